"""Leases are disjoint and cover everything, whoever joins, leaves or is slow."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.core.deterministic import DeterministicMode
from diloco_syncer.core.members.leases import LeaseBook, block_order


def sequences(book: LeaseBook, block: int, start: int, end: int) -> list[int]:
    return [block * book.block_size + position for position in range(start, end)]


@given(total=st.integers(1, 300), slots=st.integers(1, 4), data=st.data())
def test_each_sequence_once_per_epoch(total: int, slots: int, data: st.DataObject) -> None:
    book = LeaseBook(7, total, slots)
    trained: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(2000):
        slot = data.draw(st.integers(0, slots - 1)) if total < 40 else _ % slots
        leases = book.leases_of(slot)
        if not leases:
            grant = book.grant_lease(slot, lost=[s for s in range(slots) if s != slot])
            if grant.data_epoch == 2:
                break
            leases = book.leases_of(slot)
        lease = leases[0]
        part = data.draw(st.integers(1, lease.end - lease.start)) if total < 40 else lease.end - lease.start
        trained[lease.data_epoch] += sequences(book, lease.block, lease.start, lease.start + part)
        book.advance_cursors(slot, [(lease.lease, lease.start + part)])
        if total < 40 and data.draw(st.integers(0, 9)) == 0:
            book.return_leases(slot)
        if total < 40 and data.draw(st.integers(0, 9)) == 0:
            book = LeaseBook.from_json(7, json.loads(json.dumps(book.to_json())))
    else:
        raise AssertionError("2000 leases do not reach the third epoch")
    for epoch in (0,):
        assert sorted(trained[epoch]) == list(range(total))
    assert len(set(trained[1])) == len(trained[1])


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
    assert block_order(1, 0, 100) == block_order(1, 0, 100)
    assert sorted(block_order(1, 0, 100)) == list(range(100))
    assert block_order(1, 0, 100) != block_order(1, 1, 100) != block_order(2, 1, 100)


def test_deterministic_leases_do_not_depend_on_who_asks_first() -> None:
    mode, one, two = DeterministicMode(2), LeaseBook(3, 1000, 2), LeaseBook(3, 1000, 2)
    a = [mode.grant_lease(one, slot, ()) for slot in (0, 1, 0, 1)]
    b = [mode.grant_lease(two, slot, ()) for slot in (1, 1, 0, 0)]
    assert [g.block for g in a] == [b[2].block, b[0].block, b[3].block, b[1].block]
    assert len({g.block for g in a}) == 4
