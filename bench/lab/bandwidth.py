"""``bench/link_needs.py``: what links need, and how much of its time a learner computes on a given link.

The formulas and the queue are ``diloco_protocol.bandwidth.model``, the bytes of a star's exchange ``links``. Here they
are put beside what the paper reports for an all-reduce of fragments, and swept over bandwidths. Rates are bits per
second; in rows they are Gbit/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_protocol.bandwidth import links, model
from diloco_protocol.bandwidth.links import Need
from diloco_protocol.bandwidth.model import Turn
from diloco_protocol.resources import even_sizes
from lab.fleet.tables import format_table

Row = dict[str, Any]

GIGA = 1e9
DATA_PARALLEL = "data-parallel, bfloat16"
ENCODINGS = (("float32", "float32"), ("int4", "bfloat16"), ("int4", "delta-int4"), ("int2", "delta-int4"))
RATES = tuple(step * 10.0**power for power in range(-2, 3) for step in (1, 2, 5))  # Gbit/s


@dataclass(frozen=True, slots=True)
class Case:
    """A model's parameters, how many learners, when they exchange, and the share of their time that they compute."""

    parameters: int
    learners: int
    turn: Turn
    utilisation: float = model.UTILISATION


@dataclass(frozen=True, slots=True)
class Both:
    """Bits per second that one link needs, by the formula and by the queue."""

    formula: float
    queue: float


@dataclass(frozen=True, slots=True)
class StarNeed:
    """What one learner's link of a star needs, by the formula and by the queue."""

    formula: Need
    queue: Need


_PAPER = Turn(fragments=24, every=24, overlap=2, step_seconds=1.0)
# Published Gbit/s, the settings that match them (fit: the paper's text does not give all of them), bits of a value;
# None: data-parallel.
PUBLISHED: tuple[tuple[float, Case, int | None], ...] = (
    (198.0, Case(5_000_000_000, 8, _PAPER, 0.95), None),
    (0.84, Case(5_000_000_000, 8, _PAPER, 0.95), 4),
    (104.0, Case(5_000_000_000, 2, _PAPER, 0.90), None),
    (1.7, Case(5_000_000_000, 2, _PAPER, 0.90), 16),
)


def data_parallel_utilisation(parameters: float, learners: int, step_seconds: float, bits_per_second: float) -> float:
    """c of data-parallel training in bfloat16 over such links: ``model.data_parallel`` solved for c."""
    seconds = 16 * parameters * model.all_reduce_factor(learners) / bits_per_second
    return min(1.0, 1 / (model.FORWARD + seconds / step_seconds))


def formula_utilisation(turn: Turn, seconds: float) -> float:
    """c by the formula, where an exchange takes ``seconds``: ``model.formula_seconds`` solved for c."""
    return min(1.0, turn.overlap / (model.FORWARD + (seconds + turn.between_seconds) / turn.step_seconds))


def all_reduce_need(case: Case, bits: int) -> Both:
    """What an all-reduce of fragments, ``bits`` for each value, asks of each learner's link."""
    turn = case.turn
    carried = bits * case.parameters * model.all_reduce_factor(case.learners) / turn.fragments
    return Both(
        model.rate(carried, model.formula_seconds(turn, case.utilisation)),
        model.rate(carried, model.queued_seconds(turn, case.utilisation, 1.0, 0.0)),
    )


def parallel_need(case: Case) -> float:
    """What data-parallel training in bfloat16 asks of each learner's link."""
    return model.data_parallel(case.parameters, case.learners, case.turn.step_seconds, case.utilisation)


def star_need(case: Case, up: str, down: str) -> StarNeed:
    """What a star asks of one learner's link; the hub needs ``learners`` times that, in and out."""
    carried = links.traffic(even_sizes(case.parameters, case.turn.fragments), up, down, case.learners)
    return StarNeed(
        links.need_by_formula(carried, case.turn, case.utilisation),
        links.need_by_queue(carried, case.turn, case.utilisation),
    )


# ------------------------------------------------------------------ what is needed


def published_rows() -> list[Row]:
    """The four published figures beside the formula's and the queue's."""
    rows = []
    for value, case, bits in PUBLISHED:
        parallel = parallel_need(case)
        need = Both(parallel, parallel) if bits is None else all_reduce_need(case, bits)
        kind = DATA_PARALLEL if bits is None else f"all-reduce of fragments, {bits} bits"
        where = f"{kind}, M = {case.learners}, {100 * case.utilisation:.0f} % computing"
        for by, found in (("formula", need.formula), ("queue", need.queue)):
            if bits is None and by == "queue":
                continue  # one exchange at a time: there is no queue
            rows.append(_need_row(f"{where}, by {by}", found, parallel, by=by, published=value))
    return rows


def star_rows(case: Case) -> list[Row]:
    """What our star needs: each learner's link, up and down, and the hub's, in and out, by the queue; and a link that
    is as fast up as down, by both."""
    parallel = parallel_need(case)
    rows = [_need_row(f"{DATA_PARALLEL}, each learner's link, each way", parallel, parallel, by="formula")]
    for up, down in ENCODINGS:
        name, need = f"star, {up} up, {down} down", star_need(case, up, down)
        for by, one in (("formula", need.formula), ("queue", need.queue)):
            rows.append(_need_row(f"{name}, link, by {by}", one.same, parallel, by=by, part="link"))
        queue = need.queue
        parts = {"link, up": queue.up, "link, down": queue.down}
        parts |= {"hub, in": case.learners * queue.up, "hub, out": case.learners * queue.down}
        rows += [_need_row(f"{name}, {part}", bits, parallel, by="queue", part=part) for part, bits in parts.items()]
    return rows


def _need_row(name: str, bits: float, parallel: float, **more: Any) -> Row:
    """Value and ratio are None where no bandwidth is enough."""
    enough = 0 < bits < math.inf
    row = {"name": name, "kind": "need", "value": bits / GIGA if enough else None, "unit": "Gbit/s"}
    row |= {"against": DATA_PARALLEL, "baseline": parallel / GIGA, "ratio": parallel / bits if enough else None}
    return {**row, **more}


# ------------------------------------------------------------------ how much is computed


def curve_rows(
    case: Case,
    overlaps: Sequence[int],
    rates: Sequence[float] = RATES,
    on_progress: Callable[[float], None] = lambda share: None,
) -> list[Row]:
    """Share of its time (%) that a learner computes on a link of each rate (Gbit/s, the same up and down), by the
    queue, and by the formula beside it: data-parallel training, and a star with each pair of encodings and each τ."""
    rows: list[Row] = []
    for number, rate in enumerate(rates):
        bits = rate * GIGA
        step = case.turn.step_seconds
        parallel = 100 * data_parallel_utilisation(case.parameters, case.learners, step, bits)
        for series, share, formula in [(DATA_PARALLEL, parallel, parallel), *_star_shares(case, overlaps, bits)]:
            row = {"name": f"{series}, at {rate:g} Gbit/s", "kind": "curve", "series": series, "rate": rate}
            row |= {"value": share, "unit": "%", "formula": formula, "against": DATA_PARALLEL, "baseline": parallel}
            rows.append({**row, "ratio": share / parallel})
        on_progress((number + 1) / len(rates))
    return rows


def _star_shares(case: Case, overlaps: Sequence[int], bits: float) -> Iterator[tuple[str, float, float]]:
    """Name of the series, and its shares by the queue and by the formula."""
    for up, down in ENCODINGS:
        carried = links.traffic(even_sizes(case.parameters, case.turn.fragments), up, down, case.learners)
        seconds = [8 * links.FRAMING * one / bits for one in (carried.up, carried.down)]
        for overlap in overlaps:
            turn = replace(case.turn, overlap=overlap)
            share = model.utilisation(turn, model.run_steps(turn, case.utilisation), *seconds)
            formula = formula_utilisation(turn, sum(seconds))
            yield f"star, {up} up, {down} down, overlap {overlap}", 100 * share, 100 * formula


# ------------------------------------------------------------------ for people


def bandwidth_text(document: Row) -> str:
    """The published needs, our star's, and the curves."""
    rows = document["rows"]
    published = [
        [row["name"], f"{row['published']:g}", f"{row['value']:.3g}", f"{row['ratio']:.3g}"]
        for row in rows
        if "published" in row
    ]
    ours = [
        [
            row["name"],
            *(("none is enough", "-") if row["value"] is None else (f"{row['value']:.3g}", f"{row['ratio']:.3g}")),
        ]
        for row in rows
        if row["kind"] == "need" and "published" not in row
    ]
    curves = [row for row in rows if row["kind"] == "curve"]
    series = list(dict.fromkeys(row["series"] for row in curves))
    rates = list(dict.fromkeys(row["rate"] for row in curves))
    found = {(row["series"], row["rate"]): row for row in curves}
    times = "data-parallel ÷ it"

    def shares(field: str) -> str:
        lines = [[name, *(f"{found[name, rate][field]:.3g}" for rate in rates)] for name in series]
        return format_table(["", *(f"{rate:g}" for rate in rates)], lines)

    return "\n\n".join(
        [
            format_table(["Gbit/s needed, 5e9 parameters, steps of 1 s", "published", "ours", times], published),
            format_table([document["title"], "Gbit/s", times], ours),
            "Share of its time (%) that a learner computes, by the queue; columns: Gbit/s of its link, each way. (A "
            "learner of this project does not wait on a slow link: its merges become rarer, in the same proportion.)",
            shares("value"),
            "The same by the formula, which counts one exchange at a time:",
            shares("formula"),
        ]
    )


def utilisation_plots(rows: Sequence[Row]) -> list[Row]:
    """The share of its time that a learner computes, against the bandwidth of its link: by the queue, and by the
    formula."""
    curves = [row for row in rows if row["kind"] == "curve"]
    axes = {
        "x": {"name": "bandwidth, each way", "unit": "Gbit/s", "log": True},
        "y": {"name": "computing", "unit": "%"},
    }
    plots = []
    for by, field in (("queue", "value"), ("formula", "formula")):
        series = []
        for name in dict.fromkeys(row["series"] for row in curves):
            of = [row for row in curves if row["series"] == name]
            series.append({"name": name, "x": [row["rate"] for row in of], "y": [row[field] for row in of]})
        plots.append({"title": f"Share of its time that a learner computes, by the {by}", **axes, "series": series})
    return plots
