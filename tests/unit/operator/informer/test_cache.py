"""What the watches have told, kept small."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_operator.informer.cache import Cache, is_older
from diloco_operator.kube.kinds import CONFIG_MAP, JOB, NODE, POD, STATEFUL_SET
from diloco_operator.model import Ref


def obj(name: str, version: int, job: str | None = None, uid: str = "", **more: Any) -> dict[str, Any]:
    labels = {"diloco.io/job": job} if job else {}
    meta = {"namespace": "n", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**meta, "labels": labels, "managedFields": [{"manager": "x"}]}, **more}


def pod(name: str, version: int, job: str, node: str = "node-1", **more: Any) -> dict[str, Any]:
    return obj(name, version, job, spec={"nodeName": node, "containers": [{"name": "learner"}]}, **more)


def node(name: str, version: int, ready: str = "True", beat: str = "1") -> dict[str, Any]:
    made = obj(
        name,
        version,
        status={
            "conditions": [
                {"type": "Ready", "status": ready, "lastHeartbeatTime": beat},
                {"type": "DiskPressure", "status": "False", "lastHeartbeatTime": beat},
            ],
            "images": [{"names": ["x"] * 50}],
        },
    )
    del made["metadata"]["namespace"]
    return made


KEY = ("n", "j")


def test_objects_belong_to_the_job_of_their_label() -> None:
    cache = Cache()
    assert cache.put(JOB, obj("j", 1)) == {KEY}
    assert cache.put(STATEFUL_SET, obj("j-local", 2, "j")) == {KEY}
    assert cache.put(POD, pod("j-local-0", 3, "j")) == {KEY}
    assert cache.put(POD, pod("other-0", 4, "other")) == {("n", "other")}
    objects, pods = cache.of_job(KEY)
    assert set(objects) == {Ref("StatefulSet", "j-local")}
    assert [p["metadata"]["name"] for p in pods] == ["j-local-0"]
    assert cache.jobs() == [KEY]
    assert cache.of_job(("elsewhere", "j")) == ({}, ())


def test_an_object_that_changes_hands_is_news_for_both() -> None:
    cache = Cache()
    cache.put(CONFIG_MAP, obj("c", 1, "j"))
    assert cache.put(CONFIG_MAP, obj("c", 2, "k")) == {KEY, ("n", "k")}
    assert cache.of_job(KEY) == ({}, ())
    assert cache.put(CONFIG_MAP, obj("c", 3)) == {("n", "k")}
    assert cache.of_job(("n", "k")) == ({}, ())


def test_what_is_not_newer_changes_nothing() -> None:
    cache = Cache()
    cache.put(CONFIG_MAP, obj("c", 10, "j", data={"a": "new"}))
    assert cache.put(CONFIG_MAP, obj("c", 9, "j", data={"a": "old"})) == set()
    assert cache.put(CONFIG_MAP, obj("c", 10, "j", data={"a": "same"})) == set()
    found = cache.get(CONFIG_MAP, "n", "c")
    assert found is not None and found["data"] == {"a": "new"}
    # Another object of that name, whatever its version.
    assert cache.put(CONFIG_MAP, obj("c", 2, "j", uid="second", data={"a": "2"})) == {KEY}


def test_versions() -> None:
    assert is_older("5", "5") and is_older("9", "10") and not is_older("10", "9")
    assert not is_older("a", "b")  # no numbers: nothing is known, so the later is the newer
    assert is_older("a", "a")


def test_what_is_dropped_is_news_once_and_only_the_object_that_was_meant() -> None:
    cache = Cache()
    cache.put(POD, pod("p", 1, "j"))
    assert cache.drop(POD, "n", "p", "another-uid") == set()
    assert cache.drop(POD, "n", "p", "uid-p") == {KEY}
    assert cache.drop(POD, "n", "p") == set()
    assert cache.of_job(KEY) == ({}, ())


def test_heartbeats_of_a_node_are_no_news_and_its_loss_is_for_those_on_it() -> None:
    cache = Cache()
    cache.put(NODE, node("node-1", 1))
    cache.put(POD, pod("a", 2, "j", "node-1"))
    cache.put(POD, pod("b", 3, "k", "node-2"))
    assert cache.put(NODE, node("node-1", 4, beat="2")) == set()
    assert cache.put(NODE, node("node-1", 5, ready="Unknown")) == {KEY}
    assert cache.nodes(["node-1", "node-9"])["node-1"]["status"]["conditions"][0]["status"] == "Unknown"
    assert set(cache.nodes(["node-1", "node-9"])) == {"node-1"}
    assert cache.drop(NODE, "", "node-1") == {KEY}


def test_what_is_kept_is_small_and_has_what_decisions_need() -> None:
    cache = Cache()
    statuses = [
        {
            "name": "learner",
            "ready": True,
            "restartCount": 2,
            "image": "w",
            "state": {"running": {}},
            "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            "volumeMounts": [{"name": "x", "mountPath": "/" + "x" * 500}],
        }
    ]
    big = pod("p", 1, "j")
    big["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 5000, "k": "v"}
    big["spec"] |= {
        "containers": [{"name": "learner", "image": "w", "env": [{"name": "A", "value": "x" * 5000}]}],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "t", "emptyDir": {}}],
        "terminationGracePeriodSeconds": 30,
    }
    big["status"] = {
        "phase": "Running",
        "podIP": "1.2.3.4",
        "conditions": [{"type": "Ready"}],
        "containerStatuses": statuses,
        "reason": "Evicted",
    }
    cache.put(POD, big)
    found = cache.get(POD, "n", "p")
    assert found is not None
    assert len(json.dumps(found)) < 1500
    assert found["metadata"]["annotations"] == {"k": "v"}
    assert found["spec"]["terminationGracePeriodSeconds"] == 30
    assert found["spec"]["volumes"] == [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    assert found["spec"]["containers"] == [{"name": "learner", "image": "w"}]
    assert found["status"]["reason"] == "Evicted"
    status = found["status"]["containerStatuses"][0]
    assert status["restartCount"] == 2 and status["lastState"]["terminated"]["exitCode"] == 137
    assert "managedFields" not in found["metadata"]
    assert big["status"]["containerStatuses"] is statuses, "what came in is not changed"


# ------------------------------------------------------------------ what is gone stays gone


@pytest.mark.promise(
    "An object that is gone does not return with a late answer, so no pod of a lost node is deleted by force twice"
)
def test_an_answer_that_comes_after_the_end_does_not_bring_an_object_back() -> None:
    """A list is answered with the pod, the watch tells that it was deleted, and then the list's answer is put in."""
    cache = Cache()
    cache.put(POD, pod("p", 5, "j"))
    assert cache.drop(POD, "n", "p", "uid-p", "9") == {KEY}
    assert cache.put(POD, pod("p", 5, "j")) == set()
    assert cache.put(POD, pod("p", 9, "j")) == set(), "the API server's answer to its deletion"
    assert cache.of_job(KEY) == ({}, ())
    assert cache.put(POD, pod("p", 2, "j", uid="successor")) == {KEY}


def test_an_object_that_was_never_there_does_not_come_after_its_end_either() -> None:
    cache = Cache()
    assert cache.drop(CONFIG_MAP, "n", "c", "uid-c", "9") == set()
    assert cache.put(CONFIG_MAP, obj("c", 8, "j")) == set()
    assert cache.get(CONFIG_MAP, "n", "c") is None


def test_an_object_that_gets_its_label_back_is_there_again() -> None:
    """A watch by label calls an object deleted that lost the label. It has the same UID when it comes back."""
    cache = Cache()
    cache.put(STATEFUL_SET, obj("s", 5, "j"))
    cache.drop(STATEFUL_SET, "n", "s", "uid-s", "9")
    cache.drop(STATEFUL_SET, "n", "s", "uid-s", "7")  # told later, by a list that was older
    assert cache.put(STATEFUL_SET, obj("s", 8, "j")) == set()
    assert cache.put(STATEFUL_SET, obj("s", 10, "j")) == {KEY}
    cache.drop(STATEFUL_SET, "n", "s", "uid-s")
    cache.drop(STATEFUL_SET, "n", "s", "uid-s", "12")
    assert cache.put(STATEFUL_SET, obj("s", 13, "j")) == set(), "it was deleted"


def test_an_object_whose_name_another_has_does_not_take_it_back() -> None:
    cache = Cache()
    cache.put(POD, pod("p", 5, "j"))
    cache.put(POD, pod("p", 9, "j", uid="successor"))
    assert cache.put(POD, pod("p", 7, "j")) == set()
    assert cache.uids(POD) == {("n", "p"): "successor"}


def test_a_job_may_always_come_back_and_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_operator.informer.cache.MAX_GONE", 2)
    cache = Cache()
    cache.drop(JOB, "n", "j", "uid-j")
    assert cache.put(JOB, obj("j", 1)) == {KEY}, "kopf lists anew"
    for name in "abc":
        cache.drop(POD, "n", name, f"uid-{name}")
    assert [name for name in "abc" if cache.put(POD, pod(name, 1, "j"))] == ["a"]
