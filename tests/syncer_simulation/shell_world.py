"""The world of core_world.py with the syncer's real shell between its core and its store.

A syncer is the real ``Syncer`` (driver, durability, merger, pushes, relay, model, the job's end) on an event loop in
the world's time, restored by the real ``Checkpoints`` from a store in memory. Only its servers are the world's: what it
tells a session goes to the world's learners, and their uploads come from them. So nothing between two events is
atomic: a persist is slow, fails and is repeated, or ends between two of its objects; a restart reads what is there.

A syncer crashes, is told to stop, or is succeeded by one that starts beside it while its threads stand still between a
check of the epoch and what follows it. The job is suspended and resumed. The store loses what is newest. Sessions
(shell_sessions.py) end at either end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.documents import Report, read_document
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase, SyncerExit
from diloco_protocol.wire.records import Receipt, Seat
from diloco_syncer.audit.store_audit import RECORDS, audit_store
from diloco_syncer.audit.tape_audit import CHAIN, VERSIONS
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.leases import LeaseBook
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.driver import RESTART, SteadyClock
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.startup import complete_tape, replay, settings_line
from diloco_syncer.store.base import HigherEpoch, Store
from diloco_syncer.store.checkpoint import REPORT, Checkpoints, Restored
from diloco_syncer.store.documents import unpack_document
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.records import Damaged, MergeRecord, parse_record_name
from diloco_syncer.store.replay import take_back_versions
from diloco_syncer.store.restore import StoreUnusable
from diloco_syncer.store.tape import Tape, TapeError
from diloco_syncer.syncer import Syncer
from syncer_simulation.core_world import NOTHING_MERGED, World, settle
from syncer_simulation.job_changes import is_of_a_lost_region
from syncer_simulation.learners import Setup
from syncer_simulation.memory_store import MemoryStore
from syncer_simulation.oracle import Oracle
from syncer_simulation.processes import ProcessLoop, present_work

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: shell}}
spec:
  training: {{model: null, data: null, stop: {{steps: 1000}}, evaluation: null}}
  sync:
    compression: {{up: float32, down: float32}}
    outer: {{optimizer: sgd, lr: {rate}}}
  syncer: {{checkpoint: {{everySeconds: 3, keep: 1}}}}
  learners: {{command: [python, x.py]}}
  regions: [{{name: r, learners: 4}}, {{name: s, learners: 4}}]
"""
CONTROL_KEY = b"k" * 32
BEGUN = 1_700_000_000.0  # the wall clock at the beginning
PARAMETERS = 64  # of each fragment
COPIES = 8  # of the store, one a second
CALM = 60.0  # from then on nothing happens to syncers and store by itself, and the job comes to its end
TOLD = (ev.Admit, ev.Announce, ev.Promote, ev.SetPhase, ev.Pull, ev.Refuse, ev.RequestInitialModel, ev.GrantLease)
TOLD += (ev.RequestVersion, ev.RequestPeerState, ev.OfferPeerState)


@dataclass
class ShellSetup(Setup):
    """How often what happens is said as a factor; 1.0 is often."""

    faults: float = 0.0  # share of the store's writes that fail
    store_seconds: float = 0.02  # the longest that an operation of it takes
    doubles: float = 0.0  # a second syncer starts beside the first
    interrupts: float = 0.0  # share of the merges within whose write a second one succeeds the first
    hand_overs: float = 0.0  # the syncer is told to stop, and another follows
    suspends: float = 0.0  # the job is suspended, and resumed
    damages: float = 0.0  # share of the crashes after which one object is gone or damaged, once in a world
    torn: float = 0.0  # share of the losses in which what was written last is gone or torn, here and there
    evaluated: bool = False
    peer_states: bool = False  # newcomers want an inner optimizer state
    forged: float = 0.0  # share of the versions given back that are a model of the learner's own


@dataclass
class Known:
    """What a syncer knew when it decided on an action: of each fragment the version and its receipt."""

    versions: list[int] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    settled: int = 0
    tokens: int = 0  # trained in all


@dataclass
class Life:
    """One process of the syncer. ``syncer`` None: it has not come so far."""

    loop: ProcessLoop
    syncer: Syncer | None = None
    epoch: int = 0
    stopping: bool = False

    @property
    def serving(self) -> bool:
        return self.loop.alive and self.syncer is not None and not self.stopping


def records_of(objects: Iterable[str], fragments: int) -> list[int]:
    """The newest version of each fragment that has a record."""
    found = [place for name in objects if (place := parse_record_name(name)) is not None]
    return [max((version for q, version in found if q == p), default=0) for p in range(fragments)]


def is_whole(record: bytes, name: str) -> bool:
    try:
        MergeRecord.unpack(record, name)
    except Damaged:
        return False
    return True


class SyncerProcesses(World):
    """Several syncers at once, on one store."""

    setup: ShellSetup

    def __init__(self, setup: ShellSetup) -> None:
        self.job, self.layout = self.make_job(setup)
        self.layout_digest = self.layout.digest
        self.objects: MutableMapping[str, bytes] = {}
        self.copies: list[dict[str, bytes]] = []
        self.out = [0.0, 0.0]  # from when to when the store is away
        self.lives: list[Life] = []
        self.newest: Life | None = None  # of the lives that have served, the one that began last
        self.acting: Life | None = None  # whose action is carried out
        self.known = Known()
        self.life_of: dict[int, Life] = {}  # by connection
        self.welcomed: set[int] = set()  # connections, as ``Sessions`` knows it
        self.suspended = False  # or to be
        self.ended = False
        self.min_epoch = 0
        self.failures: list[BaseException] = []
        self.expected: dict[int, int] = {}  # by fragment the version that the next syncer has at least
        rules = RoundRules(setup.every, setup.overlap, setup.quorum, 0.9, grace_cap=2.0)
        self.core = Core(CoreConfig(places=(("r", 0),), rules=rules, encoding="float32"), None, 0, 0.0)  # no life's yet
        super().__init__(setup)
        self.oracle = Oracle(self.records, PARAMETERS)
        self.config = replace(
            self.config,
            evaluated=setup.evaluated,
            evaluation_seconds=20.0,
            evaluator_seconds=20.0,
            peer_seconds=2.0,
            checkpoint_seconds=2.0,
        )
        self.at(1.0, self.trouble)

    def make_job(self, setup: ShellSetup) -> tuple[DiLoCoJob, Layout]:
        tensors = [Tensor(f"w{p}", (8, PARAMETERS // 8), "float32", False) for p in range(setup.fragments)]
        return parse_job(JOB.format(rate=1.0)), Layout.build(tensors, fragments=setup.fragments)

    # ------------------------------------------------------------ time

    def run(self, limit: float = 3000.0) -> None:
        before = random.getstate()
        random.seed(self.setup.seed)  # the pauses between two tries
        clocks = dict.fromkeys(("monotonic", "perf_counter"), lambda: self.now)
        try:
            with mock.patch.multiple(time, time=self.wall_clock, **clocks):
                super().run(limit)
        finally:
            random.setstate(before)
            for life in self.lives:
                life.loop.kill()

    @property
    def knows_all_offers(self) -> bool:  # type: ignore[override]
        """A succeeded syncer may write one late, which it does not acknowledge."""
        return not (self.setup.doubles or self.setup.interrupts)

    def wall_clock(self) -> float:
        """What ``time.time`` says in the process that asks."""
        work, loop = present_work(), asyncio._get_running_loop()
        return BEGUN + self.now + getattr(loop if work is None else work.loop, "ahead", 0.0)

    def is_over(self) -> bool:
        return self.ended

    def at(self, delay: float, call: Callable[[], object]) -> None:
        def checked() -> None:
            call()
            if self.failures:
                raise self.failures[0]

        super().at(delay, checked)

    # ------------------------------------------------------------ a syncer's life

    def start_syncer(self) -> None:
        life = Life(ProcessLoop(self.at, lambda: self.now))
        if self.core.initialised and not self.going_on:
            self.change_job()
        self.going_on = False
        life.loop.ahead = self.set_clock()
        self.lives.append(life)
        life.loop.create_task(self.serve(life))

    async def serve(self, life: Life) -> None:
        """One life, as startup.py and service.py have it."""
        try:
            outcome = await self.serve_to_the_end(life)
        except (OSError, StoreUnusable) as error:
            assert isinstance(error, OSError) or (self.oracle.losses and not self.expected), error
            if not isinstance(error, OSError):
                self.lose_content(whole=True)  # as people do: they give it an older copy of its store
            outcome = SyncerExit.STORE
        except HigherEpoch:
            outcome = SyncerExit.SUPERSEDED
        except TapeError as error:  # of a predecessor whose put came late; the next life reads what is there now
            others = [one for one in self.lives if one is not life and one.epoch]
            assert others and "was written by another syncer" in str(error), error
            outcome = SyncerExit.STORE
        except Exception as error:
            self.failures.append(error)
            return
        self.seen[f"outcome {outcome}"] += 1
        if outcome == SyncerExit.OK and self.suspended:
            self.seen["suspensions"] += 1
            self.remove_learners()
        # One that is told to stop while the job ends leaves the report to the next.
        reason = life.syncer.driver.stop_reason if life.syncer is not None and outcome != SyncerExit.SUPERSEDED else ""
        self.ended = reason.startswith((f"{JobPhase.COMPLETE.value}:", f"{JobPhase.FAILED.value}:"))
        if self.ended and self.core.phase in ENDED_PHASES:
            self.going_on = self.goes_on(ev.SetPhase(self.core.phase, self.core.phase_message))
            self.ended = not self.going_on
        if self.going_on:
            self.remove_learners()
        self.end_life_of(life, restart=life is self.lives[-1] and not self.ended)

    async def serve_to_the_end(self, life: Life) -> int:
        checkpoints, restored, tape = await life.loop.run_in_executor(None, self.load)
        state = None if restored.core is None else restored.core["core"]
        life.epoch = checkpoints.epoch.number
        core = Core(self.config, state, life.epoch, self.now, wall=time.time())
        restored.newest = take_back_versions(core, restored.newest)
        model = GlobalModel(self.job, threads=1, control_key=CONTROL_KEY)
        syncer = Syncer(self.job, core, model, checkpoints, tape=tape, restored=restored, loop=life.loop)
        syncer.driver.clock = SteadyClock(raw=life.loop.time)
        syncer.durability.settings = settings_line(self.job, life.epoch, restored)
        self.register(life, syncer)
        self.begin_shards(life, syncer)
        if restored.layout is not None:
            await syncer.begin_model(restored.layout, restored.newest)
        self.epoch, self.core, self.newest, life.syncer = life.epoch, core, life, syncer
        replay(syncer, restored)
        fewer = {p: v for p, v in self.expected.items() if core.versions[p] < v}
        assert not fewer, f"of {core.versions} are left, after one object was damaged: {fewer} were there"
        self.expected = {}
        syncer.start(restored.behind)
        self.check()
        outcome = await syncer.driver.outcome
        fine = (RESTART, SyncerExit.OK, SyncerExit.SUPERSEDED, SyncerExit.STORE)
        unmerged = (
            outcome == SyncerExit.FAILED and NOTHING_MERGED in syncer.driver.stop_reason
        )  # ``settle`` looks at it
        unmerged = unmerged or is_of_a_lost_region(ev.SetPhase(core.phase, core.phase_message))
        assert outcome in fine or unmerged, syncer.driver.stop_reason
        life.stopping = True
        await self.stop_servers(life)
        if outcome == RESTART:
            self.min_epoch = syncer.min_epoch
        await syncer.close(checkpoint=outcome in (SyncerExit.OK, SyncerExit.FAILED))
        await life.loop.finish_threads()
        return outcome

    def begin_shards(self, life: Life, syncer: Syncer) -> None:
        """Here the syncer has all fragments itself."""

    def register(self, life: Life, syncer: Syncer) -> None:
        """Let the world be the syncer's servers."""
        for kind in TOLD:
            syncer.driver.on_with(kind, lambda: self.capture(syncer.core), lambda a, known: self.tell(life, a, known))
        syncer.driver.on(ev.SetPhase, lambda action: self.set_phase(life, action))
        taker: Any = syncer.pushes if syncer.shards is None else syncer.shards
        emit = taker.emit

        def judge(event: ev.Event) -> None:
            sought = isinstance(event, ev.PushReceived) and syncer.core.is_recovering
            assert not sought, f"a push is taken while a lost version is sought: {event}"
            emit(event)

        taker.emit = judge

    async def stop_servers(self, life: Life) -> None:
        self.end_sessions(life)

    def open_store(self) -> Store:
        """The store, as the thread that asks has it."""
        setup = self.setup
        faults = setup.faults * setup.chaos
        return MemoryStore(
            self.objects,
            self.random,
            setup.store_seconds,
            faults,
            out=self.out,
            on_change=self.oracle.read_object,
            interrupt=self.interrupt,
        )

    def load(self) -> tuple[Checkpoints, Restored, Tape]:
        store = self.open_store()
        checkpoints = Checkpoints(
            store,
            Epoch.claim(store, b"", self.min_epoch),
            "shell",
            keep=1,
            forget_arrays=self.job.spec.syncer.shards > 1,
        )
        self.identify(checkpoints)
        restored = checkpoints.load()
        tape = Tape(store)
        complete_tape(tape, checkpoints, restored)
        assert self.oracle.losses or not (restored.problems or tape.damage), (restored.problems, tape.damage)
        return checkpoints, restored, tape

    def interrupt(self, name: str) -> float:
        """A process may stand still within a write, after its check of the epoch, while another succeeds it."""
        there = self.now < CALM and self.newest is self.lives[-1] and self.newest.serving
        share = self.setup.interrupts if name.startswith("records/") else self.setup.interrupts / 10
        if not there or self.changes.random() >= share:
            return 0.0
        seconds = self.changes.uniform(1.0, 4.0)
        self.seen["interrupts"] += 1
        self.at(0.0, lambda: self.take_over(seconds))
        return seconds

    def identify(self, checkpoints: Checkpoints) -> None:
        """As startup.py does, where it matters whose store it is."""

    def phase_of(self, life: Life) -> JobPhase:
        assert life.syncer is not None
        return life.syncer.core.phase

    def end_sessions(self, life: Life) -> None:
        for connection, learner in list(self.connections.items()):
            if self.life_of[connection] is life:
                del self.connections[connection]
                self.at(self.random.uniform(0.1, 1.0), lambda c=connection, one=learner: self.reconnect(one, c))

    def end_life_of(self, life: Life, restart: bool) -> None:
        """This process is gone, and so are its sessions."""
        life.loop.kill()
        self.end_sessions(life)
        if restart:
            self.at(self.random.uniform(0.1, 3.0), self.start_syncer)

    def up(self) -> bool:
        return self.newest is not None and self.newest.serving

    # ------------------------------------------------------------ what happens to syncers and stores

    def trouble(self) -> None:
        self.at(1.0, self.trouble)
        setup, newest = self.setup, self.lives[-1]
        if setup.clocks and self.changes.random() < 0.05:
            newest.loop.ahead = self.set_clock()
        if setup.losses:
            self.copies = [*self.copies, dict(self.objects)][-COPIES:]
        if self.suspended and newest.serving:
            self.handle(ev.EndRequested(JobPhase.SUSPENDED, "suspended"))  # until it is
        if self.core.phase in ENDED_PHASES or self.now > CALM:
            return
        if setup.faults and self.chance(0.1):
            self.seen["outages"] += 1
            self.out[:] = self.now, self.now + self.random.uniform(0.2, 3.0)
        if newest.loop.alive and self.chance(0.03 * setup.crashes):
            self.crash(newest)
        elif newest.serving and self.chance(0.05 * setup.doubles):
            self.take_over(self.random.choice([0.0, 3.0, 3.0]) * self.random.random())
        elif newest.serving and self.chance(0.04 * setup.hand_overs):
            self.seen["hand-overs"] += 1
            assert newest.syncer is not None
            newest.syncer.driver.stop(SyncerExit.OK, "signal SIGTERM")
        elif self.core.phase is JobPhase.TRAINING and self.chance(0.04 * setup.suspends):
            self.suspended = True

    def crash(self, life: Life) -> None:
        if life.loop.alive:
            self.seen["crashes"] += 1
            self.end_life_of(life, restart=life is self.lives[-1])
            alone = not any(one.loop.alive for one in self.lives)
            once = self.core.initialised and not self.seen["damages"]
            if alone and once and self.changes.random() < self.setup.damages:
                self.damage_object()
            if alone and self.copies and self.random.random() < self.setup.losses:
                self.lose_content(whole=self.random.random() >= self.setup.torn)

    def damage_object(self) -> None:
        """One object is gone, cut or changed. That costs no version but its own, and only where that is the newest."""
        folders = sorted({name.partition("/")[0] for name in self.objects} - {"epochs", "discarded"})
        folder = self.changes.choice([*folders, *["state"] * len(folders)])  # half of the time a state
        names = sorted(name for name in self.objects if name.partition("/")[0] == folder)
        name = self.changes.choice(names) if self.changes.random() < 0.5 else names[-1]
        data, place = self.objects[name], self.changes.randrange(len(self.objects[name]))
        now = {other: content for other, content in self.objects.items() if other != name}
        changed = [data[:place], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]]
        hit = parse_record_name(name)
        fate = self.changes.choice([None, *changed])
        if hit is not None and fate is not None and is_whole(fate, name):
            fate = None  # that was padding
        now |= {} if fate is None else {name: fate}
        self.seen["damages"] += 1
        self.seen[f"damaged {folder}"] += 1
        self.note(f"{name} is {'gone' if fate is None else 'damaged'}")
        self.expected = dict(enumerate(records_of(self.objects, self.setup.fragments)))
        if hit is not None and hit[1] == self.expected[hit[0]]:
            self.expected[hit[0]] -= 1
        self.oracle.go_back(self.objects, now)
        self.objects.clear()
        self.objects.update(now)

    def take_over(self, stall: float) -> None:
        """A second syncer starts beside the newest, which goes on; its threads do nothing for ``stall`` seconds. The
        learners come over one by one."""
        before = self.lives[-1]
        self.seen["doubles"] += 1
        before.loop.stalled_until = self.now + stall
        self.start_syncer()
        for connection, learner in [(c, one) for c, one in self.connections.items() if self.life_of[c] is before]:
            after = self.random.uniform(stall, stall + 4.0)
            self.at(after, lambda one=learner, c=connection: self.reconnect(one, c))

    def remove_learners(self) -> None:
        """The job is suspended: its pods go, and when it is resumed there are others."""
        self.suspended = False
        for learner in list(self.learners):
            self.kill(learner)
        for place in self.config.places:
            self.at(self.random.uniform(0.5, 4.0), lambda place=place: self.respawn(place))

    def lose_content(self, whole: bool) -> None:
        """The store goes back to an earlier copy, as a whole; or what was written since is gone or torn here and there,
        and what was removed is there again."""
        kept = self.random.randrange(len(self.copies))
        now = dict(self.copies[kept])
        if not whole and "initial.json" in now:
            for name in sorted(self.objects.keys() | now.keys()):
                data, fate = self.objects.get(name), self.random.random()
                if name.startswith("epochs/") or fate < 0.6 or data == now.get(name):
                    now.pop(name, None)
                    now |= {} if data is None else {name: data}
                elif fate < 0.7 and data:
                    content = data.rstrip(b"\0")  # what is cut off in its padding is whole
                    now[name] = content[: self.random.randrange(len(content))]
        if self.random.random() < self.setup.wipes:
            self.seen["wipes"] += 1
            now, kept = {}, -1
        self.seen["losses"] += now != self.objects
        del self.copies[kept + 1 :]
        self.oracle.go_back(self.objects, now)
        self.objects.clear()
        self.objects.update(now)
        self.respawn_left()
        if not now:
            self.replace_seated()

    # ------------------------------------------------------------ what a syncer hears and says

    def durable_states(self) -> list[dict[str, Any]]:
        found = []
        for name in [name for name in self.objects if name.startswith("state/")]:
            with contextlib.suppress(Damaged):
                found.append(unpack_document(self.objects[name], name)["core"]["core"])
        return found

    def take_seat(self, seat: Seat, process: str) -> None:
        self.oracle.take_seat(seat, process)

    def handle(self, event: ev.Event) -> None:
        connection = getattr(event, "connection", None)
        if connection is not None and connection not in self.connections and not isinstance(event, ev.ConnectionLost):
            return  # said into a session that is over
        life = self.life_of[connection] if connection is not None else self.newest
        if life is not None and life.serving:
            assert life.syncer is not None
            self.note(event)
            try:
                life.syncer.driver.handle(event)
            except ev.BadMessage as error:
                # Everybody here is honest: only of what the store has lost somebody may have known more.
                assert connection is not None and self.oracle.losses, error
                self.seen["not believed"] += 1
                learner = self.connections[connection]
                self.hear_break(connection)
                self.at(0.1, lambda: self.reconnect(learner, connection))

    def change_job(self) -> None:
        before = self.seen["edits"]
        super().change_job()
        if self.seen["edits"] > before:
            rate = self.changes.choice([0.5, 0.7, 1.0])
            self.job = parse_job(JOB.format(rate=rate))

    def start_again(self) -> None:
        """Its next syncer starts when this one has ended."""

    def crashes_at(self, action: ev.Action) -> bool:
        if self.now < CALM and super().crashes_at(action):
            assert self.acting is not None
            self.at(0.0, lambda life=self.acting: self.crash(life))
        return False

    def capture(self, core: Core) -> Known:
        receipts = [core.receipt(p) for p in range(len(core.versions))]
        return Known(list(core.versions), receipts, core.newest_settled_epoch, core.trained_tokens)

    def set_phase(self, life: Life, action: ev.SetPhase) -> None:
        assert life.syncer is not None
        self.tell(life, action, Known())
        life.syncer._set_phase(action)

    def hear_break(self, connection: int) -> None:
        """The syncer's end of a session is closed."""
        if self.connections.pop(connection, None) is not None:
            self.handle(ev.ConnectionLost(connection))

    def tell(self, life: Life, action: ev.Action, known: Known) -> None:
        connection = getattr(action, "connection", None)
        if connection is not None:
            learner = self.connections.get(connection)
            if learner is None or learner.connection != connection:
                return  # the session is over, at one end at least
        assert life.syncer is not None
        before = self.core, self.acting, self.known, self.epoch
        self.core, self.acting, self.known, self.epoch = life.syncer.core, life, known, life.epoch
        self.note(action)
        try:
            self.check()
            if isinstance(action, ev.Admit):
                self.welcomed.add(action.connection)
            self.do(action)
            self.crashes_at(action)
        except Exception as error:
            self.failures.append(error)
            raise
        finally:
            self.core, self.acting, self.known, self.epoch = before
        if self.core.phase not in ENDED_PHASES and self.now < CALM and self.chance(0.0004 * self.setup.crashes):
            self.at(0.0, lambda: self.crash(life))


def settle_shell(world: SyncerProcesses) -> dict[str, int]:
    """As ``settle``; every offer that was acknowledged has been merged; tape and report tell of the end. Or an emptied
    store lacks what only dead learners held: the job says so, and does not go on without it."""
    told = world.core.phase_message
    lacks = world.setup.forged or "no learner here holds" in told or not any(map(world.held_by, world.learners))
    gone_back = world.setup.wipes or world.setup.losses
    if gone_back and lacks and world.core.phase in (JobPhase.WAITING, JobPhase.DRAINING):
        assert any(words in told for words in ("the store has lost data", "no learner here", "only an evaluator")), told
        world.check()
        return {}
    totals = settle(world)
    state = world.core.state(world.now)["job"]["leases"]
    waiting = world.core._aggregator.accepted_headers() if max(world.quorums) > 1 else ()
    world.oracle.check_end(LeaseBook.from_json(world.config.seed, state), waiting)
    store = world.open_store()
    wrong = [check for check in audit_store(store, "shell").checks if check.wrong]
    # A store that loses objects loses lines of its tape, which the audit tells; everything else holds.
    lost = world.oracle.losses or world.setup.damages
    known = {CHAIN, VERSIONS, RECORDS}  # also of a record, not the newest, in which a bit has turned
    assert not wrong or (lost and {check.name for check in wrong} <= known), wrong
    tape = Tape(store)
    assert tape.newest == {p: v for p, v in enumerate(world.core.versions) if v}, (tape.newest, world.core.versions)
    report = read_document(Report, world.objects[REPORT])
    assert report.outcome == world.core.phase.value and world.core.ledger is not None
    # By fragment: who was given up may come back and say more, and then the totals round otherwise.
    merged, newest = ([row.merged for row in rows] for rows in (report.ledger or (), world.core.ledger.rows()))
    assert merged == newest, (report.ledger, newest)
    assert report.tokens.trained <= totals["trained"], (report.tokens, totals)
    complete = world.core.phase is JobPhase.COMPLETE
    assert (report.final_loss is not None) == (world.setup.evaluated and complete)
    return totals
