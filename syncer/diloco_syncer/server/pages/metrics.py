"""Prometheus metrics, made from the status document at each scrape: nothing is counted twice.

A metric is a row of a table: its name (which ends in its unit), its help text, and where its value is in the document.
A value that is None is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco_protocol.documents import StatusDocument
from diloco_protocol.vocabulary import JobPhase, SlotState

Samples = Iterable[tuple[tuple[str, ...], float | None]]  # the labels behind "job", and the value
Family = tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, tuple[str, ...], Samples]

_SLOT = ("slot", "region")
_TLS = (
    ("connections", "connections", "TLS connections that are open"),
    ("handshakes", "handshakes", "TLS handshakes under way"),
    ("expires", "certificate_expires_timestamp_seconds", "When the syncer's certificate expires, in Unix time"),
    (
        "peers_expire",
        "peer_certificate_expires_timestamp_seconds",
        "When the first of the learners' certificates expires, in Unix time",
    ),
)
_OF_SLOT = (
    ("step", "step", "Inner steps of the slot"),
    ("tokens", "tokens", "Tokens trained in the slot"),
    ("loss", "loss_nats", "The learner's last loss per token"),
    ("step_seconds", "step_seconds", "The learner's median step time"),
    ("compute_seconds", "compute_seconds", "Time in forward, backward and optimizer"),
    ("stalled_seconds", "stalled_seconds", "Time in which training waited for this system"),
    ("merged_pushes", "merged_pushes", "Pushes of the slot that were merged"),
    ("starved", "starved", "1 for a slot that was late in three rounds running"),
    ("ranks", "ranks", "Processes of the learner"),
    ("slowest_rank", "slowest_rank", "The rank that comes last to the ends of the learner's steps"),
    ("slowest_rank_seconds", "slowest_rank_seconds", "By how much it comes after the first rank, a mean of steps"),
)
_OF_LINK = (
    ("link_up_bytes_per_second", "The link's speed up, while pushes were arriving"),
    ("link_down_bytes_per_second", "The link's speed down, while broadcasts were arriving"),
    ("link_round_trip_seconds", "The link's round trip, the shortest of the last"),
    ("link_needs_up_bytes_per_second", "What the job's pace needs up"),
    ("link_needs_down_bytes_per_second", "What the job's pace needs down"),
    ("link_too_slow", "1 for a link that is slower than the job's pace needs"),
)
_OF_SHARD = (
    ("serving", "shard_serving", "1 while the shard is there"),
    ("failures", "shard_failures", "How often in a row the shard's process ended soon after its start"),
    ("cpu_seconds", "shard_cpu_seconds", "Processor time of the shard's process"),
    ("resident_bytes", "shard_peak_memory_bytes", "The most memory that the shard's process has had"),
)
_CARRIED_OF_SLOT = (
    ("bytes_up", "received_bytes", "Bulk bytes received from the slot's learners"),
    ("bytes_down", "sent_bytes", "Bulk bytes sent to the slot's learners"),
)
_CARRIED_OF_REGION = (
    ("bytes_up", "region_received_bytes", "Bulk bytes received from the region"),
    ("bytes_down", "region_sent_bytes", "Bulk bytes sent to the region"),
    ("wire_bytes_up", "region_wire_received_bytes", "All bytes received from the region, with TLS"),
    ("wire_bytes_down", "region_wire_sent_bytes", "All bytes sent to the region, with TLS"),
)


def _of_job(document: StatusDocument) -> Iterator[Family]:
    losses, seconds, merged = document.eval_loss, document.seconds, document.learners_in_merges
    ages = [row.open_seconds for row in document.rounds]
    for name, text, gauge in (
        ("epoch", "The syncer's epoch: how many syncers this store has had", document.epoch),
        ("elapsed_seconds", "Seconds since the job's first step", document.elapsed_seconds),
        ("quorum_active", "Learners that can take part in merges", document.quorum.active),
        ("quorum_required", "Learners that a merge needs", document.quorum.required),
        ("standby", "Processes that wait for a slot", document.standby),
        ("sessions", "Control streams that are open", document.sessions),
        ("tokens_per_second", "Tokens trained per second, all learners", document.tokens_per_second),
        ("goodput_ratio", "Compute of merged steps over all slots' wall time", document.goodput),
        ("uptime_ratio", "Share of time in which a learner advanced", document.uptime),
        ("learners_in_merges", "Learners in a merge, the mean of the last ones", merged.recent if merged else None),
        (
            "exchange_seconds",
            "From a round's opening until K learners have its version",
            merged.exchange_seconds if merged else None,
        ),
        (
            "overlap_seconds",
            "What the steps take that an exchange may overlap",
            merged.overlap_seconds if merged else None,
        ),
        ("rounds_open", "Rounds that wait for pushes", len(document.rounds)),
        ("rounds_overdue", "Of them those that have waited far too long", sum(row.overdue for row in document.rounds)),
        ("round_open_seconds", "Age of the round that is open longest", max(ages, default=0.0)),
        ("store_failing", "1 while the store cannot be written", bool(document.store_problem)),
        ("large_merges", "Merges since the start whose norm was far above those before", document.large_merges),
        ("ledger_imbalances", "Rows of the ledger that do not add up: above 0 is a fault", document.ledger_imbalances),
        ("eval_loss_nats", "The merged model's mean loss per token", losses[-1][1] if losses else None),
    ):
        yield GaugeMetricFamily, name, text, (), [((), gauge)]
    for name, text, count in (
        ("merges", "Merges made durable", document.merges),
        ("received_bytes", "Bulk bytes received from learners", document.bytes_up),
        ("sent_bytes", "Bulk bytes sent to learners", document.bytes_down),
        ("merge_seconds", "Time to merge and make durable", seconds.merge),
        ("quorum_wait_seconds", "Time from a round's opening to its quorum", seconds.quorum),
        ("round_wait_seconds", "Time from a round's opening to its merge", seconds.waited),
    ):
        yield CounterMetricFamily, name, text, (), [((), count)]
    phases = [((name.value,), document.phase == name.value) for name in JobPhase]
    yield GaugeMetricFamily, "phase", "1 for the job's phase", ("phase",), phases
    tokens = [((state,), count) for state, count in document.tokens]
    yield GaugeMetricFamily, "tokens", "Whole tokens trained, merged, pending and dropped", ("state",), tokens
    refused = [((reason,), count) for reason, count in sorted(document.refused.items())]
    yield CounterMetricFamily, "refused_uploads", "Uploads refused, by reason", ("reason",), refused
    versions = [((str(fragment),), version) for fragment, version in enumerate(document.versions)]
    yield GaugeMetricFamily, "version", "Merges of a fragment", ("fragment",), versions
    refused = [((reason,), count) for reason, count in document.tls.refused.items()]
    yield CounterMetricFamily, "refused_connections", "Connections and joins refused, by reason", ("reason",), refused
    for key, name, text in _TLS if document.tls.secure else ():
        yield GaugeMetricFamily, name, text, (), [((), getattr(document.tls, key))]


def _of_slots(document: StatusDocument) -> Iterator[Family]:
    rows = [((str(row.slot), row.region), row) for row in document.slots]
    for key, name, text in _OF_SLOT:
        yield GaugeMetricFamily, f"slot_{name}", text, _SLOT, [(who, getattr(row, key)) for who, row in rows]
    for name, text in _OF_LINK:
        key = name.removeprefix("link_")
        yield GaugeMetricFamily, f"slot_{name}", text, _SLOT, [(who, getattr(row.link, key, None)) for who, row in rows]
    states = [((*who, name.value), row.state == name.value) for who, row in rows for name in SlotState]
    yield GaugeMetricFamily, "slot_state", "1 for the slot's state", (*_SLOT, "state"), states
    for key, name, text in _CARRIED_OF_SLOT:
        yield CounterMetricFamily, f"slot_{name}", text, _SLOT, [(who, getattr(row, key)) for who, row in rows]
    for key, name, text in _CARRIED_OF_REGION:
        regions = [((row.name,), getattr(row, key)) for row in document.regions]
        yield CounterMetricFamily, name, text, ("region",), regions


def _of_shards(document: StatusDocument) -> Iterator[Family]:
    for key, name, text in _OF_SHARD if document.shards else ():
        yield GaugeMetricFamily, name, text, ("shard",), [((str(r.shard),), getattr(r, key)) for r in document.shards]


class StatusCollector(Collector):
    """Turns a status document into metrics."""

    def __init__(self, status: Callable[[], StatusDocument]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        document = self._status()
        for rows in (_of_job(document), _of_slots(document), _of_shards(document)):
            for kind, name, text, labels, samples in rows:
                family = kind(f"diloco_{name}", text, labels=["job", *labels])
                for values, value in samples:
                    if value is not None:
                        family.add_metric([document.job, *values], value)
                yield family


def exposition(status: Callable[[], StatusDocument]) -> bytes:
    """The metrics page, UTF-8."""
    return generate_latest(StatusCollector(status))
