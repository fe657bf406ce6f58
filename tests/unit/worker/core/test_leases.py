"""Leases and cursors on the learner's side: everything is drawn once, in the block's own order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.wire.records import Lease
from diloco_worker.core.leases import Draw, Leases, order_within_block
from diloco_worker.settings import WorkerError
from example_counts import share_of


def grant(lease: int, block: int = 0, start: int = 0, end: int = 10, size: int = 10, epoch: int = 0) -> Lease:
    return Lease(lease, epoch, block, start, end=end, block_size=size)


def test_the_order_is_pinned() -> None:
    """The same on every platform and for ever: a lease may be half trained by another machine."""
    assert order_within_block(0, 0, 0, 10) == [4, 8, 5, 0, 9, 6, 2, 1, 3, 7]
    assert order_within_block(7, 3, 5, 1) == [0]


@given(seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 50), block=st.integers(0, 999), size=st.integers(1, 300))
@settings(max_examples=share_of(60), deadline=None)
def test_an_order_is_a_permutation_that_depends_on_all_three(seed: int, epoch: int, block: int, size: int) -> None:
    order = order_within_block(seed, epoch, block, size)
    assert sorted(order) == list(range(size))
    if size > 20:
        others = [order_within_block(seed + 1, epoch, block, size), order_within_block(seed, epoch + 1, block, size)]
        assert order not in [*others, order_within_block(seed, epoch, block + 1, size)]


@given(size=st.integers(1, 40), sequences=st.integers(1, 200), batch=st.integers(1, 17), data=st.data())
@settings(max_examples=share_of(100), deadline=None)
def test_blocks_are_covered_once_over_processes_that_die(
    size: int, sequences: int, batch: int, data: st.DataObject
) -> None:
    """Processes train a few batches and die; the next goes on from the cursors that were
    committed. What was committed is trained once, and in the end that is everything."""
    blocks = -(-sequences // size)
    ends = {b: min(size, sequences - b * size) for b in range(blocks)}
    cursors = dict.fromkeys(range(blocks), 0)
    trained: list[int] = []
    while any(cursors[b] < ends[b] for b in range(blocks)):
        leases = Leases(5, sequences)
        for b in range(blocks):
            if cursors[b] < ends[b]:
                leases.add(Lease(b + 1, 0, b, cursors[b], end=ends[b], block_size=size))
        ahead: deque[Draw] = deque()
        for _ in range(data.draw(st.integers(1, 8), label="steps until it dies")):
            while len(ahead) < 3 and leases.remaining:
                draw = leases.draw(min(batch, leases.remaining))
                assert draw is not None
                ahead.append(draw)
            if not ahead:
                break
            step = ahead.popleft()
            leases.commit(step.cursors)
            trained.extend(step.sequences)
            for lease, position in leases.cursors():  # the report after the step
                cursors[lease - 1] = position
        # What was drawn ahead is lost with the process.
    assert sorted(trained) == list(range(sequences))


def test_a_batch_runs_over_the_end_of_a_lease() -> None:
    leases = Leases(0, 20)
    leases.add(grant(1, block=0))
    leases.add(grant(2, block=1))
    assert leases.remaining == 20
    first, second = leases.draw(8), leases.draw(8)
    assert first is not None and second is not None
    assert first.cursors == ((1, 8),)
    assert second.cursors == ((1, 10), (2, 6))
    assert leases.draw(8) is None, "nothing is drawn when there is too little"
    assert leases.remaining == 4
    assert leases.cursors() == ((1, 0), (2, 0))
    leases.commit(first.cursors)
    assert leases.cursors() == ((1, 8), (2, 0))
    leases.commit(second.cursors)
    assert leases.cursors() == ((1, 10), (2, 6)), "a finished lease stays in the report"
    leases.commit(first.cursors)
    assert leases.cursors() == ((1, 10), (2, 6)), "a cursor never goes back"


def test_a_lease_goes_on_from_its_cursor_in_the_same_order() -> None:
    whole, rest = Leases(3, 10), Leases(3, 10)
    whole.add(grant(1))
    rest.add(grant(9, start=4))
    everything, tail = whole.draw(10), rest.draw(6)
    assert everything is not None and tail is not None
    assert everything.sequences[4:] == tail.sequences


def test_a_cursor_only_goes_forward() -> None:
    leases = Leases(0, 10)
    leases.add(grant(1))
    first, second = leases.draw(3), leases.draw(3)
    assert first is not None and second is not None
    leases.commit(second.cursors)
    leases.commit(first.cursors)
    assert leases.cursors() == second.cursors == ((1, 6),)


def test_after_a_reconnect_the_syncer_says_what_is_held() -> None:
    leases = Leases(0, 30)
    for lease in (1, 2):
        assert leases.add(grant(lease, block=lease - 1))
    assert not leases.add(grant(1)), "a lease that is said twice is one"
    draw = leases.draw(10)
    assert draw is not None
    leases.commit(draw.cursors)
    leases.reconcile([grant(1, start=3), grant(3, block=2)])
    assert leases.cursors() == ((1, 10), (3, 0)), "2 is gone, 1 is not begun again, 3 is new"
    leases.reconcile([grant(3, block=2)])
    assert leases.cursors() == ((3, 0),)


@pytest.mark.parametrize(
    "wrong", [grant(1, block=3), grant(1, end=11), grant(1, start=5, end=4), grant(1, block=2, end=6), grant(1, size=0)]
)
def test_a_lease_that_contradicts_the_data_is_refused(wrong: Lease) -> None:
    with pytest.raises(WorkerError, match="the learners' data differ; give"):
        Leases(0, 25).add(wrong)


def test_finished_leases_do_not_grow_without_end() -> None:
    leases = Leases(0, 2000)
    for lease in range(1, 201):
        leases.add(grant(lease, block=lease - 1))
        draw = leases.draw(10)
        assert draw is not None
        leases.commit(draw.cursors)
    assert len(leases.cursors()) == 128
    assert leases.cursors()[-1] == (200, 10)
