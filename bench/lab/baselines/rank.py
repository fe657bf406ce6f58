"""What every baseline's process does alike: the job's model, data, batch and steps at the pace, and a line for each."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import default_collate

from diloco_protocol.common.files import create_whole, write_whole
from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker import data, device
from diloco_worker.data.shuffle import step_seed
from diloco_worker.metrics_file import MetricsFile
from diloco_worker.training import models, trainer
from diloco_worker.training import optimizer as optimizers
from lab.baselines.settings import BaselineSettings
from lab.baselines.states import MemoryStates, TrainState
from lab.pace import StepPace

FLOAT_BYTES = 4


class Rank:
    """One rank: ``model``, ``optimizer``, ``states`` in memory, and the steps. ``writer``: see ``MemoryStates``."""

    def __init__(self, job: DiLoCoJob, settings: BaselineSettings, writer: str = "") -> None:
        self._spec = spec = job.spec
        self._settings = settings
        self._dataset = data.load(spec)
        self.model = models.build(spec, spec.seed)
        self.optimizer = optimizers.build_optimizer(self.model, spec.training.optimizer)
        self.states = MemoryStates(Path(settings.memory), writer)
        self.pace = StepPace.from_environment()
        self._metrics = MetricsFile(settings.steps(settings.learner))

    @property
    def sequences(self) -> int:
        """Of one rank's step."""
        batch = self._spec.training.batch
        return batch.sequences * batch.accumulation

    @property
    def gradient_bytes(self) -> int:
        """Of all trained parameters, as float32."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad) * FLOAT_BYTES

    def make_step(self, model: nn.Module, first: int, step: int, rank: int) -> int:
        """One optimizer step at the pace, of ``model`` (ours, or what wraps it) on the sequences from ``first`` on, the
        ``step``-th of the job. Returns the tokens of this rank's batch."""
        training = self._spec.training
        items = [self._dataset[(first + i) % len(self._dataset)] for i in range(self.sequences)]
        batch = default_collate(items)
        rate = optimizers.learning_rate(training.optimizer, step, float(step), None)
        optimizers.set_learning_rate(self.optimizer, rate)
        torch.manual_seed(step_seed(self._spec.seed, rank, step))
        self.pace.begin()
        trainer.step(
            model,
            self.optimizer,
            batch,
            training.batch.accumulation,
            clip_norm=training.optimizer.clip_norm,
            dtype=device.precision(self._spec, torch.device("cpu")),
        )
        self.pace.end()
        return data.tokens_in(batch)

    def record_step(self, step: int, tokens: int, world: int, reduced_bytes: int) -> None:
        """A line for this step. ``reduced_bytes``: which were all-reduced in it by ``world`` ranks; a ring sends and
        receives 4 (n - 1) / n of them at each."""
        moved = round(4 * (world - 1) / world * reduced_bytes) if world else 0
        self._metrics.add(
            {"time": time.time(), "step": step, "tokens": tokens, "world": world, "bytes": moved}, now=True
        )

    # -------------------------------------------------------------- the job's time

    def mark_started(self) -> None:
        """The job's first step begins now, unless it has begun before; what it begins with is kept for its score."""
        if not self._settings.started.exists():
            with contextlib.suppress(FileExistsError):  # another rank was first
                create_whole(self._settings.started, json.dumps(time.time()).encode())
                self.states.keep_for_score(TrainState(), self.model)

    def keep_state_if_due(self, state: TrainState, step_tokens: int) -> None:
        """Keep the parameters where a score is due since ``step_tokens`` ago."""
        turn = self._settings.score_tokens
        if state.tokens // turn > (state.tokens - step_tokens) // turn:
            self.states.keep_for_score(state, self.model)

    @property
    def out_of_time(self) -> bool:
        """Whether the job has had its time."""
        started: float = json.loads(self._settings.started.read_text(encoding="utf-8"))
        return time.time() >= started + self._settings.stop_seconds

    def mark_ended(self) -> None:
        write_whole(self._settings.ended, json.dumps(time.time()).encode())
