"""The words of ``diloco simulate``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.command_line import CommandLine
from diloco.console import FAILED, CommandError, command, duration, print_text
from diloco.simulate.goodput import published
from diloco_protocol.vocabulary import MAX_FRAGMENTS

simulate = CommandLine(
    name="simulate",
    help="""Simulate fleets and links: what a job would do, without the machines.

    Examples:

        diloco simulate goodput

        diloco simulate goodput --chips 5000 --mtbi 180d --recovery 60s

        diloco simulate bandwidth
""",
)

LEAST_SECONDS_BETWEEN_FAILURES = 0.01  # of the whole fleet; below it no step is ever made
CELLS = Path("runs/simulate")  # of --core

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


def overlaps(text: str) -> tuple[int, ...]:
    """``2`` or ``1,2,6``."""
    try:
        steps = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        steps = ()
    if not steps or not all(1 <= step <= 1000 for step in steps):
        raise typer.BadParameter(f"{text!r}: write steps from 1 to 1000 with commas between them, such as 1,2,6")
    return steps


def positive(text: str) -> float:
    """A duration that is not 0."""
    seconds = duration(text)
    if seconds <= 0:
        raise typer.BadParameter(f"{text!r}: it has to be longer than nothing")
    return seconds


def _time(default: published.Parameter, what: str, parser: Callable[[str], float] = duration) -> Any:
    value = f"{default.value:g}s" if default.value < 600 else ("1y" if default.value > 86400 else "10m")
    return typer.Option(
        metavar="DURATION", parser=parser, help=f"{what}  [default: {value}; {default.source}]", show_default=False
    )


Report = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Write a report there: Markdown, and a page with plots.")
]
Json = Annotated[bool, typer.Option("--json", help="All rows, for programs.")]


@simulate.command()
@command
def goodput(
    chips: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole_number,
            help="Number of chips of your own fleet, such as 5000 or 1.2M.  [default: the paper's five]",
        ),
    ] = None,
    learners: Annotated[
        Any,
        typer.Option(
            metavar="M,M,…",
            parser=learner_counts,
            help="Numbers of learners to split them into.  [default: 2,4,8,16; with --chips to 64]",
        ),
    ] = None,
    mtbi: Annotated[
        float | None, _time(published.MTBI, "Mean time of one chip between two failures, such as 1y, 30d.", positive)
    ] = None,
    slice_chips: Annotated[
        int | None,
        typer.Option(
            "--slice",
            min=1,
            metavar="CHIPS",
            help="Chips that are lost together when one of them fails.  [default: 256 for the paper's fleets "
            f"({published.SLICE.source}); with --chips 8, a node]",
        ),
    ] = None,
    step: Annotated[float | None, _time(published.STEP, "Time of one step.", positive)] = None,
    recovery: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION", parser=duration, help="--downscale and --upscale together, one half each unless given."
        ),
    ] = None,
    downscale: Annotated[
        float | None, _time(published.DOWNSCALE, "How long a learner stands still after a failure.")
    ] = None,
    upscale: Annotated[
        float | None, _time(published.UPSCALE, "How long it stands still to take a repaired slice in.")
    ] = None,
    restart: Annotated[
        float | None, _time(published.RESTART, "Rigid data-parallel training: from a failure to the next step.")
    ] = None,
    rigid_step: Annotated[
        float | None, _time(published.RIGID_STEP, "Rigid data-parallel training: time of one step.", positive)
    ] = None,
    repair_mean: Annotated[float | None, _time(published.REPAIR_MEAN, "Mean time of a repair.", positive)] = None,
    repair_shape: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=10,
            metavar="NUMBER",
            help=f"First shape of the repair times' distribution; {published.REPAIR_SHAPE.source}.",
        ),
    ] = published.REPAIR_SHAPE.value,
    repair_power: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=20,
            metavar="NUMBER",
            help=f"Second shape of that distribution; {published.REPAIR_POWER.source}.",
        ),
    ] = published.REPAIR_POWER.value,
    spares: Annotated[int, typer.Option(min=0, metavar="SLICES", help="Slices that stand by, for each learner.")] = 0,
    core: Annotated[
        bool,
        typer.Option(
            "--core",
            help="Also with the real syncer core and adoption rule, in virtual time: minutes. Exit code 1 if they "
            "differ by more than their intervals.",
        ),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Where --core keeps finished simulations, to continue from them.  [default: {CELLS}]",
            show_default=False,
        ),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option(
            min=3,
            max=1000,
            metavar="N",
            help="Repetitions of each fleet, of --core too: more make the intervals narrower.",
        ),
    ] = 8,
    failures: Annotated[
        float,
        typer.Option(
            min=10, max=1e6, metavar="N", help="Failures of the whole fleet in one repetition; with --core at most 400."
        ),
    ] = 2000,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of everything: the same seed gives the same figures.")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter; wider intervals.")] = False,
    report: Report = None,
    as_json: Json = False,
) -> int:
    """Print the share of their time in which failing chips train.

    Without --chips: the paper's table (arXiv 2604.21428) beside the simulator's, learners of unequal speed, and compute
    that comes and goes. With --chips: which number of learners is enough for this fleet, what spares buy, and what
    faster recovery buys, to data-parallel training too. Parameters that are marked "fit" are not published: they were
    chosen so that the table is met.

    Examples:

        diloco simulate goodput

        diloco simulate goodput --chips 5000 --mtbi 180d --recovery 60s

        diloco simulate goodput --chips 1.2M --learners 8,16,32 --spares 2 --json

        diloco simulate goodput --core --learners 4,8
    """
    from diloco.simulate.drawings import goodput_plots
    from diloco.simulate.failures import RepairTimes
    from diloco.simulate.goodput.fleet import Run, Stops
    from diloco.simulate.goodput.rows import CANDIDATES, LEARNERS, FleetConditions
    from diloco.simulate.progress import Progress
    from diloco.simulate.tables import goodput_text

    def of(value: float | None, default: published.Parameter) -> float:
        return default.value if value is None else value

    half = None if recovery is None else recovery / 2
    size = (published.SLICE.value if chips is None else 8) if slice_chips is None else slice_chips
    conditions = FleetConditions(
        mtbi=of(mtbi, published.MTBI),
        slice_chips=size,
        stops=Stops(
            of(step, published.STEP),
            of(half if downscale is None else downscale, published.DOWNSCALE),
            of(half if upscale is None else upscale, published.UPSCALE),
        ),
        rigid=Stops(of(rigid_step, published.RIGID_STEP), of(restart, published.RESTART), 0.0),
        repairs=RepairTimes.with_mean(of(repair_mean, published.REPAIR_MEAN), repair_shape, repair_power),
        spares=spares,
    )
    _check_fleet(chips, learners, conditions)
    run = Run(repetitions, min(failures, 400) if quick else failures, seed)
    fitting = tuple(m for m in CANDIDATES if chips is None or m == 2 or chips / m >= size)
    tried = learners or (LEARNERS if chips is None else fitting)
    if cache is not None and not core:
        raise typer.BadParameter("it keeps the simulations of --core: add --core", param_hint="--cache")
    cells = _core_cells(cache or CELLS) if core else None
    document = _goodput(chips, tried, conditions, run, Progress("goodput").advance)
    if cells is not None:
        document["rows"] += _core_rows(chips, learners, conditions, run, quick, cells)
    document["plots"] = goodput_plots(document["rows"])
    _write_report(document, report)
    print_text(json.dumps(document) if as_json else goodput_text(document))
    return FAILED if any(not row.get("agrees", True) for row in document["rows"]) else 0


def _check_fleet(chips: int | None, learners: tuple[int, ...] | None, conditions: Any) -> None:
    """Raises CommandError where there are fewer slices than learners, or failures that come faster than any step."""
    size = conditions.slice_chips
    most = max(published.CHIPS) if chips is None else chips
    if chips is not None and (wanted := max(learners or (2,))) * size > chips:
        raise CommandError(
            f"--chips {chips}: {wanted} learners need a slice of {size:g} chips each, {wanted * size:g} in all;"
            " lower --learners or --slice"
        )
    if conditions.mtbi / most < LEAST_SECONDS_BETWEEN_FAILURES:
        raise CommandError(
            f"--mtbi: of {most:,} chips one fails every {conditions.mtbi / most:.2g} s; write a time such as 30d or 1y"
        )


def _goodput(
    chips: int | None, learners: tuple[int, ...], conditions: Any, run: Any, on_progress: Callable[[float], None]
) -> dict[str, Any]:
    from diloco.simulate.goodput.rows import advise, goodput_rows, root_mean_square_error, scavenging_rows, uneven_rows

    enough: int | None = None
    if chips is None:
        rows = goodput_rows(published.CHIPS, learners, conditions, run, on_progress)
        error = root_mean_square_error(rows)
        rows += [*uneven_rows(run), *scavenging_rows(conditions)]
    else:
        rows, enough = advise(chips, learners, conditions, run, on_progress)
        error = root_mean_square_error(rows)
    return {
        "title": "Goodput, simulated",
        "rows": rows,
        "rmse": error,
        "enough": enough,
        "repetitions": run.repetitions,
        "failures": run.failures,
        "seed": run.seed,
        "parameters": _parameters(conditions),
    }


def _parameters(conditions: Any) -> dict[str, dict[str, Any]]:
    """Every parameter that was used, and where it is from."""
    stops, rigid, repairs = conditions.stops, conditions.rigid, conditions.repairs
    used = {
        "mtbi": (conditions.mtbi, published.MTBI),
        "slice": (conditions.slice_chips, published.SLICE),
        "step": (stops.step, published.STEP),
        "downscale": (stops.down, published.DOWNSCALE),
        "upscale": (stops.up, published.UPSCALE),
        "restart": (rigid.down, published.RESTART),
        "rigid-step": (rigid.step, published.RIGID_STEP),
        "repair-mean": (repairs.mean, published.REPAIR_MEAN),
        "repair-shape": (repairs.shape, published.REPAIR_SHAPE),
        "repair-power": (repairs.power, published.REPAIR_POWER),
    }
    return {
        name: {"value": value, "source": known.source if math.isclose(value, known.value, rel_tol=1e-6) else "given"}
        for name, (value, known) in used.items()
    }


def _core_cells(cache: Path) -> Any:
    import diloco.simulate.failures
    import diloco.simulate.goodput
    import diloco_syncer.core
    import diloco_worker.core.adoption
    from diloco.simulate.cells import CellCache

    packages = (diloco.simulate.goodput, diloco_syncer.core)
    files = (diloco.simulate.failures, diloco_worker.core.adoption)
    code = [Path(str(package.__file__)).parent for package in packages]
    return CellCache(cache, code + [Path(str(module.__file__)) for module in files])


def _core_rows(
    chips: int | None, learners: tuple[int, ...] | None, conditions: Any, fast: Any, quick: bool, cells: Any
) -> list[dict[str, Any]]:
    from diloco.simulate.goodput.core_rows import CoreRun, core_rows, uneven_core_rows
    from diloco.simulate.goodput.core_rows import quick as shortened
    from diloco.simulate.progress import Progress

    full = CoreRun(fast.repetitions, min(fast.failures, CoreRun().failures), seed=fast.seed)
    run = shortened(full) if quick else full
    few = (1_200_000,) if quick else (600_000, 1_200_000, 2_400_000)
    sizes = few if chips is None else (chips,)
    tried = learners or ((4,) if quick else (1, 2, 4, 8, 16))
    rows = core_rows(sizes, tried, conditions, run, cells, Progress("core").advance)
    return rows + ([] if chips else uneven_core_rows(conditions, run, cells, Progress("core, unequal").advance))


@simulate.command()
@command
def bandwidth(
    params: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole_number,
            help="Trained parameters, such as 350M.  [default: 5e9]",
            show_default=False,
        ),
    ] = None,
    learners: Annotated[int, typer.Option(min=2, max=4096, metavar="M", help="Number of learners.")] = 8,
    step_seconds: Annotated[
        float, typer.Option(min=1e-6, max=1e6, metavar="SECONDS", help="How long one inner step takes.")
    ] = 1.0,
    fragments: Annotated[int, typer.Option(min=1, max=MAX_FRAGMENTS, metavar="P", help="Fragments of the model.")] = 24,
    every: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="H", help="Steps between two merges of a fragment.")
    ] = 24,
    overlap: Annotated[
        Any,
        typer.Option(
            metavar="τ,τ,…",
            parser=overlaps,
            help="Steps that an exchange may overlap.  [default: 2]",
            show_default=False,
        ),
    ] = None,
    utilisation: Annotated[
        float, typer.Option(min=0.5, max=0.999, metavar="SHARE", help="Share of its time that a learner shall compute.")
    ] = 0.95,
    round_trip_seconds: Annotated[
        float, typer.Option(min=0, max=60, metavar="SECONDS", help="Round trip time between a learner and the hub.")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Curves at fewer bandwidths.")] = False,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Print the bandwidth that a job's links need, and the share of its time that a learner computes on thinner ones.

    The paper's four figures (arXiv 2604.21428) come first, by its formula and by a queue: it exchanges by all-reduce.
    Then our star with each pair of encodings: a learner's link, up and down, and the hub's, in and out. Then shares of
    computing over bandwidths, beside data-parallel training's. `diloco plan` does this for a job file.

    Examples:

        diloco simulate bandwidth

        diloco simulate bandwidth --params 350M --step-seconds 0.4 --overlap 1,2,6

        diloco simulate bandwidth --json
    """
    from diloco.simulate.bandwidth import RATES, Case, curve_rows, published_rows, star_rows
    from diloco.simulate.drawings import utilisation_plots
    from diloco.simulate.progress import Progress
    from diloco.simulate.tables import bandwidth_text, count_text
    from diloco_protocol.bandwidth.links import ROUND_TRIPS
    from diloco_protocol.bandwidth.model import Turn

    size = params or 5_000_000_000
    if fragments > min(every, size):
        raise typer.BadParameter(
            f"{fragments}: P is at most H (--every {every}) and --params", param_hint="--fragments"
        )
    steps = overlap or (2,)
    if max(steps) >= every:
        raise typer.BadParameter(f"{max(steps)}: τ is below H (--every {every})", param_hint="--overlap")
    case = Case(
        size, learners, Turn(fragments, every, steps[0], step_seconds, ROUND_TRIPS * round_trip_seconds), utilisation
    )
    rates = RATES[::3] if quick else RATES
    rows = published_rows() + star_rows(case) + curve_rows(case, steps, rates, Progress("bandwidth").advance)
    title = (
        f"needed by {count_text(size)} parameters, M = {learners}, P = {fragments}, H = {every}, τ = {steps[0]}, "
        f"steps of {step_seconds:g} s, {100 * utilisation:g} % computing"
    )
    document = {"rows": rows, "title": title, "plots": utilisation_plots(rows)}
    _write_report(document, report)
    print_text(json.dumps(document) if as_json else bandwidth_text(document))


def _write_report(document: dict[str, Any], directory: Path | None) -> None:
    if directory is not None:
        from diloco.reports.document import ResultDocument
        from diloco.reports.files import write_report

        write_report(ResultDocument.model_validate(document), directory)


def add_to(app: typer.Typer) -> None:
    app.add_typer(simulate)
