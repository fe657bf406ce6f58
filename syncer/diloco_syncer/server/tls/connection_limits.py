"""What one certificate may have at once and per minute, and what was refused. Plain code: time is given.

Theory of operation
-------------------
Limits hang on the certificate (its SHA-256 fingerprint) and never on an address: behind a
node port or a load balancer all connections come from one. How many learners a
certificate stands for follows from the regions that it names, and every limit is a
multiple of that:

- sessions: twice its learners and a few, since a learner that was cut off joins again
  before its old stream is noticed to be dead;
- joins: a bucket that holds two for each second and learner of a minute's half, and is
  filled at that rate. A learner in trouble tries about once a second;
- connections: a learner has a control and four bulk connections, and as many old ones may
  not be noticed dead yet.

Plaintext connections and certificates that name nobody count as one certificate for the
whole job.

A Join carries ``attempt``, which rises with each Join of a process. Who sends one again
(a replay: the same bytes on another connection) is refused, before anything happens to the
process that said it first. The highest attempts of the ``MAX_PROCESSES`` processes heard
of last are remembered.

Refusals are counted by reason, and at most one per reason and ``SAY_SECONDS`` is logged, so
that a flood fills no disk.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from diloco_protocol.security.identity import NOBODY, Names

MAX_CERTIFICATES = 4096
MAX_PROCESSES = 65_536
SAY_SECONDS = 10.0
SPARE_SESSIONS, SPARE_JOINS, SPARE_CONNECTIONS = 16, 60, 64
JOINS_PER_SECOND = 2.0  # and learner

# Reasons: labels of diloco_refused_connections_total (docs/protocol.md).
TOO_MANY_SESSIONS = "too-many-sessions"
TOO_MANY_JOINS = "too-many-joins"
TOO_MANY_CONNECTIONS = "too-many-connections"
BAD_JOIN = "bad-join"
WRONG_JOB = "wrong-job"
WRONG_TOKEN = "wrong-token"
WRONG_REGION = "wrong-region"
WRONG_PROCESS = "wrong-process"
REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at a connection's other end. ``fingerprint`` empty: plaintext."""

    fingerprint: str = ""
    names: Names = NOBODY
    address: str = ""  # for the log
    expires: float = math.inf  # wall-clock seconds

    def __str__(self) -> str:
        who = ", ".join(map(str, sorted(self.names))) or "a certificate without a name"
        return f"{who} ({self.fingerprint[:12]}) at {self.address}" if self.fingerprint else self.address


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one certificate. ``joins``: at once; ``per_second``: as the bucket fills."""

    sessions: int
    joins: float
    per_second: float
    connections: int


def limits(regions: Mapping[str, int], names: Names) -> Limits:
    """``regions``: learners (and spares) by region, of the whole job."""
    named = {one.region for one in names}
    every = not named or "" in named
    # The evaluator comes with a learner's certificate.
    count = 1 + sum(learners for region, learners in regions.items() if every or region in named)
    rate = JOINS_PER_SECOND * count
    return Limits(2 * count + SPARE_SESSIONS, 30 * rate + SPARE_JOINS, rate, 10 * count + SPARE_CONNECTIONS)


class Guards:
    """Counts by certificate, and the replay memory. All methods belong to one thread."""

    def __init__(self, regions: Mapping[str, int]) -> None:
        self._regions = dict(regions)
        self._sessions: Counter[str] = Counter()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # joins left, as of when
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def join(self, peer: Peer, now: float) -> str | None:
        """A session begins with a Join; the reason why it may not. ``now``: monotonic seconds."""
        allowed, key = limits(self._regions, peer.names), peer.fingerprint
        left, then = self._buckets.get(key, (allowed.joins, now))
        left = min(allowed.joins, left + max(0.0, now - then) * allowed.per_second)
        refused = left < 1
        self._buckets[key] = (left if refused else left - 1, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > MAX_CERTIFICATES:
            self._buckets.popitem(last=False)
        if refused:
            return TOO_MANY_JOINS
        return TOO_MANY_SESSIONS if self._sessions[key] >= allowed.sessions else None

    def opened(self, peer: Peer) -> None:
        """A session of this peer is open; ``closed`` follows."""
        self._sessions[peer.fingerprint] += 1

    def closed(self, peer: Peer) -> None:
        self._sessions[peer.fingerprint] -= 1
        if not self._sessions[peer.fingerprint]:
            del self._sessions[peer.fingerprint]

    def fresh(self, process: str, attempt: int) -> bool:
        """Whether this Join was not heard before. Attempts of 0 are not counted (an older learner)."""
        if attempt:
            if attempt <= self._attempts.get(process, 0):
                return False
            self._attempts[process] = attempt
            self._attempts.move_to_end(process)
            if len(self._attempts) > MAX_PROCESSES:
                self._attempts.popitem(last=False)
        return True


class Refusals:
    """How many were refused, and which of them to log. One instance per thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said: dict[str, tuple[float, int]] = {}  # when a line was written, and the count then

    def note(self, reason: str, now: float) -> int | None:
        """Count one. None: not to be logged; else how many were not since the last line."""
        self.counts[reason] += 1
        then, count = self._said.get(reason, (-SAY_SECONDS, 0))
        if now - then < SAY_SECONDS:
            return None
        self._said[reason] = (now, self.counts[reason])
        return self.counts[reason] - count - 1
