"""A report as HTML: nothing from a text gets out of its place, the same input gives the same bytes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest

from diloco.reports.document import Axis, ResultDocument, Series
from diloco.reports.html import render_html
from result_documents import hostile, plot


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        assert "script" not in data


def test_texts_of_others_stay_texts() -> None:
    html = render_html(hostile(ResultDocument))
    page = Page(html)
    assert not page.open, "every element is closed"
    assert not page.tags["script"] and not page.tags["a"] and not page.tags["link"]
    assert page.tags["svg"] == 2 and page.tags["title"] == 1
    assert "\x1b" not in html and "\x00" not in html
    shown = "".join(page.texts)
    assert '<script src="http://x/a.js">&amp;\' "a" | `b` $\\frac{1$ _c_' in shown
    assert shown.count("fill: #010203") >= 3, "a text that looks like a colour of the drawing is left alone"


def test_a_page_needs_nothing_from_elsewhere_and_its_ids_are_its_own() -> None:
    page = Page(render_html(ResultDocument(title="t", plots=[plot(), plot()])))
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 10
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "data", "action") and not name.startswith("on")
        if name.endswith("href"):
            assert value.startswith("#") and value[1:] in ids, (tag, value)
        for target in re.findall(r"url\(([^)]*)\)", value):
            assert target.startswith("#") and target[1:] in ids, (tag, value)
    assert any(name == "http-equiv" and value == "Content-Security-Policy" for _, name, value in page.attributes)


def test_the_same_input_gives_the_same_bytes() -> None:
    document = ResultDocument(title="t", plots=[plot(), plot(title="other")], rows=[{"name": "a", "value": 0.1}])
    again = ResultDocument.model_validate_json(document.model_dump_json())
    assert render_html(document) == render_html(again)


def test_a_drawing_takes_the_pages_colour() -> None:
    html = render_html(ResultDocument(title="t", plots=[plot()]))
    drawing = html[html.index("<svg") : html.index("</svg>")]
    assert "currentColor" in drawing and "#010203" not in drawing and "#000000" not in drawing
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize("counts", [True, False])
def test_what_is_counted_has_no_marks_between_whole_numbers(counts: bool) -> None:
    of = plot(
        x=Axis(name="time"), y=Axis(name="learners", counts=counts), series=[Series(name="a", x=[0, 9], y=[0, 2])]
    )
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", render_html(ResultDocument(title="t", plots=[of])))
    assert {"0", "1", "2"} <= set(labels) and counts == ("0.5" not in labels and "0.25" not in labels)


@pytest.mark.parametrize(
    "changes",
    [
        {"series": []},
        {"series": [Series(name="a", x=[], y=[])]},
        {"series": [Series(name="a", x=[1, None], y=[float("nan"), 2])]},
        {"series": [Series(name="a", x=[1e300], y=[1])]},
    ],
)
def test_a_plot_without_points_says_so(changes: dict[str, object]) -> None:
    document = ResultDocument(title="t", plots=[plot(**changes)])
    html = render_html(document)
    assert "There is nothing to draw" in html and "<svg" not in html


def test_every_number_of_a_plot_is_on_the_page() -> None:
    series = [Series(name="a", x=[1, 2], y=[0.125, 0.375]), Series(name="b", x=[2, 3], y=[8, 9])]
    page = Page(render_html(ResultDocument(title="t", plots=[plot(series=series)])))
    assert {"0.125", "0.375", "8", "9"} <= set(page.texts)


def test_without_matplotlib_a_page_has_the_numbers_and_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    html = render_html(ResultDocument(title="t", plots=[plot()]))
    assert "<svg" not in html and "decoupled-diloco[report]" in html and "<td" in html


def test_ticks_are_numbers_as_people_read_them() -> None:
    drawing = render_html(ResultDocument(title="t", plots=[plot()]))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    assert {"10", "200", "1,000"} <= set(labels)
    assert not any("$" in label or "\\" in label for label in labels)
