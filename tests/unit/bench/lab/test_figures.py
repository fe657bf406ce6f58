"""What a measurement's report has beyond a run's: intervals, logarithmic axes, bars, and reading it from its JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import page
from lab.figures import Axis, Plot, ResultDocument, Series, render_page
from result_documents import HOSTILE, LONG, plot

X, Y = Axis(name="time", unit="s"), Axis(name="loss")


def test_a_document_that_was_printed_is_read_as_it_was() -> None:
    document = ResultDocument(
        title="t",
        facts={"whole": 3, "share": 0.5, "word": "x", "yes": True, "unknown": None},
        rows=[{"name": "a", "value": 1.5, "baseline": "b", "ratio": 2.0}],
        plots=[Plot(title="p", x=X, y=Y, series=[Series(name="s", x=[1.0], y=[2.0], low=[1.0], high=[3.0])])],
    )
    assert ResultDocument.model_validate_json(document.model_dump_json()) == document
    more = {**document.model_dump(mode="json"), "rmse": 1.2}
    assert ResultDocument.model_validate(more) == document, "a command's further figures are left out"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rows": []}', "title"),
        ("[]", "should be an object"),
        ("{", "JSON"),
        ('{"title": "t", "plots": [{"title": "p", "x": {"name": "x"}, "y": {"name": "y"}, "series": '
         '[{"name": "s", "x": [1, 2], "y": [1]}]}]}', "same length"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ResultDocument.model_validate_json(text)


def test_a_plots_intervals_are_columns() -> None:
    first = Series(name="same", x=[2, 1], y=[20, 10], low=[19, 9], high=[21, 11])
    plot = Plot(title="p", x=X, y=Y, series=[first, Series(name="same", x=[2, 3], y=[5, None])])
    columns, rows = plot.point_rows()
    assert columns == ["time (s)", "same (1)", "same (1), low", "same (1), high", "same (2)"]
    assert rows == [
        {"time (s)": 1, "same (1)": 10, "same (1), low": 9, "same (1), high": 11},
        {"time (s)": 2, "same (1)": 20, "same (1), low": 19, "same (1), high": 21, "same (2)": 5},
        {"time (s)": 3, "same (2)": None},
    ]


def test_ticks_of_logarithms_are_numbers_as_people_read_them() -> None:
    drawing = render_page(ResultDocument(title="t", plots=[plot(Plot)]))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    assert {"1", "2", "5", "10", "20", "500", "1,000"} <= set(labels)
    assert not any("$" in label or "\\" in label for label in labels)


@pytest.mark.parametrize("y", [[0, 1], [-1, -2], [1e-300, 1e14], [5, 5]])
def test_values_that_suit_no_logarithm_are_drawn_all_the_same(y: list[float]) -> None:
    document = ResultDocument(title="t", plots=[plot(Plot, series=[Series(name="a", x=[1, 2], y=y)])])
    assert "<svg" in render_page(document)


def test_places_are_bars_and_their_names_stand_beside_them() -> None:
    arms = Axis(name="arm", places=["sgd", HOSTILE, LONG])
    first = Series(name="6 merges", x=[0, 1, 2], y=[1.5, -2, 3], low=[1, -3, 2], high=[2, -1, 4])
    bars = plot(Plot, x=arms, series=[first, Series(name="40 merges", x=[0, 2], y=[0.5, None])])
    document = ResultDocument(title="t", plots=[bars])
    page = render_page(document)
    assert page.count("<svg") == 1 and "<script" not in page
    labels = [text.strip() for text in re.findall(r">([^<]+)<", page)]
    assert "sgd" in labels and "6 merges" in labels and "40 merges" in labels
    assert {"1.5", "-3", "0.5"} <= set(labels)
    with pytest.raises(ValueError, match=r"x is 3\.0, and the axis has 3 places"):
        plot(Plot, x=arms, series=[Series(name="a", x=[3], y=[1])])


def test_a_page_is_made_again_of_what_a_measurement_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = ResultDocument(title="Bandwidth", plots=[plot(Plot)])
    figures, made = tmp_path / "figures.json", tmp_path / "page.html"
    figures.write_text(document.model_dump_json())
    monkeypatch.setattr("sys.argv", ["page.py", str(figures), str(made)])
    assert page.main() == 0 and "Bandwidth" in capsys.readouterr().out
    assert made.read_text() == render_page(document)
    figures.write_text("{}")
    with pytest.raises(SystemExit) as ended:
        page.main()
    assert ended.value.code == 2 and str(figures) in capsys.readouterr().err
    figures.unlink()
    assert page.main() == 1 and str(figures) in capsys.readouterr().err
