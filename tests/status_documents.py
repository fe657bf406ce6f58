"""Documents as programs show them, built by their models: a test names only the fields that matter to it."""

from __future__ import annotations

from typing import Any

from diloco_protocol.documents import (
    LearnerLink,
    LearnerPage,
    MergeSeconds,
    Report,
    RoundRow,
    ShardRow,
    SlotLink,
    SlotRow,
    StatusDocument,
    TlsStatus,
)

NO_TLS = TlsStatus(secure=False, connections=None, handshakes=None, refused={}, expires=None, peers_expire=None)
NO_SECONDS = MergeSeconds(merge=0.0, quorum=0.0, waited=0.0)
NO_LINK = LearnerLink(up_bytes_per_second=None, down_bytes_per_second=None, round_trip_seconds=None)


def slot_link(**fields: Any) -> SlotLink:
    """A link of which nothing is measured."""
    unknown = dict.fromkeys(name for name in SlotLink.model_fields if name.endswith("seconds") or "_per_" in name)
    return SlotLink(**{**unknown, "too_slow": False, "message": "", **fields})


def slot_row(slot: int = 0, **fields: Any) -> SlotRow:
    """A slot that nobody has held."""
    return SlotRow.model_validate(
        {
            "slot": slot,
            "retired": False,
            "region": "",
            "ordinal": 0,
            "process": "",
            "incarnation": 0,
            "incarnations": 0,
            "state": "empty",
            "ready": False,
            "step": 0,
            "steps": 0,
            "tokens": 0,
            "loss": None,
            "diverged": False,
            "step_seconds": 0.0,
            "compute_seconds": 0.0,
            "stalled_seconds": 0.0,
            "merged_pushes": 0,
            "heard_seconds_ago": None,
            "starved": False,
            "paused": False,
            "bytes_up": 0,
            "bytes_down": 0,
            "link": None,
            **fields,
        }
    )


def round_row(**fields: Any) -> RoundRow:
    """A round that has just opened."""
    return RoundRow.model_validate(
        {
            "fragment": 0,
            "round": 1,
            "merging": False,
            "open_seconds": 0.0,
            "overdue": False,
            "message": "",
            "responders": [],
            "waiting": [],
            **fields,
        }
    )


def shard_row(shard: int = 0, **fields: Any) -> ShardRow:
    """One of two shards of four fragments, which serves."""
    return ShardRow.model_validate(
        {
            "shard": shard,
            "fragments": [shard, shard + 2],
            "serving": True,
            "cpu_seconds": 1.0,
            "resident_bytes": 1,
            "store_problem": "",
            **fields,
        }
    )


def status_document(**fields: Any) -> StatusDocument:
    """The status of a job that waits for its learners."""
    return StatusDocument.model_validate(
        {
            "job": "j",
            "phase": "waiting",
            "message": "",
            "epoch": 1,
            "elapsed_seconds": 0.0,
            "step": 0,
            "loss": None,
            "quorum": {"active": 0, "required": 1},
            "standby": 0,
            "standbys": [],
            "evaluators": 0,
            "versions": [],
            "rounds": [],
            "slots": [],
            "tokens": {"trained": 0, "merged": 0, "pending": 0, "dropped": 0},
            "tokens_per_second": 0.0,
            "merges": 0,
            "goodput": 0.0,
            "uptime": 0.0,
            "eval_loss": [],
            "hold_since_seconds": None,
            "bytes_up": 0,
            "bytes_down": 0,
            "refused": {},
            "regions_lost": [],
            "sessions": 0,
            "refusals": [],
            "regions": [],
            "tls": NO_TLS,
            "store_problem": "",
            "seconds": NO_SECONDS,
            "events": [],
            **fields,
        }
    )


def learner_page(**fields: Any) -> LearnerPage:
    """The page of a learner that has not begun to connect."""
    return LearnerPage.model_validate(
        {
            "job": "j",
            "role": "learner",
            "region": "local",
            "ordinal": 0,
            "process": "",
            "phase": "waiting",
            "message": "",
            "connected": False,
            "tried": False,
            "joined": False,
            "standby": False,
            "idle": False,
            "slot": None,
            "merges": None,
            "step": None,
            "tokens": None,
            "loss": None,
            "epoch": None,
            "link": NO_LINK,
            "refused": None,
            "settings": None,
            **fields,
        }
    )


def job_report(**fields: Any) -> Report:
    """The report of a job that has just begun."""
    return Report.model_validate(
        {
            "schema": 1,
            "outcome": "interrupted",
            "seed": 0,
            "spec_digest": "",
            "steps": 0,
            "merges": 0,
            "versions": {"min": 0, "max": 0},
            "tokens": {"trained": 0, "merged": 0, "pending": 0, "dropped": 0},
            "bytes_up": 0,
            "bytes_down": 0,
            "syncer": {"epoch": 1, "restarts": 0, "peak_rss_bytes": 0},
            **fields,
        }
    )


def kept_report(report: Report) -> dict[str, Any]:
    """A report as the operator keeps it in the job's status: without its lists, and without what is not known."""
    whole = report.model_dump(mode="json")
    return {name: value for name, value in whole.items() if value is not None and not isinstance(value, list)}
