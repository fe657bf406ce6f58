"""What is read from the API server before something is done that a stale cache must not decide.

The cache is as old as the last byte of its streams. That is harmless for what is decided by level and can be put right
by the next turn. It is not for what takes a slot, or a pod, from a process that works:

* A call that says that a process has ended is made only after its pod was read, and the pod says so, too
  (``keep_confirmed``). A call that ends the job is made only for the version of the job that the plan saw.
* A plan deletes no pod by a view older than ``FRESH_SECONDS``. It asks for a new one (``JobPlan.wants_fresh_view``),
  and ``read_anew`` reads the job's pods, StatefulSets and nodes. So an operator that the API server does not answer,
  or whose stream brings nothing, deletes nothing.

Example: the watch of pods stands still while a learner's pod is replaced. The syncer lists a process that the cache
does not know. The successor's pod is read, its UID is the process's, and nothing is said to have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.kinds import JOB, NODE, POD, STATEFUL_SET, Kind
from diloco_operator.model import Call, Key, Object, Observed
from diloco_operator.plan.pod_status import process_has_ended
from diloco_protocol.vocabulary import LABEL_JOB, ControlMethod


async def keep_confirmed(api: Api, cache: Cache, key: Key, seen: Observed, calls: Sequence[Call]) -> list[Call]:
    """Those of the calls that hold by what the API server has now. What was read is put into the cache.

    Raises ApiError.
    """
    same = await _is_same_job(api, cache, key, seen) if any(c.method == ControlMethod.ANNOUNCE for c in calls) else True
    holds = await asyncio.gather(*(_still_holds(api, cache, key, call, same=same) for call in calls))
    return [call for call, held in zip(calls, holds, strict=True) if held]


async def _still_holds(api: Api, cache: Cache, key: Key, call: Call, same: bool) -> bool:
    if call.ended is None:
        return same
    name, process = call.ended
    pod = await api.get(POD, key[0], name)
    if pod is not None:
        cache.put(POD, pod)
    return process_has_ended(pod, process)


async def _is_same_job(api: Api, cache: Cache, key: Key, seen: Observed) -> bool:
    """Whether the job is as the plan saw it: its spec, and whether it is being deleted."""
    job = await api.get(JOB, *key)
    if job is None:
        return False
    cache.put(JOB, job)
    before, now = seen.job["metadata"], job["metadata"]
    return all(before.get(name) == now.get(name) for name in ("uid", "generation", "deletionTimestamp"))


async def read_anew(api: Api, cache: Cache, key: Key, seen: Observed) -> None:
    """Make the cache of the job's pods, StatefulSets and lost nodes what the API server has. Raises ApiError."""
    namespace, name = key
    for kind in (POD, STATEFUL_SET):
        before = seen.pods if kind is POD else [obj for ref, obj in seen.objects.items() if ref.kind == kind.name]
        _replace(cache, kind, before, await api.list_objects(kind, namespace, labels=f"{LABEL_JOB}={name}"))
    for node in _lost_nodes(seen):
        before = [known] if (known := (seen.nodes or {}).get(node)) is not None else []
        _replace(cache, NODE, before, await api.list_objects(NODE, None, fields=f"metadata.name={node}"))


def _replace(cache: Cache, kind: Kind, before: Iterable[Object], listed: Iterable[Object]) -> None:
    """Put what was listed into the cache, and drop what it had and was not listed."""
    uids = set()
    for obj in listed:
        cache.put(kind, obj)
        uids.add(obj["metadata"]["uid"])
    for meta in (obj["metadata"] for obj in before):
        if meta["uid"] not in uids:
            # With its version: it may be there without the job's label, and get that back.
            cache.drop(kind, meta.get("namespace", ""), meta["name"], meta["uid"], meta.get("resourceVersion"))


def _lost_nodes(seen: Observed) -> list[str]:
    """The nodes of the job's pods that the cache has as lost, or has not."""
    if seen.nodes is None:
        return []
    placed = {str(pod["spec"]["nodeName"]) for pod in seen.pods if pod["spec"].get("nodeName")}
    return sorted(node for node in placed if not _is_ready(seen.nodes.get(node) or {}))


def _is_ready(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(row.get("type") == "Ready" and row.get("status") == "True" for row in conditions)
