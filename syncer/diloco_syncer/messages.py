"""Between protobuf and the core's vocabulary: every value from the network is checked here.

A message that makes no sense raises ``WireError`` with the field's name; nothing
of it has been believed then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer.core import events as ev
from diloco_syncer.core.recovery.receipts import Rows, SlotRow

_PROCESS = re.compile(r"^[0-9a-f]{1,64}$")
_REGION = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
_HEX = re.compile(r"^[0-9a-f]{0,128}$")
_MOST = 1 << 62  # counters above are nonsense, and sums of them would leave 64 bits
_PHASES: dict[JobPhase, Any] = {name: sync_pb2.PhaseName.Value(f"PHASE_{name.name}") for name in JobPhase}


def _count(value: int, field: str) -> int:
    if value > _MOST:
        raise WireError(f"{field} is {value}: out of range")
    return value


def _seconds(value: float, field: str) -> float:
    if not 0 <= value < 1e12:
        raise WireError(f"{field} is {value}: it must be a number of seconds, not negative")
    return value


def _matches(pattern: re.Pattern[str], value: str, field: str, what: str) -> str:
    if not pattern.match(value):
        raise WireError(f"{field} {value[:80]!r}: expected {what}")
    return value


class OtherJob(WireError):
    """A Join, well-formed or not, for another job."""


def join_from(message: sync_pb2.Join, connection: int, job: str) -> ev.Join:
    """A session's first message. Raises ``WireError``; the format was checked before."""
    if message.job != job:
        raise OtherJob(f"job {message.job[:80]!r}: this syncer serves {job!r}")
    if message.role not in (sync_pb2.ROLE_LEARNER, sync_pb2.ROLE_EVALUATOR):
        raise WireError("role: expected learner or evaluator")
    if len(message.held) > limits.MAX_FRAGMENTS or len(message.digests) > 64:
        raise WireError(f"held and digests: at most {limits.MAX_FRAGMENTS} and 64 entries")
    for held in message.held:
        if held.settled > held.epoch:
            raise WireError(f"held: epoch {held.settled} cannot have settled before epoch {held.epoch}")
    for field, digest in message.digests.items():
        if len(field) > 256 or len(digest) > 256:
            raise WireError("digests: names and values have at most 256 characters")
    return ev.Join(
        connection=connection,
        process=_matches(_PROCESS, message.process, "process", "1 to 64 hex digits"),
        region=_matches(_REGION, message.region[: limits.MAX_NAME_CHARS], "region", "a region's name"),
        ordinal=message.ordinal,
        evaluator=message.role == sync_pb2.ROLE_EVALUATOR,
        layout_digest=_matches(_HEX, message.layout_digest, "layout_digest", "hex digits"),
        digests=dict(message.digests),
        sequences=_count(message.sequences, "sequences"),
        held=tuple((_count(h.epoch, "epoch"), _count(h.version, "version")) for h in message.held),
        tenure=_count(message.tenure, "tenure"),
        slot=message.slot if message.tenure else -1,
        settled=tuple(_count(h.settled, "settled") for h in message.held),
        previous_incarnation=_count(message.previous_incarnation, "previous_incarnation"),
        idle=message.idle,
        pod=_matches(_PROCESS, message.pod, "pod", "1 to 64 hex digits") if message.pod else "",
    )


def attempt_from(message: sync_pb2.Join) -> int:
    """Which try of its process a Join is; 0: not said."""
    return _count(message.attempt, "attempt")


def report_from(message: sync_pb2.Report) -> ev.ReportCounts:
    """A learner's cumulative counts."""
    if len(message.fragments) > limits.MAX_FRAGMENTS or len(message.cursors) > limits.MAX_CURSORS:
        raise WireError(
            f"report: at most {limits.MAX_FRAGMENTS} fragments and {limits.MAX_CURSORS} cursors are understood"
        )
    return ev.ReportCounts(
        slot_step=_count(message.slot_step, "slot_step"),
        trained_steps=_count(message.trained_steps, "trained_steps"),
        trained_tokens=_count(message.trained_tokens, "trained_tokens"),
        fragments=tuple(
            ev.FragmentCounts(
                epoch=_count(f.epoch, "epoch"),
                base_version=_count(f.base_version, "base_version"),
                steps=_count(f.steps, "steps"),
                tokens=_count(f.tokens, "tokens"),
                confirmed_tokens=_count(f.confirmed_tokens, "confirmed_tokens"),
                dropped_overlap=_count(f.dropped_overlap, "dropped_overlap"),
                dropped_stale=_count(f.dropped_stale, "dropped_stale"),
                dropped_rolled_back=_count(f.dropped_rolled_back, "dropped_rolled_back"),
            )
            for f in message.fragments
        ),
        compute_seconds=_seconds(message.compute_seconds, "compute_seconds"),
        stalled_seconds=_seconds(message.stalled_seconds, "stalled_seconds"),
        # A diverged learner's loss is told as it is: not a number.
        loss=message.loss if math.isfinite(message.loss) else float("nan"),
        step_seconds=_seconds(message.step_seconds, "step_seconds"),
        cursors=tuple((_count(c.lease, "lease"), _count(c.position, "position")) for c in message.cursors),
        paused=message.paused,
    )


def evaluation_from(message: sync_pb2.Evaluation, connection: int) -> ev.Evaluated:
    """An evaluator's score."""
    return ev.Evaluated(
        connection=connection,
        tokens=_count(message.tokens, "tokens"),
        loss=message.loss if math.isfinite(message.loss) else float("nan"),
        sum_versions=_count(message.sum_versions, "sum_versions"),
        final=message.final,
    )


def push_from(header: sync_pb2.UploadHeader) -> ev.PushHeader:
    """A push's or offer's header."""
    push = header.push
    for name in ("sequence", "round", "epoch", "base_version", "oldest_version", "first_step", "last_step"):
        _count(getattr(push, name), name)
    return ev.PushHeader(
        slot=header.slot,
        incarnation=_count(header.incarnation, "incarnation"),
        fragment=push.fragment,
        sequence=push.sequence,
        round=push.round,
        epoch=push.epoch,
        base_version=push.base_version,
        oldest_version=push.oldest_version,
        first_step=push.first_step,
        last_step=push.last_step,
        steps=_count(push.steps, "steps"),
        tokens=_count(push.tokens, "tokens"),
        compute_seconds=_seconds(push.compute_seconds, "compute_seconds"),
        encoding=push.encoding[:32],
        layout_digest=push.layout_digest[:128],
        report=report_from(push.report),
    )


# ------------------------------------------------------------------ down


def lease_to(grant: ev.LeaseGrant) -> sync_pb2.Lease:
    return sync_pb2.Lease(
        lease=grant.lease,
        data_epoch=grant.data_epoch,
        block=grant.block,
        start=grant.start,
        end=grant.end,
        block_size=grant.block_size,
    )


def seat_to(seat: ev.Seat) -> sync_pb2.Seat:
    return sync_pb2.Seat(
        slot=seat.slot,
        incarnation=seat.incarnation,
        continuing=seat.continuing,
        slot_step=seat.slot_step,
        slot_tokens=seat.slot_tokens,
        leases=[lease_to(grant) for grant in seat.leases],
    )


def phase_to(phase: JobPhase, message: str) -> sync_pb2.Phase:
    return sync_pb2.Phase(name=_PHASES[phase], message=message[: limits.MAX_TEXT])


def payload_to(encoding: str, data: Any, digest: int) -> sync_pb2.Payload:
    return sync_pb2.Payload(encoding=encoding, bytes=bulk.flat(data).nbytes, checksum=digest)


def refusal(reason: str, message: str, fatal: bool) -> sync_pb2.SyncerMessage:
    return sync_pb2.SyncerMessage(
        refusal=sync_pb2.Refusal(reason=reason, message=message[: limits.MAX_TEXT], fatal=fatal)
    )


def upload_reply(accepted: bool, reason: str = "", message: str = "") -> bytes:
    """An upload's answer, serialised."""
    return sync_pb2.UploadReply(
        accepted=accepted, reason=reason, message=message[: limits.MAX_TEXT]
    ).SerializeToString()


def held_to(pairs: Sequence[tuple[int, int]]) -> list[sync_pb2.Held]:
    return [sync_pb2.Held(epoch=epoch, version=version) for epoch, version in pairs]


def receipt_to(rows: Rows) -> bytes:
    """A receipt as it travels; empty where it is larger than a header has room for."""
    fields = [{name: getattr(row, name) for name in SlotRow.__dataclass_fields__} for row in rows]
    data = sync_pb2.Receipt(slots=[sync_pb2.SlotReceipt(**row) for row in fields]).SerializeToString()
    return data if len(data) <= limits.MAX_RECEIPT_BYTES else b""


def receipt_from(data: bytes) -> Rows:
    """A receipt that came back. Raises ``WireError``."""
    receipt = limits.parse(sync_pb2.Receipt, data, limits.MAX_RECEIPT_BYTES)
    return tuple(
        SlotRow(
            slot=row.slot,
            tenure=row.tenure,
            merged_tokens=_count(row.merged_tokens, "merged_tokens"),
            tenure_tokens=_count(row.tenure_tokens, "tenure_tokens"),
            sequence=_count(row.sequence, "sequence"),
            version=_count(row.version, "version"),
            last_step=_count(row.last_step, "last_step"),
            compute_seconds=_seconds(row.compute_seconds, "compute_seconds"),
        )
        for row in receipt.slots
    )
