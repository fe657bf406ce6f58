"""Pages that users read first have short sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from repository import ROOT

MOST_WORDS = 30  # in a sentence
_SHORT = """
    README regions results concepts data faq tutorial your-own-loop coming-from-ddp lora running-locally
    running-in-a-cluster choosing monitoring troubleshooting object-storage gpu-machines operator slurm clouds
    comparison what-happens-when commands time-limits
"""
SHORT = (
    "README.md",
    *(f"docs/{name}.md" for name in _SHORT.split()),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs" / "results").glob("*.md"))),
)


def sentences(page: Path) -> list[str]:
    """Of a page's prose; a span of code and a link's target count as one word, a table's cells and items
    of a list on one line (·) end sentences."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    text = re.sub(r"<!-- .* generated -->.*?<!-- .* end -->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "code", text))
    return [part for line in text.splitlines() for part in re.split(r"(?<=[.:;?!])\)?\s|\||·", line)]


@pytest.mark.parametrize("name", SHORT)
def test_sentences_are_short(name: str) -> None:
    long = [part for part in sentences(ROOT / name) if len(part.split()) > MOST_WORDS]
    assert long == []


def test_a_long_sentence_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Short. " + "word " * 31 + "end.\n\n| a cell | " + "word " * 29 + "|\n")
    assert [len(part.split()) for part in sentences(page) if len(part.split()) > MOST_WORDS] == [32]
