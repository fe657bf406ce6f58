"""What pages say of quality in words is what the kept trials say in figures; generated figures are not checked here."""

from __future__ import annotations

import re
import sys

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import quality_words

from trials.tables import TrialRow

DOCS = ROOT / "docs"
ROWS, DILOCOS = quality_words.rows(), quality_words.rows(dilocos=True)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def difference(*place: str | int) -> float:
    """In per cent above data-parallel training; 0 where the interval includes no difference."""
    row = ROWS[place]  # type: ignore[index]
    return quality_words.percent(row) if quality_words.is_clear(row) else 0.0


def test_language_models_are_as_good_with_up_to_four_learners_and_not_with_sixteen() -> None:
    few, many = [], []
    for (kind, size, merges, learners), row in ROWS.items():
        if kind != "vision" and size != "gpu" and learners <= 4:
            few.append(quality_words.percent(row))
        if kind != "vision" and learners == 16:
            many.append(difference(kind, size, merges, learners))
    assert max(few) < 1 and min(many) > 0
    (answer,) = re.findall(r"^\| Is it as good as DDP\? \| ([^|]*) \|", text_of("docs/README.md"), re.M)
    assert answer.startswith("Small language models, dense or mixtures of experts, with up to four learners: yes.")
    assert "With 16 learners: no." in answer
    faq = text_of("docs/faq.md")
    assert "with AdamW, small language models with up to four learners: yes" in faq
    assert "With sixteen learners: not quite. Beside data-parallel training with Muon: no." in faq
    assert min(quality_words.percent(row) for row in quality_words.beside_muon()) > 0
    assert min(quality_words.costs(2)) > 0  # decoupling costs something wherever it was measured
    claim = "Dense models and mixtures of experts with up to four learners: at least as good"
    assert claim in text_of("docs/results.md") and "With 16 learners: worse." in text_of("docs/results.md")


def test_vision_is_worse_where_pages_say_so() -> None:
    small = {(merges, learners): difference("vision", "small", merges, learners) for merges, learners in all_vision()}
    assert {learners for (merges, learners), above in small.items() if merges == 6 and above > 0} == {4, 8, 16}
    assert {learners for (merges, learners), above in small.items() if merges == 200 and above > 0} == {8, 16}
    assert not [place for place, above in small.items() if place[0] == 40 and above > 0]
    said = "Vision models: worse with four learners or more on 144 steps, and with eight or more on 4,800."
    assert said in text_of("docs/results.md")


def all_vision() -> list[tuple[int, int]]:
    return [place[2:] for place in ROWS if place[:2] == ("vision", "small")]


def test_the_model_on_a_gpu_is_worse_on_the_short_run_and_better_on_the_longer_one() -> None:
    assert difference("dense", "gpu", 6, 2) == 0 < difference("dense", "gpu", 6, 4)
    assert difference("dense", "gpu", 20, 2) < 0 and difference("dense", "gpu", 20, 4) < 0
    said = "On a short run it was not clearly different with two learners, and worse with four. On a longer one it was"
    assert f"{said} better with both." in text_of("docs/faq.md")
    assert "with four learners worse after 144 steps, better after 480" in text_of("docs/results.md")


def test_dilocos_own_settings_are_worse() -> None:
    for place, row in DILOCOS.items():
        if place[0] != "vision":
            assert quality_words.percent(row) > 10
    assert "dense models and mixtures are worse, so small models have other defaults" in text_of("docs/results.md")


@pytest.mark.parametrize(
    ("ratio", "interval", "said"),
    [
        (1.103, 0.024, "10 % above"),
        (0.984, 0.014, "1.6 % below"),
        (0.984, 0.016001, "not clearly different"),
        (0.984, None, "not clearly different"),
    ],
)
def test_a_difference_in_words(ratio: float, interval: float | None, said: str) -> None:
    assert (
        quality_words.words(TrialRow("", 1.0, "nats", None, baseline=1.0, ratio=ratio, interval=interval, seeds=5))
        == said
    )


def test_no_page_says_that_the_paper_prints_dilocos_settings() -> None:
    assert "0.7 and 0.9 are DiLoCo's values; the paper prints none." in text_of("docs/algorithm.md")
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        said = re.findall(r"(?i)the paper's (?:own )?settings", page.read_text(encoding="utf-8"))
        assert not said, f"{page.name}: {said}"
