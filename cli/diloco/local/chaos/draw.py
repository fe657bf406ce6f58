"""The faults of ``diloco chaos``: those that are named, or random ones for the job's learners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from diloco.console import CommandError
from diloco.local.chaos.random_faults import draw_kills, draw_schedule
from diloco.local.chaos.schedule import Fault, check, parse
from diloco.processes.worker_specs import learner_names
from diloco.validate import read_job_file


def draw_faults(
    file: Path,
    overrides: Sequence[str],
    *,
    chaos: str,
    mtbf: float,
    repair: float | None,
    minutes: float,
    seed: int,
    kills_alone: bool,
) -> tuple[str, tuple[Fault, ...]]:
    """The name of the job in the file, and what is to be broken when. ``chaos``: a schedule instead of a random one.
    ``mtbf``, ``repair``: seconds; ``repair`` None: a sixth of ``mtbf``. ``minutes``: in which faults come.
    ``kills_alone``: for pods, which somebody else starts again. Raises CommandError."""
    for option, value in {"--minutes": minutes, "--mtbf": mtbf, "--repair": repair}.items():
        if value is not None and not 0 < value < math.inf:
            raise CommandError(f"{option} {value:g}: it must be a number above 0")
    job = read_job_file(file, overrides)
    learners, seconds = job.spec.slots, minutes * 60
    try:
        if chaos:
            schedule = check(parse(chaos), learner_names(job))
        elif kills_alone:
            schedule = draw_kills(seed, learners, mtbf, seconds)
        else:
            schedule = draw_schedule(seed, learners, mtbf, mtbf / 6 if repair is None else repair, seconds=seconds)
    except ValueError as error:  # ChaosError is one; numpy has one for a negative seed
        raise CommandError(str(error)) from error
    return job.metadata.name, schedule
