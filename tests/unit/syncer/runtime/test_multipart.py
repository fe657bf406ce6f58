"""Parts in any order, from any number of calls; what is wrong takes only its own payload with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_source import ByteSource
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer.runtime import multipart
from diloco_syncer.runtime.driver import SteadyClock
from diloco_syncer.runtime.multipart import MultipartUploads, TooManyUploads
from diloco_syncer.store import spool as spool_module
from diloco_syncer.store.records import Array
from diloco_syncer.store.spool import Spool
from example_counts import share_of


def header(data: bytes, offset: int, size: int, process: str = "p") -> sync_pb2.UploadHeader:
    digest = bulk.checksum(data[offset : offset + size])
    return sync_pb2.UploadHeader(process=process, total_bytes=len(data), offset=offset, bytes=size, checksum=digest)


async def stream(data: bytes, gate: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 7):
        if gate is not None:
            await gate.wait()
        yield data[start : start + 7]


async def part(
    made: MultipartUploads, key: str, data: bytes, offset: int, size: int, process: str = "p", sent: bytes | None = None
) -> bytes | None:
    def allocate() -> Array:
        return np.zeros(len(data), np.uint8)

    chunks = stream(data[offset : offset + size] if sent is None else sent)
    done = await made.receive_part(key, header(data, offset, size, process), ByteSource(chunks), allocate)
    return None if done is None else done.tobytes()


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=share_of(80), deadline=None)
def test_parts_in_any_order_and_at_once(data: bytes, cuts: list[int], random: object) -> None:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    ranges = [(a, b - a) for a, b in itertools.pairwise(edges)] or [(0, 0)]
    random.shuffle(ranges)  # type: ignore[attr-defined]

    async def run() -> None:
        made = MultipartUploads()
        results = await asyncio.gather(*(part(made, "k", data, a, size=n) for a, n in ranges))
        assert [r for r in results if r is not None] == [data]
        assert not made._open

    asyncio.run(run())


def test_a_wrong_part_is_sent_again_and_takes_no_other_with_it() -> None:
    async def run() -> None:
        made, data = MultipartUploads(), bytes(range(100))
        assert await part(made, "good", data, 0, size=50) is None
        assert await part(made, "bad", data, 0, size=50) is None
        with pytest.raises(bulk.ChecksumError):
            await part(made, "bad", data, 50, size=50, sent=bytes(50))
        assert await part(made, "good", data, 50, size=50) == data
        assert await part(made, "bad", data, 50, size=50) == data

    asyncio.run(run())


def test_a_part_that_broke_is_sent_again_alone() -> None:
    async def run() -> None:
        made, data = MultipartUploads(), bytes(range(100))
        assert await part(made, "k", data, 0, size=50) is None
        with pytest.raises(WireError, match="30 bytes came, 50 were announced"):
            await part(made, "k", data, 50, size=50, sent=data[50:80])
        assert await part(made, "k", data, 50, size=50) == data

    asyncio.run(run())


@pytest.mark.promise("A payload in more and smaller parts than any sender makes is refused", section="Hostile callers")
def test_a_payload_in_many_small_parts_is_refused() -> None:
    """Each part is compared with all before it: of one byte each they would cost the square of the payload."""

    async def run() -> None:
        made, data = MultipartUploads(), bytes(2000)
        for offset in range(multipart.SPARE_PARTS):
            assert await part(made, "k", data, offset, size=1) is None
        with pytest.raises(WireError, match="send fewer, larger ones"):
            await part(made, "k", data, multipart.SPARE_PARTS, size=1)
        assert await part(made, "other", data, 0, size=2000) == data

    asyncio.run(run())


@pytest.mark.parametrize("size", [50, 60])
def test_a_part_that_is_under_way_ends_when_its_range_is_sent_again(size: int) -> None:
    """Its connection may be dead without our knowing. Not a byte of it is written any more: the array that it would
    write to may be in use for something else."""

    async def run() -> None:
        made, data, gate = MultipartUploads(), bytes(range(100)), asyncio.Event()
        arrays: list[Array] = []

        def allocate() -> Array:
            arrays.append(np.zeros(100, np.uint8))
            return arrays[-1]

        dead = asyncio.ensure_future(
            made.receive_part("k", header(data, 0, 50), ByteSource(stream(bytes([9] * 50), gate)), allocate)
        )
        while not made._open:
            await asyncio.sleep(0)
        if size == 50:
            assert await part(made, "k", data, 50, size=50) is None
            assert await part(made, "k", data, 0, size=50) == data, "the other part is kept"
        else:
            assert await part(made, "k", data, 0, size=60) is None, "another range begins the payload anew"
            assert await part(made, "k", data, 60, size=40) == data
        gate.set()
        with pytest.raises(WireError, match="sent again"):
            await dead
        assert 9 not in arrays[0][:9]

    asyncio.run(run())


def test_starting_over_replaces_what_is_there() -> None:
    async def run() -> None:
        made, old, new = MultipartUploads(), bytes(100), bytes(range(100))
        assert await part(made, "k", old, 0, size=50) is None
        assert await part(made, "k", new, 0, size=50) is None  # the same range again
        assert await part(made, "k", new, 50, size=50) == new
        assert await part(made, "k", old, 50, size=50) is None
        assert await part(made, "k", new, 0, size=60) is None  # other ranges
        assert await part(made, "k", new, 60, size=40) == new

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 60}, "a part of bytes 60 to 110 of 100"),
        ({"bytes": 0}, "an empty part"),
        ({"bytes": limits.MAX_PART_BYTES + 1}, "a part of bytes"),
    ],
)
def test_ranges_are_checked_before_a_byte_is_read(change: dict[str, int], message: str) -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    async def run() -> None:
        made, data = MultipartUploads(), bytes(100)
        head = header(data, 0, 50)
        for name, value in change.items():
            setattr(head, name, value)
        with pytest.raises(WireError, match=message):
            await made.receive_part("k", head, ByteSource(unread()), lambda: pytest.fail("allocated"))
        assert not made._open

    asyncio.run(run())


def test_a_part_that_names_another_size_ends_its_payload() -> None:
    async def run() -> None:
        made, data = MultipartUploads(), bytes(range(100))
        assert await part(made, "k", data, 0, size=50) is None
        with pytest.raises(WireError, match="total_bytes is 99; this payload has 100"):
            await part(made, "k", data[:99], 50, size=49)
        assert not made._open
        assert await part(made, "k", data[:99], 0, size=99) == data[:99]

    asyncio.run(run())


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "MAX_ALL", multipart.MAX_PER_PROCESS + 1)

    async def run() -> None:
        made, data = MultipartUploads(), bytes(100)
        for number in range(multipart.MAX_PER_PROCESS):
            await part(made, f"k{number}", data, 0, size=50)
        with pytest.raises(TooManyUploads):
            await part(made, "more", data, 0, size=50)
        assert await part(made, "other", data, 0, size=50, process="q") is None
        with pytest.raises(TooManyUploads):
            await part(made, "of all", data, 0, size=50, process="r")
        assert await part(made, "k0", data, 50, size=50) == data  # room for one
        assert await part(made, "more", data, 0, size=50) is None

    asyncio.run(run())


@pytest.mark.promise(
    "An optimizer state of any size reaches a new learner, and the checkpoint, as long as bytes keep "
    "arriving; all new learners that wait share one transfer"
)
def test_every_chunk_counts_as_progress_of_its_upload() -> None:
    noted: list[object] = []
    uploads = MultipartUploads(lambda *chunk: noted.append(chunk))

    async def run() -> None:
        data = bytes(1000)
        header = sync_pb2.UploadHeader(process="p", total_bytes=1000, bytes=1000, checksum=bulk.checksum(data))

        async def stream() -> AsyncIterator[bytes]:
            for start in range(0, 1000, 250):
                uploads._open["key"].touched = 0.0
                yield data[start : start + 250]
                assert uploads._open["key"].touched > 0, "it is not idle"

        assert (
            await uploads.receive_part("key", header, ByteSource(stream()), lambda: np.empty(1000, np.uint8))
            is not None
        )

    asyncio.run(run())
    assert noted == [("key", "p", 250)] * 4


def test_idle_uploads_are_dropped() -> None:
    async def run() -> None:
        made, data = MultipartUploads(), bytes(100)
        await part(made, "k", data, 0, size=50)
        # Not of this machine's clock: with its bits the sum less the moment may be more than what was added.
        made._open["k"].touched = 100.0
        made.sweep(100.0 + multipart.IDLE_SECONDS)
        assert len(made._open) == 1
        made.sweep(101.0 + multipart.IDLE_SECONDS)
        assert not made._open

    asyncio.run(run())


def test_a_clock_that_skips_our_own_standstill() -> None:
    times = iter([10.0, 10.5, 12.0, 100.0, 101.0])
    clock = SteadyClock(limit=3.0, raw=lambda: next(times))
    assert [clock() for _ in range(3)] == [10.5, 12.0, 15.0]
    clock.stop()
    assert [clock() for _ in range(2)] == [16.0, 16.0], "as of the moment at which it was stopped"


class Disk:
    """A spool whose thread stands still while ``held``, and uploads that it writes."""

    def __init__(self, folder: Path) -> None:
        self.spool = Spool(folder)
        self.made = MultipartUploads(spool=self.spool)
        self.read = 0  # bytes that were taken of the parts' sources
        self._gate = threading.Event()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._gate.clear()
        standing = threading.Event()
        self.spool._thread.submit(lambda: (standing.set(), self._gate.wait(20)))
        assert standing.wait(20)
        try:
            yield
        finally:
            self._gate.set()

    async def _stream(self, data: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(data), 10):
            self.read += len(data[start : start + 10])
            yield data[start : start + 10]

    async def send(self, data: bytes, offset: int, size: int, sent: bytes | None = None) -> bytes | None:
        source = ByteSource(self._stream(data[offset : offset + size] if sent is None else sent))
        place = lambda: self.spool.prepare(len(data))  # noqa: E731
        done = await self.made.receive_part("k", header(data, offset, size), source, place)
        return None if done is None else done.tobytes()


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.promise(
    "A disk that takes its time with an optimizer state or frozen parameters holds up nothing else of the syncer"
)
def test_while_the_disk_stands_a_chunk_of_each_part_waits_and_the_loop_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        disk, data = Disk(tmp_path), bytes(range(100))
        assert await disk.send(data, 0, size=20) is None
        with disk.held():
            parts = [asyncio.create_task(disk.send(data, offset, size=40)) for offset in (20, 60)]
            await some_turns()
            assert disk.read == 20 + 2 * 10, "and no more than that lies in memory"
        assert await asyncio.gather(*parts) in ([None, data], [data, None])

    asyncio.run(run())


@pytest.mark.promise(
    "A disk that takes its time with an optimizer state or frozen parameters holds up nothing else of the syncer"
)
@pytest.mark.parametrize(("writes", "given"), [(1, 1), (16, 3)])
def test_what_waits_for_the_disk_is_written_before_what_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, given: int
) -> None:
    """However many wait: few are given to the thread, and the others wait for their turn."""
    monkeypatch.setattr(spool_module, "WRITES", writes)

    async def run() -> None:
        disk, data = Disk(tmp_path), bytes(range(40))
        assert await disk.send(data, 0, size=10) is None
        with disk.held():
            first = asyncio.create_task(disk.send(data, 10, size=10))
            await some_turns()
            stale = asyncio.create_task(disk.send(data, 20, size=20, sent=bytes(20)))
            await some_turns()
            assert disk.read == 10 + 2 * 10
            again = asyncio.create_task(disk.send(data, 20, size=20))
            await some_turns()
            assert disk.spool._thread._work_queue.qsize() == given
        assert await first is None and await again == data
        with pytest.raises(WireError, match="sent again"):
            await stale

    asyncio.run(run())


def test_an_upload_for_which_there_is_no_room_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = os.posix_fallocate

    def full(*place: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    async def run() -> None:
        disk, data = Disk(tmp_path), bytes(range(40))
        monkeypatch.setattr(os, "posix_fallocate", full)
        parts = [disk.send(data, offset, size=20) for offset in (0, 20)]
        assert [type(each) for each in await asyncio.gather(*parts, return_exceptions=True)] == [OSError] * 2
        assert not disk.made._open and not list(tmp_path.iterdir())
        monkeypatch.setattr(os, "posix_fallocate", room)
        assert await disk.send(data, 0, size=40) == data

    asyncio.run(run())
