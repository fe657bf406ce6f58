"""6. What the encodings cost on the links of three clusters, as the kernel counts it.

bench/encodings.py counts TCP streams on one machine, with data-parallel's beside; here is the
whole link, with TCP/IP and TLS, acknowledgements and heartbeats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from ..clusters import run, until
from ..jobs import Job, pod_template
from .test_links import MODEL
from .world import EU, PROGRAM, US, RunJob, World

pytestmark = pytest.mark.timeout(1200)
PAIRS = (
    ("float32", "float32"),
    ("int4", "bfloat16"),
    ("int4", "delta-int4"),
    ("int2", "bfloat16"),
    ("int2", "delta-int4"),
)
FRAGMENTS, EVERY, SEQUENCES, LENGTH = 8, 16, 4, 64
TURNS = 8  # merges of each fragment that are counted
STEP_TOKENS = SEQUENCES * LENGTH


@dataclass
class Carried:
    """Bytes per merge on each region's link, and what `diloco plan` says of one learner's."""

    up: dict[str, float]
    down: dict[str, float]
    planned_up: float
    planned_down: float
    parameters: int

    def row(self, name: str, against: float) -> str:
        """Per token of that link's learner, at the hub per token of the job, with as many merges as steps
        make due; ``against``: data-parallel's bytes per token, one direction."""
        due = FRAGMENTS / EVERY / STEP_TOKENS
        links = [f"{kind[link] * due:8.0f}" for link in (EU, US) for kind in (self.up, self.down)]
        hub = [sum(kind.values()) / 2 * due for kind in (self.up, self.down)]
        return f"| {name} | {' | '.join(links)} | {hub[0]:.0f} | {hub[1]:.0f} | " + " | ".join(
            f"{against / each:.1f}" for each in hub
        )


def counted(world: World, job: Job) -> tuple[dict[str, tuple[int, int]], int]:
    carried = {name: world.clusters[name].link_bytes() for name in (EU, US)}
    return carried, sum(job.training()["versions"])


def measure(world: World, job: Job) -> Carried:
    job.wait_training("every fragment merged", lambda d: d["versions"] and min(d["versions"]) >= 1)
    job.merging_on(merges=FRAGMENTS)
    before, merges = counted(world, job)
    after, now = before, merges

    def enough() -> bool:
        nonlocal after, now
        after, now = counted(world, job)
        return now - merges >= TURNS * FRAGMENTS

    until(f"{TURNS} turns of all fragments", enough, 300, lambda: now)
    path = str(world.folder / f"{job.name}.json")
    plan = json.loads(run(PROGRAM, "plan", path, "--step-seconds", "0.1", "--json"))
    grown = {
        name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in (EU, US)
    }  # received, sent
    return Carried(
        {name: row[1] / (now - merges) for name, row in grown.items()},
        {name: row[0] / (now - merges) for name, row in grown.items()},
        plan["merge"]["up_bytes"],
        plan["merge"]["down_bytes"],
        parameters=plan["parameters"],
    )


def test_what_the_encodings_cost_on_the_links(world: World, run_job: RunJob) -> None:
    found: dict[str, Carried] = {}
    for number, (up, down) in enumerate(PAIRS):
        job = run_job(
            f"encoded-{number}",
            {EU: 1, US: 1},
            learners={"podTemplate": pod_template("learner", "700m")},
            sync={
                "fragments": FRAGMENTS,
                "every": EVERY,
                "overlap": 2,
                "quorum": 2,
                "compression": {"up": up, "down": down},
            },
            training={"model": {"config": MODEL}, "batch": {"sequences": SEQUENCES}, "evaluation": {"fraction": 0}},
        )
        found[f"{up} / {down}"] = measure(world, job)
        job.exact()
        world.delete(job.name)
    # Two learners' ring: each sends and receives its gradients once.
    wide = 4 * next(iter(found.values())).parameters / STEP_TOKENS
    print(f"\n| up / down | {EU} up | down | {US} up | down | hub in | out | data-parallel / in | / out |")
    for name, row in found.items():
        print(row.row(name, wide))
    print(f"data-parallel, float32, two learners, computed: {wide:.0f} bytes per token each way")
    for name, row in found.items():
        for link in (EU, US):
            # Framing, and what answers it the other way: acknowledgements are some 4 % of what comes in.
            assert row.up[link] < 1.08 * row.planned_up + 0.06 * row.planned_down, name
            assert row.down[link] < 1.08 * row.planned_down + 0.06 * row.planned_up, name
            assert row.up[link] > 0.8 * row.planned_up and row.down[link] > 0.8 * row.planned_down, name
    full, least = found["float32 / float32"], found["int2 / delta-int4"]
    assert full.up[EU] > 10 * least.up[EU] and full.down[EU] > 6 * least.down[EU]
