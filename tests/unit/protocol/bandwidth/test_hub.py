"""What a hub needs at its job's pace: the measured costs, what they add up to, and the words about shards."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from diloco_protocol.arrays import codec
from diloco_protocol.bandwidth import hub
from diloco_protocol.bandwidth.hub import HubNeeds, hub_needs, hub_shortage
from diloco_protocol.resources import BASE_BYTES, even_sizes, needs, shard_memory, syncer_memory
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.job_spec import JobSpec
from repository import ROOT

FIVE = 5 * 10**9


def spec(learners: int = 8, spares: int = 0, **sync: Any) -> JobSpec:
    job = {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "job"}}
    body = {"training": {"stop": {"steps": 9}}, "regions": [{"learners": learners, "spares": spares}]}
    body |= {"learners": {"command": ["true"]}, "sync": {"fragments": 24, "every": 24} | sync}
    return DiLoCoJob.model_validate({**job, "spec": body}).spec


def with_shards(count: int) -> JobSpec:
    given = spec()
    return given.model_copy(update={"syncer": given.syncer.model_copy(update={"shards": count})})


def needed(parameters: int = FIVE, step_seconds: float = 1.0, learners: int = 8, **more: Any) -> HubNeeds:
    given = spec(learners, **more)
    return hub_needs(given, even_sizes(parameters, given.sync.fragments), step_seconds)


def recorded() -> dict[str, float]:
    """The CPU-seconds of a GB that the results have, by row."""
    page = (ROOT / "docs/results/parts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (TLS, [^|]+) \|[^|]*\|[^|]*\| ([0-9.]+) \|", page, re.MULTILINE)
    return {name: float(seconds) for name, seconds in rows}


def test_the_costs_are_those_of_the_results() -> None:
    found = recorded()
    for encoding in ("float32", "bfloat16", "int4"):
        values = 10**6 / codec.encoded_bytes(encoding, 10**6)
        cost = 1e9 * (hub.UP_BYTE + values * hub.UP_VALUE)
        assert cost == pytest.approx(found[f"TLS, {encoding} up"], rel=0.02)
    downs = [seconds for name, seconds in found.items() if " down" in name]
    assert len(downs) == 3 and max(downs) == pytest.approx(1e9 * hub.DOWN_BYTE)


def test_the_papers_point_is_reproduced() -> None:
    """208 million values a second; each of eight learners pushes 4.125 bits of them, and takes 16."""
    found = needed()
    values = FIVE / 24
    assert found.bytes_in == pytest.approx(8 * values * 4.125 / 8, rel=1e-4)
    assert found.bytes_out == pytest.approx(8 * values * 2, rel=1e-4)
    assert found.byte_cores == pytest.approx(1.6e-9 * found.bytes_in + 0.99e-9 * found.bytes_out)
    assert found.norm_cores == pytest.approx(0.52e-9 * 8 * values)
    assert found.merge_cores == pytest.approx(values * (8 * 0.75e-9 + 20e-9))
    assert found.cores == pytest.approx(10.96, abs=0.01) and found.written == pytest.approx(8 * values)
    assert found.wanted == found.shards == 8
    one_learner = needed(learners=1, compression={"down": "delta-int4"})
    assert one_learner.written == pytest.approx(12 * values), "what the delta dropped is in the record too"


def test_more_of_anything_is_more_work() -> None:
    least = needed()
    for more in (
        needed(parameters=2 * FIVE),
        needed(learners=16),
        needed(step_seconds=0.5),
        needed(spares=4),
        needed(every=12, fragments=12),
        needed(compression={"up": "int8"}),
        needed(compression={"down": "float32"}),
    ):
        assert more.cores > least.cores and more.wanted >= least.wanted
    assert needed(every=48).cores == pytest.approx(least.cores / 2, rel=1e-3)


def test_the_busier_of_two_threads_decides() -> None:
    """Bytes: many readers. Merges: one learner, of which the bytes are few."""
    bytes_decide, merges_decide = needed(learners=20), needed(learners=1)
    assert bytes_decide.byte_cores > bytes_decide.merge_cores
    assert merges_decide.merge_cores > merges_decide.byte_cores
    for found in (bytes_decide, merges_decide, needed(learners=2), needed(step_seconds=3)):
        busier = max(found.byte_cores, found.merge_cores)
        fragments = math.ceil(24 / found.wanted)  # of the shard that has most
        assert busier * fragments / 24 <= hub.BUSY < busier * math.ceil(24 / (found.wanted - 1)) / 24
    small = needed(parameters=10**6)
    assert small.wanted == small.shards == 1


def test_the_shards_of_a_hub_share_its_memory() -> None:
    given, sizes = spec(), even_sizes(FIVE, 24)
    whole = needs(given, sizes).syncer_memory
    assert syncer_memory(given, sizes, 1) == shard_memory(given, sizes, 1) == whole
    merge = shard_memory(given, sizes, 24) - BASE_BYTES
    for shards in (2, 8, 24):
        both = syncer_memory(given, sizes, shards)
        assert whole < both <= whole + shards * (BASE_BYTES + merge)
        assert both <= shards * shard_memory(given, sizes, shards) + BASE_BYTES
        assert shard_memory(given, sizes, shards) < shard_memory(given, sizes, shards - 1)
    assert shard_memory(given, [2 * sizes[0], *sizes[1:]], 24) > shard_memory(given, sizes, 24), "of the largest"
    for job, counted in ((with_shards(8), 8), (with_shards(64), 24)):
        assert needs(job, sizes).syncer_memory == syncer_memory(given, sizes, counted)
    found = needed()
    assert (found.memory, found.shard_memory) == (syncer_memory(given, sizes, 8), shard_memory(given, sizes, 8))


def test_what_is_said_of_shards() -> None:
    given = spec()
    assert hub_shortage(given, 24, needed(parameters=10**6)) == ""
    few = hub_shortage(given, 24, needed())
    assert few.startswith("is 1, and one process cannot carry this job (11 cores)") and "set syncer.shards: 8" in few
    eight = with_shards(8)
    assert hub_shortage(eight, 24, needed()) == ""
    assert hub_shortage(eight, 24, needed(learners=16)).startswith("is 8, and 8 processes cannot carry this job")
    huge = hub_shortage(eight, 24, needed(parameters=14 * FIVE))
    assert "has work for 109 shards" in huge and "there are 24 fragments" in huge and "raise sync.every" in huge
