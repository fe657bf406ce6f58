"""Options that quality.py, ablations.py and slow_exchanges.py share."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sized
from pathlib import Path

import common
from diloco_protocol.common.cpu_quota import usable_cores
from trials.cells import RESULTS, read_line


def add_trial_options(parser: argparse.ArgumentParser, quick: str, seeds: int) -> None:
    """What is printed, and which trials are run. ``quick``: the help of --quick; ``seeds``: by default."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    common.add_report(parser)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--cache", type=cache_file, default=RESULTS, metavar="FILE", help="what there is already")
    whole = common.whole_number(1)
    cores = usable_cores()
    what = "trials at once, a core each (default: the cores of this process)"
    parser.add_argument("--jobs", type=whole, default=cores, metavar="N", help=what)
    hours = common.number(least=0)
    parser.add_argument("--hours", type=hours, default=1e6, help="begin no trial after that; run again to go on")
    parser.add_argument("--seeds", type=whole, default=seeds, metavar="N")
    parser.add_argument("--lengths", nargs="+", type=whole, metavar="MERGES", help="instead of the lengths by default")
    parser.add_argument("--arms", nargs="+", metavar="WORD", help="only those whose names have one of these words")
    parser.add_argument("--show", action="store_true", help="train nothing, print what the cache has")
    published = "show the published tables' trials, of the code before; they cannot be run again"
    parser.add_argument("--published", action="store_true", help=published)


def check_cache(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """End the program where there is nothing to show. Published trials are only shown."""
    chosen.show |= chosen.published
    if chosen.show and not chosen.cache.exists():
        parser.error(f"--show --cache {chosen.cache}: there is no such file")


def run_from_cache(chosen: argparse.Namespace, run: Callable[[argparse.Namespace, Path], int]) -> int:
    """``run`` with what is known. A quick run shows that trials run, so nothing may be known."""
    if not chosen.quick:
        return run(chosen, chosen.cache)
    with tempfile.TemporaryDirectory(prefix="diloco-trials-") as folder:
        return run(chosen, Path(folder) / "trials.jsonl")


def check_shown(chosen: argparse.Namespace, rows: Sized) -> None:
    """Raises SystemExit where --show has nothing to show."""
    if chosen.show and not rows:
        raise SystemExit("--show: no result of these trials is kept; without --show they are trained")


def cache_file(text: str) -> Path:
    """The ``type`` of --cache: a file of results, or one that does not exist yet."""
    path = Path(text)
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror or error}; name a file of results") from None
    if lines and not any(read_line(line) for line in lines):
        raise argparse.ArgumentTypeError(f"{text}: no line of it is a trial's result; name another file")
    return path
