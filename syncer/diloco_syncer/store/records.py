"""Binary files of the store: a JSON header and arrays behind it, all with checksums.

Layout of a file, little endian::

    8 bytes   magic
    4         length of the header in bytes
    8         xxh3-64 of the header
              header: JSON {"format", "kind", "body", "arrays": [[name, dtype, elements, offset, xxh3-64]]}
              zeros to a multiple of 64
              the arrays, each starting at a multiple of 64 (``offset`` counts from the first)

Kinds: ``merge`` (the record of one merge: Θ_p, outer optimizer state, responders), ``offer`` (a spooled offer),
``blob`` (frozen parameters, optimizer state). What a checksum does not confirm is ``Damaged``; a format number that
this release does not read is ``FormatRefused``. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_protocol.common.files import Buffer
from diloco_protocol.wire.bulk import checksum, flat
from diloco_protocol.wire.records import PushHeader, Receipt, SlotReceipt
from diloco_syncer.core.books.ledger import header_from_json, header_to_json
from diloco_syncer.store.base import Store

FORMAT = 2
READABLE = (2,)  # the present and, once there is one, the previous
MAGIC = b"\x89DILOCO\n"
MAX_HEADER = 64 << 20
MAX_FILE = 1 << 37
_ALIGN = 64
_PREFIX = struct.Struct("<8sIQ")
_DTYPES = frozenset({"float32", "float64", "uint8", "int64"})

# Of a merge record's fields, those that are one number or text.
_FIGURES = (
    *("job", "epoch", "fragment", "version", "number", "round", "time"),
    *("quorum_seconds", "waited_seconds", "merge_seconds", "job_tokens", "digest", "sent"),
)

Array = NDArray[Any]
Floats = NDArray[np.float32]


class Damaged(Exception):
    """A stored object is not what was written; the message names it."""


class FormatRefused(Exception):
    """A stored object has a format number that this release does not read."""


def check_format(found: object, name: str) -> None:
    """Raise ``FormatRefused`` unless ``found`` is a format number that is read here."""
    if found not in READABLE:
        raise FormatRefused(
            f"{name} has format {found!r}; this release reads {', '.join(map(str, READABLE))}: "
            "use the release that wrote it, or one release later"
        )


def pack(kind: str, body: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[Buffer]:
    """The file's bytes as buffers to be written one after the other (the arrays are not copied)."""
    rows: list[list[Any]] = []
    parts: list[Buffer] = []
    offset = 0
    for name, array in arrays.items():
        if str(array.dtype) not in _DTYPES or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"array {name}: {array.dtype}, {array.ndim} dimensions cannot be stored")
        rows.append([name, str(array.dtype), int(array.size), offset, checksum(array)])
        padding = -array.nbytes % _ALIGN
        parts += [flat(array), bytes(padding)]
        offset += array.nbytes + padding
    header = json.dumps(
        {"format": FORMAT, "kind": kind, "body": body, "arrays": rows}, separators=(",", ":"), allow_nan=False
    ).encode()
    if len(header) > MAX_HEADER:
        raise ValueError(f"a header of {len(header)} bytes cannot be stored")
    start = _PREFIX.pack(MAGIC, len(header), checksum(header)) + header
    return [start + bytes(-len(start) % _ALIGN), *parts]


def _header(data: Buffer, kind: str, name: str) -> tuple[dict[str, Any], int]:
    """The parsed header and the position of the first array."""
    if len(data) < _PREFIX.size:
        raise Damaged(f"{name} is cut off: {len(data)} bytes")
    magic, length, digest = _PREFIX.unpack_from(data)
    if magic != MAGIC or length > MAX_HEADER:
        raise Damaged(f"{name} is not a record of this program")
    raw = bytes(data[_PREFIX.size : _PREFIX.size + length])
    if len(raw) != length or checksum(raw) != digest:
        raise Damaged(f"{name}: its header is cut off or changed")
    try:
        header = json.loads(raw)
        check_format(header["format"], name)
        if header["kind"] != kind:
            raise Damaged(f"{name} is a {header['kind']!r}, not a {kind!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{name}: its header is not understood") from error
    end = _PREFIX.size + length
    return header, end + -end % _ALIGN


def unpack(data: Buffer, kind: str, name: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Body and arrays (read-only views of ``data``) of a file of this kind, all checksums verified."""
    header, start = _header(data, kind, name)
    try:
        rows, body = [tuple(row) for row in header["arrays"]], header["body"]
        if not isinstance(body, dict) or any(len(row) != 5 or not isinstance(row[0], str) for row in rows):
            raise TypeError("no body, or a row of arrays that is none")
    except (KeyError, TypeError) as error:
        raise Damaged(f"{name}: its header is not understood") from error
    arrays: dict[str, Array] = {}
    for array_name, dtype, elements, offset, digest in rows:
        if (
            not isinstance(dtype, str)
            or dtype not in _DTYPES
            or not all(type(n) is int and n >= 0 for n in (elements, offset))
        ):
            raise Damaged(f"{name}: array {array_name!r} is not understood")
        if start + offset + elements * np.dtype(dtype).itemsize > len(data):
            raise Damaged(f"{name} is cut off in array {array_name!r}")
        array = np.frombuffer(data, dtype, elements, start + offset)
        if checksum(array) != digest:
            raise Damaged(f"{name}: array {array_name!r} does not match its checksum")
        arrays[array_name] = array
    return body, arrays


def read_body(store: Store, name: str, kind: str) -> dict[str, Any]:
    """The body of a stored file without its arrays (which are not verified)."""
    body: dict[str, Any] = _read_header(store, name, kind)["body"]
    return body


def blob_bytes(store: Store, name: str) -> int:
    """How many bytes a stored blob has, by its header. Raises ``Damaged``, ``ObjectNotFound``."""
    try:
        ((_, _, size, *_),) = _read_header(store, name, "blob")["arrays"]
        return int(size)
    except (ValueError, TypeError) as error:
        raise Damaged(f"{name}: its header is not understood") from error


def _read_header(store: Store, name: str, kind: str) -> dict[str, Any]:
    start = store.read_start(name, 64 << 10)
    if len(start) >= _PREFIX.size:
        wanted = _PREFIX.size + min(_PREFIX.unpack_from(start)[1], MAX_HEADER)
        if wanted > len(start):
            start = store.read_start(name, wanted)
    return _header(start, kind, name)[0]


# ------------------------------------------------------------------ merge records


@dataclass(frozen=True, slots=True)
class RecordedPush:
    """A merge record's entry for one responder: its push, normalised weight, age, the L2 norm of its Δ, and the
    sequences of its learner's step, by the job."""

    header: PushHeader
    weight: float
    age: int
    norm: float
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Recovered:
    """Origin of a version that came from a learner.

    ``follows``: the version that was the store's newest; ``epoch``: in which the learner held the version;
    ``receipt``: of the version (core/recovery/receipts.py).
    """

    follows: int
    epoch: int
    receipt: Receipt

    def to_json(self) -> list[Any]:
        return [self.follows, self.epoch, [list(astuple(row)) for row in self.receipt]]

    @classmethod
    def from_json(cls, row: list[Any]) -> Recovered:
        follows, epoch, rows = row
        return cls(follows, epoch, tuple(SlotReceipt(*values) for values in rows))


@dataclass(slots=True)
class MergeRecord:
    """One durable merge of one fragment, or (``recovered``) a version taken from a learner.

    ``theta``: Θ_p after it, float32[elements]. ``outer``: the outer optimizer's state after it. ``feedback``: what
    the down codec dropped so far (float32[elements], only with compression.down delta-*). ``digest``: SHA-256 of
    theta's bytes. ``sent``: an encoding, and the SHA-256 of the broadcast's bytes in it. ``number``: merges of the job
    up to this one. ``before``: the ``body`` of the version that it follows. Version 0 has no responders.
    """

    job: str
    epoch: int
    fragment: int
    version: int
    theta: Floats
    outer: dict[str, Array] = field(default_factory=dict)
    feedback: Floats | None = None
    responders: tuple[RecordedPush, ...] = ()
    number: int = 0
    round: int = 0
    time: float = 0.0  # seconds since 1970
    quorum_seconds: float = 0.0
    waited_seconds: float = 0.0
    merge_seconds: float = 0.0
    job_tokens: int = 0
    digest: str = ""
    sent: str = ""
    recovered: Recovered | None = None
    before: dict[str, Any] | None = None
    norm: float = 0.0  # of the merged outer gradient; not stored

    @property
    def follows(self) -> int:
        """The version before it in the store."""
        return self.version - 1 if self.recovered is None else self.recovered.follows

    @property
    def made_in(self) -> int:
        """The epoch in which this version was made, as far as that is known."""
        return self.epoch if self.recovered is None else self.recovered.epoch

    def body(self) -> dict[str, Any]:
        """Everything but the arrays and ``before``, as JSON."""
        body: dict[str, Any] = {} if self.recovered is None else {"recovered": self.recovered.to_json()}
        body |= {name: getattr(self, name) for name in _FIGURES}
        body["responders"] = [
            {"header": header_to_json(r.header), "weight": r.weight, "age": r.age, "norm": r.norm, "batch": r.batch}
            for r in self.responders
        ]
        return body

    def without_arrays(self) -> MergeRecord:
        """The same without its arrays: a theta of its size that takes no memory."""
        nothing = np.broadcast_to(np.float32(0), self.theta.shape)
        return replace(self, theta=nothing, outer={}, feedback=None)

    def pack(self) -> list[Buffer]:
        self.digest = self.digest or theta_digest(self.theta)
        arrays: dict[str, Array] = {"theta": self.theta}
        if self.feedback is not None:
            arrays["feedback"] = self.feedback
        arrays |= {f"outer.{name}": array for name, array in self.outer.items()}
        return pack("merge", self.body() | {"before": self.before}, arrays)

    @classmethod
    def unpack(cls, data: Buffer, name: str) -> MergeRecord:
        """Read a record's file. Its arrays are copies. Raises ``Damaged``, ``FormatRefused``."""
        body, arrays = unpack(data, "merge", name)
        try:
            record = cls.from_body(body, arrays["theta"].copy())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"{name}: its header is not understood") from error
        if "feedback" in arrays:
            record.feedback = arrays["feedback"].copy()
        record.outer = {n[6:]: a.copy() for n, a in arrays.items() if n.startswith("outer.")}
        return record

    @classmethod
    def from_body(cls, body: dict[str, Any], theta: Floats) -> MergeRecord:
        """A record without its optimizer state, from the JSON part."""
        responders = tuple(
            RecordedPush(header_from_json(row["header"]), row["weight"], row["age"], row["norm"], batch=row["batch"])
            for row in body["responders"]
        )
        recovered = Recovered.from_json(body["recovered"]) if "recovered" in body else None
        return cls(**{**body, "responders": responders, "recovered": recovered}, theta=theta)


def theta_digest(theta: Floats) -> str:
    """SHA-256 of the fragment's float32 bytes (little endian), in hex."""
    return hashlib.sha256(flat(theta.astype("<f4", copy=False))).hexdigest()


def record_name(fragment: int, version: int) -> str:
    return f"records/f{fragment:05d}-v{version:012d}.rec"


def parse_record_name(name: str) -> tuple[int, int] | None:
    """(fragment, version) of a record's name, or None for another name."""
    stem = name.removeprefix("records/f").removesuffix(".rec")
    fragment, dash, version = stem.partition("-v")
    if dash and fragment.isdigit() and version.isdigit() and name == record_name(int(fragment), int(version)):
        return int(fragment), int(version)
    return None
