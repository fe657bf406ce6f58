"""Tells a core what the store has that is newer than the core's saved state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core.core import Core
from diloco_syncer.store.records import MergeRecord


def replay_records(core: Core, newer: Sequence[MergeRecord], offers: Iterable[PushHeader]) -> None:
    """Apply the records after the state, in the order of their merges. ``offers``: the spooled ones, which the caller
    restores afterwards; they tell which learners came after the state."""
    core.close_superseded_tenures(
        [r.header for record in newer for r in record.responders] + list(offers),
        [record.recovered.receipt for record in newer if record.recovered],
    )
    for record in newer:
        taken = record.recovered
        if taken is None:
            headers = [r.header for r in record.responders]
            core.apply_record(record.fragment, record.version, headers, record.epoch)
        else:
            core.apply_recovered_version(record.fragment, record.version, taken.epoch, taken.receipt, record.epoch)
