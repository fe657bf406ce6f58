"""The merged model at ``output.uri``: whole or not at all, whatever fails; nobody else's files are touched."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.spec.job import DiLoCoJob
from diloco_syncer.output import model_output
from diloco_syncer.output.model_file import ModelFile
from diloco_syncer.output.model_output import ModelOutput
from diloco_syncer.output.read_output import NoOutput, read_output
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.directory import DirectoryStore

TENSORS = [
    Tensor("embed", (40, 16), "float32", True),
    Tensor("w.0", (64, 16), "bfloat16"),
    Tensor("w.1", (7,), "float32"),
]
LAYOUT = Layout.build(TENSORS, 3)
FROZEN = {"table": np.arange(6, dtype=np.float16).reshape(2, 3)}


def job(place: Path, name: str = "job") -> DiLoCoJob:
    secret = {"spec": {"containers": [{"name": "syncer", "env": [{"name": "KEY", "value": "a-password"}]}]}}
    spec = {
        "training": {"stop": {"steps": 9}},
        "learners": {"command": ["true"]},
        "regions": [{"learners": 1}],
        "syncer": {"podTemplate": secret},
        "output": {"uri": str(place)},
    }
    head = {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": name}}
    return DiLoCoJob.model_validate({**head, "spec": spec})


def model(value: float, name: str = "job") -> ModelFile:
    thetas = [np.arange(LAYOUT.elements(p), dtype=np.float32) + np.float32(value) for p in range(len(LAYOUT))]
    blob = np.frombuffer(safetensors.numpy.save(FROZEN), np.uint8)
    return ModelFile(name, 1, LAYOUT, thetas, versions=[4] * len(LAYOUT), frozen=blob)


def written(output: ModelOutput, value: float = 0.0) -> ModelOutput:
    asyncio.run(output.write(LAYOUT, model(value, output.job.metadata.name), [4] * len(LAYOUT), b'{"outcome": "x"}'))
    return output


def made(place: Path, name: str = "job", **options: Any) -> ModelOutput:
    found = ModelOutput.of(job(place, name), lambda: None)
    assert found is not None and found.row.state == "waiting"
    for key, value in options.items():
        setattr(found, key, value)
    return found


def expected(value: float) -> dict[str, np.ndarray]:
    whole = safetensors.numpy.load(b"".join(bytes(chunk) for chunk in model(value).chunks()))
    return dict(whole)


@pytest.mark.parametrize("most", [10**9, 3000])
def test_it_is_read_back_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(model_output, "SHARD_BYTES", most)
    output = written(made(tmp_path / "out"))
    assert output.row.state == "written" and output.row.uri == str(tmp_path / "out") and not output.row.message
    found, layout, tensors, versions = read_output(DirectoryStore(tmp_path / "out"))
    assert (found.metadata.name, layout, versions) == ("job", LAYOUT, [4, 4, 4])
    assert sorted(tensors) == ["embed", "table", "w.0", "w.1"]
    for name, values in expected(0.0).items():
        np.testing.assert_array_equal(tensors[name], values)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"output.json", "job.json", "layout.json", "report.json"}
    assert ("model.safetensors" in names) == (most == 10**9) and "a-password" not in (
        tmp_path / "out/job.json"
    ).read_text()
    if most == 3000:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors) and set(index["weight_map"].values()) <= names
        for name, file in index["weight_map"].items():
            np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "out" / file)[name], tensors[name])


@pytest.mark.promise(
    "The umask decides who may read the model at `output.uri`; a run that belongs to another user is reported as such",
    section="Hostile callers",
)
def test_who_may_read_the_output_is_said_by_the_umask(tmp_path: Path) -> None:
    """It is made to be used, by other users and pods too; the store is not."""
    before = os.umask(0o022)
    try:
        written(made(tmp_path / "a" / "out"))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "out").iterdir()} == {0o644}
    assert (tmp_path / "a" / "out").stat().st_mode & 0o777 == 0o755


def test_an_earlier_output_of_the_job_gives_way_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_output, "SHARD_BYTES", 3000)
    written(made(tmp_path / "out"))
    monkeypatch.setattr(model_output, "SHARD_BYTES", 10**9)
    written(made(tmp_path / "out"), 5.0)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"job.json", "layout.json", "model.safetensors", "output.json", "report.json"}
    np.testing.assert_array_equal(read_output(DirectoryStore(tmp_path / "out"))[2]["w.1"], expected(5.0)["w.1"])


@pytest.mark.promise(
    "The merged model at `output.uri` is whole or absent, whatever fails on the way; files of others are never changed"
)
def test_what_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    written(made(tmp_path / "out", "other"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refused = written(made(tmp_path / "out"))
    assert refused.row.state == "failed" and "the model of the job other lies there" in refused.row.message
    assert "give output.uri a folder of its own" in refused.row.message
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"mine")
    refused = written(made(tmp_path / "mine"))
    assert refused.row.state == "failed" and "other files lie there" in refused.row.message
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["model.safetensors"]


class Failing(DirectoryStore):
    """A store whose puts fail until ``puts`` of them were tried."""

    def __init__(self, where: str, puts: int, error: OSError) -> None:
        super().__init__(where)
        self.left, self.error, self.seen = puts, error, [False]

    def replace(self, name: str, *parts: Any) -> None:
        self.seen.append(self.exists("output.json"))
        if name.endswith(".safetensors") and self.left:
            self.left -= 1
            raise self.error
        super().replace(name, *parts)


def through(monkeypatch: pytest.MonkeyPatch, place: Failing) -> None:
    monkeypatch.setattr(model_output, "open_store", lambda where, public: place)
    monkeypatch.setattr(model_output, "FIRST_PAUSE", 0.01)


@pytest.mark.promise(
    "The merged model at `output.uri` is whole or absent, whatever fails on the way; files of others are never changed"
)
def test_what_fails_is_tried_again_and_the_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Failing(str(tmp_path / "out"), 3, OSError(5, "syncer.storage.uri is away"))
    through(monkeypatch, place)
    output = written(made(tmp_path / "out"))
    assert output.row.state == "written" and not output.row.message and place.left == 0
    assert not any(place.seen), "output.json was there before the model was whole"


@pytest.mark.promise(
    "The merged model at `output.uri` is whole or absent, whatever fails on the way; files of others are never changed"
)
def test_patience_ends_and_what_is_there_is_no_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(made(tmp_path / "out"))
    through(monkeypatch, Failing(str(tmp_path / "out"), 10**6, OSError(5, "syncer.storage.uri is away")))
    output = written(made(tmp_path / "out", patience=0.1), 5.0)
    assert output.row.state == "failed" and "output.uri is away" in output.row.message
    with pytest.raises(NoOutput, match="is written last"):
        read_output(DirectoryStore(tmp_path / "out"))


def test_a_place_that_may_not_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = written(made(tmp_path / "file"))
    assert output.row.state == "failed" and "is not a directory" in output.row.message


def test_a_successor_writes_it_where_there_is_one(tmp_path: Path) -> None:
    def superseded() -> None:
        raise HigherEpoch("another has the store")

    output = made(tmp_path / "out", check_epoch=superseded)
    with pytest.raises(HigherEpoch):
        written(output)
    assert not (tmp_path / "out" / "output.json").exists()


def test_files_that_were_changed_are_not_read(tmp_path: Path) -> None:
    written(made(tmp_path / "out"))
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(NoOutput, match="is not what was written"):
        read_output(DirectoryStore(tmp_path / "out"))
    path.unlink()
    with pytest.raises(NoOutput, match="is missing"):
        read_output(DirectoryStore(tmp_path / "out"))


@pytest.mark.promise("Writing the model to `output.uri` needs no second copy of it in memory")
def test_the_model_is_not_in_memory_twice(tmp_path: Path) -> None:
    layout = Layout.build([Tensor("w", (4_000_000,), "float32")], 4)
    thetas = [np.ones(layout.elements(p), np.float32) for p in range(4)]
    file = ModelFile("job", 1, layout, thetas, versions=[1] * 4, frozen=None)
    output = made(tmp_path / "out")
    gc.collect()
    tracemalloc.start()
    try:
        asyncio.run(output.write(layout, file, [1] * 4, b"{}"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.row.size > 16_000_000 and peak < 2_000_000
