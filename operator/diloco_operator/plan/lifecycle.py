"""The stage of a job's life, and what it asks for: how many pods, and what to tell the syncer.

                 ┌──────────────── suspend ◀──────────────┐
    waiting ─▶ running ──▶ finishing ──▶ complete         │
    (suspended    │  ▲                                    ▼
     before its   │  └── restarting ◀── resumed ── suspending ──▶ suspended
     start)       └──▶ failing ──▶ failed

Every stage is read at every turn anew off what only the operator and the syncer write. So a restart of the operator
loses nothing, and nobody else begins a stage, whoever scales an object to nothing or deletes it. Complete and Failed
stand in the job's own conditions. Complete is final. A job that has failed goes on after it was suspended and resumed:
that it was is in the reason of Suspended. Whether a suspension or a failure has got as far as removing pods is in
``status.drain``. A suspension writes that word before it removes the first pod.

A resume that comes while old pods are still there waits until they are gone. Their learners were
told of a suspension, and idle until they are removed; they would never train again.

The syncer is told by level, too: as long as its status does not say what it should, it is told
again. Where it cannot be told, patience ends the wait, and learners drain by SIGTERM alone.

Example: ``suspend: true`` on a running job. Stage ``suspending``: each turn calls ``announce``
until the syncer's phase is ``suspended`` (or patience ends). Then ``status.drain`` is ``Saved`` (or ``NotSaved``), and
from the next turn on the objects ask for no pods. When the last pod is gone, the stage is ``suspended``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from diloco_operator.job import seconds_of
from diloco_operator.model import Call, Fact
from diloco_operator.objects.manifests import Scale
from diloco_operator.plan import durability
from diloco_operator.plan.view import ANSWER_PATIENCE, View
from diloco_protocol.vocabulary import ENDED_PHASES, ControlMethod, JobPhase

Stage = Literal[
    "deleting",
    "waiting",
    "running",
    "restarting",
    "suspending",
    "suspended",
    "finishing",
    "complete",
    "failing",
    "failed",
]

DELETE_SECONDS = 30.0
"""The longest that a deletion waits for the syncer to tell its learners."""
FAIL_SECONDS = 30.0
"""The longest that a failure waits for the same, before learners are removed. It does not wait for a syncer that has
not answered for ``ANSWER_PATIENCE``."""
SUSPEND_SECONDS = 300.0
"""The longest that a suspension waits for a syncer that answers: its drain, merges and checkpoint."""
UNREACHABLE_SECONDS = 60.0
"""The longest that a suspension waits for a syncer that does not answer."""
REPORT_SECONDS = 60.0
"""The longest that a job's end waits for its report."""
OUTPUT_UNANSWERED_SECONDS = 600.0
"""The longest that it waits for the merged model at output.uri while the syncer, which gives up by itself, does not
answer."""


Drain = Literal["", "Asked", "Saved", "NotSaved"]
"""``status.drain``: the syncer was told to drain; it said that it has; it did not say so in time. With the latter two
the job's learners are being removed, or are gone."""
ASKED: Drain = "Asked"
SAVED: Drain = "Saved"
NOT_SAVED: Drain = "NotSaved"
SUSPENSION_REASONS = frozenset({"Suspending", "Suspended", SAVED, NOT_SAVED, "Restarting"})
"""Reasons of the condition Suspended from the beginning of a suspension until the job trains again."""
ALL_SAVED = "Everything is saved; set suspend: false to continue."


class StageWords(NamedTuple):
    """How status names a stage in which the job does not train."""

    phase: str  # status.phase
    region_state: str  # status.regions[].state
    reason: str  # of conditions that are False in it
    message: str


STAGE_WORDS: dict[Stage, StageWords] = {
    "waiting": StageWords("Suspended", "Suspended", "Suspended", "The job is suspended and was not started."),
    "suspending": StageWords("Suspending", "Suspending", "Suspending", "The job is being suspended."),
    "suspended": StageWords("Suspended", "Suspended", "Suspended", "The job is suspended."),
    "restarting": StageWords("Starting", "Restarting", "Restarting", "The job continues once its old pods are gone."),
    "finishing": StageWords("Finishing", "Ended", "Complete", "The job has reached its end."),
    "complete": StageWords("Complete", "Ended", "Complete", "The job has ended."),
    "failing": StageWords("Failed", "Ended", "Failed", "The job has failed."),
    "failed": StageWords("Failed", "Ended", "Failed", "The job has failed."),
}


@dataclass(slots=True)
class LifecycleDecision:
    """The stage, and what it asks for."""

    stage: Stage
    scale: Scale = field(default_factory=Scale)
    calls: list[Call] = field(default_factory=list)
    message: str = ""  # what is waited for, in words
    drain: Drain = ""  # the ``status.drain`` to write
    stalled: str = ""  # reason why a person has to act before it goes on; empty: it goes on by itself

    @property
    def training(self) -> bool:
        """Whether pods shall be there and train."""
        return self.stage == "running"

    @property
    def learners_stay(self) -> bool:
        """Whether no learner is removed yet: they train, or shall drain."""
        return self.training or self.drain == ASKED


def outcome(view: View) -> Literal["complete", "failed", ""]:
    """How the job has ended, by its own conditions or its syncer's word; empty: it has not."""
    phase = view.job_phase if view.begun else ""
    if _is_resumed(view, phase):
        return ""
    if view.is_true("Failed") or (phase == JobPhase.FAILED and not view.is_true("Complete")):
        return "failed"
    # An output is written of a complete job alone, also while its syncer cannot be asked.
    return "complete" if view.is_true("Complete") or phase == JobPhase.COMPLETE or view.output is not None else ""


def _is_resumed(view: View, phase: str) -> bool:
    """Whether the job had failed, was suspended then, and is not any more. The syncer of before says that it has
    failed, until its pod is gone."""
    asked = view.condition("Suspended").get("reason") in SUSPENSION_REASONS
    return asked and not view.job.spec.suspend and (view.is_true("Failed") or phase == JobPhase.FAILED)


def decide(view: View, failure: str = "") -> LifecycleDecision:
    """The stage and what it asks for. ``failure``: why the job fails, if this turn has found that it does."""
    if view.job.deleted_at is not None:
        return _deleting(view)
    ended = "failed" if failure else outcome(view)
    if ended == "failed":
        return _failed(view, failure)
    if ended == "complete":
        return _complete(view)
    if view.job.spec.suspend:
        return _suspended(view)
    return _running(view)


# ------------------------------------------------------------------ stages


def _deleting(view: View) -> LifecycleDecision:
    deleted, syncer = view.job.deleted_at, view.pod_of("syncer")
    assert deleted is not None
    calls = announce(view, JobPhase.DELETED, "the job was deleted")
    reachable = view.begun and syncer is not None and not syncer.over
    if not calls or not reachable or view.now - deleted >= DELETE_SECONDS:
        return LifecycleDecision("deleting")
    return LifecycleDecision("deleting", calls=calls, message="The syncer informs its learners of the deletion.")


def _failed(view: View, failure: str) -> LifecycleDecision:
    # One call that failed does not mean that nobody can be told: learners that hear of the failure end in good order.
    silent = not view.here.syncer or view.unanswered_seconds >= ANSWER_PATIENCE
    told = view.job_phase == JobPhase.FAILED or silent
    since = None if failure else seconds_of(view.condition("Failed").get("lastTransitionTime"))
    # What an earlier turn has taken down stays down, whatever the next call brings.
    gone = has_drained(view)
    down = told or gone or (since is not None and view.now - since > FAIL_SECONDS)
    found = LifecycleDecision("failed" if down and not _has_pods(view, "learner") else "failing")
    found.drain = drain_of(view) if gone else ASKED if not down else _drained(view, JobPhase.FAILED)
    found.scale = _ended_scale(view) if down else full_scale(view)
    found.message = "" if down else "The syncer informs its learners that the job has failed."
    if view.job_phase not in ENDED_PHASES:
        found.calls = announce(view, JobPhase.FAILED, failure or str(view.condition("Failed").get("message", "")))
    return found


def _complete(view: View) -> LifecycleDecision:
    found = LifecycleDecision("complete", _ended_scale(view))
    if view.is_true("Complete") or not view.here.syncer:
        return found
    missing = view.observe(Fact.REPORT_MISSING, holds=view.observed.report is None)
    if view.observed.report is None and missing < REPORT_SECONDS:
        found.stage, found.message = "finishing", "The operator reads the job's report from the syncer."
    elif view.output is not None and view.output["state"] == "Writing":
        unanswered = view.observe(Fact.OUTPUT_UNANSWERED, holds=view.document is None)
        if unanswered < OUTPUT_UNANSWERED_SECONDS:
            found.stage, found.message = "finishing", f"The syncer writes the merged model to {view.output['uri']}."
    return found


def _ended_scale(view: View) -> Scale:
    """After an end only the syncer stays, for status and export, until the model lies at output.uri. A suspension takes
    it down too."""
    written = view.output is not None and view.output["state"] == "Written" and outcome(view) == "complete"
    return Scale(syncer=0 if view.job.spec.suspend or not view.here.syncer or written else 1)


def _suspended(view: View) -> LifecycleDecision:
    if not view.begun:
        return LifecycleDecision("waiting", message="The job was created suspended; nothing was started.")
    if has_drained(view):
        view.memory.timers.stop(Fact.SUSPENDING, Fact.SUSPENDING_UNANSWERED)
        found = LifecycleDecision("suspending" if _has_pods(view) else "suspended", drain=drain_of(view))
        said = view.condition("Suspended")
        kept = str(said.get("message") or "") if said.get("reason") == NOT_SAVED else ""
        found.message = ALL_SAVED if found.drain == SAVED else kept or _explain_not_saved()
        syncer, danger = view.pod_of("syncer"), durability.find_danger(view)
        waits = view.job.spec.suspend_policy != "Anyway" and syncer is not None and syncer.alive
        if danger is not None and danger.reason == "VolumeGoing" and waits:
            found.scale, found.message, found.stalled = Scale(syncer=1), danger.message, danger.reason
        elif danger is not None and danger.reason == durability.LOST and found.stage == "suspended":
            found.drain, found.message, found.stalled = NOT_SAVED, danger.message, danger.reason
        return found
    found = LifecycleDecision("suspending", full_scale(view), drain=ASKED)
    answers = view.document is not None
    unanswered = view.observe(Fact.SUSPENDING_UNANSWERED, holds=not answers)
    waited = view.observe(Fact.SUSPENDING)
    late = unanswered >= UNREACHABLE_SECONDS or waited >= SUSPEND_SECONDS
    in_vain, danger = durability.may_wait_in_vain(view), durability.learners_have_the_only_copy(view)
    if danger is not None and not (late and in_vain):
        # Learners have the only copy that will last: they train on, and hear of no suspension.
        found.message = f"The suspension waits until what was trained is safe. {danger.message}"
        found.stalled = danger.reason
    elif view.job_phase == JobPhase.SUSPENDED:
        found.drain, found.message = SAVED, ALL_SAVED
    elif not (late and in_vain):
        found.calls = announce(view, JobPhase.SUSPENDED, "the job is suspended")
        found.message = "Learners offer their work and the syncer makes a checkpoint."
        if not answers and in_vain:
            found.message = f"The syncer does not answer; the pods go without it after {UNREACHABLE_SECONDS:.0f} s."
        elif not answers:
            found.message = (
                "The syncer does not answer, so nothing can be saved, and learners stay. Put the syncer right (see "
                "SyncerReady), or set suspendPolicy: Anyway to remove the pods without it."
            )
        found.stalled = "NotSaved" if late else ""
    else:
        why = f"was not done within {SUSPEND_SECONDS:.0f} s"
        if unanswered >= UNREACHABLE_SECONDS:
            why = f"did not answer for {UNREACHABLE_SECONDS:.0f} s"
        found.drain, found.message = NOT_SAVED, _explain_not_saved(f": the syncer {why}")
    if found.drain == NOT_SAVED and danger is not None:
        found.message += f" {danger.message}"
    return found


def _explain_not_saved(why: str = "") -> str:
    return (
        f"The pods were removed before all was saved{why}. What learners had trained since the last merge may be lost. "
        "Set suspend: false to continue from the last checkpoint."
    )


def _running(view: View) -> LifecycleDecision:
    view.memory.timers.stop(Fact.SUSPENDING, Fact.SUSPENDING_UNANSWERED)
    if not view.begun or not _has_pods(view):
        gone = durability.find_replaced_volume(view) if has_drained(view) else ""
        if gone and view.job.spec.suspend_policy != "Anyway":  # nobody shall find the job at its beginning
            return LifecycleDecision("suspended", message=gone, drain=NOT_SAVED, stalled=durability.LOST)
        return LifecycleDecision("running", full_scale(view))
    if has_drained(view):
        message = "The pods from before the suspension are removed first."
        return LifecycleDecision("restarting", message=message, drain=drain_of(view))
    message = ""
    if view.job_phase == JobPhase.SUSPENDED and view.here.syncer:
        message = "The suspension is finished first; then the job continues."
    elif _is_resumed(view, view.job_phase):
        message = "The pods of the failed job are removed first."
    if not message:
        return LifecycleDecision("running", full_scale(view))
    return LifecycleDecision("restarting", full_scale(view), message=message, drain=_drained(view, *ENDED_PHASES))


# ------------------------------------------------------------------ parts


def full_scale(view: View) -> Scale:
    """The pods of a job that trains."""
    spec, here = view.job.spec, view.here
    return Scale(
        syncer=1 if here.syncer else 0,
        evaluator=1 if here.syncer and spec.evaluated else 0,
        learners={region.name: region.learners + region.spares for region in here.regions},
    )


def drain_of(view: View) -> Drain:
    """``status.drain``, as the job's status has it."""
    words: dict[str, Drain] = {ASKED: ASKED, SAVED: SAVED, NOT_SAVED: NOT_SAVED}
    return words.get(str(view.job.status.get("drain")), "")


def has_drained(view: View) -> bool:
    """Whether an earlier turn has ended the drain, so that learners are being removed, or are gone."""
    return drain_of(view) in (SAVED, NOT_SAVED)


def _drained(view: View, *phases: str) -> Drain:
    """How a drain ends now: all is saved where the syncer's word is one of these phases."""
    return SAVED if view.job_phase in phases else NOT_SAVED


def waits_for_resume(view: View) -> bool:
    """Whether a job that has failed is suspended, and nothing of it is left."""
    return view.job.spec.suspend and has_drained(view) and not _has_pods(view)


def _has_pods(view: View, role: str = "") -> bool:
    """Whether pods (of a role, or any) have not ended, those that are stuck aside."""
    return any(role in ("", pod.role) and not pod.over and not view.stuck(pod) for pod in view.pods)


def announce(view: View, phase: str, message: str) -> list[Call]:
    """The call that tells the syncer of an end; none where no syncer runs here, or it knows an end already."""
    syncer = view.pod_of("syncer") if view.here.syncer else None
    if syncer is None or not syncer.running or view.job_phase in ENDED_PHASES:
        return []  # an end is final for the syncer
    return [Call(ControlMethod.ANNOUNCE, {"phase": phase, "message": message[:1000]})]


def seconds_to_live(view: View) -> float | None:
    """Seconds until ttlSecondsAfterFinished is over (0 or less: it is); None: the job is kept."""
    ttl, ended = view.job.spec.ttl_seconds_after_finished, seconds_of(view.job.status.get("completionTime"))
    return None if ttl is None or ended is None else ended + ttl - view.now


def seconds_to_deadline(view: View) -> float | None:
    """Seconds until activeDeadlineSeconds is over (0 or less: it is); None: there is none. The syncer's cluster judges,
    and the others hear of it."""
    limit, started = view.job.spec.active_deadline_seconds, seconds_of(view.job.status.get("startTime"))
    return None if limit is None or started is None or not view.here.syncer else started + limit - view.now
