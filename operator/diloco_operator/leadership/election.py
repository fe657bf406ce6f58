"""The election of a leader: what one candidate concludes from what it reads of the Lease, and from its clock.

Theory of operation. The Lease names its holder. The holder renews it every ``RETRY_SECONDS``. A candidate that has
seen the same version of the Lease for ``LEASE_SECONDS`` writes itself into it. It writes on that version, so that the
API server refuses (409) if anybody wrote meanwhile.

Clocks are never compared. A candidate counts from when it *received* the version. The holder counts from when it
*sent* the renewal that succeeded, and acts for ``ACT_SECONDS`` from then. What it received was sent before, so
the holder has stopped before another begins, by ``LEASE_SECONDS - ACT_SECONDS`` at least: the longest that its last
write may take. The times that stand in the Lease are for people.

Example: a renewal is sent at 0, stored at 4 and received by the candidate at 6. The leader acts until 10, its last
write has ended at 15, and the candidate takes over at 21 at the earliest.

The clock must count on while the process or its machine stands still (``candidate.read_clock``).
"""

from __future__ import annotations

from dataclasses import dataclass

LEASE_SECONDS = 15.0
ACT_SECONDS = 10.0
RETRY_SECONDS = 2.0
FREE = ""
"""``LeaseRecord.holder`` of a Lease that was given back."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A Lease as the API server has it. ``version``: its resourceVersion. ``term``: rises with each new holder.
    ``seconds``: how long its holder may be silent. ``acquired``: since when it is held, as the Lease says it."""

    holder: str
    version: str
    term: int
    seconds: float = LEASE_SECONDS
    acquired: str = ""


@dataclass(frozen=True, slots=True)
class LeaseWrite:
    """What to write. ``version`` None: the Lease is to be made. ``acquired`` empty: now."""

    holder: str
    version: str | None
    term: int
    acquired: str = ""


class Election:
    """One candidate. ``identity`` is nobody else's, not even an earlier process's of the same name.

    All times are seconds of one clock. ``may_act`` and ``seconds_for_a_write`` may be called from any thread.
    """

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.record: LeaseRecord | None = None
        self._received_at = 0.0  # when ``record`` was first seen
        self._sent_at: float | None = None  # of the newest renewal that succeeded; None: leads nothing
        self._known = False  # whether ``record`` is the Lease, as far as anybody can know
        self._last_term = 0  # the greatest that was read

    @property
    def holder(self) -> str:
        """Who holds the Lease, as far as is known."""
        return self.record.holder if self.record is not None else FREE

    def may_act(self, now: float) -> bool:
        """Whether this candidate leads."""
        return self.seconds_for_a_write(now) > 0

    def seconds_to_act(self, now: float) -> float:
        """For how long this candidate leads if it cannot renew; 0: it does not lead."""
        sent_at = self._sent_at  # once: another thread may end the leadership meanwhile
        return 0.0 if sent_at is None else max(0.0, sent_at + ACT_SECONDS - now)

    def seconds_for_a_write(self, now: float) -> float:
        """How long a write that begins now may take; 0: it may not begin."""
        sent_at = self._sent_at  # once, as above
        if sent_at is None or now >= sent_at + ACT_SECONDS:
            return 0.0
        return sent_at + LEASE_SECONDS - now

    def receive(self, record: LeaseRecord | None, now: float) -> None:
        """The Lease was read (None: there is none), and the answer came at ``now``."""
        if not self._known or record != self.record:
            self.record, self._received_at, self._known = record, now, True
        self._last_term = max(self._last_term, record.term if record is not None else 0)
        if record is None or record.holder != self.identity:
            self._sent_at = None

    def forget(self) -> None:
        """The Lease is another than was known, for a write on it was refused: it has to be read."""
        self._known = False

    def plan_write(self, now: float) -> LeaseWrite | None:
        """What to write now; None: the Lease has to be read first, or is another's."""
        record = self.record
        if not self._known:
            return None
        if record is None:  # where somebody deleted it, its holder may not know that yet
            waits = self._last_term > 0 and now < self._received_at + LEASE_SECONDS
            return None if waits else LeaseWrite(self.identity, None, self._last_term + 1)
        if record.holder == self.identity:
            return LeaseWrite(self.identity, record.version, record.term, record.acquired)
        if record.holder == FREE or now >= self._received_at + max(record.seconds, LEASE_SECONDS):
            return LeaseWrite(self.identity, record.version, record.term + 1)
        return None

    def confirm_write(self, record: LeaseRecord, sent_at: float) -> None:
        """A planned write that was sent at ``sent_at`` succeeded; the Lease is ``record`` since."""
        self.record, self._known, self._last_term = record, True, record.term
        self._sent_at = sent_at

    def plan_release(self) -> LeaseWrite | None:
        """Give the Lease back, and lead no more at once; None: it is not held."""
        record, led = self.record, self._sent_at is not None
        self._sent_at = None
        if record is None or not led or record.holder != self.identity:
            return None
        return LeaseWrite(FREE, record.version, record.term, record.acquired)
