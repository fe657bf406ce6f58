"""Who uploads version 0: the first learner that is seated, or the next one if its upload fails.

Only a Welcome can ask for the upload. To ask a learner that is connected already, its session is ended
(``RequestInitialModel``), and its next Welcome asks; until it is back, for a heartbeat timeout, no other
learner is asked. Where an empty store is rebuilt (``recovery``), only learners that hold the model upload.
"""

from __future__ import annotations

from collections import Counter

from diloco_protocol.vocabulary import ENDED_PHASES
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.recovery.lost_versions import VersionRecovery
from diloco_syncer.core.state import JobState


class InitialModelRequest:
    """The search for a learner that uploads version 0. ``connection``: the one that does; None: there is none."""

    def __init__(self, state: JobState, actions: Actions, recovery: VersionRecovery) -> None:
        self._state = state
        self._actions = actions
        self._recovery = recovery
        self.connection: int | None = None
        self._invited = ("", 0.0)  # the process that was told to join again for it, and until when it is expected
        self._failures: Counter[str] = Counter()  # uploads that did not come through, by process

    def offer(self, slot: Slot, now: float, *, is_welcome: bool) -> None:
        """A process was seated: it uploads version 0 if that is missing, unless a better one is expected back. One that
        stood by until now gets no Welcome (``is_welcome``), which alone can ask: ``advance`` invites it."""
        if self._state.initialised or not self._may_upload(slot, now):
            return
        uploader = self.connection
        if self._recovery.is_rebuilding and uploader is not None and not self._recovery.origins(uploader):
            self.connection = None  # it builds another model than the one that this learner holds
        if self.connection is not None or not is_welcome:
            return
        invited = self._expected_process(now)
        if invited in ("", slot.holder.process) or self._failures[slot.holder.process] < self._failures[invited]:
            self.connection = slot.holder.connection
            self._invited = ("", 0.0)

    def complete(self) -> None:
        """Version 0 is durable."""
        self.connection = None

    def mark_failed(self, connection: int) -> None:
        """Version 0 does not come from this connection; learners that failed less often go before it."""
        if self.connection != connection:
            return
        self.connection = None
        slot = self._state.members.by_connection(connection)
        if slot is not None:
            self._failures[slot.holder.process] += 1

    def advance(self, now: float) -> None:
        """Invite the next learner if version 0 is missing and none is uploading it."""
        state = self._state
        if (
            state.initialised
            or self.connection is not None
            or state.phase in ENDED_PHASES
            or self._expected_process(now)
        ):
            return
        if self._invited[0]:
            self._failures[self._invited[0]] += 1  # it did not come back
            self._invited = ("", 0.0)
        connected = [
            slot for slot in state.members.slots if slot.holder.connection is not None and self._may_upload(slot, now)
        ]
        if not connected:
            return
        slot = min(connected, key=lambda slot: self._failures[slot.holder.process])
        assert slot.holder.connection is not None
        self._invited = (slot.holder.process, now + state.config.heartbeat_timeout)
        self._actions.add(ev.RequestInitialModel(slot.holder.connection))

    def _may_upload(self, slot: Slot, now: float) -> bool:
        if self._recovery.is_rebuilding:
            return slot.holder.connection is not None and self._recovery.may_give_version_0(slot.holder.connection, now)
        return self._state.config.mode.builds_version_0(slot)

    def _expected_process(self, now: float) -> str:
        """The process that was invited and is expected back; empty: none is."""
        process, until = self._invited
        if now < until and any(s.occupied and s.holder.process == process for s in self._state.members.slots):
            return process
        return ""
