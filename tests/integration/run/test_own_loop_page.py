"""docs/your-own-loop.md: its files run as they stand there, alone and as a job, and it has every name of a learner."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from free_ports import free_port
from repository import ROOT

PAGE = (ROOT / "docs" / "your-own-loop.md").read_text(encoding="utf-8")
FILES = ("model.py", "train.py", "ddp.py", "job.yaml", "full.py", "stream.py", "evaluator.py", "generate.py")
# All in one process, which loads torch once.
RUN_ALL = """
import runpy, sys
for name in sys.argv[1:]:
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (name, end.code)
    print("done:", name)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files. A block's first line names its file; of the difference from DDP both sides are files."""
    for kind, block in re.findall(r"^```(python|yaml|diff)\n(.*?)^```$", PAGE, re.S | re.M):
        sides = {"train.py": block}
        if kind == "diff":
            sides = {
                name: "".join(line[1:] for line in block.splitlines(keepends=True) if not line.startswith(other))
                for name, other in (("train.py", "-"), ("ddp.py", "+"))
            }
        else:
            sides = {block.splitlines()[0].removeprefix("# "): block}
        for name, text in sides.items():
            assert name in FILES and not (tmp_path / name).exists(), name
            (tmp_path / name).write_text(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")} | more


def test_every_name_of_a_learner_is_on_the_page_with_its_parameters() -> None:
    from diloco_worker import Learner  # loads torch

    named = set(re.findall(r"`(?:\w+\.)*(\w+)", PAGE))
    public = {name for name in dir(Learner) if not name.startswith("_")}
    assert {"batches", "after_step", "progress"} <= public <= named
    assert {"load_merged", "Observer", "configure_logging", "layout"} <= named
    for name in ("batches", "steps", "after_step", "rewarm_scale", "leave"):
        found = re.search(rf"`{name}\(([^`)]*)\)`", PAGE)
        assert found is not None, name
        shown = [part.partition("=")[0].strip() for part in found[1].split(",") if part]
        assert ["self", *shown] == list(inspect.signature(getattr(Learner, name)).parameters), name


def test_the_difference_from_ddp_is_as_small_as_it_says() -> None:
    (block,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.S | re.M)
    assert sum(line.startswith("+") for line in block.splitlines()) <= 10


@pytest.mark.slow
def test_every_script_of_the_page_runs_alone(folder: Path) -> None:
    short = folder / "short.yaml"
    short.write_text((folder / "job.yaml").read_text().replace("tokens: 60000", "tokens: 13000"))
    ddp = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    scripts = ["train.py", "full.py", "stream.py", "ddp.py"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *scripts],
        env=environment(DILOCO_ALONE_JOB=str(short), PYTHONPATH=f"{folder}:{os.environ.get('PYTHONPATH', '')}", **ddp),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("done:")] == [f"done: {s}" for s in scripts]
    assert done.stderr.count("training alone: no job started this program") == 3, done.stderr
    assert "step 50, 98% of the job, loss " in done.stdout, done.stdout


@pytest.mark.promise("A job with its own loop can be scored by its own program")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("evaluator", [True, False])
def test_the_pages_job_trains_and_its_model_is_had(folder: Path, evaluator: bool) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], env=environment(), cwd=folder, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    scored = ["--set", "evaluator.command=[python, evaluator.py]"] if evaluator else []
    run("-m", "diloco.main", "run", "job.yaml", *scored)
    report = json.loads((folder / "runs" / "own-loop" / "report.json").read_bytes())
    assert report["outcome"] == "complete" and report["merges"] > 0
    if evaluator:
        assert report["final_loss"] < 5.0  # a uniform guess has 5.545; the evaluator may come too late for version 0
        assert report["training_loss"] is None
    else:
        assert report["final_loss"] is None
        assert report["training_loss"]["last"] < report["training_loss"]["first"] < 6.0
    said = run("-m", "diloco.main", "export", "runs/own-loop", "model/")
    assert "model.safetensors: 7 tensors of " in said
    assert sorted(path.name for path in (folder / "model").iterdir()) == ["layout.json", "model.safetensors"]
    text = run("generate.py")
    assert text.startswith("the quick ") and len(text.strip()) > 20
