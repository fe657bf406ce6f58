"""Where a process stands with the syncer, as its exchange last heard it.

One frozen value, replaced as a whole by the exchange's thread; any thread may read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.vocabulary import JobPhase
from diloco_worker.core.syncer_settings import SyncerSettings

NOT_TRIED = "not tried yet"


@dataclass(frozen=True, slots=True)
class ConnectionStatus:
    """``joined``: a session was accepted once in this process's life. ``reason``: why there is no session."""

    connected: bool = False
    joined: bool = False
    standby: bool = False
    slot: int = -1
    epoch: int = 0
    phase: str = JobPhase.WAITING
    message: str = ""
    sessions: int = 0  # that were accepted so far
    reason: str = NOT_TRIED
    refused: tuple[str, str] | None = None  # the last refusal since a session: its word, its message
    # Of the job, as announced last: every fragment's version summed. It falls when the syncer's store was
    # set back. None: not every fragment has been heard of.
    merges: int | None = None
    settings: SyncerSettings | None = None  # what the syncer said last; None: nothing that is understood

    @property
    def tried(self) -> bool:
        """Whether this process has tried to reach the syncer; it loads data and model before."""
        return self.joined or self.reason != NOT_TRIED
