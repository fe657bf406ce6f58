"""Ten worlds at a time, of the fifty in which faults that are planted are found: see tests/mutants/syncer.tsv.

Each of its mutants ``world-...`` names the ten worlds that find it. So a simulation that loses its eye for a kind of
fault is noticed, as any test is that a mutant survives.
"""

from __future__ import annotations

import worlds
from world_seeds import Case


def run_ten(simulation: str, setting: str, first: int) -> None:
    for seed in range(first, first + 10):
        worlds.run_world(Case(simulation, setting, seed), None)


def test_changed_jobs_0() -> None:
    run_ten("core", "CHANGED", 0)


def test_changed_jobs_10() -> None:
    run_ten("core", "CHANGED", 10)


def test_slow_versions_0() -> None:
    run_ten("core", "SLOW", 0)


def test_slow_versions_20() -> None:
    run_ten("core", "SLOW", 20)


def test_interrupted_writes_0() -> None:
    run_ten("shell", "INTERRUPTED", 0)


def test_interrupted_writes_10() -> None:
    run_ten("shell", "INTERRUPTED", 10)


def test_damaged_objects_10() -> None:
    run_ten("shell", "DAMAGED", 10)


def test_shards_that_crash_0() -> None:
    run_ten("core", "SHARDS", 0)


def test_shards_that_crash_30() -> None:
    run_ten("core", "SHARDS", 30)


def test_a_damaged_record_before_the_newest() -> None:
    worlds.run_world(Case("shell", "DAMAGED", 990080), None)


def test_a_region_that_is_waited_for() -> None:
    worlds.run_world(Case("core", "CHANGED", 240), None)


def test_shards_in_processes_0() -> None:
    run_ten("shell", "SHARDED", 0)


def test_shards_in_processes_10() -> None:
    run_ten("shell", "SHARDED", 10)
