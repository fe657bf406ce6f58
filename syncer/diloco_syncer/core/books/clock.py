"""The job's clock: elapsed and up time, holds, tokens per second.

Elapsed time runs from the report of the job's first step to its end. What computing goes on is known by reports alone,
so the time of slots, with which compute time is compared, begins earlier: when the first of the steps began that the
job's first reports tell of. Time while the job was suspended does not count; a crashed
syncer's downtime does, for learners go on without it. Up time is the part in which at least one learner advanced: the
gap between two advances counts up to a limit of a few step times, or as far as a learner says that it computed
meanwhile (unheard, or while the syncer was down). Seconds.

How long a syncer was down is known by the wall clock alone, of perhaps another machine. So at most ``LONGEST_DOWN``
counts of it: a clock that is weeks ahead does not end a job.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

MIN_GAP = 2.0  # a gap between two advances that is still up time, whatever the step time
RATE_WINDOW = 10.0
LONGEST_DOWN = 86_400.0


class JobClock:
    """``slots``: how many the job has now."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = slots
        self._slots_since = 0.0  # elapsed when they became so many
        self.before = 0.0  # elapsed in earlier lives
        self.slot_seconds_before = 0.0
        self.started_at: float | None = None  # in this life
        self._lead: float | None = None  # of this life's first steps, before their report; None: it continued running
        self.ended_at: float | None = None
        self.up = 0.0
        self.advanced_at: float | None = None
        self.holds: list[list[float | None]] = []  # [from, to] in elapsed seconds
        self.samples: deque[tuple[float, int]] = deque()

    @property
    def running(self) -> bool:
        return self.started_at is not None and self.ended_at is None

    def elapsed(self, now: float) -> float:
        if self.started_at is None:
            return self.before
        return self.before + max(0.0, (now if self.ended_at is None else self.ended_at) - self.started_at)

    def slot_seconds(self, now: float) -> float:
        """Time of all slots together, at each moment of those that the job had then, from the beginning of the first
        step on."""
        return self.slot_seconds_before + self.slots * (self.elapsed(now) - self._slots_since)

    def set_slots(self, slots: int, now: float) -> None:
        """The job has so many slots from now on."""
        if slots != self.slots:
            self.slot_seconds_before = self.slot_seconds(now)
            self._slots_since = self.elapsed(now)
            self.slots = slots

    def start(self, now: float) -> None:
        """The first step of this life was made."""
        if self.started_at is None:
            self.started_at = self.advanced_at = now
            self._lead = 0.0

    def advance(self, now: float, step_seconds: float, computed: float, trained: int) -> None:
        """A learner made steps. ``computed``: its compute seconds since its last report; ``trained``: tokens of all
        learners."""
        if self.started_at is not None and self._lead is not None:
            longer = self.started_at - (now - computed) - self._lead
            if longer > 0:
                self._lead += longer
                self.slot_seconds_before += self.slots * longer
        if self.advanced_at is not None and self.running:
            self.up += min(now - self.advanced_at, max(MIN_GAP, 3 * step_seconds, computed))
        self.advanced_at = now
        if not self.samples or now - self.samples[-1][0] >= 0.25:
            self.samples.append((now, trained))
            while now - self.samples[0][0] > RATE_WINDOW:
                self.samples.popleft()

    def rate(self, now: float) -> float:
        """Tokens per second over the last few seconds of this life."""
        if len(self.samples) < 2 or now - self.samples[-1][0] > RATE_WINDOW:
            return 0.0
        (t0, n0), (t1, n1) = self.samples[0], self.samples[-1]
        # Learners report now and then. Until a report is overdue, the time since the last one tells nothing: else the
        # rate would depend on when it is asked for. A standstill shows once reports are overdue.
        longest = max(later - earlier for (earlier, _), (later, _) in pairwise(self.samples))
        until = max(t1, now - longest)
        return max(0.0, (n1 - n0) / max(until - t0, 1e-9))

    def uptime(self, now: float) -> float:
        elapsed = self.elapsed(now)
        return min(1.0, self.up / elapsed) if elapsed > 0 else 0.0

    def assume(self, seconds: float) -> None:
        """The job has gone on for so long at least: of a store that was lost no time is known."""
        if not self.before and self.started_at is None:
            self.before = self.up = self._slots_since = seconds
            self.slot_seconds_before = self.slots * seconds

    def end(self, now: float) -> None:
        if self.ended_at is None:
            self.ended_at = now
            self.end_hold(now)

    def begin_hold(self, now: float) -> None:
        elapsed = self.elapsed(now)
        if self.holds and self.holds[-1][1] in (None, elapsed):
            self.holds[-1][1] = None
        else:
            self.holds.append([elapsed, None])

    def end_hold(self, now: float) -> None:
        if self.holding:
            self.holds[-1][1] = self.elapsed(now)

    @property
    def holding(self) -> bool:
        return bool(self.holds) and self.holds[-1][1] is None

    def to_json(self, now: float, wall: float) -> dict[str, Any]:
        return {
            "elapsed": self.elapsed(now),
            "slot_seconds": self.slot_seconds(now),
            "up": self.up,
            "running": self.running,
            "ended": self.ended_at is not None,
            "holds": self.holds,
            "wall": wall,
        }

    def load(self, row: dict[str, Any], now: float, wall: float) -> None:
        self.before = row["elapsed"]
        self.up = row["up"]
        self.slot_seconds_before = row["slot_seconds"]
        self.holds = [list(hold) for hold in row["holds"]]
        if row["running"]:
            down = min(max(0.0, wall - row["wall"]), LONGEST_DOWN)
            self.before += down
            self.slot_seconds_before += self.slots * down
            self.started_at = now
            self.advanced_at = now - down
        self._slots_since = self.before
