"""A reflector against a server of this test: what an API server may send, break off, or refuse."""

from __future__ import annotations

import http.server
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes.client
import pytest

from diloco_operator.informer import reflector
from diloco_operator.informer.cache import Cache
from diloco_operator.informer.job_events import JobEvents
from diloco_operator.informer.reflector import Informer, Reflector
from diloco_operator.kube.api import Api
from diloco_operator.kube.kinds import CONFIG_MAP, JOB, NODE, POD, STATEFUL_SET
from diloco_operator.metrics import Metrics
from diloco_operator.model import Key, Object
from diloco_operator.settings import Settings
from patience import wait_until

Query = dict[str, str]
Reply = tuple[int, Any] | list[Object | float | bytes]
"""A status and a document; or a watch's events, seconds to wait between them, and lines that are sent as they are."""


def config_map(name: str, version: int, uid: str = "") -> Object:
    meta = {"namespace": "n", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**meta, "labels": {"diloco.io/job": f"job-{name}"}}}


def a_list(version: int, *items: Object, more: str = "") -> Reply:
    return 200, {"metadata": {"resourceVersion": str(version), "continue": more}, "items": items}


def event(what: str, obj: Object) -> Object:
    return {"type": what, "object": obj}


def bookmark(version: int) -> Object:
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


class World:
    """A server that answers requests in turn, and a reflector of ConfigMaps on it."""

    def __init__(self, replies: list[Reply]) -> None:
        self.replies = replies
        self.asked: list[Query] = []
        self.hooks: dict[int, Callable[[], Any]] = {}  # called before the answer to that request
        self.changed: set[Key] = set()
        self.cache = Cache()
        world = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                world.asked.append({key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()})
                world.hooks.get(len(world.asked), lambda: None)()
                world.answer(self, world.replies.pop(0) if world.replies else [60.0])

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        config = kubernetes.client.Configuration()
        config.host = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.metrics = Metrics()
        self.api = Api(config, 2, 5.0, self.metrics.request, streams=2)
        self.states: list[tuple[bool, str | None]] = []
        self.stream = Reflector(
            CONFIG_MAP,
            None,
            self.api,
            self.cache,
            metrics=self.metrics,
            changed=self.changed.update,
            state_changed=lambda stream: self.states.append((stream.synced, stream.denied)),
        )

    @staticmethod
    def answer(handler: Any, reply: Reply) -> None:
        if isinstance(reply, tuple):
            body = json.dumps(reply[1]).encode()
            handler.send_response(reply[0])
            if reply[0] == 429:
                handler.send_header("Retry-After", "3")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
            return
        handler.send_response(200)
        handler.end_headers()
        for part in reply:
            if isinstance(part, float):
                time.sleep(part)
            else:
                line = part if isinstance(part, bytes) else json.dumps(part).encode()
                handler.wfile.write(line + b"\n")

    def names(self) -> set[str]:
        return {name for _, name in self.cache.uids(CONFIG_MAP)}


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """``begin(*replies)``: a world whose reflector runs."""
    monkeypatch.setattr(reflector, "SHORT_SECONDS", 0.0)
    monkeypatch.setattr(reflector.random, "uniform", lambda low, high: 0.05)
    worlds: list[World] = []

    def start(*replies: Reply, before: tuple[Object, ...] = (), started: bool = True) -> World:
        world = World(list(replies))
        worlds.append(world)
        for obj in before:
            world.cache.put(CONFIG_MAP, obj)
        if started:
            world.stream.start()
        return world

    yield start
    for world in worlds:
        world.stream.stop()
        world.stream.join(5)
        assert not any(thread.name == "watch configmaps" for thread in threading.enumerate())
        world.server.shutdown()
        world.server.server_close()
        world.api.close()


def test_a_list_in_pages_replaces_the_cache_and_the_watch_goes_on_from_its_version(begin: Any) -> None:
    first = a_list(10, config_map("stays", 5), config_map("reborn", 6, "second"), more="next")
    world = begin(
        first,
        a_list(10, config_map("new", 7)),
        [event("MODIFIED", config_map("stays", 11)), event("DELETED", config_map("new", 12)), 60.0],
        before=(config_map("stays", 1), config_map("gone", 2), config_map("reborn", 3)),
    )
    wait_until(lambda: "job-new" in {name for _, name in world.changed.copy()} and world.names() == {"stays", "reborn"})
    listed, onward, watched = world.asked
    assert (listed["limit"], onward["continue"]) == ("100", "next") and "continue" not in listed
    assert (watched["resourceVersion"], watched["allowWatchBookmarks"]) == ("10", "true")
    assert world.cache.uids(CONFIG_MAP)["n", "reborn"] == "second"
    assert {name for _, name in world.changed.copy()} == {"job-stays", "job-gone", "job-reborn", "job-new"}
    found = world.cache.get(CONFIG_MAP, "n", "reborn")
    assert found is not None and (found["kind"], found["apiVersion"]) == ("ConfigMap", "v1"), "as a watch has it"
    assert world.states == [(True, None)] and world.stream.heard_at is not None


def test_what_is_put_in_while_a_list_is_read_stays(begin: Any) -> None:
    replies = ([0.1], a_list(10, more="next"), a_list(10), [60.0])
    world = begin(*replies, before=(config_map("gone", 2),), started=False)
    world.hooks[3] = lambda: world.cache.put(CONFIG_MAP, config_map("ours", 11))
    world.stream.start()
    wait_until(lambda: world.stream.synced)
    assert world.names() == {"ours"}


def test_a_watch_that_ends_is_taken_up_from_the_last_bookmark(begin: Any) -> None:
    world = begin(a_list(10), [bookmark(20)], [event("ADDED", config_map("a", 21))], [60.0])
    wait_until(lambda: len(world.asked) == 4)
    assert [query.get("resourceVersion") for query in world.asked] == [None, "10", "20", "21"]
    assert world.names() == {"a"}


def test_a_list_that_is_no_json_is_a_warning_once_in_a_row(begin: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger=reflector.__name__)
    world = begin([b"<html>"], [b"<html>"], a_list(10), [0.1], (410, {"message": "too old"}), [b"[]"], a_list(20))
    wait_until(lambda: len(world.asked) == 8)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and world.stream.synced
    assert all("list configmaps in the whole cluster" in one and "no JSON object" in one for one in said)


def test_a_version_that_is_forgotten_means_a_list(begin: Any) -> None:
    gone = event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
    world = begin(a_list(10, config_map("a", 5)), [gone], a_list(30), [0.1], (410, {"message": "too old"}), a_list(40))
    wait_until(lambda: len(world.asked) >= 7)
    assert world.names() == set() and world.stream.synced
    watches = [query["resourceVersion"] for query in world.asked if query.get("watch")]
    assert watches == ["10", "30", "30", "40"]
    restarts = world.metrics.registry.get_sample_value(
        "diloco_operator_watch_restarts_total", {"resource": CONFIG_MAP.plural}
    )
    assert restarts == 2


def test_an_object_that_cannot_be_read_costs_that_object(begin: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = begin(
        a_list(10, {"metadata": {"name": "broken"}}, {}, config_map("a", 5)),
        [
            event("ADDED", {"metadata": {"namespace": "n", "resourceVersion": "11"}}),
            b"no json",
            b"[]",
            event("DELETED", {"metadata": {"name": "x", "resourceVersion": "12"}}),
            event("ADDED", config_map("b", 13)),
            60.0,
        ],
    )
    wait_until(lambda: world.names() == {"a", "b"})
    assert len(world.asked) == 2, "the stream went on"
    assert len([record for record in caplog.records if "cannot be read" in record.message]) == 6


def test_what_is_forbidden_is_said_once_and_healed(begin: Any, caplog: pytest.LogCaptureFixture) -> None:
    no = (403, {"reason": "Forbidden", "message": "no"})
    world = begin(no, no, a_list(10), no, no, [60.0])
    wait_until(lambda: len(world.states) == 5)
    assert world.states == [(False, "list"), (False, None), (True, None), (True, "watch"), (True, None)]
    said = [record.message for record in caplog.records if record.message.startswith("forbidden")]
    assert len(said) == 2 and world.stream.in_step


def test_a_connection_that_is_dead_is_noticed_and_the_watch_taken_up(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "NO_BYTE_SECONDS", 0.2)
    # A bookmark may come too late, for so short a silence: then the next watch brings it.
    world = begin(a_list(10), [60.0], *[[bookmark(11), 60.0]] * 100)
    wait_until(lambda: any(query.get("resourceVersion") == "11" for query in world.asked))
    versions = [query.get("resourceVersion") for query in world.asked]
    before = versions.index("11")
    assert before >= 3 and versions[:before] == [None, *["10"] * (before - 1)]


# ------------------------------------------------------------------ how old the cache is


def test_the_cache_is_as_new_as_what_is_in_it_and_not_as_what_has_arrived(begin: Any) -> None:
    """A plan that reads the cache while an event is put in must not be told that it has read that event."""
    world = begin(a_list(10), [event("ADDED", config_map("a", 11)), 60.0], started=False)
    before: list[float | None] = []
    put = world.cache.put

    def look_and_put(kind: Any, obj: Object) -> set[Key]:
        before.append(world.stream.cached_at)
        return put(kind, obj)

    world.cache.put = look_and_put
    listed: list[float | None] = []
    world.hooks[2] = lambda: listed.append(world.stream.cached_at)
    world.stream.start()
    wait_until(lambda: world.names() == {"a"} and world.stream.cached_at != listed[0])
    assert before == listed and listed[0] is not None


def test_an_answer_that_brings_nothing_makes_the_cache_no_newer(begin: Any) -> None:
    """The API server refuses the watch, or begins it: what happened meanwhile has not been told yet."""
    cached: list[float | None] = []
    world = begin(a_list(10), (500, {"message": "etcd is away"}), [60.0], started=False)
    for number in (2, 3):
        world.hooks[number] = lambda: cached.append(world.stream.cached_at)
    world.stream.start()
    wait_until(lambda: len(world.asked) == 3 and world.stream._reply is not None)
    assert cached == [world.stream.cached_at] * 2 and world.stream.cached_at is not None
    assert world.stream.heard_at > world.stream.cached_at, "and yet it is not dead"


def a_stream(kind: Any, cached_at: float | None, denied: str | None = None) -> Any:
    stream: Any = Reflector(kind, None, *[None] * 5)  # type: ignore[arg-type]
    stream.cached_at, stream.denied = cached_at, denied
    return stream


@pytest.mark.parametrize(
    ("pods", "sets", "nodes", "age"),
    [
        ((90.0,), (95.0,), (99.0,), 10.0),
        ((None,), (95.0,), (99.0,), math.inf),
        ((90.0, "watch"), (95.0,), (99.0,), math.inf),
        ((98.0,), (99.0,), (None,), 2.0),
        ((98.0,), (99.0,), (10.0, "list"), 2.0),
    ],
    ids=["the oldest", "not listed yet", "forbidden", "nodes are not listed yet", "nodes are forbidden"],
)
def test_the_age_of_a_view_is_that_of_the_stream_that_is_behind_longest(
    pods: Any, sets: Any, nodes: Any, age: float
) -> None:
    streams = {POD: pods, STATEFUL_SET: sets, NODE: nodes, CONFIG_MAP: (0.0,)}
    informer = Informer(Settings(), lambda kind, place: a_stream(kind, *streams.get(kind, (None,))))
    assert informer.age("ns", 100.0) == age


# ------------------------------------------------------------------ jobs, which kopf watches


def a_job(name: str, version: int, uid: str = "u") -> Object:
    return {"metadata": {"namespace": "n", "name": name, "uid": uid, "resourceVersion": str(version)}}


async def test_a_job_that_kopf_does_not_mention_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_operator.informer import job_events

    monkeypatch.setattr(job_events, "DELIVERY_SECONDS", 0.01)
    world = World([(200, a_job("a", 5)), (200, a_job("a", 9)), (404, {"message": "not found"})])
    try:
        events = JobEvents(world.api, world.cache, world.changed.update)
        events.handle({"type": None, "object": a_job("a", 5)})
        events.handle({"type": "ADDED", "object": {"metadata": {}}})  # costs that object
        assert await events.confirm(("n", "a"), 60.0) and not world.asked
        assert await events.confirm(("n", "a"), 0.0) and not events.dead
        assert await events.confirm(("n", "a"), 0.0) and events.dead, "kopf has not brought version 9"
        events.handle({"type": "MODIFIED", "object": a_job("a", 9)})
        assert not events.dead
        world.changed.clear()
        assert not await events.confirm(("n", "a"), 0.0)
        assert world.cache.get(JOB, "n", "a") is None and world.changed == {("n", "a")}
        events.handle({"type": "ADDED", "object": a_job("b", 12)})
        events.start()
        assert world.cache.jobs() == []
    finally:
        world.server.shutdown()
        world.server.server_close()
        world.api.close()


class Waits(threading.Event):
    """Notes how long it is waited for, and waits no longer than a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return super().wait(0.01)


@pytest.mark.promise("If the API server asks clients to wait, all requests and streams wait for that time")
def test_a_stream_that_is_throttled_waits_as_long_as_it_is_asked_to(begin: Any) -> None:
    world = begin(started=False)
    world.replies = [(429, {}), a_list(5, config_map("a", 5))]
    world.stream._stopped = waits = Waits()
    world.stream.start()
    wait_until(lambda: world.names() == {"a"})
    assert waits.seconds[0] == 3.0
