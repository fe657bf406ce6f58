"""Between protobuf and the core's vocabulary: every value from the network is checked here.

A message that makes no sense raises ``WireError`` with the field's name; nothing
of it has been believed then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire import bulk, limits, sync_pb2
from diloco_protocol.wire.limits import WireError
from diloco_syncer.core import events as ev

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


# ------------------------------------------------------------------ down


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
