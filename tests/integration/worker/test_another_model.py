"""A learner with another model is told by the first tensor that differs, before anything is announced to it; one with
other data by the first item."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from syncer_client import LAYOUT, Client, SyncerProcess, raw_job

from diloco_protocol.vocabulary import WorkerExit
from diloco_protocol.wire import convert
from diloco_worker import Learner
from diloco_worker.data.map_style import sample_items
from diloco_worker.settings import RefusedError
from patience import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def syncer(tmp_path: Path) -> Iterator[SyncerProcess]:
    made = SyncerProcess(tmp_path / "syncer", raw_job()).start()
    yield made
    made.stop()


class Wider(torch.nn.Module):
    """As the job's model (``LAYOUT``), and one tensor is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(32, 8))
        self.w = torch.nn.Parameter(torch.zeros(64, 9))


def train(syncer: SyncerProcess, data: list[int] | None = None) -> None:
    """Train as a user's loop would: on ``data``, or on what the loop brings."""
    model = Wider()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environ = {
        "DILOCO_JOB_FILE": str(syncer.folder / "job.json"),
        "DILOCO_SYNCER": syncer.addresses["sync"],
        "DILOCO_ORDINAL": "1",
        "DILOCO_WORKDIR": str(syncer.folder),
    }
    with Learner.from_environment(model, optimizer, environ=environ) as learner:
        for _ in learner.steps() if data is None else learner.batches(data, 1):
            learner.after_step(tokens=1)


@pytest.mark.promise(
    "A learner with another model is refused before anything is announced to it, and the refusal names "
    "the first tensor that differs"
)
async def test_another_model_is_named_before_anything_is_announced(
    syncer: SyncerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = Client(syncer)
    try:
        assert (await first.join()).welcome.initialise
        other = asyncio.create_task(asyncio.to_thread(train, syncer))
        await until(lambda: syncer.status()["sessions"] == 2)
        await first.initialise()
        with pytest.raises(RefusedError) as refused:
            await asyncio.wait_for(other, 30)
        await first.ready()
    finally:
        await first.close()
    shapes = {tensor.name: list(tensor.shape) for tensor in LAYOUT.tensors}
    said = str(refused.value)
    assert f"w is [64, 9] float32 here and {shapes['w']} float32 in the job" in said, said
    assert refused.value.exit_code == WorkerExit.REFUSED and refused.value.reason == "other-layout"
    assert "broke the protocol" not in caplog.text and said in caplog.text.replace("\n", " ")


async def test_another_model_that_comes_later_is_named_too(syncer: SyncerProcess) -> None:
    first = Client(syncer)
    try:
        assert (await first.join()).welcome.initialise
        await first.initialise()
        with pytest.raises(RefusedError, match=r"w is \[64, 9\] float32 here and \[64, 8\] float32 in the job"):
            await asyncio.to_thread(train, syncer)
        assert syncer.status()["refusals"][0]["reason"] == "other-layout"
    finally:
        await first.close()


@pytest.mark.promise("A learner whose data have another content than the job's is refused, with the first place of it")
async def test_other_data_of_the_same_size(syncer: SyncerProcess) -> None:
    first = Client(syncer)
    try:
        told = [convert.to_wire(sample) for sample in sample_items([7, 8, 9])]
        assert (await first.join(sequences=3, data_samples=told)).welcome.initialise
        with pytest.raises(RefusedError, match=r"other content \(item 2 is the first that differs") as refused:
            await asyncio.to_thread(train, syncer, [7, 8, 10])
        assert refused.value.reason == syncer.status()["refusals"][0]["reason"] == "other-data"
    finally:
        await first.close()
