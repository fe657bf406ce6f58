"""What a report is made of: facts, tables of rows, plots, and notes; plain data with units.

Texts are plain: whoever renders them escapes them. A number that is not finite is not known (null).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from diloco_protocol.documents import Number

T = TypeVar("T")
Scalar = bool | int | Number | str

MOST_POINTS = 400  # of one series: who has more thins them first (``thinned``)


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Axis(_Part):
    name: str
    unit: str = ""
    counts: bool = Field(False, description="what is counted: no marks between whole numbers")

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


class Series(_Part):
    """Points in their order."""

    name: str
    x: list[Number]
    y: list[Number]
    line: Literal["line", "points", "steps"] = "line"

    @property
    def points(self) -> list[tuple[float, float]]:
        """Those that are known."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if x is not None and y is not None]

    def columns(self, name: str) -> dict[str, list[Number]]:
        """What a table of the points has beside x."""
        return {name: self.y}


class Mark(_Part):
    """Something that happened at an x: a fault, say."""

    x: float
    label: str


class Plot(_Part):
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: list[Mark] = []
    notes: list[str] = []

    def point_rows(self) -> tuple[list[str], list[dict[str, Scalar]]]:
        """The numbers: the columns, x first, then those of each series; and a row for each x."""
        columns = [self.x.title]
        at: dict[float, dict[str, Scalar]] = {}
        for number, series in enumerate(self.series):
            own = series.columns(self._column(number))
            columns += own
            for i, x in enumerate(series.x):
                if x is not None:
                    values = {name: numbers[i] for name, numbers in own.items()}
                    at.setdefault(x, {columns[0]: x}).update(values)
        return columns, [row for _, row in sorted(at.items())]

    def _column(self, number: int) -> str:
        """A name for a series' column, its own where no other has the same."""
        names = [self.x.title, *(series.name for series in self.series)]
        name = names[number + 1]
        return f"{name} ({number + 1})" if names.count(name) > 1 else name


class ResultTable(_Part):
    """Rows of named values; the columns are all names, in the order in which they come first."""

    title: str
    rows: list[dict[str, Scalar]]
    notes: list[str] = []

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))


class ResultDocument(_Part):
    """A report. ``rows``: the figures themselves, each with a name, value and unit, and where there is one a baseline
    and the ratio to it. ``notes``: what is emulated, missing, or else to be known."""

    title: str
    summary: str = ""
    facts: dict[str, Scalar] = {}
    rows: list[dict[str, Scalar]] = []
    tables: list[ResultTable] = []
    plots: Sequence[Plot] = []
    notes: list[str] = []

    @property
    def figures(self) -> list[ResultTable]:
        """``rows`` as a table; none where there are no rows."""
        return [ResultTable(title="Figures", rows=self.rows)] if self.rows else []


def thinned(items: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """At most ``most`` (2 or more) of the items, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def value_text(value: Scalar) -> str:
    """A value as people read it: four digits of what is no whole number, thousands apart."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
