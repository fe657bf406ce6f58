"""What one broken learner of a job costs the model, by the merge's method: held-out loss of bench/quality.py's trials.

One of M learners pushes something else than its work, from its first push to its last (bench/trials/broken.py has the
ways). All bounds that a job has by default are in force: a push that is not finite, or far larger than the parameters,
or than its fragment's merged pushes, is refused. K = 3, which the median needs.

Results are kept with those of the other trials, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import common
from lab.figures import ResultDocument
from trials.broken import FAULTS
from trials.cells import Cache, Trial, run_trials
from trials.options import add_trial_options, check_cache, check_shown, run_from_cache
from trials.reports import write_trials
from trials.search import learners_in_merges, of_seeds
from trials.tables import mean

METHODS = ("rda", "isotropic", "median")
LENGTHS = (6,)
SEEDS = 1
QUORUM = 3


@dataclass(frozen=True)
class BrokenRow:
    """``loss``: in nats, over seeds; ``in_a_merge``: learners, the mean."""

    merges: int
    learners: int
    fault: str
    method: str
    loss: float
    in_a_merge: float | None
    seeds: int


def trial_of(merges: int, learners: int, fault: str, method: str) -> Trial:
    """Of seed 0."""
    sync = {"merge": {"method": method}, "quorum": QUORUM}
    return Trial("dense", "small", merges, 0, learners=learners, sync=sync, broken=fault)


def broken_rows(chosen: argparse.Namespace, cache: Cache) -> list[BrokenRow]:
    """A row for each place and method of which all seeds are there."""
    rows = []
    for merges, learners, fault in places(chosen):
        for method in chosen.methods:
            trials = of_seeds(trial_of(merges, learners, fault, method), chosen.seeds)
            losses = [found["loss"] for trial in trials if (found := cache.find(trial))]
            if len(losses) == len(trials):
                there = learners_in_merges(trials, cache)
                loss = mean(losses).value
                rows.append(BrokenRow(merges, learners, fault, method, loss=loss, in_a_merge=there, seeds=len(losses)))
    return rows


def places(chosen: argparse.Namespace) -> Iterator[tuple[int, int, str]]:
    for merges in chosen.lengths or LENGTHS:
        for learners in chosen.learners:
            for fault in chosen.faults:
                yield merges, learners, fault


def lines(rows: Sequence[BrokenRow]) -> Iterator[str]:
    for row in rows:
        place = f"{row.merges} merges, M = {row.learners}, {row.fault:22}  {row.method:9}"
        yield f"{place}  {row.loss:.3f} nats  {row.in_a_merge or 0:.2f} learners in a merge  ({row.seeds} seeds)"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trial_options(parser, "two rows for a few steps: does it run, not what it costs", SEEDS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--learners", nargs="+", type=int, choices=(4, 8), default=[4, 8])
    chosen = parser.parse_args(arguments)
    check_cache(parser, chosen)
    if chosen.quick:
        chosen.lengths, chosen.seeds, chosen.learners, chosen.methods = [1], 1, [4], ["median"]
        chosen.faults = ["its work", "× 10"]
    return chosen


def main(arguments: Sequence[str]) -> int:
    """0: all trials are there; 3: --hours were over before."""
    return run_from_cache(parse(arguments), run_rows)


def run_rows(chosen: argparse.Namespace, file: Path) -> int:
    """As ``main``, with what is known in ``file``."""
    cache, end, complete = Cache(file), time.monotonic() + 3600 * chosen.hours, True
    firsts = [trial_of(*place, method) for place in places(chosen) for method in chosen.methods]
    if not chosen.show:
        wanted = [trial for first in firsts for trial in of_seeds(first, chosen.seeds)]
        complete = run_trials(wanted, cache, chosen.jobs, end=end)
    rows = broken_rows(chosen, cache)
    check_shown(chosen, rows)
    note = "Held-out loss in nats where one of M learners is broken, by method, with a job's default bounds."
    document = ResultDocument(
        title="One broken learner", summary=note, facts={}, rows=[asdict(row) for row in rows], plots=[], notes=[]
    )
    write_trials(document, lines(rows), chosen.json, chosen.report)
    return 0 if complete else 3


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
