"""What decides the quality: one thing varied at a time, each arm at its own best outer rate.

The trials are those of bench/quality.py (dense, small, M = 4 unless the arm says otherwise), and so is the cache. All
groups but ``outer`` vary the default: isotropic merges and Nesterov 0.5. Groups (--groups):

* ``outer``: the outer optimizer after RDA, after the isotropic merge, and after IsoLoCo's own; bench/trials/outers.py
  says what those are that the job file cannot name;
* ``adoption``: keep, overwrite, mix; the first two also where an exchange takes most of 8 or of 20 of the H steps;
* ``merge``: RDA, mean and isotropic, M = 2 to 16;
* ``weights``: by tokens and quality, by tokens, uniform, with learners at 1, 1/2 and 1/4 speed (whose batches are
  equal, so that the first two are the same), and with batches of 8, 4, 2 and 2 sequences;
* ``stragglers``: K = 1 and K = M, without and with the grace window, one learner 18 % slower, and learners at 1, 1/2
  and 1/4 speed;
* ``visitors``: learners beyond the four that join after a third of the time and leave after two thirds: none, one and
  four (the data-parallel reference has none); every run ends at the same time;
* ``cadence``: H, P and τ; of fewer steps than fragments as many fragments as steps;
* ``encoding``: float32 to 2 bit and sparse (bench/trials/sparse.py), without and with error feedback; sparse after the
  mean too, as SparseLoCo has it, beside int4 after the mean;
* ``inner``: AdamW and Muon, the latter with several inner rates, each beside data-parallel training with the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
from trials.cells import Cache, Trial, common_losses, run_trials
from trials.options import add_trial_options, check_cache, check_shown, run_from_cache
from trials.reports import ablation_report, show_trials
from trials.search import INNER_RATES, SEARCH_ROUND, best_rate, learners_in_merges, of_seeds, tuned
from trials.tables import TrialRow, beside_default, make_row

LENGTHS = {"outer": (6, 40), "adoption": (6, 40), "visitors": (6, 40)}  # of a group, in merges of each fragment
SHORT = (6,)  # of other groups
SEEDS = 5
LEARNERS = (1, 2, 4, 8, 16)
GRID = (0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)  # outer rates


@dataclass(frozen=True)
class Arm:
    """``start``: the one of ``rates`` at which the search for the best begins. ``default``: the name of the group's arm
    that has the default in the place of what this one varies; it is the one that decides whether the default stays."""

    name: str
    trial: Trial
    start: float
    rates: tuple[float, ...] = GRID
    group: str = ""
    default: str = ""

    def at(self, rate: float) -> Trial:
        if self.trial.outer:
            return replace(self.trial, outer={**self.trial.outer, "lr": rate})
        return replace(self.trial, sync={**self.trial.sync, "outer": {**self.trial.sync["outer"], "lr": rate}})

    @property
    def reference(self) -> Trial:
        """Data-parallel training of the same length, at the task's rate."""
        trial = self.trial
        return Trial(trial.kind, trial.size, trial.merges, 0, inner=trial.inner, published=trial.published)


ISOTROPIC = {"merge": {"method": "isotropic"}}
RDA = {"merge": {"method": "rda"}}
MEAN = {"merge": {"method": "mean"}}
BASE_OUTER = {"optimizer": "nesterov", "momentum": 0.5}
BASE_RATE = 1.4
RDA_RATE = 0.5  # after RDA or the mean, with BASE_OUTER


def arm(name: str, base: Trial, sync: Mapping[str, Any], start: float = BASE_RATE, **changes: Any) -> Arm:
    """An arm with the merge and the outer optimizer that all but the group ``outer`` have, where it names no other."""
    merge = {**ISOTROPIC["merge"], **sync.get("merge", {})}
    return Arm(name, replace(base, sync={"outer": BASE_OUTER, **sync, "merge": merge}, **changes), start)


def outer_arms(base: Trial) -> Iterator[Arm]:
    def of_job(name: str, start: float, **outer: Any) -> Arm:
        return Arm(name, replace(base, sync={**RDA, "outer": outer}), start)

    def on_trial(
        name: str, start: float, momentum: float = 0.9, sync: Mapping[str, Any] = RDA, prefix: str = ""
    ) -> Arm:
        trial = replace(base, sync=sync, outer={"name": name, "momentum": momentum})
        return Arm(f"{prefix}{name} {momentum:g}", trial, start)

    def isotropic(name: str, start: float, **outer: Any) -> Arm:
        return Arm(f"isotropic, {name}", replace(base, sync={**ISOTROPIC, "outer": outer}), start)

    yield of_job("sgd", 1.0, optimizer="sgd")
    yield of_job("nesterov 0.5", 0.5, optimizer="nesterov", momentum=0.5)
    yield of_job("nesterov 0.9", 0.1, optimizer="nesterov", momentum=0.9)
    yield on_trial("heavy-ball", 0.1)
    yield on_trial("warm-up", 0.2)
    yield on_trial("corrected", 1.0)
    yield on_trial("horizon", 1.0)
    yield on_trial("delayed", 0.7)
    yield on_trial("heloco", 0.1)
    yield isotropic("sgd", 2.0, optimizer="sgd")
    yield isotropic("nesterov 0.5", 1.4, **BASE_OUTER)
    yield isotropic("nesterov 0.9", 0.5, optimizer="nesterov", momentum=0.9)
    yield on_trial("warm-up", 1.0, sync=ISOTROPIC, prefix="isotropic, ")
    yield on_trial("isoloco", 2.0, 0.5, MEAN)
    yield on_trial("isoloco", 1.0, 0.9, MEAN)


def adoption_arms(base: Trial) -> Iterator[Arm]:
    for rule in ("keep", "overwrite", "mix"):
        yield arm(rule, base, {"adoption": {"rule": rule}})
    for overlap in (8, 20):
        for rule in ("keep", "overwrite"):
            sync = {"adoption": {"rule": rule}, "overlap": overlap}
            made = arm(f"τ = {overlap}, {rule}", base, sync, exchange=overlap - 0.5)
            yield replace(made, default=f"τ = {overlap}, keep")


def merge_arms(base: Trial) -> Iterator[Arm]:
    for learners in (2, 4, 8, 16):
        for method in ("rda", "mean", "isotropic"):
            start = BASE_RATE if method == "isotropic" else RDA_RATE
            yield arm(f"{method}, M = {learners}", base, {"merge": {"method": method}}, start, learners=learners)


UNEVEN = (1.0, 1.0, 2.0, 4.0)  # seconds of a step: learners at 1, 1/2 and 1/4 speed


def weight_arms(base: Trial) -> Iterator[Arm]:
    """Each beside ``tokens-quality`` under the same conditions."""
    unequal: dict[str, dict[str, Any]] = {
        "unequal speeds": {"pace": UNEVEN},
        "unequal batches": {"parts": (8, 4, 2, 2)},
    }
    for conditions, changes in unequal.items():
        for weights in ("tokens-quality", "tokens", "uniform"):
            made = arm(f"{conditions}, weights {weights}", base, {"merge": {"weights": weights}}, **changes)
            yield replace(made, default=f"{conditions}, weights tokens-quality")


def straggler_arms(base: Trial) -> Iterator[Arm]:
    """Each beside the default quorum and grace with the same learners."""
    unequal = {"one 18 % slower": (1.0, 1.0, 1.0, 1.18), "1, ½ and ¼ speed": UNEVEN}
    for conditions, pace in unequal.items():
        for quorum, grace in ((1, 0.0), (1, 0.9), (4, 0.0), (4, 0.9)):
            sync = {"quorum": quorum, "grace": {"factor": grace}}
            made = arm(f"{conditions}, K = {quorum}, γ = {grace:g}", base, sync, pace=pace)
            yield replace(made, default=f"{conditions}, K = 1, γ = 0.9")


def visitor_arms(base: Trial) -> Iterator[Arm]:
    for visitors, name in ((0, "no visitor"), (1, "one visitor"), (4, "four visitors")):
        yield arm(name, base, {}, timed=True, visitors=visitors)


def cadence_arms(base: Trial) -> Iterator[Arm]:
    for every in (6, 12, 24, 48, 96):
        yield arm(f"H = {every}", base, {"every": every, "fragments": min(24, every)})
    for fragments in (1, 4, 12):
        yield arm(f"P = {fragments}", base, {"fragments": fragments})
    for overlap in (1, 4, 8):
        yield arm(f"τ = {overlap}", base, {"overlap": overlap}, exchange=overlap - 0.5)


def encoding_arms(base: Trial) -> Iterator[Arm]:
    for up in ("float32", "bfloat16", "int8", "int4", "int2"):
        for feedback in (False, True) if up in ("int8", "int4", "int2") else (False,):
            words = f"up {up}{', error feedback' if feedback else ''}"
            yield arm(words, base, {"compression": {"up": up, "errorFeedback": feedback}})
    yield arm("after the mean: up int4", base, {"merge": {"method": "mean"}}, RDA_RATE)
    for method, start in (("isotropic", BASE_RATE), ("mean", RDA_RATE)):
        for feedback in (False, True):
            after = "after the mean: " if method == "mean" else ""
            words = f"{after}up sparse, 2 bit{', error feedback' if feedback else ''}"
            sync = {"compression": {"up": "bfloat16", "errorFeedback": feedback}, "merge": {"method": method}}
            made = arm(words, base, sync, start, sparse=True)
            yield replace(made, default=f"{after}up int4")
    for down in ("float32", "delta-int8", "delta-int4"):
        yield arm(f"down {down}", base, {"compression": {"down": down}})


def inner_arms(base: Trial) -> Iterator[Arm]:
    yield arm("adamw", base, {}, inner="adamw")  # at the task's inner rate, the best for dense models
    for rate in [rate for rate in INNER_RATES if rate >= 2e-3]:  # of these the lowest was the worst
        yield arm(f"muon, inner rate {rate:g}", base, {}, inner="muon", rate=rate)


GROUPS = {
    "outer": outer_arms,
    "adoption": adoption_arms,
    "merge": merge_arms,
    "weights": weight_arms,
    "stragglers": straggler_arms,
    "visitors": visitor_arms,
    "cadence": cadence_arms,
    "encoding": encoding_arms,
    "inner": inner_arms,
}
DEFAULTS = {  # the names of arms, by groups, where an arm names none itself
    "outer": "isotropic, nesterov 0.5",
    "adoption": "keep",
    "merge": "isotropic, M = {learners}",
    "visitors": "no visitor",
    "cadence": "H = 24",
    "encoding": "up int4",
    "inner": "adamw",
}


@dataclass
class Search:
    """Each arm's best rate, as far as the cache knows the losses that lead there."""

    arms: Sequence[Arm]
    cache: Cache

    def best_rate(self, one: Arm) -> tuple[float | None, list[Trial]]:
        """The best rate, or None and the trials that must come next."""
        shorter = [other for other in self.arms if other.name == one.name and other.trial.merges < one.trial.merges]
        start = one.start
        if shorter:
            rate, missing = self.best_rate(max(shorter, key=lambda other: other.trial.merges))
            if rate is None:
                return None, missing
            start = rate
        return best_rate(one.rates, start, one.at, self.cache)

    def next_trials(self, tune: bool) -> list[Trial]:
        """Of the arms, and of their references' rates where those are ``tune``d."""
        found = [trial for one in self.arms for trial in self.best_rate(one)[1]]
        looked_for = self.arms if tune else ()
        return found + [trial for one in looked_for for trial in tuned(one.reference, self.cache)[1]]

    def reference(self, one: Arm) -> Trial:
        """At its best inner rate, as far as that is known."""
        return tuned(one.reference, self.cache)[0]


def ablation_rows(arms: Sequence[Arm], seeds: int, cache: Cache) -> list[TrialRow]:
    """A row for each arm whose best rate is known, of as many seeds as it and its reference have."""
    rows, search = [], Search(arms, cache)
    for one in arms:
        rate, _ = search.best_rate(one)
        if rate is None:
            continue
        reference = search.reference(one)
        values, base = common_losses(of_seeds(one.at(rate), seeds), of_seeds(reference, seeds), cache)
        if values:
            edge = "*" if rate in (GRID[0], GRID[-1]) else ""
            name = f"{one.trial.merges} merges: {one.name}, outer rate {rate:g}{edge}"
            place: dict[str, Any] = {"group": one.group, "merges": one.trial.merges, "arm": one.name}
            place["learners"] = learners_in_merges(of_seeds(one.at(rate), seeds), cache)
            row = make_row(name, values, "data-parallel", base, **place, rate=reference.rate)
            rows.append(_with_default(row, one, rate, search, seeds=seeds))
    return rows


def _with_default(row: TrialRow, one: Arm, rate: float, search: Search, seeds: int) -> TrialRow:
    """The row beside the default's arm at its own best rate, where that was run; the default's own row as it is."""
    default = next((other for other in search.arms if is_default_of(other, one)), None)
    known = None if default is None or default == one else search.best_rate(default)[0]
    if default is None or known is None:
        return row
    values, others = common_losses(of_seeds(one.at(rate), seeds), of_seeds(default.at(known), seeds), search.cache)
    return beside_default(row, default.name, values, others) if values else row


def is_default_of(other: Arm, one: Arm) -> bool:
    """Whether ``other`` has the default in the place of what ``one`` varies, and the same length."""
    return (other.group, other.trial.merges, other.name) == (one.group, one.trial.merges, one.default)


def chosen_arms(chosen: argparse.Namespace) -> list[Arm]:
    """Of those groups, at their lengths."""
    return [
        replace(one, group=group, default=one.default or DEFAULTS[group].format(learners=one.trial.learners))
        for group in chosen.groups
        for merges in ((1,) if chosen.quick else chosen.lengths or LENGTHS.get(group, SHORT))
        for one in GROUPS[group](
            Trial(chosen.kind, "small", merges, 0, learners=chosen.learners, published=chosen.published)
        )
        if not chosen.arms or any(word in one.name for word in chosen.arms)
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trial_options(parser, "two arms for a few steps: does it run, not what is best", SEEDS)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--kind", default="dense", choices=("dense", "moe", "vision"))
    parser.add_argument("--learners", type=int, default=4, choices=LEARNERS, metavar="M", help="1, 2, 4, 8 or 16")
    chosen = parser.parse_args(arguments)
    check_cache(parser, chosen)
    known = chosen_arms(argparse.Namespace(**{**vars(chosen), "arms": None}))
    for word in chosen.arms or ():
        if not any(word in one.name for one in known):
            names = ", ".join(dict.fromkeys(one.name for one in known))
            parser.error(f"--arms: no arm of these groups has {word!r} in its name; there are {names}")
    return chosen


def main(arguments: Sequence[str]) -> int:
    """0: all trials are there; 3: --hours were over before."""
    return run_from_cache(parse(arguments), run_ablations)


def run_ablations(chosen: argparse.Namespace, file: Path) -> int:
    """As ``main``, with what is known in ``file``."""
    seeds = 1 if chosen.quick else chosen.seeds
    arms = chosen_arms(chosen)
    if chosen.quick:
        arms = [replace(one, rates=(one.start,)) for one in arms[:2]]
    cache, complete, search = Cache(file), True, Search(arms, Cache(file))
    if not chosen.show:
        run = partial(run_trials, cache=cache, jobs=chosen.jobs, end=time.monotonic() + 3600 * chosen.hours)
        while complete and (wanted := search.next_trials(tune=not chosen.quick)):
            complete = run(wanted, what=SEARCH_ROUND)
        best = [one.at(rate) for one in arms if (rate := search.best_rate(one)[0]) is not None]
        best += [search.reference(one) for one in arms]
        complete = complete and run([trial for one in best for trial in of_seeds(one, seeds)])
    note = "Held-out loss of each arm at its best outer rate, and by how much it is above data-parallel training's."
    rows = ablation_rows(arms, seeds, cache)
    check_shown(chosen, rows)
    show_trials(ablation_report(rows, note), rows, chosen.json, chosen.report)
    return 0 if complete else 3


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
