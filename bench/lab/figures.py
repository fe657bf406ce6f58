"""A measurement's report: what ``diloco.reports`` has for a run, with intervals, logarithmic axes and bars.

A measurement's ``--json`` is a ``ResultDocument``, so that one page can be made of it later, too (``bench/page.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from diloco.reports import document, plots
from diloco.reports.document import Scalar
from diloco.reports.html import render_html
from diloco_protocol.documents import Number


class Axis(document.Axis):
    log: bool = Field(False, description="logarithmic; not heeded where a value is not above 0")
    places: list[str] = Field([], description="of a plot's x: names for 0, 1, …, at each of which bars are drawn")


class Series(document.Series):
    low: list[Number] = Field([], description="the lower end of an interval of each y, or empty")
    high: list[Number] = Field([], description="the upper end")

    @model_validator(mode="after")
    def _same_lengths(self) -> Self:
        lengths = {len(self.x), len(self.y)} | {len(bound) for bound in (self.low, self.high) if bound}
        if len(lengths) != 1 or bool(self.low) != bool(self.high):
            raise ValueError(f"series {self.name!r}: x, y and (both or none) low and high need the same length")
        return self

    def columns(self, name: str) -> dict[str, list[Number]]:
        bounds = {f"{name}, low": self.low, f"{name}, high": self.high} if self.low else {}
        return {name: self.y, **bounds}

    @property
    def bounds(self) -> list[tuple[float, float, float]]:
        """(x, low, high) of each interval that can be drawn."""
        return [
            (x, low, high)
            for x, low, high in zip(self.x, self.low, self.high, strict=False)
            if x is not None and low is not None and high is not None and max(map(abs, (x, low, high))) < plots.LARGEST
        ]


class Plot(document.Plot):
    x: Axis
    y: Axis
    series: Sequence[Series]

    @model_validator(mode="after")
    def _places_have_names(self) -> Self:
        known = range(len(self.x.places))
        for series in self.series if known else ():
            strange = [x for x in series.x if x not in known]
            if strange:
                raise ValueError(f"series {series.name!r}: x is {strange[0]}, and the axis has {len(known)} places")
        return self

    def point_rows(self) -> tuple[list[str], list[dict[str, Scalar]]]:
        columns, rows = super().point_rows()
        if self.x.places:
            for row, name in zip(rows, sorted({x for one in self.series for x in one.x if x is not None}), strict=True):
                row[columns[0]] = self.x.places[int(name)]
        return columns, rows


class ResultDocument(document.ResultDocument):
    plots: Sequence[Plot] = []


def render_page(result: ResultDocument) -> str:
    """The report as an HTML page."""
    return render_html(result, make_figure)


def make_figure(plot: document.Plot) -> Any:
    """A matplotlib figure: bars where the axis has places, or else lines with their intervals."""
    assert isinstance(plot, Plot)
    if plot.x.places:
        return _make_bars(plot)
    figure = plots.make_lines(plot)
    (axes,) = figure.axes
    for number, series in enumerate(plot.series):
        if bounds := series.bounds:
            colour = plots.COLOURS[number % len(plots.COLOURS)]
            axes.fill_between(*zip(*bounds, strict=True), color=colour, alpha=0.18, linewidth=0)
    _set_logarithms(axes, plot)
    return figure


def _set_logarithms(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    points = [point for series in plot.series for point in plots.drawn(series)]
    for axis, at, which in ((plot.x, 0, "x"), (plot.y, 1, "y")):
        if axis.log and points and min(point[at] for point in points) > 0:
            getattr(axes, f"set_{which}scale")("log")
            ticks = getattr(axes, f"{which}axis")
            ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
            ticks.set_minor_locator(NullLocator())
            ticks.set_major_formatter(plots.tick_text)


def _make_bars(plot: Plot) -> Any:
    """Lying bars from 0, the first place on top, each place's series below each other; intervals are lines."""
    from matplotlib.figure import Figure

    names = [plots.label_text(name) for name in plot.x.places]
    thickness = 0.8 / len(plot.series)
    inches = 0.9 + len(names) * (0.12 + 0.16 * len(plot.series))
    figure = Figure(figsize=(7.6, inches))
    margin = min(0.5, 0.04 + 0.0115 * max(map(len, names)))
    figure.subplots_adjust(left=margin, right=0.985, bottom=0.55 / inches, top=1 - 0.08 / inches)
    axes = figure.add_subplot()
    for number, series in enumerate(plot.series):
        shift = (number + 0.5) * thickness - 0.4
        points = [(x + shift, y) for x, y in plots.drawn(series)]
        if points:
            at, lengths = zip(*points, strict=True)
            colour = plots.COLOURS[number % len(plots.COLOURS)]
            axes.barh(at, lengths, thickness, color=colour, label=plots.label_text(series.name))
        for x, low, high in series.bounds:
            axes.plot([low, high], [x + shift] * 2, color=plots.INK, linewidth=1.1)
    axes.axvline(0, color=plots.INK, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(plots.label_text(plot.y.title))
    axes.xaxis.set_major_formatter(plots.tick_text)
    axes.grid(True, axis="x", color=plots.INK, alpha=0.15, linewidth=0.6)
    plots.add_legend(axes, plot)
    return figure
