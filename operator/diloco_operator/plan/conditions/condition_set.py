"""The list of conditions that a turn decides, as Kubernetes' conventions have it.

``lastTransitionTime`` changes when a condition's status does; ``observedGeneration`` is the
generation of the job that was looked at. Messages hold nothing that changes by itself (no ages,
no counters of steps), or the status would be written all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from diloco_operator.job import rfc3339
from diloco_operator.model import Object

Truth = Literal["True", "False", "Unknown"]

ORDER = (
    "Ready",
    "QuorumMet",
    "SyncerReady",
    "Durable",
    "HubReachable",
    "RegionLost",
    "LinksTooSlow",
    "RoundOverdue",
    "SpecDrift",
    "SettingsDiffer",
    "NameConflict",
    "Degraded",
    "Suspended",
    "Complete",
    "Failed",
    "Reconciling",
    "Stalled",
)


@dataclass
class ConditionSet:
    """The conditions that this turn has decided so far."""

    before: list[dict[str, Any]]  # those of the job's status
    generation: int
    now: float
    found: dict[str, Object] = field(default_factory=dict)

    def set(self, kind: str, status: Truth | bool, reason: str, message: str = "") -> None:
        """Decide one condition: its status, a reason in CamelCase, a sentence."""
        text = status if isinstance(status, str) else ("True" if status else "False")
        old = next((c for c in self.before if c.get("type") == kind), {})
        since = old.get("lastTransitionTime") if old.get("status") == text else None
        self.found[kind] = {
            "type": kind,
            "status": text,
            "reason": reason,
            "message": message[:4000],
            "observedGeneration": self.generation,
            "lastTransitionTime": since if isinstance(since, str) else rfc3339(self.now),
        }

    def set_fault(self, kind: str, reason: str, message: str, *, over: str) -> None:
        """Decide a condition that is True where there is a fault. ``message`` empty: there is none, with the
        reason ``over``."""
        self.set(kind, bool(message), reason if message else over, message)

    def keep_undecided(self) -> None:
        """Keep the conditions that were not decided as they were."""
        for old in self.before:
            if isinstance(old.get("type"), str):
                self.found.setdefault(old["type"], dict(old))

    def keep(self, kind: str) -> bool:
        """Decide a condition as it was; False, if there was none."""
        old = next((c for c in self.before if c.get("type") == kind), None)
        if old:
            self.set(kind, old["status"], str(old.get("reason")), str(old.get("message")))
        return bool(old)

    def keep_or_unknown(self, kind: str, reason: str, message: str) -> None:
        """Keep a condition that cannot be decided now; one that never was becomes Unknown."""
        if not self.keep(kind):
            self.set(kind, "Unknown", reason, message)

    def rows(self) -> list[Object]:
        """The decided conditions, in ``ORDER``."""
        known = [self.found[kind] for kind in ORDER if kind in self.found]
        return known + [row for kind, row in self.found.items() if kind not in ORDER]

    def status_of(self, kind: str) -> str:
        """True, False or Unknown; empty: the condition was not decided."""
        return str(self.found.get(kind, {}).get("status", ""))
