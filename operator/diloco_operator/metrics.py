"""The operator's metrics: the one list of them. docs/operator.md is written from it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from diloco_protocol.vocabulary import ResourcePhase

PHASES: tuple[str, ...] = tuple(one.value for one in ResourcePhase)
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PREFIX = "diloco_operator_"


class Metrics:
    """One set, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.reconcile_seconds = self._histogram("reconcile_seconds", "Duration of one look at a job, in seconds.")
        self.reconcile_errors = self._counter(
            "reconcile_errors",
            "Failed looks at a job, by kind: api, unreachable (the API server), conflict (a write on an old version, "
            "which is retried), internal.",
            "kind",
        )
        self.apply_errors = self._counter(
            "apply_errors",
            "Parts of a plan that could not be carried out, by reason: conflict, invalid, forbidden, policy, "
            "quota, webhook, terminating, unavailable, other.",
            "reason",
        )
        self.leads = self._gauge("leader", "1: this operator is the leader and acts; 0: it stands by.")
        self.queue_depth = self._gauge("queue_depth", "Jobs that are due and wait for a worker.")
        self.queue_lag = self._gauge(
            "queue_lag_seconds",
            "Seconds that the most overdue job has waited, or the duration of the longest look if that is more.",
        )
        self.api_requests = self._counter(
            "api_requests",
            "Requests to the API server, by verb, resource and HTTP status (0: no answer).",
            *("verb", "resource", "code"),
        )
        self.api_seconds = self._histogram(
            "api_request_seconds",
            "Duration of requests to the API server, in seconds, by verb, without the watches' streams.",
            "verb",
        )
        self.watch_restarts = self._counter(
            "watch_restarts", "Watches that had to list again, by resource (all: every watch).", "resource"
        )
        self.jobs = self._gauge("jobs", "Jobs by phase; the phase is empty until one is written.", "phase")
        self.objects = self._gauge("cached_objects", "Objects in memory, by kind.", "kind")
        self.replacements = self._counter(
            "replacements", "Learners and syncers that this operator saw lost, and that were replaced."
        )
        self.deletions = self._counter(
            "deletions", "Objects that the operator deleted, by kind and whether by force.", "kind", "force"
        )
        self.syncer_calls = self._counter(
            "syncer_calls",
            "Calls to syncers (status, report, process-ended, checkpoint, announce) and to learners' status "
            "ports (learner-status), by outcome: ok, unreachable, refused, failed.",
            *("method", "outcome"),
        )
        self.syncer_seconds = self._histogram("syncer_call_seconds", "Duration of such a call, in seconds.")
        self.before: Callable[[], None] = lambda: None  # sets gauges, before they are shown

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, text, labels, buckets=_BUCKETS, registry=self.registry)

    def request(self, verb: str, resource: str, status: int, seconds: float | None) -> None:
        """One request to the API server; ``seconds`` None: of a stream."""
        self.api_requests.labels(verb, resource, str(status)).inc()
        if seconds is not None:
            self.api_seconds.labels(verb).observe(seconds)

    def page(self) -> bytes:
        """Prometheus' text format."""
        self.before()
        return generate_latest(self.registry)
