"""What a session swallows is said again, and a learner that is slow at its start stays a member."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_process import Rows, Syncer, make_job, one_step, small_model

from diloco_protocol.wire import sync_pb2
from diloco_worker import Learner, Observer
from diloco_worker.fragments import ModelFragments, build_layout, frozen_tensors
from diloco_worker.net import inbox
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.session import Session
from diloco_worker.net.transfers import Transfers
from diloco_worker.settings import WorkerSettings
from diloco_worker.sync.frozen_parameters import digest_tensors, frozen_file
from patience import wait_until

# The timeout is longer than any stall of the machine: no test here is about a learner that is lost.
SYNC: dict[str, Any] = {"heartbeat": {"intervalSeconds": 0.1, "timeoutSeconds": 60}}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Syncer]:
    syncer = Syncer(tmp_path, make_job(SYNC, {"steps": 100_000}))
    syncer.start()
    yield syncer
    syncer.stop()


def events(service: Syncer) -> set[str]:
    return {event["kind"] for event in service.status()["events"]}


def await_heartbeats(service: Syncer) -> None:
    """Wait until the learner of slot 0 was heard again and again, while it says nothing of its own accord."""
    ages: list[float] = []

    def heard() -> bool:
        ages.append(service.status()["slots"][0]["heard_seconds_ago"])
        return sum(new < old for old, new in itertools.pairwise(ages)) >= 5

    wait_until(heard, "heartbeats")


@contextmanager
def initialiser(
    service: Syncer, model: torch.nn.Module, before_upload: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Has a slot, and uploads version 0 after ``before_upload`` at each request of it; nothing else."""
    layout, box = build_layout(model, 3, 4), inbox.Inbox()
    client = SyncerClient(WorkerSettings.from_environment(service.environ()), layout, box)
    client.start(64)
    fragments = ModelFragments(model, layout)

    def initialised() -> bool:
        # Asked for by each session: the one before may have broken. What is uploaded without a session is not sent.
        if inbox.InitialRequested() in box.take_all():
            before_upload()
            vectors = [fragments.snapshot(p) for p in range(len(layout))]
            client.upload_initial(vectors, frozen_file(model), digest_tensors(frozen_tensors(model)))
        return "initialised" in events(service)

    try:
        wait_until(initialised, "version 0")
        yield
    finally:
        client.stop()


def test_a_slow_initialiser_and_newcomer_keeps_its_slot(service: Syncer) -> None:
    """Heartbeats go on before version 0 is uploaded, and before the first report: a timeout never begins to count."""
    asked: list[bool] = []

    def before_upload() -> None:
        await_heartbeats(service)
        asked.append("initialised" in events(service))

    with initialiser(service, small_model(), before_upload):
        assert asked and not any(asked)
        await_heartbeats(service)
        slot = service.status()["slots"][0]
        assert (slot["state"], slot["incarnation"], slot["steps"]) == ("active", 1, 0)
        assert not events(service) & {"lost", "suspect"}


def test_a_lost_goodbye_is_said_again(service: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport takes DrainRequest and Drained, and the stream breaks before either arrives."""
    swallowed = []
    send = Session._send

    async def lossy(self: Session, message: sync_pb2.LearnerMessage) -> bool:
        kind = message.WhichOneof("kind")
        if kind in ("drain_request", "drained") and kind not in swallowed:
            swallowed.append(kind)
            self.end("the network is gone")
            return True
        return await send(self, message)

    monkeypatch.setattr(Session, "_send", lossy)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows()):
            learner.after_step(tokens=batch.numel(), loss=one_step(model, optimizer, batch))
            if learner.step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
    assert swallowed == ["drain_request", "drained"]
    assert service.status()["slots"][0]["state"] == "drained"
    tokens = service.report()["tokens"]
    assert (tokens["trained"], tokens["dropped"]) == (20 * 32, 0)


def test_a_lost_initial_evaluation_is_said_again(service: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    swallowed = []
    send = Session._send

    async def lossy(self: Session, message: sync_pb2.LearnerMessage) -> bool:
        if message.HasField("evaluation") and not swallowed:
            swallowed.append(message)
            self.end("the network is gone")
            return True
        return await send(self, message)

    monkeypatch.setattr(Session, "_send", lossy)
    with Observer.from_environment(small_model(), environ=service.environ("evaluator")) as observer:
        observer.report(2.5, tokens=0, sum_versions=0)
        wait_until(lambda: service.status()["eval_loss"] == [[0, 2.5]], "the evaluation")
    assert len(swallowed) == 1


def frozen_model(seed: int) -> torch.nn.Sequential:
    """Its first layer is frozen: that travels once, with version 0."""
    model = small_model(seed)
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("role", ["learner", "evaluator"])
def test_frozen_parameters_whose_download_broke_with_the_session_are_requested_again(
    service: Syncer, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The download begins, and the session ends with all that it carried."""
    sessions: list[Session] = []
    broken: list[Session] = []
    open_session, fetch = Session.open, Transfers.fetch_frozen

    async def noted(self: Session, join: sync_pb2.Join) -> sync_pb2.SyncerMessage:
        sessions.append(self)
        return await open_session(self, join)

    async def lossy(self: Transfers, limit: int, own_digest: Callable[[], str]) -> None:
        if broken:
            return await fetch(self, limit, own_digest)
        broken.append(sessions[-1])
        sessions[-1].end("the network is gone")
        await asyncio.Event().wait()  # until it is cancelled with the session

    given = frozen_model(1)
    with initialiser(service, given):
        pass
    monkeypatch.setattr(Session, "open", noted)
    monkeypatch.setattr(Transfers, "fetch_frozen", lossy)
    model = frozen_model(2)
    if role == "evaluator":
        with Observer.from_environment(model, environ=service.environ(role)) as observer:
            observer.refresh()
            wait_until(lambda: observer.poll() and observer.complete, "a whole model")
    else:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
        with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
            next(learner.batches(Rows()))  # which waits until the model is whole
    assert len(broken) == 1 and broken[0] in sessions[:-1]
    for name, parameter in given.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.promise("A learner downloads frozen parameters only if a digest shows that its own differ")
@pytest.mark.parametrize("role", ["learner", "evaluator"])
def test_frozen_parameters_travel_only_to_whom_they_are_new(service: Syncer, role: str) -> None:
    """A process that has loaded the same ones compares digests; one that has others downloads the job's."""
    given = frozen_model(1)
    with torch.no_grad():  # more than all else that comes down
        given[0] = torch.nn.Linear(8, 16, bias=False).requires_grad_(False)
        given.insert(0, torch.nn.Linear(8, 8))
        given.append(torch.nn.Embedding(20_000, 8).requires_grad_(False))
    with initialiser(service, given):
        pass
    down = {}
    for same in (True, False):
        model = copy.deepcopy(given)
        if not same:
            with torch.no_grad():
                model[-1].weight[17, 3] += 1.0
        if role == "evaluator":
            with Observer.from_environment(model, environ=service.environ(role)) as observer:
                observer.refresh()
                wait_until(lambda observer=observer: observer.poll() and observer.complete, "a whole model")
                down[same] = observer._figures()["bytes_down"]
        else:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
            with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
                next(learner.batches(Rows()))  # which waits until the model is whole
                down[same] = learner.metrics["bytes_down"]
        assert torch.equal(model[-1].weight, given[-1].weight)
    frozen = 20_000 * 8 * 4
    assert down[True] < frozen / 10 and down[False] > frozen
