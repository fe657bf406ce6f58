"""The report: a row for each figure and baseline, in words and as JSON; results that are kept under their digest."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.local.chaos.random_faults import draw_schedule
from diloco.local.chaos.schedule import parse
from diloco.validate import read_job_file
from lab.compare import plan as plans
from lab.compare.arm import ArmResult, Record, measure_arm
from lab.compare.measures import Hit, Recovery, StepEnd
from lab.compare.plan import Comparison, Pace, choose_pace, job_overrides, mean_seconds_between_kills
from lab.compare.report import document
from lab.figures import ResultDocument
from lab.markdown import render_markdown
from repository import ROOT

JOB = ROOT / "examples" / "minimal.yaml"


def plan(**changes: float) -> Comparison:
    overrides = job_overrides([], 60.0, 3)
    schedule = draw_schedule(3, 2, 20.0, 4.0, seconds=60.0)
    made = Comparison(
        JOB,
        overrides,
        read_job_file(JOB, overrides),
        schedule,
        seconds=60.0,
        mtbf_seconds=30.0,
        pace=Pace(0.5, 1024, 0.2),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def arm(name: str, kept: int, stall: float) -> ArmResult:
    return ArmResult(
        name,
        60.0,
        kept / 1e5,
        0.9,
        kept_tokens=kept,
        trained_tokens=kept,
        tokens_per_second=kept / 60,
        bytes=10 * kept,
        final_loss=2.0,
        cpu_share=0.6,
        recoveries=[Recovery("kill", 5.0, 4.0, stall, back_seconds=1.0)],
        losses=[(0, 0.0, 5.0), (kept, 60.0, 2.0)],
        tokens=[(0.0, 0.0), (60.0, float(kept))],
    )


def test_rows_have_ours_theirs_and_the_ratio() -> None:
    arms = {"ours": arm("ours", 80_000, 0.0), "ddp": arm("ddp", 20_000, 9.0)}
    report = document(plan(), arms, {}, {"ddp": ["training.optimizer.lr=0.006"]}, cores=2)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["goodput"] == {
        "name": "goodput", "value": 0.8, "unit": "share",
        "against": "ddp", "baseline": 0.2, "ratio": pytest.approx(4.0),
    }  # fmt: skip
    assert rows["all stand still after a fault, maximum"]["value"] == 0.0
    # At equal tokens: as far as both go, 20,000, where ours is a quarter of its way from 5 to 2.
    assert rows["loss at equal tokens"]["value"] == pytest.approx(4.25)
    assert rows["loss at equal tokens"]["baseline"] == pytest.approx(2.0)
    assert "ddp alone: --set training.optimizer.lr=0.006" in report["notes"]
    bars = report["plots"][0]
    assert bars["title"] == "Goodput and uptime under faults" and bars["x"]["places"] == ["ours", "ddp"]
    assert {one["name"]: one["y"] for one in bars["series"]}["goodput"] == [0.8, 0.2]
    json.dumps(report, allow_nan=False)


def test_the_page_says_that_pace_is_emulated_what_failed_and_how_to_replay_it() -> None:
    busy = replace(arm("ddp", 20_000, 9.0), cpu_share=0.8)
    report = document(plan(), {"ours": arm("ours", 80_000, 0.0), "ddp": busy}, {"torchft": "no agents"}, {}, cores=2)
    said = render_markdown(ResultDocument.model_validate(report))
    assert "The pace is emulated" in said and "Above 70% of the cores: ddp" in said
    assert "torchft could not be run: no agents" in said
    assert report["schedule"] in said and report["schedule"].count(":kill:") > 0
    assert "| goodput | share | 0.8 | 0.2 |" in said


def test_every_arm_has_every_figure_under_one_name() -> None:
    many = [Recovery("kill", float(n), 1.0, 0.1 * n, back_seconds=2.0 * n) for n in range(1, 22)]
    few = [*many[:18], *(replace(row, back_seconds=None) for row in many[18:])]
    arms = {
        "ours": replace(arm("ours", 80_000, 0.0), recoveries=many),
        "ddp": replace(arm("ddp", 20_000, 9.0), recoveries=many),
        "ddp-elastic": replace(arm("ddp-elastic", 40_000, 4.0), recoveries=few),
    }
    (table,) = document(plan(), arms, {}, {}, cores=2)["tables"]
    figures = {row["figure"]: row for row in table["rows"]}
    assert all(row[name] is not None for row in figures.values() for name in arms)
    back = figures["a learner is back after its repair, maximum"]
    assert (back["ours"], back["ddp-elastic"]) == (42.0, 36.0), "p95 of many beside the maximum of few says nothing"
    assert figures["faults whose learner was not back at the end"]["ddp-elastic"] == 3


def test_a_baseline_that_reached_nothing_has_no_ratio() -> None:
    nothing = replace(arm("ddp", 0, 60.0), goodput=0.0, losses=[], final_loss=None)
    report = document(plan(), {"ours": arm("ours", 80_000, 0.0), "ddp": nothing}, {}, {}, cores=2)
    row = next(row for row in report["rows"] if row["name"] == "goodput")
    assert (row["baseline"], row["ratio"]) == (0.0, None)
    assert "–" in render_markdown(ResultDocument.model_validate(report))


def test_an_arm_is_measured_by_its_record() -> None:
    steps = [StepEnd(learner, 1000.0 + 0.5 * n) for learner in (0, 1) for n in range(1, 121)]
    record = Record(
        steps,
        [Hit("pause", 0, 1010.0, 1.0)],
        1000.0,
        1024 * 180,
        trained_tokens=1024 * 240,
        bytes=77,
        scores=[(0, 1000.0, 5.0), (9, 1060.0, 2.5)],
        own={"merges": 3},
        cpu=lambda start, end: 0.5,
    )
    got = measure_arm("ours", plan(), record)
    assert got.wall_seconds == 60.0 and got.goodput == pytest.approx(0.75) and got.uptime == 1.0
    assert got.final_loss == 2.5 and got.losses[-1] == (9, 60.0, 2.5)
    assert got.tokens[-1] == (60.0, 1024.0 * 240) and got.cpu_share == 0.5


def test_results_are_kept_and_read_again(tmp_path: Path) -> None:
    made = arm("ddp", 20_000, 9.0)
    made.save(tmp_path / "arms" / "one.json")
    assert ArmResult.load(tmp_path / "arms" / "one.json") == made
    assert ArmResult.load(tmp_path / "arms" / "two.json") is None
    (tmp_path / "torn.json").write_text('{"name": "ddp"}')
    assert ArmResult.load(tmp_path / "torn.json") is None


def test_the_digest_is_of_all_that_makes_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    base = plan()
    others = [
        base.digest("ddp"),
        plan(seconds=61.0).digest("ours"),
        replace(base, schedule=base.schedule[1:]).digest("ours"),
        replace(base, pace=Pace(0.6, 1024)).digest("ours"),
        replace(base, job=read_job_file(JOB, job_overrides([], 60.0, 4))).digest("ours"),
    ]
    assert len({base.digest("ours"), *others}) == 6
    kept = base.digest("ours")
    assert plan().digest("ours") == kept
    monkeypatch.setattr(plans, "training_digest", lambda: "other sources")
    assert plan().digest("ours") != kept


def test_mean_time_between_ends() -> None:
    schedule = parse("1s:kill:learner-0:5s,2s:pause:learner-1:1s,3s:cut:learner-1:1s")
    assert mean_seconds_between_kills(schedule, 60.0) == 30.0
    assert mean_seconds_between_kills((), 60.0) == math.inf


def test_the_pace_leaves_cores_free() -> None:
    assert choose_pace(0.1, 1024, learners=4, cores=2).step_seconds == pytest.approx(0.4)
    assert choose_pace(1e-6, 1024, learners=1, cores=64).step_seconds == 0.02
