"""Makes things durable, and waits while the store is full or away.

Theory of operation. All writes go through one thread, one at a time and in order (a merge's record through the merges'
thread). A write that fails is tried again with growing pauses. Meanwhile the core goes on hearing learners, pushes are
taken, ``problem`` says what is wrong, and merges (or the action that needs the state) wait; nothing is lost by it.

The job's state is taken anew at each try. Between two tries of one writer others write, and what is written last is
what a restart goes on from: a document that waited through them would bring back a state from before what they made
durable, and learners were told.

**The scrub.** With each checkpoint the newest record of one fragment is read and verified, of each in turn. One that is
damaged is written anew from what the syncer has in memory: found at the next start, it would cost its fragment a
version. After as many checkpoints as there are fragments the layout or the frozen parameters are read, or the copy of
one of them, in turn. What is damaged is written anew from the other.

A full disk is waited for without end. A store that fails otherwise for ``PATIENCE`` seconds ends the
process (exit code 4); a higher epoch ends it at once (3). Example: while a volume is being extended,
learners train on, and the merges that wait are made when there is space.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from diloco_protocol.common.files import DiskFull
from diloco_protocol.documents import EventRow
from diloco_syncer.core.recovery.lost_versions import STAND_IN
from diloco_syncer.store.base import HigherEpoch, ObjectNotFound
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.records import Array, Damaged, MergeRecord
from diloco_syncer.store.tape import EVENT, REFUSED, SETTINGS, Tape

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_NOTES = 256  # transitions that wait for the tape, and of one checkpoint's interval; the others are counted
PATIENCE = 60.0  # seconds of errors other than a full disk, before the process gives up
LAST_CHECKPOINT_SECONDS = 30.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The job's durable state at one moment. ``generation``: events that the core had handled; ``refused``: uploads
    since the job's start, by reason."""

    generation: int
    document: dict[str, Any]
    versions: list[int]
    refused: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class StoreWriter:
    """Writes what may not be lost, one write at a time. ``on_problem`` is called when ``problem`` has changed."""

    checkpoints: Checkpoints  # its methods block: call them by ``run_write``
    on_problem: Callable[[str], None]
    problem: str = ""  # what is wrong with the store, for people
    _scrubbed: int = 0  # records
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "store"))

    async def run_write(self, work: Callable[..., T], *arguments: Any, pool: ThreadPoolExecutor | None = None) -> T:
        """Run ``work`` in the store's thread (or in ``pool``) until the store takes it; returns its result.

        Raises OSError after ``PATIENCE`` seconds of errors other than a full disk, and at once whatever
        ``work`` raises besides OSError.
        """
        return await self._retry(lambda: partial(work, *arguments), pool)

    async def _retry(self, prepare: Callable[[], Callable[[], T]], pool: ThreadPoolExecutor | None = None) -> T:
        """``run_write`` of what ``prepare`` returns, which is called in the event loop before each try."""
        loop = asyncio.get_running_loop()
        first_failure, pause, told = 0.0, 0.25, ""
        while True:
            try:
                result = await loop.run_in_executor(pool or self._thread, prepare())
            except OSError as error:
                # A try alone may take longer than PATIENCE, and there is always a second one.
                first_failure = first_failure or time.monotonic()
                waited = time.monotonic() - first_failure
                if not isinstance(error, DiskFull) and error.errno not in _FULL and waited > PATIENCE:
                    raise
                told = f"the store cannot be written, merges wait: {error.strerror or error}"
                log.log(logging.DEBUG if self.problem == told else logging.ERROR, "%s", told)
                self._set_problem(told)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 10.0)
                continue
            if told and self.problem == told:
                log.warning("the store can be written again")
                self._set_problem("")
            return result

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.on_problem(problem)

    async def scrub(self, newest_records: Callable[[], Sequence[MergeRecord]]) -> None:
        """Verify the newest record of the next fragment in turn, and write it anew where it is damaged.
        ``newest_records`` returns those that are in memory, and durable."""
        newest = newest_records()
        if not newest:
            return
        place, self._scrubbed = self._scrubbed % len(newest), self._scrubbed + 1
        record, fragment = newest[place], newest[place].fragment
        try:
            name = self.checkpoints.reader.name_of(fragment, record.version)
            damage = await asyncio.to_thread(self.checkpoints.find_damage, name, "merge")
        except OSError as error:
            log.warning("fragment %d could not be verified: %s", fragment, error)
            return
        if damage and newest_records()[place] is record and record.made_in != STAND_IN:
            await self.run_write(self.checkpoints.write_record_again, record)
            log.error("the store had damaged fragment %d, which is whole again: %s", fragment, damage)


@dataclass(kw_only=True)
class Durability(StoreWriter):
    """The one way from the running syncer to its store.

    ``snapshot`` returns the state as it is now; ``newest_records`` returns each fragment's newest version, which is
    durable.
    """

    tape: Tape
    snapshot: Callable[[], Snapshot]
    newest_records: Callable[[], Sequence[MergeRecord]]
    optimizer: str = ""  # the name in the store of the inner optimizer state; empty: none
    optimizer_bytes: int = 0
    settings: dict[str, Any] | None = None  # the tape's line of this start, until it is there
    _optimizers: int = 0  # that were to be written
    _made: int = 0  # checkpoints, for the scrub of copies
    _persisted: int = -1  # the newest generation whose state is durable
    _blobs: dict[str, Array] = field(default_factory=dict)
    _notes: deque[EventRow] = field(default_factory=deque)  # transitions that the tape is to get
    _noted: int = 0  # since the last checkpoint
    _left_out: int = 0
    _refused: dict[str, int] = field(default_factory=dict)  # as the tape has it

    # ------------------------------------------------------------- state and checkpoints

    async def persist(self, generation: int) -> None:
        """Make the state durable, as it was after ``generation`` events or later."""
        if generation > self._persisted:  # else a later state is durable already
            await self._write_state(lambda now: self.checkpoints.write_state(now.document, now.versions))

    async def checkpoint(self) -> None:
        """Make a whole checkpoint now: tape, state and manifest; remove what no restart needs any more."""
        write = self.checkpoints.write_manifest
        await self._write_and_collect(lambda now: write(now.document, now.versions, self.optimizer))

    async def write_state_and_collect(self) -> None:
        """Make the state durable, so that the records before it may go; after many merges."""
        await self._write_and_collect(lambda now: self.checkpoints.write_state(now.document, now.versions))

    async def _write_and_collect(self, write: Callable[[Snapshot], object]) -> None:
        def flush_write_collect(now: Snapshot) -> None:
            self.checkpoints.epoch.check()
            self._append_notes()
            self._noted = 0
            if now.refused != self._refused:
                self.tape.append_note(REFUSED, time.time(), {"uploads": now.refused})
                self._refused = now.refused
            self.tape.flush()
            write(now)
            self.checkpoints.collect(self.optimizer)

        await self._write_state(flush_write_collect)

    async def _write_state(self, write: Callable[[Snapshot], object]) -> None:
        """Run ``write`` in the store's thread until the store takes it, with the job's state as it is at each try."""

        def prepare() -> Callable[[], int]:
            now = self.snapshot()

            def work() -> int:
                write(now)
                return now.generation

            return work

        self._persisted = max(self._persisted, await self._retry(prepare))

    async def checkpoint_every(self, seconds: float, ended: Callable[[], bool]) -> None:
        """Make a checkpoint every so many seconds; once the job has ``ended`` only check the epoch."""
        while True:
            await asyncio.sleep(seconds)
            if ended():  # there is nothing new; but another syncer may have the store
                await self.run_write(self.checkpoints.epoch.check)
            else:
                await self.checkpoint()
            await self.scrub(self.newest_records)
            await self.scrub_copies()

    async def scrub_copies(self) -> None:
        """Once in as many calls as there are fragments: verify the next of the objects that are there twice, and write
        it anew from the other where it is damaged."""
        objects, self._made = self.checkpoints.copied_blobs(), self._made + 1
        turn, rest = divmod(self._made, self.checkpoints.fragments or 1)
        if rest or not objects:
            return
        name, other = objects[turn % len(objects)]
        try:
            damage = await asyncio.to_thread(self.checkpoints.find_damage, name, "blob")
            if damage:
                await self.run_write(self.checkpoints.copy_blob, other, name)
                log.error("the store had damaged %s, which is whole again: %s", name, damage)
        except (OSError, ObjectNotFound, Damaged) as error:
            log.error("%s could not be verified, or is damaged as its copy is: %s", name, error)

    async def close(self, checkpoint: bool) -> None:
        """End the store's thread; with ``checkpoint``, after a last checkpoint."""
        if checkpoint:
            try:
                async with asyncio.timeout(LAST_CHECKPOINT_SECONDS):
                    await self.checkpoint()
            except (TimeoutError, OSError, HigherEpoch) as error:
                log.error("no last checkpoint: %s", error)
        self._thread.shutdown(True, cancel_futures=True)

    # ------------------------------------------------------------- records and blobs

    async def write_merge_record(self, record: MergeRecord) -> None:
        """Make a version durable, and append its line to the tape."""
        await self.run_write(self.checkpoints.write_record, record)
        await self.append_line(record)

    async def append_line(self, record: MergeRecord) -> None:
        """Append the line of a version that is durable to the tape."""
        await self.run_write(self._append_line, record)

    def note_event(self, row: EventRow) -> None:
        """Have a transition written to the tape, with the next merge or checkpoint. Of more than ``MOST_NOTES`` between
        two checkpoints the number is written."""
        if len(self._notes) + self._noted < MOST_NOTES:
            self._notes.append(row)
        else:
            self._left_out += 1

    def _append_line(self, record: MergeRecord) -> None:
        """Runs in the store's thread. A successor that has begun meanwhile writes the line itself
        (``Checkpoints.newer_than``): in a file it would stand between the successor's."""
        if self.tape.appends:
            self.checkpoints.epoch.check()
        self._append_notes()
        self.tape.append(record)

    def _append_notes(self) -> None:
        """Runs in the store's thread."""
        if self.settings is not None:
            self.tape.append_note(SETTINGS, time.time(), self.settings)
            self.settings = None
        while self._notes:
            row = self._notes.popleft()
            self._noted += 1
            self.tape.append_note(EVENT, row.time, {"event": row.kind, "slot": row.slot, "message": row.message})
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            self.tape.append_note(
                EVENT, time.time(), {"event": "left-out", "slot": -1, "message": f"{left_out} transitions"}
            )

    async def read_blob(self, name: str) -> Array:
        """The bytes of a stored blob, uint8; verified when they are first asked for."""
        if name not in self._blobs:
            self._blobs[name] = await asyncio.to_thread(self.checkpoints.reader.blob, name)
        return self._blobs[name]

    async def write_optimizer(self, state: Array) -> None:
        """Make a learner's inner optimizer state (uint8) part of the job's checkpoint, unless a newer one is."""
        self._optimizers += 1
        number = self._optimizers

        def write() -> None:
            if number == self._optimizers:
                # Named in the store's own thread: a checkpoint that waits there removes what is not named.
                self.optimizer = self.checkpoints.write_blob("optimizer", state)
                self.optimizer_bytes = state.nbytes

        await self.run_write(write)
