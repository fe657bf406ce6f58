"""Refused and untrusted programs: reasons for conditions, the Secrets concerned, and the cures.

A learner's status page has the last refusal as a word and a sentence (worker's
``core/connection_status.py``). A learner that was refused for good ends with
``WorkerExit.REFUSED``, and its last line says the same. A learner whose Secret cannot be used waits
for a better one; a syncer ends with ``SyncerExit.CREDENTIALS``, and its kubelet starts it again.

All of these are a person's mistakes, and heal when the Secret, or this cluster's copy of the job, is put right. So none
of them fails the job or counts as a loss. Messages name the Secret, and never its content.
"""

from __future__ import annotations

from typing import Literal

from diloco_operator import names
from diloco_operator.job import Job
from diloco_operator.plan.pod_status import ContainerExit, Obstacle
from diloco_protocol.documents import LearnerPage
from diloco_protocol.vocabulary import ConnectionRefusal, JoinRefusal, TrustFailure, WorkerExit

UNFIT = "its credentials cannot be used"
_COPY_REFUSALS = (JoinRefusal.SPEC_DRIFT, JoinRefusal.OTHER_LAYOUT, JoinRefusal.OTHER_DATA)
"""Refusals with one cause: this cluster's copy of the job is not the hub's."""

_REASONS: dict[str, str] = {
    TrustFailure.CREDENTIALS_UNUSABLE: "CredentialsUnusable",
    TrustFailure.CERTIFICATE_REFUSED: "CertificateRefused",
    ConnectionRefusal.WRONG_REGION: "CertificateRefused",
    TrustFailure.UNTRUSTED_SYNCER: "UntrustedSyncer",
    TrustFailure.UNAUTHENTICATED: "Unauthenticated",
}
_SUBJECTS: dict[str, str] = {
    TrustFailure.CREDENTIALS_UNUSABLE: UNFIT,
    TrustFailure.UNTRUSTED_SYNCER: "it does not trust the syncer",
}


def current_refusal(page: LearnerPage) -> tuple[str, str] | None:
    """Word and sentence of the refusal that keeps a learner out now, from its status page; None: there is
    none, or another obstacle has come since."""
    refused = page.refused
    if page.connected or refused is None or (page.message and refused.message not in page.message):
        return None
    return refused.reason, refused.message


def refusal_of_exit(end: ContainerExit) -> tuple[str, str] | None:
    """Word and sentence of the refusal with which a learner has ended, from its last line; None: it ended otherwise."""
    head, found, message = end.last_line.partition("): ")
    _, mark, word = head.rpartition("(")
    return (word, message) if end.code == WorkerExit.REFUSED and found and mark else None


def is_curable(end: ContainerExit | None) -> bool:
    """Whether the end is a refusal that a person cures by this copy of the job, or by its Secret."""
    said = refusal_of_exit(end) if end is not None else None
    return said is not None and said[0] in (*_COPY_REFUSALS, *_REASONS)


def condition_reason(word: str) -> str:
    """The reason of HubReachable for a refusal's word; ``word`` empty: no learner is connected."""
    return _REASONS.get(word, "Refused" if word else "NotConnected")


def refusal_rank(word: str) -> int:
    """The place in the order of refusals, of which the first is reported: those that a person here can cure."""
    order = (*_REASONS, *_COPY_REFUSALS)
    return order.index(word) if word in order else len(order) + (not word)


def refusal_sentence(word: str, message: str) -> str:
    """Why a refused learner does not take part."""
    return f"{_SUBJECTS.get(word, f'the syncer refuses it ({word})')}: {message}"


# ------------------------------------------------------------------ Secrets and cures


def describe_secret(job: Job, role: Literal["learner", "syncer"]) -> str:
    """The Secret with the credentials of this cluster's learners, or of the syncer, and where the job names it."""
    name, where = {
        "learner": (job.spec.learners.credentials.secret_name, "learners.credentials.secretName"),
        "syncer": (job.spec.syncer.tls.secret_name, "syncer.tls.secretName"),
    }[role]
    return f"Secret {name} ({where})" if name is not None else f"Secret {names.secret_name(job.name, role, job.uid)}"


UNREACHED = (
    "Learners try again by themselves. Check that the job runs there (not suspended, its syncer ready), that "
    "syncer.endpoint.address leads to its Service's port, and that no firewall is in between."
)
"""What HubReachable adds where no learner reaches the hub."""


_WHOLE = (
    "{secret} must hold tls.crt, tls.key, ca.crt and join-token, made for {whose} of this job: make it "
    "with diloco certs issue (diloco certs show says what a folder holds) and apply it."
)
_CERTIFICATE = (
    "The syncer does not accept the certificate in {secret}. Renew it (diloco certs renew), or issue one for this "
    "job and region (diloco certs issue), and apply the Secret; learners read it by themselves."
)
_SAME_FILES = "Apply the same job in every cluster; where it reads files, they must be the same too."
_CURES: dict[str, str] = {
    TrustFailure.CREDENTIALS_UNUSABLE: _WHOLE,
    TrustFailure.CERTIFICATE_REFUSED: _CERTIFICATE,
    ConnectionRefusal.WRONG_REGION: _CERTIFICATE,
    TrustFailure.UNTRUSTED_SYNCER: "Either the address leads to another server, or ca.crt in {secret} and the "
    "certificate in {syncer} of the syncer's cluster are not from one authority or not for this job: diloco certs "
    "show prints what they are.",
    TrustFailure.UNAUTHENTICATED: "The join-token in {secret} must be the syncer's, the same in all clusters: correct "
    "it and apply the Secret; learners read it by themselves.",
    JoinRefusal.SPEC_DRIFT: "These fields cannot be edited after the start: delete this cluster's copy (diloco delete "
    "{job}, with its --context), and apply the hub's copy here. Nothing is lost: the hub has the model.",
    JoinRefusal.OTHER_LAYOUT: _SAME_FILES,
    JoinRefusal.OTHER_DATA: _SAME_FILES,
}


def cure_of_refusal(job: Job, word: str) -> str:
    """What to do about a refusal of a learner; empty: its sentence says so itself."""
    secret, syncer = describe_secret(job, "learner"), describe_secret(job, "syncer")
    return _CURES.get(word, "").format(secret=secret, syncer=syncer, job=job.name, whose="learners here")


def syncer_cure(job: Job, words: str) -> str:
    """What to do where a syncer has ended with ``SyncerExit.CREDENTIALS``; ``words``: its last line."""
    if names.CONTROL_PATH in words:
        made = names.secret_name(job.name, "syncer", job.uid)
        said = f"The operator made Secret {made}: delete it, and the operator makes it again."
    elif "join-token" in words and job.spec.syncer.tls.secret_name is not None:
        said = f"{describe_secret(job, 'learner')} must hold the job's join-token: apply it anew."
    else:
        said = _WHOLE.format(secret=describe_secret(job, "syncer"), whose="the syncer")
    return f"{said} The pod tries again within five minutes; delete the pod to try at once."


def missing_secret_cure(job: Job, obstacle: Obstacle) -> str:
    """What is added to an obstacle: how to make a Secret that the job names and that is missing, or lacks a
    key; empty: the obstacle is another."""
    named = (job.spec.learners.credentials.secret_name, job.spec.syncer.tls.secret_name)
    if obstacle.secret and obstacle.secret in named:
        return " (diloco certs issue makes it)"
    if "non-existent secret key" in obstacle.message and any(named):
        return " (diloco certs issue makes a Secret with all keys)"
    return ""
