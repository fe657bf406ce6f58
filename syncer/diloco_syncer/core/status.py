"""What the core can tell about the job: the status document, without what only the
walls know (events with wall-clock time, bytes, refusals). Plain code."""

from __future__ import annotations

from typing import Any

from diloco_protocol.vocabulary import SlotState
from diloco_syncer.core.state import JobState


def goodput(job: JobState, now: float) -> float:
    """Compute seconds of merged steps ÷ (P × slots × elapsed), 0..1 (algorithm.md section 1).

    Wall time counts for every slot of the job, whether a process was there or not.
    """
    slot_seconds = job.clock.slot_seconds(now)
    if job.ledger is None or slot_seconds <= 0:
        return 0.0
    return job.ledger.merged_compute_seconds() / (job.ledger.fragments * slot_seconds)


def newest_loss(job: JobState) -> float | None:
    """Nats per token: the merged model's last score, else the mean of the active learners' last steps;
    None: there is neither."""
    if job.eval_loss:
        return job.eval_loss[-1][1]
    active = [s.loss for s in job.members.slots if s.state is SlotState.ACTIVE and s.loss is not None]
    return sum(active) / len(active) if active else None


def slot_rows(job: JobState, now: float) -> list[dict[str, Any]]:
    """One row per slot (status document, ``slots``)."""
    ledger = job.ledger
    return [
        {
            "slot": slot.index,
            "retired": slot.retired,
            "region": slot.region,
            "ordinal": slot.ordinal,
            "process": slot.process,
            "incarnation": slot.incarnation,
            "incarnations": slot.incarnations,
            "state": slot.state.value,
            "ready": slot.ready,
            "step": slot.step,
            "steps": ledger.steps(slot.index) if ledger else 0,
            "tokens": ledger.trained(slot.index) if ledger else 0,
            "loss": slot.loss,
            "step_seconds": slot.step_seconds,
            "compute_seconds": ledger.compute_seconds(slot.index) if ledger else 0.0,
            "stalled_seconds": ledger.stalled_seconds(slot.index) if ledger else 0.0,
            "merged_pushes": slot.merged_pushes,
            "heard_seconds_ago": now - slot.heard_at if slot.occupied else None,
            "starved": slot.starved,
            "paused": slot.paused,
        }
        for slot in job.members.slots
    ]


def core_status(job: JobState, now: float) -> dict[str, Any]:
    """The core's part of the status document (docs/contracts.md)."""
    rounds = job.rounds
    active = sum(s.state is SlotState.ACTIVE and s.ready for s in job.members.slots)
    holds = job.clock.holds
    return {
        "phase": job.phase.value,
        "message": job.phase_message,
        "epoch": job.epoch,
        "elapsed_seconds": job.clock.elapsed(now),
        "step": max((slot.step for slot in job.members.slots), default=0),
        "loss": newest_loss(job),
        "quorum": {"active": active, "required": job.config.rules.quorum},
        "standby": len(job.members.standby),
        "standbys": [join.process for join in job.members.standby.values()],
        "evaluators": len(job.members.evaluators),
        "versions": list(job.versions),
        "rounds": [
            {
                "fragment": opened.fragment,
                "round": opened.id,
                "merging": opened.merging,
                "responders": sorted(opened.slots()),
                "waiting": sorted((opened.pulled & job.members.reachable()) - opened.slots()),
            }
            for opened in (rounds.open.values() if rounds else ())
        ],
        "slots": slot_rows(job, now),
        "tokens": job.ledger.totals() if job.ledger else {"trained": 0, "merged": 0, "pending": 0, "dropped": 0},
        "tokens_per_second": job.clock.rate(now),
        "merges": job.merges,
        "goodput": goodput(job, now),
        "uptime": job.clock.uptime(now),
        "eval_loss": [list(pair) for pair in job.eval_loss],
        "hold_since_seconds": holds[-1][0] if job.clock.holding else None,
        "regions_lost": list(job.members.lost),
        "refusals": job.refusals.rows(now),
    }


def core_report(job: JobState, now: float) -> dict[str, Any]:
    """The core's part of report.json, once the job has ended or as it stands."""
    totals = job.ledger.totals() if job.ledger else {"trained": 0, "merged": 0, "pending": 0, "dropped": 0}
    versions = job.versions or [0]
    end = job.clock.elapsed(now)
    return {
        "steps": max((slot.step for slot in job.members.slots), default=0),
        "merges": job.merges,
        "versions": {"min": min(versions), "max": max(versions)},
        "tokens": totals,
        "ledger": job.ledger.rows() if job.ledger else [],
        "goodput": goodput(job, now),
        "uptime": job.clock.uptime(now),
        "initial_loss": job.initial_loss,
        "final_loss": job.final_loss,
        "eval_loss": [list(pair) for pair in job.eval_loss],
        "learners": [
            {
                "slot": row["slot"],
                "retired": row["retired"],
                "incarnations": row["incarnations"],
                "steps": row["steps"],
                "tokens": row["tokens"],
                "compute_seconds": row["compute_seconds"],
                "stalled_seconds": row["stalled_seconds"],
                "merged_pushes": row["merged_pushes"],
            }
            for row in slot_rows(job, now)
        ],
        "holds": [
            {"from_seconds": since, "to_seconds": end if until is None else until} for since, until in job.clock.holds
        ],
        "regions_lost": [
            {
                "region": absence.region,
                "from_seconds": absence.since,
                "to_seconds": end if absence.until is None else absence.until,
            }
            for absence in job.members.absences
        ],
    }
