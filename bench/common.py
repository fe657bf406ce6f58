"""What the benchmarks share: arguments, paired timing, the bandwidth of reading, the output.

A figure is a ratio of two things timed in the same run, in turns, so that a machine that is
slow or busy is so for both: every round times each candidate once, in an order that rotates,
and the ratio is the median over rounds of (reference's seconds / ours). 1 is as fast as the
reference, and more is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from diloco_protocol.arrays import kernels
from diloco_protocol.arrays.kernels import RANGE, U32_IN, kernel
from diloco_protocol.common.cpu_quota import usable_cores


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: ``value`` in ``unit``, the ``baseline`` that ``against`` names in the same unit, and the ``ratio`` of
    the two. Where both were timed in turns the ratio is the median over turns, and not that of the two medians."""

    name: str
    value: float
    unit: str
    against: str
    baseline: float
    ratio: float


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with --json and --quick; a benchmark may add its own."""
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run, not how fast")
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    """--threads, of a benchmark that gives ours and the references as many."""
    what = "threads for ours and for the references alike (default: the cores of this process)"
    parser.add_argument("--threads", type=whole_number(1), default=usable_cores(), metavar="N", help=what)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The ``type`` of an option: a whole number within these bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            bounds = f"of at least {least}" + (f" and at most {most}" if most is not None else "")
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, not {text!r}")
        return value

    return read


def number(*, above: float = -math.inf, least: float = -math.inf) -> Callable[[str], float]:
    """The ``type`` of an option: a finite number within this bound."""
    bound = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (above < value < math.inf and value >= least):
            raise argparse.ArgumentTypeError(f"must be a number {bound}, not {text!r}")
        return value

    return read


def add_report(parser: argparse.ArgumentParser) -> None:
    """The option --report."""
    words = "write report.json, report.md and report.html there"
    parser.add_argument("--report", type=_new_folder, metavar="DIR", help=words)


def _new_folder(text: str) -> Path:
    """A folder, made now, so that hours of work do not end without it."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text}: {error.strerror or error}; name a folder that can be written"
        ) from None
    return folder


def run_to_exit(main: Callable[[], int]) -> NoReturn:
    """Exit with what ``main`` returns. Ctrl-C is told in a line, a closed stdout is not told."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("interrupted; what was finished and kept is not run again", file=sys.stderr, flush=True)
        code = 130
    except BrokenPipeError:  # the reader of stdout, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def end_on_sigterm() -> None:
    """From now on SIGTERM ends this program as Ctrl-C does: what it started is ended, its files are removed."""

    def end(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def finds_gpu() -> bool:
    """Whether torch can train on a CUDA device here."""
    import torch

    return torch.cuda.is_available()


def times(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each of ``rounds`` rounds, after one round to warm up."""
    names = list(candidates)
    for name in names:
        candidates[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            candidates[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def compare(
    name: str,
    ours: Callable[[], object],
    references: Mapping[str, Callable[[], object]],
    *,
    work: float,
    unit: str,
    rounds: int,
) -> list[Row]:
    """One row per reference. The value is ``work`` per second of our median time."""
    seconds = times({name: ours, **references}, rounds)
    speeds = {each: work / statistics.median(taken) for each, taken in seconds.items()}
    return [
        Row(
            name,
            speeds[name],
            unit,
            reference,
            baseline=speeds[reference],
            ratio=paired(seconds[reference], seconds[name]),
        )
        for reference in references
    ]


def paired(reference: Sequence[float], ours: Sequence[float]) -> float:
    """Median over rounds of the reference's seconds over ours."""
    return statistics.median(r / o for r, o in zip(reference, ours, strict=True))


def reading(arrays: Sequence[np.ndarray], threads: int) -> Callable[[], object]:
    """Reads every byte of the arrays (32-bit elements) and keeps next to nothing: what the
    memory gives to this many threads, for a reference."""
    views = [np.ascontiguousarray(array).reshape(-1).view(np.uint32) for array in arrays]
    sums = [np.zeros(kernels.blocks_of(view.size), np.uint32) for view in views]

    def read() -> None:
        for view, partial in zip(views, sums, strict=True):
            kernels.run(_word_sums, partial.size, threads, view, partial)

    return read


@kernel(U32_IN, "uint32[::1]", RANGE)
def _word_sums(words: np.ndarray, sums: np.ndarray, first: int, last: int) -> None:
    n = np.uint64(words.size)
    for b in range(np.uint64(first), np.uint64(last)):
        start = np.uint64(b) * np.uint64(kernels.BLOCK)
        total = np.uint32(0)
        for i in range(start, min(start + np.uint64(kernels.BLOCK), n)):
            total += words[i]
        sums[b] = total


def show(rows: Sequence[Row], as_json: bool, note: str = "") -> None:
    """Print the figures: one JSON object, or a table under ``note``."""
    if as_json:
        json.dump({"rows": [asdict(row) for row in rows]}, sys.stdout)
        print()
        return
    if note:
        print(note)
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(
            f"{row.name:{width}}  {row.value:9.2f} {row.unit:5}  {row.ratio:6.2f} x {row.against} ({row.baseline:.4g})"
        )
