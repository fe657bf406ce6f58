"""Between bytes, protobuf messages and records: every value from the network is checked here.

gRPC limits message sizes per connection and not per method, so a message is measured (``parse``) before
protobuf sees it. ``from_wire`` makes a record of a message. A message that makes no sense raises ``WireError``
with the field's name; nothing of it has been believed then. ``to_wire`` makes a message of a record.

Both go field by field, by name. What there is to do for each field is worked out once per record type, from the
types of its fields and the message's descriptor (``_shape``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from diloco_protocol.vocabulary import MAX_FRAGMENTS
from diloco_protocol.wire import limits, records, sync_pb2
from diloco_protocol.wire.limits import WireError

M = TypeVar("M", bound=Message)
R = TypeVar("R")

MESSAGES: dict[type, type[Message]] = {
    records.FragmentReport: sync_pb2.FragmentReport,
    records.LeaseCursor: sync_pb2.LeaseCursor,
    records.Link: sync_pb2.Link,
    records.RanksReport: sync_pb2.Ranks,
    records.StepReport: sync_pb2.Report,
    records.Evaluation: sync_pb2.Evaluation,
    records.PushPlan: sync_pb2.Push,
    records.PushHeader: sync_pb2.Push,
    records.Pull: sync_pb2.Pull,
    records.Held: sync_pb2.Held,
    records.DataSample: sync_pb2.DataSample,
    records.Join: sync_pb2.Join,
    records.Lease: sync_pb2.Lease,
    records.Seat: sync_pb2.Seat,
    records.Payload: sync_pb2.Payload,
    records.Announcement: sync_pb2.Announcement,
    records.SlotReceipt: sync_pb2.SlotReceipt,
    records.Shard: sync_pb2.Shard,
}
"""The message of each record; the parts of a record come before it."""


def parse(kind: type[M], data: bytes, limit: int = limits.MAX_CONTROL_BYTES) -> M:
    """Parse one protobuf message from the network; ``WireError`` if it is too large or garbage."""
    if len(data) > limit:
        raise WireError(f"{kind.__name__} has {len(data)} bytes; at most {limit} are allowed")
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError(f"this is not a {kind.__name__}") from error
    return message


def from_wire(kind: type[R], message: Message, **more: Any) -> R:
    """The record of a message, checked. ``more``: fields of the record that the message has not."""
    record: R = _SHAPES[kind].read(message, **more)
    return record


def to_wire(record: Any, **more: Any) -> Any:
    """The message of a record. ``more``: fields of the message that the record has not."""
    kind = type(record)
    return MESSAGES[kind](**_SHAPES[kind].write(record), **more)


def push_header(header: sync_pb2.UploadHeader) -> records.PushHeader:
    """The record of a push's or an offer's header, checked."""
    incarnation = limits.check_count(header.incarnation, "incarnation")
    return from_wire(records.PushHeader, header.push, slot=header.slot, incarnation=incarnation)


def receipt_message(rows: records.Receipt) -> sync_pb2.Receipt:
    """A receipt of these rows, without what proves it."""
    return sync_pb2.Receipt(slots=[to_wire(row) for row in rows])


def parse_receipt(data: bytes) -> tuple[sync_pb2.Receipt, records.Receipt]:
    """A receipt that came back, and its rows, checked."""
    message = parse(sync_pb2.Receipt, data, limits.MAX_RECEIPT_BYTES)
    return message, tuple(from_wire(records.SlotReceipt, row) for row in message.slots)


def read_shards(messages: Sequence[sync_pb2.Shard]) -> tuple[records.Shard, ...]:
    """The records of a list of shards, checked: no fragment is named twice."""
    check_few = limits.check_length(MAX_FRAGMENTS)
    check_few(messages, "shards")
    named = check_few([fragment for shard in messages for fragment in shard.fragments], "shards.fragments")
    if len(set(named)) < len(named):
        raise WireError("shards: a fragment is named twice")
    return tuple(from_wire(records.Shard, shard) for shard in messages)


# ------------------------------------------------------------------ what a record type needs


@dataclass(frozen=True, slots=True)
class _Shape:
    """How records of type ``kind`` are read from messages, and written as dicts of a message's fields.

    ``names``: the fields that both have, which are the record's first. ``inward``, by index: the checks, and what
    makes records of parts. ``outward``: what makes dicts of parts. ``optional``: parts that may be absent.
    ``counters_only``: all fields are counters, as in the rows of a report, of which there are hundreds.
    """

    kind: Callable[..., Any]
    names: tuple[str, ...]
    values: Callable[[Any], Any]
    inward: tuple[tuple[int, Callable[[Any, str], Any]], ...]
    outward: tuple[tuple[str, Callable[[Any], Any]], ...]
    optional: frozenset[int]
    counters_only: bool

    def read(self, message: Any, **more: Any) -> Any:
        values = self.values(message)
        if self.counters_only and max(values) <= limits.MAX_COUNT:
            return self.kind(*values)
        values = list(values)
        for index, check in self.inward:
            absent = index in self.optional and not message.HasField(self.names[index])
            values[index] = None if absent else check(values[index], self.names[index])
        return self.kind(**dict(zip(self.names, values, strict=True)), **more)

    def write(self, record: Any) -> dict[str, Any]:
        fields = dict(zip(self.names, self.values(record)))  # noqa: B905 (it takes half as long again)
        for name, convert in self.outward:
            if fields[name] is not None:
                fields[name] = convert(fields[name])
        return fields


def _shape(kind: type) -> _Shape:
    fields = MESSAGES[kind].DESCRIPTOR.fields_by_name
    hints = {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name in fields}
    inward: list[tuple[int, Callable[[Any, str], Any]]] = []
    outward: list[tuple[str, Callable[[Any], Any]]] = []
    optional = set()
    for index, (name, hint) in enumerate(hints.items()):
        if get_origin(hint) is Annotated:
            hint, *checks = get_args(hint)
            inward += [(index, check) for check in checks]
        if get_origin(hint) is UnionType:
            optional.add(index)
            hint = get_args(hint)[0]
        many = get_origin(hint) is tuple
        part = get_args(hint)[0] if many else hint
        if part in MESSAGES:
            shape = _SHAPES[part]
            inward.append((index, _each(shape.read) if many else _one(shape.read)))
            outward.append((name, _each(shape.write) if many else shape.write))
        elif many:
            inward.append((index, lambda values, _: tuple(values)))
    return _Shape(
        kind,
        tuple(hints),
        operator.attrgetter(*hints),
        tuple(inward),
        outward=tuple(outward),
        optional=frozenset(optional),
        counters_only=all(hint == records.Count for hint in hints.values()),
    )


def _one(read: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    return lambda value, _: read(value)


def _each(convert: Callable[[Any], Any]) -> Callable[..., tuple[Any, ...]]:
    return lambda values, *_: tuple(map(convert, values))


_SHAPES: dict[type, _Shape] = {}
for _kind in MESSAGES:
    _SHAPES[_kind] = _shape(_kind)
