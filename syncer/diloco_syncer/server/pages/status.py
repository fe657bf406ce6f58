"""The status document and report.json: what the core tells, and what only the walls know."""

from __future__ import annotations

import json
import math
import resource
import sys
from typing import TYPE_CHECKING, Any

from diloco_protocol.spec.job import spec_digest
from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase
from diloco_syncer.server.pages.links import with_links

if TYPE_CHECKING:
    from diloco_syncer.runtime.driver import Engine

SCHEMA = 1
_OUTCOMES = {JobPhase.COMPLETE: "complete", JobPhase.FAILED: "failed"}


def finite(value: Any) -> Any:
    """The value for JSON: numbers that are not finite become null, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def bounded(document: dict[str, Any], limit: int) -> bytes:
    """The document as JSON of at most ``limit`` bytes; of a status document the oldest events go first.

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


def status(engine: Engine) -> dict[str, Any]:
    """The status document (docs/contracts.md)."""
    document = {"job": engine.job.metadata.name} | engine.core.status(engine.clock())
    document["message"] = engine.message
    document["slots"] = engine.traffic.with_slots(with_links(engine, document["slots"]))
    document |= {
        "bytes_up": engine.bytes_up,
        "bytes_down": engine.bytes_down,
        "regions": engine.traffic.rows(engine.sessions.doors.listener),
        "refused": dict(engine.refused),
        "sessions": engine.sessions.count,
        "tls": engine.sessions.doors.status(),
        "store_problem": engine.problem,
        "seconds": engine.seconds,
        "events": list(engine.events),
    }
    return dict(finite(document))


def report(engine: Engine) -> dict[str, Any]:
    """report.json without ``faults``, which whoever causes and sees them knows: as it stands, and of a job
    that has ended what the store has of its end, whoever asks and however often."""
    if engine.final_report is not None and engine.core.phase in ENDED_PHASES:
        return engine.final_report
    return present_report(engine)


def present_report(engine: Engine) -> dict[str, Any]:
    """The report as it stands.

    ``restarts`` counts the syncers that this store has had before this one, those of
    earlier runs included. ``outcome`` of a job that has not ended, or was suspended, is interrupted.
    """
    core, now = engine.core, engine.clock()
    reported = core.report(now)
    document = {
        "schema": SCHEMA,
        "outcome": _OUTCOMES.get(core.phase, "interrupted"),
        "seed": engine.job.spec.seed,
        "spec_digest": spec_digest(engine.job),
        "layout_digest": engine.layout.digest if engine.layout is not None else "",
        "wall_seconds": core.status(now)["elapsed_seconds"],
        **reported,
        "learners": engine.traffic.with_slots(reported["learners"]),
        "bytes_up": engine.bytes_up,
        "bytes_down": engine.bytes_down,
        "regions": engine.traffic.rows(engine.sessions.doors.listener),
        "faults": [],
        "syncer": {"epoch": engine.epoch, "restarts": engine.epoch - 1, "peak_rss_bytes": peak_rss_bytes()},
    }
    return dict(finite(document))
