"""Follows a job by its syncer's status, twice a second: faults, metrics, texts for the screen, and the run's end.

Theory of operation. ``poll`` is the only reader of the status of a run, and everything that follows from a new status
follows there: the syncer is alive, who has not joined is told of, and a job that has ended ends the run. Keepers of
processes call it too, before they judge an end. ``follow`` is the loop around it; it never returns, and is cancelled
with the run.

What is still wrong here: after an interrupt the drain is followed by this loop and waited for by ``run_end``, which
compares what this loop has read. Faults, metrics and the status share one loop: while a look waits for a syncer that
does not answer (two seconds), no fault is carried out and no line of metrics is written.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from diloco.local.metrics_log import MetricsLog
from diloco.local.runner.run_end import RunEnd
from diloco.local.runner.run_part import RunPart
from diloco.processes.data_found import DataFound
from diloco.processes.supervisor import Kind
from diloco.processes.unjoined import UnjoinedLearners, unjoined_text
from diloco_protocol.vocabulary import TRAINING_PHASES

POLL_SECONDS = 0.5
POLL_CHAOS_SECONDS = 0.1  # while faults are still to come
METRICS_SECONDS = 1.0
LAST_SECONDS = 20.0  # of the call that a syncer has to answer before it is killed


@dataclass(kw_only=True)
class JobFollower(RunPart):
    data_found: DataFound
    end: RunEnd
    _unjoined: UnjoinedLearners = field(default_factory=UnjoinedLearners)
    _next_metrics: float = 0.0  # monotonic seconds

    async def poll(self, now: bool = False, seconds: float | None = None) -> bool:
        """Read the syncer's status, False if it does not answer (in ``seconds``, if given); an ended phase ends the
        run. ``now``: one of before this call will not do."""
        answered = await self.watch.poll(now, seconds)
        if answered:
            self.health.watchdog.on_answered(time.monotonic())
        self.health.sample_rss()
        if answered:
            self._tell_unjoined()
        if answered and self.watch.is_settled:
            self.end.decide_by_phase(self.watch.phase)
        return answered

    async def follow(self, metrics: MetricsLog) -> None:
        """Carry out faults, write metrics and read the status, until the run ends."""
        while True:
            self.injector.step()
            for text, style in self.data_found.news():
                self.screen.event(text, style)
            self._write_metrics(metrics)
            await asyncio.sleep(POLL_CHAOS_SECONDS if self.injector.waiting else POLL_SECONDS)
            if await self.poll() or not (why := self.health.reason_to_kill()):
                continue
            if not await self.poll(seconds=LAST_SECONDS):  # one on a busy machine answers late, and works
                self.screen.event(f"{why}; it is killed", "red")
                self.health.kill()

    def _write_metrics(self, metrics: MetricsLog) -> None:
        if time.monotonic() < self._next_metrics:
            return
        self._next_metrics = time.monotonic() + METRICS_SECONDS
        view = self.watch.view
        try:
            metrics.write(view.status if view.serving else None)
            if view.serving:  # `diloco status` has figures of this run now: the report before is stale
                self.workdir.report.unlink(missing_ok=True)
        except OSError as error:  # a full disk: the job's own state has its own handling
            self._next_metrics = float("inf")
            self.screen.event(f"no more metrics are written: {error}", "red")

    def _tell_unjoined(self) -> None:
        if self.watch.phase not in TRAINING_PHASES:
            return
        learners = [one.name for one in self.watch.workers if one.kind is Kind.LEARNER and one.name in self.running]
        running = {name: self.watch.process_ids[name] for name in learners}
        unjoined = {name: one for name, one in running.items() if not self.watch.has_joined(one)}
        for name in self._unjoined.find(time.monotonic(), unjoined):
            self.screen.event(unjoined_text(name, self.workdir.log(name)), "yellow")
