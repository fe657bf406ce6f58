"""Worlds of the four simulations: those that are recorded, and then new ones, of seeds that nobody has tried.

    .venv/bin/python tests/worlds.py                             what .ci/run does, in four minutes on two cores
    .venv/bin/python tests/worlds.py --minutes 30                what `make nightly` does, with settings of its own
    .venv/bin/python tests/worlds.py --only new --simulation operator --setting LIVES      new worlds of one setting
    .venv/bin/python tests/worlds.py --simulation shell --setting LOSING --seed 123

The last line is what a failure prints: it runs that world alone. A world follows from its seed, its setting and the
code alone, whatever the machine does (``--hash`` says for which share of the worlds this is checked by a second run).

Recorded are the first seeds of every setting (``RECORDED``) and those of found_seeds.jsonl. New seeds follow each other
from a number drawn by chance, or from ``--first``, and take a simulation's settings in turn, until its budget of
processor time is used up. build/worlds.log names each world when it begins, and so the one that never ends.

A failure is red, with two exceptions. A line of found_seeds.jsonl whose ``mended`` is null is known and open. A new
seed that also fails on the commit before (``--base``) is not this change's fault: it is printed as KNOWN BEFORE, with
the line to add to found_seeds.jsonl, and is to be mended next. So is one of a simulation or setting that the commit
before does not have: what a new one finds first is as old as the code. That commit is looked at as a whole, with its
own simulations; where it cannot run the world otherwise, the failure is red. A recorded seed stands for what it found
only as long as the simulation draws the same numbers: what must stay checked for ever is a test of its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import faulthandler
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from world_seeds import (
    BUDGETS,
    RECORDED,
    Case,
    NewSeeds,
    Verdict,
    choose_base,
    drawn_settings,
    found_line,
    judge,
    read_found,
    recorded_seeds,
)

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "tests" / "found_seeds.jsonl"
LOG = ROOT / "build" / "worlds.log"
PACKAGES = ("protocol", "syncer", "worker", "operator", "cli")
UNKNOWN = 2  # the exit status where there is no such simulation or setting
HOURS_OF_A_CHANGE = 4  # between its first and its last commit, at most
LONGEST = 300.0  # seconds of processor time that one world may take
MOST_RED = 5  # then no more worlds begin
CORES = os.cpu_count() or 1
TRACE_LINES = 40
QUIET = (": Tick(", ": Reported(", ": Persist(")  # of a trace, what is not printed


@dataclass(frozen=True)
class Outcome:
    """How a world ended. ``error`` empty: well; ``seconds``: of processor time; ``trace``: the end of a failed one."""

    case: Case
    events: int
    seconds: float
    error: str = ""
    trace: tuple[str, ...] = ()


# ------------------------------------------------------------------ one world


def run_world(case: Case, trace: list[str] | None) -> int:
    """Run a world to its end, and return how many events it had; raises what it finds."""
    changes = json.loads(case.changes)
    if case.simulation == "operator":
        from operator_simulation.random_faults import SETTINGS, run_random_faults

        return run_random_faults(case.seed, trace, **(SETTINGS[case.setting] | changes)).acts
    kinds: dict[str, Any]
    if case.simulation == "workers":
        from syncer_simulation.worker_settings import WORKERS as kinds
    else:
        from syncer_simulation.settings import CORE, SHELL

        kinds = {"core": CORE, "shell": SHELL}[case.simulation]
    return int(kinds[case.setting].run(case.seed, changes, trace).events)


def run_case(case: Case, twice: bool) -> Outcome:
    """Run a world, and where it fails once more for its trace. ``twice``: compare the events of two runs."""
    write_log(f"begin {case.command}")
    signal.setitimer(signal.ITIMER_PROF, LONGEST)  # ends this process, which writes down where it was
    began, events, error = time.process_time(), 0, ""
    trace: list[str] | None = [] if twice else None
    again: list[str] = []
    try:
        events = run_world(case, trace)
    except Exception as failure:
        error = describe(failure)
    if error or twice:
        try:
            run_world(case, again)
            error = f"it does not fail again: {error}" if error else error
        except Exception as failure:
            error = error if describe(failure) == error else f"{error}\n\nand in a second run: {describe(failure)}"
        if not error and trace is not None and hash_of(trace) != hash_of(again):
            error = "two runs of this world differ"
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    write_log(f"end   {case.command}")
    shown = [line for line in again if not any(word in line for word in QUIET)][-TRACE_LINES:] if error else []
    return Outcome(case, events, time.process_time() - began, error, trace=tuple(line[:240] for line in shown))


def describe(failure: Exception) -> str:
    """The error and where it was raised."""
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__} in {Path(frame.filename).name}:{frame.lineno}: {failure}"


def hash_of(trace: list[str]) -> str:
    return hashlib.sha256("\n".join(trace).encode()).hexdigest()


def write_log(line: str) -> None:
    with LOG.open("a") as log:
        log.write(line + "\n")


def prepare_process() -> None:
    logging.disable(logging.CRITICAL)
    faulthandler.register(signal.SIGPROF, LOG.open("a"), chain=True)


# ------------------------------------------------------------------ the commit before


def git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def find_base() -> str | None:
    changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    head = git("rev-parse", "HEAD") or ""
    # A change that landed whole may have several commits. Its first one is no commit before it.
    made = int(git("show", "-s", "--format=%ct", "HEAD") or 0)
    earlier = git("rev-list", "-1", "--first-parent", f"--before={made - HOURS_OF_A_CHANGE * 3600}", "HEAD")
    return choose_base(head, git("merge-base", "HEAD", "origin/main"), earlier or git("rev-parse", "HEAD^"), changed)


def fails_on(base: str | None, case: Case) -> bool | None:
    """Whether the commit fails in this world too, with its own simulation, or has no such simulation or setting; None:
    it cannot run the world. One that has no such program is taken for the first that has it."""
    if base is not None and not git("ls-tree", "--name-only", base, "tests/worlds.py"):
        base = git(
            "log", "--first-parent", "-m", "--diff-filter=A", "--format=%H", "-1", "HEAD", "--", "tests/worlds.py"
        )
    if not base:
        return None
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", base], cwd=ROOT, capture_output=True)
        if archive.returncode or subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout).returncode:
            return None
        paths = os.pathsep.join(os.path.join(folder, package) for package in PACKAGES)
        program = [sys.executable, os.path.join(folder, "tests", "worlds.py"), *case.arguments]
        done = subprocess.run(
            program, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
        )
    if done.returncode == 0:
        return False
    return True if f"{Verdict.RED.value}: {case.command}" in done.stdout or done.returncode == UNKNOWN else None


# ------------------------------------------------------------------ many worlds


def run_cases(pool: futures.Executor, cases: Iterator[tuple[Case, bool]], until: float) -> Iterator[Outcome]:
    """Run worlds side by side, those twice that are marked so, as long as there are some and it is not too late."""
    running: set[futures.Future[Outcome]] = set()
    while True:
        while len(running) < 2 * CORES and time.monotonic() < until and (case := next(cases, None)) is not None:
            running.add(pool.submit(run_case, *case))
        if not running:
            return
        done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
        yield from (one.result() for one in done)


def tell_failure(verdict: Verdict, outcome: Outcome, commit: str) -> None:
    print(f"\n{verdict.value}: {outcome.case.command}")
    if verdict is Verdict.OPEN:
        print(outcome.error.partition("\n")[0])
    else:
        print(*outcome.trace, outcome.error[-6000:], sep="\n")
        print(f"for tests/found_seeds.jsonl: {found_line(outcome.case, commit, outcome.error)}")
    sys.stdout.flush()


def tell_sums(what: str, outcomes: list[Outcome]) -> None:
    for name in BUDGETS:
        mine = [outcome for outcome in outcomes if outcome.case.simulation == name]
        if mine:
            seeds = [outcome.case.seed for outcome in mine]
            span = f", seeds {min(seeds)} to {max(seeds)}" if what == "new" else ""
            events, seconds = sum(one.events for one in mine), sum(one.seconds for one in mine)
            print(f"{name}: {len(mine)} {what} worlds{span}, {events:,} events, {seconds:.0f} s of processor time")
    sys.stdout.flush()


def tell_unended() -> None:
    """Name the worlds that had begun when a process ended."""
    lines = LOG.read_text().splitlines()
    ended = {line[6:] for line in lines if line.startswith("end ")}
    for begun in [line[6:] for line in lines if line.startswith("begin ")]:
        if begun not in ended:
            print(f"\n{Verdict.RED.value}: {begun}\nit had begun when a process ended: see {LOG}")


class Run:
    """Recorded worlds, and then new ones."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.found = read_found(FOUND.read_text())
        self.chosen = [args.simulation] if args.simulation else list(BUDGETS)
        self.settings = {one: drawn_settings(one, args.minutes is not None, args.setting) for one in self.chosen}
        self.commit = git("rev-parse", "--short=8", "HEAD") or ""
        self.red = 0
        budgets = {name: getattr(args, name) for name in self.chosen}
        if args.minutes:
            share = 60.0 * args.minutes * CORES / sum(budgets.values())
            budgets = {name: budget * share for name, budget in budgets.items()}
        chance = random.SystemRandom()
        first = {name: args.first or chance.randrange(10**6, 2**32) for name in self.chosen}
        self.new = NewSeeds(budgets, first, self.settings)

    def run(self) -> int:
        spawn = multiprocessing.get_context("spawn")
        with futures.ProcessPoolExecutor(CORES, spawn, prepare_process, max_tasks_per_child=500) as pool:
            try:
                if self.args.only != "new":
                    self.run_some(pool, "recorded", iter(self.recorded()), float("inf"))
                if self.args.only != "recorded" and not self.red:
                    until = time.monotonic() + 60.0 * self.args.minutes if self.args.minutes else float("inf")
                    self.run_some(pool, "new", iter(self.new.next, None), until)
            except futures.process.BrokenProcessPool:
                tell_unended()
                return 1
        return int(self.red > 0)

    def recorded(self) -> list[Case]:
        cases = [*self.found, *recorded_seeds()]
        return [case for case in dict.fromkeys(cases) if case.setting in self.settings.get(case.simulation, ())]

    def run_some(self, pool: futures.Executor, what: str, cases: Iterator[Case], until: float) -> None:
        every = round(1 / self.args.hash) if self.args.hash else sys.maxsize
        outcomes: list[Outcome] = []
        few = iter(lambda: next(cases, None) if self.red < MOST_RED else None, None)
        for outcome in run_cases(pool, ((case, case.seed % every == 0) for case in few), until):
            outcomes.append(outcome)
            self.new.used[outcome.case.simulation] += outcome.seconds if what == "new" else 0.0
            is_open = self.found.get(outcome.case) is False
            if outcome.error:
                before = fails_on(self.args.base or find_base(), outcome.case) if what == "new" else None
                verdict = judge(True, recorded=what == "recorded", is_open=is_open, failed_before=before)
                tell_failure(verdict, outcome, self.commit)
                self.red += verdict is Verdict.RED
            elif is_open:
                print(f"good again: {outcome.case.command}: if it is mended, its line has to say in which commit")
        tell_sums(what, outcomes)


def run_one(case: Case) -> int:
    outcome = run_case(case, True)
    if outcome.error:
        tell_failure(Verdict.RED, outcome, git("rev-parse", "--short=8", "HEAD") or "")
        return 1
    print(f"good: {case.command}: {outcome.events:,} events, {outcome.seconds:.1f} s of processor time")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run worlds of the simulations: recorded seeds, then new ones.")
    parser.add_argument("--simulation", choices=list(BUDGETS), help="this one only")
    parser.add_argument("--setting", help="with --simulation: worlds of this setting only")
    parser.add_argument("--seed", type=int, help="run this world alone")
    parser.add_argument("--with", dest="changes", default="{}", help="with --seed: changes of the setting, in JSON")
    parser.add_argument("--only", choices=["recorded", "new"], help="one kind of seeds")
    for name, seconds in BUDGETS.items():
        words = f"seconds of processor time for new seeds ({seconds:.0f})"
        parser.add_argument(f"--{name}", type=float, default=seconds, metavar="SECONDS", help=words)
    parser.add_argument(
        "--minutes", type=float, help="new seeds for so long, on all cores, in the budgets' proportions"
    )
    parser.add_argument("--first", type=int, help="the first of the new seeds (drawn by chance)")
    parser.add_argument(
        "--hash", type=float, default=0.02, metavar="SHARE", help="share of worlds that run twice (0.02)"
    )
    parser.add_argument("--base", help="the commit before this change (where it left origin/main; else of hours ago)")
    args = parser.parse_args()
    LOG.parent.mkdir(exist_ok=True)
    prepare_process()
    if args.setting is not None and (args.simulation is None or args.setting not in RECORDED[args.simulation]):
        parser.error("--setting needs a --simulation that has it")
    if args.seed is None:
        LOG.write_text("")
        return Run(args).run()
    if args.setting is None:
        parser.error("--seed needs --simulation and a --setting that it has")
    return run_one(Case(args.simulation, args.setting, args.seed, args.changes))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # coroutines of simulated processes that died wait for ever, and Python's own end trips over them
