"""What to do about one job now, from what is observed: data in, data out."""

from __future__ import annotations

from .types import Memory, Observed, Plan, PlanSettings


def plan(observed: Observed, memory: Memory, settings: PlanSettings) -> Plan:
    """The plan for one job. ``memory`` is changed in place. Raises nothing for a bad job."""
    return Plan(finalizer=True)
