"""Batches ahead of the training: what a new tenure drops, what is asked for again, and how much is held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from diloco_protocol.wire.records import Lease
from diloco_worker.data import prefetch
from diloco_worker.data.prefetch import BatchPrefetcher, ShareLoader, check_shares
from diloco_worker.settings import ConfigurationError
from patience import wait_until

BLOCK = 4


class Numbers:
    """A data set of numbers; reading one waits while ``gate`` is closed."""

    def __init__(self, count: int = 4000) -> None:
        self.count = count
        self.broken = -1
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.reading.set()
        assert self.gate.wait(30)
        if index == self.broken:
            raise ValueError(f"item {index} cannot be read")
        return index


class Bench:
    def __init__(self, reserve: int = 0) -> None:
        self.data = Numbers()
        self.requests: list[int] = []
        self.feed = BatchPrefetcher(
            self.data, 2, 7, self.requests.append, notify=lambda: None, collate=list, reserve=reserve
        )

    def lease(self, number: int) -> Lease:
        return Lease(number, 0, number, 0, end=BLOCK, block_size=BLOCK)

    def grant(self, *numbers: int) -> None:
        for number in numbers:
            self.feed.add_lease(self.lease(number))

    def pop(self) -> list[int]:
        found: list[list[int]] = []

        def popped() -> bool:
            batch = self.feed.pop_batch()
            if batch is not None:
                self.feed.commit(batch.cursors)
                found.append(batch.data)
            return bool(found)

        wait_until(popped)
        return found[0]

    def blocks_of(self, batch: list[int]) -> set[int]:
        return {index // BLOCK for index in batch}


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(reserve: int = 0) -> Bench:
        made.append(Bench(reserve))
        return made[-1]

    yield make
    for one in made:
        one.data.gate.set()
        one.feed.close()


@pytest.mark.promise(
    "A new tenure trains no data that were drawn for the previous one, and the data leased ahead are bounded"
)
def test_a_new_tenure_drops_the_batches_that_are_ready(bench: Callable[..., Bench]) -> None:
    """Their sequences belong to whoever holds those leases now."""
    one = bench()
    one.grant(0, 1)
    assert one.blocks_of(one.pop()) == {0}
    wait_until(lambda: len(one.feed._ready) == 3)
    one.feed.reconcile_leases([one.lease(9)], continuing=False)
    assert one.blocks_of(one.pop()) == {9}


@pytest.mark.promise(
    "A new tenure trains no data that were drawn for the previous one, and the data leased ahead are bounded"
)
def test_a_batch_that_was_being_read_for_the_former_tenure_is_not_trained(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.data.gate.clear()
    one.grant(0)
    assert one.data.reading.wait(30) and one.feed.is_loading
    one.feed.reconcile_leases([one.lease(9)], continuing=False)
    one.data.gate.set()
    assert one.blocks_of(one.pop()) == {9}


def test_a_session_that_continues_keeps_the_batches(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.grant(0, 1)
    wait_until(lambda: len(one.feed._ready) == 3)
    one.feed.reconcile_leases([one.lease(0), one.lease(1)], continuing=True)
    assert sorted(one.pop() + one.pop()) == [0, 1, 2, 3]


def test_requests_that_a_broken_session_lost_are_made_again(bench: Callable[..., Bench]) -> None:
    one = bench()
    wait_until(lambda: one.requests == [1])
    one.feed.repeat_requests()
    wait_until(lambda: one.requests == [1, 1])


def test_requests_that_no_welcome_answers_are_made_again(bench: Callable[..., Bench]) -> None:
    """A Welcome has every lease of the slot: what was asked for before it and is not among them was never heard."""
    one = bench()
    wait_until(lambda: one.requests == [1])
    one.feed.reconcile_leases([], continuing=True)
    wait_until(lambda: one.requests == [1, 1])


@pytest.mark.promise(
    "A new tenure trains no data that were drawn for the previous one, and the data leased ahead are bounded"
)
def test_leases_that_are_held_and_asked_for_are_bounded(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report names all of them, and is bounded. Before the first one came nobody knows how large a block is."""
    monkeypatch.setattr(prefetch, "_MOST_LEASES", 20)
    one = bench(reserve=100 * BLOCK)
    wait_until(lambda: one.requests == [1])
    for granted in range(20):
        wait_until(lambda before=granted: sum(one.requests) > before)
        assert sum(one.requests) - granted <= prefetch._MOST_REQUESTS
        one.grant(granted)
    one.feed.repeat_requests()
    time.sleep(0.05)
    assert sum(one.requests) == 20, "held and asked for"
    for _ in range(BLOCK // 2):
        one.pop()  # one lease is finished
    wait_until(lambda: sum(one.requests) == 21)


def test_what_the_data_set_raises_reaches_the_training(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.data.broken = 5

    def raised() -> bool:
        try:
            one.feed.pop_batch()
        except ValueError as error:
            return "item 5" in str(error)
        return False

    one.grant(0, 1)
    wait_until(raised)


@pytest.mark.promise("The ranks of a learner load equal shares of its batches, each sequence in one of them")
def test_ranks_load_shares_of_what_the_leader_draws() -> None:
    leader_data, follower_data = Numbers(), Numbers()
    leader = BatchPrefetcher(
        leader_data, 4, 7, lambda _: None, notify=lambda: None, collate=list, reserve=0, data=(0, 2)
    )
    follower = ShareLoader(follower_data, list, (1, 2))
    try:
        leader.add_lease(Lease(0, 0, 0, 0, end=40, block_size=40))
        told: dict[int, tuple[int, ...]] = {}

        def next_batch() -> bool:
            batch = leader.pop_batch()
            last, draws = leader.take_draws()
            for number, sequences in enumerate(draws, last - len(draws) + 1):
                assert number not in told, "each draw is told once"
                told[number] = sequences
                follower.add_draw(number, sequences)
            if batch is None:
                return False
            given = follower.pop(batch.draw, 30.0)
            assert given is not None
            assert [*batch.data, *given[0]] == list(told[batch.draw])
            return True

        for _ in range(3):
            wait_until(next_batch)
        assert len({item for sequences in told.values() for item in sequences}) == 4 * len(told)
    finally:
        leader.close()
        follower.close()


def test_a_draw_that_the_leader_dropped_is_forgotten() -> None:
    data = Numbers()
    loader = ShareLoader(data, list, (0, 1))
    try:
        data.gate.clear()
        for number in (1, 2, 3):
            loader.add_draw(number, (number,))
        assert data.reading.wait(30) and loader.is_loading
        assert loader.pop(3, 0.0) is None, "it is not there yet"
        data.gate.set()
        assert loader.pop(3, 30.0) == ([3],)
        assert loader._ready == {}, "what came before is not trained"
        data.broken = 5
        loader.add_draw(4, (5,))
        with pytest.raises(ValueError, match="item 5 cannot be read"):
            loader.pop(4, 30.0)
    finally:
        data.gate.set()
        loader.close()


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    check_shares(8, 4)
    with pytest.raises(ConfigurationError, match=r"a batch of 6 sequences cannot .* multiple of 4"):
        check_shares(6, 4)
    with pytest.raises(ConfigurationError, match="at least one is needed"):
        check_shares(0, 1)
