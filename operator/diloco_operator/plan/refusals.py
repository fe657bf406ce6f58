"""Why a program is not let in, or cannot show who it is: reasons for conditions, Secrets and cures.

Theory of operation. A learner's status page has the last refusal as a word and a sentence
(worker's standing.py); one that was refused for good says the same in its last line, and
ends with ``WorkerExit.REFUSED``. A learner's pod whose Secret cannot be used waits for a better one; a
syncer ends with ``SyncerExit.CREDENTIALS`` and is started again by its kubelet. All of that is a
person's mistake that heals when the Secret (after ``_COPY`` the copy of the job) is put right,
so none of it fails a job or counts as a loss. What is said here names the Secret, and
never what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_operator import names
from diloco_operator.job import Job
from diloco_operator.plan.pods.pod_status import End, Obstacle
from diloco_protocol.vocabulary import ConnectionRefusal, JoinRefusal, TrustFailure, WorkerExit

UNFIT = "its credentials cannot be used"
_COPY = (JoinRefusal.SPEC_DRIFT, JoinRefusal.OTHER_LAYOUT, JoinRefusal.OTHER_DATA)
"""Words that say of one mistake: this copy of the job is another."""

_REASONS: dict[str, str] = {
    TrustFailure.CREDENTIALS_UNUSABLE: "CredentialsUnusable",
    TrustFailure.CERTIFICATE_REFUSED: "CertificateRefused",
    ConnectionRefusal.WRONG_REGION: "CertificateRefused",
    TrustFailure.UNTRUSTED_SYNCER: "UntrustedSyncer",
    TrustFailure.UNAUTHENTICATED: "Unauthenticated",
}
_WHO: dict[str, str] = {
    TrustFailure.CREDENTIALS_UNUSABLE: UNFIT,
    TrustFailure.UNTRUSTED_SYNCER: "it does not believe the syncer",
}


def current(document: Mapping[str, Any]) -> tuple[str, str] | None:
    """Word and sentence of the refusal that keeps a learner out now, from its status page; None: there is
    none, or it has found another obstacle since."""
    refused = document.get("refused")
    if document.get("connected") or not isinstance(refused, Mapping):
        return None
    word, message = str(refused.get("reason")), str(refused.get("message"))
    return (word, message) if message in str(document.get("message") or message) else None


def ended(end: End) -> tuple[str, str] | None:
    """The same of a learner that has ended, from its last line."""
    head, found, message = end.words.partition("): ")
    _, mark, word = head.rpartition("(")
    return (word, message) if end.code == WorkerExit.REFUSED and found and mark else None


def curable(end: End | None) -> bool:
    """Whether it is over when a person puts this copy of the job, or its Secret, right."""
    said = ended(end) if end is not None else None
    return said is not None and said[0] in (*_COPY, *_REASONS)


def reason(word: str) -> str:
    """The condition's reason."""
    return _REASONS.get(word, "Refused" if word else "NotConnected")


def rank(word: str) -> int:
    """What is told first of several: what a person here can cure."""
    order = (*_REASONS, *_COPY)
    return order.index(word) if word in order else len(order) + (not word)


def sentence(word: str, message: str) -> str:
    """Why this learner is not taking part."""
    return f"{_WHO.get(word, f'the syncer refuses it ({word})')}: {message}"


# ------------------------------------------------------------------ Secrets and cures


def learners_secret(job: Job) -> str:
    """The Secret with this cluster's learners' credentials, and where the job names it."""
    name = job.spec.learners.credentials.secret_name
    if name is None:
        return f"Secret {names.secret_name(job.name, 'learner', job.uid)}"
    return f"Secret {name} (learners.credentials.secretName)"


def syncer_secret(job: Job) -> str:
    """The syncer's, likewise."""
    name = job.spec.syncer.tls.secret_name
    if name is None:
        return f"Secret {names.secret_name(job.name, 'syncer', job.uid)}"
    return f"Secret {name} (syncer.tls.secretName)"


UNREACHED = (
    "Learners try again by themselves. Is the job there (not suspended, its syncer ready), does "
    "syncer.endpoint.address lead to its Service's port, and does no firewall stand between?"
)
"""What is added where the hub is not reached at all."""


def cure(job: Job, word: str) -> str:
    """What to do where a learner is kept out for that; empty: the refusal says it itself."""
    secret = learners_secret(job)
    if word == TrustFailure.CREDENTIALS_UNUSABLE:
        return _whole(secret, "learners here")
    if word in (TrustFailure.CERTIFICATE_REFUSED, ConnectionRefusal.WRONG_REGION):
        return (
            f"The certificate in {secret} is not taken: renew it (diloco certs renew), or issue one for this "
            "job and region (diloco certs issue), and apply the Secret; learners read it by themselves."
        )
    if word == TrustFailure.UNTRUSTED_SYNCER:
        return (
            f"Either the address leads to somebody else, or ca.crt in {secret} and the certificate in "
            f"{syncer_secret(job)} of the syncer's cluster are not of one authority and this job: diloco "
            "certs show says what they are."
        )
    if word == TrustFailure.UNAUTHENTICATED:
        return (
            f"The join-token in {secret} must be the syncer's, one for all clusters: put it right and apply "
            "the Secret; learners read it by themselves."
        )
    if word == JoinRefusal.SPEC_DRIFT:
        return (
            "What may not differ cannot be edited either: delete this cluster's copy (diloco delete "
            f"{job.name}, with its --context), and apply the hub's here. Nothing is lost by it: the model is "
            "the hub's."
        )
    if word in _COPY[1:]:
        return "Apply the same job in every cluster; where it reads files, they must be the same too."
    return ""


def syncer_cure(job: Job, words: str) -> str:
    """What to do where a syncer has ended with ``SyncerExit.CREDENTIALS``; ``words``: its last line."""
    if names.CONTROL_PATH in words:
        made = names.secret_name(job.name, "syncer", job.uid)
        said = f"Secret {made} is the operator's: delete it, and it is made again."
    elif "join-token" in words and job.spec.syncer.tls.secret_name is not None:
        said = f"{learners_secret(job)} must hold the job's join-token: apply it anew."
    else:
        said = _whole(syncer_secret(job), "the syncer")
    return f"{said} The pod tries again within five minutes, at once when it is deleted."


def _whole(secret: str, whose: str) -> str:
    return (
        f"{secret} must hold tls.crt, tls.key, ca.crt and join-token, made for {whose} of this job: make it "
        "with diloco certs issue (diloco certs show says what a folder holds) and apply it."
    )


def missing(job: Job, obstacle: Obstacle) -> str:
    """What is added where a pod waits for a Secret that the job names, or for a key in one."""
    named = (job.spec.learners.credentials.secret_name, job.spec.syncer.tls.secret_name)
    if obstacle.secret and obstacle.secret in named:
        return " (diloco certs issue makes it)"
    if "non-existent secret key" in obstacle.message and any(named):
        return " (diloco certs issue makes a Secret with all keys)"
    return ""
