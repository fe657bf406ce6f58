"""One turn for one job: observe, plan, carry out.

Theory of operation. A turn is by level: whatever woke it, it looks at all that is known
(observe.py), asks the plan, and carries the plan out in its order. What cannot be carried
out becomes an ``ApplyError``, which the next plan hears of and the status shows; if these errors
changed there is another turn at once. An API server that does not answer ends the turn
with an error, and the queue comes back with backoff.

What the plan counts stands in the status, so a status that could not be written is kept
and counts as the job's in the next turn; Events, which the plan says once, are kept until
they are sent. Everything else may be lost at any time: a new operator begins with nothing
and sends nothing for what is in order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError, classify_failure
from diloco_operator.kube.kinds import BY_NAME, JOB, POD, SECRET
from diloco_operator.kube.permissions import Permissions
from diloco_operator.logs import about
from diloco_operator.metrics import Metrics
from diloco_operator.model import (
    ApplyError,
    ClusterEvent,
    Delete,
    EventWanted,
    Key,
    Object,
    Observed,
    Plan,
    PlanMemory,
    PlanSettings,
    Ref,
)
from diloco_operator.plan import plan as planning
from diloco_operator.reconcile.apply import Applier, ApplyMemory, explain_refusal, ref_of
from diloco_operator.reconcile.event_reader import EventReader, find_waiting
from diloco_operator.reconcile.event_recorder import EventRecorder
from diloco_operator.reconcile.job_secrets import manifest as secret_manifest
from diloco_operator.reconcile.observe import (
    CachedJob,
    learner_pods,
    make_observed,
    read_cached_job,
    role_runs,
    syncer_is_here,
    syncer_pod,
)
from diloco_operator.reconcile.root_key import RootKeyFinder
from diloco_operator.reconcile.status_writer import Written, write_status
from diloco_operator.reconcile.syncer_poller import SyncerPoller
from diloco_operator.settings import Settings
from diloco_protocol.vocabulary import FINALIZER

log = logging.getLogger(__name__)

PlanFunction = Callable[[Observed, PlanMemory, PlanSettings], Plan]

AT_ONCE_SECONDS = 0.3
CONFLICT_SECONDS = 0.5  # until the watch has brought what changed under a write
SECRET_AGAIN_SECONDS = 30.0
MAX_EVENTS = 100  # kept of one job while they cannot be sent


@dataclass(slots=True)
class Record:
    """What is remembered of one job."""

    uid: str
    memory: PlanMemory = field(default_factory=PlanMemory)
    applied: ApplyMemory = field(default_factory=ApplyMemory)
    apply_errors: tuple[ApplyError, ...] = ()
    made: dict[str, float] = field(default_factory=dict)  # Secret -> when it was made (monotonic)
    status: Written = field(default_factory=Written)
    events: list[EventWanted] = field(default_factory=list)
    phase: str = ""
    replacements: int | None = None


class Reconciler:
    """Turns jobs.

    ``nodes_are_read``: whether nodes are in the cache, and all of them. ``confirm``: whether a job is still there.
    """

    def __init__(
        self,
        settings: Settings,
        api: Api,
        cache: Cache,
        poller: SyncerPoller,
        keys: RootKeyFinder,
        permissions: Permissions,
        events: EventRecorder,
        metrics: Metrics,
        nodes_are_read: Callable[[], bool],
        confirm: Callable[[Key], Awaitable[bool]],
        plan: PlanFunction = planning.plan,
    ) -> None:
        self._settings = settings
        self._api = api
        self._cache = cache
        self._poller = poller
        self._keys = keys
        self._permissions = permissions
        self._events = events
        self._metrics = metrics
        self._nodes_are_read = nodes_are_read
        self._confirm = confirm
        self._plan = plan
        self._applier = Applier(api, cache)
        self._event_reader = EventReader(api)
        self._records: dict[Key, Record] = {}

    def phases(self) -> dict[str, int]:
        """How many jobs are in which phase."""
        found: dict[str, int] = {}
        for record in self._records.values():
            found[record.phase] = found.get(record.phase, 0) + 1
        return found

    async def turn(self, key: Key) -> float | None:
        """Look at a job; seconds until the next look, None if there is no such job. Raises ApiError."""
        began = time.monotonic()
        try:
            return await self._turn(key)
        except ApiError as error:
            if error.status == 409:
                self._metrics.reconcile_errors.labels("conflict").inc()
                log.debug("%s", error, extra=about(key))
                return CONFLICT_SECONDS
            raise
        finally:
            self._metrics.reconcile_seconds.observe(time.monotonic() - began)

    async def _turn(self, key: Key) -> float | None:
        seen = read_cached_job(self._cache, key, self._nodes_are_read())
        if seen is None:
            self._records.pop(key, None)
            self._poller.forget(key)
            return None
        uid = str(seen.job["metadata"]["uid"])
        record = self._records.get(key)
        if record is None or record.uid != uid:
            self._poller.forget(key)
            record = self._records[key] = Record(uid)
        here = syncer_is_here(seen.job, self._settings.cluster)
        target = syncer_pod(seen.pods) if here else None
        asked, learners, report = self._poller.latest_answers(key, target[0] if target else None)
        now = time.time()
        observed = make_observed(
            seen,
            now,
            status=record.status.unwritten,
            cluster_events=await self._read_cluster_events(key, seen, now),
            apply_errors=(*record.apply_errors, *self._permissions.apply_errors(key[0])),
            syncer=asked,
            learners=learners,
            report=report,
        )
        plan = self._plan(observed, record.memory, self._settings.plan())
        missing = any(ref_of(manifest) not in seen.objects for manifest in plan.apply)
        if missing and not await self._still_there(key, uid):
            return AT_ONCE_SECONDS
        record.events = [*record.events, *plan.events][-MAX_EVENTS:]
        record.status.planned(plan.status)
        self._count(record, plan.status)
        apply_errors = await self._carry_out(key, record, seen, plan, target, now)
        root = self._keys.key
        self._poller.schedule(
            key,
            plan.poll_syncer,
            target,
            root.control_key(uid) if root is not None else None,
            {} if here else learner_pods(seen.pods),
            not (seen.job.get("status") or {}).get("report"),
        )
        changed = set(apply_errors) != set(record.apply_errors)
        for apply_error in set(apply_errors) - set(record.apply_errors):
            self._metrics.apply_errors.labels(apply_error.reason).inc()
            log.warning("%s %s: %s", apply_error.ref.kind, apply_error.ref.name, apply_error.message, extra=about(key))
        record.apply_errors = apply_errors
        return AT_ONCE_SECONDS if changed else min(plan.wake_in, self._settings.resync_seconds)

    async def _still_there(self, key: Key, uid: str) -> bool:
        """Whether the job is there, so that objects may be made for it. kopf does not tell of every deletion."""
        if not await self._confirm(key):
            return False
        job = self._cache.get(JOB, *key)
        return job is not None and job["metadata"]["uid"] == uid

    # ------------------------------------------------------------------ carrying out, in the plan's order

    async def _carry_out(
        self, key: Key, record: Record, seen: CachedJob, plan: Plan, target: tuple[str, str] | None, now: float
    ) -> tuple[ApplyError, ...]:
        meta = seen.job["metadata"]
        ending = bool(meta.get("deletionTimestamp"))
        has = FINALIZER in (meta.get("finalizers") or ())
        apply_errors: list[ApplyError] = []
        if plan.finalizer and not has and not ending:
            await self._trying(apply_errors, JOB.name, key[1], self._finalizer(key, seen.job, True))
        await self._make_secrets(key, record, seen, plan, apply_errors)
        applied = await self._applier.apply(key, record.uid, plan.apply, seen.objects, record.applied)
        apply_errors += applied.values()
        root = self._keys.key
        if target is not None and root is not None:
            await self._poller.call(key, target[1], root.control_key(record.uid), plan.calls)
        for delete in plan.deletes:
            await self._trying(apply_errors, delete.ref.kind, delete.ref.name, self._delete(key, delete))
        await self._trying(
            apply_errors,
            JOB.name,
            key[1],
            write_status(self._api, self._cache, key, record.uid, record.status, plan.urgent),
        )
        events, record.events = record.events, []
        await self._events.record(key, seen.job, events, now)
        if plan.delete_job:
            log.info("deleting the job: its time to live is over", extra=about(key))
            await self._trying(apply_errors, JOB.name, key[1], self._delete_job(key, record.uid))
        if has and not plan.finalizer:
            job = self._cache.get(JOB, *key)
            if job is not None and job["metadata"]["uid"] == record.uid:
                await self._trying(apply_errors, JOB.name, key[1], self._finalizer(key, job, False))
        return tuple(apply_errors)

    async def _trying(self, apply_errors: list[ApplyError], kind: str, name: str, doing: Any) -> None:
        """Await a write; what is refused becomes an ApplyError. Raises ApiError where trying again helps."""
        try:
            await doing
        except ApiError as error:
            if error.unreachable or error.status == 409:
                raise
            if error.status != 404:
                apply_errors.append(ApplyError(Ref(kind, name), classify_failure(error), explain_refusal(error)))

    async def _finalizer(self, key: Key, job: Object, wanted: bool) -> None:
        meta = job["metadata"]
        others = [name for name in meta.get("finalizers") or () if name != FINALIZER]
        patch = {
            "metadata": {
                "finalizers": [*others, FINALIZER] if wanted else others,
                "resourceVersion": meta["resourceVersion"],
                "uid": meta["uid"],
            }
        }
        made = await self._api.merge_patch(JOB, key[0], key[1], patch)
        if not wanted and meta.get("deletionTimestamp") and not others:
            self._cache.drop(JOB, key[0], key[1], meta["uid"])
            log.info("the job is let go", extra=about(key))
        else:
            self._cache.put(JOB, made)

    async def _make_secrets(
        self, key: Key, record: Record, seen: CachedJob, plan: Plan, apply_errors: list[ApplyError]
    ) -> None:
        root = self._keys.key
        now = time.monotonic()
        for wanted in plan.secrets:
            at = record.made.get(wanted.name)
            if at is None and not wanted.missed and role_runs(seen.pods, wanted.role):
                continue  # made by an earlier operator: a pod has it mounted
            if at is not None and (not wanted.missed or now - at < SECRET_AGAIN_SECONDS):
                continue
            ref = Ref(SECRET.name, wanted.name)
            if root is None:
                apply_errors.append(ApplyError(ref, "other", self._keys.problem))
                continue
            try:
                await self._api.create(SECRET, key[0], secret_manifest(wanted, root))
                log.info("Secret %s made", wanted.name, extra=about(key))
            except ApiError as error:
                if error.unreachable:
                    raise
                if error.status != 409:
                    apply_errors.append(ApplyError(ref, classify_failure(error), explain_refusal(error)))
                    continue
            record.made[wanted.name] = now

    async def _delete(self, key: Key, delete: Delete) -> None:
        kind = BY_NAME[delete.ref.kind]
        log.info(
            "deleting %s %s%s: %s",
            delete.ref.kind,
            delete.ref.name,
            " by force" if delete.force else "",
            delete.why,
            extra=about(key),
        )
        grace = 0 if delete.force else None
        rest = await self._api.delete(kind, key[0], delete.ref.name, delete.uid, grace)
        self._metrics.deletions.labels(kind.name, str(delete.force).lower()).inc()
        if rest is None:
            self._cache.drop(kind, key[0], delete.ref.name, delete.uid)
        else:
            self._cache.put(kind, rest)

    async def _delete_job(self, key: Key, uid: str) -> None:
        rest = await self._api.delete(JOB, key[0], key[1], uid)
        if rest is not None:
            self._cache.put(JOB, rest)

    # ------------------------------------------------------------------ small things

    async def _read_cluster_events(self, key: Key, seen: CachedJob, now: float) -> tuple[ClusterEvent, ...]:
        waits = find_waiting(seen.objects, seen.pods, now)
        if not waits:
            return ()
        uids = {ref: str(obj["metadata"]["uid"]) for ref, obj in seen.objects.items()}
        uids |= {Ref(POD.name, pod["metadata"]["name"]): str(pod["metadata"]["uid"]) for pod in seen.pods}
        return await self._event_reader.about(key[0], key[1], waits, uids, now)

    def _count(self, record: Record, status: dict[str, Any] | None) -> None:
        if status is None:
            return
        record.phase = str(status.get("phase") or "")
        total = int((status.get("replacements") or {}).get("total") or 0)
        if record.replacements is not None and total > record.replacements:
            self._metrics.replacements.inc(total - record.replacements)
        record.replacements = total
