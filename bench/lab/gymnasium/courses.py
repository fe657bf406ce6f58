"""The courses of the gymnasium: what a link does, to whom, and what is measured of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from diloco.local.screen import slot_note
from diloco_protocol.common import reach
from diloco_protocol.documents import StatusDocument, read_document
from lab.gymnasium import stand_in
from lab.gymnasium.stand_in import StandIn, even_layout, light_job
from programs import Syncer
from relay import Link, Relays

MBIT = 1e6 / 8
BYTES = 2  # of a value, as it is broadcast
PATIENCE = 10.0  # times the link's own time, and at least PATIENCE_SECONDS
PATIENCE_SECONDS = 180.0
NAME = "hub.test"  # a host with two addresses
SILENT, GOOD = "127.0.0.9", "127.0.0.1"


class CourseFailed(Exception):
    """A learner was not merged, or the books do not balance; the message says so in words."""


@dataclass(frozen=True, slots=True)
class Figure:
    """``baseline``: of ``against``, in the same unit; None: there is none."""

    name: str
    value: float
    unit: str
    against: str = ""
    baseline: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    figures: tuple[Figure, ...]
    told: tuple[str, ...]


@dataclass(frozen=True)
class Course:
    name: str
    measure: Callable[[Ground], Awaitable[tuple[Figure, ...]]]
    elements: int  # of each fragment
    pace: float = 1.0  # seconds of a step
    learners: int = 2
    sets: tuple[str, ...] = ()
    files: int | None = None

    async def run(self) -> Result:
        """Raises CourseFailed."""
        job = light_job(f"regions.0.learners={self.learners}", *self.sets)
        with (
            tempfile.TemporaryDirectory(prefix="links-") as folder,
            Relays() as relays,
            Syncer(Path(folder), job, files=self.files) as syncer,
        ):
            async with Ground(self, syncer, relays).watched() as ground:
                figures = await self.measure(ground)
                ground.check_books()
            return Result(self.name, figures, tuple(ground.told))


@dataclass
class Ground:
    """What a course runs on: a syncer, relays, and the stand-ins of this process. ``told``: each sentence once."""

    course: Course
    syncer: Syncer
    relays: Relays
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executor = ThreadPoolExecutor(2)
        self.layout = even_layout(light_job(*self.course.sets), self.course.elements)
        self.model_bytes = BYTES * sum(self.layout.elements(p) for p in range(len(self.layout)))
        self._running: list[asyncio.Task[None]] = []
        self._kinds: set[str] = set()
        self.status: StatusDocument | None = None

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Ground]:
        """What the syncer says is written down meanwhile. At the end all stand-ins are gone."""
        watching = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            for task in [watching, *self._running]:
                task.cancel()
            await asyncio.gather(watching, *self._running, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                document = await asyncio.to_thread(self.syncer.status)
                self.status = read_document(StatusDocument, json.dumps(document))
                self._note(self.status)
            await asyncio.sleep(0.5)

    def _note(self, status: StatusDocument) -> None:
        fragments = len(status.versions)
        for slot in status.slots:
            where = f"{slot.region}-{slot.ordinal}"
            message = slot.link.message if slot.link is not None else ""
            for said in (slot_note(slot, fragments), message, slot.problem):
                self._tell(where, said)
        for event in status.events:
            self._tell(event.kind, event.message if event.kind in ("lost", "starved") else "")

    def _tell(self, where: str, said: str) -> None:
        """Once, whatever its figures are."""
        kind = where + re.sub(r"[\d.]+( [kM]?B/s)?", "#", said)
        if said and kind not in self._kinds:
            self._kinds.add(kind)
            self.told.append(f"{where}: {said}")

    def begin(self, address: str, ordinal: int) -> tuple[StandIn, asyncio.Task[None]]:
        """A stand-in that trains from now on."""
        one = StandIn(
            self.syncer.folder, address, self.layout, self.course.pace, executor=self.executor, ordinal=ordinal
        )
        task = asyncio.create_task(one.run())
        self._running.append(task)
        return one, task

    async def begin_job(self) -> StandIn:
        """The first learner, beside the syncer, once something was merged."""
        first, _ = self.begin(self.syncer.address, 0)
        await self.wait(lambda: first.first_merge is not None, PATIENCE_SECONDS, "the first learner is not merged")
        return first

    async def wait(self, condition: Callable[[], object], seconds: float, otherwise: str) -> float:
        """Seconds until the condition holds. Raises CourseFailed."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while not condition():
            if loop.time() - begun > seconds:
                raise CourseFailed(f"{otherwise} within {seconds:.0f} s; told: {'; '.join(self.told) or 'nothing'}")
            await asyncio.sleep(0.05)
        return loop.time() - begun

    def check_books(self) -> None:
        """Raises CourseFailed."""
        assert self.status is not None
        tokens = self.status.tokens
        if tokens.trained != tokens.merged + tokens.pending + tokens.dropped or self.status.ledger_imbalances:
            raise CourseFailed(f"the books do not balance: {tokens}")

    @property
    def merges(self) -> int:
        return 0 if self.status is None else self.status.merges


Trouble = Callable[[Ground, Link], Coroutine[Any, Any, None]]


async def none(ground: Ground, link: Link) -> None:
    """A link that does nothing but carry."""


def newcomer(link: Callable[[], Link], trouble: Trouble = none, host: str = "") -> Callable[[Ground], Any]:
    """A newcomer joins behind the link: when is it merged, and what did the link carry until then?"""

    async def measure(ground: Ground) -> tuple[Figure, ...]:
        await ground.begin_job()
        way = link()
        address = ground.relays.open(ground.syncer.address, near=way)
        with dead_address(int(address.rpartition(":")[2])) if host else contextlib.nullcontext():
            one, _ = ground.begin(f"{host}:{address.rpartition(':')[2]}" if host else address, 1)
            troubling = asyncio.create_task(trouble(ground, way))
            own = ground.model_bytes / way.rate if way.rate else 0.0
            own += 6 * 2 * way.latency + 2 * ground.course.pace  # to connect, join, ask, be pulled and be told
            limit = max(PATIENCE * own, PATIENCE_SECONDS)
            try:
                seconds = await ground.wait(lambda: one.first_merge is not None, limit, "the newcomer is not merged")
            finally:
                troubling.cancel()
        ready = "until its first update is merged"
        return (
            Figure(ready, seconds, "s", "the link's own time", baseline=own),
            Figure(
                "bytes down by then",
                way.carried.down / 1e6,
                "MB",
                "bytes of the model",
                baseline=ground.model_bytes / 1e6,
            ),
        )

    return measure


async def stop_one(ground: Ground, link: Link) -> None:
    """The bulk connection that has carried most stops, when a third of the model is here."""
    await ground.wait(lambda: link.carried.down > ground.model_bytes / 3, PATIENCE_SECONDS, "nothing comes")
    max(link.ways, key=lambda way: way.carried).silent = True


def resets(per_minute: float) -> Trouble:
    """Each connection is reset with this chance a minute."""

    async def trouble(ground: Ground, link: Link) -> None:
        draw = random.Random(1)
        while True:
            await asyncio.sleep(1.0)
            for way in list(link.ways):
                if draw.random() < per_minute / 60:
                    ground.relays.do(way.reset)

    return trouble


@contextlib.contextmanager
def dead_address(port: int) -> Iterator[None]:
    """``NAME`` has two addresses, the first of which is silent: a listener whose queue is full."""
    with socket.create_server((SILENT, port), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        before = reach.resolve_name
        reach.resolve_name = lambda host, port, seconds=0.0: [SILENT, GOOD] if host == NAME else before(host, port)
        try:
            yield
        finally:
            reach.resolve_name = before


def quiet_then(trouble: Callable[[Ground, float], Awaitable[None]], seconds: float) -> Callable[[Ground], Any]:
    """Merges while something troubles the job, beside those in as long a time before."""

    async def measure(ground: Ground) -> tuple[Figure, ...]:
        await ground.begin_job()
        begun = ground.merges
        await asyncio.sleep(seconds)
        quiet = ground.merges - begun
        begun = ground.merges
        await trouble(ground, seconds)
        return (Figure("merges meanwhile", float(ground.merges - begun), "", "as long before", baseline=float(quiet)),)

    return measure


async def flap(ground: Ground, seconds: float) -> None:
    """Another learner joins, and ten seconds later it is lost without a word."""
    for turn in range(max(int(seconds / 10), 1)):
        if turn % 2:
            await asyncio.sleep(10.0)
            continue
        _, task = ground.begin(ground.syncer.address, 1)
        await asyncio.sleep(10.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def silence(idle_seconds: float, merges: int) -> Callable[[Ground], Any]:
    """A learner whose merges are rarer than its NAT's patience: how long do some take, beside those of a good link?"""

    async def measure(ground: Ground) -> tuple[Figure, ...]:
        link = Link(idle_seconds=idle_seconds)
        address = ground.relays.open(ground.syncer.address, near=link)
        one, _ = ground.begin(address, 0)
        own = merges * ground.course.pace
        at = ground.merges
        seconds = await ground.wait(lambda: ground.merges >= at + merges, PATIENCE * own, "merges stop")
        assert one.connection.status.sessions
        sessions = float(one.connection.status.sessions)
        return (
            Figure(f"for {merges} merges", seconds, "s", "at its steps' pace", baseline=own),
            Figure("sessions", sessions, "", "of a good link", baseline=1.0),
        )

    return measure


def crowd(seconds: float) -> Callable[[Ground], Any]:
    """Many learners join at once; then 1 % of all connections are reset each minute."""

    async def measure(ground: Ground) -> tuple[Figure, ...]:
        link = Link()
        address = ground.relays.open(ground.syncer.address, near=link)
        many = [ground.begin(address, ordinal)[0] for ordinal in range(ground.course.learners)]
        ready = await ground.wait(lambda: all(one.ready_at for one in many), 600.0, "not all have joined")
        merged = ready + await ground.wait(lambda: all(one.first_merge for one in many), 600.0, "not all are merged")
        troubling = asyncio.create_task(resets(0.01)(ground, link))
        begun, before = ground.merges, sum(one.connection.status.sessions for one in many)
        await asyncio.sleep(seconds)
        troubling.cancel()
        again = sum(one.connection.status.sessions for one in many) - before
        return (
            Figure("until all have the model and a slot", ready, "s"),
            Figure("until of all an update is merged", merged, "s"),
            Figure(f"merges in {seconds:.0f} s of resets", float(ground.merges - begun), ""),
            Figure("sessions that began again meanwhile", float(again), ""),
        )

    return measure


def stopped(seconds: float) -> Callable[[Ground], Any]:
    """A learner's process is stopped, and goes on."""

    async def measure(ground: Ground) -> tuple[Figure, ...]:
        await ground.begin_job()
        course, syncer = ground.course, ground.syncer
        words = [syncer.folder, syncer.address, course.elements, course.pace, 1]
        command = [sys.executable, stand_in.__file__, *map(str, words)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines: list[str] = []
            reading = asyncio.create_task(asyncio.to_thread(lambda: lines.extend(iter_lines(process, lines))))
            try:
                await ground.wait(lambda: lines, PATIENCE_SECONDS, "the learner is not merged")
                process.send_signal(signal.SIGSTOP)
                begun = ground.merges
                await asyncio.sleep(seconds)
                meanwhile, count = ground.merges - begun, len(lines)
                process.send_signal(signal.SIGCONT)
                back = await ground.wait(lambda: len(lines) > count + 2, PATIENCE_SECONDS, "it is not merged again")
            finally:
                process.kill()
                await reading
        own = 6 * course.pace
        return (
            Figure("until three updates are merged again", back, "s", "three pushes and merges", baseline=own),
            Figure(f"the other's merges in {seconds:.0f} s", float(meanwhile), ""),
        )

    return measure


def iter_lines(process: subprocess.Popen[str], lines: list[str]) -> Iterator[str]:
    """Lines as they come, straight into ``lines``."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
    return iter(())


def courses(quick: bool) -> list[Course]:
    """All, or those that take some seconds each."""
    fragment = 128_000 if quick else 1_875_000  # 24 of them: 6 MB, and 90 MB of 45 million parameters
    pace = 0.5 if quick else 10.0
    small: dict[str, Any] = {"elements": 64_000, "pace": 0.5}
    rates = [Course(f"{rate} Mbit/s", newcomer(partial(Link, rate * MBIT)), fragment, pace) for rate in (8, 16)]
    far = [
        # Steps that are short beside the round trip are late at every merge: that is not the link's to mend.
        Course(
            f"round trip {trip} ms",
            newcomer(partial(Link, 16 * MBIT, trip / 2000)),
            64_000,
            pace=max(0.5, 1.5 * trip / 1000),
        )
        for trip in ((2000,) if quick else (50, 500, 1000, 2000))
    ]
    often = resets(6.0 if quick else 1.0)
    more = [
        Course("each connection reset once a minute", newcomer(lambda: Link(8 * MBIT), often), fragment, pace),
        Course("one of two addresses is dead", newcomer(lambda: Link(16 * MBIT), host=NAME), **small),
        Course("flapping every 10 s", quiet_then(flap, 20.0 if quick else 120.0), **small),
        Course(
            f"{16 if quick else 64} learners at once, 1024 files",
            crowd(10.0 if quick else 180.0),
            elements=16_384,
            pace=1.0 if quick else 4.0,
            learners=16 if quick else 64,
            sets=("sync.fragments=8", "sync.every=8"),
            files=1024,
        ),
        Course(f"stopped for {15 if quick else 300} s", stopped(15.0 if quick else 300.0), **small),
    ]
    rare: dict[str, Any] = {
        "elements": 64_000,
        "pace": 25.0,
        "learners": 1,
        "sets": ("sync.fragments=4", "sync.every=4"),
    }
    idle = [
        Course("one bulk connection stops", newcomer(lambda: Link(8 * MBIT), stop_one), fragment, pace),
        Course("silent after 20 s without a byte", silence(20.0, merges=8), **rare),
        Course("silent after 60 s without a byte", silence(60.0, merges=4), **{**rare, "pace": 70.0}),
    ]
    return [*rates, *far, *more, *([] if quick else idle)]
