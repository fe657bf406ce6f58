"""What the applier sends, and what it leaves alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import POD, Kind
from diloco_operator.model import Object, Ref
from diloco_operator.names import GENERATION, JOB_UID, is_ours, owner_reference, ref_of
from diloco_operator.reconcile import apply
from diloco_operator.reconcile.apply import Applier, ApplyMemory, _conflict
from diloco_protocol.vocabulary import LABEL_JOB

KEY, UID = ("ns", "job"), "job-uid"


def config(value: str, owner: str = UID, **data: str) -> Object:
    meta: Object = {"name": "job-settings", "namespace": "ns", "labels": {LABEL_JOB: "job"}}
    meta["ownerReferences"] = [owner_reference("job", owner)]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"job.json": value, **data}}


def stateful_set(service: str, owner: str = UID) -> Object:
    meta = config("", owner)["metadata"] | {"name": "job-local", "annotations": {GENERATION: service}}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": {"serviceName": service}}


def live(obj: Object, version: int = 1) -> Object:
    return {**obj, "metadata": {**obj["metadata"], "uid": "u", "resourceVersion": str(version)}}


class ScriptedApi:
    """Has at most one object, and makes of what is applied what ``make`` does."""

    def __init__(self, there: Object | None = None) -> None:
        self.there = there
        self.sent: list[Object] = []
        self.version = 1

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return self.there

    def made(self, manifest: Object) -> Object:
        return manifest

    async def apply(self, kind: Kind, manifest: Object, dry_run: bool = False) -> Object:
        self.sent.append(manifest)
        self.version += 1
        self.there = live(self.made(manifest), self.version)
        return self.there


class Stubborn(ScriptedApi):
    """Another program puts one value back."""

    def made(self, manifest: Object) -> Object:
        return {**manifest, "data": {**manifest["data"], "job.json": "theirs"}}


def applied(api: Any, wanted: Object, memory: ApplyMemory, seen: Object | None) -> dict[Ref, Any]:
    there = {} if seen is None else {ref_of(wanted): seen}
    return asyncio.run(Applier(api, Cache(), KEY, UID, live=there, memory=memory).apply([wanted]))


@pytest.mark.promise("An object that does not belong to the job is never sent, whether or not the cache knows it")
@pytest.mark.parametrize("seen", [True, False], ids=["the cache has it", "only the API server has it"])
def test_an_object_that_is_not_the_jobs_is_not_sent(seen: bool) -> None:
    theirs = live(config("x", owner="another"))
    api = ScriptedApi(theirs)
    errors = applied(api, config("mine"), ApplyMemory(), theirs if seen else None)
    assert [error.reason for error in errors.values()] == ["conflict"] and not api.sent


class Replacing(ScriptedApi):
    """Refuses what has another UID than its object, as an API server does."""

    async def apply(self, kind: Kind, manifest: Object, dry_run: bool = False) -> Object:
        uid, there = manifest["metadata"].get("uid"), self.there
        if there is None and uid is not None:
            raise ApiError("patch", kind.plural, 409, "uid mismatch: no existing object was found")
        if there is not None and uid is None:
            raise ApiError("patch", kind.plural, 409, "conflict with another manager")
        if there is not None and uid != there["metadata"]["uid"]:
            raise ApiError("patch", kind.plural, 422, "metadata.uid: Invalid value: field is immutable")
        return await super().apply(kind, manifest, dry_run)


@pytest.mark.promise(
    "An apply is for exactly the object that the operator looked at, and takes over no other owner's "
    "object; an object that was deleted unnoticed is created again"
)
def test_what_is_sent_is_for_the_object_that_was_looked_at() -> None:
    """The cache has the job's; the API server has somebody else's of that name by now. Nothing is taken from it."""
    theirs = live(config("theirs", owner="another"))
    theirs["metadata"]["uid"] = "v"
    api = Replacing(theirs)
    errors = applied(api, config("new"), ApplyMemory(), live(config("mine")))
    assert [error.reason for error in errors.values()] == ["conflict"]
    assert not api.sent and api.there == theirs
    mine = Replacing(live(config("old")))
    assert applied(mine, config("new"), ApplyMemory(), mine.there) == {} and len(mine.sent) == 1


@pytest.mark.promise(
    "An apply is for exactly the object that the operator looked at, and takes over no other owner's "
    "object; an object that was deleted unnoticed is created again"
)
def test_what_was_deleted_unseen_is_made_again_at_once() -> None:
    api = Replacing(None)
    assert applied(api, config("new"), ApplyMemory(), live(config("mine"))) == {}
    assert [sent["data"]["job.json"] for sent in api.sent] == ["new"]


def test_no_dry_run_is_made_of_an_object_that_is_not_the_jobs() -> None:
    theirs = stateful_set("theirs", owner="another")
    api = ScriptedApi(live(theirs))
    errors = applied(api, stateful_set("mine"), ApplyMemory(), live(theirs))
    assert [error.reason for error in errors.values()] == ["conflict"] and not api.sent


class Judging(ScriptedApi):
    """Refuses what it is told to, and counts tries; nothing is made of a dry run."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__()
        self.answer, self.tries = (status, message), 0

    async def apply(self, kind: Kind, manifest: Object, dry_run: bool = False) -> Object:
        assert dry_run
        self.tries += 1
        if self.answer[0] != 200:
            raise ApiError("patch", kind.plural, *self.answer)
        return manifest


@pytest.mark.promise(
    "Faults of a suspended job's pod templates are told before it starts, by a dry run", section="Operator"
)
@pytest.mark.parametrize(
    ("status", "message", "told", "tries"),
    [
        (422, "spec.template.spec.containers[0].imagee: field not declared in schema", ["invalid"], 3),
        (403, 'admission webhook "p" denied the request: too large', ["policy"], 3),
        (403, "exceeded quota: small", [], 40),
        (500, 'failed calling webhook "w"', [], 40),
        (200, "", [], 1),
    ],
)
def test_what_a_waiting_job_would_be_refused_is_found_and_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, status: int, message: str, told: list[str], tries: int
) -> None:
    """Over 800 s. What is in order is not asked again, a lasting fault rarely."""
    api, memory, seconds = Judging(status, message), ApplyMemory(), iter(range(0, 800, 20))
    monkeypatch.setattr(apply, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    applier: Any = Applier(api, Cache(), KEY, UID, live={}, memory=memory)  # type: ignore[arg-type]
    for _ in range(40):
        faults = asyncio.run(applier.find_faults([stateful_set("1")]))
        assert [fault.reason for fault in faults] == told
        assert asyncio.run(applier.find_faults([])) == ()
    assert api.tries == tries and api.there is None


class Failing(ScriptedApi):
    """Some webhook for its object is down."""

    tries = 0

    async def apply(self, kind: Kind, manifest: Object, dry_run: bool = False) -> Object:
        self.tries += 1
        raise ApiError("patch", kind.plural, 500, "failed calling webhook")


def test_a_write_that_fails_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    api, memory, seconds = Failing(), ApplyMemory(), iter(range(600))
    monkeypatch.setattr(apply, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for _ in range(600):
        assert len(applied(api, config("mine"), memory, None)) == 1
    assert 30 <= api.tries <= 40


def test_an_object_that_does_not_become_what_was_wanted_is_sent_again_only_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api, memory = Stubborn(), ApplyMemory()
    applied(api, config("mine"), memory, None)
    for _ in range(3):
        applied(api, config("mine"), memory, api.there)
    assert len(api.sent) == 1
    monkeypatch.setattr(apply, "UNCHANGED_SECONDS", 0.0)
    applied(api, config("mine"), memory, api.there)
    assert len(api.sent) == 2


def test_an_object_that_somebody_changed_since_is_sent_again_at_once() -> None:
    api, memory = Stubborn(), ApplyMemory()
    applied(api, config("mine"), memory, None)
    assert api.there is not None
    changed = live({**api.there, "data": {"job.json": "changed again"}}, 9)
    applied(api, config("mine"), memory, changed)
    assert len(api.sent) == 2


def test_what_nobody_controls_is_the_jobs_only_if_it_is_a_claim_that_the_operator_made() -> None:
    labels = {LABEL_JOB: "job", "app.kubernetes.io/managed-by": "diloco-operator"}
    claim = Ref("PersistentVolumeClaim", "job-syncer")
    assert is_ours(claim, {"metadata": {"labels": labels}}, "job", UID)
    assert not is_ours(claim, {"metadata": {"labels": labels | {"app.kubernetes.io/managed-by": "a"}}}, "job", UID)
    settings = Ref("ConfigMap", "job-settings")
    assert not is_ours(settings, {"metadata": {"labels": labels}}, "job", UID)


def test_what_was_made_for_this_very_job_is_the_jobs_without_labels_and_owner() -> None:
    for ref in (Ref("ConfigMap", "job-settings"), Ref("PersistentVolumeClaim", "job-syncer")):
        for uid in (UID, "another"):
            assert is_ours(ref, {"metadata": {"annotations": {JOB_UID: uid}}}, "job", UID) == (uid == UID)


def test_what_an_earlier_job_of_the_name_left_is_not_touched_and_the_cure_ends_no_pod() -> None:
    labels = {LABEL_JOB: "job", "app.kubernetes.io/managed-by": "diloco-operator"}
    meta = {"name": "job-local", "labels": labels, "annotations": {JOB_UID: "another"}}
    error = _conflict(Ref("StatefulSet", "job-local"), {"metadata": meta}, "job")
    assert "earlier job" in error.message and "--cascade=orphan statefulset job-local" in error.message
    assert (
        "orphan" not in _conflict(Ref("StatefulSet", "job-local"), {"metadata": {"name": "job-local"}}, "job").message
    )


def test_a_claim_that_lost_its_labels_is_not_touched_and_the_cure_keeps_its_data() -> None:
    meta = {"name": "job-syncer", "annotations": {JOB_UID: "another"}}
    told = _conflict(Ref("PersistentVolumeClaim", "job-syncer"), {"metadata": meta}, "job").message
    assert "Delete" not in told and "kubectl label pvc job-syncer " in told
    labels = dict(word.rstrip(".").split("=") for word in told.split() if "=" in word)
    assert is_ours(Ref("PersistentVolumeClaim", "job-syncer"), {"metadata": meta | {"labels": labels}}, "job", UID)
    stranger = {"metadata": {"name": "job-syncer"}}
    assert "label" not in _conflict(Ref("PersistentVolumeClaim", "job-syncer"), stranger, "job").message


class AnsweringApi(Api):
    """Refuses a deletion, and then has this pod or none."""

    def __init__(self, status: int, uid: str | None) -> None:
        self.status, self.uid = status, uid

    async def write(self, verb: str, resource: str, method: str, path: str, **parts: Any) -> Object:
        raise ApiError(verb, resource, self.status, "the object has been modified")

    async def ask(self, verb: str, resource: str, method: str, path: str, **parts: Any) -> Object:
        if self.uid is None:
            raise ApiError(verb, resource, 404, "not found")
        return {"metadata": {"name": "p", "uid": self.uid}}


@pytest.mark.parametrize(("status", "uid"), [(404, "mine"), (409, None), (409, "another")])
def test_an_object_that_is_not_there_any_more_is_deleted(status: int, uid: str | None) -> None:
    assert asyncio.run(AnsweringApi(status, uid).delete(POD, "ns", "p", "mine")) is None


@pytest.mark.promise("A conflict over an existing object is not taken for its deletion")
def test_a_conflict_over_an_object_that_is_there_is_not_taken_for_its_deletion() -> None:
    with pytest.raises(ApiError, match="modified"):
        asyncio.run(AnsweringApi(409, "mine").delete(POD, "ns", "p", "mine"))
