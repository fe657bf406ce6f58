"""Who uploads version 0: the first learner that is seated, or the next one if its upload fails.

Only a Welcome can ask for the upload. To ask a learner that is connected already, its session is ended
(``RequestInitialModel``), and its next Welcome asks; until it is back, for a heartbeat timeout, no other
learner is asked. Where an empty store is rebuilt (``recovery``), only learners that hold the model upload. If none of
these has a slot, one that stands by is asked: it holds the same versions, and gives them as well from where it is.
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
        self._process = ""  # that of the connection
        self._invited = ("", 0.0)  # the process that was told to join again for it, and until when it is expected
        self._invited_standby = False  # whether that one has no slot
        self._failures: Counter[str] = Counter()  # uploads that did not come through, by process

    def offer(self, slot: Slot, now: float, *, is_welcome: bool) -> None:
        """A process was seated: it uploads version 0 if that is missing, unless a better one is expected back. One that
        stood by until now gets no Welcome (``is_welcome``), which alone can ask: ``advance`` invites it."""
        if self._state.initialised or not self._may_upload(slot, now):
            return
        self._replace_builder()
        if self.connection is not None or not is_welcome:
            return
        invited, process = self._expected_process(now), slot.holder.process
        if invited in ("", process) or self._failures[process] < self._failures[invited]:
            self._take(slot.holder.connection, process)

    def offer_standby(self, join: ev.Join, now: float) -> None:
        """A process that stands by has joined: it uploads version 0 if it was invited to."""
        if self._state.initialised or not self._recovery.may_give_version_0(join.connection, now):
            return
        self._replace_builder()
        if self.connection is None and join.process == self._expected_process(now):
            self._take(join.connection, join.process)

    def _replace_builder(self) -> None:
        """A process that holds the model of an emptied store has joined: nobody else uploads one that is new."""
        uploader = self.connection
        if self._recovery.is_rebuilding and uploader is not None and not self._recovery.origins(uploader):
            self.connection = None

    def _take(self, connection: int | None, process: str) -> None:
        self.connection, self._process, self._invited = connection, process, ("", 0.0)

    def complete(self) -> None:
        """Version 0 is durable."""
        self.connection = None

    def mark_failed(self, connection: int) -> None:
        """Version 0 does not come from this connection; learners that failed less often go before it."""
        if self.connection != connection:
            return
        self.connection = None
        self._failures[self._process] += 1

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
        holders = [slot.holder for slot in state.members.slots if self._may_upload(slot, now)]
        able = [(holder.process, holder.connection) for holder in holders if holder.connection is not None]
        self._invited_standby = not able
        if not able:
            standby = state.members.standby
            able = [(standby[c].process, c) for c in self._recovery.standby_holders(now)]
        if not able:
            return
        process, connection = min(able, key=lambda one: self._failures[one[0]])
        self._invited = (process, now + state.config.heartbeat_timeout)
        self._actions.add(ev.RequestInitialModel(connection))

    def _may_upload(self, slot: Slot, now: float) -> bool:
        if self._recovery.is_rebuilding:
            return slot.holder.connection is not None and self._recovery.may_give_version_0(slot.holder.connection, now)
        return self._state.config.mode.builds_version_0(slot)

    def _expected_process(self, now: float) -> str:
        """The process that was invited and is expected back; empty: none is."""
        process, until = self._invited
        held = self._invited_standby or any(
            slot.occupied and slot.holder.process == process for slot in self._state.members.slots
        )
        return process if now < until and held else ""
