"""Whether what the job has trained is safe: what the syncer's status, its claim and the job's own status say of it.

A version is announced only when its merge is in the store. So what is merged is safe while the store is, and what is
not merged yet is in learners alone. Where the store is in danger, learners hold the only copy that will last. Then a
suspension does not take them down, and the syncer is not replaced for an edit. The condition ``Durable`` says so.

Example: ``kubectl delete pvc job-syncer``. The claim stays Terminating while the syncer's pod mounts it. Durable is
False with the reason ``VolumeGoing``, an Event tells of it, and ``suspend: true`` waits.
"""

from __future__ import annotations

from typing import NamedTuple

from diloco_operator import names
from diloco_operator.plan.view import ANSWER_PATIENCE, View
from diloco_protocol.vocabulary import ENDED_PHASES

LOST = "StoreLost"


class Danger(NamedTuple):
    """Why what was trained is not safe: a reason in CamelCase, and a sentence with the cure."""

    reason: str
    message: str


def find_danger(view: View) -> Danger | None:
    """What threatens the work of a job that was started here; None: nothing that is known."""
    if not view.here.syncer or not view.begun:
        return None
    document = view.document
    if claim_is_going(view):
        name = names.claim(view.job.name).name
        return Danger(
            "VolumeGoing",
            f"PersistentVolumeClaim {name} is being deleted. Its data live as long as the syncer's pod does: save the "
            "model now with `diloco export`. Or delete the syncer's pod while learners run: a new volume is made, and "
            "the syncer takes the model back from them.",
        )
    if document is None and (gone := find_replaced_volume(view)):
        return Danger(LOST, gone)
    if document is not None and document.store_problem:
        problem = f"{document.store_problem[0].upper()}{document.store_problem[1:]}"
        message = view.steady("Durable", f"{problem}. What learners train since is in no store.")
        return Danger("StoreProblem", message)
    if lost := find_lost_store(view):
        return Danger(LOST, lost)
    took_part = any(row.get("inQuorum") for row in view.job.status.get("regions") or [])
    if document is None and view.unanswered_seconds >= ANSWER_PATIENCE and known_merges(view) and took_part:
        message = "The syncer does not answer. Learners train on for a while, and what they train is in no store."
        return Danger("SyncerNotAnswering", message)
    return None


def claim_is_going(view: View) -> bool:
    """Whether the claim that the operator made for the syncer is being deleted."""
    storage = view.job.spec.syncer.storage
    live = view.live(names.claim(view.job.name))
    own = storage.uri is None and storage.claim_name is None
    return own and live is not None and "deletionTimestamp" in live["metadata"]


def learners_have_the_only_copy(view: View) -> Danger | None:
    """The danger in which no learner that works may be taken away; None: there is none, or the syncer is silent."""
    danger = find_danger(view)
    if danger is None or (view.document is None and danger.reason not in ("VolumeGoing", LOST)):
        return None
    # With fewer merges the syncer goes on from what it has, and saves that.
    began_anew = danger.reason == LOST and view.document is not None and view.document.merges > 0
    return None if began_anew else danger


def known_merges(view: View) -> int:
    """How many merges the store had, by the job's status."""
    return int((view.job.status.get("syncer") or {}).get("merges") or 0)


def find_lost_store(view: View) -> str:
    """What is said of a store that came back empty or older; empty: it did not. It is said until the syncer has as many
    merges again as ``status.syncer.merges`` keeps: by what learners give back, or by new ones."""
    had, document, before = known_merges(view), view.document, view.condition("Durable")
    if document is None:
        return str(before.get("message")) if before.get("reason") == LOST else ""
    if document.merges >= had or document.phase in ENDED_PHASES:
        return ""
    return (
        f"The syncer's store had {had} merges, and came back empty or with fewer. Learners that have trained with it "
        "give back what they hold. If there are none, the job goes on from what the store has."
    )


def find_replaced_volume(view: View) -> str:
    """What is said of a volume that was deleted; empty: it is the one that the syncer had, or nothing was merged, or it
    is not the operator's."""
    storage, had = view.job.spec.syncer.storage, known_merges(view)
    volume = (view.job.status.get("syncer") or {}).get("volume")
    if not view.here.syncer or not had or not volume or storage.uri is not None or storage.claim_name is not None:
        return ""
    ref = names.claim(view.job.name)
    live, learners = view.live(ref), any(pod.role == "learner" and not pod.over for pod in view.pods)
    if learners if live is None else live["metadata"]["uid"] == volume:
        return ""
    said = f"PersistentVolumeClaim {ref.name}, which had the model with {had} merges, was deleted; there is another."
    if learners:
        return f"{said} Learners that have trained with it give the model back once the syncer answers."
    cure = "Restore its data and set suspendPolicy: Anyway to continue with what it has then, or delete the job"
    return f"{said} {cure} and apply it again to begin anew."


def may_wait_in_vain(view: View) -> bool:
    """Whether a suspension may end without the syncer's word that all is saved: there is nothing to lose, the user
    wants it so, or the syncer is in another cluster."""
    answered = (view.job.status.get("syncer") or {}).get("epoch") is not None
    return not view.here.syncer or not answered or view.job.spec.suspend_policy == "Anyway"
