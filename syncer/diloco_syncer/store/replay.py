"""Tells a core what the store has that is newer than the core's saved state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core.core import Core
from diloco_syncer.core.recovery.lost_versions import STAND_IN
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.restore import StoreUnusable, stand_in


def take_back_versions(core: Core, newest: Sequence[MergeRecord]) -> list[MergeRecord]:
    """Tell a core of each fragment whose newest record is older than its saved state; returns the records to go on
    from. One that the state knows nothing of any more is stood in for. Raises ``StoreUnusable`` where the job has
    ended: nobody can bring anything back then."""
    records = list(newest)
    for fragment, (record, version) in enumerate(zip(newest, core.versions, strict=False)):
        if record.version < version and not core.take_back_version(fragment, record.version):
            records[fragment] = stand_in(record.job, fragment, record.theta.size)
    missing = [record.fragment for record in records if record.made_in == STAND_IN]
    if missing and core.phase in {JobPhase.EVALUATING, *ENDED_PHASES}:
        raise StoreUnusable(
            f"the job is {core.phase.value}, and of fragment {missing[0]} of its model no version is left that fits: "
            "restore the store from a copy"
        )
    return records


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
