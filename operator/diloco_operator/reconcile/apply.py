"""Server-side apply of the plan's objects: those that are missing or not as they should be.

Theory of operation. For an object that is in order (``diff.py``) no request is made.

An object that the cache does not have is read before it is applied. If there is one of that name that belongs
to somebody else, it is left alone, and the plan gets the ApplyError ``conflict``. What is sent then has the UID of the
object that was looked at, so that another of its name is not taken for it.

The objects with pods of a new generation are first applied as a dry run. If the API server or a policy refuses one,
nothing of this generation that pods use is applied, so the old pods run on. What else fails, such as a webhook that
does not answer, costs the object that it fails for. That one is tried less and less often.
Of a job that was created suspended only the dry run is made, so that its faults are told while it waits.

Some objects do not become what was applied: the API server writes a value in another form, or another program
changes it back. Such an object is applied again only when what is wanted or what is there changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco_operator.informer.cache import Cache
from diloco_operator.job import digest
from diloco_operator.kube.api import Api, NotLeading
from diloco_operator.kube.errors import ApiError, classify_failure, failing_webhook
from diloco_operator.kube.kinds import BY_NAME, WITH_PODS
from diloco_operator.logs import about
from diloco_operator.model import LASTING, ApplyError, Key, Object, Ref
from diloco_operator.names import GENERATION, JOB_UID, MANAGER, is_left_by, is_ours, ref_of
from diloco_operator.reconcile.diff import APPLIED, differences, marked, state
from diloco_protocol.vocabulary import LABEL_JOB

log = logging.getLogger(__name__)

TRY_AGAIN_SECONDS = 300.0  # a dry run that found a fault is repeated after this, whatever was wanted
LONGEST_PAUSE_SECONDS = 20.0
"""The longest pause before a write is tried again that failed; it is half as long as that has lasted."""
UNCHANGED_SECONDS = 600.0  # likewise an object that does not become what was wanted


@dataclass(slots=True)
class ApplyMemory:
    """What is remembered of one job's objects between turns; an operator that restarts starts with none."""

    # object -> digest of what is wanted and version of what is there, when they were found to agree
    agreed: dict[Ref, tuple[str, str]] = field(default_factory=dict)
    # object -> digests of what was sent and of what the API server made of it, and when
    unchanged_by_apply: dict[Ref, tuple[str, str, float]] = field(default_factory=dict)
    # digest of the manifests of a generation that were tried -> their fault (None: tried and fine), and when
    tried: dict[str, tuple[tuple[ApplyError, ...], float]] = field(default_factory=dict)
    # object -> digest of what was sent and failed, since when it fails, when it was tried last, and how it failed
    failing: dict[Ref, tuple[str, float, float, ApplyError]] = field(default_factory=dict)


def _annotation(obj: Object, name: str) -> str | None:
    value = (obj["metadata"].get("annotations") or {}).get(name)
    return None if value is None else str(value)


def is_in_order(wanted: Object, live: Object, memory: ApplyMemory, now: float) -> bool:
    """Whether there is nothing to send. ``wanted`` is marked."""
    ref = ref_of(wanted)
    found = (_annotation(wanted, APPLIED) or "", _version(live))
    if memory.agreed.get(ref) == found:
        return True
    if _annotation(live, APPLIED) == found[0] and not differences(wanted, live):
        memory.agreed[ref] = found
        memory.unchanged_by_apply.pop(ref, None)
        return True
    sent = memory.unchanged_by_apply.get(ref)
    return (
        sent is not None
        and now - sent[2] < UNCHANGED_SECONDS
        and sent[:2] == (_annotation(wanted, APPLIED), state(live))
    )


@dataclass(frozen=True, slots=True)
class Applier:
    """Applies manifests for one job. ``live``: its objects as the cache has them."""

    api: Api
    cache: Cache
    key: Key
    uid: str
    live: Mapping[Ref, Object]
    memory: ApplyMemory

    async def apply(self, manifests: Sequence[Object]) -> dict[Ref, ApplyError]:
        """Apply what is not in order. Returns what could not be; raises ApiError where the API server answers
        nobody."""
        now = time.monotonic()
        apply_errors: dict[Ref, ApplyError] = {}
        pending: list[Object] = []
        for manifest in manifests:
            wanted, ref = marked(manifest), ref_of(manifest)
            there = self.live.get(ref)
            if there is not None and not self._is_ours(ref, there):
                apply_errors[ref] = _conflict(ref, there, self.key[1])
            elif there is None or not is_in_order(wanted, there, self.memory, now):
                failed = _recent_failure(wanted, self.memory, now)
                if failed is None:
                    pending.append(wanted)
                else:
                    apply_errors[ref] = failed
        if not pending:
            return apply_errors
        held, faults = await self._try_dry(pending, now)
        apply_errors |= {apply_error.ref: apply_error for apply_error in faults}
        for wanted in pending:
            ref = ref_of(wanted)
            if ref not in held and ref not in apply_errors:
                apply_error = await self._one(wanted, self.live.get(ref), now)
                if apply_error is not None:
                    apply_errors[ref] = apply_error
            _remember_failure(wanted, apply_errors.get(ref), self.memory, now)
        return apply_errors

    async def find_faults(self, manifests: Sequence[Object]) -> tuple[ApplyError, ...]:
        """What is wrong with objects that are not to be made yet. What was found is true until something else is
        wanted, a fault for ``TRY_AGAIN_SECONDS``. What may pass by itself is none."""
        wanted = [marked(manifest) for manifest in manifests]
        known = self.memory.tried.get(digest({"all": wanted}))
        if not wanted or (known is not None and not known[0]):
            return ()
        faults = await self._try_all(wanted, time.monotonic())
        return tuple([fault for fault in faults if fault.reason in LASTING])

    def _is_ours(self, ref: Ref, there: Object) -> bool:
        return is_ours(ref, there, self.key[1], self.uid)

    async def _one(self, wanted: Object, there: Object | None, now: float) -> ApplyError | None:
        ref = ref_of(wanted)
        kind, cached = BY_NAME[ref.kind], there is not None
        try:
            there = there or await self.api.get(kind, self.key[0], ref.name)
            if there is not None and not self._is_ours(ref, there):
                return _conflict(ref, there, self.key[1])
            why = "it is not there" if there is None else ", ".join(differences(wanted, there)) or "rendered anew"
            made = await self.api.apply(kind, _addressed(wanted, there))
        except ApiError as error:
            if cached and _is_gone(error):
                return await self._one(wanted, None, now)
            return await apply_error_of(self.api, ref, error)
        self.cache.put(kind, made)
        if there is None or _version(made) != _version(there):
            log.info("%s %s applied (%s)", *ref, why, extra=about(self.key))
        if differences(wanted, made):
            self.memory.unchanged_by_apply[ref] = (_annotation(wanted, APPLIED) or "", state(made), now)
        return None

    async def _try_dry(self, pending: Sequence[Object], now: float) -> tuple[set[Ref], tuple[ApplyError, ...]]:
        """The dry run of pod-carrying objects of a new generation: what is held back, and the faults."""
        with_pods = [wanted for wanted in pending if wanted["kind"] in WITH_PODS]
        new = [wanted for wanted in with_pods if _is_new(wanted, self.live.get(ref_of(wanted)))]
        if not new:
            return set(), ()
        faults = await self._try_all(new, now)
        if not any(fault.reason in LASTING for fault in faults):
            return set(), faults
        # The old programs go on with the old settings: these would reach them at their next restart.
        held = {ref_of(wanted) for wanted in pending if wanted["kind"] in WITH_PODS or wanted["kind"] == "ConfigMap"}
        return held, faults

    async def _try_all(self, new: Sequence[Object], now: float) -> tuple[ApplyError, ...]:
        """The faults that dry runs find, or have found a short while ago."""
        what = digest({"all": new})
        faults, at = self.memory.tried.get(what, ((), now - 2 * TRY_AGAIN_SECONDS))
        if now - at > TRY_AGAIN_SECONDS:
            faults = tuple([e for wanted in new if (e := await self._dry(wanted)) is not None])
            if all(fault.reason in LASTING for fault in faults):
                self.memory.tried = {what: (faults, now)}
            for fault in faults:
                log.warning("%s %s would be refused: %s", *fault.ref, fault.message, extra=about(self.key))
        return faults

    async def _dry(self, wanted: Object) -> ApplyError | None:
        ref = ref_of(wanted)
        kind = BY_NAME[ref.kind]
        try:
            there = self.live.get(ref)
            if there is None:
                there = await self.api.get(kind, self.key[0], ref.name)
                if there is not None and not self._is_ours(ref, there):
                    return None  # the conflict is found, and said, where it is applied
            await self.api.apply(kind, _addressed(wanted, there), dry_run=True)
        except ApiError as error:
            return await apply_error_of(self.api, ref, error)
        return None


def _recent_failure(wanted: Object, memory: ApplyMemory, now: float) -> ApplyError | None:
    """How the same object failed a short while ago; None: it did not, or is due again."""
    sent, since, at, failed = memory.failing.get(ref_of(wanted), ("", 0.0, 0.0, None))
    pause = min(LONGEST_PAUSE_SECONDS, (at - since) / 2)
    return failed if sent == _annotation(wanted, APPLIED) and now - at < pause else None


def _remember_failure(wanted: Object, failed: ApplyError | None, memory: ApplyMemory, now: float) -> None:
    ref, sent = ref_of(wanted), _annotation(wanted, APPLIED) or ""
    before = memory.failing.pop(ref, None)
    if failed is not None and not (failed.reason in LASTING and ref.kind in WITH_PODS):  # a dry run is remembered
        since = before[1] if before is not None and before[0] == sent else now
        memory.failing[ref] = (sent, since, now, failed)


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion"))


def _addressed(wanted: Object, there: Object | None) -> Object:
    """The manifest with the UID of the object that it is for; None: there is none."""
    if there is None:
        return wanted
    return {**wanted, "metadata": {**wanted["metadata"], "uid": there["metadata"]["uid"]}}


def _is_gone(error: ApiError) -> bool:
    """Whether the object with the UID that was sent is not there: gone (409), or another has its name (422)."""
    return error.status == 409 or (error.status == 422 and "metadata.uid" in str(error))


def _is_new(wanted: Object, there: Object | None) -> bool:
    return there is None or _annotation(there, GENERATION) != _annotation(wanted, GENERATION)


def _conflict(ref: Ref, there: Object, job: str) -> ApplyError:
    owners = [
        f"{owner.get('kind')} {owner.get('name')} (UID {owner.get('uid')})"
        for owner in there["metadata"].get("ownerReferences") or ()
        if owner.get("controller")
    ]
    whose = f"belongs to {owners[0]}" if owners else "is not this job's"
    cure = "Delete or rename it, or give the job another name"
    if not owners and is_left_by(there, job):
        whose = "was left by an earlier job of this name"
        # Without that flag its pods, which may still train, would go with it.
        cure = (
            f"Delete it (kubectl delete --cascade=orphan {ref.kind.lower()} {ref.name}), or give the job another name"
        )
    elif ref.kind == "PersistentVolumeClaim" and _annotation(there, JOB_UID) is not None:
        whose = "was made by an operator, and has lost its labels"
        labels = f"{LABEL_JOB}={job} app.kubernetes.io/managed-by={MANAGER}"
        cure = f"To go on from its data: kubectl label pvc {ref.name} {labels}. Else give the job another name"
    return ApplyError(ref, "conflict", f"{ref.kind} {ref.name} {whose}; it is left as it is. {cure}")


async def apply_error_of(api: Api, ref: Ref, error: ApiError) -> ApplyError:
    """A write of an object that failed. It costs that object, whatever the answer was. Raises ``error`` again where
    this operator may not write any more, or the API server answers nobody."""
    if isinstance(error, NotLeading) or (error.status == 0 and not await api.answers()):
        raise error
    return ApplyError(ref, classify_failure(error), explain_refusal(error))


def explain_refusal(error: ApiError) -> str:
    """A refusal in one sentence; of a forbidden request the verb and resource."""
    message, reason = str(error).strip(), classify_failure(error)
    if reason == "webhook":
        return f"the webhook {failing_webhook(message)} does not answer the API server. {message}"[:1000]
    if reason == "unavailable" and error.status:
        return f"the API server answers {error.status}: {message}"[:1000]
    if reason == "forbidden" and "cannot " in message:
        # "… is forbidden: User "system:serviceaccount:…" cannot patch resource …": the part for people
        return (
            f"the operator may not {error.verb} {error.resource}: grant it that right (docs/operator.md, "
            f"permissions). {message}"
        )[:1000]
    return message[:1000]
