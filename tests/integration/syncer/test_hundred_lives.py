"""Lives of a real syncer, each killed inside an operation of its store, or on a disk that fails for a while."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import faulty_syncer
import grpc
import pytest
from faulty_syncer import CALLS, ERRORS, KILLS, Fault
from forked import ForkedProcess, fork
from learner_process import Syncer, make_job

from diloco_syncer.audit.store_audit import audit_store
from diloco_syncer.store import records
from diloco_syncer.store.directory import DirectoryStore
from patience import wait_until

LIVES = int(os.environ.get("SYNCER_LIVES", "100"))
TOKENS = 32  # of a step
SYNC = {
    "staleness": {"maxSteps": 1_000_000, "maxVersions": 1_000_000},
    "compression": {"up": "float32", "down": "float32"},
    "heartbeat": {"intervalSeconds": 0.1, "timeoutSeconds": 3600},
}


class Mortal(Syncer):
    """A syncer whose lives end as the test says, and what it has promised in them."""

    def __init__(self, folder: Path) -> None:
        service = {"checkpoint": {"everySeconds": 2, "keep": 1}}
        super().__init__(folder, make_job(SYNC, {"steps": 10_000_000}, learners=2, service=service))
        self.told = folder / "fault-happened"
        self.versions = [0, 0, 0]  # that were shown
        self.digests: dict[str, str] = {}  # of each record that was there between two lives
        self.ends: Counter[str] = Counter()

    def live(self, fault: Fault, seconds: float) -> None:
        """One life: until it is killed by the fault, or from outside when the fault is over or does not come."""
        for path in (self.address_file, self.told):
            path.unlink(missing_ok=True)
        words = ["--job", self.job_file, "--store", self.folder / "store", "--address-file", self.address_file]
        words += ["--control-key-file", self.folder / "control.key"]
        program = [faulty_syncer.__file__, fault.to_json(), self.told, *words]
        self.process = fork([*map(str, program)], {}, self.folder / "syncer.log")
        began, over = time.monotonic(), 0.0
        while self.process.poll() is None:
            self.look()
            if self.told.exists() and not over:
                over = time.monotonic() + fault.seconds + 1.0
            if over and time.monotonic() > over and fault.what in ERRORS:
                break
            if time.monotonic() > began + seconds and self.versions_now():
                break
            time.sleep(0.05)
        within = self.told.exists() and fault.what in KILLS
        if within:
            self.process.wait()
        self.ends[f"{fault.what} {fault.call}" if self.told.exists() else "from outside"] += 1
        code = self.process.poll()
        self.stop()
        assert code in (None, -9, 4), f"{fault}: ended with {code}"  # 4: the store cannot be used
        self.compare_records()

    def versions_now(self) -> list[int]:
        with contextlib.suppress(grpc.RpcError, OSError):  # it has not begun, or is gone
            return list(self.status()["versions"])
        return []

    def look(self) -> None:
        """What it shows never goes back, over all its lives."""
        if self.address_file.exists() and (now := self.versions_now()):
            assert all(a <= b for a, b in zip(self.versions, now, strict=True)), (self.versions, now)
            self.versions = now

    def compare_records(self) -> None:
        """No version was made anew with other values."""
        store = DirectoryStore(self.folder / "store")
        for name in store.list("records"):
            digest = str(records.read_body(store, name, "merge")["digest"])
            assert self.digests.setdefault(name, digest) == digest, name


def drain(learner: ForkedProcess, syncer: Mortal) -> None:
    learner.terminate()
    wait_until(lambda: learner.poll() is not None, "the drain", learner, learner.log)
    assert learner.returncode == 0, syncer.folder


def draw(chance: random.Random) -> Fault:
    call, at = chance.choice(CALLS), chance.choice([1, 2, 3, 5, 8, 13, 21, 34, 55])
    if chance.random() < 0.25:
        return Fault(call, at, chance.choice(ERRORS), chance.choice([0.3, 1.0, 3.0]))
    return Fault(call, at, chance.choice(KILLS))


@pytest.mark.promise(
    "A hundred lives of a real syncer, killed inside write, fsync, link, rename and unlink, and with a disk that is "
    "full or broken, lose and double nothing that was acknowledged: each token counts once, and the audit holds",
    section="Syncer",
)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_lives_lose_and_double_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(int(os.environ.get("SYNCER_LIVES_SEED", "1")))
    syncer, steps = Mortal(tmp_path), 0
    learners = [syncer.learner(ordinal, 1_000_000) for ordinal in (0, 1)]

    def collect(ordinal: int) -> int:
        return int(json.loads(syncer.metrics_file(ordinal).read_text())["steps_made"])

    try:
        for life in range(LIVES):
            syncer.live(draw(chance), seconds=6.0)
            if life % 10 == 9:  # one leaves: its offers are acknowledged in this life or a later one, and another comes
                learners[life // 10 % 2].terminate()
            for ordinal, learner in enumerate(learners):
                if learner.poll() is not None:
                    assert learner.returncode == 0, f"life {life}: learner {ordinal} ended with {learner.returncode}"
                    steps += collect(ordinal)
                    learners[ordinal] = syncer.learner(ordinal, 1_000_000)
        syncer.start()
        for ordinal, learner in enumerate(learners):
            drain(learner, syncer)
            steps += collect(ordinal)
        wait_until(lambda: all(row["state"] == "drained" for row in syncer.status()["slots"]), "the drains")
        report = syncer.report()
        syncer.look()
        assert sum(syncer.versions) == report["merges"]
    finally:
        for learner in learners:
            learner.kill()
        syncer.stop()
    given_up = check(syncer, report, steps)
    with capsys.disabled():
        ends = ", ".join(f"{name}: {count}" for name, count in sorted(syncer.ends.items()))
        print(f"\n{LIVES} lives, {report['merges']} merges, {steps} steps; {ends}; given up: {given_up}")


def check(syncer: Mortal, report: dict[str, Any], steps: int) -> dict[int, int]:
    """Of each fragment every trained token counts once: it is merged, or it waits, or the learner itself has dropped it
    (``overlap``: its snapshot was one of more than it keeps). But for what learners were told of no acknowledgement:
    returns the tokens that they gave up when they left."""
    log = (syncer.folder / "syncer.log").read_text(encoding="utf-8")
    given_up = Counter[int]()
    for fragment, tokens in re.findall(r"fragment (\d+): (\d+) tokens were not taken over", log):
        given_up[int(fragment)] += int(tokens)
    parts = Counter[int]()
    for row in report["ledger"]:
        parts[row["fragment"]] += row["merged"] + row["pending"] + row["reasons"].get("overlap", 0)
    for fragment in range(3):
        trained = steps * TOKENS
        assert trained - given_up[fragment] <= parts[fragment] <= trained, (fragment, parts, given_up, trained)
    audit = audit_store(DirectoryStore(syncer.folder / "store"), "small")
    assert audit.holds and audit.merges >= report["merges"] > 0, audit
    assert "Traceback" not in log
    return dict(given_up)
