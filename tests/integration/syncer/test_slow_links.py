"""A link that is slower than its job needs: measured by what it carries, told in status, metrics and
the picture, and slower merges are all that comes of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import ForkedProcess, fork
from syncer_client import SyncerProcess

from diloco.local.screen import RunView, picture
from diloco_protocol.bandwidth import links
from diloco_protocol.documents import StatusDocument, read_document
from diloco_protocol.spec.load import parse_job
from diloco_worker import Learner
from patience import own_work, wait_until

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: slow}
spec:
  training: {model: null, data: null, stop: {steps: 100000}, evaluation: null}
  sync:
    fragments: 4
    every: 4
    overlap: 2
    quorum: 2
    grace: {factor: 0.9, capSeconds: 0.2}
    compression: {up: int4, down: bfloat16}
    heartbeat: {intervalSeconds: 0.2, timeoutSeconds: 30}
  syncer: {checkpoint: {everySeconds: 3600}}
  learners: {command: [python, x.py]}
  regions:
  - {name: near, learners: 1}
  - {name: far, learners: 1}
"""
STEP_SECONDS = 0.1
SIDE = 512  # of the model's one matrix: 262 144 parameters, 65 536 in a fragment
DELAY = 0.02  # seconds each way


class Link:
    """A TCP relay of so many bytes per second in each direction, all connections together, and a delay."""

    def __init__(self, target: str, rate: float) -> None:
        self.target, self.rate = target, rate
        self.port = 0
        self._free = [0.0, 0.0]
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 14)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        self._loop.run_until_complete(serve())
        self._loop.run_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host, _, port = self.target.rpartition(":")
        back, out = await asyncio.open_connection(host, int(port), limit=1 << 14)
        try:
            await asyncio.gather(self._pump(reader, out, 0), self._pump(back, writer, 1))
        except OSError:
            pass
        finally:
            for end in (writer, out):
                end.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        while data := await reader.read(8192):
            now = self._loop.time()
            # A sleep takes longer than it should; what is lost by it is made up for.
            self._free[way] = max(self._free[way], now - 0.02) + len(data) / self.rate
            due = max(self._free[way], now) + DELAY
            self._loop.call_at(due, _write, writer, data)
            await asyncio.sleep(max(0.0, self._free[way] - now))  # no more than a little is under way

    def close(self) -> None:
        async def end() -> None:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(5)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():  # else one side has gone meanwhile
        writer.write(data)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SyncerProcess]:
    # Not on loopback alone: there a busy machine would be named, and not the link.
    made = SyncerProcess(tmp_path / "syncer", parse_job(JOB)).start("--listen", "0.0.0.0:0")
    yield made
    made.stop()


def learner(service: SyncerProcess, region: str, address: str) -> ForkedProcess:
    environ = {
        "DILOCO_JOB_FILE": str(service.folder / "job.json"),
        "DILOCO_SYNCER": address,
        "DILOCO_ROLE": "learner",
        "DILOCO_ORDINAL": "0",
        "DILOCO_REGION": region,
        "DILOCO_WORKDIR": str(service.folder / region),
        "DILOCO_STATUS": "127.0.0.1:0",
    }
    return fork([__file__], environ, service.log)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_slow_link_is_measured_and_told(service: SyncerProcess) -> None:
    sizes = [SIDE * SIDE // 4] * 4
    carried = links.traffic(sizes, "int4", "bfloat16", 2)
    rate = 0.5 * carried.down / STEP_SECONDS  # bytes per second: half of what broadcasts need
    slow = Link(service.addresses["sync"], rate)
    learners = [learner(service, "near", service.addresses["sync"]), learner(service, "far", f"127.0.0.1:{slow.port}")]
    try:

        def rows() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = service.status()["slots"]
            return sorted(found, key=lambda row: str(row["region"]), reverse=True)  # near, far

        def told() -> str:
            return json.dumps([row["link"] for row in rows()], indent=1)

        def judged() -> bool:
            there = [row["link"] for row in rows() if row["link"] is not None]
            return len(there) == 2 and all(
                one["up_bytes_per_second"] and one["down_bytes_per_second"] and one["round_trip_seconds"]
                for one in there
            )

        wait_until(judged, "both links to be judged", own_work, told)
        wait_until(lambda: rows()[1]["link"]["too_slow"], "the far link to be too slow", own_work, told)
        near, far = (row["link"] for row in rows())
        assert not near["too_slow"] and near["message"] == ""
        assert near["down_bytes_per_second"] > 4 * rate
        assert far["down_bytes_per_second"] == pytest.approx(rate, rel=0.3)
        assert 0.4 * rate < far["up_bytes_per_second"] < 3 * rate  # buffers on the way have the rest
        assert 2 * DELAY <= far["round_trip_seconds"] < 1.0
        assert near["round_trip_seconds"] < far["round_trip_seconds"]
        assert far["needs_down_bytes_per_second"] > 1.2 * far["down_bytes_per_second"]
        assert "slower than the job needs" in far["message"]
        metrics = service.get("/metrics").decode()
        assert 'diloco_slot_link_too_slow{job="slow",region="far",slot=' in metrics
        assert 'diloco_slot_link_down_bytes_per_second{job="slow",region="near",slot=' in metrics
        shown = view_text(service.status())
        assert "slow link" in shown and "slower than the job needs" in shown

        # Merges are rarer, as told, and that is all: both train on at their pace, and are merged.
        def deviations() -> list[str]:
            """What is otherwise in a window of 12 merges of the slow learner."""
            before, begun = service.status(), rows()
            wait_until(
                lambda: rows()[1]["merged_pushes"] >= begun[1]["merged_pushes"] + 12, "twelve merges of the far one"
            )
            after, ended = service.status(), rows()
            steps, merges = after["step"] - before["step"], after["merges"] - before["merges"]
            found = [] if 0.25 * steps < merges < 0.75 * steps else [f"{merges} merges in {steps} steps"]
            for old, new in zip(begun, ended, strict=True):
                stalled, own = (new[field] - old[field] for field in ("stalled_seconds", "step"))
                if stalled >= 0.1 * STEP_SECONDS * steps:
                    found.append(f"{new['region']} waited for {stalled:.2f} s in {steps} steps")
                if own <= 0.8 * steps:
                    found.append(f"{new['region']} made {own} of {steps} steps")
            return found

        # A learner that the machine does not run for seconds spoils its window, and no later one.
        windows = []
        while not windows or windows[-1]:
            assert len(windows) < 5, windows
            windows.append(deviations())
    finally:
        for one in learners:
            one.kill()
            one.wait()
        slow.close()


def view_text(status: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        shown = read_document(StatusDocument, status)
        console.print(picture(RunView("slow", None, shown, {}, serving=True), []))
    return captured.get()


def run_learner() -> None:
    """A program of the user's own, whose steps take ``STEP_SECONDS``."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(SIDE, SIDE, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Learner.from_environment(model, optimizer) as learner:
        for values in learner.batches(torch.randn(100_000, 8).repeat(1, SIDE // 8)):
            time.sleep(STEP_SECONDS)
            loss = (model(values) - values).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.after_step(tokens=4, loss=loss.detach())


if __name__ == "__main__":
    run_learner()
