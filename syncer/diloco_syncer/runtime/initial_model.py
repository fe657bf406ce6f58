"""Version 0 on its way in: staged part by part, and in force only as a whole.

The learner that was asked uploads the layout, every fragment (float32), the frozen parameters if there are any, and
``DONE``. Each part is staged durably as it comes. ``DONE`` puts all of them in force by creating one small document
exclusively. Whatever takes time with the model's size (parsing, checking, checksums, encoding) is done in threads:
others are served meanwhile.

An upload that broke is gone on from. What an earlier one has staged of fragments and frozen parameters is accepted
before its bytes come if its ``digest`` is the same, whoever sends it. What differs is never read again, and is removed
later.

Where an empty store is rebuilt, each fragment comes with the receipt of the version that it was. It proves that this
version was announced, of a model with this layout and these frozen parameters (version_tags.py).

If an upload will not succeed the core is told, and asks another learner: when a part is refused, and
when nothing has come for ``PATIENCE`` seconds from the learner that was asked. A part whose transfer
broke is not the end: its sender tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import MAX_JSON_BYTES, Layout, LayoutError
from diloco_protocol.common.files import Buffer
from diloco_protocol.vocabulary import MAX_FRAGMENTS, JobPhase, TransferRefusal
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.bulk import allocate as allocate_memory
from diloco_protocol.wire.bulk import checksum_text
from diloco_protocol.wire.limits import WireError
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.core.recovery.lost_versions import STAND_IN
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.global_model import Broadcast, GlobalModel, first_records
from diloco_syncer.runtime.multipart import ReadPayload, UploadRefused, upload_reply
from diloco_syncer.store import records
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.checkpoint import RecordMadeMeanwhile
from diloco_syncer.store.records import Array, Floats, MergeRecord
from diloco_syncer.store.spool import Spool
from diloco_syncer.version_tags import content_digest

log = logging.getLogger(__name__)

LAYOUT, FRAGMENT = sync_pb2.Initial.LAYOUT, sync_pb2.Initial.FRAGMENT
FROZEN, DONE = sync_pb2.Initial.FROZEN, sync_pb2.Initial.DONE
MAX_FROZEN = 1 << 38
MAX_DIGEST = 128  # characters of the frozen parameters' digest
PATIENCE = 2 * limits.STALL_SECONDS  # without any upload under way; a sender's pauses are shorter
WATCH_SECONDS = 1.0
BeginModel = Callable[[Layout, Sequence[MergeRecord], str, str, Sequence[Broadcast]], Awaitable[None]]


class InitialRefused(UploadRefused):
    """A part of version 0 is refused; the message says why. ``not_believed``: it is of no model that was announced."""

    def __init__(self, message: str, not_believed: bool = False) -> None:
        super().__init__(TransferRefusal.INITIAL, message)
        self.not_believed = not_believed


@dataclass(frozen=True, slots=True)
class Staged:
    """A fragment or the frozen parameters, durable: the digest, the name in the store, and a fragment's values."""

    digest: str = ""
    name: str = ""
    theta: Floats = field(default_factory=lambda: np.empty(0, np.float32))


@dataclass
class InitialModelUpload:
    """The one upload of version 0 that is under way. ``job``: its name. ``begin_model`` puts it in force, once it is
    durable (``GlobalModel.begin``)."""

    job: str
    core: Core
    model: GlobalModel
    durability: Durability
    spool: Spool
    emit: Callable[[ev.Event], None]
    stop_by: Callable[[BaseException], None]
    begin_model: BeginModel

    def __post_init__(self) -> None:
        self._connection = 0
        self._watched = 0  # the connection that was asked, as last seen
        self._touched = 0.0  # when an upload of it last was under way; time.monotonic()
        self._under_way = 0  # uploads of parts
        self.attempt = 0
        self._staged: dict[tuple[int, int], Staged] = {}  # by part and fragment
        self._earlier: dict[tuple[int, int], Staged] = {}  # in other attempts
        self._origins: Sequence[int] = ()  # of the attempt's versions, where an empty store is rebuilt
        self._begin_attempt(0)

    def _begin_attempt(self, connection: int) -> None:
        self._connection = connection
        self.attempt += 1
        self._layout: Layout | None = None
        self._layout_name = ""
        origins, self._origins = self._origins, self.core.version_0_origins(connection)
        self._earlier = {} if origins or self._origins else self._earlier | self._staged
        self._staged = {}
        self._receipts: dict[int, bytes] = {}

    async def receive(
        self, header: sync_pb2.UploadHeader, connection: int, read: ReadPayload
    ) -> sync_pb2.UploadReply | None:
        """Receive a part of one of version 0's payloads; a refusal ends the attempt of the learner that was asked."""
        part, fragment = header.initial.part, header.initial.fragment
        self._under_way += 1
        try:
            size = self.check_part(connection, part, fragment, header.total_bytes)
            attempt = self.attempt
            if self._is_staged(part, fragment, header.initial.digest):
                return upload_reply(True)
            # Frozen parameters may be larger than all that is trained, and are not needed here.
            make = lambda: self.spool.prepare(size) if part == FROZEN else allocate_memory(size)  # noqa: E731
            whole = await read(("initial", header.process, part, fragment), make)
            if whole is None:
                return None
            self._receipts[fragment] = header.initial.receipt or self._receipts.get(fragment, b"")
            digest = header.initial.digest[:MAX_DIGEST]
            await self.store_part(connection, attempt, part, fragment, data=whole, digest=digest)
            return upload_reply(True)
        except InitialRefused as error:
            self._give_up(connection, str(error), error.not_believed)
            raise
        except OSError as error:
            self._give_up(connection, f"no room for it: {error.strerror}")
            raise InitialRefused(f"the syncer has no room for it: {error.strerror}") from error
        finally:
            self._under_way -= 1
            self._touched = time.monotonic()

    def _is_staged(self, part: int, fragment: int, digest: str) -> bool:
        """Whether this payload need not come again."""
        key = part, fragment
        found = self._staged.get(key) or self._earlier.pop(key, Staged())
        if not digest or found.digest != digest:
            return False
        self._staged[key] = found
        return True

    def check_part(self, connection: int, part: int, fragment: int, size: int) -> int:
        """Check that this part may come now; returns its exact size in bytes. Raises ``InitialRefused``."""
        if self.model.layout is not None:
            raise InitialRefused("version 0 exists already")
        if not connection or connection != self.core.initialiser:
            raise InitialRefused("another learner was asked for version 0")
        if part == LAYOUT:
            if not 0 < size <= MAX_JSON_BYTES:
                raise InitialRefused(f"a layout of {size} bytes; at most {MAX_JSON_BYTES} are read")
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

    async def store_part(
        self, connection: int, attempt: int, part: int, fragment: int, data: Array, digest: str = ""
    ) -> None:
        """Make a part (uint8) durable. ``attempt``: the one under way when the part was checked; a layout begins
        another. ``digest``: of frozen parameters. Raises ``InitialRefused``."""
        if connection != self.core.initialiser:
            raise InitialRefused("another learner was asked for version 0 since")
        if part == LAYOUT:
            self._begin_attempt(connection)
            await self._take_layout(data, self.attempt)
            return
        self._check_attempt(attempt)
        if part == FRAGMENT:
            await self._take_fragment(fragment, data, attempt)
        elif part == FROZEN:
            content = await asyncio.to_thread(content_digest, data)
            self._check_attempt(attempt)
            name = await self._stage(
                attempt, f"frozen-{content.hex()}.rec", lambda: records.pack("blob", {}, {"blob": data})
            )
            self._staged[FROZEN, 0] = Staged(digest, name)
        else:
            await self._finish(attempt)

    def _check_attempt(self, attempt: int) -> None:
        if attempt != self.attempt:
            raise InitialRefused("another upload of version 0 has begun since")

    async def _stage(self, attempt: int, part: str, pack: Callable[[], Sequence[Buffer]]) -> str:
        """Keep what ``pack`` makes, which takes its checksums: it is called in the store's thread."""
        stage = self.durability.checkpoints.stage
        name = await self.durability.run_write(lambda: stage(attempt, part, *pack()))
        self._check_attempt(attempt)
        return name

    # ------------------------------------------------------------- giving up

    async def watch_sender(self) -> None:
        """Give up on a learner that was asked and sends nothing; returns when version 0 is durable."""
        while self.model.layout is None:
            await asyncio.sleep(WATCH_SECONDS)
            asked, now = self.core.initialiser or 0, time.monotonic()
            if asked != self._watched or self._under_way:
                self._watched = asked
                self._touched = now
            elif asked and now - self._touched > PATIENCE:
                self._watched = 0
                self._give_up(asked, f"nothing of it came for {PATIENCE:.0f} s")

    def _give_up(self, connection: int, message: str, not_believed: bool = False) -> None:
        if connection and connection == self.core.initialiser:
            log.warning("version 0 from session %d did not come through: %s", connection, message)
            self.emit(ev.InitialModelFailed(connection, message if not_believed else ""))

    async def _take_layout(self, data: Array, attempt: int) -> None:
        try:
            layout = await asyncio.to_thread(lambda: Layout.from_json(data.tobytes()))
        except LayoutError as error:
            raise InitialRefused(str(error)) from error
        if len(layout) > MAX_FRAGMENTS:
            raise self._fail_job(f"{len(layout)} fragments; at most {MAX_FRAGMENTS} are served")
        most, largest = self.durability.checkpoints.store.most_created, self.model.record_bytes(layout)
        if most is not None and largest > most:
            words = f"a record of its largest fragment has {largest} bytes, and the store takes at most {most} at once"
            raise self._fail_job(f"{words}: set sync.fragments to {-(-len(layout) * largest // most)} or more")
        if self._origins and len(self._origins) != len(layout):
            raise InitialRefused(f"{len(layout)} fragments, and this learner said that it holds {len(self._origins)}")
        self._check_attempt(attempt)
        name = await self._stage(attempt, "layout.rec", lambda: records.pack("blob", {}, {"blob": data}))
        self._layout_name, self._layout = name, layout

    def _fail_job(self, message: str) -> InitialRefused:
        """Fail the job: every learner would upload the same."""
        self.emit(ev.EndRequested(JobPhase.FAILED, f"version 0 is refused: {message}"))
        return InitialRefused(message)

    async def _take_fragment(self, fragment: int, data: Array, attempt: int) -> None:
        theta = data.view(np.float32)
        finite, digest = await asyncio.to_thread(lambda: (codec.norm_and_finite(theta)[1], checksum_text(theta)))
        self._check_attempt(attempt)
        if not finite:
            raise InitialRefused(f"fragment {fragment} has values that are not finite: check the model's start")
        record = self._records({fragment: theta})[0]
        name = await self._stage(attempt, f"f{fragment:05d}.rec", record.pack)
        self._staged[FRAGMENT, fragment] = Staged(digest, name, theta)

    def _records(self, fragments: dict[int, Floats]) -> list[MergeRecord]:
        origins = self.core.version_0_origins(self._connection)
        return first_records(self.job, self.core.epoch, fragments, origins)

    async def _finish(self, attempt: int) -> None:
        layout = self._layout
        assert layout is not None
        missing = [p for p in range(len(layout)) if (FRAGMENT, p) not in self._staged]
        if missing:
            raise InitialRefused(f"fragment {missing[0]} is missing ({len(missing)} in all)")
        fragments = [self._staged[FRAGMENT, p] for p in range(len(layout))]
        frozen = self._staged.get((FROZEN, 0), Staged())
        origins = self.core.version_0_origins(self._connection)
        newest = self._records({p: staged.theta for p, staged in enumerate(fragments)})
        broadcasts = await asyncio.to_thread(lambda: [self.model.encode(record, None) for record in newest])
        self._check_attempt(attempt)
        for broadcast, origin in zip(broadcasts, origins, strict=bool(origins)):
            self._check_announced(broadcast, layout, origin)
        commit = self.durability.checkpoints.commit_initial
        names = [staged.name for staged in fragments]
        try:
            await self.durability.run_write(commit, self._layout_name, names, frozen.name, frozen.digest)
        except (HigherEpoch, RecordMadeMeanwhile) as error:
            self.stop_by(error)  # whoever uploads it next would hear the same
            raise
        if not origins:  # else it may stand in for later versions, and is told to nobody before a restart
            await self.begin_model(layout, newest, frozen.name, frozen.digest, broadcasts)
        self._staged, self._earlier = {}, {}
        self.emit(ev.InitialModelStored(layout.digest, tuple(layout.elements(p) for p in range(len(layout)))))
        log.info("version 0 is durable: %d parameters in %d fragments", layout.total_elements, len(layout))
        log.info("merges: %s", self.model.merging)

    def _check_announced(self, broadcast: Broadcast, layout: Layout, origin: int) -> None:
        """Raises ``InitialRefused`` unless a fragment that was given back is a version that was announced."""
        fragment = broadcast.fragment
        receipt = self._receipts.get(fragment, b"")
        frozen = self._staged.get((FROZEN, 0), Staged())
        try:
            announced = self.model.check_receipt(receipt, fragment, layout, frozen.name)
            if announced.digest != broadcast.digest:
                raise WireError(f"fragment {fragment}: its values are not those that were announced")
            if (origin == STAND_IN) != (announced.version > 0):
                raise WireError(f"fragment {fragment}: its receipt is of version {announced.version}")
        except WireError as error:
            raise InitialRefused(str(error), not_believed=True) from error
