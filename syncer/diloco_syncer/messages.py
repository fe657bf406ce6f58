"""Messages that the syncer makes of words and not of records: phases, refusals, answers to uploads."""

from __future__ import annotations

from typing import Any

from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire import limits, sync_pb2

_PHASES: dict[JobPhase, Any] = {name: sync_pb2.PhaseName.Value(f"PHASE_{name.name}") for name in JobPhase}


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
