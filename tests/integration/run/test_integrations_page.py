"""docs/integrations.md: its scripts run as they stand there, alone and as jobs that lose a learner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SCRIPTS = ("trainer.py", "module.py", "accelerated.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files. A block's first line names its file."""
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```$", PAGE, re.S | re.M):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.py", "job.yaml", *SCRIPTS}
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    return found | {"CUDA_VISIBLE_DEVICES": ""} | more


@pytest.mark.promise("Scripts of transformers' Trainer, Lightning and accelerate are learners, and may be killed")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_a_job_that_loses_a_learner(folder: Path, script: str) -> None:
    # A quorum of both: the job cannot end before the replacement is in merges.
    values = (f"learners.command=[python, {script}]", "sync.quorum=2")
    words = [word for value in values for word in ("--set", value)]
    done = subprocess.run(
        [sys.executable, "-m", "diloco.main", "run", "job.yaml", *words, "--chaos", "step=30:kill:local-1"],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "runs" / "my-trainer" / "report.json").read_bytes())
    assert report["outcome"] == "complete" and report["merges"] > 0
    (fault,) = report["faults"]
    assert fault["action"] == "kill" and fault["recovered_seconds"] is not None, fault
    assert report["training_loss"]["last"] < 0.8 * report["training_loss"]["first"] < 6.0
    lines = [
        json.loads(line)
        for path in (folder / "runs" / "my-trainer" / "metrics").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {line["tokens"] / line["step"] for line in lines if line["step"] == 20} == {8 * 32}
    if script != "accelerated.py":  # whose rate is constant
        assert min(line["lr"] for line in lines) < 4e-4 < 1e-3 < max(line["lr"] for line in lines)


@pytest.mark.slow
def test_a_script_alone_ends_with_its_job_and_draws_every_item_once(folder: Path) -> None:
    short = folder / "short.yaml"
    short.write_text((folder / "job.yaml").read_text().replace("tokens: 60000", "tokens: 13000"))
    count = "import rows, sys, atexit\nseen = []\nget = rows.Rows.__getitem__\n"
    count += "rows.Rows.__getitem__ = lambda self, i: (seen.append(i), get(self, i))[1]\n"
    count += "atexit.register(lambda: print('seen', len(seen), len(set(seen))))\n"
    count += "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')\n"
    for script in ("trainer.py", "module.py"):
        done = subprocess.run(
            [sys.executable, "-c", count, script],
            env=environment(DILOCO_ALONE_JOB=str(short), PYTHONPATH=f"{folder}:{os.environ.get('PYTHONPATH', '')}"),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        steps = -(-13000 // (8 * 32))
        assert f"seen {8 * steps} {8 * steps}" in done.stdout, done.stdout  # no batch is read ahead of the steps
