"""Comparing what the watches told with a list of what there is.

After every list that a stream began with (at the start, after a lost connection) nobody
says what was deleted meanwhile, nor when all of the list has come through. So the kind's
names and versions are listed once more, metadata alone and in pages: what was here before
and is not there is dropped, and a stream is *in step* when nothing of the list is missing
here. Jobs are looked at from the moment when every stream is in step, or forbidden.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from diloco_operator.informer.cache import Cache
from diloco_operator.informer.reflector import Stream
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.model import Key

log = logging.getLogger(__name__)

FIRST_SECONDS, LAST_SECONDS = 0.3, 30.0
ARRIVE_SECONDS = 10.0
SAY_SECONDS = 60.0


class Census:
    """``news(jobs)`` is told of jobs whose objects turned out to be gone."""

    def __init__(self, api: Api, cache: Cache, news: Callable[[set[Key]], None]) -> None:
        self._api = api
        self._cache = cache
        self._news = news
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._again: set[Stream] = set()
        self._in_step: set[Stream] = set()

    def listed(self, stream: Stream) -> None:
        """A stream has begun anew (or is forbidden): compare soon."""
        if stream in self._tasks:
            self._again.add(stream)
            return
        task = asyncio.create_task(self._compare(stream), name=f"census of {stream.kind.plural}")
        self._tasks[stream] = task
        task.add_done_callback(lambda _: self._done(stream))

    def in_step(self, stream: Stream) -> bool:
        """Whether what the stream began with is all here, or will not come."""
        return stream in self._in_step or stream.denied is not None

    async def close(self) -> None:
        """Stop comparing."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, stream: Stream) -> None:
        self._tasks.pop(stream, None)
        if stream in self._again:
            self._again.discard(stream)
            self.listed(stream)

    async def _arrived(self, stream: Stream, found: dict[Key, tuple[str, str]]) -> list[Key]:
        """Wait for what a list had; what did not come (it may have been deleted since)."""
        until = time.monotonic() + ARRIVE_SECONDS
        while (missing := self._cache.missing(stream.kind, found)) and time.monotonic() < until:
            await asyncio.sleep(FIRST_SECONDS)
        return missing

    async def _compare(self, stream: Stream) -> None:
        wait, began, said = FIRST_SECONDS, time.monotonic(), False
        while stream.denied is None:
            await asyncio.sleep(wait)
            before = self._cache.keys(stream.kind, stream.namespace)
            try:
                found = await self._api.list_versions(stream.kind, stream.namespace, stream.selector)
            except ApiError as error:
                log.debug("census of %s: %s", stream.kind.plural, error)
                if error.status == 403:
                    return
            else:
                gone = self._cache.prune(stream.kind, before, found)
                if gone:
                    self._news(gone)
                missing = await self._arrived(stream, found)
                if not missing:
                    self._in_step.add(stream)
                    return
                if not said and time.monotonic() - began > SAY_SECONDS:
                    said = True
                    log.warning(
                        "the watch of %s %s has not brought %d objects that are there, such as %s",
                        stream.kind.plural,
                        stream.where(),
                        len(missing),
                        "/".join(missing[0]),
                    )
            wait = min(2 * wait, LAST_SECONDS)
