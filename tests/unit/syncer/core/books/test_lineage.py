"""Which epochs settled: kept in order, and never taken back."""

from __future__ import annotations

from diloco_syncer.core.books.lineage import Lineage


def test_settled_epochs_stay_in_order_when_an_older_one_is_found_later() -> None:
    lineage = Lineage()
    for epoch in (2, 5, 3, 5):
        lineage.mark_settled(epoch)
    assert lineage.epochs == [2, 3, 5] and lineage.newest_settled == 5


def test_the_epoch_of_the_newest_recovery_does_not_go_back() -> None:
    lineage = Lineage()
    lineage.mark_settled(6)
    lineage.mark_recovered(7)
    lineage.mark_recovered(4)
    assert lineage.has_recovered
    assert not lineage.learn_settled(9) and lineage.is_unknown(9), "what was decided stays decided"


def test_of_what_an_emptied_store_forgot_nothing_is_another_lineage() -> None:
    lineage = Lineage()
    assert lineage.learn_settled(5, emptied=True)
    assert [lineage.is_unknown(epoch) for epoch in (3, 5, 6)] == [False, False, True]
