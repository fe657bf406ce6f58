"""Calls of the operator or the local runner, signed; and the status call, open to all who may connect."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import grpc

from diloco_protocol.vocabulary import ControlMethod, JobPhase
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.control_auth import CallRefused, NonceCache, sign_reply, verify_call
from diloco_protocol.wire.limits import WireError
from diloco_syncer.core import events as ev
from diloco_syncer.server.pages.status import bounded, report, status

if TYPE_CHECKING:
    from diloco_syncer.runtime.driver import Engine

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


class Control:
    """The Control service."""

    def __init__(self, engine: Engine, key: bytes) -> None:
        self._engine = engine
        self._key = key
        self._nonces = NonceCache()

    def handler(self) -> Any:
        """The service for a grpc.aio server, with unparsed messages."""
        method = grpc.unary_unary_rpc_method_handler(self.call)
        return grpc.method_handlers_generic_handler("diloco.v1.Control", {"Call": method})

    async def call(self, raw: bytes, context: Any) -> bytes:
        """One signed call."""
        try:
            call = limits.parse(sync_pb2.SignedCall, raw)
            verify_call(self._key, call, self._nonces)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except CallRefused as error:
            log.warning("control call refused: %s", error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        try:
            body = json.loads(call.body or b"{}")
            if not isinstance(body, dict):
                raise BadCall("the body must be a JSON object")
            answer = bounded(await self._do(call.method, body), limits.MAX_REPLY_BYTES - limits.MAX_HEADER_BYTES)
        except (BadCall, ValueError, RecursionError) as error:
            reply = sync_pb2.CallReply(ok=False, message=str(error)[: limits.MAX_TEXT])
        else:
            reply = sync_pb2.CallReply(ok=True, body=answer)
        sign_reply(self._key, call.nonce, reply)
        return reply.SerializeToString()

    async def _do(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine
        if method == ControlMethod.PROCESS_GONE:
            ordinal = body.get("ordinal")
            if type(ordinal) is not int or ordinal < 0:
                raise BadCall("ordinal: expected a whole number that is not negative")
            engine.handle(
                ev.ProcessEnded(_text(body, "region"), ordinal, _text(body, "process", ""), _text(body, "reason", ""))
            )
            return {}
        if method == ControlMethod.CHECKPOINT:
            await engine.checkpoint()
            return {"epoch": engine.epoch, "versions": list(engine.core.versions)}
        if method == ControlMethod.ANNOUNCE:
            phase = _ENDS.get(_text(body, "phase"))
            if phase is None:
                raise BadCall(f"phase: {body['phase']!r} is none of {', '.join(_ENDS)}")
            engine.handle(ev.EndRequested(phase, _text(body, "message", "")))
            return {"phase": engine.core.phase.value}
        if method == ControlMethod.REPORT:
            document = report(engine)
            engine.report_fetched = True
            return document
        if method == ControlMethod.STATUS:
            return status(engine)
        raise BadCall(f"method {method[:80]!r} is none of {', '.join(ControlMethod)}")


def status_handler(engine: Engine) -> Any:
    """The Status service for a grpc.aio server."""

    async def get(raw: bytes, context: Any) -> bytes:
        await engine.sessions.doors.authorize(context)
        try:
            text = bounded(status(engine), limits.MAX_CONTROL_BYTES - limits.MAX_HEADER_BYTES)
        except ValueError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return sync_pb2.StatusReply(json=text.decode()).SerializeToString()

    return grpc.method_handlers_generic_handler("diloco.v1.Status", {"Get": grpc.unary_unary_rpc_method_handler(get)})
