"""What synchronisation costs the training thread: time inside the library, and step time with and without.

A learner process trains the demo's model (examples/tiny-gpt.yaml, one learner, otherwise
its own settings: every 12 steps each fragment, int4 up) through the library, against the
real syncer program. A second process trains the same model on the same data without the
library. They take turns on one core, some steps each, and the syncer has another core.
While one trains the other stands still, so both see the same machine.

*Stalled* is what the library itself counts: the training thread's time inside its calls,
from being handed a batch to being handed the next, less the loop's own work. The
background thread shares the core with training here, which is the worst case; what it
takes shows in the step time, of which the median and the mean are told: at some steps a
fragment moves, at others none. A turn's first step is not counted: its caches are cold.

``--millions`` measures a larger model instead: of layers of 7.1 million parameters, one
sequence a step, so that a step is as short as the model allows.

``--device cuda`` trains on a GPU, whose memory has both models, in the precision that the
built-in trainer chooses there. Its models have layers of 50.6 million parameters (500 million
in all without ``--millions``), steps of 16 sequences of 512 tokens, and the defaults of
``sync``. The processes that train have four cores, the syncer has the others. Each step is
waited for, so that its time is known.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import common
import programs
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import load_job

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny-gpt.yaml"
OVERRIDES = (
    "training.stop={steps: 1000000}",
    "training.evaluation=null",
    "training.optimizer.schedule=constant",
    "regions.0.learners=1",
    "syncer.checkpoint.everySeconds=3600",
    "sync.heartbeat.timeoutSeconds=600",
)
WAIT_SECONDS = 600.0
SETTLE_SECONDS = 0.3  # between turns, for what the background has under way

LAYERS = {"cpu": (768, 2048, 12), "cuda": (2048, 5504, 16)}  # of larger models: width, inner width, heads
ON_GPU = (
    "training.batch.sequences=16",
    "training.data.sequenceLength=512",
    "training.model.config.max_position_embeddings=512",
    "sync={}",
    "sync.heartbeat.timeoutSeconds=600",
)
GPU_MILLIONS = 500
GPU_CORES = 4  # of the processes that train


def main() -> None:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--millions", type=int, help="parameters of the model, in millions (default: the demo's, 0.9)")
    parser.add_argument("--device", choices=tuple(LAYERS), default="cpu", help="what trains (default: cpu)")
    args = parser.parse_args()
    turns, steps = (3, 12) if args.quick else (12, 72)  # 72: each fragment six times
    on_gpu = args.device == "cuda"
    if args.millions is not None and args.millions < 1:
        parser.error(f"--millions is {args.millions}: expected 1 or more")
    if on_gpu and not common.finds_gpu():
        parser.error("--device cuda: torch finds no CUDA device here")
    millions = args.millions or (GPU_MILLIONS if on_gpu else None)
    if millions is not None:
        turns, steps = (2, 12) if args.quick else (4 if on_gpu else 6, 24)
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = {cores[0]}, {cores[-1]}
    if on_gpu and len(cores) > GPU_CORES:
        ours, theirs = set(cores[:GPU_CORES]), set(cores[GPU_CORES:])
    job = load_job(EXAMPLE, (*OVERRIDES, *larger_model(millions, args.device)))
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    children: list[Any] = []
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder,
        programs.Syncer(Path(folder), job, theirs) as syncer,
    ):
        for name, target in (("with", synchronised), ("without", alone)):
            pipes[name], end = context.Pipe()
            given = (end, ours, str(syncer.job_file), syncer.address)
            child = context.Process(target=target, args=given, daemon=True)
            child.start()
            children.append(child)
            ask(pipes[name], 0, children)  # ready to take its first step
        measured: dict[str, list[Turn]] = {name: [] for name in pipes}
        for name in pipes:
            ask(pipes[name], steps, children)  # warm up; the learner's first merges
        for turn in range(turns):
            for name in ("with", "without") if turn % 2 else ("without", "with"):
                time.sleep(SETTLE_SECONDS)
                measured[name].append(ask(pipes[name], steps, children))
        merges = syncer.status()["merges"]
        for pipe in pipes.values():
            pipe.send(-1)
        for child in children:
            child.join(60)
    if merges == 0:
        raise SystemExit("bench/overlap: nothing was merged, so nothing was measured")
    where = "one core" if len(cores) == 1 else f"{len(ours)} and {len(theirs)} core(s)"
    note = f"{turns} turns of {steps} steps on {args.device}; learner and syncer on {where}; {merges} merges"
    common.show(figures(measured), args.json, note)


def larger_model(millions: int | None, device: str) -> tuple[str, ...]:
    """What a job with a model of so many million parameters has instead, and on which device."""
    if millions is None:
        return ("training.device=cpu",)
    width, inner, heads = LAYERS[device]
    config = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": max(1, round(millions * 1e6 / (4 * width**2 + 3 * width * inner))),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    own = ON_GPU if device == "cuda" else ("training.batch.sequences=1",)
    prefix = "training.model.config"
    return (f"training.device={device}", *(f"{prefix}.{name}={value}" for name, value in config.items()), *own)


class Turn(NamedTuple):
    """What came of a turn: seconds of a step (median, mean), and the share of the time that was stalled."""

    median: float = 0.0
    mean: float = 0.0
    stalled: float = 0.0


def figures(measured: dict[str, list[Turn]]) -> list[common.Row]:
    stalled = statistics.mean(turn.stalled for turn in measured["with"])
    name = "training thread inside the library"
    rows = [common.Row(name, 100 * stalled, "%", "the training thread's wall time", baseline=100.0, ratio=stalled)]
    for name, of in (("step, synchronised", "median"), ("step, synchronised, mean", "mean")):
        seconds = {who: [getattr(turn, of) for turn in turns] for who, turns in measured.items()}
        value, alone = (1e3 * statistics.median(seconds[who]) for who in ("with", "without"))
        ratio = common.paired(seconds["without"], seconds["with"])
        rows.append(common.Row(name, value, "ms", "the same loop alone", baseline=alone, ratio=ratio))
    return rows


def ask(pipe: Connection, steps: int, children: list[Any]) -> Turn:
    """Have ``steps`` steps made; what came of it."""
    if steps:
        pipe.send(steps)
    end = time.monotonic() + WAIT_SECONDS
    while not pipe.poll(0.5):
        if time.monotonic() > end or not all(child.is_alive() for child in children):
            raise SystemExit("bench/overlap: a training process does not answer; its words are above")
    return Turn(*pipe.recv())


class Turns:
    """A training process's side: stands still between turns, and takes the time of each step. ``settle`` waits until
    all that was queued on the device is done."""

    def __init__(self, pipe: Connection, stalled: Callable[[], float], settle: Callable[[], None]) -> None:
        self._pipe, self._stalled, self._settle = pipe, stalled, settle
        self._left = 0
        self._seconds: list[float] = []
        self._began = self._last = self._stalled_before = 0.0

    def next(self) -> bool:
        """Call between two steps; False: no more."""
        self._settle()
        now = time.monotonic()
        if self._left:
            self._seconds.append(now - self._last)
            self._left -= 1
        if not self._left:
            if self._seconds:
                stalled = self._stalled() - self._stalled_before
                counted = self._seconds[1:]
                share = stalled / (now - self._began)
                self._pipe.send((statistics.median(counted), statistics.fmean(counted), share))
                self._seconds = []
            else:
                self._pipe.send(())
            steps = self._pipe.recv()
            if steps < 0:
                return False
            self._left, self._stalled_before = steps, self._stalled()
            now = self._began = time.monotonic()
        self._last = now
        return True


def begin(cores: set[int], job_file: str, address: str) -> tuple[DiLoCoJob, Any, Any, Any]:
    """(job, model, optimizer, data set), as the built-in trainer makes them, on ``cores``."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DILOCO_JOB_FILE"], os.environ["DILOCO_SYNCER"] = job_file, address
    os.environ["DILOCO_JOB_DIRECTORY"] = str(EXAMPLE.parent)
    import torch

    from diloco_protocol.spec.load import job_from_json
    from diloco_worker import data, device
    from diloco_worker.training import models
    from diloco_worker.training import optimizer as optimizers

    torch.set_num_threads(1)
    # The allocator keeps what it is given back once it has seen a block so large. The library's
    # own buffers would do this for one process and not for the other.
    torch.ones(31 << 20, dtype=torch.uint8)
    job = job_from_json(Path(job_file).read_text(encoding="utf-8"))
    model = models.build(job.spec, job.spec.seed).to(device.device(job.spec))
    return job, model, optimizers.build_optimizer(model, job.spec.training.optimizer), data.load(job.spec)


def waiting(model: Any) -> Callable[[], None]:
    """What waits for the model's device."""
    import torch

    where = next(model.parameters()).device
    return (lambda: torch.cuda.synchronize(where)) if where.type == "cuda" else lambda: None


def trained(job: DiLoCoJob, model: Any, optimizer: Any, batch: Any) -> tuple[int, Any]:
    """One step of the built-in trainer; (tokens, loss)."""
    from diloco_worker import data, device
    from diloco_worker.training import trainer

    training = job.spec.training
    dtype = device.precision(job.spec, device.device(job.spec))
    loss = trainer.step(
        model, optimizer, batch, training.batch.accumulation, clip_norm=training.optimizer.clip_norm, dtype=dtype
    )
    return data.tokens_in(batch), loss


def synchronised(pipe: Connection, cores: set[int], job_file: str, address: str) -> None:
    """The loop through the library."""
    job, model, optimizer, dataset = begin(cores, job_file, address)
    from diloco_worker import Learner

    with Learner.from_environment(model, optimizer) as learner:
        turns = Turns(pipe, lambda: learner.metrics["stalled_seconds"], waiting(model))
        for batch in learner.batches(dataset):
            if not turns.next():
                break
            tokens, loss = trained(job, model, optimizer, batch)
            learner.after_step(tokens=tokens, loss=loss)
    sys.exit(learner.exit_code)


def alone(pipe: Connection, cores: set[int], job_file: str, address: str) -> None:
    """The same loop without it: batches of the same data set, in order."""
    job, model, optimizer, dataset = begin(cores, job_file, address)
    from torch.utils.data import default_collate

    turns = Turns(pipe, lambda: 0.0, waiting(model))
    size, at = job.spec.training.batch.sequences, 0
    while turns.next():
        batch = default_collate([dataset[(at + i) % len(dataset)] for i in range(size)])
        at += size
        trained(job, model, optimizer, batch)


if __name__ == "__main__":
    main()
