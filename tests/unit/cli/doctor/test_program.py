"""``diloco doctor train.py``: what is said of a program of one's own that is run for some steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.doctor.job import check_job
from diloco.doctor.program import check_program
from diloco.main import app
from diloco_worker.standalone.rehearsal import VARIABLE

LOOP = """
import sys
import torch
import diloco_worker

assert sys.argv[1:] == ["--lr", "0.01"]
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches(torch.randn(64, 8)):
        assert len(batch) == 3
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if learner.step == 4:
            model.head = torch.nn.Linear(4, 4)
        learner.after_step(tokens=batch.numel(), loss=loss)
print("not JSON")
raise SystemExit(learner.exit_code)
"""
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: mine}
spec:
  learners: {command: [torchrun, --nproc-per-node, "2", train.py]}
  training: {batch: {sequences: 3}}
  regions: [{learners: 1}]
"""


def diloco(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout


@pytest.mark.promise(
    "`diloco doctor train.py` names what a job would refuse of a program, or train wrongly without a word"
)
def test_a_program_is_run_with_its_arguments_and_the_jobs_batch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "job.yaml").write_text(JOB)
    code, said = diloco("doctor", tmp_path / "train.py", "-f", tmp_path / "job.yaml", "--json", "--", "--lr", "0.01")
    document = json.loads(said)
    (error,) = [one["said"] for one in document["findings"] if one["level"] == "error"]
    assert code == 1 and error.startswith("parameter head.weight was unfrozen, or added"), said
    assert [one["said"] for one in document["findings"] if one["about"] == "steps"] == [
        "30 steps made; 1 fragment of the model moved as merges do"
    ]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Programs do not run: each leaves these rows, and ends so (None: not at all)."""

    def script(code: int | None, *rows: dict[str, Any]) -> None:
        def run(command: list[str], env: dict[str, str], stdout: Any, timeout: float) -> Any:
            assert command[0] == sys.executable and stdout == 2, "stderr"
            assert "DILOCO_JOB_FILE" not in env and env["DILOCO_LOG_LEVEL"] == "ERROR"
            Path(env[VARIABLE]).write_text("".join(json.dumps(row) + "\n" for row in rows))
            if code is None:
                raise subprocess.TimeoutExpired(command, timeout)
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setenv("DILOCO_JOB_FILE", "/another/job.json")
        monkeypatch.setenv("DILOCO_LOG_LEVEL", "ERROR")

    return script


STEP = {"steps": 30, "moved": 4}
ERROR = {"level": "error", "said": "wrong: cure"}


@pytest.mark.parametrize(
    ("code", "rows", "expected"),
    [
        (0, [STEP], [("ok", "30 steps made; 4 fragments of the model moved as merges do")]),
        (
            2,
            [ERROR, STEP],
            [("error", "wrong: cure"), ("ok", "30 steps made; 4 fragments of the model moved as merges do")],
        ),
        (1, [STEP], [("error", "it ended with exit code 1; its own error stands above"), ("ok", "30 steps made")]),
        (0, [], [("error", "it ended and made no Learner"), ("warning", "0 steps made")]),
        (3, [], [("error", "it ended with exit code 3"), ("warning", "0 steps made")]),
        (None, [STEP], [("error", "it has not ended within 1800 s"), ("ok", "30 steps made")]),
    ],
)
def test_how_the_program_ended(
    ran: Callable[..., None],
    tmp_path: Path,
    code: int | None,
    rows: list[dict[str, Any]],
    expected: list[tuple[str, str]],
) -> None:
    ran(code, *rows)
    (tmp_path / "train.py").touch()
    found = list(check_program(tmp_path / "train.py", [], None))
    assert [one.level for one in found] == [level for level, _ in expected]
    for one, (_, said) in zip(found, expected, strict=True):
        assert one.said.startswith(said) and bool(one.fix) == ("made no Learner" in said)


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "absent.py")])
    assert result.exit_code == 2 and "absent.py: there is no such file" in result.stderr
    result = CliRunner().invoke(app, ["doctor", "job.yaml", "--", "--lr"])
    assert result.exit_code == 2 and "arguments after -- are a program's" in result.stderr


def test_of_ranks_that_a_command_starts_itself_nobody_knows_the_number(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    found = [one for one in check_job(tmp_path / "job.yaml", [], None) if one.level == "warning"]
    assert any(one.said.startswith("the ranks that torchrun starts are one learner") for one in found)
