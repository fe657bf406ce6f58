"""What ends a run, and how: the one place that decides its outcome.

Theory of operation. The first decision counts, and all that comes later is without effect. *Complete* and *failed* come
from the syncer's phase, failed also from the supervisor. Before the first process of the job is started, a signal ends
the run at once, and nothing of it is kept. After that, Ctrl-C (and SIGTERM, SIGHUP) asks the syncer to interrupt:
learners offer their work and leave, the syncer makes its checkpoint, and the run ends with 130. A second one, a second
or more later, kills everything at once. Signals that are closer together are one wish.

A drain is waited for as long as it progresses: ``DRAIN_SECONDS`` without any change and it is given up, and so it is
after ``MAX_DRAIN_SECONDS`` in all. The end of a drain is not decided here: the syncer's last phase tells it.

What is still wrong here: the outcome, the wish to interrupt and ``stopping`` are three facts that only together say
where the end is, and every reader combines them in its own way. One state (running, interrupted, stopping, ended) would
be better. Waits look ten or fifty times a second at what could wake them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time

from diloco.local.outcome import OUTCOMES, REFUSED, RunOutcome, ended_phase
from diloco.local.runner.run_part import RunPart
from diloco.processes.launch import SAME_SIGNAL_SECONDS, ForkServerClient
from diloco.processes.stop_signals import stop_reason
from diloco.processes.supervisor import Exit
from diloco.syncer_client import SyncerError
from diloco_protocol.documents import Report
from diloco_protocol.vocabulary import ENDED_PHASES, ControlMethod, JobPhase, SyncerExit

DRAIN_SECONDS = 10.0  # after Ctrl-C, without any progress of learners that offer their work and a syncer that ends
MAX_DRAIN_SECONDS = 600.0
_FOLLOWS: dict[str, str] = {
    JobPhase.EVALUATING: "the stop was reached, and the merged model is evaluated to the end",
    JobPhase.COMPLETE: "the job is complete already, and its processes leave",
    JobPhase.FAILED: "the job has failed already, and its processes leave",
}
LEAVE_SECONDS = 10.0  # after the job's end, for processes to leave by themselves


@dataclasses.dataclass(kw_only=True)
class RunEnd(RunPart):
    forkserver: ForkServerClient
    stopping: bool = False  # nothing is started or waited for any more
    has_started: bool = False  # the job's checks are over
    _interrupts: int = 0
    _interrupted_at: float = 0.0
    _outcome: RunOutcome | None = None
    _decided: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def is_interrupted(self) -> bool:
        """Whether the user wants the run to end."""
        return self._interrupts > 0

    async def wait_for_outcome(self) -> RunOutcome:
        """How the run ends, once that is decided."""
        await self._decided.wait()
        assert self._outcome is not None
        return self._outcome

    # -------------------------------------------------------------- decisions

    def decide(self, outcome: RunOutcome) -> None:
        """End the run so, unless it ends already."""
        if self._outcome is None:
            self._outcome = dataclasses.replace(outcome, log_begin=self.errors.log_begin(outcome.log_of))
            self._decided.set()

    def decide_by_phase(self, phase: str) -> None:
        """End the run as the syncer's last phase says."""
        outcome, code = OUTCOMES.get(phase, ("failed", 1))
        output = self.watch.output
        if phase == JobPhase.COMPLETE and output is not None and output.state == "failed":
            text = f"the merged model was not written to {output.uri}: {output.message}"
            self.decide(RunOutcome(outcome, 1, text))
            return
        note = self.supervisor.vain_replacements() if outcome != "complete" else ""
        self.decide(RunOutcome(outcome, code, self.watch.end_message if code else "", note=note))

    def decide_if_over(self) -> None:
        """No syncer comes any more: if one has ended the job, that was its last word."""
        if self.watch.is_over:
            heard, report = self.watch.phase, self.watch.report
            self.decide_by_phase(heard if self.watch.ended or report is None else ended_phase(report))

    def last_phase(self, how: Exit) -> str | None:
        """The phase in which a syncer that has ended by itself ended the job; None: it was only asked to stop, or its
        own end was not the job's."""
        if how.code not in (SyncerExit.OK, SyncerExit.FAILED):
            return None
        if (report := self.stored_report()) is not None:
            self.watch.report = report  # its last word: what was heard before may be older
        failed = how.code == SyncerExit.FAILED
        last = self.watch.phase if report is None else ended_phase(report)
        if last in ENDED_PHASES and (last == JobPhase.FAILED) == failed:
            return last
        return JobPhase.SUSPENDED if self.is_interrupted and not failed else None

    def stored_report(self) -> Report | None:
        """The report that the last syncer left if it ended the job: it may be gone before anyone could ask it."""
        address = self.syncer.address()
        return None if address is None else self.workdir.last_report(int(address["epoch"]))

    # -------------------------------------------------------------- the user's wish

    def on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._interrupts and now < self._interrupted_at + SAME_SIGNAL_SECONDS:
            return
        self._interrupts += 1
        self._interrupted_at = now
        if not self.has_started:
            self.stopping = True
            self._kill_all()
            self.decide(RunOutcome(REFUSED, 130, f"{stop_reason(number)}, before the job began: nothing is kept"))
        elif self._interrupts == 1:
            closed = ", the terminal was closed" if number == signal.SIGHUP else ""
            follows = _FOLLOWS.get(self.watch.phase, "learners offer their work, then a checkpoint")
            self.screen.event(f"interrupted{closed}: {follows} (again after a second or more: stop at once)", "bold")
            self.spawn(self._interrupt(stop_reason(number)))
        else:
            self.screen.event("stopping at once", "bold red")
            self.stopping = True
            self._kill_all()
            self.decide(RunOutcome("interrupted", 130))

    async def _interrupt(self, reason: str) -> None:
        await self.watch.poll(now=True)
        started = self.watch.phase not in ("", JobPhase.WAITING)
        try:
            if not started:
                raise SyncerError("nothing has been trained yet")
            await self.syncer.call(ControlMethod.ANNOUNCE, {"phase": "interrupted", "message": reason})
            await self._wait_for_drain()
            if self.watch.is_over:
                return  # it drained; a process that does not leave is waited for elsewhere
            self.screen.event(
                f"the job did not drain: nothing changed for {DRAIN_SECONDS:.0f} s; its last durable state is kept",
                "red",
            )
        except SyncerError:
            pass  # there is nobody to drain to; what is durable stays
        self.decide(RunOutcome("interrupted", 130, reason, note=self.supervisor.vain_replacements()))

    async def _wait_for_drain(self) -> None:
        """Until the job is over, or its drain does not progress any more."""
        began = changed_at = time.monotonic()
        before = None
        while not self.watch.is_over and time.monotonic() < min(changed_at + DRAIN_SECONDS, began + MAX_DRAIN_SECONDS):
            if (seen := self.watch.drain_progress) != before:
                before, changed_at = seen, time.monotonic()
            await asyncio.sleep(0.1)

    def _kill_all(self) -> None:
        for process in self.running.values():
            process.signal(signal.SIGKILL)
        self.forkserver.kill()

    # -------------------------------------------------------------- after the decision

    async def wait_for_exits(self) -> None:
        """Let the processes go by themselves, where the syncer has told them to."""
        outcome = self._outcome
        assert outcome is not None
        if outcome.outcome == "failed" and outcome.log_of and "syncer" in self.running and not self.stopping:
            with contextlib.suppress(SyncerError):
                await self.syncer.call(
                    ControlMethod.ANNOUNCE, {"phase": "failed", "message": outcome.message}, seconds=2.0
                )
        if self.watch.report is None and "syncer" in self.running and not self.stopping:
            await self.watch.fetch_report()
        deadline = time.monotonic() + (LEAVE_SECONDS if self.watch.is_over else 0.0)
        while self.running and time.monotonic() < deadline and not self.stopping:
            await asyncio.sleep(0.02)
