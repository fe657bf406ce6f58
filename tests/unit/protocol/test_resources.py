"""What a job's programs need: the formulas, and the fields that ask for less."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_protocol.arrays import codec
from diloco_protocol.resources import (
    BASE_BYTES,
    LearnerNeeds,
    even_sizes,
    find_shortages,
    learner_needs,
    needs,
    payload_bytes,
    record_floats,
    shard_memory,
    syncer_pod_memory,
    versions_kept,
)
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.job_spec import JobSpec

BILLION = even_sizes(10**9, 24)


def spec(**fields: Any) -> JobSpec:
    head = {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "job"}}
    body = {"training": {"stop": {"steps": 9}}, "regions": [{"learners": 8}]} | fields
    body["learners"] = {"command": ["true"]} | body.get("learners", {})
    return DiLoCoJob.model_validate({**head, "spec": body}).spec


def pod(container: str, **resources: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": container, "resources": resources}]}}}


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
@pytest.mark.parametrize("elements", [1, 127, 128, 129, 1_000_003])
def test_payloads_are_as_large_as_the_codec_makes_them(encoding: str, elements: int) -> None:
    exact = codec.encoded_bytes(encoding, elements)
    assert exact <= payload_bytes(encoding, elements) <= exact + 260


def test_a_billion_parameters() -> None:
    given = spec()
    assert record_floats(given.sync) == 2 and versions_kept(given, 24) == 6, "Θ and nesterov's buffer, six versions"
    found = needs(given, BILLION)
    assert 48e9 < found.syncer_volume < 70e9 and 16e9 < found.syncer_memory < 23e9 and found.learner_memory == 8e9
    more = needs(spec(sync={"outer": {"optimizer": "adamw"}, "compression": {"down": "delta-int4"}}), BILLION)
    assert more.syncer_volume - found.syncer_volume == 6 * 8 * 10**9 and more.syncer_memory > found.syncer_memory
    beside = needs(spec(output={"uri": "/var/lib/diloco/output"}), BILLION)
    assert beside.syncer_volume - found.syncer_volume == 4 * 10**9, "the merged model lies beside the store"
    assert versions_kept(given, 1) > versions_kept(given, 24), "states are not made at every merge"


def test_a_learner_of_several_ranks_keeps_on_its_leaders_host_what_one_process_does() -> None:
    groups = [{"name": "eu", "learners": 4, "processes": 8, "pods": 2, "parallel": {"replicate": 2}}]
    model = {"model": {"config": {"model_type": "llama"}}, "data": {"paths": ["a"]}, "stop": {"steps": 9}}
    built_in = spec(training=model, regions=groups, learners={"command": None})
    found = learner_needs(built_in, BILLION, "eu")
    shared = 8 * max(BILLION)
    assert found.memory == 8e9 + shared and found.other_memory == 0, "the first rank alone builds the model"
    assert found.shared_memory == shared and learner_needs(spec(), BILLION, "eu").shared_memory == 0
    assert found.device_memory == (2 * 16 * 10**9 + 2 * 8 * max(BILLION)) // 16
    on_cpu = spec(training={**model, "device": "cpu"}, regions=groups, learners={"command": None})
    assert learner_needs(on_cpu, BILLION, "eu") == LearnerNeeds(24 * 10**9 + shared, 16 * 10**9, 0, shared)
    own = learner_needs(spec(regions=groups), BILLION, "eu")
    assert own.device_memory < found.device_memory, "of its own program the least"
    low = spec(regions=[{**groups[0], **pod("learner", limits={"memory": "2Gi"})}])
    said = find_shortages(low, BILLION)[-1].message
    assert "(region eu) needs at least 7948Mi in its first pod for this model, 318Mi of it in /dev/shm: raise" in said


@pytest.mark.promise(
    "If a job's memory or volume is too small for its model, the job names the field, once; the bound for "
    "the volume is the store's own"
)
def test_the_fields_that_ask_for_less_are_named() -> None:
    regions = [{"name": "eu", "learners": 4}, {"name": "us", "learners": 4, **pod("learner", limits={"memory": "2Gi"})}]
    given = spec(
        regions=regions,
        syncer=pod("syncer", limits={"memory": "4Gi"}, requests={"memory": "1Gi"}),
        learners=pod("learner", limits={"memory": "64Gi"}),
    )
    found = {one.path: one.message for one in find_shortages(given, BILLION)}
    assert list(found) == [
        "syncer.podTemplate.spec.containers[syncer].resources.limits.memory",
        "syncer.podTemplate.spec.containers[syncer].resources.requests.memory",
        "syncer.storage.size",
        "regions[1].podTemplate.spec.containers[learner].resources.limits.memory",
    ]
    assert "is 4Gi" in next(iter(found.values())) and "is 10Gi" in found["syncer.storage.size"]
    assert "region us" in list(found.values())[-1]


def test_what_is_enough_is_not_named() -> None:
    assert not find_shortages(spec(), even_sizes(10**6, 24)), "the defaults are for small models"
    assert [one.path for one in find_shortages(spec(), BILLION)] == [
        "syncer.podTemplate.spec.containers[syncer].resources.requests.memory",
        "syncer.storage.size",
    ]
    enough = pod("syncer", requests={"memory": "20Gi"})
    assert not find_shortages(spec(syncer={**enough, "storage": {"size": "100Gi"}}), BILLION)
    assert not find_shortages(spec(syncer={**enough, "storage": {"uri": "s3://bucket/job"}}), BILLION)
    assert not find_shortages(spec(syncer=enough), BILLION, volume=200 << 30), "the volume that is there is larger"


def test_the_pods_of_a_syncer_and_of_its_shards_have_needs_of_their_own() -> None:
    """The syncer reads the records of the whole model as it starts. A shard has its part of them, and of the pushes."""
    pods = {"shards": 4, "shardPods": {}, "storage": {"uri": "s3://bucket/job"}}
    given = spec(syncer=pods)
    beside = {name: pods[name] for name in ("shards", "storage")}
    assert syncer_pod_memory(spec(syncer=beside), BILLION) == needs(given, BILLION).syncer_memory
    assert syncer_pod_memory(given, BILLION) == BASE_BYTES + 8 * 10**9, "Θ and the momentum"
    assert shard_memory(given, BILLION, 4) < needs(given, BILLION).syncer_memory / 3
    name = "spec.containers[syncer].resources"
    few = [f"syncer.{one}odTemplate.{name}.requests.memory" for one in ("p", "shardPods.p")]
    assert [one.path for one in find_shortages(given, BILLION)] == few
    enough = pod("syncer", requests={"memory": "8Gi"})
    assert not find_shortages(spec(syncer={**pods, **enough}), BILLION), "the syncer's template is theirs too"
    low = {"shardPods": pod("syncer", limits={"memory": "2Gi"})}
    (found,) = find_shortages(spec(syncer={**pods, **enough, **low}), BILLION)
    assert found.path == f"syncer.shardPods.podTemplate.{name}.limits.memory" and "a shard is killed" in found.message


def test_wrong_podtemplates_are_left_to_who_checks_them() -> None:
    for wrong in ({"spec": []}, {"spec": {"containers": 3}}, {"spec": {"containers": [7, {"name": "syncer"}]}}):
        find_shortages(spec(syncer={"podTemplate": wrong}), BILLION)
    odd = pod("syncer", limits={"memory": "much"}, requests=None)
    assert len(find_shortages(spec(syncer=odd), BILLION)) == 2
