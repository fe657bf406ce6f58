"""Worlds on real stores: on a disk that forgets what was not flushed, and on a bucket that loses answers. And worlds in
which learners give back models of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from syncer_simulation.bucket_world import BucketWorld
from syncer_simulation.disk_world import DiskSetup, DiskWorld
from syncer_simulation.settings import BUCKET, DISK, FLIPPED, FORGED
from syncer_simulation.shell_sessions import ShellWorld
from syncer_simulation.shell_world import ShellSetup, settle_shell


def simulate(setup: Any, kind: type[ShellWorld]) -> Any:
    world = kind(setup)
    world.run(limit=600.0)
    settle_shell(world)
    return world


def run_world(setup: ShellSetup, kind: type[ShellWorld]) -> Counter[str]:
    seen: Counter[str] = simulate(setup, kind).seen
    return seen


def run_worlds(setup: ShellSetup, kind: type[ShellWorld], count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(count):
        try:
            seen += run_world(replace(setup, seed=seed), kind)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return seen


@pytest.mark.promise(
    "A syncer killed within any operation of its volume, also by a power cut, and on a disk that is full or broken for "
    "a while, loses nothing that it has announced or acknowledged",
    section="Syncer",
)
@pytest.mark.slow
def test_syncers_on_a_disk_that_forgets_lose_nothing() -> None:
    seen = run_worlds(DISK, DiskWorld, 20)
    assert min(seen[what] for what in ("killed within", "power cuts", "outages", "doubles")) > 0, seen


def test_a_succeeded_syncer_leaves_the_tape_of_a_volume_alone() -> None:
    """Its record was durable before its successor began, and its line would have come after."""
    assert run_world(replace(DISK, doubles=0.5, seed=3), DiskWorld)["doubles"]


@pytest.mark.promise(
    "One flipped bit anywhere in a volume takes one fragment back by one version at most, and no job ends by it",
    section="Syncer",
)
@pytest.mark.slow
def test_one_flipped_bit_costs_one_version_of_one_fragment_at_most() -> None:
    seen = run_worlds(FLIPPED, DiskWorld, 20)
    assert seen["flips"] > 10 and seen["power cuts"], seen


# Where a power cut brings a torn line back, the next start cuts it off again, and the store has its record: nothing is
# lost (test_tape.py).
REPEATED = {"diloco_syncer.store.tape._cut_torn_line"}


@pytest.mark.slow
def test_the_worlds_notice_each_flush_that_is_left_out() -> None:
    callers = set[str]().union(*(simulate(replace(DISK, seed=s), DiskWorld).disk.flushed_by for s in range(3)))
    callers -= REPEATED
    assert len(callers) >= 6, callers
    unnoticed = [caller for caller in sorted(callers) if not is_noticed(replace(DISK, left_out=caller))]
    assert not unnoticed, unnoticed


def is_noticed(setup: DiskSetup) -> bool:
    try:
        run_worlds(setup, DiskWorld, 40)
    except AssertionError:
        return True
    return False


@pytest.mark.slow
def test_syncers_on_a_bucket_that_loses_answers_lose_nothing() -> None:
    seen = run_worlds(BUCKET, BucketWorld, 20)
    assert min(seen[what] for what in ("outages", "doubles", "crashes")) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"lag": 5.0}, {"overwrites": True}], ids=["lag", "overwrites"])
def test_the_worlds_notice_a_service_that_no_store_may_lie_in_and_its_start_refuses_it(fault: dict[str, Any]) -> None:
    wrong = replace(BUCKET, doubles=4.0, **fault)
    with pytest.raises(AssertionError):
        run_worlds(replace(wrong, unprobed=True), BucketWorld, 20)
    refused = BucketWorld(replace(wrong, seed=0))
    refused.run(limit=60.0)
    assert refused.newest is None, "a syncer has begun"


@pytest.mark.slow
def test_no_model_of_a_learners_own_is_taken_back() -> None:
    seen = run_worlds(FORGED, ShellWorld, 20)
    assert seen["forged"] > 5 and seen["taken"], seen
