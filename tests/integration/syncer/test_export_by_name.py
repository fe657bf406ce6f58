"""The model of a loop of one's own is exported without its class: merged tensors by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from syncer_client import LAYOUT, Client, SyncerProcess, raw_job, turn
from typer.testing import CliRunner

from diloco.main import app

pytestmark = pytest.mark.asyncio(loop_scope="module")

FROZEN = {"table": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.mark.promise("A job with its own loop can be exported, in shards if it is large, whole or not at all")
async def test_merged_tensors_are_exported_by_name_and_a_program_has_them_too(tmp_path: Path) -> None:
    """After a merge, and after the syncer has gone."""
    job = raw_job()
    assert job.spec.training.model is None and job.spec.learners.command
    syncer = SyncerProcess(tmp_path / "run", job).start()
    client = Client(syncer)
    try:
        assert (await client.join()).welcome.initialise
        await client.initialise(safetensors.numpy.save(FROZEN))
        await client.ready()
        await turn(client, 0)
    finally:
        await client.close()
        syncer.stop()
    merged = np.sort(np.concatenate(client.bases))

    out = tmp_path / "model"
    done = CliRunner().invoke(app, ["export", str(syncer.folder), str(out)])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == ["layout.json", "model.safetensors"]
    exported = safetensors.numpy.load_file(out / "model.safetensors")
    shapes = {tensor.name: tuple(tensor.shape) for tensor in LAYOUT.tensors} | {"table": (2, 3)}
    assert {name: values.shape for name, values in exported.items()} == shapes
    trained = [exported[tensor.name].ravel() for tensor in LAYOUT.tensors]
    np.testing.assert_array_equal(np.sort(np.concatenate(trained)), merged)
    np.testing.assert_array_equal(exported["table"], FROZEN["table"])

    from diloco_worker import load_merged  # loads torch

    loaded = load_merged(syncer.folder)
    assert loaded.keys() == exported.keys()
    for name, values in exported.items():
        np.testing.assert_array_equal(loaded[name].numpy(), values)
