"""The world of shell_world.py with real learners: the worker's library from its training loop to its calls.

A learner is a process (worker_process.py): ``Learner``, ``Synchronizer``, ``SyncerClient``, ``SyncerConnection``,
``Transfers``, prefetching and the drain are the product's, on loops and threads of the simulation. Its calls (calls.py)
reach the real ``Sessions``, ``Uploads`` and ``Downloads`` of the syncer that serves. Between the two are links that are
slow, stand still and break, at one end first; processes are killed, frozen, told to end, and replaced.

The parameters say which steps are in them, so the oracle reads pushes and records as they are on the wire and in the
store.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase, PushRefusal, TransferRefusal
from diloco_protocol.wire import channels, convert, limits, sync_pb2
from diloco_protocol.wire.records import Announcement, Held, PushHeader, PushPlan
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.merging import push_checks
from diloco_syncer.server.bulk import BulkServer
from diloco_syncer.store.records import Floats, MergeRecord
from diloco_syncer.syncer import Syncer
from diloco_worker.fragments import build_layout
from diloco_worker.settings import RefusedError
from syncer_simulation import threads
from syncer_simulation.calls import Call, HeardUpload, VirtualConnection
from syncer_simulation.learners import Ids, Learner
from syncer_simulation.oracle import Oracle
from syncer_simulation.processes import ProcessLoop
from syncer_simulation.shell_world import BEGUN, CALM, TOLD, Life, ShellSetup, SyncerProcesses
from syncer_simulation.worker_process import PLACES, Rows, WorkerProcess, virtual_threads

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: shell}}
spec:
  training: {{model: null, data: null, stop: {{steps: {steps}}}, evaluation: null}}
  sync:
    fragments: {fragments}
    every: {every}
    overlap: {overlap}
    quorum: {quorum}
    grace: {{capSeconds: 2}}
    compression: {{up: {up}, down: {down}, errorFeedback: {feedback}}}
    merge: {{method: mean}}
    outer: {{optimizer: sgd, lr: 1.0}}
    adoption: {{rule: {rule}}}
    staleness: {{maxVersions: {max_versions}}}
    deterministic: {deterministic}
    heartbeat: {{intervalSeconds: 0.5, timeoutSeconds: {timeout}}}
  syncer: {{checkpoint: {{everySeconds: 3, keep: 1}}}}
  learners: {{command: [python, x.py]}}
  regions: [{{name: r, learners: {slots}, spares: {spares}}}]
"""


@dataclass
class WorkerSetup(ShellSetup):
    """How often what happens is said as a factor; 1.0 is often."""

    up: str = "float32"
    down: str = "float32"
    feedback: bool = False
    breaks: float = 1.0  # how often sessions break, and links stand still
    lost_answers: float = 0.02  # share of the uploads of which the answer never comes
    broken_calls: float = 0.01  # share of the uploads and downloads that break
    terminations: float = 1.0  # how often a learner is told to end
    bytes_per_second: tuple[float, ...] = (1e6,)  # of a link, one of these
    codec_seconds: float = 0.05  # the longest that encoding takes
    old_jobs: float = 0.0  # share of the processes whose job file has another encoding than the syncer's
    deterministic: bool = False  # a job in that mode, whose learners and slots live
    timeout: float = 3.0  # seconds after which a silent learner is given up
    part_bytes: int = 0  # of a transfer, at most; 0: as it is
    flips: float = 0.0  # share of the pieces of a payload, each with a checksum, in which a bit turns on the way
    faithful: bool = False  # nothing breaks: who is told to end offers everything, and the syncer reads that it leaves


# Of honest learners, as long as the store has lost nothing: refused because something else came first.
UNLUCKY = {PushRefusal.OTHER_ROUND, PushRefusal.ALREADY_MERGED, PushRefusal.ENDED, PushRefusal.FENCED}
UNLUCKY |= {TransferRefusal.NOT_JOINED, TransferRefusal.BUSY}


@dataclass
class HeardPush:
    """What a learner has uploaded of a push. ``come``: by where they begin, the bytes of each piece."""

    header: PushHeader
    data: bytearray
    come: dict[int, int] = field(default_factory=dict)


class RowsOracle(Oracle):
    """Reads in the parameters which steps are in them."""

    def __init__(self, world: WorkerWorld) -> None:
        super().__init__(world.records, PLACES)
        self._world = world

    def read_theta(self, theta: Floats) -> Ids:
        return self._world.ids_at(np.flatnonzero(np.abs(theta) > 1e-4))

    def _read_version(self, record: MergeRecord) -> tuple[int, int]:
        found = super()._read_version(record)
        dropped = 0.0 if record.feedback is None else record.feedback  # by the broadcasts' encoding, so far
        there, merged = self.read_theta(record.theta + dropped), self.records[found].ids
        assert there == merged, f"version {found}: {sorted(there ^ merged)} is in one of what was pushed and the values"
        return found


class WorkerWorld(SyncerProcesses):
    """Several syncers at once, and real learners."""

    setup: WorkerSetup

    def __init__(self, setup: WorkerSetup) -> None:
        self.step_ids: list[tuple[str, int]] = []  # by place
        self.uploads: dict[HeardUpload, HeardPush] = {}
        self.heard: dict[tuple[str, PushHeader], HeardPush] = {}  # by process
        self.whole: dict[tuple[str, int, int], PushHeader] = {}  # by process, fragment and sequence, the last one
        super().__init__(setup)
        self.oracle = RowsOracle(self)
        config = CoreConfig.from_job(self.job)
        self.config = replace(
            config,
            rules=replace(config.rules, pull_seconds=0.3),
            drain_seconds=30.0,
            rebuild_seconds=6.0,
            peer_seconds=2.0,
            checkpoint_seconds=2.0,
        )
        self.at(0.25, self.mishaps)

    def make_job(self, setup: ShellSetup) -> tuple[DiLoCoJob, Layout]:
        assert isinstance(setup, WorkerSetup)
        fields = {
            **setup.__dict__,
            "feedback": str(setup.feedback and setup.up != "float32").lower(),
            "rule": setup.rule.value,
            "deterministic": str(setup.deterministic).lower(),
        }
        layout = build_layout(Rows(setup.fragments), setup.fragments, setup.every)
        assert [layout.elements(p) for p in range(len(layout))] == [PLACES] * setup.fragments
        return parse_job(JOB.format(**fields)), layout

    def run(self, limit: float = 3000.0) -> None:
        def nanoseconds() -> int:
            return round((BEGUN + self.now) * 1e9)

        clocks = mock.patch.multiple(time, sleep=threads.sleep, time_ns=nanoseconds)
        # The parameters are marks of steps, which begin at 0, and no model: their sizes mean nothing.
        sizes = mock.patch.object(push_checks, "MOST_GROWTH", math.inf)
        parts: Any = contextlib.nullcontext()
        if most := self.setup.part_bytes:
            names = ("MAX_PART_BYTES", "MAX_UPLOAD_PART_BYTES", "MIN_PART_BYTES")
            parts = mock.patch.multiple(limits, **dict.fromkeys(names, most))
        with virtual_threads(self), clocks, sizes, parts:
            try:
                super().run(limit)
            finally:
                for process in self.processes:
                    process.kill()

    @property
    def processes(self) -> list[WorkerProcess]:
        return cast(list[WorkerProcess], self.everyone)

    def job_of(self, process: WorkerProcess) -> DiLoCoJob:
        """The job as the process's file has it."""
        setup = self.setup
        if self.random.random() < setup.old_jobs:
            setup = replace(setup, up="bfloat16" if setup.up == "float32" else "float32")
        job = self.make_job(setup)[0]
        return job.model_copy(update={"spec": job.spec.in_region(process.place[0])})

    # ------------------------------------------------------------ steps

    def begin_step(self, process: WorkerProcess) -> tuple[int, int]:
        """The place of a new step, and its tokens."""
        place = len(self.step_ids)
        assert place < PLACES, "more steps are made than the parameters have places for"
        step_id = str(process), place
        self.step_ids.append(step_id)
        self.tokens_of[step_id] = tokens = self.random.choice([5, 7, 11])
        return place, tokens

    def ids_at(self, places: Any) -> Ids:
        return frozenset(self.step_ids[place] for place in places)

    def check_schedule(self) -> None:
        """Each version of a deterministic job has of every slot the steps that the schedule names, whatever came first:
        of fragment p those up to ⌈(p + 1)·H/P⌉ in version 1, H more in each that follows, and all in the last one."""
        setup, made = self.setup, dict[str, list[tuple[str, int]]]()
        for step_id in self.step_ids:
            made.setdefault(step_id[0], []).append(step_id)
        assert {len(steps) for steps in made.values()} == {setup.steps}, {
            who: len(steps) for who, steps in made.items()
        }
        assert len(made) == setup.slots
        for (p, version), record in self.records.items():
            due = math.ceil((p + 1) * setup.every / setup.fragments) + (version - 1) * setup.every
            scheduled = {step for steps in made.values() for step in steps[: due if version else 0]}
            assert record.ids == scheduled, f"version {version} of fragment {p}: {record.ids ^ scheduled}"
            assert version < self.core.versions[p] or due >= setup.steps, f"fragment {p} ends at step {due}"

    # ------------------------------------------------------------ processes

    def spawn(self, place: tuple[str, int]) -> Learner:
        process = cast(Any, WorkerProcess(self, place, next(self.numbers)))
        self.learners.append(process)
        self.everyone.append(process)
        self.at(self.random.uniform(0.0, 0.5), process.start)
        return cast(Learner, process)

    def kill(self, learner: Learner) -> None:
        process = cast(WorkerProcess, learner)
        process.kill()
        process.link.sever(self.random.choice([0.0, 0.5, 6.0]) * self.random.random())
        if learner in self.learners:
            self.learners.remove(learner)
        if self.random.random() < 0.5:
            self.handle(ev.ProcessEnded(*process.place, process.process, "killed"))

    def end_of(self, process: WorkerProcess) -> None:
        """It has ended by itself."""
        learner = process.learner
        phase = "?" if learner is None else learner.phase
        self.note(f"{process} ends in {phase}: {process.error or 'well'}; given up: {process.given_up}")
        self.seen["ended by an error" if process.error else "ended well"] += 1
        if process.error is not None:
            assert isinstance(process.error, RefusedError), process.error
        for _, _, why in process.given_up:
            self.seen[f"given up: {why[:40]}"] += 1
        if self.setup.faithful and process.told_to_end and process.seated and phase not in ENDED_PHASES:
            assert process.confirmed and not process.given_up, f"{process} leaves badly: {process.given_up}"
            self.seen["left well"] += 1
        process.kill()
        process.link.sever(self.random.uniform(0.0, 0.5))
        process.left = True
        over = self.core.phase in (JobPhase.DRAINING, *ENDED_PHASES)
        if process.error is not None or process.told_to_end or not over:
            cast(list[Any], self.learners).remove(process)
            self.at(1.0, lambda: self.respawn(process.place))

    def seated_learners(self) -> list[Learner]:
        return [learner for learner in self.learners if cast(WorkerProcess, learner).seated]

    def held_by(self, learner: Learner) -> tuple[Held, ...]:
        return tuple(cast(WorkerProcess, learner).held())

    def mishaps(self) -> None:
        """What happens to learners and their links."""
        self.at(0.25, self.mishaps)
        if self.core.phase not in (JobPhase.TRAINING, JobPhase.HOLDING) or self.now > CALM:
            return
        setup = self.setup
        for learner in list(self.learners):
            process = cast(WorkerProcess, learner)
            if process.left or process.learner is None:
                continue
            if setup.clocks and self.changes.random() < 0.02:
                process.set_clock()
            if self.chance(0.008 * setup.deaths):
                self.seen["kills"] += 1
                self.kill(learner)
                self.at(self.random.uniform(0.1, 5.0), lambda place=process.place: self.respawn(place))
            elif self.chance(0.006 * setup.deaths):
                self.seen["freezes"] += 1
                process.loop.stalled_until = self.now + self.random.uniform(0.5, 6.0)
            elif self.chance(0.008 * setup.terminations):
                self.seen["terminations"] += 1
                process.terminate()
            elif self.chance(0.01 * setup.breaks):
                self.seen["breaks"] += 1
                process.link.sever(self.random.choice([0.0, 0.5, 6.0]) * self.random.random())
            elif self.chance(0.01 * setup.breaks):
                self.seen["stalls"] += 1
                process.link.stalled_until = self.now + self.random.uniform(0.5, 8.0)

    # ------------------------------------------------------------ calls

    def hear(self, call: Call, message: bytes, answer: bool) -> None:
        """A learner writes into its call, or reads an answer. What is wrong with it is this world's to say."""
        with self._noting_failures():
            (self._hear_answer if answer else self._hear_request)(call, message)

    def _hear_request(self, call: Call, message: bytes) -> None:
        if call.method == channels.SESSION:
            said = sync_pb2.LearnerMessage.FromString(message)
            if said.WhichOneof("kind") == "join":
                call.channel.process.known.clear()
                call.channel.process.answers.clear()
            if said.WhichOneof("kind") != "report":
                self.note(f"{call.channel.process} says {said.WhichOneof('kind')}")

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures.append(error)
            raise

    def hear_upload(self, call: HeardUpload, header: sync_pb2.UploadHeader) -> bool:
        """A learner begins an upload; returns whether its answer will be lost."""
        if not header.HasField("push"):
            return False
        with self._noting_failures():
            said = convert.push_header(header)
            new = HeardPush(said, bytearray(header.total_bytes))
            self.uploads[call] = self.heard.setdefault((header.process, said), new)
            self.note(f"{call.process} pushes {header.push.fragment}/{header.push.sequence} for {header.push.round}")
            return self.chance(self.setup.lost_answers)

    def hear_bytes(self, call: HeardUpload, offset: int, part: memoryview) -> None:
        """A learner uploads bytes, of which the first is this one of the payload."""
        if (push := self.uploads.get(call)) is not None:
            with self._noting_failures():
                push.data[offset : offset + len(part)] = part
                push.come[offset] = len(part)
                if sum(push.come.values()) == len(push.data):
                    self._read_push(push.header, push.data)
                    self.whole[call.process.process, push.header.fragment, push.header.sequence] = push.header

    def check_push(self, process: WorkerProcess, plan: PushPlan) -> None:
        """A learner has made a push. A pull has one answer, and none is of work that is known to be merged."""
        if not plan.round:
            return
        try:
            before = process.answers.setdefault((plan.fragment, plan.round), plan.sequence)
            again = before != plan.sequence and self.is_without_verdict(process, plan.fragment, before)
            assert before == plan.sequence or again, f"{process} answers a pull twice: {plan}, and {before}"
            process.answers[plan.fragment, plan.round] = plan.sequence
            known = process.known.get(plan.fragment)
            merged = known is not None and min(known.version, known.merged_version) > plan.base_version
            repeated = self.setup.deterministic  # whatever it has not adopted, in each new session: a header tells it
            assert repeated or not merged, f"{process} pushes what it knows to be merged: {plan}, {known}"
        except AssertionError as error:
            self.failures.append(error)
            raise

    def is_without_verdict(self, process: WorkerProcess, fragment: int, sequence: int) -> bool:
        """Whether the session goes on although this push of it will have no verdict."""
        return False

    def _read_push(self, header: PushHeader, data: bytearray) -> None:
        assert len(data) == codec.encoded_bytes(header.encoding, PLACES)
        values = codec.decode(bytes(data), header.encoding, PLACES)
        ids = self.ids_at(np.flatnonzero(values > 0.5))
        tokens = sum(self.tokens_of[step] for step in ids)
        assert (len(ids), tokens) == (header.steps, header.tokens), f"{header} has {sorted(ids)} of {tokens} tokens"
        if header.incarnation:  # else it is a standby's, which counts nowhere
            self.oracle.upload_push(header, ids)

    def _hear_answer(self, call: Call, message: bytes) -> None:
        if call.method == channels.SESSION:
            said = sync_pb2.SyncerMessage.FromString(message)
            self.note(f"{call.channel.process} hears {said.WhichOneof('kind')}")
            for told in (*said.welcome.fragments, *([said.announcement] if said.HasField("announcement") else ())):
                news = convert.from_wire(Announcement, told)
                call.channel.process.known[news.fragment] = news

    def hear_reply(self, call: HeardUpload, reply: sync_pb2.UploadReply) -> None:
        """A learner hears the answer to an upload, or to a part of one."""
        upload = self.uploads.pop(call, None)
        if upload is None or (reply.accepted and reply.reason == TransferRefusal.PARTIAL):
            return
        if reply.reason == PushRefusal.BAD_CHECKSUM and self.setup.flips:
            return  # no verdict: it is sent again
        header = upload.header
        with self._noting_failures():
            self.note(f"{call.process} hears of {header.fragment}/{header.sequence}: {reply.reason or 'accepted'}")
            call.process.verdicts.add((header.fragment, header.sequence))
            is_taken = reply.accepted or reply.reason == PushRefusal.REPEATED
            if header.round == 0 and is_taken:
                # One that is repeated may be known from its header, by what it was in an earlier session.
                taken = self.whole[call.process.process, header.fragment, header.sequence]
                self.oracle.acknowledged[taken.id] = taken, self.oracle.ids_of[taken.id]
            elif not is_taken:
                self.refused[reply.reason] += 1
                assert reply.reason in UNLUCKY or self.oracle.losses, (header, reply)
                call.process.answers.pop((header.fragment, header.round), None)

    # ------------------------------------------------------------ syncers

    def register(self, life: Life, syncer: Syncer) -> None:
        """The servers are real; the world looks on."""
        handlers = syncer.driver._handlers
        for kind in TOLD:
            handlers[kind] = partial(self.prepare, life, handlers[kind])

    def prepare(self, life: Life, decide: Callable[[ev.Action], Any], action: ev.Action) -> Callable[[], Any]:
        return partial(self.carry_out, life, action, decide(action))

    def carry_out(self, life: Life, action: ev.Action, step: Callable[[], Any]) -> Any:
        assert life.syncer is not None
        before = self.core, self.epoch
        self.core, self.epoch = life.syncer.core, life.epoch
        self.note(action)
        try:
            self.check()
            match action:
                case ev.Admit() | ev.Promote() if action.seat is not None:
                    connection = life.syncer.sessions.find_connection(action.connection)
                    if connection is not None:
                        self.oracle.take_seat(action.seat, connection.process)
                case ev.GrantLease():
                    self.seen["leases"] += 1
                    self.oracle.take_lease(action)
        except Exception as error:
            self.failures.append(error)
            raise
        finally:
            self.core, self.epoch = before
        if life is self.newest and self.now < CALM and self.chance(0.0004 * self.setup.crashes):
            self.at(0.0, lambda: self.crash(life))
        return step()

    async def stop_servers(self, life: Life) -> None:
        assert life.syncer is not None
        life.syncer.sessions.end_all()
        self.at(0.5, lambda: self.end_sessions(life))

    def end_sessions(self, life: Life) -> None:
        """The syncer's end of all its connections is closed."""
        for process in self.processes:
            for call in list(process.link.calls):
                if call.life is life and call.shard is None:
                    call.sever(0.0)

    def find_bulk_server(self, connection: VirtualConnection) -> tuple[ProcessLoop, BulkServer] | None:
        """Who serves a bulk connection, on its loop; None: nobody listens."""
        life = connection.life
        return None if life is None or life.syncer is None or not life.serving else (life.loop, life.syncer.bulk)
