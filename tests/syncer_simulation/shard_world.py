"""The core's world with shards: each has the bytes of some fragments, and they crash and come back one by one.

A shard's records and spooled offers are durable, and nothing else that it has. A merge that was under way when it
crashed may be durable or not, and it is told of when the shard is back. The syncer may hear of the loss late, or not
before the shard is back, or of either more than once. With the syncer all shards begin anew.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from diloco_protocol.vocabulary import ENDED_PHASES, PushRefusal
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.ledger import PushId
from diloco_syncer.core.books.rounds import Accepted
from syncer_simulation.core_world import World
from syncer_simulation.learners import Ids, Learner, Setup


@dataclass
class ShardSetup(Setup):
    shards: int = 1
    between: float = 8.0  # seconds between two losses, at most


class ShardWorld(World):
    setup: ShardSetup

    def start_syncer(self) -> None:
        if not hasattr(self, "chances"):
            self.chances = random.Random(f"shards of {self.setup.seed}")
            self.crashes = Counter[int]()  # by shard
            self.left_out: set[tuple[int, int, int]] = set()  # slot, fragment and sequence of such pushes
            self.config = replace(self.config, shards=self.setup.shards)
            self.at(self.chances.uniform(1.0, self.setup.between), self.lose_some)
        self.gone: set[int] = set()  # shards, since they crashed
        self.begun: dict[int, tuple[ev.Merge, list[Ids]]] = {}  # by fragment, the merge that its shard makes
        self.untold: dict[int, ev.MergeDurable] = {}  # by fragment, a merge that its shard could not tell of
        super().start_syncer()

    @property
    def dealt(self) -> tuple[int, ...]:
        return self.core._state.shards.of

    def serves(self, fragment: int) -> bool:
        return self.dealt[fragment] not in self.gone

    def life_of(self, push_id: PushId | None) -> tuple[int, int]:
        return self.life, 0 if push_id is None else self.crashes[self.dealt[push_id[2]]]

    # ------------------------------------------------------------ shards crash, and come back

    def lose_some(self) -> None:
        self.at(self.chances.uniform(0.2, self.setup.between), self.lose_some)
        if self.core.initialised and self.up() and self.core.phase not in ENDED_PHASES:
            self.lose_shard(self.chances.randrange(self.setup.shards))

    def lose_shard(self, shard: int) -> None:
        if shard in self.gone:
            return
        self.seen["shards lost"] += 1
        self.gone.add(shard)
        self.crashes[shard] += 1
        for p in [p for p in self.begun if self.dealt[p] == shard]:
            self.seen["merges lost"] += 1
            action, content = self.begun.pop(p)
            if self.chances.random() < 0.4:
                self.seen["merges that were durable"] += 1
                self.untold[p] = self.make_record(action, content)
        heard, away = self.chances.uniform(0.0, 0.5), self.chances.uniform(0.1, self.chances.choice([1.0, 8.0]))
        for _ in range(self.chances.choice([1, 1, 1, 2])):
            self.in_life(heard, lambda: self.tell_lost(shard))
        self.in_life(away, lambda: self.come_back(shard))

    def in_life(self, delay: float, call: object) -> None:
        """Call it, if the syncer lives until then."""
        life = self.life
        self.at(delay, lambda: life == self.life and self.up() and call())  # type: ignore[operator]

    def tell_lost(self, shard: int) -> None:
        if shard in self.gone:
            self.handle(ev.ShardLost(shard))

    def come_back(self, shard: int) -> None:
        life = self.life
        for p in [p for p in self.untold if self.dealt[p] == shard]:
            self.handle(self.untold.pop(p))
        handles: dict[int, int] = {}
        for old in [old for old, push_id in self.offer_of.items() if self.dealt[push_id[2]] == shard]:
            push_id = self.offer_of.pop(old)  # the shard that gave it this number is no more
            if push_id in self.spool and life == self.life:
                new = handles[old] = next(self.numbers)
                self.payload[new], self.offer_of[new] = self.payload[old], push_id
        for _ in range(self.chances.choice([1, 1, 1, 2])):
            if life == self.life:
                self.gone.discard(shard)
                self.handle(ev.ShardReady(shard, handles))
        if life == self.life and self.up():
            waiting = {push.handle for push in self.waiting(shard)}
            assert waiting <= set(handles.values()), "the core counts on what the shard has lost"
            self.check()

    def waiting(self, shard: int) -> list[Accepted]:
        """What waits for a merge of this shard's fragments."""
        rounds = self.core.open_rounds.values()
        waiting = [push for opened in rounds if self.dealt[opened.fragment] == shard for push in opened.pushes]
        for p, offers in self.core._aggregator._offers.items():
            waiting += offers if self.dealt[p] == shard else []
        return waiting

    # ------------------------------------------------------------ what they do

    def do(self, action: ev.Action) -> None:
        if isinstance(action, ev.Merge) and self.serves(action.fragment):
            self.begun[action.fragment] = action, [self.payload[r.handle] for r in action.responders]
        super().do(action)

    def make_record(self, action: ev.Merge, content: list[Ids]) -> ev.MergeDurable:
        durable = super().make_record(action, content)
        headers = [r.header for r in action.responders if r.handle in durable.left_out]
        self.left_out |= {(header.slot, header.fragment, header.sequence) for header in headers}
        return durable

    def merge(self, action: ev.Merge, content: list[Ids], life: int) -> None:
        if self.begun.get(action.fragment, (None,))[0] is action:
            del self.begun[action.fragment]
            super().merge(action, content, life)

    def answer(self, learner: Learner, header: PushHeader, refused: tuple[PushRefusal, str] | None) -> None:
        """A shard may crash when the core has accepted an offer, before the offer is durable."""
        taken = refused is None and header.round == 0 and self.up() and header.id in self.offered
        if taken and self.chances.random() < 0.1:
            self.seen["offers lost before their answer"] += 1
            del self.offered[header.id]
            self.spool.pop(header.id, None)
            self.lose_shard(self.dealt[header.fragment])
            return
        if refused is not None and refused[0] is PushRefusal.REPEATED and not self.seen["losses"]:
            self.check_taken(header, learner)
        super().answer(learner, header, refused)

    def check_taken(self, header: PushHeader, learner: Learner) -> None:
        """An offer that is said to have been taken before is merged, or waits, or could not be merged."""
        if (header.slot, header.fragment, header.sequence) in self.left_out:
            return
        if header.round or learner.seat is None or header.incarnation != learner.seat.incarnation:
            return
        there = self.records[header.fragment, self.core.versions[header.fragment]].ids
        there = there.union(*(self.payload[push.handle] for push in self.waiting(self.dealt[header.fragment])))
        assert learner.offers[header.fragment][1] <= there, f"{header} was taken before, and is lost"

    # ------------------------------------------------------------ what must hold

    def hear(self, event: ev.Event) -> list[ev.Action]:
        before = dict(self.core.open_rounds)
        actions = super().hear(event)
        for action in actions:
            if isinstance(action, ev.Merge | ev.Pull):
                shard = self.dealt[action.fragment]
                assert shard not in self.core._state.shards.lost, f"{action} for a shard that is lost"
        merging = [opened for opened in self.core.open_rounds.values() if opened.merging and not opened.last]
        assert len({self.dealt[opened.fragment] for opened in merging}) == len(merging), "two merges of one shard"
        new = {p for p in self.core.open_rounds if p not in before}
        assert not {self.dealt[p] for p in new} & self.core._state.shards.lost.keys(), "a round without its shard"
        self.seen["merges side by side"] += len(merging) > 1
        return actions
