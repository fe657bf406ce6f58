"""The learners of the shell's world: sessions that end at either end first, uploads, peers' states, an evaluator."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from diloco_protocol.vocabulary import JobPhase, PushRefusal
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.convert import to_wire
from diloco_protocol.wire.records import Announcement, Evaluation, Payload, PushHeader, Receipt, Seat
from diloco_syncer.core import events as ev
from diloco_syncer.runtime.global_model import model_name
from diloco_syncer.runtime.multipart import Allocate, TooManyUploads, UploadRefused
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.checkpoint import RecordMadeMeanwhile
from diloco_syncer.store.records import Array
from diloco_syncer.store.restore import StoreUnusable
from diloco_syncer.store.tape import TapeError
from diloco_syncer.version_tags import Announced, VersionTags, content_digest
from diloco_worker.core.leases import Leases
from syncer_simulation.learners import Ids, Learner
from syncer_simulation.shell_world import CONTROL_KEY, Life, ShellSetup, SyncerProcesses

NOBODYS: Ids = frozenset({("nobody", 1)})  # in a model that no syncer has announced
STATE_SECONDS = 30.0  # a newcomer that asks for an inner optimizer state has an answer by then


class ShellWorld(SyncerProcesses):
    """Several syncers at once, and learners that notice late or never what became of their sessions."""

    def __init__(self, setup: ShellSetup) -> None:
        super().__init__(setup)
        self.scales: dict[tuple[int, int, int, int], float] = {}  # of pushes, by id
        self.states_wanted: dict[int, float] = {}  # connections, and since when
        if setup.evaluated:
            self.start_evaluator()
            self.at(0.5, self.evaluate)

    # ------------------------------------------------------------ sessions that end at one end first

    def open_connection(self, learner: Learner) -> int:
        connection = super().open_connection(learner)
        assert self.newest is not None
        self.life_of[connection] = self.newest
        return connection

    def break_connection(self, learner: Learner) -> bool:
        """The learner's end is closed; the syncer hears of it later, perhaps after the learner is back."""
        connection, learner.connection = learner.connection, None
        if connection is not None:
            self.at(self.random.choice([0.0, 0.5, 6.0]) * self.random.random(), lambda: self.hear_break(connection))
        return connection is not None

    def reconnect(self, learner: Learner, connection: int | None) -> None:
        """The learner notices that this connection is dead, if it still has it."""
        if connection is not None and learner.connection == connection:
            self.break_connection(learner)
            self.at(self.random.uniform(0.1, 1.0), lambda: self.connect(learner))

    def mishap(self, learner: Learner) -> None:
        connection = learner.connection
        if connection in self.connections and self.chance(0.003 * self.setup.deaths):
            self.seen["half-open"] += 1
            self.hear_break(connection)
            self.at(self.random.uniform(0.1, 4.0), lambda: self.reconnect(learner, connection))
        super().mishap(learner)

    def drain(self, learner: Learner) -> None:
        if learner.connection in self.connections:  # else it has to hear first that nobody listens
            super().drain(learner)

    # ------------------------------------------------------------ what a session tells

    def told(self) -> list[tuple[int, Learner]]:
        there = list(self.connections.items())
        mine = [(c, one) for c, one in there if self.life_of[c] is self.acting and one.connection == c]
        return [(c, one) for c, one in mine if c in self.welcomed]

    def do(self, action: ev.Action) -> None:
        match action:
            case ev.GrantLease():
                self.seen["leases"] += 1
                self.oracle.take_lease(action)
                self.connections[action.connection].leases.add(action.lease)
            case ev.RequestPeerState():
                assert self.acting is not None and self.acting.syncer is not None
                process = self.connections[action.connection].process
                relay = self.acting.syncer.relay
                relay.expect_upload(action.transfer, action.connection, process, checkpoint=action.checkpoint)
                self.at(self.delay(0.5), lambda: self.give_state(action))
            case ev.OfferPeerState():
                self.take_state(action)
            case _:
                super().do(action)

    def seated(self, learner: Learner, seat: Seat | None, merged: tuple[ev.MergedPush, ...]) -> None:
        connection = learner.connection
        if learner.evaluator:
            for p in range(len(self.known.versions)):
                if p not in learner.withheld:
                    self.announce(learner, p, ev.MergedPush())
        if seat is not None:
            if not (seat.continuing and learner.seat is not None):
                learner.leases = Leases(self.setup.seed, max(1, self.setup.sequences))
            learner.leases.reconcile(seat.leases)
            if self.setup.peer_states and not seat.continuing and self.core.initialised:
                self.at(0.2, lambda: self.want_state(connection))
        super().seated(learner, seat, merged)

    def announce(self, learner: Learner, p: int, merged: ev.MergedPush) -> None:
        known, epoch, connection = self.known, self.epoch, learner.connection
        if p >= len(known.versions):
            return  # there was no version 0 when the syncer decided on this Welcome: it is announced later
        version = known.versions[p]
        ids = self.records[p, version].ids
        self.oracle.announced.add((p, version))
        news = Announcement(
            p,
            epoch,
            version,
            Payload("f", p, hash(ids)),
            merged_sequence=merged.sequence,
            merged_version=merged.version,
        )

        def arrive() -> None:
            if learner.connection != connection:
                return
            if learner.evaluator:
                self.tokens_heard = max((epoch, known.tokens), self.tokens_heard)
            else:
                learner.news.append((news, ids))
            if learner.held_since.get(p) != connection or learner.holdings[p][:2] <= (epoch, version):
                learner.holdings[p] = (epoch, version, ids, known.receipts[p], known.settled)
                learner.held_since[p] = connection

        self.at(self.delay(0.3) + self.changes.uniform(0.0, learner.late), arrive)

    def train(self, learner: Learner) -> None:
        """With sequences, as far as some are leased; more of them are asked for."""
        super().train(learner)
        drawn = learner.leases.draw(self.random.randint(1, 3))
        if drawn is not None:
            self.oracle.train_sequences(drawn.cursors)
            learner.leases.commit(drawn.cursors)
        if learner.leases.remaining < 6 and learner.connection is not None and not self.chance(0.3):
            self.handle(ev.LeaseRequested(learner.connection))

    # ------------------------------------------------------------ uploads

    def begin_upload(self, connection: int, upload: Callable[[Life], Any], fragment: int | None = None) -> None:
        """``fragment``: of a push."""
        if (life := self.life_of[connection]).serving:
            life.loop.create_task(upload(life))

    def find_receiver(self, life: Life, header: sync_pb2.UploadHeader) -> Any:
        """Who takes an upload."""
        assert life.syncer is not None
        return life.syncer.bulk.uploads.receivers[header.WhichOneof("what") or ""]

    async def upload(
        self, life: Life, learner: Learner, connection: int, data: Array, **what: Any
    ) -> sync_pb2.UploadReply | None:
        """What the syncer answers to an upload of ``data``, uint8; None: nothing."""

        async def read(key: object, allocate: Allocate) -> Array:
            made = allocate()
            whole = await made if isinstance(made, asyncio.Future) else made
            await asyncio.sleep(self.delay(0.1))
            whole[:] = data
            return whole

        header = sync_pb2.UploadHeader(job="shell", process=learner.process, total_bytes=data.nbytes, **what)
        try:
            reply: sync_pb2.UploadReply | None = await self.find_receiver(life, header)(
                header, connection if connection in self.connections else 0, read
            )
        except UploadRefused as error:
            return sync_pb2.UploadReply(reason=error.reason, message=str(error))
        except (TooManyUploads, asyncio.CancelledError):
            return None
        except (HigherEpoch, RecordMadeMeanwhile, TapeError, StoreUnusable, OSError):
            return None  # these end the process, which is judged by that
        except Exception as error:
            self.failures.append(error)
            raise
        assert reply is not None
        return reply

    def send(self, learner: Learner, header: PushHeader, ids: Ids) -> None:
        connection = learner.connection
        if connection is None or connection not in self.welcomed:
            return  # only a Welcome tells under which incarnation
        self.oracle.upload_push(header, ids)
        # Of steps that point anywhere the norms grow as the root of their number; some push has come apart.
        wild = 100.0 if self.setup.norm_gate is not None and self.chance(0.03) else 1.0
        if self.setup.diverged and self.changes.random() < self.setup.diverged:
            wild = self.changes.choice([math.nan, math.inf, 100.0, 1e30])
        scale = self.scales.setdefault(header.id, wild * math.sqrt(header.steps))
        data = np.full(self.oracle.elements, scale, np.float32).view(np.uint8)

        async def push(life: Life) -> None:
            what = {"slot": header.slot, "incarnation": header.incarnation, "push": to_wire(header)}
            reply = await self.upload(life, learner, connection, data, **what)
            self.on_their_way[header.id] -= 1
            if reply is None or (not reply.accepted and self.on_their_way[header.id]):
                return  # a push is sent again where nothing was heard of it: the last answer counts
            losses = self.oracle.losses
            refused = None if reply.accepted else (PushRefusal(reply.reason), reply.message)
            if refused is not None:
                self.refused[refused[0].value] += 1
                self.seen["refused by the gate"] += refused[0] is PushRefusal.NORM_GATE
            if not self.chance(0.1):
                self.at(
                    self.delay(0.1),
                    lambda: self.hear_answer(learner, header, ids, refused, connection=connection, losses=losses),
                )

        for _ in range(2 if self.chance(0.05) else 1):
            if not self.chance(0.05):
                self.on_their_way[header.id] += 1
                self.at(self.delay(0.4), lambda: self.begin_upload(connection, push, header.fragment))

    def hear_answer(
        self,
        learner: Learner,
        header: PushHeader,
        ids: Ids,
        refused: tuple[PushRefusal, str] | None,
        connection: int,
        losses: int,
    ) -> None:
        """``losses``: that there had been when it was given."""
        if learner.connection != connection:
            return
        if header.round == 0 and learner.offers[header.fragment][0].sequence != header.sequence:
            return  # it has offered more since; a late copy of this one is "repeated" whatever became of the first
        taken = refused is None or refused[0] is PushRefusal.REPEATED
        if header.round == 0 and taken and losses == self.oracle.losses:
            self.oracle.acknowledged[header.id] = header, ids
        self.answer(learner, header, refused)

    def initialise(self, connection: int) -> None:
        learner = self.connections.get(connection)
        if learner is None or self.end_mixture(learner):
            return
        initial = sync_pb2.Initial
        held = [learner.holdings[p][2] for p in range(self.setup.fragments)] if self.held_by(learner) else learner.base
        versions = [self.oracle.upload_version(ids).view(np.uint8) for ids in held]
        receipts = [b"" for _ in held]
        if self.held_by(learner):
            told = [learner.holdings[p] for p in range(self.setup.fragments)]
            receipts = [
                self.receipt_of(p, one[1], values, one[3])
                for p, (one, values) in enumerate(zip(told, versions, strict=True))
            ]
        parts = [(initial.LAYOUT, 0, np.frombuffer(self.layout.to_json().encode(), np.uint8))]
        parts += [(initial.FRAGMENT, p, values) for p, values in enumerate(versions)]
        parts.append((initial.DONE, 0, np.empty(0, np.uint8)))

        forged = bool(receipts[0]) and self.chance(self.setup.forged)
        if forged:
            receipts[-1] = self.forge_receipt(receipts[-1], len(held) - 1, versions[-1])
            versions[-1][:] = self.oracle.upload_version(NOBODYS).view(np.uint8)

        async def upload(life: Life) -> None:
            for part, p, data in parts:
                what = sync_pb2.Initial(part=part, fragment=p, receipt=receipts[p] if part == initial.FRAGMENT else b"")
                reply = await self.upload(life, learner, connection, data, initial=what)
                assert not (forged and part == initial.DONE and reply is not None and reply.accepted), "it was forged"
                if reply is None or not reply.accepted:
                    self.seen["forged"] += forged and reply is not None
                    return

        self.begin_upload(connection, upload)

    def receipt_of(self, p: int, version: int, values: Array, rows: Receipt) -> bytes:
        """As it came with the version's bytes."""
        announced = Announced(version, content_digest(values), rows)
        return VersionTags(CONTROL_KEY, "shell").make(announced, p, "float32", model_name(self.layout, ""))

    def forge_receipt(self, genuine: bytes, p: int, values: Array) -> bytes:
        """What a learner shows for a model of its own: the receipt of what it was given, or one of its own making."""
        if self.random.random() < 0.5:
            return genuine
        announced = VersionTags(CONTROL_KEY, "shell").check(genuine, p, "float32", model_name(self.layout, ""))
        own = announced._replace(digest=content_digest(self.oracle.upload_version(NOBODYS)))
        return VersionTags(b"of its own", "shell").make(own, p, "float32", model_name(self.layout, ""))

    def give_base(self, ask: ev.RequestVersion) -> None:
        learner, p = self.connections.get(ask.connection), ask.fragment
        if learner is None or self.chance(0.05):
            return  # no answer
        epoch, version, ids, rows, _ = learner.holdings[p]
        if (epoch, version) != (ask.epoch, ask.version) or self.chance(self.setup.refusals):
            self.handle(ev.LostVersionFailed(ask.connection, p))
            return
        data = self.oracle.upload_version(ids).view(np.uint8)
        receipt = self.receipt_of(p, version, data, rows)
        forged = self.chance(self.setup.forged)
        if forged:
            receipt = self.forge_receipt(receipt, p, data)
            data = self.oracle.upload_version(NOBODYS).view(np.uint8)
        base = sync_pb2.Base(fragment=p, epoch=epoch, version=version, encoding="float32", receipt=receipt)

        async def upload(life: Life) -> None:
            reply = await self.upload(life, learner, ask.connection, data, base=base)
            taken = reply is not None and reply.accepted
            assert not (forged and taken), "a model of the learner's own was taken"
            self.seen["taken"] += taken
            self.seen["forged"] += forged and reply is not None

        self.begin_upload(ask.connection, upload)

    # ------------------------------------------------------------ peers' states

    def want_state(self, connection: int | None) -> None:
        if connection in self.connections:
            self.states_wanted[connection] = self.now
            patient = self.random.random() < 0.5
            self.handle(ev.PeerStateRequested(connection, patient=patient))
            waits = self.config.rejoin_seconds if patient else 0.0  # for learners that may bring one
            self.at(STATE_SECONDS + waits, lambda: self.expect_state(connection))

    def expect_state(self, connection: int) -> None:
        late = connection in self.states_wanted and connection in self.connections
        if late and self.life_of[connection].serving and self.core.is_recovering:
            self.at(
                STATE_SECONDS, lambda: self.expect_state(connection)
            )  # nobody trains, and it may have to be patient
            return
        assert not late or not self.life_of[connection].serving, f"{connection} has no answer to what it wants"

    def give_state(self, ask: ev.RequestPeerState) -> None:
        """A learner was asked for its inner optimizer state; it says that it has none, sends it, or does nothing."""
        learner = self.connections.get(ask.connection)
        if learner is None or self.chance(0.1):
            return
        if self.chance(0.1):
            self.handle(ev.PeerStateFailed(ask.connection, ask.transfer))
            return
        data = np.full(100, ask.connection % 256, np.uint8)

        async def upload(life: Life) -> None:
            state = sync_pb2.PeerState(transfer=ask.transfer)
            reply = await self.upload(life, learner, ask.connection, data, peer_state=state)
            if reply is not None and reply.accepted and ask.checkpoint:
                self.seen["states kept"] += 1

        self.begin_upload(ask.connection, upload)

    def take_state(self, offer: ev.OfferPeerState) -> None:
        del self.states_wanted[offer.connection]
        self.seen["states given" if offer.transfer else "no states"] += 1
        if offer.transfer:
            assert self.acting is not None and self.acting.syncer is not None
            relay, process = self.acting.syncer.relay, self.connections[offer.connection].process
            relay.offer(offer.transfer, process)
            arrived = relay.find_offered(offer.transfer, process)
            assert arrived is not None and arrived.data[0] != offer.connection % 256

    # ------------------------------------------------------------ the evaluator

    def start_evaluator(self) -> None:
        self.evaluator = Learner(f"evaluator{next(self.numbers)}", ("", 0), self.setup, 0.5, evaluator=True)
        self.tokens_heard = 0, 0  # epoch, and trained in all
        self.at(0.2, lambda one=self.evaluator: self.connect(one))

    def evaluate(self) -> None:
        """As the worker's: what it has heard of is scored; the end's score comes on, and is said again and again."""
        self.at(self.random.uniform(0.3, 1.0), self.evaluate)
        if not self.evaluator.alive:
            self.start_evaluator()  # it was refused for good
        connection = self.evaluator.connection
        if connection not in self.connections or connection not in self.welcomed:
            return
        if self.chance(0.01):
            self.reconnect(self.evaluator, connection)
            return
        if len(self.evaluator.holdings) < self.setup.fragments:
            return
        final = self.core.phase is JobPhase.EVALUATING
        merges = sum(held[1] for held in self.evaluator.holdings.values())
        if final and self.random.random() < 0.5:
            self.handle(ev.EvaluationAdvanced(connection, self.random.random()))
        else:
            score = Evaluation(self.tokens_heard[1], 10.0 / (1 + merges), merges, final)
            self.handle(ev.Evaluated(connection, score))
