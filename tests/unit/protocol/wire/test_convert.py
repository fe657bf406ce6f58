"""Records and messages: each field of the one is a field of the other, and nonsense is refused by its name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.wire import convert, limits, records, sync_pb2
from diloco_protocol.wire.records import (
    FragmentReport,
    Lease,
    LeaseCursor,
    Link,
    PushHeader,
    RanksReport,
    Shard,
    SlotReceipt,
    StepReport,
)
from example_counts import share_of

# Of the UploadHeader around the message; of the session.
BESIDE = {PushHeader: {"slot", "incarnation"}, records.Join: {"connection", "evaluator"}}
# That the sender adds; of a Join also what is read before there is a record.
LATER = {records.PushPlan: {"encoding", "layout_digest", "report"}, records.Join: {"format", "job", "role", "attempt"}}
FLOATS = st.floats(0, 1e9)
VALID = {records.Join: {"process": "ab", "region": "r"}}  # fields that may not be empty
HEX = st.text("0123456789abcdef", min_size=1, max_size=64)
TEXTS = {records.Hex: HEX, records.ProcessId: HEX, records.RegionName: st.text("abz09", min_size=1, max_size=20)}
NARROW = {
    records.Port: st.integers(0, 65535),
    records.Host: st.sampled_from(["", "a-1.b.svc", "10.0.0.7", "fe80::1%e"]),
}


def of_field(hint: Any) -> st.SearchStrategy[Any]:
    if hint == records.Count:
        return st.integers(0, limits.MAX_COUNT)
    if hint == records.Loss:
        return st.floats(allow_infinity=False, allow_nan=False) | st.just(math.nan)
    if hint == records.Share:
        return st.floats(0, 1)
    if hint in TEXTS | NARROW:
        return (TEXTS | NARROW)[hint]
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is dict:
        return st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=3)
    if hint == tuple[int, ...]:
        return st.lists(st.integers(0, 511), max_size=3).map(tuple)
    simple = {bool: st.booleans(), int: st.integers(0, (1 << 32) - 1), float: FLOATS, str: st.text(max_size=20)}
    if hint in simple:
        return simple[hint]
    if get_origin(hint) is tuple:
        return st.lists(of_kind(get_args(hint)[0]), max_size=3).map(tuple)
    parts = get_args(hint) or (hint,)
    return st.one_of([st.none() if part is type(None) else of_kind(part) for part in parts])


def of_kind(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: of_field(hint) for name, hint in hints.items()})


@pytest.mark.parametrize("kind", convert.MESSAGES)
def test_record_and_message_have_the_same_fields(kind: type) -> None:
    fields = set(get_type_hints(kind)) - BESIDE.get(kind, set())
    assert fields | LATER.get(kind, set()) == set(convert.MESSAGES[kind].DESCRIPTOR.fields_by_name)


@given(st.sampled_from(list(convert.MESSAGES)).flatmap(of_kind))
@settings(max_examples=share_of(300), deadline=None)
def test_to_the_wire_and_back_is_the_same(record: Any) -> None:
    message = convert.to_wire(record)
    raw = convert.parse(type(message), message.SerializeToString())
    beside = {name: getattr(record, name) for name in BESIDE.get(type(record), set())}
    assert convert.from_wire(type(record), raw, **beside) == record


@pytest.mark.parametrize("progress", [-0.1, 1.5, math.nan, math.inf])
def test_a_share_out_of_range_is_refused_by_its_name(progress: float) -> None:
    message = sync_pb2.Announcement(progress=progress)
    with pytest.raises(limits.WireError, match=r"^progress is .*: it must be a number from 0 to 1"):
        convert.from_wire(records.Announcement, message)


@pytest.mark.parametrize("kind", convert.MESSAGES)
def test_a_counter_out_of_range_is_refused_by_its_name(kind: type) -> None:
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in hints.items():
        if hint != records.Count or name in BESIDE.get(kind, set()):
            continue
        message = convert.MESSAGES[kind](**VALID.get(kind, {}), **{name: limits.MAX_COUNT + 1})
        with pytest.raises(limits.WireError, match=f"^{name} is {limits.MAX_COUNT + 1}: out of range"):
            convert.from_wire(kind, message)


REPORT = StepReport(
    4,
    4,
    40,
    (FragmentReport(1, 0, 4, 40),),
    compute_seconds=1.0,
    stalled_seconds=0.5,
    loss=2.5,
    step_seconds=0.25,
    cursors=(LeaseCursor(1, 3),),
    link=Link(5.0),
    ranks=RanksReport(4, 2, 0.5),
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute_seconds": -1.0}, "compute_seconds is -1.0: it must be a number of seconds, not negative"),
        ({"stalled_seconds": math.nan}, "stalled_seconds is nan"),
        ({"step_seconds": math.inf}, "step_seconds is inf"),
        ({"fragments": REPORT.fragments * 513}, "fragments has 513 entries; at most 512"),
        ({"cursors": REPORT.cursors * 257}, "cursors has 257 entries; at most 256"),
        ({"fragments": (replace(REPORT.fragments[0], tokens=1 << 63),)}, f"tokens is {1 << 63}"),
        ({"cursors": (LeaseCursor(1 << 63, 0),)}, f"lease is {1 << 63}"),
    ],
)
def test_a_report_that_makes_no_sense_is_refused_by_the_fields_name(changes: dict[str, Any], words: str) -> None:
    assert convert.from_wire(StepReport, convert.to_wire(REPORT)) == REPORT
    with pytest.raises(limits.WireError) as refused:
        convert.from_wire(StepReport, convert.to_wire(replace(REPORT, **changes)))
    assert str(refused.value).startswith(words)


def test_a_diverged_learners_loss_is_not_a_number() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        assert math.isnan(convert.from_wire(StepReport, convert.to_wire(replace(REPORT, loss=loss))).loss)


def test_a_push_has_the_identity_of_its_header() -> None:
    push = sync_pb2.Push(sequence=3, encoding="x" * 100, report=convert.to_wire(REPORT))
    header = convert.push_header(sync_pb2.UploadHeader(slot=2, incarnation=7, push=push))
    assert header.id == (2, 7, 0, 3) and header.encoding == "x" * 32 and header.report == REPORT
    with pytest.raises(limits.WireError, match=r"^incarnation is"):
        convert.push_header(sync_pb2.UploadHeader(incarnation=1 << 63, push=push))


def test_a_receipt_is_returned_as_it_was_given() -> None:
    rows = tuple(
        SlotReceipt(slot, (1 << 64) - 1, 1 << 40, 1 << 39, sequence=7, version=6, last_step=99, compute_seconds=1.5)
        for slot in range(500)
    )
    assert convert.parse_receipt(convert.receipt_message(rows).SerializeToString())[1] == rows
    with pytest.raises(limits.WireError, match="last_step"):
        convert.parse_receipt(convert.receipt_message((replace(rows[0], last_step=1 << 63),)).SerializeToString())


def test_seats_are_read_with_their_leases() -> None:
    lease = Lease(1, 0, 2, 3, end=8, block_size=8)
    seat = records.Seat(1, 2, True, 30, slot_tokens=300, leases=(lease, lease))
    assert convert.from_wire(records.Seat, convert.to_wire(seat)) == seat
    with pytest.raises(limits.WireError, match=r"^block_size is"):
        convert.from_wire(records.Seat, convert.to_wire(replace(seat, leases=(replace(lease, block_size=1 << 63),))))


SHARDS = [Shard(7001, "", (0, 2)), Shard(0, "syncer-1.ns.svc", (1,)), Shard(65535, "fd00::7", ())]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([Shard(65536, "", ())], "port is 65536: it must be below 65536"),
        ([Shard(0, "a b", ())], "host 'a b': expected a host's name or address"),
        ([Shard(0, "a/b", ())], "host 'a/b'"),
        ([Shard(0, "a" * 254, ())], "host 'aaa"),
        ([Shard(0, "", (2,))], "shards: a fragment is named twice"),
        ([Shard(0, "", (5, 5))], "shards: a fragment is named twice"),
        ([Shard(0, "", tuple(range(3, 513)))], "shards.fragments has 513 entries; at most 512"),
        ([Shard(0, "", ())] * 510, "shards has 513 entries; at most 512"),
    ],
)
def test_shards_that_make_no_sense_are_refused(more: list[Shard], words: str) -> None:
    assert convert.read_shards([convert.to_wire(shard) for shard in SHARDS]) == tuple(SHARDS)
    with pytest.raises(limits.WireError) as refused:
        convert.read_shards([convert.to_wire(shard) for shard in SHARDS + more])
    assert str(refused.value).startswith(words)


def test_digests_are_bounded_and_a_text_matches_its_pattern_as_a_whole() -> None:
    many = {str(i): "" for i in range(65)}
    with pytest.raises(limits.WireError, match="digests: at most 64 entries"):
        limits.check_digests(many, "digests")
    assert len(limits.check_digests(dict(list(many.items())[:64]), "digests")) == 64
    check = limits.check_pattern("[0-9a-f]+", "hex digits")
    assert check("0af", "process") == "0af"
    with pytest.raises(limits.WireError, match="process '0afx': expected hex digits"):
        check("0afx", "process")
