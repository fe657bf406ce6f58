"""Model quality beside data-parallel training: the same model, data, tokens and evaluation.

Every trial trains a small model from scratch on so many tokens and is scored on what was held out:

* *data-parallel*: the gradients of all batches averaged at every step, which in one process is the whole batch at
  once, at the inner rate that is best for it at this length (bench/trials/search.py);
* *DDP*: the same by torch's DistributedDataParallel over gloo, two ranks, for small models at 6 and 40 merges and for
  the larger dense one at 6;
* *data-parallel, Muon*: as the first, with Muon for the matrices, at its own best inner rate, for small dense models
  at 6 merges;
* *M = 1, 2, 4, 8, 16*: M learners share the batch and meet at the syncer, with the job file's defaults and the inner
  rate of the same grid that is best for them. They train in one process in virtual time (bench/lab/world):
  real steps, adoption, merges, outer steps and encodings; a step takes a second, and 1.5 s pass from a snapshot to the
  version that holds it.
* *M = 4, faults*: each learner dies twice on average, and another process takes its slot after 5 % of the run. The
  inner rate is that of M = 4.

Three kinds of model (dense, mixture of experts, vision), two sizes, and three lengths, told in merges of each fragment
at H = 24: steps are 24 times as many. The ratio is to the data-parallel loss of the same seed, above 1 is worse.
A second one is to the loss of one learner with the same outer step: what decoupling costs. Intervals are 95 % by
Student's t over seeds.

Of the larger models at 40 and 200 merges some arms are trained only with ``--lengths`` or ``--arms``, because they take
hours (``is_chosen``). ``--sizes gpu`` is a dense model of 26 million parameters, trained on a CUDA device; without that
word no trial needs one.

Rates are chosen by 1,024 held-out sequences, and the losses are those of 1,024 others (bench/trials/tasks.py).
``--published`` shows the tables of docs/results/quality.md, which are of the code before.

Results are kept in bench/results/trials.jsonl, which is part of the repository, and an interrupted run goes on.
bench/ablations.py varies one thing at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
from diloco_protocol.spec.load import JobError, job_to_json, parse_job
from trials.cells import Cache, Trial, choice_losses, common_losses, run_trials
from trials.options import add_trial_options, check_cache, check_shown
from trials.reports import quality_report, show_trials
from trials.search import INNER_RATES, SEARCH_ROUND, learners_in_merges, of_seeds, searched_seeds, tuned
from trials.tables import TrialRow, beside_default, make_row
from trials.tasks import make_job

KINDS = ("dense", "moe", "vision")
SIZES = ("small", "large")
ON_GPU = "gpu"  # the size that needs one; of dense models alone
LENGTHS = {"small": (6, 40, 200), "large": (6, 40, 200), ON_GPU: (6, 20)}  # unless --lengths says others
LEARNERS = (1, 2, 4, 8, 16)
FAULTS = "M = 4, faults"
DDP = "DDP, two ranks"
MUON = "data-parallel, Muon"
ONE = f"M = {LEARNERS[0]}"
ARM_NAMES = (*(f"M = {m}" for m in LEARNERS), FAULTS, DDP, MUON)
DDP_OF = {(kind, "small", merges) for kind in KINDS for merges in (6, 40)} | {("dense", "large", 6)}
MUON_OF = {("dense", "small", 6)}
SEEDS = 5


def is_chosen(chosen: argparse.Namespace, reference: Trial, name: str | None = None) -> bool:
    """Whether an arm (None: any arm) is trained beside this reference: some arms of the larger models, which take
    hours, only where --lengths or --arms asks for them. Whatever was run is shown."""
    if chosen.lengths or chosen.arms or chosen.show or reference.size != "large" or reference.merges < 40:
        return True
    if reference.merges < 200:
        return name != f"M = {LEARNERS[-1]}"
    return reference.kind != "moe" and name in (None, "M = 4", "M = 8", FAULTS)


def references(chosen: argparse.Namespace) -> Iterator[Trial]:
    """The data-parallel trials of seed 0 at the task's rate, shortest first."""
    for merges in chosen.lengths or sorted({merges for size in chosen.sizes for merges in LENGTHS[size]}):
        for size in chosen.sizes:
            if chosen.lengths or merges in LENGTHS[size]:
                found = (
                    Trial(kind, size, merges, 0, published=chosen.published)
                    for kind in chosen.kinds
                    if size != ON_GPU or kind == "dense"
                )
                yield from (trial for trial in found if is_chosen(chosen, trial))


def arms(reference: Trial, chosen: argparse.Namespace) -> list[tuple[str, Trial]]:
    """What is compared with this reference, by name, at the task's inner rate; DDP at the reference's."""
    base = replace(reference, rate=None, sync=chosen.sync)
    found = [(f"M = {m}", replace(base, learners=m)) for m in LEARNERS]
    found.append((FAULTS, replace(base, learners=4, deaths=True)))
    if (reference.kind, reference.size, reference.merges) in DDP_OF and not chosen.sync:
        found.append((DDP, replace(reference, ddp=True)))
    if (reference.kind, reference.size, reference.merges) in MUON_OF and not chosen.sync:
        found.append((MUON, replace(reference, rate=None, inner="muon")))
    return [
        (name, trial)
        for name, trial in found
        if is_chosen(chosen, reference, name) and (not chosen.arms or any(has(name, word) for word in chosen.arms))
    ]


def has(name: str, word: str) -> bool:
    """Whether the arm's name has the word, whole: "M = 1" is not in "M = 16"."""
    return re.search(rf"{re.escape(word)}\b", name) is not None


def rate_search(trial: Trial) -> Trial | None:
    """The trial whose best inner rate an arm has; None: the arm's rate is not looked for."""
    return None if trial.ddp else replace(trial, deaths=False)


def best_arms(reference: Trial, chosen: argparse.Namespace, cache: Cache) -> list[tuple[str, Trial]]:
    """The arms, each at its best inner rate, as far as that is known."""
    found = []
    for name, trial in arms(reference, chosen):
        searched = rate_search(trial)
        found.append((name, trial if searched is None else replace(trial, rate=tuned(searched, cache)[0].rate)))
    return found


def quality_rows(chosen: argparse.Namespace, cache: Cache, *, inner: str = "adamw") -> list[TrialRow]:
    """A row for each arm, of as many seeds as it and data-parallel training with that inner optimizer have."""
    rows = []
    for reference in references(chosen):
        model, merges = f"{reference.kind}-{reference.size}", reference.merges
        best, _ = tuned(reference, cache)
        beside, _ = tuned(replace(reference, inner=inner), cache)
        found = best_arms(best, chosen, cache)
        one = dict(found).get(ONE)
        for arm, trial in found:
            values, base = common_losses(of_seeds(trial, chosen.seeds), of_seeds(beside, chosen.seeds), cache)
            if values:
                name = f"{model}, {merges} merges: {arm}"
                place: dict[str, Any] = {"group": model, "merges": merges, "arm": arm}
                place["learners"] = learners_in_merges(of_seeds(trial, chosen.seeds), cache)
                own = None if trial.ddp else trial.rate
                row = make_row(name, values, "data-parallel", base, **place, rate=beside.rate, own_rate=own)
                if one is not None and trial.learners > 1:
                    values, base = common_losses(of_seeds(trial, chosen.seeds), of_seeds(one, chosen.seeds), cache)
                    row = beside_default(row, ONE, values, base) if values else row
                rows.append(row)
    return rows


def searches(chosen: argparse.Namespace) -> Iterator[tuple[str, Trial]]:
    """What has its best inner rate looked for, by name: each reference, then its arms."""
    for reference in references(chosen):
        model = f"{reference.kind}-{reference.size}, {reference.merges} merges"
        yield f"{model}, data-parallel", reference
        for name, trial in arms(reference, chosen):
            if rate_search(trial) == trial:
                yield f"{model}, {name}", trial


def show_rates(chosen: argparse.Namespace, cache: Cache) -> None:
    """Each known loss by which a search chooses, with a star at the best, where the search has ended."""
    for name, trial in searches(chosen):
        best, _ = tuned(trial, cache)
        for rate in INNER_RATES:
            values = choice_losses(of_seeds(replace(trial, rate=rate), searched_seeds(trial)), cache)
            if values is not None:
                star = " *" if rate == best.rate else ""
                print(f"{name}: inner rate {rate:g}: {sum(values) / len(values):.4f} nats{star}")


def next_rates(chosen: argparse.Namespace, cache: Cache) -> list[Trial]:
    """What the searches for best inner rates need next."""
    return [trial for _, searched in searches(chosen) for trial in tuned(searched, cache)[1]]


def quick_rows() -> list[TrialRow]:
    """Does it run: a few steps of a small model."""
    rows = []
    sync = {"fragments": 4, "every": 8}
    with tempfile.TemporaryDirectory(prefix="diloco-quality-") as folder:
        cache = Cache(Path(folder) / "trials.jsonl")
        base = Trial("dense", "small", 2, 0)
        named = [
            ("M = 2", replace(base, learners=2, sync=sync)),
            ("faults", replace(base, learners=2, sync=sync, deaths=True)),
            (DDP, replace(base, ddp=True)),
        ]
        run_trials([base, *(trial for _, trial in named)], cache, 1)
        for name, trial in named:
            values, reference = common_losses([trial], [base], cache)
            words = f"dense-small, 48 steps: {name}"
            rows.append(make_row(words, values, "data-parallel", reference, group="dense-small", merges=2, arm=name))
    return rows


def show_quality(rows: list[TrialRow], chosen: argparse.Namespace, note: str) -> None:
    show_trials(quality_report(rows, note), rows, chosen.json, chosen.report)


def sync_from(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("""not an object such as {"merge": {"method": "rda"}}""")
    job = json.loads(job_to_json(make_job("dense", "small", 1, 2, seed=0, sync={})))
    job["spec"]["sync"] |= found
    try:
        parse_job(json.dumps(job))
    except JobError as error:
        raise argparse.ArgumentTypeError("; ".join(map(str, error.problems))) from error
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_trial_options(parser, "a few steps: does it run, not how good", SEEDS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sizes", nargs="+", choices=(*SIZES, ON_GPU), default=SIZES)
    parser.add_argument("--sync", type=sync_from, default={}, metavar="JSON", help="spec.sync, if not the defaults")
    parser.add_argument(
        "--rates", action="store_true", help="only the search for the best inner rates, of data-parallel too"
    )
    chosen = parser.parse_args(arguments)
    if chosen.arms and (unknown := [word for word in chosen.arms if not any(has(name, word) for name in ARM_NAMES)]):
        parser.error(f"--arms: no arm has {unknown[0]!r} in its name; there are {', '.join(ARM_NAMES)}")
    check_cache(parser, chosen)
    if ON_GPU in chosen.sizes and "dense" not in chosen.kinds:
        parser.error(f"--sizes {ON_GPU} has dense models alone: add dense to --kinds")
    if ON_GPU in chosen.sizes and not (chosen.show or chosen.quick) and not common.finds_gpu():
        parser.error(f"--sizes {ON_GPU} is trained on a CUDA device, and torch finds none: --show prints what is known")
    return chosen


def main(arguments: Sequence[str]) -> int:
    """0: all trials are there; 3: --hours were over before."""
    chosen = parse(arguments)
    note = "Held-out loss, and by how much it is above data-parallel training's (95 % intervals)."
    if chosen.quick:
        show_quality(quick_rows(), chosen, note)
        return 0
    cache, end = Cache(chosen.cache), time.monotonic() + 3600 * chosen.hours
    complete = True
    while complete and not chosen.show and (wanted := next_rates(chosen, cache)):
        complete = run_trials(wanted, cache, chosen.jobs, end=end, what=SEARCH_ROUND)
    if chosen.rates:
        show_rates(chosen, cache)
        return 0 if complete else 3
    trials = [
        replace(trial, seed=seed)
        for reference in references(chosen)
        for best in [tuned(reference, cache)[0]]
        for compared in [(best, *(arm for _, arm in best_arms(best, chosen, cache)))]
        for seed in range(chosen.seeds)
        for trial in compared
    ]
    complete = chosen.show or (complete and run_trials(trials, cache, chosen.jobs, end=end))
    rows = quality_rows(chosen, cache)
    check_shown(chosen, rows)
    show_quality(rows, chosen, note)
    return 0 if complete else 3


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
