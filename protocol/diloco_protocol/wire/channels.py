"""The method of the sync port that is gRPC, and options of gRPC channels and servers.

Control messages are protobuf and small. A server takes them as raw bytes, unparsed. Bulk bytes have connections of
their own at the same address (bulk_calls.py).

Keepalive: an idle connection is pinged every ``KEEPALIVE_SECONDS``: less than the shortest idle timeout of common load
balancers (60 s), and not so often that a server or a firewall takes it for abuse; a dead peer is noticed
``KEEPALIVE_ANSWER_SECONDS`` later. Proxies of the environment are never used: a learner's proxy settings are for the
web, and gRPC through an HTTP proxy loses its long streams.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from diloco_protocol.wire import limits

SESSION_SERVICE = "diloco.v1.Sync"
SESSION = f"/{SESSION_SERVICE}/Session"

Option = tuple[str, Any]
Context = Any  # grpc.aio.ServicerContext; its stubs are generic and the class is not
SessionHandler = Callable[[AsyncIterator[bytes], Context], Any]  # a coroutine that uses context.write


def session_handler(session: SessionHandler) -> Any:
    """The Sync service with unparsed messages, so that their sizes are checked first (``parse``)."""
    return grpc.method_handlers_generic_handler(
        SESSION_SERVICE, {"Session": grpc.stream_stream_rpc_method_handler(session)}
    )


def channel_options() -> list[Option]:
    """Options of a learner's channel. Each has a connection of its own (no shared subchannels)."""
    return [*_common(limits.MAX_CONTROL_BYTES), *_connecting()]


def control_options(reply_bytes: int = limits.MAX_REPLY_BYTES) -> list[Option]:
    """Options of a control client's channel: replies may be large (``reply_bytes``), and a connection that is not
    used is given up, for an operator talks to many syncers."""
    return [*_common(reply_bytes), *_connecting(), ("grpc.client_idle_timeout_ms", 15_000)]


def server_options(reply_bytes: int = limits.MAX_CONTROL_BYTES, connections: int | None = None) -> list[Option]:
    """Options of the syncer's servers; ``reply_bytes``: the largest message down; ``connections``: the
    most at once, None: any number. A port in use is an error (no SO_REUSEPORT)."""
    return [
        *([("grpc.max_allowed_incoming_connections", connections)] if connections is not None else []),
        *_common(2 * limits.MAX_CONTROL_BYTES, reply_bytes),  # what is too large is refused with a reason
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(limits.JOIN_SECONDS * 1000)),  # until HTTP/2 has begun
        ("grpc.http2.min_ping_interval_without_data_ms", limits.KEEPALIVE_SECONDS * 1000 // 3),
        ("grpc.http2.max_ping_strikes", 5),
        ("grpc.max_concurrent_streams", 1024),
    ]


def control_server_options(connections: int) -> list[Option]:
    """Options of the syncer's control server, whose callers are few and whose calls are short: what anybody may send it
    before a key was looked at fits in 8 calls of 64 KiB on each of ``connections``."""
    small: list[Option] = [
        ("grpc.max_receive_message_length", limits.MAX_HEADER_BYTES),
        ("grpc.max_concurrent_streams", 8),
        ("grpc.http2.lookahead_bytes", limits.MAX_HEADER_BYTES),
        ("grpc.http2.bdp_probe", 0),  # a window that does not grow
    ]
    changed = {name for name, _ in small}
    usual = server_options(limits.MAX_REPLY_BYTES, connections)
    return [*(option for option in usual if option[0] not in changed), *small]


def _connecting() -> list[Option]:
    """Of a client: how long one try to connect may take (gRPC calls it the least backoff), and the pauses between."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", limits.FIRST_PAUSE_SECONDS * 1000),
        ("grpc.min_reconnect_backoff_ms", limits.CONNECT_SECONDS * 1000),
        ("grpc.max_reconnect_backoff_ms", limits.LONGEST_PAUSE_SECONDS * 1000),
    ]


def _common(largest: int, sent: int = limits.MAX_CONTROL_BYTES) -> list[Option]:
    return [
        ("grpc.max_send_message_length", sent),
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.keepalive_time_ms", limits.KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", limits.KEEPALIVE_ANSWER_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]
