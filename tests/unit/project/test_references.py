"""The pages that tools/ writes from the code are current."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from repository import ROOT
from wrong_jobs import LEAVES

sys.path.insert(0, str(ROOT / "tools"))

import job_reference


def test_the_field_reference_is_current() -> None:
    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    assert text == job_reference.page(), "tools/job_reference.py --write docs/job.md"
    for leaf in LEAVES:
        assert f"| `{leaf.path[-1]}` |" in text


def test_the_reference_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "job.md"
    assert job_reference.main(["--check", str(page)]) == 1
    assert job_reference.main(["--write", str(page)]) == 0
    assert job_reference.main(["--check", str(page)]) == 0
    page.write_text(page.read_text() + "more")
    assert job_reference.main(["--check", str(page)]) == 1
    assert "make docs" in capsys.readouterr().out
