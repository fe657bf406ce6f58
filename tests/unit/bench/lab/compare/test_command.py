"""``bench/chaos.py``: what it refuses, and the schedule that it prints."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import chaos
from diloco.local.chaos.schedule import parse
from repository import ROOT

JOB = str(ROOT / "examples" / "minimal.yaml")
Said = Callable[..., tuple[int, str]]  # runs it with these arguments: its exit code and what it printed


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def run(*arguments: str) -> tuple[int, str]:
        code = chaos.main([JOB, *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_the_schedule_is_printed_and_is_the_same_again(said: Said) -> None:
    code, text = said("--mtbf", "20", "--minutes", "2", "--seed", "7", "--dry-run")
    assert code == 0 and len(parse(text.strip())) > 3
    assert said("--mtbf", "20", "--minutes", "2", "--seed", "7", "--dry-run") == (0, text)
    assert said("--mtbf", "20", "--minutes", "2", "--seed", "8", "--dry-run")[1] != text
    assert said("--chaos", text.strip(), "--dry-run")[1] == text


def test_the_schedule_is_printed_for_programs_too(said: Said) -> None:
    code, text = said("--mtbf", "20", "--minutes", "2", "--seed", "7", "--dry-run", "--json")
    printed = json.loads(text)
    assert code == 0 and len(printed["rows"]) == len(parse(printed["chaos"]))
    assert all({"name", "value", "baseline", "ratio"} <= row.keys() for row in printed["rows"])
    assert json.loads(said("--mtbf", "1e9", "--dry-run", "--json")[1]) == {"chaos": "none", "rows": []}
    assert said("--mtbf", "1e9", "--dry-run") == (0, "none\n")
    assert said("--chaos", "none", "--dry-run") == (0, "none\n")


def test_quick_changes_defaults_and_not_what_is_said(said: Said) -> None:
    short = said("--quick", "--dry-run")[1]
    assert all((fault.after_seconds or 0) < 12 for fault in parse(short.strip()))
    assert said("--quick", "--minutes", "5", "--mtbf", "60", "--dry-run")[1] != short  # the long form's own defaults
    longer = said("--quick", "--minutes", "3", "--dry-run")[1]
    assert max(fault.after_seconds or 0 for fault in parse(longer.strip())) > 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "ddp,horovod"], "there is no baseline 'horovod'; there are ddp, ddp-elastic, torchft"),
        (["--compare", ""], "--compare: name a baseline; there are ddp"),
        (["--compare", "ddp,dpp", "--quick"], "there is no baseline 'dpp'"),
        (["--mtbf", "0"], "--mtbf 0: it must be a number above 0"),
        (["--mtbf", "-3", "--quick"], "--mtbf -3: it must be a number above 0"),
        (["--repair", "inf"], "--repair inf: it must be a number above 0"),
        (["--minutes", "0"], "--minutes 0: it must be a number above 0"),
        (["--step-seconds", "0"], "--step-seconds 0: it must be a number above 0"),
        (["--chaos", "500s:kill:learner-1:3s"], "the arms end after 300 s; raise --minutes"),
        (["--chaos", "5s:kill:syncer"], "a comparison takes kill, pause, cut and slow of one named learner"),
        (["--chaos", "5s:kill:learner-7"], "the job has no learner-7"),
        (["--set", "regions.0.spares=1"], "no baseline has spare machines"),
        (["--set-arm", "torchft:sync.outer.lr=0.5"], "write ARM:PATH=VALUE, where ARM is one of ours, ddp"),
        (["--set-arm", "ddp:training.optimizer.rate=1"], "spec.training.optimizer.rate"),
        (["--set-arm", "ddp:regions.0.learners=2"], "below training.optimizer and sync; model, data, batch"),
        (["--set-arm", "ddp:training.batch.sequences=4"], "are the same for all"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, said: Said) -> None:
    code, text = said(*arguments)
    assert code == 2 and words in " ".join(text.split()), text
