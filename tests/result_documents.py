"""Reports of measurements for tests of what renders them: a usual plot, and a document of hostile texts."""

from __future__ import annotations

from diloco.reports.document import Axis, Mark, Plot, ResultDocument, ResultTable, Series

HOSTILE = (
    """<script src="http://x/a.js">&amp;' "a" | `b` $\\frac{1$ _c_ """
    """<!-- [d](http://e) \x1b[2J\x00 #010203 fill: #010203"""
)
LONG = "_" + "very " * 40


def plot(**changes: object) -> Plot:
    fields = {
        "title": "Tokens per second against bandwidth",
        "x": Axis(name="bandwidth", unit="Mbit/s", log=True),
        "y": Axis(name="tokens per second", log=True),
        "series": [
            Series(name="ours", x=[1, 4, 16], y=[900, 1000, 1000], low=[800, 950, 990], high=[950, 1020, 1010]),
            Series(name="DDP", x=[1, 4, 16], y=[20, 80, 320]),
        ],
        **changes,
    }
    return Plot.model_validate(fields)


def hostile() -> ResultDocument:
    axis = Axis(name=HOSTILE, unit=HOSTILE)
    lines = [Series(name=HOSTILE, x=[1, 2], y=[1, 2]), Series(name=LONG, x=[1, 2], y=[2, 1], line="steps")]
    bad = Plot(title=HOSTILE, x=axis, y=axis, series=lines, marks=[Mark(x=1.5, label=HOSTILE)], notes=[HOSTILE])
    rows = [{HOSTILE: HOSTILE, "b": 1}]
    return ResultDocument(
        title=HOSTILE,
        summary=HOSTILE,
        facts={HOSTILE: HOSTILE},
        rows=rows,
        tables=[ResultTable(title=HOSTILE, rows=rows, notes=[HOSTILE])],
        plots=[bad, bad],
        notes=[HOSTILE],
    )
