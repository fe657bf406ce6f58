"""What follows when a process of the run has ended: the supervisor is asked, and what it says is done.

Theory of operation. The supervisor knows counts and errors, and decides. It is told here what it cannot know: whether
the job still needs this process, and whether a merge may come without it. Before it is asked about a worker that left
by itself or failed the status is read once more: the job may be about to end, or there may have been a merge, and
nobody has heard of it yet. A restart waits for its time here; the keeper of the process starts it.

What is still wrong here: asking, showing and waiting are one function, because the screen says when the process comes
back. While it waits, a merge that sets its backoff back is without effect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from diloco.local.outcome import RunOutcome
from diloco.local.runner.run_end import RunEnd
from diloco.local.runner.run_part import RunPart
from diloco.processes.exit_errors import ExitError
from diloco.processes.supervisor import Abandon, Exit, Fail, Finished, Kind, Restart, describe_end
from diloco.processes.worker_specs import WorkerSpec


@dataclass(kw_only=True)
class ProcessEnds(RunPart):
    """``poll_now`` reads the syncer's status; an ended phase ends the run."""

    end: RunEnd
    poll_now: Callable[[], Awaitable[bool]]

    async def wait_to_restart(self, worker: WorkerSpec, how: Exit, error: ExitError | None) -> bool:
        """Do what the supervisor says about an end; True: start it again now, if the run
        still goes on."""
        if (how.code == 0 or error is not None) and worker.kind is not Kind.SYNCER:
            # It may have left because the job ends, which we have not heard yet, or there may have been a merge.
            await self.poll_now()
        text = "" if error is None else error.text
        decision = self.supervisor.ended(
            worker.name,
            worker.kind,
            how,
            time.monotonic(),
            wanted=self._is_still_needed(worker, how),
            error=text,
            answered=self.health.watchdog.answers,
            dispensable=worker.kind is Kind.LEARNER and self._is_dispensable(worker),
        )
        if isinstance(decision, Restart):
            delay = max(0.0, decision.at - time.monotonic(), self.injector.away_seconds(worker.name))
            again = f"again in {delay:.1f} s" if delay > 0 else "again at once"
            said = self._describe_repeated(worker, error)
            self.screen.event(
                f"{worker.name} ended ({describe_end(worker.kind, how)}{said}), starting it {again}", "yellow"
            )
            self.errors.show(worker.name, error, self.screen)
            self.watch.view.notes[worker.name] = "starting"
            await asyncio.sleep(delay)
            return True
        if isinstance(decision, Abandon):
            self.errors.show(worker.name, error, self.screen)
            self.screen.event(f"{decision.message}; see {self.workdir.log(worker.name)}", "red")
        elif isinstance(decision, Fail):
            said = decision.message if text in decision.message else f"{decision.message}: {text}"
            self.end.decide(RunOutcome("failed", decision.exit_code, said, worker.name))
        elif isinstance(decision, Finished) and not self.end.stopping and (how.signal is not None or how.code):
            self.screen.event(f"{worker.name} ended ({describe_end(worker.kind, how)})", "yellow")
            self.errors.show(worker.name, error, self.screen)
        return False

    def _describe_repeated(self, worker: WorkerSpec, error: ExitError | None) -> str:
        """Of an error that was shown before: what it was, and how often its process was replaced by now."""
        if error is None or not self.errors.was_shown(error):
            return ""
        text = f": {error.brief}"
        times, most = self.supervisor.since_merge.get(worker.name, 0), self.supervisor.max_replacements
        return f"{text}; replacement {times} of at most {most} without a merge" if times else text

    def _is_dispensable(self, worker: WorkerSpec) -> bool:
        """Whether a merge may come without this learner: enough others are in the quorum, or have not failed and may
        yet join."""
        status = self.watch.view.status
        required = self.job.spec.quorum if status is None else status.quorum.required
        learners = (one.name for one in self.watch.workers if one.kind is Kind.LEARNER)
        others = [name for name in learners if name != worker.name]
        return sum(self._is_in_quorum(name) or not self.supervisor.has_failed(name) for name in others) >= required

    def _is_in_quorum(self, name: str) -> bool:
        slot = self.watch.slot_of(name) if name in self.running else None
        return slot is not None and slot.in_quorum

    def _is_still_needed(self, worker: WorkerSpec, how: Exit) -> bool:
        """Whether the job still needs a process that ended so."""
        if self.end.stopping or self.end.is_interrupted:
            return False
        if self.watch.is_over:  # the next syncer writes what is left of the model
            return worker.kind is Kind.SYNCER and self.watch.is_writing_output
        if worker.kind is Kind.LEARNER:
            # In deterministic mode a learner leaves by itself when its share is done.
            done = self.job.spec.sync.deterministic and how.code == 0
            return not self.watch.closing and not done
        return True
