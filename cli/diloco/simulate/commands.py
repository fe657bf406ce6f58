"""The word of ``diloco simulate``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

from diloco.command_line import CommandLine
from diloco.console import CommandError, command, duration, print_text
from diloco.simulate import parameters

simulate = CommandLine(
    name="simulate",
    help="""Simulate fleets: what a job would do, without the machines.

    Examples:

        diloco simulate goodput --chips 5000 --mtbi 180d --recovery 60s
""",
)

LEAST_SECONDS_BETWEEN_FAILURES = 0.01  # of the whole fleet; below it no step is ever made
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def whole_number(text: str) -> int:
    """``5000``, ``150k``, ``2.4M``, ``5e9``, ``5B``."""
    digits = text.strip().rstrip("kKmMbB")
    unit = _UNITS.get(text.strip()[len(digits) :].lower())
    try:
        value = float(digits) * (unit or math.nan)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 1 <= value <= 1e15):
        raise typer.BadParameter(f"{text!r} is no number: write 5000, 150k, 2.4M or 5e9")
    return round(value)


def learner_counts(text: str) -> tuple[int, ...]:
    """``8`` or ``2,4,8``."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= 4096 for count in counts):
        raise typer.BadParameter(f"{text!r}: write numbers from 1 to 4096 with commas between them, such as 2,4,8")
    return counts


def positive(text: str) -> float:
    """A duration that is not 0."""
    seconds = duration(text)
    if seconds <= 0:
        raise typer.BadParameter(f"{text!r}: it has to be longer than nothing")
    return seconds


def _time(default: parameters.Parameter, what: str, parser: Callable[[str], float] = duration) -> Any:
    value = f"{default.value:g}s" if default.value < 600 else ("1y" if default.value > 86400 else "10m")
    return typer.Option(
        metavar="DURATION", parser=parser, help=f"{what}  [default: {value}; {default.source}]", show_default=False
    )


@simulate.command()
@command
def goodput(
    chips: Annotated[
        int, typer.Option(metavar="N", parser=whole_number, help="Number of chips, such as 5000 or 1.2M.")
    ],
    learners: Annotated[
        Any,
        typer.Option(
            metavar="M,M,…",
            parser=learner_counts,
            help="Numbers of learners to split them into.  [default: powers of two up to 64]",
        ),
    ] = None,
    mtbi: Annotated[
        float | None, _time(parameters.MTBI, "Mean time of one chip between two failures, such as 1y, 30d.", positive)
    ] = None,
    slice_chips: Annotated[
        int,
        typer.Option("--slice", min=1, metavar="CHIPS", help="Chips that are lost together when one of them fails."),
    ] = round(parameters.SLICE.value),
    step: Annotated[float | None, _time(parameters.STEP, "Time of one step.", positive)] = None,
    recovery: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=duration,
            help="How long a learner stands still for a failure: one half to continue without what failed, one half "
            "to take it in again after its repair.  [default: 30s, fit to the paper's table]",
        ),
    ] = None,
    repair_mean: Annotated[float | None, _time(parameters.REPAIR_MEAN, "Mean time of a repair.", positive)] = None,
    spares: Annotated[int, typer.Option(min=0, metavar="SLICES", help="Slices that stand by, for each learner.")] = 0,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of everything: the same seed gives the same figures.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="All rows, for programs.")] = False,
) -> None:
    """Print the share of their time in which failing chips train.

    It shows which number of learners is enough for this fleet, what spares buy, and what faster recovery buys, to
    data-parallel training too. Parameters that are marked "fit" are not published: they were chosen so that the
    paper's table (arXiv 2604.21428) is met, which `python bench/goodput.py` prints.

    Examples:

        diloco simulate goodput --chips 5000 --mtbi 180d --recovery 60s

        diloco simulate goodput --chips 1.2M --learners 8,16,32 --spares 2 --json
    """
    from diloco.simulate.advice import CANDIDATES, FleetConditions, advise, failures_left_out
    from diloco.simulate.failures import RepairTimes
    from diloco.simulate.fleet import Run, Stops
    from diloco.simulate.tables import advice_text

    half = None if recovery is None else recovery / 2
    conditions = FleetConditions(
        mtbi=mtbi or parameters.MTBI.value,
        slice_chips=slice_chips,
        stops=Stops(
            step or parameters.STEP.value,
            parameters.DOWNSCALE.value if half is None else half,
            parameters.UPSCALE.value if half is None else half,
        ),
        repairs=RepairTimes.with_mean(
            repair_mean or parameters.REPAIR_MEAN.value, parameters.REPAIR_SHAPE.value, parameters.REPAIR_POWER.value
        ),
        spares=spares,
    )
    check_fleet(chips, learners or (2,), slice_chips, conditions.mtbi)
    tried = learners or tuple(m for m in CANDIDATES if m == 2 or chips / m >= slice_chips)
    run = Run(seed=seed)
    rows, enough = advise(chips, tried, conditions, run)
    document = {"title": "Goodput, simulated", "rows": rows, "enough": enough, "parameters": conditions.used()}
    document |= {"repetitions": run.repetitions, "failures": run.failures, "seed": seed}
    document["left_out"] = failures_left_out(chips, enough, conditions)
    print_text(json.dumps(document) if as_json else advice_text(document))


def check_fleet(chips: int, learners: tuple[int, ...], slice_chips: float, mtbi: float) -> None:
    """Raises CommandError where there are fewer slices than learners, or failures that come faster than any step."""
    if (wanted := max(learners)) * slice_chips > chips:
        raise CommandError(
            f"--chips {chips}: {wanted} learners need a slice of {slice_chips:g} chips each, {wanted * slice_chips:g}"
            " in all; lower --learners or --slice"
        )
    if mtbi / chips < LEAST_SECONDS_BETWEEN_FAILURES:
        raise CommandError(
            f"--mtbi: of {chips:,} chips one fails every {mtbi / chips:.2g} s; write a time such as 30d or 1y"
        )


def add_to(app: typer.Typer) -> None:
    app.add_typer(simulate)
