"""What is read from the API server before a process is said to have ended, or a pod is deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import JOB, NODE, POD, STATEFUL_SET, Kind
from diloco_operator.model import Call, Object, Observed
from diloco_operator.reconcile.confirm import keep_confirmed, read_anew
from diloco_protocol.vocabulary import LABEL_JOB, LABEL_ROLE, ControlMethod

KEY = ("ns", "job")
UID = "aaaaaaaa-0000-0000-0000-000000000001"
OTHER = "bbbbbbbb-0000-0000-0000-000000000002"


def pod(uid: str = UID, name: str = "job-local-0", version: str = "5", **state: Any) -> Object:
    labels = {LABEL_JOB: "job", LABEL_ROLE: "learner"}
    row = {"name": "learner", "ready": True, "restartCount": 0, "state": state or {"running": {"startedAt": None}}}
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": version, "labels": labels},
        "spec": {"nodeName": "n0", "containers": []},
        "status": {"phase": "Running", "containerStatuses": [row]},
    }


def job(generation: int = 1, **meta: Any) -> Object:
    return {"metadata": {"name": "job", "namespace": "ns", "uid": "j", "generation": generation, **meta}, "spec": {}}


def node(ready: str) -> Object:
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": "n0", "uid": "n", "resourceVersion": ready}, "spec": {}, "status": status}


class ScriptedApi:
    """Answers with these objects, or with an error."""

    def __init__(self, *objects: tuple[Kind, Object], error: ApiError | None = None) -> None:
        self.objects, self.error = objects, error
        self.asked: list[str] = []

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        found = await self.list_objects(kind, namespace)
        return next((obj for obj in found if obj["metadata"]["name"] == name), None)

    async def list_objects(self, kind: Kind, namespace: str | None, **selectors: str) -> list[Object]:
        self.asked.append(kind.name)
        if self.error is not None:
            raise self.error
        return [obj for of, obj in self.objects if of is kind]


def ended(name: str = "job-local-0") -> Call:
    body = {"region": "local", "ordinal": 0, "process": UID.replace("-", "") + "0000", "reason": "its pod is gone"}
    return Call(ControlMethod.PROCESS_ENDED, body, (name, UID.replace("-", "")))


def confirmed(api: Any, call: Call, cache: Cache | None = None) -> list[Call]:
    return asyncio.run(keep_confirmed(api, cache or Cache(), KEY, Observed(0.0, job()), calls=[call]))


@pytest.mark.promise(
    "`process-ended` is called only if the API server confirms it: no pod, another UID, or an ended container"
)
def test_a_process_whose_pod_runs_is_not_said_to_have_ended() -> None:
    cache = Cache()
    assert confirmed(ScriptedApi((POD, pod())), ended(), cache) == []
    assert cache.get(POD, "ns", "job-local-0") is not None, "the next plan knows it"


@pytest.mark.parametrize(
    "found",
    [
        [],
        [(POD, pod(OTHER))],
        [(POD, pod(terminated={"exitCode": 1}))],
        [(POD, {**pod(), "status": {"phase": "Failed"}})],
    ],
    ids=["no pod", "another pod", "its container ended", "its pod failed"],
)
def test_a_process_that_ended_is_reported(found: list[tuple[Kind, Object]]) -> None:
    assert confirmed(ScriptedApi(*found), ended()) == [ended()]


def test_a_container_that_has_not_run_yet_says_nothing_of_a_process() -> None:
    assert confirmed(ScriptedApi((POD, pod(waiting={"reason": "ContainerCreating"}))), ended()) == []


def test_where_the_api_server_does_not_answer_nothing_is_said() -> None:
    with pytest.raises(ApiError):
        confirmed(ScriptedApi(error=ApiError("get", "pods", 0, "no answer")), ended())


@pytest.mark.promise("The end of a process is reported only for the job that the plan saw")
@pytest.mark.parametrize(
    ("now", "kept"), [(job(), 1), (job(2), 0), (job(deletionTimestamp="2023-11-14T22:13:21Z"), 0), (None, 0)]
)
def test_an_end_is_told_only_of_the_job_that_the_plan_saw(now: Object | None, kept: int) -> None:
    api = ScriptedApi(*([(JOB, now)] if now is not None else []))
    call = Call(ControlMethod.ANNOUNCE, {"phase": "suspended", "message": ""})
    assert len(confirmed(api, call)) == kept


def test_reading_anew_makes_the_cache_what_there_is() -> None:
    cache = Cache()
    cache.put(POD, pod())
    cache.put(POD, pod(OTHER, "job-local-1"))
    old = cache.get(POD, "ns", "job-local-1")
    assert old is not None
    seen = Observed(0.0, job(), pods=(pod(), old), nodes={"n0": node("Unknown")})
    cache.put(NODE, node("Unknown"))
    api: Any = ScriptedApi((POD, pod(version="9", terminated={"exitCode": 1})), (NODE, node("True")))
    asyncio.run(read_anew(api, cache, KEY, seen))
    (left,) = cache.of_job(KEY)[1]
    assert left["metadata"]["name"] == "job-local-0" and "terminated" in left["status"]["containerStatuses"][0]["state"]
    assert cache.nodes(["n0"])["n0"]["status"]["conditions"][0]["status"] == "True"
    assert api.asked == [POD.name, STATEFUL_SET.name, NODE.name]


def test_a_pod_that_ends_while_the_answer_comes_stays_gone() -> None:
    """The watch tells of its deletion after the list was answered, and never mentions the pod again."""
    cache = Cache()
    cache.put(POD, pod())

    class LateApi(ScriptedApi):
        async def list_objects(self, kind: Kind, namespace: str | None, **selectors: str) -> list[Object]:
            found = await super().list_objects(kind, namespace, **selectors)
            cache.drop(POD, "ns", "job-local-0", UID, "9")
            return found

    api: Any = LateApi((POD, pod()))
    asyncio.run(read_anew(api, cache, KEY, Observed(0.0, job(), pods=(pod(),))))
    assert cache.of_job(KEY)[1] == ()


def test_a_pod_that_has_lost_its_label_comes_back_with_it() -> None:
    cache = Cache()
    cache.put(POD, pod())
    api: Any = ScriptedApi()
    asyncio.run(read_anew(api, cache, KEY, Observed(0.0, job(), pods=cache.of_job(KEY)[1])))
    assert cache.of_job(KEY)[1] == ()
    cache.put(POD, pod(version="6"))
    assert len(cache.of_job(KEY)[1]) == 1


def test_a_node_that_is_well_is_not_asked_for() -> None:
    api: Any = ScriptedApi()
    asyncio.run(read_anew(api, Cache(), KEY, Observed(0.0, job(), pods=(pod(),), nodes={"n0": node("True")})))
    assert NODE.name not in api.asked
