"""The job's newest transitions, numbered, for the status document and the log."""

from __future__ import annotations

import logging
import time
from collections import deque

from diloco_protocol.documents import EventRow
from diloco_protocol.vocabulary import EventKind
from diloco_syncer.core import events as ev

log = logging.getLogger(__name__)

EVENTS_KEPT = 500
WARNINGS = frozenset(
    {
        *(EventKind.LOST, EventKind.PROCESS_ENDED, EventKind.HOLD, EventKind.STARVED, EventKind.DROPPED),
        *(EventKind.SHARD_LOST, EventKind.SYNCER_RESTART),
    }
)


class EventLog:
    """Keeps the newest ``EVENTS_KEPT`` transitions. ``number``: transitions of the job, over restarts."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.events: deque[EventRow] = deque(maxlen=EVENTS_KEPT)

    def record(self, note: ev.RecordEvent) -> EventRow:
        """Number a transition, keep it, and log it."""
        self.number += 1
        row = EventRow(
            n=self.number,
            time=time.time(),
            kind=note.kind,
            slot=note.slot,
            incarnation=note.incarnation,
            message=note.message,
            details=note.details,
        )
        self.events.append(row)
        level = logging.WARNING if note.kind in WARNINGS else logging.INFO
        log.log(level, "%s: %s", note.kind, note.message, extra={"slot": note.slot})
        return row
