"""What slow exchanges and unequal learners cost: the held-out loss beside equal learners with a short exchange.

The trials are those of bench/quality.py with the defaults of a job and the task's inner rate. What varies:

* the *exchange*, from a snapshot to the version that holds it: 1.5, 4, 8 and 16 steps of a learner, once because the
  way is long (``latency``) and once because the link is narrow (``throughput``: a link carries one push, and one
  version, in so long);
* the *paces* of the learners: equal, near (0.96 to 1.04), wide (0.7 to 1.6) and wild (0.5 to 4 s a step; and ``one
  slow``, seven equal ones and one that is eight times slower);
* the *quorum*: K = 1 and K = M.

Each row has three differences, each of the same seeds: to equal paces at the same exchange (what unequal paces cost),
to the exchange of 1.5 steps with equal paces (what all costs) and to the loss before the drain (what the last merges
changed). And ``learners``: how many a merge has on average, before the drain.

Results are kept with those of the other trials, and an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
from lab.figures import ResultDocument
from trials.cells import Cache, Trial, run_trials
from trials.options import add_trial_options, check_cache, check_shown, run_from_cache
from trials.reports import INTERVAL, write_trials
from trials.search import of_seeds
from trials.tables import difference, excess, mean

EXCHANGES = (1.5, 4.0, 8.0, 16.0)  # steps
PACES: dict[str, tuple[float, ...]] = {
    "equal": (),
    "near": (0.96, 0.99, 1.01, 1.04),
    "wide": (0.7, 0.9, 1.2, 1.6),
    "wild": (0.5, 1.0, 2.0, 4.0),
    "one slow": (1.0, 1.0, 1.0, 8.0),
}
LEARNERS = 4
LENGTHS = (6,)
SEEDS = 5


@dataclass(frozen=True)
class Place:
    """A row's place. ``way``: what makes the exchange as long, ``latency`` or ``throughput``."""

    kind: str
    merges: int
    way: str
    exchange: float
    paces: str
    quorum: int

    @property
    def trial(self) -> Trial:
        """Of seed 0."""
        return Trial(
            self.kind,
            "small",
            self.merges,
            0,
            learners=LEARNERS,
            sync={} if self.quorum == 1 else {"quorum": self.quorum},
            exchange=self.exchange,
            pace=PACES[self.paces],
            throttled=self.way == "throughput" and self.exchange > EXCHANGES[0],
        )

    @property
    def name(self) -> str:
        exchange = f"exchange {self.exchange:g} steps by {self.way}"
        return f"{self.kind}, {self.merges} merges, {exchange}, {self.paces} paces, K = {self.quorum}"


@dataclass(frozen=True)
class ExchangeRow:
    """``loss`` in nats; ratios to other places' losses of the same seeds, with half of their 95 % intervals.
    ``before_drain``: what the loss was before the last merges. ``learners``: in a merge before them."""

    name: str
    loss: float
    learners: float
    merges: float
    to_equal: float
    to_equal_interval: float | None
    to_short: float
    to_short_interval: float | None
    before_drain: float
    seeds: int


def places(chosen: argparse.Namespace) -> Iterator[Place]:
    """The rows, those first with which others are compared."""
    for kind in chosen.kinds:
        for merges in chosen.lengths or LENGTHS:
            for paces in chosen.paces:
                for way in chosen.ways:
                    for exchange in chosen.exchanges:
                        for quorum in chosen.quorums:
                            yield Place(kind, merges, way, exchange, paces=paces, quorum=quorum)


def compared(place: Place) -> tuple[Place, Place, Place]:
    """The place; that of equal paces at its exchange, and that of equal paces and the short one, both with K = 1."""
    equal = replace(place, paces="equal", quorum=1)
    return place, equal, replace(equal, exchange=EXCHANGES[0])


def exchange_rows(chosen: argparse.Namespace, cache: Cache) -> list[ExchangeRow]:
    """A row for each place, of the seeds for which all that is compared is there."""
    rows = []
    for place in places(chosen):
        found = [[cache.find(one) for one in of_seeds(other.trial, chosen.seeds)] for other in compared(place)]
        whole = [results for results in zip(*found, strict=True) if all(results)]
        if not whole:
            continue
        own, equal, short = ([result or {} for result in column] for column in zip(*whole, strict=True))
        losses = [one["loss"] for one in own]
        to_equal = excess(losses, [one["loss"] for one in equal])
        to_short = excess(losses, [one["loss"] for one in short])
        rows.append(
            ExchangeRow(
                place.name,
                mean(losses).value,
                learners=mean([one["responders"] for one in own]).value,
                merges=mean([one["merges"] for one in own]).value,
                to_equal=1 + to_equal.value / 100,
                to_equal_interval=to_equal.half / 100 if len(own) > 1 else None,
                to_short=1 + to_short.value / 100,
                to_short_interval=to_short.half / 100 if len(own) > 1 else None,
                before_drain=mean([one["loss_before_drain"] for one in own]).value,
                seeds=len(own),
            )
        )
    return rows


def lines(rows: Sequence[ExchangeRow]) -> Iterator[str]:
    width = max(len(row.name) for row in rows)
    for row in rows:
        equal = difference(row.to_equal, row.to_equal_interval, 1)
        short = difference(row.to_short, row.to_short_interval, 1)
        yield (
            f"{row.name:{width}}  {row.loss:.4f} nats  {equal:>15} of equal paces  {short:>15} of 1.5 steps"
            f"  {row.learners:.2f} learners in a merge  {row.merges:.0f} merges"
            f"  {row.before_drain:.4f} before the drain  ({row.seeds} seeds)"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trial_options(parser, "two rows for a few steps: does it run, not what it costs", SEEDS)
    parser.add_argument("--kinds", nargs="+", choices=("dense", "moe", "vision"), default=["dense"])
    parser.add_argument("--exchanges", nargs="+", type=float, choices=EXCHANGES, default=EXCHANGES)
    parser.add_argument("--paces", nargs="+", choices=PACES, default=list(PACES))
    parser.add_argument("--ways", nargs="+", choices=("latency", "throughput"), default=["latency", "throughput"])
    parser.add_argument("--quorums", nargs="+", type=int, choices=(1, LEARNERS), default=[1, LEARNERS])
    chosen = parser.parse_args(arguments)
    check_cache(parser, chosen)
    if chosen.quick:
        chosen.lengths, chosen.seeds, chosen.exchanges, chosen.quorums = [1], 1, (1.5, 4.0), [1]
        chosen.paces, chosen.ways = ["equal"], ["latency"]
    return chosen


def main(arguments: Sequence[str]) -> int:
    """0: all trials are there; 3: --hours were over before."""
    return run_from_cache(parse(arguments), run_rows)


def run_rows(chosen: argparse.Namespace, file: Path) -> int:
    """As ``main``, with what is known in ``file``. An interrupted run has whole rows: seeds come one after another."""
    cache, end, complete = Cache(file), time.monotonic() + 3600 * chosen.hours, True
    wanted = [one for seed in range(chosen.seeds) for place in places(chosen) for one in _of_seed(place, seed)]
    if not chosen.show:
        complete = run_trials(wanted, cache, chosen.jobs, end=end)
    rows = exchange_rows(chosen, cache)
    check_shown(chosen, rows)
    note = "Held-out loss by exchange, paces and quorum, beside equal paces, and beside an exchange of 1.5 steps."
    document = ResultDocument(
        title="Slow exchanges", summary=note, facts={}, rows=[asdict(row) for row in rows], plots=[], notes=[INTERVAL]
    )
    write_trials(document, lines(rows), chosen.json, chosen.report)
    return 0 if complete else 3


def _of_seed(place: Place, seed: int) -> list[Any]:
    return [replace(other.trial, seed=seed) for other in compared(place)]


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
