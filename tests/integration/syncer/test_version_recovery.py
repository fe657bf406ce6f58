"""A store loses its newest content, and the learners that live on bring it back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_process import Rows, Syncer, make_job, one_step, small_model, until

from diloco_protocol.arrays import codec
from diloco_syncer.store import tape
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import MergeRecord, record_name, theta_digest
from diloco_worker import Learner

pytestmark = pytest.mark.timeout(120)

SYNC = {
    "staleness": {"maxSteps": 100_000, "maxVersions": 100_000},
    "compression": {"up": "float32", "down": "float32"},
    "heartbeat": {"intervalSeconds": 0.1, "timeoutSeconds": 3},
}


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Syncer]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Syncer(tmp_path, make_job({**SYNC, **getattr(request, "param", {})}, {"steps": 1_000_000}))
    made.start()
    yield made
    made.stop()
    torch.set_num_threads(threads)


def copy_of(service: Syncer) -> Path:
    """The store as it is at this moment."""
    assert service.process is not None
    copy = service.folder / "copy"
    service.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, service.process.pid, os.WSTOPPED)  # else a thread may still rename a file
    try:
        shutil.copytree(service.folder / "store", copy)
    finally:
        service.process.send_signal(signal.SIGCONT)
    return copy


def put_back(service: Syncer, copy: Path, but: tuple[str, ...]) -> Path:
    """The store is the copy again, but for these of its names; returns what it was."""
    store, newest = service.folder / "store", service.folder / "newest"
    store.rename(newest)
    shutil.copytree(copy, store)
    for name in but:
        if (store / name).is_dir():
            shutil.rmtree(store / name)
            shutil.copytree(newest / name, store / name)
        else:
            shutil.copy(newest / name, store / name)
    return newest


def status(service: Syncer) -> dict[str, Any]:
    """Empty while it begins again."""
    with contextlib.suppress(OSError):
        return service.status()
    return {}


def slot_is(service: Syncer, state: str) -> bool:
    return any(row["state"] == state for row in status(service).get("slots", [])[:1])


def lines(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (store / "tape.jsonl").read_text(encoding="utf-8").splitlines()]


def broadcast_of(store: Path, fragment: int, version: int, service: Syncer) -> str:
    """Digest of a version as learners have it."""
    name = record_name(fragment, version)
    theta = MergeRecord.unpack((store / name).read_bytes(), name).theta
    down = json.loads(service.job_file.read_text(encoding="utf-8"))["spec"]["sync"]["compression"]["down"]
    encoding = down if down == "bfloat16" else "float32"
    return theta_digest(codec.decode(codec.encode(theta, encoding), encoding, theta.size))


@pytest.mark.parametrize(
    ("service", "epochs_too"),
    [
        ({}, False),
        ({}, True),
        ({"deterministic": True, "overlap": 2}, False),
        ({"compression": {"up": "int4", "errorFeedback": True, "down": "bfloat16"}}, True),
        ({"compression": {"up": "int8", "down": "delta-int8"}}, False),
    ],
    indirect=["service"],
    ids=["records and states", "epochs too", "deterministic", "bfloat16", "deltas"],
)
def test_records_states_and_perhaps_epochs_are_gone(service: Syncer, epochs_too: bool) -> None:
    """The newest records and states are lost; with ``epochs_too`` the whole store is an older copy,
    so that its next epoch is one that the learner has seen. Not a token is lost."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    copy = newest = None
    before = 0
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows(40_000)):
            loss = one_step(model, optimizer, batch)
            learner.after_step(tokens=batch.numel(), loss=loss)
            time.sleep(0.002)
            if learner.step % 20:
                continue
            now = {"merges": 0} | status(service)
            if copy is None and now["merges"] >= 4:
                copy = copy_of(service)
                if epochs_too:
                    service.kill()
                    service.start()
            elif copy and newest is None and now["merges"] >= 16:
                before = now["merges"]
                service.kill()
                newest = put_back(service, copy, () if epochs_too else ("epochs", "tape.jsonl"))
                service.start()
            elif newest and now["merges"] >= before + 6 and slot_is(service, "active"):
                os.kill(os.getpid(), signal.SIGTERM)
    assert newest is not None
    until(lambda: slot_is(service, "drained"), "the slot to be free")
    report = service.report()
    assert report["tokens"]["trained"] == learner.step * 32
    assert report["tokens"]["dropped"] == 0
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] == learner.step * 32
    told = lines(service.folder / "store")
    # What was taken is what was lost, at the broadcast's precision bit for bit.
    taken = [row for row in told if row["kind"] == "recovered-from-learner"]
    assert sorted(row["fragment"] for row in taken) == [0, 1, 2]
    for row in taken:
        assert row["follows"] < row["version"]
        assert row["result"] == broadcast_of(newest, row["fragment"], row["version"], service)
    assert any(row["kind"] == "discarded" for row in told) != epochs_too
    assert tape.verify(DirectoryStore(service.folder / "store")) == len(told)
    log = (service.folder / "syncer.log").read_text(encoding="utf-8")
    assert "beginning again from the store" in log and "Traceback" not in log
    assert report["merges"] >= before + 6


def test_a_wiped_store_is_refused_in_words(service: Syncer) -> None:
    """A syncer with an empty store does not begin the job anew under a learner that is far ahead."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    log = service.folder / "syncer.log"
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        wiped = False
        for batch in learner.batches(Rows(40_000)):
            loss = one_step(model, optimizer, batch)
            learner.after_step(tokens=batch.numel(), loss=loss)
            time.sleep(0.002)
            if learner.step % 20:
                continue
            if not wiped and service.status()["merges"] >= 4:
                wiped = True
                service.kill()
                (service.folder / "store").rename(service.folder / "aside")
                service.start()
                until(lambda: "joins" in log.read_text().split("serving on")[-1], "the learner to come back")
                time.sleep(0.5)
                assert not service.status()["versions"], "nobody was asked for version 0"
                # It goes on alone, and as soon as the store is there again, with everybody.
                service.kill()
                shutil.rmtree(service.folder / "store")
                (service.folder / "aside").rename(service.folder / "store")
                service.start()
                wiped_at = learner.step
            if wiped and learner.step > wiped_at + 100 and slot_is(service, "active"):
                os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: slot_is(service, "drained"), "the slot to be free")
    assert service.report()["tokens"]["dropped"] == 0
