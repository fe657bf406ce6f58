"""How a run ended, and report.json: the syncer's report with what only the runner knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.local.chaos import fault_report
from diloco.local.chaos.fault_report import Event, Injected
from diloco.local.training_loss import read_training_loss
from diloco_protocol.documents import OutputRow, Report, ReportSyncer, StatusDocument, Tokens, VersionRange
from diloco_protocol.spec.job import DiLoCoJob, spec_digest
from diloco_protocol.vocabulary import JobPhase

if TYPE_CHECKING:
    from diloco_syncer.store.kept_tokens import KeptTokens

# The syncer's last phase -> report.json's outcome, exit code.
OUTCOMES: dict[str, tuple[str, int]] = {
    JobPhase.COMPLETE: ("complete", 0),
    JobPhase.FAILED: ("failed", 1),
    JobPhase.SUSPENDED: ("interrupted", 130),
}


def ended_phase(report: Report) -> str:
    """The phase in which a syncer ended the job of which this is its last report."""
    return next((phase for phase, (outcome, _) in OUTCOMES.items() if outcome == report.outcome), report.outcome)


def last_output(status: StatusDocument | None, report: Report | None) -> OutputRow | None:
    """What became of ``output.uri`` by the newest word of a syncer: by its status, or by a report that was asked for
    after it, with which the syncer may have ended."""
    row = None if status is None else status.output
    told = None if report is None else report.output
    return told if told is not None and (row is None or row.open) else row


REFUSED = "refused"  # before anything was started: no report is written


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How the run ended: report.json's ``outcome`` (or REFUSED), the exit code, and why. ``note``: what was wrong
    meanwhile."""

    outcome: str
    exit_code: int
    message: str = ""
    log_of: str = ""  # the process whose log has more
    log_begin: int = 0  # where in that file the last process's part begins, bytes
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunResult:
    ended: RunOutcome
    report: Report | None  # the syncer's; None: it could not be had
    status: StatusDocument | None  # the last one seen
    faults: list[Injected]
    events: list[Event]
    syncer_restarts: int
    syncer_peak_rss_bytes: int
    wall_seconds: float
    complete_already: bool = False  # before this run began


def complete_report(result: RunResult, job: DiLoCoJob, metrics: Path, kept: KeptTokens | None = None) -> Report:
    """report.json: the syncer's report with what only the runner knows. ``metrics``: the folder of the processes'
    metrics files; ``kept``: after a hard end, what the job continues with."""
    report = result.report or _report_without_syncer(result.status, job)
    if kept is not None:
        report = report.model_copy(update=_durable_figures(kept))
    own = {
        # The syncer's, where the learners are other machines'.
        "training_loss": None if report.is_scored else read_training_loss(metrics) or report.training_loss,
        "outcome": result.ended.outcome,
        "message": "; ".join(part for part in (result.ended.message, result.ended.note) if part),
        "wall_seconds": round(result.wall_seconds, 3),
        "faults": fault_report.rows(result.faults, result.events),
        "syncer": ReportSyncer(
            epoch=report.syncer.epoch,
            restarts=result.syncer_restarts,
            peak_rss_bytes=max(result.syncer_peak_rss_bytes, report.syncer.peak_rss_bytes),
        ),
    }
    return Report.model_validate({**dict(report), **own})


def is_hard_end(result: RunResult) -> bool:
    """Whether an interrupted run ended before its syncer had taken in what the learners had."""
    drained = result.report is not None and result.report.outcome == "interrupted"
    return result.ended.outcome == "interrupted" and not drained


def read_kept(job: DiLoCoJob, store: Path) -> KeptTokens | None:
    """What a job continues with after a hard end, by its store; None: it has nothing, or that cannot be read."""
    from diloco_syncer.store.base import ObjectNotFound
    from diloco_syncer.store.directory import DirectoryStore
    from diloco_syncer.store.kept_tokens import read_kept_tokens
    from diloco_syncer.store.records import Damaged, FormatRefused
    from diloco_syncer.store.restore import StoreUnusable

    try:
        return read_kept_tokens(job, DirectoryStore(store))
    except (StoreUnusable, Damaged, ObjectNotFound, FormatRefused, OSError):
        return None  # the next start says what is wrong with the store


def hard_end_note(result: RunResult, kept: KeptTokens | None) -> str:
    """What a hard end cost, in words; empty: nothing that is known."""
    if kept is None:
        return ""
    heard = kept.tokens.trained if result.status is None else result.status.tokens.trained
    lost = kept.not_offered + max(0, heard - kept.tokens.trained)
    if not lost:
        return ""
    return (
        f"stopped at once: {lost:,} tokens were not offered, and are lost when the job continues;"
        f" it continues from {kept.tokens.trained:,} tokens"
    )


def _durable_figures(kept: KeptTokens) -> dict[str, Any]:
    return {
        "tokens": kept.tokens,
        "ledger": kept.ledger,
        "merges": kept.merges,
        "versions": VersionRange(min=min(kept.versions), max=max(kept.versions)),
        "steps": kept.steps,
    }


def _report_without_syncer(status: StatusDocument | None, job: DiLoCoJob) -> Report:
    """Where the syncer could not be asked: the figures of its last status, or null."""
    same = {"merges", "tokens", "goodput", "uptime", "eval_loss", "bytes_up", "bytes_down", "regions"}
    known: dict[str, Any] = dict.fromkeys(("merges", "bytes_up", "bytes_down"), 0)
    known["tokens"] = Tokens(trained=0, merged=0, pending=0, dropped=0)
    if status is not None:
        known = {name: value for name, value in status if name in same}
    scored = known.get("eval_loss")
    versions = (status and status.versions) or [0]
    return Report(
        outcome="failed",
        seed=job.spec.seed,
        spec_digest=spec_digest(job),
        steps=status.step if status else 0,
        versions=VersionRange(min=min(versions), max=max(versions)),
        initial_loss=scored[0][1] if scored and scored[0][0] == 0 else None,
        syncer=ReportSyncer(epoch=status.epoch if status else None, restarts=0, peak_rss_bytes=0),
        **known,
    )
