"""Draw docs/pictures/goodput.svg: goodput against chips, from the table of docs/results/goodput.md.

The table is the source: nothing is simulated here. The points stand in the picture's ``<desc>``: a picture with the
same points is current, whatever another version of matplotlib would draw.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape, unescape
from pathlib import Path

from diloco.reports.plots import draw_svg

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

from lab.figures import Axis, Plot, Series, make_figure

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "goodput.md"
SHOWN = ("rigid data-parallel", "elastic data-parallel", "M = 8")
_HEAD = re.compile(r"^\| chips (?P<sizes>\|[^\n]+)\|$", re.MULTILINE)
_CELL = re.compile(r"(?P<published>[\d.]+) / (?P<ours>[\d.]+) ± (?P<half>[\d.]+)")
_DESC = re.compile(r"<desc>(.*?)</desc>", re.DOTALL)
_UNITS = {"k": 1e3, "M": 1e6}
COLOUR = "#7d8590"  # of text and axes: readable on white and on black


def read_series(page: str) -> list[Series]:
    """Two series of each row that is shown: simulated, and as published. Raises ValueError if there is no table."""
    head = _HEAD.search(page)
    if head is None:
        raise ValueError(f"{PAGE.name} has no table that begins with '| chips |'")
    sizes = [float(size.strip()[:-1]) * _UNITS[size.strip()[-1]] for size in head["sizes"].strip("| ").split("|")]
    rows = page[head.end() :].split("\n\n", 1)[0].splitlines()
    found = {cells[0].strip(): cells[1:] for cells in (row.strip("| ").split("|") for row in rows)}
    series = []
    for name in SHOWN:
        values = [match for match in map(_CELL.search, found.get(name, [])) if match]
        if len(values) != len(sizes):
            raise ValueError(f"{PAGE.name}: the row {name!r} needs a cell like '72 / 71.6 ± 0.4' for each size")
        ours, half = ([float(value[key]) for value in values] for key in ("ours", "half"))
        low, high = ([y + sign * h for y, h in zip(ours, half, strict=True)] for sign in (-1, 1))
        series.append(Series(name=name, x=[*sizes], y=[*ours], low=[*low], high=[*high]))
        published = [float(value["published"]) for value in values]
        series.append(Series(name=f"{name}, published", x=[*sizes], y=[*published], line="points"))
    return series


def describe(series: list[Series]) -> str:
    return json.dumps([each.model_dump(include={"name", "x", "y"}) for each in series])


def draw(series: list[Series]) -> str:
    """A file of its own: text and axes have one colour, since an image does not know its page's."""
    plot = Plot(title="", x=Axis(name="chips", log=True), y=Axis(name="goodput", unit="%"), series=series)
    svg = draw_svg(plot, "goodput", make_figure)
    opening, rest = svg.split(">", 1)
    return f'{opening} style="color: {COLOUR}"><desc>{escape(describe(series))}</desc>{rest}\n'


def picture(there: str) -> str:
    """The picture as it is, if it shows the table's figures, or else drawn anew."""
    series = read_series(PAGE.read_text(encoding="utf-8"))
    drawn = _DESC.search(there)
    return there if drawn and unescape(drawn[1]) == describe(series) else draw(series)
