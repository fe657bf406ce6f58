"""Large models: version 0, a peer's optimizer state, and merges of eight learners; and each process's memory.

The real syncer program, and eight synthetic learners in three processes (lab/gymnasium/synthetic.py): their connections
and transfers are the product's, and what they send is made when it is sent. Merges are by RDA, which models of these
sizes have by default, and take all eight pushes.

    python bench/large.py --parameters 250M
    python bench/large.py --parameters 1B       some 20 GiB of memory, 40 GB of disk; 16 GiB with the next option
                          --set sync.outer.optimizer=sgd
    python bench/large.py --cut                 the sender of version 0 and of the state is cut off half way, once each

The references: for what moves, the same bytes over one TCP socket of this machine, measured before; for memory, what
`diloco plan` says. A process's memory is the greatest count of its anonymous memory (RssAnon). For a learner `plan`
counts what the library keeps of the model; a synthetic one has torch and what is under way.

Checked: the merged parameters of a fragment are computed again from the pushes that its record names, and the state is
the one that was made. Exit code 1: they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import common
from diloco.bandwidth_plan import parameters_from
from diloco_protocol.arrays import codec
from diloco_protocol.merging import choose_merge
from diloco_protocol.resources import library_bytes, needs, payload_bytes
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.wire import bulk
from diloco_syncer.store.base import ObjectNotFound
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import Damaged
from diloco_syncer.store.restore import StoreReader
from lab.gymnasium import synthetic
from lab.gymnasium.stand_in import light_job
from lab.gymnasium.synthetic import STATE_BYTES, Told, make_state
from memory import anonymous_bytes
from programs import Syncer
from relay import Link, Relays

LEARNERS, PROCESSES, FRAGMENTS = 8, 2, 24
PACE = 0.25  # seconds of a step
OVERRIDES = (
    f"regions.0.learners={LEARNERS}",
    f"sync.quorum={LEARNERS}",
    f"sync.fragments={FRAGMENTS}",
    f"sync.every={FRAGMENTS}",
    "sync.merge.method=rda",
    "sync.heartbeat.timeoutSeconds=120",
    "syncer.checkpoint.keep=1",
)
WAIT_SECONDS = 1800.0
SAMPLE_SECONDS = 0.02
LEAST_FREE = 1 << 30  # of the machine's memory; with less the run ends
TOLERANCE = 1e-5  # of a merged value, relative to the largest


class LargeFailed(Exception):
    """The run came to nothing; the message says why."""


@dataclass
class Run:
    """One job. ``peaks``: anonymous memory by process."""

    job: DiLoCoJob
    elements: int  # of each fragment
    syncer: Syncer
    children: list[tuple[Any, Connection]] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)

    def begin(self, addresses: Sequence[Sequence[tuple[int, str]]]) -> float:
        """Start a process for each share of the learners; when all have begun to connect, by time.monotonic()."""
        context = multiprocessing.get_context("spawn")
        for share in addresses:
            ours, theirs = context.Pipe()
            work = (theirs, self.syncer.folder, share, self.elements, PACE)
            process = context.Process(target=synthetic.run_learners, args=work, daemon=True)
            process.start()
            self.children.append((process, ours))
            self.told.append(Told())
        self.wait(lambda: all(told.ready for told in self.told), "a process of learners")
        return time.monotonic()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Memory is sampled meanwhile, and the learners end with it."""
        stopping = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stopping,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            for process, pipe in self.children:
                with contextlib.suppress(OSError):
                    pipe.send("end")
                process.join(20)
                process.kill()

    def _sample(self, stopping: threading.Event) -> None:
        while not stopping.wait(SAMPLE_SECONDS):
            for pid in [self.syncer.pid, *(process.pid for process, _ in list(self.children))]:
                self.peaks[pid] = max(self.peaks.get(pid, 0), anonymous_bytes(pid))

    def wait(self, condition: Callable[[], object], what: str) -> float:
        """Seconds until it holds. Raises LargeFailed."""
        begun = time.monotonic()
        while not condition():
            self._hear()
            if free_memory() < LEAST_FREE:
                raise LargeFailed(f"this machine has too little memory left; waiting for {what}")
            if time.monotonic() - begun > WAIT_SECONDS:
                raise LargeFailed(f"{what} did not come within {WAIT_SECONDS:.0f} s:\n{self.syncer.log_end()}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def _hear(self) -> None:
        for n, (process, pipe) in enumerate(self.children):
            while pipe.poll():
                self.told[n] = pipe.recv()
            if self.told[n].error or not process.is_alive():
                raise LargeFailed(f"a process of learners ended: {self.told[n].error or process.exitcode}")

    @property
    def state(self) -> tuple[float, int] | None:
        return self.told[-1].state


def free_memory() -> int:
    """Bytes that the kernel could give without swapping."""
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024


def tcp_rate(size: int) -> float:
    """Bytes a second over a TCP socket of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        buffer = memoryview(bytearray(1 << 20))
        sender = threading.Thread(target=near.sendall, args=(bytes(size),))
        begun, left = time.monotonic(), size
        sender.start()
        with far:
            while left:
                left -= far.recv_into(buffer[: min(left, len(buffer))])
        sender.join()
        return size / (time.monotonic() - begun)


def measure(job: DiLoCoJob, folder: Path, elements: int, seconds: float, *, cut: bool) -> list[common.Row]:
    """Raises LargeFailed."""
    rate, rows = tcp_rate(1 << 28), []
    sizes = [elements] * FRAGMENTS
    parameters = sum(sizes)

    def add(name: str, value: float, unit: str, baseline: float, *, against: str = "a TCP socket") -> None:
        rows.append(common.Row(name, value, unit, against, baseline=baseline, ratio=value / baseline))

    link = Link()
    with Syncer(folder, job) as syncer, Relays() as relays:
        run = Run(job, elements, syncer)
        first = relays.open(syncer.address, near=link) if cut else syncer.address
        ways = [(ordinal, syncer.address if ordinal else first) for ordinal in range(LEARNERS)]
        with run.watched():
            begun = run.begin([ways[:1]])  # it is asked for version 0
            if cut:
                cut_once(run, relays, link, 4 * parameters)
            run.wait(lambda: syncer.status()["versions"], "version 0")
            durable, up = time.monotonic() - begun, syncer.status()["bytes_up"]
            add("version 0, until it is durable", durable, "s", 4 * parameters / rate)
            add("version 0, bytes up", up / 1e6, "MB", 4 * parameters / 1e6, against="its values")
            each = -(-(LEARNERS - 1) // PROCESSES)
            begun = run.begin([ways[1 + each * n : 1 + each * (n + 1)] for n in range(PROCESSES)])
            run.wait(lambda: all(None not in told.ready for told in run.told), "the model")
            last = max(at for told in run.told for at in told.ready if at is not None)
            down = 2 * parameters * (LEARNERS - 1)
            add("version 0, until the other seven have it", last - begun, "s", down / rate)
            run.children[-1][1].send("state")
            if cut:
                cut_once(run, relays, link, STATE_BYTES * parameters)
            run.wait(lambda: run.state, "a peer's state")
            assert run.state is not None
            add("a peer's optimizer state", run.state[0], "s", 2 * STATE_BYTES * parameters / rate)
            if run.state[1] != bulk.checksum(make_state(STATE_BYTES * parameters)):
                raise LargeFailed("the peer's state is not the one that was made")
            begun, before = time.monotonic(), syncer.status()
            run.wait(lambda: time.monotonic() - begun > seconds, "the end")
            after, taken = syncer.status(), time.monotonic() - begun
            merged = LEARNERS * (codec.encoded_bytes(job.spec.sync.compression.up, elements) + 2 * elements)
            add("merges, of eight pushes each", (after["merges"] - before["merges"]) / taken, "/s", rate / merged)
            for way in ("up", "down"):
                moved = (after[f"bytes_{way}"] - before[f"bytes_{way}"]) / taken
                add(f"bytes {way}, of all learners", moved / 1e6, "MB/s", rate / 1e6)
            planned = needs(job.spec, sizes).syncer_memory
            greatest = run.peaks[syncer.pid]
            add("memory of the syncer", greatest / 2**30, "GiB", planned / 2**30, against="diloco plan")
            # Nobody is late here, or still reads a version that was overtaken.
            up_bytes = payload_bytes(job.spec.sync.compression.up, elements)
            planned -= LEARNERS * FRAGMENTS * up_bytes + parameters
            bare = "diloco plan without late pushes and overtaken versions"
            add("memory of the syncer", greatest / 2**30, "GiB", planned / 2**30, against=bare)
            for (process, _), told in zip(run.children, run.told, strict=True):
                count, greatest = len(told.ready), run.peaks[process.pid]
                planned = count * library_bytes(job.spec, sizes)
                name = f"memory of {count} synthetic learner{'s' * (count > 1)}"
                add(name, greatest / 2**30, "GiB", planned / 2**30, against="the library in diloco plan")
    check_merge(job, folder, elements)
    return rows


def cut_once(run: Run, relays: Relays, link: Link, size: int) -> None:
    """Reset all connections of the link when half of ``size`` bytes has gone up it."""
    begun = link.carried.up
    run.wait(lambda: link.carried.up - begun > size / 2, "half of what is to be cut")
    for way in list(link.ways):
        relays.do(way.reset)


def check_merge(job: DiLoCoJob, folder: Path, elements: int) -> None:
    """Compute a fragment's newest version again, from the one before and the pushes that it names. Raises LargeFailed
    unless it is what the syncer has."""
    reader = StoreReader(open_store(str(folder / "store")), job.metadata.name)
    reader.layout()
    newest: dict[int, int] = {}
    for fragment, version in reader.merges():
        newest[fragment] = max(version, newest.get(fragment, 0))
    for fragment, version in newest.items():
        with contextlib.suppress(ObjectNotFound, Damaged):
            before, after = (reader.record(fragment, v) for v in (version - 1, version))
            break
    else:
        raise LargeFailed("no merge is in the store with the version before it")
    mean, length, encoding = np.zeros(elements), 0.0, job.spec.sync.compression.up
    for push in after.responders:
        made = synthetic.make_push(elements, fragment, push.header.slot, push.header.base_version)
        delta = codec.decode(codec.encode(made, encoding), encoding, elements)
        norm = float(np.linalg.norm(delta.astype(np.float64)))
        length += push.weight * norm
        mean += delta * (push.weight / norm)
    merged = mean * (length / np.linalg.norm(mean))
    momentum = before.outer.get("momentum", np.zeros(elements, np.float32))
    outer = choose_merge(job.spec, FRAGMENTS * elements)[1]  # sgd is nesterov without momentum
    mu = outer.momentum if outer.optimizer == "nesterov" else 0.0
    expected = before.theta - outer.lr * (merged + mu * (mu * momentum + merged))
    wrong = float(np.abs(expected - after.theta).max() / np.abs(after.theta).max())
    print(f"fragment {fragment}: version {version}, made of {len(after.responders)} pushes", file=sys.stderr)
    if not wrong <= TOLERANCE:
        raise LargeFailed(f"fragment {fragment}, version {version} is not made of the pushes that it names ({wrong:g})")


def main() -> int:
    """0; 1: the run failed."""
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--parameters", type=parameters_from, default="250M", metavar="N", help="such as 250M or 1B")
    parser.add_argument("--seconds", type=common.number(above=0), default=60.0, help="of merges that are counted")
    parser.add_argument("--cut", action="store_true", help="cut off who sends version 0 and the state, half way")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="of the job's spec")
    given: argparse.Namespace = parser.parse_args()
    if given.quick:
        given.parameters, given.seconds = 20_000_000, 5.0
    elements = given.parameters // FRAGMENTS // 256 * 256
    job = light_job(*OVERRIDES, *given.set)
    with tempfile.TemporaryDirectory(prefix="diloco-bench-", dir=Path.cwd()) as folder:
        try:
            rows = measure(job, Path(folder), elements, given.seconds, cut=given.cut)
        except LargeFailed as error:
            print(f"bench/large: {error}", file=sys.stderr)
            return 1
    parameters = FRAGMENTS * elements
    common.show(rows, given.json, f"{parameters / 1e6:.0f} M parameters, {LEARNERS} learners, {FRAGMENTS} fragments")
    return 0


if __name__ == "__main__":
    common.run_to_exit(main)
