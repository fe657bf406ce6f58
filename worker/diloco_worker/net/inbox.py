"""What the background thread says to the training thread, and the box that it lies in.

The training thread empties the box at step boundaries; putting and taking hold a
lock for as long as a deque's append takes. Only at the start, in deterministic
mode, while paused and while draining does it wait for something to come.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from diloco_worker.core.adoption import Broadcast
from diloco_worker.core.leases import LeaseGrant
from diloco_worker.core.syncer_settings import SyncerSettings
from diloco_worker.fragments import Vector


@dataclass(frozen=True, slots=True)
class Seated:
    """This process holds a slot now. ``continuing``: the same tenure goes on."""

    slot: int
    incarnation: int
    continuing: bool
    slot_step: int
    slot_tokens: int
    leases: tuple[LeaseGrant, ...]


@dataclass(frozen=True, slots=True)
class Unseated:
    """This process holds no slot (any more): it is a standby until it is seated."""


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A session began; what follows is said by this syncer. ``trained``: some fragment is above
    version 0. ``optimizer_bytes``: size of the inner optimizer state in the job's checkpoint, 0: none.
    ``hub``: the settings that hold, None where the job file's do."""

    trained: bool
    optimizer_bytes: int
    settings: SyncerSettings | None = None


@dataclass(frozen=True, slots=True)
class Announced:
    """A broadcast was announced; its bytes come by themselves, or (observers) when asked for."""

    news: Broadcast
    job_tokens: int = 0  # trained in all, when it was merged


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A broadcast's bytes are here: ready to be adopted."""

    news: Broadcast
    vector: Vector
    job_tokens: int


@dataclass(frozen=True, slots=True)
class PushRequested:
    """The syncer asks for a push in this round; ``version`` is v_p."""

    fragment: int
    round: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class PushAnswered:
    """The answer to a push. ``accepted`` None: none came, its fate is open."""

    fragment: int
    sequence: int
    accepted: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """One more block."""

    grant: LeaseGrant


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The job's phase, in the words of the status document."""

    phase: str
    message: str


@dataclass(frozen=True, slots=True)
class InitialRequested:
    """This process shall upload version 0."""


@dataclass(frozen=True, slots=True)
class FrozenDownloaded:
    """The job's frozen parameters, safetensors; None: version 0 has none."""

    data: bytes | None


@dataclass(frozen=True, slots=True)
class StateRequested:
    """A newcomer (or the checkpoint) wants this learner's inner optimizer state."""

    transfer: int


@dataclass(frozen=True, slots=True)
class StateDownloaded:
    """An inner optimizer state, safetensors, of a peer or of the job's checkpoint; None: there is
    none to be had. ``versions``: (epoch, version) per fragment at the peer's snapshot."""

    peer: bool
    data: bytes | None
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session broke; answers that were on their way will not come."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The background cannot go on: the training thread raises this."""

    error: Exception


Item = (
    Seated
    | Unseated
    | Welcomed
    | Announced
    | Downloaded
    | PushRequested
    | PushAnswered
    | LeaseGranted
    | PhaseChanged
    | InitialRequested
    | FrozenDownloaded
    | StateRequested
    | StateDownloaded
    | Disconnected
    | Failed
)


class Inbox:
    """Items in the order in which they were put; of each that states what *is* only the newest.

    A broadcast per fragment (an announcement names this learner's newest merged push in any
    version up to it, so an overtaken one is not missed), a pull per fragment, the phase, the
    seat and the welcome: however long the training thread does not look, they do not pile up.
    Verdicts, leases and states answer what that thread asked for, and are bounded by it.
    """

    def __init__(self) -> None:
        self._items: dict[tuple[object, ...], Item] = {}
        self._count = 0
        self._filled = threading.Condition()
        self._notified = False

    def notify(self) -> None:
        """Wake whoever waits: something that is not inbox is there (a batch)."""
        with self._filled:
            self._notified = True
            self._filled.notify_all()

    def put(self, item: Item) -> None:
        with self._filled:
            self._count += 1
            key = _states(item) or (self._count,)
            item = _following(self._items.pop(key, None), item)
            self._items[key] = item  # a dict keeps the order: what was replaced comes at the end
            self._filled.notify_all()

    def take_all(self) -> list[Item]:
        """Everything there is now, without waiting."""
        if not self._items:
            return []
        with self._filled:
            items = list(self._items.values())
            self._items.clear()
        return items

    def wait(self, timeout: float) -> bool:
        """Until there is inbox, or a call of ``notify``, at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        with self._filled:
            while not self._items and not self._notified:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._filled.wait(left)
            self._notified = False
            return True


def _states(item: Item) -> tuple[object, ...] | None:
    """What the item tells the state of: a newer one of the same makes it old news. None: an event."""
    match item:
        case Downloaded() | Announced():
            return type(item), item.news.fragment
        case PushRequested():
            return PushRequested, item.fragment
        case Seated() | Unseated():
            return (Seated,)
        case PhaseChanged() | Welcomed() | InitialRequested() | Disconnected() | Failed():
            return (type(item),)
        case _:
            return None


def _following(before: Item | None, item: Item) -> Item:
    """``item`` in place of ``before``: a tenure that was not noticed to begin does not go on."""
    if isinstance(before, Failed):
        return before  # the first is the cause
    if isinstance(item, Seated) and item.continuing and before is not None:
        return replace(item, continuing=isinstance(before, Seated) and before.continuing)
    return item
