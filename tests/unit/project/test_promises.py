"""Promises stand at tests that are run, each in one wording, and docs/reliability.md has them all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import promises

UNIT = """
import pytest

slow = [pytest.mark.slow, pytest.mark.promise("A third")]
pytestmark = [pytest.mark.promise("Of the file")]


@pytest.mark.promise("A first, "
                     "in two lines")
@pytest.mark.promise("A second", section="Hostile callers")
def test_one() -> None: ...


class TestMore:
    @slow
    async def test_two(self) -> None: ...


@pytest.mark.parametrize("x", [pytest.param(1, id="one", marks=pytest.mark.promise("A first, in two lines")), 2])
def test_three(x: int) -> None: ...
"""
E2E = """
import pytest


@pytest.mark.ci
@pytest.mark.promise("A third")
def test_four() -> None: ...


@pytest.mark.parametrize("x", [pytest.param("near", marks=[pytest.mark.ci, pytest.mark.timeout(9)]), "far"])
def test_five(x: str) -> None: ...
"""


def tree(root: Path, **sources: str) -> Path:
    """A repository whose test files these are, each by its folder below tests/."""
    for folder, source in sources.items():
        path = root / "tests" / folder.replace("__", "/") / "test_it.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
    return root


def test_there_are_promises() -> None:
    assert len(promises.places_by_promise(promises.read_tests(ROOT))) > 200


def test_each_test_with_a_promise_is_run_by_a_target() -> None:
    """Its file is in a folder that a target of the Makefile gives to pytest."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [line for line in makefile.splitlines() if line.startswith("\t") and "$(PYTEST)" in line]
    folders = {word for line in commands for word in re.findall(r"(?<= )tests/[a-z0-9/]*[a-z0-9](?= |$)", line)}
    assert {"tests/unit", "tests/integration", "tests/e2e"} <= folders
    for test in promises.read_tests(ROOT):
        assert not test.promises or any(test.path.startswith(f"{folder}/") for folder in folders), test.path


def test_promises_are_read_wherever_a_mark_may_stand(tmp_path: Path) -> None:
    root = tree(tmp_path, unit__syncer=UNIT, e2e=E2E)
    assert {name: table.splitlines()[2:] for name, table in promises.tables(root).items() if table.count("\n") > 1} == {
        "Syncer": [
            "| Of the file | `tests/unit/syncer/test_it.py` |",
            "| A first, in two lines | `tests/unit/syncer/test_it.py::test_one`, `::test_three[one]` |",
            "| A third | `tests/unit/syncer/test_it.py::TestMore::test_two`, `tests/e2e/test_it.py::test_four` |",
        ],
        "Hostile callers": ["| A second | `tests/unit/syncer/test_it.py::test_one` |"],
    }
    assert promises.held("ci", root) == [
        ("tests/e2e/test_it.py::test_four", "A third"),
        ("tests/e2e/test_it.py::test_five", ""),
    ]
    assert [test.name for test in promises.read_tests(root, "slow") if "slow" in test.marks] == ["TestMore::test_two"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@pytest.mark.promise('Of a helper')\ndef make(): ...\n", "a promise that stands at no test"),
        ("@pytest.mark.promise(TEXT)\ndef test_it(): ...\n", "write promise"),
        ("@pytest.mark.promise\ndef test_it(): ...\n", "write promise"),
        ("@pytest.mark.promise('A text', 'Syncer')\ndef test_it(): ...\n", "write promise"),
        ("@pytest.mark.promise('A text.')\ndef test_it(): ...\n", "without a full stop"),
        ("@pytest.mark.promise('A text', section='Elsewhere')\ndef test_it(): ...\n", "one section"),
        (
            "@pytest.mark.promise('No token is lost')\ndef test_it(): ...\n"
            "@pytest.mark.promise('No token is lost', section='Syncer')\ndef test_more(): ...\n",
            "one section",
        ),
        (
            "@pytest.mark.promise('No token of a drain is lost')\ndef test_it(): ...\n"
            "@pytest.mark.promise('no token of the drain is lost')\ndef test_more(): ...\n",
            "or in other words",
        ),
    ],
)
def test_a_promise_that_no_page_can_show_is_refused(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        promises.tables(tree(tmp_path, unit__worker=source))


def test_a_folder_without_a_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tests/unit/new/test_it\.py::test_it: no section"):
        promises.tables(tree(tmp_path, unit__new="@pytest.mark.promise('A text')\ndef test_it(): ...\n"))


def test_the_head_of_the_gate_has_a_line_for_each_test(tmp_path: Path) -> None:
    test = "@pytest.mark.ci\n@pytest.mark.promise('A {}')\ndef test_{}(): ...\n"
    root = tree(tmp_path, integration__run=test.format("run", "it"), e2e=test.format("cluster", "it"))
    script = f"# head\n{promises.GATE_HEAD}#   old lines\n#   of it\nset -e\n"
    assert promises.gate_head(script, root) == (
        f"# head\n{promises.GATE_HEAD}#   programs  it: A run\n#   cluster   it: A cluster\nset -e\n"
    )
    (root / "tests" / "e2e" / "test_it.py").write_text("import pytest\n\n@pytest.mark.ci\ndef test_it(): ...\n")
    with pytest.raises(ValueError, match="holds a promise: mark it"):
        promises.gate_head(script, root)
