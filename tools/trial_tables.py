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


def table(columns: Sequence[str], rows: Sequence[tuple[Sequence[str], TrialRow]], *, with_default: bool = False) -> str:
    """A Markdown table: the row's own first cells, then its figures. ``with_default``: the last is the difference to
    the default's arm."""
    head = [*columns, *HEAD, *([DEFAULT] if with_default else [])]
    lines = [head, ["---"] * len(head)]
    for cells, row in rows:
        base = "" if row.baseline is None else loss_text(row.baseline, row.rate)
        over = difference(row.ratio, row.interval, 1)
        default = [difference(row.default_ratio, row.default_interval, 1)] if with_default else []
        lines.append([*cells, base, loss_text(row.value, row.own_rate), over, str(row.seeds), *default])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@functools.cache
def results() -> Cache:
    return Cache(RESULTS)


@functools.cache
def quality_rows(*, dilocos: bool) -> list[TrialRow]:
    """Every arm beside data-parallel training, with the defaults or with DiLoCo's own settings, by kind of model."""
    sync = DILOCOS_SETTINGS if dilocos else {}
    chosen = quality.parse(["--published", "--sizes", *quality.LENGTHS, "--sync", json.dumps(sync)])
    return sorted(
        quality.quality_rows(chosen, results()), key=lambda row: quality.KINDS.index(row.group.partition("-")[0])
    )


def quality_table(*, dilocos: bool) -> str:
    return table(
        ("model", "merges", "learners"),
        [
            ((row.group.replace("-", ", "), str(row.merges), row.arm.removeprefix("M = ")), row)
            for row in quality_rows(dilocos=dilocos)
        ],
    )


def ablation_table() -> str:
    """Of those groups of which more than one arm was run: the default is an arm of each."""
    arms = ablations.chosen_arms(ablations.parse(["--published", "--lengths", *map(str, quality.LENGTHS["small"])]))
    rows = ablations.ablation_rows(arms, ablations.SEEDS, results())
    run = Counter(row.group for row in rows)
    shown = [((row.group, row.name), row) for row in rows if run[row.group] > 1]
    return table(("what is varied", "arm, at its best outer rate"), shown, with_default=True)


def quality_tables() -> dict[str, str]:
    return {
        "quality with the defaults": quality_table(dilocos=False),
        "quality with DiLoCo's settings": quality_table(dilocos=True),
    }


def ablation_tables() -> dict[str, str]:
    return {"ablations": ablation_table()}
