"""The status document and report.json: the core's figures, and those of the parts around it."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_protocol.spec.job import DiLoCoJob, spec_digest
from diloco_protocol.vocabulary import JobPhase
from diloco_syncer.core.core import Core
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.event_log import EventLog
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.merger import Merger
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.server.pages.links import LinkMeasures, with_links
from diloco_syncer.server.sessions import Sessions
from diloco_syncer.server.tls.access import CallAuthorizer

SCHEMA = 1
_OUTCOMES = {JobPhase.COMPLETE: "complete", JobPhase.FAILED: "failed"}


def finite(value: Any) -> Any:
    """The value for JSON: numbers that are not finite become null, at every depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def bounded(document: dict[str, Any], limit: int) -> bytes:
    """The document as JSON of at most ``limit`` bytes; the oldest events of a status document are left out first.

    Raises ValueError if that is not enough.
    """
    text = json.dumps(document, allow_nan=False).encode()
    events = document.get("events")
    while len(text) > limit and events:
        events = events[-(len(events) // 2) :] if len(events) > 1 else []
        text = json.dumps({**document, "events": events}, allow_nan=False).encode()
    if len(text) > limit:
        raise ValueError(f"the answer has {len(text)} bytes; at most {limit} can be sent: read it over HTTP")
    return text


def peak_rss_bytes() -> int:
    """The most memory this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class StatusPage:
    """The status document and the report; everything is only read. ``refused``: uploads, by reason."""

    job: DiLoCoJob
    core: Core
    clock: Callable[[], float]
    model: GlobalModel
    durability: Durability
    merger: Merger
    sessions: Sessions
    authorizer: CallAuthorizer
    traffic: Traffic
    event_log: EventLog
    refused: Counter[str]

    def status(self) -> dict[str, Any]:
        """The status document (docs/contracts.md)."""
        document = {"job": self.job.metadata.name} | self.core.status(self.clock())
        document["message"] = self.durability.problem or self.core.phase_message
        rows = with_links(self.job, self.model.layout, document["slots"], self._find_link)
        document["slots"] = self.traffic.with_slots(rows)
        document |= {
            "bytes_up": self.traffic.bytes_up,
            "bytes_down": self.traffic.bytes_down,
            "regions": self.traffic.rows(),
            "refused": dict(self.refused),
            "sessions": self.sessions.count,
            "tls": self.authorizer.status(),
            "store_problem": self.durability.problem,
            "seconds": self.merger.seconds,
            "events": list(self.event_log.events),
        }
        return dict(finite(document))

    def _find_link(self, slot: int) -> LinkMeasures | None:
        connection = self.sessions.find_connection(self.core.slots[slot].connection)
        return None if connection is None else connection.link

    def report(self) -> dict[str, Any]:
        """report.json as it stands, without ``faults``, which only whoever causes them knows.

        ``restarts`` counts the syncers that this store has had before this one, those of earlier runs
        included. ``outcome`` of a job that has not ended, or was suspended, is interrupted.
        """
        core, now, layout = self.core, self.clock(), self.model.layout
        reported = core.report(now)
        document = {
            "schema": SCHEMA,
            "outcome": _OUTCOMES.get(core.phase, "interrupted"),
            "seed": self.job.spec.seed,
            "spec_digest": spec_digest(self.job),
            "layout_digest": layout.digest if layout is not None else "",
            "wall_seconds": core.status(now)["elapsed_seconds"],
            **reported,
            "learners": self.traffic.with_slots(reported["learners"]),
            "bytes_up": self.traffic.bytes_up,
            "bytes_down": self.traffic.bytes_down,
            "regions": self.traffic.rows(),
            "faults": [],
            "syncer": {"epoch": core.epoch, "restarts": core.epoch - 1, "peak_rss_bytes": peak_rss_bytes()},
        }
        return dict(finite(document))
