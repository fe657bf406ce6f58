"""The ranks of a learner, started by torchrun as in its pods: exit codes, drains, probes, and pods that come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from free_ports import free_port
from patience import on_started, wait_for_end, wait_until

RANK = """
import os, signal, sys, time
from pathlib import Path
def note(what): Path(os.environ["NOTES"], f"{what}-{os.environ['DILOCO_ORDINAL']}-{os.environ['RANK']}").touch()
def drain(*_): note("drained"); sys.exit(0)
signal.signal(signal.SIGTERM, drain)
note("began")
for code in sys.argv[1:]:
    rank, code = code.split("=")
    if rank == os.environ["RANK"]: sys.exit(int(code))
time.sleep(600)
"""


class Pods:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.all = folder, free_port(), []  # type: ignore[var-annotated]
        (folder / "rank.py").write_text(RANK)

    def start(self, index: int, *codes: str, pods: int = 1, processes: int = 2, **env: str) -> subprocess.Popen[bytes]:
        shape = ["--processes", str(processes), "--pods", str(pods), "--address", "127.0.0.1", "--port", str(self.port)]
        command = [sys.executable, "-m", "diloco_worker.integrations.torchrun", *shape, "--"]
        command += [sys.executable, str(self.folder / "rank.py"), *codes]
        given = {"DILOCO_POD_INDEX": str(index), "DILOCO_DRAIN_SECONDS": "20", "NOTES": str(self.folder)}
        log = self.folder / f"{len(self.all)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, env={**os.environ, **given, **env}, stderr=file)
        on_started(process, log)
        self.all.append(process)
        return process

    def notes(self, what: str) -> set[str]:
        return {path.name.removeprefix(f"{what}-") for path in self.folder.glob(f"{what}-*")}

    def log(self, index: int) -> str:
        return (self.folder / f"{index}.log").read_text()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As with the pod: the program and its ranks."""
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.Error:
            family = []
        for one in family:
            one.kill()
        process.wait()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    found = Pods(tmp_path)
    yield found
    for process in found.all:
        found.kill(process)


def test_the_code_of_the_rank_that_failed_first_is_the_pods(pods: Pods) -> None:
    assert wait_for_end(pods.start(3, "1=6")) == 6
    assert pods.notes("began") == {"3-0", "3-1"}
    assert "rank 1 ended first of this pod's ranks, with exit code 6" in pods.log(0)
    assert wait_for_end(pods.start(3, "0=7", "1=5")) == 5, "7 says that another rank has ended"


def test_ranks_drain_when_the_pod_is_told_to_end(pods: Pods) -> None:
    pod = pods.start(0)
    wait_until(lambda: pods.notes("began") == {"0-0", "0-1"}, "both ranks", pod)
    pod.send_signal(signal.SIGTERM)
    assert wait_for_end(pod) == 128 + signal.SIGTERM
    assert pods.notes("drained") == {"0-0", "0-1"}


def test_two_pods_are_one_learner_and_the_second_answers_probes(pods: Pods) -> None:
    address = f"127.0.0.1:{free_port()}"
    one, two = pods.start(4, pods=2), pods.start(5, pods=2, DILOCO_STATUS=address)
    wait_until(lambda: pods.notes("began") == {"2-0", "2-1", "2-2", "2-3"}, "four ranks", one, two)
    for path in ("livez", "readyz", "metrics"):
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=10) as answer:
            assert answer.status == 200
    for pod in (two, one):
        pod.send_signal(signal.SIGTERM)
    assert [wait_for_end(pod) for pod in (one, two)] == [143, 143]


def test_a_pod_that_waits_for_the_others_ends_at_once_when_told(pods: Pods) -> None:
    pod = pods.start(0, pods=2)
    wait_until(lambda: _listens(pod.pid, pods.port), "the place where pods meet", pod)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=10) == 143, "no line of Python runs while it waits"
    assert not pods.notes("began")


def _listens(pid: int, port: int) -> bool:
    return any(c.laddr.port == port for c in psutil.Process(pid).net_connections() if c.laddr)


def test_a_pod_that_is_back_waits_for_the_end_of_the_life_that_it_was_in(pods: Pods) -> None:
    one, two = pods.start(0, pods=2, processes=1), pods.start(1, pods=2, processes=1)
    wait_until(lambda: pods.notes("began") == {"0-0", "0-1"}, "two ranks", one, two)
    pods.kill(two)
    (pods.folder / "began-0-1").unlink()
    back = pods.start(1, pods=2, processes=1)
    wait_until(lambda: "this pod is back, and the learner's other ranks have not ended yet" in pods.log(2), "", back)
    assert pods.notes("began") == {"0-0"}
    pods.kill(one)
    again = pods.start(0, pods=2, processes=1)
    wait_until(lambda: pods.notes("began") == {"0-0", "0-1"}, "two ranks", back, again)
