"""tests/worlds.py: which failures are red, which world comes next, and what a failure prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import world_seeds
import worlds
from world_seeds import Case, NewSeeds, Verdict
from worlds import Outcome

CASE = Case("core", "HARSH", 61, '{"fragments": 1}')


@pytest.mark.parametrize(
    ("failed", "recorded", "is_open", "failed_before", "verdict"),
    [
        (False, True, False, None, Verdict.GOOD),
        (False, False, True, None, Verdict.GOOD),
        (True, True, False, None, Verdict.RED),
        (True, True, False, True, Verdict.RED),  # a recorded one was good on the commit before
        (True, True, True, None, Verdict.OPEN),
        (True, False, False, False, Verdict.RED),
        (True, False, False, None, Verdict.RED),  # the commit before cannot tell
        (True, False, False, True, Verdict.KNOWN),
    ],
)
def test_what_is_red(failed: bool, recorded: bool, is_open: bool, failed_before: bool | None, verdict: Verdict) -> None:
    assert world_seeds.judge(failed, recorded=recorded, is_open=is_open, failed_before=failed_before) is verdict


@pytest.mark.parametrize(
    ("merge_base", "parent", "changed", "base"),
    [
        ("m", "p", False, "m"),  # a branch
        ("m", "p", True, "m"),
        ("h", "p", False, "p"),  # a clone of main
        ("h", "p", True, "h"),  # main, and an edit
        (None, "p", False, "p"),
        (None, None, False, None),  # one commit
    ],
)
def test_the_commit_before(merge_base: str | None, parent: str | None, changed: bool, base: str | None) -> None:
    assert world_seeds.choose_base("h", merge_base, parent, changed) == base


def test_new_seeds_follow_each_other_and_take_the_settings_in_turn_until_the_budget_is_used_up() -> None:
    few = len(world_seeds.RECORDED["core"]) - 1
    settings = {name: list(world_seeds.RECORDED[name]) for name in ("core", "shell", "operator")}
    new = NewSeeds({"core": few, "shell": 5.0, "operator": 0.0}, {"core": 100, "shell": 200, "operator": 300}, settings)
    cases = []
    while (case := new.next()) is not None:
        cases.append(case)
        new.used[case.simulation] += 1.0
    core = [case for case in cases if case.simulation == "core"]
    assert [case.seed for case in core] == list(range(100, 100 + few))
    assert {case.setting for case in core} == set(world_seeds.RECORDED["core"]) - {core_setting_of(100 + few)}
    assert [case.seed for case in cases if case.simulation == "shell"] == list(range(200, 205))
    assert not [case for case in cases if case.simulation == "operator"]


def test_only_a_nightly_run_draws_settings_that_still_fail_and_a_person_may_name_them() -> None:
    for name, kinds in world_seeds.RECORDED.items():
        later = set(world_seeds.NIGHTLY.get(name, ()))
        assert set(world_seeds.drawn_settings(name, nightly=False)) == set(kinds) - later
        assert world_seeds.drawn_settings(name, nightly=True) == list(kinds) and later <= set(kinds)
    assert world_seeds.drawn_settings("operator", nightly=False, named="LIVES") == ["LIVES"]


def core_setting_of(seed: int) -> str:
    settings = list(world_seeds.RECORDED["core"])
    return settings[seed % len(settings)]


def test_what_is_found_is_written_down_and_read_again() -> None:
    line = world_seeds.found_line(CASE, "abc", "AssertionError: lost\nat length")
    assert json.loads(line)["failed"] == "AssertionError: lost"
    assert world_seeds.read_found(line + "\n") == {CASE: False}
    assert world_seeds.read_found(line.replace("null", '"def"')) == {CASE: True}


def test_every_found_seed_says_what_it_found() -> None:
    for line in worlds.FOUND.read_text().splitlines():
        row = json.loads(line)
        assert row.keys() - {"with"} == {"simulation", "setting", "seed", "commit", "failed", "mended"}
        assert row["setting"] in world_seeds.RECORDED[row["simulation"]] and row["failed"]


def test_every_setting_has_recorded_seeds() -> None:
    from operator_simulation.random_faults import SETTINGS
    from syncer_simulation.settings import CORE, SHELL
    from syncer_simulation.worker_settings import WORKERS

    assert {name: set(kinds) for name, kinds in world_seeds.RECORDED.items()} == {
        "core": set(CORE),
        "shell": set(SHELL),
        "workers": set(WORKERS),
        "operator": set(SETTINGS),
    }


def test_a_world_that_fails_says_how_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome(CASE, 5, 0.1, "AssertionError: lost", trace=("12.0 a step",))
    worlds.tell_failure(Verdict.RED, outcome, "abc")
    told = capsys.readouterr().out
    command = "tests/worlds.py --simulation core --setting HARSH --seed 61 --with '{\"fragments\": 1}'"
    assert f"FAILED: .venv/bin/python {command}" in told
    assert "12.0 a step" in told and "AssertionError: lost" in told and '"mended": null' in told


def run_worlds(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(worlds.ROOT / "tests" / "worlds.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, cwd=worlds.ROOT)


def test_one_world_runs_alone() -> None:
    world = ("--simulation", "core", "--setting", "LIVE_1", "--seed", "3")
    good = run_worlds(*world)
    assert good.returncode == 0 and good.stdout.startswith("good: "), good
    bad = run_worlds(*world, "--with", '{"swallowed": "push"}')
    assert bad.returncode == 1 and "FAILED: " in bad.stdout and " epoch 1: " in bad.stdout, bad
    assert run_worlds("--setting", "ORDINARY", "--seed", "3").returncode == 2


def test_the_same_world_has_the_same_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "LOG", tmp_path / "worlds.log")
    case = Case("core", "ORDINARY", 5)
    assert not worlds.run_case(case, twice=True).error
    runs: list[list[str]] = []

    def run_otherwise(case: Case, trace: list[str] | None) -> int:
        assert trace is not None
        runs.append(trace)
        trace.append(str(len(runs)))
        return 1

    monkeypatch.setattr(worlds, "run_world", run_otherwise)
    assert worlds.run_case(case, twice=True).error == "two runs of this world differ"
    assert worlds.LOG.read_text().startswith(f"begin {case.command}\nend   {case.command}\n")
