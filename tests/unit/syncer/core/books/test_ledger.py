"""What the ledger costs where there are many slots and fragments."""

from __future__ import annotations

from dataclasses import replace

from diloco_protocol.documents import Tokens
from diloco_protocol.wire.records import FragmentReport, StepReport
from diloco_syncer.core.books.ledger import Ledger
from ledger_balance import imbalances


class Unread(list):
    """Cells that nobody may walk through."""

    def __iter__(self) -> object:
        raise AssertionError("every cell was read")


def report(step: int, dropped: int = 0) -> StepReport:
    row = FragmentReport(1, 0, step, 10 * step - dropped, 0, dropped)
    return StepReport(step, step, 10 * step, (row,) * 4)


def test_totals_follow_reports_without_a_walk_through_every_cell() -> None:
    ledger = Ledger(4, 3)
    for slot in range(3):
        ledger.open_tenure(slot, slot + 1)
        assert ledger.apply_report(slot, report(1))
    assert ledger.totals() == Tokens(trained=30, merged=0, pending=30, dropped=0)
    cells = [book.cells for book in ledger.books]
    for book in ledger.books:
        book.cells = Unread(book.cells)
    assert ledger.apply_report(0, report(5, dropped=8))
    assert ledger.totals() == Tokens(trained=70, merged=0, pending=62, dropped=8)
    assert ledger.merged_compute_seconds() == 0
    for book, kept in zip(ledger.books, cells, strict=True):
        book.cells = kept
    ledger.close_tenure(1, "died", ())
    assert ledger.totals() == Tokens(trained=70, merged=0, pending=52, dropped=18) and not imbalances(ledger)
    ledger.open_tenure(1, 7)
    assert ledger.apply_report(1, replace(report(2), trained_tokens=20)) and not imbalances(ledger)
