"""A measurement's report as Markdown: tables for all figures, plots' numbers among them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from diloco.reports.document import ResultTable, Scalar, thinned, value_text
from diloco_protocol.common.logs import printable
from lab.figures import Plot, ResultDocument

ROWS_SHOWN = 25  # of a plot's points

_SPECIAL = re.compile(r"[\\`*_\[\]<>|~$#]")


def render_markdown(document: ResultDocument) -> str:
    """The whole document, ending with a line end."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: ResultDocument) -> Iterator[str]:
    yield f"# {_plain(document.title)}"
    if document.summary:
        yield from ("", _plain(document.summary))
    if document.facts:
        yield ""
        for name, value in document.facts.items():
            yield f"- {_plain(name)}: {_plain(value_text(value))}"
    for table in document.figures:
        yield from _table(table)
    for plot in document.plots:
        yield from _plot(plot)
    for table in document.tables:
        yield from _table(table)
    if document.notes:
        yield from ("", "## Notes", "")
        yield from (f"- {_plain(note)}" for note in document.notes)


def _table(table: ResultTable) -> Iterator[str]:
    yield from ("", f"## {_plain(table.title)}", "")
    yield from _rows(table.columns, table.rows)
    yield from _notes(table.notes)


def _plot(plot: Plot) -> Iterator[str]:
    columns, points = plot.point_rows()
    rows = thinned(points, ROWS_SHOWN) if plot.x.places else _gathered(points)
    yield from ("", f"## {_plain(plot.title)}", "", f"{_plain(plot.y.title)} against {_plain(plot.x.title)}.", "")
    yield from _rows(columns if rows else [], rows)
    if len(rows) < len(points):
        last = "" if plot.x.places or len(plot.series) == 1 else " A column has its last value since the row before."
        yield from ("", f"{len(rows)} of {len(points)} points.{last}")
    if plot.marks:
        yield ""
        yield from (f"- at {value_text(mark.x)} {_plain(plot.x.unit)}: {_plain(mark.label)}" for mark in plot.marks)
    yield from _notes(plot.notes)


def _gathered(points: Sequence[dict[str, Scalar]]) -> list[dict[str, Scalar]]:
    """Evenly some of the points, each with the last values since the one before: series rarely share an x."""
    ends = thinned(range(len(points)), ROWS_SHOWN)
    rows = []
    for before, end in pairwise([-1, *ends]):
        row = {name: value for point in points[before + 1 : end + 1] for name, value in point.items()}
        rows.append(row)
    return rows


def _rows(columns: Sequence[str], rows: Sequence[dict[str, Scalar]]) -> Iterator[str]:
    if not columns:
        yield "No figures."
        return
    numeric = [all(not isinstance(row.get(name), str) for row in rows) for name in columns]
    yield _row([_plain(name) for name in columns])
    yield _row(["---:" if number else "---" for number in numeric])
    for row in rows:
        yield _row([_plain(value_text(row[name])) if name in row else "" for name in columns])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield from ("", _plain(note))


def _plain(text: str) -> str:
    """One line that Markdown shows as it is."""
    one_line = " ".join(printable(text).split())
    return _SPECIAL.sub(lambda found: "\\" + found[0], one_line.replace("&", "&amp;"))
