"""The core's world with one learner that lies, or is broken: what it does to the others is at most its share.

The reference is the same job without that learner. What is compared: merges per second and the others' work in them,
the others' data and what is left of it, the loss, and the job's end.

Parameters are ``ELEMENTS`` numbers a fragment. Every learner has an optimum of its own near ``OPTIMUM``, and its steps
go straight there. What is merged of that is merged by the product's own code.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from diloco_protocol.arrays.layout import Piece
from diloco_protocol.merging import push_weights
from diloco_protocol.wire.records import PushHeader, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.leases import MAX_BLOCK
from diloco_syncer.core.books.ledger import PushId
from diloco_syncer.core.books.norm_gate import GATE_FACTOR
from diloco_syncer.core.books.shares import MOST
from diloco_syncer.core.books.slots import TURNS_AHEAD
from diloco_syncer.numerics import merge
from syncer_simulation.core_world import World, settle
from syncer_simulation.learners import Learner, Setup

SENT = {"sends 10^30 times its work": 1e30, "sends 200 times its work": 200.0, "sends the opposite": -1.0}
FAULTS = (
    *("mute", "says it is slow", "says it is fast", "claims steps", "counts too many tokens", "counts one token"),
    *("marks what it has not read", *SENT),
)
BATCH = 2  # sequences of a step
ELEMENTS, PIECES = 16, [Piece("w", 0, 16, 0, mean=False)]
BEGIN, OPTIMUM, SPREAD = 5.0, 3.0, 0.3
STEP, OUTER = 0.02, 0.7  # how far a step goes, and an outer step


@dataclass
class BrokenSetup(Setup):
    fault: str = "absent"  # of the last place's learner
    stop: str = "steps"
    method: str = "rda"


def drawn_broken(seed: int) -> BrokenSetup:
    """Two to four honest learners, and one more. Nothing else goes wrong."""
    rng = random.Random(seed)
    honest = rng.randint(2, 4)
    return BrokenSetup(
        seed,
        honest + 1,
        fragments=rng.randint(1, 4),
        every=rng.randint(4, 8),
        quorum=rng.randint(1, honest - 1),
        steps=1200,
        chaos=0.0,
        latency=rng.choice([0.1, 1.0]),
        max_versions=1000,
        fault=rng.choice(FAULTS),
        stop=rng.choice(["steps", "tokens"]),
        sequences=1_000_000,
        method=rng.choice(["rda", "median"] if honest > 3 else ["rda"]),
    )


class BrokenWorld(World):
    setup: BrokenSetup

    def start_syncer(self) -> None:
        limit = self.setup.steps if self.setup.stop == "steps" else 36 * self.setup.steps * (self.setup.slots - 1)
        alone, batches = 8 * self.setup.every, {"r": BATCH}
        self.config = replace(self.config, stop=(self.setup.stop, limit), max_steps=alone, batches=batches)
        self.config = replace(self.config, norm_gate=GATE_FACTOR, weights=self.weights)
        self.theta = {(p, 0): np.full(ELEMENTS, BEGIN, np.float32) for p in range(self.setup.fragments)}
        self.deltas: dict[PushId, np.ndarray] = {}
        self.hungry = 0  # steps that had no data
        super().start_syncer()

    @property
    def weights(self) -> str:
        return push_weights(self.setup.method, "tokens-quality")

    def is_broken(self, learner: Learner) -> bool:
        return learner.place[1] == self.setup.slots - 1

    def spawn(self, place: tuple[str, int]) -> Learner:
        learner = super().spawn(place)
        learner.speed = 0.1 + 0.02 * (place[1] % 3)  # the same in the reference
        learner.alive = not (self.is_broken(learner) and self.setup.fault == "absent")
        return learner

    def report(self, learner: Learner) -> None:
        if self.is_broken(learner) and learner.connection is not None and learner.adoption.complete:
            self.handle(ev.Reported(learner.connection, self.say(learner.report())))
        else:
            super().report(learner)

    def say(self, report: StepReport) -> StepReport:
        """What the broken learner says in place of its true report."""
        match self.setup.fault:
            case "says it is slow":
                return replace(report, step_seconds=1e6)
            case "says it is fast":
                return replace(report, step_seconds=1e-9)
            case "claims steps":
                more = 1000 * report.trained_steps
                rows = tuple(replace(row, tokens=row.tokens + more) for row in report.fragments)
                steps, tokens = report.trained_steps + more, report.trained_tokens + more
                slot_step = report.slot_step + more
                return replace(report, slot_step=slot_step, trained_steps=steps, trained_tokens=tokens, fragments=rows)
        return report

    def push(self, learner: Learner, p: int, round: int) -> None:
        if self.is_broken(learner) and round and self.setup.fault in ("mute", "says it is slow", "claims steps"):
            return
        super().push(learner, p, round)

    def seated(self, learner: Learner, seat: Seat | None, merged: tuple[ev.MergedPush, ...]) -> None:
        super().seated(learner, seat, merged)
        if seat is not None:
            learner.leases.reconcile(seat.leases)

    def do(self, action: ev.Action) -> None:
        if isinstance(action, ev.GrantLease) and action.connection in self.connections:
            self.connections[action.connection].leases.add(action.lease)
        super().do(action)

    def train(self, learner: Learner) -> None:
        super().train(learner)
        count, read = BATCH, learner.adoption.report().trained_tokens
        if self.is_broken(learner) and self.setup.fault == "marks what it has not read":
            count = max(1, min(learner.leases.remaining, read - sum(one.position for one in learner.leases.cursors())))
        if (drawn := learner.leases.draw(count)) is not None:
            learner.leases.commit(drawn.cursors)
        self.hungry += drawn is None
        if learner.leases.remaining < 10 * BATCH and learner.connection is not None:
            self.handle(ev.LeaseRequested(learner.connection))

    def size_of(self, header: PushHeader) -> tuple[float, float]:
        """Make the push's values, and measure them as the runtime does."""
        if header.id in self.sizes:
            return self.sizes[header.id]
        (learner,) = (one for one in self.everyone if one.process == self.core.slots[header.slot].holder.process)
        base = self.theta[header.fragment, header.base_version]
        own = np.random.default_rng([learner.place[1], header.fragment]).standard_normal(ELEMENTS)
        delta = ((base - OPTIMUM - SPREAD * own) * (1 - (1 - STEP) ** header.steps)).astype(np.float32)
        if self.is_broken(learner):
            delta *= np.float32(SENT.get(self.setup.fault, 1.0))
        self.deltas[header.id] = delta
        (square,), (of_theta,) = merge.piece_squares(PIECES, delta), merge.piece_squares(PIECES, base)
        growth = merge.growth(PIECES, np.array([square]), np.array([of_theta]), of_theta / ELEMENTS)
        return self.sizes.setdefault(header.id, (float(np.sqrt(square)), growth))

    def merge_values(self, action: ev.Merge) -> None:
        deltas = [self.deltas[r.header.id] for r in action.responders]
        squares = [merge.piece_squares(PIECES, delta) for delta in deltas]
        weights, slots = [r.weight for r in action.responders], [r.header.slot for r in action.responders]
        merged = merge.merge(PIECES, deltas, weights, self.setup.method, squares=squares, slots=slots)
        before = self.theta[action.fragment, action.version - 1]
        self.theta[action.fragment, action.version] = before - np.float32(OUTER) * merged.delta

    def mark_end(self) -> None:
        super().mark_end()
        self.read = [slot.reported.sequences for slot in self.core.slots]
        self.may_read = [MOST * BATCH * slot.step + MAX_BLOCK for slot in self.core.slots]
        processes = {learner.process for learner in self.everyone if self.is_broken(learner)}
        self.broken_slots = {slot.index for slot in self.core.slots if slot.holder.process in processes}
        newest = [self.theta[p, v] for p, v in enumerate(self.core.versions)]
        self.loss = float(np.mean([np.square(theta - OPTIMUM) for theta in newest]))

    def count_tokens(self, learner: Learner) -> int:
        tokens = super().count_tokens(learner)
        if self.is_broken(learner) and self.setup.fault == "counts too many tokens":
            return 1000 * tokens
        return 1 if self.is_broken(learner) and self.setup.fault == "counts one token" else tokens


def settle_broken(world: BrokenWorld) -> None:
    """The others' merges, their work in them, and the job's end are those of a job without that learner, but for what
    one learner may add."""
    settle(world)
    reference = BrokenWorld(replace(world.setup, fault="absent"))
    reference.run()
    settle(reference)
    (end, merges, work), (usual_end, usual_merges, usual_work) = measured(world), measured(reference)
    honest = world.setup.slots - 1
    assert merges >= 0.85 * usual_merges, (world.setup.fault, merges, usual_merges)
    assert merges <= (1.15 + 1 / honest) * usual_merges, (world.setup.fault, merges, usual_merges)
    assert work >= 0.85 * usual_work, (world.setup.fault, work, usual_work)
    of_others, usual_of_others = (
        [read for slot, read in enumerate(one.read) if slot not in one.broken_slots] for one in (world, reference)
    )
    assert world.hungry <= world.setup.slots, f"{world.hungry} steps had no data, and not the first of each alone"
    assert sum(of_others) / end >= 0.85 * sum(usual_of_others) / usual_end, (world.setup.fault, of_others)
    assert all(world.read[slot] <= world.may_read[slot] for slot in world.broken_slots), (world.setup.fault, world.read)
    assert world.loss <= reference.loss + 2 * SPREAD**2, (world.setup.fault, world.loss, reference.loss)
    claimed = TURNS_AHEAD * 8 * world.setup.every / world.setup.steps
    if world.setup.stop == "steps":
        assert 0.9 - claimed <= end / usual_end <= 1.1, (world.setup.fault, end, usual_end)
    else:
        soonest = honest / (honest + MOST)
        assert 0.9 * soonest - claimed <= end / usual_end <= 1.1, (world.setup.fault, end, usual_end)


def measured(world: BrokenWorld) -> tuple[float, float, float]:
    """When the drain began, versions per second until then, and steps of honest learners in them per second."""
    assert world.at_the_end is not None
    end, merged = world.at_the_end
    broken = {learner.process for learner in world.everyone if world.is_broken(learner)}
    work = sum(step.split("/")[0] not in broken for ids in merged for step, _ in ids)
    return end, sum(world.versions_at_the_end) / end, work / end
