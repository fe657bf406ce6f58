"""The plan against a small cluster (operator_world.py): a job's life. All converges, and is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from diloco_operator import names
from diloco_operator.model import PlanMemory, PlanSettings, ProgramAnswer
from diloco_operator.objects import pods
from operator_world import SETTINGS, World, idle, job_object, started, template

# ------------------------------------------------------------------ start and steady state


def test_a_job_starts_and_then_nothing_is_done() -> None:
    world = started()
    assert [e.reason for _, e in world.events] == ["Started", "QuorumMet"]
    assert world.status["startTime"] and world.status["release"] == {
        "operator": SETTINGS.release,
        "syncer": "diloco-syncer:1",
        "worker": "diloco-worker:1",
    }
    idle(world)
    assert world.plans[-1].wake_in == 20 and world.plans[-1].poll_syncer == 10
    before = len(world.plans)
    world.run(120)
    assert len(world.plans) - before <= 7
    assert len(world.events) == 2


def test_progress_is_in_the_status_as_the_syncer_says_it() -> None:
    world = started()
    document = world.document().model_copy(update={"progress": 0.399, "seconds_left": 61.6})
    world.document = lambda: document  # type: ignore[method-assign]
    world.run(90)
    progress = world.status["progress"]
    assert (progress["percent"], progress["secondsLeft"]) == (39, 62) and progress["storedAt"]
    assert progress["notMerged"] == document.tokens.pending


def test_settings_and_claim_come_before_what_holds_pods() -> None:
    world = World(job_object())
    first = world.turn()
    assert {m["kind"] for m in first.apply} == {
        "ConfigMap",
        "NetworkPolicy",
        "Service",
        "PodDisruptionBudget",
        "PersistentVolumeClaim",
    }
    assert first.wake_in < 1 and first.finalizer and not world.status.get("startTime")
    assert world.status["phase"] == "Pending"
    second = world.turn()
    assert [m["kind"] for m in second.apply if "template" in m.get("spec", {})] == ["Deployment", "StatefulSet"]
    assert world.status["startTime"]


def test_conditions_say_of_which_generation_they_are_and_since_when() -> None:
    world = started()

    def times() -> dict[str, str]:
        rows = world.status["conditions"]
        generation = world.job["metadata"]["generation"]
        assert {row["observedGeneration"] for row in rows} == {generation}, rows
        assert all(row["reason"] for row in rows)
        return {row["type"]: row["lastTransitionTime"] for row in rows}

    first = times()
    world.run(60)
    world.edit(failurePolicy={"maxReplacements": 77})
    world.until(World.whole)
    assert times() == first, "what holds has held since then"
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    then = times()
    changed = {kind for kind in then if then[kind] != first[kind]}
    assert changed == {"Ready", "QuorumMet", "SyncerReady", "Suspended", "Reconciling"}
    assert all(then[kind] > first[kind] for kind in changed)


def test_a_spare_takes_over_and_the_successor_stands_by() -> None:
    world = started(2, regions=[{"name": "local", "learners": 2, "spares": 1}])
    assert world.region()["desired"] == 3 and world.status["learners"] == "2/2"
    world.delete_pod("job-local-0")
    world.run(40)
    assert world.whole() and world.told("LearnerReplaced") == 1
    idle(world)


def test_an_operator_that_starts_anew_changes_and_tells_nothing() -> None:
    world = started()
    world.run(20)
    events, uids = len(world.events), set(world.pods)
    world.memory = PlanMemory()
    world.settings = PlanSettings(None, "diloco-system", "diloco-syncer:2", "diloco-worker:2")
    # Its first look is before the syncer has been asked.
    world.asked, before = ProgramAnswer(None, "this pod has not been asked yet"), world.status
    first = world.turn()
    assert first.status is not None and not first.events
    assert first.status["release"].pop("newer") == f"{SETTINGS.release}: diloco-syncer:2, diloco-worker:2"
    assert first.status == before
    idle(world)
    assert len(world.events) == events and set(world.pods) == uids
    world.edit(failurePolicy={"maxReplacements": 77})
    world.until(World.whole)
    idle(world)
    assert set(world.pods) == uids and world.status["release"]["worker"] == "diloco-worker:1"


def upgrade_operator(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 2: its syncer gets another flag, every pod another toleration, and both other images."""
    container = pods._container

    def with_flag(name: str, image: str, pull: str, command: list[str]) -> dict[str, Any]:
        return container(name, image, pull, [*command, "--new-flag"] if name == "syncer" else command)

    monkeypatch.setattr(pods, "_container", with_flag)
    monkeypatch.setattr(pods, "TOLERATION_SECONDS", 25)
    world.settings = replace(SETTINGS, syncer_image="diloco-syncer:2", worker_image="diloco-worker:2", release="2")
    world.memory = PlanMemory()


def templates(world: World) -> dict[str, Any]:
    return {
        ref.name: obj["spec"]["template"] for ref, obj in world.objects.items() if "template" in obj.get("spec", {})
    }


def is_mixed(template: dict[str, Any]) -> bool:
    """Whether an image of one release has the template of another."""
    text = json.dumps(template)
    marks = {'"tolerationSeconds": 25': ":2", '"tolerationSeconds": 20': ":1"}
    (image,) = (release for mark, release in marks.items() if mark in text)
    own = [one["image"] for one in template["spec"]["containers"] if one["image"].startswith("diloco-")]
    return any(not one.endswith(image) for one in own) or ("--new-flag" in text) != (
        image == ":2" and template["spec"]["containers"][0]["name"] == "syncer"
    )


@pytest.mark.promise(
    "After an upgrade of the operator, an edit of a field such as `ttlSecondsAfterFinished` changes no "
    "pod template and no image"
)
@pytest.mark.parametrize(
    "edit",
    [
        {"ttlSecondsAfterFinished": 1000},
        {"failurePolicy": {"maxReplacements": 77}},
        {"nodeLoss": {"policy": "ForceDelete"}},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_an_edit_after_an_upgrade_changes_no_template_and_no_image(
    edit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = started()
    uids, before = set(world.pods), templates(world)
    upgrade_operator(world, monkeypatch)
    world.run(60)
    world.edit(**edit)
    world.run(120)
    assert templates(world) == before and set(world.pods) == uids
    assert world.status["release"]["newer"] == "2: diloco-syncer:2, diloco-worker:2"
    idle(world)


def test_what_a_program_reads_reaches_it_after_an_upgrade_with_its_old_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = started()
    before = templates(world)
    upgrade_operator(world, monkeypatch)
    world.run(60)
    world.edit(sync={"quorum": 2})
    world.run(60)
    world.until(World.whole)
    after = templates(world)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"job-syncer"} and not any(map(is_mixed, after.values()))
    for one in (before["job-syncer"], after["job-syncer"]):
        del one["metadata"]["annotations"][names.INPUTS]
    assert after["job-syncer"] == before["job-syncer"]


@pytest.mark.promise("Template and image change together, and only when the user asks for it")
def test_an_edit_of_pods_after_an_upgrade_waits_for_the_users_word(monkeypatch: pytest.MonkeyPatch) -> None:
    world = started()
    uids, before = set(world.pods), templates(world)
    upgrade_operator(world, monkeypatch)
    world.run(60)
    own = {"spec": {"containers": [{"name": "learner", "env": [{"name": "MINE", "value": "1"}]}]}}
    world.edit(learners={"podTemplate": own})
    world.run(60)
    ready = world.condition("Ready")
    assert ready["reason"] == "UpgradeNeeded" and "diloco upgrade job" in ready["message"]
    assert templates(world) == before and set(world.pods) == uids
    world.edit(release="now")
    world.until(lambda w: not uids & set(w.pods))
    world.until(World.whole)
    assert not any(map(is_mixed, templates(world).values())) and "MINE" in json.dumps(templates(world))
    assert world.truth("Ready") == "True"


@pytest.mark.promise("Template and image change together, and only when the user asks for it")
def test_an_upgrade_moves_template_and_image_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = started()
    uids = set(world.pods)
    upgrade_operator(world, monkeypatch)
    world.run(60)
    world.edit(release="2026-11-22T15:00:00Z")
    while uids & set(world.pods):
        world.run(1)
        assert not any(map(is_mixed, templates(world).values()))
    world.until(World.whole)
    assert world.status["release"] == {
        "operator": "2",
        "asked": "2026-11-22T15:00:00Z",
        "syncer": "diloco-syncer:2",
        "worker": "diloco-worker:2",
    }
    uids = set(world.pods)
    world.edit(ttlSecondsAfterFinished=1000)
    world.run(120)
    assert set(world.pods) == uids
    idle(world)


def test_what_was_deleted_by_hand_after_an_upgrade_is_made_with_the_image_of_its_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = started()
    upgrade_operator(world, monkeypatch)
    world.run(60)
    del world.objects[names.syncer_deployment("job")]
    world.run(60)
    assert not any(map(is_mixed, templates(world).values()))
    assert world.objects[names.syncer_deployment("job")]


# ------------------------------------------------------------------ suspend, resume, ends


def test_suspended_from_its_creation_nothing_is_started() -> None:
    world = World(job_object(suspend=True))
    world.run(60)
    assert not world.objects and not world.pods and not world.secrets
    assert world.status["phase"] == "Suspended" and world.truth("Suspended") == "True"
    assert "startTime" not in world.status and "release" not in world.status
    # A job that was never started uses the defaults of the operator that starts it.
    world.settings = PlanSettings(None, "diloco-system", "diloco-syncer:9", "diloco-worker:9")
    world.edit(suspend=False)
    world.until(World.whole)
    assert world.status["release"]["worker"] == "diloco-worker:9"
    assert world.truth("Suspended") == "False"
    assert [e.reason for _, e in world.events] == ["Suspended", "Started", "QuorumMet"]


def test_suspend_and_resume() -> None:
    world = started()
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    assert not world.pods and world.status["phase"] == "Suspended"
    assert world.syncer.phase == "suspended" and world.status["progress"]["tokens"] > 0
    assert world.condition("Suspended")["reason"] == "Saved"
    idle(world)
    tokens = world.syncer.tokens
    world.edit(suspend=False)
    world.until(World.whole)
    assert world.syncer.epoch == 2 and world.syncer.tokens >= tokens
    reasons = [e.reason for _, e in world.events]
    assert reasons == ["Started", "QuorumMet", "Suspending", "Suspended", "Resumed", "QuorumMet"]
    assert not world.status.get("replacements")
    idle(world)


def test_what_was_saved_is_durable_while_no_syncer_answers() -> None:
    """Nobody has trained since: neither while the job is suspended, nor while its syncer starts again."""
    world = started()
    world.run(60)
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    world.run(60)
    assert world.truth("Durable") == "True" and world.status["learners"] == "0/3"
    world.syncer_silent = True
    world.edit(suspend=False)
    world.run(40)
    assert world.truth("Durable") == "True" and world.truth("SyncerReady") == "False"


def test_the_turn_after_the_drains_end_is_soon() -> None:
    """The word is written first; the pods go by the turn that reads it."""
    world = started()
    world.edit(suspend=True)
    world.until(lambda w: w.status.get("drain") == "Saved", 30)
    assert not any(pod.terminating for pod in world.pods.values()) and world.plans[-1].wake_in <= 0.5
    world.run(2)
    assert all(pod.terminating for pod in world.pods.values())


def test_pods_stay_until_the_syncer_says_that_all_is_saved() -> None:
    world = started()
    world.edit(suspend=True)
    world.run(1)
    assert world.syncer.phase == "draining" and len(world.pods) == 4
    assert not any(p.terminating for p in world.pods.values())
    assert world.status["phase"] == "Suspending"


@pytest.mark.parametrize("delay", [0.5, 1.5, 2.5, 3.5, 5.0, 8.0])
def test_a_suspension_that_is_taken_back(delay: float) -> None:
    world = started()
    world.edit(suspend=True)
    world.run(delay)
    world.edit(suspend=False)
    world.until(World.whole, 200)
    world.until(lambda w: w.syncer.phase == "training")
    idle(world)


@pytest.mark.promise(
    "A suspension removes no learner before the syncer has saved everything, unless `suspendPolicy` is `Anyway`"
)
def test_a_suspension_waits_for_a_syncer_that_does_not_answer() -> None:
    world = started()
    world.syncer_silent = True
    world.run(40)
    assert world.condition("Durable")["reason"] == "SyncerNotAnswering"
    world.edit(suspend=True)
    world.run(600)
    assert len(world.pods) == 4 and not any(pod.terminating for pod in world.pods.values())
    assert world.truth("Stalled") == "True" and "suspendPolicy" in world.condition("Stalled")["message"]
    assert world.status["learners"] == "3/3" and world.condition("Durable")["reason"] == "SyncerNotAnswering"
    world.syncer_silent = False
    world.until(lambda w: w.condition("Suspended").get("reason") == "Saved", 60)


def full_volume(world: World) -> None:
    world.syncer.problem = "the disk is full"


def claim_goes(world: World) -> None:
    world.objects[names.claim("job")]["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"


@pytest.mark.promise(
    "A suspension removes no learner before the syncer has saved everything, unless `suspendPolicy` is `Anyway`"
)
@pytest.mark.parametrize(
    ("harm", "reason"), [(full_volume, "StoreProblem"), (claim_goes, "VolumeGoing")], ids=["full", "claim"]
)
def test_while_learners_have_the_only_copy_none_of_them_is_taken(harm: Any, reason: str) -> None:
    world = started()
    harm(world)
    world.run(20)
    assert world.truth("Durable") == "False" and world.condition("Durable")["reason"] == reason
    assert world.told("VolumeGoing" if reason == "VolumeGoing" else "SyncerStoreProblem") == 1
    uids = set(world.pods)
    world.edit(learners=template("other:1"))
    world.run(60)
    assert set(world.pods) == uids and reason in world.region()["cause"], "no learner is restarted for an edit"
    world.edit(suspend=True)
    world.run(600)
    assert set(world.pods) == uids and world.syncer.phase != "suspended"
    assert world.condition("Stalled")["reason"] == reason and world.status["phase"] == "Suspending"
    world.edit(suspendPolicy="Anyway")
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    assert world.condition("Suspended")["reason"] == "NotSaved" and not world.pods
    assert ("being deleted" if reason == "VolumeGoing" else "disk is full") in world.condition("Suspended")["message"]


def test_a_full_disk_is_told_once_and_not_with_each_file_that_is_tried() -> None:
    world = started()
    world.syncer.problem = "disk full: 5540 bytes are needed for /store/state/e1-n30.json and 0 bytes are free"
    world.run(30)
    said = [world.condition(kind)["message"] for kind in ("Durable", "SyncerReady", "Ready")]
    world.syncer.problem = "disk full: 264 bytes are needed for /store/records/f3-v6.rec and 0 bytes are free"
    world.run(30)
    assert [world.condition(kind)["message"] for kind in ("Durable", "SyncerReady", "Ready")] == said
    world.syncer.problem = "the disk can only be read"
    world.run(30)
    assert "can only be read" in world.condition("Durable")["message"] and "5540" not in str(world.status["conditions"])


def test_a_syncer_whose_volume_goes_is_not_replaced_for_an_edit() -> None:
    world = started()
    uid = world.of("syncer")[0].uid
    claim_goes(world)
    world.run(20)
    world.edit(sync={"quorum": 2})
    world.run(60)
    assert world.of("syncer")[0].uid == uid and world.syncer.required == 1
    del world.objects[names.claim("job")]["metadata"]["deletionTimestamp"]
    world.until(lambda w: w.syncer.required == 2, 120)


@pytest.mark.promise("A store that comes back empty is reported with what it had, until it has as much again")
def test_a_store_that_comes_back_empty_is_told() -> None:
    world = started()
    world.run(120)
    world.edit(ttlSecondsAfterFinished=1000)  # so that all of the status is written
    world.run(5)
    had = world.status["syncer"]["merges"]
    world.syncer = type(world.syncer)()
    world.delete_pod(world.of("syncer")[0].name)
    world.until(lambda w: w.condition("Durable").get("reason") == "StoreLost", 60)
    assert f"{had} merges" in world.condition("Durable")["message"] and world.told("StoreLost") == 1
    world.run(30)
    assert world.condition("Durable")["reason"] == "StoreLost" and world.told("StoreLost") == 1
    world.until(lambda w: w.syncer.merges > had, 600)
    world.until(lambda w: w.truth("Durable") == "True", 90)


@pytest.mark.promise(
    "A suspension removes no learner before the syncer has saved everything, unless `suspendPolicy` is `Anyway`"
)
def test_between_a_volume_that_is_gone_and_what_learners_give_back_none_of_them_is_taken() -> None:
    """Who asks for a suspension then is not told of ``suspendPolicy: Anyway``, which would cost the model."""
    world = started()
    world.run(120)
    world.edit(suspend=True, ttlSecondsAfterFinished=1000)
    world.syncer_silent = True
    world.remove_object(names.claim("job"))
    world.run(5)
    waits = world.condition("Suspended")["message"]
    assert "give the model back" in waits and "Anyway" not in waits
    assert world.condition("Stalled")["reason"] == "StoreLost" == world.condition("Durable")["reason"]
    world.run(600)
    assert len(world.pods) == 4 and not any(pod.terminating for pod in world.pods.values())


def test_a_syncer_that_does_not_answer_cannot_hold_up_a_suspension_for_ever() -> None:
    world = started(suspendPolicy="Anyway")
    world.syncer_silent = True
    world.run(20)
    world.edit(suspend=True)
    world.run(50)
    assert len(world.pods) == 4, "patience first"
    world.until(lambda w: w.truth("Suspended") == "True", 60)
    suspended = world.condition("Suspended")
    assert suspended["reason"] == "NotSaved" and "did not answer" in suspended["message"]
    assert world.told("NotSaved") == 1 and world.told("Suspended") == 0


def test_suspension_with_a_changed_spec_restarts_nothing_before() -> None:
    world = started()
    epoch = world.syncer.epoch
    world.edit(suspend=True, sync={"quorum": 2, "every": 48}, learners=template("other:1"))
    world.until(lambda w: w.truth("Suspended") == "True", 100)
    assert world.syncer.epoch == epoch and world.told("RollingOut") == 0
    world.edit(suspend=False)
    world.until(World.whole)
    assert world.syncer.required == 2 and all(p.image == "other:1" for p in world.of("learner"))


def test_complete() -> None:
    world = started(training={"stop": {"tokens": 4000}, "evaluation": {"fraction": 0.1}})
    assert len(world.of("evaluator")) == 1
    world.until(lambda w: w.truth("Complete") == "True", 200)
    assert world.report is not None and world.report.eval_loss == []
    told = world.status["report"]
    assert (told["outcome"], told["goodput"], told["tokens"]) == ("complete", 0.9, dict(world.report.tokens))
    assert not any(isinstance(value, list) for value in told.values())
    assert world.status["phase"] == "Complete" and world.status["completionTime"]
    world.until(lambda w: not w.of("learner") and not w.of("evaluator"))
    idle(world)
    assert len(world.of("syncer")) == 1, "it serves status and export"
    assert world.document().loss is None and world.status["progress"]["loss"] == 2.0
    assert world.told("Complete") == 1 and world.told("QuorumLost") == 0
    # An end is final: an edit restarts nothing, and a syncer that is lost comes back to the same end.
    uid = world.of("syncer")[0].uid
    world.edit(training={**world.job["spec"]["training"], "stop": {"tokens": 10**9}})
    world.run(30)
    assert world.of("syncer")[0].uid == uid and world.truth("Complete") == "True"
    world.delete_pod(world.of("syncer")[0].name)
    world.run(30)
    assert world.syncer.phase == "complete" and world.truth("Complete") == "True"
    # A suspension frees what is left.
    world.edit(suspend=True)
    world.run(20)
    assert not world.pods and world.status["phase"] == "Complete"


def test_an_end_does_not_wait_for_its_report_for_ever() -> None:
    world = started(training={"stop": {"tokens": 2000}})
    world.until(lambda w: w.syncer.phase == "draining")
    world.report = None
    ask, world._ask = world._ask, lambda: None  # type: ignore[method-assign]

    def without_report() -> None:
        ask()
        world.report = None

    world._ask = without_report  # type: ignore[method-assign]
    world.until(lambda w: w.syncer.phase == "complete")
    world.run(20)
    assert world.truth("Complete") == "False" and world.status["phase"] == "Finishing"
    world.until(lambda w: w.truth("Complete") == "True", 80)


def test_time_to_live() -> None:
    world = started(training={"stop": {"tokens": 2000}}, ttlSecondsAfterFinished=40)
    world.until(lambda w: w.truth("Complete") == "True", 100)
    ended = world.now
    world.until(lambda w: w.gone, 100)
    assert 39 <= world.now - ended <= 75


def test_the_syncer_says_that_the_job_has_failed() -> None:
    world = started()
    world.syncer.phase = "failed"
    world.until(lambda w: w.truth("Failed") == "True", 30)
    world.until(lambda w: not w.of("learner"))
    assert world.status["phase"] == "Failed" and world.condition("Failed")["reason"] == "SyncerFailed"
    assert world.status["report"]["outcome"] == "failed" and len(world.of("syncer")) == 1
    idle(world)


# ------------------------------------------------------------------ deletion


def test_a_job_that_has_ended_is_deleted_without_waiting() -> None:
    world = started(training={"stop": {"tokens": 3000}})
    world.until(lambda w: w.truth("Complete") == "True" and not w.of("learner"), 100)
    world.delete_job()
    world.until(lambda w: w.gone, 3)


def test_a_claim_that_is_on_its_way_out_is_not_mounted() -> None:
    world = World(job_object())
    world.turn()
    world.objects[names.claim("job")]["metadata"]["deletionTimestamp"] = "2023-11-14T22:13:21Z"
    world.run(10)
    assert not world.of("syncer")


@pytest.mark.parametrize("on_delete", ["Retain", "Delete"])
def test_deletion_tells_learners_first(on_delete: str) -> None:
    world = started(syncer={"storage": {"onDelete": on_delete}})
    world.delete_job()
    world.until(lambda w: w.gone, 30)
    assert world.syncer.phase == "deleted"
    assert (names.claim("job") in world.objects) == (on_delete == "Retain")
    assert world.told("Deleting") == 1


def test_deletion_waits_thirty_seconds_at_most() -> None:
    world = started()
    world.syncer_silent = True
    world.delete_job()
    began = world.now
    world.until(lambda w: w.gone, 60)
    assert 29 <= world.now - began <= 33


@pytest.mark.promise(
    "If the deletion of the volume is refused, the job names it, the operator retries with growing "
    "delays, and finally leaves the volume with a Warning"
)
def test_a_volume_whose_deletion_is_refused_is_named_and_let_go() -> None:
    world = started(syncer={"storage": {"onDelete": "Delete"}})
    world.kept_by_policy = {names.claim("job")}
    world.delete_job()
    world.until(lambda w: "cannot be deleted" in w.condition("Ready")["message"], 60)
    began, plans = world.now, len(world.plans)
    assert names.claim("job").name in world.condition("Ready")["message"]
    assert "volumes are kept" in world.condition("Ready")["message"]
    world.until(lambda w: w.gone, 400)
    assert 250 <= world.now - began <= 330 and len(world.plans) - plans < 50, "it asks less and less often"
    (event,) = [event for _, event in world.events if event.reason == "VolumeStays"]
    assert event.type == "Warning" and names.claim("job").name in event.message
    assert names.claim("job") in world.objects


def kstatus(world: World) -> str:
    """What kstatus makes of a custom resource (cli-utils, pkg/kstatus/status/generic.go)."""
    if world.status.get("observedGeneration") != world.job["metadata"]["generation"]:
        return "InProgress"
    if world.truth("Reconciling") == "True":
        return "InProgress"
    if world.truth("Stalled") == "True":
        return "Failed"
    return "Current" if world.truth("Ready") == "True" else "InProgress"


@pytest.mark.promise(
    "Flux and `helm --wait` end when a job trains, is suspended as requested, has ended, or is invalid"
)
def test_flux_and_helm_see_where_a_job_is() -> None:
    world = World(job_object(suspend=True))
    world.run(5)
    assert kstatus(world) == "Current" and world.condition("Ready")["reason"] == "Suspended"
    world.edit(suspend=False)
    world.run(2)
    assert kstatus(world) == "InProgress"
    world.until(World.whole)
    world.run(5)
    assert kstatus(world) == "Current" and world.condition("Ready")["reason"] == "Training"
    world.edit(suspend=True)
    world.run(1)
    assert kstatus(world) == "InProgress"
    world.until(lambda w: w.truth("Suspended") == "True")
    assert kstatus(world) == "Current"
    world.edit(suspend=False)
    world.until(World.whole)
    world.edit(learners={"podTemplate": {"spec": {"containers": [{"name": "learner", "command": ["x"]}]}}})
    world.run(5)
    assert kstatus(world) == "Failed" and world.condition("Stalled")["reason"] == "PodTemplate"


@pytest.mark.promise(
    "Flux and `helm --wait` end when a job trains, is suspended as requested, has ended, or is invalid"
)
@pytest.mark.parametrize(("how", "seen"), [("complete", "Current"), ("failed", "Failed")])
def test_an_end_is_seen_as_one(how: str, seen: str) -> None:
    world = started()
    world.syncer.phase = how
    world.until(lambda w: w.truth("Complete" if how == "complete" else "Failed") == "True")
    world.run(30)
    assert kstatus(world) == seen and world.condition("Ready")["reason"] == how.capitalize()


@pytest.mark.promise("No lost quorum is reported when learners leave at a job's end")
def test_no_quorum_is_lost_when_learners_leave_at_the_end() -> None:
    world = started(sync={"quorum": 3})
    world.syncer.phase, world.syncer.target, world.syncer.moves_at = "draining", "complete", world.now + 20
    for pod in world.of("learner")[:2]:
        for slot in world.syncer.slots:
            if slot.process == pod.process:
                slot.state = "draining"
    world.run(10)
    assert world.condition("QuorumMet")["reason"] in ("Finishing", "Met")
    assert world.told("QuorumLost") == 0 and world.truth("Ready") == "True"


def test_deletion_without_a_syncer_does_not_wait() -> None:
    world = World(job_object())
    world.bad_images = {"diloco-syncer:1"}
    world.run(20)
    world.delete_job()
    began = world.now
    world.until(lambda w: w.gone, 30)
    assert world.now - began <= 3


def test_a_job_whose_spec_cannot_be_read_can_be_deleted() -> None:
    world = started(syncer={"storage": {"onDelete": "Delete"}})
    world.edit(regions=[{"name": "local", "learners": 0}])
    world.run(5)
    assert world.status["phase"] == "Invalid"
    world.delete_job()
    world.until(lambda w: w.gone, 60)
    assert names.claim("job") not in world.objects


# ------------------------------------------------------------------ scaling and regions


def test_scaling_up_and_down() -> None:
    world = started()
    first = {p.name: p.uid for p in world.of("learner")}
    world.edit(regions=[{"name": "local", "learners": 5}])
    world.until(World.whole)
    assert world.status["learners"] == "5/5"
    now = {p.name: p.uid for p in world.of("learner")}
    assert {n: now[n] for n in first} == first, "a learner restarted"
    epoch = world.syncer.epoch
    assert epoch == 2, "the syncer reads the regions when it starts"
    world.edit(regions=[{"name": "local", "learners": 2}])
    world.until(lambda w: len(w.of("learner")) < 5)
    assert world.syncer.epoch == epoch, "who leaves drains to a syncer that knows it"
    world.until(lambda w: w.syncer.epoch == epoch + 1)
    world.until(World.whole)
    assert world.status["learners"] == "2/2"
    assert {p.name: p.uid for p in world.of("learner")} == {n: first[n] for n in sorted(first)[:2]}
    assert world.told("Scaled") == 2 and world.told("LearnerGone") == 0
    assert not world.status.get("replacements")
    idle(world)


def test_within_the_bound_scaling_restarts_no_syncer() -> None:
    def regions(learners: int, bound: int) -> list[dict[str, Any]]:
        return [{"name": "local", "learners": learners, "maxLearners": bound}]

    world = started(regions=regions(2, 4))
    first = {p.name: p.uid for p in world.of("learner")}
    for learners in (4, 3, 2):
        world.edit(regions=regions(learners, 4))
        world.until(lambda w, n=learners: w.status["learners"] == f"{n}/{n}" and len(w.of("learner")) == n)
        world.until(World.whole)
    assert world.syncer.epoch == 1 and not world.status.get("replacements")
    assert {p.name: p.uid for p in world.of("learner")} == first, "a learner restarted"
    world.edit(regions=regions(5, 5))
    world.until(World.whole)
    assert world.syncer.epoch == 2, "the bound is read at the start"
    idle(world)


def test_a_region_comes_and_another_goes() -> None:
    world = started(2)
    world.edit(regions=[{"name": "local", "learners": 2}, {"name": "far", "learners": 1}])
    world.until(World.whole)
    assert world.status["learners"] == "3/3" and world.region("far")["state"] == "Running"
    world.edit(regions=[{"name": "far", "learners": 1}])
    world.run(1.5)
    gone = [p for p in world.of("learner") if p.region == "local"]
    assert gone and all(p.terminating for p in gone), "they drain, by the StatefulSet's own scaling"
    assert names.stateful_set("job", "local") in world.objects
    world.until(World.whole)
    world.run(5)
    left = {ref for ref in world.objects if ref.name == "job-local"}
    assert not left, "StatefulSet, Service and budget are gone when the learners are"
    assert world.status["learners"] == "1/1"
    idle(world)


def test_evaluation_is_switched_off() -> None:
    world = started(training={"evaluation": {"fraction": 0.1}})
    assert world.of("evaluator")
    world.edit(training={**world.job["spec"]["training"], "evaluation": None})
    world.until(lambda w: not w.of("evaluator") and names.evaluator_deployment("job") not in w.objects)
    world.until(World.whole)


@pytest.mark.promise("A job that has not ended by `activeDeadlineSeconds` fails with that reason")
def test_a_job_fails_at_its_deadline() -> None:
    world = started(activeDeadlineSeconds=600)
    began = world.now
    world.until(lambda w: w.truth("Failed") == "True", 700)
    assert 540 <= world.now - began <= 602
    failed = world.condition("Failed")
    assert failed["reason"] == "DeadlineExceeded" and "activeDeadlineSeconds" in failed["message"]


def test_a_deadline_that_is_raised_in_time_fails_nothing() -> None:
    world = started(activeDeadlineSeconds=600)
    world.run(300)
    world.edit(activeDeadlineSeconds=6000)
    world.run(600)
    assert world.truth("Failed") == "False" and world.whole()
