"""Messages that only the syncer reads or makes: a Join becomes the core's event, answers become messages.

What both sides know in records goes through ``diloco_protocol.wire.convert``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.limits import WireError, check_count
from diloco_syncer.core import events as ev

_check_process = limits.check_pattern(r"[0-9a-f]{1,64}", "1 to 64 hex digits")
_check_region = limits.check_pattern(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "a region's name")
_check_digest = limits.check_pattern(r"[0-9a-f]{0,128}", "hex digits")
_check_held: Callable[[Any, str], Any] = limits.check_length(limits.MAX_FRAGMENTS)
_PHASES: dict[JobPhase, Any] = {name: sync_pb2.PhaseName.Value(f"PHASE_{name.name}") for name in JobPhase}


class OtherJob(WireError):
    """A Join, well-formed or not, for another job."""


def join_from(message: sync_pb2.Join, connection: int, job: str) -> ev.Join:
    """A session's first message. Raises ``WireError``; the format was checked before."""
    if message.job != job:
        raise OtherJob(f"job {message.job[:80]!r}: this syncer serves {job!r}")
    if message.role not in (sync_pb2.ROLE_LEARNER, sync_pb2.ROLE_EVALUATOR):
        raise WireError("role: expected learner or evaluator")
    for held in _check_held(message.held, "held"):
        if held.settled > held.epoch:
            raise WireError(f"held: epoch {held.settled} cannot have settled before epoch {held.epoch}")
    return ev.Join(
        connection=connection,
        process=_check_process(message.process, "process"),
        region=_check_region(message.region[: limits.MAX_NAME_CHARS], "region"),
        ordinal=message.ordinal,
        evaluator=message.role == sync_pb2.ROLE_EVALUATOR,
        layout_digest=_check_digest(message.layout_digest, "layout_digest"),
        digests=dict(limits.check_digests(message.digests, "digests")),
        sequences=check_count(message.sequences, "sequences"),
        held=tuple((check_count(h.epoch, "epoch"), check_count(h.version, "version")) for h in message.held),
        tenure=check_count(message.tenure, "tenure"),
        slot=message.slot if message.tenure else -1,
        settled=tuple(check_count(h.settled, "settled") for h in message.held),
        previous_incarnation=check_count(message.previous_incarnation, "previous_incarnation"),
        idle=message.idle,
        pod=_check_process(message.pod, "pod") if message.pod else "",
    )


def attempt_from(message: sync_pb2.Join) -> int:
    """Which try of its process a Join is; 0: not said."""
    return check_count(message.attempt, "attempt")


# ------------------------------------------------------------------ down


def phase_to(phase: JobPhase, message: str) -> sync_pb2.Phase:
    return sync_pb2.Phase(name=_PHASES[phase], message=message[: limits.MAX_TEXT])


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
