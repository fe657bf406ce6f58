"""What the background thread says to the training thread, and the box that it lies in.

The training thread empties the box at step boundaries; putting and taking hold a
lock for as long as a deque's append takes. Only at the start, in deterministic
mode, while paused and while draining does it wait for something to come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from .adoption import Broadcast
from .fragments import Vector
from .sampling import Grant


@dataclass(frozen=True, slots=True)
class Seated:
    """This process holds a slot now. ``continuing``: the same tenure goes on."""

    slot: int
    incarnation: int
    continuing: bool
    slot_step: int
    slot_tokens: int
    leases: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Unseated:
    """This process holds no slot (any more): it is a standby until it is seated."""


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A session began; what follows is said by this syncer. ``trained``: some fragment is above
    version 0. ``optimizer_bytes``: size of the inner optimizer state in the job's checkpoint, 0: none."""

    trained: bool
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A broadcast was announced; its bytes are on their way."""

    news: Broadcast


@dataclass(frozen=True, slots=True)
class Arrived:
    """A broadcast's bytes are here: ready to be adopted."""

    news: Broadcast
    vector: Vector
    job_tokens: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The syncer asks for a push in this round; ``version`` is v_p."""

    fragment: int
    round: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a push. ``accepted`` None: none came, its fate is open."""

    fragment: int
    sequence: int
    accepted: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Leased:
    """One more block."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The job's phase, in the words of the status document."""

    phase: str
    message: str


@dataclass(frozen=True, slots=True)
class InitialWanted:
    """This process shall upload version 0."""


@dataclass(frozen=True, slots=True)
class FrozenArrived:
    """The job's frozen parameters, safetensors; None: version 0 has none."""

    data: bytes | None


@dataclass(frozen=True, slots=True)
class StateWanted:
    """A newcomer (or the checkpoint) wants this learner's inner optimizer state."""

    transfer: int


@dataclass(frozen=True, slots=True)
class StateArrived:
    """A peer's inner optimizer state, safetensors; None: there is none to be had.
    ``versions``: (epoch, version) per fragment at the peer's snapshot."""

    data: bytes | None
    versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session broke; answers that were on their way will not come."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The background cannot go on: the training thread raises this."""

    error: Exception


Item = (
    Seated | Unseated | Welcomed | Heard | Arrived | Pulled | Verdict | Leased | PhaseChanged | InitialWanted
    | FrozenArrived | StateWanted | StateArrived | Disconnected | Failure
)  # fmt: skip


class Inbox:
    """Items in order. Its length is bounded by what the syncer may have open at once:
    a pull, a broadcast and a verdict per fragment, one lease, one phase."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._filled = threading.Condition()
        self._poked = False

    def poke(self) -> None:
        """Wake whoever waits: something that is not mail is there (a batch)."""
        with self._filled:
            self._poked = True
            self._filled.notify_all()

    def put(self, item: Item) -> None:
        with self._filled:
            self._items.append(item)
            self._filled.notify_all()

    def take(self) -> list[Item]:
        """Everything there is now, without waiting."""
        if not self._items:
            return []
        with self._filled:
            items = list(self._items)
            self._items.clear()
        return items

    def wait(self, timeout: float) -> bool:
        """Until there is mail, or a poke, at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        with self._filled:
            while not self._items and not self._poked:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._filled.wait(left)
            self._poked = False
            return True
