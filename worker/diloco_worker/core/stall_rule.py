"""When a learner that makes no step has stalled: a hung kernel, collective or loader, which no exception tells of.

Theory of operation
-------------------
The training thread counts signs of life: a step made, a batch handed out, each turn of a wait for the syncer. A
watchdog observes the count now and then (``StallRule.observe``). While it stands still in a learner that trains, idle
time adds up; from ``limit`` on the learner has stalled.

The limit is ``learners.stallSeconds``, and at least FACTOR times the median step. Before the process's first step it is
FIRST_STEP times as long, because that step may compile the model.

Between two observations no more than twice the watchdog's interval counts. A process that was stopped as a whole
(SIGSTOP, a machine that sleeps) was not observed meanwhile, and goes on.

Example: stallSeconds 600, steps of 40 s. The limit is 800 s, and 3,600 s before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 20.0  # of the median step, the least limit
FIRST_STEP = 6.0  # the limit before the first step, of stallSeconds


@dataclass(frozen=True, slots=True)
class LifeSigns:
    """What is observed of a learner. ``trains``: it is in its loop, holds a slot, and its job trains. ``signs``: how
    many signs of life there were. ``steps``: that this process has made; ``step_seconds``: their median."""

    trains: bool
    signs: int
    steps: int
    step_seconds: float


class StallRule:
    """``stall_seconds`` None: nothing ever counts as stalled. ``interval``: seconds between two observations."""

    def __init__(self, stall_seconds: float | None, interval: float) -> None:
        self.idle_seconds = 0.0  # without a sign of life
        self._stall_seconds = stall_seconds
        self._interval = interval
        self._observed_at: float | None = None
        self._signs = -1
        # Idle seconds from which on it has stalled; None: never, or nothing was observed yet.
        self.limit: float | None = None

    @property
    def suspect(self) -> bool:
        """Whether half of the limit is over."""
        return self.limit is not None and 2 * self.idle_seconds >= self.limit

    @property
    def stalled(self) -> bool:
        """Whether the limit is over."""
        return self.limit is not None and self.idle_seconds >= self.limit

    def observe(self, now: float, life: LifeSigns) -> None:
        """Take an observation at ``now``, seconds of a clock that never goes back."""
        passed = 0.0 if self._observed_at is None else now - self._observed_at
        self._observed_at = now
        if self._stall_seconds is not None:
            first = FIRST_STEP if life.steps == 0 else 1.0
            self.limit = max(self._stall_seconds * first, FACTOR * life.step_seconds)
        if not life.trains or life.signs != self._signs:
            self._signs = life.signs
            self.idle_seconds = 0.0
        else:
            self.idle_seconds += min(passed, 2 * self._interval)
