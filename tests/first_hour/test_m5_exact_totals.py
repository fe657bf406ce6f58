"""Where nothing is pending in any fragment, no token is: what rounding leaves is merged."""

from __future__ import annotations

import io

from rich.console import Console

from diloco.local.summary import summary
from diloco_protocol.documents import Tokens
from diloco_protocol.wire.records import FragmentReport, PushHeader, StepReport
from diloco_syncer.core.books.ledger import Ledger
from ledger_balance import imbalances
from status_documents import job_report

FRAGMENTS = 3


def trained(tokens: int, dropped: tuple[int, ...]) -> StepReport:
    """A learner's report: of each fragment some tokens were dropped as overlap."""
    rows = tuple(FragmentReport(1, 0, 1, tokens - lost, 0, lost) for lost in dropped)
    return StepReport(1, 1, tokens, rows)


def header(fragment: int, tokens: int, report: StepReport) -> PushHeader:
    return PushHeader(fragment, 1, 1, 1, 0, 0, 1, 1, 1, tokens, 1.0, "float32", "L", report, 0, 1)


def test_m5_no_token_is_pending_once_every_part_is_merged_or_dropped() -> None:
    ledger = Ledger(FRAGMENTS, 1)
    ledger.open_tenure(0, 1)
    lost = (1, 0, 0)  # a third of a token: rounded down both ways, it would be nobody's
    report = trained(100, lost)
    assert ledger.apply_report(0, report)
    for fragment in range(FRAGMENTS):
        assert ledger.totals().pending > 0
        ledger.count_merge(header(fragment, 100 - lost[fragment], report))
        assert not imbalances(ledger)
    assert [(row.merged, row.pending, row.dropped) for row in ledger.rows()] == [(99, 0, 1), (100, 0, 0), (100, 0, 0)]
    assert ledger.totals() == Tokens(trained=100, merged=100, pending=0, dropped=0)


def test_m5_what_is_pending_at_the_end_is_said_with_the_reason() -> None:
    tokens = {"trained": 100, "merged": 60, "pending": 40, "dropped": 0}
    for outcome, words in (("complete", "fewer learners than a merge needs"), ("interrupted", "kept in the store")):
        console = Console(file=io.StringIO(), width=200)
        console.print(summary(job_report(outcome=outcome, tokens=tokens, ledger=[])))
        assert words in console.file.getvalue()  # type: ignore[attr-defined]
        console = Console(file=io.StringIO(), width=200)
        console.print(summary(job_report(outcome=outcome, tokens={**tokens, "pending": 0, "merged": 100})))
        assert words not in console.file.getvalue()  # type: ignore[attr-defined]


def test_m5_what_no_store_is_known_to_have_is_not_promised() -> None:
    tokens = {"trained": 100, "merged": 60, "pending": 40, "dropped": 0}
    console = Console(file=io.StringIO(), width=200)
    console.print(summary(job_report(outcome="interrupted", tokens=tokens, ledger=None)))
    assert "40 pending (as last heard)" in console.file.getvalue()  # type: ignore[attr-defined]
