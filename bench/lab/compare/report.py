"""The report of a comparison: rows of ours beside each baseline's, as a document of ``diloco.reports``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.local.chaos.random_faults import text_of
from lab.compare import measures
from lab.compare.arm import ArmResult
from lab.compare.plan import BASELINES, MOST_CPU_SHARE, OURS, Comparison

Row = dict[str, Any]


def seconds_until_back(arm: ArmResult) -> list[float]:
    """Of each fault whose learner came back before the end."""
    return [row.back_seconds for row in arm.recoveries if row.back_seconds is not None]


def figures(arm: ArmResult, equal_tokens: float, word: str) -> dict[str, tuple[float | None, str]]:
    """Name → value and unit, of one arm. ``equal_tokens``: at which losses are compared; ``word``: what the worst of
    recoveries is (``measures.worst_word``)."""
    stalls = [row.stall_seconds for row in arm.recoveries]
    backs = seconds_until_back(arm)
    curve = [(float(tokens), loss) for tokens, _, loss in arm.losses]
    return {
        "goodput": (arm.goodput, "share"),
        "uptime": (arm.uptime, "share"),
        "tokens in the model per second": (arm.tokens_per_second, "1/s"),
        "all stand still after a fault, median": (measures.middle(stalls), "s"),
        f"all stand still after a fault, {word}": (measures.worst(stalls, word), "s"),
        "a learner is back after its repair, median": (measures.middle(backs), "s"),
        f"a learner is back after its repair, {word}": (measures.worst(backs, word), "s"),
        "faults whose learner was not back at the end": (float(len(stalls) - len(backs)), ""),
        "bytes over learners' links": (float(arm.bytes), "B"),
        "bytes per token in the model": (arm.bytes / max(1, arm.kept_tokens), "B"),
        "loss at equal time": (arm.final_loss, "nats"),
        "loss at equal tokens": (measures.loss_at(curve, equal_tokens), "nats"),
    }


def equal_tokens(arms: Sequence[ArmResult]) -> float:
    """As far as every arm's scores reach."""
    return min((max((tokens for tokens, _, _ in arm.losses), default=0) for arm in arms), default=0)


def figures_of_all(arms: Mapping[str, ArmResult]) -> dict[str, dict[str, tuple[float | None, str]]]:
    """``figures`` of every arm, at the same tokens and with the same names."""
    reach = equal_tokens(list(arms.values()))
    word = measures.worst_word(min((len(seconds_until_back(arm)) for arm in arms.values()), default=0))
    return {name: figures(arm, reach, word) for name, arm in arms.items()}


def make_rows(arms: Mapping[str, ArmResult]) -> list[Row]:
    """A row for each figure of ours that is known and each baseline: ``value`` ours, ``baseline`` theirs, ``ratio``
    ours to theirs (None: theirs is 0, or unknown), ``against`` whose."""
    known = figures_of_all(arms)
    ours = known.pop(OURS, {})
    rows = []
    for baseline, theirs in known.items():
        for name, (value, unit) in ours.items():
            if value is None:
                continue
            other = theirs.get(name, (None, unit))[0]
            ratio = value / other if other else None
            rows.append(
                {"name": name, "value": value, "unit": unit, "against": baseline, "baseline": other, "ratio": ratio}
            )
    return rows


def make_table(arms: Mapping[str, ArmResult]) -> list[Row]:
    """A row for each figure, a column for each arm."""
    known = figures_of_all(arms)
    rows = []
    for figure in dict.fromkeys(figure for figures_of_one in known.values() for figure in figures_of_one):
        unit = next(found[figure][1] for found in known.values() if figure in found)
        row: Row = {"figure": figure, "unit": unit}
        row |= {name: found.get(figure, (None, ""))[0] for name, found in known.items()}
        rows.append(row)
    return rows


def conditions(plan: Comparison, arms: Mapping[str, ArmResult], cores: int) -> list[str]:
    """Under what all this was measured, in sentences."""
    spec, pace = plan.job.spec, plan.pace
    used = ", ".join(f"{name} {arm.cpu_share:.0%}" for name, arm in arms.items())
    kinds: dict[str, int] = {}
    for fault in plan.schedule:
        kinds[fault.action] = kinds.get(fault.action, 0) + 1
    measured = f" (it computes for {pace.cpu_seconds:.3g} CPU seconds of them)" if pace.cpu_seconds else ""
    lines = [
        f"{plan.learners} learners, all on this machine's {cores} cores, {plan.seconds:g} s of training an arm from its"
        f" first step, {pace.tokens} tokens in a learner's step, seed {spec.seed}.",
        f"The pace is emulated: a step takes {pace.step_seconds:g} s{measured}, and what the arithmetic leaves of it is"
        " slept. A learner's clock stands while it is stopped.",
        f"Of the cores all processes of an arm used: {used} (at most {MOST_CPU_SHARE:.0%} is wanted).",
        f"Faults, the same for all, hit learners: {', '.join(f'{n} {kind}' for kind, n in kinds.items()) or 'none'}.",
        "Processes of every arm come from a fork server that has the libraries loaded. A killed one may start again"
        " when its machine is back. No arm has spare machines.",
        "Goodput is the tokens in the model at the end times the pace's seconds for a token, of all learners' time"
        " (docs/algorithm.md). Recovery is counted without the repair.",
        "Ours counts bytes as they are sent; data-parallel's are those of a ring all-reduce of float32 gradients.",
        'Every arm has the job\'s optimizers and rates, except where a line below says "alone". This command searches'
        " no rates.",
    ]
    late = [name for name, arm in arms.items() if arm.cpu_share > MOST_CPU_SHARE]
    if late:
        lines.append(f"Above {MOST_CPU_SHARE:.0%} of the cores: {', '.join(late)}. Learners slowed each other down.")
    lines += [f"{name}: {text}." for name, text in BASELINES.items() if name in arms]
    return lines


def document(
    plan: Comparison,
    arms: Mapping[str, ArmResult],
    failed: Mapping[str, str],
    own: Mapping[str, Sequence[str]],
    cores: int,
) -> dict[str, Any]:
    """The report as a ``ResultDocument``'s JSON: rows, a table, plots, notes; and the schedule to replay it by.
    ``own``: overrides of one arm alone."""
    notes = conditions(plan, arms, cores)
    notes += [f"{name} alone: --set {override}" for name, overrides in own.items() for override in overrides]
    notes += [f"{name} could not be run: {why}" for name, why in failed.items()]
    notes.append(f"The faults: --chaos {text_of(plan.schedule)}")
    return {
        "title": f"{plan.job.metadata.name} under faults, compared",
        "summary": "The same job, data, batch and faults in every arm. Pace is emulated.",
        "rows": make_rows(arms),
        "tables": [{"title": "Arms", "rows": make_table(arms)}],
        "plots": _plots(arms),
        "notes": notes,
        "arms": {name: _short(arm) for name, arm in arms.items()},
        "failed": dict(failed),
        "schedule": text_of(plan.schedule),
    }


def _plots(arms: Mapping[str, ArmResult]) -> list[dict[str, Any]]:
    time, tokens, nats = ({"name": "time", "unit": "s"}, {"name": "tokens"}, {"name": "loss", "unit": "nats"})
    trained = {name: arm.tokens for name, arm in arms.items()}
    by_time = {name: [(at, loss) for _, at, loss in arm.losses] for name, arm in arms.items()}
    by_tokens = {name: [(float(n), loss) for n, _, loss in arm.losses] for name, arm in arms.items()}
    first = next(iter(arms.values()), None)
    marks = [{"x": round(row.at_seconds, 1), "label": row.action} for row in (first.recoveries if first else [])]
    places = list(arms)
    shares = {"goodput": [arm.goodput for arm in arms.values()], "uptime": [arm.uptime for arm in arms.values()]}
    bars = {
        "title": "Goodput and uptime under faults",
        "x": {"name": "arm", "places": places},
        "y": {"name": "share"},
        "series": [{"name": name, "x": list(range(len(places))), "y": values} for name, values in shares.items()],
    }
    return [
        bars,
        _plot("Tokens trained", time, {"name": "tokens"}, trained, marks=marks),
        _plot("Loss against time", time, nats, by_time, marks=[]),
        _plot("Loss against tokens", tokens, nats, by_tokens, marks=[]),
    ]


def _plot(
    title: str,
    x: dict[str, str],
    y: dict[str, str],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    marks: list[dict[str, Any]],
) -> dict[str, Any]:
    series = [{"name": name, "x": [a for a, _ in line], "y": [b for _, b in line]} for name, line in lines.items()]
    return {"title": title, "x": x, "y": y, "series": series, "marks": marks}


def _short(arm: ArmResult) -> dict[str, Any]:
    left_out = ("losses", "tokens", "recoveries")
    return {name: getattr(arm, name) for name in arm.__slots__ if name not in left_out}
