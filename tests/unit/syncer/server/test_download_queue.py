"""How many downloads of one process are sent at a time."""

from __future__ import annotations

import asyncio

import pytest

from diloco_protocol.wire.bulk_calls import CallFailed
from diloco_syncer.server import download_queue
from diloco_syncer.server.download_queue import MAX_PER_PROCESS, DownloadQueue


@pytest.mark.promise(
    "A download that its client does not read is given up, with the version that it holds; a process gets "
    "few downloads at a time"
)
async def test_a_process_has_so_many_downloads_at_a_time_and_the_others_wait_their_turn() -> None:
    queue, running, most = DownloadQueue(), 0, 0
    go = asyncio.Event()

    async def download(process: str) -> None:
        nonlocal running, most
        async with queue.await_turn(process):
            running += 1
            most = max(most, running)
            await go.wait()
            running -= 1

    tasks = [asyncio.create_task(download("a")) for _ in range(3 * MAX_PER_PROCESS)]
    await asyncio.sleep(0)
    assert running == MAX_PER_PROCESS and queue._calls["a"].count == 3 * MAX_PER_PROCESS
    other = asyncio.create_task(download("b"))
    await asyncio.sleep(0)
    assert running == MAX_PER_PROCESS + 1, "what one does holds up no other"
    tasks[-1].cancel()  # it waits
    go.set()
    await asyncio.gather(*tasks, other, return_exceptions=True)
    assert most == MAX_PER_PROCESS + 1 and running == 0 and not queue._calls


@pytest.mark.promise(
    "A download that its client does not read is given up, with the version that it holds; a process gets "
    "few downloads at a time"
)
async def test_a_process_has_so_many_that_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_queue, "MAX_WAITING", 3)
    queue = DownloadQueue()

    async def download() -> None:
        async with queue.await_turn("a"):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(download()) for _ in range(MAX_PER_PROCESS + 3)]
    await asyncio.sleep(0)
    with pytest.raises(CallFailed, match="too many downloads"):
        async with queue.await_turn("a"):
            pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not queue._calls
