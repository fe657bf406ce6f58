"""``diloco export`` of a job whose model only its own program knows: files, shards, what is in the way."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from diloco.console import CommandError
from diloco.export.export import ExportFailed, MergedModel, difference, read_merged, write_merged
from diloco.export.tensors import write_tensors
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.spec.load import parse_job
from diloco_worker import load_merged
from diloco_worker.settings import WorkerError

TENSORS = {name: np.full((50, 2), value, np.float32) for value, name in enumerate(("a.weight", "b.weight", "c.bias"))}
LAYOUT = Layout.build([Tensor(name, (50, 2), "bfloat16") for name in TENSORS], 2)


@pytest.mark.promise("A job with its own loop can be exported, in shards if it is large, whole or not at all")
def test_parameters_and_layout_are_written_whole(tmp_path: Path) -> None:
    write_tensors("j", LAYOUT, TENSORS, [3, 4], out=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["layout.json", "model.safetensors"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(loaded[name], values)
    assert Layout.from_json((tmp_path / "out" / "layout.json").read_text()) == LAYOUT
    with pytest.raises(FileExistsError, match="exists already: name a new directory"):
        write_tensors("j", LAYOUT, TENSORS, [3, 4], out=tmp_path / "out")


@pytest.mark.promise("A job with its own loop can be exported, in shards if it is large, whole or not at all")
def test_a_large_model_is_written_in_shards_with_their_index(tmp_path: Path) -> None:
    write_tensors("j", LAYOUT, TENSORS, [3, 4], out=tmp_path, shard_bytes=800)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 1200
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], TENSORS[name])


@pytest.mark.promise("A job with its own loop can be exported, in shards if it is large, whole or not at all")
def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    wrong = {**TENSORS, "d": np.array(["text"])}
    with pytest.raises(SafetensorError, match="dtype"):
        write_tensors("j", LAYOUT, wrong, [3, 4], out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_the_jobs_last_score_is_a_fault_only_of_the_same_merges() -> None:
    score = (76_032, 2.0, 12)
    assert difference(2.03, score, 12) == difference(1.97, score, 99) == ""
    assert difference(2.1, score, 1_012) == "; 1,000 merges were made since"
    assert difference(2.1, score, 12).startswith("\nwarning: ")


def test_what_is_no_runs_directory_is_told_by_what_it_is(tmp_path: Path) -> None:
    write_tensors("j", LAYOUT, TENSORS, [3, 4], out=tmp_path / "model")
    with pytest.raises(CommandError, match=r"is an export already: load model\.safetensors"):
        read_merged(str(tmp_path / "model"))
    with pytest.raises(WorkerError, match="is an export already"):
        load_merged(tmp_path / "model")
    (tmp_path / "run" / "store" / "epochs").mkdir(parents=True)
    for name in ("job.json", "store/job.json"):
        (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(CommandError, match=f"name the run's directory: {tmp_path}/run$"):
        read_merged(str(tmp_path / "run" / "store"))


OWN = {
    "apiVersion": "diloco.io/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"name": "own"},
    "spec": {
        "learners": {"command": ["python", "train.py"]},
        "training": {"stop": {"steps": 10}},
        "regions": [{"name": "local", "learners": 1}],
    },
}


def own_model() -> MergedModel:
    return MergedModel(parse_job(json.dumps(OWN)), LAYOUT, TENSORS, [3, 4])


def test_it_says_what_it_wrote_and_under_which_names(tmp_path: Path) -> None:
    written = write_merged(own_model(), tmp_path / "out")
    said = written.text
    assert f"{tmp_path / 'out'}: the merged parameters (the job has no training.model), fragments at versions" in said
    assert "model.safetensors: 3 tensors of 300 elements in float32, by the names that the program's own" in said
    document = written.document
    assert document["job"] == "own" and document["what"] == "tensors" and document["versions"] == {"min": 3, "max": 4}
    assert document["files"] == sorted(path.name for path in (tmp_path / "out").iterdir()) != []


def test_a_disk_that_is_full_leaves_nothing_and_is_told(tmp_path: Path) -> None:
    """A file may grow to 200 bytes here, which safetensors tells by an error of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(ExportFailed, match=r"out cannot be written: .*too large"):
            write_merged(own_model(), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
