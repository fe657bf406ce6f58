"""Two operators on a real API server: one leads, the other follows when its process stands still, and is followed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_operator.leadership.election import LEASE_SECONDS

from .clusters import Cluster, until
from .operator_shell import NS, get, job, key_file, named

pytestmark = pytest.mark.timeout(300)
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NS}/leases/trial"


class Operator:
    """``python -m diloco_operator`` as a process beside the cluster."""

    def __init__(self, kube: Cluster, folder: Path, name: str) -> None:
        self.log = folder / f"{name}.log"
        words = ("--namespace", NS, "--lease", "trial", "--http", "127.0.0.1:0", "--log-format", "text")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "diloco_operator", *words, "--key-file", str(key_file(folder))],
                env={**os.environ, "KUBECONFIG": str(kube.kubeconfig)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def operators(kube: Cluster, tmp_path: Path) -> Iterator[list[Operator]]:
    made = [Operator(kube, tmp_path, "first")]
    try:
        until("the first leads", lambda: made[0].said("this operator leads"), 60)
        made.append(Operator(kube, tmp_path, "second"))
        until("the second stands by", lambda: made[1].said("standing by"), 60)
        yield made
    finally:
        for one in made:
            one.end()


def lease(kube: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = get(kube, LEASE)["spec"]
    return found


def looked_at(kube: Cluster, name: str) -> int:
    return int(get(kube, named("dilocojobs", name)).get("status", {}).get("observedGeneration") or 0)


@pytest.mark.promise("A stopped leader (SIGSTOP) gets a successor, and writes nothing when it resumes")
def test_a_leader_that_is_stopped_is_followed_and_stays_quiet_when_it_goes_on(
    kube: Cluster, operators: list[Operator]
) -> None:
    first, second = operators
    kube.apply(job("led"))
    kube.kubectl("patch", "dj", "led", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    generation = get(kube, named("dilocojobs", "led"))["metadata"]["generation"]
    until("the leader looks at it", lambda: looked_at(kube, "led") == generation, 60)
    holder = lease(kube)["holderIdentity"]
    first.process.send_signal(signal.SIGSTOP)
    kube.kubectl("patch", "dj", "led", "--type=merge", "-p", '{"spec": {"ttlSecondsAfterFinished": 5000}}')
    began = time.monotonic()
    until("another leads", lambda: lease(kube)["holderIdentity"] != holder, 90)
    assert time.monotonic() - began > LEASE_SECONDS / 3, "not while it may still act"
    taken = lease(kube)
    until("the other looks at it", lambda: looked_at(kube, "led") == generation + 1, 60)
    first.process.send_signal(signal.SIGCONT)
    until("it knows that it leads no more", lambda: first.said("does not lead any more"), 60)
    assert lease(kube)["holderIdentity"] == taken["holderIdentity"]
    assert lease(kube)["leaseTransitions"] == taken["leaseTransitions"] == 2
    second.end()
    until("the first leads again", lambda: lease(kube)["holderIdentity"] == holder, 60)
    assert second.said("gave the Lease")
