"""A store loses its newest content, and the learners that live on bring it back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from operator import ge, gt
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_process import Rows, Syncer, make_job, one_step, small_model

import tape_reader
from diloco_protocol.arrays import codec
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import MergeRecord, parse_record_name, record_name, theta_digest
from diloco_worker import Learner
from patience import wait_until

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
    sync = {**SYNC, **getattr(request, "param", {})}
    learners = sync.pop("learners", 1)
    made = Syncer(tmp_path, make_job(sync, {"steps": 1_000_000}, learners))
    made.start()
    yield made
    made.stop()
    torch.set_num_threads(threads)


def copy_of(service: Syncer) -> Path:
    """The store as it is at this moment."""
    assert service.process is not None
    copy = service.folder / "copy"
    service.process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{service.process.pid}/task")  # one that runs may still rename a file

    def stands_still() -> bool:
        try:
            return all(") T " in (thread / "stat").read_text() for thread in threads.iterdir())
        except OSError:  # a thread that has ended meanwhile
            return False

    wait_until(stands_still, "the stop")
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
    return list(tape_reader.read(DirectoryStore(store)))


def broadcast_of(store: Path, fragment: int, version: int, service: Syncer) -> str:
    """Digest of a version as learners have it."""
    name = record_name(fragment, version)
    theta = MergeRecord.unpack((store / name).read_bytes(), name).theta
    down = json.loads(service.job_file.read_text(encoding="utf-8"))["spec"]["sync"]["compression"]["down"]
    encoding = down if down == "bfloat16" else "float32"
    return theta_digest(codec.decode(codec.encode(theta, encoding), encoding, theta.size))


def recorded_versions(store: Path) -> list[int]:
    """The newest version of each fragment of which there is a record."""
    newest = [0] * 3
    for path in (store / "records").iterdir():
        if found := parse_record_name(f"records/{path.name}"):
            newest[found[0]] = max(newest[found[0]], found[1])
    return newest


def held_versions(learner: Learner) -> list[int]:
    """Of each fragment, what has come to it of what the syncer announced: a merge is one before its broadcast is."""
    return [fragment.base_version for fragment in learner._synchronizer.adoption.report().fragments]


@pytest.mark.promise(
    "Versions that a store lost are restored from a learner without the loss of a token, whatever the "
    "encoding, also if the store's epochs went back"
)
@pytest.mark.parametrize(
    ("service", "epochs_too"),
    [
        pytest.param({}, False, id="records and states", marks=pytest.mark.slow),
        pytest.param({}, True, id="epochs too", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param({"deterministic": True, "overlap": 2}, False, id="deterministic", marks=pytest.mark.slow),
        pytest.param(
            {"compression": {"up": "int4", "errorFeedback": True, "down": "bfloat16"}},
            True,
            id="bfloat16",
            marks=pytest.mark.slow,
        ),
        pytest.param({"compression": {"up": "int8", "down": "delta-int8"}}, False, id="deltas"),
    ],
    indirect=["service"],
)
def test_records_states_and_perhaps_epochs_are_gone(service: Syncer, epochs_too: bool) -> None:
    """The newest records and states are lost; with ``epochs_too`` the whole store is an older copy,
    so that its next epoch is one that the learner has seen. Not a token is lost."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    copy = newest = None
    copied = list[int]()
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
                copied = recorded_versions(copy)
                if epochs_too:
                    service.kill()
                    service.start()
            elif copy and newest is None and now["merges"] >= 16 and all(map(gt, held_versions(learner), copied)):
                # Of every fragment something is lost that the learner holds.
                before = now["merges"]
                service.kill()
                newest = put_back(service, copy, () if epochs_too else ("epochs", "tape"))
                service.start()
            elif newest and now["merges"] >= before + 6 and slot_is(service, "active"):
                os.kill(os.getpid(), signal.SIGTERM)
    assert newest is not None
    wait_until(lambda: slot_is(service, "drained"), "the slot to be free")
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
    assert tape_reader.verify(DirectoryStore(service.folder / "store")) == len(told)
    log = (service.folder / "syncer.log").read_text(encoding="utf-8")
    assert "beginning again from the store" in log and "Traceback" not in log
    assert report["merges"] >= before + 6


@pytest.mark.parametrize(
    "service",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"compression": {"up": "int8", "down": "delta-int8"}},
        {"fragments": 3, "every": 60},
    ],
    indirect=True,
    ids=["every fragment merged", "deltas", "one fragment merged"],
)
def test_an_emptied_store_is_rebuilt_from_the_learner(service: Syncer) -> None:
    """The store is gone while the learner lives: its versions come back bit for bit, and not a token is lost."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    every = json.loads(service.job_file.read_text(encoding="utf-8"))["spec"]["sync"]["every"]
    enough = 1 if every > 50 else 6
    emptied, versions = service.folder / "emptied", list[int]()
    before = 0
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows(40_000)):
            loss = one_step(model, optimizer, batch)
            learner.after_step(tokens=batch.numel(), loss=loss)
            time.sleep(0.002)
            if learner.step % 20:
                continue
            now = {"merges": 0} | status(service)
            if not versions and now["merges"] >= enough and any(held_versions(learner)):
                versions = now["versions"]
                before = now["merges"]
                service.kill()
                (service.folder / "store").rename(emptied)
                service.start()
            elif versions and now["merges"] >= before + 3 and slot_is(service, "active"):
                os.kill(os.getpid(), signal.SIGTERM)
    assert versions
    wait_until(lambda: slot_is(service, "drained"), "the slot to be free")
    report = service.report()
    assert report["tokens"]["trained"] == learner.step * 32
    assert report["tokens"]["dropped"] == 0
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] == learner.step * 32
    told = lines(service.folder / "store")
    taken = {row["fragment"]: row for row in told if row["kind"] == "recovered-from-learner"}
    merged = [p for p, version in enumerate(versions) if version > 1]
    assert set(merged) <= set(taken) <= set(range(3)) and taken, "what was merged came back"
    for fragment, row in taken.items():
        # The newest may have been on its way to the learner when the syncer was killed.
        assert row["version"] >= versions[fragment] - 1 and row["follows"] == 0
        assert row["result"] == broadcast_of(emptied, fragment, row["version"], service)
    assert tape_reader.verify(DirectoryStore(service.folder / "store")) == len(told)
    log = (service.folder / "syncer.log").read_text(encoding="utf-8")
    assert "the store has lost data (it is empty, and local-0 holds merged versions)" in log and "Traceback" not in log
    assert "an empty store is rebuilt from what learners hold" in log


@pytest.mark.promise("An emptied store is rebuilt from the learners, whichever returns first")
@pytest.mark.slow
@pytest.mark.parametrize("service", [{"learners": 2}], indirect=True)
def test_an_emptied_store_is_rebuilt_from_two_learners(service: Syncer) -> None:
    """Each goes on in its slot and its tenure, and their tokens are all accounted for."""
    learners = [service.learner(ordinal, 40_000) for ordinal in (0, 1)]
    try:
        # Early: one of them may hold no merged version yet.
        wait_until(
            lambda: status(service).get("merges", 0) >= 6 and all(row["process"] for row in service.status()["slots"]),
            "some merges",
        )
        was = service.status()
        service.kill()
        (service.folder / "store").rename(service.folder / "emptied")
        service.start()
        wait_until(lambda: status(service).get("merges", 0) >= was["merges"] + 6, "merges after the rebuild")
        wait_until(lambda: service.status()["quorum"]["active"] == 2, "both learners")
        wait_until(lambda: at_least(service.status()["versions"], was["versions"]), "all versions that there were")
        now = service.status()
    finally:
        for learner in learners:
            learner.terminate()
        for learner in learners:
            learner.wait()
    rows = {row["slot"]: row for row in now["slots"]}
    for row in was["slots"]:
        after = rows[row["slot"]]
        assert (after["process"], after["state"]) == (row["process"], "active")
    assert now["tokens"]["dropped"] == 0
    wait_until(
        lambda: all(row["state"] == "drained" for row in status(service).get("slots", [{"state": ""}])), "the drain"
    )
    report = service.report()
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    # Whatever a process has ever done is its slot's: it began no new tenure.
    made = [json.loads(service.metrics_file(ordinal).read_text())["steps_made"] for ordinal in (0, 1)]
    assert sorted(row["steps"] for row in report["learners"]) == sorted(made)


def at_least(numbers: list[int], bounds: list[int]) -> bool:
    return len(numbers) == len(bounds) and all(map(ge, numbers, bounds))
