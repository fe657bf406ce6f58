"""Uploads from learner processes to a syncer process: against gRPC streams and a bare TCP socket.

Two figures, for one learner and for four at once, in bytes of payload per second of all
learners together:

- *upload*: what the wire itself does. The learner's own upload (parts and checksums) over
  as many connections as a learner uses, into the syncer's own assembly of parts, with both
  checksums compared, in a process that does nothing else with it.
- *push to verdict*: the same to the real program, `python -m diloco_syncer`, which also
  judges the header, decodes the payload (float32), takes its norm, and asks the core; the
  clock stops with the last verdict. (The job has one slot more than learners push, and is
  deterministic, so that a round waits for ever and no merge interferes.)

The references move the same payloads between the same processes: a gRPC stream of raw
bytes (identity serialisers, as many connections; the server drops what it gets),
and one TCP socket per learner (sendall, recv_into one buffer). Everything is timed in
turns, in one run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio

import common
import programs
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.common.reach import split_address
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import TransferRefusal
from diloco_protocol.wire import bulk, channels, convert, limits, sync_pb2
from diloco_protocol.wire import channels as wire_channels
from diloco_protocol.wire.bulk_calls import PREFACE, ServedCall, bulk_connection, read_frame
from diloco_protocol.wire.byte_stream import ByteStream, set_options
from diloco_syncer.runtime.buffer_pool import BufferPool
from diloco_syncer.runtime.multipart import MultipartUploads, upload_reply

LEARNERS = 4
FRAGMENTS = 4
CONNECTIONS = 4  # of a learner, as the worker opens them
AT_ONCE = 2  # uploads under way per learner, as in the worker
TOKENS = 1000  # per step
RAW = "/bench.Raw/Upload"
RAW_BYTES = 2 << 20  # of a message of raw gRPC, where 1 to 2 MiB are the plateau
OPTIONS = [
    ("grpc.max_send_message_length", 2 * RAW_BYTES),
    ("grpc.max_receive_message_length", 2 * RAW_BYTES),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.use_local_subchannel_pool", 1),
]
WAIT_SECONDS = 60.0

JOB = f"""
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: bench-wire}}
spec:
  training: {{model: null, data: null, evaluation: null, stop: {{steps: 1000000}}}}
  sync:
    fragments: {FRAGMENTS}
    every: 64
    quorum: {LEARNERS + 1}
    deterministic: true
    adoption: {{rule: overwrite}}
    compression: {{up: float32, down: float32}}
    heartbeat: {{intervalSeconds: 60, timeoutSeconds: 3600}}
  syncer: {{checkpoint: {{everySeconds: 3600}}}}
  learners: {{command: [none]}}
  regions: [{{name: local, learners: {LEARNERS + 1}}}]
"""


def layout_of(elements: int) -> Layout:
    """``FRAGMENTS`` fragments of ``elements`` values each."""
    return Layout.build([Tensor(f"w{p}", (elements,), "float32") for p in range(FRAGMENTS)], FRAGMENTS)


# ------------------------------------------------------------------ the far end of the references


def sink(pipe: Connection) -> None:
    """A process that takes raw streams, TCP bytes, and uploads as the syncer assembles them."""
    asyncio.run(_sink(pipe))


async def _sink(pipe: Connection) -> None:
    uploads, buffers = MultipartUploads(), BufferPool()

    async def raw(stream: AsyncIterator[bytes], context: Any) -> bytes:
        count = 0
        async for chunk in stream:
            count += len(chunk)
        return count.to_bytes(8, "little")

    async def serve(stream: ByteStream) -> None:
        await stream.read_exactly(len(PREFACE))
        while message := await read_frame(stream):
            call = ServedCall(stream, convert.parse(sync_pb2.BulkRequest, message))
            header = call.request.upload
            key = (header.process, header.push.fragment, header.push.sequence)
            whole = await uploads.receive_part(key, header, call, partial(buffers.allocate, header.total_bytes))
            reply = upload_reply(True) if whole is not None else upload_reply(True, TransferRefusal.PARTIAL)
            await call.reply(sync_pb2.BulkReply(upload=reply))
        stream.close()

    async def accept_bulk(listening: socket.socket) -> None:
        serving = set()
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            set_options(connection)
            serving.add(asyncio.create_task(serve(ByteStream(connection))))

    server = aio.server(options=OPTIONS)
    method = grpc.stream_unary_rpc_method_handler(raw)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Raw", {"Upload": method})])
    raw_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    listening.setblocking(False)
    accepting = asyncio.create_task(accept_bulk(listening))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        pipe.send((listening.getsockname()[1], raw_port, listener.getsockname()[1]))
        await asyncio.to_thread(pipe.recv)  # until told to end
    accepting.cancel()
    await server.stop(0.5)


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_drain, args=(connection,), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    """Read: 8 bytes of length, that many bytes, answer one byte; and again."""
    buffer = memoryview(bytearray(RAW_BYTES))
    with connection:
        while head := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                count = connection.recv_into(buffer[: min(left, len(buffer))])
                if not count:
                    return
                left -= count
            connection.sendall(b"k")


# ------------------------------------------------------------------ learners


def learner(pipe: Connection, ordinal: int, elements: int, syncer: str, ports: tuple[int, int, int]) -> None:
    """A process that sends its payloads, in whichever way it is told, again and again."""

    async def run() -> None:  # channels belong to the loop in which they are made
        await _Learner(ordinal, elements, syncer, ports).serve(pipe)

    asyncio.run(run())


class _Learner:
    def __init__(self, ordinal: int, elements: int, syncer: str, ports: tuple[int, int, int]) -> None:
        """``ports``: of the far end's uploads, raw gRPC and TCP."""
        source = np.random.default_rng(ordinal)
        self._payloads = [source.standard_normal(elements, np.float32) for _ in range(FRAGMENTS)]
        self._layout = layout_of(elements)
        self._process = f"{ordinal + 1:032x}"
        self._ordinal = ordinal
        self._turn = 0
        self._slot, self._incarnation, self._epoch = 0, 0, 0
        sink, raw, tcp = (f"127.0.0.1:{port}" for port in ports)
        self._control = aio.insecure_channel(syncer, options=wire_channels.channel_options())
        plain = Credentials()
        self._syncer = bulk.Lanes([bulk_connection(plain, syncer) for _ in range(CONNECTIONS)])
        self._sink = bulk.Lanes([bulk_connection(plain, sink) for _ in range(CONNECTIONS)])
        self._raw_channels = [aio.insecure_channel(raw, options=OPTIONS) for _ in range(CONNECTIONS)]
        self._socket = socket.create_connection(split_address(tcp))

    async def serve(self, pipe: Connection) -> None:
        ways: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "join": self._join,
            "verdict": lambda: self._send(self._push),
            "upload": lambda: self._send(self._upload),
            "raw": lambda: self._send(self._raw),
            "tcp": lambda: asyncio.to_thread(self._tcp),
        }
        while (word := await asyncio.to_thread(pipe.recv)) != "end":
            try:
                await ways[word]()
            except Exception as error:  # told to the parent, which ends the run
                pipe.send(f"learner {self._ordinal}, {word}: {type(error).__name__}: {error}")
                raise
            pipe.send("")
        for channel in [self._control, *self._raw_channels]:
            await channel.close(None)
        self._socket.close()

    async def _send(self, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """All payloads, ``AT_ONCE`` under way."""
        self._turn += 1
        waiting = list(range(FRAGMENTS))

        async def work() -> None:
            while waiting:
                await one(waiting.pop(0))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    # ------------------------------------------------------------- ours

    async def _join(self) -> None:
        """Take a seat; the first learner uploads version 0."""
        method: Any = self._control.stream_stream(channels.SESSION, None, None)
        self._call = method()
        join = sync_pb2.Join(
            format=limits.FORMAT,
            job="bench-wire",
            process=self._process,
            role=sync_pb2.ROLE_LEARNER,
            region="local",
            ordinal=self._ordinal,
            layout_digest=self._layout.digest,
        )
        await self._call.write(sync_pb2.LearnerMessage(join=join).SerializeToString())
        first = convert.parse(sync_pb2.SyncerMessage, await asyncio.wait_for(self._call.read(), limits.JOIN_SECONDS))
        if not first.HasField("welcome"):
            raise RuntimeError(f"refused: {first.refusal.message}")
        welcome = first.welcome
        self._slot, self._incarnation = welcome.seat.slot, welcome.seat.incarnation
        self._epoch = welcome.epoch
        if welcome.initialise:
            part = sync_pb2.Initial
            rows: list[tuple[Any, Any]] = [(part(part=part.LAYOUT), self._layout.to_json().encode())]
            rows += [(part(part=part.FRAGMENT, fragment=p), v) for p, v in enumerate(self._payloads)]
            rows += [(part(part=part.DONE), b"")]
            for what, payload in rows:
                await self._accepted(self._syncer, self._header(initial=what), payload)

    def _header(self, **what: Any) -> sync_pb2.UploadHeader:
        return sync_pb2.UploadHeader(
            job="bench-wire", slot=self._slot, incarnation=self._incarnation, process=self._process, **what
        )

    def _push_header(self, fragment: int) -> sync_pb2.UploadHeader:
        """The next push: one more step than the last, in the round that never ends."""
        n = self._turn
        counts = sync_pb2.FragmentReport(epoch=self._epoch, base_version=0, steps=n, tokens=n * TOKENS)
        report = sync_pb2.Report(
            slot_step=n, trained_steps=n, trained_tokens=n * TOKENS, fragments=[counts] * FRAGMENTS
        )
        push = sync_pb2.Push(
            fragment=fragment,
            sequence=n,
            round=1,
            epoch=self._epoch,
            first_step=1,
            last_step=n,
            steps=n,
            tokens=n * TOKENS,
            encoding="float32",
            layout_digest=self._layout.digest,
            report=report,
        )
        return self._header(push=push)

    async def _accepted(self, lanes: bulk.Lanes, header: sync_pb2.UploadHeader, payload: Any) -> None:
        answer = await bulk.upload(lanes, header, payload)
        if not answer.accepted:
            raise RuntimeError(f"refused ({answer.reason}): {answer.message}")

    async def _push(self, fragment: int) -> None:
        await self._accepted(self._syncer, self._push_header(fragment), self._payloads[fragment])

    async def _upload(self, fragment: int) -> None:
        await self._accepted(self._sink, self._push_header(fragment), self._payloads[fragment])

    # ------------------------------------------------------------- references

    async def _raw(self, fragment: int) -> None:
        view = bulk.flat(self._payloads[fragment])

        async def part(channel: aio.Channel, offset: int, size: int) -> None:
            method: Any = channel.stream_unary(RAW, None, None)
            call = method(timeout=WAIT_SECONDS)
            for start in range(offset, offset + size, RAW_BYTES):
                await call.write(bytes(view[start : min(start + RAW_BYTES, offset + size)]))
            await call.done_writing()
            if int.from_bytes(await call, "little") != size:
                raise RuntimeError("bytes were lost")

        parts = bulk.split(view.nbytes, CONNECTIONS)
        await asyncio.gather(*(part(self._raw_channels[i % CONNECTIONS], *p) for i, p in enumerate(parts)))

    def _tcp(self) -> None:
        for payload in self._payloads:
            view = bulk.flat(payload)
            self._socket.sendall(view.nbytes.to_bytes(8, "little"))
            self._socket.sendall(view)
            if self._socket.recv(1) != b"k":
                raise RuntimeError("the far end is gone")


# ------------------------------------------------------------------ the run


def tell(pipes: list[Connection], word: str) -> None:
    """Say it to all of them, and wait until all have done it."""
    for pipe in pipes:
        pipe.send(word)
    for pipe in pipes:
        if not pipe.poll(WAIT_SECONDS):
            raise SystemExit(f"bench/wire: no answer to {word!r} within {WAIT_SECONDS:.0f} s")
        if problem := pipe.recv():
            raise SystemExit(f"bench/wire: {problem}")


def main() -> None:
    common.end_on_sigterm()
    args = common.arguments(__doc__ or "").parse_args()
    elements = (1 if args.quick else 8) << 20  # of each fragment: 4 or 32 MiB
    rounds = 2 if args.quick else 9
    context = multiprocessing.get_context("spawn")
    children: list[Any] = []
    pipes: list[Connection] = []

    def start(target: Callable[..., None], *given: Any) -> Connection:
        ours, theirs = context.Pipe()
        child = context.Process(target=target, args=(theirs, *given), daemon=True)
        child.start()
        children.append(child)
        return ours

    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder,
        programs.Syncer(Path(folder), parse_job(JOB)) as syncer,
    ):
        far = start(sink)
        if not far.poll(WAIT_SECONDS):
            raise SystemExit(f"bench/wire: the far end does not listen within {WAIT_SECONDS:.0f} s")
        ports = far.recv()
        for ordinal in range(LEARNERS):
            pipes.append(start(learner, ordinal, elements, syncer.address, ports))
            tell(pipes[-1:], "join")
        for count in (1, LEARNERS):
            rows += measure(pipes[:count], count * FRAGMENTS * elements * 4, rounds)
        for pipe in [*pipes, far]:
            pipe.send("end")
        for child in children:
            child.join(10)
    common.show(rows, args.json, f"payloads of {elements * 4 >> 20} MiB, {CONNECTIONS} connections a learner")


def measure(pipes: list[Connection], size: int, rounds: int) -> list[common.Row]:
    """``size``: bytes that all of them send in one turn."""
    seconds = common.times({word: partial(tell, pipes, word) for word in ("upload", "verdict", "raw", "tcp")}, rounds)
    learners = f"{len(pipes)} learner{'s' * (len(pipes) > 1)}"
    names = {"upload": f"upload, {learners}", "verdict": f"push to verdict, {learners}"}
    references = {"raw": "raw gRPC streams", "tcp": "a TCP socket"}
    speeds = {word: size / statistics.median(taken) / 1e9 for word, taken in seconds.items()}
    return [
        common.Row(
            names[ours],
            speeds[ours],
            "GB/s",
            references[other],
            baseline=speeds[other],
            ratio=common.paired(seconds[other], seconds[ours]),
        )
        for ours in names
        for other in references
    ]


if __name__ == "__main__":
    main()
