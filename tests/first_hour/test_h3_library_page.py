"""H3: docs/your-own-loop.md describes the library that people program against.

Commit 8f0ca90 has no such page. tests/integration/run/test_own_loop_page.py runs the page's files.
"""

from __future__ import annotations

import inspect
import re

import pytest

from repository import ROOT

PAGE = ROOT / "docs" / "your-own-loop.md"
# What the review could not find out, and words of the answer.
QUESTIONS = {
    "how long is the schedule": ("learner.progress",),
    "which data set": ("map-style", "`__getitem__`"),
    "how large is a batch": ("`sequences`", "`training.batch`"),
    "where is a batch": ("on the CPU",),
    "a DataLoader": ("`DataLoader`",),
    "streams": ("IterableDataset", "`steps()`"),
    "mixed precision": ("torch.autocast",),
    "which process logs": ("learner.slot == 0",),
    "the optimizer's state after a kill": ("optimizer's state", "`rewarm_scale`"),
    "buffers": ("BatchNorm",),
    "from DDP": ("DistributedDataParallel",),
    "the trained model": ("diloco export", "load_merged", "a learner's own copy"),
}


def test_h3_every_name_of_a_learner_is_on_the_page_with_its_parameters() -> None:
    page = PAGE.read_text(encoding="utf-8")
    from diloco_worker import Learner

    named = set(re.findall(r"`(?:\w+\.)*(\w+)", page))
    public = {name for name in dir(Learner) if not name.startswith("_")}
    assert {"batches", "after_step", "progress"} <= public <= named
    assert {"load_merged", "Observer", "configure_logging", "layout"} <= named
    for name in ("batches", "steps", "after_step", "rewarm_scale", "leave"):
        found = re.search(rf"`{name}\(([^`)]*)\)`", page)
        assert found is not None, name
        shown = [part.partition("=")[0].strip() for part in found[1].split(",") if part]
        assert ["self", *shown] == list(inspect.signature(getattr(Learner, name)).parameters), name


@pytest.mark.parametrize("question", QUESTIONS)
def test_h3_questions_have_answers(question: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for words in QUESTIONS[question]:
        assert words in page, words


def test_h3_people_are_led_to_the_page() -> None:
    for place, link in ((ROOT / "README.md", "docs/your-own-loop.md"), (ROOT / "docs/README.md", "your-own-loop.md")):
        assert f"]({link}" in place.read_text(encoding="utf-8")
