"""What a report is made of: reading it, the numbers of plots, values as people read them."""

from __future__ import annotations

import json
import math

import pytest

from diloco.reports.document import (
    Axis,
    Plot,
    ReportError,
    ResultDocument,
    Series,
    point_rows,
    read_result,
    thinned,
    value_text,
)

X, Y = Axis(name="time", unit="s"), Axis(name="loss")


def test_a_document_that_was_printed_is_read_as_it_was() -> None:
    document = ResultDocument(
        title="t",
        facts={"whole": 3, "share": 0.5, "word": "x", "yes": True, "unknown": None},
        rows=[{"name": "a", "value": 1.5, "baseline": "b", "ratio": 2.0}],
        plots=[Plot(title="p", x=X, y=Y, series=[Series(name="s", x=[1.0], y=[2.0], low=[1.0], high=[3.0])])],
    )
    assert read_result(document.model_dump_json()) == document
    more = {**document.model_dump(mode="json"), "rmse": 1.2}
    assert read_result(json.dumps(more)) == document, "a command's further figures are left out"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rows": []}', "title"),
        ("[]", "the document"),
        ("{", "JSON"),
        ('{"title": "t", "plots": [{"title": "p", "x": {"name": "x"}, "y": {"name": "y"}, "series": '
         '[{"name": "s", "x": [1, 2], "y": [1]}]}]}', "same length"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_told_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ReportError, match=words):
        read_result(text)


def test_a_number_that_is_not_finite_is_not_known() -> None:
    document = ResultDocument(title="t", rows=[{"value": math.nan}], facts={"a": math.inf})
    assert document.rows == [{"value": None}] and document.facts == {"a": None}
    series = Series(name="s", x=[1, 2, None], y=[math.nan, 5, 6])
    assert series.points == [(2, 5)]


def test_a_plots_numbers_are_rows_by_x_with_a_column_for_each_series() -> None:
    first = Series(name="same", x=[2, 1], y=[20, 10], low=[19, 9], high=[21, 11])
    plot = Plot(title="p", x=X, y=Y, series=[first, Series(name="same", x=[2, 3], y=[5, None])])
    columns, rows = point_rows(plot)
    assert columns == ["time (s)", "same (1)", "same (1), low", "same (1), high", "same (2)"]
    assert rows == [
        {"time (s)": 1, "same (1)": 10, "same (1), low": 9, "same (1), high": 11},
        {"time (s)": 2, "same (1)": 20, "same (1), low": 19, "same (1), high": 21, "same (2)": 5},
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
