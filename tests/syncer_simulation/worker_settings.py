"""The kinds of worlds in which the library's learners run. Not in settings.py, which needs no torch."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

from diloco_worker.core.adoption import Rule
from syncer_simulation.settings import Kind
from syncer_simulation.sharded_workers import ShardedWorkerSetup, ShardedWorkerWorld
from syncer_simulation.shell_world import settle_shell
from syncer_simulation.worker_world import WorkerSetup, WorkerWorld

# Sessions that break, links that stand still, uploads of which no answer comes, learners that die, freeze or are told
# to end. The syncer lives.
LINKS = WorkerSetup(
    0,
    steps=60,
    max_versions=1000,
    crashes=0.0,
    deaths=3.0,
    breaks=3.0,
    terminations=2.0,
    old_jobs=0.3,
    sequences=4000,
    store_seconds=0.05,
    bytes_per_second=(1e6, 1e5, 2e4),
)
# And syncers that crash, are succeeded, end in good order and suspend the job, on a store that fails.
RESTARTS = replace(
    LINKS, deaths=1.5, breaks=1.5, crashes=3.0, faults=0.05, doubles=1.0, hand_overs=1.0, suspends=1.0, every=6
)
# And the store goes back, as a whole or here and there, or is emptied.
GOING_BACK = replace(RESTARTS, doubles=0.3, losses=0.6, torn=0.5, wipes=0.2, refusals=0.3)
# And a learner stands by, which may be the only one that holds what an emptied store had.
STANDING_BY = replace(GOING_BACK, spares=1, wipes=0.6, deaths=3.0, replaced=0.5)
# Nothing breaks, and one learner after the other is told to end.
LEAVING = replace(LINKS, deaths=0.0, breaks=0.0, lost_answers=0.0, broken_calls=0.0, terminations=6.0, faithful=True)

# Each learner is there from the beginning to the end, and so are the slots: the schedule says what is in each version.
SCHEDULED = replace(
    RESTARTS, deaths=0.0, terminations=0.0, old_jobs=0.0, suspends=0.0, breaks=3.0, timeout=60.0, deterministic=True
)


def of_workers(setup: WorkerSetup) -> Kind[WorkerSetup, WorkerWorld]:
    return Kind(lambda seed: replace(setup, seed=seed), WorkerWorld, settle_shell, 600.0)


def drawn_workers(seed: int) -> WorkerSetup:
    """A job of any size and encodings, over links that are fast, slow or change bits; its syncer lives or does not."""
    rng = random.Random(seed)
    slots = rng.randint(1, 4)
    return replace(
        rng.choice([LINKS, RESTARTS]),
        seed=seed,
        slots=slots,
        quorum=rng.randint(1, slots),
        latency=rng.choice([1.0, 3.0]),
        bytes_per_second=rng.choice([(1e6,), (1e6, 1e5, 2e4), (1e5, 5e3, 2e3)]),
        fragments=rng.randint(1, 4),
        every=rng.randint(4, 8),
        overlap=rng.randint(0, 3),
        rule=rng.choice([Rule.KEEP, Rule.OVERWRITE]),
        up=rng.choice(["float32", "bfloat16", "int8", "int4"]),
        down=rng.choice(["float32", "bfloat16", "delta-int8", "delta-int4"]),
        feedback=rng.random() < 0.5,
        part_bytes=rng.choice([0, 1000]),
        flips=rng.choice([0.0, 0.02]),
    )


def drawn_scheduled(seed: int) -> WorkerSetup:
    """A deterministic job of any size, on machines whose clocks differ and are set."""
    rng = random.Random(seed)
    slots, every = rng.randint(1, 4), rng.randint(4, 8)
    return replace(
        SCHEDULED,
        seed=seed,
        slots=slots,
        quorum=slots,
        fragments=rng.randint(1, 4),
        every=every,
        overlap=rng.randint(1, every // 2),
        steps=rng.choice([30, 41, 60]),
        up=rng.choice(["float32", "bfloat16", "int8"]),
        down=rng.choice(["float32", "delta-int8"]),
        feedback=rng.random() < 0.5,
        clocks=rng.choice([0.0, 40 * 86_400.0]),
    )


def drawn_shards(seed: int) -> ShardedWorkerSetup:
    """As ``drawn_workers``, with shards, which crash alone and with the syncer."""
    drawn = asdict(drawn_workers(seed))
    return ShardedWorkerSetup(**drawn | {"fragments": random.Random(seed).randint(1, drawn["every"])})


def drawn_scheduled_shards(seed: int) -> ShardedWorkerSetup:
    """As ``drawn_scheduled``, with shards."""
    return ShardedWorkerSetup(**asdict(drawn_scheduled(seed)))


def settle_scheduled(world: WorkerWorld) -> None:
    settle_shell(world)
    world.check_schedule()


WORKERS: dict[str, Kind[WorkerSetup, WorkerWorld]] = {
    "LINKS": of_workers(LINKS),
    "RESTARTS": of_workers(RESTARTS),
    "GOING_BACK": of_workers(GOING_BACK),
    "STANDING_BY": of_workers(STANDING_BY),
    "LEAVING": of_workers(LEAVING),
    "SCHEDULED": Kind(drawn_scheduled, WorkerWorld, settle_scheduled, 600.0),
    "SHARDED": Kind(drawn_shards, ShardedWorkerWorld, settle_shell, 600.0),
    "SCHEDULED_SHARDS": Kind(drawn_scheduled_shards, ShardedWorkerWorld, settle_scheduled, 600.0),
    "DRAWN": Kind(drawn_workers, WorkerWorld, settle_shell, 600.0),
}
