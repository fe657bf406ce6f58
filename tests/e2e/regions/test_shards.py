"""Shards of the syncer in pods of their own, which learners of other clusters reach at ports above the syncer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..buckets import bucket
from ..test_shard_pods import back_again, serving, shard_pod
from .world import EU, HUB, US, RunJob, World, contributes

pytestmark = pytest.mark.timeout(900)


def test_learners_of_other_clusters_reach_each_shard(world: World, run_job: RunJob, tmp_path: Path) -> None:
    with bucket(world.hub, tmp_path) as syncer:
        job = run_job("sharded", {HUB: 1, EU: 1, US: 1}, syncer={**syncer, "shards": 2, "shardPods": {}})
        before = job.in_merges(3)
        assert serving(before), before["shards"]
        for region in (HUB, EU, US):
            contributes(job, region, 120)
        pods = world.identities("sharded", HUB, EU, US)
        world.hub.kubectl("delete", "pod", shard_pod(job, 0)["metadata"]["name"], "-n", world.namespace, "--wait=false")
        back_again(job, 0, before)
        for region in (HUB, EU, US):
            contributes(job, region, 120)
        assert world.identities("sharded", HUB, EU, US) == pods, "a learner was started again"
        job.exact()
        world.delete("sharded")  # while its bucket is there
