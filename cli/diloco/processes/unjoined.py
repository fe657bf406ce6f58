"""Learners that run and do not join: their program never asks the library for batches, or loads for long.

A program that makes a ``Learner`` and iterates over a loader of its own opens no connection. Nothing fails: its process
runs, and the job waits for it. Which of the two it is nobody can tell from outside, so that both are said, once for
each process. Plain code; the time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping

UNJOINED_SECONDS = 90.0


class UnjoinedLearners:
    """Watches the learners' processes of a run. A process's id is new at each start."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # process id -> since when it runs, as seen here; inf: it was said

    def find(self, now: float, unjoined: Mapping[str, str]) -> list[str]:
        """Who is to be told of now, by name. ``unjoined``: the process ids, by name, of learners that run and have not
        joined, of a job that trains."""
        self._since = {one: since for one, since in self._since.items() if one in unjoined.values()}
        found = []
        for name, process in unjoined.items():
            if now - self._since.setdefault(process, now) >= UNJOINED_SECONDS:
                self._since[process] = float("inf")
                found.append(name)
        return found


def unjoined_text(name: str, log: object) -> str:
    return (
        f"{name} has run for {UNJOINED_SECONDS:.0f} s and has not joined: it still loads, or its loop does not ask for "
        f"learner.batches() (or learner.steps()); see {log}"
    )
