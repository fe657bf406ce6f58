"""What pages say of quality, from the results in bench/results/trials.jsonl (tools/generate.py)."""

from __future__ import annotations

import trial_tables

from trials.cells import EVERY
from trials.tables import TrialRow

KINDS = {"dense": "dense model", "moe": "mixture of experts", "vision": "vision model"}
LENGTHS = (6, 40, 200)  # merges of each fragment
Place = tuple[str, str, int, int]  # kind, size, merges, learners


def rows(*, dilocos: bool = False) -> dict[Place, TrialRow]:
    """The rows without faults by their places."""
    found = {}
    for row in trial_tables.quality_rows(dilocos=dilocos):
        kind, _, size = row.group.partition("-")
        learners = row.arm.removeprefix("M = ")
        if learners.isdecimal() and row.merges is not None:
            found[kind, size, row.merges, int(learners)] = row
    return found


def percent(row: TrialRow) -> float:
    """By how many per cent its loss is above data-parallel training's."""
    assert row.ratio is not None
    return 100 * (row.ratio - 1)


def is_clear(row: TrialRow) -> bool:
    """Whether the interval over seeds leaves out that there is no difference."""
    return row.interval is not None and abs(percent(row)) > 100 * row.interval


def words(row: TrialRow | None) -> str:
    """The difference in words."""
    if row is None:
        return "not run"
    if not is_clear(row):
        return "not clearly different"
    return f"{abs(percent(row)):.{0 if abs(percent(row)) >= 10 else 1}f} % {'above' if percent(row) > 0 else 'below'}"


def spread(row: TrialRow) -> str:
    """The difference with its interval, in words."""
    assert row.interval is not None
    return f"{abs(percent(row)):.1f} ± {100 * row.interval:.1f} % {'above' if percent(row) > 0 else 'below'}"


def from_to(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f} %"


def steps(merges: int) -> str:
    return f"{merges * EVERY:,}"


def text_models() -> dict[Place, TrialRow]:
    """The rows of dense models and mixtures of experts that were trained on CPUs."""
    return {place: row for place, row in rows().items() if place[0] != "vision" and place[1] != "gpu"}


def costs(learners: int) -> list[float]:
    """By how many per cent the loss of so many learners is above one learner's, at each length and size."""
    found = (row for place, row in text_models().items() if place[3] == learners)
    return [100 * (row.default_ratio - 1) for row in found if row.default_ratio is not None]


def beside_muon() -> list[TrialRow]:
    """The rows of learners beside data-parallel training with Muon."""
    return [row for row in trial_tables.quality_rows(inner="muon") if row.arm.startswith("M = ")]


def beside_others() -> str:
    """What decoupling costs, and the difference to data-parallel training with Muon."""
    muon = next(row for row in beside_muon() if row.arm == "M = 4")
    return (
        f"Beside one learner with the same outer step, which is what decoupling costs, four are {from_to(costs(4))} "
        f"above and sixteen {from_to(costs(16))}. Beside data-parallel training with Muon, four learners of the small "
        f"dense model are {spread(muon)} after {steps(6)} steps. Nothing else was compared with it."
    )


def main_line(page: str) -> str:
    """The line of quality among the main results; ``page``: where the link leads."""
    found = rows()

    def along(kind: str) -> str:
        *first, last = (words(found.get((kind, "small", merges, 4))) for merges in LENGTHS)
        return f"{', '.join(first)} and {last}"

    many = [percent(row) for place, row in text_models().items() if place[3] == 16]
    gpu = {place[2:]: row for place, row in found.items() if place[1] == "gpu"}
    *early, late = map(steps, LENGTHS)
    return (
        f"- **Quality:** the loss beside [data-parallel training's]({page}) with AdamW after {', '.join(early)} and "
        f"{late} steps, with four learners and some 0.1 million parameters. A dense model: {along('dense')}. A mixture "
        f"of experts: {along('moe')}. A vision model: {along('vision')}. With 16 learners dense models and mixtures "
        f"are {from_to(many)} above. {beside_others()} A dense model of 26 million parameters, on one GPU "
        f"({gpu[6, 4].seeds} seeds): four learners {spread(gpu[6, 4])} after {steps(6)} steps and "
        f"{spread(gpu[20, 4])} after {steps(20)}, eight {spread(gpu[6, 8])} and {spread(gpu[20, 8])}. At {steps(20)} "
        "its data-parallel training has the lowest rate that was tried, so a lower one may be better."
    )


def by_length() -> str:
    """The table of the questions' page: kinds of models and numbers of learners by the length of the run."""
    found = rows()
    head = ["model", "learners", *(f"{steps(merges)} steps" for merges in LENGTHS)]
    lines = [head, ["---"] * len(head)]
    for kind, name in KINDS.items():
        for learners in (2, 4, 8, 16):
            cells = [words(found.get((kind, "small", merges, learners))) for merges in LENGTHS]
            lines.append([f"{name}, 0.1 million parameters", str(learners), *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    large = [
        f"with {learners} learners {words(found['dense', 'gpu', 6, learners])} after {steps(6)} steps, and "
        f"{words(found['dense', 'gpu', 20, learners])} after {steps(20)}"
        for learners in (2, 4, 8)
    ]
    return f"{table}\n\n{beside_others()} A dense model of 26 million parameters, on one GPU: {'; '.join(large)}."


def by_settings() -> str:
    """The table of the page for choosing: four learners with the defaults and with DiLoCo's own settings."""
    lines = ["| model | steps | with the defaults | with RDA, Nesterov 0.7 and 0.9 |", "|---|---|---|---|"]
    for kind, name in KINDS.items():
        for merges in LENGTHS:
            place = (kind, "small", merges, 4)
            cells = [words(rows(dilocos=dilocos).get(place)) for dilocos in (False, True)]
            lines.append(f"| {name} | {steps(merges)} | {' | '.join(cells)} |")
    return "\n".join(lines)
