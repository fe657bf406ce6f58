"""What must hold of every ledger: trained = merged + pending + dropped, to the token."""

from __future__ import annotations

from diloco_syncer.core.merging.ledger import Ledger


def imbalances(ledger: Ledger) -> list[str]:
    """Say in words which (slot, fragment) have columns that do not add up; empty: the ledger is exact."""
    wrong = []
    for slot in range(len(ledger.books)):
        trained = ledger.trained(slot)
        for fragment in range(ledger.fragments):
            merged, pending = ledger.merged(slot, fragment), ledger.pending(slot, fragment)
            dropped = ledger.dropped(slot, fragment)
            if (
                trained != merged + pending + sum(dropped.values())
                or min([merged, pending, *dropped.values()], default=0) < 0
            ):
                wrong.append(
                    f"slot {slot} fragment {fragment}: trained {trained}, merged {merged}, "
                    f"pending {pending}, dropped {dropped}"
                )
    return wrong
