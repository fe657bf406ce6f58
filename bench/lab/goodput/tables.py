"""The rows of ``bench/goodput.py`` as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from lab.fleet.advice import Row, label
from lab.fleet.tables import advice_texts, format_table, head_text, parameters_text, value_text


def count_text(count: float) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return f"{count:g}"


def goodput_text(document: Row) -> str:
    """The published tables beside ours, and what a fleet of one's own is told."""
    rows = document["rows"]
    parts = [head_text(document), _grid(rows)]
    if document["rmse"] is not None:
        worst = max((row for row in rows if "published" in row and "chips" in row), key=_distance)
        parts.append(
            f"published first, then ours. RMSE {document['rmse']:.2f} points; farthest: {worst['name']}, "
            f"{_distance(worst):.1f}"
        )
    parts += [text for text in (_uneven(rows), _scavenging(rows), *_core(rows)) if text]
    parts += advice_texts(document) if "enough" in document else []
    parts.append(parameters_text(document["parameters"]))
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

    lines = [[label(*kind), *(cell(found[*kind, size]) for size in sizes)] for kind in kinds]
    uptime = [[f"uptime, {label(*kind)}", *(f"{found[*kind, size]['uptime']:.1f}" for size in sizes)] for kind in kinds]
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
