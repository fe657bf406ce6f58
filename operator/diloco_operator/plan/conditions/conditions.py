"""The conditions of a job: one place where each is decided, with reason and message.

Which there are. ``Ready``, ``Suspended``, ``Complete``, ``Failed``, ``Degraded`` and
``NameConflict`` are on every job, True or False. ``SyncerReady``, ``QuorumMet``,
``RegionLost`` and ``LinksTooSlow`` are the word of the syncer's cluster, and absent on other
clusters' copies of the job; ``HubReachable`` and ``SettingsDiffer`` are what a cluster without
the syncer can tell by its learners, and absent at the syncer's. ``SpecDrift`` is on both
sides: at the syncer's of whoever was refused for it, elsewhere of the learners here. What
cannot be known at the moment is Unknown. A job whose spec is refused keeps the conditions
that it had, and says why in ``Ready``.

``lastTransitionTime`` changes with the status of a condition, ``observedGeneration`` is the
generation that was looked at. Messages hold nothing that changes by itself (no ages, no
counters of steps), or the status would be written all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from diloco_operator.job import stamp
from diloco_operator.model import Object

Truth = Literal["True", "False", "Unknown"]

ORDER = (
    "Ready",
    "QuorumMet",
    "SyncerReady",
    "HubReachable",
    "RegionLost",
    "LinksTooSlow",
    "SpecDrift",
    "SettingsDiffer",
    "NameConflict",
    "Degraded",
    "Suspended",
    "Complete",
    "Failed",
)
FIELDS = 10  # named in a message


@dataclass
class Conditions:
    """The conditions being decided. ``before``: those of the job's status."""

    before: list[dict[str, Any]]
    generation: int
    now: float
    found: dict[str, Object] = field(default_factory=dict)

    def say(self, kind: str, status: Truth | bool, reason: str, message: str = "") -> None:
        """Decide one condition."""
        said = status if isinstance(status, str) else ("True" if status else "False")
        old = next((c for c in self.before if c.get("type") == kind), {})
        since = old.get("lastTransitionTime") if old.get("status") == said else None
        self.found[kind] = {
            "type": kind,
            "status": said,
            "reason": reason,
            "message": message[:4000],
            "observedGeneration": self.generation,
            "lastTransitionTime": since if isinstance(since, str) else stamp(self.now),
        }

    def keep(self) -> None:
        """Those that were not decided stay as they were."""
        for old in self.before:
            if isinstance(old.get("type"), str):
                self.found.setdefault(old["type"], dict(old))

    def rows(self) -> list[Object]:
        """In their order."""
        known = [self.found[kind] for kind in ORDER if kind in self.found]
        return known + [row for kind, row in self.found.items() if kind not in ORDER]

    def truth(self, kind: str) -> str:
        return str(self.found.get(kind, {}).get("status", ""))


def listed(fields: list[str]) -> str:
    """Fields of a job for a message, which names so many and counts the others."""
    more = f" and {len(fields) - FIELDS} more" if len(fields) > FIELDS else ""
    return ", ".join(fields[:FIELDS]) + more
