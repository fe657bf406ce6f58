"""What the hub tells of learners wherever they are, and of a syncer whose Secret is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_operator import names
from diloco_operator.model import Object, Observed, PlanSettings
from diloco_operator.plan.conditions.hub_conditions import RECENT_SECONDS, TOO_SLOW_SECONDS, WELL_SECONDS
from diloco_protocol.documents import StatusDocument
from diloco_protocol.vocabulary import LABEL_ROLE
from operator_world import SPREAD, World, job_object
from status_documents import slot_link, status_document

SLOW = {
    "up_bytes_per_second": 1.2345e6,
    "down_bytes_per_second": 2e6,
    "round_trip_seconds": 0.0812,
    "needs_up_bytes_per_second": 1.25e7,
    "needs_down_bytes_per_second": 2.5e7,
    "too_slow": True,
    "message": "slow",
}
FAST = {**SLOW, "up_bytes_per_second": 1e9, "down_bytes_per_second": 1e9, "too_slow": False, "message": ""}


class Hub(World):
    """The syncer's cluster: ``links`` and ``refused`` are put into the syncer's status."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(job_object(**{**SPREAD, **spec}), settings=PlanSettings("hub", "o", "s", "w"))
        self.links: dict[str, Object] = {}  # by region
        self.refused: list[Object] = []
        self.rounds: list[Object] = []
        self.waits_for = ""

    def document(self) -> StatusDocument:
        found = super().document()
        rows = [{**dict(row), "link": self.links.get(row.region)} for row in found.slots]
        changed = {"slots": rows, "refusals": self.refused, "rounds": self.rounds or found.rounds}
        if self.waits_for:
            changed |= {"phase": "waiting", "message": self.waits_for, "quorum": {"active": 0, "required": 1}}
        return status_document(**{**dict(found), **changed})


def served(**spec: Any) -> Hub:
    world = Hub(**spec)
    world.until(lambda w: w.truth("SyncerReady") == "True" and w.truth("QuorumMet") == "True", 60)
    return world


# ------------------------------------------------------------------ links


def test_a_link_that_stays_slow_is_told_once_with_numbers_that_stand() -> None:
    world = served()
    world.links = {"near": FAST, "away": SLOW}
    world.run(TOO_SLOW_SECONDS / 2)
    assert world.truth("LinksTooSlow") == "False"
    world.run(TOO_SLOW_SECONDS)
    found = world.condition("LinksTooSlow")
    assert found["status"] == "True" and found["reason"] == "SlowerThanNeeded"
    for part in (
        "Region away (learner ",
        "up 9.9 Mbit/s of 100 Mbit/s needed",
        "round trip 81 ms",
        "sync.compression",
        "diloco plan",
    ):
        assert part in found["message"], found["message"]
    assert "near" not in found["message"] and world.told("LinksTooSlow") == 1
    world.links["away"] = {**SLOW, "up_bytes_per_second": 1.9e6}
    world.run(60)
    assert world.condition("LinksTooSlow")["message"] == found["message"]
    assert world.truth("Ready") == "True"


def test_a_link_near_its_need_does_not_flap() -> None:
    world = served()
    world.links = {"away": SLOW}
    world.until(lambda w: w.truth("LinksTooSlow") == "True", 200)
    for _ in range(5):
        world.links = {"away": FAST}
        world.run(WELL_SECONDS / 2)
        world.links = {"away": SLOW}
        world.run(30)
    assert world.truth("LinksTooSlow") == "True" and world.told("LinksTooSlow") == 1
    world.links = {"away": FAST}
    world.run(WELL_SECONDS + 60)
    assert world.truth("LinksTooSlow") == "False" and world.told("LinksTooSlowOver") == 1
    for _ in range(5):
        world.links = {"away": SLOW}
        world.run(TOO_SLOW_SECONDS / 2)
        world.links = {"away": FAST}
        world.run(20)
    assert world.truth("LinksTooSlow") == "False" and world.told("LinksTooSlow") == 1


def test_a_job_that_is_suspended_has_no_slow_links_and_tells_of_none() -> None:
    world = served()
    world.links = {"away": SLOW}
    world.refused = [refusal(0, "seed")]
    world.until(lambda w: w.truth("LinksTooSlow") == "True", 200)
    world.edit(suspend=True)
    world.until(lambda w: w.truth("Suspended") == "True", 200)
    assert world.truth("LinksTooSlow") == world.truth("SpecDrift") == "False"
    assert not world.told("LinksTooSlowOver") and not world.told("SpecDriftOver")
    world.edit(suspend=False)
    world.until(lambda w: w.truth("LinksTooSlow") == "True", 400)
    assert world.told("LinksTooSlow") == 2 and world.told("SpecDrift") == 2


@pytest.mark.promise("A round that stays open is reported, with the missing slots and the reasons")
def test_an_overdue_round_is_told_until_it_closes() -> None:
    world = served()
    words = "fragment 3 waits for pushes for long: slot 1 (norm-gate)"
    opened = {"fragment": 3, "round": 17, "merging": False, "responders": [], "waiting": [1]}
    world.rounds = [{**opened, "open_seconds": 20.0, "overdue": False, "message": ""}]
    world.run(30)
    assert world.truth("RoundOverdue") == "False"
    for seconds in (120.0, 150.0):
        world.rounds = [{**opened, "open_seconds": seconds, "overdue": True, "message": words}]
        world.run(30)
    found = world.condition("RoundOverdue")
    assert (found["status"], found["reason"]) == ("True", "PushesMissing") and words in found["message"]
    assert world.told("RoundOverdue") == 1 and world.truth("Ready") == "True"
    world.rounds = []
    world.run(30)
    assert world.truth("RoundOverdue") == "False" and world.told("RoundOverdueOver") == 1


@pytest.mark.promise(
    "If only an evaluator holds versions of an emptied store, status, condition and log explain what to do"
)
def test_what_a_job_waits_for_at_its_start_is_told_with_the_cure() -> None:
    world = served()
    world.waits_for = "the store is empty: give the syncer its store back (spec.syncer.storage)"
    world.until(lambda w: w.truth("QuorumMet") == "False", 60)
    for kind in ("QuorumMet", "Ready"):
        found = world.condition(kind)
        assert found["reason"] == "Gathering" and f"The syncer: {world.waits_for}." in found["message"]
    world.waits_for = ""
    world.until(lambda w: w.truth("Ready") == "True", 60)


def test_another_region_that_is_slow_too_is_added() -> None:
    world = served()
    world.links = {"away": SLOW}
    world.until(lambda w: w.truth("LinksTooSlow") == "True", 200)
    world.links = {"away": SLOW, "near": SLOW}
    world.run(TOO_SLOW_SECONDS + 60)
    message = world.condition("LinksTooSlow")["message"]
    assert "Region away " in message and "Region near " in message and world.told("LinksTooSlow") == 1


def test_two_links_that_are_slow_in_turn_are_both_told_once() -> None:
    world = served()
    told: list[str] = []
    for turn in range(40):
        world.links = {"away": SLOW, "near": FAST} if turn % 2 else {"away": FAST, "near": SLOW}
        world.run(60)
        if world.truth("LinksTooSlow") == "True":
            told.append(str(world.condition("LinksTooSlow")["message"]))
    assert len(told) > 30 and len(set(told)) == 2 and told == sorted(told, key=len), set(told)
    assert told[-1].startswith(told[0].partition(" Merges ")[0])
    assert "Region near (learner " in told[-1] and "Region away (learner " in told[-1]
    assert told[-1].count("Fix:") == 1 and world.told("LinksTooSlow") == 1


def test_a_region_whose_name_begins_another_is_its_own() -> None:
    regions = [{"name": n, "cluster": "hub", "learners": 1} for n in ("eu-1", "eu")]
    world = served(regions=regions)
    world.links = {"eu-1": SLOW}
    world.until(lambda w: w.truth("LinksTooSlow") == "True", 200)
    world.links = {"eu-1": SLOW, "eu": SLOW}
    world.run(TOO_SLOW_SECONDS + 60)
    assert "Region eu (learner 0)" in world.condition("LinksTooSlow")["message"]


def test_what_was_known_of_links_stands_while_the_syncer_is_silent_and_for_a_new_operator() -> None:
    world = served()
    world.links = {"away": SLOW}
    world.until(lambda w: w.truth("LinksTooSlow") == "True", 200)
    found = world.condition("LinksTooSlow")
    world.syncer_silent = True
    world.run(60)
    assert world.condition("LinksTooSlow") == found
    world.syncer_silent = False
    world.memory = type(world.memory)()
    world.run(60)
    assert world.condition("LinksTooSlow") == found and world.told("LinksTooSlow") == 1


@pytest.mark.parametrize("link", [None, slot_link(), slot_link(too_slow=True), {**SLOW, "up_bytes_per_second": None}])
def test_links_of_which_little_is_known(link: Any) -> None:
    world = served()
    world.links = {"away": link}
    world.run(TOO_SLOW_SECONDS + 60)
    slow = link is not None and bool(dict(link)["too_slow"])
    assert world.truth("LinksTooSlow") == ("True" if slow else "False")


def test_many_regions_fit_into_the_message() -> None:
    clusters = ["hub"] + ["far"] * 63
    regions = [{"name": f"region-{i:02}", "cluster": c, "learners": 1} for i, c in enumerate(clusters)]
    world = served(regions=regions)
    world.links = {row["name"]: SLOW for row in regions}
    world.run(TOO_SLOW_SECONDS + 60)
    message = world.condition("LinksTooSlow")["message"]
    assert len(message) < 4000 and "Region region-63 too." in message and message.endswith("needed.")


# ------------------------------------------------------------------ other jobs


def refusal(ordinal: int, *fields: str, ago: float = 1.0, region: str = "away", **more: Any) -> Object:
    return {
        "role": "learner",
        "region": region,
        "ordinal": ordinal,
        "reason": "spec-drift",
        "message": "…",
        "fields": list(fields),
        "seconds_ago": ago,
        **more,
    }


def test_whose_copy_is_another_job_is_named_at_the_hub_too() -> None:
    world = served()
    assert world.truth("SpecDrift") == "False"
    world.refused = [refusal(0, "training.model"), refusal(1, "seed", "training.model", ago=30.0)]
    world.run(30)
    found = world.condition("SpecDrift")
    assert found["status"] == "True"
    assert "region away (cluster far): seed, training.model" in found["message"]
    assert world.told("SpecDrift") == 1
    world.refused = [refusal(0, "training.model", ago=60.0), refusal(1, "seed", ago=90.0)]
    world.run(30)
    assert world.condition("SpecDrift")["message"] == found["message"]
    world.refused = []
    world.run(30)
    assert world.truth("SpecDrift") == "False" and world.told("SpecDriftOver") == 1


def test_a_refusal_of_long_ago_or_for_another_reason_is_no_drift() -> None:
    world = served()
    world.refused = [refusal(0, "seed", ago=RECENT_SECONDS + 1), refusal(1, reason="other-data")]
    world.run(30)
    assert world.truth("SpecDrift") == "False"


def test_an_evaluator_and_an_unknown_region_may_drift() -> None:
    world = served()
    world.refused = [
        refusal(0, *(f"field-{i:02}" for i in range(30)), role="evaluator"),
        refusal(0, "seed", region="gone"),
    ]
    world.run(30)
    message = world.condition("SpecDrift")["message"]
    assert "the evaluator: field-00" in message and "and 20 more" in message and "region gone: seed" in message


# ------------------------------------------------------------------ the syncer's own Secret


@pytest.mark.parametrize(
    ("words", "cures"),
    [
        (
            "/etc/diloco/credentials/tls.crt: the certificate is for the syncer of job ns/other, and this is …",
            ["Secret s (syncer.tls.secretName)", "diloco certs issue"],
        ),
        ("/etc/diloco/credentials/join-token is empty", ["Secret l (learners.credentials.secretName)"]),
        (
            "/etc/diloco/control/control-key must hold at least 16 bytes of key",
            ["The operator made Secret ", "delete it"],
        ),
    ],
)
def test_a_syncer_whose_secret_is_wrong_waits_for_a_better_one(words: str, cures: list[str]) -> None:
    world = Hub(failurePolicy={"maxReplacements": 1})
    world.run(3)
    world.last_words = words
    (pod,) = world.of("syncer")
    world.crashing = {pod.name: 5}
    world.run(900)
    found = world.condition("SyncerReady")
    assert (found["status"], found["reason"]) == ("False", "Credentials"), world.story()
    for part in (words.rstrip("."), *cures):
        assert part in found["message"]
    assert world.condition("Ready")["reason"] == "SyncerCredentials"
    assert world.told("SyncerCredentials") == 1 and world.told("SyncerCrashed") == 0
    assert world.truth("Failed") == "False" and not world.status.get("replacements")
    world.crashing = {}
    world.until(lambda w: w.truth("SyncerReady") == "True", 400)
    assert world.truth("Failed") == "False"


class Reading(Hub):
    """Its syncer reads a large store; ``waiting`` is why its container waits."""

    waiting: Object | None = None

    def observed(self) -> Observed:
        found = super().observed()
        for pod in found.pods:
            if pod["metadata"]["labels"][LABEL_ROLE] == "syncer":
                status = pod["status"]
                status["conditions"] = [c for c in status["conditions"] if c["type"] != "Ready"]
                if self.waiting is not None:
                    status["containerStatuses"][0]["state"] = {"waiting": self.waiting}
        return found


def test_a_secret_that_was_put_right_is_not_to_blame_while_the_store_is_read() -> None:
    world = Reading()
    world.run(3)
    world.last_words = "tls.crt is empty"
    (pod,) = world.of("syncer")
    world.crashing = {pod.name: 5}
    world.run(60)
    assert world.condition("SyncerReady")["reason"] == "Credentials"
    world.crashing = {}
    world.until(lambda w: pod.running, 300)
    world.run(20)
    assert world.condition("SyncerReady")["reason"] == "Credentials", "it may end by it again"
    world.run(60)
    assert world.condition("SyncerReady")["reason"] == "Starting", world.story()
    assert world.told("SyncerCredentials") == 1


def test_what_keeps_a_container_from_starting_is_told_before_how_it_ended() -> None:
    world = Reading()
    world.run(3)
    world.last_words = "tls.crt is empty"
    world.crashing = {world.of("syncer")[0].name: 5}
    world.run(60)
    message = "references non-existent secret key: join-token"
    world.waiting = {"reason": "CreateContainerConfigError", "message": message}
    world.run(30)
    found = world.condition("SyncerReady")
    assert found["reason"] == "PodConfiguration" and message in found["message"], world.story()


def test_a_pod_that_is_deleted_meanwhile_does_not_count_and_a_later_loss_does() -> None:
    world = served(failurePolicy={"maxReplacements": 5})
    world.last_words = "tls.crt is empty"
    (pod,) = world.of("syncer")
    world.crashing = {pod.name: 5}
    world.run(60)
    world.delete_pod(pod.name)
    world.crashing = {}
    world.run(10)
    assert not world.status.get("replacements")
    world.until(lambda w: w.truth("SyncerReady") == "True", 100)
    world.delete_pod(world.of("syncer")[0].name)
    world.run(20)
    assert world.status["replacements"]["total"] == 1


def test_a_loss_counts_again_once_the_same_pod_has_served() -> None:
    world = served()
    (pod,) = world.of("syncer")
    world.crashing = {pod.name: 5}
    world.run(5)
    world.crashing = {}
    world.until(lambda w: w.truth("SyncerReady") == "True", 400)
    world.delete_pod(pod.name)
    world.run(20)
    assert world.status["replacements"]["total"] == 1


def test_learners_that_have_not_joined_are_told_of_their_secret() -> None:
    world = Hub()
    world._members = lambda hub: None  # type: ignore[method-assign]
    world.run(120)
    cause = world.region("near")["cause"]
    assert "kubectl logs job-near-0" in cause and "Secret l does not fit" in cause
    assert world.truth("Failed") == "False" and not world.status.get("replacements")


@pytest.mark.promise("A load balancer without an address is reported, and fails nothing")
def test_a_load_balancer_without_an_address_is_told() -> None:
    world = World(job_object(syncer={"endpoint": {"type": "LoadBalancer"}}))
    world.until(lambda w: w.truth("QuorumMet") == "True", 60)
    world.run(20)
    ready = world.condition("SyncerReady")
    assert ready["reason"] == "AddressPending" and ready["status"] == "True", "its own cluster's learners reach it"
    assert "external" not in world.status["syncer"]
    service = world.objects[names.syncer_service("job")]
    service["status"] = {"loadBalancer": {"ingress": [{"hostname": "lb.example.com"}]}}
    world.run(30)
    assert world.condition("SyncerReady")["reason"] == "Serving"
    assert world.status["syncer"]["external"] == "lb.example.com:7700"


def test_clusters_that_cannot_reach_the_load_balancer_yet_are_waited_for() -> None:
    spread = {
        **SPREAD,
        "syncer": {**SPREAD["syncer"], "endpoint": {"type": "LoadBalancer", "address": "a.example.com"}},
    }
    world = World(job_object(**spread), settings=PlanSettings("hub", "o", "s", "w"))
    world.until(lambda w: w.condition("SyncerReady").get("reason") == "AddressPending", 60)
    assert world.truth("SyncerReady") == "False" and world.condition("Ready")["reason"] == "SyncerAddressPending"
