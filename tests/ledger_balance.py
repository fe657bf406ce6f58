"""What must hold of every ledger: trained = merged + pending + dropped, to the token, and totals are the rows'."""

from __future__ import annotations

from diloco_syncer.core.books.ledger import Ledger


def imbalances(ledger: Ledger) -> list[str]:
    """Say in words which columns do not add up; empty: the ledger is exact."""
    wrong = [words for slot in range(len(ledger.books)) for words in ledger.imbalances(slot)]
    rows, totals, parts = ledger.rows(), ledger.totals(), max(1, ledger.fragments)
    dropped = sum(row.dropped for row in rows) // parts
    merged = sum(row.merged for row in rows) // parts if any(row.pending for row in rows) else totals.trained - dropped
    for name, known in (("merged", merged), ("dropped", dropped)):
        if known != getattr(totals, name):
            wrong.append(f"{name}: {getattr(totals, name)} in all, and {known} by the rows")
    if totals.trained != totals.merged + totals.pending + totals.dropped:
        wrong.append(f"the totals do not add up: {totals}")
    return wrong
