"""tools/generate.py, which writes and checks every generated file (`make lint` runs the check over all of them)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from repository import ROOT
from wrong_jobs import LEAVES

sys.path.insert(0, str(ROOT / "tools"))

import generate
import helper_table
import proto_stubs
import stacks
import time_limits


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with three generated files: a whole one, a page with a part, and one that needs a program."""

    def without_program() -> str:
        raise generate.Skipped("no such program")

    files = {
        "docs/whole.md": generate.whole(lambda: "all of it\n"),
        "docs/page.md": generate.parts(lambda: {"part": "a table"}),
        "manifests/needs.yaml": generate.whole(without_program),
    }
    monkeypatch.setattr(generate, "FILES", files)
    monkeypatch.setattr(generate, "CHECKS", {"lock": (lambda: ["it lacks x"], "make lock")})
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("before\n<!-- part: generated --><!-- part: end -->\nafter\n")
    return tmp_path


def test_what_is_not_current_is_shown_and_then_written(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check", "docs"]) == 1
    said = capsys.readouterr().err
    assert "docs/whole.md is not current: run make generate" in said and "+all of it" in said
    assert generate.main(["--write"]) == 0
    assert (table / "docs" / "whole.md").read_text() == "all of it\n"
    page = "before\n<!-- part: generated -->\n\na table\n\n<!-- part: end -->\nafter\n"
    assert (table / "docs" / "page.md").read_text() == page
    assert "needs.yaml was not compared: no such program" in capsys.readouterr().out
    assert not (table / "manifests").exists()
    assert generate.main(["--check", "docs/whole.md", "docs/page.md"]) == 0


def test_a_program_stays_one(table: Path) -> None:
    program = table / "docs" / "whole.md"
    program.write_text("old\n")
    program.chmod(0o755)
    assert generate.main(["--write", "docs/whole.md"]) == 0
    assert program.read_text() == "all of it\n" and program.stat().st_mode & 0o100


def test_a_page_without_marks_is_a_problem(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table / "docs" / "page.md").write_text("no marks")
    assert generate.main(["--write", "docs/page.md"]) == 1
    assert "docs/page.md: the page lacks the marks of part" in capsys.readouterr().err


def test_what_is_only_compared_counts_in_a_check_of_everything(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--write"]) == 0
    assert generate.main(["--check"]) == 1
    assert "lock: it lacks x: run make lock" in capsys.readouterr().err


def test_a_path_without_a_generated_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate.main(["--check", "docs/nothing.md"])
    assert "nothing is generated at docs/nothing.md" in capsys.readouterr().err


def test_every_file_of_the_table_is_there_and_every_generated_part_is_in_the_table() -> None:
    assert all((ROOT / name).is_file() for name in generate.FILES)
    marked = {
        str(path.relative_to(ROOT))
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "charts").rglob("*.md"))
        if re.search(r"<!-- .*: generated -->|<!-- Written by ", path.read_text(encoding="utf-8"))
    }
    assert marked == {name for name in generate.FILES if name.endswith(".md")}


def test_stubs_that_differ_in_the_generators_versions_alone_are_current() -> None:
    for name, text in proto_stubs.generated().items():
        other = re.sub(r"(# Protobuf Python Version: ).*", r"\g<1>0.0.1", text)
        assert proto_stubs.stub(name, other) == other
        assert proto_stubs.stub(name, other.replace("SignedCall", "SignedCull")) == text


def test_the_field_reference_has_every_field() -> None:
    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    for leaf in LEAVES:
        assert f"| `{leaf.path[-1]}` |" in text


def test_a_time_limit_that_is_not_in_the_code_is_named() -> None:
    assert time_limits.shown("protocol.wire.limits:JOIN_SECONDS") == "10 s"
    assert time_limits.shown("spec.sync.heartbeat.timeoutSeconds") == "10 s"
    for wrong in ("protocol.wire.limits:NO_SECONDS", "protocol.nothing:SECONDS", "spec.sync.heartbeat.patience"):
        with pytest.raises(ValueError, match=r"tools/time_limits\.py names"):
            time_limits.shown(wrong)


def test_the_stacks_are_those_of_the_contracts_of_layers() -> None:
    pyproject = """
[[tool.importlinter.contracts]]
id = "one"
type = "layers"
containers = ["pack.core"]
layers = ["top", "left | right", "books"]
[[tool.importlinter.contracts]]
id = "functional-core"
type = "forbidden"
source_modules = ["pack.core.books"]
"""
    assert stacks.stacks(pyproject).splitlines()[-1] == "| `pack.core` | `top` → `left`, `right` → **`books`** |"


def test_a_helper_without_a_purpose_is_named(tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text('"""A ``helper`` of\ntests. Not a test."""\n')
    assert helper_table.purpose(helper) == "A `helper` of tests"
    helper.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"helper\.py does not say"):
        helper_table.purpose(helper)
