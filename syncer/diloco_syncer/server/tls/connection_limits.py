"""What one certificate may have at once and per minute; which refusals are counted and logged.

Theory of operation. Limits hang on the certificate (its SHA-256 fingerprint) and never on an address: behind a load
balancer all connections come from one address. How many learners a certificate stands for follows from the regions
that it names, and every limit is a multiple of that number:

- sessions: twice its learners and a few, since a learner that was cut off joins again before its old stream is noticed
  to be dead;
- joins: a token bucket that is refilled with two joins a second and learner, and holds half a minute of that. A
  learner in trouble tries about once a second;
- connections: a learner has one control and eight bulk connections, two more while it gives its state to another, and
  as many old ones may not have been noticed dead;
- silent calls: streams whose first message (a Join) has not come. It comes with the call itself.

Example: a certificate for a region of 10 learners may have 38 sessions (the evaluator counts as one more learner).
Plaintext connections and certificates that name no party count as one certificate for the whole job.

A Join carries ``attempt``, which rises with each Join of a process. A Join whose attempt is not higher than the highest
heard is a replay (the same bytes on another connection), and is refused before it can affect the process that sent the
original. The highest attempts of the ``MAX_PROCESSES`` processes heard of last are remembered.

What a session says, and what its process uploads, is taken at ``MESSAGES_PER_SECOND`` each; what comes faster waits in
the connection (``MessagePace``). A learner reports at most 50 times a second.

Refusals are counted by reason, and at most one per reason and ``LOG_SECONDS`` is logged, so that a flood fills no disk.
No I/O; the time is an argument.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diloco_protocol.security.identity import NO_NAMES, Names
from diloco_protocol.vocabulary import ConnectionRefusal

MAX_CERTIFICATES = 4096
MAX_PROCESSES = 65_536
LOG_SECONDS = 10.0
SPARE_SESSIONS, SPARE_JOINS, SPARE_CONNECTIONS, SPARE_SILENT = 16, 60, 64, 64
JOINS_PER_SECOND = 2.0  # and learner
MESSAGES_PER_SECOND = 200.0
MESSAGES_AT_ONCE = 512  # a learner that leaves offers all of its fragments


class TooManyCalls(Exception):
    """So many calls of one certificate have said nothing yet."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection. ``fingerprint`` empty: plaintext."""

    fingerprint: str = ""
    names: Names = NO_NAMES
    address: str = ""  # for the log
    expires: float = math.inf  # wall-clock seconds

    def __str__(self) -> str:
        who = ", ".join(map(str, sorted(self.names))) or "a certificate without a name"
        return f"{who} ({self.fingerprint[:12]}) at {self.address}" if self.fingerprint else self.address


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of one certificate. ``joins``: size of the token bucket; ``per_second``: its refill rate; ``silent``:
    calls that have said nothing yet."""

    sessions: int
    joins: float
    per_second: float
    connections: int
    silent: int


def allowance_of(regions: Mapping[str, int], names: Names) -> Allowance:
    """The limits of a certificate with these names. ``regions``: learners and spares by region, of the whole job."""
    named = {one.region for one in names}
    every = not named or "" in named
    # The evaluator comes with a learner's certificate.
    count = 1 + sum(learners for region, learners in regions.items() if every or region in named)
    rate = JOINS_PER_SECOND * count
    return Allowance(
        sessions=2 * count + SPARE_SESSIONS,
        joins=30 * rate + SPARE_JOINS,
        per_second=rate,
        connections=20 * count + SPARE_CONNECTIONS,
        silent=16 * count + SPARE_SILENT,
    )


@dataclass(slots=True)
class MessagePace:
    """How fast one session's messages, or its process's uploads, are taken."""

    _due: float = -math.inf  # when the newest was, at the even pace

    def count_message(self, now: float) -> float:
        """Count a message; returns for how many seconds the next one shall wait. ``now``: monotonic seconds."""
        earliest = now - MESSAGES_AT_ONCE / MESSAGES_PER_SECOND
        self._due = max(self._due, earliest) + 1 / MESSAGES_PER_SECOND
        return max(0.0, self._due - now)


class ConnectionLimits:
    """Counts by certificate, and the attempts seen. Only one thread may call the methods."""

    def __init__(self, regions: Mapping[str, int]) -> None:
        self._regions = dict(regions)
        self._sessions: Counter[str] = Counter()
        self._silent: Counter[str] = Counter()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # joins left, as of when
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def admit_join(self, peer: Peer, now: float) -> str | None:
        """Count a Join; returns the reason why its session may not begin, or None. ``now``: monotonic seconds."""
        allowed, key = allowance_of(self._regions, peer.names), peer.fingerprint
        left, then = self._buckets.get(key, (allowed.joins, now))
        left = min(allowed.joins, left + max(0.0, now - then) * allowed.per_second)
        refused = left < 1
        self._buckets[key] = (left if refused else left - 1, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > MAX_CERTIFICATES:
            self._buckets.popitem(last=False)
        if refused:
            return ConnectionRefusal.TOO_MANY_JOINS
        return ConnectionRefusal.TOO_MANY_SESSIONS if self._sessions[key] >= allowed.sessions else None

    @contextlib.contextmanager
    def silent_call(self, peer: Peer) -> Iterator[None]:
        """Count a call while its first message is awaited. Raises TooManyCalls."""
        key = peer.fingerprint
        if self._silent[key] >= allowance_of(self._regions, peer.names).silent:
            raise TooManyCalls("too many calls that say nothing: try again later")
        self._silent[key] += 1
        try:
            yield
        finally:
            self._silent[key] -= 1
            if not self._silent[key]:
                del self._silent[key]

    def session_opened(self, peer: Peer) -> None:
        """Count a session of this peer; ``session_closed`` must follow."""
        self._sessions[peer.fingerprint] += 1

    def session_closed(self, peer: Peer) -> None:
        """A session that was counted has ended."""
        self._sessions[peer.fingerprint] -= 1
        if not self._sessions[peer.fingerprint]:
            del self._sessions[peer.fingerprint]

    def is_new_attempt(self, process: str, attempt: int) -> bool:
        """Whether this attempt of the process is higher than all before. Attempt 0 means: not numbered."""
        if attempt:
            if attempt <= self._attempts.get(process, 0):
                return False
            self._attempts[process] = attempt
            self._attempts.move_to_end(process)
            if len(self._attempts) > MAX_PROCESSES:
                self._attempts.popitem(last=False)
        return True


class RefusalCounter:
    """Counts refusals by reason, and says which of them to log. One instance per thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}  # when a line was written, and the count then

    def count_refusal(self, reason: str, now: float) -> int | None:
        """Count a refusal. None: do not log it; else log it, and this many before it were not logged."""
        self.counts[reason] += 1
        then, count = self._logged.get(reason, (-LOG_SECONDS, 0))
        if now - then < LOG_SECONDS:
            return None
        self._logged[reason] = (now, self.counts[reason])
        return self.counts[reason] - count - 1
