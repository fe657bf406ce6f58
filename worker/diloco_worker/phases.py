"""The job's phases as a worker sees them, in the words of the status document (sync.proto PhaseName)."""

from __future__ import annotations

LEAVING = frozenset({"draining", "evaluating"})  # no further step; offers are taken
ENDED = frozenset({"complete", "failed", "suspended", "deleted"})
CLOSING = LEAVING | ENDED  # no further step
