"""The training thread's side of the exchange: what happens at a step boundary, at the start, and in a drain.

Theory of operation
-------------------
``Synchronizer`` joins four things: the adoption rule (which decides), the model's
fragments (which are copied and moved), the inbox (what the background heard) and
the exchange (what the background shall say). Only the training thread calls it, so
that nothing here is locked, and parameters move only between two steps.

A *boundary* takes the inbox, adopts the broadcasts that arrived, answers pulls with
snapshots, and leaves the newest report. That takes as long as copying a fragment
or two. It waits only in ``await_ready`` (at the start, without a slot, paused, in
deterministic mode), and in ``drain``; every wait ends when this process shall
stop, and each is measured by the caller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.spec.job import JobSpec
from diloco_protocol.vocabulary import ENDED_PHASES, STOPPED_PHASES, JobPhase
from diloco_protocol.wire import sync_pb2
from diloco_worker import logs
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Broadcast, Decision, Kind, Rule
from diloco_worker.core.leases import LeaseGrant
from diloco_worker.core.syncer_settings import SyncerSettings
from diloco_worker.fragments import ModelFragments, Vector, frozen_bytes, frozen_tensors, load_frozen, most_frozen_bytes
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import (
    Announced,
    Disconnected,
    Downloaded,
    Failed,
    FrozenDownloaded,
    Inbox,
    InitialRequested,
    LeaseGranted,
    Message,
    PhaseChanged,
    PushAnswered,
    PushRequested,
    Seated,
    StateDownloaded,
    StateRequested,
    Unseated,
    Welcomed,
)
from diloco_worker.net.transfers import Push
from diloco_worker.settings import ConfigurationError, WorkerError
from diloco_worker.sync.optimizer_handover import OptimizerHandover
from diloco_worker.sync.optimizer_state import Rewarm
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint

log = logging.getLogger(__name__)

_SLICE = 0.1  # seconds; a wait looks for SIGTERM so often


def adoption_config(spec: JobSpec, fragments: int) -> AdoptionConfig:
    """The adoption rule's numbers; ``fragments`` is the layout's P."""
    sync = spec.sync
    return AdoptionConfig(
        fragments=fragments,
        every=sync.every,
        overlap=sync.overlap,
        rule=Rule(sync.adoption.rule),
        alpha=sync.adoption.alpha,
        max_versions=sync.staleness.max_versions,
        max_steps=spec.max_steps_alone,
        deterministic=sync.deterministic,
    )


class Synchronizer:
    """One learner in the job. ``stopping`` says that the process was told to end."""

    def __init__(
        self,
        spec: JobSpec,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        client: SyncerClient,
        inbox: Inbox,
        fragments: ModelFragments,
        stopping: Callable[[], bool],
        checkpoint: SlotCheckpoint,
    ) -> None:
        self.spec = spec  # with the hub's settings, once they are known
        self._syncer_settings = SyncerSettings.of(spec)
        self._model = model
        self._optimizer = optimizer
        self._layout = layout
        self._client = client
        self._inbox = inbox
        self._fragments = fragments
        self._stopping = stopping
        self.adoption = Adoption(adoption_config(spec, len(layout)))
        optimizer_spec = spec.training.optimizer
        self.rewarm = Rewarm(optimizer_spec.warmup_steps or spec.sync.every)
        self.slot = -1
        self.slot_tokens = 0  # when the tenure began
        self.phase: str = JobPhase.WAITING
        self.message = ""
        self.tenure = 0  # counts tenures; a batch drawn in an earlier one is not trained
        self.on_leases: Callable[[tuple[LeaseGrant, ...], bool], None] = lambda grants, continuing: None
        self.on_lease: Callable[[LeaseGrant], None] = lambda grant: None
        self.on_disconnect: Callable[[], None] = lambda: None
        self.describe: Callable[[sync_pb2.Report], None] = lambda report: None
        self.verdicts: dict[tuple[int, int], PushAnswered] = {}  # of offers, while draining
        self._draining = False
        self._offered: dict[int, Push] = {}  # per fragment, the offer that was sent and not refused
        self._bases: list[Vector | None] = [None] * len(layout)
        self._snapshots: dict[tuple[int, int], Vector] = {}
        self._arrived: dict[int, Downloaded] = {}  # to be adopted
        self._latest: dict[int, Downloaded] = {}  # newest seen, adopted or not
        self._heard: dict[int, Broadcast] = {}
        self._pulls: dict[int, PushRequested] = {}
        self._frozen_needed = bool(frozen_tensors(model))
        self._frozen_asked = False
        self._optimizer_bytes = 0
        self._job_trained = False
        self._waiting: dict[tuple[int, int], Push] = {}  # deterministic mode: pushes not merged yet
        self._handover = OptimizerHandover(model, optimizer, self.adoption, client, checkpoint, self.rewarm.begin)

    # ------------------------------------------------------------------ looking

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
            and not self._frozen_needed
            and not self._handover.awaited
            and not self._deadlines()
            and not self.adoption.paused
        )

    @property
    def own_stop(self) -> bool:
        """Deterministic mode: whether this slot has reached its own share of the stop."""
        if not self.spec.sync.deterministic or not self.seated:
            return False
        stop = self.spec.training.stop
        if stop.kind == "steps":
            return self.adoption.now.step >= stop.limit
        return stop.kind == "tokens" and self.tokens >= -(-int(stop.limit) // self.learners)

    @property
    def learners(self) -> int:
        """Slots of the job, as the hub has it."""
        return self._syncer_settings.learners

    @property
    def tokens(self) -> int:
        """The slot's tokens, over all its tenures."""
        return self.slot_tokens + self.adoption.now.tokens

    @property
    def over(self) -> bool:
        """No further step: told to end, the job closes, or (deterministic) the own stop is reached."""
        return self._stopping() or self.phase in STOPPED_PHASES or self.own_stop

    def held(self) -> list[tuple[int, int]]:
        """(epoch, version) of every base; only when all have one."""
        bases = [state.base for state in self.adoption.fragments]
        return [(base.epoch, base.version) for base in bases if base is not None]

    # ------------------------------------------------------------------ step boundaries

    def stepped(self, tokens: int, compute_seconds: float) -> None:
        """One inner step was made; then a boundary."""
        self.adoption.on_step(tokens, compute_seconds)
        self.boundary()
        if self.seated:
            self._handover.checkpoint(self.held)

    def boundary(self) -> None:
        """What is due between two steps. Raises WorkerError if the learner cannot go on."""
        for item in self._inbox.take_all():
            self._receive(item)
        moved = self._adopt()
        if not self._draining and self.seated and self.adoption.complete:
            if self.spec.sync.deterministic:
                self._push_due()
            else:
                self._answer_pulls()
        if self._handover.awaited:
            self._handover.use(self.held())
        if moved or self._client.report_wanted:
            self.send_report()

    def await_ready(self) -> None:
        """Boundaries until the next step may be made, or ``over``."""
        self.boundary()
        while not self.ready and not self.over:
            self._inbox.wait(_SLICE)
            self.boundary()

    def send_report(self) -> None:
        """Leave the newest report; nothing before all fragments have a base."""
        if self.seated and self.adoption.complete:
            self._client.send_report(self.report())

    def report(self) -> sync_pb2.Report:
        """The report as of now."""
        adoption = self.adoption
        report = sync_pb2.Report(
            slot_step=adoption.now.step,
            trained_steps=adoption.trained_steps,
            trained_tokens=adoption.now.tokens,
            compute_seconds=adoption.now.seconds,
            paused=adoption.paused,
        )
        for row in adoption.rows():
            report.fragments.add(
                epoch=row.epoch,
                base_version=row.base_version,
                steps=row.steps,
                tokens=row.tokens,
                confirmed_tokens=row.confirmed_tokens,
                dropped_overlap=row.dropped_overlap,
                dropped_stale=row.dropped_stale,
                dropped_rolled_back=row.dropped_rolled_back,
            )
        self.describe(report)
        return report

    # ------------------------------------------------------------------ inbox

    def _receive(self, item: Message) -> None:
        match item:
            case Downloaded():
                fragment = item.broadcast.fragment
                self._arrived[fragment] = self._latest[fragment] = item
            case Announced():
                self._heard[item.broadcast.fragment] = item.broadcast
            case PushRequested():
                self._pulls[item.fragment] = item
            case PushAnswered():
                self._judged(item)
            case PhaseChanged():
                if item.phase != self.phase:
                    log.info("the job is %s: %s", item.phase, item.message)
                self.phase = item.phase
                self.message = item.message
            case LeaseGranted():
                self.on_lease(item.grant)
            case Seated():
                self._sit(item)
            case Unseated():
                if self.seated:
                    log.warning("the slot %d was taken by another process: standing by", self.slot)
                self.slot = -1
                logs.set_fields(slot=-1)
            case Welcomed():
                self._optimizer_bytes = item.optimizer_bytes
                self._job_trained = item.trained
                if item.settings is not None and item.settings != self._syncer_settings:
                    self._apply_settings(item.settings)
                if self._frozen_needed and self._frozen_asked:  # the connection broke in the middle
                    self._client.fetch_frozen(most_frozen_bytes(self._model))
                for push in self._waiting.values():
                    self._client.push(push)  # deterministic mode: no pull asks again
            case InitialRequested():
                self._initialise()
            case FrozenDownloaded():
                self._take_frozen(item)
            case StateRequested():
                self._handover.give(item.transfer, self.held())
            case StateDownloaded():
                self._handover.receive_state(item)
            case Disconnected():
                self._pulls.clear()
                self.on_disconnect()
            case Failed():
                raise item.error

    def _apply_settings(self, settings: SyncerSettings) -> None:
        """The job was changed while this process ran."""
        self.spec, self._syncer_settings = settings.applied(self.spec), settings
        self.adoption.config = adoption_config(self.spec, len(self._layout))

    def _sit(self, seat: Seated) -> None:
        continuing = seat.continuing and self.tenure > 0 and self.seated
        self.slot = seat.slot
        logs.set_fields(slot=seat.slot)
        if not continuing:
            self.tenure += 1
            self.slot_tokens = seat.slot_tokens
            self.adoption.begin_tenure(seat.slot_step)
            self._bases = [None] * len(self._bases)
            self._snapshots.clear()
            self._waiting.clear()
            self._offered.clear()
            self._pulls.clear()
            self._arrived.update(self._latest)
            self._client.begin_tenure()
            above_zero = self._job_trained or any(item.broadcast.version > 0 for item in self._latest.values())
            if seat.slot_step or self._optimizer_bytes or above_zero:
                self._handover.want(self._optimizer_bytes > 0)
            log.info("slot %d, incarnation %d, from step %d", seat.slot, seat.incarnation, seat.slot_step)
        else:
            self._handover.ask_again()
        self.on_leases(seat.leases, continuing)

    def _initialise(self) -> None:
        vectors = [self._fragments.snapshot(p) for p in range(len(self._layout))]
        self._frozen_needed = False
        self._client.upload_initial(vectors, frozen_bytes(self._model))

    def _take_frozen(self, item: FrozenDownloaded) -> None:
        if item.data is None:
            raise ConfigurationError(
                "the job's version 0 has no frozen parameters and this model has: give every learner the same model"
            )
        load_frozen(self._model, item.data)
        self._frozen_needed = False

    def _judged(self, verdict: PushAnswered) -> None:
        self.verdicts[verdict.fragment, verdict.sequence] = verdict
        while len(self.verdicts) > 4 * len(self._layout):
            del self.verdicts[next(iter(self.verdicts))]
        refused = verdict.accepted is False
        offer = self._offered.get(verdict.fragment)
        if refused and offer is not None and offer.plan.sequence == verdict.sequence:
            del self._offered[verdict.fragment]
        forget = self.adoption.on_verdict(verdict.fragment, verdict.sequence, refused=refused)
        self._settle(verdict.fragment, 0, forget)

    # ------------------------------------------------------------------ broadcasts

    def _adopt(self) -> bool:
        if not self.seated:
            return False
        moved = False
        for fragment in sorted(self._arrived):
            # An offered fragment stays as it was offered: its work may be merged after this
            # process has left, so it must not be dropped as stale, or sent twice, meanwhile.
            if fragment in self._offered:
                continue
            if not self._draining and not self.adoption.may_adopt(fragment):
                continue
            arrived = self._arrived.pop(fragment)
            moved |= self._carry_out(self.adoption.on_broadcast(arrived.broadcast), arrived.vector)
        if self._frozen_needed and not self._frozen_asked and self.adoption.complete:
            self._frozen_asked = True
            self._client.fetch_frozen(most_frozen_bytes(self._model))
        return moved

    def _carry_out(self, decision: Decision, new: Vector) -> bool:
        fragment = decision.fragment
        if decision.kind is Kind.STOP:
            raise WorkerError(decision.message)
        if not decision.moves_parameters:
            return decision.kind is Kind.RELABEL
        base = self._bases[fragment]
        reference = self._snapshots[fragment, decision.reference] if decision.kind is Kind.KEEP else base
        self._fragments.move(fragment, decision.kind, new, reference, decision.alpha)
        for sequence in decision.move:
            assert base is not None
            was = self._snapshots[fragment, sequence].array
            self._snapshots[fragment, sequence] = Vector.from_array(was + (new.array - base.array))
        self._bases[fragment] = new
        self._settle(fragment, decision.merged, decision.forget)
        if decision.reset_optimizer:
            self._optimizer.state.clear()
            self.rewarm.begin(self.adoption.now.step)
        return True

    def _settle(self, fragment: int, merged: int, forget: tuple[int, ...]) -> None:
        for sequence in forget:
            self._snapshots.pop((fragment, sequence), None)
            self._waiting.pop((fragment, sequence), None)
        if merged or forget:
            self._client.resolve_pushes(fragment, merged, forget)

    # ------------------------------------------------------------------ pushes

    def offer(self, fragment: int) -> int | None:
        """Offer everything above the base; the offer's sequence. None: there is nothing.

        Where an earlier offer has no answer, that very offer is sent again."""
        push = self._offered.get(fragment)
        if push is not None:
            self._client.push(push)
        else:
            push = self.push(fragment, round=0, version=0)
            if push is None:
                return None
            self._offered[fragment] = push
        return push.plan.sequence

    def push(self, fragment: int, round: int, version: int) -> Push | None:
        """Snapshot and send; None: there is no step to send."""
        planned = self.adoption.snapshot(fragment, round, version)
        if planned is None:
            return None
        plan, given_up = planned
        self._settle(fragment, 0, given_up)
        base = self._bases[fragment]
        assert base is not None
        theta = self._fragments.snapshot(fragment)
        self._snapshots[fragment, plan.sequence] = theta
        push = Push(plan, base, theta, self.report())
        if round and self.spec.sync.deterministic:
            self._waiting[fragment, plan.sequence] = push
        self._client.push(push)
        return push

    def _answer_pulls(self) -> None:
        for fragment, pull in list(self._pulls.items()):
            base = self.adoption.fragments[fragment].base
            assert base is not None
            heard = self._heard.get(fragment)
            if pull.version < base.version:
                del self._pulls[fragment]  # that round is over
            elif heard is not None and heard.version > base.version and heard.merged_version > base.version:
                continue  # our work is in a broadcast on its way: from the old base it would be refused
            elif self.push(fragment, pull.round, pull.version) is not None:
                del self._pulls[fragment]  # else: at the first boundary with a step

    def _push_due(self) -> None:
        """Deterministic mode: snapshots of the due fragments, then (τ = 0) their adoption."""
        for fragment, state in enumerate(self.adoption.fragments):
            if self.adoption.due(fragment):
                assert state.base is not None
                self.push(fragment, state.base.version + 1, state.base.version)

    def _deadlines(self) -> bool:
        """Deterministic mode: whether a broadcast must be adopted before the next step."""
        if not self.spec.sync.deterministic:
            return False
        step = self.adoption.now.step
        return any((due := self.adoption.deadline(p)) is not None and due <= step for p in range(len(self._layout)))

    def resolve_outstanding(self, seconds: float) -> None:
        """Deterministic mode, at the own stop: adopt the broadcasts of all pushes on their way,
        fragment by fragment as they would have been."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopping() and self.phase not in ENDED_PHASES:
            for fragment in range(len(self._layout)):
                arrived = self._arrived.get(fragment)
                if self.adoption.deadline(fragment) is not None and arrived is not None:
                    del self._arrived[fragment]
                    self._carry_out(self.adoption.on_broadcast(arrived.broadcast), arrived.vector)
            if all(state.snapshot_step is None for state in self.adoption.fragments):
                break
            self._inbox.wait(_SLICE)
            for item in self._inbox.take_all():
                self._receive(item)
            if self._client.report_wanted:
                self.send_report()

    @property
    def online(self) -> bool:
        """Whether there is a session with the syncer."""
        return self._client.connected

    def wait_mail(self, seconds: float) -> None:
        """Until the background says something, at most so long."""
        self._inbox.wait(seconds)

    def begin_drain(self) -> None:
        """From now on pulls are not answered: offers follow."""
        self._draining = True
        self._pulls.clear()
        self.verdicts.clear()
