"""What the README says of bandwidth is what ``diloco plan`` says, for the defaults and for the hub too."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.main import app
from repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)
PLAN = ["plan", str(ROOT / "examples" / "minimal.yaml"), "--params", "5e9", "--step-seconds", "1", "--json"]


def planned(*changes: str) -> dict[str, Any]:
    """For eight learners."""
    sets = [word for change in ("regions.0.learners=8", *changes) for word in ("--set", change)]
    done = CliRunner().invoke(app, [*PLAN, *sets])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def check_row(row: tuple[str, ...], plan: dict[str, Any]) -> None:
    """In Gbit/s: a learner's link up and down, the hub's in and out."""
    link, hub = plan["queued"]["link"], plan["queued"]["hub"]
    figures = [value / 1e9 for value in (link["up"], link["down"], hub["in"], hub["out"])]
    assert [float(cell) for cell in row[1:]] == pytest.approx(figures, rel=0.01), row


def test_the_table_is_what_the_command_prints() -> None:
    assert len(ROWS) == 2, "the defaults, and an encoding that is the same both ways"
    defaults, thin = planned(), planned("sync.compression.down=delta-int4")
    assert all(f"{name} {way}" in ROWS[0][0] for way, name in defaults["compression"].items()), ROWS[0]
    check_row(ROWS[0], defaults)
    assert "delta-int4" in ROWS[1][0]
    check_row(ROWS[1], thin)


def test_data_parallel_training_beside_it_is_of_the_same_case() -> None:
    found = re.search(r"^\| data-parallel training.*? \| ([\d.]+) \| ([\d.]+) \|", README, re.M)
    assert found is not None
    gigabits = planned()["data_parallel"]["bits_per_second"] / 1e9
    assert [float(cell) for cell in found.groups()] == pytest.approx([gigabits] * 2, rel=0.01)
