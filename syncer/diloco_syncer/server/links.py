"""What is known of each learner's link, and whether it is too slow for its job: ``slots[].link`` of the status.

Up is measured here, while pushes arrive; down and the round trip come from the learner's reports. The
measures belong to a session, and end with it. Whether the link suffices is judged when the status is
read (diloco_protocol/bandwidth/links.py), at the pace that the job has then.

Where the syncer listens on loopback alone, both ends are on one machine. If that has more to do than it has processors,
its processors are what was measured, and it is named instead of the link.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.bandwidth import links
from diloco_protocol.bandwidth.links import LEAST_TRANSFERS, Measured
from diloco_protocol.common.meter import Meter
from diloco_protocol.documents import SlotLink
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.vocabulary import SlotState
from diloco_protocol.wire.records import StepReport
from diloco_syncer.core.books.slots import Slot

_FASTEST, _LONGEST = 1e15, 1e6  # bytes per second, seconds: beyond, a learner's number makes no sense


class LinkMeasures:
    """The measures of one session's link."""

    def __init__(self) -> None:
        self.up = Meter()
        self._down: float | None = None
        self._round_trip: float | None = None
        self.missing_fragments = 0  # that the learner, a newcomer, has still to download

    def apply_report(self, report: StepReport) -> None:
        """Take over what the learner has measured; numbers that make no sense count as unknown."""
        if report.link is not None:
            down, trip = report.link.down_bytes_per_second, report.link.round_trip_seconds
            self._down = down if 0 < down < _FASTEST else None
            self._round_trip = trip if 0 < trip < _LONGEST else None
        self.missing_fragments = report.link.missing_fragments if report.link is not None else 0

    @property
    def known(self) -> Measured:
        up = self.up.rate if self.up.transfers >= LEAST_TRANSFERS else None
        return Measured(up, self._down, self._round_trip)


def busy_text(load: float, processors: int) -> str:
    """Why exchanges within one machine take long; empty: it has processors to spare."""
    if load <= processors:
        return ""
    return (
        f"exchanges take longer than the steps that they overlap: this machine is busy (load {load:.0f} on "
        f"{processors} processors). Fix: fewer learners, or a larger sync.every"
    )


def find_machine_load() -> str:
    """``busy_text`` of this machine as it is now."""
    return busy_text(os.getloadavg()[0], len(os.sched_getaffinity(0)))


_traffic = lru_cache(maxsize=4)(links.traffic)


def slot_links(
    job: DiLoCoJob,
    layout: Layout | None,
    slots: Sequence[Slot],
    find_link: Callable[[int], LinkMeasures | None],
    *,
    busy: str = "",
) -> dict[int, SlotLink]:
    """``link`` of the status document's rows, by slot, of those that have a session.

    ``find_link``: the measures of a slot's session, by the slot's index. ``busy``: what is wrong with the machine that
    all are on; empty: nothing, or they are on several.
    """
    spec = job.spec
    paces = [s.step_seconds for s in slots if s.state is SlotState.ACTIVE and s.holder.ready and s.step_seconds > 0]
    pace = median(paces) if paces else 0.0
    carried = None
    if layout is not None:
        sizes = tuple(layout.elements(p) for p in range(len(layout)))
        carried = _traffic(sizes, spec.sync.compression.up, spec.sync.compression.down, spec.most_slots)
    found = {}
    for slot in slots:
        if (link := find_link(slot.index)) is None:
            continue
        known, judged = link.known, links.Verdict()
        if carried is not None:
            judged = links.judge(carried, spec.sync, len(sizes), pace, measured=known)
        found[slot.index] = SlotLink(
            up_bytes_per_second=known.up,
            down_bytes_per_second=known.down,
            round_trip_seconds=known.round_trip,
            missing_fragments=link.missing_fragments,
            needs_up_bytes_per_second=judged.up,
            needs_down_bytes_per_second=judged.down,
            too_slow=judged.too_slow and not busy,
            message=busy if judged.too_slow and busy else judged.message,
        )
    return found
