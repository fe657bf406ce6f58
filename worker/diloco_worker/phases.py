"""The job's phases as a worker sees them, in the words of the status document (sync.proto PhaseName)."""

from __future__ import annotations

GOING = frozenset({"waiting", "training", "holding"})  # learners are wanted
LEAVING = frozenset({"draining", "evaluating"})  # no further step; offers are taken
ENDED = frozenset({"complete", "failed", "suspended", "deleted"})
CLOSING = LEAVING | ENDED  # no further step
PHASES = ("waiting", "training", "holding", "draining", "evaluating", "complete", "failed", "suspended", "deleted")
