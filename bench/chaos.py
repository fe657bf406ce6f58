"""This system beside data-parallel training and torchft's DiLoCo: the same job under the same random faults.

Every arm is real processes on this machine at an emulated pace: each step takes the same time, and a process sleeps the
rest of it. Faults come from a seed: learners are killed, paused, cut off and slowed down. The arms run one after
another. The same command continues where it stopped, and does not repeat finished arms.

    python bench/chaos.py examples/tiny-gpt.yaml --compare ddp,ddp-elastic --mtbf 60 --minutes 5 --report out/
    python bench/chaos.py examples/tiny-gpt.yaml --mtbf 30 --seed 7 --dry-run
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import common
from diloco.console import WRONG, CommandError, print_text
from diloco.packages import PackagesMissing, require_packages
from lab.compare.command import LONG, QUICK, CompareOptions, compare


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Raises SystemExit."""
    parser = common.arguments(__doc__ or "")
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="the job file (kind: DiLoCoJob)")
    words = "baselines, separated by commas: ddp, ddp-elastic, torchft (default: ddp)"
    parser.add_argument("--compare", default="ddp", metavar="NAMES", help=words)
    words = "mean time until a healthy learner fails, Poisson (default: 60)"
    parser.add_argument("--mtbf", type=float, metavar="SECONDS", help=words)
    words = "mean time that a fault lasts, Weibull (default: --mtbf / 6)"
    parser.add_argument("--repair", type=float, metavar="SECONDS", help=words)
    parser.add_argument("--minutes", type=float, metavar="N", help="minutes of training in each arm (default: 5)")
    words = "where results are kept and the report goes (default: runs/chaos-<the job's name>)"
    parser.add_argument("--report", type=Path, metavar="DIR", help=words)
    words = "seed of the faults, and of the job instead of its own"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=words)
    words = "these faults instead of random ones, as for `diloco run`"
    parser.add_argument("--chaos", default="", metavar="SPEC", help=words)
    words = "how long a step takes (default: all steps together need half of the cores)"
    parser.add_argument("--step-seconds", type=float, metavar="SECONDS", help=words)
    words = "change one field of the job, as for `diloco run`"
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="PATH=VALUE", help=words)
    words = (
        "change one field below training.optimizer or sync for one arm alone (ours or a baseline), so that each runs "
        "at its own best settings: --set-arm ddp:training.optimizer.lr=6e-3"
    )
    parser.add_argument("--set-arm", action="append", default=[], metavar="ARM:PATH=VALUE", help=words)
    parser.add_argument("--dry-run", action="store_true", help="print the faults, as --chaos takes them, and end")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0; 1: an arm could not be run; 2: the arguments are wrong. ``--quick``: two learners, 12 s, a fault in 6 s."""
    given = parse(arguments)
    defaults = QUICK if given.quick else LONG
    options = CompareOptions(
        job=given.job,
        report=given.report,
        compare=given.compare,
        mtbf=defaults.mtbf if given.mtbf is None else given.mtbf,
        repair=given.repair,
        minutes=defaults.minutes if given.minutes is None else given.minutes,
        seed=given.seed,
        chaos=given.chaos,
        step_seconds=given.step_seconds,
        overrides=(*defaults.overrides, *given.overrides),
        arm_overrides=given.set_arm,
        dry_run=given.dry_run,
        as_json=given.json,
    )
    try:
        if not given.dry_run:
            require_packages("bench/chaos.py")
        return compare(options)
    except (CommandError, PackagesMissing) as error:
        print_text(f"error: {error}", file=sys.stderr)
        return error.code if isinstance(error, CommandError) else WRONG


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
