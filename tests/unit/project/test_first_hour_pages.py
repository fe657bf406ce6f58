"""The pages of tests/first_hour name tests that are there, and paths from the index as short as they say."""

from __future__ import annotations

import re

import pytest

from repository import ROOT

HOUR = (ROOT / "tests" / "first_hour" / "hour.md").read_text(encoding="utf-8")


def test_the_findings_that_could_not_be_imported_have_their_tests() -> None:
    rows = re.findall(r"^\| ([HM]\d+) \| [^|]+ \| ([^|]+) \|$", HOUR, re.M)
    assert [finding for finding, _ in rows] == [
        *("H2", "H5", "H7", "M1", "M2", "M3", "M4", "M5", "M6", "M7", "M8", "M9", "M10", "M13", "M14", "M16", "M19")
    ]
    assert f"- {len(rows)} files cannot be imported" in HOUR
    for finding, tests in rows:
        source = ""
        for file, name in re.findall(r"`([\w.]*)::(\w+)`", tests):
            source = (ROOT / "tests" / "first_hour" / file).read_text(encoding="utf-8") if file else source
            assert file.startswith(f"test_{finding.lower()}_") or not file
            assert re.search(rf"^(?:async )?def {name}\(", source, re.M), f"{finding}: {name}"


MOST_WORDS = 400  # that a reader takes in within two minutes
# Question -> the links of its row, each with the words that end the answer there.
SIX = {
    "How do I bring my own training loop?": {"your-own-loop.md#the-change": "learner.exit_code)"},
    "How do I get my model out?": {
        "faq.md#how-do-i-get-my-model-out": "diloco export JOB model/ --context NAME -n NAMESPACE",
        "lora.md#what-comes-out": "diloco export runs/my-lora adapter/ --adapter",
    },
    "What do I lose when a node dies?": {
        "faq.md#what-do-i-lose-when-a-node-dies": "or in a bucket.",
        "faq.md#does-a-lost-learner-come-back-by-itself": "`ForceDelete`",
    },
    "Which H and which K for my links?": {"choosing.md#an-example": "`sync.fragments: 48`."},
    "Is it as good as DDP?": {"faq.md#is-the-model-as-good-as-with-ddp": "it was better with both."},
    "What runs on GPUs today?": {"faq.md#what-runs-on-gpus-today": "make gpu-check"},
}


def up_to(link: str, end: str) -> str:
    part, found, _ = section(link).partition(end)
    assert found, f"{link} has no {end!r}"
    return part + end


def section(link: str) -> str:
    """What stands under the heading that the link names, up to the next heading of any level."""
    page, _, anchor = link.partition("#")
    text = re.sub(r"^# .*$", "", (ROOT / "docs" / page).read_text(encoding="utf-8"), count=1, flags=re.M)
    for part in re.split(r"^#{2,3} (?=\S)", text, flags=re.M):
        heading = part.partition("\n")[0]
        if re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"{link} leads nowhere")


@pytest.mark.parametrize("question", SIX)
def test_the_way_from_the_index_to_an_answer_is_short(question: str) -> None:
    """All words of the index down to the row, and then of the sections that it links, up to the answer."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    above, found, row = index.partition(f"| {question} |")
    row = row.partition("\n")[0]
    assert found and all(f"]({link})" in row for link in SIX[question])
    words = sum(len(text.split()) for text in (above, question, row, *(up_to(*link) for link in SIX[question].items())))
    assert words <= MOST_WORDS, f"{words} words"
