"""How long a learner's step takes, as the syncer sees it: the steps of its pushes over the time between them.

Theory of operation. What a learner says of its pace is shown to people, and nothing is decided by it: one that says
1000 s a step, or claims 1000 steps a second, would set the pace of all. So a step counts once a push that carries it
was accepted. Between two pushes that carry new steps lie so many seconds and so many steps; the median of the last
``SAMPLES`` such quotients is the pace, so that one pause does not change it. It begins with the first report of a step
and not with the tenure, for a first step may take minutes.

Example. A learner's first step is reported at 60 s. Its push of step 3 comes at 61 s, that of step 5 at 62.2 s: its
samples are 0.5 and 0.6 s.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

SAMPLES = 9


class Pace:
    """Of one tenure."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._last: tuple[int, float] | None = None  # the furthest step that counts, and when it did

    def begin(self, step: int, now: float) -> None:
        """A step was reported. Only the first report counts."""
        if self._last is None:
            self._last = step, now

    def record_push(self, last_step: int, now: float) -> None:
        """A push that carries the steps up to this one was accepted."""
        self.begin(last_step, now)
        assert self._last is not None
        step, at = self._last
        if last_step > step and now > at:
            self._samples.append((now - at) / (last_step - step))
            self._last = last_step, now

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step; None: there are no two pushes to take it from yet."""
        return median_low(self._samples) if self._samples else None
