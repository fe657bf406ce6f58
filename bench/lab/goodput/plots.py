"""The rows of ``bench/goodput.py`` as plots of a report (``diloco.reports``), in its JSON."""

from __future__ import annotations

from collections.abc import Sequence

from lab.fleet.advice import Row, label


def goodput_plots(rows: Sequence[Row]) -> list[Row]:
    """Goodput against chips, each method and number of learners a series, with the published points; none for one
    number of chips."""
    cells = [row for row in rows if "chips" in row]
    series = []
    for method, learners in dict.fromkeys((row["method"], row["learners"]) for row in cells):
        of = [row for row in cells if (row["method"], row["learners"]) == (method, learners)]
        name = label(method, learners)
        ours = {"name": name, "x": [row["chips"] for row in of], "y": [row["value"] for row in of]}
        series.append({**ours, "low": [row["low"] for row in of], "high": [row["high"] for row in of]})
        known = [row for row in of if "published" in row]
        if known:
            points = {"x": [row["chips"] for row in known], "y": [row["published"] for row in known]}
            series.append({"name": f"{name}, published", "line": "points", **points})
    if len({row["chips"] for row in cells}) < 2:
        return []
    axes = {"x": {"name": "chips", "log": True}, "y": {"name": "goodput", "unit": "%"}}
    return [{"title": "Goodput under chip failures", **axes, "series": series}]
