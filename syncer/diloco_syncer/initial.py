"""Version 0 on its way in: staged part by part, and in force only as a whole.

The learner that was asked uploads the layout, every fragment (float32), the frozen
parameters if there are any, and ``DONE``. Each part is staged durably as it
comes; ``DONE`` puts all in force by creating one small document exclusively. What
an upload that broke has staged is never looked at again, and removed later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from diloco_protocol import codec, sync_pb2, wire
from diloco_protocol.files import Buffer
from diloco_protocol.layout import MAX_JSON_BYTES, Layout, LayoutError
from diloco_syncer import events as ev
from diloco_syncer import records
from diloco_syncer.events import PhaseName
from diloco_syncer.parameters import Parameters, first_records
from diloco_syncer.records import Array, Floats

if TYPE_CHECKING:
    from diloco_syncer.engine import Engine

log = logging.getLogger(__name__)

LAYOUT, FRAGMENT = sync_pb2.Initial.LAYOUT, sync_pb2.Initial.FRAGMENT
FROZEN, DONE = sync_pb2.Initial.FROZEN, sync_pb2.Initial.DONE
MAX_FROZEN = 1 << 38


class InitialRefused(Exception):
    """A part of version 0 is refused; the message says why."""


class InitialUpload:
    """The one upload of version 0 that is under way."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection = 0
        self._attempt = 0
        self._begin(0)

    def _begin(self, connection: int) -> None:
        self._connection = connection
        self._attempt += 1
        self._layout: Layout | None = None
        self._layout_name = self._frozen_name = ""
        self._fragments: dict[int, Floats] = {}
        self._names: dict[int, str] = {}

    def admit(self, connection: int, part: int, fragment: int, size: int) -> int:
        """Whether this part may come now; returns its exact size in bytes. Raises ``InitialRefused``."""
        if self._engine.layout is not None:
            raise InitialRefused("version 0 exists already")
        if not connection or connection != self._engine.core.initialiser:
            raise InitialRefused("another learner was asked for version 0")
        if part == LAYOUT:
            if not 0 < size <= MAX_JSON_BYTES:
                raise InitialRefused(f"a layout of {size} bytes; at most {MAX_JSON_BYTES} are read")
            self._begin(connection)
            return size
        if connection != self._connection or self._layout is None:
            raise InitialRefused("the layout comes first")
        if part == FRAGMENT:
            if fragment >= len(self._layout):
                raise InitialRefused(f"fragment {fragment}: the layout has {len(self._layout)}")
            expected = 4 * self._layout.elements(fragment)
        elif part == FROZEN:
            if not 0 < size <= MAX_FROZEN:
                raise InitialRefused(f"{size} bytes of frozen parameters; at most {MAX_FROZEN} are taken")
            expected = size
        elif part == DONE:
            expected = 0
        else:
            raise InitialRefused(f"part {part} is not known")
        if size != expected:
            raise InitialRefused(f"{size} bytes, and this part of version 0 has {expected}")
        return expected

    async def take(self, part: int, fragment: int, data: Array) -> None:
        """A part is here as uint8; it is durable when this returns. Raises ``InitialRefused``."""
        if part == LAYOUT:
            await self._take_layout(data)
        elif part == FRAGMENT:
            await self._take_fragment(fragment, data)
        elif part == FROZEN:
            self._frozen_name = await self._stage("frozen.rec", *records.pack("blob", {}, {"blob": data}))
        else:
            await self._finish()

    async def _stage(self, part: str, *data: Buffer) -> str:
        return await self._engine.durably(self._engine.checkpoints.stage, self._attempt, part, *data)

    async def _take_layout(self, data: Array) -> None:
        try:
            layout = Layout.from_json(data.tobytes())
        except LayoutError as error:
            raise InitialRefused(str(error)) from error
        if len(layout) > wire.MAX_FRAGMENTS:
            raise self._hopeless(f"{len(layout)} fragments; at most {wire.MAX_FRAGMENTS} are served")
        self._layout_name = await self._stage("layout.rec", *records.pack("blob", {}, {"blob": data}))
        self._layout = layout

    def _hopeless(self, message: str) -> InitialRefused:
        """Every learner would upload the same: the job fails."""
        self._engine.handle(ev.EndRequested(PhaseName.FAILED, f"version 0 is refused: {message}"))
        return InitialRefused(message)

    async def _take_fragment(self, fragment: int, data: Array) -> None:
        theta = data.view(np.float32)
        if not codec.norm_and_finite(theta)[1]:
            raise InitialRefused(
                f"fragment {fragment} has values that are not finite: check the model's start"
            )
        record = first_records(self._engine.job.metadata.name, self._engine.epoch, {fragment: theta})[0]
        self._names[fragment] = await self._stage(f"f{fragment:05d}.rec", *record.pack())
        self._fragments[fragment] = theta

    async def _finish(self) -> None:
        engine, layout = self._engine, self._layout
        assert layout is not None
        missing = [p for p in range(len(layout)) if p not in self._fragments]
        if missing:
            raise InitialRefused(f"fragment {missing[0]} is missing ({len(missing)} in all)")
        names = [self._names[p] for p in range(len(layout))]
        await engine.durably(engine.checkpoints.commit_initial, self._layout_name, names, self._frozen_name)
        newest = first_records(engine.job.metadata.name, engine.epoch, self._fragments)
        engine.begin(layout, Parameters(engine.job, layout, newest, engine.threads), self._frozen_name)
        self._fragments = {}
        engine.handle(ev.InitialStored(layout.digest, tuple(layout.elements(p) for p in range(len(layout)))))
        log.info("version 0 is durable: %d parameters in %d fragments", layout.total_elements, len(layout))
