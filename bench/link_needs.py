"""The bandwidth that a job's links need, and the share of its time that a learner computes on thinner ones.

The paper's four figures (arXiv 2604.21428) come first, by its formula and by a queue: it exchanges by all-reduce. Then
our star with each pair of encodings: a learner's link, up and down, and the hub's, in and out. Then shares of computing
over bandwidths, beside data-parallel training's. ``diloco plan`` does this for a job file.

    python bench/link_needs.py
    python bench/link_needs.py --params 350M --step-seconds 0.4 --overlap 1,2,6
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial

import common
from diloco.console import print_text
from diloco_protocol.bandwidth.links import ROUND_TRIPS
from diloco_protocol.bandwidth.model import Turn
from diloco_protocol.vocabulary import MAX_FRAGMENTS
from lab.bandwidth import RATES, Case, bandwidth_text, curve_rows, published_rows, star_rows, utilisation_plots
from lab.figures import ResultDocument
from lab.fleet.arguments import whole_number
from lab.goodput.tables import count_text
from lab.progress import Progress
from lab.report_files import write_report

PARAMS = 5_000_000_000


def overlaps(text: str) -> tuple[int, ...]:
    """``2`` or ``1,2,6``."""
    return tuple(dict.fromkeys(common.whole_number(1, 1000)(part) for part in text.split(",")))


def share(text: str) -> float:
    """A share of the time from 0.5 to 0.999."""
    value = common.number(least=0.5)(text)
    if value > 0.999:
        raise argparse.ArgumentTypeError(f"must be at most 0.999, not {text!r}")
    return value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Raises SystemExit."""
    parser = common.arguments(__doc__ or "")
    words = "trained parameters, such as 350M (default: 5e9)"
    parser.add_argument("--params", type=whole_number, default=5_000_000_000, metavar="N", help=words)
    words = "number of learners (default: 8)"
    parser.add_argument("--learners", type=common.whole_number(2, 4096), default=8, metavar="M", help=words)
    words = "how long one inner step takes (default: 1)"
    parser.add_argument("--step-seconds", type=common.number(above=0), default=1.0, metavar="SECONDS", help=words)
    words = "fragments of the model (default: 24)"
    parser.add_argument("--fragments", type=common.whole_number(1, MAX_FRAGMENTS), default=24, metavar="P", help=words)
    words = "steps between two merges of a fragment (default: 24)"
    parser.add_argument("--every", type=common.whole_number(1, 1_000_000), default=24, metavar="H", help=words)
    words = "steps that an exchange may overlap (default: 2)"
    parser.add_argument("--overlap", type=overlaps, default=(2,), metavar="T,T,...", help=words)
    words = "share of its time that a learner shall compute (default: 0.95)"
    parser.add_argument("--utilisation", type=share, default=0.95, metavar="SHARE", help=words)
    words = "round trip time between a learner and the hub (default: 0)"
    parser.add_argument("--round-trip-seconds", type=common.number(least=0), default=0.0, metavar="SECONDS", help=words)
    common.add_report(parser)
    given = parser.parse_args(arguments)
    if given.fragments > min(given.every, given.params):
        parser.error(f"--fragments {given.fragments}: P is at most H (--every {given.every}) and --params")
    if max(given.overlap) >= given.every:
        parser.error(f"--overlap {max(given.overlap)}: τ is below H (--every {given.every})")
    return given


def main(arguments: Sequence[str]) -> int:
    """0."""
    given = parse(arguments)
    turn = Turn(
        given.fragments,
        given.every,
        given.overlap[0],
        given.step_seconds,
        between_seconds=ROUND_TRIPS * given.round_trip_seconds,
    )
    case = Case(given.params, given.learners, turn, given.utilisation)
    rates = RATES[::3] if given.quick else RATES
    rows = published_rows() + star_rows(case) + curve_rows(case, given.overlap, rates, Progress("links").advance)
    title = (
        f"needed by {count_text(given.params)} parameters, M = {given.learners}, P = {given.fragments}, "
        f"H = {given.every}, τ = {given.overlap[0]}, steps of {given.step_seconds:g} s, "
        f"{100 * given.utilisation:g} % computing"
    )
    document = {"rows": rows, "title": title, "plots": utilisation_plots(rows)}
    if given.report is not None:
        write_report(ResultDocument.model_validate(document), given.report)
    print_text(json.dumps(document) if given.json else bandwidth_text(document))
    return 0


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
