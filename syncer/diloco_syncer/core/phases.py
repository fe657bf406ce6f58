"""The job's phases: start, hold, drain, last merges, last evaluation, end.

    waiting ──K ready──▶ training ◀──▶ holding
       ▲                     │ stop reached, or suspend
       │                     ▼
    (restart)            draining ──all left, last merges──▶ evaluating ──▶ complete
                             └──▶ suspended

Failed and deleted are entered at once; failed also after a drain that ends a job in which nothing was ever merged, for
its model is still the one that it began with. Training starts when K slots hold version 0.

Below K active slots the job holds: learners go on, merges wait, and K stays. The same while a whole region is
lost and failurePolicy.onRegionLost is Hold; where it is Fail, a lost region ends the job.

At the end all drain: every learner finishes its step and offers what it has. Then each fragment that K slots
have work for is merged once more. While a shard is lost, learners are waited for as long as their bytes would be
(``most_drain_seconds``), and a job is not complete before it has the merges that wait for the shard. It waits as long
for those, and fails if none comes: what was offered is in the store, and a later start merges it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books import shares
from diloco_syncer.core.members.state_donors import StateDonors
from diloco_syncer.core.merging.aggregation import Aggregator
from diloco_syncer.core.state import JobState

_EVALUATING = "the merged model is evaluated"
_LEAST_PROGRESS = 0.001  # of a score; less does not count as coming on
_ENOUGH = "enough learners are active"
RESUMES = "; started again on its store, the job goes on"
"""What the syncer says with a failure of its own finding. Who else ends a job knows how it is continued."""
_SHARDS_MISSED = (
    "and the last merges of the offered work wait for shard {shards} of the syncer, which did not come back within"
    " {seconds:.0f} s; see why it ends"
)
_AGAIN = "continued: the learners have to join again"
_NOTHING_MERGED = (
    "and nothing was merged: {who} had work to offer at the end,"
    " and the model is the one that the job began with; see why learners ended, or raise training.stop"
)


@dataclass
class Phases:
    """The phase, and when it is left. Times are monotonic seconds. ``begin_training`` and ``begin_last_merges`` are
    asked when all else is ready; False: something has to come before."""

    state: JobState
    actions: Actions
    aggregator: Aggregator
    donors: StateDonors
    begin_training: Callable[[], bool]
    begin_last_merges: Callable[[JobPhase], bool]
    _target: JobPhase = JobPhase.COMPLETE  # the phase that follows the drain
    _target_message: str = ""
    _entered_at: float = 0.0  # when the phase began
    _progress_at: float = 0.0  # when the drain last made progress
    _scored_by: int = 0  # the connection of the evaluator that last told of progress
    _scored_share: float = 0.0  # and of how much
    _requested: tuple[JobPhase, str] | None = None
    _missing: tuple[int, float] | None = None  # the job's merges when only lost shards were waited for, and since when

    def request_end(self, phase: JobPhase, message: str) -> None:
        """An end is requested. It is taken up before the next event is."""
        self._requested = (phase, message)

    def record_progress(self, now: float) -> None:
        """An offer came or a learner left: the drain's patience begins anew."""
        self._progress_at = now

    def record_bytes(self, now: float) -> None:
        """Bytes of a push or an offer came, or a shard did. They count for so long only: whoever sends them may never
        be done, and a shard may be lost again and again."""
        if self.state.phase is JobPhase.DRAINING and now - self._entered_at < self.state.config.most_drain_seconds:
            self._progress_at = now

    def record_score_progress(self, connection: int, share: float, now: float) -> None:
        """An evaluator came on with the final score: the wait for it begins anew, and the phase says how far it is."""
        if self.state.phase is not JobPhase.EVALUATING:
            return
        if connection != self._scored_by or share >= self._scored_share + _LEAST_PROGRESS:
            self._scored_by, self._scored_share, self._progress_at = connection, share, now
            message = f"{_EVALUATING}: {share:.0%} of the final score"
            self.state.phase_message = message
            self.actions.add(ev.SetPhase(self.state.phase, message))

    def advance(self, now: float) -> None:
        """Make the transitions that are due. A transition may make the next one due."""
        while self._advance_once(now):
            pass

    def _advance_once(self, now: float) -> bool:
        """Make one transition; False: none is due."""
        state = self.state
        if state.phase in ENDED_PHASES:
            return False
        if self._requested is not None:
            phase, message = self._requested
            self._requested = None
            if phase is not JobPhase.SUSPENDED or not state.initialised:
                return self._end(phase, message, now)
            if not state.is_ending:
                return self._drain(phase, message, now)
        if words := self.aggregator.describe_out_of_scale():
            return self._end(JobPhase.FAILED, f"{words}; sync.deterministic leaves nobody out{RESUMES}", now)
        handlers: dict[JobPhase, Callable[[float], bool]] = {
            JobPhase.WAITING: self._leave_waiting,
            JobPhase.TRAINING: self._leave_training,
            JobPhase.HOLDING: self._leave_training,
            JobPhase.DRAINING: self._leave_draining,
            JobPhase.EVALUATING: self._leave_evaluating,
        }
        return handlers[state.phase](now)

    def _set(self, name: JobPhase, message: str, now: float) -> bool:
        self.state.phase = name
        self.state.phase_message = message
        self._entered_at = self._progress_at = now
        self.actions.add(ev.Persist(), ev.SetPhase(name, message))
        self.actions.record_event(EventKind.PHASE, None, f"{name.value}: {message}")
        return True

    # ------------------------------------------------------------- phases

    def _leave_waiting(self, now: float) -> bool:
        state = self.state
        if state.initialised and self._stop_reached(now):
            return self._drain(JobPhase.COMPLETE, "the stop is reached", now)
        mode, stop, slots = state.config.mode, state.config.stop, state.members.slots
        ready = sum((s.occupied and s.holder.ready) or mode.has_stopped(stop, s, state.ledger) for s in slots)
        if not state.initialised or ready < self.state.config.rules.quorum or not self.begin_training():
            return False
        state.clock.end_hold(now)  # that of a syncer before this one
        return self._set(JobPhase.TRAINING, _ENOUGH, now)

    def _leave_training(self, now: float) -> bool:
        if self._stop_reached(now):
            return self._drain(JobPhase.COMPLETE, "the stop is reached", now)
        if self._record_lost_regions(now):
            return True
        lost = self._missed_regions()
        if lost and self.state.config.on_region_lost == "Fail":
            return self._end(JobPhase.FAILED, f"{lost}, and failurePolicy.onRegionLost is Fail{RESUMES}", now)
        quorum = self.state.config.rules.quorum
        # A suspect slot is not given up yet. A draining one has offers for one more merge, and opens no round.
        active = sum(s.occupied and s.state is not SlotState.DRAINING for s in self.state.members.slots)
        message = f"{active} of {quorum} learners that a merge needs are active" if active < quorum else ""
        if lost:
            message = f"{lost}, and failurePolicy.onRegionLost is Hold"
        if message and self.state.phase is JobPhase.TRAINING:
            self.state.clock.begin_hold(now)
            self._set(JobPhase.HOLDING, message, now)
            self.actions.record_event(EventKind.HOLD, None, message)
            return True
        if not message and self.state.phase is JobPhase.HOLDING:
            self.state.clock.end_hold(now)
            self._set(JobPhase.TRAINING, _ENOUGH, now)
            self.actions.record_event(EventKind.RESUME, None, _ENOUGH)
            return True
        return False

    def _record_lost_regions(self, now: float) -> bool:
        """Record which regions are lost since the last call, and which are back."""
        members, patience = self.state.members, self.state.config.region_lost_seconds
        members.update_lost_regions(now, patience)
        lost, back = members.record_absences(now, self.state.clock.elapsed(now))
        if not lost and not back:
            return False
        self.actions.add(ev.Persist())
        for region in lost:
            message = f"no learner of region {region} was heard for {patience:g} s"
            self.actions.record_event(EventKind.REGION_LOST, None, message)
        for region in back:
            self.actions.record_event(EventKind.REGION_BACK, None, f"region {region} is heard again")
        return True

    def _missed_regions(self) -> str:
        """What is said of lost regions; empty: none is lost, or the job goes on without them."""
        lost = ", ".join(self.state.members.lost_regions)
        if not lost or self.state.config.on_region_lost == "Continue":
            return ""
        return f"no learner of region {lost} was heard for {self.state.config.region_lost_seconds:g} s"

    def _leave_draining(self, now: float) -> bool:
        state, config = self.state, self.state.config
        staying = [s for s in state.members.slots if s.occupied]
        patient = now - self._progress_at < config.drain_seconds
        # Of a lost shard's fragments nobody can offer anything.
        patient |= not state.shards.all_served and now - self._entered_at < config.most_drain_seconds
        if staying and patient:
            return False
        for slot in staying:
            slot.state = SlotState.LOST
            self.actions.record_event(EventKind.LOST, slot, f"{slot.learner} did not drain in time")
        if staying:
            return True
        if not self.begin_last_merges(self._target):
            return False
        begun, merging = self.aggregator.finish_rounds(now)
        if begun:
            return True
        if merging or self.donors.checkpoint_pending:
            return False
        if self._target is JobPhase.COMPLETE and self.aggregator.awaits_shards:
            return self._await_shards(now)  # a suspended job has the offers when it is resumed
        self.state.clock.end(now)
        if self._target is JobPhase.COMPLETE and not any(state.versions):
            quorum = state.config.rules.quorum
            nothing = _NOTHING_MERGED.format(who=f"fewer than {quorum} learners" if quorum > 1 else "no learner")
            return self._end(JobPhase.FAILED, f"{self._target_message}, {nothing}{RESUMES}", now)
        if self._target is JobPhase.COMPLETE and self.state.config.evaluated:
            return self._set(JobPhase.EVALUATING, _EVALUATING, now)
        return self._end(self._target, self._target_message, now)

    def _await_shards(self, now: float) -> bool:
        """Wait for lost shards, whose merges are all that the job lacks: at most ``most_drain_seconds`` without another
        merge, since the drain began or they were lost."""
        state, patience = self.state, self.state.config.most_drain_seconds
        if self._missing is None or self._missing[0] != state.merges:
            self._missing = state.merges, max(self._entered_at, min(state.shards.lost.values()))
        if now - self._missing[1] < patience:
            return False
        shards = " and ".join(map(str, sorted(state.shards.lost)))
        missed = _SHARDS_MISSED.format(shards=shards, seconds=patience)
        return self._end(JobPhase.FAILED, f"{self._target_message}, {missed}{RESUMES}", now)

    def _leave_evaluating(self, now: float) -> bool:
        config, state = self.state.config, self.state
        # One that scored before comes back: its pod is replaced, or its process started again.
        expected = state.members.evaluators or state.scores.rows
        patience = config.evaluation_seconds if expected else config.evaluator_seconds
        scored = state.scores.final is not None
        waited, since_progress = now - self._entered_at, now - self._progress_at
        if not scored and since_progress < patience and waited < config.most_evaluation_seconds:
            return False
        message = self._target_message if scored else "no final evaluation: no evaluator in time"
        return self._end(self._target, message, now)

    # ------------------------------------------------------------- transitions

    def _drain(self, target: JobPhase, message: str, now: float) -> bool:
        self._target = target
        self._target_message = message
        if target is JobPhase.SUSPENDED:
            self.donors.request_for_checkpoint(now)
        return self._set(JobPhase.DRAINING, message, now)

    def _end(self, name: JobPhase, message: str, now: float) -> bool:
        self.state.clock.end(now)
        return self._set(name, message, now)

    def _stop_reached(self, now: float) -> bool:
        state = self.state
        if state.ledger is None:
            return False
        kind, limit = self.state.config.stop
        slots, ledger = state.members.slots, state.ledger
        if shares.claimed_amount(kind, slots, ledger, state.clock.elapsed(now)) < limit:
            return False  # what counts is less still, and takes longer to find
        return state.config.mode.is_stop_reached((kind, limit), slots, ledger, lambda: state.reached_amount(now))

    # ------------------------------------------------------------- durable

    def to_json(self) -> dict[str, Any]:
        return {"target": self._target.value, "target_message": self._target_message}

    def load(self, row: dict[str, Any]) -> None:
        """Go on from a saved phase. A suspended, failed or deleted job, one that was draining, and a complete one
        whose stop was moved wait for learners again. Where a suspension is still wanted it is requested again,
        and a stop that is reached is seen again."""
        self._target = JobPhase(row["target"])
        self._target_message = row["target_message"]
        state = self.state
        again = state.phase in (JobPhase.SUSPENDED, JobPhase.FAILED, JobPhase.DELETED, JobPhase.DRAINING)
        ended = state.phase in (JobPhase.COMPLETE, JobPhase.EVALUATING)
        if again or (ended and not self._stop_reached(0.0)):
            state.phase = JobPhase.WAITING
            state.phase_message = "resumed"
            self._target = JobPhase.COMPLETE
            state.scores.final = None  # it was of an end that was not the last: the next one is scored anew

    def restart(self, now: float) -> None:
        """The syncer began anew: learners have to come back before the job goes on."""
        if self.state.phase in (JobPhase.TRAINING, JobPhase.HOLDING):
            self.state.phase = JobPhase.WAITING
            self.state.phase_message = _AGAIN  # that of the phase before would contradict this one
        elif self.state.phase is JobPhase.EVALUATING and self.aggregator.has_last_merges:
            # The store has lost a last merge, and has offers that were in it: they are merged again, and scored.
            self.state.phase, self.state.phase_message = JobPhase.DRAINING, self._target_message
            self.state.scores.final = None
        self._entered_at = self._progress_at = now
