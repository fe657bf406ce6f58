"""What is known of each learner's link, and whether it is thin for its job: the status document's
``slots[].link``.

Up is measured here, while pushes arrive; down and the round trip are the learner's, from its
reports. What belongs to a link belongs to its session, and ends with it. Whether it is enough
is judged when somebody asks (protocol's links.py), at the pace that the job has then.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any

from diloco_protocol.bandwidth import links
from diloco_protocol.bandwidth.links import LEAST_TRANSFERS, Measured, Traffic
from diloco_protocol.common.meter import Meter
from diloco_protocol.wire import sync_pb2

if TYPE_CHECKING:
    from diloco_syncer.runtime.driver import Engine

_FASTEST, _LONGEST = 1e15, 1e6  # bytes per second, seconds: what a learner says beyond is not believed


class LinkMeasures:
    """Of one session."""

    def __init__(self) -> None:
        self.up = Meter()
        self._down: float | None = None
        self._round_trip: float | None = None

    def heard(self, report: sync_pb2.Report) -> None:
        """What the learner says; numbers that make no sense say nothing."""
        if report.HasField("link"):
            down, trip = report.link.down_bytes_per_second, report.link.round_trip_seconds
            self._down = down if 0 < down < _FASTEST else None
            self._round_trip = trip if 0 < trip < _LONGEST else None

    @property
    def known(self) -> Measured:
        up = self.up.rate if self.up.transfers >= LEAST_TRANSFERS else None
        return Measured(up, self._down, self._round_trip)


@lru_cache(maxsize=4)
def _traffic(sizes: tuple[int, ...], up: str, down: str, learners: int) -> Traffic:
    return links.traffic(sizes, up, down, learners)


def with_links(engine: Engine, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The status document's rows of slots, each with ``link``: null while nobody is there."""
    spec, layout = engine.job.spec, engine.layout
    paces = [r["step_seconds"] for r in rows if r["state"] == "active" and r["ready"] and r["step_seconds"] > 0]
    pace = median(paces) if paces else 0.0
    carried = None
    if layout is not None:
        sizes = tuple(layout.elements(p) for p in range(len(layout)))
        carried = _traffic(sizes, spec.sync.compression.up, spec.sync.compression.down, spec.slots)
    for row, slot in zip(rows, engine.core.slots, strict=True):
        connection = None if slot.connection is None else engine.sessions.connection(slot.connection)
        row["link"] = None
        if connection is None:
            continue
        known, judged = connection.link.known, links.Verdict()
        if carried is not None:
            judged = links.judge(carried, spec.sync, len(sizes), pace, known)
        row["link"] = {
            "up_bytes_per_second": known.up,
            "down_bytes_per_second": known.down,
            "round_trip_seconds": known.round_trip,
            "needs_up_bytes_per_second": judged.up,
            "needs_down_bytes_per_second": judged.down,
            "thin": judged.thin,
            "message": judged.message,
        }
    return rows
