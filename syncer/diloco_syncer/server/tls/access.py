"""Who may call: for each call on the sync port, the peer at its other end.

With credentials the listener knows the certificate of each connection, and every call shows the join token. In
plaintext (one machine) a call shows the join token, or where there is none every call is authorized. What is refused
here is counted and logged together with what the listener refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from diloco_protocol.documents import TlsStatus
from diloco_protocol.security.credentials import TOKEN_KEY, Credentials
from diloco_protocol.vocabulary import ConnectionRefusal
from diloco_protocol.wire import limits
from diloco_protocol.wire.bulk_calls import CallFailed
from diloco_syncer.runtime.traffic import NOBODY
from diloco_syncer.server.tls.connection_limits import ConnectionLimits, Peer, RefusalCounter, TooManyCalls
from diloco_syncer.server.tls.listener import PortListener

log = logging.getLogger(__name__)
PLAINTEXT = Credentials()


class CallAuthorizer:
    """Authorizes calls on the sync port. Only the syncer's event loop may call the methods."""

    def __init__(
        self,
        listener: PortListener | None = None,
        regions: Mapping[str, int] | None = None,
        plaintext: Credentials = PLAINTEXT,
    ) -> None:
        """``listener`` None: plaintext, with the token of ``plaintext``. ``regions``: learners and spares of each."""
        self.listener = listener
        reloader = None if listener is None else listener.reloader
        self._reloader = reloader
        self._accepts_token: Callable[[Any], bool] = plaintext.admits if reloader is None else reloader.accepts_token
        self.limits = ConnectionLimits(regions or {})
        self.secure = reloader is not None  # plaintext has no certificate that limits could hang on
        self._refusals = RefusalCounter()

    async def authorize(self, context: Any, requests: AsyncIterator[bytes] | None = None) -> Peer:
        """The peer of a call that shows the join token; aborts any other call.

        ``requests``: what the caller streams. Its first message is awaited before the call is aborted:
        a client whose first write meets a call that has ended already sees INTERNAL and not the reason.
        """
        peer = Peer() if self.listener is None else self.listener.find_peer(context.peer())
        if peer is None:  # its connection ended while the call was on its way
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection has ended")
        assert peer is not None
        if not self._accepts_token(context.invocation_metadata()):
            code, message = grpc.StatusCode.UNAUTHENTICATED, "the join token is missing or wrong"
            await self.refuse(context, peer, ConnectionRefusal.WRONG_TOKEN, code, message=message, requests=requests)
        return peer

    def check_token(self, peer: Peer, token: str) -> None:
        """Raises CallFailed for a bulk call that does not show the join token."""
        if not self.accepts_token(token):
            message = "the join token is missing or wrong"
            self.record_refusal(peer, ConnectionRefusal.WRONG_TOKEN, message)
            raise CallFailed(message, final=True)

    def accepts_token(self, token: str) -> bool:
        """Whether a bulk call's token is the job's."""
        return self._accepts_token(((TOKEN_KEY, token),))

    def find_name(self, context: Any) -> str:
        """The listener's name for a gRPC call's connection."""
        return "" if self.listener is None else str(context.peer())

    def assign_place(self, called: str, place: str) -> None:
        """Count the bytes of a call's connection, by the listener's name for it, for ``place`` from now on
        (traffic.py)."""
        if self.listener is not None:
            self.listener.assign_place(called, place)

    def find_place(self, called: str) -> str:
        """For which place the bytes of a call's connection are counted (traffic.py)."""
        return NOBODY if self.listener is None else self.listener.find_place(called)

    async def refuse(
        self,
        context: Any,
        peer: Peer,
        reason: str,
        code: grpc.StatusCode,
        message: str,
        requests: AsyncIterator[bytes] | None = None,
    ) -> None:
        """Record a refusal and abort the call, after its first message (``authorize``); always raises."""
        self.record_refusal(peer, reason, message)
        if requests is not None:
            with contextlib.suppress(TimeoutError, TooManyCalls), self.limits.silent_call(peer):
                async with asyncio.timeout(limits.JOIN_SECONDS):
                    await anext(requests, None)
        await context.abort(code, message)

    def record_refusal(self, peer: Peer, reason: str, message: str) -> None:
        """Count a refusal, and log it unless one for the same reason was logged in the last seconds."""
        unsaid = self._refusals.count_refusal(reason, time.monotonic())
        if unsaid is not None:
            more = f" ({unsaid} like it before, not logged)" if unsaid else ""
            log.warning("refused %s: %s: %s%s", peer, reason, message, more)

    def status(self) -> TlsStatus:
        """The status document's ``tls``."""
        refused = Counter(self._refusals.counts)
        if self.listener is not None:
            refused.update(dict(self.listener.refusals.counts))
        listener = self.listener if self.secure else None
        return TlsStatus(
            secure=self.secure,
            connections=listener.connections if listener is not None else None,
            handshakes=listener.handshakes if listener is not None else None,
            refused=dict(sorted(refused.items())),
            expires=self._reloader.expires if self._reloader is not None else None,
            peers_expire=listener.earliest_expiry if listener is not None else None,
        )
