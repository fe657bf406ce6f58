"""The best rate of a grid, found by looking at a rate's neighbours, as far as a cache of results knows their losses.

``best_rate`` begins at one rate of the grid and moves to the better neighbour until there is none. It trains nothing,
and returns the trials whose losses it needs next.

``tuned_reference`` is the data-parallel reference at the inner rate that is best for it, for a model and a length. The
learners of a trial keep the task's rate, which was not looked for beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from trials.cells import Cache, Trial, losses

INNER_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)


def searched_seeds(trial: Trial) -> int:
    """Seeds with which a rate is chosen."""
    return 2 if trial.merges < 100 else 1


def of_seeds(trial: Trial, seeds: int) -> list[Trial]:
    return [replace(trial, seed=seed) for seed in range(seeds)]


def best_rate(
    rates: Sequence[float], start: float, at: Callable[[float], Trial], cache: Cache
) -> tuple[float | None, list[Trial]]:
    """The best of ``rates`` by the mean loss over ``searched_seeds``, or None and the trials that must come next.
    ``at``: the trial at a rate."""
    middle = rates.index(start)
    while True:
        around = rates[max(0, middle - 1) : middle + 2]
        tried = {rate: of_seeds(at(rate), searched_seeds(at(rate))) for rate in around}
        found = {rate: losses(trials, cache) for rate, trials in tried.items()}
        if missing := [trial for rate, values in found.items() if values is None for trial in tried[rate]]:
            return None, missing
        best = min(around, key=lambda rate: sum(found[rate] or ()))
        if best == rates[middle]:
            return best, []
        middle = rates.index(best)


def tuned_reference(reference: Trial, cache: Cache) -> tuple[Trial, list[Trial]]:
    """The reference at the best of INNER_RATES; or, where the cache does not know which is the best, as it was given
    (``rate`` None), and the trials that must come next."""
    from trials import tasks

    task = tasks.TASKS[reference.kind, reference.size]
    start = min(INNER_RATES, key=lambda rate: abs(math.log(rate / task.rate)))
    rate, missing = best_rate(INNER_RATES, start, lambda rate: replace(reference, rate=rate), cache)
    return (reference if rate is None else replace(reference, rate=rate)), missing
