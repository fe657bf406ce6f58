"""``bench/chaos.py``: draw the faults, find the pace, run each arm once, write the report.

What is finished is kept in the report's folder under a digest of what makes it, so that the same command goes on where
it stopped. Progress and the time left go to stderr.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from diloco.console import COMPLETE, FAILED, CommandError, print_text
from diloco.local.chaos.random_faults import draw_schedule, schedule_document, text_of
from diloco.local.chaos.schedule import ChaosError, Fault, check, parse
from diloco.local.report import write_text
from diloco.processes.worker_specs import learner_names
from diloco.validate import read_job_file
from diloco_protocol.common.files import PUBLIC, write_whole
from diloco_protocol.spec.job import DiLoCoJob, spec_digest
from lab.compare.arm import ArmError, ArmResult, Record, Tell, measure_arm
from lab.compare.baselines import calibrate, run_baseline
from lab.compare.ours import run_ours
from lab.compare.plan import (
    BASELINES,
    END_SECONDS,
    OURS,
    START_SECONDS,
    Comparison,
    Pace,
    choose_pace,
    job_overrides,
    mean_seconds_between_kills,
)
from lab.compare.report import document
from lab.figures import ResultDocument, render_page
from lab.markdown import render_markdown

TELL_SECONDS = 10.0


class Defaults(NamedTuple):
    """What holds where the command line is silent. ``mtbf``: seconds; ``overrides``: before the given ones."""

    minutes: float
    mtbf: float
    overrides: tuple[str, ...]


LONG = Defaults(5.0, 60.0, ())
QUICK = Defaults(0.2, 6.0, ("regions.0.learners=2",))  # about a minute: does it run, not how it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """``chaos``: a schedule instead of a random one. ``step_seconds`` None: by calibration. ``repair`` None: a sixth
    of ``mtbf``. All seconds but ``minutes``. ``arm_overrides``: those of one arm alone, ``ARM:PATH=VALUE``."""

    job: Path
    report: Path | None = None
    compare: str = "ddp"
    mtbf: float = LONG.mtbf
    repair: float | None = None
    minutes: float = LONG.minutes
    seed: int = 0
    chaos: str = ""
    step_seconds: float | None = None
    overrides: Sequence[str] = field(default_factory=tuple)
    arm_overrides: Sequence[str] = field(default_factory=tuple)
    dry_run: bool = False
    as_json: bool = False


def compare(options: CompareOptions) -> int:
    """Run the comparison; the exit code: 0, or 1 where an arm could not be run. Raises CommandError."""
    baselines = _baselines(options.compare)
    seconds = options.minutes * 60
    given = {"--minutes": options.minutes, "--mtbf": options.mtbf, "--repair": options.repair}
    for option, value in {**given, "--step-seconds": options.step_seconds}.items():
        if value is not None and not 0 < value < math.inf:
            raise CommandError(f"{option} {value:g}: it must be a number above 0")
    overrides = job_overrides(options.overrides, seconds, options.seed)
    job = read_job_file(options.job, overrides)
    if any(region.spares for region in job.spec.regions):
        raise CommandError(f"{options.job}: no baseline has spare machines; compare it with --set regions.0.spares=0")
    if any(region.batch or region.most_learners > region.learners for region in job.spec.regions):
        raise CommandError(
            f"{options.job}: baselines have one batch and a fixed number of learners;"
            " leave maxLearners and regions[].batch out"
        )
    if job.spec.learners.command is not None:
        raise CommandError(
            f"{options.job}: learners.command is a program of its own, which has no pace and no baseline;"
            " compare a job of the built-in trainer"
        )
    own = _arm_overrides(options.arm_overrides, [OURS, *baselines])
    jobs = {name: read_job_file(options.job, [*overrides, *own[name]]) for name in own}
    schedule = _schedule(options, job, seconds)
    if options.dry_run:
        print_text(json.dumps(schedule_document(schedule)) if options.as_json else text_of(schedule))
        return COMPLETE
    # The programs run in the job file's folder, so a path of this process's own means another place there.
    folder = (options.report or Path("runs") / f"chaos-{job.metadata.name}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--report {folder}: {error.strerror or error}; name a folder that can be written") from None
    progress = ArmProgress(seconds, list(own))
    pace = asyncio.run(_pace(options, job, folder, progress))
    mtbf = mean_seconds_between_kills(schedule, seconds)
    plan = Comparison(options.job, overrides, job, schedule, seconds=seconds, mtbf_seconds=mtbf, pace=pace)
    progress.say(f"{len(schedule)} faults in {seconds:g} s; a step takes {pace.step_seconds:g} s")
    plans = {name: replace(plan, job=jobs[name], overrides=(*overrides, *own[name])) for name in own}
    arms, failed = asyncio.run(_run_arms(plans, folder, progress))
    report = document(plan, arms, failed, own, cores=len(os.sched_getaffinity(0)))
    page = ResultDocument.model_validate(report)
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "report.md", render_markdown(page))
    write_text(folder / "report.html", render_page(page))
    print_text(json.dumps(report, indent=1) if options.as_json else render_markdown(page), flush=True)
    progress.say(f"the report is in {folder}")
    return FAILED if failed else COMPLETE


def _baselines(text: str) -> list[str]:
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names:
        raise CommandError(f"--compare: name a baseline; there are {', '.join(BASELINES)}")
    for name in names:
        if name not in BASELINES:
            raise CommandError(f"--compare: there is no baseline {name!r}; there are {', '.join(BASELINES)}")
        if name == "torchft" and importlib.util.find_spec("torchft") is None:
            raise CommandError(
                "--compare torchft: the package torchft is not installed here; pip install torchft, or leave it out"
            )
    return names


def _schedule(options: CompareOptions, job: DiLoCoJob, seconds: float) -> tuple[Fault, ...]:
    learners = job.spec.slots
    repair = options.mtbf / 6 if options.repair is None else options.repair
    try:
        if not options.chaos:
            return draw_schedule(options.seed, learners, options.mtbf, repair, seconds=seconds)
        schedule = check(parse(options.chaos), learner_names(job))
    except ChaosError as error:
        raise CommandError(str(error)) from error
    for fault in schedule:
        if fault.syncer or fault.learner is None or fault.at_step is not None or fault.action == "term":
            raise CommandError(
                f"--chaos {fault.text}: a comparison takes kill, pause, cut and slow of one named learner at a time,"
                " for the others have no syncer, no drain and no slots; leave it out, or use diloco run --chaos"
            )
        if fault.after_seconds is not None and fault.after_seconds >= seconds:
            raise CommandError(f"--chaos {fault.text}: the arms end after {seconds:g} s; raise --minutes")
    return schedule


def _arm_overrides(given: Sequence[str], arms: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Each arm's own overrides. Raises CommandError for an arm that there is not, and for what all have alike."""
    own: dict[str, tuple[str, ...]] = dict.fromkeys(arms, ())
    for text in given:
        name, colon, override = text.partition(":")
        if not colon or name not in own:
            raise CommandError(f"--set-arm {text}: write ARM:PATH=VALUE, where ARM is one of {', '.join(arms)}")
        if not override.startswith(("training.optimizer.", "sync.")):
            raise CommandError(
                f"--set-arm {text}: one arm's own settings are below training.optimizer and sync; model, data, batch,"
                " seed, stop and faults are the same for all"
            )
        own[name] = (*own[name], override)
    return own


async def _run_arms(
    plans: Mapping[str, Comparison], folder: Path, progress: ArmProgress
) -> tuple[dict[str, ArmResult], dict[str, str]]:
    """Each arm by its own plan, one after another: results by name, and why the others have none."""
    arms: dict[str, ArmResult] = {}
    failed: dict[str, str] = {}
    for name, plan in plans.items():
        try:
            arms[name] = await _arm(name, plan, folder, progress)
        except ArmError as error:
            failed[name] = str(error).splitlines()[0]
            print_text(f"error: {name}: {error}", file=sys.stderr)
    return arms, failed


async def _pace(options: CompareOptions, job: DiLoCoJob, folder: Path, progress: ArmProgress) -> Pace:
    kept = folder / "arms" / f"pace-{spec_digest(job)[:16]}.json"
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        progress.say("measuring how long a step computes")
        try:
            found = await calibrate(job, options.job.absolute().parent, folder / "work" / "calibration")
        except ArmError as error:
            raise CommandError(f"the job's step cannot be measured: {error}", FAILED) from error
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, json.dumps(found).encode(), mode=PUBLIC)
    chosen = choose_pace(found["cpu_seconds"], found["tokens"], job.spec.slots, len(os.sched_getaffinity(0)))
    if options.step_seconds is None:
        return chosen
    return Pace(options.step_seconds, chosen.tokens, chosen.cpu_seconds)


async def _arm(name: str, plan: Comparison, folder: Path, progress: ArmProgress) -> ArmResult:
    kept = folder / "arms" / f"{name}-{plan.digest(name)}.json"
    if (known := ArmResult.load(kept)) is not None:
        progress.finish(name, "was run before")
        return known
    work, tell = folder / "work" / name, progress.teller(name)
    result = measure_arm(name, plan, await _run(name, plan, work, tell))
    result.save(kept)
    progress.finish(name, f"goodput {result.goodput:.2f}, {result.kept_tokens:,} tokens in the model")
    return result


async def _run(name: str, plan: Comparison, work: Path, tell: Tell) -> Record:
    if name == OURS:
        return await run_ours(plan, work, tell)
    return await run_baseline(name, plan, work, tell)


class ArmProgress:
    """Says on stderr how far the arms are, with the time left of all of them."""

    def __init__(self, seconds: float, arms: Sequence[str]) -> None:
        self._seconds = seconds
        self._left = list(arms)
        self._next = 0.0

    def say(self, text: str) -> None:
        print_text(text, file=sys.stderr, flush=True)

    def finish(self, arm: str, text: str) -> None:
        """This arm is done."""
        self._left.remove(arm)
        self.say(f"{arm}: {text}")

    def teller(self, arm: str) -> Tell:
        """What an arm calls with its seconds of training; a line comes every ``TELL_SECONDS``."""

        def show_seconds(over: float) -> None:
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + TELL_SECONDS
            each = self._seconds + START_SECONDS + END_SECONDS
            left = max(0.0, len(self._left) * each - (over + START_SECONDS if over else 0.0))
            self.say(f"{arm}: {min(over, self._seconds):.0f} of {self._seconds:g} s; about {_span(left)} left in all")

        return show_seconds


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
