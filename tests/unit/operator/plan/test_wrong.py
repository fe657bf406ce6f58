"""The plan against a small cluster: wrong specs and foreign objects, and lost regions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_operator import names
from diloco_operator.job import Placement, read_job
from diloco_operator.model import ApplyError, ClusterEvent, PlanMemory, Ref
from diloco_operator.plan.conditions import decide
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.conditions.decide import STALLED_SECONDS
from diloco_operator.plan.planning import plan_job
from diloco_operator.plan.view import View
from diloco_protocol.vocabulary import LABEL_JOB
from operator_world import SETTINGS, World, job_object, started

HERE = Placement(True, ())

# ------------------------------------------------------------------ wrong things


def test_a_foreign_object_stops_the_job_and_is_never_touched() -> None:
    world = World(job_object())
    ref = names.settings_map("job")
    foreign = {"metadata": {"name": ref.name, "uid": "f", "labels": {}}, "data": {"mine": "yes"}}
    world.foreign[ref] = foreign
    world.run(30)
    assert world.truth("NameConflict") == "True" and ref.name in world.condition("NameConflict")["message"]
    assert not world.pods and world.foreign[ref] is foreign and world.told("NameConflict") == 1
    assert world.truth("Ready") == "False"
    del world.foreign[ref]
    world.until(World.whole)
    assert world.truth("NameConflict") == "False" and world.told("NameConflictOver") == 1


def refused(world: World, kind: str, name: str, reason: Any, *, seconds: float) -> None:
    """The writes of one object are not taken for so long."""
    take, world.objects = world._apply, {r: o for r, o in world.objects.items() if r != (kind, name)}

    def apply(made: Any) -> None:
        kept = tuple(m for m in made.apply if (m["kind"], m["metadata"]["name"]) != (kind, name))
        take(replace(made, apply=kept))
        world.objects.pop(Ref(kind, name), None)
        world.apply_errors = (*world.apply_errors, ApplyError(Ref(kind, name), reason, "the webhook w does not answer"))

    world._apply = apply  # type: ignore[method-assign]
    world.run(seconds)
    world._apply = take  # type: ignore[method-assign]


@pytest.mark.promise("Stalled is True where a person has to act, and names who refuses what")
def test_a_webhook_that_stays_away_is_stalled_after_a_patience_and_a_quota_is_not() -> None:
    for reason, word, stalled in (("webhook", "WebhookUnavailable", "True"), ("quota", "QuotaExceeded", "False")):
        world = World(job_object())
        refused(world, "StatefulSet", "job-local", reason, seconds=STALLED_SECONDS - 10)
        assert world.condition("Ready")["reason"] == word and world.truth("Stalled") == "False"
        refused(world, "StatefulSet", "job-local", reason, seconds=20)
        assert world.truth("Stalled") == stalled, world.condition("Stalled")
        world.apply_errors = ()
        world.until(World.whole)
        assert world.truth("Stalled") == "False"


def test_a_name_that_is_taken_needs_a_person() -> None:
    world = World(job_object())
    ref = names.settings_map("job")
    world.foreign[ref] = {"metadata": {"name": ref.name, "uid": "f", "labels": {}}}
    world.run(30)
    assert world.condition("Stalled")["reason"] == "NameConflict" and world.truth("Stalled") == "True"


@pytest.mark.promise("In a namespace that is being deleted nothing is made any more, and learners hear of the end")
def test_in_a_namespace_that_ends_nothing_is_made_and_learners_are_told() -> None:
    world = started()
    told = len(world.events)
    world.apply_errors = (ApplyError(Ref("Service", "job-syncer"), "terminating", "it is being terminated"),)
    world.run(30)
    assert world.syncer.phase == "deleted" and not world.plans[-1].apply
    assert world.condition("Ready")["reason"] == "NamespaceTerminating" and len(world.events) == told


def test_an_object_with_our_label_and_another_owner_is_foreign() -> None:
    world = started()
    ref = Ref("ConfigMap", "stray")
    world.foreign[ref] = {
        "kind": "ConfigMap",
        "metadata": {
            "name": "stray",
            "uid": "f",
            "labels": {LABEL_JOB: "job"},
            "ownerReferences": [{"controller": True, "uid": "somebody else"}],
        },
    }
    world.run(60)  # _check holds each plan to it


def test_an_invalid_spec_touches_nothing() -> None:
    world = started()
    objects, uids = dict(world.objects), set(world.pods)
    world.edit(sync={"quorum": 9, "overlap": 500})
    world.run(30)
    ready = world.condition("Ready")
    assert ready["reason"] == "InvalidSpec" and "sync.quorum" in ready["message"]
    assert "sync.overlap" in ready["message"] and world.status["phase"] == "Invalid"
    assert world.status["observedGeneration"] == 2 and world.status["startTime"]
    assert not world.plans[-1].apply and set(world.pods) == uids and world.told("InvalidSpec") == 1
    assert {r: o["metadata"]["generation"] for r, o in world.objects.items()} == {
        r: o["metadata"]["generation"] for r, o in objects.items()
    }
    world.edit(sync={"quorum": 1})
    world.until(World.whole)
    assert set(world.pods) == uids


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"syncer": {"tls": {"secretName": "mine"}}}, "Unsupported", ["learners.credentials.secretName"]),
        (
            {"syncer": {"cluster": "a"}, "regions": [{"name": "local", "cluster": "a", "learners": 3}]},
            "NotPlaced",
            ["cluster a", "cluster.name"],
        ),
        (
            {"learners": {"podTemplate": {"spec": {"restartPolicy": "Never"}}}},
            "PodTemplate",
            ["spec.learners.podTemplate.spec.restartPolicy"],
        ),
    ],
)
def test_a_job_that_is_not_taken_keeps_what_it_has(spec: dict[str, Any], reason: str, words: list[str]) -> None:
    fresh = World(job_object(**spec))
    fresh.run(20)
    assert fresh.condition("Ready")["reason"] == reason and not fresh.objects
    assert all(word in fresh.condition("Ready")["message"] for word in words)
    assert fresh.told(reason) == 1 and fresh.status["phase"] == "Pending"

    world = started()
    before = world.job["spec"]
    uids = set(world.pods)
    world.edit(**spec)
    world.run(30)
    assert world.condition("Ready")["reason"] == reason and set(world.pods) == uids
    world.job["spec"] = {}
    world.edit(**before)
    world.until(World.whole)
    assert set(world.pods) == uids


def test_a_fault_that_the_dry_run_finds_is_told_and_heals() -> None:
    world = World(job_object(count=1))
    world.run(5)
    fault = ApplyError(names.stateful_set("job", "local"), "invalid", "containers[0].ports[0].containerPort: wrong")
    real = world._apply

    def refusing(made: Any) -> None:
        real(made)
        world.apply_errors = (*world.apply_errors, fault)
        world.next_turn = world.now

    world._apply = refusing  # type: ignore[method-assign]
    world.run(20)
    ready = world.condition("Ready")
    assert ready["reason"] == "Refused" and "containerPort" in ready["message"]
    assert world.told("Refused") == 1
    world._apply = real  # type: ignore[method-assign]
    world.apply_errors = ()
    world.until(World.whole)


def refusing(world: World, *faults: ApplyError) -> None:
    """Let the API server refuse what the plan has of these objects, in a dry run too."""

    def apply(made: Any) -> None:
        had = {Ref(one["kind"], one["metadata"]["name"]) for one in (*made.apply, *made.tries)}
        world.apply_errors, before = tuple([fault for fault in faults if fault.ref in had]), world.apply_errors
        world.next_turn = world.now if world.apply_errors != before else world.next_turn

    world._apply = apply  # type: ignore[method-assign]


def test_a_template_at_fault_is_told_while_the_job_waits_for_its_turn() -> None:
    world = World(job_object(suspend=True))
    kinds = {"PersistentVolumeClaim", "Deployment", "StatefulSet"}
    assert {one["kind"] for one in world.turn().tries} == kinds
    fault = ApplyError(names.stateful_set("job", "local"), "invalid", "spec.template.spec.nodeSelectr: no such field")
    refusing(world, fault, ApplyError(names.claim("job"), "quota", "exceeded quota: small"))
    world.run(30)
    assert not world.objects and world.truth("Suspended") == "True" and not world.status.get("startTime")
    ready = world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Refused") and "nodeSelectr" in ready["message"]
    assert "quota" not in ready["message"]  # it may be free when the job's turn comes
    assert world.truth("Stalled") == "True" and world.told("Refused") == 1
    refusing(world)
    world.edit(learners={})
    world.run(5)
    assert (world.truth("Ready"), world.truth("Stalled")) == ("True", "False")


def test_a_template_that_is_edited_while_the_job_is_suspended_is_tried_then() -> None:
    world = started(1)
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True")
    fault = ApplyError(names.stateful_set("job", "local"), "policy", "denied the request: no such registry")
    refusing(world, fault)
    world.edit(learners={"podTemplate": {"metadata": {"labels": {"a": "b"}}}})
    world.run(5)
    assert world.condition("Ready")["reason"] == "Refused" and world.truth("Suspended") == "True"
    assert world.truth("Stalled") == "True"


def test_what_is_good_to_have_does_not_stop_training() -> None:
    world = started(1)
    fault = ApplyError(Ref("PodDisruptionBudget", "job-local"), "forbidden", "poddisruptionbudgets is forbidden")
    world._apply, real = (lambda made: None), world._apply  # type: ignore[method-assign, assignment]
    world.apply_errors, world.next_turn = (fault,), world.now
    world.run(20)
    assert world.truth("Ready") == "True" and world.truth("Degraded") == "True"
    assert "poddisruptionbudgets" in world.condition("Degraded")["message"] and world.told("ApplyFailed") == 1
    world._apply = real  # type: ignore[method-assign]
    world.until(lambda w: w.truth("Degraded") == "False", 30)


def test_a_missing_secret_is_made_again() -> None:
    world = started(1)
    name = names.secret_name("job", "learner", world.job["metadata"]["uid"])
    assert name in world.secrets and not any(s.missed for s in world.plans[-1].secrets)
    world.delete_pod("job-local-0", force=True)
    world.run(0.5)
    world.cluster_events.append(
        ClusterEvent(
            "Pod",
            "job-local-0",
            "FailedMount",
            f'MountVolume.SetUp failed for volume "credentials" : secret "{name}" not found',
            time=world.now,
        )
    )
    made = world.turn()
    assert [s.name for s in made.secrets if s.missed] == [name]
    (obstacle,) = [
        pod.obstacle
        for pod in View(world.observed(), world.memory, SETTINGS, read_job(world.job), here=HERE).pods
        if pod.obstacle
    ]
    assert obstacle.secret == name and obstacle.message.endswith("not found; the operator makes it again")


def test_three_learners_with_one_obstacle_are_one_line() -> None:
    world = World(job_object())
    world.unschedulable = {f"job-local-{index}" for index in range(3)}
    world.run(60)
    said = world.condition("Degraded")["message"]
    assert (
        said.startswith("Region local: job-local-0, job-local-1, job-local-2: no node takes it")
        and said.count("no node") == 1
    )


def test_one_refusal_of_several_objects_is_one_sentence_with_one_cure() -> None:
    world = World(job_object(regions=[{"name": "a", "learners": 1}, {"name": "b", "learners": 1}]))
    refs = [names.stateful_set("job", region) for region in ("a", "b")]
    why = "the webhook w does not answer the API server. {0}: no route"
    refusing(world, *(ApplyError(ref, "webhook", why.format(ref.name)) for ref in refs))
    made = world.turn()
    world.objects = {
        Ref(one["kind"], one["metadata"]["name"]): {**one, "metadata": {**one["metadata"], "uid": "u", "generation": 1}}
        for one in made.apply
    }
    world.run(10)
    said = world.condition("Ready")["message"]
    assert (
        said.startswith("StatefulSet job-a, StatefulSet job-b: the webhook w") and said.count("Mend that webhook") == 1
    )


@pytest.mark.promise("A job that is made again under its name counts no loss of the pods that the earlier one left")
def test_pods_of_an_earlier_job_of_the_name_are_no_loss() -> None:
    world = started(2)
    for pod in list(world.pods.values()):
        world.delete_pod(pod.name)
    again = job_object(count=2)
    again["metadata"]["uid"] = "bbbbbbbb-0000-0000-0000-000000000002"
    world.job, world.memory, world.objects, world.events = again, PlanMemory(), {}, []
    world.syncer, world.asked, world.plans, world.next_turn = type(world.syncer)(), None, [], world.now
    left = set(world.pods)
    world.run(1)
    assert set(world.pods) >= left, "they still end"
    world.until(World.whole)
    assert not left & set(world.pods)
    assert not any(world.told(gone) for gone in ("SyncerGone", "LearnerGone", "LearnerReplaced", "SyncerReplaced"))
    assert "replacements" not in world.status


def test_before_a_syncer_has_served_nobody_is_said_to_go_on_alone() -> None:
    world = World(job_object())
    world.run(1)
    assert world.condition("QuorumMet")["message"] == "The syncer cannot be asked yet."
    world.until(World.whole)
    world.syncer_silent = True
    world.run(60)
    assert "alone" in world.condition("QuorumMet")["message"]


# ------------------------------------------------------------------ lost regions


def test_a_lost_region_is_told_and_comes_back() -> None:
    regions = [{"name": "near", "learners": 2}, {"name": "far", "learners": 1}]
    world = started(regions=regions, failurePolicy={"regionLostSeconds": 60, "onRegionLost": "Continue"})
    world.unschedulable = {"job-far-0"}
    world.delete_pod("job-far-0", force=True)
    world.run(40)
    assert world.truth("RegionLost") == "False" and world.region("far")["lostSince"]
    assert world.region("far")["state"] == "Starting"
    since = world.region("far")["lostSince"]
    world.memory = PlanMemory()  # the operator restarts: the time goes on
    world.run(40)
    assert world.truth("RegionLost") == "True" and "far" in world.condition("RegionLost")["message"]
    assert world.region("far")["lostSince"] == since and world.told("RegionLost") == 1
    assert world.region("far")["state"] == "Lost"
    assert world.truth("Ready") == "True", "two go on"
    world.unschedulable = set()
    world.until(World.whole)
    assert world.truth("RegionLost") == "False" and world.told("RegionBack") == 1
    assert "lostSince" not in world.region("far")


def test_a_region_is_lost_at_the_moment_for_which_the_next_turn_is_planned() -> None:
    """In floats a sum less one addend may be less than the other, as in a quarter of all moments."""
    patience = 60.1
    since = next(s / 7 for s in range(10_000) if (s / 7 + patience) - s / 7 < patience)
    policy = SimpleNamespace(region_lost_seconds=patience)
    spec = SimpleNamespace(failure_policy=policy)
    found = SimpleNamespace(regions=SimpleNamespace(lost={"far": since}))
    for now, status in ((since + patience, "True"), (since + patience - 0.1, "False")):
        view = SimpleNamespace(job=SimpleNamespace(spec=spec), now=now, regions_lost=[])
        out = ConditionSet([], 1, now)
        decide._decide_region_lost(view, found, out)  # type: ignore[arg-type]
        assert out.found["RegionLost"]["status"] == status


def test_a_region_that_the_syncer_counts_as_lost_is_lost_here() -> None:
    """It acts by its own time, which may be over sooner than this one's."""
    regions = [{"name": "near", "learners": 2}, {"name": "far", "learners": 1}]
    world = started(regions=regions, failurePolicy={"regionLostSeconds": 600})
    world.unschedulable = {"job-far-0"}
    world.delete_pod("job-far-0", force=True)
    world.run(60)
    assert world.truth("RegionLost") == "False" and world.region("far")["lostSince"]
    world.syncer.lost = ["far"]
    world.run(20)
    assert world.truth("RegionLost") == "True" and "far" in world.condition("RegionLost")["message"]


def test_a_job_that_holds_for_a_lost_region_is_not_ready() -> None:
    """With a quorum: of K learners all are there, and yet nothing is merged."""
    world = started(regions=[{"name": "near", "learners": 2}, {"name": "far", "learners": 1}])
    world.syncer.misses = "nobody of region far was heard for 15 s, and failurePolicy.onRegionLost is Hold"
    world.run(40)
    assert world.status["phase"] == "Holding" and world.truth("QuorumMet") == "True"
    assert world.truth("Ready") == "False" and world.condition("Ready")["reason"] == "Holding"
    assert world.syncer.misses in world.condition("Ready")["message"]
    world.syncer.misses = ""
    world.run(40)
    assert world.status["phase"] == "Running" and world.truth("Ready") == "True"


def test_the_plan_raises_nothing_whatever_the_status_says() -> None:
    """A status that an older or a foreign hand wrote is no reason to stop."""
    world = started()
    observed = world.observed()
    for status in (
        {},
        {"conditions": None, "regions": None, "replacements": None, "release": None},
        {"progress": {"tokens": "many", "pace": 3}, "syncer": {"mood": "good"}, "replacements": {"total": 2}},
        {"phase": "Sleeping", "conditions": [{}], "startTime": "2023-11-14T22:13:21Z"},
    ):
        observed.job["status"] = status
        plan_job(observed, world.memory, SETTINGS)


@pytest.mark.promise(
    "If a job's memory or volume is too small for its model, the job names the field, once; the bound for "
    "the volume is the store's own"
)
def test_a_job_that_asks_for_less_than_its_model_needs_is_told_once() -> None:
    world = started()
    document = world.document
    large = {"parameters": 10**9, "versions": [0] * 24}
    world.document = lambda: document().model_copy(update=large)  # type: ignore[method-assign]
    world.run(60)
    degraded = world.condition("Degraded")
    assert degraded["status"] == "True" and degraded["reason"] == "ResourcesTooSmall"
    assert "syncer.storage.size is 10Gi" in degraded["message"] and "requests.memory is 256Mi" in degraded["message"]
    assert world.told("ResourcesTooSmall") == 1 and world.truth("Ready") == "True", "training goes on"
    world.memory, world.next_turn = PlanMemory(), world.now  # the operator restarts, and its first call gets no answer
    world.asked_at, world.syncer_silent = -1e9, True
    world.run(5)
    world.syncer_silent = False
    world.run(60)
    assert world.told("ResourcesTooSmall") == 1 and world.condition("Degraded") == degraded
    resources = {"containers": [{"name": "syncer", "resources": {"requests": {"memory": "20Gi"}}}]}
    world.edit(syncer={"storage": {"size": "100Gi"}, "podTemplate": {"spec": resources}})
    world.until(lambda w: w.truth("Degraded") == "False", 120)
