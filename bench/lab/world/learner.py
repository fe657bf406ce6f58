"""One learner's process between two steps: what it adopts, pushes and reports.

The decisions are the worker's own (``diloco_worker.core.adoption``), carried out in the order in which
``diloco_worker/sync/synchronizer.py`` does: adopt what was downloaded, answer pulls, report. There are no messages and
no time here; ``world`` delivers both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from diloco_protocol.arrays.kernels import Float32s
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire.records import Announcement, Held, PushPlan, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Kind
from diloco_worker.core.progress import job_progress
from lab.world.links import SimulatedLink
from lab.world.parts import StepOrder, StepResult
from lab.world.values import LearnerValues

_MOVES = (Kind.OVERWRITE, Kind.KEEP, Kind.MIX, Kind.REBASE)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A learner's inner optimizer, and the versions on which it was made, per fragment."""

    state: object
    versions: tuple[int, ...]


@dataclass(eq=False)
class LearnerProcess:
    """A process that trains: it holds a slot, or stands by for one.

    ``step_seconds``: what a step takes it. ``resumes_at``: it stands still until then. ``stepping``: a step is
    under way. ``values`` None: it has no parameters.
    """

    spec: JobSpec
    place: tuple[str, int]
    process: str
    step_seconds: float
    link: SimulatedLink
    fragments: int
    connection: int | None = None
    seat: Seat | None = None
    tenure: int = 0
    alive: bool = True
    leaving: bool = False  # its own machine is taken back, while the job continues
    left: bool = False
    stepping: bool = False
    resumes_at: float = 0.0
    owed_seconds: float = 0.0  # that the step under way stood still
    waits_for_state: bool = False
    offered_state: OptimizerState | None = None
    phase: JobPhase = JobPhase.WAITING
    loss: float = math.nan
    heard: float = 0.0  # the newest progress that the syncer told
    reported_at: float = -math.inf
    values: LearnerValues | None = None
    announced: dict[int, Announcement] = field(default_factory=dict)
    fetching: set[int] = field(default_factory=set)
    fetched: dict[int, int] = field(default_factory=dict)  # the newest version that was downloaded, by fragment
    downloaded: dict[int, tuple[Announcement, Float32s | None]] = field(default_factory=dict)
    pulls: dict[int, ev.Pull] = field(default_factory=dict)
    pushed_rounds: dict[int, tuple[int, int]] = field(default_factory=dict)  # round and sequence of what answers a pull
    offers: dict[int, int] = field(default_factory=dict)  # sequence of the offer that is on its way or was accepted
    refused_above: dict[int, int] = field(default_factory=dict)  # of a refused offer: the base's version
    accepted: set[int] = field(default_factory=set)  # fragments whose offer was accepted
    adoption: Adoption = field(init=False)

    def __post_init__(self) -> None:
        self.adoption = Adoption(AdoptionConfig.of(self.spec, self.fragments))

    # ------------------------------------------------------------ seat

    def begin_tenure(self, seat: Seat) -> None:
        """Hold the slot as a newcomer: everything is taken from the syncer."""
        self.tenure = seat.incarnation
        self.adoption.begin_tenure(seat.slot_step, seat.tenure)
        self.announced.clear()
        self.fetched.clear()
        self.downloaded.clear()
        self.forget_pulls()
        self.offers.clear()
        self.accepted.clear()
        self.refused_above.clear()
        if self.values is not None:
            self.values.begin_tenure()

    def end_session(self) -> None:
        """The syncer is gone, with all that was on its way and the step that was under way; another's time begins."""
        self.connection, self.stepping = None, False
        self.link = SimulatedLink(self.link.rates)
        self.resumes_at = self.owed_seconds = 0.0
        self.reported_at = -math.inf
        self.announced.clear()
        self.fetching.clear()
        self.downloaded.clear()
        self.forget_pulls()

    def forget_pulls(self) -> None:
        """The session is over: the next one pulls anew."""
        self.pulls.clear()
        self.pushed_rounds.clear()

    def held(self) -> tuple[Held, ...]:
        """What it has of each fragment; empty: nothing."""
        bases = [state.base for state in self.adoption.fragments]
        return tuple(Held(base.epoch, base.version) for base in bases if base) if all(bases) else ()

    # ------------------------------------------------------------ steps

    @property
    def draining(self) -> bool:
        """Whether it makes no more steps, and leaves once its work is offered."""
        return self.leaving or self.phase is JobPhase.DRAINING

    @property
    def ready(self) -> bool:
        """Whether the next step may be made."""
        return (
            self.alive
            and self.seat is not None
            and self.adoption.complete
            and not self.adoption.paused
            and not self.waits_for_state
            and self.phase in (JobPhase.TRAINING, JobPhase.HOLDING)
        )

    def order_step(self, learners: int) -> StepOrder:
        """The step that was made just now. ``learners``: slots of the job."""
        assert self.seat is not None
        now = self.adoption.now
        tokens = self.seat.slot_tokens + now.tokens
        progress = job_progress(self.spec, learners, now.step, tokens, heard=self.heard)
        copy = self.values.replica if self.values is not None else None
        return StepOrder(copy, self.seat.slot, now.step, progress, since_start=self.adoption.trained_steps)

    def count_step(self, result: StepResult) -> None:
        """Count a step that was made."""
        self.adoption.on_step(result.tokens, self.step_seconds)
        self.loss = result.loss

    def report(self) -> StepReport:
        """The report as of now."""
        return replace(self.adoption.report(), loss=self.loss, step_seconds=self.step_seconds)

    # ------------------------------------------------------------ boundaries

    def adopt(self) -> bool:
        """Adopt what was downloaded; whether some base changed. Raises RuntimeError for versions that contradict."""
        moved = False
        for fragment in sorted(self.downloaded):
            news, values = self.downloaded[fragment]
            if fragment in self.offers and news.merged_sequence != self.offers[fragment]:
                continue  # an offered fragment stays as it was offered
            del self.downloaded[fragment]
            self.offers.pop(fragment, None)
            decision = self.adoption.on_broadcast(news)
            if decision.kind is Kind.STOP:
                raise RuntimeError(decision.message)
            moved |= decision.kind in (*_MOVES, Kind.RELABEL)
            if decision.kind in _MOVES and self.values is not None:
                assert values is not None
                self.values.move(decision, values)
        self._adopt_state()
        return moved

    def _adopt_state(self) -> None:
        """Go on from a peer's optimizer state once this learner's versions are at least those on which it was made."""
        offered = self.offered_state
        if offered is None or self.values is None or not self.adoption.complete:
            return
        if all(held.version >= version for held, version in zip(self.held(), offered.versions, strict=True)):
            self.values.replica.set_optimizer_state(offered.state)
            self.offered_state, self.waits_for_state = None, False

    def answerable_pulls(self) -> Iterator[ev.Pull]:
        """Pulls that are to be answered at this boundary, those of rounds that are over forgotten."""
        for fragment, pull in list(self.pulls.items()):
            base, news = self.adoption.fragments[fragment].base, self.announced.get(fragment)
            assert base is not None
            if pull.version < base.version:
                del self.pulls[fragment]
            elif news is not None and news.version > base.version and news.merged_version > base.version:
                continue  # its work is in a broadcast on its way: from the old base it would be refused
            else:
                yield pull

    def plan_push(self, fragment: int, round: int) -> PushPlan | None:
        """Take a snapshot for a push, or (``round`` 0) an offer; None: there is no step above the base."""
        planned = self.adoption.snapshot(fragment, round)
        if planned is None:
            return None
        plan, given_up = planned
        if self.values is not None:
            self.values.take_snapshot(plan, given_up)
        return plan

    def take_answer(self, fragment: int, sequence: int, refused: bool) -> None:
        """The syncer answered a push or an offer. A refused one's work stays above the base."""
        if refused and self.pushed_rounds.get(fragment, (0, 0))[1] == sequence:
            del self.pushed_rounds[fragment]
        if self.offers.get(fragment) == sequence:
            if refused:
                del self.offers[fragment]
                base = self.adoption.fragments[fragment].base
                self.refused_above[fragment] = base.version if base else 0
            else:
                self.accepted.add(fragment)
        forget = self.adoption.on_push_answer(fragment, sequence, refused)
        if self.values is not None:
            self.values.resolve_pushes(fragment, 0, forget)

    def offers_due(self) -> list[int]:
        """Fragments that a learner that leaves has yet to offer, in order. One whose offer was refused waits for the
        version in which its work was merged."""
        due = []
        for fragment in self.adoption.drain_order():
            base = self.adoption.fragments[fragment].base
            waits = base is not None and base.version <= self.refused_above.get(fragment, -1)
            if fragment not in self.offers and not waits:
                due.append(fragment)
        return due

    @property
    def drained(self) -> bool:
        """Whether every fragment with work above its base was offered, and the offers were accepted."""
        return all(fragment in self.offers and fragment in self.accepted for fragment in self.adoption.drain_order())
