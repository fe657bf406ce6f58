"""What a byte costs the syncer: CPU-seconds of its processes per GB of payload, beside a raw socket.

Eight synthetic learners push to the real program, `python -m diloco_syncer`, and download from it, in plain text and
over TLS, in each encoding. The CPU time of its processes is counted (user and system, from the kernel), after a turn
that is not: the hub is warm, its memory has been used before. Up is all of a push: reading, checksums, decoding,
squares and norm, the core's verdict. (The job has one learner more than push, so that a round waits for ever and no
merge interferes. That learner pushes once, before the downloads, so that there is an update to broadcast.) Down is a
version in whole (float32, bfloat16) or its update (int4).

The reference moves as many bytes over as many connections in turns with it: blocking sockets of Python, with TLS 1.3
where ours has it, each in a thread of one process, which copies each byte once. The ratio is ours over the reference:
1 costs what the socket costs, and less is better. The row `two shards` is GB per CPU-second of the busiest process of
a hub with two shards, over that of a hub of one process: there, more is better.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import common
import programs
from diloco.certs import files as certs
from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.load import parse_job
from diloco_protocol.wire import bulk, channels, convert, limits, sync_pb2
from diloco_protocol.wire import channels as wire_channels
from diloco_protocol.wire.bulk_calls import bulk_connection

LEARNERS = 8
PROCESSES = 2  # that the learners live in
FRAGMENTS = 4
CONNECTIONS = 4  # of a learner, as the worker opens them
AT_ONCE = 2  # transfers under way per learner
TOKENS = 1000  # per step
COPY_BYTES = 256 << 10  # of the reference: what it reads and copies at a time
WAIT_SECONDS = 300.0
ENCODINGS = {"float32": "bfloat16", "int4": "delta-int4", "bfloat16": "float32"}  # up: down

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: bench-hub}}
spec:
  training: {{model: null, data: null, evaluation: null, stop: {{steps: 1000000}}}}
  sync:
    fragments: {fragments}
    every: 64
    quorum: {quorum}
    deterministic: true
    adoption: {{rule: overwrite}}
    compression: {{up: {up}, down: {down}}}
    heartbeat: {{intervalSeconds: 60, timeoutSeconds: 3600}}
  syncer: {{checkpoint: {{everySeconds: 3600}}, shards: {shards}}}
  learners: {{command: [none]}}
  regions: [{{name: local, learners: {quorum}}}]
"""


def layout_of(elements: int) -> Layout:
    """``FRAGMENTS`` fragments of ``elements`` values each."""
    return Layout.build([Tensor(f"w{p}", (elements,), "float32") for p in range(FRAGMENTS)], FRAGMENTS)


# ------------------------------------------------------------------ the reference


def serve_raw(pipe: Connection, folder: str | None, size: int) -> None:
    """A process: on each connection, b"u" and 8 bytes of length are followed by so many bytes up, b"d" asks for so many
    down. ``folder``: of the certificate, None: plain text; ``size``: bytes of a payload."""
    context = None
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
    payload = np.random.default_rng(0).integers(0, 256, size, np.uint8)

    def serve(connection: socket.socket) -> None:
        with connection if context is None else context.wrap_socket(connection, server_side=True) as open_socket:
            buffer, target = memoryview(bytearray(COPY_BYTES)), np.empty(size, np.uint8).data
            source = payload.data
            while head := open_socket.recv(1):
                count = int.from_bytes(_receive_exactly(open_socket, 8), "little")
                if head == b"u":
                    at = 0
                    while at < count:
                        got = open_socket.recv_into(buffer[: min(count - at, COPY_BYTES)])
                        if not got:
                            return
                        target[at : at + got] = buffer[:got]
                        at += got
                    open_socket.sendall(b"k")
                else:
                    for at in range(0, count, COPY_BYTES):
                        open_socket.sendall(bytes(source[at : min(at + COPY_BYTES, count)]))

    def accept(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        pipe.send((os.getpid(), listener.getsockname()[1]))
        pipe.recv()  # until told to end


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionError("the far end is gone")
        received += part
    return received


# ------------------------------------------------------------------ learners


@dataclass(frozen=True)
class Place:
    """Where learners find the hub and the reference. ``folder``: of their credentials, None: plain text."""

    hub: str
    raw_port: int
    folder: str | None
    elements: int
    up: str
    down: str
    shards: int = 1


def host_learners(pipe: Connection, ordinals: list[int], place: Place) -> None:
    """A process of some learners, which do together what they are told."""

    async def run() -> None:
        learners = [Learner(ordinal, place) for ordinal in ordinals]
        while (word := await asyncio.to_thread(pipe.recv)) != "end":
            try:
                await asyncio.gather(*(learner.ways[word]() for learner in learners))
            except Exception as error:  # told to the parent, which ends the run
                pipe.send(f"{word}: {type(error).__name__}: {error}")
                raise
            pipe.send("")

    asyncio.run(run())


class Learner:
    """One learner: its session, its bulk connections, and one connection to the reference."""

    def __init__(self, ordinal: int, place: Place) -> None:
        source = np.random.default_rng(ordinal)
        values = [source.standard_normal(place.elements, np.float32) for _ in range(FRAGMENTS)]
        self._payloads = [codec.encode(v, place.up) for v in values]
        self._start = values if ordinal == 0 else []  # version 0 comes from the first
        self._place, self._ordinal, self._process = place, ordinal, f"{ordinal + 1:032x}"
        self._layout = layout_of(place.elements)
        self._turn = self._slot = self._incarnation = self._epoch = 0
        self._credentials = Credentials.from_directory(place.folder)
        self._control = self._credentials.aio_channel(place.hub, wire_channels.channel_options())
        self._lanes_up, self._lanes_down = self._connect(CONNECTIONS)
        self._shards: dict[int, tuple[bulk.Lanes, bulk.Lanes]] = {}  # by fragment: of its shard, up and down
        kinds = sync_pb2.DownloadRequest
        self.ways: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "join": self._join,
            "push": self._push_all,
            "full": lambda: self._each_fragment(partial(self._download, kinds.FULL)),
            "delta": lambda: self._each_fragment(partial(self._download, kinds.DELTA)),
            "raw up": lambda: asyncio.to_thread(self._raw, b"u"),
            "raw down": lambda: asyncio.to_thread(self._raw, b"d"),
        }

    def _connect(self, count: int, shard: int | None = None) -> tuple[bulk.Lanes, bulk.Lanes]:
        """Connections to the hub or a shard of it, up and as many down."""
        hub = self._place.hub
        up, down = ([bulk_connection(self._credentials, hub, shard) for _ in range(count)] for _ in range(2))
        return bulk.Lanes(up), bulk.Lanes(down)

    async def _each_fragment(self, one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """All fragments, ``AT_ONCE`` under way."""
        waiting = list(range(FRAGMENTS))

        async def work() -> None:
            while waiting:
                await one(waiting.pop(0))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _join(self) -> None:
        """Take a seat; the first learner uploads version 0."""
        method: Any = self._control.stream_stream(channels.SESSION, None, None)
        self._call = method(metadata=self._credentials.metadata())
        join = sync_pb2.Join(
            format=limits.FORMAT,
            job="bench-hub",
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
        self._slot, self._incarnation, self._epoch = welcome.seat.slot, welcome.seat.incarnation, welcome.epoch
        if welcome.initialise:
            part = sync_pb2.Initial
            rows: list[tuple[Any, Any]] = [(part(part=part.LAYOUT), self._layout.to_json().encode())]
            rows += [
                (part(part=part.FRAGMENT, fragment=p, digest=bulk.checksum_text(v)), v)
                for p, v in enumerate(self._start)
            ]
            rows += [(part(part=part.DONE), b"")]
            for what, payload in rows:
                await self._upload(self._lanes_up, payload, initial=what)
        shards = welcome.shards
        while self._place.shards > 1 and not shards:
            raw = await asyncio.wait_for(self._call.read(), WAIT_SECONDS)
            shards = convert.parse(sync_pb2.SyncerMessage, raw).shards.shards
        for number, shard in enumerate(shards):
            lanes = self._connect(max(1, CONNECTIONS // self._place.shards), number)
            self._shards |= dict.fromkeys(shard.fragments, lanes)

    async def _upload(self, lanes: bulk.Lanes, payload: Any, **what: Any) -> None:
        header = sync_pb2.UploadHeader(
            job="bench-hub", slot=self._slot, incarnation=self._incarnation, process=self._process, **what
        )
        answer = await bulk.upload(lanes, header, payload)
        if not answer.accepted:
            raise RuntimeError(f"refused ({answer.reason}): {answer.message}")

    async def _push_all(self) -> None:
        """A push of each fragment: one more step than the last, in the round that waits for one learner more."""
        self._turn += 1
        await self._each_fragment(self._push)

    async def _push(self, fragment: int) -> None:
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
            encoding=self._place.up,
            layout_digest=self._layout.digest,
            report=report,
        )
        lanes = self._shards[fragment][0] if self._shards else self._lanes_up
        await self._upload(lanes, self._payloads[fragment], push=push)

    async def _download(self, what: Any, fragment: int) -> None:
        request = sync_pb2.DownloadRequest(
            job="bench-hub", process=self._process, what=what, fragment=fragment, epoch=self._epoch, version=1
        )
        encoding = "float32" if self._place.down.startswith("delta-") else self._place.down
        if what == sync_pb2.DownloadRequest.DELTA:
            encoding = self._place.down.removeprefix("delta-")
        size = codec.encoded_bytes(encoding, self._place.elements)
        lanes = self._shards[fragment][1] if self._shards else self._lanes_down
        header, _ = await bulk.download(lanes, request, size=size)
        if not header.found:
            raise RuntimeError(f"version 1 of fragment {fragment} is not to be had: {header.reason}")

    def _raw(self, what: bytes) -> None:
        """As many bytes as all fragments have in float32, over a connection of the reference."""
        connection = socket.create_connection(("127.0.0.1", self._place.raw_port))
        if self._place.folder is not None:
            context = ssl.create_default_context(cafile=f"{self._place.folder}/ca.crt")
            connection = context.wrap_socket(connection, server_hostname=self._credentials.server_name)
        with connection:
            target = memoryview(bytearray(COPY_BYTES))
            view = memoryview(bytearray(4 * self._place.elements))
            for _ in range(FRAGMENTS):
                connection.sendall(what + view.nbytes.to_bytes(8, "little"))
                if what == b"u":
                    connection.sendall(view)
                    _receive_exactly(connection, 1)
                    continue
                left = view.nbytes
                while left:
                    left -= connection.recv_into(target[: min(left, COPY_BYTES)])


# ------------------------------------------------------------------ what the kernel has counted


def cpu_seconds(pids: list[int]) -> list[float]:
    """User and system time of each process."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return [(int(one[11]) + int(one[12])) / os.sysconf("SC_CLK_TCK") for one in fields]


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in found for child in text.split()]


def cpu_by_thread(pids: list[int]) -> Counter[str]:
    """CPU time, in nanoseconds, of the threads that live, by their names without a number. The first one of a process
    has the event loop."""
    found: Counter[str] = Counter()
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            name = (task / "comm").read_text().strip().rstrip("0123456789").rstrip("_-")
            name = "event loop" if task.name == str(pid) else name
            found[name] += int((task / "schedstat").read_text().split()[0])
    return found


# ------------------------------------------------------------------ the run


class Bench:
    """One hub with its learners and its reference."""

    def __init__(self, folder: Path, up: str, secure: bool, elements: int, shards: int = 1) -> None:
        self.up, self.down, self.secure, self.elements, self.shards = up, ENCODINGS[up], secure, elements, shards
        self.busiest: dict[str, float] = {}  # by row: CPU-seconds per GB of the busiest process of the hub
        self._folder, self._children = folder, list[Any]()
        self._pipes: list[Connection] = []
        self.profile: dict[str, Counter[str]] = {}

    def _start(self, target: Callable[..., None], *given: Any) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=target, args=(theirs, *given), daemon=True)
        child.start()
        self._children.append(child)
        return ours

    def _tell(self, word: str, pipes: list[Connection] | None = None) -> None:
        """Say it to all of them, and wait until all have done it."""
        chosen = self._pipes if pipes is None else pipes
        for pipe in chosen:
            pipe.send(word)
        for pipe in chosen:
            if not pipe.poll(WAIT_SECONDS):
                raise SystemExit(f"bench/hub: no answer to {word!r} within {WAIT_SECONDS:.0f} s")
            if problem := pipe.recv():
                raise SystemExit(f"bench/hub: {problem}")

    def measure(self, turns: int) -> list[common.Row]:
        """The rows of this hub."""
        text = JOB.format(fragments=FRAGMENTS, quorum=LEARNERS + 1, up=self.up, down=self.down, shards=self.shards)
        job = parse_job(text)
        learners = syncer = None
        if self.secure:
            certs.init(self._folder / "pki", "bench", 2)
            targets = certs.targets_of(job, "default")
            folders = certs.issue_all(self._folder / "pki", targets, None, hosts=["localhost"], days=2)
            syncer, learners = (str(folder) for folder in folders)
        with programs.Syncer(self._folder / "hub", job, credentials=syncer) as hub:
            raw = self._start(serve_raw, syncer, 4 * self.elements)
            raw_pid, raw_port = raw.recv()
            place = Place(
                hub.address, raw_port, learners, elements=self.elements, up=self.up, down=self.down, shards=self.shards
            )
            dealt = [list(range(LEARNERS + 1))[start::PROCESSES] for start in range(PROCESSES)]
            last = self._start(host_learners, [LEARNERS], place)
            for ordinals in dealt:
                self._pipes.append(self._start(host_learners, [o for o in ordinals if o != LEARNERS], place))
            self._tell("join", [*self._pipes, last])
            pids = [hub.pid, *children_of(hub.pid)]
            words = "tls" if self.secure else "plain"
            count = partial(self._count, pids=pids, raw_pids=[raw_pid], turns=turns)
            rows = [count(f"{words} {self.up} up", "push", "raw up", size=codec.encoded_bytes(self.up, self.elements))]
            self._tell("push", [last])  # each round is whole now
            end = time.monotonic() + WAIT_SECONDS
            while min(hub.status()["versions"]) < 1:
                if time.monotonic() > end:
                    raise SystemExit("bench/hub: the pushes were not merged")
                time.sleep(0.1)
            update = self.down.startswith("delta-")
            name = f"{words} {self.down} down"
            down = codec.encoded_bytes(self.down.removeprefix("delta-"), self.elements)
            rows.append(count(name, "delta" if update else "full", "raw down", size=down))
            for pipe in [*self._pipes, last, raw]:
                pipe.send("end")
            for child in self._children:
                child.join(10)
        return rows

    def _count(
        self, name: str, ours: str, reference: str, *, pids: list[int], raw_pids: list[int], turns: int, size: int
    ) -> common.Row:
        """A row: ``turns`` of ours and of the reference after one of each. ``size``: bytes of a payload of ours; it is
        moved as often in a turn as makes the reference's, that of a float32 fragment."""
        spent, times, each = [0.0, 0.0], 4 * self.elements // size, list[float]()
        threads = Counter[str]()
        for turn in range(turns + 1):
            for which, (word, counted) in enumerate(((ours, pids), (reference, raw_pids))):
                before, split = cpu_seconds(counted), cpu_by_thread(counted)
                for _ in range(1 if which else times):
                    self._tell(word)
                used = [now - then for now, then in zip(cpu_seconds(counted), before, strict=True)]
                if turn:
                    spent[which] += sum(used)
                if turn and not which:
                    each = [known + more for known, more in zip(each or [0.0] * len(used), used, strict=True)]
                    threads += cpu_by_thread(counted) - split
        gigabytes = [turns * LEARNERS * FRAGMENTS * count / 1e9 for count in (times * size, 4 * self.elements)]
        self.busiest[name] = max(each) / gigabytes[0]
        value, raw = (seconds / bytes_moved for seconds, bytes_moved in zip(spent, gigabytes, strict=True))
        self.profile[name] = threads
        against = "a raw TLS socket" if self.secure else "a raw socket"
        return common.Row(name, value, "s/GB", against, baseline=raw, ratio=value / raw)


def measure_two_shards(up: str, elements: int, turns: int, one: float) -> common.Row:
    """Bytes of pushes per CPU-second of the busiest process of a hub with two shards, over TLS. ``one``: CPU-seconds
    per GB of a hub of one process."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        bench = Bench(Path(folder), up, True, elements, shards=2)
        bench.measure(turns)
    two = bench.busiest[f"tls {up} up"]
    return common.Row("two shards", 1 / two, "GB/s", "one process", baseline=1 / one, ratio=one / two)


def main() -> None:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--only", metavar="ENCODING", choices=list(ENCODINGS), help="pushes in this encoding alone")
    args = parser.parse_args()
    elements = (1 if args.quick else 8) << 20  # of each fragment
    turns = 1 if args.quick else 4
    rows, notes = [], []
    for secure in (False, True):
        for up in [args.only] if args.only else ENCODINGS:
            with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
                bench = Bench(Path(folder), up, secure, elements)
                rows += bench.measure(turns)
            if secure and up == (args.only or "float32"):
                rows.append(measure_two_shards(up, elements, turns, bench.busiest[f"tls {up} up"]))
            for name, threads in bench.profile.items():
                whole = sum(threads.values()) or 1.0
                shares = ", ".join(f"{thread} {spent / whole:.0%}" for thread, spent in threads.most_common(5))
                notes.append(f"{name}: {shares}")
    common.show(rows, args.json, f"{LEARNERS} learners, {FRAGMENTS} fragments of {elements} values, {turns} turns")
    if not args.json:
        print("by thread:", *notes, sep="\n  ")


if __name__ == "__main__":
    main()
