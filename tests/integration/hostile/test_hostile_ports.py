"""What anybody can do to the control port of a syncer, without a key: nothing that costs memory or disk."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from syncer_client import SyncerProcess, raw_job, send_call

from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.control_auth import sign_call

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[SyncerProcess]:
    made = SyncerProcess(tmp_path / "syncer", raw_job()).start()
    yield made
    made.stop()


def peak_mib(syncer: SyncerProcess) -> float:
    assert syncer.process is not None
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{syncer.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def test_unsigned_calls_of_any_size_cost_little_memory_and_few_lines(syncer: SyncerProcess) -> None:
    large = sync_pb2.SignedCall(method="status", body=b"x" * ((4 << 20) - 1000)).SerializeToString()
    small = sync_pb2.SignedCall(method="status", body=b"{}").SerializeToString()
    before = peak_mib(syncer)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(syncer.addresses["control"], options=options) for _ in range(4)]

    async def call(number: int, raw: bytes) -> grpc.StatusCode:
        try:
            await channels[number % 4].unary_unary(limits.CONTROL_PATH)(raw, timeout=60)
        except aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    codes = set(await asyncio.gather(*(call(number, large) for number in range(160))))
    assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}, codes
    assert peak_mib(syncer) - before < 100
    codes = set(await asyncio.gather(*(call(number, small) for number in range(200))))
    assert grpc.StatusCode.PERMISSION_DENIED in codes and grpc.StatusCode.OK not in codes, codes
    assert syncer.text().count("control call refused") == 1
    for channel in channels:
        await channel.close()
    async with aio.insecure_channel(syncer.addresses["control"]) as channel:
        assert (await send_call(channel, sign_call(syncer.key, "status", b"{}"))).ok
