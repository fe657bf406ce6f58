"""Draw docs/pictures/goodput.svg: goodput against chips, from the table of docs/results.md, ours beside the paper's.

The table is the source: nothing is simulated here. ``--check`` exits 1 if the picture was drawn from other figures.
The points stand in the picture's ``<desc>``, so that a check does not depend on what matplotlib writes.
"""

from __future__ import annotations

import argparse
import json
import re
from html import escape, unescape
from pathlib import Path

from diloco.reports.document import Axis, Plot, Series
from diloco.reports.plots import draw_svg
from diloco_protocol.common.files import PUBLIC, write_whole

PAGE, PICTURE = Path("docs/results.md"), Path("docs/pictures/goodput.svg")
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
        raise ValueError(f"{PAGE} has no table that begins with '| chips |'")
    sizes = [float(size.strip()[:-1]) * _UNITS[size.strip()[-1]] for size in head["sizes"].strip("| ").split("|")]
    rows = page[head.end() :].split("\n\n", 1)[0].splitlines()
    found = {cells[0].strip(): cells[1:] for cells in (row.strip("| ").split("|") for row in rows)}
    series = []
    for name in SHOWN:
        values = [match for match in map(_CELL.search, found.get(name, [])) if match]
        if len(values) != len(sizes):
            raise ValueError(f"{PAGE}: the row {name!r} needs a cell like '72 / 71.6 ± 0.4' for each number of chips")
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
    svg = draw_svg(plot, "goodput")
    opening, rest = svg.split(">", 1)
    return f'{opening} style="color: {COLOUR}"><desc>{escape(describe(series))}</desc>{rest}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the picture is not current")
    chosen = parser.parse_args()
    series = read_series(PAGE.read_text(encoding="utf-8"))
    if not chosen.check:
        write_whole(PICTURE, draw(series).encode(), mode=PUBLIC)
        return 0
    drawn = _DESC.search(PICTURE.read_text(encoding="utf-8")) if PICTURE.exists() else None
    if drawn is None or unescape(drawn[1]) != describe(series):
        print(f"{PICTURE} is not current: run make tables")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
