"""A job on bare machines, with certificates: served by one command, joined by others, one of which leaves
and one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import ENV, JOB

from diloco_protocol.spec.load import parse_job

WORDS = "the quick brown fox jumps over the lazy dog and runs away from the angry bear\n"


class Program:
    """One `diloco` command in a process of its own, its output in a file."""

    def __init__(self, folder: Path, name: str, *arguments: str | Path) -> None:
        self.log = folder / f"{name}.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco.main", *map(str, arguments)],
                cwd=folder,
                env=ENV,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ends(self, seconds: float = 60.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            for process in [*self.children(), psutil.Process(self.process.pid)]:
                process.kill()
            self.process.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    running: list[Program] = []

    def make(name: str, *arguments: str | Path) -> Program:
        running.append(Program(tmp_path, name, *arguments))
        return running[-1]

    yield make
    for program in running:
        program.close()


def certificates(folder: Path, job: Path) -> Path:
    for arguments in (["init", "--out", "pki"], ["issue", str(job), "--pki", "pki"]):
        command = [sys.executable, "-m", "diloco.main", "certs", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    return folder / "pki" / "default" / "tiny"


@pytest.mark.slow
@pytest.mark.timeout(300)  # whoever comes after a common end waits for states on disks, 90 s at most
def test_machines_join_leave_and_are_lost(tmp_path: Path, start: Callable[..., Program]) -> None:
    (tmp_path / "corpus.txt").write_text(WORDS * 2000)
    text = JOB.format(steps=1, learners=2).replace("stop: {steps: 1}", "stop: {tokens: 150000}")
    text = text.replace("[corpus.txt]", f"[{tmp_path}/corpus.txt]")
    job = tmp_path / "job.yaml"
    job.write_text(text)
    assert parse_job(text).spec.slots == 2
    pki = certificates(tmp_path, job)
    served = start(
        "served",
        "syncer",
        "serve",
        job,
        "--workdir",
        "hub",
        "--listen",
        "127.0.0.1:0",
        "--credentials",
        pki / "syncer",
        "--evaluator-credentials",
        pki / "learners",
    )
    address_file = tmp_path / "hub" / "address.json"
    last: dict[str, Any] = {}

    def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.out")))
            assert served.process.poll() is None, f"serve ended with {served.process.returncode}:\n{logs}"
            assert time.monotonic() < end, f"{what} did not come about in {seconds} s: {last}\n{logs}"
            time.sleep(0.05)

    def slots() -> list[dict[str, Any]]:
        address = json.loads(address_file.read_text())["http"]
        with urllib.request.urlopen(f"http://{address}/status", timeout=5) as page:
            last.update(json.load(page))
        found: list[dict[str, Any]] = last["slots"]
        return found

    until(address_file.exists, "the address file")
    sync = json.loads(address_file.read_text())["sync"]

    def join(name: str, *arguments: str | Path) -> Program:
        return start(name, "learner", "join", sync, "--credentials", pki / "learners", "--workdir", name, *arguments)

    # One has no job file: it gets the job from the hub, and its region from the certificate.
    leaving, killed = join("leaving"), join("killed", job, "--region", "local")
    until(lambda: all(slot["merged_pushes"] > 0 for slot in slots()), "a merge of both")
    leaving.process.send_signal(signal.SIGINT)  # Ctrl-C: it offers its work
    assert leaving.ends() == 0, leaving.output
    until(lambda: "drained" in [slot["state"] for slot in slots()], "the leaving one's end")
    (worker,) = [child for child in killed.children() if "diloco_worker" in " ".join(child.cmdline())]
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait(10)
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "its worker's end")
    third = join("third")
    assert served.ends(200) == 0, served.output
    assert third.ends() == 0, third.output
    report = json.loads((tmp_path / "hub" / "report.json").read_bytes())
    assert report["outcome"] == "complete" and report["final_loss"] is not None
    tokens = report["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"] >= 150_000
    assert sum(row["incarnations"] for row in report["learners"]) == 3
    dropped = {reason for row in report["ledger"] for reason in row["reasons"]}
    assert dropped <= {"died", "overlap", "stale"}, "who left in good order dropped nothing"
    handed = json.loads((tmp_path / "leaving" / "job.json").read_text())
    assert handed["metadata"]["name"] == "tiny"
    places = [json.loads((tmp_path / n / "place.json").read_text())["ordinal"] for n in ("leaving", "third")]
    assert len(set(places)) == 2
    for name in ("leaving", "killed", "third"):  # keys stay where they are
        for path in (tmp_path / name).rglob("*.json"):
            assert "PRIVATE KEY" not in path.read_text()
    # It is complete, and whoever comes now is told so.
    again = start(
        "again", "syncer", "serve", job, "--workdir", "hub", "--listen", "127.0.0.1:0", "--credentials", pki / "syncer"
    )
    assert again.ends() == 0 and "complete already" in again.output


def test_a_stranger_does_not_get_the_job(tmp_path: Path, start: Callable[..., Program]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(steps=1, learners=1))
    pki = certificates(tmp_path, job)
    served = start(
        "served", "syncer", "serve", job, "--workdir", "hub", "--listen", "127.0.0.1:0", "--credentials", pki / "syncer"
    )
    address_file = tmp_path / "hub" / "address.json"
    end = time.monotonic() + 60
    while not address_file.exists():
        assert served.process.poll() is None and time.monotonic() < end, served.output
        time.sleep(0.05)
    sync = json.loads(address_file.read_text())["sync"]
    plain = start("plain", "learner", "join", sync)
    assert plain.ends() == 1 and "gave no job" in plain.output
    (pki / "learners" / "join-token").write_text("guessed\n")
    wrong = start("wrong", "learner", "join", sync, "--credentials", pki / "learners")
    assert wrong.ends() == 1 and "token" in wrong.output
    other = tmp_path / "other"
    other.mkdir()
    strangers = certificates(other, job)
    stranger = start("stranger", "learner", "join", sync, "--credentials", strangers / "learners")
    assert stranger.ends() == 1 and "not believed" in stranger.output
