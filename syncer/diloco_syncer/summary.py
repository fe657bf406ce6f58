"""What the core can tell about the job: the status document, without what only the
walls know (events with wall-clock time, bytes, refusals). Plain code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_syncer.core import Core


def goodput(core: Core, now: float) -> float:
    """Compute seconds of merged steps ÷ (P × slots × elapsed), 0..1 (algorithm.md section 1).

    Wall time counts for every slot of the job, whether a process was there or not.
    """
    elapsed = core.clock.elapsed(now)
    if core.ledger is None or elapsed <= 0:
        return 0.0
    slot_seconds = len(core.config.places) * elapsed
    return core.ledger.merged_compute_seconds() / (core.ledger.fragments * slot_seconds)


def slot_rows(core: Core, now: float) -> list[dict[str, Any]]:
    """One row per slot (status document, ``slots``)."""
    ledger = core.ledger
    return [
        {
            "slot": slot.index,
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
        for slot in core.members.slots
    ]


def core_status(core: Core, now: float) -> dict[str, Any]:
    """The core's part of the status document (docs/design.md)."""
    rounds = core.rounds
    active = sum(s.state.value == "active" and s.ready for s in core.members.slots)
    holds = core.clock.holds
    return {
        "phase": core.phase.value,
        "message": core.phases.message,
        "epoch": core.epoch,
        "elapsed_seconds": core.clock.elapsed(now),
        "quorum": {"active": active, "required": core.config.rules.quorum},
        "standby": len(core.members.standby),
        "evaluators": len(core.members.evaluators),
        "versions": list(core.versions),
        "rounds": [
            {
                "fragment": opened.fragment,
                "round": opened.id,
                "merging": opened.merging,
                "responders": sorted(opened.slots()),
                "waiting": sorted((opened.pulled & core.members.reachable()) - opened.slots()),
            }
            for opened in (rounds.open.values() if rounds else ())
        ],
        "slots": slot_rows(core, now),
        "tokens": core.ledger.totals()
        if core.ledger
        else {"trained": 0, "merged": 0, "pending": 0, "dropped": 0},
        "tokens_per_second": core.clock.rate(now),
        "merges": core.merges,
        "goodput": goodput(core, now),
        "uptime": core.clock.uptime(now),
        "eval_loss": [list(pair) for pair in core.eval_loss],
        "hold_since_seconds": holds[-1][0] if core.clock.holding else None,
    }


def core_report(core: Core, now: float) -> dict[str, Any]:
    """The core's part of report.json, once the job has ended or as it stands."""
    totals = core.ledger.totals() if core.ledger else {"trained": 0, "merged": 0, "pending": 0, "dropped": 0}
    versions = core.versions or [0]
    end = core.clock.elapsed(now)
    return {
        "steps": max((slot.step for slot in core.members.slots), default=0),
        "merges": core.merges,
        "versions": {"min": min(versions), "max": max(versions)},
        "tokens": totals,
        "ledger": core.ledger.rows() if core.ledger else [],
        "goodput": goodput(core, now),
        "uptime": core.clock.uptime(now),
        "initial_loss": core.initial_loss,
        "final_loss": core.final_loss,
        "eval_loss": [list(pair) for pair in core.eval_loss],
        "learners": [
            {
                "slot": row["slot"],
                "incarnations": row["incarnations"],
                "steps": row["steps"],
                "tokens": row["tokens"],
                "compute_seconds": row["compute_seconds"],
                "stalled_seconds": row["stalled_seconds"],
                "merged_pushes": row["merged_pushes"],
            }
            for row in slot_rows(core, now)
        ],
        "holds": [
            {"from_seconds": since, "to_seconds": end if until is None else until}
            for since, until in core.clock.holds
        ],
    }
