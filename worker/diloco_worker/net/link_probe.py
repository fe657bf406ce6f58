"""What this process measures of its link to the syncer, from traffic that is there anyway.

Throughput comes from the bulk transfers (diloco_protocol.common.meter). The round trip is that of an
echo: once a heartbeat a report asks for one, and the syncer answers at once. The shortest of the last
sixteen counts, because longer ones waited behind bulk bytes or a busy thread. Reports tell the syncer of
both. Each session starts measuring anew, because another connection may take another way.

There is no I/O and no clock here: the time (monotonic seconds) comes in as an argument. Any thread may
call ``measurements``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from diloco_protocol.bandwidth.links import LEAST_TRANSFERS
from diloco_protocol.common.meter import Meter
from diloco_protocol.wire.progress import Progress
from diloco_protocol.wire.records import Link, StepReport

_ECHOES = 16  # of which the shortest counts
_LOST_SECONDS = 60.0  # after which an echo is not waited for any more


class LinkProbe:
    """The link of one process, as seen from its side."""

    def __init__(self) -> None:
        self._number = 0
        self.reset()

    def reset(self) -> None:
        """Start measuring anew: a session began."""
        self.up = Meter()
        self.down = Meter()
        self.arriving = Progress()
        self.round_trip: float | None = None  # seconds, the shortest of the last echoes
        self._trips: deque[float] = deque(maxlen=_ECHOES)
        self._asked: float | None = None  # when the echo that is under way was asked for
        self._next = float("-inf")

    def stamp(self, report: StepReport, now: float, every: float, missing: int = 0) -> StepReport:
        """Complete a report that is about to be sent: what was measured, and every ``every`` seconds the
        request for an echo. ``missing``: fragments that a newcomer has still to download; its rate is that of all
        that has come."""
        down = self.down.rate if self.down.transfers >= LEAST_TRANSFERS else None
        if missing:
            down = self.arriving.rate(now)
        link = Link(down or 0.0, self.round_trip or 0.0, missing)
        echo = 0
        lost = self._asked is not None and now - self._asked > _LOST_SECONDS
        if now >= self._next and (self._asked is None or lost):
            self._number += 1
            self._asked = now
            self._next = now + every
            echo = self._number
        return replace(report, link=link if link != Link() else None, echo=echo)

    def record_echo(self, number: int, now: float) -> None:
        """Measure the round trip of an echo; one of an earlier session, or given up, is ignored."""
        if number == self._number and self._asked is not None:
            self._trips.append(max(0.0, now - self._asked))
            self.round_trip = min(self._trips)
            self._asked = None

    def measurements(self) -> dict[str, float | None]:
        """What the status port shows: bytes per second, seconds; None: not measured."""
        return {"link_up": self.up.rate, "link_down": self.down.rate, "round_trip_seconds": self.round_trip}
