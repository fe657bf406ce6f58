"""What a report is made of: facts, tables of rows, plots, and notes; plain data with units.

A measurement's ``--json`` is a ``ResultDocument``, so that one page can be made of it later, too. Texts are plain:
whoever renders them escapes them. A number that is not finite is not known (null).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from diloco_protocol.documents import Number

T = TypeVar("T")
Scalar = bool | int | Number | str

MOST_POINTS = 400  # of one series: who has more thins them first (``thinned``)


class ReportError(Exception):
    """A document that cannot be read; the message says what is wrong with it."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Axis(_Part):
    name: str
    unit: str = ""
    log: bool = Field(False, description="logarithmic; not heeded where a value is not above 0")
    counts: bool = Field(False, description="what is counted: no marks between whole numbers")
    places: list[str] = Field([], description="of a plot's x: names for 0, 1, …, at each of which bars are drawn")

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


class Series(_Part):
    """Points in their order. ``low`` and ``high``: an interval of each y, or empty."""

    name: str
    x: list[Number]
    y: list[Number]
    low: list[Number] = []
    high: list[Number] = []
    line: Literal["line", "points", "steps"] = "line"

    @model_validator(mode="after")
    def _same_lengths(self) -> Self:
        lengths = {len(self.x), len(self.y)} | {len(bound) for bound in (self.low, self.high) if bound}
        if len(lengths) != 1 or bool(self.low) != bool(self.high):
            raise ValueError(f"series {self.name!r}: x, y and (both or none) low and high need the same length")
        return self

    @property
    def points(self) -> list[tuple[float, float]]:
        """Those that are known."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if x is not None and y is not None]


class Mark(_Part):
    """Something that happened at an x: a fault, say."""

    x: float
    label: str


class Plot(_Part):
    title: str
    x: Axis
    y: Axis
    series: list[Series]
    marks: list[Mark] = []
    notes: list[str] = []

    @model_validator(mode="after")
    def _places_have_names(self) -> Self:
        known = range(len(self.x.places))
        for series in self.series if known else ():
            strange = [x for x in series.x if x not in known]
            if strange:
                raise ValueError(f"series {series.name!r}: x is {strange[0]}, and the axis has {len(known)} places")
        return self

    def place(self, x: float) -> Scalar:
        """What stands at ``x`` of the axis."""
        return self.x.places[int(x)] if self.x.places else x


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
    plots: list[Plot] = []
    notes: list[str] = []

    @property
    def figures(self) -> list[ResultTable]:
        """``rows`` as a table; none where there are no rows."""
        return [ResultTable(title="Figures", rows=self.rows)] if self.rows else []


def read_result(text: str | bytes) -> ResultDocument:
    """A document that a measurement has printed. Raises ReportError."""
    try:
        return ResultDocument.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ReportError(f"{where}: {first['msg']} ({error.error_count()} problems in all)") from error


def thinned(items: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """At most ``most`` (2 or more) of the items, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def point_rows(plot: Plot) -> tuple[list[str], list[dict[str, Scalar]]]:
    """A plot's numbers: the columns, x first, then each series (and its interval); and a row for each x."""
    columns = [plot.x.title]
    at: dict[float, dict[str, Scalar]] = {}
    for number, series in enumerate(plot.series):
        name = _column(plot, number)
        bounds = {f"{name}, low": series.low, f"{name}, high": series.high} if series.low else {}
        columns += [name, *bounds]
        for i, x in enumerate(series.x):
            if x is not None:
                values = {name: series.y[i], **{bound: values[i] for bound, values in bounds.items()}}
                at.setdefault(x, {columns[0]: plot.place(x)}).update(values)
    return columns, [row for _, row in sorted(at.items())]


def _column(plot: Plot, number: int) -> str:
    """A name for a series' column, its own where no other has the same."""
    names = [plot.x.title, *(series.name for series in plot.series)]
    name = names[number + 1]
    return f"{name} ({number + 1})" if names.count(name) > 1 else name


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
