"""`bench/link_needs.py`: the published needs, and curves that agree with the needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import link_needs
from diloco_protocol.bandwidth import links, model
from diloco_protocol.bandwidth.model import Turn
from lab import bandwidth
from lab.bandwidth import Case, curve_rows, published_rows, star_need

PAPER = Case(5_000_000_000, 8, Turn(24, 24, 2, 1.0))


def test_the_published_needs_by_formula_and_by_queue() -> None:
    found = [(row["published"], row["by"], row["value"]) for row in published_rows()]
    assert [(one, by) for one, by, _ in found] == [
        (198.0, "formula"),
        (0.84, "formula"),
        (0.84, "queue"),
        (104.0, "formula"),
        (1.7, "formula"),
        (1.7, "queue"),
    ]
    values = [value for *_, value in found]
    assert values == pytest.approx([194.6, 0.823, 1.40, 102.9, 1.76, 3.02], rel=0.005)


def test_a_share_at_the_needed_rate_is_the_share_that_was_asked_for() -> None:
    for share in (0.6, 0.9, 0.95):
        rate = model.data_parallel(5e9, 8, 1.0, share)
        assert bandwidth.data_parallel_utilisation(5e9, 8, 1.0, rate) == pytest.approx(share)
        turn = Turn(24, 24, 2, 1.0, between_seconds=0.1)
        assert bandwidth.formula_utilisation(turn, model.formula_seconds(turn, share)) == pytest.approx(share)
    assert bandwidth.data_parallel_utilisation(5e9, 8, 1.0, 1e15) == 1.0


def test_curves_rise_with_bandwidth_and_reach_what_links_are_sized_for() -> None:
    need = star_need(PAPER, "int4", "delta-int4").queue.same / bandwidth.GIGA
    rates = (0.01, 0.1, 0.5 * need, 1.001 * need, 10.0, 1000.0)
    rows = curve_rows(PAPER, (2, 6), rates)
    for series in {row["series"] for row in rows}:
        shares = [row["value"] for row in rows if row["series"] == series]
        assert shares == sorted(shares) and shares[-1] == pytest.approx(100, abs=0.6)
    ours = {row["rate"]: row for row in rows if row["series"] == "star, int4 up, delta-int4 down, overlap 2"}
    assert ours[rates[3]]["value"] >= 95 > ours[rates[2]]["value"]
    # On a thin link both are bound by bytes alone: the ratio is that of bytes in the wider direction.
    carried = links.traffic([5_000_000_000 // 24] * 24, "int4", "delta-int4", 8)
    gradients = 2 * 5e9 * model.all_reduce_factor(8)
    assert ours[0.01]["ratio"] == pytest.approx(gradients / (links.FRAMING * carried.up), rel=0.03)


def test_the_script_says_link_and_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert link_needs.main(["--quick", *arguments]) == 0
        return capsys.readouterr().out

    rows = json.loads(said("--json", "--params", "350M", "--learners", "4", "--overlap", "1,2"))["rows"]
    assert {"name", "value", "unit", "baseline", "ratio"} <= set.intersection(*(set(row) for row in rows))
    parts = {
        row["part"]: row["value"]
        for row in rows
        if row["name"].startswith("star, int4 up, bfloat16 down, ") and "part" in row
    }
    assert parts["hub, in"] == pytest.approx(4 * parts["link, up"])
    assert parts["hub, out"] == pytest.approx(4 * parts["link, down"])
    text = said("--report", str(tmp_path))
    shares = [line for line in text.splitlines() if line.startswith("star, int4 up, bfloat16 down, overlap 2")]
    assert len(shares) == 2 and shares[0] != shares[1]  # by the queue, and by the formula
    plots = json.loads((tmp_path / "report.json").read_text())["plots"]
    assert [plot["title"].rpartition(", ")[2] for plot in plots] == ["by the queue", "by the formula"]
    by_queue, by_formula = ({one["name"]: one["y"] for one in plot["series"]} for plot in plots)
    assert by_queue.keys() == by_formula.keys() and by_queue != by_formula
    assert by_queue["data-parallel, bfloat16"] == by_formula["data-parallel, bfloat16"], "there is no queue"
    assert all(plot["title"] in (tmp_path / "report.md").read_text() for plot in plots)
    assert "198" in text and "0.84" in text and "hub, out" in text


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("--params", "x"),
        ("--overlap", "0"),
        ("--overlap", "2,24"),
        ("--learners", "1"),
        ("--fragments", "25"),
        ("--utilisation", "1"),
    ],
)
def test_a_wrong_argument_is_named(option: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        link_needs.main([option, wrong])
    assert ended.value.code == 2 and option in capsys.readouterr().err
