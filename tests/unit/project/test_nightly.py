"""`make nightly`: what is due, what a part's outcome is, and that no test of a cluster is left out."""

from __future__ import annotations

import re
import sys

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import nightly
from nightly import Outcome, Part

PART = Part("site", "make site", "the site", ("docs/",))
EVERY = ("slow-unit", "worlds", "site", "mutants", "bench-hub", "e2e-chaos", "regions-lost")


def outcome(part: str = "site", code: str = "c1", passed: int = 1, failed: int = 0) -> Outcome:
    return Outcome(part, "0123abcd", code, 60, passed=passed, failed=failed)


def test_a_part_is_due_until_it_has_passed_on_this_code() -> None:
    parts = [PART, Part("worlds", "x", "y", ())]
    code = {"site": "c1", "worlds": "c1"}
    assert nightly.find_due(parts, {}, code) == parts
    assert nightly.find_due(parts, {"site": outcome()}, code) == parts[1:]
    assert nightly.find_due(parts, {"site": outcome()}, {**code, "site": "c2"}) == parts
    assert nightly.find_due(parts, {"site": outcome(failed=1)}, code) == parts


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


@pytest.mark.parametrize(
    ("path", "readers"),
    [
        ("syncer/diloco_syncer/core/rounds.py", set(EVERY) - {"site"}),
        ("tests/patience.py", set(EVERY) - {"site", "bench-hub"}),
        ("tests/one_slot.py", {"slow-unit", "worlds", "mutants"}),
        ("tests/unit/syncer/test_slots.py", {"slow-unit", "mutants"}),
        ("tests/e2e/jobs.py", {"e2e-chaos", "regions-lost"}),
        ("tests/e2e/test_chaos.py", {"e2e-chaos"}),
        ("tests/e2e/regions/test_lost.py", {"regions-lost"}),
        ("tests/e2e/regions/world.py", {"regions-lost"}),
        ("bench/lab/trials.py", {"slow-unit", "bench-hub"}),
        ("docs/faq.md", {"site"}),
        ("docs/reliability.md", set()),
        ("tests/nightly.jsonl", set()),
        ("tests/mutants/caught.tsv", set()),
        (".ci/run", set()),
    ],
)
def test_a_part_is_due_again_when_a_file_that_it_reads_has_changed(path: str, readers: set[str]) -> None:
    before, after = [f"100644 aa 0\t{path}", "100644 bb 0\tother"], [f"100644 cc 0\t{path}", "100644 bb 0\tother"]
    parts = [part for part in nightly.list_parts() if part.name in EVERY]
    assert {p.name for p in parts if nightly.digest_code(p, before) != nightly.digest_code(p, after)} == readers


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


def test_what_cluster_tests_import_is_read_by_their_parts() -> None:
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py")}
    texts = [path.read_text() for path in (ROOT / "tests/e2e").rglob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)} & helpers
    for part in (part for part in nightly.list_parts() if part.name.startswith(("e2e-", "regions-"))):
        assert all(nightly.read_by(part, f"tests/{name}.py") for name in imported | {"conftest"}), part.name


def test_each_quick_form_is_a_program() -> None:
    for name in nightly.QUICK_FORMS:
        assert (ROOT / "bench" / f"{name}.py").is_file(), name


def test_the_kept_lines_name_parts() -> None:
    known = nightly.read_outcomes(nightly.LINES.read_text().splitlines())
    assert known.keys() <= {part.name for part in nightly.list_parts()}
