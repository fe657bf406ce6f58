"""One cluster's API server: objects with versions, watch events, and the verbs that the operator uses.

As Kubernetes' own: a version that rises with every write; a write on an old version, or with another UID, is refused
with 409; a pod that runs is deleted when its kubelet has ended it; an object with finalizers when they are gone;
what an object owns goes after it. Objects are never changed in place.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json, to_json

from diloco_operator.job import rfc3339
from diloco_operator.kube.api import NotLeading
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import EVENT, LEASE, POD, SECRET, Kind
from diloco_operator.leadership.candidate import REQUEST_SECONDS, lease_manifest, read_lease
from diloco_operator.leadership.election import LeaseRecord, LeaseWrite
from diloco_operator.model import Object
from operator_simulation.virtual_time import WALL

ObjectKey = tuple[str, str, str]
"""Kind, namespace, name."""


def wall() -> float:
    """The API server's clock."""
    return WALL + asyncio.get_running_loop().time()


def copied(value: Any) -> Any:
    return from_json(to_json(value))


def merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


class ApiServer:
    """The objects of one cluster. ``watchers`` hear of every change: kind, ADDED | MODIFIED | DELETED, object."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.objects: dict[ObjectKey, Object] = {}
        self.version = 1000
        self.watchers: list[Callable[[str, str, Object], None]] = []
        self.warnings: list[Object] = []
        self.refusing: dict[str, tuple[int, str]] = {}  # kinds whose writes fail: status and message
        self.full: frozenset[str] = frozenset()  # kinds of which the namespace's quota is used up
        self._uids = 0

    # ------------------------------------------------------------------ reading

    def find(self, kind: str, namespace: str, name: str) -> Object | None:
        return self.objects.get((kind, namespace, name))

    def all(self, kind: str) -> list[Object]:
        return [obj for (of, _, _), obj in self.objects.items() if of == kind]

    # ------------------------------------------------------------------ writing

    def put(self, kind: str, obj: Object) -> Object:
        """Store an object as it shall be now; the same as before is no write."""
        meta = obj["metadata"]
        key = (kind, meta.get("namespace", ""), meta["name"])
        before = self.objects.get(key)
        if before is not None and before == obj:
            return before
        self.version += 1
        obj = {**obj, "metadata": {**meta, "resourceVersion": str(self.version)}}
        self.objects[key] = obj
        self._notify(kind, "MODIFIED" if before is not None else "ADDED", obj)
        return obj

    def remove(self, kind: str, namespace: str, name: str) -> Object:
        """The object is gone, and what it owns goes; its last state."""
        obj = self.objects.pop((kind, namespace, name))
        self.version += 1
        last = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        self._notify(kind, "DELETED", last)
        uid = obj["metadata"]["uid"]
        for (of, space, called), child in list(self.objects.items()):
            owners = child["metadata"].get("ownerReferences") or ()
            if any(owner.get("uid") == uid for owner in owners):
                self.delete(of, space, called, None, grace=None)
        return last

    def create(self, kind: str, manifest: Object) -> Object:
        meta = manifest["metadata"]
        if (kind, meta.get("namespace", ""), meta["name"]) in self.objects:
            raise ApiError("create", kind, 409, f"{kind} {meta['name']} already exists")
        self._admit(kind, meta["name"])
        self._uids += 1
        digits = hashlib.sha256(f"{self.cluster} {self._uids}".encode()).hexdigest()
        uid = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"
        made = copied(manifest)
        if kind == "PersistentVolumeClaim":
            made["metadata"] = {"finalizers": ["kubernetes.io/pvc-protection"], **made["metadata"]}
        made["metadata"] = {"generation": 1, **made["metadata"], "uid": uid, "creationTimestamp": rfc3339(wall())}
        return self.put(kind, made)

    def apply(self, kind: str, manifest: Object, dry_run: bool) -> Object:
        """Server-side apply of an object of which the caller owns all but labels and annotations of others."""
        meta = manifest["metadata"]
        before = self.find(kind, meta["namespace"], meta["name"])
        if before is None and meta.get("uid"):
            raise ApiError("patch", kind, 409, f"{kind} {meta['name']}: uid mismatch")
        if before is not None and meta.get("uid") not in (None, before["metadata"]["uid"]):
            raise ApiError("patch", kind, 422, f"{kind} {meta['name']}: metadata.uid: field is immutable")
        if before is None:
            self._admit(kind, meta["name"])
            return manifest if dry_run else self.create(kind, {"kind": kind, **manifest})
        new = {**before, **{key: value for key, value in copied(manifest).items() if key != "metadata"}}
        kept = dict(before["metadata"])
        for field in ("labels", "annotations"):
            kept[field] = {**(kept.get(field) or {}), **(meta.get(field) or {})}
        if "ownerReferences" in meta:
            kept["ownerReferences"] = copied(meta["ownerReferences"])
        if new.get("spec") != before.get("spec"):
            kept["generation"] = kept["generation"] + 1
        return before if dry_run else self.put(kind, {**new, "metadata": kept})

    def patch(self, kind: str, namespace: str, name: str, patch: Object, sub: str) -> Object:
        before = self.find(kind, namespace, name)
        if before is None:
            raise ApiError("patch", kind, 404, f"{kind} {name} not found")
        meta = patch.get("metadata") or {}
        for field in ("resourceVersion", "uid"):
            if field in meta and meta[field] != before["metadata"][field]:
                raise ApiError("patch", kind, 409, f"{kind} {name}: the object has been modified")
        if sub == "status":
            return self.put(kind, {**before, "status": merged(before.get("status") or {}, patch["status"])})
        new = merged(before, {key: value for key, value in patch.items() if key != "status"})
        new["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if new.get("spec") != before.get("spec"):
            new["metadata"]["generation"] = before["metadata"]["generation"] + 1
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self.remove(kind, namespace, name)
            return new
        return self.put(kind, new)

    def delete(self, kind: str, namespace: str, name: str, uid: str | None, grace: int | None) -> Object | None:
        """The object as the API server answers with it; None: it answers with no object.

        Of a pod that is removed at once it is the last state, with a deletionTimestamp.
        """
        obj = self.find(kind, namespace, name)
        if obj is None or (uid is not None and obj["metadata"]["uid"] != uid):
            return None
        ends = 0
        if kind == POD.name and obj["spec"].get("nodeName") and grace != 0:
            own = obj["spec"].get("terminationGracePeriodSeconds", 30)
            ends = own if grace is None else grace
        elif not obj["metadata"].get("finalizers"):
            last = self.remove(kind, namespace, name)
            if kind != POD.name:
                return None
            meta = {"deletionTimestamp": rfc3339(wall()), **last["metadata"], "deletionGracePeriodSeconds": 0}
            return {**last, "metadata": meta}
        if "deletionTimestamp" in obj["metadata"]:
            return obj
        marks = {"deletionTimestamp": rfc3339(wall() + ends), "deletionGracePeriodSeconds": ends}
        return self.put(kind, {**obj, "metadata": {**obj["metadata"], **marks}})

    def warn(self, kind: str, obj: Object, reason: str, message: str) -> None:
        """A Warning Event about an object."""
        about = {"kind": kind, "name": obj["metadata"]["name"], "uid": obj["metadata"]["uid"]}
        self.warnings = [w for w in self.warnings if w["involvedObject"] != about or w["reason"] != reason]
        self.warnings.append(
            {"involvedObject": about, "reason": reason, "message": message, "lastTimestamp": rfc3339(wall())}
        )

    def _admit(self, kind: str, name: str) -> None:
        if kind in self.full:
            raise ApiError("create", kind, 403, f'{kind} "{name}" is forbidden: exceeded quota: small, used: 5')

    def _notify(self, kind: str, what: str, obj: Object) -> None:
        for watcher in list(self.watchers):
            watcher(kind, what, obj)


class SimulatedApi:
    """The operator's ``Api``: requests that take time, may be lost, and whose answers may be.

    ``reaches``: whether the operator's node reaches the API server now. ``goes_on``: waits while the operator's process
    stands still. ``acted``: told of every write before it is carried out (verb, kind, name, body).
    ``seconds_for_a_write``: as in ``Api``.
    """

    host = "https://simulated"

    def __init__(
        self,
        server: ApiServer,
        rng: random.Random,
        reaches: Callable[[], bool],
        goes_on: Callable[[], Awaitable[None]],
        acted: Callable[[str, str, str, Any], None],
        seconds_for_a_write: Callable[[], float],
        timeout: float = 15.0,
    ) -> None:
        self.server = server
        self.loss = 0.0  # of requests, and of answers
        self.slow = 0.05  # the longest that a request takes, its answer included
        self.writes = 0
        self._rng = rng
        self._reaches = reaches
        self._goes_on = goes_on
        self._acted = acted
        self._seconds_for_a_write = seconds_for_a_write
        self._timeout = timeout

    async def send(self, verb: str, kind: Kind, timeout: float, do: Callable[[], Any]) -> Any:
        """One request of at most ``timeout`` seconds. The answer is under way for as long as the request was, so that
        a watch may tell of what was written before the answer does."""
        took = self._rng.uniform(0.002, self.slow)
        way = min(took, timeout) / 2
        await asyncio.sleep(way)
        if took >= timeout or not self._reaches() or self._rng.random() < self.loss / 2:
            await asyncio.sleep(timeout - way)
            await self._goes_on()
            raise ApiError(verb, kind.plural, 0, "the API server does not answer")
        try:
            found = copied(do())
        except ApiError as error:
            error.verb, error.resource = verb, kind.plural
            await self._goes_on()
            raise
        lost = self._rng.random() < self.loss / 2
        await asyncio.sleep(timeout - way if lost else way)
        await self._goes_on()
        if lost:
            raise ApiError(verb, kind.plural, 0, "the answer was lost")
        return found

    async def _ask(self, verb: str, kind: Kind, name: str, body: Any, do: Callable[[], Any]) -> Any:
        await self._goes_on()
        if verb == "get":
            return await self.send(verb, kind, self._timeout, do)
        timeout = min(self._timeout, self._seconds_for_a_write())
        if timeout <= 0:
            raise NotLeading(verb, kind.plural, 0, "this operator does not lead, and writes nothing")

        def carry_out() -> Any:
            if kind.name in self.server.refusing:
                raise ApiError(verb, kind.plural, *self.server.refusing[kind.name])
            if verb != "try":
                self.writes += kind is not EVENT
                self._acted(verb, kind.name, name, body)
            return do()

        return await self.send(verb, kind, timeout, carry_out)

    async def answers(self) -> bool:
        """As ``Api.answers``."""
        try:
            await self._ask("get", EVENT, "", None, do=dict)
        except ApiError:
            return False
        return True

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        server = self.server
        return await self._ask("get", kind, name, None, do=lambda: server.find(kind.name, namespace or "", name))

    async def list_objects(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        label, _, value = labels.partition("=")

        def found() -> list[Object]:
            every = [obj["metadata"] | {"of": obj} for obj in self.server.all(kind.name)]
            named = [meta for meta in every if fields in ("", f"metadata.name={meta['name']}")]
            return [meta["of"] for meta in named if not label or meta.get("labels", {}).get(label) == value]

        return await self._ask("get", kind, "", None, do=found)

    async def list_warnings(self, namespace: str, selector: str = "", limit: int = 500) -> tuple[list[Object], bool]:
        return await self._ask("get", EVENT, "", None, do=lambda: self.server.warnings), True

    async def create(self, kind: Kind, namespace: str | None, manifest: Object) -> Object:
        if kind is EVENT:
            return await self._ask("create", kind, "", manifest, do=lambda: manifest)
        if kind is SECRET:  # its content is nobody's business here
            manifest = {"kind": "Secret", "metadata": manifest["metadata"]}
        name = manifest["metadata"]["name"]
        return await self._ask("create", kind, name, manifest, do=lambda: self.server.create(kind.name, manifest))

    async def apply(self, kind: Kind, manifest: Object, dry_run: bool = False) -> Object:
        name, server = manifest["metadata"]["name"], self.server
        verb = "try" if dry_run else "apply"
        return await self._ask(verb, kind, name, manifest, do=lambda: server.apply(kind.name, manifest, dry_run))

    async def merge_patch(self, kind: Kind, namespace: str, name: str, patch: Object, sub: str = "") -> Object:
        if kind is EVENT:
            return await self._ask("patch", kind, name, patch, do=dict)
        server = self.server
        return await self._ask(
            "patch", kind, name, patch, do=lambda: server.patch(kind.name, namespace, name, patch, sub)
        )

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace: int | None = None) -> Object | None:
        server, body = self.server, {"uid": uid, "grace": grace}
        return await self._ask(
            "delete", kind, name, body, do=lambda: server.delete(kind.name, namespace, name, uid, grace)
        )


class SimulatedLease:
    """The operator's ``LeaseStore`` on a simulated API server. Its requests take simulated time."""

    where = "diloco-system/diloco-operator"

    def __init__(self, api: SimulatedApi, namespace: str, name: str, skew: float) -> None:
        self._api, self._place, self._skew = api, (namespace, name), skew

    async def read(self) -> LeaseRecord | None:
        """As ``LeaseStore.read``."""
        server = self._api.server
        found = await self._api.send("get", LEASE, REQUEST_SECONDS, lambda: server.find(LEASE.name, *self._place))
        return read_lease(found) if found is not None else None

    async def write(self, wanted: LeaseWrite) -> LeaseRecord:
        """As ``LeaseStore.write``."""
        server, at = self._api.server, datetime.fromtimestamp(wall() + self._skew, UTC)
        body = lease_manifest(wanted, *self._place, at)

        def carry_out() -> Object:
            if wanted.version is None:
                return server.create(LEASE.name, body)
            return server.patch(LEASE.name, *self._place, body, "")

        return read_lease(await self._api.send("patch", LEASE, REQUEST_SECONDS, carry_out))
