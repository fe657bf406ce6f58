"""The table of test helpers in CONTRIBUTING.md, from the first sentence of each (tools/generate.py)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
FOLDERS = ("", "integration", "e2e", "e2e/regions", "operator_simulation", "syncer_simulation")
NOT_HELPERS = ("__init__.py", "conftest.py")


def tables() -> dict[str, str]:
    """The part of the page by its name."""
    return {"test helpers": table()}


def table() -> str:
    """A row for every module beside the tests that is no test: its path, and what it is for."""
    rows = ["| helper | |", "|---|---|"]
    for folder in FOLDERS:
        for path in sorted((TESTS / folder).glob("*.py")):
            if not path.name.startswith("test_") and path.name not in NOT_HELPERS:
                rows.append(f"| `tests/{path.relative_to(TESTS)}` | {purpose(path)} |")
    return "\n".join(rows)


def purpose(path: Path) -> str:
    """The first sentence of the module's docstring. Raises ValueError if it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if text is None:
        raise ValueError(f"{path.name} does not say what it is for")
    words = " ".join(text.partition("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[a-z\d)`])\. (?=[A-Z])", words)[0].rstrip(".")
