"""What the operator and the API server count, read from outside."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

import fleet
import programs
from kubeapi import Api

PREFIX = "diloco_operator_"
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The operator's counts at one time."""

    at: float
    samples: Mapping[tuple[str, Labels], float]
    counted: float  # requests, as the API server counts
    cpu: float  # seconds

    def requests(self) -> Counter[str]:
        """By verb and resource."""
        found: Counter[str] = Counter()
        for (name, labels), value in self.samples.items():
            if name == PREFIX + "api_requests_total":
                words = dict(labels)
                found[f"{words['verb']} {words['resource']}"] += round(value)
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.samples.get((PREFIX + name, frozenset(labels.items())), 0.0)

    def buckets(self, name: str) -> Counter[float]:
        """Upper bound -> observations up to it, whatever the other labels are."""
        found: Counter[float] = Counter()
        for (sample, labels), value in self.samples.items():
            if sample == f"{PREFIX}{name}_bucket":
                found[float(dict(labels)["le"])] += round(value)
        return found


def snapshot(operator: programs.Operator, api: Api) -> Snapshot:
    families = text_string_to_metric_families(operator.page("/metrics"))
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    return Snapshot(time.monotonic(), samples, fleet.requests_counted(api), operator.cpu_seconds)


def quantile(share: float, name: str, before: Snapshot, after: Snapshot) -> float:
    """Of what was observed between two snapshots, interpolated within its bucket; NaN: nothing was."""
    old = before.buckets(name)
    counts = sorted((bound, count - old[bound]) for bound, count in after.buckets(name).items())
    total = counts[-1][1] if counts else 0.0
    low, below = 0.0, 0.0
    for bound, count in counts:
        if total and count >= share * total:
            if bound == float("inf"):
                return low  # it is more: the histogram ends here
            return low + (bound - low) * (share * total - below) / max(count - below, 1e-9)
        low, below = bound, count
    return float("nan")


def reconciles(before: Snapshot, after: Snapshot) -> float:
    return after.value("reconcile_seconds_count") - before.value("reconcile_seconds_count")


def difference(before: Snapshot, after: Snapshot) -> int:
    return sum((after.requests() - before.requests()).values())


def words(before: Snapshot, after: Snapshot) -> str:
    found = (after.requests() - before.requests()).most_common(14)
    return ", ".join(f"{name} {count}" for name, count in found) or "none"


def errors(before: Snapshot, after: Snapshot) -> dict[str, int]:
    """What went wrong between two snapshots, by metric and kind."""
    found = {}
    for (name, labels), value in after.samples.items():
        if name in (PREFIX + "reconcile_errors_total", PREFIX + "apply_errors_total"):
            more = round(value - before.samples.get((name, labels), 0.0))
            if more:
                found[" ".join(dict(labels).values())] = more
    return found
