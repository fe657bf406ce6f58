"""The pace of an emulated machine: every step takes the same time, and what the arithmetic leaves of it is slept.

Theory of operation
-------------------
Learners that share a few cores slow each other down, so what happens to one would change the speed of all. With
``LAB_STEP_SECONDS`` a step takes that long however little it computes: with cores to spare, learners no longer
notice each other, and a comparison of programs compares how they meet and recover. Whoever reports figures of a paced
run says that they are.

The time is that of the *machine's clock*, which stands while the process is stopped: a thread counts in ticks, and a
tick that came late by more than ``STOPPED_SECONDS`` counts as one. So a machine that is stopped for half of the time
needs twice as long for a step, which by the wall clock alone would pass unnoticed while it sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from diloco_worker.settings import ConfigurationError

VARIABLE = "LAB_STEP_SECONDS"  # reaches every process of a run: it is no setting of a job
TICK_SECONDS = 0.005
STOPPED_SECONDS = 0.05
MOST_SECONDS = 3600.0


class MachineClock:
    """Seconds that this process was not stopped, counted by a thread from ``start`` on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._count, name="machine-clock", daemon=True).start()

    def _count(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            passed, last = now - last, now
            self.seconds += passed if passed <= STOPPED_SECONDS else TICK_SECONDS


class StepPace:
    """``begin`` and ``end`` stand around a step; ``end`` returns when the step has taken its time. ``step_seconds`` 0:
    it has no pace, and both do nothing."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self._clock = MachineClock() if step_seconds > 0 else None
        self._begun = 0.0

    @classmethod
    def from_environment(cls) -> StepPace:
        """By ``VARIABLE``; not set: no pace. Raises ConfigurationError."""
        given = os.environ.get(VARIABLE)
        if not given:
            return cls(0.0)
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= MOST_SECONDS:
            raise ConfigurationError(
                f"{VARIABLE} is {given!r}: it must be a number of seconds above 0, at most {MOST_SECONDS:g};"
                " leave it out for steps as fast as they are"
            )
        return cls(seconds)

    def begin(self) -> None:
        if self._clock is not None:
            self._begun = self._clock.seconds

    def end(self) -> None:
        """Sleep until the step that began last has taken ``step_seconds`` of the machine's clock."""
        if self._clock is None:
            return
        while (left := self._begun + self.step_seconds - self._clock.seconds) > 0:
            time.sleep(max(TICK_SECONDS, left))


def pace_trainer() -> None:
    """Make each step of this process's built-in trainer take its time."""
    from diloco_worker.training import trainer

    pace, make_step = StepPace.from_environment(), trainer.step

    def step_at_pace(*arguments: Any, **options: Any) -> Any:
        pace.begin()
        loss = make_step(*arguments, **options)
        pace.end()
        return loss

    trainer.step = step_at_pace
