"""Versions that the store lost, on their way in from learners that hold them.

The core decides whom to ask (core/recovery tells the story); here the bytes come in and become a record. A learner
uploads the version exactly as it was broadcast, so whoever holds it goes on holding the same bytes. Its receipt proves
that they are what was announced (version_tags.py); what is not proved is not taken.
Θ_p thus has the broadcast's precision. The outer optimizer's state is that of the last durable version,
and the residual that a delta codec had dropped by then is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.multipart import ReadPayload, UploadRefused, upload_reply
from diloco_syncer.store.records import Array, Floats, MergeRecord, Recovered, theta_digest
from diloco_syncer.version_tags import Announced, content_digest

log = logging.getLogger(__name__)

VERSION = "version"  # in an upload's key


@dataclass
class VersionUploads:
    """Uploads of versions that the store lost. ``job``: its name; ``next_number``: of the job's next record;
    ``read_newest`` returns a fragment's newest record with its arrays, and blocks."""

    job: str
    core: Core
    model: GlobalModel
    durability: Durability
    decode_threads: Executor
    next_number: Callable[[], int]
    read_newest: Callable[[int], MergeRecord]
    emit: Callable[[ev.Event], None]
    run_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    _tell_at: dict[int, float] = field(default_factory=dict)  # by fragment, of the next bytes; time.monotonic()

    def note_chunk(self, key: Hashable) -> None:
        """Some bytes of an upload came. Of a version the core hears so once a second."""
        now = time.monotonic()
        match key:
            case (str(kind), int(connection), int(fragment)) if kind == VERSION:
                if now >= self._tell_at.get(fragment, 0.0):
                    self._tell_at[fragment] = now + 1.0
                    self.emit(ev.LostVersionAdvanced(connection, fragment))

    async def receive(
        self, header: sync_pb2.UploadHeader, connection: int, read: ReadPayload
    ) -> sync_pb2.UploadReply | None:
        """Receive a part of a version; the whole becomes the fragment's newest record."""
        base, size = header.base, header.total_bytes
        announced = self._check(connection, base, size)
        whole = await read((VERSION, connection, base.fragment), lambda: np.empty(size, np.uint8))
        if whole is None:
            return None
        self.emit(ev.LostVersionAdvanced(connection, base.fragment, whole=True))
        record = await self._make_record(connection, base, announced, whole)
        self.emit(ev.LostVersionAccepted(base.fragment))
        # In a task of the syncer's: a slow store may take the record when its sender has gone.
        await asyncio.shield(self.run_task(self._store(record)))
        return upload_reply(True)

    def _refused(self, why: str) -> UploadRefused:
        log.warning("a version from a learner is refused: %s", why)
        return UploadRefused(TransferRefusal.BASE, why)

    def _check(self, connection: int, base: sync_pb2.Base, size: int) -> Announced:
        """Check that this version may come now; returns what its receipt proves. Raises ``UploadRefused``."""
        layout = self.model.layout
        if layout is None:
            raise self._refused("version 0 does not exist yet")
        if base.fragment >= len(layout):
            raise self._refused(f"fragment {base.fragment}: the layout has {len(layout)}")
        encoding = self.model.full_encoding
        expected = codec.encoded_bytes(encoding, layout.elements(base.fragment))
        try:
            announced = self.model.check_receipt(base.receipt, base.fragment, layout, self.model.frozen)
        except WireError as error:
            raise self._disbelieve(connection, base.fragment, str(error)) from error
        why = self.core.check_version_upload(connection, base.fragment, base.epoch, base.version, announced.rows)
        if not why and announced.version != base.version:
            raise self._disbelieve(connection, base.fragment, f"its receipt is of version {announced.version}")
        if not why and (base.encoding != encoding or size != expected):
            why = f"{size} bytes of {base.encoding!r}: as {encoding} it has {expected}"
        if why:
            self.emit(ev.LostVersionFailed(connection, base.fragment))
            raise self._refused(why)
        return announced

    def _disbelieve(self, connection: int, fragment: int, why: str) -> UploadRefused:
        self.emit(ev.LostVersionFailed(connection, fragment, not_believed=why))
        return self._refused(why)

    async def _make_record(
        self, connection: int, base: sync_pb2.Base, announced: Announced, encoded: Array
    ) -> MergeRecord:
        """The fragment's newest record, of a version (uint8, all its bytes). Raises ``UploadRefused``."""
        layout, fragment = self.model.layout, base.fragment
        assert layout is not None
        elements = layout.elements(fragment)

        def decode() -> tuple[Floats, bool, str, MergeRecord] | None:
            if content_digest(encoded) != announced.digest:
                return None
            values = codec.decode(encoded, base.encoding, elements)
            return values, codec.norm_and_finite(values)[1], theta_digest(values), self.read_newest(fragment)

        decoded = await asyncio.get_running_loop().run_in_executor(self.decode_threads, decode)
        if decoded is None:
            raise self._disbelieve(connection, fragment, "its bytes are not those that were announced")
        theta, finite, digest, old = decoded
        # The core may have given up on it while its bytes came.
        why = self.core.check_version_upload(connection, fragment, base.epoch, base.version, announced.rows)
        if why or not finite:
            self.emit(ev.LostVersionFailed(connection, fragment))
            raise self._refused(why or "it has values that are not finite")
        return MergeRecord(
            job=self.job,
            epoch=self.core.epoch,
            fragment=fragment,
            version=base.version,
            theta=theta,
            outer=old.outer,
            number=self.next_number(),
            time=time.time(),
            digest=digest,
            recovered=Recovered(old.version, base.epoch, announced.rows),
            before=old.body(),
        )

    async def _store(self, record: MergeRecord) -> None:
        await self.durability.write_merge_record(record)
        fragment, version, follows = record.fragment, record.version, record.follows
        log.warning("fragment %d: version %d is taken from a learner; the store had %d", fragment, version, follows)
        self.emit(ev.LostVersionStored(fragment))
