"""Carries out merges: one at a time, in the order of their actions, in a thread of their own.

``MergeMaker`` makes versions where the pushes are, and ``Merger`` takes what was made into the job. The core hears of a
merge only when its record is durable; until then nothing of it is in force. A merge whose record cannot be written
waits for the store (durability.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from diloco_protocol.resources import STATE_EVERY
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.shares import weigh_pushes, work_of
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.phases import RESUMES
from diloco_syncer.runtime.durability import Durability, StoreWriter
from diloco_syncer.runtime.global_model import Broadcast, Diverged, GlobalModel
from diloco_syncer.runtime.pushes import ReceivedPushes
from diloco_syncer.store.records import MergeRecord

MAX_QUEUED = 4096


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of a merge: a version that is durable, in ``seconds``, without the pushes of ``left_out`` (handles).
    ``record`` None: nothing, for ``failure``, and the largest push is of the slot ``largest``. ``publish`` is called
    when it is in force, with the receipt of the version before."""

    action: ev.Merge
    record: MergeRecord | None
    broadcast: Broadcast | None = None
    seconds: float = 0.0
    left_out: tuple[int, ...] = ()
    failure: str = ""
    largest: int = 0
    publish: Callable[[bytes], None] = lambda receipt: None


@dataclass
class MergeMaker:
    """Makes the next version of a fragment, from pushes that are here, and its record durable."""

    config: CoreConfig
    epoch: int
    model: GlobalModel
    pushes: ReceivedPushes
    writer: StoreWriter
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "merge"))

    async def make_version(self, action: ev.Merge, number: int) -> Merged:
        """Merge the pushes into the record ``number`` of the job. Where it would be infinite the largest push is left
        out, unless too few are left then. Raises what ``StoreWriter.run_write`` raises."""
        began = time.monotonic()
        left_out: list[ev.Responder] = []
        while True:
            try:
                record, broadcast = await self.writer.run_write(self._merge, action, number, pool=self._thread)
                break
            except Diverged as error:
                largest = max(action.responders, key=lambda r: self.pushes.norm(r.handle))
                if len(action.responders) <= self.config.rules.quorum:
                    return Merged(action, None, failure=str(error), largest=largest.header.slot)
                left_out.append(largest)
                action = without_responder(action, largest, self.config)
        await self.writer.run_write(self.writer.checkpoints.write_record, record, pool=self._thread)
        handles = tuple(r.handle for r in left_out)
        return Merged(action, record, broadcast, time.monotonic() - began, left_out=handles)

    def _merge(self, action: ev.Merge, number: int) -> tuple[MergeRecord, Broadcast]:
        """Merge the pushes; blocks. Raises OSError where offers cannot be read, ``Diverged``."""
        deltas, squares = self.pushes.gradients(r.handle for r in action.responders)
        return self.model.merge(action, deltas, squares, self.epoch, number)

    async def close(self) -> None:
        """End the thread, after the merge that is running."""
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)


@dataclass
class Merger:
    """Has merges made, and takes them into the job. ``number``: of the job's newest record; ``seconds``: what its
    merges took, summed; ``queue``: merges that are to be made."""

    core: Core
    model: GlobalModel
    durability: Durability
    emit: Callable[[ev.Event], None]
    number: int
    seconds: dict[str, float]
    queue: asyncio.Queue[ev.Merge] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))
    _merges_since_state: int = 0

    def next_number(self) -> int:
        """Take the number of the job's next record."""
        self.number += 1
        return self.number

    async def run(self, make_version: Callable[[ev.Merge, int], Awaitable[Merged]]) -> None:
        """Carry out one merge after the other."""
        while True:
            action = await self.queue.get()
            await self.take_version(await make_version(action, self.next_number()))

    async def take_version(self, merged: Merged) -> None:
        """Put a version that is durable in force, and tell the core."""
        record, action = merged.record, merged.action
        if record is None or merged.broadcast is None:
            words = f"{merged.failure}; the largest push is of {self.core.slots[merged.largest].learner}"
            self.emit(ev.EndRequested(JobPhase.FAILED, words + RESUMES))
            return
        await self.durability.append_line(record)
        spent = {"merge": merged.seconds, "quorum": action.quorum_seconds, "waited": action.waited_seconds}
        self.seconds = {name: self.seconds[name] + seconds for name, seconds in spent.items()}
        norms = tuple(r.norm for r in record.responders)
        rows = self.core.receipt(action.fragment)  # of the version that it follows
        receipt = self.model.make_receipt(self.model.broadcasts[action.fragment], rows)
        self.model.publish(record, merged.broadcast, time.monotonic(), receipt)  # and at once:
        merged.publish(receipt)
        left_out = merged.left_out
        self.emit(
            ev.MergeDurable(action.fragment, action.version, merged.seconds, norms, norm=record.norm, left_out=left_out)
        )
        self._merges_since_state += 1
        if self._merges_since_state >= max(STATE_EVERY, len(self.model.newest)):
            self._merges_since_state = 0
            await self.durability.write_state_and_collect()


def without_responder(action: ev.Merge, responder: ev.Responder, config: CoreConfig) -> ev.Merge:
    """The merge of the others, with the weights that they would have had without it."""
    others = [other for other in action.responders if other is not responder]
    works = [work_of(other.header, other.batch) for other in others]
    weights = weigh_pushes(config.weights, works, config.max_steps)
    responders = (replace(other, weight=weight) for other, weight in zip(others, weights, strict=True))
    return replace(action, responders=tuple(responders))
