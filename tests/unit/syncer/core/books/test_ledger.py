"""The ledger's totals: what they cost where there are many slots and fragments, and what rounding leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_protocol.documents import Tokens
from diloco_protocol.wire.records import FragmentReport, PushHeader, StepReport
from diloco_syncer.core.books.ledger import Ledger
from ledger_balance import imbalances


class Unread(list):
    """Cells that nobody may walk through."""

    def __iter__(self) -> object:
        raise AssertionError("every cell was read")


def report(step: int, dropped: int = 0) -> StepReport:
    row = FragmentReport(1, 0, step, 10 * step - dropped, confirmed_tokens=0, dropped_overlap=dropped)
    return StepReport(step, step, 10 * step, (row,) * 4)


def test_no_slot_alone_makes_the_time_of_a_job_long() -> None:
    ledger = Ledger(2, 3)
    assert ledger.seconds_of_a_slot() == 0.0
    for slot, seconds in enumerate((8.0, 1e9, 0.0)):
        ledger.books[slot].cells[0].compute_seconds = seconds
        ledger.books[slot].forget_sums()
        assert ledger.seconds_of_a_slot() == 4.0


@pytest.mark.promise("A status request does not visit every fragment of every slot")
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


def trained(tokens: int, dropped: tuple[int, ...]) -> StepReport:
    """A learner's report: of each fragment some tokens were dropped as overlap."""
    rows = tuple(FragmentReport(1, 0, 1, tokens - lost, confirmed_tokens=0, dropped_overlap=lost) for lost in dropped)
    return StepReport(1, 1, tokens, rows)


def header(fragment: int, tokens: int, report: StepReport) -> PushHeader:
    return PushHeader(
        fragment,
        1,
        1,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=1,
        steps=1,
        tokens=tokens,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=report,
        slot=0,
        incarnation=1,
    )


def test_no_token_is_pending_once_every_part_is_merged_or_dropped() -> None:
    """What rounding leaves is merged."""
    fragments = 3
    ledger = Ledger(fragments, 1)
    ledger.open_tenure(0, 1)
    lost = (1, 0, 0)  # a third of a token: rounded down both ways, it would be nobody's
    report = trained(100, lost)
    assert ledger.apply_report(0, report)
    for fragment in range(fragments):
        assert ledger.totals().pending > 0
        ledger.count_merge(header(fragment, 100 - lost[fragment], report))
        assert not imbalances(ledger)
    assert [(row.merged, row.pending, row.dropped) for row in ledger.rows()] == [(99, 0, 1), (100, 0, 0), (100, 0, 0)]
    assert ledger.totals() == Tokens(trained=100, merged=100, pending=0, dropped=0)


@pytest.mark.promise("A row of the ledger that is wrong is named, and hides no status, no report and no end of the job")
@pytest.mark.parametrize("column", ["merged", "pending", "dropped"])
def test_a_wrong_row_is_named_and_blinds_nobody(column: str) -> None:
    """Each column in turn is far below 0, in one fragment."""
    ledger = Ledger(2, 2)
    ledger.open_tenure(1, 1)
    assert ledger.apply_report(1, trained(40, (0, 0)))
    cell = ledger.books[1].cells[1]
    if column == "merged":
        cell.merged -= 1000
    elif column == "pending":
        cell.tenure_merged += 1000
    else:
        cell.dropped["died"] -= 1000
    ledger.books[1].forget_sums()
    rows, totals = ledger.rows(), ledger.totals()
    assert [row.imbalance.partition(":")[0] for row in rows] == ["", "slot 1 fragment 1"] and "-" in rows[1].imbalance
    assert getattr(rows[1], column) == 0 and totals.trained == 40
    assert (rows[0].merged, rows[0].pending, rows[0].dropped) == (0, 40, 0)
