"""A learner whose steps take a fixed time: what the job's ``learners.command`` is in bench/paced_runs.py.

It trains as the built-in trainer does (the same model, data, optimizer and step) and sleeps for the rest of the pace
that ``BENCH_PACES`` has for its region (a JSON object, seconds). So learners of several speeds, or more learners than
cores, run honestly side by side as long as each step's own time fits into its pace; those that did not are counted and
said at the end. Nobody begins while others still load torch: with ``BENCH_GATE``, a file, a learner says by
a file ``*.ready`` beside it that it has loaded, and joins when the file is there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch

from diloco_worker import Learner, data
from diloco_worker.settings import WorkerSettings
from diloco_worker.training import models, trainer
from diloco_worker.training import optimizer as optimizers

GATE_SECONDS = 300.0
log = logging.getLogger("paced_learner")


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    settings = WorkerSettings.from_environment()
    spec = settings.job.spec
    pace = float(json.loads(os.environ["BENCH_PACES"])[settings.region])
    torch.set_num_threads(1)
    dataset = data.load(spec)
    model = models.build(spec, spec.seed)
    optimizer = optimizers.build_optimizer(model, spec.training.optimizer)
    accumulation, clip = spec.training.batch.accumulation, spec.training.optimizer.clip_norm
    wait_for_gate()
    steps = late = 0
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(dataset):
            due = time.monotonic() + pace
            rate = optimizers.learning_rate(spec.training.optimizer, learner.step, 0, None) * learner.rewarm_scale()
            optimizers.set_learning_rate(optimizer, rate)
            loss = trainer.step(model, optimizer, batch, accumulation, clip_norm=clip, dtype=torch.float32)
            left = due - time.monotonic()
            steps, late = steps + 1, late + (left < 0)
            time.sleep(max(0.0, left))
            learner.after_step(tokens=data.tokens_in(batch), loss=loss, lr=rate)
    log.info("%d of %d steps took longer than the pace of %g s", late, steps, pace)
    return learner.exit_code


def wait_for_gate() -> None:
    """Say that this learner is ready, and wait until it may join."""
    gate = Path(os.environ["BENCH_GATE"])
    gate.with_suffix(f".{os.getpid()}.ready").touch()
    end = time.monotonic() + GATE_SECONDS
    while not gate.exists():
        if time.monotonic() > end:
            raise SystemExit(f"paced_learner: {gate} did not come in {GATE_SECONDS:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
