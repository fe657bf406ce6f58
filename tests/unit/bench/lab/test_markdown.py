"""Markdown of a measurement's report: nothing from a text gets out of its place, and every row says something."""

from __future__ import annotations

import re

from lab.figures import Axis, Plot, ResultDocument, Series
from lab.markdown import render_markdown
from result_documents import hostile, plot


def test_the_same_input_gives_the_same_bytes() -> None:
    document = ResultDocument(
        title="t", plots=[plot(Plot), plot(Plot, title="other")], rows=[{"name": "a", "value": 0.1}]
    )
    again = ResultDocument.model_validate_json(document.model_dump_json())
    assert render_markdown(document) == render_markdown(again)


def test_a_plot_without_points_keeps_its_title() -> None:
    text = render_markdown(ResultDocument(title="t", plots=[plot(Plot, series=[])]))
    assert "Tokens per second against bandwidth" in text and "No figures." in text


def test_places_stand_by_their_names() -> None:
    arms = Axis(name="arm", places=["sgd", "adamw"])
    first = Series(name="6 merges", x=[0, 1], y=[1.5, -2], low=[1, -3], high=[2, -1])
    bars = plot(Plot, x=arms, series=[first, Series(name="40 merges", x=[0, 1], y=[0.5, None])])
    assert "| sgd | 1.5 | 1 | 2 | 0.5 |" in render_markdown(ResultDocument(title="t", plots=[bars]))


def test_markdown_is_made_of_whole_rows() -> None:
    lines = render_markdown(hostile(ResultDocument)).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 3 * 2 + 2 * 4
    for line in table:
        assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4)
    assert not any("<script" in line.replace("\\<", "") for line in lines)
    assert "[d](" not in "".join(lines)


def test_series_that_share_no_x_have_a_value_in_every_row() -> None:
    even = Series(name="ours", x=list(range(0, 400, 2)), y=list(range(0, 400, 2)))
    odd = Series(name="DDP", x=list(range(1, 400, 2)), y=[-x for x in range(1, 400, 2)])
    short = Series(name="ended", x=[1, 3], y=[7, 8])
    text = render_markdown(ResultDocument(title="t", plots=[plot(Plot, series=[even, odd, short])]))
    table = re.findall(r"^\| (\d+) \| (\S*) \| (\S*) \| ?(\S*?) ?\|$", text, re.M)
    assert len(table) == 25 and table[0] == ("0", "0", "", "") and table[-1] == ("399", "398", "-399", "")
    assert all(0 <= int(x) - int(ours) <= 1 and 0 <= int(x) + int(ddp) <= 1 for x, ours, ddp, _ in table[1:])
    assert [row[3] for row in table if row[3]] == ["8"]  # nothing is carried past the last row that has it
    assert "25 of 400 points. A column has its last value since the row before." in text
