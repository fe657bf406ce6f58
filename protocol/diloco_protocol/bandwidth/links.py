"""What a job's links carry, what they need, and whether a link that was measured is too slow.

Theory of operation. ``traffic`` counts the bytes that are sent: values by the codec, each push's
header and report, announcements, receipts. ``need_by_queue`` and ``need_by_formula`` divide them by
the seconds that ``bandwidth.model`` allows. How fast a link really is shows in the transfers that
happen anyway (``common.meter``). ``judge`` calls a link *too slow* if that is below what the job's
own pace needs. Nothing breaks then: pushes take longer, rounds stay open longer, merges become rarer.

Times come in as arguments. Rates are bytes per second, as transfers are counted; in ``Need`` they are
bits per second, as links are sold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from diloco_protocol.arrays import codec
from diloco_protocol.bandwidth import model
from diloco_protocol.bandwidth.model import Turn
from diloco_protocol.common.format_units import rate_text, seconds_text, size_text
from diloco_protocol.spec.sync import CompressionSpec, SyncSpec
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.convert import to_wire
from diloco_protocol.wire.records import Announcement, FragmentReport, Payload, PushPlan, SlotReceipt, StepReport

_COUNT = 1 << 40  # a counter of a long run

FRAMING = 1.05  # bytes on an Ethernet link per byte of ours: TCP/IP and Ethernet 66 of 1448, TLS, HTTP/2
ROUND_TRIPS = 2.5  # per exchange: pull and push, announcement, request and broadcast
REPORT_SECONDS = 0.02  # reports are at least so far apart
UP: tuple[str, ...] = get_args(CompressionSpec.model_fields["up"].annotation)  # encodings
DOWN: tuple[str, ...] = get_args(CompressionSpec.model_fields["down"].annotation)
LEAST_TRANSFERS = 4  # before a link is judged
NOISE_SECONDS = 0.05  # an exchange shorter than this says more of busy processors than of the link


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on one learner's link."""

    up: int  # of one merge, of the largest fragment
    down: int
    up_per_turn: int  # of one merge of each fragment
    down_per_turn: int
    report: int  # up, after each step


def payload_bytes(encoding: str, elements: int) -> int:
    """Bytes of one fragment in an encoding of the job file, ``delta-int4`` among them."""
    return codec.encoded_bytes(encoding.removeprefix("delta-"), elements)


def traffic(sizes: Sequence[int], up: str, down: str, learners: int) -> Traffic:
    """What merges carry of fragments of ``sizes`` elements, pushed as ``up`` and broadcast as ``down``."""
    header = _upload_header(up, len(sizes))
    slot = to_wire(
        SlotReceipt(1, 1 << 63, _COUNT, _COUNT, sequence=_COUNT, version=_COUNT, last_step=_COUNT, compute_seconds=1.0)
    )
    receipt = learners * (slot.ByteSize() + 2)
    payload = Payload(down, _COUNT, 1 << 63)
    delta = payload if down.startswith("delta-") else None
    told = Announcement(
        1,
        1,
        _COUNT,
        payload,
        merged_sequence=_COUNT,
        merged_version=_COUNT,
        delta=delta,
        job_tokens=_COUNT,
        settled=1,
        progress=1.0,
    )
    download = sync_pb2.DownloadHeader(found=True, total_bytes=_COUNT, bytes=_COUNT, checksum=1 << 63)
    beside = sync_pb2.SyncerMessage(announcement=to_wire(told)).ByteSize() + download.ByteSize()
    beside += receipt if receipt <= limits.MAX_RECEIPT_BYTES else 0
    ups = [payload_bytes(up, size) + header.ByteSize() for size in sizes]
    downs = [payload_bytes(down, size) + beside for size in sizes]
    return Traffic(max(ups), max(downs), sum(ups), sum(downs), report=header.push.report.ByteSize())


def _upload_header(up: str, fragments: int) -> sync_pb2.UploadHeader:
    part = FragmentReport(1, 1 << 20, 999, 1 << 27, confirmed_tokens=_COUNT)
    report = StepReport(
        _COUNT,
        _COUNT,
        _COUNT,
        (part,) * fragments,
        compute_seconds=1.0,
        stalled_seconds=1.0,
        loss=1.0,
        step_seconds=1.0,
    )
    plan = PushPlan(
        1,
        _COUNT,
        _COUNT,
        1,
        base_version=_COUNT,
        oldest_version=_COUNT,
        first_step=_COUNT,
        last_step=_COUNT,
        steps=999,
        tokens=_COUNT,
        compute_seconds=1.0,
    )
    push = to_wire(plan, encoding=up, layout_digest="0" * 64, report=to_wire(report))
    header = sync_pb2.UploadHeader(format=1, job="j" * 30, slot=1, incarnation=1000, process="0" * 32, push=push)
    header.total_bytes, header.offset, header.bytes, header.checksum = _COUNT, 1, _COUNT, 1 << 63
    return header


def turn(sync: SyncSpec, fragments: int, step_seconds: float, round_trip_seconds: float = 0.0) -> Turn:
    """When the job's exchanges happen; ``fragments`` is the layout's P."""
    return Turn(fragments, sync.every, sync.overlap, step_seconds, between_seconds=ROUND_TRIPS * round_trip_seconds)


@dataclass(frozen=True, slots=True)
class Need:
    """Bits per second of one learner's link, framing included; infinite: no bandwidth is enough.

    ``up`` and ``down`` go together, and give each direction half of an exchange's time.
    ``same`` is enough in either direction where a link is as fast up as down.
    """

    up: float
    down: float
    same: float


def need_by_formula(carried: Traffic, turn: Turn, utilisation: float = model.UTILISATION) -> Need:
    """What the paper's formula asks for, with a push and a broadcast in place of the all-reduce."""
    seconds = model.formula_seconds(turn, utilisation)
    return _need(carried, turn, seconds / 2, seconds)


def need_by_queue(carried: Traffic, turn: Turn, utilisation: float = model.UTILISATION) -> Need:
    """What the queued model asks for: size links by it."""
    both = carried.up + carried.down
    half = model.queued_seconds(turn, utilisation, 0.5, 0.5) / 2
    same = model.queued_seconds(turn, utilisation, carried.up / both, carried.down / both)
    return _need(carried, turn, half, same)


def _need(carried: Traffic, turn: Turn, half: float, whole: float) -> Need:
    def bits(amount: float, seconds: float) -> float:
        return 8 * FRAMING * model.rate(amount, seconds)

    reports = 8 * FRAMING * carried.report / max(turn.step_seconds, REPORT_SECONDS)
    return Need(
        up=bits(carried.up, half) + reports,
        down=bits(carried.down, half),
        same=bits(carried.up + carried.down, whole) + reports,
    )


# ------------------------------------------------------------------ measured


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a link: bytes per second, seconds; None: not measured (yet)."""

    up: float | None = None
    down: float | None = None
    round_trip: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``up`` and ``down``: bytes per second of payload that the job's pace needs; None: not known.
    ``too_slow``: what was measured is below. ``message``: for people, with numbers; empty where all is well."""

    up: float | None = None
    down: float | None = None
    too_slow: bool = False
    message: str = ""


def judge(carried: Traffic, sync: SyncSpec, fragments: int, step_seconds: float, measured: Measured) -> Verdict:
    """Whether a learner's link keeps up with its job, whose steps take ``step_seconds``.

    The limits are those of the queued model in the long run, at ``model.UTILISATION``. Time that one
    direction does not use is the other's.
    """
    if step_seconds <= 0:
        return Verdict()
    of_turn = turn(sync, fragments, step_seconds, measured.round_trip or 0.0)
    wanted = model.UTILISATION
    half = of_turn.steady(wanted)
    # Needs are told without the round trip too, where that alone takes all the time there is.
    seconds = half or turn(sync, fragments, step_seconds).steady(wanted)
    if seconds <= 0:
        return Verdict()
    verdict = Verdict(carried.up / seconds, carried.down / seconds)
    up = carried.up / measured.up if measured.up else 0.0
    down = carried.down / measured.down if measured.down else 0.0
    each = of_turn.period * step_seconds / wanted
    left = of_turn.window(wanted) - of_turn.between_seconds
    far = of_turn.between_seconds > up + down  # the way is long rather than slow
    if up + down < NOISE_SECONDS or (max(up, down) <= each and (up + down <= left or far)):
        return verdict
    share = of_turn.period * step_seconds / max(up, down, 1e-9)
    effect = (
        f"merges come at about {share:.0%} of their pace"
        if share < 1
        else f"the exchange is longer than the {sync.overlap} steps that it overlaps: merges come late"
    )
    parts = [f"up {rate_text(measured.up)}"] if measured.up else []
    parts += [f"down {rate_text(measured.down)}"] if measured.down else []
    distance = f", round trip {seconds_text(measured.round_trip)}" if measured.round_trip else ""
    return Verdict(
        verdict.up,
        verdict.down,
        True,
        f"the link is slower than the job needs: measured {', '.join(parts)}{distance}; a merge's exchange "
        f"({size_text(carried.up)} up, {size_text(carried.down)} down) takes {seconds_text(up + down)}, and "
        f"needs up {rate_text(verdict.up)}, down {rate_text(verdict.down)} at {seconds_text(step_seconds)} a "
        f"step; {effect}. Fix: a smaller sync.compression, a larger "
        "sync.every or sync.overlap, or a faster link",
    )
