"""Which inner optimizer state a newcomer handover over: a peer's, else the newer one on a disk, else none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_protocol.wire.records import Announcement, Payload
from diloco_worker.core.adoption import Adoption, AdoptionConfig
from diloco_worker.net import inbox
from diloco_worker.sync import optimizer_handover
from diloco_worker.sync.optimizer_handover import JOB, OWN, PEER, OptimizerHandover
from diloco_worker.sync.optimizer_state import Origin, max_state_bytes, snapshot
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint

Versions = tuple[tuple[int, int], ...]
HELD: Versions = ((1, 6), (1, 6))


class Asked:
    """The syncer's client: what was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def request_peer_state(self, limit: int) -> None:
        self.calls.append(PEER)

    def fetch_optimizer(self, limit: int) -> None:
        self.calls.append(JOB)


def state(rate: float, origin: Origin | None) -> bytes:
    """A state whose every first moment is ``rate``."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for row in optimizer.state.values():
        row["exp_avg"].fill_(rate)
    encode = snapshot(model, optimizer, origin)
    assert encode is not None
    return encode()


class Newcomer:
    def __init__(self, folder: Path, own: Versions | None = None) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.adoption = Adoption(AdoptionConfig(2, 4, 1))
        for fragment in range(2):
            self.adoption.on_broadcast(Announcement(fragment, 1, 6, Payload("float32", 4, 4)))
        path = folder / "local-0.safetensors"
        checkpoint = SlotCheckpoint(path, "a", "d", 60.0, max_state_bytes(self.model))
        if own is not None:
            path.write_bytes(state(0.25, checkpoint.origin(9, own)))
        self.asked, self.fresh = Asked(), list[int]()
        client: Any = self.asked
        self.handover = OptimizerHandover(
            self.model, self.optimizer, self.adoption, client, checkpoint, self.fresh.append
        )

    @property
    def moment(self) -> float:
        return float(self.optimizer.state[self.model.bias]["exp_avg"][0])


@pytest.fixture
def newcomer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Newcomer]:
    caplog.set_level(logging.INFO)
    return lambda own=None: Newcomer(tmp_path, own)


def test_a_peers_state_comes_first(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer(((1, 6), (1, 6)))
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, None), ((1, 6), (1, 7))))
    one.handover.apply_when_ready(HELD)
    assert one.handover.is_waiting, "until this learner's versions are the peer's"
    one.handover.apply_when_ready(((1, 6), (1, 7)))
    assert one.moment == 0.5 and not one.handover.is_waiting
    assert one.asked.calls == [PEER]


@pytest.mark.parametrize(
    ("own", "job", "taken"),
    [
        (((1, 5), (1, 5)), None, OWN),
        (((1, 5), (1, 5)), Origin("a", "d", 8, ((1, 5), (1, 4))), OWN),
        (((1, 5), (1, 5)), Origin("a", "d", 9, ((1, 5), (1, 5))), JOB),
        (((1, 6), (1, 6)), Origin("a", "d", 2, ((2, 0), (1, 1))), JOB),
        (((9, 6), (9, 6)), Origin("a", "d", 8, ((1, 5), (1, 4))), JOB),
        (None, Origin("a", "d", 8, ((1, 5), (1, 4))), JOB),
    ],
    ids=["no job's", "own newer", "the same", "a later epoch", "own of no known versions", "no own"],
)
def test_without_a_peer_the_newer_one_on_a_disk(
    newcomer: Callable[..., Newcomer],
    caplog: pytest.LogCaptureFixture,
    own: Versions | None,
    job: Origin | None,
    taken: str,
) -> None:
    one = newcomer(own)
    one.handover.request_state(job is not None)
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    if job is not None:
        assert one.asked.calls == [PEER, JOB]
        one.handover.receive_state(inbox.StateDownloaded(False, state(0.75, job)))
    for _ in range(3):
        one.handover.apply_when_ready(HELD)
    assert f"goes on from the state of the {taken}" in caplog.text
    assert one.moment == {OWN: 0.25, JOB: 0.75}[taken]
    assert not one.handover.is_waiting and not one.fresh


def test_one_that_does_not_fit_leaves_the_other(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer(((1, 5), (1, 5)))
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, b"garbage"))
    one.handover.apply_when_ready(HELD)
    one.handover.receive_state(inbox.StateDownloaded(False, b"garbage"))
    one.handover.apply_when_ready(HELD)
    assert one.moment == 0.25


def test_nothing_anywhere_is_a_fresh_start_with_warm_up(
    newcomer: Callable[..., Newcomer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_handover, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(optimizer_handover.limits, "transfer_seconds", lambda size: 0.0)
    one = newcomer()
    one.handover.request_state(True)
    for _ in range(2):  # neither a peer's nor the job's comes in time
        assert one.handover.is_waiting
        time.sleep(0.001)
        one.handover.apply_when_ready(HELD)
    assert one.asked.calls == [PEER, JOB]
    assert not one.handover.is_waiting and one.fresh == [0]


def test_a_session_that_breaks_takes_the_request_with_it(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer()
    one.handover.repeat_request()
    assert one.asked.calls == []
    one.handover.request_state(False)
    one.handover.repeat_request()
    assert one.asked.calls == [PEER, PEER]


def test_no_peer_and_nothing_on_any_disk_is_a_fresh_start(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer()
    one.handover.request_state(False)
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    assert not one.handover.is_waiting and one.fresh == [0]
    assert one.asked.calls == [PEER]
