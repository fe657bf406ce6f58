"""What kopf tells of DiLoCoJobs, and two things that it does not tell.

kopf lists and watches the jobs and calls ``handle`` for each event. After it had to list anew it does not say which
jobs were deleted meanwhile, and it does not say when it last heard from the API server. So a job that kopf has not
mentioned for ``CONFIRM_SECONDS`` is read once: a job that is gone is dropped, and one that is newer than what kopf
told, and stays so, shows that kopf's watch is dead (``dead``). A job that trains is mentioned every minute, since its
progress is written, and is never read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco_operator.informer.cache import Cache, is_older
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import JOB
from diloco_operator.logs import about
from diloco_operator.model import Key

log = logging.getLogger(__name__)

CONFIRM_SECONDS = 600.0
RECENT_SECONDS = 60.0  # a job that was mentioned within these is there
CHECK_SECONDS = 30.0
DELIVERY_SECONDS = 10.0  # for an event that is on its way


class _Mention(NamedTuple):
    at: float  # monotonic
    version: str  # metadata.resourceVersion


class JobEvents:
    """The DiLoCoJobs of the cache. ``changed(jobs)`` is called for jobs that changed. For one event loop."""

    def __init__(self, api: Api, cache: Cache, changed: Callable[[set[Key]], None]) -> None:
        self._api = api
        self._cache = cache
        self._changed = changed
        self._mentions: dict[Key, _Mention] = {}
        self.dead = False  # kopf does not bring what the API server has

    def start(self) -> None:
        """kopf begins, and will list: the jobs of an earlier life are forgotten."""
        self._mentions.clear()
        self.dead = False
        for namespace, name in self._cache.jobs():
            self._cache.drop(JOB, namespace, name)

    def handle(self, event: Any) -> None:
        """Take one of kopf's events; an object that cannot be read is logged."""
        try:
            meta = event["object"]["metadata"]
            key = (meta["namespace"], meta["name"])
            if event["type"] == "DELETED":
                self._mentions.pop(key, None)
                jobs = self._cache.drop(JOB, *key, meta["uid"])
            else:
                self._mentions[key] = _Mention(time.monotonic(), meta["resourceVersion"])
                jobs = self._cache.put(JOB, event["object"])
        except Exception:
            log.exception("a DiLoCoJob of kopf's event cannot be read")
            return
        self.dead = False
        if jobs:
            self._changed(jobs)

    async def run(self) -> None:
        """Read what kopf has not mentioned for long, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for key in self._cache.jobs():
                try:
                    await self.confirm(key, CONFIRM_SECONDS)
                except ApiError as error:
                    log.debug("%s", error, extra=about(key))
                    break

    async def confirm(self, key: Key, seconds: float = RECENT_SECONDS) -> bool:
        """Whether a job is there: mentioned within so many seconds, or else read now. Raises ApiError."""
        mention = self._mentions.get(key)
        if mention is not None and time.monotonic() - mention.at < seconds:
            return True
        job = await self._api.get(JOB, *key)
        if job is None:
            log.info("the job is gone; kopf did not tell", extra=about(key))
            self._mentions.pop(key, None)
            self._changed(self._cache.drop(JOB, *key) or {key})
            return False
        version = job["metadata"]["resourceVersion"]
        if mention is not None and not is_older(version, mention.version):
            await asyncio.sleep(DELIVERY_SECONDS)
            if self._mentions.get(key) is mention:
                log.error("kopf has not brought version %s of the job", version, extra=about(key))
                self.dead = True
        self._mentions.setdefault(key, _Mention(0.0, version))
        self._mentions[key] = self._mentions[key]._replace(at=time.monotonic())
        self._changed(self._cache.put(JOB, job))
        return True
