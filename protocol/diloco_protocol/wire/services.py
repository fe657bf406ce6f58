"""The method of the sync port that is gRPC, and how a server offers it: as raw bytes, unparsed.

Control messages are protobuf and small. Bulk bytes have connections of their own at the same address (bulk_calls.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

SESSION_SERVICE = "diloco.v1.Sync"
SESSION = f"/{SESSION_SERVICE}/Session"

Context = Any  # grpc.aio.ServicerContext; its stubs are generic and the class is not
SessionHandler = Callable[[AsyncIterator[bytes], Context], Any]  # a coroutine that uses context.write


def session_handler(session: SessionHandler) -> Any:
    """The Sync service with unparsed messages, so that their sizes are checked first (``parse``)."""
    return grpc.method_handlers_generic_handler(
        SESSION_SERVICE, {"Session": grpc.stream_stream_rpc_method_handler(session)}
    )
