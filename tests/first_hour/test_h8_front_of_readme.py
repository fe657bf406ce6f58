"""H8: the README's first screen has a reason to stay: what it is, a recording, measured results, the status.

On commit 8f0ca90 it had three dense paragraphs and no picture; that no GPU was tried stood in its last list.
"""

from __future__ import annotations

import re

from repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST = README.partition("\n## ")[0]


def test_h8_the_first_screen() -> None:
    lines = FIRST.splitlines()
    assert len(lines) <= 30
    sentences = next(line for line in lines if line and not line.startswith("#"))
    assert sentences.startswith("**") and len(sentences.split()) <= 70, "what it is"
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+\.svg)\)", FIRST)
    assert "@keyframes" in (ROOT / picture).read_text(encoding="utf-8"), "a recording that plays"
    results = set(re.findall(r"\]\(docs/results/\w+\.md#([\w-]+)\)", FIRST))
    assert len(results) >= 3, "figures, each with where it was measured"
    (status,) = [line for line in lines if line.startswith("**Status: ")]
    for words in ("alpha", "GPU", "cloud", "largest model"):
        assert words in status


def test_h8_sections_come_as_people_look_for_them() -> None:
    headings = re.findall(r"^## (.*)$", README, re.M)
    wanted = ["Two commands", "How it works", "Your own loop", "A job", "On Kubernetes", "Across clusters"]
    wanted += ["Comparison", "Limits"]
    assert [heading for heading in headings if heading in wanted] == wanted
