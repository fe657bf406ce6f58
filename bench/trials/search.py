"""The best rate of a grid, found by looking at a rate's neighbours, as far as a cache of results knows their losses.

``best_rate`` begins at one rate of the grid and moves to the better neighbour until there is none. It trains nothing,
and returns the trials whose losses it needs next.

``tuned`` is a trial at the inner rate that is best for it: data-parallel training has another than learners that share
the batch among them, and each is compared at its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from trials.cells import Cache, Trial, choice_losses

SEARCH_ROUND = "search for rates, this round"  # what ``run_trials`` names: more rounds may follow
INNER_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)


def searched_seeds(trial: Trial) -> int:
    """Seeds with which a rate is chosen."""
    return 2 if trial.merges < 100 and trial.size != "gpu" else 1


def of_seeds(trial: Trial, seeds: int) -> list[Trial]:
    return [replace(trial, seed=seed) for seed in range(seeds)]


def learners_in_merges(trials: Sequence[Trial], cache: Cache) -> float | None:
    """The mean over those of the trials that the cache knows; None: there are none, or nothing is merged."""
    found = [result["responders"] for one in trials if (result := cache.find(one)) and "responders" in result]
    return statistics.mean(found) if found else None


def best_rate(
    rates: Sequence[float], start: float, at: Callable[[float], Trial], cache: Cache
) -> tuple[float | None, list[Trial]]:
    """The best of ``rates`` by the mean loss over ``searched_seeds``, or None and the trials that must come next. The
    loss is that of sequences which are not reported. ``at``: the trial at a rate."""
    middle = rates.index(start)
    while True:
        around = rates[max(0, middle - 1) : middle + 2]
        tried = {rate: of_seeds(at(rate), searched_seeds(at(rate))) for rate in around}
        found = {rate: choice_losses(trials, cache) for rate, trials in tried.items()}
        if missing := [trial for rate, values in found.items() if values is None for trial in tried[rate]]:
            return None, missing
        best = min(around, key=lambda rate: sum(found[rate] or ()))
        if best == rates[middle]:
            return best, []
        middle = rates.index(best)


def tuned(trial: Trial, cache: Cache) -> tuple[Trial, list[Trial]]:
    """The trial at the best of INNER_RATES; or, where the cache does not know which is the best, as it was given
    (``rate`` None), and the trials that must come next."""
    from trials import tasks

    task = tasks.TASKS[trial.kind, trial.size]
    start = min(INNER_RATES, key=lambda rate: abs(math.log(rate / task.rate)))
    rate, missing = best_rate(INNER_RATES, start, lambda rate: replace(trial, rate=rate), cache)
    return (trial if rate is None else replace(trial, rate=rate)), missing
