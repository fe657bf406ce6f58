"""Plots as SVG to be put into a page: matplotlib draws them (the extra ``report``).

The same plot gives the same bytes: ids are salted with a fixed word and begin with the figure's name, and no time is in
it. Text and axes take the page's colour (``currentColor``), so that one drawing is readable on light and dark; series
differ by marker as well as by colour. Labels are plain text, never formulas.
"""

from __future__ import annotations

import io
import re
import warnings
from typing import Any

from diloco.reports.document import Axis, Plot, Series, value_text
from diloco_protocol.common.logs import printable

LABEL_LENGTH = 60
LARGEST = 1e15  # what is farther from 0 than this is not drawn
COLOURS = ("#2f86c9", "#e0851b", "#2a9d63", "#d0558b", "#8f74d0", "#b08a00", "#1aa3a3", "#c9543f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK = "#010203"  # stands for the page's colour
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "diloco",
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10.0,
    "path.simplify": False,
}
_PROLOGUE = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*"')
_TAG = re.compile(r"<[^>]*>")  # labels have no ">" in them: it is escaped
_ID = re.compile(r'( id="|xlink:href="#|url\(#)')
_INKED = re.compile(rf"(fill|stroke): {_INK}")


class NoPlots(Exception):
    """matplotlib is not installed."""


def has_points(plot: Plot) -> bool:
    """Whether there is anything to draw."""
    return any(_drawn(series) for series in plot.series)


def draw_svg(plot: Plot, name: str) -> str:
    """An ``<svg>`` element whose ids begin with ``name`` (letters and digits). Raises NoPlots."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlots("plots need matplotlib: pip install 'decoupled-diloco[report]'") from error
    out = io.StringIO()
    settings: Any = {**matplotlib.rcParamsDefault, **_SETTINGS}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font lacks: the page's font has it
        if plot.x.places:
            figure = _bars_figure(plot)
        else:
            figure = Figure(figsize=(7.6, 3.9))
            figure.subplots_adjust(left=0.13, right=0.985, bottom=0.14, top=0.97)
            axes = figure.add_subplot()
            for number, series in enumerate(plot.series):
                _draw_series(axes, series, number)
            _draw_marks(axes, plot)
            _set_scales(axes, plot)
            _add_legend(axes, plot)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_page(out.getvalue(), name)


def _draw_series(axes: Any, series: Series, number: int) -> None:
    points = _drawn(series)
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
        label=_label(series.name),
    )
    bounds = _bounds(series)
    if bounds:
        axes.fill_between(*zip(*bounds, strict=True), color=colour, alpha=0.18, linewidth=0)


def _bounds(series: Series) -> list[tuple[float, float, float]]:
    """(x, low, high) of each interval that can be drawn."""
    return [
        (x, low, high)
        for x, low, high in zip(series.x, series.low, series.high, strict=False)
        if x is not None and low is not None and high is not None and max(abs(x), abs(low), abs(high)) < LARGEST
    ]


def _bars_figure(plot: Plot) -> Any:
    """Lying bars from 0, the first place on top, each place's series below each other; intervals are lines."""
    from matplotlib.figure import Figure

    names = [_label(name) for name in plot.x.places]
    thickness = 0.8 / len(plot.series)
    inches = 0.9 + len(names) * (0.12 + 0.16 * len(plot.series))
    figure = Figure(figsize=(7.6, inches))
    margin = min(0.5, 0.04 + 0.0115 * max(map(len, names)))
    figure.subplots_adjust(left=margin, right=0.985, bottom=0.55 / inches, top=1 - 0.08 / inches)
    axes = figure.add_subplot()
    for number, series in enumerate(plot.series):
        shift = (number + 0.5) * thickness - 0.4
        points = [(x + shift, y) for x, y in _drawn(series)]
        if points:
            at, lengths = zip(*points, strict=True)
            axes.barh(at, lengths, thickness, color=COLOURS[number % len(COLOURS)], label=_label(series.name))
        for x, low, high in _bounds(series):
            axes.plot([low, high], [x + shift] * 2, color=_INK, linewidth=1.1)
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(_label(plot.y.title))
    axes.xaxis.set_major_formatter(lambda value, _: value_text(float(value)))
    axes.grid(True, axis="x", color=_INK, alpha=0.15, linewidth=0.6)
    _add_legend(axes, plot)
    return figure


def _draw_marks(axes: Any, plot: Plot) -> None:
    for mark in plot.marks:
        if abs(mark.x) < LARGEST and not (plot.x.log and mark.x <= 0):
            axes.axvline(mark.x, color=_INK, alpha=0.45, linewidth=0.8, linestyle=":")


def _set_scales(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    points = [point for series in plot.series for point in _drawn(series)]
    for axis, at, which in ((plot.x, 0, "x"), (plot.y, 1, "y")):
        getattr(axes, f"set_{which}label")(_label(axis.title))
        ticks = getattr(axes, f"{which}axis")
        if _is_log(axis, [point[at] for point in points]):
            getattr(axes, f"set_{which}scale")("log")
            ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
            ticks.set_minor_locator(NullLocator())
        elif axis.counts:
            ticks.set_major_locator(MaxNLocator(integer=True))
        ticks.set_major_formatter(lambda value, _: value_text(float(value)))  # matplotlib's own writes formulas
    axes.grid(True, which="major", color=_INK, alpha=0.15, linewidth=0.6)


def _is_log(axis: Axis, values: list[float]) -> bool:
    return axis.log and bool(values) and min(values) > 0


def _add_legend(axes: Any, plot: Plot) -> None:
    if len(plot.series) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=_INK)


def _drawn(series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in series.points if abs(x) < LARGEST and abs(y) < LARGEST]


def _label(text: str) -> str:
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
