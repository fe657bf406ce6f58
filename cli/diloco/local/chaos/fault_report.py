"""What each fault cost, read from the syncer's numbered events.

A fault hits a process; what the report wants to know is how long the slot that this process held was away. From the
events of that slot after the fault:

* detected: the first sign that the syncer knew (``suspect``, ``lost``, ``process-ended``; ``draining``, ``drained``);
* joined: the first ``joined`` or ``taken`` under a higher incarnation after that;
* first step, recovered: the ``first-step`` and ``first-merge`` of that join or a later one.

For a fault of the syncer, detected is when the runner saw its process end (or, while it lives on, the first sign of a
lost learner); joined, first step and recovered are the first such events of any slot thereafter.

A pause, a cut or a slow-down may pass unnoticed, when it is shorter than the heartbeat's timeout; then nothing was lost
and all four are None. So that it does not adopt a later fault's events, only signs that come before the next fault on
the same slot count, and for these only those before the next fault of the syncer and before they end plus
``NOTICE_SECONDS``. That a learner drained is a sign of ``term`` alone: all drain when the job ends. All times are
wall-clock seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_protocol.documents import EventRow, FaultRow
from diloco_protocol.vocabulary import EventKind

NOTICE_SECONDS = 15.0
SIGNS = frozenset({EventKind.SUSPECT, EventKind.LOST, EventKind.PROCESS_ENDED})


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault that was carried out. ``at_seconds`` counts from the job's start; ``slot`` is None for the syncer, and
    for a learner that held none; ``noticed`` is when the runner saw the process end, None if it did not."""

    time: float
    at_seconds: float
    action: str
    target: str
    slot: int | None = None
    incarnation: int = 0
    duration: float = 0.0
    noticed: float | None = None


class Event(EventRow):
    """One of the syncer's events, with the epoch of the syncer that told it."""

    epoch: int


def rows(faults: Sequence[Injected], events: Iterable[Event]) -> list[FaultRow]:
    """report.json's ``faults``, in the order of ``faults``; seconds since the fault or None."""
    told = sorted(events, key=lambda event: (event.time, event.epoch, event.n))
    return [_row(fault, _until(fault, faults), told) for fault in faults]


def _until(fault: Injected, faults: Sequence[Injected]) -> float:
    """The latest time of a sign of this fault."""
    passing = fault.action in ("pause", "cut", "slow")
    later = [
        other.time
        for other in faults
        if other.time > fault.time and (other.slot == fault.slot or (passing and other.target == "syncer"))
    ]
    if passing:
        later.append(fault.time + fault.duration + NOTICE_SECONDS)
    return min(later, default=float("inf"))


def _row(fault: Injected, until: float, told: Sequence[Event]) -> FaultRow:
    after = [event for event in told if event.time >= fault.time]
    if fault.target == "syncer":
        detected, joined, step, merge = _syncer(fault, until, after)
    elif fault.slot is None:
        detected, joined, step, merge = fault.noticed, None, None, None
    else:
        detected, joined, step, merge = _slot(fault, until, after)

    def since(time: float | None) -> float | None:
        return None if time is None else round(max(0.0, time - fault.time), 3)

    return FaultRow(
        at_seconds=round(fault.at_seconds, 3),
        time=round(fault.time, 3),
        lasts_seconds=fault.duration,
        action=fault.action,
        target=fault.target,
        detected_seconds=since(detected),
        joined_seconds=since(joined),
        first_step_seconds=since(step),
        recovered_seconds=since(merge),
    )


Times = tuple[float | None, float | None, float | None, float | None]


def _first(events: Iterable[Event], *kinds: str) -> Event | None:
    return next((event for event in events if event.kind in kinds), None)


def _slot(fault: Injected, until: float, after: Sequence[Event]) -> Times:
    mine = [event for event in after if event.slot == fault.slot]
    signs = SIGNS | {EventKind.DRAINED} if fault.action == "term" else SIGNS
    sign = _first((event for event in mine if event.time <= until), *signs)
    newer = [event for event in mine if event.incarnation > fault.incarnation]
    join = _first(newer, EventKind.JOINED)
    if sign is None and (join is None or join.time > until):
        return None, None, None, None
    detected = sign.time if sign is not None else join.time if join is not None else None
    return _recovery(detected, join, [e for e in newer if join is not None and e.incarnation >= join.incarnation])


def _syncer(fault: Injected, until: float, after: Sequence[Event]) -> Times:
    sign = _first((event for event in after if event.time <= until), *SIGNS)
    detected = fault.noticed if fault.noticed is not None else sign.time if sign else None
    if detected is None:
        return None, None, None, None
    since = [event for event in after if event.time >= detected]
    return _recovery(detected, _first(since, EventKind.JOINED), since)


def _recovery(detected: float | None, join: Event | None, events: Iterable[Event]) -> Times:
    """When it was noticed, and after it who joined, made a step and was merged."""
    if join is None:
        return detected, None, None, None
    since = [event for event in events if event.time >= join.time]
    step, merge = _first(since, EventKind.FIRST_STEP), _first(since, EventKind.FIRST_MERGE)
    return detected, join.time, step.time if step else None, merge.time if merge else None
