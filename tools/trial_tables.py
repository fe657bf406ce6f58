"""The tables of docs/results/quality.md and ablations.md, from the results in bench/results/trials.jsonl.

Nothing is trained here (tools/generate.py): ``make quality`` and ``make ablations`` do that, and add to the
results. The tables are of the published lines (bench/trials/cells.py), until whoever has the day runs all trials again.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import ablations
import quality
from trials.cells import RESULTS, Cache
from trials.search import INNER_RATES
from trials.tables import TrialRow, difference

DILOCOS_SETTINGS = {"merge": {"method": "rda"}}  # DiLoCo's outer optimizer then follows
DEFAULT = "beside the group's default"
ONE = "beside one learner"
HEAD = (
    "data-parallel, nats (at its best inner rate, where searched)",
    "this project, nats (likewise)",
    "difference",
    "seeds",
)


def loss_text(loss: float, rate: float | None) -> str:
    """With the inner rate, and a star where that is an end of the grid."""
    if rate is None:
        return f"{loss:.3f}"
    star = "\\*" if rate in (INNER_RATES[0], INNER_RATES[-1]) else ""
    return f"{loss:.3f} at {rate:g}{star}"


def table(columns: Sequence[str], rows: Sequence[tuple[Sequence[str], TrialRow]], second: str) -> str:
    """A Markdown table: the row's own first cells, then its figures. ``second``: what the last column calls the
    difference to the row's second reference."""
    head = [*columns, *HEAD, second]
    lines = [head, ["---"] * len(head)]
    for cells, row in rows:
        base = "" if row.baseline is None else loss_text(row.baseline, row.rate)
        over = difference(row.ratio, row.interval, 1)
        beside = difference(row.default_ratio, row.default_interval, 1)
        lines.append([*cells, base, loss_text(row.value, row.own_rate), over, str(row.seeds), beside])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@functools.cache
def results() -> Cache:
    return Cache(RESULTS)


@functools.cache
def quality_rows(*, dilocos: bool = False, inner: str = "adamw") -> list[TrialRow]:
    """Every arm beside data-parallel training with that inner optimizer, with the defaults or with DiLoCo's own
    settings, by kind of model."""
    sync = DILOCOS_SETTINGS if dilocos else {}
    chosen = quality.parse(["--published", "--sizes", *quality.LENGTHS, "--sync", json.dumps(sync)])
    rows = quality.quality_rows(chosen, results(), inner=inner)
    return sorted(rows, key=lambda row: quality.KINDS.index(row.group.partition("-")[0]))


def quality_table(*, dilocos: bool) -> str:
    return table(
        ("model", "merges", "learners"),
        [
            ((row.group.replace("-", ", "), str(row.merges), row.arm.removeprefix("M = ")), row)
            for row in quality_rows(dilocos=dilocos)
        ],
        ONE,
    )


def ablation_table() -> str:
    """Of those groups of which more than one arm was run: the default is an arm of each."""
    arms = ablations.chosen_arms(ablations.parse(["--published", "--lengths", *map(str, quality.LENGTHS["small"])]))
    rows = ablations.ablation_rows(arms, ablations.SEEDS, results())
    run = Counter(row.group for row in rows)
    shown = [((row.group, row.name), row) for row in rows if run[row.group] > 1]
    return table(("what is varied", "arm, at its best outer rate"), shown, DEFAULT)


def muon_table() -> str:
    """Every arm beside data-parallel training with Muon, where that was run."""
    cells = []
    for row in quality_rows(inner="muon"):
        if row.arm.startswith("M = "):
            place = (row.group.replace("-", ", "), str(row.merges), row.arm.removeprefix("M = "))
            cells.append([*place, difference(row.ratio, row.interval, 1), str(row.seeds)])
    head = ["model", "merges", "learners", "difference", "seeds"]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *cells])


def quality_tables() -> dict[str, str]:
    return {
        "quality beside Muon": muon_table(),
        "quality with the defaults": quality_table(dilocos=False),
        "quality with DiLoCo's settings": quality_table(dilocos=True),
    }


def ablation_tables() -> dict[str, str]:
    return {"ablations": ablation_table()}
