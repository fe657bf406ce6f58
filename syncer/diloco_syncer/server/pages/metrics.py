"""Prometheus metrics, made from the status document at each scrape: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diloco_protocol.documents import StatusDocument, TlsStatus
from diloco_protocol.vocabulary import JobPhase, SlotState


class StatusCollector(Collector):
    """Turns a status document into metrics. Names end in their units (seconds, bytes, tokens)."""

    def __init__(self, status: Callable[[], StatusDocument]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # known only with a status; registering asks nothing

    def collect(self) -> Iterator[Metric]:
        document = self._status()
        job = document.job

        def gauge(name: str, text: str, value: float | None) -> Metric:
            family = GaugeMetricFamily(f"diloco_{name}", text, labels=["job"])
            if value is not None:
                family.add_metric([job], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(f"diloco_{name}", text, labels=["job"])
            family.add_metric([job], value)
            return family

        yield gauge("epoch", "The syncer's epoch: how many syncers this store has had", document.epoch)
        yield gauge("elapsed_seconds", "Seconds since the job's first step", document.elapsed_seconds)
        yield gauge("quorum_active", "Learners that can take part in merges", document.quorum.active)
        yield gauge("quorum_required", "Learners that a merge needs", document.quorum.required)
        yield gauge("standby", "Processes that wait for a slot", document.standby)
        yield gauge("sessions", "Control streams that are open", document.sessions)
        yield gauge("tokens_per_second", "Tokens trained per second, all learners", document.tokens_per_second)
        yield gauge("goodput_ratio", "Compute of merged steps over all slots' wall time", document.goodput)
        yield gauge("uptime_ratio", "Share of time in which a learner advanced", document.uptime)
        yield gauge("rounds_open", "Rounds that wait for pushes", len(document.rounds))
        yield gauge("store_failing", "1 while the store cannot be written", bool(document.store_problem))
        losses = document.eval_loss
        yield gauge("eval_loss_nats", "The merged model's mean loss per token", losses[-1][1] if losses else None)
        yield counter("merges", "Merges made durable", document.merges)
        yield counter("received_bytes", "Bulk bytes received from learners", document.bytes_up)
        yield counter("sent_bytes", "Bulk bytes sent to learners", document.bytes_down)
        seconds = document.seconds
        yield counter("merge_seconds", "Time to merge and make durable", seconds.merge)
        yield counter("quorum_wait_seconds", "Time from a round's opening to its quorum", seconds.quorum)
        yield counter("round_wait_seconds", "Time from a round's opening to its merge", seconds.waited)
        yield from self._labelled(document, job)
        yield from self._slots(document, job)
        yield from self._carried(document, job)

    def _tls(self, tls: TlsStatus, job: str) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "diloco_refused_connections", "Connections and joins refused, by reason", labels=["job", "reason"]
        )
        for reason, count in tls.refused.items():
            refused.add_metric([job, reason], count)
        yield refused
        if tls.secure:
            for key, text in (
                ("connections", "TLS connections that are open"),
                ("handshakes", "TLS handshakes under way"),
            ):
                family = GaugeMetricFamily(f"diloco_{key}", text, labels=["job"])
                family.add_metric([job], getattr(tls, key))
                yield family
            for key, name, text in (
                (
                    "expires",
                    "certificate_expires_timestamp_seconds",
                    "When the syncer's certificate expires, in Unix time",
                ),
                (
                    "peers_expire",
                    "peer_certificate_expires_timestamp_seconds",
                    "When the first of the learners' certificates expires, in Unix time",
                ),
            ):
                family = GaugeMetricFamily(f"diloco_{name}", text, labels=["job"])
                if getattr(tls, key) is not None:
                    family.add_metric([job], getattr(tls, key))
                yield family

    def _labelled(self, document: StatusDocument, job: str) -> Iterator[Metric]:
        phase = GaugeMetricFamily("diloco_phase", "1 for the job's phase", labels=["job", "phase"])
        for name in JobPhase:
            phase.add_metric([job, name.value], document.phase == name.value)
        tokens = GaugeMetricFamily(
            "diloco_tokens", "Whole tokens trained, merged, pending and dropped", labels=["job", "state"]
        )
        for state, count in document.tokens:
            tokens.add_metric([job, state], count)
        refused = CounterMetricFamily("diloco_refused_uploads", "Uploads refused, by reason", labels=["job", "reason"])
        for reason, count in sorted(document.refused.items()):
            refused.add_metric([job, reason], count)
        versions = GaugeMetricFamily("diloco_version", "Merges of a fragment", labels=["job", "fragment"])
        for fragment, version in enumerate(document.versions):
            versions.add_metric([job, str(fragment)], version)
        yield from (phase, tokens, refused, versions)
        yield from self._tls(document.tls, job)

    def _slots(self, document: StatusDocument, job: str) -> Iterator[Metric]:
        columns = {
            "step": ("step", "Inner steps of the slot"),
            "tokens": ("tokens", "Tokens trained in the slot"),
            "loss": ("loss_nats", "The learner's last loss per token"),
            "step_seconds": ("step_seconds", "The learner's median step time"),
            "compute_seconds": ("compute_seconds", "Time in forward, backward and optimizer"),
            "stalled_seconds": ("stalled_seconds", "Time in which training waited for this system"),
            "merged_pushes": ("merged_pushes", "Pushes of the slot that were merged"),
            "starved": ("starved", "1 for a slot that was late in three rounds running"),
        }
        for key, (name, text) in columns.items():
            family = GaugeMetricFamily(f"diloco_slot_{name}", text, labels=["job", "slot", "region"])
            for row in document.slots:
                if (value := getattr(row, key)) is not None:
                    family.add_metric([job, str(row.slot), row.region], value)
            yield family
        yield from self._links(document, job)
        state = GaugeMetricFamily(
            "diloco_slot_state", "1 for the slot's state", labels=["job", "slot", "region", "state"]
        )
        for row in document.slots:
            for name in SlotState:
                state.add_metric([job, str(row.slot), row.region, name.value], row.state == name.value)
        yield state

    def _carried(self, document: StatusDocument, job: str) -> Iterator[Metric]:
        for key, name, text in (
            ("bytes_up", "received_bytes", "Bulk bytes received from"),
            ("bytes_down", "sent_bytes", "Bulk bytes sent to"),
        ):
            slots = CounterMetricFamily(
                f"diloco_slot_{name}", f"{text} the slot's learners", labels=["job", "slot", "region"]
            )
            for row in document.slots:
                slots.add_metric([job, str(row.slot), row.region], getattr(row, key))
            yield slots
        for key, name, text in (
            ("bytes_up", "region_received_bytes", "Bulk bytes received from the region"),
            ("bytes_down", "region_sent_bytes", "Bulk bytes sent to the region"),
            ("wire_bytes_up", "region_wire_received_bytes", "All bytes received from the region, with TLS"),
            ("wire_bytes_down", "region_wire_sent_bytes", "All bytes sent to the region, with TLS"),
        ):
            regions = CounterMetricFamily(f"diloco_{name}", text, labels=["job", "region"])
            for region in document.regions:
                if (value := getattr(region, key)) is not None:
                    regions.add_metric([job, region.name], value)
            yield regions

    def _links(self, document: StatusDocument, job: str) -> Iterator[Metric]:
        columns = {
            "link_up_bytes_per_second": "The link's speed up, while pushes were arriving",
            "link_down_bytes_per_second": "The link's speed down, while broadcasts were arriving",
            "link_round_trip_seconds": "The link's round trip, the shortest of the last",
            "link_needs_up_bytes_per_second": "What the job's pace needs up",
            "link_needs_down_bytes_per_second": "What the job's pace needs down",
            "link_too_slow": "1 for a link that is slower than the job's pace needs",
        }
        for name, text in columns.items():
            family = GaugeMetricFamily(f"diloco_slot_{name}", text, labels=["job", "slot", "region"])
            for row in document.slots:
                if (value := getattr(row.link, name.removeprefix("link_"), None)) is not None:
                    family.add_metric([job, str(row.slot), row.region], value)
            yield family


def exposition(status: Callable[[], StatusDocument]) -> bytes:
    """The metrics page, UTF-8."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry)
