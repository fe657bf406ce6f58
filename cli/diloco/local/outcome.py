"""How a run ended, and report.json: the syncer's report with what only the runner knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco.local.chaos import fault_report as faults
from diloco.local.chaos.fault_report import Event, Injected
from diloco_protocol.vocabulary import JobPhase

if TYPE_CHECKING:
    from diloco_protocol.spec.job import DiLoCoJob

# The syncer's last phase -> report.json's outcome, exit code.
OUTCOMES: dict[str, tuple[str, int]] = {
    JobPhase.COMPLETE: ("complete", 0),
    JobPhase.FAILED: ("failed", 1),
    JobPhase.SUSPENDED: ("interrupted", 130),
}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How the run ended: report.json's ``outcome``, the exit code, and why."""

    outcome: str
    exit_code: int
    message: str = ""
    log_of: str = ""  # the process whose log has more


@dataclass(frozen=True, slots=True)
class RunResult:
    ended: RunOutcome
    report: dict[str, Any] | None  # the syncer's; None: it could not be had
    status: dict[str, Any]  # the last one seen
    faults: list[Injected]
    events: list[Event]
    syncer_restarts: int
    syncer_peak_rss_bytes: int
    wall_seconds: float
    complete_already: bool = False  # before this run began


def complete_report(result: RunResult, job: DiLoCoJob) -> dict[str, Any]:
    """report.json: the syncer's report with what only the runner knows. Where the syncer
    could not be asked, figures are those of its last status, or null."""
    from diloco_protocol.spec.job import spec_digest

    status = result.status
    versions = status.get("versions") or [0]
    evaluations = status.get("eval_loss") or []
    known: dict[str, Any] = {
        "schema": 1,
        "outcome": None,
        "seed": job.spec.seed,
        "spec_digest": spec_digest(job),
        "layout_digest": None,
        "wall_seconds": None,
        "steps": max((slot.get("step") or 0 for slot in status.get("slots") or []), default=0),
        "merges": status.get("merges") or 0,
        "versions": {"min": min(versions), "max": max(versions)},
        "tokens": status.get("tokens") or {"trained": 0, "merged": 0, "pending": 0, "dropped": 0},
        "ledger": None,
        "goodput": status.get("goodput"),
        "uptime": status.get("uptime"),
        "initial_loss": evaluations[0][1] if evaluations and evaluations[0][0] == 0 else None,
        "final_loss": None,
        "eval_loss": evaluations,
        "bytes_up": status.get("bytes_up") or 0,
        "bytes_down": status.get("bytes_down") or 0,
        "regions": status.get("regions"),
        "learners": None,
        "faults": [],
        "holds": None,
        "regions_lost": None,
        "syncer": {"epoch": status.get("epoch")},
    }
    report = {**known, **(result.report or {})}
    report["outcome"] = result.ended.outcome
    report["message"] = result.ended.message
    report["wall_seconds"] = round(result.wall_seconds, 3)
    report["faults"] = faults.rows(result.faults, result.events)
    syncer = report["syncer"]
    report["syncer"] = {
        **syncer,
        "restarts": result.syncer_restarts,
        "peak_rss_bytes": max(result.syncer_peak_rss_bytes, syncer.get("peak_rss_bytes") or 0),
    }
    return report
