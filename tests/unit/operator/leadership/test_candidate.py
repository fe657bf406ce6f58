"""Operators as candidates, with the operator's own requests, on a server of this test that has a Lease."""

from __future__ import annotations

import asyncio
import http.server
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import kubernetes.client
import pytest

from diloco_operator.kube.api import Api, NotLeading
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import CONFIG_MAP
from diloco_operator.leadership import candidate as candidates
from diloco_operator.leadership.candidate import Candidate, LeaseStore
from diloco_operator.leadership.election import ACT_SECONDS, LEASE_SECONDS
from diloco_operator.metrics import Metrics
from diloco_operator.model import Call, Key
from diloco_operator.reconcile import syncer_poller
from diloco_operator.reconcile.leading import run_while_leading
from diloco_operator.reconcile.syncer_poller import SyncerPoller
from diloco_operator.reconcile.workqueue import WorkQueue
from free_ports import closed_port
from operator_simulation import virtual_time
from operator_simulation.api_server import ApiServer, SimulatedApi, SimulatedLease
from operator_simulation.kubernetes import now
from patience import until


class Server:
    """Leases and ConfigMaps, with versions, as the API server keeps them."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.away = False
        self.namespace = True
        self.written: list[str] = []  # what the operator wrote besides
        world = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*((200, world.lease) if world.lease else (404, {"message": "not found"})))

            def do_POST(self) -> None:
                self.answer(*world.create(self.path, self.body()))

            def do_PATCH(self) -> None:
                self.answer(*world.patch(self.path, self.body()))

            def body(self) -> Any:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, status: int, document: Any) -> None:
                if world.away:
                    status, document = 503, {"message": "not now"}
                text = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def create(self, path: str, body: Any) -> tuple[int, Any]:
        if self.away:
            return 503, {}
        if "leases" not in path:
            self.written.append(body["metadata"]["name"])
            return 201, body
        if not self.namespace:
            return 404, {"message": 'namespaces "ns" not found'}
        if self.lease is not None:
            return 409, {"message": "already exists"}
        return 201, self.store(body)

    def patch(self, path: str, body: Any) -> tuple[int, Any]:
        if self.away:
            return 503, {}
        if self.lease is None:
            return 404, {"message": "not found"}
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        return 200, self.store({**self.lease, **body})

    def store(self, lease: Any) -> Any:
        self.version += 1
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.version)}}
        return self.lease

    def holder(self) -> str:
        return self.lease["spec"]["holderIdentity"] if self.lease else ""


class Process:
    """An operator's candidate and its requests. ``late``: seconds that its clock is ahead, which a test may raise."""

    def __init__(self, server: Server, name: str) -> None:
        config = kubernetes.client.Configuration()
        config.host = f"http://127.0.0.1:{server.server.server_address[1]}"
        self.late = 0.0
        self.api = Api(config, 2, 5.0, seconds_for_a_write=lambda: self.candidate.seconds_for_a_write())
        store = LeaseStore(self.api.client, "ns", "diloco-operator", lambda *asked: None)
        self.candidate = Candidate(store, name, lambda: candidates.read_clock() + self.late)

    async def write(self, name: str) -> None:
        await self.api.create(CONFIG_MAP, "ns", {"metadata": {"name": name, "namespace": "ns"}})


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "RETRY_SECONDS", 0.02)


@asynccontextmanager
async def running(*processes: Process) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one.candidate.run()) for one in processes]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_leads_and_writes_and_the_other_writes_nothing(server: Server) -> None:
    first, second = Process(server, "first"), Process(server, "second")
    async with running(first):
        await until(first.candidate.leads)
        async with running(second):
            await until(lambda: second.candidate.has_read)
            await first.write("by-first")
            with pytest.raises(NotLeading):
                await second.write("by-second")
            assert not second.candidate.leads() and server.holder() == "first"
    assert server.written == ["by-first"]


@pytest.mark.promise("A leader that was paused writes nothing when it resumes, even before it learns of a new leader")
async def test_a_leader_that_stood_still_writes_nothing_when_it_goes_on(server: Server) -> None:
    """Its clock has gone on, and nobody has told it yet that another leads."""
    first, second = Process(server, "first"), Process(server, "second")
    async with running(first):
        await until(first.candidate.leads)
    first.late = ACT_SECONDS
    with pytest.raises(NotLeading):
        await first.write("late")
    async with running(second):
        await until(lambda: second.candidate.has_read)
        assert not second.candidate.leads()
        second.late = LEASE_SECONDS
        await until(second.candidate.leads)
        term = second.candidate.term
        async with running(first):
            await until(lambda: first.candidate.term == term)
            assert second.candidate.leads() and not first.candidate.leads()
    assert server.written == [] and server.holder() == "second"


@pytest.mark.promise("A standby sends no control call to a syncer")
async def test_calls_to_the_syncer_are_the_leaders(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(server, "first")
    poller = SyncerPoller(Metrics(), 1, 0.2, lambda key: None, leads=first.candidate.leads)
    calls = [Call("process-ended", {"process": "p"})]
    await poller.call(("ns", "j"), "127.0.0.1", b"k", calls)
    asked = poller.metrics.syncer_calls.labels("process-ended", "unreachable")
    assert asked._value.get() == 0, "not even tried"
    async with running(first):
        await until(first.candidate.leads)
        with closed_port() as port:
            monkeypatch.setattr(syncer_poller, "CONTROL_PORT", port)
            await poller.call(("ns", "j"), "127.0.0.1", b"k", calls)
    assert asked._value.get() == 1


async def test_a_lease_is_given_back_once_writes_have_ended(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Process(server, "first"), Process(server, "second")
    async with running(first):
        await until(first.candidate.leads)
    with monkeypatch.context() as patched:
        patched.setattr(candidates, "RELEASE_SECONDS", 0.3)
        await first.candidate.release(lambda: False)
    assert server.holder() == "first" and not first.candidate.leads(), "it ends by itself"
    async with running(first):
        await until(first.candidate.leads)
    await first.candidate.release(lambda: True)
    assert server.holder() == ""
    async with running(second):
        await until(second.candidate.leads)
    assert server.lease is not None and server.lease["spec"]["leaseTransitions"] == 2


async def test_without_an_api_server_it_leads_no_more_and_then_again(server: Server) -> None:
    first = Process(server, "first")
    async with running(first):
        await until(first.candidate.leads)
        server.away = True
        await until(lambda: first.candidate.problem)
        assert first.candidate.leads(), "for a while"
        first.late += ACT_SECONDS
        assert not first.candidate.leads()
        with pytest.raises(ApiError):
            await first.write("none")
        server.away = False
        await until(first.candidate.leads)
        assert not first.candidate.problem and first.candidate.term == 1, "nobody led meanwhile"


async def test_what_keeps_the_lease_from_being_made_is_told(server: Server) -> None:
    server.namespace = False
    first = Process(server, "first")
    async with running(first):
        await until(lambda: "not found" in first.candidate.problem)
    assert not first.candidate.leads() and not first.candidate.has_read


@pytest.mark.promise("A candidate learns of a new leader by notification, without polling the clock")
def test_who_leads_is_waited_for_and_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an hour nothing changes: the Lease is renewed, and nobody looks at the clock besides. Then it is lost."""
    monkeypatch.setattr(candidates, "RETRY_SECONDS", 2.0)
    made: list[Candidate] = []
    looks: list[float] = []
    turns: list[bool] = []  # whether it led
    server = ApiServer("hub")

    def clock() -> float:
        looks.append(now())
        return looks[-1]

    async def at_once() -> None:
        pass

    async def turn(key: Key) -> float:
        turns.append(made[0]._election.may_act(now()))
        return 0.5

    async def scenario() -> None:
        reached = True
        api = SimulatedApi(
            server, random.Random(0), lambda: reached, at_once, acted=lambda *act: None, seconds_for_a_write=lambda: 0.0
        )
        candidate = Candidate(SimulatedLease(api, "ns", "diloco-operator", skew=0.0), "one", clock)  # type: ignore[arg-type]
        made.append(candidate)
        queue = WorkQueue(turn, 1, clock=now)
        begun: list[bool] = []
        leading = run_while_leading(
            candidate, queue, lambda another: (begun.append(another), queue.add(("ns", "j")))[0]
        )
        tasks = [asyncio.create_task(candidate.run()), asyncio.create_task(leading)]
        await asyncio.sleep(3600)
        assert begun == [True] and len(turns) > 7000
        assert len(looks) < 5 * 3600 / 1.4
        reached = False
        await asyncio.sleep(60)
        assert not candidate.leads()
        before, reached = len(turns), True
        await asyncio.sleep(60)
        assert begun == [True, False] and len(turns) > before, "it is the same term: nobody else led"
        assert all(turns), "none is made by who does not lead"
        for task in tasks:
            task.cancel()

    virtual_time.run(scenario())
