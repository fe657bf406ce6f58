"""One turn for one job: observe, plan, carry out.

Theory of operation. Whatever woke it, a turn looks at all that is known of the job (``observe.py``), has it
planned, and carries the plan out in its order. What the API server refuses becomes an ``ApplyError``: the next
plan takes it into account, and the status shows it. If these errors have changed, the next turn comes at once.
A write that fails costs its own object, whatever the answer was: somebody's webhook that is down must not stop calls,
deletions and the status. Only where the API server answers nobody, the turn ends with an error, and the work queue
repeats it with backoff.

What the plan counts is kept in the status. So a status that could not be written is remembered, and the next turn reads
it as the job's. Events are remembered until they are written or refused, since the plan names each only once.
Everything else may be lost at any time: a new operator begins with nothing, and sends nothing for an object that is in
order.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import BY_NAME, JOB, POD, SECRET
from diloco_operator.kube.permissions import Permissions
from diloco_operator.logs import about
from diloco_operator.metrics import Metrics
from diloco_operator.model import (
    ApplyError,
    Call,
    ClusterEvent,
    Delete,
    EventWanted,
    JobPlan,
    Key,
    Object,
    Observed,
    PlanMemory,
    PlanSettings,
    Ref,
)
from diloco_operator.names import ref_of
from diloco_operator.plan import planning
from diloco_operator.reconcile.apply import Applier, ApplyMemory, apply_error_of
from diloco_operator.reconcile.confirm import keep_confirmed, read_anew
from diloco_operator.reconcile.event_reader import EventReader, find_waiting
from diloco_operator.reconcile.event_recorder import EventRecorder
from diloco_operator.reconcile.job_secrets import manifest as secret_manifest
from diloco_operator.reconcile.observe import learner_pods, read_cached_job, role_runs, syncer_is_here, syncer_pod
from diloco_operator.reconcile.root_key import RootKeyFinder
from diloco_operator.reconcile.status_writer import Written, write_status
from diloco_operator.reconcile.syncer_poller import SyncerPoller
from diloco_operator.settings import Settings
from diloco_protocol.vocabulary import FINALIZER

log = logging.getLogger(__name__)

PlanFunction = Callable[[Observed, PlanMemory, PlanSettings], JobPlan]

AT_ONCE_SECONDS = 0.3
CONFLICT_SECONDS = 0.5  # until the watch has brought what changed under a write
SECRET_AGAIN_SECONDS = 30.0
MAX_EVENTS = 100  # kept of one job while they cannot be written
EVENTS_AGAIN_SECONDS = 10.0  # until those that were not answered are sent again


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
    read_at: float = -math.inf  # when its pods, StatefulSets and nodes were read anew (monotonic)
    conflicts: int = 0  # turns in a row with a write on an old version
    phase: str = ""
    replacements: int | None = None


@dataclass(slots=True)
class CarriedOut:
    """What came of a plan."""

    apply_errors: list[ApplyError] = field(default_factory=list)
    conflict: bool = False  # a write was on an old version: the next look is soon


@dataclass
class Reconciler:
    """Turns jobs.

    ``nodes_are_read``: whether nodes are in the cache, and all of them. ``confirm``: whether a job is still there.
    ``view_age``: for how many seconds the cache has got nothing new of a namespace (namespace, monotonic now).
    """

    settings: Settings
    api: Api
    cache: Cache
    poller: SyncerPoller
    keys: RootKeyFinder
    permissions: Permissions
    events: EventRecorder
    metrics: Metrics
    nodes_are_read: Callable[[], bool]
    confirm: Callable[[Key], Awaitable[bool]]
    view_age: Callable[[str, float], float]
    plan_job: PlanFunction = planning.plan_job

    def __post_init__(self) -> None:
        self._event_reader = EventReader(self.api)
        self._records: dict[Key, Record] = {}

    def phases(self) -> dict[str, int]:
        """How many jobs are in which phase."""
        return Counter(record.phase for record in self._records.values())

    def forget(self) -> None:
        """Another operator has led meanwhile: what is remembered of all jobs is not so any more."""
        for key in self._records:
            self.poller.forget(key)
        self._records.clear()

    async def turn(self, key: Key) -> float | None:
        """Look at a job; seconds until the next look, None if there is no such job. Raises ApiError."""
        began = time.monotonic()
        try:
            return await self._turn(key)
        finally:
            self.metrics.reconcile_seconds.observe(time.monotonic() - began)

    async def _turn(self, key: Key) -> float | None:
        # The age of the view is taken before the view: streams may come back while this turn waits for an answer.
        now, clock = time.time(), time.monotonic()
        age = self.view_age(key[0], clock)
        seen = read_cached_job(self.cache, key, self.nodes_are_read(), now)
        if seen is None:
            self._records.pop(key, None)
            self.poller.forget(key)
            return None
        uid = str(seen.job["metadata"]["uid"])
        record = self._records.get(key)
        if record is None or record.uid != uid:
            self.poller.forget(key)
            record = self._records[key] = Record(uid)
        here = syncer_is_here(seen.job, self.settings.cluster)
        target = syncer_pod(seen.pods) if here else None
        asked, learners, report = self.poller.latest_answers(key, target[0] if target else None)
        observed = replace(
            seen,
            # A status that was planned and could not be written yet counts as the job's.
            job=seen.job if record.status.unwritten is None else {**seen.job, "status": record.status.unwritten},
            cluster_events=await self._read_cluster_events(key, seen),
            apply_errors=(*record.apply_errors, *self.permissions.apply_errors(key[0])),
            syncer=asked,
            learners=learners,
            report=report,
            view_age=min(age, clock - record.read_at),
            monotonic=clock,
        )
        plan = self.plan_job(observed, record.memory, self.settings)
        self.events.log_events(key, plan.events)
        record.events = [*record.events, *plan.events][-MAX_EVENTS:]
        missing = any(ref_of(manifest) not in seen.objects for manifest in plan.apply)
        if missing and not await self._still_there(key, uid):
            return AT_ONCE_SECONDS
        self._remember_status(record, plan.status)
        done = await self._carry_out(key, record, seen, plan, target=target)
        apply_errors = tuple(done.apply_errors)
        root = self.keys.key
        self.poller.schedule(
            key,
            plan.poll_syncer,
            target,
            root.control_key(uid) if root is not None else None,
            {} if here else learner_pods(seen.pods),
            not (seen.job.get("status") or {}).get("report"),
        )
        changed = set(apply_errors) != set(record.apply_errors)
        for apply_error in set(apply_errors) - set(record.apply_errors):
            self.metrics.apply_errors.labels(apply_error.reason).inc()
            log.warning("%s %s: %s", *apply_error.ref, apply_error.message, extra=about(key))
        record.apply_errors = apply_errors
        read = plan.wants_fresh_view and await self._read_anew(key, record, seen)
        record.conflicts = record.conflicts + 1 if done.conflict else 0
        if changed or read:
            return AT_ONCE_SECONDS
        if done.conflict:
            return min(CONFLICT_SECONDS * 2.0 ** (record.conflicts - 1), self.settings.resync_seconds)
        unsent = EVENTS_AGAIN_SECONDS if record.events else math.inf
        return min(plan.wake_in, self.settings.resync_seconds, unsent)

    async def _read_anew(self, key: Key, record: Record, seen: Observed) -> bool:
        """Bring the cache up to date, so that the next turn may act by it; whether that was allowed."""
        began = time.monotonic()
        try:
            await read_anew(self.api, self.cache, key, seen)
        except ApiError as error:
            if error.unreachable:
                raise
            log.warning("nothing is deleted now, the view of the cluster may be old: %s", error, extra=about(key))
            return False
        record.read_at = began
        return True

    async def _still_there(self, key: Key, uid: str) -> bool:
        """Whether the job is there, so that objects may be made for it. kopf does not tell of every deletion."""
        if not await self.confirm(key):
            return False
        job = self.cache.get(JOB, *key)
        return job is not None and job["metadata"]["uid"] == uid

    # ------------------------------------------------------------------ carrying out, in the plan's order

    async def _carry_out(
        self, key: Key, record: Record, seen: Observed, plan: JobPlan, target: tuple[str, str] | None
    ) -> CarriedOut:
        meta, job_ref = seen.job["metadata"], Ref(JOB.name, key[1])
        has, done = FINALIZER in (meta.get("finalizers") or ()), CarriedOut()
        may_make = True
        if plan.finalizer and not has and not meta.get("deletionTimestamp"):
            may_make = await self._trying(done, job_ref, self._finalizer(key, seen.job, True))
        if may_make:
            await self._make_secrets(key, record, seen, plan, apply_errors=done.apply_errors)
            applier = Applier(self.api, self.cache, key, record.uid, live=seen.objects, memory=record.applied)
            done.apply_errors += (await applier.apply(plan.apply)).values()
            done.apply_errors += await applier.find_faults(plan.tries)
        if target is not None and self.keys.key is not None:
            calling = self._call(key, target[1], self.keys.key.control_key(record.uid), seen, calls=plan.calls)
            await self._trying(done, job_ref, calling)
        for delete in plan.deletes:
            await self._trying(done, delete.ref, self._delete(key, delete))
        writing = write_status(self.api, self.cache, key, record.uid, wanted=plan.status, written=record.status)
        await self._trying(done, job_ref, writing)
        await self.events.record(key, seen.job, record.events, seen.now)
        if plan.delete_job:
            over = Delete(job_ref, record.uid, "its time to live is over")
            await self._trying(done, job_ref, self._delete(key, over))
        if has and not plan.finalizer:
            job = self.cache.get(JOB, *key)
            if job is not None and job["metadata"]["uid"] == record.uid:
                await self._trying(done, job_ref, self._finalizer(key, job, False))
        return done

    async def _trying(self, done: CarriedOut, ref: Ref, doing: Awaitable[None]) -> bool:
        """Await a write, and return whether it was taken. What is refused becomes an ApplyError. Raises ApiError where
        the API server answers nobody."""
        try:
            await doing
        except ApiError as error:
            if error.status == 409:
                self.metrics.reconcile_errors.labels("conflict").inc()
                log.debug("%s %s: %s", *ref, error)
                done.conflict = True
            elif error.status != 404:
                done.apply_errors.append(await apply_error_of(self.api, ref, error))
            return False
        return True

    async def _call(self, key: Key, ip: str, control_key: bytes, seen: Observed, calls: Sequence[Call]) -> None:
        """Make those calls to the syncer that the API server confirms."""
        confirmed = await keep_confirmed(self.api, self.cache, key, seen, calls=calls)
        await self.poller.call(key, ip, control_key, confirmed)

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
        made = await self.api.merge_patch(JOB, key[0], key[1], patch)
        if not wanted and meta.get("deletionTimestamp") and not others:
            self.cache.drop(JOB, key[0], key[1], meta["uid"])
            log.info("the job's finalizer was removed", extra=about(key))
        else:
            self.cache.put(JOB, made)

    async def _make_secrets(
        self, key: Key, record: Record, seen: Observed, plan: JobPlan, apply_errors: list[ApplyError]
    ) -> None:
        root = self.keys.key
        now = time.monotonic()
        for wanted in plan.secrets:
            at = record.made.get(wanted.name)
            if at is None and not wanted.missed and role_runs(seen.pods, wanted.role):
                continue  # made by an earlier operator: a pod has it mounted
            if at is not None and (not wanted.missed or now - at < SECRET_AGAIN_SECONDS):
                continue
            ref = Ref(SECRET.name, wanted.name)
            if root is None:
                apply_errors.append(ApplyError(ref, "other", self.keys.problem))
                continue
            try:
                await self.api.create(SECRET, key[0], secret_manifest(wanted, root))
                log.info("Secret %s made", wanted.name, extra=about(key))
            except ApiError as error:
                if error.status != 409:
                    apply_errors.append(await apply_error_of(self.api, ref, error))
                    continue
            record.made[wanted.name] = now

    async def _delete(self, key: Key, delete: Delete) -> None:
        kind = BY_NAME[delete.ref.kind]
        force = " by force" if delete.force else ""
        log.info("deleting %s %s%s: %s", *delete.ref, force, delete.why, extra=about(key))
        rest = await self.api.delete(kind, key[0], delete.ref.name, delete.uid, 0 if delete.force else None)
        self.metrics.deletions.labels(kind.name, str(delete.force).lower()).inc()
        if rest is None or _is_final(rest):
            self.cache.drop(kind, key[0], delete.ref.name, delete.uid)
        else:
            self.cache.put(kind, rest)

    # ------------------------------------------------------------------ small things

    async def _read_cluster_events(self, key: Key, seen: Observed) -> tuple[ClusterEvent, ...]:
        waits = find_waiting(seen.objects, seen.pods, seen.now)
        if not waits:
            return ()
        uids = {ref: str(obj["metadata"]["uid"]) for ref, obj in seen.objects.items()}
        uids |= {Ref(POD.name, pod["metadata"]["name"]): str(pod["metadata"]["uid"]) for pod in seen.pods}
        return await self._event_reader.about(key[0], key[1], waits, uids, seen.now)

    def _remember_status(self, record: Record, status: dict[str, Any] | None) -> None:
        if status is None:
            return
        record.status.unwritten = status
        record.phase = str(status.get("phase") or "")
        total = int((status.get("replacements") or {}).get("total") or 0)
        if record.replacements is not None and total > record.replacements:
            self.metrics.replacements.inc(total - record.replacements)
        record.replacements = total


def _is_final(rest: Object) -> bool:
    """Whether the answer to a deletion shows the object's last state: neither a grace period nor a finalizer keeps it.

    The API server answers the deletion of a pod by force with the pod that it has removed.
    """
    meta = rest["metadata"]
    return meta.get("deletionGracePeriodSeconds") == 0 and not meta.get("finalizers")
