"""The kinds of worlds in which the syncer's simulations run: what tests and tests/worlds.py have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from diloco_protocol.vocabulary import JobPhase
from diloco_worker.core.adoption import Rule
from syncer_simulation.broken_world import BrokenWorld, drawn_broken, settle_broken
from syncer_simulation.bucket_world import BucketSetup, BucketWorld
from syncer_simulation.core_world import World, check_liveness, settle
from syncer_simulation.disk_world import DiskSetup, DiskWorld
from syncer_simulation.learners import Setup
from syncer_simulation.lease_world import LeaseWorld, settle_leases
from syncer_simulation.shard_world import ShardSetup, ShardWorld
from syncer_simulation.sharded_world import ShardedSetup, ShardedWorld
from syncer_simulation.shell_sessions import ShellWorld
from syncer_simulation.shell_world import ShellSetup, settle_shell

AnySetup = TypeVar("AnySetup", bound=Setup)
AnyWorld = TypeVar("AnyWorld", bound=World)


@dataclass(frozen=True)
class Kind(Generic[AnySetup, AnyWorld]):
    """One kind of worlds: how a seed makes one, until when it runs at most, and how its end is judged."""

    setup: Callable[[int], AnySetup]
    world: Callable[[AnySetup], AnyWorld]
    settle: Callable[[AnyWorld], object]
    limit: float = 3000.0  # virtual seconds

    def run(self, seed: int, changes: Mapping[str, Any], trace: list[str] | None = None) -> AnyWorld:
        """Run a world to its end. ``changes``: fields of the setup that differ; ``trace``: gets a line per event."""
        world = self.world(replace(self.setup(seed), **changes))
        world.trace = trace
        world.run(self.limit)
        self.settle(world)
        return world


# ------------------------------------------------------------------ the core's

HARSH = Setup(0, steps=80, crashes=6.0, refusals=0.6, losses=0.7)
SCALED = Setup(0, steps=80, crashes=5.0, scales=0.7)
WIPED = Setup(0, steps=80, crashes=3.0, refusals=0.3, wipes=0.6)
MOVED = replace(WIPED, deaths=2.0, spares=2, scales=0.5)  # and who comes back may have had another slot
SPARES = replace(WIPED, spares=2, replaced=0.7)  # and those that stand by may be all that is left
VISITED = Setup(0, steps=60, slots=2, visitors=2, crashes=5.0)
SLOW = replace(HARSH, slow=0.5, deaths=5.0)  # versions come late to some, words do not
CROSSINGS = replace(HARSH, losses=0.0, crashes=2.0, crossings=True, deaths=3.0, spares=2, steps=160)
# With data, of which some is trained twice.
LEASED = Setup(0, steps=80, crashes=5.0, deaths=2.0, spares=1, told_crashes=0.1, sequences=3000)
LOSSY = Setup(0, every=8, steps=160, latency=0.3, deaths=0.0, crashes=0.0)  # messages are lost, nobody dies


def settle_rebuilt(world: World) -> None:
    """As ``settle``; or the only learner that held a fragment has died: the job says so, and does not go on without
    it."""
    if world.core.phase in (JobPhase.WAITING, JobPhase.DRAINING):
        assert "no learner here holds" in world.core.phase_message
        world.check()
    else:
        settle(world)


def drawn_setup(seed: int) -> Setup:
    """A job of any size, with or without a store that goes back."""
    rng = random.Random(seed)
    slots = rng.randint(1, 4)
    return Setup(
        seed,
        slots,
        fragments=rng.randint(1, 4),
        every=rng.randint(4, 8),
        overlap=rng.randint(0, 3),
        quorum=rng.randint(1, slots),
        rule=rng.choice(list(Rule)),
        crashes=rng.choice([1.0, 6.0]),
        refusals=rng.choice([0.1, 0.7]),
        losses=rng.choice([0.0, 0.7]),
    )


def drawn_changes(seed: int) -> Setup:
    """A job that people change while it runs, with any stop, on machines whose clocks differ, in one region or in two
    of which one goes at times, and with pushes that have come apart."""
    rng = random.Random(seed)
    slots = rng.randint(2, 4)
    return Setup(
        seed,
        slots,
        fragments=rng.randint(1, 3),
        every=rng.randint(4, 8),
        overlap=rng.randint(0, 3),
        quorum=rng.randint(1, slots),
        rule=rng.choice(list(Rule)),
        steps=rng.choice([40, 80]),
        deaths=rng.choice([0.0, 1.0, 2.0]),
        crashes=rng.choice([1.0, 4.0]),
        losses=rng.choice([0.0, 0.7]),
        stop=rng.choice(["steps", "tokens", "seconds"]),
        edits=rng.choice([0.0, 0.5]),
        clocks=rng.choice([0.0, 40 * 86_400.0]),
        regions=rng.randint(1, 2),
        on_region_lost=rng.choice(["Continue", "Hold", "Fail"]),
        norm_gate=rng.choice([None, 3.0]),
        diverged=rng.choice([0.0, 0.1, 0.5]),
        told_crashes=rng.choice([0.0, 0.1]),
        slow=rng.choice([0.0, 0.3]),
    )


def drawn_shards(seed: int) -> ShardSetup:
    """A job as ``drawn_changes`` has it, whose fragments some shards share, which crash too."""
    rng = random.Random(f"shard setup of {seed}")
    drawn = asdict(drawn_changes(seed))
    drawn["fragments"] = rng.randint(1, 5)
    return ShardSetup(**drawn, shards=rng.randint(1, 5), between=rng.choice([3.0, 10.0]))


CHANGING = ("slots", "fragments", "every", "overlap", "quorum", "rule", "stop", "edits", "clocks", "regions")
CHANGING += ("on_region_lost", "norm_gate", "diverged", "told_crashes", "slow")


def of_core(setup: Setup, judge: Callable[[World], object] = settle, limit: float = 3000.0) -> Kind[Setup, World]:
    return Kind(lambda seed: replace(setup, seed=seed), World, judge, limit)


def settle_live(share: float) -> Callable[[World], object]:
    def judge(world: World) -> None:
        check_liveness(world, share)
        settle(world)

    return judge


CORE: dict[str, Kind[Any, Any]] = {
    "ORDINARY": of_core(Setup(0)),
    "HARSH": of_core(HARSH),
    "SCALED": of_core(SCALED),
    "WIPED": of_core(WIPED, settle_rebuilt),
    "MOVED": of_core(MOVED, settle_rebuilt),
    "SPARES": of_core(SPARES, settle_rebuilt),
    "VISITED": of_core(VISITED),
    "CROSSINGS": of_core(CROSSINGS),
    "SLOW": of_core(SLOW),
    "DRAWN": Kind(drawn_setup, World, settle),
    "CHANGED": Kind(drawn_changes, World, settle),
    "SHARDS": Kind(drawn_shards, ShardWorld, settle),
    "LEASES": Kind(lambda seed: replace(LEASED, seed=seed), LeaseWorld, settle_leases),
    "BROKEN": Kind(drawn_broken, BrokenWorld, settle_broken),
    # With K = M every loss holds everybody up. Of the seeds that it names, a test asks for a greater share of the pace.
    "LIVE_1": of_core(LOSSY, settle_live(0.5), 600.0),
    "LIVE_2": of_core(replace(LOSSY, quorum=2), settle_live(0.5), 600.0),
    "LIVE_3": of_core(replace(LOSSY, quorum=3), settle_live(0.2), 600.0),
}

# ------------------------------------------------------------------ the shell's

# Writes that fail or whose answer is lost, outages, crashes, second syncers beside one that goes on, orderly ends,
# suspensions; an evaluator, newcomers that want an optimizer state, pushes that have come apart.
TROUBLE = ShellSetup(
    0,
    steps=80,
    max_versions=1000,
    crashes=3.0,
    deaths=2.0,
    faults=0.05,
    doubles=1.0,
    hand_overs=1.0,
    suspends=1.0,
    sequences=300,
    store_seconds=0.05,
    norm_gate=3.0,
    evaluated=True,
    peer_states=True,
)
# And the store goes back, as a whole or here and there, or is emptied.
LOSING = replace(TROUBLE, doubles=0.3, losses=0.6, torn=0.5, wipes=0.2, refusals=0.3)
# And a learner stands by, which may be the only one that holds what an emptied store had.
STANDING_BY = replace(LOSING, spares=1, wipes=0.6, deaths=3.0, replaced=0.5)
# And half of what is given back is a model of the learner's own.
FORGED = replace(LOSING, wipes=0.4, forged=0.5, refusals=0.0)
QUIET = ShellSetup(0, steps=24, chaos=0.0, max_versions=1000, sequences=300, store_seconds=0.05)
# One syncer after the other is succeeded, at the end too.
SUCCESSIONS = replace(QUIET, chaos=1.0, doubles=6.0, deaths=3.0, crashes=0.0)
# Within a write, too.
INTERRUPTED = replace(SUCCESSIONS, steps=60, doubles=0.5, interrupts=0.15)
# One object of the store is damaged, once.
DAMAGED = replace(
    TROUBLE,
    steps=120,
    sequences=30_000,  # in few leases: each makes a new state
    deaths=0.3,
    crashes=5.0,
    doubles=0.0,
    suspends=0.0,
    faults=0.0,
    damages=0.6,
    norm_gate=None,
    evaluated=False,
)


# The real store on a disk that forgets what was not flushed, under syncers that are killed within its operations.
DISK = DiskSetup(**asdict(replace(TROUBLE, faults=0.01, store_seconds=0.02, doubles=0.5, crashes=4.0)), kills=0.03)
# And a bit of one object turns.
FLIPPED = replace(DISK, faults=0.0, doubles=0.0, flips=0.7, crashes=6.0)

# The real store of buckets, over a service that loses answers.
BUCKET = BucketSetup(**asdict(TROUBLE))


# Shards share the fragments, which crash alone and with the syncer.
SHARDED = ShardedSetup(**asdict(replace(TROUBLE, fragments=4)))


def drawn_shell(seed: int) -> ShellSetup:
    """A job that changes as ``drawn_changes`` has it, under the shell's troubles."""
    rng = random.Random(seed)
    changes = drawn_changes(seed)
    drawn = {name: getattr(changes, name) for name in CHANGING}
    return replace(
        TROUBLE,
        seed=seed,
        steps=60,
        **drawn,
        doubles=rng.choice([0.0, 1.0]),
        evaluated=rng.random() < 0.3,
        losses=rng.choice([0.0, 0.0, 0.4]),
    )


def of_shell(setup: ShellSetup) -> Kind[ShellSetup, ShellWorld]:
    return Kind(lambda seed: replace(setup, seed=seed), ShellWorld, settle_shell, 600.0)


def of_disk(setup: DiskSetup) -> Kind[DiskSetup, DiskWorld]:
    return Kind(lambda seed: replace(setup, seed=seed), DiskWorld, settle_shell, 600.0)


def of_bucket(setup: BucketSetup) -> Kind[BucketSetup, BucketWorld]:
    return Kind(lambda seed: replace(setup, seed=seed), BucketWorld, settle_shell, 600.0)


def of_shards(setup: ShardedSetup) -> Kind[ShardedSetup, ShardedWorld]:
    return Kind(lambda seed: replace(setup, seed=seed), ShardedWorld, settle_shell, 600.0)


SHELL: dict[str, Kind[Any, Any]] = {
    "TROUBLE": of_shell(TROUBLE),
    "LOSING": of_shell(LOSING),
    "STANDING_BY": of_shell(STANDING_BY),
    "FORGED": of_shell(FORGED),
    "CHANGED": Kind(drawn_shell, ShellWorld, settle_shell, 600.0),
    "INTERRUPTED": of_shell(INTERRUPTED),
    "DAMAGED": of_shell(DAMAGED),
    "SUCCESSIONS": of_shell(SUCCESSIONS),
    "DISK": of_disk(DISK),
    "FLIPPED": of_disk(FLIPPED),
    "BUCKET": of_bucket(BUCKET),
    "SHARDED": of_shards(SHARDED),
}
