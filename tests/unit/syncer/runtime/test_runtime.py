"""The syncer's I/O shell in one process, without its servers: what is told to whom, and when it is durable."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_source import ByteSource
from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.documents import Report
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import JobPhase, SlotState, SyncerExit
from diloco_protocol.wire import bulk, convert, limits, sync_pb2
from diloco_protocol.wire.control_auth import sign_call
from diloco_protocol.wire.progress import OVERTAKEN_BYTES
from diloco_protocol.wire.records import Held, PushHeader, SlotReceipt, StepReport
from diloco_syncer import startup
from diloco_syncer import syncer as syncer_module
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.books.shares import Work, weigh_pushes
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.output import model_output
from diloco_syncer.runtime import global_model, initial_model
from diloco_syncer.runtime.driver import RESTART
from diloco_syncer.runtime.global_model import model_name
from diloco_syncer.runtime.merger import without_responder
from diloco_syncer.server.control import Control
from diloco_syncer.server.pages.metrics import exposition
from diloco_syncer.server.sessions import Connection
from diloco_syncer.server.tls import connection_limits
from diloco_syncer.server.tls.connection_limits import Peer
from diloco_syncer.store import records
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.spool import Spool
from diloco_syncer.store.tape import Tape
from diloco_syncer.syncer import Syncer
from diloco_syncer.version_tags import Announced, VersionTags, content_digest
from patience import until
from shell_figures import SHELL

pytestmark = pytest.mark.timeout(120)
KEY = b"k" * 32
LAYOUT = Layout.build([Tensor("w", (64, 8), "float32", False)], fragments=2)
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: shell}
spec:
  training: {model: null, data: null, stop: {steps: 1000}, evaluation: null}
  sync:
    fragments: 2
    every: 2
    overlap: 1
    compression: {up: float32, down: float32}
    merge: {method: rda}
    outer: {optimizer: sgd, lr: 1.0}
    heartbeat: {intervalSeconds: 1, timeoutSeconds: 30}
  syncer: {checkpoint: {everySeconds: 3600}}
  learners: {command: [python, x.py]}
  regions: [{name: local, learners: 2}]
"""


class Context:
    """What a handler asks of a call. ``sent``: what it wrote."""

    def __init__(self, sent: list[bytes] | None = None) -> None:
        self.sent = [] if sent is None else sent

    async def write(self, message: bytes) -> None:
        self.sent.append(message)

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    async def abort(self, code: Any, details: str) -> None:
        raise AssertionError(f"{code}: {details}")


class Sink:
    """Where a download goes."""

    def __init__(self) -> None:
        self.replies: list[sync_pb2.BulkReply] = []
        self.sent = bytearray()

    async def reply(self, reply: sync_pb2.BulkReply) -> None:
        self.replies.append(reply)

    async def write(self, part: memoryview, note: Callable[[int], None] = lambda count: None) -> None:
        self.sent += part


class Bench:
    """A running syncer on a directory, and messages to it by hand."""

    def __init__(self, store: Path, *overrides: str) -> None:
        self.options = startup.Options(
            job=parse_job(JOB, overrides),
            store=str(store),
            listen="",
            control="",
            http="",
            address_file=None,
            control_key=KEY,
            credentials=Credentials(),
            threads=1,
        )
        self.store = store
        self.syncer: Syncer

    async def __aenter__(self) -> Bench:
        self.syncer, restored = await asyncio.to_thread(startup.restore, self.options, asyncio.get_running_loop())
        startup.replay(self.syncer, restored)
        self.syncer.start(restored.behind)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.syncer.close(checkpoint=False)

    def receipt(self, fragment: int, version: int, values: Any, key: bytes = KEY) -> bytes:
        """That of a version, as a syncer with this control key gives it."""
        rows = self.syncer.core.receipt(fragment) if self.syncer.core.initialised else ()
        announced = Announced(version, content_digest(values), rows)
        name = self.options.job.metadata.name
        return VersionTags(key, name).make(announced, fragment, "float32", model_name(LAYOUT, ""))

    def connect(
        self,
        number: int,
        ordinal: int,
        process: str,
        evaluator: bool = False,
        before: int = 0,
        held: tuple[Held, ...] = (),
    ) -> Connection:
        """``before``: the incarnation that the process had; ``held``: its versions."""
        connection = Connection(number)
        connection.process = process
        self.syncer.sessions._connections[number] = connection
        self.syncer.driver.handle(
            ev.Join(
                connection=number,
                process=process,
                region="local",
                ordinal=ordinal,
                evaluator=evaluator,
                layout_digest=LAYOUT.digest,
                digests={},
                sequences=0 if evaluator else 100_000,
                held=held,
                previous_incarnation=before,
            )
        )
        return connection

    async def upload(
        self, process: str, payload: Any, meanwhile: Callable[[], object] = lambda: None, **what: Any
    ) -> sync_pb2.UploadReply:
        """``meanwhile``: called when the syncer has begun to read the bytes."""
        if (connection := self.syncer.sessions.find_process(process)) is not None:
            await until(lambda: connection.welcomed)
        data = bytes(bulk.flat(payload))
        header = sync_pb2.UploadHeader(
            format=limits.FORMAT,
            job="shell",
            process=process,
            total_bytes=len(data),
            bytes=len(data),
            checksum=bulk.checksum(data),
            **what,
        )

        async def pieces() -> AsyncIterator[bytes]:
            meanwhile()
            yield data

        return await self.syncer.bulk.uploads.upload(header, ByteSource(pieces()), Peer())

    async def download(self, process: str, version: int, offset: int = 0, count: int = 0) -> bytes | None:
        """A part of fragment 0; None: it is not found."""
        request = sync_pb2.DownloadRequest(
            format=limits.FORMAT,
            job="shell",
            process=process,
            what=sync_pb2.DownloadRequest.FULL,
            fragment=0,
            epoch=1,
            version=version,
            offset=offset,
            bytes=count,
        )
        sink = Sink()
        await self.syncer.bulk.downloads.serve(request, sink, Peer())
        return bytes(sink.sent) if sink.replies[0].download.found else None

    async def initialise(
        self,
        process: str,
        before_done: Callable[[], object] = lambda: None,
        receipts: Sequence[bytes] = (b"", b""),
        values: float = 0.0,
        accepted: bool = True,
    ) -> sync_pb2.UploadReply:
        """Returns the last answer."""
        part = sync_pb2.Initial
        rows: list[tuple[Any, Any]] = [(part(part=part.LAYOUT), LAYOUT.to_json().encode())]
        rows += [
            (part(part=part.FRAGMENT, fragment=p, receipt=receipts[p]), np.full(LAYOUT.elements(p), values, np.float32))
            for p in (0, 1)
        ]
        for what, payload in rows:
            assert (await self.upload(process, payload, initial=what)).accepted
        before_done()
        reply = await self.upload(process, b"", initial=part(part=part.DONE))
        assert reply.accepted == accepted
        return reply

    def report(self, connection: int, step: int = 0, **changes: Any) -> sync_pb2.Report:
        rows = [sync_pb2.FragmentReport(epoch=1, base_version=0, steps=step, tokens=10 * step)] * 2
        told = sync_pb2.Report(slot_step=step, trained_steps=step, trained_tokens=10 * step, fragments=rows, **changes)
        self.syncer.sessions._handle_message(
            self.syncer.sessions._connections[connection], sync_pb2.LearnerMessage(report=told)
        )
        return told

    def offer(self, connection: int, fragment: int = 0) -> dict[str, Any]:
        """The header fields of an offer of one step."""
        slot = self.syncer.core.slot_by_connection(connection)
        assert slot is not None
        push = sync_pb2.Push(
            fragment=fragment,
            sequence=1,
            round=0,
            epoch=1,
            first_step=1,
            last_step=1,
            steps=1,
            tokens=10,
            compute_seconds=0.1,
            encoding="float32",
            layout_digest=LAYOUT.digest,
            report=self.report(connection, 1),
        )
        return {"slot": slot.index, "incarnation": slot.holder.incarnation, "push": push}


@contextlib.contextmanager
def held_up(syncer: Syncer) -> Any:
    """The store's thread does nothing meanwhile."""
    gate, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert gate.wait(60)

    syncer.durability._thread.submit(wait)
    try:
        yield
    finally:
        gate.set()


# ------------------------------------------------------------------ offers


@pytest.mark.promise('A repeated offer, also in another session, is answered with "repeated" only when it is durable')
async def test_a_retry_of_an_offer_hears_repeated_only_when_the_offer_is_durable(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        fields, delta = bench.offer(1), np.ones(LAYOUT.elements(0), np.float32)
        await until(lambda: not bench.syncer.driver._actions)
        with held_up(bench.syncer):
            # A Persist that waits for the store holds up the verdict behind it.
            bench.connect(2, 1, "b")
            await until(lambda: not bench.syncer.driver._actions or bench.syncer.driver._actions[0])
            first = asyncio.create_task(bench.upload("a", delta, **fields))
            header = convert.push_header(sync_pb2.UploadHeader(**fields))
            await until(lambda: bench.syncer.core.check_push(header) is not None)
            again = asyncio.create_task(bench.upload("a", delta, **fields))
            done, _ = await asyncio.wait((first, again), timeout=0.3)
            assert not done and not list(tmp_path.glob("offers/*"))
        assert (await first).accepted
        assert (await again).reason == "repeated"
        assert len(list(tmp_path.glob("offers/*"))) == 1


@pytest.mark.promise('A repeated offer, also in another session, is answered with "repeated" only when it is durable')
async def test_an_offer_that_comes_again_in_another_session_hears_repeated_only_when_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first copy waits for the store, which has taken the new seat already."""
    spool, full = Checkpoints.spool_offer, True

    def spool_later(self: Checkpoints, *arguments: Any) -> None:
        if full:
            raise OSError("the store failed")
        spool(self, *arguments)

    monkeypatch.setattr(Checkpoints, "spool_offer", spool_later)
    async with Bench(tmp_path, "sync.quorum=2") as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        fields, delta = bench.offer(1), np.ones(LAYOUT.elements(0), np.float32)
        first = asyncio.create_task(bench.upload("a", delta, **fields))
        await until(lambda: bench.syncer.durability.problem)
        del bench.syncer.sessions._connections[1]
        bench.connect(2, 0, "a", before=fields["incarnation"])
        slot = bench.syncer.core.slot_by_connection(2)
        assert slot is not None and slot.holder.incarnation > fields["incarnation"]
        again = asyncio.create_task(bench.upload("a", delta, **fields | {"incarnation": slot.holder.incarnation}))
        done, _ = await asyncio.wait((first, again), timeout=0.3)
        assert not done and not list(tmp_path.glob("offers/*"))
        full = False
        assert (await again).reason == "repeated"
        assert len(list(tmp_path.glob("offers/*"))) == 1
        assert (await first).accepted


@pytest.mark.promise(
    "A superseded syncer acknowledges no offer, and announces no state or merge that its successor may not have read"
)
async def test_a_succeeded_syncer_acknowledges_no_offer(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        fields, delta = bench.offer(1), np.ones(LAYOUT.elements(0), np.float32)
        await until(lambda: not bench.syncer.driver._actions)
        Epoch.claim(DirectoryStore(tmp_path))
        offer = asyncio.create_task(bench.upload("a", delta, **fields))
        assert await asyncio.wait_for(asyncio.shield(bench.syncer.driver.outcome), 20) == SyncerExit.SUPERSEDED
        assert not offer.done() and not list(tmp_path.glob("offers/*"))
    with pytest.raises(asyncio.CancelledError):  # the call ends without an answer: the learner asks the successor
        await offer


@pytest.mark.promise(
    "No offer is taken while a version that the store lost is sought, however early its first bytes came"
)
async def test_an_offer_waits_for_a_lost_version_that_shows_up_while_its_bytes_come(tmp_path: Path) -> None:
    async with Bench(tmp_path, "sync.quorum=2") as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
    async with Bench(tmp_path, "sync.quorum=2") as bench:
        bench.connect(1, 0, "a", before=1, held=(Held(1, 0, 0),) * 2)
        fields, delta = bench.offer(1), np.ones(LAYOUT.elements(0), np.float32)
        newer = Held(1, 3, 0), Held(1, 0, 0)
        reply = await bench.upload("a", delta, lambda: bench.connect(2, 0, "e", evaluator=True, held=newer), **fields)
        assert bench.syncer.core.is_recovering
        assert (reply.accepted, reply.reason) == (False, "busy") and not list(tmp_path.glob("offers/*"))


async def test_a_refused_offer_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        fields = bench.offer(1)
        bad = np.full(LAYOUT.elements(0), np.nan, np.float32)
        assert (await bench.upload("a", bad, **fields)).reason == "not-finite"
        await asyncio.wait_for(bench.syncer.pushes.wait_spooled(5), 1)
        assert (await bench.upload("a", np.ones_like(bad), **fields)).accepted


@pytest.mark.parametrize("encoding", ["float32", "int8"])
async def test_pushes_that_wait_are_not_touched_by_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Large enough for pooled memory: what is refused must not come up in a merge."""
    large = Layout.build([Tensor("w", (1024, 64), "float32", False)], fragments=2)
    monkeypatch.setattr(sys.modules[__name__], "LAYOUT", large)
    async with Bench(tmp_path, f"sync.compression.up={encoding}", "sync.quorum=2") as bench:
        replies = []
        for number, process in enumerate("ab"):
            bench.connect(number + 1, number, process)
        await bench.initialise("a")
        for connection, process, value in ((1, "a", 1.0), (2, "b", np.nan)):
            fields = bench.offer(connection)
            fields["push"].encoding = encoding
            delta = codec.encode(np.full(large.elements(0), value, np.float32), encoding)
            replies.append((await bench.upload(process, delta, **fields)).reason)
        assert replies == ["", "not-finite"]
        handles = list(bench.syncer.pushes._held)
        (waiting,), _ = bench.syncer.pushes.gradients(handles)
        if isinstance(waiting, codec.EncodedValues):
            scratch = np.empty(codec.scratch_size(waiting.elements), np.float32)
            waiting = waiting.decode(0, waiting.elements, scratch)
        np.testing.assert_allclose(waiting, 1.0, rtol=0.01)


async def test_bytes_by_region_and_slot_are_the_totals_and_outlive_the_syncer(tmp_path: Path) -> None:
    def counted(syncer: Syncer) -> tuple[Any, ...]:
        shown = syncer.status_page.status()
        assert sum(row.bytes_up for row in shown.regions) == shown.bytes_up
        return shown.bytes_up, shown.regions, [row.bytes_up for row in shown.slots]

    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a").place = bench.syncer.traffic.place_of("local", False)
        await bench.initialise("a")
        delta = np.ones(LAYOUT.elements(0), np.float32)
        before = counted(bench.syncer)
        assert (await bench.upload("a", delta, **bench.offer(1))).accepted
        total, regions, slots = counted(bench.syncer)
        assert total == before[0] + delta.nbytes and regions[0].name == "local"
        assert slots[0] - before[2][0] == delta.nbytes and sum(slots) <= total == regions[0].bytes_up
        await bench.syncer.durability.checkpoint()
    async with Bench(tmp_path) as bench:
        assert counted(bench.syncer) == (total, regions, slots)


# ------------------------------------------------------------------ version 0


@pytest.mark.promise(
    "While version 0 arrives, other requests are served: no work that grows with the model runs on the event loop"
)
async def test_work_on_version_0_that_grows_with_the_model_is_done_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing, checking, checksums and encoding: at a billion parameters each takes seconds."""
    seen: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(Layout, "from_json")
    watch(codec, "norm_and_finite")
    watch(records, "pack")
    watch(records, "theta_digest")
    watch(global_model.GlobalModel, "encode")
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        assert bench.syncer.core.initialised
    assert set(seen) == {"from_json", "norm_and_finite", "pack", "theta_digest", "encode"}
    assert threading.get_ident() not in set().union(*seen.values())


@pytest.mark.promise("Incoming frozen parameters are in a file on the store's volume, not in memory")
async def test_frozen_parameters_are_received_into_a_file_on_the_stores_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    allocate = Spool.allocate
    monkeypatch.setattr(Spool, "allocate", lambda self, size: made.append(allocate(self, size)) or made[-1])
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        part = sync_pb2.Initial
        assert (await bench.upload("a", LAYOUT.to_json().encode(), initial=part(part=part.LAYOUT))).accepted
        assert (await bench.upload("a", b"frozen", initial=part(part=part.FROZEN))).accepted
        (array,) = made
        assert isinstance(array, np.memmap) and array.tobytes() == b"frozen"
        assert str(array.filename).startswith(str(tmp_path / "spool")) and not list((tmp_path / "spool").iterdir())


@pytest.mark.promise("A job whose records a bucket would refuse for their size fails at its start, with the cure")
async def test_fragments_of_which_the_store_takes_no_record_are_refused_at_the_start(tmp_path: Path) -> None:
    for most, fits in ((4 * 2 * LAYOUT.elements(0), True), (4 * 2 * LAYOUT.elements(0) - 1, False)):
        async with Bench(tmp_path / str(fits), "sync.outer.optimizer=nesterov") as bench:
            bench.syncer.durability.checkpoints.store.most_created = most
            bench.connect(1, 0, "a")
            part = sync_pb2.Initial
            reply = await bench.upload("a", LAYOUT.to_json().encode(), initial=part(part=part.LAYOUT))
            assert reply.accepted == fits, reply.message
            if not fits:
                assert "set sync.fragments to 3 or more" in reply.message
                assert bench.syncer.core.phase is JobPhase.FAILED


async def test_version_0_that_is_refused_is_asked_of_somebody_else(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        heard: list[ev.InitialModelFailed] = []
        handle = bench.syncer.core.handle

        def watched(event: ev.Event, now: float) -> list[ev.Action]:
            heard.extend([event] if isinstance(event, ev.InitialModelFailed) else [])
            return handle(event, now)

        bench.syncer.core.handle = watched  # type: ignore[method-assign]
        bench.connect(1, 0, "a")
        bench.connect(2, 1, "b")
        part = sync_pb2.Initial
        layout = part(part=part.LAYOUT)
        # Who was not asked is refused, and the one that was asked is still asked.
        refused = await bench.upload("b", LAYOUT.to_json().encode(), initial=layout)
        assert refused.reason == "initial" and not heard
        assert (await bench.upload("a", LAYOUT.to_json().encode(), initial=layout)).accepted
        nan = np.full(LAYOUT.elements(0), np.nan, np.float32)
        what = part(part=part.FRAGMENT, fragment=0)
        assert "not finite" in (await bench.upload("a", nan, initial=what)).message
        assert heard == [ev.InitialModelFailed(1)]


async def test_a_learner_that_was_asked_and_sends_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_model, "PATIENCE", 0.3)
    monkeypatch.setattr(initial_model, "WATCH_SECONDS", 0.02)
    async with Bench(tmp_path) as bench:
        asked = bench.connect(1, 0, "a")
        await until(lambda: bench.syncer.core.initialiser == 1)
        # It is told so; its session ends.
        await until(lambda: asked.closing)
        bench.syncer.driver.handle(ev.ConnectionLost(1))
        monkeypatch.setattr(initial_model, "PATIENCE", 60.0)  # its welcome waits for the disk
        bench.connect(2, 1, "b")
        assert bench.syncer.core.initialiser == 2
        await bench.initialise("b")
        assert bench.syncer.core.initialised


async def test_bytes_of_an_attempt_that_was_given_up_do_not_get_into_the_next(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        part, upload = sync_pb2.Initial, bench.syncer.initial_model
        layout = LAYOUT.to_json().encode()
        assert (await bench.upload("a", layout, initial=part(part=part.LAYOUT))).accepted
        upload.check_part(1, part.FRAGMENT, 0, 4 * LAYOUT.elements(0))
        admitted = upload.attempt
        assert (await bench.upload("a", layout, initial=part(part=part.LAYOUT))).accepted
        with pytest.raises(initial_model.InitialRefused, match="has begun since"):
            await upload.store_part(1, admitted, part.FRAGMENT, 0, np.zeros(4 * LAYOUT.elements(0), np.uint8))


@pytest.mark.promise("Version 0 whose upload broke goes on from the fragments that came, whoever sends the rest")
@pytest.mark.parametrize("left", ["the same", "another model", "an emptied store's"])
async def test_version_0_goes_on_from_the_fragments_that_a_broken_upload_has_left(tmp_path: Path, left: str) -> None:
    part, again = sync_pb2.Initial, 2.0 if left == "another model" else 1.0
    layout, size = LAYOUT.to_json().encode(), LAYOUT.elements(0)

    async def send(bench: Bench, process: str, value: float) -> int:
        """The frozen parameters, then the first fragment and they again: how many bytes of these two were received."""
        values = np.full(size, value, np.float32)
        what = part(part=part.FRAGMENT, digest=bulk.checksum_text(values))
        assert (await bench.upload(process, layout, initial=part(part=part.LAYOUT))).accepted
        assert (await bench.upload(process, b"frozen", initial=part(part=part.FROZEN, digest="f"))).accepted
        before = bench.syncer.status_page.status().bytes_up
        assert (await bench.upload(process, values, initial=what)).accepted
        assert (await bench.upload(process, b"frozen", initial=part(part=part.FROZEN, digest="f"))).accepted
        return bench.syncer.status_page.status().bytes_up - before

    async with Bench(tmp_path) as bench:
        origins = {1: (7, 7)} if left == "an emptied store's" else {}
        bench.syncer.core.version_0_origins = lambda connection: origins.get(connection, ())  # type: ignore[method-assign]
        bench.connect(1, 0, "a")
        assert await send(bench, "a", 1.0) == 4 * size
        bench.syncer.driver.handle(ev.ConnectionLost(1))
        bench.connect(2, 1, "b")
        assert await send(bench, "b", again) == (0 if left == "the same" else 4 * size)
        rest = np.zeros(LAYOUT.elements(1), np.float32)
        assert (await bench.upload("b", rest, initial=part(part=part.FRAGMENT, fragment=1))).accepted
        assert (await bench.upload("b", b"", initial=part(part=part.DONE))).accepted
        assert bench.syncer.core.initialised and bench.syncer.model.frozen_digest == "f"
        newest = bench.syncer.model.newest[0]
        assert set(newest.theta.tolist()) == {again} and newest.recovered is None


# ------------------------------------------------------------------ the end


async def test_a_syncer_of_a_job_that_has_ended_ends(tmp_path: Path) -> None:
    async with Bench(tmp_path, "training.stop={steps: 5}") as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        bench.syncer.core.slots[0].step = 5
        bench.syncer.driver.handle(ev.EndRequested(JobPhase.COMPLETE, "the stop is reached"))
        bench.syncer.sessions._connections.clear()
        await until(lambda: (tmp_path / "report.json").exists())
    before = (tmp_path / "report.json").read_bytes()
    for lost in (False, True):
        if lost:
            (tmp_path / "report.json").unlink()
        async with Bench(tmp_path, "training.stop={steps: 5}") as bench:
            assert bench.syncer.core.phase is JobPhase.COMPLETE
            await bench.syncer.fetch_report()
            assert await asyncio.wait_for(asyncio.shield(bench.syncer.driver.outcome), 60) == 0
        assert json.loads((tmp_path / "report.json").read_text())["outcome"] == "complete"
        assert lost or (tmp_path / "report.json").read_bytes() == before


class Clock:
    """The clock of a syncer's end: how often it was looked at, and how far it goes before the machine's."""

    def __init__(self) -> None:
        self.looks, self.ahead = 0, 0.0

    def monotonic(self) -> float:
        self.looks += 1
        return time.monotonic() + self.ahead

    time = staticmethod(time.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(syncer_module, "time", made)
    monkeypatch.setattr(syncer_module, "LINGER_SECONDS", 3600.0)
    return made


async def stays(syncer: Syncer, clock: Clock) -> bool:
    """Whether a syncer that has ended, and whose report was fetched, still serves after some looks."""
    await syncer.fetch_report()
    enough = clock.looks + 5
    await until(lambda: syncer.driver.outcome.done() or clock.looks > enough)
    return not syncer.driver.outcome.done()


@pytest.mark.promise("An ended syncer waits for learners that are joining again, but not for ever")
async def test_a_learner_that_is_joining_again_hears_of_the_end(tmp_path: Path, clock: Clock) -> None:
    async with Bench(tmp_path, "training.stop={steps: 5}", "regions.0.learners=3") as bench:
        syncer, connections = bench.syncer, bench.syncer.sessions._connections
        for number, process in enumerate("abc"):
            bench.connect(number + 1, number, process)
        await bench.initialise("a")
        connections.pop(2)
        syncer.driver.handle(ev.ConnectionLost(2))
        connections.pop(3)
        syncer.driver.handle(ev.ConnectionLost(3))
        syncer.core.slots[2].state = SlotState.LOST  # it was not heard for long, and now its end is known
        syncer.driver.handle(ev.ProcessEnded(process="c", region="local", ordinal=2, reason="killed"))
        syncer.driver.handle(ev.EndRequested(JobPhase.COMPLETE, "the stop is reached"))
        await until(syncer._final_report_made.is_set)
        connections.clear()
        assert await stays(syncer, clock)
        again = bench.connect(4, 1, "b", before=2)
        await until(lambda: again.welcomed)
        assert sync_pb2.SyncerMessage.FromString(again.queue[0]).welcome.phase.name == sync_pb2.PHASE_COMPLETE
        assert await stays(syncer, clock)
        connections.clear()
        assert not await stays(syncer, clock)


@pytest.mark.promise("An ended syncer waits for learners that are joining again, but not for ever")
async def test_an_ended_syncer_does_not_wait_for_ever_for_a_learner_that_is_away(tmp_path: Path, clock: Clock) -> None:
    async with Bench(tmp_path, "training.stop={steps: 5}") as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        bench.syncer.sessions._connections.clear()
        bench.syncer.driver.handle(ev.ConnectionLost(1))
        bench.syncer.driver.handle(ev.EndRequested(JobPhase.COMPLETE, "the stop is reached"))
        assert await stays(bench.syncer, clock)
        clock.ahead = 3601.0
        assert not await stays(bench.syncer, clock)


@pytest.mark.parametrize(("listen", "expected"), [("0.0.0.0:7700", True), ("127.0.0.1:0", False)])
async def test_a_syncer_of_a_job_that_was_complete_tells_learners_that_know_its_address(
    tmp_path: Path, clock: Clock, listen: str, expected: bool
) -> None:
    async with Bench(tmp_path, "training.stop={steps: 5}") as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        bench.syncer.core.slots[0].step = 5
        bench.syncer.driver.handle(ev.EndRequested(JobPhase.COMPLETE, "the stop is reached"))
        await until(lambda: (tmp_path / "report.json").exists())
    bench = Bench(tmp_path, "training.stop={steps: 5}")
    bench.options = replace(bench.options, listen=listen)
    async with bench:
        assert await stays(bench.syncer, clock) == expected
        clock.ahead = 3601.0
        assert not await stays(bench.syncer, clock)


async def test_the_report_of_an_end_is_given_when_the_end_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path, "training.stop={steps: 5}") as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        syncer = bench.syncer
        assert (await syncer.fetch_report()).outcome == "running", "of a job that goes on: as it stands"
        with held_up(syncer):
            syncer.core.slots[0].step = 5
            syncer.driver.handle(ev.EndRequested(JobPhase.COMPLETE, "the stop is reached"))
            await until(lambda: syncer.core.phase is JobPhase.COMPLETE)
            monkeypatch.setattr(syncer_module, "MAKING_SECONDS", 0.01)
            with pytest.raises(TimeoutError):
                await syncer.fetch_report()
            monkeypatch.setattr(syncer_module, "MAKING_SECONDS", 60.0)
            fetched = asyncio.create_task(syncer.fetch_report())
        await until(lambda: (tmp_path / "report.json").exists())
        assert await fetched == Report.model_validate_json((tmp_path / "report.json").read_bytes())


@pytest.mark.promise("The report of an ended job says what has become of its output by now")
async def test_the_report_of_an_end_tells_of_an_output_that_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, store = tmp_path / "taken", tmp_path / "store"
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"another program's")
    asks = ("training.stop={steps: 5}", f"output.uri={place}")

    def is_told(state: str) -> bool:
        found = Report.model_validate_json((store / "report.json").read_bytes()).output
        return found is not None and found.state == state

    async with Bench(store, *asks) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        bench.syncer.core.slots[0].step = 5
        bench.syncer.driver.handle(ev.EndRequested(JobPhase.COMPLETE, "the stop is reached"))
        await until(lambda: (store / "report.json").exists() and is_told("failed"))
    (place / "model.safetensors").unlink()
    claims = threading.Event()
    claim = model_output._claim

    def slow_claim(*arguments: Any) -> Any:
        assert claims.wait(60)
        return claim(*arguments)

    monkeypatch.setattr(model_output, "_claim", slow_claim)
    async with Bench(store, *asks) as bench:
        told = (await bench.syncer.fetch_report()).output
        assert told is not None and told.open and is_told("failed")
        claims.set()
        await until(lambda: is_told("written"))
        told = (await bench.syncer.fetch_report()).output
        assert told is not None and told.state == "written"


# ------------------------------------------------------------------ the optimizer's state


async def test_a_checkpoint_that_waits_does_not_remove_a_new_optimizer_state(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        with held_up(bench.syncer):
            keeping = asyncio.create_task(bench.syncer.durability.write_optimizer(np.arange(100, dtype=np.uint8)))
            await asyncio.sleep(0)  # both wait in the store's thread, one after the other
            checkpoint = asyncio.create_task(bench.syncer.durability.checkpoint())
            await asyncio.sleep(0.05)
        # No turn of the loop between the two: the store's thread does them in one go.
        bench.syncer.durability._thread.submit(int).result(10)
        await asyncio.gather(keeping, checkpoint)
        assert np.array_equal(
            await bench.syncer.durability.read_blob(bench.syncer.durability.optimizer), np.arange(100, dtype=np.uint8)
        )


# ------------------------------------------------------------------ evaluations, leases


async def test_an_evaluation_is_its_sessions_and_in_range(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        learner, evaluator = bench.connect(1, 0, "a"), bench.connect(2, 0, "b", evaluator=True)
        await bench.initialise("a")
        bench.report(1, 1)
        heard = bench.syncer.sessions._handle_message

        def told(tokens: int = 5, **fields: Any) -> sync_pb2.LearnerMessage:
            return sync_pb2.LearnerMessage(evaluation=sync_pb2.Evaluation(tokens=tokens, loss=1.5, **fields))

        heard(learner, told())
        assert not bench.syncer.core.status(0.0, SHELL).eval_loss
        for message in (told(1 << 63), told(sum_versions=1 << 63)):
            with pytest.raises(limits.WireError, match="out of range"):
                heard(evaluator, message)
        heard(evaluator, told())
        assert bench.syncer.core.status(0.0, SHELL).eval_loss == [(5, 1.5)]


async def test_a_slot_holds_a_bounded_number_of_leases_and_gets_more_when_it_moves(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        connection = bench.connect(1, 0, "a")
        await bench.initialise("a")
        leases = bench.syncer.core._state.leases
        assert leases is not None
        for _ in range(limits.MAX_CURSORS + 40):
            bench.syncer.sessions._handle_message(
                connection, sync_pb2.LearnerMessage(lease_request=sync_pb2.LeaseRequest())
            )
        assert leases.count_of(0) == limits.MAX_CURSORS
        done = [sync_pb2.LeaseCursor(lease=g.lease, position=g.end) for g in leases.leases_of(0)[:10]]
        last = leases.next_lease
        bench.report(1, 1000, cursors=done)
        assert leases.count_of(0) == limits.MAX_CURSORS and leases.next_lease == last + 10
        slot = bench.syncer.core.slots[0]
        assert slot.state is SlotState.ACTIVE


# ------------------------------------------------------------------ merges that would be infinite


@pytest.mark.promise(
    "A merge that would become infinite leaves out the push with the largest norm, by name, while K are left",
    section="Syncer",
)
@pytest.mark.parametrize("quorum", [1, 2])
async def test_a_merge_that_would_be_infinite_is_made_without_who_made_it_so(tmp_path: Path, quorum: int) -> None:
    async with Bench(tmp_path, f"sync.quorum={quorum}", "sync.outer.lr=4") as bench:
        core = bench.syncer.core
        for number, process in ((1, "a"), (2, "b")):
            bench.connect(number, number - 1, process)
        await bench.initialise("a")
        for number in (1, 2):
            bench.report(number)
        await until(lambda: core.phase is JobPhase.TRAINING)
        fields = [bench.offer(number) for number in (1, 2)]
        for process, value, said in zip("ab", (3e38, 1.0), fields, strict=True):
            assert (await bench.upload(process, np.full(LAYOUT.elements(0), value, np.float32), **said)).accepted
        await until(lambda: core.versions[0] == 1 or core.phase is JobPhase.FAILED)
        if quorum == 2:
            assert core.phase is JobPhase.FAILED and "the largest push is of local-0; started" in core.phase_message
            return
        (record,) = [record for record in bench.syncer.model.newest if record.fragment == 0]
        assert [(push.header.slot, push.weight) for push in record.responders] == [(1, 1.0)]
        assert np.array_equal(record.theta, np.full(LAYOUT.elements(0), -4.0, np.float32))
        await until(lambda: any(row.kind == "left-out" for row in bench.syncer.event_log.events))
        (told,) = [row for row in bench.syncer.event_log.events if row.kind == "left-out"]
        assert "the update of local-0" in told.message and core.phase is JobPhase.TRAINING
        assert core.ledger is not None and core.ledger.merged(0, 0) == 0 and not core.ledger.imbalances(0)


@pytest.mark.promise(
    "A push that is far larger than the parameters is refused, with all defaults and from the first merge on",
    section="Syncer",
)
async def test_a_push_that_is_far_larger_than_the_parameters_is_refused(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        for record in bench.syncer.model.newest:
            record.theta[:] = 1.0
        fields = bench.offer(1)
        for value in (3e38, 1e18, 20.5):
            refused = await bench.upload("a", np.full(LAYOUT.elements(0), value, np.float32), **fields)
            assert (refused.accepted, refused.reason) == (False, "out-of-scale")
        assert (await bench.upload("a", np.full(LAYOUT.elements(0), 19.5, np.float32), **fields)).accepted


def test_who_is_left_out_takes_no_part_in_the_weights_of_the_others() -> None:
    """The bound on tokens compares the others with each other then, as the audit does."""
    job = CoreConfig(places=(("r", 0),), rules=RoundRules(4, 0, 1, 0.9, grace_cap=2.0), encoding="float32")
    header = PushHeader(
        *(0, 0, 1, 1),
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=4,
        steps=4,
        tokens=1,
        compute_seconds=0.1,
        encoding="int4",
        layout_digest="",
        report=StepReport(),
        slot=0,
        incarnation=1,
    )
    responders = tuple(
        ev.Responder(replace(header, slot=slot, tokens=tokens), slot, weight, 0)
        for slot, (tokens, weight) in enumerate([(4000, 0.5), (1000, 0.3), (16, 0.2)])
    )
    merge = ev.Merge(0, 1, 1, responders, quorum_seconds=0.0, waited_seconds=0.0, job_tokens=0)
    rest = without_responder(merge, responders[0], job)
    assert [r.handle for r in rest.responders] == [1, 2]
    due = weigh_pushes("tokens-quality", [Work(1000, 4), Work(16, 4)], job.max_steps)
    assert [r.weight for r in rest.responders] == due == pytest.approx([16 / 17, 1 / 17])


# ------------------------------------------------------------------ slow readers


async def test_a_download_that_is_overtaken_goes_on_to_its_end(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        model = bench.syncer.model
        size = 4 * LAYOUT.elements(0)

        async def part(offset: int, version: int = 0, process: str = "a") -> bytes | None:
            return await bench.download(process, version, offset, size // 4)

        def overtake() -> None:
            old = model.newest[0]
            record = type(old)(job="shell", epoch=1, fragment=0, version=old.version + 1, theta=old.theta + 1, outer={})
            model.publish(record, model.encode(record, None), asyncio.get_running_loop().time())

        pieces = [await part(0)]
        for offset in (1, 2, 3):
            for _ in range(3):
                overtake()
            pieces.append(await part(offset * size // 4))
        assert b"".join(piece or b"" for piece in pieces) == bytes(size)
        # Through with it: the next merge lets it go. A version that nobody was reading is gone as well.
        overtake()
        assert await part(0) is None and await part(0, version=3) is None
        # However many read, few old versions are kept.
        for reader in range(20):
            bench.connect(10 + reader, 0, f"{reader}").welcomed = True
            assert await part(0, version=model.versions[0], process=f"{reader}")
            overtake()
        assert 0 < len(model.superseded[0]) <= 4
        model.drop_superseded(asyncio.get_running_loop().time() + 60)
        assert not model.superseded[0] and not len(model.downloads)


async def test_a_wrong_checksum_is_told_from_other_faults_by_its_kind(tmp_path: Path) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        for error, word in (
            (bulk.ChecksumError("altered"), "bad-checksum"),
            (limits.WireError("a checksum"), "bad-transfer"),
        ):

            async def broken(*_: Any, raised: Exception = error) -> Any:
                raise raised

            bench.syncer.bulk.uploads._receive = broken  # type: ignore[method-assign]
            assert (await bench.upload("a", b"x")).reason == word


@pytest.mark.promise("A signed control call cannot be replayed to the next syncer")
async def test_a_control_call_cannot_be_made_again_to_the_syncer_that_follows(tmp_path: Path) -> None:
    async def make(call: sync_pb2.SignedCall, bench: Bench) -> bytes:
        syncer = bench.syncer
        control = Control(
            KEY,
            syncer.core,
            syncer.driver.handle,
            syncer.durability.checkpoint,
            status=syncer.status_page.status,
            report=syncer.fetch_report,
        )
        return await control.call(call.SerializeToString(), Context())

    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        body = {"region": "local", "ordinal": 0, "process": "", "reason": "its pod is gone"}
        call = sign_call(KEY, "process-ended", json.dumps(body).encode(), time.time_ns() // 1_000_000 - 5000)
    async with Bench(tmp_path) as bench:
        bench.connect(2, 0, "b")
        with pytest.raises(AssertionError, match=r"PERMISSION_DENIED.*before this process began"):
            await make(call, bench)
        assert bench.syncer.core.slots[0].occupied, "the successor has not gone"
        fresh = sign_call(KEY, "status", b"{}", time.time_ns() // 1_000_000 + 1000)  # the service is made after it
        assert sync_pb2.CallReply.FromString(await make(fresh, bench)).ok


@pytest.mark.promise("A ledger that is not exact is noticed at the next checkpoint, in the log and as a metric")
async def test_a_ledger_that_is_not_exact_is_told_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        bench.report(1, 3)
        bench.syncer.driver.run_task(bench.syncer._check_ledger_every(0.01))
        await asyncio.sleep(0.05)
        assert "diloco_ledger_imbalances" in (page := exposition(bench.syncer.status_page.status).decode())
        assert 'diloco_ledger_imbalances{job="shell"} 0.0' in page and "ledger" not in caplog.text
        assert bench.syncer.core.ledger is not None
        bench.syncer.core.ledger.books[0].cells[1].merged += 7
        await until(lambda: bench.syncer.status_page.status().ledger_imbalances == 1)
        await asyncio.sleep(0.05)
        assert 'diloco_ledger_imbalances{job="shell"} 1.0' in exposition(bench.syncer.status_page.status).decode()
        assert ["slot 0 fragment 1" in row.imbalance for row in bench.syncer.report().ledger or ()] == [False, True]
    assert caplog.text.count("the ledger is not exact") == 1 and "slot 0 fragment 1" in caplog.text


# ------------------------------------------------------------------ faults


@pytest.mark.promise("A fault while answering one caller ends that caller's session only", section="Hostile callers")
async def test_a_fault_in_answering_one_caller_ends_that_callers_session(tmp_path: Path) -> None:
    """In a message to it, and in the answer to its push."""
    async with Bench(tmp_path) as bench:
        syncer = bench.syncer
        good, bad = bench.connect(1, 0, "a"), bench.connect(2, 1, "b")
        await bench.initialise("a")
        bench.report(1)
        wanted = sync_pb2.LearnerMessage(lease_request=sync_pb2.LeaseRequest())

        def fail(action: ev.GrantLease) -> None:
            if action.connection == 2:
                raise ValueError("Value out of range: 18446744073709551816")
            syncer.sessions.send_action(action)

        syncer.driver.on(ev.GrantLease, fail)
        for connection in (bad, good):
            syncer.sessions._handle_message(connection, wanted)
        await until(lambda: bad.closing and not syncer.driver._actions)
        said = sync_pb2.SyncerMessage.FromString(bad.queue[-1])
        assert (said.refusal.reason, said.refusal.fatal) == ("fault", False)
        assert not good.closing
        await until(lambda: sync_pb2.SyncerMessage.FromString(good.queue[-1]).WhichOneof("kind") == "lease")

        def refuse(_: Any) -> None:
            raise ZeroDivisionError

        syncer.driver.on(ev.AnswerPush, refuse)
        with pytest.raises(ZeroDivisionError):
            await bench.upload("a", np.zeros(LAYOUT.elements(0), np.float32), **bench.offer(1))
        assert not syncer.driver.outcome.done()
        # What answers nobody still ends the process: it must not go on as if it had been done.
        syncer.driver.on(ev.RecordEvent, refuse)
        syncer.driver.handle(ev.ConnectionLost(1))
        await until(syncer.driver.outcome.done)


@pytest.mark.promise("A learner takes no end of its session for a confirmation that the syncer has not given")
@pytest.mark.parametrize("read", [True, False])
async def test_a_syncer_that_ends_confirms_no_drained_that_it_has_not_read(tmp_path: Path, read: bool) -> None:
    """A learner takes a stream that ends as OK after its half-close for the confirmation, and does not come again."""

    class Call(Context):
        async def abort(self, code: Any, details: str) -> None:
            raise ConnectionAbortedError(code.name)

    messages: asyncio.Queue[sync_pb2.LearnerMessage | None] = asyncio.Queue()

    async def stream() -> AsyncIterator[bytes]:
        while (message := await messages.get()) is not None:
            yield message.SerializeToString()

    join = {"process": "a", "region": "local", "layout_digest": LAYOUT.digest, "attempt": 1}
    joined = sync_pb2.Join(format=limits.FORMAT, job="shell", role=sync_pb2.ROLE_LEARNER, **join)
    messages.put_nowait(sync_pb2.LearnerMessage(join=joined))
    async with Bench(tmp_path) as bench:
        call = Call()
        serving = asyncio.create_task(bench.syncer.sessions.serve(stream(), call))
        await until(lambda: bool(call.sent))
        drained = (sync_pb2.LearnerMessage(drained=sync_pb2.Drained()), None)
        if read:
            for message in drained:
                messages.put_nowait(message)
            await asyncio.wait_for(serving, 60)
            assert bench.syncer.core.slots[0].state is SlotState.DRAINED
        else:
            bench.syncer.sessions.end_all()
            for message in drained:  # they were on their way
                messages.put_nowait(message)
            with pytest.raises(ConnectionAbortedError, match="UNAVAILABLE"):
                await asyncio.wait_for(serving, 60)


@pytest.mark.promise(
    "Empty calls of one certificate are limited, and a session's messages and uploads are limited in "
    "rate: other clients are not held up",
    section="Hostile callers",
)
async def test_messages_and_uploads_of_a_session_are_taken_at_a_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five at once, and then one in a thousand seconds: the rest waits in the connection, and nobody else does."""
    monkeypatch.setattr(connection_limits, "MESSAGES_AT_ONCE", 5)
    monkeypatch.setattr(connection_limits, "MESSAGES_PER_SECOND", 0.001)
    read: Counter[str] = Counter()

    async def reports(process: str, count: int) -> AsyncIterator[bytes]:
        for number in range(1, count + 1):
            read[process] += 1
            yield sync_pb2.LearnerMessage(report=sync_pb2.Report(echo=number)).SerializeToString()

    async with Bench(tmp_path) as bench:
        sessions, flooding, other = bench.syncer.sessions, bench.connect(1, 0, "a"), bench.connect(2, 1, "b")
        reading = asyncio.create_task(sessions._read(reports("a", 20), flooding))
        for _ in range(5):
            await flooding.pace_upload()
        sixth = asyncio.create_task(flooding.pace_upload())
        for _ in range(100):
            await asyncio.sleep(0)
        assert read["a"] == 6 and not reading.done() and not sixth.done()
        await sessions._read(reports("b", 5), other)
        await other.pace_upload()
        assert read["b"] == 5 and not other.closing
        for task in (reading, sixth):
            task.cancel()
        await asyncio.gather(reading, sixth, return_exceptions=True)


@pytest.mark.promise(
    "A superseded syncer leaves the tape to its successor; a syncer whose predecessor wrote a line at the "
    "last moment starts again from the store"
)
async def test_a_line_that_a_predecessor_wrote_at_the_last_moment_begins_the_syncer_anew(tmp_path: Path) -> None:
    def record(version: int) -> MergeRecord:
        return MergeRecord(
            "shell", 1, 0, version, theta=np.full(LAYOUT.elements(0), version, np.float32), number=version
        )

    predecessor = Tape(DirectoryStore(tmp_path))
    async with Bench(tmp_path) as bench:
        predecessor.append(record(1))
        predecessor.flush()
        bench.syncer.driver.run_task(bench.syncer.durability.write_merge_record(record(1)))
        assert await asyncio.wait_for(bench.syncer.driver.outcome, 20) == RESTART
    async with Bench(tmp_path) as bench:
        assert bench.syncer.durability.tape.previous == predecessor.previous, "it goes on from that line"
        assert not bench.syncer.driver.outcome.done()


@pytest.mark.promise(
    "The grace window is what the overlap leaves after quorum, merge, durability and broadcast, as measured (Eq. 3)"
)
async def test_a_version_counts_as_sent_when_all_parts_of_it_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        told: list[object] = []
        monkeypatch.setattr(bench.syncer.bulk.downloads.callers, "emit", told.append)
        half = 2 * LAYOUT.elements(0)
        await bench.download("a", 0, half)
        assert await bench.download("a", 9) is None and not told
        await bench.download("a", 0, 0, half)
        assert told == [ev.VersionSent(1, 0, 0)]


@pytest.mark.promise(
    "If a holder of lost versions stops sending, it is given up after a minute, however large the "
    "versions are; several holders of the same versions send in parallel"
)
async def test_bytes_of_a_lost_version_are_told_to_the_core_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path) as bench:
        told: list[object] = []
        monkeypatch.setattr(bench.syncer.versions, "emit", told.append)
        for fragment in (0, 0, 1, 0, 1):
            bench.syncer._note_chunk(("version", 7, fragment), "a", 1)
        bench.syncer._note_chunk(("push", "id", "a"), "a", 1)
        assert told == [ev.LostVersionAdvanced(7, 0), ev.LostVersionAdvanced(7, 1)]
        bench.syncer.versions._tell_at.clear()
        bench.syncer._note_chunk(("version", 7, 0), "a", 1)
        assert told[2:] == [ev.LostVersionAdvanced(7, 0)]


@pytest.mark.promise(
    "An optimizer state of any size reaches a new learner, and the checkpoint, as long as bytes keep "
    "arriving; all new learners that wait share one transfer"
)
async def test_a_state_is_alive_while_its_sender_uploads_something_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path) as bench:
        told: list[object] = []
        relay, note = bench.syncer.relay, bench.syncer._note_chunk
        monkeypatch.setattr(relay, "_emit", told.append)
        relay.expect_upload(5, 1, "a", checkpoint=False)

        def noted(key: tuple[object, ...], process: str, count: int) -> bool:
            relay._expected[5].tell_at = 0.0
            told.clear()
            note(key, process, count)
            return told == [ev.PeerStateAdvanced(5)]

        assert noted(("peer", 5), "a", 1) and noted(("push", "id", "a"), "a", OVERTAKEN_BYTES - 1)
        assert not noted(("push", "id", "b"), "b", 1)
        assert not noted(("push", "id", "a"), "a", 1), "of the state nothing comes"
        relay.expect_upload(5, 2, "a", checkpoint=False)
        assert not noted(("push", "id", "a"), "a", 1), "nor in its sender's next session"
        assert noted(("peer", 5), "a", 1)
        note(("peer", 5), "a", 1)
        assert len(told) == 1, "once a second"


@pytest.mark.promise(
    "A disk that takes its time with an optimizer state or frozen parameters holds up nothing else of the syncer"
)
async def test_a_disk_that_takes_its_time_with_a_state_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for a state takes as long as its bytes on some volumes (NFS, tmpfs), and reading it for its checksum too."""
    goes_on, threads, allocate, checksum = threading.Event(), set[int](), Spool.allocate, bulk.checksum

    def allocate_slowly(spool: Spool, size: int) -> Any:
        if not goes_on.wait(20):
            raise OSError(errno.EIO, "the event loop waits for the disk")
        return allocate(spool, size)

    def watch_checksum(data: Any) -> int:
        threads.add(threading.get_ident())
        return checksum(data)

    monkeypatch.setattr(Spool, "allocate", allocate_slowly)
    async with Bench(tmp_path) as bench:
        for number, process in ((1, "a"), (2, "b")):
            bench.connect(number, number - 1, process)
        await bench.initialise("a")
        relay = bench.syncer.relay
        relay.expect_upload(5, 1, "a", checkpoint=False)
        state = sync_pb2.PeerState(transfer=5)
        sending = asyncio.create_task(bench.upload("a", b"a state", peer_state=state))
        await asyncio.sleep(0.1)
        delta = np.ones(LAYOUT.elements(0), np.float32)
        assert (await bench.upload("b", delta, **bench.offer(2))).accepted
        goes_on.set()
        assert (await sending).accepted
        relay.offer(5, "b")
        monkeypatch.setattr(bulk, "checksum", watch_checksum)
        sink, what = Sink(), sync_pb2.DownloadRequest.PEER_STATE
        asked = sync_pb2.DownloadRequest(format=limits.FORMAT, job="shell", process="b", what=what, transfer=5)
        await bench.syncer.bulk.downloads.serve(asked, sink, Peer())
        assert bytes(sink.sent) == b"a state"
    assert threads and threading.get_ident() not in threads


async def test_what_stands_in_for_a_version_is_not_served_where_the_job_is_suspended_meanwhile(tmp_path: Path) -> None:
    """The store was emptied, and a learner gives back what it holds of it."""
    Epoch.claim(DirectoryStore(tmp_path))
    held = Held(1, 1, 1), Held(1, 0, 1)
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a", before=1, held=held)
        zeros = [np.zeros(LAYOUT.elements(p), np.float32) for p in (0, 1)]
        await bench.initialise(
            "a",
            before_done=lambda: bench.syncer.driver.handle(ev.EndRequested(JobPhase.SUSPENDED, "suspended")),
            receipts=[bench.receipt(0, 1, zeros[0]), bench.receipt(1, 0, zeros[1])],
        )
        assert bench.syncer.core.phase is JobPhase.SUSPENDED and not bench.syncer.core.initialised
        assert bench.syncer.model.layout is None and not bench.syncer.model.broadcasts
        assert await asyncio.wait_for(asyncio.shield(bench.syncer.driver.outcome), 20) == SyncerExit.OK
    async with Bench(tmp_path) as bench:
        assert bench.syncer.core.is_recovering and bench.syncer.core.versions == [0, 0]
        bench.connect(1, 0, "a", before=1, held=held)
        assert bench.syncer.core.phase is JobPhase.WAITING


OWN = np.full(LAYOUT.elements(0), 666.0, np.float32)  # a model of a learner's own
THEIRS = np.ones(LAYOUT.elements(0), np.float32)  # what was announced


@pytest.mark.promise(
    "No learner can put a model of its own in place of a version that the store lost: only what this job's syncers "
    "announced is taken back, and a refusal is reported",
    section="Syncer",
)
@pytest.mark.parametrize("forged", ["values", "receipt of another version", "another key", "no receipt"])
async def test_a_model_of_a_learners_own_takes_no_lost_versions_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: str
) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        await until(lambda: not bench.syncer.driver._actions)
        told: list[object] = []
        monkeypatch.setattr(bench.syncer.versions, "emit", told.append)
        monkeypatch.setattr(bench.syncer.core, "check_version_upload", lambda *_: "")
        receipt = {
            "values": bench.receipt(0, 3, THEIRS),
            "receipt of another version": bench.receipt(0, 2, OWN),
            "another key": bench.receipt(0, 3, OWN, b"w" * 32),
            "no receipt": b"",
        }[forged]
        base = sync_pb2.Base(fragment=0, epoch=1, version=3, encoding="float32", receipt=receipt)
        reply = await bench.upload("a", OWN, base=base)
        assert (reply.accepted, reply.reason) == (False, "base")
        failed = told[-1]
        assert isinstance(failed, ev.LostVersionFailed) and failed.not_believed == reply.message
        assert bench.syncer.model.versions == [0, 0] and bench.syncer.durability.tape.newest == {}
        base.receipt = bench.receipt(0, 3, THEIRS)
        assert (await bench.upload("a", THEIRS, base=base)).accepted


def test_a_receipt_proves_one_version_of_one_fragment_of_one_model() -> None:
    tags = VersionTags(KEY, "shell")
    announced = Announced(3, content_digest(THEIRS), ())
    made = tags.make(announced, 0, "float32", "m")
    assert tags.check(made, 0, "float32", "m") == announced
    for fragment, encoding, model in ((1, "float32", "m"), (0, "bfloat16", "m"), (0, "float32", "n")):
        with pytest.raises(limits.WireError, match="tag is wrong"):
            tags.check(made, fragment, encoding, model)
    for others in (VersionTags(KEY, "another"), VersionTags(b"w" * 32, "shell")):
        with pytest.raises(limits.WireError, match="tag is wrong"):
            others.check(made, 0, "float32", "m")
    row = SlotReceipt(0, 1, 2, 3, sequence=4, version=2, last_step=6, compute_seconds=0.5)
    for changed in (announced._replace(version=4), announced._replace(rows=(row,)), announced._replace(digest=b"d")):
        forged = sync_pb2.Receipt.FromString(tags.make(changed, 0, "float32", "m"))
        forged.tag = sync_pb2.Receipt.FromString(made).tag
        with pytest.raises(limits.WireError, match="tag is wrong"):
            tags.check(forged.SerializeToString(), 0, "float32", "m")
    assert tags.make(announced._replace(rows=(row,) * 2000), 0, "float32", "m") == b"", "a header has no room for it"


@pytest.mark.promise(
    "An emptied store whose control key is lost as well takes no model back: the job waits, and says what to do",
    section="Syncer",
)
@pytest.mark.parametrize("forged", ["values", "another key", "no receipt", "merged for version 0"])
async def test_an_emptied_store_is_rebuilt_of_nothing_that_was_not_announced(tmp_path: Path, forged: str) -> None:
    Epoch.claim(DirectoryStore(tmp_path))
    held = Held(1, 0, 1), Held(1, 0, 1)
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a", before=1, held=held)
        bench.connect(2, 1, "b", before=2, held=held)  # only when all are here is version 0 given back
        asked = bench.syncer.core.initialiser or 1
        uploader = {1: "a", 2: "b"}[asked]
        values = [np.full(LAYOUT.elements(p), 666.0, np.float32) for p in (0, 1)]
        receipts = [bench.receipt(p, int(forged.startswith("merged")), values[p]) for p in (0, 1)]
        if forged == "values":
            receipts[1] = bench.receipt(1, 0, np.zeros(LAYOUT.elements(1), np.float32))
        elif forged == "another key":
            receipts[1] = bench.receipt(1, 0, values[1], b"w" * 32)
        elif forged == "no receipt":
            receipts = [b"", b""]
        reply = await bench.initialise(uploader, receipts=receipts, values=666.0, accepted=False)
        assert reply.reason == "initial" and not DirectoryStore(tmp_path).exists("initial.json")
        await until(lambda: any("is not believed" in row.message for row in bench.syncer.event_log.events))
        core = bench.syncer.core
        assert core.initialiser is None and core.is_recovering and not core.initialised
        assert not core.version_0_origins(asked), "it is not asked again"


async def test_the_record_of_a_lost_version_is_made_though_its_sender_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is slow, and the call ends first: what the store may have by then the core hears of."""
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        await until(lambda: not bench.syncer.driver._actions)
        told: list[object] = []
        monkeypatch.setattr(bench.syncer.versions, "emit", told.append)
        monkeypatch.setattr(bench.syncer.core, "check_version_upload", lambda *_: "")
        values = np.ones(LAYOUT.elements(0), np.float32)
        base = sync_pb2.Base(fragment=0, epoch=1, version=3, encoding="float32", receipt=bench.receipt(0, 3, values))
        with held_up(bench.syncer):
            call = asyncio.create_task(bench.upload("a", values, base=base))
            await until(lambda: ev.LostVersionAccepted(0) in told)
            call.cancel()
            await asyncio.wait((call,))
        await until(lambda: ev.LostVersionStored(0) in told)
        assert bench.syncer.durability.tape.newest == {0: 3}
        assert (await bench.upload("a", values[: LAYOUT.elements(1)], base=sync_pb2.Base(fragment=1))).reason == "base"
        other = np.ones(LAYOUT.elements(1), np.float32)
        base.fragment, base.receipt = 1, bench.receipt(1, 3, other)
        assert (await bench.upload("a", other, base=base)).accepted
        assert told[-1] == ev.LostVersionStored(1) and not bench.syncer.driver.outcome.done()


async def test_a_sender_whose_version_cannot_be_made_durable_is_not_kept_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path) as bench:
        bench.connect(1, 0, "a")
        await bench.initialise("a")
        monkeypatch.setattr(bench.syncer.core, "check_version_upload", lambda *_: "")
        values = np.ones(LAYOUT.elements(0), np.float32)
        base = sync_pb2.Base(fragment=0, epoch=1, version=3, encoding="float32", receipt=bench.receipt(0, 3, values))
        Epoch.claim(DirectoryStore(tmp_path))
        with pytest.raises(HigherEpoch):
            await asyncio.wait_for(bench.upload("a", values, base=base), 20)
        assert await asyncio.wait_for(asyncio.shield(bench.syncer.driver.outcome), 20) == SyncerExit.SUPERSEDED


@pytest.mark.promise(
    "A drain waits for an offer whose bytes arrive, however slow its link is, on both sides and within a bound"
)
async def test_bytes_of_a_push_are_told_to_the_core_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(tmp_path) as bench:
        told: list[object] = []
        monkeypatch.setattr(bench.syncer.pushes, "emit", told.append)
        for _ in range(3):
            bench.syncer._note_chunk(("push", "id", "a"), "a", 1)
        bench.syncer._note_chunk(("initial", 0), "a", 1)
        assert told == [ev.PushAdvanced()]
        bench.syncer.pushes._tell_at = 0.0
        bench.syncer._note_chunk(("initial", 0), "a", 1)
        assert len(told) == 1
        bench.syncer._note_chunk(("push", "id", "a"), "a", 1)
        assert len(told) == 2
