"""Where a job is in its life, and what that asks for: how many pods, what to tell the syncer.

                 ┌──────────────── suspend ◀──────────────┐
    waiting ─▶ running ──▶ finishing ──▶ complete         │
    (suspended    │  ▲                                    ▼
     before its   │  └── restarting ◀── resumed ── suspending ──▶ suspended
     start)       └──▶ failing ──▶ failed

Theory of operation. Every stage is read off what is there, at every turn anew; nothing is
remembered that a restart of the operator would lose. What has ended is in the job's own
conditions and final. That a suspension has gone as far as taking the pods down is seen by
the objects: they ask for no pods. So a resume that comes in between waits until the old
pods are gone, because learners that were told of a suspension idle until they are removed.

The syncer is told by level too: as long as it does not say itself what it should, it is told
again. Where it cannot be told, patience ends the wait, and learners drain by SIGTERM alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from diloco_operator import names
from diloco_operator.job import seconds
from diloco_operator.model import Call
from diloco_operator.objects.manifests import Scale
from diloco_operator.plan.view import View
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
"""Likewise a failure, before learners are taken down."""
SUSPEND_SECONDS = 300.0
"""The longest that a suspension waits for a syncer that answers: its drain, merges and checkpoint."""
UNREACHABLE_SECONDS = 60.0
"""The longest that it waits for one that does not."""
REPORT_SECONDS = 60.0
"""The longest that a job's end waits for its report."""


@dataclass(slots=True)
class Course:
    """What the stage asks for."""

    stage: Stage
    scale: Scale = field(default_factory=Scale)
    calls: list[Call] = field(default_factory=list)
    message: str = ""  # what is waited for, in words

    @property
    def training(self) -> bool:
        """Whether pods are to be there and at work."""
        return self.stage == "running"


def outcome(view: View) -> Literal["complete", "failed", ""]:
    """How the job has ended, as it says itself or its syncer does."""
    if view.holds("Failed"):
        return "failed"
    if view.holds("Complete"):
        return "complete"
    if view.begun and view.said in (JobPhase.COMPLETE, JobPhase.FAILED):
        return "complete" if view.said == JobPhase.COMPLETE else "failed"
    return ""


def course(view: View, failure: str = "") -> Course:
    """The stage and what it asks for. ``failure``: why the job fails, found this very turn."""
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


def _deleting(view: View) -> Course:
    deleted = view.job.deleted_at
    assert deleted is not None
    syncer = view.pod_of("syncer")
    reachable = syncer is not None and syncer.running and not syncer.over
    waits = (
        view.begun
        and view.here.syncer
        and reachable
        and view.said not in ENDED_PHASES
        and view.now - deleted < DELETE_SECONDS
    )
    found = Course("deleting")
    if waits:
        found.message = "The syncer tells its learners that the job is deleted."
        found.calls = _announce(view, JobPhase.DELETED, "the job was deleted")
    return found


def deletion_done(course: Course) -> bool:
    """Whether everybody was told who could be."""
    return course.stage == "deleting" and not course.message


def _failed(view: View, failure: str) -> Course:
    told = view.said == JobPhase.FAILED or not _answers(view)
    since = view.now if failure else view.since("Failed")
    down = told or view.now - since > FAIL_SECONDS
    found = Course("failed" if down and not _pods(view, "learner") else "failing")
    if down:
        found.scale = _ended_scale(view)
    else:
        found.scale = _full(view)
        found.message = "Learners are told that the job has failed."
    if view.said not in ENDED_PHASES:
        found.calls = _announce(view, JobPhase.FAILED, failure or str(view.condition("Failed").get("message", "")))
    return found


def _complete(view: View) -> Course:
    found = Course("complete", _ended_scale(view))
    if view.holds("Complete") or not view.here.syncer or view.observed.report is not None:
        return found
    if view.lasting("report") < REPORT_SECONDS:
        found.stage, found.message = "finishing", "The job's report is fetched from the syncer."
    return found


def _ended_scale(view: View) -> Scale:
    """After an end only the syncer stays, for status and export; a suspension takes it down too."""
    return Scale(syncer=0 if view.job.spec.suspend or not view.here.syncer else 1)


def _suspended(view: View) -> Course:
    if not view.begun:
        return Course("waiting", message="It is suspended from its creation: nothing was started.")
    if not _is_down(view):
        answers = _answers(view)
        told = view.said == JobPhase.SUSPENDED
        unanswered = view.lasting("suspend unanswered", not answers)
        waited = view.lasting("suspend")
        if not told and unanswered < UNREACHABLE_SECONDS and waited < SUSPEND_SECONDS:
            found = Course("suspending", _full(view))
            found.calls = _announce(view, JobPhase.SUSPENDED, "the job is suspended")
            found.message = (
                "Learners offer their work and the syncer makes a checkpoint."
                if answers
                else "The syncer does not answer; without it the pods are taken down after "
                f"{UNREACHABLE_SECONDS:.0f} s."
            )
            return found
    else:
        view.memory.since.pop("suspend", None)
        view.memory.since.pop("suspend unanswered", None)
    rest = [pod for pod in view.pods if not pod.over and not view.stuck(pod)]
    if rest or not _is_down(view):
        return Course("suspending", message="Learners drain, and pods are taken down.")
    return Course("suspended")


def _running(view: View) -> Course:
    for fact in ("suspend", "suspend unanswered"):
        view.memory.since.pop(fact, None)
    if view.begun:
        if view.said == JobPhase.SUSPENDED and view.here.syncer:
            return Course("restarting", message="The suspension is finished first, then the job goes on.")
        old = [pod for pod in view.pods if not pod.over and not view.stuck(pod)]
        if _is_down(view) and old:
            return Course("restarting", message="The pods from before the suspension leave first.")
    return Course("running", _full(view))


# ------------------------------------------------------------------ parts


def _full(view: View) -> Scale:
    spec, here = view.job.spec, view.here
    return Scale(
        syncer=1 if here.syncer else 0,
        evaluator=1 if here.syncer and spec.evaluated else 0,
        learners={region.name: region.learners + region.spares for region in here.regions},
    )


def _is_down(view: View) -> bool:
    """Whether the objects ask for no pods: a suspension has gone that far. Objects that are not there were
    taken away by somebody, and say nothing."""
    if view.here.syncer:
        return view.replicas(names.syncer_deployment(view.job.name)) == 0
    asked = [view.replicas(names.stateful_set(view.job.name, r.name)) for r in view.here.regions]
    return 0 in asked and not any(asked)


def _answers(view: View) -> bool:
    """Whether the syncer can be told something."""
    return view.document is not None


def _pods(view: View, role: str) -> bool:
    return any(pod.role == role and not pod.over and not view.stuck(pod) for pod in view.pods)


def _announce(view: View, phase: str, message: str) -> list[Call]:
    """Tell the syncer, if it is here and there is a process to be told."""
    syncer = view.pod_of("syncer") if view.here.syncer else None
    if syncer is None or not syncer.running or view.said in ENDED_PHASES:
        return []  # an end is final for the syncer
    return [Call(ControlMethod.ANNOUNCE, {"phase": phase, "message": message[:1000]})]


def expired(view: View) -> float | None:
    """Seconds until an ended job's time to live is over (0 or less: it is); None: it is kept."""
    ttl = view.job.spec.ttl_seconds_after_finished
    text = view.job.status.get("completionTime")
    if ttl is None or not isinstance(text, str):
        return None
    return seconds(text) + ttl - view.now
