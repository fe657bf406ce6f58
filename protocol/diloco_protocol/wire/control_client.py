"""Signed calls to a syncer's control service: the one client of operator and local runner.

Needs the service's address and the control key, nothing else (credentials.py). One channel is kept between calls; after
a failure the next call makes a new one, so that the name is resolved anew. gRPC is loaded at the first call.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from diloco_protocol.common.reach import first_answering
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import convert, limits
from diloco_protocol.wire.control_auth import CallRefused, sign_call, verify_reply

CALL_SECONDS = 10.0

Failure = Literal["unreachable", "refused", "failed"]


class ControlError(Exception):
    """A call did not come through.

    ``kind``: "unreachable", nobody answered in time (trying again may help); "refused", the syncer
    does not believe the call or cannot do it (key, clock, a wrong body; trying again does not
    help); "failed", what answered is no syncer with this key, or broke.
    """

    def __init__(self, kind: Failure, message: str) -> None:
        super().__init__(message)
        self.kind: Failure = kind


class _Link:
    """A channel and how many calls are on it; given up, it is closed when the last one is over, for
    closing cancels what is under way."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.calls = 0
        self.given_up = False

    async def close_if_free(self) -> None:
        if self.given_up and not self.calls:
            await self.channel.close(None)


class ControlClient:
    """Calls to one syncer. ``address``: host:port of its control service; ``key``: the control key; ``largest``: bytes
    of a reply that are read.

    For one event loop; calls may run beside each other.
    """

    def __init__(self, address: str, key: bytes, largest: int = limits.MAX_REPLY_BYTES) -> None:
        self.address = address
        self._largest = largest
        self._key = key
        self._link: _Link | None = None

    async def call(
        self, method: str, body: dict[str, Any] | None = None, timeout: float = CALL_SECONDS
    ) -> dict[str, Any]:
        """One call (docs/protocol.md, control calls); the reply's body. ``timeout``: seconds, connecting
        included. Raises ControlError."""
        from diloco_protocol.wire import channels

        if self._link is None:
            address = await first_answering(self.address, timeout)
        if self._link is None:  # not made by a call beside this one
            self._link = _Link(Credentials().aio_channel(address, channels.control_options(self._largest)))
        link = self._link
        link.calls += 1
        try:
            return await self._call(link.channel, method, body or {}, timeout)
        except ControlError as error:
            if error.kind != "refused":
                self._give_up(link)
            raise ControlError(error.kind, f"control call {method} to {self.address}: {error}") from error.__cause__
        finally:
            link.calls -= 1
            await link.close_if_free()

    async def close(self) -> None:
        """Let go of the connection; another call makes a new one."""
        if (link := self._link) is not None:
            self._give_up(link)
            await link.close_if_free()

    def _give_up(self, link: _Link) -> None:
        link.given_up = True
        if self._link is link:
            self._link = None

    async def _call(self, channel: Any, method: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        import grpc

        from diloco_protocol.wire import sync_pb2

        signed = sign_call(self._key, method, json.dumps(body).encode())
        try:
            raw = await channel.unary_unary(limits.CONTROL_PATH)(signed.SerializeToString(), timeout=timeout)
            reply = convert.parse(sync_pb2.CallReply, raw, self._largest)
            verify_reply(self._key, signed.nonce, reply)
            document = json.loads(reply.body) if reply.body else {}
        except grpc.aio.AioRpcError as error:
            words = f"{error.code().name.lower().replace('_', ' ')}: {error.details()}"
            raise ControlError(_kind(error.code()), words) from error
        except (limits.WireError, CallRefused, ValueError, RecursionError) as error:
            raise ControlError("failed", str(error)) from error
        if not reply.ok:
            raise ControlError("refused", reply.message)
        if not isinstance(document, dict):
            raise ControlError("failed", "the reply is no JSON object")
        return document


def _kind(code: Any) -> Failure:
    import grpc

    status = grpc.StatusCode
    if code in (status.UNAVAILABLE, status.DEADLINE_EXCEEDED, status.CANCELLED):
        return "unreachable"
    if code in (status.PERMISSION_DENIED, status.INVALID_ARGUMENT, status.UNAUTHENTICATED):
        return "refused"
    return "failed"
