"""The tables of docs/operator.md, from where settings, permissions and metrics are defined (tools/generate.py)."""

from __future__ import annotations

from prometheus_client.metrics import MetricWrapperBase

from diloco_operator.kube.kinds import OWN_NEEDS, needs
from diloco_operator.metrics import Metrics
from diloco_operator.settings import fields, flag, shown_default, variable


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def settings_table() -> str:
    """Every flag and variable."""
    rows = ["| flag, variable | takes | default | |", "|---|---|---|---|"]
    for setting in fields():
        rows.append(
            f"| `{flag(setting.name)}`<br>`{variable(setting.name)}` | {setting.metadata['takes']} "
            f"| `{_cell(shown_default(setting))}` | {_cell(setting.metadata['text'])} |"
        )
    return "\n".join(rows)


def permissions_table() -> str:
    """Every rule that the operator's account needs."""
    rows = ["| API group | resource | verbs | for |", "|---|---|---|---|"]
    for need in (*needs(nodes=True), *OWN_NEEDS):
        also = "; not in namespaced mode" if need.optional else ""
        also += "; in the operator's own namespace" if need in OWN_NEEDS else ""
        rows.append(
            f"| {f'`{need.group}`' if need.group else 'core'} | `{need.resource}` | {', '.join(need.verbs)} "
            f"| {_cell(need.why)}{also} |"
        )
    return "\n".join(rows)


def metrics_table() -> str:
    """Every metric."""
    rows = ["| metric | type | labels | |", "|---|---|---|---|"]
    for name, kind, labels, text in metric_rows(Metrics()):
        rows.append(f"| `{name}` | {kind} | {', '.join(f'`{one}`' for one in labels)} | {_cell(text)} |")
    return "\n".join(rows)


def metric_rows(metrics: Metrics) -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and help of each metric, as they are shown."""
    rows: list[tuple[str, str, tuple[str, ...], str]] = []
    for one in vars(metrics).values():
        if isinstance(one, MetricWrapperBase):
            kind = str(one._type)
            name = one._name + ("_total" if kind == "counter" else "")
            rows.append((name, kind, tuple(one._labelnames), one._documentation))
    return rows


def tables() -> dict[str, str]:
    """The tables of the page by their names."""
    return {"settings": settings_table(), "permissions": permissions_table(), "metrics": metrics_table()}
