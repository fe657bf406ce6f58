"""Writing a job's status: when it differs, with its version as condition, and not too often.

Theory of operation. Only the operator writes status, so a version that is not the newest (somebody changed the spec
meanwhile) is no reason to plan anew: the patch is made again for the object as it is. Progress moves all the time, and
is written at most every ``PROGRESS_SECONDS``, anything else at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco_operator.informer.cache import Cache
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import JOB
from diloco_operator.model import Key, Object
from diloco_operator.plan.job_status import differs_beyond_progress
from diloco_operator.reconcile.diff import is_empty

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 60.0
TRIES = 4


@dataclass(slots=True)
class Written:
    """What is remembered of one job's status."""

    at: float = -1e9  # monotonic, of the last write
    unwritten: dict[str, Any] | None = None  # planned, and not in the API server yet


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that turns ``old`` into ``new``; empty: they are equal.

    What is empty counts as absent: the API server fills in empty lists where the CRD has a default.
    """
    patch: dict[str, Any] = {key: None for key in old if key not in new and not is_empty(old[key])}
    for key, value in new.items():
        before = old.get(key)
        if before == value or (is_empty(before) and is_empty(value)):
            continue
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            if inner := merge_patch(before, value):
                patch[key] = inner
        else:
            patch[key] = value
    return patch


async def write_status(
    api: Api, cache: Cache, key: Key, uid: str, wanted: dict[str, Any] | None, written: Written
) -> None:
    """Write the status that is wanted (None: it stays as it is) if there is reason to. Raises ApiError."""
    if wanted is None:
        return
    job = cache.get(JOB, *key)
    for left in reversed(range(TRIES)):
        patch = _patch(job, wanted, written.at) if job is not None and job["metadata"]["uid"] == uid else None
        if patch is None:
            break
        try:
            cache.put(JOB, await api.merge_patch(JOB, key[0], key[1], patch, sub="status"))
            written.at = time.monotonic()
            break
        except ApiError as error:
            if error.status == 404:
                break
            if error.status != 409 or not left:
                raise
            job = await api.get(JOB, *key)
            if job is not None:
                cache.put(JOB, job)
    written.unwritten = None


def _patch(job: Object, wanted: Mapping[str, Any], written_at: float) -> Object | None:
    """The patch; None: there is nothing to write now."""
    there = job.get("status") or {}
    patch = merge_patch(there, wanted)
    if not patch:
        return None
    # Of what is written alone: what is empty in two ways, as a report that is over, is no difference for ever.
    before, now = {key: there.get(key) for key in patch}, {key: wanted.get(key) for key in patch}
    if not differs_beyond_progress(before, now) and time.monotonic() - written_at < PROGRESS_SECONDS:
        return None
    meta = job["metadata"]
    return {"metadata": {"resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}, "status": patch}
