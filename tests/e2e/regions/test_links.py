"""5. Links as slow as `diloco plan` says that they may be, and slower."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest

from ..clusters import run
from ..jobs import Job, pod_template
from .world import EU, PROGRAM, US, RunJob, World

pytestmark = pytest.mark.timeout(1200)
SECONDS = 60.0  # of each measurement
# Two million parameters and short sequences: an exchange is large, a step is not.
MODEL = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@dataclass
class Pace:
    """Of all learners together, in some time. ``stalled``: the greatest share of a learner's time."""

    steps: float  # per second
    merges: float
    stalled: float
    step_seconds: float

    def row(self, what: str, against: Pace) -> str:
        return (
            f"{what:>22}  {self.steps:6.2f} steps/s (x {self.steps / against.steps:.2f})  {self.merges:5.2f} "
            f"merges/s (x {self.merges / against.merges:.2f})  stalled {self.stalled:.1%}"
        )


def pace(job: Job) -> Pace:
    """Of the next while."""
    first, began = job.training(), time.monotonic()
    time.sleep(SECONDS)
    last, took = job.training(), time.monotonic() - began
    before = {row["slot"]: row for row in first["slots"]}

    def grown(row: dict[str, float], key: str) -> float:
        return row[key] - before[int(row["slot"])][key]

    rows = last["slots"]
    return Pace(
        sum(grown(row, "steps") for row in rows) / took,
        (last["merges"] - first["merges"]) / took,
        max(grown(row, "stalled_seconds") for row in rows) / took,
        max(row["step_seconds"] for row in rows),
    )


def needed(world: World, job: Job, step_seconds: float) -> float:
    """Bits per second that a learner's link needs either way, as `diloco plan` says it of the job."""
    path = str(world.folder / f"{job.name}.json")
    words = ("plan", path, "--step-seconds", f"{step_seconds:.4f}", "--json")
    return float(json.loads(run(PROGRAM, *words))["queued"]["link"]["same"])


def test_slow_links(world: World, run_job: RunJob) -> None:
    job = run_job(
        "slow",
        {EU: 1, US: 1},
        learners={"podTemplate": pod_template("learner", "700m")},
        sync={
            "fragments": 8,
            "every": 16,
            "overlap": 2,
            "quorum": 2,
            "compression": {"up": "int4", "down": "bfloat16"},
        },
        training={"model": {"config": MODEL}, "batch": {"sequences": 4}, "evaluation": {"fraction": 0}},
    )
    job.in_merges(2)
    job.merging_on(merges=16)
    free = pace(job)
    print("\n" + free.row("unlimited", free))
    enough = needed(world, job, free.step_seconds)
    found = {}
    try:
        for factor in (1.2, 0.5):
            rate = f"{factor * enough / 1000:.0f}kbit"
            for name in (EU, US):
                world.clusters[name].fault("slow", rate)
            job.merging_on(merges=8, timeout=120)
            found[factor] = pace(job)
            print(found[factor].row(f"{factor} x need, {rate}", free))
            told = {row["region"]: row["link"] for row in job.training()["slots"]}
            print({region: link["message"] or "no complaint" for region, link in told.items()})
        assert all(link["too_slow"] and "merges" in link["message"] for link in told.values())
        job.wait_condition("LinksTooSlow", timeout=60)
    finally:
        for name in (EU, US):
            world.clusters[name].fault("fast")
    # Nobody waits. Beside the same job's stall without a limit, of which a busy machine makes more. Steps a second are
    # the machine's, which may be busier in one minute than in another, so merges are counted by the step.
    for slow in found.values():
        assert slow.stalled <= free.stalled + 0.01
    usual = free.merges / free.steps
    assert found[1.2].merges / found[1.2].steps > 0.85 * usual
    assert 0.3 * usual < found[0.5].merges / found[0.5].steps < 0.95 * usual
    job.wait_condition("LinksTooSlow", "False", timeout=300)
    job.exact()
