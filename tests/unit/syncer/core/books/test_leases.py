"""Leases are disjoint and cover everything, whoever joins, leaves or is slow."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_syncer.core.books.deterministic import DeterministicMode
from diloco_syncer.core.books.leases import LeaseBook, order_blocks
from example_counts import share_of


def positions(book: LeaseBook, block: int, start: int, end: int) -> list[int]:
    return [block * book.block_size + position for position in range(start, end)]


@pytest.mark.promise(
    "In each data epoch every sequence is leased once, whichever learners are lost, return or give up, "
    "and across restarts"
)
@given(total=st.integers(1, 300), slots=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=share_of(40))
def test_each_sequence_once_per_epoch(total: int, slots: int, seed: int) -> None:
    """Whoever is lost, comes back, or gives its leases up, and across restarts of the syncer. When an epoch begins,
    no lost slot has a lease of an epoch before."""
    chance = random.Random(seed)
    book = LeaseBook(7, total, slots)
    trained: dict[int, list[int]] = {0: [], 1: []}
    lost: set[int] = set()
    newest = 0
    while True:
        slot = chance.choice([s for s in range(slots) if s not in lost])
        leases = book.leases_of(slot)
        if leases:
            part = chance.randint(1, leases[0].end - leases[0].start)
            trained[leases[0].data_epoch] += positions(book, leases[0].block, leases[0].start, leases[0].start + part)
            book.advance_cursors(slot, [(leases[0].lease, leases[0].start + part)])
        else:
            epoch = book.grant_lease(slot, lost).data_epoch
            if epoch > newest:
                newest = epoch
                assert all(held.data_epoch == epoch for held in book.open.values() if held.slot in lost)
            if epoch == 2:
                break
        happening = chance.random()
        if happening < 0.05:
            book.return_leases(chance.randrange(slots))
        elif happening < 0.1:
            book = LeaseBook.from_json(7, json.loads(json.dumps(book.to_json())))
        elif happening < 0.2:
            lost ^= {chance.randrange(slots)}
            lost = lost if len(lost) < slots else set()
    assert not book.returned, "a new epoch begins when nothing is left of the last one"
    for held in book.open.values():
        if held.data_epoch < 2:
            trained[held.data_epoch] += positions(book, held.block, held.position, held.end)
    assert [sorted(trained[epoch]) for epoch in (0, 1)] == [list(range(total))] * 2


def test_what_lost_slots_hold_is_leased_on_when_the_epochs_last_block_is_out() -> None:
    book = LeaseBook(0, 64 * 2, 1)
    book.grant_lease(1)
    assert book.count_of(1) == 1
    kept = book.leases_of(1)[0].block
    for _ in range(book.blocks - 1):
        grant = book.grant_lease(0, lost=[1])
        assert grant.block != kept, "it may come back"
        book.advance_cursors(0, [(grant.lease, grant.end)])
    assert (book.grant_lease(0, lost=[1]).block, book.count_of(1)) == (kept, 0)
    assert book.grant_lease(0, lost=[1]).data_epoch == 1


def test_what_was_returned_outlives_the_syncer() -> None:
    book = LeaseBook(0, 640, 1)
    grant = book.grant_lease(0)
    book.advance_cursors(0, [(grant.lease, 4)])
    book.return_leases(0)
    again = LeaseBook.from_json(0, json.loads(json.dumps(book.to_json())))
    back = again.grant_lease(1)
    assert (back.block, back.start, back.end) == (grant.block, 4, grant.end)


def test_numbers_that_a_lost_state_may_have_given_are_not_given_again() -> None:
    book = LeaseBook(0, 640, 1)
    first = book.grant_lease(0).lease
    book.skip_numbers()
    assert book.grant_lease(0).lease > first + (1 << 16)


def test_a_cursor_beyond_a_leases_end_finishes_it() -> None:
    book = LeaseBook(0, 640, 1)
    grant = book.grant_lease(0)
    book.advance_cursors(0, [(grant.lease, grant.end + 1)])
    assert book.count_of(0) == 0


def test_each_epoch_has_an_order_of_its_own() -> None:
    book = LeaseBook(3, 64, 1)
    for epoch in (0, 1, 2):
        grants = [book.grant_lease(0) for _ in range(book.blocks)]
        assert [grant.block for grant in grants] == order_blocks(3, epoch, book.blocks)
        book.advance_cursors(0, [(grant.lease, grant.end) for grant in grants])


def test_a_lost_slots_block_is_leased_on_from_its_cursor() -> None:
    book = LeaseBook(0, 64 * 10, 1)
    grant = book.grant_lease(0)
    book.advance_cursors(0, [(grant.lease, 4)])
    (kept,) = book.leases_of(0)
    assert (kept.lease, kept.block, kept.start) == (grant.lease, grant.block, 4)
    book.return_leases(0)
    again = book.grant_lease(1)
    assert (again.block, again.start, again.end) == (grant.block, 4, grant.end)


def test_cursors_never_step_back_and_belong_to_their_slot() -> None:
    book = LeaseBook(0, 640, 1)
    grant = book.grant_lease(0)
    book.advance_cursors(0, [(grant.lease, 5)])
    book.advance_cursors(0, [(grant.lease, 3)])
    book.advance_cursors(1, [(grant.lease, 9)])
    assert book.leases_of(0)[0].start == 5


def test_epochs_are_ordered_by_seed_and_differ() -> None:
    assert order_blocks(1, 0, 100) == order_blocks(1, 0, 100)
    assert sorted(order_blocks(1, 0, 100)) == list(range(100))
    assert order_blocks(1, 0, 100) != order_blocks(1, 1, 100) != order_blocks(2, 1, 100)


def test_deterministic_leases_do_not_depend_on_who_asks_first() -> None:
    mode, one, two = DeterministicMode(2), LeaseBook(3, 1000, 2), LeaseBook(3, 1000, 2)
    a = [mode.grant_lease(one, slot, ()) for slot in (0, 1, 0, 1)]
    b = [mode.grant_lease(two, slot, ()) for slot in (1, 1, 0, 0)]
    assert [g.block for g in a] == [b[2].block, b[0].block, b[3].block, b[1].block]
    assert len({g.block for g in a}) == 4
