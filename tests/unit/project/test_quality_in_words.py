"""What pages say of quality in words is what the generated table of docs/results.md says in figures."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest

from repository import ROOT

DOCS = ROOT / "docs"
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")
FAQ = (DOCS / "faq.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A row of the table: ``above`` is the difference to data-parallel training in per cent."""

    kind: str
    size: str
    merges: int
    learners: int
    above: float


def rows(name: str = "quality with the defaults") -> list[Row]:
    table = RESULTS.split(f"<!-- {name}: generated -->")[1].split("<!-- quality")[0]
    found = re.findall(r"^\| (\w+), (\w+) \| (\d+) \| (\d+) \|.*\| ([+-][\d.]+) %", table, re.M)
    assert len(found) > (30 if name == "quality with the defaults" else 5)
    return [Row(kind, size, int(merges), int(learners), float(above)) for kind, size, merges, learners, above in found]


def test_sixteen_learners_are_as_far_above_as_the_table_has_them() -> None:
    greatest = max(row.above for row in rows() if row.learners == 16 and row.kind != "vision")
    for page in (RESULTS.partition("\n## ")[0], (ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.findall(r"16 learners (?:it is )?up to (\d+) % above", page) == [f"{greatest:.0f}"]


@pytest.mark.parametrize(("kind", "words"), [("dense", "Small language models, dense"), ("moe", "mixtures of experts")])
def test_the_index_calls_a_kind_good_that_is_good(kind: str, words: str) -> None:
    (answer,) = re.findall(r"^\| Is it as good as DDP\? \| ([^|]*) \|", (DOCS / "README.md").read_text(), re.M)
    small = [row for row in rows() if row.size != "gpu"]
    assert all(row.above < 1 for row in small if row.kind == kind and row.learners <= 4)
    assert words in answer.partition(": yes")[0]


def test_pages_have_the_figures_of_the_model_on_a_gpu() -> None:
    """Four learners after 6 and 20 merges: above, and below."""
    above = {(row.merges, row.learners): row.above for row in rows() if row.size == "gpu"}
    assert above[6, 4] > 1 > 0 > above[20, 4]
    for page in (ROOT / "README.md", DOCS / "faq.md", DOCS / "choosing.md"):
        said = re.findall(r"26 million parameters[^\n|]*", page.read_text(encoding="utf-8"))
        text = " ".join(said)
        assert f"{above[6, 4]:.0f} %" in text and f"{-above[20, 4]:.0f} %" in text, page.name


def test_vision_is_called_worse_where_the_table_has_it_worse() -> None:
    (line,) = re.findall(r"^- \*\*Vision:\*\* (.*)$", FAQ, re.M)
    short = {row.learners: row.above for row in rows() if (row.kind, row.size, row.merges) == ("vision", "small", 6)}
    assert all((above > 0) == (learners > 2) for learners, above in short.items())
    assert line.startswith("worse with four learners or more")
    for learners, word in ((4, "four"), (8, "eight")):
        above = math.floor(short[learners] + 0.5)  # a half upwards
        assert re.search(rf"\b{above} % above [^,.]*with {word} learners|\b{above} % above with {word}\b", line), word


def test_the_page_for_choosing_has_the_figures_of_four_learners() -> None:
    defaults, dilocos = (
        {(row.kind, row.size, row.merges, row.learners): row.above for row in rows(name)}
        for name in ("quality with the defaults", "quality with DiLoCo's settings")
    )
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (dense|mixture of experts) \| ([\d,]+) \| ([\d.]+) % below \| (.*) \|$", page, re.M)
    assert len(shown) == 6
    for words, steps, below, other in shown:
        case = ("dense" if words == "dense" else "moe", "small", int(steps.replace(",", "")) // 24, 4)
        assert defaults[case] == -float(below), case
        assert other == (f"{dilocos[case]:.0f} % above" if case in dilocos else "not run"), case


def test_no_page_says_that_the_paper_prints_dilocos_settings() -> None:
    assert "0.7 and 0.9 are DiLoCo's values; the paper prints none." in (DOCS / "algorithm.md").read_text()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        said = re.findall(r"(?i)the paper's (?:own )?settings", page.read_text(encoding="utf-8"))
        assert not said, f"{page.name}: {said}"
