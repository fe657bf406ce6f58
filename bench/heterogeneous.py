"""Learners of several speeds, and learners that come for a third of the run: goodput, tokens and loss at equal time.

Every run is a whole job of real processes on this machine (bench/paced_runs.py): each step takes a fixed time, the rest
of it slept, so that machines of several speeds are emulated honestly on few cores; all learners together compute for
less than 70 % of the cores, and a run of which more than one step in twenty was later than its pace is refused (with
--quick that is only said).

*Speeds.* Three learners at 1, 1/2 and 1/4 of the pace, each with the same batch, under K = 1 and K = M, a grace window
of factor 0 and 0.9, for the same time. The baseline is K = M without a grace window: all wait for the slowest. One
more run gives the slower regions a batch in proportion (``regions[].batch``): steps take equally long, and carry less.

*Scavenging.* Two learners, and in one run a third that joins beyond them (``maxLearners``) after a third of the time
and leaves after two thirds. The baseline is the run without it.

A run is cached under build/heterogeneous by a digest of what makes it; --fresh runs all again. Figures are means over
seeds, and so are the report's curves, the merged model's loss against time and against trained tokens. --quick runs one
small job of each part, beside nothing. Exit code 1: a run failed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

import common
from diloco.console import CommandError
from diloco.reports.document import Scalar
from lab.figures import Axis, Plot, ResultDocument, Series
from lab.report_files import write_report
from paced_runs import OVERHEAD, SEQUENCES, Arm, Found, RunFailed, cached, load, run, say

PACE = 0.12  # seconds of a step of the fastest learner
SPEEDS = {"whole": 1.0, "half": 0.5, "quarter": 0.25}


POINTS = 24  # of a curve
FIGURES = {
    "goodput": ("goodput", ""),
    "learners": ("learners in a merge", ""),
    "tokens": ("merged tokens", "/s"),
    "loss": ("final loss", "nats"),
}


def speed_arms(seconds: float, seeds: Sequence[int]) -> list[Arm]:
    regions = tuple({"name": name, "learners": 1} for name in SPEEDS)
    paces = {name: PACE / speed for name, speed in SPEEDS.items()}
    arms = [
        Arm(
            f"K = {'M' if quorum == 3 else 1}, grace {grace:g}",
            regions,
            paces,
            seconds,
            seed=seed,
            quorum=quorum,
            grace=grace,
        )
        for quorum, grace in [(3, 0.0), (3, 0.9), (1, 0.0), (1, 0.9)]
        for seed in seeds
    ]
    own = tuple(
        {"name": name, "learners": 1, "batch": {"sequences": round(SEQUENCES * speed)}}
        for name, speed in SPEEDS.items()
    )
    even = dict.fromkeys(SPEEDS, PACE)
    return arms + [Arm("K = 1, grace 0.9, batch by speed", own, even, seconds, seed=seed) for seed in seeds]


def scavenging_arms(seconds: float, seeds: Sequence[int]) -> list[Arm]:
    regions = ({"name": "local", "learners": 2, "maxLearners": 3},)
    arms = []
    for seed in seeds:
        for name, visitors in (("two learners", ()), ("and a third for a third of the time", ((1 / 3, 2 / 3),))):
            arms.append(Arm(name, regions, {"local": PACE}, seconds, seed=seed, visitors=visitors))
    return arms


def quick_arms(seconds: float) -> dict[str, list[Arm]]:
    """The least of each part: two learners of two speeds; one, and another that comes and goes."""
    two = {"whole": PACE, "half": 2 * PACE}
    regions = tuple({"name": name, "learners": 1} for name in two)
    alone = ({"name": "local", "learners": 1, "maxLearners": 2},)
    visitor = Arm(
        "a second for a third of the time", alone, {"local": PACE}, seconds, seed=0, visitors=((1 / 3, 2 / 3),)
    )
    return {"speeds": [Arm("K = 1, grace 0.9", regions, two, seconds, seed=0)], "scavenging": [visitor]}


def main() -> int:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--only", choices=("speeds", "scavenging"), help="one of the two parts")
    parser.add_argument("--seconds", type=common.number(above=0), help="of each run (default: 60, with --quick 7)")
    parser.add_argument("--seeds", type=common.whole_number(1), default=3, help="runs of each kind (--quick: 1)")
    parser.add_argument("--fresh", action="store_true", help="run again what is cached; --quick always does")
    common.add_report(parser)
    args = parser.parse_args()
    seconds = args.seconds or (7.0 if args.quick else 60.0)
    seeds = range(1 if args.quick else args.seeds)
    if args.quick:
        parts = quick_arms(seconds)
    else:
        parts = {"speeds": speed_arms(seconds, seeds), "scavenging": scavenging_arms(seconds, seeds)}
    wanted = {name: arms for name, arms in parts.items() if args.only in (None, name)}
    fresh = args.fresh or args.quick
    todo = [arm for arms in wanted.values() for arm in arms if fresh or not cached(arm)]
    for number, arm in enumerate(todo):
        left = len(todo) - number
        minutes = left * (arm.seconds + OVERHEAD) / 60
        say(f"{arm.name}, seed {arm.seed}: {left} runs left, about {minutes:.0f} minutes")
        run(arm, args.quick)
    found: dict[str, dict[str, list[Found]]] = {}
    for name, arms in wanted.items():
        for arm in arms:
            found.setdefault(name, {}).setdefault(arm.name, []).append(load(arm))
    document = report(found, f"runs of {seconds:g} s, {len(seeds)} of each kind; steps paced at {1e3 * PACE:g} ms")
    show(document, args.json)
    if args.report:
        write_report(document, args.report)
    return 0


# ------------------------------------------------------------------ shown


def report(found: Mapping[str, Mapping[str, Sequence[Found]]], conditions: str) -> ResultDocument:
    """The figures of each part, and the merged model's loss against time and against tokens."""
    return ResultDocument(
        title="Learners of several speeds, and learners that come and go",
        summary="Whole jobs of real processes on one machine, for equally long.",
        facts={"conditions": conditions},
        rows=[row for part, kinds in found.items() for row in figures(part, kinds)],
        plots=[plot for part, kinds in found.items() for plot in loss_plots(part, kinds)],
        notes=[
            "Emulated: a step takes a fixed time, the rest of which is slept.",
            "A curve is the mean over the seeds' runs; where there are several, with the least and the greatest.",
        ],
    )


def figures(part: str, found: Mapping[str, Sequence[Found]]) -> list[dict[str, Scalar]]:
    """Goodput, learners in a merge, merged tokens per second and loss of each kind of run, beside the first kind's."""
    first = next(iter(found))
    rows: list[dict[str, Scalar]] = []

    def add(name: str, value: float, unit: str, beside: str | None, reference: float) -> None:
        ratio = value / reference if beside else None
        baseline = reference if beside else None
        names = {"name": f"{part}: {name}", "unit": unit, "against": beside}
        rows.append({**names, "value": value, "baseline": baseline, "ratio": ratio})

    means = {
        kind: {key: statistics.mean(getattr(one, key) for one in runs) for key in FIGURES}
        for kind, runs in found.items()
    }
    for kind, values in means.items():
        for key, (words, unit) in FIGURES.items():
            beside = first if len(found) > 1 else None
            add(f"{kind}: {words}", values[key], unit, beside, reference=means[first][key])
    for kind, runs in found.items():
        joined = [one.joined for one in runs if one.joined is not None]
        if joined:
            add(f"{kind}: joined until merged", statistics.mean(joined), "s", "a turn of H steps", reference=8 * PACE)
        regions = list(runs[0].share) if len(runs[0].share) > 1 else []
        for region in regions:
            share = statistics.mean(one.share[region] for one in runs)
            add(f"{kind}: tokens of {region}", 100 * share, "%", "an even share", reference=100 / len(regions))
    return rows


def loss_plots(part: str, found: Mapping[str, Sequence[Found]]) -> list[Plot]:
    axes = (Axis(name="time since the first step", unit="s"), Axis(name="tokens trained by all learners"))
    return [
        Plot(
            title=f"{part}: loss against {'time' if column == 0 else 'tokens'}",
            x=x,
            y=Axis(name="loss of the merged model", unit="nats per token"),
            series=[mean_curve(kind, runs, column) for kind, runs in found.items()],
        )
        for column, x in enumerate(axes)
    ]


def mean_curve(kind: str, runs: Sequence[Found], column: int) -> Series:
    """Loss against one column of the runs' curves, as far as all of them go."""
    at = np.linspace(0, min(one.curve[-1][column] for one in runs), POINTS)
    curves = [np.asarray(one.curve) for one in runs]
    losses = np.stack([np.interp(at, curve[:, column], curve[:, 2]) for curve in curves])
    bounds = {"low": losses.min(axis=0).tolist(), "high": losses.max(axis=0).tolist()} if len(runs) > 1 else {}
    return Series(name=kind, x=at.tolist(), y=losses.mean(axis=0).tolist(), **bounds)


def show(document: ResultDocument, as_json: bool) -> None:
    if as_json:
        print(document.model_dump_json())
        return
    print(document.facts["conditions"])
    width = max(len(str(row["name"])) for row in document.rows)
    for row in document.rows:
        beside = "" if row["ratio"] is None else f"  {row['ratio']:6.2f} x {row['against']}"
        print(f"{row['name']:{width}}  {row['value']:9.2f} {row['unit']:5}{beside}")


if __name__ == "__main__":
    try:
        common.run_to_exit(main)
    except (RunFailed, CommandError) as error:
        raise SystemExit(f"bench/heterogeneous: {error}") from error
