"""A syncer's documents as they are at the call.

Not a test: helpers. The syncer keeps its pages for up to half a second, so a page that is looked at again and again
(as every wait of a test does) may be of before what the test has just done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import grpc
from documents import conforming

from diloco_protocol.documents import Report, StatusDocument
from diloco_protocol.vocabulary import ControlMethod
from diloco_protocol.wire import channels, limits, sync_pb2
from diloco_protocol.wire.control_auth import sign_call
from patience import wait_until

SECONDS = 60.0


def ask_status(control: str, key: bytes) -> dict[str, Any]:
    """The status document. ``control``: host:port of its control port."""
    time.sleep(0.03)  # in two minutes a syncer takes 4,096 signed calls, of which it remembers each
    reply = _call_signed(control, key, ControlMethod.STATUS)
    assert reply.ok, reply.message
    return conforming(StatusDocument, json.loads(reply.body))


def ask_report(control: str, key: bytes) -> dict[str, Any]:
    """The report; of a job that has ended, once that is durable."""

    def ask() -> sync_pb2.CallReply | None:
        reply = _call_signed(control, key, ControlMethod.REPORT)
        assert reply.ok or "call again" in reply.message, reply.message
        return reply if reply.ok else None

    return conforming(Report, json.loads(wait_until(ask, "a report that is durable").body))


def announce_end(control: str, key: bytes, phase: str) -> None:
    """Have the job end: suspended, deleted or failed."""
    reply = _call_signed(control, key, ControlMethod.ANNOUNCE, phase=phase)
    assert reply.ok, reply.message


def _call_signed(control: str, key: bytes, method: ControlMethod, **body: str) -> sync_pb2.CallReply:
    words = json.dumps(body).encode()
    return sync_pb2.CallReply.FromString(_call(control, limits.CONTROL_PATH, lambda: sign_call(key, method, words)))


_channels: dict[str, grpc.Channel] = {}  # one for each port: a syncer whose loop is late still counts closed ones


def _call(address: str, path: str, make_message: Callable[[], Any]) -> bytes:
    """Over the channel of the call before. That may be to a syncer that is no more, so a second try has a new one."""
    known = address in _channels
    if not known:
        _channels[address] = grpc.insecure_channel(address, channels.control_options())
    try:
        return bytes(_channels[address].unary_unary(path)(make_message().SerializeToString(), timeout=SECONDS))
    except grpc.RpcError as error:
        _channels.pop(address).close()
        if known:
            return _call(address, path, make_message)
        raise ConnectionError(str(error)) from error  # what a page raises too
