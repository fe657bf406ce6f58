"""Reports of measurements for tests of what renders them: a usual plot, and a document of hostile texts."""

from __future__ import annotations

from typing import Any, TypeVar

from diloco.reports.document import Plot, ResultDocument

D = TypeVar("D", bound=ResultDocument)

HOSTILE = (
    """<script src="http://x/a.js">&amp;' "a" | `b` $\\frac{1$ _c_ """
    """<!-- [d](http://e) \x1b[2J\x00 #010203 fill: #010203"""
)
LONG = "_" + "very " * 40


def plot(kind: type[Plot] = Plot, **changes: Any) -> Any:
    """A plot of this kind, with what it knows of these fields."""
    fields = {
        "title": "Tokens per second against bandwidth",
        "x": {"name": "bandwidth", "unit": "Mbit/s", "log": True},
        "y": {"name": "tokens per second", "log": True},
        "series": [
            {
                "name": "ours",
                "x": [1, 4, 16],
                "y": [900, 1000, 1000],
                "low": [800, 950, 990],
                "high": [950, 1020, 1010],
            },
            {"name": "DDP", "x": [1, 4, 16], "y": [20, 80, 320]},
        ],
        **changes,
    }
    return kind.model_validate(fields)


def hostile(kind: type[D]) -> D:
    axis = {"name": HOSTILE, "unit": HOSTILE}
    lines = [{"name": HOSTILE, "x": [1, 2], "y": [1, 2]}, {"name": LONG, "x": [1, 2], "y": [2, 1], "line": "steps"}]
    marks = [{"x": 1.5, "label": HOSTILE}]
    bad = {"title": HOSTILE, "x": axis, "y": axis, "series": lines, "marks": marks, "notes": [HOSTILE]}
    rows = [{HOSTILE: HOSTILE, "b": 1}]
    return kind.model_validate(
        {
            "title": HOSTILE,
            "summary": HOSTILE,
            "facts": {HOSTILE: HOSTILE},
            "rows": rows,
            "tables": [{"title": HOSTILE, "rows": rows, "notes": [HOSTILE]}],
            "plots": [bad, bad],
            "notes": [HOSTILE],
        }
    )
