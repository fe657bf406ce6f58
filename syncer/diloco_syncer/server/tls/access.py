"""Who may call: for each call on the sync port, the peer at its other end.

With credentials the gate knows each connection's certificate, and calls show the join
token; without, everything is open (one machine). What is refused here is counted and
logged with what the gate refused.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import grpc

from diloco_protocol.security import identity
from diloco_syncer.server.tls.connection_limits import WRONG_TOKEN, Guards, Peer, Refusals
from diloco_syncer.server.tls.listener import Gate

log = logging.getLogger(__name__)


class Doors:
    """All of it belongs to the syncer's loop."""

    def __init__(self, gate: Gate | None = None, regions: Mapping[str, int] | None = None) -> None:
        """``gate`` None: plaintext. ``regions``: learners and spares of each."""
        self.gate = gate
        self.guards = Guards(regions or {})
        self.limited = gate is not None  # plaintext has no certificate that limits could hang on
        self._refusals = Refusals()

    async def admit(self, context: Any) -> Peer:
        """The peer of a call, which knows the join token. Aborts the call otherwise."""
        if self.gate is None:
            return Peer()
        peer = self.gate.peer(context.peer())
        if peer is None:  # its connection ended while the call was on its way
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection has ended")
        assert peer is not None
        if not self.gate.keeper.admits(context.invocation_metadata()):
            code, message = grpc.StatusCode.UNAUTHENTICATED, "the join token is missing or wrong"
            await self.refuse(context, peer, WRONG_TOKEN, code, message)
        return peer

    def comes_from(self, context: Any, place: str) -> None:
        """The call's connection is of that place (traffic.py)."""
        if self.gate is not None:
            self.gate.belongs(context.peer(), place)

    async def refuse(self, context: Any, peer: Peer, reason: str, code: grpc.StatusCode, message: str) -> None:
        """Note it, and end the call; always raises."""
        self.note(peer, reason, message)
        await context.abort(code, message)

    def note(self, peer: Peer, reason: str, message: str) -> None:
        """Count a refusal, and log it if none like it was lately."""
        unsaid = self._refusals.note(reason, time.monotonic())
        if unsaid is not None:
            more = f" ({unsaid} like it before, not logged)" if unsaid else ""
            log.warning("refused %s: %s: %s%s", peer, reason, message, more)

    def refused(self) -> dict[str, int]:
        """How many were refused since the start, by reason."""
        counts = Counter(self._refusals.counts)
        if self.gate is not None:
            counts.update(dict(self.gate.refusals.counts))
        return dict(sorted(counts.items()))

    def status(self) -> dict[str, Any]:
        """For the status document."""
        gate = self.gate
        return {
            "secure": gate is not None,
            "connections": gate.connections if gate is not None else None,
            "handshakes": gate.handshakes if gate is not None else None,
            "refused": self.refused(),
            "expires": gate.keeper.expires if gate is not None else None,
            "peers_expire": gate.earliest_expiry if gate is not None else None,
        }


def may_come_from(peer: Peer, region: str) -> bool:
    """Whether a learner of this region may come with this peer's certificate."""
    return identity.covers(peer.names, region)
