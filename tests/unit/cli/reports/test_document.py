"""What a report is made of: the numbers of plots, values as people read them."""

from __future__ import annotations

import math

import pytest

from diloco.reports.document import Axis, Plot, ResultDocument, Series, thinned, value_text

X, Y = Axis(name="time", unit="s"), Axis(name="loss")


def test_a_number_that_is_not_finite_is_not_known() -> None:
    document = ResultDocument(title="t", rows=[{"value": math.nan}], facts={"a": math.inf})
    assert document.rows == [{"value": None}] and document.facts == {"a": None}
    series = Series(name="s", x=[1, 2, None], y=[math.nan, 5, 6])
    assert series.points == [(2, 5)]


def test_a_plots_numbers_are_rows_by_x_with_a_column_for_each_series() -> None:
    first = Series(name="same", x=[2, 1], y=[20, 10])
    plot = Plot(title="p", x=X, y=Y, series=[first, Series(name="same", x=[2, 3], y=[5, None])])
    columns, rows = plot.point_rows()
    assert columns == ["time (s)", "same (1)", "same (2)"]
    assert rows == [
        {"time (s)": 1, "same (1)": 10},
        {"time (s)": 2, "same (1)": 20, "same (2)": 5},
        {"time (s)": 3, "same (2)": None},
    ]


def test_thinning_keeps_both_ends() -> None:
    assert thinned(range(5), 5) == [0, 1, 2, 3, 4]
    kept = thinned(range(1001), 11)
    assert kept == list(range(0, 1001, 100))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (12345, "12,345"),
        (0.123456, "0.1235"),
        (3.0, "3"),
        (12345.678, "12,345.7"),
        (1e-9, "1e-09"),
        (2e20, "2e+20"),
        ("as it is", "as it is"),
    ],
)
def test_values_as_people_read_them(value: float | str | None, text: str) -> None:
    assert value_text(value) == text
