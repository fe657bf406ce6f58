"""Carries out merges: one at a time, in the order of their actions, in a thread of their own.

The core hears of a merge only when its record is durable; until then nothing of it is in force. A
merge whose record cannot be written waits for the store (durability.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from diloco_protocol.resources import STATE_EVERY
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.shares import weigh_pushes, work_of
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.phases import RESUMES
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import Broadcast, Diverged, GlobalModel
from diloco_syncer.runtime.pushes import ReceivedPushes
from diloco_syncer.store.records import MergeRecord

MAX_QUEUED = 4096


@dataclass
class Merger:
    """Makes the next version of a fragment from pushes that are here. ``number``: of the job's newest record;
    ``seconds``: what its merges took, summed."""

    core: Core
    model: GlobalModel
    pushes: ReceivedPushes
    durability: Durability
    emit: Callable[[ev.Event], None]
    number: int
    seconds: dict[str, float]
    _queue: asyncio.Queue[ev.Merge] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))
    _merges_since_state: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "merge"))

    def next_number(self) -> int:
        """Take the number of the job's next record."""
        self.number += 1
        return self.number

    def queue_merge(self, action: ev.Merge) -> None:
        self._queue.put_nowait(action)

    async def run(self) -> None:
        while True:
            await self._merge(await self._queue.get())

    async def _merge(self, action: ev.Merge) -> None:
        began = time.monotonic()
        left_out: list[ev.Responder] = []
        while True:
            try:
                record, broadcast = await self.durability.run_write(self._make_version, action, pool=self._thread)
                break
            except Diverged as error:
                largest = max(action.responders, key=lambda r: self.pushes.norm(r.handle))
                if len(action.responders) <= self.core.config.rules.quorum:
                    words = f"{error}; the largest push is of {self.core.slots[largest.header.slot].learner}"
                    self.emit(ev.EndRequested(JobPhase.FAILED, words + RESUMES))
                    return
                left_out.append(largest)
                action = without_responder(action, largest, self.core.config)
        await self.durability.write_merge_record(record, self._thread)
        self.number += 1
        took = time.monotonic() - began
        spent = {"merge": took, "quorum": action.quorum_seconds, "waited": action.waited_seconds}
        self.seconds = {name: self.seconds[name] + seconds for name, seconds in spent.items()}
        norms = tuple(r.norm for r in record.responders)
        rows = self.core.receipt(action.fragment)  # of the version that it follows
        receipt = self.model.make_receipt(self.model.broadcasts[action.fragment], rows)
        self.model.publish(record, broadcast, time.monotonic(), receipt)  # and at once:
        handles = tuple(r.handle for r in left_out)
        self.emit(ev.MergeDurable(action.fragment, action.version, took, norms, norm=record.norm, left_out=handles))
        self._merges_since_state += 1
        if self._merges_since_state >= max(STATE_EVERY, len(self.model.newest)):
            self._merges_since_state = 0
            await self.durability.write_state_and_collect()

    def _make_version(self, action: ev.Merge) -> tuple[MergeRecord, Broadcast]:
        """Merge the pushes; blocks. Raises OSError where offers cannot be read, ``Diverged``."""
        deltas, squares = self.pushes.gradients(r.handle for r in action.responders)
        return self.model.merge(action, deltas, squares, self.core.epoch, self.number + 1)

    async def close(self) -> None:
        """End the thread, after the merge that is running."""
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)


def without_responder(action: ev.Merge, responder: ev.Responder, config: CoreConfig) -> ev.Merge:
    """The merge of the others, with the weights that they would have had without it."""
    others = [other for other in action.responders if other is not responder]
    works = [work_of(other.header, other.batch) for other in others]
    weights = weigh_pushes(config.weights, works, config.max_steps)
    responders = (replace(other, weight=weight) for other, weight in zip(others, weights, strict=True))
    return replace(action, responders=tuple(responders))
