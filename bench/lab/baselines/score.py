"""What is measured outside of a baseline's time: the loss of the states that it kept, and how long a step computes."""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path

from torch.utils.data import default_collate

from diloco_protocol.common.files import write_whole
from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker import data, device
from diloco_worker.training import evaluator, models, trainer
from diloco_worker.training import optimizer as optimizers
from lab.baselines.settings import BaselineSettings
from lab.baselines.states import MemoryStates

WARM_STEPS, TIMED_STEPS = 2, 9


def write_scores(job: DiLoCoJob, settings: BaselineSettings) -> int:
    """Score what the arm has kept, as the job's evaluator does: a list of tokens, time and loss. Returns 0."""
    spec = job.spec
    device.configure(spec)
    model = models.build(spec, spec.seed)
    batches = evaluator.chosen(data.load(spec, held_out=True), spec)
    dtype = device.precision(spec, device.device(spec))
    scores = []
    for state in MemoryStates(Path(settings.memory)).kept():
        model.load_state_dict(state["model"])
        loss = evaluator.mean_loss(model, batches, dtype)
        scores.append([state["tokens"], state["time"], loss if math.isfinite(loss) else None])
    write_whole(settings.scores, json.dumps(scores).encode())
    return 0


def calibrate(job: DiLoCoJob, settings: BaselineSettings) -> int:
    """Measure the CPU seconds that one learner's step takes (the median), and its tokens. Returns 0."""
    spec = job.spec
    device.configure(spec)
    dataset = data.load(spec)
    model = models.build(spec, spec.seed)
    optimizer = optimizers.build_optimizer(model, spec.training.optimizer)
    training = spec.training
    count = training.batch.sequences * training.batch.accumulation
    batch = default_collate([dataset[i] for i in range(count)])
    seconds = []
    for _ in range(WARM_STEPS + TIMED_STEPS):
        began = time.process_time()
        trainer.step(
            model,
            optimizer,
            batch,
            training.batch.accumulation,
            clip_norm=training.optimizer.clip_norm,
            dtype=device.precision(spec, device.device(spec)),
        )
        seconds.append(time.process_time() - began)
    found = {"cpu_seconds": statistics.median(seconds[WARM_STEPS:]), "tokens": data.tokens_in(batch)}
    write_whole(settings.calibration, json.dumps(found).encode())
    return 0
