"""Making the plan's objects true: server-side apply of what is not as it should be.

Theory of operation. An object that is in order (diff.py) costs nothing. Before an object
is sent that the watches have not told of, it is looked for: one of that name that is not
this job's is never touched, the plan hears of it as ``conflict``. A generation's first
pod-carrying objects are tried dry before anything of it is sent, so that a pod template
with a fault leaves the old objects running; the fault is the plan's ``invalid``.

An object that was sent and is still not what was wanted (the API server writes some values
in its own way, or something else changes it back) is not sent again until either changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError, classify_failure
from diloco_operator.kube.kinds import BY_NAME, WITH_PODS
from diloco_operator.logs import about
from diloco_operator.model import ApplyError, Key, Object, Ref
from diloco_operator.names import GENERATION, is_ours
from diloco_operator.reconcile.diff import APPLIED, differences, digest, marked, state

log = logging.getLogger(__name__)

TRY_AGAIN_SECONDS = 300.0  # a dry run that found a fault is repeated after this, whatever was wanted
UNCHANGED_SECONDS = 600.0  # likewise an object that does not become what was wanted


@dataclass(slots=True)
class ApplyMemory:
    """What is remembered of one job's objects between turns; an operator that restarts starts with none."""

    # object -> digest of what is wanted and version of what is there, when they were found to agree
    agreed: dict[Ref, tuple[str, str]] = field(default_factory=dict)
    # object -> digests of what was sent and of what the API server made of it, and when
    unchanged_by_apply: dict[Ref, tuple[str, str, float]] = field(default_factory=dict)
    # digest of the pod-carrying manifests of a generation -> their fault (None: tried and fine), and when
    tried: dict[str, tuple[tuple[ApplyError, ...], float]] = field(default_factory=dict)


def ref_of(manifest: Object) -> Ref:
    return Ref(manifest["kind"], manifest["metadata"]["name"])


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


class Applier:
    """Applies manifests for jobs."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache

    async def apply(
        self, key: Key, uid: str, manifests: Sequence[Object], live: dict[Ref, Object], memory: ApplyMemory
    ) -> dict[Ref, ApplyError]:
        """Apply what is not in order. ``live``: the job's objects as the cache has them. Returns what could
        not be; raises ApiError where the API server is not there."""
        now = time.monotonic()
        apply_errors: dict[Ref, ApplyError] = {}
        pending: list[Object] = []
        for manifest in manifests:
            wanted, ref = marked(manifest), ref_of(manifest)
            there = live.get(ref)
            if there is not None and not is_ours(ref, there, key[1], uid):
                apply_errors[ref] = _conflict(ref, there)
            elif there is None or not is_in_order(wanted, there, memory, now):
                pending.append(wanted)
        if not pending:
            return apply_errors
        held, faults = await self._try_dry(key, uid, pending, live, memory, now)
        apply_errors |= {apply_error.ref: apply_error for apply_error in faults}
        for wanted in pending:
            ref = ref_of(wanted)
            if ref not in held and ref not in apply_errors:
                apply_error = await self._one(key, uid, wanted, live.get(ref), memory, now)
                if apply_error is not None:
                    apply_errors[ref] = apply_error
        return apply_errors

    async def _one(
        self, key: Key, uid: str, wanted: Object, there: Object | None, memory: ApplyMemory, now: float
    ) -> ApplyError | None:
        ref = ref_of(wanted)
        kind = BY_NAME[ref.kind]
        try:
            if there is None:
                there = await self._api.get(kind, key[0], ref.name)
                if there is not None and not is_ours(ref, there, key[1], uid):
                    return _conflict(ref, there)
            why = "it is not there" if there is None else ", ".join(differences(wanted, there)) or "rendered anew"
            made = await self._api.apply(kind, wanted)
        except ApiError as error:
            return _apply_error(ref, error)
        self._cache.put(kind, made)
        if there is None or made["metadata"].get("resourceVersion") != there["metadata"].get("resourceVersion"):
            log.info("%s %s applied (%s)", ref.kind, ref.name, why, extra=about(key))
        if differences(wanted, made):
            memory.unchanged_by_apply[ref] = (_annotation(wanted, APPLIED) or "", state(made), now)
        return None

    async def _try_dry(
        self, key: Key, uid: str, pending: Sequence[Object], live: dict[Ref, Object], memory: ApplyMemory, now: float
    ) -> tuple[set[Ref], tuple[ApplyError, ...]]:
        """The dry run of pod-carrying objects of a new generation: what is held back, and the faults."""
        new = [
            wanted for wanted in pending if wanted["kind"] in WITH_PODS and _is_new(wanted, live.get(ref_of(wanted)))
        ]
        if not new:
            return set(), ()
        what = digest({"all": new})
        faults, at = memory.tried.get(what, ((), now - 2 * TRY_AGAIN_SECONDS))
        if now - at > TRY_AGAIN_SECONDS:
            found = [
                apply_error for wanted in new if (apply_error := await self._dry(key, uid, wanted, live)) is not None
            ]
            faults = tuple(found)
            memory.tried = {what: (faults, now)}
            for fault in faults:
                log.warning(
                    "%s %s would be refused: %s", fault.ref.kind, fault.ref.name, fault.message, extra=about(key)
                )
        if not faults:
            return set(), ()
        # The old programs go on with the old settings: these would reach them at their next restart.
        held = {ref_of(wanted) for wanted in pending if wanted["kind"] in WITH_PODS or wanted["kind"] == "ConfigMap"}
        return held, faults

    async def _dry(self, key: Key, uid: str, wanted: Object, live: dict[Ref, Object]) -> ApplyError | None:
        ref = ref_of(wanted)
        kind = BY_NAME[ref.kind]
        try:
            if ref not in live:
                there = await self._api.get(kind, key[0], ref.name)
                if there is not None and not is_ours(ref, there, key[1], uid):
                    return None  # the conflict is found, and said, where it is applied
            await self._api.apply(kind, wanted, dry_run=True)
        except ApiError as error:
            return _apply_error(ref, error)
        return None


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion"))


def _is_new(wanted: Object, there: Object | None) -> bool:
    return there is None or _annotation(there, GENERATION) != _annotation(wanted, GENERATION)


def _conflict(ref: Ref, there: Object) -> ApplyError:
    owners = [
        f"{owner.get('kind')} {owner.get('name')} (UID {owner.get('uid')})"
        for owner in there["metadata"].get("ownerReferences") or ()
        if owner.get("controller")
    ]
    whose = f"belongs to {owners[0]}" if owners else "is not this job's"
    cure = "it is left as it is. Delete or rename it, or give the job another name"
    return ApplyError(ref, "conflict", f"{ref.kind} {ref.name} {whose}; {cure}")


def _apply_error(ref: Ref, error: ApiError) -> ApplyError:
    """Raises ``error`` again where trying the whole turn again is all there is to do."""
    if error.unreachable:
        raise error
    return ApplyError(ref, classify_failure(error), explain_refusal(error))


def explain_refusal(error: ApiError) -> str:
    """A refusal in one sentence; of a forbidden request the verb and resource."""
    message = str(error).strip()
    if classify_failure(error) == "forbidden" and "cannot " in message:
        # "… is forbidden: User "system:serviceaccount:…" cannot patch resource …": the part for people
        return (
            f"the operator may not {error.verb} {error.resource}: grant it that (docs/operator.md, "
            f"permissions). {message}"
        )[:1000]
    return message[:1000]
