"""The baselines of ``bench/chaos.py`` as real processes: each loses what it must, and goes on."""

from __future__ import annotations

import asyncio
import sys
from itertools import groupby
from pathlib import Path

import pytest
from runs import JOB

from diloco.local.chaos.schedule import parse
from diloco.validate import read_job_file
from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from lab.compare.arm import ArmResult, measure_arm, read_rows
from lab.compare.baselines import run_baseline
from lab.compare.plan import Comparison, Pace, job_overrides

STEP, TOKENS = 0.1, 4 * 32

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(200)]


def train(name: str, folder: Path, chaos: str, seconds: float) -> ArmResult:
    job_file = folder / "job.yaml"
    job_file.write_text(JOB.format(steps=1, learners=2))
    words = " ".join(f"word{n % 97} and {n * 7919 % 1000}" for n in range(20_000))
    (folder / "corpus.txt").write_text(words)
    overrides = job_overrides([], seconds, 0)
    plan = Comparison(
        job_file,
        overrides,
        read_job_file(job_file, overrides),
        parse(chaos),
        seconds=seconds,
        mtbf_seconds=seconds,
        pace=Pace(STEP, TOKENS),
    )
    told: list[float] = []
    record = asyncio.run(run_baseline(name, plan, folder / "arm", told.append))
    assert max(told) > seconds / 2, "it says how far it is"
    return measure_arm(name, plan, record)


def test_rigid_waits_for_the_machine_and_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    got = train("ddp", tmp_path, "2s:kill:learner-1:1.5s", seconds=20.0)
    (fault,) = got.recoveries
    assert fault.stall_seconds >= 1.4, "nobody trains while one machine is away"
    assert fault.back_seconds is not None and got.uptime < 0.95
    # Checkpoints are some steps apart. A step that one rank ended and the killed one did not is in the state.
    assert -TOKENS <= got.trained_tokens - got.kept_tokens <= 10 * 2 * TOKENS
    assert got.bytes > 0 and got.losses[-1][2] < got.losses[0][2]
    assert got.losses[-1][0] == got.kept_tokens


def test_elastic_goes_on_without_the_machine_and_with_it_again(tmp_path: Path) -> None:
    got = train("ddp-elastic", tmp_path, "3s:kill:learner-1:12s", seconds=35.0)
    worlds = {row["time"]: row["world"] for row in read_rows(tmp_path / "arm" / "steps-0.jsonl")}
    groups = [world for world, _ in groupby(worlds[time] for time in sorted(worlds))]
    order = iter(groups)  # a rank that is silent for a while makes further groups
    found = all(world in order for world in (2, 1, 2))
    assert found, f"the survivor trains alone while the other is away, and both do after its return: {groups}"
    (fault,) = got.recoveries
    assert fault.stall_seconds < 12.0 and fault.back_seconds is not None
    # The survivor kept what it had at each change of the group: at most the step in flight is lost, of each rank.
    assert abs(got.trained_tokens - got.kept_tokens) <= 2 * 2 * TOKENS
    steps = [row["step"] for row in read_rows(tmp_path / "arm" / "steps-0.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "no step is made twice"
    assert got.bytes > 0 and got.losses[-1][2] < got.losses[0][2]
