"""The tables of all metrics in docs/monitoring.md, from what syncer and learner show (tools/generate.py)."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import contracts
from prometheus_client.core import Metric

from diloco_syncer.server.pages.metrics import StatusCollector
from diloco_worker.status_page import _METRICS, StatusPort

OF_WORKER = ("job", "role", "region", "ordinal")  # labels of each of a learner's metrics


def tables() -> dict[str, str]:
    """The tables of the page by their names."""
    syncer = StatusCollector(lambda: contracts.EXAMPLES["status"]).collect()
    settings = SimpleNamespace(
        job=SimpleNamespace(metadata=SimpleNamespace(name="")), role="learner", region="", ordinal=0
    )
    learner = StatusPort(settings, None)
    learner.attach(learner._connection, lambda: dict.fromkeys(_METRICS, 0.0))
    return {
        "metrics of the syncer": table(syncer, common=("job",)),
        "metrics of a learner": table(learner.collect(), common=OF_WORKER),
    }


def table(metrics: Iterable[Metric], *, common: tuple[str, ...]) -> str:
    """A row for each metric; ``common`` labels, which all have, are left out."""
    rows = ["| metric | type | labels | |", "|---|---|---|---|"]
    for metric in metrics:
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric._labelnames if label not in common)
        rows.append(f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |")
    return "\n".join(rows)
