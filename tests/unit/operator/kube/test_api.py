"""Requests to the API server: what a server of this test answers, and what the operator makes of it."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import kubernetes.client
import pytest

from diloco_operator.kube import api as api_module
from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import LONGEST_PAUSE, ApiError, refusal
from diloco_operator.kube.kinds import CONFIG_MAP
from diloco_operator.model import Object


class Server:
    """Answers with ``status`` and these headers, and notes what is asked."""

    def __init__(self) -> None:
        self.status, self.headers = 200, {}  # type: tuple[int, dict[str, str]]
        self.asked: list[str] = []
        world = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                world.asked.append(self.path)
                body = json.dumps({"kind": "ConfigMap", "metadata": {"name": "c"}}).encode()
                self.send_response(world.status)
                for name, value in world.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_PATCH(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


def api_of(server: Server) -> Api:
    config = kubernetes.client.Configuration()
    config.host = f"http://127.0.0.1:{server.server.server_address[1]}"
    return Api(config, 2, 5.0)


@pytest.mark.promise("If the API server asks clients to wait, all requests and streams wait for that time")
async def test_no_request_is_sent_before_the_api_server_wants_one_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job's request is throttled; another's waits as well, for as long as the API server has asked."""
    waited: list[float] = []

    class Time:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Time()

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock.now += seconds

    api = api_of(server)
    monkeypatch.setattr(api_module, "time", clock)
    monkeypatch.setattr(api_module.asyncio, "sleep", sleep)
    server.status, server.headers = 429, {"Retry-After": "7"}
    with pytest.raises(ApiError):
        await api.get(CONFIG_MAP, "ns", "one")
    assert not waited
    server.status, server.headers = 200, {}
    await asyncio.gather(api.get(CONFIG_MAP, "ns", "two"), api.get(CONFIG_MAP, "ns", "three"))
    assert sum(waited) >= 7.0 and len(server.asked) == 3
    waited.clear()
    await api.get(CONFIG_MAP, "ns", "four")
    assert not waited
    api.close()


@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [(429, "3", 3.0), (503, "1", 1.0), (429, "86400", LONGEST_PAUSE), (429, "Wed, 21 Oct", 0.0), (404, "3", 0.0)],
)
def test_how_long_the_api_server_asks_to_be_left_alone(status: int, header: str, seconds: float) -> None:
    assert refusal("get", "pods", status, b"{}", retry_after=header).retry_after == seconds


@pytest.mark.promise(
    "An apply is for exactly the object that the operator looked at, and takes over no other owner's "
    "object; an object that was deleted unnoticed is created again"
)
@pytest.mark.parametrize("uid", [None, "u"])
async def test_only_an_object_that_was_looked_at_is_taken_from_others(server: Server, uid: str | None) -> None:
    """Server-side apply is forced with a UID, and only so."""
    meta: Object = {"name": "c", "namespace": "ns"} | ({"uid": uid} if uid else {})
    api = api_of(server)
    await api.apply(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    assert f"force={'true' if uid else 'false'}" in server.asked[0]
    api.close()
