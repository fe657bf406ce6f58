"""Whether and when a process that ended is started again.

The runner reports every end of a process and is told what to do: start it again at
a given time, stop trying, or nothing because the end was as it should be. The rules:

* The first replacement of a process comes at once. One that ends again and again without having been in a merge comes
  back after 0.5 s, 1 s, 2 s, ... up to 30 s, each with jitter of ± 50 %, so that processes which broke together do not
  come back together. One that was in a merge since it started is healthy, and its next replacement comes at once.
* More than ``failurePolicy.maxReplacements`` replacements of one learner, or of the syncer, without any merge in
  between, and the job has failed: something is wrong that another start will not cure. Every merge sets the counts back
  to zero.
* One process that ended ``SAME_ERRORS`` times with the same error, before any merge of the job, and the job has failed
  at once: its program is wrong. So has it if the syncer ended so often before its first answer. Where enough other
  learners for a merge are left, the failures of one learner are its own.
* Some exit codes say that a start is in vain (docs/contracts.md): 2, the configuration is wrong; 4, the syncer refused
  the learner for good (one that was in a merge has lost its place to another, and may come back to stand by); for the
  syncer 3, a higher epoch has the store, 4, the store cannot be written, and 5, its credentials cannot be used.
  ``failurePolicy.rules`` come before this for learners: replace and count, replace and do not count, or fail. An exit
  code that one names to be replaced is never the same error again.
* The evaluator never makes the job fail: after ``EVALUATOR_RESTARTS`` vain starts the job goes on without it.

Time and randomness come in as arguments; nothing here sleeps or looks at a clock.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from diloco_protocol.common.program_errors import SAME_ERRORS, RepeatedErrors, repeated_text, shorten
from diloco_protocol.vocabulary import SyncerExit, WorkerExit

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
EVALUATOR_RESTARTS = 5

WORKER_IN_VAIN: dict[int, str] = {
    WorkerExit.CONFIGURATION: "its configuration is wrong",
    WorkerExit.REFUSED: "the syncer refused it for good",
}
WORKER_FAULTS: dict[int, str] = {WorkerExit.DIVERGED: "training diverged", WorkerExit.STALLED: "training stalled"}
SYNCER_IN_VAIN: dict[int, str] = {
    SyncerExit.CONFIGURATION: "the job or its arguments are wrong",
    SyncerExit.SUPERSEDED: "another syncer has taken over this job's store",
    SyncerExit.STORE: "its store cannot be written",
    SyncerExit.CREDENTIALS: "its credentials cannot be used",
}


class Kind(StrEnum):
    LEARNER = "learner"
    EVALUATOR = "evaluator"
    SYNCER = "syncer"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: with ``code``, or by ``signal``; exactly one is set."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


def describe_end(kind: Kind, how: Exit) -> str:
    """How a process of this kind ended, in words where its exit code has some."""
    words = None if kind is Kind.SYNCER or how.code is None else WORKER_FAULTS.get(how.code)
    return f"{how}: {words}" if words else str(how)


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again at ``at`` (the caller's monotonic seconds)."""

    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The process is not needed any more."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Go on without this process (the evaluator)."""

    message: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The job has failed; ``exit_code`` is what the runner exits with."""

    message: str
    exit_code: int


Decision = Restart | Finished | Abandon | Fail


@dataclass(slots=True)
class Supervisor:
    """See the module's text. ``rng`` gives the jitter; ``max_replacements`` is the job's."""

    max_replacements: int
    rng: random.Random
    rules: Sequence[tuple[frozenset[int], str]] = ()  # learners' exit codes -> Replace | Ignore | Fail
    since_merge: dict[str, int] = field(default_factory=dict)  # failures of each process
    restarts: dict[str, int] = field(default_factory=dict)
    any_merge: bool = False  # whether the job has had a merge, in an earlier run perhaps
    _errors: RepeatedErrors = field(default_factory=RepeatedErrors)
    _last_errors: dict[str, str] = field(default_factory=dict)  # of each process
    _unanswered: int = 0  # syncers in a row that ended before their first answer
    _vain: dict[str, int] = field(default_factory=dict)  # ends in a row without a merge in between
    _was_in: set[str] = field(default_factory=set)  # in a merge since their start

    def merged(self) -> None:
        """The job's number of merges has risen."""
        self.any_merge = True
        self.since_merge.clear()

    def healthy(self, name: str) -> None:
        """This process was in a merge (the syncer: made one; the evaluator: evaluated)."""
        self._vain[name] = 0
        self._was_in.add(name)

    def ended(
        self,
        name: str,
        kind: Kind,
        how: Exit,
        now: float,
        *,
        wanted: bool,
        error: str = "",
        answered: bool = True,
        dispensable: bool = False,
    ) -> Decision:
        """``name`` ended. ``wanted`` says whether the job still needs it, ``error`` which error ended it (empty: none,
        or the run did it itself), ``answered`` of the syncer whether it had ever answered, ``dispensable`` of a learner
        whether enough others for a merge are left."""
        if not wanted:
            return Finished()
        if error:
            self._last_errors[name] = error
        end = describe_end(kind, how)
        in_vain = SYNCER_IN_VAIN if kind is Kind.SYNCER else WORKER_IN_VAIN
        why = in_vain.get(how.code) if how.code is not None else None
        if kind is Kind.LEARNER and how.code == WorkerExit.REFUSED and name in self._was_in:
            why = None  # it was a worker, and lost its place to another process: it may stand by
        self._was_in.discard(name)
        if kind is Kind.EVALUATOR:
            tries = self._vain.get(name, 0)
            if why is not None or tries >= EVALUATOR_RESTARTS:
                reason = why or f"it ended {tries + 1} times in a row ({end})"
                return Abandon(f"giving up on the {name}: {reason}; the job continues without evaluation")
            return self._restart(name, now)
        rule = None
        if kind is Kind.LEARNER and how.code is not None:
            rule = next((action for codes, action in self.rules if how.code in codes), None)
        if rule == "Fail":
            return Fail(f"{name} ended with {end}, for which failurePolicy.rules says Fail", 1)
        if rule == "Ignore":
            return self._restart(name, now)
        if why is not None and rule is None:
            return Fail(f"{name} ended with {how}: {why}", 2 if how.code in (2, 5) else 1)
        failures = self.since_merge.get(name, 0)
        if failures >= self.max_replacements:
            return Fail(
                f"{name} ended with {end}, and {failures} replacements of it since the last merge"
                " did not help"
                f" (failurePolicy.maxReplacements: {self.max_replacements})",
                1,
            )
        if rule is None and (
            again := self._repeated(name, kind, end, error, answered=answered, dispensable=dispensable)
        ):
            return Fail(f"{again} (failurePolicy.maxReplacements, {self.max_replacements}, is not used up)", 1)
        self.since_merge[name] = failures + 1
        return self._restart(name, now)

    def vain_replacements(self) -> str:
        """Which processes were replaced for an error since the last merge, how often and why; empty: none."""
        parts = []
        for name, times in sorted(self.since_merge.items()):
            if error := self._last_errors.get(name):
                often = f"{times} time{'s' * (times != 1)}"
                parts.append(f"{name} was replaced {often}, at last for: {shorten(error, 160)}")
        return f"since the last merge {'; '.join(parts)}" if parts else ""

    def has_failed(self, name: str) -> bool:
        """Whether an error has ended this process since the run began."""
        return name in self._last_errors

    def _repeated(self, name: str, kind: Kind, end: str, error: str, answered: bool, dispensable: bool) -> str:
        """Why another start is of no use, as the ones before were not; empty: it may be."""
        if kind is Kind.SYNCER:
            self._unanswered = self._unanswered + 1 if error and not answered else 0
            if self._unanswered >= SAME_ERRORS:
                return f"{name} ended {self._unanswered} times before it answered ({end}): {error}"
        times = 0 if self.any_merge else self._errors.add(name, error)
        if times < SAME_ERRORS or dispensable:
            return ""
        return repeated_text(name, times, error)

    def _restart(self, name: str, now: float) -> Restart:
        tries = self._vain.get(name, 0)
        self._vain[name] = tries + 1
        self.restarts[name] = self.restarts.get(name, 0) + 1
        if tries == 0:
            return Restart(now)
        backoff = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(tries - 1, 16))
        return Restart(now + backoff * self.rng.uniform(0.5, 1.5))
