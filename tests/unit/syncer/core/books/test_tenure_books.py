"""The books of one slot: what a report may change, and what ends with a tenure."""

from __future__ import annotations

from dataclasses import replace

from diloco_protocol.wire.records import FragmentReport, PushHeader, StepReport
from diloco_syncer.core.books.ledger import Ledger


def report(trained: int, confirmed: int = 0, epoch: int = 1, fragments: int = 1) -> StepReport:
    """Of ``trained`` tokens, ten a step."""
    row = FragmentReport(epoch, 0, trained // 10, trained - confirmed, confirmed_tokens=confirmed)
    return StepReport(trained // 10, trained // 10, trained, (row,) * fragments)


def header(tokens: int, incarnation: int = 1) -> PushHeader:
    told = report(tokens)
    steps = tokens // 10
    return PushHeader(
        0,
        1,
        1,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=steps,
        steps=steps,
        tokens=tokens,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=told,
        slot=0,
        incarnation=incarnation,
    )


def opened(fragments: int = 1) -> Ledger:
    ledger = Ledger(fragments, 1)
    ledger.open_tenure(0, 1)
    return ledger


def test_a_report_of_other_fragments_or_an_older_one_changes_nothing() -> None:
    ledger = opened()
    assert ledger.apply_report(0, report(100))
    assert not ledger.apply_report(0, report(200, fragments=2))
    assert not ledger.apply_report(0, report(90))
    assert ledger.trained(0) == 100
    assert ledger.apply_report(0, report(100, confirmed=50)), "not older: it tells of a merge"
    assert not ledger.apply_report(0, report(100))
    assert ledger.pending(0, 0) == 100


def test_what_was_merged_of_a_tenure_is_nothing_of_the_next() -> None:
    ledger = opened()
    ledger.apply_report(0, report(100))
    ledger.count_merge(header(80))
    assert ledger.close_tenure(0, "died", ()) == 20
    ledger.open_tenure(0, 2)
    ledger.apply_report(0, report(30))
    assert (ledger.merged(0, 0), ledger.pending(0, 0), ledger.dropped(0, 0)) == (80, 30, {"died": 20})


def test_the_stalls_of_a_tenure_that_is_over_are_still_the_slots() -> None:
    ledger = opened()
    for tenure in (1, 2):
        ledger.apply_report(0, replace(report(100), stalled_seconds=3.0))
        assert ledger.stalled_seconds(0) == 3.0 * tenure
        ledger.close_tenure(0, "died", ())
        ledger.open_tenure(0, tenure + 1)
    assert ledger.stalled_seconds(0) == 6.0


def test_tokens_that_are_confirmed_and_unknown_were_rolled_back_if_their_base_is_of_this_epoch() -> None:
    """Of an earlier one the version that has them may still come back."""
    ledger = opened()
    ledger.apply_report(0, report(100, confirmed=50, epoch=1))
    ledger.drop_rolled_back(0, 2)
    assert ledger.dropped(0, 0) == {}
    ledger.drop_rolled_back(0, 1)
    assert ledger.dropped(0, 0) == {"rolled-back": 50} and ledger.pending(0, 0) == 50
