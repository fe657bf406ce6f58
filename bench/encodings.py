"""What each encoding costs on the links, in bytes that a real run moved, beside data-parallel's.

Two learners train a small model with the real programs, each through a relay of its own that
counts its link (relay.py), one run per pair of encodings. Counting begins when every fragment
has been merged once, so version 0 and the first states are not in it, and goes on for whole
turns: every fragment as often as every other. On a busy machine merges come later than the
steps make them due, which would make them look cheap: so bytes are those per merge, and merges
are as many as are due. Then data-parallel training of the same
model with the same batches: computed, and measured with torch's DDP over gloo (parallel.py).

Per pair of encodings:

- *bytes per token* on a learner's link, up and down, per token of that learner. The ratio is
  data-parallel's bytes of float32 gradients in one direction, which its learners send and receive.
- *at the hub*: bytes in and out per step of all learners. The ratio is float32's both ways.
- *needed bandwidth* of a learner's link, by the paper's formula and by the queue (``diloco plan``), at the
  paper's point: 5e9 parameters, 8 learners, P = 24, overlap 2, steps of 1 s, computing 95 % of the time.
  The ratio is that of data-parallel's need to it, of which the paper says 60 to 242.

A ratio above 1 is so many times less than the reference.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import parallel
import programs
from diloco_protocol.bandwidth import model as bandwidth
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import load_job
from lab.bandwidth import Case, star_need
from relay import Carried, Link, Relays

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny-gpt.yaml"
PAIRS = (
    ("float32", "float32"),
    ("int4", "bfloat16"),
    ("int4", "delta-int4"),
    ("int2", "bfloat16"),
    ("int2", "delta-int4"),
)
LEARNERS = 2
# 3.3 million parameters in 24 fragments: a push as int4 has 72 kB, its headers and its report below 1.
OVERRIDES = (
    "training.model.config.hidden_size=256",
    "training.model.config.intermediate_size=704",
    "training.stop={steps: 1000000}",
    "training.batch.sequences=4",
    "training.evaluation=null",
    "training.optimizer.schedule=constant",
    f"regions.0.learners={LEARNERS}",
    f"sync.quorum={LEARNERS}",
    "sync.fragments=24",
    "sync.every=24",
    "sync.overlap=2",
    "syncer.checkpoint.everySeconds=3600",
)
SMALL = (
    "training.batch.sequences=2",
    "training.model.config.num_hidden_layers=1",
    "sync.every=12",
    "sync.fragments=12",
)
TURNS, QUICK_TURNS = 3, 1
SETTLED = 1  # merges of each fragment before counting begins
WAIT_SECONDS = 240.0  # for one run
POLL_SECONDS = 0.05
PARALLEL_STEPS = 4
# The paper's point (arXiv 2604.21428).
PARAMETERS, DATACENTRES, STEP_SECONDS = 5_000_000_000, 8, 1.0


@dataclass(frozen=True, slots=True)
class Moved:
    """What one run moved while it was counted, on all links."""

    bytes: Carried
    merges: int
    steps: float  # that a learner made meanwhile
    due: float  # merges per step: P/H

    def per_step(self) -> tuple[float, float]:
        """Bytes up and down, all learners together, if every merge that is due is made."""
        return self.bytes.up / self.merges * self.due, self.bytes.down / self.merges * self.due

    def per_token(self, batch: int) -> tuple[float, float]:
        """Bytes up and down on one learner's link per token of its own; the mean of all."""
        up, down = self.per_step()
        return up / LEARNERS / batch, down / LEARNERS / batch


@dataclass(frozen=True, slots=True)
class Need:
    """Bits per second of a learner's link at the paper's point, as fast up as down, and data-parallel's."""

    formula: float
    queue: float
    parallel: float


def main() -> None:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument(
        "--only", metavar="UP/DOWN", action="append", help="only these encodings, such as int4/bfloat16"
    )
    args = parser.parse_args()
    pairs = [pair for pair in PAIRS if not args.only or "/".join(pair) in args.only]
    if args.quick and not args.only:
        pairs = [("int4", "delta-int4")]
    if not pairs:
        raise SystemExit(f"bench/encodings: --only takes {', '.join('/'.join(pair) for pair in PAIRS)}")
    overrides = OVERRIDES + (SMALL if args.quick else ())
    found: dict[tuple[str, str], Moved] = {}
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        for up, down in pairs:
            chosen = f"sync.compression={{up: {up}, down: {down}}}"
            job = load_job(EXAMPLE, (*overrides, chosen))
            found[up, down] = run(job, Path(folder) / f"{up}-{down}", QUICK_TURNS if args.quick else TURNS)
            say(f"{up} up, {down} down: {found[up, down]}")
        job_file = Path(folder) / "-".join(pairs[0]) / "job.json"
        size, batch = shape(job)
        ddp = data_parallel(job_file, ("float32",) if args.quick else ("float32", "bfloat16"))
    reference = ddp.get("float32", computed(size, 4))
    show(found, size, batch, ddp, reference=reference, as_json=args.json)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------ measured


def run(job: DiLoCoJob, folder: Path, turns: int) -> Moved:
    """One job with real processes until so many turns are counted; then all is thrown away."""
    with programs.Syncer(folder, job) as syncer, contextlib.ExitStack() as stack:
        relays = stack.enter_context(Relays())
        own_links = [Link() for _ in range(LEARNERS)]
        learners = []
        for ordinal, link in enumerate(own_links):
            learners.append(learner(folder, syncer.job_file, ordinal, relays.open(syncer.address, link)))
            stack.callback(ended, learners[-1])
        return counted(job, syncer, own_links, learners, turns=turns, folder=folder)


def ended(process: subprocess.Popen[bytes]) -> None:
    """Killed: what was to be counted is counted."""
    process.kill()
    process.wait(programs.STOP_SECONDS)


def learner(folder: Path, job_file: Path, ordinal: int, address: str) -> subprocess.Popen[bytes]:
    """The worker program, as ``diloco run`` starts it, on one thread."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")} | {
        "DILOCO_JOB_FILE": str(job_file),
        "DILOCO_JOB_DIRECTORY": str(EXAMPLE.parent),
        "DILOCO_ROLE": "learner",
        "DILOCO_REGION": "local",
        "DILOCO_ORDINAL": str(ordinal),
        "DILOCO_PROCESS": secrets.token_hex(16),
        "DILOCO_WORKDIR": str(folder),
        "DILOCO_SYNCER": address,
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"learner-{ordinal}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "diloco_worker"], stdout=log, stderr=log, env=env)


def counted(
    job: DiLoCoJob,
    syncer: programs.Syncer,
    own_links: Sequence[Link],
    learners: Sequence[subprocess.Popen[bytes]],
    turns: int,
    folder: Path,
) -> Moved:
    """The difference of two moments, as many merges apart as ``turns`` turns have."""
    end = time.monotonic() + WAIT_SECONDS
    first: tuple[Carried, dict[str, Any]] | None = None
    while time.monotonic() < end:
        if any(process.poll() is not None for process in learners):
            break
        carried = sum((link.carried for link in own_links), Carried())
        status = syncer.status()
        if first is None:
            if status["versions"] and min(status["versions"]) >= SETTLED:
                first = carried, status
        elif sum(status["versions"]) >= sum(first[1]["versions"]) + turns * len(status["versions"]):
            return moved(job, first, (carried, status))
        time.sleep(POLL_SECONDS)
    logs = [*folder.glob("learner-*.log"), folder / "syncer.log"]
    said = "\n".join(f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs)
    raise SystemExit(f"bench/encodings: a learner ended, or it took {WAIT_SECONDS:.0f} s\n{said}")


def moved(job: DiLoCoJob, first: tuple[Carried, dict[str, Any]], last: tuple[Carried, dict[str, Any]]) -> Moved:
    (before, old), (after, new) = first, last
    steps = sum(row["steps"] for row in new["slots"]) - sum(row["steps"] for row in old["slots"])
    merges = sum(new["versions"]) - sum(old["versions"])
    return Moved(after - before, merges, steps / LEARNERS, len(new["versions"]) / job.spec.sync.every)


def data_parallel(job_file: Path, encodings: Sequence[str]) -> dict[str, float]:
    """Bytes per step and direction that DDP over gloo moved, by the gradients' encoding; where it runs."""
    found = {}
    for name in encodings:
        try:
            found[name] = parallel.bytes_per_step(job_file, EXAMPLE.parent, name == "bfloat16", PARALLEL_STEPS)
        except parallel.NotMeasured as why:
            say(f"data-parallel with {name} gradients is not measured: {why}")
    return found


# ------------------------------------------------------------------ computed


def shape(job: DiLoCoJob) -> tuple[int, int]:
    """(trained parameters, tokens of one learner's step)."""
    from diloco_worker.training.models import outline

    model = outline(job.spec, directory=EXAMPLE.parent)
    data = job.spec.training.data
    assert data is not None
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return size, job.spec.training.batch.sequences * data.sequence_length


def computed(parameters: int, width: int) -> float:
    """Bytes per step and direction of a ring's all-reduce; ``width``: bytes of a gradient."""
    return width * parameters * bandwidth.all_reduce_factor(LEARNERS)


def need(up: str, down: str) -> Need:
    """At the paper's point."""
    star = star_need(Case(PARAMETERS, DATACENTRES, bandwidth.Turn(24, 24, 2, STEP_SECONDS)), up, down)
    return Need(star.formula.same, star.queue.same, bandwidth.data_parallel(PARAMETERS, DATACENTRES, STEP_SECONDS))


# ------------------------------------------------------------------ shown


def show(
    found: dict[tuple[str, str], Moved], size: int, batch: int, ddp: dict[str, float], reference: float, as_json: bool
) -> None:
    """``reference``: data-parallel's bytes per step and direction with float32 gradients."""
    if as_json:
        common.show(figures(found, batch, ddp, size, reference=reference), True)
        return
    print(f"{size} parameters, {LEARNERS} learners, {batch} tokens a step of each; bytes of TCP streams\n")
    print(
        "| up / down | link, bytes per token, up | down | hub, MB per step, in | out "
        "| data-parallel ÷ link, up | down | needs, Gbit/s, formula | queue "
        "| data-parallel ÷ needs, formula | queue |"
    )
    print("|---|" + 10 * "---|")
    for (up, down), run in found.items():
        (upward, downward), hub, of = run.per_token(batch), run.per_step(), need(up, down)
        print(
            f"| {up} / {down} | {upward:.0f} | {downward:.0f} | {hub[0] / 1e6:.3f} | {hub[1] / 1e6:.3f} "
            f"| {reference / batch / upward:.1f} | {reference / batch / downward:.1f} "
            f"| {of.formula / 1e9:.2f} | {of.queue / 1e9:.2f} "
            f"| {of.parallel / of.formula:.0f} | {of.parallel / of.queue:.0f} |"
        )
    print()
    for name, width in (("float32", 4), ("bfloat16", 2)):
        wide = computed(size, width)
        measured = f"{ddp[name] / batch:.0f} measured, DDP over gloo" if name in ddp else "not measured"
        print(f"data-parallel, {name} gradients: {wide / batch:.0f} bytes per token each way; {measured}")
    counts = ", ".join(f"{run.merges} of {run.steps * run.due:.0f}" for run in found.values())
    print(f"merges counted, of those that the steps made due: {counts}")


def figures(
    found: dict[tuple[str, str], Moved], batch: int, ddp: dict[str, float], size: int, reference: float
) -> list[common.Row]:
    against = "data-parallel, float32, " + ("measured" if "float32" in ddp else "computed")
    base = found.get(("float32", "float32"))
    rows = []
    for (up, down), run in found.items():
        name, of = f"{up} up, {down} down", need(up, down)
        for way, count in zip(("up", "down"), run.per_token(batch), strict=True):
            whole = reference / batch
            rows.append(
                common.Row(f"{name}: link, {way}", count, "B/token", against, baseline=whole, ratio=whole / count)
            )
        if base is not None:
            for way, count, full in zip(("in", "out"), run.per_step(), base.per_step(), strict=True):
                words = f"{name}: hub, {way}"
                rows.append(
                    common.Row(words, count, "B/step", "float32 up and down", baseline=full, ratio=full / count)
                )
        for kind, bits in (("formula", of.formula), ("queue", of.queue)):
            words, needed = f"{name}: need by {kind}", of.parallel / 1e9
            rows.append(
                common.Row(words, bits / 1e9, "Gb/s", "data-parallel's need", baseline=needed, ratio=of.parallel / bits)
            )
    for encoding, moved_bytes in ddp.items():
        wide = computed(size, 4 if encoding == "float32" else 2)
        words, moved = f"data-parallel, {encoding}", moved_bytes / batch
        rows.append(common.Row(words, moved, "B/token", "computed", baseline=wide / batch, ratio=wide / moved_bytes))
    return rows


if __name__ == "__main__":
    main()
