"""Asking syncers and learners, over real gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from pydantic import RootModel

from diloco_operator.metrics import Metrics
from diloco_operator.model import Call, ProgramAnswer
from diloco_operator.reconcile import syncer_poller
from diloco_operator.reconcile.syncer_poller import NOT_ASKED, SyncerPoller
from diloco_protocol.common.http_server import HttpServer, json_page
from diloco_protocol.documents import LearnerPage
from diloco_protocol.wire import convert, sync_pb2
from diloco_protocol.wire.control_auth import CallRefused, NonceCache, sign_reply, verify_call
from free_ports import free_port
from patience import until
from status_documents import job_report, learner_page, status_document

KEY = b"k" * 64
EVENT = {"n": 1, "time": 1.0, "kind": "joined", "slot": 0, "incarnation": 1, "message": "joined"}
REPORT = job_report(outcome="complete", merges=7)
JOB = ("ns", "tiny")


class Syncer:
    """A control service that believes as the real one does, and answers what it is told to."""

    def __init__(self, key: bytes = KEY) -> None:
        self.key, self.nonces = key, NonceCache()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.status = status_document(phase="training", events=[EVENT] * 400).model_dump(mode="json")
        self.credulous = False  # takes any call
        self.body = b""  # sent instead of an answer
        self.free = asyncio.Event()  # unless it is set no call is answered
        self.free.set()
        self.active = self.most = 0
        self.port = free_port()  # where it is started again
        self._server: Any = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(self._call)
        handler = grpc.method_handlers_generic_handler("diloco.v1.Control", {"Call": method})
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _call(self, raw: bytes, context: Any) -> bytes:
        call = convert.parse(sync_pb2.SignedCall, raw)
        try:
            if not self.credulous:
                verify_call(self.key, call, self.nonces)
        except CallRefused as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        self.calls.append((call.method, json.loads(call.body)))
        self.active += 1
        self.most = max(self.most, self.active)
        await self.free.wait()
        self.active -= 1
        answer = {"status": self.status, "report": REPORT.model_dump(mode="json")}.get(call.method, {})
        reply = sync_pb2.CallReply(ok=True, body=self.body or json.dumps(answer).encode())
        sign_reply(self.key, call.nonce, reply)
        return reply.SerializeToString()


@pytest.fixture
async def syncer(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Syncer()
    await made.start()
    monkeypatch.setattr(syncer_poller, "CONTROL_PORT", made.port)
    yield made
    await made.stop()


class Told:
    """Which jobs were answered for. ``then``: what is done about it, as a turn would."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.then: Callable[[], None] = lambda: None

    def __call__(self, key: Any) -> None:
        self.keys.append(key)
        asyncio.get_running_loop().call_soon(self.then)

    async def until(self, count: int) -> None:
        await until(lambda: len(self.keys) >= count, f"{count} answers")


def ask(poller: SyncerPoller, seconds: float = 30.0, pod: str = "pod-1", ip: str = "127.0.0.1", **more: Any) -> None:
    given: dict[str, Any] = {"control_key": KEY, "learners": {}, "report_wanted": True, **more}
    poller.schedule(JOB, seconds, (pod, ip), **given)


def outcome(metrics: Metrics, method: str, word: str) -> float:
    return float(
        metrics.registry.get_sample_value("diloco_operator_syncer_calls_total", {"method": method, "outcome": word})
        or 0
    )


async def test_a_syncer_is_asked_at_once_and_then_as_often_as_wanted(
    syncer: Syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncer_poller, "MIN_SECONDS", 0.0)
    told, metrics = Told(), Metrics()
    poller = SyncerPoller(metrics, 4, 60.0, told)
    began, wall = time.monotonic(), time.time()
    told.then = lambda: ask(poller, 0.2)
    ask(poller, 0.2)
    await told.until(3)
    assert time.monotonic() - began > 0.35
    asked, learners, report = poller.latest_answers(JOB, "pod-1")
    assert asked is not None and asked.document == status_document(**syncer.status)
    assert asked.error == "" and asked.failing_since is None and wall <= asked.at <= time.time()
    assert (learners, report) == ({}, None)
    assert {method for method, _ in syncer.calls} == {"status"}
    assert outcome(metrics, "status", "ok") == len(syncer.calls)
    await poller.close()


async def test_asking_often_is_bounded(syncer: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncer_poller, "MIN_SECONDS", 60.0)
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    told.then = lambda: ask(poller, 0.0)
    ask(poller, 0.0)
    await told.until(1)
    await asyncio.sleep(0.2)
    assert len(syncer.calls) == 1
    await poller.close()


async def test_nobody_is_asked_again_before_the_answer_was_looked_at(
    syncer: Syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncer_poller, "MIN_SECONDS", 0.0)
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    ask(poller, 0.02)
    await told.until(1)
    await asyncio.sleep(0.3)
    assert len(syncer.calls) == 1
    ask(poller, 0.02)
    await told.until(2)
    await poller.close()


async def test_since_when_nobody_answers_and_that_somebody_does_again(
    syncer: Syncer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(syncer_poller, "MIN_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "diloco_operator")
    told, metrics = Told(), Metrics()
    poller = SyncerPoller(metrics, 4, 60.0, told)
    await syncer.stop()
    before = time.monotonic()
    told.then = lambda: ask(poller, 0.05)
    ask(poller, 0.05)
    await told.until(3)
    first, _, _ = poller.latest_answers(JOB, "pod-1")
    assert first is not None and first.document is None and "unavailable" in first.error
    assert first.failing_since is not None and before <= first.failing_since <= time.monotonic()
    # The pod is replaced: the answers of the one before are none of its own, but how long nobody
    # answered goes on.
    other, _, _ = poller.latest_answers(JOB, "pod-2")
    assert other == ProgramAnswer(None, other.error if other else "", first.at, first.failing_since)
    await syncer.start()

    def answered() -> ProgramAnswer | None:
        now = poller.latest_answers(JOB, "pod-1")[0]
        return now if now is not None and now.document is not None else None

    assert (await until(answered)).failing_since is None
    said = [record.message for record in caplog.records]
    assert len([line for line in said if "does not answer" in line]) == 1
    assert len([line for line in said if "answers again" in line]) == 1
    assert outcome(metrics, "status", "unreachable") >= 3
    await poller.close()


async def test_a_wrong_key_is_refused_and_said(syncer: Syncer) -> None:
    told, metrics = Told(), Metrics()
    poller = SyncerPoller(metrics, 4, 60.0, told)
    ask(poller, control_key=b"w" * 64)
    await told.until(1)
    asked, _, _ = poller.latest_answers(JOB, "pod-1")
    assert asked is not None and asked.document is None and "wrong signature" in asked.error
    assert outcome(metrics, "status", "refused") == 1
    await poller.call(JOB, "127.0.0.1", b"w" * 64, [Call("checkpoint", {})] * 2)
    assert outcome(metrics, "checkpoint", "refused") == 2
    assert syncer.calls == []
    await poller.close()


async def test_who_answers_in_the_syncers_place_is_not_believed(syncer: Syncer) -> None:
    syncer.credulous, syncer.key = True, b"x" * 64
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    ask(poller)
    await told.until(1)
    asked, _, _ = poller.latest_answers(JOB, "pod-1")
    assert asked is not None and asked.document is None and "not signed with the control key" in asked.error
    await poller.close()


async def test_a_syncer_that_hangs_holds_up_nobody(syncer: Syncer) -> None:
    syncer.free.clear()
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 0.2, told)
    ask(poller)
    await told.until(1)
    asked, _, _ = poller.latest_answers(JOB, "pod-1")
    assert asked is not None and "deadline exceeded" in asked.error
    await poller.close()


@pytest.mark.promise(
    "A syncer's answer counts as of the time of the question: a failure that was counted meanwhile ends "
    "no job that has merged"
)
async def test_a_syncers_answer_is_dated_by_when_it_was_asked_for(syncer: Syncer) -> None:
    """What happens while an answer is on its way is not in it."""
    syncer.free.clear()
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    before = time.time()
    ask(poller)
    await until(lambda: syncer.active)
    on_its_way = time.time()
    syncer.free.set()
    await told.until(1)
    asked, _, _ = poller.latest_answers(JOB, "pod-1")
    assert asked is not None and asked.document is not None and before <= asked.at <= on_its_way
    await poller.close()


async def test_a_learners_answer_is_dated_by_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, free = asyncio.Event(), asyncio.Event()
    page = learner_page().model_dump_json().encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await free.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    monkeypatch.setattr(syncer_poller, "WORKER_PORT", server.sockets[0].getsockname()[1])
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    before = time.time()
    poller.schedule(JOB, 30.0, None, None, {"l-0": ("pod-1", "127.0.0.1")}, False)
    await until(asked.is_set)
    on_its_way = time.time()
    free.set()
    await told.until(1)
    answer = poller.latest_answers(JOB, None)[1]["l-0"]
    assert answer.document is not None and before <= answer.at <= on_its_way
    await poller.close()
    server.close()


async def test_no_more_than_so_many_calls_at_once(syncer: Syncer) -> None:
    syncer.free.clear()
    told = Told()
    poller = SyncerPoller(Metrics(), 3, 60.0, told)
    for i in range(12):
        poller.schedule((f"ns-{i}", "j"), 30.0, (f"p{i}", "127.0.0.1"), KEY, {}, True)
    await until(lambda: syncer.active == 3)
    await asyncio.sleep(0.05)  # for a fourth, were it let
    syncer.free.set()
    await told.until(12)
    assert syncer.most == 3
    await poller.close()


async def test_the_report_is_fetched_once_when_the_end_is_said_and_only_if_it_is_wanted(
    syncer: Syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syncer_poller, "MIN_SECONDS", 0.0)
    syncer.status["phase"] = "complete"
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    told.then = lambda: ask(poller, 0.05, report_wanted=False)
    told.then()
    await told.until(2)
    assert poller.latest_answers(JOB, "pod-1")[2] is None
    told.then = lambda: ask(poller, 0.05, report_wanted=True)
    await told.until(5)
    assert poller.latest_answers(JOB, "pod-1")[2] == REPORT
    assert [method for method, _ in syncer.calls].count("report") == 1
    syncer.status["phase"] = "training"  # its stop was raised: it goes on
    await told.until(8)
    assert poller.latest_answers(JOB, "pod-1")[2] is None
    await poller.close()


async def test_a_new_pod_is_asked_at_once_and_no_pod_not_at_all(syncer: Syncer) -> None:
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    ask(poller, 30.0, pod="pod-1")
    await told.until(1)
    ask(poller, 30.0, pod="pod-2")
    await told.until(2)
    assert poller.latest_answers(JOB, None)[0] is None
    poller.schedule(JOB, 0.0, None, KEY, {}, True)
    await asyncio.sleep(0.1)
    assert len(syncer.calls) == 2
    poller.forget(JOB)
    assert poller.latest_answers(JOB, None) == (None, {}, None)
    # A pod that was not asked yet is not no pod: an operator that begins anew knows of one.
    assert poller.latest_answers(JOB, "pod-2") == (ProgramAnswer(None, NOT_ASKED), {}, None)
    await poller.close()


async def test_calls_say_what_they_are_told_to(syncer: Syncer) -> None:
    poller = SyncerPoller(Metrics(), 4, 60.0, lambda key: None)
    gone = Call("process-ended", {"region": "local", "ordinal": 1, "process": "", "reason": "pod deleted"})
    end = Call("announce", {"phase": "suspended", "message": "x"})
    await poller.call(JOB, "127.0.0.1", KEY, [gone, end])
    assert syncer.calls == [(gone.method, gone.body), (end.method, end.body)]
    await poller.close()


async def test_of_many_calls_that_nobody_answers_only_the_first_is_waited_for(syncer: Syncer) -> None:
    syncer.free.clear()
    metrics = Metrics()
    poller = SyncerPoller(metrics, 4, 0.3, lambda key: None)
    calls = [Call("process-ended", {"region": "local", "ordinal": i}) for i in range(20)]
    await poller.call(JOB, "127.0.0.1", KEY, calls)
    assert outcome(metrics, "process-ended", "unreachable") == 1
    await poller.close()


async def test_learners_pages_are_read_where_the_syncer_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    page: Callable[[], LearnerPage] = lambda: learner_page(phase="suspended")  # noqa: E731
    server = HttpServer({"/status": json_page(page)})
    port = await server.start("127.0.0.1", 0)
    monkeypatch.setattr(syncer_poller, "WORKER_PORT", port)
    told, metrics = Told(), Metrics()
    poller = SyncerPoller(metrics, 4, 60.0, told)
    poller.schedule(JOB, 5.0, None, KEY, {"tiny-b-0": ("u0", "127.0.0.1"), "tiny-b-1": ("u1", "::1")}, True)
    await told.until(1)
    _, learners, _ = poller.latest_answers(JOB, None)
    assert learners["tiny-b-0"].document == page()
    assert learners["tiny-b-1"].document is None and learners["tiny-b-1"].failing_since is not None
    assert outcome(metrics, "learner-status", "ok") == 1
    # A pod that is not there any more says nothing, nor does its successor before it was asked.
    poller.schedule(JOB, 5.0, None, KEY, {"tiny-b-0": ("u9", "127.0.0.1")}, True)
    assert poller.latest_answers(JOB, None)[1] == {}
    await poller.close()
    await server.stop()


@pytest.mark.parametrize(
    ("field", "junk", "said"),
    [
        ("merges", "many", "merges: Input should be a valid integer"),
        ("slots", [{"slot": 0}], "slots.0.retired: Field required"),
        ("versions", None, "versions: Input should be a valid list"),
        ("phase", "asleep", "phase: Input should be"),
        ("refusals", [{"role": "learner"}], "refusals.0.region: Field required"),
    ],
)
async def test_a_status_that_is_not_understood_is_no_answer_and_its_field_is_named(
    syncer: Syncer, field: str, junk: Any, said: str
) -> None:
    syncer.status[field] = junk
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    ask(poller)
    await told.until(1)
    asked, _, _ = poller.latest_answers(JOB, "pod-1")
    assert asked is not None and asked.document is None and said in asked.error and asked.failing_since is not None
    await poller.close()


async def test_a_field_that_is_not_known_is_left_out(syncer: Syncer) -> None:
    expected = status_document(**syncer.status)
    syncer.status["of_another_release"] = 1
    told = Told()
    poller = SyncerPoller(Metrics(), 4, 60.0, told)
    ask(poller)
    await told.until(1)
    asked, _, _ = poller.latest_answers(JOB, "pod-1")
    assert asked is not None and asked.document == expected
    await poller.close()


@pytest.mark.parametrize("junk", ["many", 1.5, [3]])
async def test_a_learners_page_that_is_not_understood_is_no_answer(monkeypatch: pytest.MonkeyPatch, junk: Any) -> None:
    content = learner_page().model_dump(mode="json") | {"merges": junk}
    server = HttpServer({"/status": json_page(lambda: RootModel(content))})
    monkeypatch.setattr(syncer_poller, "WORKER_PORT", await server.start("127.0.0.1", 0))
    told, metrics = Told(), Metrics()
    poller = SyncerPoller(metrics, 4, 60.0, told)
    poller.schedule(JOB, 5.0, None, KEY, {"tiny-b-0": ("u0", "127.0.0.1")}, True)
    await told.until(1)
    answer = poller.latest_answers(JOB, None)[1]["tiny-b-0"]
    assert answer.document is None and answer.error.startswith("its status page: merges: ")
    assert outcome(metrics, "learner-status", "failed") == 1
    await poller.close()
    await server.stop()


async def _drip_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _drip_body(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def _no_end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000)
    await writer.drain()


async def _too_much(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")


async def _nested(writer: asyncio.StreamWriter) -> None:
    page = b'{"a":' * 40_000
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)


async def _garbage(writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xff\r\n\r\n" * 100)


@pytest.mark.promise(
    "A job's programs cannot hold up the operator, whatever they answer: one deadline, few bytes, a "
    "bounded share of its calls",
    section="Hostile callers",
)
@pytest.mark.parametrize(
    ("answer", "seconds", "said"),
    [
        (_drip_head, 0.5, "TimeoutError"),
        (_drip_body, 0.5, "TimeoutError"),
        (_no_end, 30.0, "ValueError"),
        (_too_much, 30.0, "ValueError"),
        (_nested, 30.0, "its status page"),
        (_garbage, 30.0, "ValueError"),
    ],
)
async def test_a_learners_pod_cannot_hold_up_the_operator_whatever_it_answers(
    monkeypatch: pytest.MonkeyPatch, answer: Any, seconds: float, said: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await answer(writer)
            await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    monkeypatch.setattr(syncer_poller, "WORKER_PORT", server.sockets[0].getsockname()[1])
    told = Told()
    poller = SyncerPoller(Metrics(), 4, seconds, told)
    poller.schedule(JOB, 30.0, None, None, {"l-0": ("pod-1", "127.0.0.1")}, False)
    await told.until(1)
    _, learners, _ = poller.latest_answers(JOB, None)
    assert learners["l-0"].document is None and said in learners["l-0"].error
    await poller.close()
    server.close()


@pytest.mark.promise(
    "A job's programs cannot hold up the operator, whatever they answer: one deadline, few bytes, a "
    "bounded share of its calls",
    section="Hostile callers",
)
async def test_a_syncers_answer_is_bounded_and_parsed_without_harm(syncer: Syncer) -> None:
    told = Told()
    for body, said in ((b"[" + b"{}," * 2_000_000 + b"{}]", "larger than max"), (b'{"a":' * 100_000, "recursion")):
        syncer.body = body
        poller = SyncerPoller(Metrics(), 4, 60.0, told)
        ask(poller)
        await told.until(len(told.keys) + 1)
        asked, _, _ = poller.latest_answers(JOB, "pod-1")
        assert asked is not None and asked.document is None and said in asked.error.lower(), asked
        await poller.close()


@pytest.mark.promise(
    "A job's programs cannot hold up the operator, whatever they answer: one deadline, few bytes, a "
    "bounded share of its calls",
    section="Hostile callers",
)
async def test_a_namespace_whose_programs_stall_stalls_no_other(syncer: Syncer) -> None:
    told = Told()
    poller = SyncerPoller(Metrics(), 8, 60.0, told)
    syncer.free.clear()
    for number in range(16):
        poller.schedule(
            ("hostile", f"job-{number}"), 30.0, ("pod", "127.0.0.1"), control_key=KEY, learners={}, report_wanted=False
        )
    await until(lambda: syncer.active == 2)
    syncer.free = asyncio.Event()  # of the next call; those that are under way stay unanswered
    syncer.free.set()
    ask(poller)
    await told.until(1)
    assert told.keys == [JOB] and syncer.most <= 3
    await poller.close()
