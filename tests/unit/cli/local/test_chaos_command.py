"""``diloco chaos``: the faults that it draws, what it refuses, and what it hands to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.local import run
from diloco.local.chaos.schedule import parse
from diloco.main import app
from repository import ROOT

JOB = str(ROOT / "examples" / "minimal.yaml")


def said(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["chaos", JOB, *arguments])
    return done.exit_code, done.output


def test_the_schedule_is_printed_and_is_the_same_again() -> None:
    drawn = ("--mtbf", "20", "--minutes", "2", "--seed", "7", "--dry-run")
    code, text = said(*drawn)
    assert code == 0 and len(parse(text.strip())) > 3
    assert said(*drawn) == (0, text)
    assert said("--chaos", text.strip(), "--dry-run")[1] == text
    assert json.loads(said(*drawn, "--json")[1])["chaos"] == text.strip()


def test_in_a_cluster_there_are_kills_alone() -> None:
    code, text = said("--mtbf", "20", "--minutes", "2", "--seed", "7", "--dry-run", "--context", "nowhere")
    kills = parse(text.strip())
    assert code == 0 and kills and all(fault.action == "kill" and not fault.duration for fault in kills)


def test_the_job_runs_to_its_own_end_under_these_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[run.RunOptions] = []
    monkeypatch.setattr(run, "run", lambda options: given.append(options) or 0)
    drawn = ("--mtbf", "20", "--minutes", "2", "--seed", "7")
    assert said(*drawn, "--workdir", "there", "--set", "sync.quorum=2", "--json")[0] == 0
    (options,) = given
    assert options.chaos == said(*drawn, "--dry-run")[1].strip()
    assert (options.workdir, options.as_json) == (Path("there"), True)
    assert list(options.overrides) == ["sync.quorum=2"], "the job is its owner's"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mtbf", "0"], "--mtbf 0: it must be a number above 0"),
        (["--repair", "inf"], "--repair inf: it must be a number above 0"),
        (["--minutes", "0"], "--minutes 0: it must be a number above 0"),
        (["--chaos", "5s:kill:learner-7"], "the job has no learner-7"),
        (["--context", "x", "--chaos", "5s:pause:learner-0:3s"], "in a cluster pods are deleted"),
        (["--context", "x", "--workdir", "there"], "nothing is run here: leave out --workdir"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str) -> None:
    code, text = said(*arguments)
    assert code == 2 and words in " ".join(text.split()), text
