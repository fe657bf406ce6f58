"""What the syncer and its shards say to each other, and how it is written.

A message is one dataclass. On a stream it is JSON behind its length; both ends are programs of one release. What comes
is checked as pydantic does it, and nothing is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter, ValidationError

from diloco_protocol.security.identity import Names
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.records import Payload, PushHeader
from diloco_syncer.core.events import AnswerPush, Merge, PushAdvanced, ReleasePush

RELEASE = version("decoupled-diloco")
MAX_MESSAGE = 64 << 20  # bytes: a merge names the pushes of all learners, each with its report

# ------------------------------------------------------------------ from a shard


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a shard's process: its number, how many shards it takes there to be, and its release."""

    shard: int
    shards: int
    release: str = RELEASE

    def find_objection(self, shards: int) -> str:
        """Why a syncer of so many shards does not take it; empty: it does."""
        if self.release != RELEASE:
            return f"shard {self.shard} is of release {self.release}, and the syncer of {RELEASE}"
        if self.shards != shards or not 0 <= self.shard < shards:
            return f"shard {self.shard} is one of {self.shards}, and the syncer has {shards}"
        return ""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version that a shard has: its record without arrays (``body`` as ``MergeRecord.body`` makes it; ``norm``), what
    is sent of it, and ``merge.piece_squares`` of its Θ."""

    body: dict[str, Any]
    norm: float
    full: Payload
    delta: Payload | None
    squares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer to ``Begin``. ``offers``: the names of the spooled offers in the store. ``outer_state_reset``: see
    ``GlobalModel``. ``failure``: why it could not begin."""

    versions: tuple[VersionRow, ...] = ()
    offers: tuple[str, ...] = ()
    outer_state_reset: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ShardEnded:
    """The last message of a process that ends by a fault: its exit code (``SyncerExit``), and why, for people."""

    code: int
    why: str


@dataclass(frozen=True, slots=True)
class FindCaller:
    """Whose is this call? ``request``: an UploadHeader (``sends``) or a DownloadRequest, in hex."""

    call: int
    sends: bool
    request: str
    names: Names
    address: str


@dataclass(frozen=True, slots=True)
class UploadBegan:
    """A part of an upload begins."""

    connection: int


@dataclass(frozen=True, slots=True)
class UploadEnded:
    """A part of an upload ended; ``count``: its bytes, if it came whole."""

    connection: int
    place: str
    slot: int | None
    count: int | None


@dataclass(frozen=True, slots=True)
class PartSent:
    """So many bytes of a version were sent."""

    place: str
    slot: int | None
    count: int


@dataclass(frozen=True, slots=True)
class WholeSent:
    """All bytes of a version were sent to a process."""

    process: str
    epoch: int
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class PushHere:
    """All ``bytes`` of a push are here. ``squares``: ``merge.piece_squares`` of it."""

    header: PushHeader
    handle: int
    norm: float
    squares: tuple[float, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class OfferSpooled:
    """An accepted offer is durable."""

    handle: int


@dataclass(frozen=True, slots=True)
class VersionMade:
    """What became of a ``MakeVersion`` (see ``merger.Merged``)."""

    fragment: int
    version: VersionRow | None
    seconds: float
    left_out: tuple[int, ...] = ()
    failure: str = ""
    largest: int = 0


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """What is wrong with the store, for people; empty: nothing any more."""

    problem: str


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """What a shard's process has used, and what it refused: of all its life."""

    cpu_seconds: float
    resident_bytes: int
    refused: dict[str, int]
    wire_bytes: dict[str, tuple[int, int]]


FromShard = (
    Hello
    | Begun
    | ShardEnded
    | FindCaller
    | UploadBegan
    | UploadEnded
    | PartSent
    | WholeSent
    | PushAdvanced
    | PushHere
    | OfferSpooled
    | VersionMade
    | StoreProblem
    | ShardFigures
)

# ------------------------------------------------------------------ to a shard


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """The answer to the ``Hello`` of a shard that does not fit: why, for people."""

    why: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Own these fragments from these versions on, or from the next of one if this epoch has made it. ``handles``: the
    numbers of pushes begin above."""

    epoch: int
    fragments: dict[int, int]
    handles: int


@dataclass(frozen=True, slots=True)
class RestoreOffer:
    """Have a spooled offer under this handle (``checkpoint.SpooledOffer``)."""

    handle: int
    header: PushHeader
    norm: float
    squares: tuple[float, ...]
    encoded_bytes: int


@dataclass(frozen=True, slots=True)
class CallerFound:
    """The answer to ``FindCaller`` (``callers.Caller``); ``receipt`` in hex."""

    call: int
    connection: int
    place: str
    slot: int | None
    receipt: str


@dataclass(frozen=True, slots=True)
class CallRefused:
    """The other answer: ``kind`` is ``caller``, ``upload`` or ``busy``, by the exception that it was."""

    call: int
    kind: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class MakeVersion:
    """Make this merge, as record ``number`` of the job."""

    action: Merge
    number: int


@dataclass(frozen=True, slots=True)
class PublishVersion:
    """Put the version that was made last in force; ``receipt``: of the one before, in hex."""

    fragment: int
    version: int
    receipt: str


@dataclass(frozen=True, slots=True)
class ForgetPush:
    """No push is taken now: the sender shall try again after a pause."""

    handle: int


ToShard = (
    HelloRefused
    | Begin
    | RestoreOffer
    | CallerFound
    | CallRefused
    | MakeVersion
    | PublishVersion
    | AnswerPush
    | ReleasePush
    | ForgetPush
)

_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (*FromShard.__args__, *ToShard.__args__)
}


def write_message(message: FromShard | ToShard) -> bytes:
    """A message as JSON."""
    name = type(message).__name__
    return json.dumps([name, _KINDS[name].dump_python(message, mode="json")], separators=(",", ":")).encode()


def read_message(data: bytes) -> Any:
    """The message that these bytes are. Raises ``WireError``."""
    try:
        name, body = json.loads(data)
        return _KINDS[name].validate_python(body)
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise WireError(f"between the syncer and a shard came what is no message: {error}") from error
