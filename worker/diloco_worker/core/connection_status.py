"""The state of a process's connection to the syncer, as the syncer last told.

It is one frozen value, which the client's thread replaces as a whole; any thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.spec.job import SyncerSettings
from diloco_protocol.vocabulary import JobPhase

NOT_TRIED = "not tried yet"


@dataclass(frozen=True, slots=True)
class ConnectionStatus:
    """``joined``: a session was accepted at least once in this process's life. ``reason``: why there is none now."""

    connected: bool = False
    joined: bool = False
    standby: bool = False
    slot: int = -1
    epoch: int = 0
    phase: str = JobPhase.WAITING
    message: str = ""
    sessions: int = 0  # that were accepted so far
    reason: str = NOT_TRIED
    refused: tuple[str, str] | None = None  # the last refusal since a session: reason and message
    # Of the job, as announced last: every fragment's version summed. It falls when the syncer's store was
    # set back. None: not every fragment has been heard of.
    merges: int | None = None
    settings: SyncerSettings | None = None  # the syncer's, of the last Welcome; None: not understood

    @property
    def tried(self) -> bool:
        """Whether this process has begun to connect; it loads data and model before."""
        return self.joined or self.reason != NOT_TRIED
