"""What a continuation begins with after a hard end: the figures of the store, once all processes are gone.

A syncer that was killed cannot say what of its last status is durable. So the store is read as a restart reads it, with
the same core, and every learner counts as gone: what it had neither in a merge nor in a spooled offer is dropped.
Nothing is written. No parameters are read, so it takes as long for a large model as for a small one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from diloco_protocol.documents import LedgerRow, Tokens
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core.books.ledger import header_from_json
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.store import records
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.epochs import epoch_of
from diloco_syncer.store.records import Damaged
from diloco_syncer.store.replay import replay_records, take_back_versions
from diloco_syncer.store.restore import StoreReader


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """``not_offered``: tokens in the newest state that were neither merged nor offered; in ``tokens`` they are dropped.
    ``versions``: of the fragments."""

    tokens: Tokens
    ledger: list[LedgerRow]
    not_offered: int
    merges: int
    versions: list[int]
    steps: int


def read_kept_tokens(job: DiLoCoJob, store: Store) -> KeptTokens | None:
    """The figures that the job continues with; None: it has no state yet. Raises ``StoreUnusable``, ``Damaged``,
    ``ObjectNotFound``, ``FormatRefused``, OSError."""
    reader = StoreReader(store, job.metadata.name, with_arrays=False)
    layout = reader.layout()
    found = reader.newest(layout)
    if layout is None or found.core is None:
        return None
    epoch = epoch_of(found.name) + 1
    core = Core(CoreConfig.from_job(job), found.core["core"], epoch, time.monotonic(), wall=time.time())
    if core.ledger is None:
        return None
    offers = _offers(store)
    take_back_versions(core, [chain.newest for chain in found.chains])
    newer = sorted((record for chain in found.chains for record in chain.newer), key=lambda record: record.number)
    replay_records(core, newer, offers)
    for header in offers:
        core.restore_offer(header, 0, 0.0)
    core.start(time.monotonic())
    before = core.ledger.totals()
    core.write_off_learners()
    tokens = core.ledger.totals()
    steps = max((slot.step for slot in core.slots), default=0)
    lost = before.pending - tokens.pending
    return KeptTokens(tokens, core.ledger.rows(), lost, core.merges, versions=list(core.versions), steps=steps)


def _offers(store: Store) -> list[PushHeader]:
    headers = []
    for name in store.list("offers"):
        try:
            headers.append(header_from_json(records.read_body(store, name, "offer")["header"]))
        except (Damaged, ObjectNotFound, KeyError, TypeError, ValueError):
            continue  # a restart sets it aside
    return headers
