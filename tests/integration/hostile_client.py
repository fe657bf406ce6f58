"""A client that can say anything to a syncer, with and without a certificate.

Not a test: what tests of hostile callers need. It speaks the protocol by hand (syncer_client.py), shows any
certificate and join token, and names any process, slot and incarnation.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from grpc import aio
from syncer_client import LAYOUT, Client, SyncerProcess

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import bulk, limits, services, sync_pb2


class WithToken:
    """A channel whose calls show the join token, for a client that knows of none."""

    def __init__(self, channel: aio.Channel, metadata: Any) -> None:
        self._channel, self._metadata = channel, metadata

    def __getattr__(self, kind: str) -> Any:
        make = getattr(self._channel, kind)
        if kind not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return make

        def method(*arguments: Any, **options: Any) -> Any:
            made = make(*arguments, **options)
            return lambda *a, **o: made(*a, **{**o, "metadata": self._metadata})

        return method


class Learner(Client):
    """A scripted learner with credentials. ``folder`` None: it has none."""

    def __init__(self, syncer: SyncerProcess, folder: Path | None, region: str = "eu-1", process: str = "") -> None:
        super().__init__(syncer, 0, process)
        self.credentials = Credentials() if folder is None else Credentials.from_directory(folder)
        self.region, self.attempt = region, 0
        self.metadata = self.credentials.metadata()
        self.plain, self.channel = (self.channel, self.credentials.aio_channel(syncer.addresses["sync"], self.options))

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
        self.call = self.channel.stream_stream(services.SESSION)(metadata=self.metadata)
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

    async def upload(self, header: sync_pb2.UploadHeader, payload: Any) -> sync_pb2.UploadReply:
        return await bulk.upload(self.channel, header, payload, timeout=60, metadata=self.metadata)

    async def download(self, request: sync_pb2.DownloadRequest, size: int) -> Any:
        return await bulk.download(self.channel, request, size=size, metadata=self.metadata)

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
        if not isinstance(self.channel, WithToken):
            self.channel = WithToken(self.channel, self.metadata)  # type: ignore[assignment]
        await self.ready()
        return first.welcome

    async def close(self) -> None:
        await self.plain.close()
        await super().close()


class Learners:
    """All that a test makes, closed at its end."""

    def __init__(self, syncer: SyncerProcess) -> None:
        self.syncer, self.all = syncer, list[Learner]()

    def __call__(self, folder: Path | None, region: str = "eu-1", process: str = "") -> Learner:
        self.all.append(Learner(self.syncer, folder, region, process))
        return self.all[-1]

    async def __aenter__(self) -> Learners:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self.all:
            await each.close()
