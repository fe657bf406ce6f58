"""Our arm: ``diloco run`` itself, with the schedule as its ``--chaos``, its trainer at the pace (paced_run.py)."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import sys
from pathlib import Path

from diloco.local.chaos.random_faults import text_of
from diloco.processes.exit_errors import tail
from diloco.processes.launch import Child, StartError, end_all
from diloco.processes.supervisor import Kind
from diloco.processes.workdir import Workdir
from diloco.processes.worker_specs import learner_names, worker_specs
from diloco_protocol.common.files import read_bounded
from diloco_protocol.documents import Report, read_document
from diloco_protocol.vocabulary import EVALUATOR
from lab.compare.arm import ArmError, Record, Tell, hits_of, read_rows
from lab.compare.cpu import CpuMeter
from lab.compare.measures import StepEnd
from lab.compare.plan import OURS, Comparison
from lab.pace import VARIABLE

PACED_RUN = Path(__file__).parents[2] / "paced_run.py"
SAMPLE_SECONDS = 1.0
MOST_REPORT_BYTES = 64 << 20
LATE_SECONDS = 300.0  # beyond the training's time, for the start, the drain and the last score


async def run_ours(plan: Comparison, folder: Path, tell: Tell) -> Record:
    """Run the job to its end in ``folder``, which is emptied first. Raises ArmError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    workdir = Workdir(folder / "run")
    log = folder / "run.log"
    command = [sys.executable, str(PACED_RUN), "run", str(plan.job_file.absolute()), "--workdir", str(workdir.path)]
    command += [word for text in plan.run_overrides() for word in ("--set", text)]
    if plan.schedule:
        command += ["--chaos", text_of(plan.schedule)]
    env = {**os.environ, VARIABLE: f"{plan.pace.step_seconds:g}"}
    try:
        process = await Child.start(OURS, command, env, log)
    except StartError as error:
        raise ArmError(str(error)) from error
    meter = CpuMeter(process.pid)
    try:
        code = await _follow(process, plan, workdir, meter, tell=tell)
    finally:
        await end_all([process], 15.0)
    if code != 0:
        end = "\n".join(tail(log, 8))
        raise ArmError(f"diloco run ended with {code}; the end of {log}:\n{end}")
    return read_record(plan, workdir, meter)


async def _follow(process: Child, plan: Comparison, workdir: Workdir, meter: CpuMeter, tell: Tell) -> int | None:
    waiting = asyncio.ensure_future(process.wait())
    loop = asyncio.get_running_loop()
    deadline = loop.time() + plan.seconds + LATE_SECONDS
    first: float | None = None
    while not waiting.done():
        if loop.time() > deadline:
            raise ArmError(f"diloco run did not end {LATE_SECONDS:g} s after its training's time; see {workdir.logs}")
        meter.sample()
        if first is None and any(path.stem != EVALUATOR for path in workdir.metrics.glob("*.jsonl")):
            first = loop.time()
        tell(0.0 if first is None else loop.time() - first)
        await asyncio.wait([waiting], timeout=SAMPLE_SECONDS)
    return waiting.result().code


def _learner_bytes(report: Report) -> int:
    """Over learners' links, both ways; the evaluator's is none."""
    return sum(row.bytes_up + row.bytes_down for row in report.learners or ())


def read_record(plan: Comparison, workdir: Workdir, meter: CpuMeter) -> Record:
    report = read_document(Report, read_bounded(workdir.report, MOST_REPORT_BYTES))
    steps = [
        StepEnd(worker.learner, row["time"])
        for worker in worker_specs(plan.job)
        if worker.kind is Kind.LEARNER and worker.learner is not None
        for row in read_rows(workdir.metrics / f"{worker.name}.jsonl")
    ]
    if not steps:
        raise ArmError(f"no learner made a step; see {workdir.logs}")
    started = min(step.time for step in steps) - plan.pace.step_seconds
    scores = [
        (int(row["tokens"]), row["time"] - row["seconds"], float(row["loss"]))
        for row in read_rows(workdir.metrics / f"{EVALUATOR}.jsonl")
        if math.isfinite(row["loss"])
    ]
    if plan.job.spec.evaluated and not scores:
        raise ArmError(f"the evaluator left no loss; see {workdir.logs}")
    cores = len(os.sched_getaffinity(0))
    return Record(
        steps,
        hits_of(
            [(row.action, row.target, row.time, row.lasts_seconds) for row in report.faults], learner_names(plan.job)
        ),
        started,
        report.tokens.merged,
        trained_tokens=report.tokens.trained,
        bytes=_learner_bytes(report),
        scores=sorted(scores),
        own={
            "goodput_of_its_report": report.goodput,
            "uptime_of_its_report": report.uptime,
            "merges": report.merges,
            "learners_in_merges": report.learners_in_merges,
            "dropped_tokens": report.tokens.dropped,
        },
        cpu=lambda start, end: meter.share(start, end, cores),
    )
