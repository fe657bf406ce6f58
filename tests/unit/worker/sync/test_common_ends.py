"""All learners end at the same moment, and come back in any order, some without their directories: the syncer's core
and the learners' handovers together, with the network between them reduced to a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core_desk import Desk, config, of
from diloco_protocol.wire import limits
from diloco_protocol.wire.records import Announcement, Payload
from diloco_syncer.core import events as ev
from diloco_worker.core.adoption import Adoption, AdoptionConfig
from diloco_worker.net import inbox
from diloco_worker.sync import optimizer_handover
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_handover import OptimizerHandover
from diloco_worker.sync.optimizer_state import max_state_bytes
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint

LEARNERS = 3
WARM_UP = 20
BEFORE = 100  # steps of each slot when all end
HELD = ((1, 0),)


class Process:
    """A learner's process in the slot ``ordinal``. It is its own client: what it says waits in ``said``."""

    def __init__(self, connection: int, ordinal: int, file: Path) -> None:
        self.connection, self.ordinal = connection, ordinal
        model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.said, self.fresh = model, list[ev.Event](), False
        self.given: dict[int, Callable[[], Any]] = {}
        self.connected, self.bytes_arrived = True, 0
        self.adoption = Adoption(AdoptionConfig(1, 4, 1))
        checkpoint = SlotCheckpoint(file, "a", "d", 1e-9, limit=max_state_bytes(model))
        client: Any = self
        self.handover = OptimizerHandover(
            InnerOptimizers(model, self.optimizer),
            self.adoption,
            client,
            checkpoint,
            warm_up=WARM_UP,
            on_fresh=self.begin_fresh,
        )
        self.checkpoint = checkpoint

    def take_seat(self, step: int, tenure: int) -> None:
        self.adoption.begin_tenure(step, tenure)
        self.adoption.on_broadcast(Announcement(0, 1, 0, Payload("float32", 8, 8)))
        if step:
            self.handover.request_state(False)

    def begin_fresh(self, step: int) -> None:
        self.fresh = True

    def train_step(self) -> None:
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.adoption.on_step(4, 0.1)
        self.handover.count_step()

    def report(self) -> ev.Event:
        return ev.Reported(self.connection, replace(self.adoption.report(), young_optimizer=self.handover.is_young))

    # what the handover asks of its client

    def request_peer_state(self, limit: int, patient: bool) -> None:
        self.said.append(ev.PeerStateRequested(self.connection, patient))

    def decline_state(self, transfer: int) -> None:
        self.said.append(ev.PeerStateFailed(self.connection, transfer))

    def send_state(self, transfer: int, encode: Callable[[], Any], versions: Any) -> None:
        self.given[transfer] = encode
        self.said.append(ev.PeerStateReceived(transfer))


class Job:
    """A job whose learners have trained when it begins; a second passes with each ``tick``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.desk = Desk(config(slots=LEARNERS, heartbeat_timeout=10.0, stop=("steps", 1_000_000)))
        monkeypatch.setattr(optimizer_handover, "time", SimpleNamespace(monotonic=lambda: self.desk.now))
        self.processes: dict[int, Process] = {}
        self.connections = itertools.count(1)
        for ordinal in range(LEARNERS):
            self.start(ordinal, initial=True)
        self.carry_out(self.desk.do(ev.InitialModelStored("L", (8,))))
        for process in self.processes.values():
            process.take_seat(0, process.connection)
            process.train_step()
            for _ in range(BEFORE - 1):
                process.adoption.on_step(4, 0.1)
                process.handover.count_step()
            process.checkpoint._next = 0.0
            process.handover.write_checkpoint(lambda: HELD)
            process.checkpoint.close()
        self.exchange()

    def start(self, ordinal: int, initial: bool = False) -> Process:
        connection = next(self.connections)
        process = Process(connection, ordinal, self.folder / f"{ordinal}.safetensors")
        self.processes[connection] = process
        actions = self.desk.join(connection, ordinal)
        if not initial:
            (admit,) = of(actions, ev.Admit)
            assert admit.seat is not None
            process.take_seat(admit.seat.slot_step, admit.seat.tenure)
        self.carry_out(actions)
        return process

    def end_all(self) -> None:
        for connection in list(self.processes):
            process = self.processes.pop(connection)
            self.carry_out(self.desk.do(ev.ProcessEnded("r", process.ordinal, f"p{connection}", "killed")))

    def tick(self) -> None:
        for process in self.processes.values():
            process.handover.apply_when_ready(HELD)
            if not process.handover.is_waiting:
                process.train_step()
        self.exchange()
        self.carry_out(self.desk.later(1.0))

    def exchange(self) -> None:
        for process in list(self.processes.values()):
            self.carry_out(self.desk.do(process.report()))
        while said := [event for process in self.processes.values() for event in process.said]:
            for process in self.processes.values():
                process.said.clear()
            for event in said:
                self.carry_out(self.desk.do(event))

    def carry_out(self, actions: list[ev.Action]) -> None:
        for ask in of(actions, ev.RequestPeerState):
            if ask.connection in self.processes:
                self.processes[ask.connection].handover.send_state(ask.transfer, HELD)
        for offer in of(actions, ev.OfferPeerState):
            data = next((p.given[offer.transfer]() for p in self.processes.values() if offer.transfer in p.given), None)
            self.processes[offer.connection].handover.receive_state(inbox.StateDownloaded(True, data, HELD))


@pytest.mark.promise(
    "After a common end the first learner to return waits, for a known time, for the missing places: no "
    "learner begins fresh while a state exists"
)
@pytest.mark.parametrize("pause", [0, 25])
def test_whoever_comes_back_first_nobody_begins_fresh_while_a_state_exists(
    pause: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice of directories that are gone, but all of them."""
    for keepers in (choice for n in range(1, LEARNERS + 1) for choice in itertools.combinations(range(LEARNERS), n)):
        job = Job(tmp_path / "".join(map(str, keepers)), monkeypatch)
        job.end_all()
        for ordinal in set(range(LEARNERS)) - set(keepers):
            (job.folder / f"{ordinal}.safetensors").unlink()
        for ordinal in range(LEARNERS):
            job.start(ordinal)
            for _ in range(pause):
                job.tick()
        for _ in range(3):
            job.tick()
        for process in job.processes.values():
            assert not process.fresh and not process.handover.is_waiting, (keepers, process.ordinal)
            assert not process.handover.is_young and process.handover._trained > BEFORE, (keepers, process.ordinal)


@pytest.mark.promise(
    "An optimizer state that began fresh within the job replaces no better one: not a slot's own file, "
    "not a process's, not a stored one"
)
def test_one_that_comes_back_too_late_keeps_its_own_state_and_the_others_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have begun fresh by then, and a young state replaces no better one: a later newcomer gets the best."""
    job = Job(tmp_path, monkeypatch)
    job.end_all()
    for ordinal in (1, 2):
        (job.folder / f"{ordinal}.safetensors").unlink()
    others = [job.start(ordinal) for ordinal in (1, 2)]
    began = job.desk.now
    while any(other.handover.is_waiting for other in others):
        job.tick()
        assert job.desk.now - began <= limits.REJOIN_SECONDS + 1
    assert job.desk.now - began >= limits.REJOIN_SECONDS
    assert others[0].fresh
    job.tick()
    survivor = job.start(0)
    for _ in range(3):
        job.tick()
    assert survivor.handover._trained > BEFORE and not survivor.fresh
    # A process that begins anew while young ones and the survivor are there.
    gone = others[0]
    del job.processes[gone.connection]
    job.carry_out(job.desk.do(ev.ProcessEnded("r", gone.ordinal, f"p{gone.connection}", "killed")))
    (job.folder / f"{gone.ordinal}.safetensors").unlink(missing_ok=True)
    last = job.start(gone.ordinal)
    for _ in range(3):
        job.tick()
    assert last.handover._trained > BEFORE and not last.fresh


@pytest.mark.promise(
    "After a common end the first learner to return waits, for a known time, for the missing places: no "
    "learner begins fresh while a state exists"
)
def test_where_no_state_is_left_nobody_waits_once_all_are_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, monkeypatch)
    job.end_all()
    for ordinal in range(LEARNERS):
        (job.folder / f"{ordinal}.safetensors").unlink()
    for ordinal in range(LEARNERS):
        job.start(ordinal)
        job.tick()
    for _ in range(WARM_UP // 2):
        job.tick()
    processes = job.processes.values()
    assert all(not process.handover.is_waiting and process.handover.is_young for process in processes)
    assert any(process.fresh for process in processes)
    for _ in range(WARM_UP):
        job.tick()
    assert not any(process.handover.is_young for process in processes)
