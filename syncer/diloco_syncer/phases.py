"""The job's phases: start, hold, drain, last merges, last evaluation, end.

    waiting ──K ready──▶ training ◀──▶ holding
       ▲                     │ stop reached, or suspend
       │                     ▼
    (restart)            draining ──all left, last merges──▶ evaluating ──▶ complete
                             └──▶ suspended

Failed and deleted are entered at once. Training starts when K slots hold version
0. Below K active slots the job holds: learners go on, merges wait, K stays. At
the end all drain: every learner finishes its step and offers what it has; then
each fragment that K slots have work for is merged once more. Plain code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_syncer import events as ev
from diloco_syncer.config import CoreConfig
from diloco_syncer.events import ENDED, Action, PhaseName
from diloco_syncer.membership import SlotState

if TYPE_CHECKING:
    from diloco_syncer.core import Core


class Phases:
    """The phase, and when it is left. Times are monotonic seconds."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.name = PhaseName.WAITING
        self.message = ""
        self.target = PhaseName.COMPLETE  # of the drain
        self.target_message = ""
        self.since = 0.0
        self.requested: tuple[PhaseName, str] | None = None

    @property
    def closing(self) -> bool:
        return self.name in (PhaseName.DRAINING, PhaseName.EVALUATING)

    def request_end(self, phase: PhaseName, message: str) -> None:
        """Somebody wants an end; the first one wins, but failing or deleting beats suspending."""
        if self.requested is None or phase is not PhaseName.SUSPENDED:
            self.requested = (phase, message)

    def advance(self, core: Core, now: float) -> list[Action]:
        """The transitions that are due. A transition may make the next one due."""
        out: list[Action] = []
        while True:
            step = self._next(core, now)
            if step is None:
                return out
            out += step

    def _next(self, core: Core, now: float) -> list[Action] | None:
        if self.name in ENDED:
            return None
        if self.requested is not None:
            phase, message = self.requested
            self.requested = None
            if phase is not PhaseName.SUSPENDED or not core.initialised:
                return self._end(core, phase, message, now)
            if not self.closing:
                return self._drain(core, phase, message, now)
        handlers: dict[PhaseName, Callable[[Core, float], list[Action] | None]] = {
            PhaseName.WAITING: self._waiting,
            PhaseName.TRAINING: self._training,
            PhaseName.HOLDING: self._training,
            PhaseName.DRAINING: self._draining,
            PhaseName.EVALUATING: self._evaluating,
        }
        return handlers[self.name](core, now)

    def _set(self, name: PhaseName, message: str, now: float) -> list[Action]:
        self.name, self.message, self.since = name, message, now
        return [ev.Persist(), ev.SetPhase(name, message), ev.Note("phase", -1, 0, f"{name.value}: {message}")]

    # ------------------------------------------------------------- phases

    def _waiting(self, core: Core, now: float) -> list[Action] | None:
        if core.initialised and self._stop_reached(core, now):
            return self._drain(core, PhaseName.COMPLETE, "the stop is reached", now)
        ready = sum(s.occupied and s.ready for s in core.members.slots)
        if not core.initialised or ready < self.config.rules.quorum:
            return None
        return self._set(PhaseName.TRAINING, f"{ready} learners hold version 0", now)

    def _training(self, core: Core, now: float) -> list[Action] | None:
        if self._stop_reached(core, now):
            return self._drain(core, PhaseName.COMPLETE, "the stop is reached", now)
        quorum = self.config.rules.quorum
        # A suspect slot is not given up yet.
        active = sum(s.state in (SlotState.ACTIVE, SlotState.SUSPECT) for s in core.members.slots)
        if active < quorum and self.name is PhaseName.TRAINING:
            core.clock.hold(now)
            message = f"{active} of {quorum} learners that a merge needs are active"
            return [*self._set(PhaseName.HOLDING, message, now), ev.Note("hold", -1, 0, message)]
        if active >= quorum and self.name is PhaseName.HOLDING:
            core.clock.release(now)
            message = f"{active} learners are active again"
            return [*self._set(PhaseName.TRAINING, message, now), ev.Note("resume", -1, 0, message)]
        return None

    def _draining(self, core: Core, now: float) -> list[Action] | None:
        staying = [s for s in core.members.slots if s.occupied]
        if staying and now - self.since < self.config.drain_seconds:
            return None
        out: list[Action] = []
        for slot in staying:
            slot.state = SlotState.LOST
            out.append(ev.Note("lost", slot.index, slot.incarnation, "did not drain in time"))
        if out:
            return out
        finished, out = core.finish_rounds(now)
        if out or not finished or core.peers.checkpoint_pending:
            return out or None
        core.clock.end(now)
        if self.target is PhaseName.COMPLETE and self.config.evaluated:
            return self._set(PhaseName.EVALUATING, "the merged model is evaluated", now)
        return self._end(core, self.target, self.target_message, now)

    def _evaluating(self, core: Core, now: float) -> list[Action] | None:
        waited = now - self.since
        patience = (
            self.config.evaluation_seconds if core.members.evaluators else self.config.evaluator_seconds
        )
        if core.final_loss is None and waited < patience:
            return None
        message = (
            self.target_message
            if core.final_loss is not None
            else "no final evaluation: no evaluator in time"
        )
        return self._end(core, self.target, message, now)

    # ------------------------------------------------------------- transitions

    def _drain(self, core: Core, target: PhaseName, message: str, now: float) -> list[Action]:
        self.target, self.target_message = target, message
        out: list[Action] = []
        if target is PhaseName.SUSPENDED:
            out += core.peers.checkpoint(core.members, now)
        return out + self._set(PhaseName.DRAINING, message, now)

    def _end(self, core: Core, name: PhaseName, message: str, now: float) -> list[Action]:
        core.clock.end(now)
        return self._set(name, message, now)

    def _stop_reached(self, core: Core, now: float) -> bool:
        """Tokens of all learners, the greatest slot step, or seconds since the first step;
        in deterministic mode every slot stops by itself and all must have."""
        if core.ledger is None:
            return False
        kind, limit = self.config.stop
        slots = core.members.slots
        if self.config.rules.deterministic:
            if kind == "steps":
                return all(slot.step >= limit for slot in slots)
            share = -(-int(limit) // len(slots))
            return all(core.ledger.trained(slot.index) >= share for slot in slots)
        if kind == "steps":
            return max(slot.step for slot in slots) >= limit
        if kind == "tokens":
            return core.ledger.total_trained() >= limit
        return core.clock.elapsed(now) >= limit

    # ------------------------------------------------------------- durable

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name.value,
            "message": self.message,
            "target": self.target.value,
            "target_message": self.target_message,
        }

    def load(self, row: dict[str, Any], core: Core) -> None:
        """Go on from a saved phase: a suspended or failed job, and a complete one whose
        stop was moved, wait for learners again."""
        self.name, self.message = PhaseName(row["name"]), row["message"]
        self.target, self.target_message = PhaseName(row["target"]), row["target_message"]
        again = self.name in (PhaseName.SUSPENDED, PhaseName.FAILED)
        ended = self.name in (PhaseName.COMPLETE, PhaseName.EVALUATING)
        if again or (ended and not self._stop_reached(core, 0.0)):
            self.name, self.message, self.target = PhaseName.WAITING, "resumed", PhaseName.COMPLETE
