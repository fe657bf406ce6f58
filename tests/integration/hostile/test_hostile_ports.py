"""What anybody can do to the ports of a syncer, without a key or a token: nothing that costs memory or disk, and
nothing at all in its job."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from hostile_client import Learner
from syncer_client import SyncerProcess, raw_job, send_call

from diloco_protocol.security.credentials import TOKEN_KEY, Credentials
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.control_auth import make_key, sign_call
from diloco_syncer.server.tls.connection_limits import LOG_SECONDS

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


@pytest.mark.promise(
    "Calls to the control port without its key cost little memory and few log lines", section="Hostile callers"
)
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
    began = time.monotonic()
    codes = set(await asyncio.gather(*(call(number, small) for number in range(200))))
    assert grpc.StatusCode.PERMISSION_DENIED in codes and grpc.StatusCode.OK not in codes, codes
    lines = syncer.text().count("control call refused")
    assert 1 <= lines <= 1 + (time.monotonic() - began) // LOG_SECONDS
    for channel in channels:
        await channel.close()
    async with aio.insecure_channel(syncer.addresses["control"]) as channel:
        assert (await send_call(channel, sign_call(syncer.key, "status", b"{}"))).ok


@pytest.mark.promise(
    "Other users of the machine get only the status page of a `diloco run`: they lack the join token",
    section="Hostile callers",
)
async def test_on_one_machine_only_who_has_the_token_takes_part(tmp_path: Path) -> None:
    """The ports of 127.0.0.1 are every user's; the file with the token is one user's."""
    token = make_key(tmp_path / "token").decode()
    syncer = SyncerProcess(tmp_path / "syncer", raw_job()).start("--join-token-file", str(tmp_path / "token"))
    try:
        for shown in ((), ((TOKEN_KEY, ""),), ((TOKEN_KEY, token[:-1]),)):
            stranger = Learner(syncer, Credentials(token=dict(shown).get(TOKEN_KEY, "")), "local")
            stranger.metadata = shown
            with pytest.raises(aio.AioRpcError) as refused:
                await stranger.join()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(bulk.TransferError, match="join token"):
                await stranger.download(sync_pb2.DownloadRequest(what=sync_pb2.DownloadRequest.JOB), 1 << 20)
            await stranger.close()
        assert syncer.status()["sessions"] == 0 and syncer.status()["tls"]["refused"] == {"wrong-token": 6}
        owner = Learner(syncer, Credentials(token=token), "local")
        assert (await owner.take_part()).seat.incarnation
        await owner.close()
    finally:
        syncer.stop()
