"""The faults of ``diloco chaos``: those that are named, or random ones for the job's learners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.console import CommandError
from diloco.local.chaos.random_faults import draw_kills, draw_schedule
from diloco.local.chaos.schedule import Fault, check, parse
from diloco.processes.worker_specs import learner_names
from diloco.validate import read_job_file


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """``chaos``: a schedule instead of a random one. ``mtbf``, ``repair``: seconds; ``repair`` None: a sixth of
    ``mtbf``. ``minutes``: in which faults come."""

    job: Path
    overrides: Sequence[str]
    chaos: str
    mtbf: float
    repair: float | None
    minutes: float
    seed: int

    def check_numbers(self) -> None:
        """Raises CommandError for a number that is not above 0."""
        for option, value in {"--minutes": self.minutes, "--mtbf": self.mtbf, "--repair": self.repair}.items():
            if value is not None and not 0 < value < math.inf:
                raise CommandError(f"{option} {value:g}: it must be a number above 0")


def draw_faults(options: DrawOptions, kills_alone: bool) -> tuple[str, tuple[Fault, ...]]:
    """The name of the job in the file, and what is to be broken when. ``kills_alone``: for pods, which somebody else
    starts again. Raises CommandError."""
    options.check_numbers()
    job = read_job_file(options.job, options.overrides)
    learners, seconds = job.spec.slots, options.minutes * 60
    repair = options.mtbf / 6 if options.repair is None else options.repair
    try:
        if options.chaos:
            schedule = check(parse(options.chaos), learner_names(job))
        elif kills_alone:
            schedule = draw_kills(options.seed, learners, options.mtbf, seconds)
        else:
            schedule = draw_schedule(options.seed, learners, options.mtbf, repair, seconds=seconds)
    except ValueError as error:  # ChaosError is one
        raise CommandError(str(error)) from error
    return job.metadata.name, schedule
