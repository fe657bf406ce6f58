"""``diloco run`` of a job with ``output.uri``: the merged model lies there at the end, or the run says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, diloco
from safetensors.numpy import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_model_lies_at_output_uri_and_is_exported_from_there(start: Callable[..., Run], tmp_path: Path) -> None:
    place = tmp_path / "models" / "tiny"
    run = start("--set", f"output.uri={place}", steps=24)
    assert run.ends() == 0, run.everything()
    manifest = json.loads((place / "output.json").read_text())
    assert run.report()["output"]["state"] == "written" and str(place) in run.output
    assert set(manifest["files"]) == {"job.json", "layout.json", "report.json", "model.safetensors"}
    assert diloco("export", place, tmp_path / "from-output").returncode == 0
    assert diloco("export", run.workdir, tmp_path / "from-run").returncode == 0
    # What transformers loads is the same from both, and its tensors have the names and values of the output's own.
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "from-output" / name).read_bytes() == (tmp_path / "from-run" / name).read_bytes(), name
    exported, own = load_file(tmp_path / "from-run" / "model.safetensors"), load_file(place / "model.safetensors")
    assert all((own[name] == values).all() for name, values in exported.items())


def test_a_run_whose_model_cannot_be_written_says_so_and_tries_again(start: Callable[..., Run], tmp_path: Path) -> None:
    place = tmp_path / "taken"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"somebody's")
    run = start("--set", f"output.uri={place}", steps=24)
    assert run.ends() == 1, run.everything()
    assert "give output.uri a folder of its own" in run.output
    assert run.report()["outcome"] == "complete" and run.report()["output"]["state"] == "failed"
    (place / "model.safetensors").unlink()
    again = start("--set", f"output.uri={place}", steps=24)
    assert again.ends() == 0, again.everything()
    assert (place / "output.json").is_file() and again.report()["output"]["state"] == "written"
