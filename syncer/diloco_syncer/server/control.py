"""Control: signed calls of the operator or the local runner."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from diloco_protocol.documents import Report, StatusDocument
from diloco_protocol.vocabulary import ControlMethod, JobPhase
from diloco_protocol.wire import convert, limits, sync_pb2
from diloco_protocol.wire.control_auth import CallRefused, NonceCache, sign_reply, verify_call
from diloco_protocol.wire.limits import WireError
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from diloco_syncer.server.pages.status_page import bounded
from diloco_syncer.server.tls.connection_limits import RefusalCounter

log = logging.getLogger(__name__)

_ENDS = {
    "suspended": JobPhase.SUSPENDED,
    "interrupted": JobPhase.SUSPENDED,
    "failed": JobPhase.FAILED,
    "deleted": JobPhase.DELETED,
}


class BadCall(Exception):
    """A call's body is not what its method takes; the message names the field."""


def _text(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > limits.MAX_TEXT:
        raise BadCall(f"{name}: expected a text of at most {limits.MAX_TEXT} characters")
    return value


@dataclass(repr=False)
class Control:
    """The Control service. ``key`` signs calls and replies; ``status`` and ``report`` return documents, ``report``
    raises TimeoutError while that of the job's end is not made."""

    key: bytes
    core: Core
    emit: Callable[[ev.Event], None]
    checkpoint: Callable[[], Awaitable[None]]
    status: Callable[[], StatusDocument]
    report: Callable[[], Awaitable[Report]]
    nonces: NonceCache = field(default_factory=lambda: NonceCache(since_ms=time.time_ns() // 1_000_000))
    _refusals: RefusalCounter = field(default_factory=RefusalCounter)

    def handler(self) -> Any:
        """The service for a grpc.aio server, with unparsed messages."""
        method = grpc.unary_unary_rpc_method_handler(self.call)
        return grpc.method_handlers_generic_handler("diloco.v1.Control", {"Call": method})

    async def call(self, raw: bytes, context: Any) -> bytes:
        try:
            call = convert.parse(sync_pb2.SignedCall, raw, limits.MAX_HEADER_BYTES)
            verify_call(self.key, call, self.nonces)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except CallRefused as error:
            unlogged = self._refusals.count_refusal("control", time.monotonic())
            if unlogged is not None:
                log.warning("control call refused: %s (%d before it were not logged)", error, unlogged)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        try:
            body = json.loads(call.body or b"{}")
            if not isinstance(body, dict):
                raise BadCall("the body must be a JSON object")
            answer = await self._carry_out(call.method, body)
        except (BadCall, ValueError, RecursionError) as error:
            reply = sync_pb2.CallReply(ok=False, message=str(error)[: limits.MAX_TEXT])
        else:
            reply = sync_pb2.CallReply(ok=True, body=answer)
        sign_reply(self.key, call.nonce, reply)
        return reply.SerializeToString()

    async def _carry_out(self, method: str, body: dict[str, Any]) -> bytes:
        if method == ControlMethod.PROCESS_ENDED:
            ordinal = body.get("ordinal")
            if type(ordinal) is not int or ordinal < 0:
                raise BadCall("ordinal: expected a whole number that is not negative")
            self.emit(
                ev.ProcessEnded(_text(body, "region"), ordinal, _text(body, "process", ""), _text(body, "reason", ""))
            )
            return b"{}"
        if method == ControlMethod.CHECKPOINT:
            await self.checkpoint()
            return json.dumps({"epoch": self.core.epoch, "versions": list(self.core.versions)}).encode()
        if method == ControlMethod.ANNOUNCE:
            phase = _ENDS.get(_text(body, "phase"))
            if phase is None:
                raise BadCall(f"phase: {body['phase']!r} is none of {', '.join(_ENDS)}")
            self.emit(ev.EndRequested(phase, _text(body, "message", "")))
            return json.dumps({"phase": self.core.phase.value}).encode()
        if method in (ControlMethod.REPORT, ControlMethod.STATUS):
            try:
                document = await self.report() if method == ControlMethod.REPORT else self.status()
            except TimeoutError as error:
                raise BadCall("the report of the job's end is not made yet: call again") from error
            return bounded(document, limits.MAX_REPLY_BYTES - limits.MAX_HEADER_BYTES)
        raise BadCall(f"method {method[:80]!r} is none of {', '.join(ControlMethod)}")
