"""The plan under random faults: whatever happens, the invariants of operator_world.py hold at every turn,
and when it is over the job comes back to what it should be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco_operator import names
from diloco_operator.model import PlanMemory
from diloco_operator.plan.job_status import differs_beyond_progress
from example_counts import share_of
from operator_world import World, job_object

FAULTS = (
    "delete",
    "force",
    "lose",
    "back",
    "crash",
    "mend",
    "quota",
    "no-quota",
    "full",
    "room",
    "image",
    "broken",
    "scale",
    "suspend",
    "resume",
    "silence",
    "speak",
    "restart",
    "away",
    "return",
    "remove",
    "deaf",
    "syncer",
    "settings",
    "evict",
)
REMOVABLE = (
    names.settings_map("job"),
    names.syncer_service("job"),
    names.stateful_set("job", "local"),
    names.stateful_set("job", "far"),
    names.syncer_deployment("job"),
    names.budget("job", "local"),
)


def happen(world: World, what: str, number: int) -> None:
    """One thing happens. ``number`` chooses among what there is."""
    learners = sorted(world.of("learner"), key=lambda p: p.name)
    victim = learners[number % len(learners)] if learners else None
    nodes = sorted(world.nodes)
    if what in ("delete", "force") and victim is not None:
        world.delete_pod(victim.name, force=what == "force")
    elif what == "evict" and victim is not None:
        world._condition(victim, "DisruptionTarget", True, "EvictionByEvictionAPI")
        world.delete_pod(victim.name)
    elif what == "syncer":
        for pod in world.of("syncer"):
            world._delete_pod(pod, force=bool(number % 2))
    elif what == "lose" and sum(world.nodes.values()) > 1:
        world.lose(nodes[number % len(nodes)])
    elif what == "back":
        for node in nodes:
            if not world.nodes[node]:
                world.back(node)
    elif what == "crash" and victim is not None:
        world.crashing[victim.name] = (1, 3, 137)[number % 3]
    elif what == "mend":
        world.crashing = {}
    elif what in ("quota", "no-quota"):
        world.quota = number % 7 if what == "quota" else None
    elif what in ("full", "room"):
        world.unschedulable = {victim.name} if what == "full" and victim is not None else set()
    elif what == "image":
        world.edit(learners=image(f"good:{number}"))
    elif what == "broken":
        world.edit(learners=image("broken:1"))
    elif what == "scale":
        world.edit(regions=regions(1 + number % 4, 1 + number % 2))
    elif what in ("suspend", "resume"):
        world.edit(suspend=what == "suspend")
    elif what in ("silence", "speak"):
        world.syncer_silent = what == "silence"
    elif what == "restart":
        world.memory = PlanMemory()
    elif what in ("away", "return"):
        world.operator_away = what == "away"
    elif what == "remove":
        ref = REMOVABLE[number % len(REMOVABLE)]
        if ref in world.objects:
            world.remove_object(ref)
    elif what == "deaf" and victim is not None:
        world.deaf.add(victim.uid)
    elif what == "settings":
        world.edit(sync={**world.job["spec"].get("sync", {}), "every": 24 + number})


def regions(local: int, far: int, spares: int = 0) -> list[dict[str, Any]]:
    return [{"name": "local", "learners": local, "spares": spares}, {"name": "far", "learners": far}]


def image(name: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"containers": [{"name": "learner", "image": name}]}}}


def heal(world: World) -> None:
    world.crashing, world.unschedulable, world.deaf = {}, set(), set()
    world.quota, world.syncer_silent, world.operator_away = None, False, False
    for node in world.nodes:
        if not world.nodes[node]:
            world.back(node)
    world.edit(suspend=False, learners=image("last:1"))


steps = st.lists(
    st.tuples(st.sampled_from(FAULTS), st.integers(0, 50), st.sampled_from([0.0, 0.5, 3.0, 12.0, 45.0])), max_size=12
)


jobs_and_faults = given(
    steps,
    st.integers(0, 1000),
    st.sampled_from([1, 2, 99]),
    st.sampled_from(["Wait", "ForceDelete"]),
    st.integers(0, 1),
)
any_speed = settings(deadline=None, suppress_health_check=list(HealthCheck))


@jobs_and_faults
@settings(any_speed, max_examples=share_of(8))
def test_whatever_happens_it_comes_back(
    story: list[tuple[str, int, float]], seed: int, quorum: int, policy: str, spares: int
) -> None:
    comes_back(story, seed, quorum, policy, spares=spares)


@pytest.mark.slow
@jobs_and_faults
@settings(any_speed, max_examples=40)
def test_whatever_happens_in_many_jobs_they_come_back(
    story: list[tuple[str, int, float]], seed: int, quorum: int, policy: str, spares: int
) -> None:
    comes_back(story, seed, quorum, policy, spares=spares)


def comes_back(story: list[tuple[str, int, float]], seed: int, quorum: int, policy: str, spares: int) -> None:
    spec: dict[str, Any] = {
        "regions": regions(3, 1, spares),
        # 99 stands for "every learner", also after the scaling that would break the rule.
        "sync": {"deterministic": True} if quorum == 99 else {"quorum": min(quorum, 2)},
        "nodeLoss": {"policy": policy, "afterSeconds": 20},
        "failurePolicy": {"maxReplacements": 100_000},
    }
    world = World(job_object(**spec), seed=seed)
    world.bad_images = {"broken:1"}
    for what, number, pause in story:
        happen(world, what, number)
        world.run(pause)
    heal(world)
    world.until(World.whole, 2500)
    world.until(lambda w: {p.image for p in w.of("learner")} == {"last:1"} and not w.plans[-1].deletes, 600)
    world.until(World.whole, 600)
    world.run(60)
    assert world.truth("Degraded") == "False" and world.truth("Failed") == "False", world.story()
    world.turn()
    one, before, two = world.turn(), world.status, world.turn()
    assert one.apply == two.apply and one.status == two.status and two.status is not None, world.story()
    assert not two.calls and not two.deletes and not two.events, (two, world.story())
    assert not differs_beyond_progress(before, two.status), world.story()
