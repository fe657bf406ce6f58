"""syncer_simulation/worker_world.py: the worker's library against the syncer's, on links that break and stand still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from diloco_protocol.vocabulary import PushRefusal
from diloco_worker.net.connection import SyncerConnection
from diloco_worker.net.inbox import Message, PushAnswered
from diloco_worker.net.transfers import Push
from diloco_worker.sync import deterministic
from diloco_worker.sync.synchronizer import Synchronizer
from syncer_simulation.worker_settings import WORKERS


def simulate(kind: str, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += WORKERS[kind].run(seed, {}).seen
        except AssertionError as error:
            raise AssertionError(f"{kind}, seed {seed}: {error}") from error
    return seen


@pytest.mark.promise(
    "Whatever happens to links, learners, syncers and the store, the library's learners lose no acknowledged work and "
    "push none twice, every merged version holds exactly the steps that were pushed into it, and the job ends"
)
def test_a_learner_lives_with_its_link_and_leaves_well() -> None:
    seen = simulate("LINKS", range(2)) + simulate("LEAVING", range(1))
    assert min(seen[what] for what in ("kills", "breaks", "stalls", "freezes", "left well")) > 0, seen


@pytest.mark.promise(
    "Whatever happens to links, learners, syncers and the store, the library's learners lose no acknowledged work and "
    "push none twice, every merged version holds exactly the steps that were pushed into it, and the job ends"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "happened"),
    [
        ("LINKS", ("kills", "breaks", "stalls", "freezes", "terminations")),
        ("RESTARTS", ("kills", "breaks", "crashes", "doubles", "hand-overs", "suspensions", "outages")),
        ("GOING_BACK", ("kills", "breaks", "losses", "wipes")),
        ("LEAVING", ("left well",)),
        ("SHARDED", ("kills", "breaks", "crashes", "shard crashes", "untold", "connections to shards in vain")),
        ("DRAWN", ("kills", "breaks", "crashes", "doubles")),
    ],
)
def test_the_library_lives_with_what_happens(kind: str, happened: tuple[str, ...]) -> None:
    seen = simulate(kind, range(20))
    assert min(seen[what] for what in happened) > 0, seen


@pytest.mark.promise(
    "Whatever happens to links, to the syncer and its store, and to clocks, each version of a deterministic job holds "
    "exactly the steps that its schedule names"
)
@pytest.mark.slow
def test_a_deterministic_job_keeps_its_schedule() -> None:
    for kind, own in (("SCHEDULED", "doubles"), ("SCHEDULED_SHARDS", "shard crashes")):
        seen = simulate(kind, range(20))
        assert min(seen[what] for what in (own, "breaks", "stalls", "crashes", "hand-overs")) > 0, seen


@pytest.mark.slow
def test_the_same_seed_gives_the_same_world() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        WORKERS["GOING_BACK"].run(3, {}, trace)
    assert traces[0] == traces[1] != []


# ------------------------------------------------------------------ what it finds


def refuse_what_is_repeated(self: Push, accepted: bool | None, reason: str, message: str) -> PushAnswered:
    taken = accepted and reason != PushRefusal.REPEATED
    return PushAnswered(self.plan.fragment, self.plan.sequence, taken, reason, message=message)


def answer_every_pull(self: Synchronizer, message: Message) -> None:
    self._pushed_rounds.clear()
    handle(self, message)


def half_close_at_once(self: SyncerConnection) -> None:
    if self._session is not None and not self._session.half_closed:
        self._spawn(self._session.half_close)


handle = Synchronizer._handle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "change", "kind", "words"),
    [
        (Push, "answered", refuse_what_is_repeated, "LINKS", "not outstanding"),
        (Synchronizer, "_handle", answer_every_pull, "LINKS", "answers a pull twice"),
        (SyncerConnection, "half_close", half_close_at_once, "LEAVING", "leaves badly"),
        (deterministic, "first_due", lambda fragment, config: config.every, "SCHEDULED", "of fragment 0"),
    ],
)
def test_the_simulation_notices(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any], kind: str, words: str
) -> None:
    monkeypatch.setattr(owner, name, change)
    with pytest.raises(AssertionError, match=words):
        simulate(kind, range(30))
