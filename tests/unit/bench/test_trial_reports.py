"""Reports of bench/quality.py and bench/ablations.py: which row stands where in which plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from repository import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from trials.cells import Cache, Trial
from trials.reports import ablation_report, quality_report, show_trials
from trials.search import learners_in_merges, of_seeds
from trials.tables import TrialRow, make_row, row_lines


def row(group: str, merges: int, arm: str, *losses: float) -> TrialRow:
    return make_row(f"{group} {merges} {arm}", losses, "b", [2.0] * len(losses), group=group, merges=merges, arm=arm)


def test_quality_is_drawn_against_merges_with_an_interval_a_plot_each_model() -> None:
    rows = [
        row("dense-small", 40, "M = 4", 2.0, 2.2),
        row("dense-small", 6, "M = 4", 2.2, 2.2),
        row("dense-small", 6, "M = 1", 2.0, 2.0),
        row("moe-small", 6, "M = 4", 2.4, 2.4),
        make_row("DDP", [2.0], "one process", [2.0]),
    ]
    document = quality_report(rows, "note")
    assert [plot.title.split(":")[0] for plot in document.plots] == ["dense-small", "moe-small"]
    four, one = document.plots[0].series
    assert (four.name, one.name) == ("M = 4", "M = 1")
    assert four.x == [6, 40] and four.y == pytest.approx([1.1, 1.05])
    half = 12.7062 * 0.05  # t of 1 degree, 97.5 %; the deviation of 0 and 10 % over √2
    assert four.low == pytest.approx([1.1, 1.05 - half], rel=1e-4)
    assert four.high == pytest.approx([1.1, 1.05 + half], rel=1e-4)
    assert len(document.rows) == 5 and document.rows[0]["ratio"] == pytest.approx(1.05)


def test_an_arm_is_a_bar_in_per_cent_for_each_length() -> None:
    rows = [row("outer", 6, "sgd", 2.02), row("outer", 6, "nesterov", 2.2), row("outer", 40, "nesterov", 1.98)]
    (plot,) = ablation_report([*rows, row("merge", 6, "rda", 2.0)], "note").plots[:1]
    columns, numbers = plot.point_rows()
    assert columns == ["arm", "6 merges", "40 merges"]
    assert [one["arm"] for one in numbers] == ["sgd", "nesterov"]
    assert numbers[0]["6 merges"] == pytest.approx(1.0) and "40 merges" not in numbers[0]
    assert numbers[1]["6 merges"] == pytest.approx(10.0) and numbers[1]["40 merges"] == pytest.approx(-1.0)
    assert not plot.series[0].low, "one seed has no interval"


def test_a_row_says_how_many_learners_a_merge_had(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "trials.jsonl")
    trials = of_seeds(Trial("dense", "small", 6, 0, learners=4), 3)
    assert learners_in_merges(trials, cache) is None
    for trial, responders in zip(trials, (4.0, 3.0), strict=False):
        cache.put(trial, {"loss": 2.0, "responders": responders})
    found = make_row("a", [2.0], "b", [2.0], learners=learners_in_merges(trials, cache))
    assert "3.50 learners in a merge" in next(row_lines([found]))


def test_what_is_printed_and_what_is_written_are_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("outer", 6, "sgd", 2.02, 2.04)]
    document = ablation_report(rows, "note")
    show_trials(document, rows, as_json=True, directory=tmp_path / "report")
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "report" / "report.json").read_text())
    assert (printed["rows"][0]["against"], printed["rows"][0]["baseline"]) == ("b", 2.0)
    show_trials(document, rows, as_json=False)
    assert "+1.50 %" in capsys.readouterr().out
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot be written"):
        show_trials(document, rows, as_json=False, directory=tmp_path / "file")
