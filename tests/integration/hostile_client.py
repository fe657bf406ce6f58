"""A client that can say anything to a syncer, with and without a certificate.

Not a test: what tests of hostile callers need. It speaks the protocol by hand (syncer_client.py), shows any
certificate and join token, and names any process, slot and incarnation.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from syncer_client import LAYOUT, Client, SyncerProcess

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import channels, limits, sync_pb2


class Learner(Client):
    """A scripted learner with credentials, or those in a folder. None: it has none."""

    def __init__(
        self, syncer: SyncerProcess, shown: Path | Credentials | None, region: str = "eu-1", process: str = ""
    ) -> None:
        super().__init__(
            syncer, 0, process, shown if isinstance(shown, Credentials) else Credentials.from_directory(shown)
        )
        self.region, self.attempt = region, 0

    def said(self, **changes: Any) -> bytes:
        self.attempt += 1
        fields: dict[str, Any] = {
            "format": limits.FORMAT,
            "job": "raw",
            "process": self.process,
            "role": sync_pb2.ROLE_LEARNER,
            "region": self.region,
            "ordinal": 0,
            "layout_digest": LAYOUT.digest,
            "attempt": self.attempt,
        }
        return sync_pb2.LearnerMessage(join=sync_pb2.Join(**(fields | changes))).SerializeToString()

    async def join(self, raw: bytes = b"", **changes: Any) -> sync_pb2.SyncerMessage:
        self.call = self.channel.stream_stream(channels.SESSION)(metadata=self.metadata)
        await self.call.write(raw or self.said(**changes))
        first = sync_pb2.SyncerMessage.FromString(await asyncio.wait_for(self.call.read(), 60))
        if first.HasField("welcome"):
            self.welcome = first.welcome
            self._reader = asyncio.create_task(self._read())
        return first

    async def refused(self, raw: bytes = b"", **changes: Any) -> tuple[str, bool]:
        first = await self.join(raw, **changes)
        assert first.HasField("refusal"), first
        return first.refusal.reason, first.refusal.fatal

    async def push_as(self, victim: Client, process: str, fragment: int = 0, **changes: Any) -> sync_pb2.UploadReply:
        """Upload an offer of somebody else's slot, under its incarnation and this process id."""
        seat = victim.welcome.seat
        header = sync_pb2.UploadHeader(
            job="raw",
            slot=seat.slot,
            incarnation=seat.incarnation,
            process=process,
            push=victim.push(fragment, 0, **changes),
        )
        victim.sequence[fragment] -= 1
        return await self.upload(header, victim.delta(fragment))

    async def take_part(self) -> sync_pb2.Welcome:
        """Join, make version 0 if that is asked for, take what is newest, and report."""
        first = await self.join()
        assert first.HasField("welcome"), first
        if first.welcome.initialise:
            await self.initialise()
        await self.ready()
        return first.welcome


class Learners:
    """All that a test makes, closed at its end."""

    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer, self.all = syncer, list[Learner]()

    def __call__(self, shown: Path | Credentials | None, region: str = "eu-1", process: str = "") -> Learner:
        self.all.append(Learner(self.syncer, shown, region, process))
        return self.all[-1]

    async def __aenter__(self) -> Learners:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.all:
            await each.close()
