"""How fast a link is, by the transfers that happen anyway.

Theory of operation. Bytes over the time in which at least one transfer was under way, so that several at once count as
what they are, one link's work. Where the receiver measures, a transfer begins with its header and ends with its last
byte: neither round trips nor anybody's computing count. It says how fast the link was for what it carried; a payload
that fits into one packet says little. Newer transfers weigh more.

Plain code: the time (seconds, monotonic) comes in as an argument.
"""

from __future__ import annotations

_HALF_LIFE = 8  # transfers after which an old one counts half


class Meter:
    """One direction of one link."""

    def __init__(self) -> None:
        self.transfers = 0
        self._active = 0
        self._since = 0.0  # of the time that is not counted yet
        self._busy = self._pending = 0.0  # seconds: of transfers that ended; since the last that did
        self._bytes = 0.0

    def begin(self, now: float) -> None:
        """The first bytes of a transfer are here."""
        self._pass(now)
        self._active += 1

    def end(self, now: float, size: int | None) -> None:
        """It is over, or (None) it broke: what it took then says nothing of the link."""
        self._pass(now)
        self._active -= 1
        if size is None:
            self._pending = 0.0
            return
        keep = 0.5 ** (1 / _HALF_LIFE)
        self._bytes = keep * self._bytes + size
        self._busy = keep * self._busy + self._pending
        self._pending = 0.0
        self.transfers += 1

    def _pass(self, now: float) -> None:
        if self._active:
            self._pending += max(0.0, now - self._since)
        self._since = now

    @property
    def rate(self) -> float | None:
        """Bytes per second, the newer transfers weighing more; None: nothing was measured."""
        return self._bytes / self._busy if self._busy > 0 else None
