"""The syncer's core and the learner's adoption rule against each other, in virtual time.

Not a test: what tests/unit/syncer/core/test_simulation.py runs.

Both are the real code. What is simulated is everything between them: a network
that delays, loses and repeats, processes that die, freeze and come back, a syncer
that crashes between any two actions and restarts from what was durable.

The oracle does not share their arithmetic. A step of a process is a unique id; a
fragment's parameters are the *set* of the ids that went into them; a push carries
a set. So "no step is merged twice" is "the sets of one merge, and the set that it
is merged into, are disjoint", and every ledger column can be counted by hand.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase, PushRefusal
from diloco_protocol.wire.records import Announcement, Held, Payload, PushHeader, Receipt, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.clock import LONGEST_DOWN
from diloco_syncer.core.books.ledger import PushId, header_from_json, header_to_json
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.recovery.lost_versions import STAND_IN
from ledger_balance import imbalances
from syncer_simulation.job_changes import MEAN_STEP_SECONDS, MEAN_TOKENS, change_config, draw_norm, is_of_a_lost_region
from syncer_simulation.learners import Ids, Learner, Setup


@dataclass
class Record:
    """What the store keeps of one version."""

    made: int  # epoch
    ids: Ids
    headers: list[str]
    epoch: int  # that of the syncer that wrote it
    taken: tuple[int, Receipt] | None = None  # from a learner: the epoch in which it held it, its receipt

    def read(self) -> list[PushHeader]:
        return [header_from_json(json.loads(header)) for header in self.headers]


class World:
    """Virtual time, one syncer at a time, some processes."""

    layout_digest = "L"
    knows_all_offers = True  # at the end

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.removals = random.Random(setup.seed)  # apart, so that what is recorded of a seed stays
        self.changes = random.Random(setup.seed)  # of the job, its clocks and regions; apart too
        self.now = 0.0
        self.queue: list[tuple[float, int, object]] = []
        self.order = count()
        self.connections: dict[int, Learner] = {}
        self.numbers = count(1)
        self.learners: list[Learner] = []
        self.everyone: list[Learner] = []
        # What is durable.
        self.records: dict[tuple[int, int], Record] = {}
        self.state: str | None = None
        self.older: list[tuple[str, list[int], dict]] = []  # states written, with versions and spool
        self.first: list[tuple[str, int]] = []  # states written before version 0, with their epochs
        self.behind = False
        self.spool: dict[PushId, tuple[str, Ids]] = {}
        self.epoch = 0
        # What the present syncer holds in memory.
        self.life = 0
        self.payload: dict[int, Ids] = {}
        self.offer_of: dict[int, PushId] = {}  # by handle
        self.down_until = 0.0
        self.tokens_of: dict[tuple[str, int], int] = {}
        self.offered: dict[PushId, tuple[int, Ids]] = {}  # what was taken: fragment, steps
        self.seen: Counter[str] = Counter()
        self.events = 0  # how many calls there were
        self.trace: list[str] | None = None  # what was said to the syncers and by them; None: it is not written down
        self.refused: Counter[str] = Counter()
        # What was alive: see liveness().
        self.well_steps: Counter[int] = Counter()  # of each slot, made while K learners could take part
        self.steps_at: list[tuple[float, tuple[str, int]]] = []  # when which of these steps was made
        self.at_the_end: tuple[float, list[Ids]] | None = None  # when the drain began, and what was merged by then
        self.seats: dict[tuple[int, int], str] = {}  # slot and incarnation: the process that was told so
        self.bases: dict[PushId, Ids] = {}  # what was in the version that a push is based on
        self.on_their_way: Counter[PushId] = Counter()  # of pushes, that are on their way
        self.sizes: dict[PushId, tuple[float, float]] = {}  # of pushes: norm, and growth
        self.ahead = self.lowest = 0.0  # the wall clock of the syncer's machine; and the least that it ever was
        self.jumped = 0.0  # seconds that such clocks may have made of none
        self.going_on = False  # the job has ended, and is started again
        self.quorums = {setup.quorum}
        self.merging: set[int] = set()  # rounds, after the last event
        limits = {
            "steps": setup.steps,
            "tokens": MEAN_TOKENS * setup.steps * setup.slots,
            "seconds": MEAN_STEP_SECONDS * setup.steps,
        }
        first = -(-setup.slots // setup.regions)  # slots of the first region
        self.config = CoreConfig(
            places=tuple(("r", i) if i < first else ("s", i - first) for i in range(setup.slots)),
            rules=RoundRules(setup.every, setup.overlap, setup.quorum, 0.9, grace_cap=2.0, pull_seconds=0.3),
            encoding="float32",
            max_versions=setup.max_versions,
            heartbeat_timeout=3.0,
            stop=(setup.stop, limits[setup.stop]),  # type: ignore[arg-type]
            norm_gate=setup.norm_gate,
            on_region_lost=setup.on_region_lost,  # type: ignore[arg-type]
            region_lost_seconds=4.0,
            seed=setup.seed,
            drain_seconds=30.0,
            rebuild_seconds=6.0,
            open_places={"r": setup.visitors} if setup.visitors else {},
        )
        self.start_syncer()
        for place in (*self.config.places, *(("r", first + i) for i in range(setup.spares))):
            self.spawn(place)
        if setup.regions > 1:
            self.at(self.changes.uniform(3.0, 8.0), self.lose_region)
        for i in range(setup.visitors):
            self.at(self.random.uniform(0.0, 3.0), lambda i=i: self.visit(("r", 100 + i)))

    # ------------------------------------------------------------ time

    def at(self, delay: float, call: object) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), call))

    def delay(self, longest: float) -> float:
        return self.random.uniform(0.0, longest) * self.setup.latency

    def chance(self, p: float) -> bool:
        return self.random.random() < p * self.setup.chaos

    def run(self, limit: float = 3000.0) -> None:
        while not self.is_over() and self.now < limit:
            self.now, _, call = heapq.heappop(self.queue)
            self.events += 1
            call()  # type: ignore[operator]
        # Whatever was on its way when the job ended is nobody's business any more.

    def is_over(self) -> bool:
        return self.core.phase in ENDED_PHASES and not self.going_on

    def wall(self) -> float:
        """The wall clock of the machine that the present syncer is on."""
        return self.now + self.ahead

    def set_clock(self) -> float:
        """The next syncer's machine is another one, or the present one's clock is set. Some are wrong by days."""
        if self.setup.clocks:
            most = self.setup.clocks * self.changes.choice([0.00001, 0.001, 1.0])
            self.ahead = self.changes.uniform(-most, most)
            self.jumped += min(LONGEST_DOWN, max(0.0, self.ahead - self.lowest))
            self.lowest = min(self.lowest, self.ahead)
        return self.ahead

    def change_job(self) -> None:
        """People have edited the job while no syncer ran."""
        if self.core.initialised and self.changes.random() < self.setup.edits:
            self.seen["edits"] += 1
            self.config = change_config(self.config, self.changes)
            self.quorums.add(self.config.rules.quorum)
            self.respawn_left()  # the job may not be as near to its end any more

    def note(self, said: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f} epoch {self.epoch}: {said}")

    # ------------------------------------------------------------ syncer

    def start_syncer(self) -> None:
        self.epoch += 1
        self.life += 1
        if self.state is not None and self.core.initialised and self.random.random() < self.setup.scales:
            self.rescale()
        again, self.going_on = self.going_on, False
        if self.state is not None and not again:
            self.change_job()
        state = None if self.state is None else json.loads(self.state)
        self.set_clock()
        self.core = Core(self.config, state, self.epoch, self.now, wall=self.wall())
        before = 0.0 if state is None else state["job"]["clock"]["elapsed"]
        assert self.elapsed() >= before, "the job's time goes back"
        self.payload, self.offer_of = {}, {}
        if self.records and not self.core.initialised:
            self.core.handle(ev.InitialModelStored("L", (10,) * self.setup.fragments), self.now)
        if self.core.initialised:
            begun = list(self.core.versions)
            newer = [(p, v, r) for (p, v), r in sorted(self.records.items()) if v > begun[p]]
            headers = [h for _, _, record in newer for h in record.read()]
            offers = [header_from_json(json.loads(text)) for text, _ in self.spool.values()]
            self.core.close_superseded_tenures(headers + offers, [r.taken[1] for _, _, r in newer if r.taken])
            for p, v, record in newer:
                if record.taken:
                    self.core.apply_recovered_version(p, v, *record.taken, record.epoch)
                else:
                    self.core.apply_record(p, v, record.read(), record.epoch)
            for push_id, (text, ids) in list(self.spool.items()):
                handle = next(self.numbers)
                if self.core.restore_offer(header_from_json(json.loads(text)), handle, 1.0):
                    self.payload[handle], self.offer_of[handle] = ids, push_id
                else:
                    del self.spool[push_id]
        made = [self.records[p, v].made for p, v in enumerate(self.core.versions)]
        actions = self.core.start(self.now, made, self.behind)
        self.behind = False
        if again and self.core.phase is JobPhase.COMPLETE:
            self.check_stop()
        self.check()
        self.act(actions)
        self.tick(self.life)

    def tick(self, life: int) -> None:
        if life == self.life and self.now >= self.down_until:
            self.handle(ev.Tick())
            self.at(max(0.01, min(1.0, self.core.wake_at - self.now)), lambda: self.tick(life))

    def rescale(self) -> None:
        """The job has other learners from now on: some are removed (by a drain, or killed), some are new."""
        self.seen["scalings"] += 1
        while True:
            places = [(name, i) for name in ("r", "s") for i in range(self.random.randint(0, 4))]
            if len(places) >= self.setup.quorum:
                break
        rules = replace(self.config.rules)
        open_places = {"r": self.setup.visitors} if self.setup.visitors and ("r", 0) in places else {}
        self.config = replace(self.config, places=tuple(places), rules=rules, open_places=open_places)
        for learner in list(self.learners):
            if learner.place not in places:
                self.at(self.random.uniform(0.0, 5.0), lambda learner=learner: self.remove(learner))
        for place in places:
            self.at(self.random.uniform(0.0, 3.0), lambda place=place: self.respawn(place))

    def visit(self, place: tuple[str, int]) -> None:
        """Somebody comes beyond the places, goes after a while, and comes again as another process."""
        visitor = self.spawn(place)
        self.seen["visits"] += 1
        self.at(self.random.uniform(1.0, 6.0), lambda: self.remove(visitor))
        self.at(self.random.uniform(6.0, 9.0), lambda: self.visit(place))

    def lose_region(self) -> None:
        """A whole region goes, and comes back as other processes; perhaps it is missed in between."""
        self.at(self.changes.uniform(10.0, 20.0), self.lose_region)
        if self.core.phase is not JobPhase.TRAINING:
            return
        self.seen["regions gone"] += 1
        away = self.changes.uniform(1.0, 12.0)
        for learner in [one for one in self.learners if one.place[0] == "s" and not one.left]:
            self.kill(learner)
            self.at(away, lambda learner=learner: self.respawn(learner.place))

    def goes_on(self, action: ev.SetPhase) -> bool:
        """Whether people start the job again that has ended so: one that a lost region ended, or, once, one that is
        complete, with a higher stop."""
        if is_of_a_lost_region(action):
            self.seen["ends by a lost region"] += 1
            return True
        if (
            action.phase is not JobPhase.COMPLETE
            or self.seen["extensions"]
            or self.changes.random() >= self.setup.edits
        ):
            return False
        self.seen["extensions"] += 1
        kind, limit = self.config.stop
        self.config = replace(self.config, stop=(kind, 1.5 * limit))
        return True

    def remove(self, learner: Learner) -> None:
        if learner not in self.learners or learner.place in self.config.places:
            return
        if self.random.random() < 0.7 and learner.seat is not None and learner.adoption.complete:
            learner.draining = True
            self.seen["removed by draining"] += 1
            if learner.connection is not None:
                self.handle(ev.DrainRequested(learner.connection))
            return
        self.seen["removed by force"] += 1
        self.kill(learner)

    def kill(self, learner: Learner) -> None:
        learner.alive = False
        self.learners.remove(learner)
        self.break_connection(learner)
        if self.random.random() < 0.5:
            self.handle(ev.ProcessEnded(*learner.place, learner.process, "killed"))

    def break_connection(self, learner: Learner) -> bool:
        """The session ends, and both ends know it; whether there was one."""
        connection, learner.connection = learner.connection, None
        if connection is not None:
            self.connections.pop(connection, None)
            self.handle(ev.ConnectionLost(connection))
        return connection is not None

    def respawn(self, place: tuple[str, int]) -> None:
        """A process for this place, if it is one and has none."""
        if place in self.config.places and not any(one.place == place for one in self.learners):
            self.spawn(place)

    def lose(self) -> None:
        """The store goes back: to an older state, and of each fragment to some record since."""
        kept = self.random.randrange(max(0, len(self.older) - 40), len(self.older))
        del self.older[kept + 1 :]
        state, versions, spool = self.older[-1]
        lost = 0
        for p, begun in enumerate(versions):
            there = sorted(v for q, v in self.records if q == p and v >= begun)
            left = len(there) if self.random.random() < 0.3 else self.random.randint(1, len(there))
            for v in there[left:]:
                lost += 1
                del self.records[p, v]
        self.state = state
        if self.random.random() < 0.5:
            self.spool = dict(spool)
        self.behind = lost > 0 and self.random.random() < 0.5
        self.seen["losses"] += lost > 0
        self.offered.clear()
        self.seats.clear()
        self.respawn_left()

    def respawn_left(self) -> None:
        """The store has forgotten that some have left."""
        for learner in [learner for learner in self.learners if learner.left]:
            self.learners.remove(learner)  # the job had let it go, and wants a learner there again
            self.at(1.0, lambda learner=learner: self.respawn(learner.place))

    def wipe(self) -> None:
        """The store is empty, or a copy from before version 0: only learners have something."""
        self.seen["wipes"] += 1
        self.records.clear()
        self.spool.clear()
        self.offered.clear()
        self.older.clear()
        self.seats.clear()
        self.state, self.epoch = self.random.choice([(None, 0), *self.first[-1:]])
        self.seen["copies from before version 0"] += self.state is not None
        self.behind = False
        self.respawn_left()
        self.replace_seated()

    def replace_seated(self) -> None:
        """With the store went, perhaps, all that had slots; who stands by is left."""
        if not self.setup.replaced or self.random.random() >= self.setup.replaced:
            return
        self.seen["replacements"] += 1
        for learner in self.seated_learners():
            self.kill(learner)
            self.respawn(learner.place)

    def seated_learners(self) -> list[Learner]:
        return [learner for learner in self.learners if learner.seat is not None]

    def crash_syncer(self) -> None:
        self.seen["crashes"] += 1
        self.life += 1
        self.down_until = self.now + self.random.uniform(0.1, 4.0)
        if self.older and self.random.random() < self.setup.losses:
            self.lose()
        if self.setup.wipes and self.random.random() < self.setup.wipes:
            self.wipe()
        self.end_life()

    def end_life(self) -> None:
        for learner in self.connections.values():
            learner.connection = None
            self.at(self.random.uniform(0.1, 1.0), lambda learner=learner: self.connect(learner))
        self.connections.clear()
        self.at(self.down_until - self.now, self.start_syncer)

    def up(self) -> bool:
        return self.now >= self.down_until

    def handle(self, event: ev.Event) -> None:
        if self.up():
            self.note(event)
            self.act(self.hear(event))

    def hear(self, event: ev.Event) -> list[ev.Action]:
        """Tell the core of an event; returns what it does. No merge begins while a region is missed."""
        actions = self.core.handle(event, self.now)
        self.check_regions()
        merging = {opened.id for opened in self.core.open_rounds.values() if opened.merging}
        if self.core.phase is JobPhase.HOLDING and self.core._state.members.lost_regions:
            assert self.core.config.on_region_lost == "Continue" or merging <= self.merging, "a merge while it holds"
        self.merging = merging
        return actions

    def act(self, actions: list[ev.Action]) -> None:
        life = self.life
        for action in actions:
            if life != self.life:
                return  # crashed between two actions
            self.note(action)
            self.do(action)
            if self.crashes_at(action):
                self.crash_syncer()
                return
            if (
                self.core.initialised
                and self.core.phase not in ENDED_PHASES
                and self.chance(0.0004 * self.setup.crashes)
            ):
                self.crash_syncer()

    def crashes_at(self, action: ev.Action) -> bool:
        """Whether the syncer crashes right after it has told this; half of the time who was told dies too."""
        if not isinstance(action, ev.Admit | ev.Promote | ev.GrantLease):
            return False
        if self.changes.random() >= self.setup.told_crashes or not self.core.initialised or self.is_over():
            return False
        learner = self.connections.get(action.connection)
        if learner in self.learners and self.changes.random() < 0.5:
            assert learner is not None
            self.at(0.0, lambda: learner in self.learners and self.kill(learner))
            self.at(self.changes.uniform(0.1, 2.0), lambda: self.respawn(learner.place))
        self.seen["crashes at a word"] += 1
        return True

    def do(self, action: ev.Action) -> None:
        match action:
            case ev.Persist():
                if self.changes.random() < 0.05:
                    self.set_clock()
                self.state = json.dumps(self.core.state(self.now, self.wall()))
                if self.core.initialised:
                    self.older.append((self.state, list(self.core.versions), dict(self.spool)))
                else:
                    self.first.append((self.state, self.epoch))
            case ev.Admit():
                learner = self.connections[action.connection]
                if action.initialise:
                    seconds = self.random.uniform(0.1, 4.0) if self.setup.replaced else 0.1
                    self.at(seconds, lambda c=action.connection: self.initialise(c))
                learner.withheld = set(action.withheld)
                self.seated(learner, action.seat, action.merged)
            case ev.RequestVersion():
                self.at(self.delay(0.5), lambda: self.give_base(action))
            case ev.RestartFromStore():
                assert action.above == 0 or self.setup.wipes
                self.epoch = max(self.epoch, action.above)
                self.seen["recoveries"] += not action.above
                self.life += 1
                self.down_until = self.now + 0.1
                self.end_life()
            case ev.Promote():
                self.seated(self.connections[action.connection], action.seat, ())  # a Promotion tells of no merge
            case ev.RequestInitialModel():
                learner = self.connections.pop(action.connection, None)
                if learner is not None:
                    learner.connection = None
                    self.at(0.01, lambda: self.handle(ev.ConnectionLost(action.connection)))
                    self.at(0.2, lambda: self.connect(learner))
            case ev.Refuse():
                learner = self.connections.pop(action.connection, None)
                if learner is not None:
                    learner.connection = None
                    if not action.fatal:
                        self.at(0.2, lambda: self.connect(learner))
                    else:
                        learner.alive = False
                        if self.setup.wipes and learner in self.learners:  # as its supervisor would
                            self.learners.remove(learner)
                            self.at(1.0, lambda: self.respawn(learner.place))
            case ev.Pull():
                learner = self.connections.get(action.connection)
                if learner is None or self.swallows("pull") or self.chance(0.02):
                    return
                # As in the worker: a repetition while the answer is on its way, or there, asks for nothing new.
                if learner.pushed.get(action.fragment, (0, 0))[0] != action.round:
                    learner.pulls[action.fragment] = action
            case ev.Merge():
                content = [self.payload[r.handle] for r in action.responders]
                life = self.life
                self.at(self.delay(0.3), lambda: self.merge(action, content, life))
            case ev.Announce():
                for connection, learner in self.told():
                    learner.withheld.discard(action.fragment)
                    self.announce(learner, action.fragment, action.merged.get(connection, ev.MergedPush()))
            case ev.ReleasePush():
                self.remove_offer(action.handle)
            case ev.AnswerPush() | ev.SetPhase() | ev.RecordEvent() | ev.GrantLease():
                self.seen["given up"] += isinstance(action, ev.RecordEvent) and "continuing from" in action.message
                self.seen["drained too late"] += isinstance(action, ev.RecordEvent) and "in time" in action.message
                if isinstance(action, ev.SetPhase) and action.phase is JobPhase.DRAINING:
                    self.mark_end()
                    for _, learner in self.told():
                        learner.draining = True
                if isinstance(action, ev.SetPhase) and action.phase in ENDED_PHASES and self.goes_on(action):
                    self.start_again()
            case _:
                raise AssertionError(action)

    def start_again(self) -> None:
        """The job has ended, and goes on."""
        self.going_on = True
        self.life += 1
        self.down_until = self.now + self.changes.uniform(0.5, 3.0)
        self.respawn_left()
        self.end_life()

    def told(self) -> list[tuple[int, Learner]]:
        """Whom the syncer reaches: connection and learner."""
        return list(self.connections.items())

    def merge(self, action: ev.Merge, content: list[Ids], life: int) -> None:
        """The runtime merges and writes the record; a crash before loses it, after keeps it."""
        if life != self.life:
            return
        durable = self.make_record(action, content)
        if self.chance(0.01 * self.setup.crashes):
            self.crash_syncer()
            return
        self.merge_values(action)
        self.handle(durable)
        if life == self.life:
            self.check()

    def make_record(self, action: ev.Merge, content: list[Ids]) -> ev.MergeDurable:
        """Write the record; returns what the core is to be told of it."""
        p, v, responders = action.fragment, action.version, list(action.responders)
        assert (p, v) not in self.records, "a version was made twice"
        before = self.records[p, v - 1].ids
        after = before
        assert abs(sum(r.weight for r in action.responders) - 1) < 1e-6
        left_out = []
        if len(responders) > self.config.rules.quorum and self.changes.random() < self.setup.diverged:
            left_out.append(responders.pop())  # the merge would have become infinite
            content = content[:-1]
            self.offered.pop(left_out[0].header.id, None)
            self.seen["left out"] += 1
        for ids in content:
            assert not ids & after, "a step was merged twice"
            after |= ids
        headers = [json.dumps(header_to_json(r.header)) for r in responders]
        norms = tuple(self.size_of(r.header)[0] for r in responders)
        self.records[p, v] = Record(self.epoch, after, headers, self.epoch)
        return ev.MergeDurable(p, v, 0.05, norms, left_out=tuple(r.handle for r in left_out))

    def merge_values(self, action: ev.Merge) -> None:
        """The version has parameters, in worlds that have some."""

    def remove_offer(self, handle: int) -> None:
        """An offer was merged or replaced. Its file goes a while later, and not at all if the syncer crashes before."""
        push_id = self.offer_of.pop(handle, None)
        life = self.life_of(push_id)

        def remove() -> None:
            if life == self.life_of(push_id) and push_id is not None:
                self.spool.pop(push_id, None)

        self.at(self.removals.uniform(0.0, 2.0), remove)

    def serves(self, fragment: int) -> bool:
        """Whether the process that has the fragment's bytes is there."""
        return True

    def life_of(self, push_id: PushId | None) -> tuple[int, int]:
        """Of the process that has the push's bytes."""
        return self.life, 0

    def swallows(self, kind: str) -> bool:
        return self.setup.swallowed == kind

    # ------------------------------------------------------------ what is alive

    def count_well_step(self, learner: Learner, step_id: tuple[str, int]) -> None:
        """Count a step that was made while the job could merge it."""
        if self.core.phase is not JobPhase.TRAINING or not self.up() or learner.connection is None:
            return
        there = [one for one in self.connections.values() if one.seat is not None and self.now >= one.frozen_until]
        if learner.seat is not None and len(there) >= self.setup.quorum:
            self.well_steps[learner.seat.slot] += 1
            self.steps_at.append((self.now, step_id))

    def mark_end(self) -> None:
        """The drain begins: from here on offers merge what rounds did not."""
        newest = [self.records[p, v].ids for p, v in enumerate(self.core.versions)]
        self.at_the_end = (self.now, newest)
        self.versions_at_the_end = list(self.core.versions)
        if "the stop is reached" in self.core.phase_message and not self.seen["losses"] + self.seen["wipes"]:
            self.check_stop()

    def check_stop(self) -> None:
        """The job ends for its stop, and the stop is reached."""
        kind, limit = self.core.config.stop
        assert self.core.ledger is not None
        reached = {
            "steps": max(slot.step for slot in self.core.slots),
            "tokens": self.core.ledger.total_trained(),
            "seconds": self.elapsed(),
        }[kind]
        assert reached >= limit, f"the stop is {limit} {kind}, and {reached} are reached"

    def elapsed(self) -> float:
        """The job's elapsed time, which wall clocks may have made longer."""
        elapsed = self.core._state.clock.elapsed(self.now)
        assert elapsed <= self.now + self.jumped + 0.001, f"{elapsed} s in {self.now} s, with {self.jumped} s of clocks"
        return elapsed

    def check_slots(self) -> None:
        """The region with open places has as many slots as it has places or learners, whichever are more."""
        regions = {region for region, _ in self.config.places}
        for region, most in self.config.open_places.items() if regions == {"r"} else ():
            slots = [slot for slot in self.core.slots if not slot.retired]
            held = sum(slot.occupied for slot in slots)
            places = len(self.config.places)
            assert len(slots) == max(places, held), (len(slots), places, held)
            assert held <= places + most
            others = [
                slot for slot in self.core.slots if slot.retired and slot.occupied and slot.holder.region == region
            ]
            assert not others or held >= places + most or self.setup.scales, "a learner without a place"

    def check_regions(self) -> None:
        """While a region is missed the job does what its policy says."""
        lost, policy = self.core._state.members.lost_regions, self.core.config.on_region_lost
        if lost and policy != "Continue":
            wrong = {JobPhase.TRAINING} if policy == "Hold" else {JobPhase.TRAINING, JobPhase.HOLDING}
            assert self.core.phase not in wrong, f"{lost} is lost, the policy is {policy}"

    def check(self) -> None:
        self.check_slots()
        self.check_regions()
        self.elapsed()
        if self.core.ledger is not None:
            assert imbalances(self.core.ledger) == []
            waiting = {header.id for header in self.core._aggregator.accepted_headers()}
            held = {push_id for book in self.core.ledger.books for cell in book.cells for push_id in cell.held}
            assert held <= waiting, f"the books wait for what is not there: {held - waiting}"
            for p in range(self.setup.fragments):
                newest = self.records[p, self.core.versions[p]]
                if newest.made == STAND_IN:
                    assert self.core.phase not in (JobPhase.TRAINING, JobPhase.COMPLETE), "gone on from a stand-in"
                    continue
                ids = newest.ids
                merged = sum(self.core.ledger.merged(s, p) for s in range(len(self.core.ledger.books)))
                assert merged == sum(self.tokens_of[i] for i in ids), "the merged column is not what was merged"

    # ------------------------------------------------------------ learners

    def spawn(self, place: tuple[str, int]) -> Learner:
        number = next(self.numbers)
        learner = Learner(f"p{number}", place, self.setup, self.random.uniform(0.05, 0.2))
        if self.changes.random() < self.setup.slow:
            learner.late = 8.0
        self.learners.append(learner)
        self.everyone.append(learner)
        self.at(self.random.uniform(0.0, 0.5), lambda: self.connect(learner))
        self.at(0.5, lambda: self.step(learner))
        return learner

    def connect(self, learner: Learner) -> None:
        if not learner.alive or learner.left or learner.connection is not None:
            return
        if not self.up() or self.now < learner.frozen_until:
            self.at(0.5, lambda: self.connect(learner))
            return
        connection = self.open_connection(learner)
        region, ordinal = learner.place
        self.handle(
            ev.Join(
                connection,
                learner.process,
                region,
                ordinal,
                evaluator=learner.evaluator,
                layout_digest=self.layout_digest,
                digests={},
                sequences=self.setup.sequences,
                held=self.held_by(learner),
                previous_incarnation=learner.seat.incarnation if learner.seat else 0,
                tenure=learner.tenure,
                slot=learner.tenure_slot,
            )
        )

    def open_connection(self, learner: Learner) -> int:
        learner.connection = next(self.numbers)
        self.connections[learner.connection] = learner
        return learner.connection

    def held_by(self, learner: Learner) -> tuple[Held, ...]:
        fragments = range(self.setup.fragments)
        if any(p not in learner.holdings for p in fragments):
            return ()
        return tuple(Held(*learner.holdings[p][:2], learner.holdings[p][4]) for p in fragments)

    def give_base(self, ask: ev.RequestVersion) -> None:
        """A learner was asked for what it holds; the runtime makes it durable."""
        learner, p = self.connections.get(ask.connection), ask.fragment
        if learner is None or not self.up() or self.chance(0.05):
            return  # no answer
        epoch, version, ids, rows, _ = learner.holdings[p]
        why = "not here" if (epoch, version) != (ask.epoch, ask.version) else ""
        if not why:
            why = self.core.check_version_upload(ask.connection, p, epoch, version, rows)
            assert "was not asked for" in why or not why, why
        if why or self.chance(self.setup.refusals):
            self.handle(ev.LostVersionFailed(ask.connection, p))
            return
        assert version > self.core.versions[p]
        assert (p, version) not in self.records
        self.records[p, version] = Record(epoch, ids, [], self.epoch, taken=(epoch, rows))
        self.seen["taken"] += 1
        for push_id in find_parted_offers({one: offered for one, (_, offered) in self.offered.items()}, p, ids):
            del self.offered[push_id]
        self.handle(ev.LostVersionStored(p))

    def take_seat(self, seat: Seat, process: str) -> None:
        owner = self.seats.setdefault((seat.slot, seat.incarnation), process)
        assert owner == process, f"{seat} was {owner}'s, and is {process}'s"

    def durable_states(self) -> list[dict[str, Any]]:
        """The core's documents of which a restart takes one."""
        return [json.loads(self.state or "")]

    def seated(self, learner: Learner, seat: Seat | None, merged: tuple[ev.MergedPush, ...]) -> None:
        if seat is None:
            learner.seat = None
            return
        self.take_seat(seat, learner.process)
        known = max(state["job"]["members"]["next_incarnation"] for state in self.durable_states())
        assert seat.incarnation < known, f"{learner.process} is told of {seat}, which is not durable"
        if self.setup.edits:  # each Welcome carries the settings
            config = self.core.config
            numbers = {"every": config.rules.every, "overlap": config.rules.overlap}
            learner.adoption.config = replace(learner.adoption.config, **numbers, max_versions=config.max_versions)
        if seat.continuing and learner.seat is not None:
            there = learner.tenure_slot
            assert seat.slot == there, f"{learner.process} continues in slot {seat.slot}, and its tenure is in {there}"
        else:
            if self.setup.crossings and learner.adoption.complete and learner.connection is not None:
                # The training thread says it while the client's hears of the seat.
                late, connection = ev.Reported(learner.connection, learner.report()), learner.connection
                self.seen["late reports"] += 1
                self.at(self.delay(0.1), lambda: connection in self.connections and self.handle(late))
            learner.begin(seat.slot_step, seat.tenure)
            learner.tenure = seat.incarnation
            learner.tenure_slot = seat.slot
            learner.offered.clear()
            learner.unsettled.clear()
        # As the worker does when a session ends: a round's number may come again after a restart.
        learner.pulls.clear()
        learner.pushed.clear()
        learner.seat = seat
        learner.draining = learner.draining or self.core.phase is JobPhase.DRAINING
        learner.in_flight.clear()  # their answers are lost: offered again before anything is adopted
        for p in range(len(self.core.versions)):
            if p not in learner.withheld:
                self.announce(learner, p, merged[p] if merged else ev.MergedPush())

    def initialise(self, connection: int) -> None:
        if connection in self.connections and self.core.initialiser == connection:
            learner, origins = self.connections[connection], self.core.version_0_origins(connection)
            if self.end_mixture(learner):
                return
            for p in range(self.setup.fragments):
                # What stands in for a version holds its steps: the job must never go on from it.
                ids = learner.holdings[p][2] if origins else frozenset()
                self.records[p, 0] = Record(origins[p] if origins else self.epoch, ids, [], self.epoch)
            self.seen["rebuilds"] += bool(origins)
            self.handle(ev.InitialModelStored("L", (10,) * self.setup.fragments))

    def end_mixture(self, learner: Learner) -> bool:
        """As the worker does: who holds merged versions of some fragments only begins no job anew with them."""
        some = len(learner.holdings) < self.setup.fragments and any(held[1] for held in learner.holdings.values())
        if some and learner in self.learners:
            self.seen["mixtures"] += 1
            self.kill(learner)
            self.at(1.0, lambda: self.respawn(learner.place))
        return some

    def announce(self, learner: Learner, p: int, merged: ev.MergedPush) -> None:
        version = self.core.versions[p]
        epoch, ids, connection = self.epoch, self.records[p, version].ids, learner.connection
        news = Announcement(
            p,
            epoch,
            version,
            Payload("f", p, hash(ids)),
            merged_sequence=merged.sequence,
            merged_version=merged.version,
        )
        rows, settled = self.core.receipt(p), self.core.newest_settled_epoch

        def arrive() -> None:
            if not self.serves(p):
                self.at(0.5, arrive)
            elif learner.connection == connection:  # a broken session takes its downloads with it
                learner.news.append((news, ids))
                # Whatever this session tells of goes before what an earlier one did, as in the worker.
                if learner.held_since.get(p) != connection or learner.holdings[p][:2] <= (epoch, version):
                    learner.holdings[p] = (epoch, version, ids, rows, settled)
                    learner.held_since[p] = connection

        # The session is in order, downloads are not: newer news of a fragment may come first.
        if version == 0 or not self.swallows("announce"):
            self.at(self.delay(0.3) + self.changes.uniform(0.0, learner.late), arrive)

    def step(self, learner: Learner) -> None:
        if not learner.alive or learner.left:
            return
        self.at(learner.speed, lambda: self.step(learner))
        if self.now < learner.frozen_until or learner.seat is None:
            return
        learner.adopt()
        if not learner.adoption.complete:
            self.beat(learner)
            return
        if learner.draining and learner.connection is not None:
            self.drain(learner)
        elif self.core.phase not in ENDED_PHASES:
            if not learner.adoption.paused:
                self.train(learner)
            for pull in list(learner.pulls.values()):
                del learner.pulls[pull.fragment]
                self.push(learner, pull.fragment, pull.round)
        self.report(learner)
        self.mishap(learner)

    def train(self, learner: Learner) -> None:
        assert learner.seat is not None
        tokens = self.count_tokens(learner)
        learner.adoption.on_step(tokens, learner.speed)
        step_id = (f"{learner.process}/{learner.seat.incarnation}", learner.adoption.now.step)
        self.tokens_of[step_id] = tokens
        self.count_well_step(learner, step_id)
        learner.theta = [ids | {step_id} for ids in learner.theta]

    def count_tokens(self, learner: Learner) -> int:
        """The tokens of a step that this learner makes."""
        return self.random.choice([1, 7, 100])

    def report(self, learner: Learner) -> None:
        connection = learner.connection
        if connection is None or not learner.adoption.complete:
            return
        event = ev.Reported(connection, learner.report())
        for _ in range(2 if self.chance(0.1) else 1):
            if not self.swallows("report") and not self.chance(0.1):
                self.at(self.delay(0.2), lambda: connection in self.connections and self.handle(event))

    def beat(self, learner: Learner) -> None:
        """As in the worker: who has nothing to report sends an empty report, so that its slot is not lost meanwhile."""
        if learner.connection in self.connections and not self.swallows("report"):
            self.handle(ev.Reported(learner.connection, StepReport()))

    def push(self, learner: Learner, p: int, round: int) -> None:
        assert learner.seat is not None
        planned = learner.adoption.snapshot(p, round)
        if planned is None:
            return
        plan, given_up = planned
        for sequence in given_up:
            del learner.snapshots[p, sequence]
        learner.snapshots[p, plan.sequence] = learner.theta[p]
        ids = learner.theta[p] - learner.base[p]
        self.bases[learner.seat.slot, learner.seat.incarnation, p, plan.sequence] = learner.base[p]
        header = PushHeader(
            **asdict(plan),
            encoding="float32",
            layout_digest=self.layout_digest,
            report=learner.report(),
            slot=learner.seat.slot,
            incarnation=learner.seat.incarnation,
        )
        assert plan.tokens == sum(self.tokens_of[i] for i in ids)
        if round == 0:
            learner.offers[p] = (header, ids)
        else:
            answers = learner.pushed[p] = (round, plan.sequence)
            self.at(1.0, lambda: self.give_up_waiting(learner, p, answers))
        self.send(learner, header, ids)

    def give_up_waiting(self, learner: Learner, p: int, answers: tuple[int, int]) -> None:
        """As the worker's transfers do: a push that got no answer is no answer to its pull."""
        if learner.pushed.get(p) == answers and (p, answers[1]) not in learner.accepted:
            del learner.pushed[p]

    def send(self, learner: Learner, header: PushHeader, ids: Ids) -> None:
        """As in the worker: none without a session, and to the syncer of that session only."""
        if learner.connection is None:
            return
        life = self.life
        for _ in range(2 if self.chance(0.05) else 1):
            if not self.swallows("push") and not self.chance(0.05):
                self.on_their_way[header.id] += 1
                self.at(self.delay(0.4), lambda: self.arrive(learner, header, ids, life))

    def arrive(self, learner: Learner, header: PushHeader, ids: Ids, life: int) -> None:
        self.on_their_way[header.id] -= 1
        if not self.up() or life != self.life or self.core.is_recovering or not self.serves(header.fragment):
            return  # settling: told to try again later
        refused = self.core.check_push(header)
        if refused is None:
            handle = next(self.numbers)
            self.payload[handle] = ids
            if header.round == 0:  # spooled before it is accepted: durable before it is acknowledged
                self.spool[header.id] = (json.dumps(header_to_json(header)), ids)
                self.offer_of[handle] = header.id
            norm, growth = self.size_of(header)
            received = ev.PushReceived(header, norm, math.isfinite(norm), handle, growth=growth)
            actions = self.hear(received)
            verdict = next(a for a in actions if isinstance(a, ev.AnswerPush))
            if verdict.reason is None:  # what is restored of the store may have outlived its base
                assert math.isfinite(norm)
                there = self.records[header.fragment, self.core.versions[header.fragment]].ids
                assert self.bases[header.id] <= there, f"{header}: the store does not have its base"
            if verdict.reason is not None:
                self.spool.pop(self.offer_of.pop(handle, header.id), None)
                refused = (verdict.reason, verdict.message)
            elif header.round == 0:
                self.offered[header.id] = header.fragment, ids
            self.act(actions)
        if refused is not None:
            self.refused[refused[0].value] += 1
            if refused[0] is PushRefusal.OTHER_EPOCH:
                base = self.records.get((header.fragment, header.base_version))
                known = base is not None and base.epoch <= header.epoch and base.ids == self.bases[header.id]
                assert not known, f"{header}: the store has its base"
        if self.swallows("answer") or self.chance(0.1):
            return  # the answer is lost
        if refused is not None and self.on_their_way[header.id]:
            return  # a push is sent again where nothing was heard of it: the last answer counts
        self.answer(learner, header, refused)

    def size_of(self, header: PushHeader) -> tuple[float, float]:
        """The norm of a push, and how large it is beside the parameters."""
        if not self.setup.diverged:
            return 1.0, 0.0
        drawn = draw_norm(header.steps, self.setup.diverged, self.changes)
        return self.sizes.setdefault(header.id, drawn)

    def answer(self, learner: Learner, header: PushHeader, refused: tuple[PushRefusal, str] | None) -> None:
        if not learner.alive or learner.seat is None or header.incarnation != learner.seat.incarnation:
            return
        p = header.fragment
        learner.in_flight.discard(p)
        final = refused is not None and refused[0] is not PushRefusal.REPEATED
        if refused is None:
            learner.accepted.add((p, header.sequence))
        elif final and learner.pushed.get(p, (0, 0))[1] == header.sequence:
            del learner.pushed[p]
        for sequence in learner.adoption.on_push_answer(p, header.sequence, final):
            learner.snapshots.pop((p, sequence), None)  # its values may be given up
        if header.round == 0:
            (learner.unsettled.discard if final else learner.offered.add)(p)

    def drain(self, learner: Learner) -> None:
        """Offer everything, then leave; what has no answer is offered again."""
        for p in learner.adoption.drain_order():
            if p in learner.offered:
                continue
            if p in learner.unsettled and (
                p not in learner.in_flight or self.random.random() < 0.05 or self.now > learner.repeat_at[p]
            ):
                learner.in_flight.add(p)  # the answer may be lost: the very same offer once more
                learner.repeat_at[p] = self.now + 3.0
                header, ids = learner.offers[p]
                assert learner.seat is not None
                again = replace(header, incarnation=learner.seat.incarnation)
                self.bases[again.id] = self.bases[header.id]
                self.send(learner, again, ids)
            elif p not in learner.unsettled:
                learner.in_flight.add(p)
                learner.unsettled.add(p)
                learner.repeat_at[p] = self.now + 3.0
                self.push(learner, p, 0)
        if all(p in learner.offered for p in learner.adoption.drain_order()):
            learner.left = True
            connection = learner.connection
            assert connection is not None
            self.handle(ev.Reported(connection, learner.report()))
            self.handle(ev.Drained(connection))
            self.break_connection(learner)
            if learner in self.learners and self.core.phase not in (JobPhase.DRAINING, *ENDED_PHASES):
                self.learners.remove(learner)
                self.at(1.0, lambda: self.respawn(learner.place))

    def mishap(self, learner: Learner) -> None:
        if learner.left or self.core.phase not in (JobPhase.TRAINING, JobPhase.HOLDING):
            return
        if self.chance(0.004 * self.setup.deaths):  # killed
            self.seen["kills"] += 1
            self.kill(learner)
            self.at(self.random.uniform(0.1, 5.0), lambda: self.respawn(learner.place))
        elif self.chance(0.003 * self.setup.deaths):  # frozen, perhaps for longer than the timeout
            self.seen["freezes"] += 1
            learner.frozen_until = self.now + self.random.uniform(0.5, 6.0)
        elif self.chance(0.005 * self.setup.deaths):  # the connection breaks
            self.seen["breaks"] += 1
            if self.break_connection(learner):
                self.at(self.random.uniform(0.1, 2.0), lambda: self.connect(learner))
        elif self.chance(0.002 * self.setup.deaths) and not learner.draining and learner.connection is not None:
            learner.draining = True
            self.seen["drains"] += 1
            self.handle(ev.DrainRequested(learner.connection))


def check_liveness(world: World, share: float = 1.0) -> None:
    """The job came on while it could: each fragment has, by the beginning of the drain, ``share`` of a version for
    every two turns of H steps that K learners made, whoever lived in the last third has work in it, and everybody's
    drain ended with an answer. ``share``: the pace to be kept, where losses hold up rounds."""
    assert world.at_the_end is not None, f"the job did not come to its end: it is {world.core.phase}"
    steps = sorted(world.well_steps.values(), reverse=True)[world.setup.quorum - 1]
    expected = share * steps / (2 * world.setup.every)
    assert min(world.versions_at_the_end) >= expected, (world.versions_at_the_end, expected)
    end, merged = world.at_the_end
    since = [step for when, step in world.steps_at if when > end * 2 / 3]
    for who, count_ in Counter(process for process, _ in since).items():
        # A turn until a round opens, another until it is merged; and it may have begun in between.
        made = [step for step in since if step[0] == who]
        before = made[: max(0, count_ - round(3 * world.setup.every / share))]
        # Fewer steps than a turn may all be of a time in which losses made it late: they are dropped as too old.
        looked_at = before if len(before) >= world.setup.every else made
        assert not before or any(step in ids for step in looked_at for ids in merged), f"{who} contributed nothing"
    assert not world.seen["drained too late"], world.seen


def find_parted_offers(offers: Mapping[PushId, Ids], p: int, there: Ids) -> set[PushId]:
    """The offers of a fragment of which a version from a learner has a part. They are dropped, for no offer can be
    divided (docs/algorithm.md, section 8): of each slot one, and those that it replaced."""
    parted = {push_id for push_id, ids in offers.items() if push_id[2] == p and ids & there and ids - there}
    for slot in {push_id[0] for push_id in parted}:
        lost = [offers[push_id] for push_id in parted if push_id[0] == slot]
        assert max(lost, key=len) == frozenset().union(*lost), f"slot {slot} loses several offers of fragment {p}"
    return parted


NOTHING_MERGED = "and nothing was merged: "  # the end of a job whose merges need more learners than there were


def check_unmerged_end(world: World) -> None:
    """A job whose merges need K > 1 may rightly fail at its stop: nothing has ever been merged, and of no fragment is
    there work of K slots. What was acknowledged is there."""
    core = world.core
    quorum = world.core.config.rules.quorum
    # Else steps were made, and there was nobody to wait for.
    assert quorum > 1 or world.setup.stop == "seconds" or world.setup.edits
    assert not any(v for _, v in world.records), world.records.keys()
    waiting = core._aggregator.accepted_headers()
    for p in range(world.setup.fragments):
        slots = {header.slot for header in waiting if header.fragment == p}
        assert len(slots) < quorum, f"fragment {p} could be merged: slots {slots} have work"
    seated = {slot.holder.process for slot in core.slots if slot.occupied}
    assert not seated, f"they have not left: {seated}"


def settle(world: World) -> dict[str, int]:
    """The end: everything exact, and what was trained is accounted for."""
    world.check()
    core = world.core
    unmerged = core.phase is JobPhase.FAILED and NOTHING_MERGED in core.phase_message
    assert unmerged or core.phase is JobPhase.COMPLETE, (core.phase, core.phase_message, world.now)
    if unmerged:
        check_unmerged_end(world)
    assert world.core.ledger is not None
    rows = world.core.ledger.rows()
    trained = world.core.ledger.total_trained()
    for row in rows:
        assert row.merged + row.pending + row.dropped == trained
        assert sum(row.reasons.values()) == row.dropped
    waiting = [header for header in core._aggregator.accepted_headers() if not header.round]
    for p in range(world.setup.fragments if world.knows_all_offers else 0):
        slots = {header.slot for header in waiting if header.fragment == p}
        assert len(slots) < core.config.rules.quorum, f"fragment {p} could be merged: slots {slots} have work"
    for push_id, (p, ids) in world.offered.items():
        there = world.records[p, core.versions[p]].ids
        there = there.union(*(world.offered[one.id][1] for one in waiting if one.id in world.offered))
        assert ids <= there, f"the offer {push_id} was taken, and is lost"
    for p in range(world.setup.fragments):
        there = {v for q, v in world.records if q == p}
        assert max(there) == world.core.versions[p]
        if not (world.setup.losses or world.setup.wipes or world.seen["damages"]):
            assert there == set(range(world.core.versions[p] + 1)), "a gap"
    return dict(world.core.ledger.totals())
