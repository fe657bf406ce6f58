"""``diloco audit``: what is told of a run, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco import audit as audits
from diloco.audit import audit
from diloco.console import CommandError
from diloco.main import app
from diloco_syncer.audit.store_audit import Audit, Check
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.documents import pack_document
from diloco_syncer.store.tape import SETTINGS, Tape


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory whose syncer has begun, and merged nothing."""
    workdir = tmp_path / "r"
    store = DirectoryStore(workdir / "store")
    (workdir / "job.json").write_text(json.dumps({"metadata": {"name": "j"}}))
    (workdir / "store" / "epochs").mkdir()
    tape = Tape(store)
    merge = {"method": "rda", "weights": "tokens"}
    tape.append_note(SETTINGS, 1.5e9, {"epoch": 1, "max_steps": 96, "sync": {"merge": merge}})
    tape.flush()
    state = {"job": "j", "versions": [], "core": {"core": {"job": {"ledger": None}}}}
    store.create("state/s.json", *pack_document(state))
    return workdir


def test_a_runs_directory_and_its_store_are_audited_alike(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for what in (run, run / "store"):
        assert audit(str(what), as_json=False) == 0
        said.append(capsys.readouterr().out.replace(str(what), "IT"))
    assert said[0] == said[1] and said[0].startswith("IT: the job j, 0 merges in epoch 1\n")
    assert said[0].endswith("everything holds\n") and "there is no state with books yet" in said[0]
    assert audit(str(run), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


def test_what_does_not_hold_is_named_and_is_the_exit_code(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check("records", False, "7 wrong", tuple(f"fault {number}" for number in range(7)))
    found = Audit("j", 3, (1, 2), (check,), events={"joined": 2}, refused={"stale": 4})
    monkeypatch.setattr(audits, "audit_store", lambda store, job, progress: found)
    assert audit(str(run), as_json=False) == 1
    said = capsys.readouterr().out
    assert "epochs 1 to 2" in said and "WRONG records" in said and "fault 4" in said and "fault 5" not in said
    assert "and 2 more (--json lists them)" in said and "2 joined" in said and "4 stale" in said
    assert said.endswith("NOT everything holds\n")
    assert audit(str(run), as_json=True) == 1 and "fault 6" in capsys.readouterr().out


def test_what_has_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is no run's directory"):
        audit(str(tmp_path), as_json=False)
    (tmp_path / "job.json").write_text(json.dumps({"metadata": {"name": "j"}}))
    with pytest.raises(CommandError, match="its run has not begun"):
        audit(str(tmp_path), as_json=False)
    (tmp_path / "s" / "epochs").mkdir(parents=True)
    with pytest.raises(CommandError, match="is no store of a job"):
        audit(str(tmp_path / "s"), as_json=False)
    with pytest.raises(CommandError, match="there is no such directory"):
        audit(f"file://{tmp_path}/none", as_json=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(CommandError, match="a store is a directory, or a URI"):
        audit("ftp://x", as_json=False)


def test_help_names_what_is_checked() -> None:
    said = CliRunner().invoke(app, ["audit", "--help"]).output
    words = " ".join(said.split())
    assert "merged twice" in words and "exit code is 1" in words
