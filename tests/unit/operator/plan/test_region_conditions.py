"""What a cluster without the syncer tells of the hub: merges, why nobody is let in, other settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from diloco_operator.model import Observed, ProgramAnswer
from diloco_operator.plan.conditions.condition_set import ORDER
from diloco_operator.plan.conditions.region_conditions import DIFFERS_SECONDS, differing_fields
from diloco_operator.plan.pod_status import ContainerExit
from diloco_operator.plan.refusals import condition_reason, current_refusal, refusal_of_exit, refusal_rank
from diloco_operator.plan.transitions import FAULT_OVER
from diloco_protocol.vocabulary import ENDS_FOR_RESUME, FAULT_CONDITIONS
from operator_world import SPREAD, START, Far, World, job_object
from status_documents import learner_page


def ready(**spec: Any) -> Far:
    world = Far(job_object(**{**SPREAD, **spec}))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    return world


class Merging(Far):
    """Its hub merges once a second."""

    def observed(self) -> Observed:
        self.page["merges"] = int(self.now - START)
        return super().observed()


# ------------------------------------------------------------------ merges and progress


def test_merges_that_learners_hear_of_set_the_count_of_losses_back() -> None:
    world = Merging(job_object(**SPREAD, failurePolicy={"maxReplacements": 2}))
    world.until(lambda w: w.truth("Ready") == "True", 60)
    world.crashing = {"job-away-1": 1}
    world.run(900)
    assert world.truth("Failed") == "False", world.story()
    assert world.status["replacements"]["total"] > 3


def test_without_merges_losses_fail_the_copy() -> None:
    world = ready(failurePolicy={"maxReplacements": 2})
    world.page["merges"] = 7
    world.run(60)
    world.crashing = {"job-away-1": 1}
    world.until(lambda w: w.truth("Failed") == "True", 900)
    assert world.condition("Failed")["reason"] == "TooManyReplacements"


def test_a_store_that_was_set_back_is_where_merges_are_counted_from() -> None:
    world = ready(failurePolicy={"maxReplacements": 5})
    world.page["merges"] = 1000
    world.run(30)
    world.crashing = {"job-away-1": 1}
    world.until(lambda w: (w.status.get("replacements") or {}).get("sinceMerge") == 1, 120)
    world.crashing = {}
    world.page["merges"] = 10
    world.run(30)
    assert world.status["replacements"] == {"total": 1, "sinceMerge": 1, "place": "job-away-1", "merges": 1000}
    world.run(60)
    assert world.status["replacements"] == {"total": 1, "sinceMerge": 1, "place": "job-away-1", "merges": 10}
    world.page["merges"] = 11
    world.run(90)
    assert world.status["replacements"]["sinceMerge"] == 0


def test_an_older_page_is_no_merge() -> None:
    """Who had the newest page dies; for a moment the others' pages are older."""
    world = ready(failurePolicy={"maxReplacements": 5})
    world.page["merges"] = 1000
    world.run(70)
    for losses in (1, 2):
        world.page["merges"] = 998
        world.crashing = {"job-away-1": 1}
        world.until(lambda w, n=losses: (w.status.get("replacements") or {}).get("total") == n, 120)
        world.crashing = {}
        world.run(20)
        world.page["merges"] = 1000
        world.run(60)
        assert world.status["replacements"] == {
            "total": losses,
            "sinceMerge": losses,
            "place": "job-away-1",
            "merges": 1000,
        }


def test_only_who_is_connected_tells_of_merges() -> None:
    world = ready()
    world.page |= {"merges": 5, "connected": False}
    world.run(90)
    assert (world.status.get("progress") or {}).get("merges") is None
    world.page["connected"] = True
    world.run(90)
    assert world.status["progress"]["merges"] == 5


def test_progress_is_what_learners_know() -> None:
    world = ready()
    world.page |= {"merges": 12, "step": 240, "loss": 3.25, "tokens": 99}
    world.run(90)
    assert world.status["progress"] == {"step": 240, "merges": 12, "loss": 3.25}
    world.page |= {"connected": False, "slot": None}
    world.run(90)
    assert world.status["progress"] == {"step": 240, "merges": 12, "loss": 3.25}, "what was known stands"


def test_merges_that_are_not_known_say_nothing() -> None:
    world = ready()
    world.page["merges"] = None
    world.run(90)
    assert "merges" not in (world.status.get("progress") or {})


# ------------------------------------------------------------------ why nobody is let in


def test_a_hub_that_is_suspended_is_waited_for() -> None:
    world = ready()
    world.page |= {
        "connected": False,
        "slot": None,
        "idle": True,
        "phase": "draining",
        "message": "no session with the syncer: connection refused",
    }
    world.run(60)
    for kind in ("HubReachable", "Ready"):
        found = world.condition(kind)
        assert (found["status"], found["reason"]) == ("False", "Drained")
        assert "suspended" in found["message"]
    assert world.status["phase"] == "Holding"
    assert world.told("HubDrained") == 1 and world.told("HubUnreachable") == 0
    # It goes on: who was idle makes room for a process that trains.
    world.last_words, world.crashing = ENDS_FOR_RESUME, {"job-away-0": 0, "job-away-1": 0}
    world.run(10)
    world.crashing = {}
    world.page |= {"connected": True, "slot": 1, "idle": False, "phase": "training"}
    world.until(lambda w: w.truth("Ready") == "True", 120)
    assert world.told("LearnerCrashed") == 0 and not world.status.get("replacements")
    assert any(pod.container["restartCount"] for pod in world.of("learner")), "nobody made room"


def test_a_program_that_just_ends_is_told() -> None:
    world = ready()
    world.crashing = {"job-away-1": 0}
    world.until(lambda w: w.told("LearnerCrashed") > 0, 60)
    assert world.status["replacements"]["total"] == 1


def test_a_hub_that_is_not_reached_is_told_with_what_to_look_at() -> None:
    world = ready()
    world.page |= {"connected": False, "slot": None, "message": "no session with the syncer: timed out"}
    world.run(60)
    hub = world.condition("HubReachable")
    assert (hub["status"], hub["reason"]) == ("False", "NotConnected")
    assert "timed out" in hub["message"] and "syncer.endpoint.address" in hub["message"]
    assert world.told("HubUnreachable") == 1


@pytest.mark.parametrize(
    ("word", "expected", "cures"),
    [
        ("certificate-refused", "CertificateRefused", ["Secret l ", "diloco certs renew"]),
        ("wrong-region", "CertificateRefused", ["Secret l ", "diloco certs issue"]),
        ("untrusted-syncer", "UntrustedSyncer", ["Secret l ", "Secret s ", "diloco certs show"]),
        ("unauthenticated", "Unauthenticated", ["Secret l ", "join-token"]),
        ("credentials-unusable", "CredentialsUnusable", ["Secret l ", "diloco certs issue"]),
        ("spec-drift", "Refused", ["diloco delete job", "the hub has the model"]),
        ("other-layout", "Refused", ["Apply the same job in every cluster"]),
        ("other-data", "Refused", ["Apply the same job in every cluster"]),
    ],
)
def test_why_the_hub_is_not_reached(word: str, expected: str, cures: list[str]) -> None:
    world = ready()
    said = "these are the learner's words"
    world.page |= {
        "connected": False,
        "slot": None,
        "message": f"no session with the syncer: {said}",
        "refused": {"reason": word, "message": said},
    }
    world.run(60)
    hub = world.condition("HubReachable")
    assert (hub["status"], hub["reason"]) == ("False", expected)
    for part in ("10.0.0.1:30700", said, *cures):
        assert part in hub["message"]
    assert world.condition("Ready")["reason"] == expected
    assert said in world.region("away")["cause"]
    assert world.told("HubUnreachable") == 1 and world.truth("Failed") == "False"
    world.page |= {"connected": True, "slot": 1, "message": "", "refused": None}
    world.run(60)
    assert world.truth("Ready") == "True" and world.told("HubReachable") == 1
    assert (world.status.get("replacements") or {}).get("total", 0) == 0


def test_a_refusal_that_is_over_is_not_the_reason() -> None:
    """The Secret was put right while the syncer is away: what is told is that nobody answers."""
    world = ready()
    world.page |= {
        "connected": False,
        "message": "no session with the syncer: cannot connect",
        "refused": {"reason": "certificate-refused", "message": "certificate expired"},
    }
    world.run(40)
    hub = world.condition("HubReachable")
    assert hub["reason"] == "NotConnected" and "cannot connect" in hub["message"]


def test_what_learners_said_that_have_ended() -> None:
    world = Far(job_object(**SPREAD))
    message = "the certificate is another region's"
    world.last_words = json.dumps({"level": "error", "message": f"refused by the syncer (wrong-region): {message}"})
    world.crashing = {"job-away-0": 4, "job-away-1": 4}
    world.page |= {"connected": False, "slot": None, "message": "no session with the syncer: not tried yet"}
    world.run(40)
    hub = world.condition("HubReachable")
    assert hub["reason"] == "CertificateRefused" and message in hub["message"] and "Secret l" in hub["message"]


@pytest.mark.parametrize("word", ["spec-drift", "other-layout", "other-data", "wrong-region"])
def test_who_is_refused_for_a_persons_mistake_is_no_loss(word: str) -> None:
    world = Far(job_object(**SPREAD, failurePolicy={"maxReplacements": 1}))
    world.last_words = json.dumps({"level": "error", "message": f"refused by the syncer ({word}): seed differ"})
    world.crashing = {"job-away-0": 4, "job-away-1": 4}
    joined, world.page = world.page, {**world.page, "connected": False, "slot": None}
    world.run(900)
    assert world.truth("Failed") == "False" and not world.status.get("replacements")
    assert world.told("LearnerCrashed") == 0 and not world.taken, "a new pod would be refused too"
    world.crashing, world.page = {}, joined
    world.until(lambda w: w.truth("Ready") == "True", 700)


def test_a_drift_is_told_once_however_long_it_lasts() -> None:
    """Its pod is not replaced: a new one would be refused too, and nothing would be known until then."""
    regions = [{**region, "learners": 1} for region in SPREAD["regions"]]
    world = Far(job_object(**{**SPREAD, "regions": regions}))
    world.last_words = json.dumps({"level": "error", "message": "refused by the syncer (spec-drift): seed"})
    world.crashing = {"job-away-0": 4}
    untried = {"connected": False, "slot": None, "tried": False, "message": "no session: not tried yet"}
    joined, world.page = world.page, {**world.page, **untried}
    world.run(1500)
    assert world.truth("SpecDrift") == "True" and world.truth("HubReachable") == "False"
    told = [world.told(condition_reason) for condition_reason in ("SpecDrift", "SpecDriftOver", "LearnerDeleted")]
    assert told == [1, 0, 0], world.story()
    (pod,) = world.of("learner")
    world.crashing, world.page = {}, joined
    world.until(lambda w: w.truth("SpecDrift") == "False" and w.truth("Ready") == "True", 310)
    assert world.of("learner") == [pod] and world.told("SpecDriftOver") == 1


def test_one_learner_that_cannot_work_with_the_job_fails_no_copy_in_which_another_does() -> None:
    world = ready(failurePolicy={"maxReplacements": 20})
    world.crashing = {"job-away-1": 2}
    world.run(120)
    assert world.truth("Failed") == "False" and world.told("LearnerCrashed") > 1, world.story()
    world.page |= {"slot": None, "standby": True}
    world.until(lambda w: w.truth("Failed") == "True", 400)
    assert world.condition("Failed")["reason"] == "LearnerConfiguration"


def test_a_rule_for_the_exit_code_goes_before() -> None:
    rules = {"rules": [{"action": "Fail", "exitCodes": [4]}]}
    world = Far(job_object(**SPREAD, failurePolicy=rules))
    world.last_words = json.dumps({"level": "error", "message": "refused by the syncer (spec-drift): seed"})
    world.crashing = {"job-away-0": 4}
    world.until(lambda w: w.truth("Failed") == "True", 60)
    assert world.condition("Failed")["reason"] == "ExitCode"


def test_learners_that_are_not_so_far_say_nothing_of_the_hub() -> None:
    world = Far(job_object(**SPREAD))
    untried = {"connected": False, "slot": None, "message": "no session with the syncer: not tried yet"}
    joined, world.page = world.page, {**world.page, **untried, "tried": False}
    world.run(60)
    hub = world.condition("HubReachable")
    assert (hub["status"], hub["reason"]) == ("Unknown", "Preparing") and not world.told("HubUnreachable")
    world.page = {**world.page, "tried": True, "message": "no session with the syncer: cannot connect"}
    world.run(30)
    assert world.condition("HubReachable")["reason"] == "NotConnected" and world.told("HubUnreachable") == 1
    world.page = joined
    world.until(lambda w: w.truth("Ready") == "True", 60)


def test_one_that_is_connected_is_enough() -> None:
    world = ready()
    observed = world.observed

    def mixed() -> Observed:
        found = observed()
        first = sorted(found.learners)[0]
        refused = {"reason": "unauthenticated", "message": "no"}
        page = {**world.page, "connected": False, "slot": None, "refused": refused}
        learners = {**found.learners, first: ProgramAnswer(learner_page(**page), "", found.now)}
        return Observed(**{**{f: getattr(found, f) for f in found.__slots__}, "learners": learners})

    world.observed = mixed  # type: ignore[method-assign]
    world.run(40)
    assert world.truth("HubReachable") == "True"
    assert "(unauthenticated): no" in world.region("away")["cause"]


def test_words_of_refusals() -> None:
    refused = {"reason": "a", "message": "b"}
    assert current_refusal(learner_page(connected=True, refused=refused)) is None
    assert current_refusal(learner_page()) is None
    assert current_refusal(learner_page(refused=refused, message="x: b")) == ("a", "b")
    assert current_refusal(learner_page(refused=refused)) == ("a", "b")
    assert current_refusal(learner_page(refused=refused, message="no route to host")) is None
    words = "refused by the syncer (spec-drift): seed differ (a): b"
    assert refusal_of_exit(ContainerExit(4, "Error", words, None)) == ("spec-drift", "seed differ (a): b")
    assert refusal_of_exit(ContainerExit(1, "Error", words, None)) is None
    assert (
        refusal_of_exit(ContainerExit(4, "Error", "", None)) is None
        and refusal_of_exit(ContainerExit(4, "Error", "a): b", None)) is None
    )
    assert condition_reason("") == "NotConnected" and condition_reason("anything") == "Refused"
    order = ["credentials-unusable", "unauthenticated", "spec-drift", "other-data", "other", ""]
    assert sorted(reversed(order), key=refusal_rank) == order


# ------------------------------------------------------------------ missing Secrets


def waits_for_secret(world: World, message: str) -> Callable[[], Observed]:
    observed = world.observed

    def one() -> Observed:
        found = observed()
        for pod in found.pods:
            pod["status"]["phase"] = "Pending"
            status = pod["status"]["containerStatuses"][0]
            status["state"] = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
        return found

    return one


def test_a_secret_that_is_not_there_is_named_with_its_cure() -> None:
    world = Far(job_object(**SPREAD))
    world.observed = waits_for_secret(world, 'secret "l" not found')  # type: ignore[method-assign]
    world.run(40)
    cause = world.region("away")["cause"]
    assert "create the Secret l" in cause and "diloco certs issue" in cause


def test_a_key_that_is_missing_in_a_secret() -> None:
    world = Far(job_object(**SPREAD))
    message = "references non-existent secret key: join-token"
    world.observed = waits_for_secret(world, message)  # type: ignore[method-assign]
    world.run(40)
    assert "diloco certs issue makes a Secret with all keys" in world.region("away")["cause"]


# ------------------------------------------------------------------ settings that differ


def hub_settings(**sync: Any) -> dict[str, Any]:
    from diloco_operator.job import read_job
    from diloco_operator.plan.conditions.region_conditions import _own_settings

    own = _own_settings(read_job(job_object(**SPREAD)))
    return {**own, "sync": {**own["sync"], **sync}}


def test_the_copy_names_the_fields_in_which_it_differs() -> None:
    world = ready()
    assert world.truth("SettingsDiffer") == "Unknown"
    world.page["settings"] = hub_settings()
    world.run(30)
    assert world.truth("SettingsDiffer") == "False"
    world.page["settings"] = hub_settings(every=77) | {"learners": 9}
    world.run(DIFFERS_SECONDS / 2)
    assert world.truth("SettingsDiffer") == "False", "an edit may be on its way here"
    world.run(DIFFERS_SECONDS)
    found = world.condition("SettingsDiffer")
    assert found["status"] == "True" and found["reason"] == "FieldsDiffer"
    assert "sync.every" in found["message"] and "regions[].learners (in all)" in found["message"]
    assert world.truth("Ready") == "True" and world.truth("Degraded") == "False"
    assert world.told("SettingsDiffer") == 1
    world.page |= {"connected": False}
    world.run(30)
    assert world.condition("SettingsDiffer")["message"] == found["message"], "what was known stands"
    world.page |= {"connected": True, "settings": hub_settings()}
    world.run(30)
    assert world.truth("SettingsDiffer") == "False" and world.told("SettingsDifferOver") == 1


def test_differences_are_paths_of_the_job() -> None:
    own = {"sync": {"every": 24, "outer": {"lr": 0.7}, "new": 1}, "learners": 3, "stop": {"tokens": 5}}
    assert differing_fields(own, own) == []
    assert differing_fields(own, {}) == [] and differing_fields({}, own) == []
    other = {"sync": {"every": 24.0, "outer": {"lr": 0.1}, "old": 2}, "learners": 4, "stop": {"tokens": None}}
    assert sorted(differing_fields(own, other)) == [
        "regions[].learners (in all)",
        "sync.outer.lr",
        "training.stop.tokens",
    ]


def test_many_differences_are_counted() -> None:
    world = ready()
    everything = {key: "other" for key in hub_settings()["sync"]}
    world.page["settings"] = hub_settings(**everything) | {
        "learners": 9,
        "stop": {"tokens": 1, "steps": 2, "seconds": 3},
    }
    world.run(120)
    message = world.condition("SettingsDiffer")["message"]
    assert " more. " in message and len(message) < 1000


def test_every_fault_that_people_and_events_know_is_a_condition() -> None:
    assert set(ORDER) >= FAULT_CONDITIONS
    assert set(ORDER) >= set(FAULT_OVER)
    assert set(FAULT_OVER) - {"HubReachable"} <= FAULT_CONDITIONS
