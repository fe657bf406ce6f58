"""Versions that the store lost, on their way in from those who hold them.

The core asks (lost_versions.py); here the bytes come in and become a record. What is uploaded
is the version exactly as it was broadcast, so everybody who holds it goes on holding
the same bytes. Θ_p thus has the broadcast's precision; the outer optimizer's state is
that of the last durable version, and what a delta codec had dropped by then is gone.
The record says which version it follows, for those between are in no store any
more, and keeps the receipt (receipts.py), from which a restart sets the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from diloco_protocol.arrays import codec
from diloco_protocol.wire import sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer.core import events as ev
from diloco_syncer.core.recovery.receipts import Rows
from diloco_syncer.messages import receipt_from
from diloco_syncer.store.records import Array, Floats, MergeRecord, Recovered, theta_digest

if TYPE_CHECKING:
    from diloco_syncer.runtime.driver import Engine

log = logging.getLogger(__name__)


class BaseRefused(Exception):
    """A base is refused; the message says why."""


class Bases:
    """Uploads of versions that the store lost."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def admit(self, connection: int, base: sync_pb2.Base, size: int) -> Rows:
        """Whether this base may come now; its receipt. Raises ``BaseRefused``."""
        engine = self._engine
        if engine.layout is None or engine.parameters is None:
            raise BaseRefused("version 0 does not exist yet")
        if base.fragment >= len(engine.layout):
            raise BaseRefused(f"fragment {base.fragment}: the layout has {len(engine.layout)}")
        encoding = engine.parameters.full_encoding
        expected = codec.encoded_bytes(encoding, engine.layout.elements(base.fragment))
        try:
            rows = receipt_from(base.receipt)
            why = engine.core.check_version_upload(connection, base.fragment, base.epoch, base.version, rows)
        except WireError as error:
            why = str(error)
        if not why and (base.encoding != encoding or size != expected):
            why = f"{size} bytes of {base.encoding!r}: as {encoding} it has {expected}"
        if why:
            engine.handle(ev.LostVersionFailed(connection, base.fragment))
            raise BaseRefused(why)
        return rows

    async def take(self, connection: int, base: sync_pb2.Base, rows: Rows, encoded: Array) -> None:
        """All bytes are here, uint8; a record is durable when this returns. Raises ``BaseRefused``."""
        engine, fragment = self._engine, base.fragment
        assert engine.layout is not None and engine.parameters is not None
        elements = engine.layout.elements(fragment)

        def decode() -> tuple[Floats, bool]:
            values = codec.decode(encoded, base.encoding, elements)
            return values, codec.norm_and_finite(values)[1]

        theta, finite = await asyncio.get_running_loop().run_in_executor(engine.decode_thread, decode)
        # It may have been given up while its bytes came.
        why = engine.core.check_version_upload(connection, fragment, base.epoch, base.version, rows)
        if why or not finite:
            engine.handle(ev.LostVersionFailed(connection, fragment))
            raise BaseRefused(why or "it has values that are not finite")
        old = engine.parameters.newest[fragment]
        record = MergeRecord(
            job=engine.job.metadata.name,
            epoch=engine.epoch,
            fragment=fragment,
            version=base.version,
            theta=theta,
            outer=old.outer,
            number=engine.next_number(),
            time=time.time(),
            digest=theta_digest(theta),
            recovered=Recovered(old.version, base.epoch, rows),
        )
        await engine.durably(engine.checkpoints.write_record, record)
        await engine.durably(engine.tape.append, record)
        log.warning(
            "fragment %d: version %d is taken from a learner; the store had %d", fragment, base.version, old.version
        )
        engine.handle(ev.LostVersionStored(fragment))
