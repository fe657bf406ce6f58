"""What only the shell knows of the job, gathered for the status document and report.json."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from diloco_protocol.documents import MergeSeconds, OutputRow, Report, ShardRow, StatusDocument
from diloco_protocol.spec.job import DiLoCoJob, spec_digest
from diloco_syncer.core.core import Core
from diloco_syncer.core.documents import ShellFigures
from diloco_syncer.runtime.durability import Durability
from diloco_syncer.runtime.event_log import EventLog
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.runtime.merger import Merger
from diloco_syncer.runtime.traffic import Traffic
from diloco_syncer.server.links import LinkMeasures, find_machine_load, slot_links
from diloco_syncer.server.sessions import Sessions
from diloco_syncer.server.tls.access import CallAuthorizer


def bounded(document: StatusDocument | Report, limit: int) -> bytes:
    """The document as JSON of at most ``limit`` bytes; the oldest events of a status document are left out first.

    Raises ValueError if that is not enough.
    """
    text = document.model_dump_json().encode()
    events = document.events if isinstance(document, StatusDocument) else []
    while len(text) > limit and events:
        events = events[-(len(events) // 2) :] if len(events) > 1 else []
        text = document.model_copy(update={"events": events}).model_dump_json().encode()
    if len(text) > limit:
        raise ValueError(f"the answer has {len(text)} bytes; at most {limit} can be sent: read it over HTTP")
    return text


def peak_rss_bytes() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class StatusPage:
    """The status document and the report; everything is only read. ``refused``: uploads, by reason; ``find_output``:
    what became of the job's output so far; ``one_machine``: all learners are on this one."""

    job: DiLoCoJob
    core: Core
    clock: Callable[[], float]
    model: GlobalModel
    durability: Durability
    merger: Merger
    sessions: Sessions
    authorizer: CallAuthorizer
    traffic: Traffic
    event_log: EventLog
    refused: Callable[[], Counter[str]]
    imbalances: Callable[[], int]
    find_output: Callable[[], OutputRow | None]
    one_machine: bool
    find_shards: Callable[[], list[ShardRow]]

    def status(self) -> StatusDocument:
        return self.core.status(self.clock(), self._figures())

    def report(self) -> Report:
        return self.core.report(self.clock(), self._figures(), spec_digest(self.job), peak_rss_bytes())

    def _figures(self) -> ShellFigures:
        shards = self.find_shards()
        problems = [row.store_problem for row in shards if row.store_problem]
        return ShellFigures(
            job=self.job.metadata.name,
            store_problem=self.durability.problem or "".join(problems[:1]),
            sessions=self.sessions.count,
            links=slot_links(
                self.job,
                self.model.layout,
                self.core.slots,
                self._find_link,
                busy=find_machine_load() if self.one_machine else "",
            ),
            slot_bytes=self.traffic.slot_bytes,
            regions=self.traffic.rows(),
            refused_uploads=self.refused(),
            tls=self.authorizer.status(),
            merge_seconds=MergeSeconds.model_validate(self.merger.seconds),
            events=list(self.event_log.events),
            ledger_imbalances=self.imbalances(),
            output=self.find_output(),
            shards=shards,
        )

    def _find_link(self, slot: int) -> LinkMeasures | None:
        connection = self.sessions.find_connection(self.core.slots[slot].holder.connection)
        return None if connection is None else connection.link
