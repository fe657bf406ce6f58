"""Plots as SVG to be put into a page: matplotlib draws them (the extra ``report``).

The same plot gives the same bytes: ids are salted with a fixed word and begin with the figure's name, and no time is in
it. Text and axes take the page's colour (``currentColor``), so that one drawing is readable on light and dark; series
differ by marker as well as by colour. Labels are plain text, never formulas.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

from diloco.reports.document import Plot, Series, value_text
from diloco_protocol.common.logs import printable

LABEL_LENGTH = 60
LARGEST = 1e15  # what is farther from 0 than this is not drawn
COLOURS = ("#2f86c9", "#e0851b", "#2a9d63", "#d0558b", "#8f74d0", "#b08a00", "#1aa3a3", "#c9543f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK = "#010203"  # stands for the page's colour
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diloco",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10.0,
    "path.simplify": False,
}
_PROLOGUE = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*"')
MakeFigure = Callable[[Plot], Any]
_TAG = re.compile(r"<[^>]*>")  # labels have no ">" in them: it is escaped
_ID = re.compile(r'( id="|xlink:href="#|url\(#)')
_INKED = re.compile(rf"(fill|stroke): {INK}")


class NoPlots(Exception):
    """matplotlib is not installed."""


def has_points(plot: Plot) -> bool:
    """Whether there is anything to draw."""
    return any(drawn(series) for series in plot.series)


def draw_svg(plot: Plot, name: str, make_figure: MakeFigure) -> str:
    """An ``<svg>`` element whose ids begin with ``name`` (letters and digits). Raises NoPlots."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoPlots("plots need matplotlib: pip install 'decoupled-diloco[report]'") from error
    out = io.StringIO()
    settings: Any = {**matplotlib.rcParamsDefault, **_SETTINGS}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font lacks: the page's font has it
        make_figure(plot).savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(out.getvalue(), name)


def make_lines(plot: Plot) -> Any:
    """A matplotlib figure with a line, or points, for each series, and a vertical line at each mark."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.9))
    figure.subplots_adjust(left=0.13, right=0.985, bottom=0.14, top=0.97)
    axes = figure.add_subplot()
    for number, series in enumerate(plot.series):
        _draw_series(axes, series, number)
    _draw_marks(axes, plot)
    _set_scales(axes, plot)
    add_legend(axes, plot)
    return figure


def _draw_series(axes: Any, series: Series, number: int) -> None:
    points = drawn(series)
    if not points:
        return
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    x, y = zip(*points, strict=True)
    axes.plot(
        x,
        y,
        color=colour,
        marker=marker if len(points) <= 40 or series.line == "points" else None,
        markersize=4,
        linewidth=1.6,
        linestyle="none" if series.line == "points" else ("-", "--", "-.", ":")[number // len(COLOURS) % 4],
        drawstyle="steps-post" if series.line == "steps" else "default",
        label=label_text(series.name),
    )


def _draw_marks(axes: Any, plot: Plot) -> None:
    for mark in plot.marks:
        if abs(mark.x) < LARGEST:
            axes.axvline(mark.x, color=INK, alpha=0.45, linewidth=0.8, linestyle=":")


def _set_scales(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis, ticks in ((plot.x, axes.xaxis), (plot.y, axes.yaxis)):
        ticks.set_label_text(label_text(axis.title))
        if axis.counts:
            ticks.set_major_locator(MaxNLocator(integer=True))
        ticks.set_major_formatter(tick_text)  # matplotlib's own writes formulas
    axes.grid(True, which="major", color=INK, alpha=0.15, linewidth=0.6)


def tick_text(value: float, _: object) -> str:
    """A tick's label."""
    return value_text(float(value))


def add_legend(axes: Any, plot: Plot) -> None:
    if len(plot.series) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def drawn(series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in series.points if abs(x) < LARGEST and abs(y) < LARGEST]


def label_text(text: str) -> str:
    one_line = " ".join(printable(text).split())
    short = one_line if len(one_line) <= LABEL_LENGTH else one_line[: LABEL_LENGTH - 1] + "…"
    return f" {short}" if short.startswith("_") else short  # such labels have no entry in a legend


def _for_page(svg: str, name: str) -> str:
    """Without what only a file of its own needs; ids that no other figure of the page has; scaled by the page."""
    svg = _METADATA.sub("", _PROLOGUE.sub("", svg))
    svg = _SIZE.sub(lambda found: found[1] or "", svg, count=2)
    return _TAG.sub(lambda tag: _tag_for_page(tag[0], name), svg).strip()


def _tag_for_page(tag: str, name: str) -> str:
    return _INKED.sub(r"\1: currentColor", _ID.sub(rf"\1{name}-", tag))
