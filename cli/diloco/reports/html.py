"""A report as one HTML page: style and drawings are in it, no script, and nothing is fetched.

Readable on light and on dark, as the reader's system asks. Below each plot are its numbers. The page forbids itself
everything but its own styles (Content-Security-Policy), so that a text that slipped through could not load or run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from diloco.reports import plots
from diloco.reports.document import Plot, ResultDocument, ResultTable, Scalar, value_text
from diloco_protocol.common.logs import printable

_STYLE = """\
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --faint: #66707c; --rule: #d5dae0; --row: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e4e8ec; --faint: #9aa5b1; --rule: #363d46; --row: #1c2026; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem; }
dt, .note, summary, caption { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: 0.25rem 0.7rem; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--row); }
figure { margin: 0.6rem 0; } figure svg { width: 100%; height: auto; max-width: 760px; display: block; }
summary { cursor: pointer; }"""
_ABSENT = ""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_html(document: ResultDocument, make_figure: plots.MakeFigure = plots.make_lines) -> str:
    """The whole page. Without matplotlib it has the plots' numbers and says why it has no drawings."""
    title = _text(document.title)
    head = (
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}\n</style>",
        "</head>",
        "<body>",
        f"<h1>{title}</h1>",
    )
    return "\n".join((*head, *_body(document, make_figure), "</body>", "</html>")) + "\n"


def _body(document: ResultDocument, make_figure: plots.MakeFigure) -> Iterator[str]:
    if document.summary:
        yield f"<p>{_text(document.summary)}</p>"
    if document.facts:
        yield "<dl>"
        for name, value in document.facts.items():
            yield f"<dt>{_text(name)}</dt><dd>{_text(value_text(value))}</dd>"
        yield "</dl>"
    for table in document.figures:
        yield from _table(table)
    for number, plot in enumerate(document.plots, 1):
        yield from _plot(plot, f"figure{number}", make_figure)
    for table in document.tables:
        yield from _table(table)
    if document.notes:
        yield "<h2>Notes</h2>"
        yield "<ul>"
        yield from (f"<li>{_text(note)}</li>" for note in document.notes)
        yield "</ul>"


def _table(table: ResultTable) -> Iterator[str]:
    yield f"<h2>{_text(table.title)}</h2>"
    yield from _rows(table.columns, table.rows)
    yield from _notes(table.notes)


def _plot(plot: Plot, name: str, make_figure: plots.MakeFigure) -> Iterator[str]:
    yield f"<h2>{_text(plot.title)}</h2>"
    columns, rows = plot.point_rows()
    if not plots.has_points(plot):
        yield '<p class="note">There is nothing to draw.</p>'
    else:
        try:
            drawing = plots.draw_svg(plot, name, make_figure)
        except plots.NoPlots as why:
            yield f'<p class="note">Not drawn: {_text(str(why))}</p>'
        else:
            yield f'<figure role="img" aria-label="{_text(f"{plot.y.title} against {plot.x.title}")}">'
            yield drawing
            yield "</figure>"
    if plot.marks:
        yield f"<details{_open(len(plot.marks))}><summary>What happened when ({len(plot.marks)})</summary>"
        rows_of_marks: list[dict[str, Scalar]] = [{plot.x.title: mark.x, "what": mark.label} for mark in plot.marks]
        yield from _rows([plot.x.title, "what"], rows_of_marks)
        yield "</details>"
    if rows:
        yield f"<details{_open(len(rows))}><summary>The numbers ({len(rows)})</summary>"
        yield from _rows(columns, rows)
        yield "</details>"
    yield from _notes(plot.notes)


def _open(rows: int) -> str:
    return " open" if rows <= 12 else ""


def _rows(columns: Sequence[str], rows: Sequence[dict[str, Scalar]]) -> Iterator[str]:
    numeric = {name for name in columns if all(not isinstance(row.get(name), str) for row in rows)}
    classes = {name: ' class="number"' if name in numeric else "" for name in columns}
    yield '<div class="scroll"><table>'
    yield f"<thead><tr>{''.join(f'<th{classes[name]}>{_text(name)}</th>' for name in columns)}</tr></thead>"
    yield "<tbody>"
    for row in rows:
        texts = {name: _text(value_text(value)) for name, value in row.items()}
        yield f"<tr>{''.join(f'<td{classes[name]}>{texts.get(name, _ABSENT)}</td>' for name in columns)}</tr>"
    yield "</tbody></table></div>"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield f'<p class="note">{_text(note)}</p>'


def _text(text: str) -> str:
    """Escaped, for content and for attributes in double quotes."""
    return escape(printable(text))
