"""What this process measures of its link to the syncer, by what travels anyway.

Throughput comes from the bulk transfers (protocol's meter.py). The round trip is that of an
echo: once a heartbeat a report asks for one, and the syncer answers at once. The shortest
of the last sixteen counts, for the longer ones waited behind bulk bytes or a busy thread.
Reports tell the syncer of both. All of it begins anew with each session: another
connection may take another way.

Plain code: the time (seconds, monotonic) comes in as an argument. ``figures`` may be read by
any thread.
"""

from __future__ import annotations

from collections import deque

from diloco_protocol.bandwidth.links import LEAST_TRANSFERS
from diloco_protocol.common.meter import Meter
from diloco_protocol.wire import sync_pb2

_ECHOES = 16  # of which the shortest counts
_LOST_SECONDS = 60.0  # after which an echo is not waited for any more


class LinkProbe:
    """One process's link, as seen from its side."""

    def __init__(self) -> None:
        self._number = 0
        self.begin()

    def begin(self) -> None:
        """A new session."""
        self.up = Meter()
        self.down = Meter()
        self._trips: deque[float] = deque(maxlen=_ECHOES)
        self.round_trip: float | None = None  # seconds, the shortest of these
        self._asked: float | None = None  # when the echo that is under way was asked for
        self._next = float("-inf")

    def stamp(self, report: sync_pb2.Report, now: float, every: float) -> None:
        """Put into a report that is about to be sent what is known, and every ``every`` seconds the
        wish for an echo."""
        if self.down.transfers >= LEAST_TRANSFERS and self.down.rate is not None:
            report.link.down_bytes_per_second = self.down.rate
        if self.round_trip is not None:
            report.link.round_trip_seconds = self.round_trip
        lost = self._asked is not None and now - self._asked > _LOST_SECONDS
        if now >= self._next and (self._asked is None or lost):
            self._number += 1
            self._asked = now
            self._next = now + every
            report.echo = self._number

    def heard(self, number: int, now: float) -> None:
        """An echo; one of an earlier session, or given up, says nothing."""
        if number == self._number and self._asked is not None:
            self._trips.append(max(0.0, now - self._asked))
            self.round_trip = min(self._trips)
            self._asked = None

    def figures(self) -> dict[str, float | None]:
        """For the status port: bytes per second, seconds; None: not measured."""
        return {"link_up": self.up.rate, "link_down": self.down.rate, "round_trip_seconds": self.round_trip}
