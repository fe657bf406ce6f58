"""What the training thread does for synchronisation: at step boundaries, at the start, and in a drain.

Theory of operation
-------------------
A ``Synchronizer`` joins four parts: the adoption rule (which decides), the model's fragments (which are
copied and moved), the inbox (what the syncer said) and the client (which carries what this learner says).
Only the training thread calls it, so nothing here is locked, and parameters move only between two steps.

A *step boundary* reads the inbox, adopts the broadcasts that were downloaded, answers pulls with
snapshots, and leaves the newest report. That takes as long as copying a fragment or two.

Example: between two steps version 7 of fragment 2 and a pull of fragment 5 have come. The boundary moves
fragment 2's parameters to the new base, keeps their work above it, copies fragment 5 into a ``Push``, gives
it to the client, and returns.

Waiting happens in ``await_ready`` only (at the start, without a slot, paused, in deterministic mode) and in
a drain. Every wait ends when this process is told to stop, and the caller measures each.

In a learner of several ranks only the leader has one. What it does to parameters and optimizer state it tells the
others first (``group.fragments``, ``optimizer_state``), so nothing here knows of ranks.

What is still wrong with it: one class reads messages, decides by them and moves parameters, and ``ready``, ``phase``
and ``must_stop`` are read at any time instead of once at a boundary. Nine tables are kept by fragment or by push, and
no one place says when an entry ends: ``_resolve_pushes``, ``_forget_pulls`` and ``begin_drain`` each clear some of
them. Deterministic mode is asked at ten places, where the syncer's core has one object for all that differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, replace

import torch

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.spec.job import SyncerSettings
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.vocabulary import ENDED_PHASES, STOPPED_PHASES, JobPhase, JoinRefusal, PushRefusal
from diloco_protocol.wire.records import Announcement, Lease, Pull, Seat, StepReport
from diloco_worker import logs
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Kind
from diloco_worker.core.progress import job_progress
from diloco_worker.core.syncer_settings import apply_settings
from diloco_worker.data.prefetch import BatchPrefetcher
from diloco_worker.fragments import ModelFragments, Vector
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import (
    Disconnected,
    Downloaded,
    Failed,
    FrozenDownloaded,
    Inbox,
    InitialRequested,
    Message,
    PhaseChanged,
    PushAnswered,
    StateDownloaded,
    StateRequested,
    Unseated,
    Welcomed,
)
from diloco_worker.net.transfers import Push
from diloco_worker.settings import DivergedError, RefusedError, WorkerError
from diloco_worker.sync.boundary_guard import BoundaryGuard
from diloco_worker.sync.deterministic import DeterministicMode
from diloco_worker.sync.frozen_parameters import FrozenParameters
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_handover import OptimizerHandover
from diloco_worker.sync.optimizer_state import Rewarm
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint
from diloco_worker.sync.step_metrics import StepMetrics

log = logging.getLogger(__name__)

_SLICE = 0.1  # seconds; a wait looks for SIGTERM so often


@dataclass
class Synchronizer:
    """The synchronisation of one learner. ``spec``: the job's, with the syncer's settings once they are known;
    ``stopping()``: whether the process was told to end; ``hold()`` is called again and again in each wait."""

    spec: JobSpec
    model: InitVar[torch.nn.Module]
    inner: InnerOptimizers
    layout: Layout
    client: SyncerClient
    inbox: Inbox
    fragments: ModelFragments
    checkpoint: InitVar[SlotCheckpoint]
    metrics: StepMetrics
    stopping: Callable[[], bool]
    hold: Callable[[], None] = lambda: None

    def __post_init__(self, model: torch.nn.Module, checkpoint: SlotCheckpoint) -> None:
        self.adoption = Adoption(AdoptionConfig.of(self.spec, len(self.layout)))
        warm_up = self.spec.training.optimizer.warmup_steps or self.spec.sync.every
        self.rewarm = Rewarm(warm_up)
        self.slot = -1
        self.slot_tokens = 0  # of the slot, when the tenure began
        self.phase: str = JobPhase.WAITING
        self.tenure = 0  # counts tenures; a batch drawn in an earlier one is not trained
        self.guard = BoundaryGuard()  # around all that counts, moves parameters or takes snapshots
        self.push_answers: dict[tuple[int, int], PushAnswered] = {}  # by fragment and sequence; for the drain
        self._syncer_settings = SyncerSettings.of(self.spec)
        self.prefetcher: BatchPrefetcher | None = None  # gets the leases; None: the loop brings its own data
        self._deterministic = DeterministicMode(self.adoption) if self.spec.sync.deterministic else None
        self._frozen = FrozenParameters(model, self.client, self.inner.exchange)
        self._handover = OptimizerHandover(
            self.inner, self.adoption, self.client, checkpoint, warm_up=warm_up, on_fresh=self.rewarm.begin
        )
        self._draining = False
        self._offered: dict[int, Push] = {}  # per fragment, the offer that was sent and not refused
        self._bases: list[Vector | None] = [None] * len(self.layout)
        self._snapshots: dict[tuple[int, int], Vector] = {}  # by fragment and sequence
        self._downloaded: dict[int, Downloaded] = {}  # per fragment, to be adopted
        self._newest: dict[int, Downloaded] = {}  # per fragment, adopted or not
        self._announced: dict[int, Announcement] = {}  # per fragment, the newest
        self._pulls: dict[int, Pull] = {}  # per fragment, not answered yet
        # Per fragment: the round, and the sequence of the push that answers its pull and was not refused.
        self._pushed_rounds: dict[int, tuple[int, int]] = {}
        self._optimizer_bytes = 0  # of the job checkpoint's optimizer state
        self._job_has_trained = False
        self._progress_heard = 0.0  # of the job's stop, in the newest announcement

    # ------------------------------------------------------------------ state

    @property
    def seated(self) -> bool:
        """Whether this process holds a slot."""
        return self.slot >= 0

    @property
    def ready(self) -> bool:
        """Whether the next step may be made."""
        return (
            self.seated
            and self.adoption.complete
            and self.phase in (JobPhase.TRAINING, JobPhase.HOLDING)
            and not self._frozen.missing
            and not self._handover.is_waiting
            and not (self._deterministic and self._deterministic.must_wait)
            and not self.adoption.paused
        )

    @property
    def reached_own_stop(self) -> bool:
        """Deterministic mode: whether this slot has reached its own share of the stop."""
        if self._deterministic is None or not self.seated:
            return False
        return self._deterministic.reached_stop(self.spec.training.stop, self.learners, self.tokens)

    @property
    def learners(self) -> int:
        """Slots of the job, as the syncer has it."""
        return self._syncer_settings.learners

    @property
    def tokens(self) -> int:
        """The slot's trained tokens, over all its tenures."""
        return self.slot_tokens + self.adoption.now.tokens

    @property
    def progress(self) -> float:
        """How near the job is to its stop, 0 to 1."""
        return job_progress(self.spec, self.learners, self.adoption.now.step, self.tokens, heard=self._progress_heard)

    @property
    def must_stop(self) -> bool:
        """Whether no further step is made: this process was told to end, the job closes, or its own stop is reached."""
        return self.stopping() or self.phase in STOPPED_PHASES or self.reached_own_stop

    def base_versions(self) -> list[tuple[int, int]]:
        """(epoch, version) of every fragment's base; of those that have one."""
        bases = [state.base for state in self.adoption.fragments]
        return [(base.epoch, base.version) for base in bases if base is not None]

    # ------------------------------------------------------------------ step boundaries

    def complete_step(self, tokens: int, compute_seconds: float) -> None:
        """Count one inner step, and run the boundary after it."""
        with self.guard:
            self.adoption.on_step(tokens, compute_seconds)
            self._handover.count_step()
            self.run_boundary()
            if self.seated:
                self._handover.write_checkpoint(self.base_versions)

    def run_boundary(self) -> None:
        """Do what is due between two steps. Raises WorkerError if the learner cannot go on."""
        with self.guard:
            self._read_inbox()
            moved = self._adopt()
            if not self._draining and self.seated and self.adoption.complete:
                if self._deterministic is not None:
                    self._push_due(self._deterministic)
                else:
                    self._answer_pulls()
            if self._handover.is_waiting:
                self._handover.apply_when_ready(self.base_versions())
            if moved or self.client.report_wanted:
                self.send_report()

    def await_ready(self) -> None:
        """Run boundaries until the next step may be made, or until ``must_stop``."""
        self.run_boundary()
        while not self.ready and not self.must_stop:
            self.metrics.mark_alive()
            self.wait(_SLICE)
            self.run_boundary()

    def wait(self, seconds: float) -> None:
        """Wait so long at most for a message."""
        self.hold()
        self.inbox.wait(seconds)

    def send_report(self) -> None:
        """Leave the newest report; none is sent before all fragments have a base."""
        if self.seated and self.adoption.complete:
            self.client.send_report(self.report())

    def report(self) -> StepReport:
        """The report as of now."""
        return replace(
            self.adoption.report(),
            stalled_seconds=self.metrics.stalled_seconds,
            loss=self.metrics.read_loss(),
            diverged=self.metrics.diverged,
            young_optimizer=self._handover.is_young,
            fresh_optimizer=self._handover.fresh,
            step_seconds=self.metrics.step_seconds,
            cursors=self.prefetcher.cursors() if self.prefetcher is not None else (),
        )

    # ------------------------------------------------------------------ messages from the syncer

    def _read_inbox(self) -> None:
        for message in self.inbox.take_all():
            self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Downloaded():
                fragment = message.announcement.fragment
                self._downloaded[fragment] = self._newest[fragment] = message
            case Announcement():
                self._announced[message.fragment] = message
                self._progress_heard = message.progress
            case Pull():
                # One that is repeated while its answer is on its way, however slow the link is, asks for nothing new.
                if self._pushed_rounds.get(message.fragment, (0, 0))[0] != message.round:
                    self._pulls[message.fragment] = message
            case PushAnswered():
                self._on_push_answer(message)
            case PhaseChanged():
                if message.phase != self.phase:
                    log.info("the job is %s: %s", message.phase, message.message)
                self.phase = message.phase
            case Lease():
                if self.prefetcher is not None:
                    self.prefetcher.add_lease(message)
            case Seat():
                self._on_seat(message)
            case Unseated():
                if self.seated:
                    log.warning("the slot %d was taken by another process: standing by", self.slot)
                self.slot = -1
                logs.set_fields(slot=-1)
            case Welcomed():
                self._on_welcome(message)
            case InitialRequested():
                self._upload_initial()
            case FrozenDownloaded():
                self._frozen.load(message)
            case StateRequested():
                self._handover.send_state(message.transfer, self.base_versions())
            case StateDownloaded():
                self._handover.receive_state(message)
            case Disconnected():
                self._forget_pulls()
                if self.prefetcher is not None:
                    self.prefetcher.repeat_requests()
            case Failed():
                raise message.error

    def _upload_initial(self) -> None:
        """Upload version 0: what this learner holds, as its Join says, so that an emptied store is rebuilt without its
        own work; else its model as it is. Raises ``RefusedError`` where it holds merged versions of some fragments:
        a store was emptied once more before the others came, and the job would begin anew from a mixture."""
        held = self._newest
        if len(held) < len(self.layout) and any(one.announcement.version for one in held.values()):
            words = "the store is empty, and this process holds some fragments of the model that was in it: restart it"
            raise RefusedError(JoinRefusal.EMPTY_STORE, words)
        vectors = [held[p].vector if p in held else self.fragments.snapshot(p) for p in range(len(self.layout))]
        self.client.upload_initial(vectors, self._frozen.serialize(), self._frozen.digest())

    def _on_welcome(self, welcome: Welcomed) -> None:
        self._optimizer_bytes = welcome.optimizer_bytes
        self._job_has_trained = welcome.trained
        settings = welcome.settings
        if settings is not None and settings != self._syncer_settings:  # the job was changed while this process ran
            self.spec = apply_settings(settings, self.spec)
            self._syncer_settings = settings
            self.adoption.config = AdoptionConfig.of(self.spec, len(self.layout))
        # What the session before may have lost, and nobody asks for again.
        self._frozen.repeat_request()
        if self._deterministic is not None:
            for push in self._deterministic.unmerged_pushes:
                self.client.push(push)

    def _on_seat(self, seat: Seat) -> None:
        continuing = seat.continuing and self.tenure > 0 and self.seated
        self.slot = seat.slot
        logs.set_fields(slot=seat.slot)
        if continuing:
            self._handover.repeat_request()
        else:
            self._begin_tenure(seat)
        if self.prefetcher is not None:
            self.prefetcher.reconcile_leases(seat.leases, continuing)

    def _begin_tenure(self, seat: Seat) -> None:
        """Hold the slot as a newcomer: everything is taken from the syncer."""
        self.tenure += 1
        self.slot_tokens = seat.slot_tokens
        self.adoption.begin_tenure(seat.slot_step, seat.tenure)
        if self._deterministic is not None:
            self._deterministic = DeterministicMode(self.adoption)
        self._bases = [None] * len(self._bases)
        self._snapshots.clear()
        self._offered.clear()
        self._forget_pulls()
        self._downloaded.update(self._newest)
        self.client.begin_tenure()
        above_zero = self._job_has_trained or any(one.announcement.version > 0 for one in self._newest.values())
        if seat.slot_step or self._optimizer_bytes or above_zero:
            self._handover.request_state(self._optimizer_bytes > 0)
        else:
            self._handover.stop_waiting()
        log.info("slot %d, incarnation %d, from step %d", seat.slot, seat.incarnation, seat.slot_step)

    def _on_push_answer(self, answer: PushAnswered) -> None:
        if answer.reason == PushRefusal.NOT_FINITE:  # finite values too large for the encoding become infinite
            raise DivergedError(f"a push of fragment {answer.fragment} was refused: {answer.message}")
        self.push_answers[answer.fragment, answer.sequence] = answer
        while len(self.push_answers) > 4 * len(self.layout):
            del self.push_answers[next(iter(self.push_answers))]
        refused = answer.accepted is False
        pushed = self._pushed_rounds.get(answer.fragment)
        if not answer.accepted and pushed is not None and pushed[1] == answer.sequence:
            del self._pushed_rounds[answer.fragment]  # the syncer pulls again
        offer = self._offered.get(answer.fragment)
        if refused and offer is not None and offer.plan.sequence == answer.sequence:
            del self._offered[answer.fragment]
        forget = self.adoption.on_push_answer(answer.fragment, answer.sequence, refused=refused)
        self._resolve_pushes(answer.fragment, 0, forget)

    # ------------------------------------------------------------------ broadcasts

    def _adopt(self) -> bool:
        """Adopt what was downloaded and may be adopted now; whether some base changed."""
        if not self.seated:
            return False
        moved = False
        for fragment in sorted(self._downloaded):
            # An offered fragment stays as it was offered: its work may be merged after this
            # process has left, so it must not be dropped as stale, or sent twice, meanwhile.
            if fragment in self._offered and not self._forget_merged_offer(fragment):
                continue
            if self._deterministic and not self._draining and not self._deterministic.may_adopt(fragment):
                continue
            moved |= self._adopt_fragment(self._downloaded.pop(fragment))
        if self.adoption.complete:
            self._frozen.request()
        return moved

    def _forget_merged_offer(self, fragment: int) -> bool:
        """Whether what was downloaded says that the fragment's offer, whose answer was lost, is in a merge. A syncer
        whose store lost that merge would refuse the offer, and then the merge would name a push that is forgotten."""
        merged = self._downloaded[fragment].announcement.merged_sequence
        if merged != self._offered[fragment].plan.sequence:
            return False
        del self._offered[fragment]
        return True

    def _adopt_fragment(self, downloaded: Downloaded) -> bool:
        """Do with one fragment what the adoption rule decides; whether its base changed."""
        new = downloaded.vector
        decision = self.adoption.on_broadcast(downloaded.announcement)
        fragment = decision.fragment
        if decision.kind is Kind.STOP:
            raise WorkerError(decision.message)
        if not decision.moves_parameters:
            return decision.kind is Kind.RELABEL
        base = self._bases[fragment]
        reference = self._snapshots[fragment, decision.reference] if decision.kind is Kind.KEEP else base
        self.fragments.move(fragment, decision.kind, new, reference, decision.alpha)
        # Here, on the host, and not in another thread: only where a second push of the fragment is under way while the
        # first one's merge is adopted, which is seldom, and the next adoption may need it at once.
        for sequence in decision.move:
            assert base is not None
            snapshot = self._snapshots[fragment, sequence].array
            self._snapshots[fragment, sequence] = Vector.from_array(snapshot + (new.array - base.array))
        self._bases[fragment] = new
        self._resolve_pushes(fragment, decision.merged, decision.forget)
        if self._deterministic is not None:
            self._deterministic.on_adopted(fragment)
        return True

    def _resolve_pushes(self, fragment: int, merged: int, forget: tuple[int, ...]) -> None:
        """The fate of pushes is known: ``merged`` (0: none) was merged, and ``forget`` are not needed any more."""
        for sequence in forget:
            self._snapshots.pop((fragment, sequence), None)
        if self._deterministic is not None:
            self._deterministic.on_resolved(fragment, forget)
        if merged or forget:
            self.client.resolve_pushes(fragment, merged, forget)

    # ------------------------------------------------------------------ pushes

    def push_fragment(self, fragment: int, round: int) -> Push | None:
        """Take a snapshot and send it; ``round`` 0: as an offer. None: there is no step above the base."""
        planned = self.adoption.snapshot(fragment, round)
        if planned is None:
            return None
        plan, given_up = planned
        self._resolve_pushes(fragment, 0, given_up)
        base = self._bases[fragment]
        assert base is not None
        theta = self.fragments.snapshot(fragment)
        self._snapshots[fragment, plan.sequence] = theta
        push = Push(plan, base, theta, self.report())
        if self._deterministic is not None:
            self._deterministic.on_push(push)
        self.client.push(push)
        return push

    def _answer_pulls(self) -> None:
        for fragment, pull in list(self._pulls.items()):
            base = self.adoption.fragments[fragment].base
            assert base is not None
            announced = self._announced.get(fragment)
            if pull.version < base.version:
                del self._pulls[fragment]  # that round is over
            elif announced is not None and announced.version > base.version and announced.merged_version > base.version:
                continue  # our work is in a broadcast on its way: from the old base it would be refused
            elif (push := self.push_fragment(fragment, pull.round)) is not None:
                self._pushed_rounds[fragment] = (pull.round, push.plan.sequence)
                del self._pulls[fragment]  # else: at the first boundary with a step

    def _forget_pulls(self) -> None:
        """The session is over: the next one pulls anew, and after a restart under numbers that were used before."""
        self._pulls.clear()
        self._pushed_rounds.clear()

    def _push_due(self, schedule: DeterministicMode) -> None:
        for fragment, state in enumerate(self.adoption.fragments):
            if schedule.due(fragment):
                assert state.base is not None
                self.push_fragment(fragment, state.base.version + 1)

    # ------------------------------------------------------------------ leaving

    def adopt_outstanding(self, seconds: float) -> None:
        """Deterministic mode, at the own stop: wait at most so long for the merges of all pushes on their way, and
        adopt them fragment by fragment, as they would have been."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping() and self.phase not in ENDED_PHASES:
            schedule = self._deterministic
            assert schedule is not None
            for fragment in range(len(self.layout)):
                if schedule.adoption_step(fragment) is not None and fragment in self._downloaded:
                    with self.guard:
                        self._adopt_fragment(self._downloaded.pop(fragment))
            if not schedule.awaits_merges:
                break
            self.wait(_SLICE)
            with self.guard:
                self._read_inbox()
            if self.client.report_wanted:
                self.send_report()

    def begin_drain(self) -> None:
        """Answer no more pulls: offers follow."""
        self._draining = True
        self._pulls.clear()
        self.push_answers.clear()

    def offer_fragment(self, fragment: int) -> int | None:
        """Offer everything above the base; returns the offer's sequence. None: there is nothing.

        Where an earlier offer has no answer, that very offer is sent again."""
        push = self._offered.get(fragment)
        if push is not None:
            self.client.push(push)
        else:
            with self.guard:
                push = self.push_fragment(fragment, round=0)
                if push is None:
                    return None
                self._offered[fragment] = push
        return push.plan.sequence
