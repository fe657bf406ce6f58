"""The core's world with one learner that lies, or is broken: what it does to the others is at most its share.

The reference is the same job without that learner.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from diloco_protocol.wire.records import StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.shares import MOST
from diloco_syncer.core.books.slots import TURNS_AHEAD
from syncer_simulation.core_world import World, settle
from syncer_simulation.learners import Learner, Setup

FAULTS = ("mute", "says it is slow", "says it is fast", "claims steps", "counts too many tokens", "counts one token")


@dataclass
class BrokenSetup(Setup):
    fault: str = "absent"  # of the last place's learner
    stop: str = "steps"


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
    )


class BrokenWorld(World):
    setup: BrokenSetup

    def start_syncer(self) -> None:
        limit = self.setup.steps if self.setup.stop == "steps" else 36 * self.setup.steps * (self.setup.slots - 1)
        self.config = replace(self.config, stop=(self.setup.stop, limit), max_steps=8 * self.setup.every)
        super().start_syncer()

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
