"""The job's phases: start, hold, drain, last merges, last evaluation, end.

    waiting ──K ready──▶ training ◀──▶ holding
       ▲                     │ stop reached, or suspend
       │                     ▼
    (restart)            draining ──all left, last merges──▶ evaluating ──▶ complete
                             └──▶ suspended

Failed and deleted are entered at once. Training starts when K slots hold version
0. Below K active slots the job holds: learners go on, merges wait, K stays. The same while a
whole region is lost, where failurePolicy.onRegionLost is Hold; where it is Fail, that ends the job. At
the end all drain: every learner finishes its step and offers what it has; then
each fragment that K slots have work for is merged once more. Plain code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.events import Action
from diloco_syncer.core.members.state_donors import StateDonors
from diloco_syncer.core.merging.aggregation import Aggregator
from diloco_syncer.core.recovery.lost_versions import VersionRecovery
from diloco_syncer.core.state import JobState

_ENOUGH = "the learners that a merge needs are there"


class Phases:
    """The phase, and when it is left. Times are monotonic seconds."""

    def __init__(self, job: JobState, merging: Aggregator, peers: StateDonors, lost: VersionRecovery) -> None:
        self.job = job
        self.lost = lost
        self.merging = merging
        self.peers = peers
        self.config = job.config
        self.target = JobPhase.COMPLETE  # of the drain
        self.target_message = ""
        self.since = 0.0
        self.requested: tuple[JobPhase, str] | None = None
        self.moved_at = 0.0  # when the drain last came on

    def request_end(self, phase: JobPhase, message: str) -> None:
        """Somebody wants an end; the first one wins, but failing or deleting beats suspending."""
        if self.requested is None or phase is not JobPhase.SUSPENDED:
            self.requested = (phase, message)

    def advance(self, now: float) -> list[Action]:
        """The transitions that are due. A transition may make the next one due."""
        out: list[Action] = []
        while True:
            step = self._next(now)
            if step is None:
                return out
            out += step

    def _next(self, now: float) -> list[Action] | None:
        if self.job.phase in ENDED_PHASES:
            return None
        if self.requested is not None:
            phase, message = self.requested
            self.requested = None
            if phase is not JobPhase.SUSPENDED or not self.job.initialised:
                return self._end(phase, message, now)
            if not self.job.closing:
                return self._drain(phase, message, now)
        handlers: dict[JobPhase, Callable[[float], list[Action] | None]] = {
            JobPhase.WAITING: self._waiting,
            JobPhase.TRAINING: self._training,
            JobPhase.HOLDING: self._training,
            JobPhase.DRAINING: self._draining,
            JobPhase.EVALUATING: self._evaluating,
        }
        return handlers[self.job.phase](now)

    def _set(self, name: JobPhase, message: str, now: float) -> list[Action]:
        self.job.phase, self.job.phase_message = name, message
        self.since = self.moved_at = now
        return [
            ev.Persist(),
            ev.SetPhase(name, message),
            ev.RecordEvent(EventKind.PHASE, -1, 0, f"{name.value}: {message}"),
        ]

    # ------------------------------------------------------------- phases

    def _waiting(self, now: float) -> list[Action] | None:
        if self.job.initialised and self._stop_reached(now):
            return self._drain(JobPhase.COMPLETE, "the stop is reached", now)
        ready = sum(s.occupied and s.ready for s in self.job.members.slots)
        if not self.job.initialised or ready < self.config.rules.quorum or self.lost.settling:
            return None
        self.job.history.settle(self.job.epoch)
        return self._set(JobPhase.TRAINING, _ENOUGH, now)

    def _training(self, now: float) -> list[Action] | None:
        if self._stop_reached(now):
            return self._drain(JobPhase.COMPLETE, "the stop is reached", now)
        told = self._watch_regions(now)
        if told:
            return told
        lost = self._missed_regions()
        if lost and self.config.on_region_lost == "Fail":
            return self._end(JobPhase.FAILED, f"{lost}, and failurePolicy.onRegionLost is Fail", now)
        quorum = self.config.rules.quorum
        # A suspect slot is not given up yet, and a draining one still takes part by its offers.
        active = sum(s.occupied for s in self.job.members.slots)
        message = f"{active} of {quorum} learners that a merge needs are active" if active < quorum else ""
        if lost:
            message = f"{lost}, and failurePolicy.onRegionLost is Hold"
        if message and self.job.phase is JobPhase.TRAINING:
            self.job.clock.hold(now)
            return [*self._set(JobPhase.HOLDING, message, now), ev.RecordEvent(EventKind.HOLD, -1, 0, message)]
        if not message and self.job.phase is JobPhase.HOLDING:
            self.job.clock.release(now)
            return [*self._set(JobPhase.TRAINING, _ENOUGH, now), ev.RecordEvent(EventKind.RESUME, -1, 0, _ENOUGH)]
        return None

    def _watch_regions(self, now: float) -> list[Action]:
        """Which regions are lost since the last look, and which are back: told, and kept for the report."""
        members, patience = self.job.members, self.config.region_lost_seconds
        members.watch_regions(now, patience)
        gone, back = members.note_absences(now, self.job.clock.elapsed(now))
        notes = [
            ev.RecordEvent(EventKind.REGION_LOST, -1, 0, f"nobody of region {region} was heard for {patience:g} s")
            for region in gone
        ]
        notes += [ev.RecordEvent(EventKind.REGION_BACK, -1, 0, f"region {region} is heard again") for region in back]
        return [ev.Persist(), *notes] if notes else []

    def _missed_regions(self) -> str:
        """What is said of lost regions; empty: none, or the job goes on without them."""
        lost = ", ".join(self.job.members.lost)
        if not lost or self.config.on_region_lost == "Continue":
            return ""
        return f"nobody of region {lost} was heard for {self.config.region_lost_seconds:g} s"

    def _draining(self, now: float) -> list[Action] | None:
        staying = [s for s in self.job.members.slots if s.occupied]
        if staying and now - self.moved_at < self.config.drain_seconds:
            return None
        out: list[Action] = []
        for slot in staying:
            slot.state = SlotState.LOST
            out.append(ev.RecordEvent(EventKind.LOST, slot.index, slot.incarnation, "did not drain in time"))
        if out:
            return out
        if self.lost.settling:
            return None
        finished, out = self.merging.finish_rounds(now)
        if out or not finished or self.peers.checkpoint_pending:
            return out or None
        self.job.clock.end(now)
        if self.target is JobPhase.COMPLETE and self.config.evaluated:
            return self._set(JobPhase.EVALUATING, "the merged model is evaluated", now)
        return self._end(self.target, self.target_message, now)

    def _evaluating(self, now: float) -> list[Action] | None:
        waited = now - self.since
        patience = self.config.evaluation_seconds if self.job.members.evaluators else self.config.evaluator_seconds
        if self.job.final_loss is None and waited < patience:
            return None
        message = (
            self.target_message if self.job.final_loss is not None else "no final evaluation: no evaluator in time"
        )
        return self._end(self.target, message, now)

    # ------------------------------------------------------------- transitions

    def _drain(self, target: JobPhase, message: str, now: float) -> list[Action]:
        self.target = target
        self.target_message = message
        out: list[Action] = []
        if target is JobPhase.SUSPENDED:
            out += self.peers.checkpoint(self.job.members, now)
        return out + self._set(JobPhase.DRAINING, message, now)

    def _end(self, name: JobPhase, message: str, now: float) -> list[Action]:
        self.job.clock.end(now)
        return self._set(name, message, now)

    def _stop_reached(self, now: float) -> bool:
        """Tokens of all learners, the greatest slot step, or seconds since the first step;
        in deterministic mode every slot stops by itself and all must have."""
        if self.job.ledger is None:
            return False
        kind, limit = self.config.stop
        slots = self.job.members.slots
        if self.config.rules.deterministic:
            if kind == "steps":
                return all(slot.step >= limit for slot in slots)
            share = -(-int(limit) // len(slots))
            return all(self.job.ledger.trained(slot.index) >= share for slot in slots)
        if kind == "steps":
            return max(slot.step for slot in slots) >= limit
        if kind == "tokens":
            return self.job.ledger.total_trained() >= limit
        return self.job.clock.elapsed(now) >= limit

    # ------------------------------------------------------------- durable

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target.value, "target_message": self.target_message}

    def load(self, row: dict[str, Any]) -> None:
        """Go on from a saved phase. A suspended, failed or deleted job, a complete one whose stop was
        moved, and one that was draining wait for learners again: whoever wants it suspended
        still says so, and a stop that is reached is seen again."""
        self.target = JobPhase(row["target"])
        self.target_message = row["target_message"]
        job = self.job
        again = job.phase in (JobPhase.SUSPENDED, JobPhase.FAILED, JobPhase.DELETED, JobPhase.DRAINING)
        ended = job.phase in (JobPhase.COMPLETE, JobPhase.EVALUATING)
        if again or (ended and not self._stop_reached(0.0)):
            job.phase, job.phase_message, self.target = JobPhase.WAITING, "resumed", JobPhase.COMPLETE
            job.final_loss = None  # of an end that was not the last: the next one is scored anew

    def restart(self, now: float) -> None:
        """A new life of the syncer: learners have to come back before it goes on."""
        if self.job.phase in (JobPhase.TRAINING, JobPhase.HOLDING):
            self.job.phase = JobPhase.WAITING
        self.since = self.moved_at = now
