"""`make nightly`: what is due, what a part's outcome is, and that no test of a cluster is left out."""

from __future__ import annotations

import sys

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import nightly
from nightly import Outcome, Part

PART = Part("site", "make site", "the site")


def outcome(part: str = "site", code: str = "c1", passed: int = 1, failed: int = 0) -> Outcome:
    return Outcome(part, "0123abcd", code, 60, passed=passed, failed=failed)


def test_a_part_is_due_until_it_has_passed_on_this_code() -> None:
    parts = [PART, Part("worlds", "x", "y")]
    assert nightly.find_due(parts, {}, "c1") == parts
    assert nightly.find_due(parts, {"site": outcome()}, "c1") == parts[1:]
    assert nightly.find_due(parts, {"site": outcome()}, "c2") == parts
    assert nightly.find_due(parts, {"site": outcome(failed=1)}, "c1") == parts


@pytest.mark.parametrize(
    ("status", "output", "passed", "failed"),
    [
        (0, "===== 12 passed, 3 skipped in 4.56s =====\n", 12, 0),
        (1, "===== 2 failed, 12 passed, 1 error in 4.56s (0:00:04) =====\n", 12, 3),
        (0, "12 passed, 1 warning in 0.5s\n", 12, 0),
        (0, "first\n=== 1 failed in 1.00s ===\n=== 7 passed in 2.00s ===\n", 7, 0),  # the last summary counts
        (124, "===== 12 passed in 4.56s =====\n", 12, 1),
        (0, "no tests here\n", 1, 0),
        (2, "", 0, 1),
        (5, "===== 3 deselected in 0.1s =====\n", 1, 0),
        (0, "===== 3 skipped in 0.1s =====\n", 0, 0),  # and so it is due again
    ],
)
def test_what_is_counted(status: int, output: str, passed: int, failed: int) -> None:
    assert nightly.judge(PART, status, output, 61.4, commit="0123abcd", code="c1") == Outcome(
        "site", "0123abcd", "c1", 61, passed=passed, failed=failed
    )


def test_pages_and_the_lines_of_runs_are_no_code() -> None:
    code = ["100644 aa 0\ttools/nightly.py", "100644 bb 0\ttests/README.py"]
    pages = ["100644 cc 0\tdocs/faq.md", "100644 dd 0\tREADME.md", "100644 ee 0\ttests/nightly.jsonl"]
    assert nightly.digest_code([*code, *pages]) == nightly.digest_code(code)
    assert nightly.digest_code(code) != nightly.digest_code(code[:1])


def test_the_last_line_of_a_part_counts() -> None:
    lines = ['{"part": "site", "commit": "a", "code": "c", "seconds": 1, "passed": 0, "failed": 1}']
    lines += [lines[0].replace('"passed": 0, "failed": 1', '"passed": 1, "failed": 0'), ""]
    assert nightly.read_outcomes(lines)["site"].is_green
    assert "| `site` | the site | `a` | 0.0 | 1 | 0 |" in nightly.table([PART], nightly.read_outcomes(lines))
    assert "| `site` | the site | not yet run |" in nightly.table([PART], {})


def test_every_file_of_cluster_tests_is_in_one_part() -> None:
    listed = [name for files in nightly.E2E.values() for name in files]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "tests/e2e").glob("test_*.py"))
    regions = [f"test_{name}.py" for name in nightly.REGIONS]
    assert sorted(regions) == sorted(path.name for path in (ROOT / "tests/e2e/regions").glob("test_*.py"))


def test_each_quick_form_is_a_program() -> None:
    for name in nightly.QUICK_FORMS:
        assert (ROOT / "bench" / f"{name}.py").is_file(), name


def test_the_kept_lines_name_parts() -> None:
    known = nightly.read_outcomes(nightly.LINES.read_text().splitlines())
    assert known.keys() <= {part.name for part in nightly.list_parts()}
