"""What the background thread tells the training thread, and the inbox in which it waits.

Announcements, pulls, seats and leases are the wire's own records. An announcement's bytes follow by themselves as
``Downloaded``, or, for an observer, when it asks for them.

The training thread takes the messages at its step boundaries (``take_all``); putting and taking hold a lock
for as long as a dict's update takes. The training thread waits for a message (``wait``) only at the start,
in deterministic mode, while it is paused, and while it drains.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.spec.job import SyncerSettings
from diloco_protocol.wire.records import Announcement, Lease, Pull, Seat
from diloco_worker.fragments import Vector


@dataclass(frozen=True, slots=True)
class Unseated:
    """This process holds no slot (any more): it is a standby until it is seated."""


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A session began; the messages after this one are of it. ``trained``: some fragment is above version 0.
    ``optimizer_bytes``: size of the inner optimizer state in the job's checkpoint, 0: there is none.
    ``settings``: those in force; None: the job file's are."""

    trained: bool
    optimizer_bytes: int
    settings: SyncerSettings | None = None


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A broadcast's values, float32[elements], are here: it can be adopted."""

    announcement: Announcement
    vector: Vector


@dataclass(frozen=True, slots=True)
class PushAnswered:
    """The syncer answered a push. ``accepted`` None: no answer came, and the push's fate is open."""

    fragment: int
    sequence: int
    accepted: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The job's phase, one of the status document's."""

    phase: str
    message: str


@dataclass(frozen=True, slots=True)
class InitialRequested:
    """The syncer asks this process to upload version 0."""


@dataclass(frozen=True, slots=True)
class FrozenDownloaded:
    """The job's frozen parameters, as safetensors; None: version 0 has none. ``same``: they are this model's own, so
    none were downloaded."""

    data: Bytes | None
    same: bool = False


@dataclass(frozen=True, slots=True)
class StateRequested:
    """The syncer asks for this learner's inner optimizer state, for a newcomer or for the job's checkpoint."""

    transfer: int


@dataclass(frozen=True, slots=True)
class StateDownloaded:
    """An inner optimizer state, as safetensors, of a peer or of the job's checkpoint; ``data`` None: there is none
    to be had. ``versions``: (epoch, version) per fragment when the peer took it."""

    peer: bool
    data: Bytes | None
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session broke: answers that were on their way will not come."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The background cannot go on: the training thread raises ``error``."""

    error: Exception


Message = (
    Seat
    | Unseated
    | Welcomed
    | Announcement
    | Downloaded
    | Pull
    | PushAnswered
    | Lease
    | PhaseChanged
    | InitialRequested
    | FrozenDownloaded
    | StateRequested
    | StateDownloaded
    | Disconnected
    | Failed
)


class Inbox:
    """Messages in the order in which they were put; of each that tells a *state*, only the newest.

    States are a broadcast per fragment, a pull per fragment, the phase, the seat and the welcome. However long
    the training thread does not look, they do not pile up. An overtaken broadcast is not missed, because an
    announcement names this learner's newest merged push in any version up to it. All other messages answer
    what the training thread asked for, and are bounded by that.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[object, ...], Message] = {}
        self._count = 0
        self._changed = threading.Condition()
        self._notified = False

    def notify(self) -> None:
        """Wake whoever waits: something that is no message is there (a batch)."""
        with self._changed:
            self._notified = True
            self._changed.notify_all()

    def put(self, message: Message) -> None:
        """Add a message, in place of the one that tells an older state of the same thing."""
        with self._changed:
            self._count += 1
            key = _state_key(message) or (self._count,)
            message = _replacement(self._messages.pop(key, None), message)
            self._messages[key] = message  # a dict keeps the order: what was replaced comes at the end
            self._changed.notify_all()

    def take_all(self) -> list[Message]:
        """Remove and return all messages, without waiting."""
        if not self._messages:
            return []
        with self._changed:
            messages = list(self._messages.values())
            self._messages.clear()
        return messages

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for a message or a ``notify``; whether one came."""
        end = time.monotonic() + timeout
        with self._changed:
            while not self._messages and not self._notified:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            self._notified = False
            return True


def _state_key(message: Message) -> tuple[object, ...] | None:
    """What the message tells the state of; None: it tells an event, and all of them are kept."""
    match message:
        case Downloaded():
            return Downloaded, message.announcement.fragment
        case Announcement() | Pull():
            return type(message), message.fragment
        case Seat() | Unseated():
            return (Seat,)
        case PhaseChanged() | Welcomed() | InitialRequested() | Disconnected() | Failed():
            return (type(message),)
        case _:
            return None


def _replacement(before: Message | None, message: Message) -> Message:
    """What is kept of ``message`` where ``before`` told an older state. The first failure stays, because it is the
    cause. A tenure whose beginning was not read yet does not count as continuing."""
    if isinstance(before, Failed):
        return before
    if isinstance(message, Seat) and message.continuing and before is not None:
        return replace(message, continuing=isinstance(before, Seat) and before.continuing)
    return message
