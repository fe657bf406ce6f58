"""Learners of several ranks on all CUDA devices that torch finds (`make gpu-check`, docs/gpu-checklist.md). With one
device two ranks share it, by gloo, and without any two ranks run on the CPU, by gloo: then no GPU is checked."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import Run, check_ledger

DEVICES = torch.cuda.device_count()
RANKS = max(2, DEVICES)
BACKEND = "gloo" if DEVICES < 2 else "nccl"
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "sharded_loop.py"
OWN = f"""
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: own}}
spec:
  training: {{batch: {{sequences: {2 * RANKS}}}, stop: {{steps: 60}}}}
  sync: {{fragments: 3, every: 6, overlap: 1}}
  learners: {{processes: {RANKS}, command: [python, {EXAMPLE}]}}
  regions: [{{learners: 1}}]
"""


def start_group(start: Callable[..., Run], parallel: str, steps: int) -> Run:
    """A group on all devices beside a single process, which merge together or not at all."""
    group = f"{{name: group, learners: 1, processes: {RANKS}, parallel: {parallel}}}"
    words = [f"regions=[{group}, {{name: alone, learners: 1}}]", "sync.quorum=2"]
    words += [f"training.batch.sequences={2 * RANKS}", f"training.device={'cuda' if DEVICES else 'cpu'}"]
    return start(*[word for one in words for word in ("--set", one)], steps=steps)


def check_end(run: Run) -> None:
    """The job is complete, and the ranks found each other as this machine lets them."""
    assert run.ends() == 0, run.everything()
    report = run.report()
    check_ledger(report)
    assert report["outcome"] == "complete" and report["final_loss"] < report["initial_loss"] - 0.5
    log = (run.workdir / "logs" / "group-0.log").read_text()
    assert f"of {RANKS} ranks, by " in log and BACKEND in log, log


def test_ranks_train_beside_a_single_process_and_come_back_when_one_is_killed(start: Callable[..., Run]) -> None:
    run = start_group(start, "{}", steps=150)
    run.waits_for("first-merge: group-0")
    (last,) = [one for rank, one in run.ranks("group").items() if rank == RANKS - 1]
    last.send_signal(signal.SIGKILL)
    run.until(lambda: run.output.count("joined: group-0") == 2, "the learner's return")
    check_end(run)


def test_copies_of_a_model_train_in_ranks(start: Callable[..., Run]) -> None:
    """HSDP where there are four ranks or more, in an even number; else a copy in each rank."""
    check_end(start_group(start, f"{{replicate: {2 if RANKS % 2 == 0 else RANKS}}}", steps=60))


def test_a_sharded_loop_of_ones_own_trains(start: Callable[..., Run]) -> None:
    if DEVICES == 1:
        pytest.skip("there is one CUDA device only")  # and NCCL refuses two ranks on it
    run = start(text=OWN)
    assert run.ends() == 0, run.everything()
    report = run.report()
    check_ledger(report, len(report["ledger"]))
    assert report["outcome"] == "complete" and report["tokens"]["dropped"] == 0
