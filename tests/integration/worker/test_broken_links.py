"""Links that swallow what passes, and rounds that go on all the same: pulls, pushes and their answers."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from learner_process import Rows, Syncer, one_step, small_model

from diloco_protocol.wire import limits
from diloco_syncer.store.directory import DirectoryStore
from diloco_worker import Learner
from diloco_worker.net.transfers import Push, Transfers
from free_ports import free_port
from patience import wait_until
from tape_reader import read

StartSyncer = Callable[..., Syncer]


class Relay:
    """A TCP relay between learners and the syncer. Connections are numbered from 0 in the order in which they come."""

    def __init__(self, syncer: Syncer) -> None:
        """Begins to serve, and has the syncer's address file name it."""
        document = json.loads(syncer.address_file.read_text(encoding="utf-8"))
        host, _, port = document["sync"].rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        self._silent: set[int] = set()
        self._is_cut = False
        self.address_file = syncer.folder / "relay.json"
        document["sync"] = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.address_file.write_text(json.dumps(document), encoding="utf-8")
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._ends)

    def silence_bulk(self) -> None:
        """From now on whatever enters the first bulk connection, which small payloads take, vanishes, and neither side
        hears of it. A session opens its own connection before those."""
        found: list[int] = []

        def opened() -> bool:
            found[:] = [number for number, (near, _) in enumerate(self._ends) if near.fileno() >= 0]
            return len(found) >= 2

        wait_until(opened, "a session's connections")
        self._silent.add(found[1])

    def cut(self) -> None:
        """End all connections, and those that come, until ``heal``."""
        self._is_cut = True
        for ends in self._ends:
            _close(*ends)

    def heal(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, 5.0)
            except OSError:
                return
            number = len(self._ends)
            self._ends.append((near, far))
            if self._is_cut:  # looked at once ``cut`` finds this one too
                _close(near, far)
                continue
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(number, one, other), daemon=True).start()

    def _pump(self, number: int, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                if number not in self._silent:
                    other.sendall(data)
        except OSError:
            pass
        _close(one, other)


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):  # it is closed
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@pytest.fixture
def relayed(syncer: StartSyncer) -> Iterator[Callable[..., tuple[Syncer, Relay]]]:
    relays: list[Relay] = []

    def start(*arguments: Any, **more: Any) -> tuple[Syncer, Relay]:
        service = syncer(*arguments, **more)
        relays.append(Relay(service))
        return service, relays[-1]

    yield start
    for relay in relays:
        relay.close()


class Trainer:
    """A learner in this process that steps until it is told to stop."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._model = small_model()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.02)
        self.learner = Learner.from_environment(self._model, self._optimizer, environ=environ)
        self._batches = iter(self.learner.batches(Rows()))

    def train_until(self, condition: Callable[[], bool], what: str) -> None:
        """Make steps until the condition holds."""

        def one_more() -> bool:
            batch = next(self._batches)
            self.learner.after_step(tokens=batch.numel(), loss=one_step(self._model, self._optimizer, batch))
            return condition()

        wait_until(one_more, what, every=0.0)


def versions(service: Syncer) -> list[int]:
    found: list[int] = service.status()["versions"]
    return found


@pytest.mark.promise("A bulk connection that dies silently costs the delay of one push")
@pytest.mark.parametrize("what", [pytest.param("push", marks=pytest.mark.slow), "version"])
def test_a_bulk_connection_that_dies_silently_stops_no_round(
    relayed: Callable[..., tuple[Syncer, Relay]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """No byte passes it any more, and nobody closes it; the session's own stream lives on. Without certificates."""
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.5)  # of this process: how long its transfers may take
    service, relay = relayed({"fragments": 1}, {"steps": 1_000_000})
    trainer = Trainer(service.environ() | {"DILOCO_SYNCER_FILE": str(relay.address_file)})
    with trainer.learner:
        trainer.train_until(lambda: versions(service)[:1] > [0], "a first merge")
        push, silenced = Transfers.push, []

        def push_into_silence(self: Transfers, one: Push) -> None:
            if what == "push" and not silenced:
                relay.silence_bulk()
                silenced.append(one.plan.base_version)
            push(self, one)

        monkeypatch.setattr(Transfers, "push", push_into_silence)
        if what == "version":
            relay.silence_bulk()
            silenced.append(versions(service)[0] + 1)  # a push that was on its way may still arrive
        trainer.train_until(lambda: bool(silenced) and versions(service)[0] > silenced[0] + 2, "merges after that")


def await_pause(port: int) -> None:
    """Wait until the learner with this status port has waited for the syncer within one step, as it otherwise does
    for moments only."""
    began: dict[float, float] = {}  # at which step: what it had waited in all when that was first seen

    def paused() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
                page = reply.read().decode()
        except OSError:  # it has no time to answer
            return False
        found = dict(re.findall(r"^diloco_worker_(step|stalled_seconds_total){.*} (\S+)$", page, re.M))
        if len(found) < 2:  # it has not begun
            return False
        step, waited = float(found["step"]), float(found["stalled_seconds_total"])
        return waited - began.setdefault(step, waited) > 0.5

    wait_until(paused, "a learner to pause")


@pytest.mark.promise(
    "A job with a norm gate continues after its learners were cut off until they paused, with one learner "
    "and with three"
)
@pytest.mark.slow
@pytest.mark.parametrize("learners", [1, 3])
def test_a_job_with_a_gate_goes_on_after_the_hubs_link_was_cut_until_learners_paused(
    relayed: Callable[..., tuple[Syncer, Relay]], learners: int
) -> None:
    """They pause after 4 turns; each then brings 4 times the steps, whose norm is 2 to 4 times as large."""
    sync = {"fragments": 1, "quorum": 1, "normGate": {"factor": 1.7}}
    service, relay = relayed(sync, {"steps": 1_000_000}, learners=learners)
    ports = [free_port() for _ in range(learners)]
    processes = [
        service.learner(i, DILOCO_SYNCER_FILE=str(relay.address_file), DILOCO_STATUS=f"127.0.0.1:{port}")
        for i, port in enumerate(ports)
    ]
    try:
        wait_until(lambda: versions(service)[:1] > [12], "merges")
        relay.cut()
        wait_until(lambda: service.status()["sessions"] == 0, "the cut")
        for port in ports:
            await_pause(port)
        at = versions(service)[0]
        relay.heal()
        wait_until(lambda: versions(service)[0] > at + 10, "merges after the cut")
    finally:
        for process in processes:
            process.kill()
    merges = [line for line in read(DirectoryStore(service.folder / "store")) if line["version"] > at]
    steps = [row["steps"] for merge in merges for row in merge["responders"]]
    assert max(steps) >= 12, "nobody had to pause"
