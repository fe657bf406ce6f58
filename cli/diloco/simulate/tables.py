"""The simulators' rows as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diloco.simulate.goodput.published import YEAR

Row = dict[str, Any]


def format_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they must be, the first one to the left, the others to the right."""
    rows = [head, *body]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if not i else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def duration_text(seconds: float) -> str:
    """Seconds as the options are written."""
    for unit, length in (("y", YEAR), ("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.3g}{unit}"
    return f"{seconds:.3g}s"


def count_text(count: float) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return f"{count:g}"


def value_text(row: Row) -> str:
    """The value and half of its 95 % interval."""
    half = (row["high"] - row["low"]) / 2
    return f"{row['value']:.1f} ± {half:.1f}"


# ------------------------------------------------------------------ goodput


def goodput_text(document: Row) -> str:
    """The published tables beside ours, or those of a fleet of one's own."""
    head = (
        f"Goodput in %, with 95 % intervals over {document['repetitions']} repetitions of {document['failures']:g} "
        f"failures; one failure per chip in {duration_text(document['parameters']['mtbi']['value'])}"
    )
    rows = document["rows"]
    parts = [head, _grid(rows)]
    if document["rmse"] is not None:
        worst = max((row for row in rows if "published" in row and "chips" in row), key=_distance)
        parts.append(
            f"published first, then ours. RMSE {document['rmse']:.2f} points; farthest: {worst['name']}, "
            f"{_distance(worst):.1f}"
        )
    parts += [text for text in (_uneven(rows), _scavenging(rows), *_core(rows)) if text]
    if document.get("enough"):
        parts += _advice(document)
    parts.append(_parameters(document["parameters"]))
    return "\n\n".join(parts)


def _distance(row: Row) -> float:
    return abs(float(row["value"]) - float(row["published"]))


def _grid(rows: Sequence[Row]) -> str:
    cells = [row for row in rows if "chips" in row]
    sizes = list(dict.fromkeys(row["chips"] for row in cells))
    kinds = list(dict.fromkeys((row["method"], row["learners"]) for row in cells))
    found = {(row["method"], row["learners"], row["chips"]): row for row in cells}

    def cell(row: Row) -> str:
        return (f"{row['published']}  " if "published" in row else "") + value_text(row)

    def named(method: str, learners: int) -> str:
        return f"M = {learners}" if method == "decoupled" else method

    lines = [[named(*kind), *(cell(found[*kind, size]) for size in sizes)] for kind in kinds]
    uptime = [[f"uptime, {named(*kind)}", *(f"{found[*kind, size]['uptime']:.1f}" for size in sizes)] for kind in kinds]
    return format_table(["chips", *(count_text(size) for size in sizes)], [*lines, *uptime])


def _uneven(rows: Sequence[Row]) -> str:
    unequal = [row for row in rows if row["name"].startswith("unequal") and row["method"] != "core"]
    body = [[row["name"], str(row["published"]), value_text(row)] for row in unequal]
    return format_table(["learners that wait for a quorum, goodput in %", "published", "ours"], body) if body else ""


def _scavenging(rows: Sequence[Row]) -> str:
    body = [[row["name"], f"{row['published']:.2f}", f"{row['value']:.2f}"] for row in rows if row["unit"] == "x"]
    return format_table(["compute that comes and goes", "published", "ours"], body) if body else ""


def _core(rows: Sequence[Row]) -> list[str]:
    """What the real core did: beside the fast simulator, and with learners of unequal speed."""
    own = [row for row in rows if row["method"] == "core"]
    fleets = [
        [
            row["name"],
            value_text(row),
            f"{row['baseline']:.1f} ± {row['baseline_half']:.1f}",
            "yes" if row["agrees"] else "NO",
            f"{row['responders']:.4g}",
            f"{row['pending']:.1f}",
            f"{row['microseconds_per_event']:.0f}",
        ]
        for row in own
        if "agrees" in row
    ]
    unequal = [
        [row["name"], value_text(row), f"{row['responders']:.1f}", f"{row['pace']:.2f}"]
        for row in own
        if "agrees" not in row
    ]
    by_ledger = ["the real core, goodput in %", "by its ledger", "fast simulator", "agree"]
    merged = ["learners that do not wait, in %", "merged or on its way", "learners in a merge", "merges of those due"]
    return [
        format_table([*by_ledger, "learners in a merge", "turns on the way", "µs per event"], fleets) if fleets else "",
        format_table(merged, unequal) if unequal else "",
    ]


def _advice(document: Row) -> list[str]:
    rows, enough = document["rows"], document["enough"]
    spares = [row for row in rows if row["method"] == "spares"]
    recovery = [row for row in rows if row["method"] == "recovery"]
    return [
        f"M = {enough} is the smallest that comes within a point of the best here. More learners also cost: the "
        "paper's models fell off at M = 16, and the hub's traffic grows with M.",
        format_table(
            ["what spares buy", "goodput", "per bought chip"],
            [[row["name"], value_text(row), f"{row['per_bought_chip']:.1f}"] for row in spares],
        ),
        format_table(
            ["what faster recovery buys", "goodput", "times as much"],
            [[row["name"], value_text(row), f"{row['ratio']:.3f}"] for row in recovery],
        ),
    ]


def _parameters(parameters: Row) -> str:
    def text(name: str, value: float) -> str:
        return duration_text(value) if name in ("mtbi", "repair-mean") else f"{value:g}"

    body = [[f"--{name}", text(name, one["value"]), one["source"]] for name, one in parameters.items()]
    width = [max(len(row[i]) for row in body) for i in range(2)]
    return "\n".join(f"{name.ljust(width[0])}  {value.rjust(width[1])}  {source}" for name, value, source in body)


# ------------------------------------------------------------------ bandwidth


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
