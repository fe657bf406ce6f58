"""Worlds of the three simulations: those that are recorded, and then new ones, of seeds that nobody has tried.

    .venv/bin/python tests/worlds.py                             what .ci/run does, in four minutes on two cores
    .venv/bin/python tests/worlds.py --only new --minutes 30     what `make nightly` does
    .venv/bin/python tests/worlds.py --simulation shell --setting LOSING --seed 123

The last line is what a failure prints: it runs that world alone. A world follows from its seed, its setting and the
code alone, whatever the machine does (``--hash`` says for which share of the worlds this is checked by a second run).

Recorded are the first seeds of every setting (``RECORDED``) and those of found_seeds.jsonl. New seeds follow each other
from a number drawn by chance, or from ``--first``, and take a simulation's settings in turn, until its budget of
processor time is used up. build/worlds.log names each world when it begins, and so the one that never ends.

A failure is red, with two exceptions. A line of found_seeds.jsonl whose ``mended`` is null is known and open. A new
seed that also fails on the commit before (``--base``) is not this change's fault: it is printed as KNOWN BEFORE, with
the line to add to found_seeds.jsonl, and is to be mended next. That commit is looked at as a whole, with its own
simulations; where it cannot run the world, the failure is red. A recorded seed stands for what it found only as long
as the simulation draws the same numbers: what must stay checked for ever is a test of its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import enum
import faulthandler
import hashlib
import json
import logging
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOUND = ROOT / "tests" / "found_seeds.jsonl"
LOG = ROOT / "build" / "worlds.log"
PACKAGES = ("protocol", "syncer", "worker", "operator", "cli")
LONGEST = 300.0  # seconds of processor time that one world may take
MOST_FAILURES = 5  # then no more worlds begin
TRACE_LINES = 40
QUIET = (": Tick(", ": Reported(", ": Persist(")  # of a trace, what is not printed

BUDGETS = {"core": 90.0, "shell": 120.0, "operator": 90.0}  # seconds of processor time for new seeds
RECORDED: dict[str, dict[str, range]] = {
    "core": {
        "HARSH": range(1000),
        "ORDINARY": range(1, 1000, 2),
        "SCALED": range(1, 1000, 20),
        "WIPED": range(1, 1000, 20),
        **dict.fromkeys(("MOVED", "VISITED", "CROSSINGS", "LIVE_1", "LIVE_2", "LIVE_3"), range(50)),
        "DRAWN": range(200),
    },
    "shell": {"TROUBLE": range(60), "LOSING": range(60), "SUCCESSIONS": range(5, 20)},
    "operator": {"FAULTS": range(12)},
}


@dataclass(frozen=True)
class Case:
    """One world. ``changes``: fields of the setting that differ, as a JSON object."""

    simulation: str
    setting: str
    seed: int
    changes: str = "{}"

    @property
    def arguments(self) -> list[str]:
        words = ["--simulation", self.simulation, "--setting", self.setting, "--seed", str(self.seed)]
        return words + (["--with", self.changes] if self.changes != "{}" else [])

    @property
    def command(self) -> str:
        return shlex.join([".venv/bin/python", "tests/worlds.py", *self.arguments])


@dataclass(frozen=True)
class Outcome:
    """How a world ended. ``error`` empty: well; ``seconds``: of processor time; ``trace``: the end of a failed one."""

    case: Case
    events: int
    seconds: float
    error: str = ""
    trace: tuple[str, ...] = ()


class Verdict(enum.Enum):
    GOOD = "good"
    RED = "FAILED"
    KNOWN = "KNOWN BEFORE"
    OPEN = "KNOWN, AND OPEN"


def judge(failed: bool, *, recorded: bool, is_open: bool, failed_before: bool | None) -> Verdict:
    """What a world says of this change. ``is_open``: found_seeds.jsonl has it, not mended; ``failed_before``: whether
    it fails on the commit before too, None where that is not known."""
    if not failed:
        return Verdict.GOOD
    if is_open:
        return Verdict.OPEN
    return Verdict.KNOWN if failed_before and not recorded else Verdict.RED


def choose_base(head: str, merge_base: str | None, parent: str | None, changed: bool) -> str | None:
    """The commit before this change: where it left main; else, on main itself, HEAD if files differ from it, and
    HEAD's first parent if none does."""
    if merge_base not in (None, head):
        return merge_base
    return head if changed else parent


def read_found(text: str) -> dict[Case, bool]:
    """The worlds of found_seeds.jsonl, and whether each is mended."""
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return {
        Case(row["simulation"], row["setting"], row["seed"], json.dumps(row.get("with", {}))): row["mended"] is not None
        for row in rows
    }


def found_line(case: Case, commit: str, failed: str) -> str:
    row: dict[str, Any] = {"simulation": case.simulation, "setting": case.setting, "seed": case.seed}
    if case.changes != "{}":
        row["with"] = json.loads(case.changes)
    return json.dumps(row | {"commit": commit, "failed": failed.partition("\n")[0][:200], "mended": None})


@dataclass
class NewSeeds:
    """Which new world comes next: one of the simulation that has used the least of its budget."""

    budgets: dict[str, float]
    first: dict[str, int]
    used: Counter[str] = field(default_factory=Counter)  # seconds, so far
    begun: Counter[str] = field(default_factory=Counter)

    def next(self) -> Case | None:
        shares = {name: self.used[name] / budget for name, budget in self.budgets.items() if budget > 0}
        name = min(shares, key=lambda name: (shares[name], self.begun[name]), default=None)
        if name is None or shares[name] >= 1.0:
            return None
        seed, settings = self.first[name] + self.begun[name], list(RECORDED[name])
        self.begun[name] += 1
        return Case(name, settings[seed % len(settings)], seed)


# ------------------------------------------------------------------ one world


def run_world(case: Case, trace: list[str] | None) -> int:
    """Run a world to its end, and return how many events it had; raises what it finds."""
    changes = json.loads(case.changes)
    if case.simulation == "operator":
        from operator_simulation.random_faults import SETTINGS, run_random_faults

        return run_random_faults(case.seed, trace, **(SETTINGS[case.setting] | changes)).acts
    from syncer_simulation.settings import CORE, SHELL

    kinds: dict[str, Any] = {"core": CORE, "shell": SHELL}[case.simulation]
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
    return choose_base(head, git("merge-base", "HEAD", "origin/main"), git("rev-parse", "HEAD^"), changed)


def fails_on(base: str | None, case: Case) -> bool | None:
    """Whether the commit fails in this world too, with its own simulation; None: it cannot run the world."""
    if base is None:
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
    return True if f"{Verdict.RED.value}: {case.command}" in done.stdout else None


# ------------------------------------------------------------------ many worlds


def run_cases(pool: futures.Executor, cases: Iterator[Case], share: float, until: float) -> Iterator[Outcome]:
    """Run worlds side by side as long as there are some, few have failed, and it is not too late."""
    every, failures = round(1 / share) if share else 0, 0
    running: set[futures.Future[Outcome]] = set()
    while True:
        while len(running) < 2 * (os.cpu_count() or 1) and failures < MOST_FAILURES and time.monotonic() < until:
            case = next(cases, None)
            if case is None:
                break
            running.add(pool.submit(run_case, case, bool(every) and case.seed % every == 0))
        if not running:
            return
        done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
        for one in done:
            failures += bool(one.result().error)
            yield one.result()


def tell_failure(verdict: Verdict, outcome: Outcome, commit: str) -> None:
    print(f"\n{verdict.value}: {outcome.case.command}")
    print(*outcome.trace, sep="\n")
    print(outcome.error[-6000:])
    if verdict is not Verdict.OPEN:
        print(f"for tests/found_seeds.jsonl: {found_line(outcome.case, commit, outcome.error)}", flush=True)


def tell_sum(what: str, outcomes: list[Outcome]) -> None:
    for name in BUDGETS:
        mine = [outcome for outcome in outcomes if outcome.case.simulation == name]
        if mine:
            seeds = [outcome.case.seed for outcome in mine]
            span = f", seeds {min(seeds)} to {max(seeds)}" if what == "new" else ""
            events, seconds = sum(one.events for one in mine), sum(one.seconds for one in mine)
            print(f"{name}: {len(mine)} {what} worlds{span}, {events:,} events, {seconds:.0f} s of processor time")
    sys.stdout.flush()


def run_many(args: argparse.Namespace) -> int:
    found = read_found(FOUND.read_text()) if FOUND.exists() else {}
    chosen = [args.simulation] if args.simulation else list(BUDGETS)
    budgets = {name: getattr(args, name) for name in chosen}
    until = float("inf")
    if args.minutes:
        until = time.monotonic() + 60.0 * args.minutes
        whole = 60.0 * args.minutes * (os.cpu_count() or 1) / sum(budgets.values())
        budgets = {name: budget * whole for name, budget in budgets.items()}
    recorded = [case for case in found if case.simulation in chosen]
    recorded += [Case(name, kind, seed) for name in chosen for kind, some in RECORDED[name].items() for seed in some]
    recorded = list(dict.fromkeys(recorded))
    first = {
        name: args.first if args.first is not None else random.SystemRandom().randrange(10**6, 2**32) for name in chosen
    }
    new = NewSeeds(budgets, first)
    commit = git("rev-parse", "--short", "HEAD") or ""
    red = 0
    with futures.ProcessPoolExecutor(
        os.cpu_count(), multiprocessing.get_context("spawn"), prepare_process, max_tasks_per_child=500
    ) as pool:
        try:
            for what in ("recorded", "new"):
                if args.only not in (None, what) or red:
                    continue
                outcomes: list[Outcome] = []
                cases = iter(recorded) if what == "recorded" else iter(new.next, None)
                for outcome in run_cases(pool, cases, args.hash, until if what == "new" else float("inf")):
                    outcomes.append(outcome)
                    new.used[outcome.case.simulation] += outcome.seconds if what == "new" else 0.0
                tell_sum(what, outcomes)
                for outcome in filter(lambda one: one.error, outcomes):
                    case = outcome.case
                    before = fails_on(args.base or find_base(), case) if what == "new" else None
                    is_open = found.get(case) is False
                    verdict = judge(True, recorded=what == "recorded", is_open=is_open, failed_before=before)
                    tell_failure(verdict, outcome, commit)
                    red += verdict is Verdict.RED
        except futures.process.BrokenProcessPool:
            lines = LOG.read_text().splitlines()
            ended = {line[6:] for line in lines if line.startswith("end ")}
            for begun in [line[6:] for line in lines if line.startswith("begin ")]:
                if begun not in ended:
                    print(f"\n{Verdict.RED.value}: {begun}\nit was running when a process ended: see {LOG}")
            red += 1
    return int(red > 0)


def run_one(case: Case) -> int:
    outcome = run_case(case, True)
    if outcome.error:
        tell_failure(Verdict.RED, outcome, git("rev-parse", "--short", "HEAD") or "")
        return 1
    print(f"good: {case.command}: {outcome.events:,} events, {outcome.seconds:.1f} s of processor time")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run worlds of the simulations: recorded seeds, then new ones.")
    parser.add_argument("--simulation", choices=list(BUDGETS), help="this one only")
    parser.add_argument("--setting", help="with --seed: of this world")
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
    parser.add_argument("--base", help="the commit before this change (where it left origin/main, else HEAD^)")
    args = parser.parse_args()
    LOG.parent.mkdir(exist_ok=True)
    prepare_process()
    if args.seed is None:
        LOG.write_text("")
        return run_many(args)
    if args.simulation is None or args.setting not in RECORDED[args.simulation]:
        parser.error("--seed needs --simulation and a --setting that it has")
    return run_one(Case(args.simulation, args.setting, args.seed, args.changes))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # coroutines of simulated processes that died wait for ever, and Python's own end trips over them
