"""All stores against the same rules; epochs; a disk that is full."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_protocol.common import files
from diloco_syncer.store.base import HigherEpoch, ObjectExists, ObjectNotFound, Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch, find_successor
from diloco_syncer.store.open import open_store
from recorded_disk import RecordedDisk


@pytest.mark.parametrize("call", ["create", "replace"])
def test_an_object_is_on_the_device_with_its_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    made = DirectoryStore(tmp_path / "store")
    disk = RecordedDisk(monkeypatch, tmp_path)
    getattr(made, call)("records/a", b"one")
    assert disk.events[:3] == [
        ("flush", "store", ["records"]),
        ("flush", "store/records/*.tmp", b"one"),
        ("name", "store/records/a", ""),
    ]
    assert disk.events[3][:2] == ("flush", "store/records") and "a" in disk.events[3][2]


def test_objects(store: Store) -> None:
    assert store.list("records") == []
    assert not store.exists("records/a")
    with pytest.raises(ObjectNotFound):
        store.read("records/a", 10)
    with pytest.raises(ObjectNotFound):
        store.read_start("records/a", 10)
    store.create("records/a", b"ab", memoryview(b"cd"), b"")
    with pytest.raises(ObjectExists):
        store.create("records/a", b"other")
    assert store.read("records/a", 4) == b"abcd"
    assert store.read_start("records/a", 2) == b"ab"
    assert store.read_start("records/a", 99) == b"abcd"
    with pytest.raises(files.TooLarge, match="4 bytes; at most 3"):
        store.read("records/a", 3)
    store.replace("records/a", b"new")
    store.replace("records/b", b"")
    assert store.read("records/a", 10) == b"new"
    assert store.list("records") == ["records/a", "records/b"]
    store.delete("records/a")
    store.delete("records/a")
    assert store.list("records") == ["records/b"]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "a/../b", "..", "A", "a//b", "a/", ".hidden", "a b"])
def test_names_stay_inside(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        store.create(name, b"x")


def test_of_many_that_create_exactly_one_succeeds(store: Store) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(5)
        try:
            store.create("records/x", bytes([number]) * 1000)
            won.append(number)
        except ObjectExists:
            pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(won) == 1
    assert store.read("records/x", 1000) == bytes(won) * 1000


def test_epochs_rise_and_the_older_notices(store: Store) -> None:
    first = Epoch.claim(store, b"me")
    first.check()
    second = Epoch.claim(store)
    assert (first.number, second.number) == (1, 2)
    second.check()
    with pytest.raises(HigherEpoch, match="claimed epoch 2"):
        first.check()


def test_a_pod_leaves_the_store_to_one_that_came_after_it(store: Store) -> None:
    def claim(pod: str | None, at: float) -> int:
        named = {} if pod is None else {"pod": pod}
        return Epoch.claim(store, json.dumps({"pid": 1, "time": at, **named}).encode()).number

    claim(None, 0.0)  # of a process in no pod, and of one that wrote something else
    Epoch.claim(store, b"me")
    assert find_successor(store, "a", 5.0) == ""
    claim("a", 10.0)
    assert find_successor(store, "a", 11.0) == "" and find_successor(store, "b", 11.0) == "", (
        "one that is new may claim"
    )
    claim("b", 20.0)
    assert "pod b" in find_successor(store, "a", 21.0) and "epoch 4" in find_successor(store, "a", 21.0)
    assert find_successor(store, "b", 21.0) == "" and find_successor(store, "", 21.0) == ""
    # It had begun to claim before it could know: its successor is none of its successors.
    claim("a", 22.0)
    assert find_successor(store, "b", 23.0) == "" and find_successor(store, "a", 23.0)
    claim("b", 400.0)
    assert "epoch 6" in find_successor(store, "a", 900.0)
    # Not for ever: the one that came later may be the one that is gone.
    assert find_successor(store, "a", 1001.0) == ""
    claim(None, 1002.0)
    assert find_successor(store, "b", 1003.0) == "" and find_successor(store, "a", 1003.0) == ""


def test_an_epoch_above_those_that_others_have_heard_of_leaves_no_gap(store: Store) -> None:
    first = Epoch.claim(store, b"me")
    assert Epoch.claim(store, b"me", above=5).number == 6
    with pytest.raises(HigherEpoch):
        first.check()
    assert Epoch.claim(store, above=3).number == 7


def test_a_killed_writer_leaves_a_temporary_file_that_is_no_object(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    store.create("records/a", b"x")
    leftover = tmp_path / "s" / "records" / ".b.0123456789ab.tmp"
    leftover.write_bytes(b"half")
    assert store.list("records") == ["records/a"]
    assert store.remove_leftovers() == 1 and not leftover.exists()


@pytest.mark.promise(
    "Written files (store, weights, optimizer state, job) belong to their owner alone, and on a volume of "
    "a pod with an fsGroup to that group",
    section="Hostile callers",
)
def test_a_store_on_a_disk_is_its_owners_alone(tmp_path: Path) -> None:
    made = DirectoryStore(tmp_path / "run" / "store")
    made.create("states/1", b"a")
    made.replace("tape/1", b"b")
    for each in (tmp_path / "run").rglob("*"):
        assert each.stat().st_mode & 0o077 == 0, each
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_a_store_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(files.NotWritable, match="not a directory"):
        DirectoryStore(tmp_path / "file")
    for scheme in ("nosuch", "memory", "https"):
        with pytest.raises(files.NotWritable, match=rf"store {scheme}://….*file://, s3://, gs://, az://"):
            open_store(f"{scheme}://user:secret@host/x")
    assert isinstance(open_store(f"file://{tmp_path}/s"), DirectoryStore)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], capture_output=True, timeout=10)
    if made.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True, timeout=10)


def test_a_full_disk_leaves_what_was_there_and_no_halves(small_disk: Path) -> None:
    store = DirectoryStore(small_disk / "s")
    store.create("records/a", b"old")
    for write in (store.replace, store.create):
        name = "records/a" if write == store.replace else "records/b"
        with pytest.raises(files.DiskFull, match=r"disk full: 1000000 bytes are needed .* bytes are free"):
            write(name, bytes(1_000_000))
    assert store.read("records/a", 10) == b"old"
    assert os.listdir(small_disk / "s" / "records") == ["a"]
    store.replace("records/a", b"new")
    assert store.read("records/a", 10) == b"new"


def test_a_syncer_in_a_pod_that_was_succeeded_ends_and_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a node that is cut off, where a kubelet that nobody reaches starts it again and again."""
    from diloco_protocol.spec.load import job_to_json, parse_job
    from diloco_syncer.__main__ import main
    from operator_world import job_object

    document = job_object() | {"metadata": {"name": "job"}}
    (tmp_path / "job.json").write_text(job_to_json(parse_job(json.dumps(document))))
    (tmp_path / "key").write_text("00" * 32 + "\n")
    store = open_store(str(tmp_path / "store"))
    for pod in ("old", "new"):
        Epoch.claim(store, json.dumps({"pod": pod, "time": time.time()}).encode())
    monkeypatch.setenv("DILOCO_POD", "old")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # which main sets for its process
    words = ["--job", "job.json", "--store", "store", "--control-key-file", "key"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diloco_syncer.__main__._log", lambda *_: None)
    assert main(words) == 3
    assert "pod new, which came after this one, has claimed epoch 2" in caplog.text
    assert len(store.list("epochs")) == 2
