"""Where CI is set, a skip that is not on the list of tests/skips.py fails, wherever it is raised."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

TESTS = """
import pytest

def test_not_listed():
    pytest.skip("no time")

@pytest.fixture
def missing():
    pytest.skip("not there")

def test_in_a_fixture(missing):
    pass

@pytest.mark.skipif(True, reason="for good")
def test_by_a_mark():
    pass

def test_listed():
    pytest.skip("mounting a tmpfs is not permitted here")

def test_passes():
    pass
"""
WHOLE_FILE = "import pytest\npytest.skip('of the whole file', allow_module_level=True)\n"


@pytest.mark.parametrize(("ci", "counts"), [("1", {"failed": 1, "errors": 3, "skipped": 1}), ("", {"skipped": 5})])
def test_a_skip_that_is_not_listed_fails_in_ci(tmp_path: Path, ci: str, counts: dict[str, int]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_file.py").write_text(WHOLE_FILE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", "--continue-on-collection-errors"],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    last = done.stdout.splitlines()[-1]
    assert {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", last) if word != "in"} == {**counts, "passed": 1}
    assert ("not on the list of tests/skips.py: no time" in done.stdout) == bool(ci)
