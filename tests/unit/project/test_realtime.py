"""Which tests are told to depend on real time, and that the others have nothing to wait with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import realtime
from realtime import FILES, NAMES, TESTS, is_realtime

# Of these the words are in virtual time, or in texts.
OTHERS = {"unit/operator/reconcile/test_workqueue.py", "unit/project/test_patience.py"}
WAITS = re.compile(r"\bwait_until\(|\bwait_for_end\(|await until\(|^ +time\.sleep\(\d|asyncio\.timeout\(", re.M)


def functions(path: Path) -> dict[str, tuple[set[str], str]]:
    """Each test of a file, with its marks and its source."""
    text = path.read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        node.name: (
            {mark for each in node.decorator_list for mark in re.findall(r"mark\.(\w+)", ast.unparse(each))},
            ast.get_source_segment(text, node) or "",
        )
        for node in found
        if node.name.startswith("test_")
    }


def test_every_file_and_name_of_the_list_is_there() -> None:
    assert [file for file in FILES if not (TESTS / "unit" / file).exists()] == []
    there = {name for path in TESTS.rglob("test_*.py") for name in functions(path)}
    assert sorted(NAMES - there) == []


def test_a_test_that_waits_is_marked() -> None:
    """In which the helper of waits, a sleep or a time limit stands; fixtures and other helpers are not looked at."""
    missed = [
        f"{place}::{name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        if (place := path.relative_to(TESTS).as_posix()) not in OTHERS
        for name, (marks, source) in functions(path).items()
        if WAITS.search(source) and "realtime" not in marks and not is_realtime(path, name)
    ]
    assert missed == []


def test_the_rules() -> None:
    unit = TESTS / "unit"
    assert is_realtime(TESTS / "e2e" / "regions" / "test_links.py", "test_x")
    assert is_realtime(unit / FILES[0], "test_x")
    assert is_realtime(unit / "cli" / "test_x.py", "test_nobody_answers")
    assert not is_realtime(unit / "cli" / "test_x.py", "test_x")
    assert realtime.TIMEOUT_SECONDS > 300.0
