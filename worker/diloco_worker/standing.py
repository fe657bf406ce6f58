"""Where a process stands with the syncer, as its exchange last heard it.

One frozen value, replaced as a whole by the exchange's thread; any thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """``joined``: a session was accepted once in this process's life. ``reason``: why there is no session."""

    connected: bool = False
    joined: bool = False
    standby: bool = False
    slot: int = -1
    epoch: int = 0
    phase: str = "waiting"
    message: str = ""
    sessions: int = 0  # that were accepted so far
    reason: str = "not tried yet"
    refused: tuple[str, str] | None = None  # the last refusal since a session: its word, its message
