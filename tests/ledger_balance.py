"""What must hold of every ledger: trained = merged + pending + dropped, to the token, and totals are the rows'."""

from __future__ import annotations

from diloco_syncer.core.merging.ledger import Ledger


def imbalances(ledger: Ledger) -> list[str]:
    """Say in words which columns do not add up; empty: the ledger is exact."""
    wrong = [words for slot in range(len(ledger.books)) for words in ledger.imbalances(slot)]
    rows, totals, parts = ledger.rows(), ledger.totals(), max(1, ledger.fragments)
    for name in ("merged", "dropped"):
        if (known := sum(getattr(row, name) for row in rows) // parts) != getattr(totals, name):
            wrong.append(f"{name}: {getattr(totals, name)} in all, and {known} by the rows")
    return wrong
