"""When a job fails because its program is wrong: one place ended three times with the same error, before any merge.

Such an error is counted as a failure is (``failurePolicy.maxReplacements``): of each place alone, and at most once in
the heartbeat's timeout. What hits everybody at once for a moment is one error of each. The count begins anew when the
job is edited, for that may have put it right; so it does where a job that has failed is suspended and resumed. An exit
code that ``failurePolicy.rules`` name is left to them. That a learner ends well and never joined the job is such an
error, too.

The job fails only while nothing can be merged: where a quorum takes part, merges will come, and the failures of one
place are its own. In a cluster without the syncer nobody judges: what is known there of merges comes from learners that
are connected.

Example: a loop with a wrong name in its step. Each learner trains nothing, ends with ``NameError: name 'lss' is not
defined``, and is started again by its kubelet. At the third end of ``job-local-0`` the job fails with that text.
"""

from __future__ import annotations

from diloco_operator.model import Object, RepeatedError
from diloco_operator.plan.pod_status import OUT_OF_MEMORY, ContainerExit, Pod
from diloco_operator.plan.pods.memory_need import memory_need_text
from diloco_operator.plan.view import View
from diloco_protocol.common.program_errors import NEVER_JOINED, SAME_ERRORS, repeated_text
from diloco_protocol.vocabulary import SyncerExit

SYNCER = "syncer"
_TOLD_TO_END = frozenset({129, 130, 143})  # by SIGHUP, SIGINT, SIGTERM


def is_program_error(pod: Pod, end: ContainerExit, never_joined: bool) -> bool:
    """Whether the end was an error of the program. ``never_joined``: it is a learner's that never joined the job. One
    that joined may end with exit code 0, as after a drain. A syncer's exit codes of its own name what is wrong outside
    of it (its store, its credentials), which a person or time puts right."""
    if end.code == 0:
        return never_joined
    if end.code in _TOLD_TO_END:
        return False
    return pod.role != SYNCER or end.code == SyncerExit.FAILED or end.code > 128


def count_error(view: View, place: str, error: str) -> None:
    """Count an end of a place by an error; empty: it was none."""
    memory = view.memory
    if memory.errors_generation != view.job.generation:
        memory.errors.clear()
        memory.errors_generation, memory.repeated_error = view.job.generation, None
    times = memory.errors.add(place, error)
    if times >= SAME_ERRORS:
        pod = view.learners.get(place)
        memory.repeated_error = RepeatedError(place, times, error, view.now, process="" if pod is None else pod.process)


def find_repeated_error(view: View, replacements: Object) -> tuple[str, str] | None:
    """Reason and message of why the job fails; None: it does not by this rule."""
    memory, again = view.memory, view.memory.repeated_error
    if again is None or not view.here.syncer or memory.errors_generation != view.job.generation:
        return None
    progress = view.job.status.get("progress")
    known = int((progress or {}).get("merges") or 0)
    if max(known, replacements["merges"], view.merges or 0) > 0:
        return None
    if view.document is None:
        if again.place != SYNCER or progress:
            return None  # the syncer cannot be asked: it may have merged
    elif again.place == SYNCER or view.document.quorum.active >= view.required or view.merges_known_at <= again.at:
        return None
    pod = view.learners.get(again.place)
    if pod is not None and view.taking_part(pod):
        return None  # it was started once more, and that helped
    if again.error == NEVER_JOINED and view.is_listed(again.process):
        return None  # it had joined, of which the syncer's answer at its end did not tell yet
    subject = "The syncer" if again.place == SYNCER else f"Learner {again.place}"
    need = (
        f". {memory_need_text(view, SYNCER if again.place == SYNCER else 'learner')}"
        if OUT_OF_MEMORY in again.error
        else ""
    )
    return (
        "RepeatedError",
        f"{repeated_text(subject, again.times, again.error)}{need} "
        f"(failurePolicy.maxReplacements: {view.job.spec.failure_policy.max_replacements} is not waited for)",
    )
