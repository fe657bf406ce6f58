"""The main results of docs/results.md, and their copy in README.md (tools/generate.py)."""

from __future__ import annotations

import re
from pathlib import Path

import quality_words

ROOT = Path(__file__).resolve().parent.parent
QUALITY = "results/quality.md#quality-beside-data-parallel-training"


def for_results() -> dict[str, str]:
    """The generated line of docs/results.md."""
    return {"quality": quality_words.main_line(QUALITY)}


def for_readme() -> dict[str, str]:
    """The parts of README.md that are written in docs/results.md by hand, with that page's generated line."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    return {
        "main results": f"{as_in_root(part(text, 'main results'))}\n{as_in_root(for_results()['quality'])}",
        "claims": as_in_root(part(text, "claims")),
    }


def part(page: str, name: str) -> str:
    """What stands between a page's marks. Raises ValueError without them."""
    found = re.search(rf"<!-- {name}: source -->\n+(.*?)\n+<!-- {name}: end -->", page, re.S)
    if found is None:
        raise ValueError(f"docs/results.md lacks the marks of {name}")
    return found[1]


def as_in_root(text: str) -> str:
    """A text of docs/ with its links as they are from the repository's root."""
    return re.sub(r"\]\((?![a-z]+:|#)", "](docs/", text)
