"""What is compared, settled before anything runs: job, faults, pace, and the digest under which a result is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import diloco
from diloco.local.chaos.schedule import Fault
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from lab.sources import source_digest, training_digest

OURS = "ours"
BASELINES = {
    "ddp": "torch DDP, rigid: any failure restarts all from the last checkpoint, and all wait for a machine's return",
    "ddp-elastic": "torch DDP, elastic: torchrun's agents re-form at each loss and return, and continue from the"
    " most advanced state",
    "torchft": "torchft's DiLoCo: a quorum at each merge, which discards its steps where it fails",
}
MOST_CPU_SHARE = 0.7  # of the cores, for all that an arm runs
LEARNERS_CPU_SHARE = 0.5  # of the cores, for the steps alone: syncer, evaluator, collectives and restarts come on top
LAB, CLI = Path(__file__).parents[1], Path(diloco.__path__[0])
# What makes an arm's result, beside the packages that train.
MADE_BY = (LAB / "compare", LAB / "baselines", CLI / "local", CLI / "processes")
SCORES = 8  # of the merged model in an arm
START_SECONDS, END_SECONDS = 15.0, 10.0  # of an arm, beside its training: for the time left


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step takes and how many tokens it has; ``cpu_seconds``: what it computes of it (0: not measured)."""

    step_seconds: float
    tokens: int
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """``seconds``: of training, from the first step; ``mtbf_seconds``: between two faults that end a process, of the
    job as a whole; ``overrides`` as ``diloco run --set`` takes them, with which ``job`` was read from ``job_file``."""

    job_file: Path
    overrides: tuple[str, ...]
    job: DiLoCoJob
    schedule: tuple[Fault, ...]
    seconds: float
    mtbf_seconds: float
    pace: Pace

    @property
    def learners(self) -> int:
        return self.job.spec.slots

    @property
    def score_tokens(self) -> int:
        """Tokens between two scores of the model, alike in every arm."""
        per_second = self.learners * self.pace.tokens / self.pace.step_seconds
        return max(1, round(per_second * self.seconds / SCORES))

    def run_overrides(self) -> list[str]:
        """All of ours' ``--set``, the spacing of the scores included."""
        return [*self.overrides, f"training.evaluation.everyTokens={self.score_tokens}"]

    def digest(self, arm: str) -> str:
        """Of all that makes the arm's result, but for the machine."""
        from importlib.metadata import version

        made_of = {
            "arm": arm,
            "job": job_to_json(self.job),
            "schedule": [fault.text for fault in self.schedule],
            "seconds": self.seconds,
            "pace": [self.pace.step_seconds, self.pace.tokens],
            "code": [training_digest(), source_digest(MADE_BY), version("torch")],
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def job_overrides(given: Sequence[str], seconds: float, seed: int) -> tuple[str, ...]:
    """What every arm's job is given: a stop by time, so a rate that does not know the end, and the CPU; then what the
    user said."""
    return (
        f"training.stop={{seconds: {seconds:g}}}",
        "training.optimizer.schedule=constant",
        "training.device=cpu",
        "failurePolicy.maxReplacements=1000",
        f"seed={seed}",
        *given,
    )


def choose_pace(cpu_seconds: float, tokens: int, learners: int, cores: int) -> Pace:
    """The shortest step at which the learners' arithmetic takes ``LEARNERS_CPU_SHARE`` of the cores."""
    step = learners * cpu_seconds / (LEARNERS_CPU_SHARE * cores)
    return Pace(max(0.02, round(step, 3)), tokens, cpu_seconds)


def mean_seconds_between_kills(schedule: Sequence[Fault], seconds: float) -> float:
    """Mean time between two faults that end a process, of the job as a whole; infinite if there are none."""
    kills = sum(fault.action in ("kill", "cut") for fault in schedule)
    return seconds / kills if kills else float("inf")
