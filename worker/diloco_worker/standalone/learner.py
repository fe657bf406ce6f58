"""A training script without its job: ``python train.py``, for a first try and for a debugger.

``Learner.from_environment`` gives a ``StandaloneLearner`` where the environment names neither a job nor a syncer. It
has everything that a loop uses of a ``Learner``, and the same complaints about model, optimizer and data set. There is
one process, no syncer and no thread, so that a breakpoint holds everything, in the data set's code too. Nothing is
merged, and nothing is written.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Self

import torch
from torch.utils.data import default_collate

from diloco_protocol.common.first_step import BATCHES_SECONDS, MANY_BATCHES, no_step_text
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, load_job
from diloco_protocol.vocabulary import JobPhase
from diloco_worker.data.prefetch import check_shares, share_of
from diloco_worker.data.shuffle import Permutation, step_seed
from diloco_worker.group.ranks import Ranks
from diloco_worker.named_parameters import ModelWatch
from diloco_worker.settings import ALONE_JOB, ConfigurationError
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.training_loop import LoopChecks, TrainingLoop

log = logging.getLogger(__name__)


def job_alone(environ: Mapping[str, str]) -> DiLoCoJob:
    """The job file that DILOCO_ALONE_JOB names, as a learner of its first region has it; not set: a job of defaults.
    Raises ConfigurationError."""
    path = environ.get(ALONE_JOB)
    try:
        if path:
            job = load_job(path)
            return job.model_copy(update={"spec": job.spec.in_region(job.spec.regions[0].name)})
    except JobError as error:
        raise ConfigurationError(f"{ALONE_JOB}: {error}") from error
    return DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "alone"},
            "spec": {"learners": {"command": ["python", "train.py"]}, "regions": [{"name": "local", "learners": 1}]},
        }
    )


class StandaloneLearner(TrainingLoop):
    """What a loop uses of a Learner, with nobody else there but its own ``ranks``. ``job``: whose batch, seed and stop
    hold.

    Raises ConfigurationError for a model or optimizer that a job would refuse.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        job: DiLoCoJob,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(job.spec, model, Ranks() if ranks is None else ranks)
        self.job = job
        self.learners, self.slot, self.step, self.tokens = 1, 0, 0, 0  # the slot of a job's first learner
        self.exit_code = 0  # there is no job that could fail
        self._checks = LoopChecks(InnerOptimizers(model, optimizers), ModelWatch(model), job.spec.sync.every)
        self._losses: list[float] = []  # the first and the last
        self._terminated = False  # some rank was told to end, and all of them know
        self._given = 0  # batches before the first step
        self._told_of_no_step = False
        self._began = 0.0
        self._compute_seconds = 0.0

    @classmethod
    def from_environment(
        cls,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        environ: Mapping[str, str],
        ranks: Ranks,
    ) -> Self:
        """With the job that DILOCO_ALONE_JOB names, and a warning. Raises ConfigurationError."""
        learner = cls(model, optimizers, job_alone(environ), ranks)
        if ranks.leads:
            named, stop = environ.get(ALONE_JOB), learner.job.spec.training.stop
            log.warning(
                "training alone: no job started this program (diloco run JOB.yaml does), %s. Nothing is merged or "
                "saved; it stops after %s %s",
                f"with the settings of {named}" if named else f"with default settings ({ALONE_JOB}=JOB.yaml: a job's)",
                f"{stop.limit:,.0f}",
                stop.kind,
            )
        return learner

    # ------------------------------------------------------------------ state

    @property
    def progress(self) -> float:
        """How near the loop is to training.stop, 0 to 1."""
        stop = self.job.spec.training.stop
        seconds = time.monotonic() - self._began if self._began else 0.0
        return min(1.0, {"steps": self.step, "tokens": self.tokens, "seconds": seconds}[stop.kind] / stop.limit)

    @property
    def seed(self) -> int:
        """As Learner.seed, of slot 0."""
        return step_seed(self.job.spec.seed, 0, self.step, self._ranks.data[0])

    @property
    def phase(self) -> str:
        """waiting, training, draining (SIGTERM) or complete."""
        if self.progress >= 1.0:
            return JobPhase.COMPLETE
        if self._terminated:
            return JobPhase.DRAINING
        return JobPhase.TRAINING if self._started else JobPhase.WAITING

    @property
    def draining(self) -> bool:
        """Whether no further step is to be made."""
        several = self._ranks.size > 1 and self.job.spec.training.stop.kind == "seconds"  # their clocks differ
        return self._terminated or (self.progress >= 1.0 and not several)

    @property
    def metrics(self) -> dict[str, float]:
        """As Learner.metrics; no bytes travel."""
        return self._metrics.describe(self._metrics.read_loss(), self.step, self.tokens, self._compute_seconds)

    def rewarm_scale(self) -> float:
        """1: the optimizer is the one that began."""
        return 1.0

    # ------------------------------------------------------------------ the loop

    def batches(
        self, dataset: Any, sequences: int | None = None, collate: Callable[[list[Any]], Any] = default_collate
    ) -> Iterator[Any]:
        """As Learner.batches. The data set is read in this thread, in another order by the seed in each pass."""
        count = self._count_batch(self.job.spec, dataset, sequences)
        if not 1 <= count <= len(dataset):
            raise ConfigurationError(
                f"the data set has {len(dataset)} sequences and a step needs {count}: "
                "give more data, or lower batch.sequences or batch.accumulation"
            )
        check_shares(count, self._ranks.data[1])
        numbers = self._numbers(len(dataset))
        for _ in self.steps():
            self._metrics.begin_wait()
            drawn = [next(numbers) for _ in range(count)]
            batch = collate([dataset[number] for number in share_of(drawn, self._ranks.data)])
            self._compute_from = self._metrics.end_wait()
            yield batch

    def _numbers(self, size: int) -> Iterator[int]:
        """Numbers of items, pass after pass."""
        data_epoch = 0
        while True:
            order = Permutation(size, step_seed(self.job.spec.seed, 0, data_epoch))
            yield from map(order, range(size))
            data_epoch += 1

    def steps(self) -> Iterator[int]:
        """As Learner.steps."""
        self._begin_loop()
        self._began = time.monotonic()
        while not self.draining:
            self._compute_from = time.monotonic()
            self._tell_of_no_step()
            yield self.step

    def _tell_of_no_step(self) -> None:
        """Say once what the syncer would say of a loop that finishes no step."""
        if self.step or self._told_of_no_step:
            return
        self._given += 1
        if self._given > MANY_BATCHES and time.monotonic() - self._began >= BATCHES_SECONDS:
            self._told_of_no_step = True
            log.warning("no-steps: %s", no_step_text(self._given - 1))

    def after_step(self, tokens: int, loss: torch.Tensor | float | None = None, lr: float | None = None) -> None:
        """As Learner.after_step. ``lr`` is not written anywhere."""
        tokens = self._check_step(tokens)
        seconds = self._end_compute()
        if loss is not None:
            self._metrics.put_loss(loss)  # of this rank: there is nobody to tell the others' to
            if math.isfinite(known := self._metrics.read_loss()):
                self._losses = [*self._losses[:1], known]
        joined = self._ranks.join_step(tokens, None, self._signalled or self.progress >= 1.0)
        self._terminated |= self._ranks.size > 1 and joined.told
        self.step += 1
        self.tokens += joined.tokens
        self._compute_seconds += seconds
        self._metrics.add_step(seconds)
        self._compute_from = self._metrics.end_wait()

    def _check_step(self, tokens: int) -> int:
        return self._checks.check_step(tokens)

    # ------------------------------------------------------------------ end

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        super()._terminate(signum, frame)
        self._terminated |= self._ranks.size == 1

    def leave(self) -> None:
        """Say what was trained: there is nobody to offer it to."""
        if not self._ranks.leads and self._ranks.size > 1:
            return
        losses = f", training loss {self._losses[0]:.3f} to {self._losses[-1]:.3f}" if self._losses else ""
        said = f"trained alone: {self.step} steps, {self.tokens} tokens{losses}"
        if log.isEnabledFor(logging.INFO):
            log.info(said)
        else:  # Python prints warnings alone where the program has configured no logging
            print(said, file=sys.stderr)
