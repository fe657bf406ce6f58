"""A syncer process, and a raw client that speaks the protocol by hand.

Not a test: helpers for tests that need both. The client is deliberately not the
worker's library, so that the syncer is tested against docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from forked import ForkedProcess, fork
from grpc import aio
from syncer_calls import ask_status

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.common.reach import join_address, split_address
from diloco_protocol.security.credentials import BULK_PROTOCOL, Credentials
from diloco_protocol.security.identity import SERVER_NAME
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.wire import bulk, channels, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import bulk_connection
from diloco_protocol.wire.control_auth import make_key, sign_call
from diloco_syncer import service, startup
from patience import until, wait_until

PREFACE = b"diloco-bulk\n"  # as docs/protocol.md has it
LAYOUT = Layout.build([Tensor("embed", (32, 8), "float32", True), Tensor("w", (64, 8), "float32", False)], fragments=2)
TOKENS = 100  # per step

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: raw}
spec:
  training: {model: null, data: null, stop: {steps: 100000}, evaluation: null}
  sync:
    fragments: 2
    every: 2
    overlap: 1
    grace: {factor: 0, capSeconds: 0}
    compression: {up: float32, down: float32}
    merge: {method: rda}
    outer: {optimizer: sgd, lr: 1.0}
    heartbeat: {intervalSeconds: 1, timeoutSeconds: 30}
  syncer: {checkpoint: {everySeconds: 3600}}
  learners: {command: [python, x.py]}
  regions:
  - {name: local, learners: 2}
"""


def raw_job(*overrides: str) -> DiLoCoJob:
    return parse_job(JOB, overrides)


class SyncerProcess:
    """A syncer on a store, with its log."""

    def __init__(
        self, folder: Path, job: DiLoCoJob, store: Path | None = None, uri: str = "", env: dict[str, str] | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.job, self.store = folder, job, store or folder / "store"
        self.uri, self.env = uri, env or {}
        self.log = folder / "log"
        self.key = make_key(folder / "key")
        self.starts = 0
        (folder / "job.json").write_text(job_to_json(job))
        self.process: ForkedProcess | None = None
        self.addresses: dict[str, Any] = {}

    def start(self, *options: str) -> SyncerProcess:
        self.launch(*options)
        return self.await_serving()

    def launch(self, *options: str) -> None:
        self.starts += 1
        addresses = self.folder / "addresses"
        addresses.unlink(missing_ok=True)
        words = ["--job", self.folder / "job.json", "--store", self.uri or self.store, "--threads", "1"]
        words += ["--control-key-file", self.folder / "key", "--address-file", addresses, *options]
        self.process = fork(["-m", "diloco_syncer", *map(str, words)], self.env, self.log)

    def await_serving(self) -> SyncerProcess:
        path = self.folder / "addresses"
        wait_until(path.exists, "the syncer to serve", self.process, self.log)
        self.addresses = json.loads(path.read_text())
        return self

    @property
    def exited(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def status(self) -> dict[str, Any]:
        return ask_status(self.addresses["control"], self.key)

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self.addresses['http']}{path}", timeout=60) as page:
            return bytes(page.read())

    async def call(self, method: str, **body: Any) -> sync_pb2.CallReply:
        """A signed control call."""
        async with aio.insecure_channel(self.addresses["control"]) as channel:
            call = sign_call(self.key, method, json.dumps(body).encode())
            return await send_call(channel, call)


async def send_call(channel: aio.Channel, call: sync_pb2.SignedCall) -> sync_pb2.CallReply:
    raw = await channel.unary_unary("/diloco.v1.Control/Call")(call.SerializeToString(), timeout=60)
    return sync_pb2.CallReply.FromString(raw)


class RawBulk:
    """A bulk connection whose bytes are said by hand, whatever they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.port = int(writer.get_extra_info("sockname")[1])  # this end's

    @classmethod
    async def connect(cls, address: str, credentials: Credentials | None = None, first: bytes = PREFACE) -> RawBulk:
        """With the certificate of ``credentials`` if they have one; else in plain text, where ``first`` comes first."""
        host, _, port = address.rpartition(":")
        if credentials is not None and credentials.secure:
            context = credentials.client_context([BULK_PROTOCOL])
            return cls(*await asyncio.open_connection(host, int(port), ssl=context, server_hostname=SERVER_NAME))
        made = cls(*await asyncio.open_connection(host, int(port)))
        await made.send(first)
        return made

    async def send(self, *pieces: Any) -> None:
        for piece in pieces:
            self._writer.write(bulk.flat(piece))
        await self._writer.drain()

    async def request(self, token: str = "", **what: Any) -> None:
        """A BulkRequest, behind its length."""
        await self.send(behind_length(sync_pb2.BulkRequest(token=token, **what).SerializeToString()))

    async def reply(self, seconds: float = 60) -> sync_pb2.BulkReply:
        size = int.from_bytes(await self.read(4, seconds), "big")
        return sync_pb2.BulkReply.FromString(await self.read(size))

    async def read(self, size: int, seconds: float = 60) -> bytes:
        async with asyncio.timeout(seconds):
            return await self._reader.readexactly(size)

    async def failure(self) -> tuple[str, bool]:
        """The failure that is answered: its message, and whether it is for good."""
        reply = await self.reply()
        assert reply.HasField("failure"), reply
        return reply.failure.message, reply.failure.final

    async def until_heard(self, words: bytes) -> None:
        """Read until these came, whatever comes before."""
        data = b""
        while words not in data:
            more = await self._reader.read(1 << 20)
            assert more, "the connection has ended"
            data = data[-len(words) :] + more

    async def until_ended(self, seconds: float = 60) -> bytes:
        """Wait until the syncer has ended the connection; what it still said."""
        try:
            async with asyncio.timeout(seconds):
                return await self._reader.read()
        except ConnectionError:  # it has not read all that was sent
            return b""

    def abort(self) -> None:
        """Without what is still to be sent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def behind_length(data: Any) -> bytes:
    """A message, or a chunk of an upload, as it stands on a bulk connection."""
    return len(data).to_bytes(4, "big") + bytes(data)


class Client:
    """One learner, by hand. It holds θ = base - 0.01 · (its steps since the base)."""

    def __init__(
        self, syncer: SyncerProcess, ordinal: int = 0, process: str = "", credentials: Credentials | None = None
    ) -> None:
        self.syncer, self.ordinal = syncer, ordinal
        self.process = process or secrets.token_hex(8)
        # With gRPC's own limit for a connection (20 s): this client does not try again, as a learner would.
        # It may say more than the syncer takes.
        own = ("reconnect_backoff", "max_send_message_length")
        options = [(name, value) for name, value in channels.channel_options() if not any(one in name for one in own)]
        self.credentials = credentials or Credentials()
        self.metadata = self.credentials.metadata()
        self.channel = self.credentials.aio_channel(syncer.addresses["sync"], options)
        self._bulk = bulk_connection(self.credentials, syncer.addresses["sync"])
        self._shards: dict[tuple[str, int], bulk.Channel] = {}  # connections to shards, by address and number
        self._calling = asyncio.Lock()  # for one bulk call at a time; after one that failed the next need not wait
        self.call: Any = None
        self.heard: list[sync_pb2.SyncerMessage] = []
        self.welcome = sync_pb2.Welcome()
        self.sequence = [0] * len(LAYOUT)
        self.base: list[tuple[int, int]] = []
        self.bases: list[np.ndarray[Any, Any]] = [np.zeros(0, np.float32)] * len(LAYOUT)
        self.steps = 0
        self.merged_steps = [0] * len(LAYOUT)  # steps at the snapshot of the newest merged push
        self.pushed: list[dict[int, int]] = [{} for _ in LAYOUT.fragments]  # sequence -> steps at it
        self.confirmed = [0] * len(LAYOUT)
        self.ended = ""
        self._reader: asyncio.Task[None] | None = None

    async def join(self, **changes: Any) -> sync_pb2.SyncerMessage:
        """Open a session; the first message back."""
        fields: dict[str, Any] = {
            "format": limits.FORMAT,
            "job": "raw",
            "process": self.process,
            "role": sync_pb2.ROLE_LEARNER,
            "region": "local",
            "ordinal": self.ordinal,
            "layout_digest": LAYOUT.digest,
        }
        self.call = self.channel.stream_stream(channels.SESSION)(metadata=self.metadata)
        await self.say(join=sync_pb2.Join(**(fields | changes)))
        first = sync_pb2.SyncerMessage.FromString(await asyncio.wait_for(self.call.read(), 60))
        assert first.WhichOneof("kind") in ("welcome", "refusal"), first
        if first.HasField("welcome"):
            self.welcome = first.welcome
            self._reader = asyncio.create_task(self._read())
        return first

    async def _read(self) -> None:
        try:
            while (raw := await self.call.read()) is not aio.EOF:
                self.heard.append(sync_pb2.SyncerMessage.FromString(raw))
            self.ended = "end"
        except aio.AioRpcError as error:
            self.ended = error.code().name

    async def say(self, **kind: Any) -> None:
        await self.call.write(sync_pb2.LearnerMessage(**kind).SerializeToString())

    def of_kind(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.heard if m.HasField(kind)]

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self.call is not None:
            self.call.cancel()
        await self.channel.close()
        self._bulk.drop()

    # ------------------------------------------------------------- bulk calls, and version 0

    def header(self, **what: Any) -> sync_pb2.UploadHeader:
        seat = self.welcome.seat
        return sync_pb2.UploadHeader(
            job="raw", slot=seat.slot, incarnation=seat.incarnation, process=self.process, **what
        )

    def shards(self) -> list[sync_pb2.Shard]:
        """As the syncer told last."""
        told = self.of_kind("shards")
        return list(told[-1].shards if told else self.welcome.shards)

    def way_to(self, fragment: int | None) -> bulk.Channel:
        """The connection to who has this fragment; None: to the syncer itself."""
        shards = self.shards()
        for number, shard in enumerate(shards if fragment is not None else ()):
            if fragment in shard.fragments:
                host, port = split_address(self.syncer.addresses["sync"])
                there = join_address(shard.host or host, shard.port or port)
                made = bulk_connection(self.credentials, there, number)
                return self._shards.setdefault((there, number), made)
        return self._bulk

    async def upload(self, header: sync_pb2.UploadHeader, payload: Any) -> sync_pb2.UploadReply:
        way = self.way_to(header.push.fragment if header.HasField("push") else None)
        async with asyncio.timeout(60), self._calling:
            return await bulk.upload(way, header, payload)

    async def download(
        self, request: sync_pb2.DownloadRequest, size: int | None = None
    ) -> tuple[sync_pb2.DownloadHeader, np.ndarray[Any, Any]]:
        fragments = (sync_pb2.DownloadRequest.FULL, sync_pb2.DownloadRequest.DELTA)
        way = self.way_to(request.fragment if request.what in fragments else None)
        async with asyncio.timeout(60), self._calling:
            return await bulk.download(way, request, size=size)

    async def raw_bulk(self) -> RawBulk:
        """Another bulk connection, by hand."""
        return await RawBulk.connect(self.syncer.addresses["sync"], self.credentials)

    async def initialise(self, frozen: bytes = b"frozen bytes") -> None:
        part = sync_pb2.Initial
        rows: list[tuple[Any, Any]] = [(part(part=part.LAYOUT), LAYOUT.to_json().encode())]
        rows += [(part(part=part.FRAGMENT, fragment=p), first_values(p)) for p in range(len(LAYOUT))]
        rows += [(part(part=part.FROZEN), frozen), (part(part=part.DONE), b"")]
        for what, payload in rows:
            reply = await self.upload(self.header(initial=what), payload)
            assert reply.accepted, reply

    # ------------------------------------------------------------- training

    async def adopt(self, fragment: int, version: int) -> sync_pb2.Announcement:
        """Wait for the announcement of at least this version, take it, keep our steps above it."""

        def newest() -> list[Any]:
            told = [*self.welcome.fragments, *self.of_kind("announcement")]
            return [a for a in told if a.fragment == fragment and a.version >= version]

        await until(newest)
        news = newest()[-1]
        request = sync_pb2.DownloadRequest(
            job="raw",
            process=self.process,
            what=sync_pb2.DownloadRequest.FULL,
            fragment=fragment,
            epoch=news.epoch,
            version=news.version,
        )
        header, data = await self.download(request, size=news.full.bytes)
        assert header.found, header.reason
        assert bulk.checksum(data) == news.full.checksum
        values = codec.decode(data, news.full.encoding, LAYOUT.elements(fragment))
        while len(self.base) <= fragment:
            self.base.append((0, 0))
        if news.merged_sequence in self.pushed[fragment]:
            steps = self.pushed[fragment][news.merged_sequence]
            self.confirmed[fragment] += (steps - self.merged_steps[fragment]) * TOKENS
            self.merged_steps[fragment] = steps
        self.base[fragment] = (news.epoch, news.version)
        self.bases[fragment] = values
        return news

    async def ready(self) -> None:
        """Take version 0 (or what is newest) of everything and report."""
        for fragment in range(len(LAYOUT)):
            await self.adopt(fragment, 0)
        await self.report()

    def counts(self) -> sync_pb2.Report:
        return sync_pb2.Report(
            tenure=self.welcome.seat.tenure,
            slot_step=self.welcome.seat.slot_step + self.steps,
            trained_steps=self.steps,
            trained_tokens=self.steps * TOKENS,
            loss=2.0,
            step_seconds=0.01,
            compute_seconds=0.01 * self.steps,
            fragments=[
                sync_pb2.FragmentReport(
                    epoch=epoch,
                    base_version=version,
                    steps=self.steps - self.merged_steps[p],
                    tokens=(self.steps - self.merged_steps[p]) * TOKENS,
                    confirmed_tokens=self.confirmed[p],
                )
                for p, (epoch, version) in enumerate(self.base)
            ],
        )

    async def report(self) -> None:
        await self.say(report=self.counts())

    async def train(self, steps: int) -> None:
        self.steps += steps
        await self.report()

    async def pulled(self, fragment: int, version: int) -> Any:
        """Wait to be asked for this fragment on this version."""

        def asked() -> list[Any]:
            return [p for p in self.of_kind("pull") if (p.fragment, p.version) == (fragment, version)]

        await until(asked)
        return asked()[-1]

    def push(self, fragment: int, round_id: int, **changes: Any) -> sync_pb2.Push:
        """The header of the next push of this fragment."""
        self.sequence[fragment] += 1
        above = self.steps - self.merged_steps[fragment]
        epoch, version = self.base[fragment]
        begun = self.welcome.seat.slot_step
        self.pushed[fragment][self.sequence[fragment]] = self.steps
        fields: dict[str, Any] = {
            "fragment": fragment,
            "sequence": self.sequence[fragment],
            "round": round_id,
            "epoch": epoch,
            "base_version": version,
            "oldest_version": version,
            "first_step": begun + self.merged_steps[fragment] + 1,
            "last_step": begun + self.steps,
            "steps": above,
            "tokens": above * TOKENS,
            "compute_seconds": 0.01 * above,
            "encoding": "float32",
            "layout_digest": LAYOUT.digest,
            "report": self.counts(),
        }
        return sync_pb2.Push(**(fields | changes))

    def delta(self, fragment: int) -> np.ndarray[Any, Any]:
        above = self.steps - self.merged_steps[fragment]
        return np.full(LAYOUT.elements(fragment), 0.01 * above, np.float32)

    async def send(self, push: sync_pb2.Push, payload: Any = None) -> sync_pb2.UploadReply:
        data = self.delta(push.fragment) if payload is None else payload
        return await self.upload(self.header(push=push), data)

    async def merge_once(self, fragment: int, version: int) -> sync_pb2.Announcement:
        """Answer the pull on this version, and take what is merged."""
        pull = await self.pulled(fragment, version)
        reply = await self.send(self.push(fragment, pull.round))
        assert reply.accepted, reply
        return await self.adopt(fragment, version + 1)


async def turn(client: Client, version: int) -> None:
    """One step and one merge for each fragment, from this version to the next."""
    for fragment in range(len(LAYOUT)):
        await client.train(1)
        await client.merge_once(fragment, version)


def first_values(fragment: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(fragment).standard_normal(LAYOUT.elements(fragment)).astype(np.float32)


async def serve_in_process(store: Path) -> int:
    """Run a syncer in this process, on any ports, until it ends; its exit code. SIGTERM's handler stays as it was."""
    options = startup.Options(
        job=raw_job(),
        store=str(store),
        listen="127.0.0.1:0",
        control="127.0.0.1:0",
        http="127.0.0.1:0",
        address_file=None,
        control_key=b"k" * 32,
        credentials=Credentials(),
        threads=1,
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        return await service.run(options)
    finally:
        signal.signal(signal.SIGTERM, before)
