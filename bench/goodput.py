"""The goodput of fleets that fail: the paper's table (arXiv 2604.21428) beside the simulator's.

Learners of unequal speed, and compute that comes and goes, are beside the paper's figures, too. Parameters that are
marked "fit" are not published: they were chosen so that the table is met. ``--core`` adds the real syncer core and
adoption rule under the same failures, in virtual time. ``--chips`` is for a fleet of one's own: it
adds which number of learners is enough, what spares buy, and what faster recovery buys.

    python bench/goodput.py
    python bench/goodput.py --chips 5000 --mtbi 180d --recovery 60s
    python bench/goodput.py --chips 1.2M --learners 8,16,32 --spares 2 --json
    python bench/goodput.py --core --learners 4,8
    python bench/goodput.py --core --chips 1.2M --slice 256 --learners 1,2,4
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import common
import diloco_syncer.core
import diloco_worker.core.adoption
import lab.fleet
import lab.goodput
from diloco.console import CommandError, print_text
from lab.cells import CellCache
from lab.figures import ResultDocument
from lab.fleet import parameters
from lab.fleet.advice import CANDIDATES, FleetConditions, Row, advise, failures_left_out
from lab.fleet.arguments import check_fleet, duration, learner_counts, positive, whole_number
from lab.fleet.repairs import RepairTimes
from lab.fleet.simulator import Run, Stops
from lab.goodput import published
from lab.goodput.core_rows import CoreRun, core_rows, uneven_core_rows
from lab.goodput.core_rows import quick as shortened
from lab.goodput.plots import goodput_plots
from lab.goodput.rows import LEARNERS, PAPER, goodput_rows, root_mean_square_error, scavenging_rows, uneven_rows
from lab.goodput.tables import goodput_text
from lab.progress import Progress
from lab.report_files import write_report

CELLS = Path("runs/simulate")
QUICK_FAILURES = 400.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Raises SystemExit."""
    parser = common.arguments(__doc__ or "")
    words = "chips of a fleet of your own, such as 5000 or 1.2M (default: the paper's five fleets)"
    parser.add_argument("--chips", type=whole_number, metavar="N", help=words)
    words = "numbers of learners to split them into (default: 2,4,8,16; for --chips, up to 64; --core has its own)"
    parser.add_argument("--learners", type=learner_counts, metavar="M,M,...", help=words)
    node, paper = parameters.SLICE.value, published.SLICE.value
    words = f"chips that are lost together when one of them fails (default: {paper:g}; for --chips, {node:g})"
    parser.add_argument("--slice", type=common.whole_number(1), metavar="CHIPS", help=words)
    words = "mean time of one chip between two failures, such as 30d (default: 1y)"
    parser.add_argument("--mtbi", type=positive, default=parameters.MTBI.value, metavar="DURATION", help=words)
    words = "time of one step (default: 3s)"
    parser.add_argument("--step", type=positive, default=parameters.STEP.value, metavar="DURATION", help=words)
    words = "how long a learner stands still for a failure: one half to go on without what failed, one half to take it"
    words += " in again after its repair (default: 30s)"
    parser.add_argument("--recovery", type=duration, metavar="DURATION", help=words)
    words = "mean time of a repair (default: 10m)"
    known = parameters.REPAIR_MEAN.value
    parser.add_argument("--repair-mean", type=positive, default=known, metavar="DURATION", help=words)
    words = "slices that stand by, for each learner (default: 0)"
    parser.add_argument("--spares", type=common.whole_number(0), default=0, metavar="SLICES", help=words)
    words = "let chips fail also while a learner stands still, which the published table leaves out"
    parser.add_argument("--fail-in-stops", action="store_true", help=words)
    words = "also with the real syncer core, in virtual time: minutes; exit code 1 if they differ by more than chance"
    parser.add_argument("--core", action="store_true", help=words)
    words = f"where --core keeps finished simulations, to continue from them (default: {CELLS})"
    parser.add_argument("--cache", type=Path, default=CELLS, metavar="DIR", help=words)
    words = "repetitions of each fleet, of --core too (default: 8)"
    parser.add_argument("--repetitions", type=common.whole_number(3, 1000), default=8, metavar="N", help=words)
    words = "failures of the whole fleet in one repetition; with --core at most 400 (default: 2000)"
    parser.add_argument("--failures", type=common.number(least=10), default=2000.0, metavar="N", help=words)
    parser.add_argument("--seed", type=common.whole_number(0), default=0, metavar="N", help="seed of everything")
    common.add_report(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0; 1: the core and the simulator differ; 2: the arguments are wrong."""
    given = parse(arguments)
    try:
        return run_goodput(given)
    except CommandError as error:
        print_text(f"error: {error}", file=sys.stderr)
        return error.code


def run_goodput(given: argparse.Namespace) -> int:
    """As ``main``. Raises CommandError."""
    sizes: tuple[int, ...] = published.CHIPS if given.chips is None else (given.chips,)
    conditions = read_conditions(given)
    learners: tuple[int, ...] = given.learners or LEARNERS
    own = given.chips is not None and not given.core
    if own and not given.learners:
        learners = tuple(m for m in CANDIDATES if m == 2 or given.chips / m >= conditions.slice_chips)
    for size in sizes:
        check_fleet(size, learners, conditions.slice_chips, conditions.mtbi)
    run = Run(given.repetitions, min(given.failures, QUICK_FAILURES) if given.quick else given.failures, given.seed)
    cells = find_cells(given.cache) if given.core else None
    rows = goodput_rows(sizes, learners, conditions, run, on_progress=Progress("goodput").advance)
    used = conditions.used()
    if conditions.slice_chips == published.SLICE.value:
        used["slice"]["source"] = published.SLICE.source
    document = {"title": "Goodput, simulated", "rows": rows, "rmse": root_mean_square_error(rows), "parameters": used}
    if own:
        advice, enough = advise(rows, conditions, run)
        rows += advice
        document |= {"enough": enough, "left_out": failures_left_out(given.chips, enough, conditions)}
    if given.chips is None:
        rows += [*uneven_rows(run), *scavenging_rows(conditions)]
    if cells is not None:
        rows += rows_of_core(given, conditions, run, cells)
    document |= {"repetitions": run.repetitions, "failures": run.failures, "seed": run.seed}
    document["plots"] = goodput_plots(rows)
    if given.report is not None:
        write_report(ResultDocument.model_validate(document), given.report)
    print_text(json.dumps(document) if given.json else goodput_text(document))
    return 1 if any(not row.get("agrees", True) for row in rows) else 0


def read_conditions(given: argparse.Namespace) -> FleetConditions:
    """What the fleet is like: the paper's, or one of nodes, with what was given."""
    conditions = PAPER if given.chips is None else FleetConditions()
    stops = (parameters.DOWNSCALE.value, parameters.UPSCALE.value)
    down, up = stops if given.recovery is None else (given.recovery / 2, given.recovery / 2)
    return replace(
        conditions,
        mtbi=given.mtbi,
        slice_chips=given.slice or conditions.slice_chips,
        stops=Stops(given.step, down, up, interrupted=given.fail_in_stops),
        rigid=replace(conditions.rigid, interrupted=given.fail_in_stops),
        repairs=RepairTimes.with_mean(given.repair_mean, parameters.REPAIR_SHAPE.value, parameters.REPAIR_POWER.value),
        spares=given.spares,
    )


def find_cells(folder: Path) -> CellCache:
    """What the core did before, by the code that decides it. Raises CommandError."""
    packages = (lab.fleet, diloco_syncer.core, lab.goodput)
    code = [Path(str(package.__file__)).parent for package in packages]
    modules = (diloco_worker.core.adoption,)
    return CellCache(folder, [*code, *(Path(str(module.__file__)) for module in modules)])


def rows_of_core(given: argparse.Namespace, conditions: FleetConditions, fast: Run, cells: CellCache) -> list[Row]:
    """The real core beside the simulator, and with learners of unequal speed."""
    full = CoreRun(fast.repetitions, min(fast.failures, CoreRun().failures), seed=fast.seed)
    run = shortened(full) if given.quick else full
    few = (1_200_000,) if given.quick else (600_000, 1_200_000, 2_400_000)
    sizes = few if given.chips is None else (given.chips,)
    tried = given.learners or ((4,) if given.quick else (1, 2, 4, 8, 16))
    rows = core_rows(sizes, tried, conditions, run, cells=cells, told=Progress("core").advance)
    if given.chips is not None:
        return rows
    return rows + uneven_core_rows(conditions, run, cells, Progress("core, unequal").advance)


if __name__ == "__main__":
    common.run_to_exit(partial(main, sys.argv[1:]))
