"""The links of a simulated job: each learner's own, to the syncer and back."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkRates:
    """A learner's link: ``latency`` in seconds one way, and bytes per second in each direction."""

    latency: float = 0.05
    up: float = math.inf
    down: float = math.inf


class SimulatedLink:
    """One learner's link in use. Payloads of one direction go one after another, in the order in which they were sent;
    messages without a payload pass them by, for they travel over a connection of their own."""

    def __init__(self, rates: LinkRates) -> None:
        self.rates = rates
        self.bytes_up = self.bytes_down = 0
        self._free_up = self._free_down = 0.0

    def send_up(self, now: float, size: int) -> float:
        """Send ``size`` bytes to the syncer; returns when all of them are there."""
        self._free_up = max(now, self._free_up) + size / self.rates.up
        self.bytes_up += size
        return self._free_up + self.rates.latency

    def send_down(self, now: float, size: int) -> float:
        """Have the learner ask for ``size`` bytes; returns when it has all of them."""
        self._free_down = max(now + self.rates.latency, self._free_down) + size / self.rates.down
        self.bytes_down += size
        return self._free_down + self.rates.latency
