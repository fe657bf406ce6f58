"""The norm gate (``sync.normGate.factor``): pushes whose norm is far above that of their fragment's merged pushes.

Theory of operation
-------------------
Pushes differ in their steps: a learner that was cut off brings four turns at once, one that leaves a single step. The
norm of Δ grows with its steps, as their number where all steps point the same way (never faster: the triangle
inequality), as its root where they are independent. So a push is measured in both ways, norm ÷ steps and norm ÷ √steps,
each as a multiple of the running median of the same measure; the smaller multiple counts. Whichever way the job's
norms grow, the honest push of any length stays near 1 (docs/decisions/053).

The gate judges once it has seen ``GATE_SAMPLES`` pushes of the fragment. After ``GATE_PATIENCE`` refusals in a row it
is the job that has changed, and not one push: the fragment's samples are forgotten, and what comes next passes. One
learner that has come apart among others does not get that far, since each push that passes begins the count anew.

Example: factor 3, and pushes of 24 steps with norms around 1. A push of 96 steps may have a norm of 12, one of a single
step of 3/√24 = 0.6.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from statistics import median
from typing import Any

GATE_FACTOR = 10.0  # where the job names none
GATE_SAMPLES = 5  # pushes seen before the gate judges
GATE_WINDOW = 31
GATE_PATIENCE = 3  # refusals of a fragment in a row, after which the gate begins anew

Sample = tuple[float, int]  # norm and steps of a merged push


class NormGate:
    """Refuses a push whose norm, for its steps, is above ``factor`` times the running median of its fragment's merged
    pushes; ``factor`` None: none."""

    def __init__(self, factor: float | None) -> None:
        self.factor = factor
        self._samples: dict[int, deque[Sample]] = {}  # by fragment
        self._refused: dict[int, int] = {}  # by fragment: how many in a row
        self._growing: dict[int, Counter[int]] = {}  # by fragment: each slot's pushes far larger than the parameters
        self._merges: dict[int, deque[float]] = {}  # by fragment: norms of merges in this life
        self.large_merges = 0  # in this life

    def objection(self, fragment: int, norm: float, steps: int) -> str:
        """Why a push of so many steps (at least 1) does not pass, by the L2 norm of its values; empty: it passes."""
        usual = self._usual_norm(fragment, steps)
        if self.factor is None or usual is None or norm <= self.factor * usual:
            return ""
        return (
            f"norm {norm:.3g} of {steps} steps is above {self.factor:g} x {usual:.3g}, the running median for as many"
        )

    def is_usual(self, fragment: int, norm: float, steps: int) -> bool:
        """Whether pushes of the fragment are known to be about as large."""
        usual = self._usual_norm(fragment, steps)
        return usual is not None and norm <= GATE_FACTOR * usual

    def record_growth(self, fragment: int, slot: int, alone: bool) -> bool:
        """Remember that a push of the slot is far larger than the parameters; returns whether one of another slot was,
        too, since the fragment's last merge. Then it is the job that moves so far, and no broken learner. ``alone``:
        nobody else has work in the model, or may have; then it is the job after ``GATE_PATIENCE`` such pushes."""
        seen = self._growing.setdefault(fragment, Counter())
        seen[slot] += 1
        return len(seen) > 1 or (alone and seen[slot] > GATE_PATIENCE)

    def _usual_norm(self, fragment: int, steps: int) -> float | None:
        """The running median for so many steps; None: too few pushes were merged."""
        seen = self._samples.get(fragment, ())
        if len(seen) < GATE_SAMPLES:
            return None
        return max(median(n / measure(s) for n, s in seen) * measure(steps) for measure in (float, math.sqrt))

    def record_merge(self, fragment: int, norm: float) -> str:
        """Remember the norm of a merged outer gradient (0: not known); returns what is said of one that is far above
        those before it, else nothing."""
        seen = self._merges.setdefault(fragment, deque(maxlen=GATE_WINDOW))
        usual = median(seen) if len(seen) >= GATE_SAMPLES else math.inf
        if norm:
            seen.append(norm)
        if norm <= GATE_FACTOR * usual:
            return ""
        self.large_merges += 1
        return f"fragment {fragment} moves by {norm:.3g}, and {usual:.3g} is usual"

    def record_refusal(self, fragment: int) -> None:
        """A push was refused for its norm."""
        refused = self._refused[fragment] = self._refused.get(fragment, 0) + 1
        if refused >= GATE_PATIENCE:
            self._samples.pop(fragment, None)
            self._refused.pop(fragment)

    def record_pass(self, fragment: int) -> None:
        """A push was accepted."""
        self._refused.pop(fragment, None)

    def add(self, fragment: int, merged: Iterable[Sample]) -> None:
        """Remember pushes that were merged."""
        self._growing.pop(fragment, None)
        self._samples.setdefault(fragment, deque(maxlen=GATE_WINDOW)).extend(merged)

    def to_json(self) -> list[list[Any]]:
        """A row for each fragment of which something is known: its index, refusals in a row, samples."""
        known = sorted(self._samples.keys() | self._refused.keys())
        return [[p, self._refused.get(p, 0), [list(sample) for sample in self._samples.get(p, ())]] for p in known]

    def load(self, rows: list[list[Any]]) -> None:
        """Go on from ``to_json``."""
        for fragment, refused, samples in rows:
            self.add(fragment, ((norm, steps) for norm, steps in samples))
            if refused:
                self._refused[fragment] = refused
