"""The core's world with data: leases are asked for, granted, trained from, and lost with who held them.

A sequence is granted to one live learner at a time, and whatever happens each is trained, or still leased or waiting to
be. Without mishaps each is trained once. What a learner had trained and not reported when it died is trained again.
"""

from __future__ import annotations

from collections import Counter

from diloco_protocol.wire.records import Lease, Seat
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.leases import LeaseBook
from diloco_worker.core.leases import Leases
from syncer_simulation.core_world import World, settle
from syncer_simulation.learners import Learner, Setup
from syncer_simulation.oracle import Oracle


class LeaseWorld(World):
    def __init__(self, setup: Setup) -> None:
        self.oracle = Oracle({}, 1)
        self.times = Counter[tuple[int, int, int]]()  # data epoch, block and position: how often it was trained
        super().__init__(setup)

    def do(self, action: ev.Action) -> None:
        if isinstance(action, ev.GrantLease) and action.connection in self.connections:
            self.seen["leases"] += 1
            learner = self.connections[action.connection]
            self.oracle.take_lease(action)
            self.check_holders(learner, action.lease)
            learner.leases.add(action.lease)
        super().do(action)

    def check_holders(self, learner: Learner, lease: Lease) -> None:
        """No other learner with a session and a seat has something of the lease's block to train."""
        for other in self.connections.values():
            if other is learner or other.seat is None:
                continue  # who stands by trains nothing, and gets the leases of the seat that it takes
            for number, position in other.leases.cursors():
                held = self.oracle.leases[number]
                if (held.data_epoch, held.block) == (lease.data_epoch, lease.block):
                    assert position >= held.end, f"{lease} for {learner.process}: {other.process} has {held}"

    def seated(self, learner: Learner, seat: Seat | None, merged: tuple[ev.MergedPush, ...]) -> None:
        if seat is not None:
            if not (seat.continuing and learner.seat is not None):
                learner.leases = Leases(self.setup.seed, max(1, self.setup.sequences))
            self.oracle.take_seat(seat, learner.process)
            for lease in seat.leases:
                self.check_holders(learner, lease)
            self.seen["leases taken over"] += len(seat.leases) if not seat.continuing else 0
            learner.leases.reconcile(seat.leases)
        super().seated(learner, seat, merged)

    def train(self, learner: Learner) -> None:
        super().train(learner)
        before = dict(learner.leases.cursors())
        drawn = learner.leases.draw(self.changes.randint(1, 3))
        if drawn is not None:
            self.oracle.train_sequences(drawn.cursors)
            learner.leases.commit(drawn.cursors)
            for number, position in drawn.cursors:
                lease = self.oracle.leases[number]
                start = before.get(number, lease.start)
                self.times.update((lease.data_epoch, lease.block, place) for place in range(start, position))
        if learner.leases.remaining < 6 and learner.connection is not None and self.changes.random() < 0.7:
            self.handle(ev.LeaseRequested(learner.connection))


def settle_leases(world: LeaseWorld) -> None:
    """As ``settle``; no block was left out or is leased twice, and without mishaps no sequence was trained twice."""
    settle(world)
    book = LeaseBook.from_json(world.config.seed, world.core.state(world.now)["job"]["leases"])
    world.oracle.check_end(book)
    # Without mishaps all that was trained was reported, and counts.
    for held in (*book.open.values(), *book.returned):
        trained = world.oracle.trained_to[held.data_epoch, held.block]
        assert held.position <= trained and (held.position == trained or world.setup.chaos), (held, trained)
    if not world.setup.chaos:
        assert max(world.times.values()) == 1, [which for which, times in world.times.items() if times > 1][:5]
