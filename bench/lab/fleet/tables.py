"""The simulator's rows as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.fleet.parameters import YEAR

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


def value_text(row: Row) -> str:
    """The value and half of its 95 % interval."""
    half = (row["high"] - row["low"]) / 2
    return f"{row['value']:.1f} ± {half:.1f}"


def head_text(document: Row) -> str:
    """What the figures are of."""
    return (
        f"Goodput in %, with 95 % intervals over {document['repetitions']} repetitions of {document['failures']:g} "
        f"failures; one failure per chip in {duration_text(document['parameters']['mtbi']['value'])}"
    )


def advice_texts(document: Row) -> list[str]:
    """What a fleet of one's own is told below the goodput of each number of learners."""
    rows, enough = document["rows"], document["enough"]
    spares = [row for row in rows if row["method"] == "spares"]
    recovery = [row for row in rows if row["method"] == "recovery"]
    return [
        f"M = {enough} is the smallest that comes within a point of the best here. More learners also cost: the "
        "paper's models fell off at M = 16, and the hub's traffic grows with M.",
        *([document["left_out"]] if document["left_out"] else []),
        format_table(
            ["what spares buy", "goodput", "per bought chip"],
            [[row["name"], value_text(row), f"{row['per_bought_chip']:.1f}"] for row in spares],
        ),
        format_table(
            ["what faster recovery buys", "goodput", "times as much"],
            [[row["name"], value_text(row), f"{row['ratio']:.3f}"] for row in recovery],
        ),
    ]


def parameters_text(parameters: Mapping[str, Row]) -> str:
    """Every parameter with its value and where that is from."""

    def text(name: str, value: float) -> str:
        return duration_text(value) if name in ("mtbi", "repair-mean") else f"{value:g}"

    body = [[name, text(name, one["value"]), one["source"]] for name, one in parameters.items()]
    width = [max(len(row[i]) for row in body) for i in range(2)]
    return "\n".join(f"{name.ljust(width[0])}  {value.rjust(width[1])}  {source}" for name, value, source in body)
