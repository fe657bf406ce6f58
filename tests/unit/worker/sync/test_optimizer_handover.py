"""Which inner optimizer state a newcomer handover over: a peer's, else the newer one on a disk, else none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco_protocol.wire import limits
from diloco_protocol.wire.records import Announcement, Payload
from diloco_worker.core.adoption import Adoption, AdoptionConfig
from diloco_worker.net import inbox
from diloco_worker.settings import WorkerError
from diloco_worker.sync import optimizer_handover, optimizer_state
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_handover import JOB, OWN, PEER, OptimizerHandover
from diloco_worker.sync.optimizer_state import Origin, max_state_bytes, snapshot
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint

Versions = tuple[tuple[int, int], ...]
HELD: Versions = ((1, 6), (1, 6))
WARM_UP = 10


class Asked:
    """The syncer's client: what was asked for."""

    def __init__(self) -> None:
        self.connected, self.bytes_arrived = True, 0
        self.calls: list[str] = []

    def request_peer_state(self, limit: int, patient: bool) -> None:
        self.calls.append("patient" if patient else PEER)

    def fetch_optimizer(self, limit: int) -> None:
        self.calls.append(JOB)

    def decline_state(self, transfer: int) -> None:
        self.calls.append(f"declined {transfer}")

    def send_state(self, transfer: int, encode: Callable[[], bytes], versions: Versions) -> None:
        self.calls.append(f"sent {transfer}")


def state(rate: float, origin: Origin | None) -> bytes:
    """A state whose every first moment is ``rate``."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for row in optimizer.state.values():
        row["exp_avg"].fill_(rate)
    encode = snapshot(InnerOptimizers(model, optimizer), origin)
    assert encode is not None
    return encode()


class Newcomer:
    def __init__(self, folder: Path, own: Versions | None = None, trained: int = WARM_UP) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.adoption = Adoption(AdoptionConfig(2, 4, 1))
        for fragment in range(2):
            self.adoption.on_broadcast(Announcement(fragment, 1, 6, Payload("float32", 4, 4)))
        self.limit = max_state_bytes(self.model)
        path = folder / "local-0.safetensors"
        self.checkpoint = checkpoint = SlotCheckpoint(path, "a", "d", 60.0, limit=self.limit)
        if own is not None:
            path.write_bytes(state(0.25, checkpoint.origin(9, own, trained)))
        self.asked, self.fresh = Asked(), list[int]()
        client: Any = self.asked
        self.handover = OptimizerHandover(
            InnerOptimizers(self.model, self.optimizer),
            self.adoption,
            client,
            checkpoint,
            warm_up=WARM_UP,
            on_fresh=self.fresh.append,
        )

    def train_a_step(self) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.adoption.on_step(4, 0.1)
        self.handover.count_step()

    @property
    def moment(self) -> float:
        return float(self.optimizer.state[self.model.bias]["exp_avg"][0])


@pytest.fixture
def newcomer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Newcomer]:
    caplog.set_level(logging.INFO)
    return lambda own=None, trained=WARM_UP: Newcomer(tmp_path, own, trained)


def test_a_peers_state_comes_first(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer(((1, 6), (1, 6)))
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, None), ((1, 6), (1, 7))))
    one.handover.apply_when_ready(HELD)
    assert one.handover.is_waiting, "until this learner's versions are the peer's"
    one.handover.repeat_request()  # the session broke: what is here is not asked for again
    one.handover.apply_when_ready(((1, 6), (1, 7)))
    assert one.moment == 0.5 and not one.handover.is_waiting
    assert one.asked.calls == [PEER]


@pytest.mark.parametrize(
    ("own", "job", "taken"),
    [
        (((1, 5), (1, 5)), None, OWN),
        (((1, 5), (1, 5)), Origin("a", "d", 8, ((1, 5), (1, 4)), trained=99), OWN),
        (((1, 5), (1, 5)), Origin("a", "d", 9, ((1, 5), (1, 5)), trained=99), JOB),
        (((1, 6), (1, 6)), Origin("a", "d", 2, ((2, 0), (1, 1)), trained=99), JOB),
        (((9, 6), (9, 6)), Origin("a", "d", 8, ((1, 5), (1, 4)), trained=99), JOB),
        (None, Origin("a", "d", 8, ((1, 5), (1, 4)), trained=99), JOB),
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
    assert f"continues from the state of the {taken}" in caplog.text
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
    clock = [1000.0]
    monkeypatch.setattr(optimizer_handover, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = newcomer()
    one.handover.request_state(True)
    one.asked.connected = False
    for calls in ([PEER], [PEER, JOB]):  # for neither a peer's nor the job's is there a session
        one.handover.apply_when_ready(HELD)
        clock[0] += limits.REJOIN_SECONDS
        one.handover.apply_when_ready(HELD)
        assert one.handover.is_waiting and one.asked.calls == calls
        clock[0] += 0.01
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
    for _ in range(2):
        assert one.handover.is_waiting
        one.handover.receive_state(inbox.StateDownloaded(True, None))
    assert not one.handover.is_waiting and one.fresh == [0]
    assert one.asked.calls == [PEER, "patient"]


@pytest.mark.promise(
    "After the loss of all learners at once, the newest optimizer state on any disk is used, also by "
    "learners whose own disk has none"
)
def test_with_nothing_on_any_disk_a_peer_that_found_its_own_is_asked_for_it(newcomer: Callable[..., Newcomer]) -> None:
    """All learners were lost at once, and this one's disk with it."""
    one = newcomer()
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    one.handover.receive_state(inbox.StateDownloaded(False, None))
    assert one.asked.calls == [PEER, JOB, "patient"] and not one.fresh
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, None), HELD))
    one.handover.apply_when_ready(HELD)
    assert one.moment == 0.5 and not one.handover.is_waiting and not one.fresh


@pytest.mark.promise(
    "A new learner never harms its donor: a state that cannot be copied or serialised is declined, and "
    "the donor trains on"
)
def test_a_state_that_cannot_be_copied_is_declined_and_hurts_nobody(
    newcomer: Callable[..., Newcomer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever copying raises would otherwise end the learner that gives, or that writes its own checkpoint."""
    donor = newcomer()
    donor.train_a_step()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optimizer_state, "snapshot", full)
    donor.handover.send_state(7, HELD)
    assert donor.asked.calls == ["declined 7"]
    assert "not given to a newcomer: it cannot be copied: CUDA out of memory" in caplog.text
    donor.checkpoint._next = 0.0  # one is due
    donor.handover.write_checkpoint(lambda: HELD)
    assert "own checkpoint was not written, training continues: the optimizer's state cannot be copied" in caplog.text
    monkeypatch.undo()
    donor.handover.send_state(8, HELD)
    assert donor.asked.calls == ["declined 7", "sent 8"]


def test_ranks_that_have_parted_over_a_state_end(
    newcomer: Callable[..., Newcomer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leader would otherwise go on with others that still wait for its part."""
    one = newcomer()
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, None), HELD))

    def part(*_: object) -> None:
        raise WorkerError("the ranks have parted")

    monkeypatch.setattr(optimizer_state, "restore", part)
    with pytest.raises(WorkerError, match="parted"):
        one.handover.apply_when_ready(HELD)
    monkeypatch.setattr(optimizer_state, "snapshot", part)
    one.train_a_step()
    one.checkpoint._next = 0.0  # one is due
    for give in (lambda: one.handover.send_state(7, HELD), lambda: one.handover.write_checkpoint(lambda: HELD)):
        with pytest.raises(WorkerError, match="parted"):
            give()
    assert one.asked.calls == [PEER]


def test_a_learner_that_has_made_no_step_gives_no_state(newcomer: Callable[..., Newcomer]) -> None:
    """What it has came from a peer or a disk, and a newcomer had better have it from there."""
    one = newcomer(((1, 5), (1, 5)))
    one.handover.request_state(False)
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    one.handover.apply_when_ready(HELD)
    assert one.moment == 0.25 and one.adoption.complete
    one.handover.send_state(3, HELD)
    one.train_a_step()
    one.handover.send_state(4, HELD)
    assert one.asked.calls == [PEER, "declined 3", "sent 4"]


@pytest.mark.promise(
    "A new learner waits for an optimizer state of which nothing moves for 90 s, takes the first answer, and "
    "keeps its own state rather than a disk's"
)
def test_an_answer_that_comes_after_the_choice_is_ignored(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer(((1, 5), (1, 5)))
    one.handover.request_state(True)
    first = state(0.5, None)
    one.handover.receive_state(inbox.StateDownloaded(True, first, ((1, 6), (1, 7))))
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.125, None), HELD))  # another peer's
    one.handover.receive_state(inbox.StateDownloaded(False, state(0.125, None)))  # nobody asked for the job's
    one.handover.apply_when_ready(((1, 6), (1, 7)))
    assert one.moment == 0.5 and not one.handover.is_waiting
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.125, None), HELD))
    assert one.moment == 0.5 and not one.handover.is_waiting


@pytest.mark.promise(
    "A new learner waits for an optimizer state of which nothing moves for 90 s, takes the first answer, and "
    "keeps its own state rather than a disk's"
)
def test_a_peers_state_whose_versions_never_come_is_given_up_at_the_deadline(
    newcomer: Callable[..., Newcomer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The newcomer would otherwise never make a step."""
    clock = [100.0]
    monkeypatch.setattr(optimizer_handover, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = newcomer()
    one.handover.request_state(False)
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, None), ((1, 6), (2, 0))))
    for arrived, now, waits in ((7, 200.0, True), (8, 1e6, True), (8, 1e6 + 90.0, True), (8, 1e6 + 90.1, False)):
        one.asked.bytes_arrived, clock[0] = arrived, now  # of the versions, while they come
        one.handover.apply_when_ready(HELD)
        assert one.handover.is_waiting is waits, now
    assert one.fresh == [0] and not one.optimizer.state
    assert "it was made on versions that this job has not" in caplog.text


@pytest.mark.promise(
    "A new learner waits for an optimizer state of which nothing moves for 90 s, takes the first answer, and "
    "keeps its own state rather than a disk's"
)
def test_a_process_that_lost_a_slot_keeps_its_own_state_rather_than_a_disks(
    newcomer: Callable[..., Newcomer], caplog: pytest.LogCaptureFixture
) -> None:
    one = newcomer(((1, 5), (1, 5)))
    one.train_a_step()
    moment = one.moment
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    assert one.asked.calls == [PEER], "the job's checkpoint is not asked for"
    assert one.moment == moment and not one.handover.is_waiting and not one.fresh
    assert "continues with this process's own state" in caplog.text


@pytest.mark.promise(
    "An optimizer state that began fresh within the job replaces no better one: not a slot's own file, "
    "not a process's, not a stored one"
)
@pytest.mark.parametrize(
    ("own", "peers", "taken"),
    [(WARM_UP, 3, OWN), (5, 3, OWN), (3, 5, PEER), (WARM_UP, WARM_UP, PEER), (900, WARM_UP, PEER)],
    ids=["young peer's", "younger peer's", "younger own", "both warmed up", "both beyond it"],
)
def test_a_peers_state_that_holds_less_of_the_warm_up_goes_behind_the_slots_own(
    newcomer: Callable[..., Newcomer], own: int, peers: int, taken: str
) -> None:
    one = newcomer(((1, 5), (1, 5)), own)
    one.handover.request_state(False)
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, Origin("a", "d", 9, HELD, trained=peers)), HELD))
    one.handover.apply_when_ready(HELD)
    assert one.moment == {OWN: 0.25, PEER: 0.5}[taken] and not one.handover.is_waiting


def test_an_own_state_that_does_not_fit_leaves_a_younger_peers(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer(((9, 9), (9, 9)))  # of versions that this job has not
    one.handover.request_state(False)
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, Origin("a", "d", 9, HELD, trained=3)), HELD))
    for _ in range(2):
        one.handover.apply_when_ready(HELD)
    assert one.moment == 0.5 and not one.fresh


@pytest.mark.promise(
    "An optimizer state that began fresh within the job replaces no better one: not a slot's own file, "
    "not a process's, not a stored one"
)
def test_of_stored_states_the_one_with_more_of_the_warm_up_goes_before_the_newer(
    newcomer: Callable[..., Newcomer],
) -> None:
    one = newcomer(((1, 6), (1, 6)), 3)
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    one.handover.receive_state(
        inbox.StateDownloaded(False, state(0.75, Origin("a", "d", 2, ((1, 1), (1, 1)), trained=99)))
    )
    one.handover.apply_when_ready(HELD)
    assert one.moment == 0.75


@pytest.mark.promise(
    "An optimizer state that began fresh within the job replaces no better one: not a slot's own file, "
    "not a process's, not a stored one"
)
def test_a_process_keeps_its_state_rather_than_take_a_younger_one(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer()
    for _ in range(6):
        one.train_a_step()
    moment = one.moment
    one.handover.request_state(True)
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, Origin("a", "d", 9, HELD, trained=3)), HELD))
    assert one.moment == moment and not one.handover.is_waiting and not one.fresh


def test_a_learner_is_young_until_it_is_beyond_its_warm_up_and_says_in_its_state_how_much_it_holds(
    newcomer: Callable[..., Newcomer],
) -> None:
    one = newcomer()
    one.adoption.begin_tenure(100)
    for fragment in range(2):
        one.adoption.on_broadcast(Announcement(fragment, 1, 6, Payload("float32", 4, 4)))
    one.handover.request_state(False)
    for _ in range(2):
        one.handover.receive_state(inbox.StateDownloaded(True, None))
    assert one.fresh == [100] and not one.handover.is_young, "it does not train"
    for step in range(1, WARM_UP + 1):
        one.train_a_step()
        assert one.handover.is_young == (step < WARM_UP)
    first = newcomer()  # where the job is young, nobody began fresh within it
    first.train_a_step()
    assert not first.handover.is_young
    other = newcomer()
    other.handover.request_state(False)
    origin = Origin("a", "d", 120, HELD, trained=WARM_UP)
    other.handover.receive_state(inbox.StateDownloaded(True, state(0.5, origin), HELD))
    other.handover.apply_when_ready(HELD)
    other.train_a_step()
    assert other.handover._trained == WARM_UP + 1
    other.checkpoint._next = 0.0
    other.handover.write_checkpoint(lambda: list(HELD))
    other.checkpoint.close()
    found = other.checkpoint.load()
    assert found is not None and found[1].trained == WARM_UP + 1


@pytest.mark.promise(
    "A new learner takes over an optimizer state over a link of any speed: while bytes come, and while the syncer "
    "still has to answer, it begins with no fresh one"
)
@pytest.mark.parametrize("patient", [False, True])
def test_a_state_is_waited_for_as_long_as_its_session_lives(
    patient: bool, newcomer: Callable[..., Newcomer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hops of it may take hours, and the syncer ends them by progress."""
    clock = [100.0]
    monkeypatch.setattr(optimizer_handover, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    one = newcomer()
    one.handover.request_state(True)
    if patient:
        one.handover.receive_state(inbox.StateDownloaded(True, None))
        one.handover.receive_state(inbox.StateDownloaded(False, None))
    calls = list(one.asked.calls)
    for hours in range(1, 4):
        clock[0] = 3600.0 * hours
        one.handover.apply_when_ready(HELD)
        assert one.handover.is_waiting and one.asked.calls == calls
    one.handover.receive_state(inbox.StateDownloaded(True, state(0.5, None), HELD))
    one.handover.apply_when_ready(HELD)
    assert one.moment == 0.5 and not one.fresh


def test_a_tenure_in_a_job_that_has_not_trained_waits_for_no_state(newcomer: Callable[..., Newcomer]) -> None:
    """Its store was emptied while a learner waited."""
    one = newcomer()
    one.handover.request_state(False)
    one.handover.stop_waiting()
    assert not one.handover.is_waiting and not one.fresh


def test_that_the_optimizer_keeps_no_state_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is no fault, and its newcomers go on from it without a warm-up."""
    caplog.set_level(logging.INFO)

    def stateless(name: str) -> Newcomer:
        one = Newcomer(tmp_path / name)
        one.handover.inner = InnerOptimizers(one.model, torch.optim.SGD(one.model.parameters(), lr=0.1))
        one.optimizer = one.handover.inner.all[0]  # type: ignore[assignment]
        return one

    giver = stateless("giver")
    for _ in range(3):
        giver.train_a_step()
        giver.checkpoint._next = 0.0
        giver.handover.write_checkpoint(lambda: HELD)
        giver.checkpoint.close()
    assert caplog.messages == ["the inner optimizer keeps no state: newcomers are told so, and go on without it"]
    encode = snapshot(giver.handover.inner, giver.checkpoint.origin(9, HELD, WARM_UP))
    assert encode is not None
    taker = stateless("taker")
    taker.handover.request_state(False)
    taker.handover.receive_state(inbox.StateDownloaded(True, encode(), HELD))
    taker.handover.apply_when_ready(HELD)
    assert not taker.handover.is_waiting and taker.fresh == []


def test_that_a_state_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Newcomer(tmp_path)
    for _ in range(3):
        one.train_a_step()
        one.optimizer.state[one.model.bias]["note"] = "neither a tensor nor a number"
        one.checkpoint._next = 0.0
        one.handover.write_checkpoint(lambda: HELD)
        assert not one.checkpoint.due
    assert caplog.messages == ["the optimizer's state holds more than tensors and numbers: no newcomer takes it over"]


def test_why_it_began_fresh_is_told_while_it_warms_up(newcomer: Callable[..., Newcomer]) -> None:
    one = newcomer()
    one.handover.request_state(False)
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    one.handover.receive_state(inbox.StateDownloaded(True, None))
    assert one.fresh == [0] and one.handover.fresh == "no peer has one"
    for _ in range(WARM_UP):
        assert one.handover.fresh
        one.train_a_step()
    assert one.handover.fresh == ""
    one.handover.request_state(False)
    assert one.handover.fresh == "", "of another tenure"
