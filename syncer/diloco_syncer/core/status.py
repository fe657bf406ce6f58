"""The core's part of the status document and of report.json: what can be said of the job without the shell, which
adds events with wall-clock time, bytes and refusals."""

from __future__ import annotations

from typing import Any

from diloco_protocol.vocabulary import SlotState
from diloco_syncer.core.state import JobState


def goodput(state: JobState, now: float) -> float:
    """Compute seconds of merged steps ÷ (P × slots × elapsed), 0..1 (algorithm.md section 1).

    Wall time counts for every slot of the job, whether a process was there or not.
    """
    slot_seconds = state.clock.slot_seconds(now)
    if state.ledger is None or slot_seconds <= 0:
        return 0.0
    return state.ledger.merged_compute_seconds() / (state.ledger.fragments * slot_seconds)


def newest_loss(state: JobState) -> float | None:
    """Nats per token: the merged model's last score, else the mean of the active learners' last steps;
    None: there is neither."""
    if state.scores.rows:
        return state.scores.rows[-1][1]
    active = [s.loss for s in state.members.slots if s.state is SlotState.ACTIVE and s.loss is not None]
    return sum(active) / len(active) if active else None


def slot_rows(state: JobState, now: float) -> list[dict[str, Any]]:
    """One row per slot (status document, ``slots``)."""
    ledger = state.ledger
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
        for slot in state.members.slots
    ]


def core_status(state: JobState, now: float) -> dict[str, Any]:
    """The core's part of the status document."""
    rounds = state.rounds
    active = sum(s.state.value == "active" and s.ready for s in state.members.slots)
    holds = state.clock.holds
    return {
        "phase": state.phase.value,
        "message": state.phase_message,
        "epoch": state.epoch,
        "elapsed_seconds": state.clock.elapsed(now),
        "step": max((slot.step for slot in state.members.slots), default=0),
        "loss": newest_loss(state),
        "quorum": {"active": active, "required": state.config.rules.quorum},
        "standby": len(state.members.standby),
        "standbys": [join.process for join in state.members.standby.values()],
        "evaluators": len(state.members.evaluators),
        "versions": list(state.versions),
        "rounds": [
            {
                "fragment": opened.fragment,
                "round": opened.id,
                "merging": opened.merging,
                "responders": sorted(opened.slots()),
                "waiting": sorted((opened.pulled & state.members.reachable()) - opened.slots()),
            }
            for opened in (rounds.open.values() if rounds else ())
        ],
        "slots": slot_rows(state, now),
        "tokens": state.ledger.totals() if state.ledger else {"trained": 0, "merged": 0, "pending": 0, "dropped": 0},
        "tokens_per_second": state.clock.rate(now),
        "merges": state.merges,
        "goodput": goodput(state, now),
        "uptime": state.clock.uptime(now),
        "eval_loss": [list(pair) for pair in state.scores.rows],
        "hold_since_seconds": holds[-1][0] if state.clock.holding else None,
        "regions_lost": list(state.members.lost_regions),
        "refusals": state.refusals.rows(now),
    }


def core_report(state: JobState, now: float) -> dict[str, Any]:
    """The core's part of report.json, once the job has ended or as it stands."""
    totals = state.ledger.totals() if state.ledger else {"trained": 0, "merged": 0, "pending": 0, "dropped": 0}
    versions = state.versions or [0]
    end = state.clock.elapsed(now)
    return {
        "steps": max((slot.step for slot in state.members.slots), default=0),
        "merges": state.merges,
        "versions": {"min": min(versions), "max": max(versions)},
        "tokens": totals,
        "ledger": state.ledger.rows() if state.ledger else [],
        "goodput": goodput(state, now),
        "uptime": state.clock.uptime(now),
        "initial_loss": state.scores.initial,
        "final_loss": state.scores.final,
        "eval_loss": [list(pair) for pair in state.scores.rows],
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
            for row in slot_rows(state, now)
        ],
        "holds": [
            {"from_seconds": since, "to_seconds": end if until is None else until} for since, until in state.clock.holds
        ],
        "regions_lost": [
            {
                "region": absence.region,
                "from_seconds": absence.since,
                "to_seconds": end if absence.until is None else absence.until,
            }
            for absence in state.members.absences
        ],
    }
