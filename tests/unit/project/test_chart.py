"""The chart as files: values, schema, README, dashboard, versions; test_chart_rendered.py has the rest."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from diloco.local.screen import LATE_SHARE
from diloco_operator.metrics import Metrics
from diloco_operator.model import RELEASE
from diloco_protocol.documents import StatusDocument
from diloco_protocol.vocabulary import SHARD_FAILING
from diloco_syncer.server.pages.metrics import StatusCollector
from diloco_worker import status_page
from repository import ROOT
from status_documents import shard_row, slot_link, slot_row, status_document

CHART = ROOT / "charts" / "diloco"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tool(name: str) -> ModuleType:
    """A program of tools/, as a module."""
    if str(ROOT / "tools") not in sys.path:
        sys.path.append(str(ROOT / "tools"))  # where it finds its neighbours
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chart = tool("chart")


def leaves(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> list[str]:
    """Paths of the values that the schema does not divide further."""
    found: list[str] = []
    for key, value in values.items():
        inner = schema["properties"][key]
        if isinstance(value, dict) and inner.get("properties") and value:
            found += leaves(value, inner, f"{path}{key}.")
        else:
            found.append(path + key)
    return found


# ---------------------------------------------------------------- values, schema, README


def test_every_value_is_in_the_schema_and_every_key_of_the_schema_has_a_default() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        assert schema["type"] == "object", path
        assert schema["additionalProperties"] is False, f"{path or 'the top'} takes unknown keys"
        assert set(values) == set(schema["properties"]) - {"global"}, path
        for key, value in values.items():
            inner = schema["properties"][key]
            whole = key in ("resources", "affinity")  # Kubernetes' own, passed on as they are
            if isinstance(value, dict) and inner.get("properties") and not whole:
                compare(value, inner, f"{path}{key}.")

    compare(VALUES, SCHEMA, "")


def test_every_value_is_described() -> None:
    described = {value.path for value in chart.documented((CHART / "values.yaml").read_text())}
    missing = [
        path
        for path in leaves(VALUES, SCHEMA)
        if not any(path == one or path.startswith(f"{one}.") for one in described)
    ]
    assert not missing


def test_descriptions_are_read_with_their_defaults() -> None:
    text = """
# a remark, not a description
a: 1
# -- First line,
# and the second.
b:
  # -- Of c.
  c: [x, "y|z"]
  d: {}
# -- Lost, because of the empty line.

e: null
"""
    found = [tuple(value) for value in chart.documented(text)]
    first = ("b", '{"c": ["x", "y|z"], "d": {}}', "First line, and the second.")
    assert found == [first, ("b.c", '["x", "y|z"]', "Of c.")]
    assert '["x", "y\\|z"]' in chart.table(text)


def test_the_version_is_the_projects() -> None:
    head = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert head["version"] == head["appVersion"] == PROJECT["version"] == RELEASE
    dockerfile = (ROOT / "examples" / "custom-loop.Dockerfile").read_text()
    assert f"ARG WORKER=diloco-worker:{PROJECT['version']}\n" in dockerfile


def test_without_helm_the_check_fails_and_says_why(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "chart.py"), "check"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "needs helm" in done.stderr


# ---------------------------------------------------------------- dashboard


DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())


def metric_names() -> set[str]:
    """Everything that operator, syncers and workers show, as Prometheus knows it."""
    names = set()
    for name, kind, _, _ in tool("operator_tables").metric_rows(Metrics()):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    collector = StatusCollector(busy_job)
    for family in collector.collect():
        names.add(family.name + ("_total" if family.type == "counter" else ""))
    for kind, name, _ in status_page._METRICS.values():
        names.add(f"diloco_worker_{name}" + ("_total" if kind == "counter" else ""))
    return names


def busy_job() -> StatusDocument:
    """A status from which every metric of the syncer is made."""
    link = slot_link(
        up_bytes_per_second=1.0,
        down_bytes_per_second=1.0,
        round_trip_seconds=1.0,
        needs_up_bytes_per_second=1.0,
        needs_down_bytes_per_second=1.0,
    )
    return status_document(
        tls={
            "secure": True,
            "connections": 1,
            "handshakes": 0,
            "refused": {"stranger": 1},
            "expires": 1.0,
            "peers_expire": 1.0,
        },
        eval_loss=[[1, 1.0]],
        learners_in_merges={"recent": 1.0, "overall": 1.0, "exchange_seconds": 1.0, "overlap_seconds": 1.0},
        versions=[1],
        refused={"other-round": 1},
        slots=[slot_row(region="local", loss=1.0, link=link)],
        shards=[shard_row()],
        regions=[{"name": "eu", "bytes_up": 1, "bytes_down": 1, "wire_bytes_up": 2, "wire_bytes_down": 2}],
    )


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    shown = set(re.findall(r"\bdiloco_[a-z_]+\b", json.dumps(DASHBOARD)))
    assert len(shown) > 25
    assert not shown - metric_names()
    first_rank = {"tokens_per_second", "eval_loss_nats", "goodput_ratio", "learners_in_merges"}
    of_ranks = {"slot_ranks", "slot_slowest_rank", "slot_slowest_rank_seconds"}
    of_shards = {"shard_serving", "shard_failures", "shard_cpu_seconds"}
    assert not {f"diloco_{name}" for name in first_rank | of_ranks | of_shards} - shown


def test_alerts_ask_for_metrics_that_there_are() -> None:
    rules = (CHART / "templates" / "prometheusrule.yaml").read_text()
    asked = set(re.findall(r"\bdiloco_[a-z_]+\b", rules))
    assert len(asked) > 10
    assert not asked - metric_names()
    assert f"diloco_shard_failures >= {SHARD_FAILING}" in rules, "as the syncer tells of it"
    assert f"diloco_slot_slowest_rank_seconds > {LATE_SHARE} * diloco_slot_step_seconds" in rules, "as the screen"


def test_the_dashboards_panels_stand_side_by_side() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["expr"].count("{") == target["expr"].count("}"), target["expr"]
            known = {"datasource", *(one["name"] for one in DASHBOARD["templating"]["list"]), "__rate_interval"}
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= known, target["expr"]


# ---------------------------------------------------------------- what images are made of


def listed(*words: str) -> set[str]:
    """What tools/requirements.py prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "requirements.py"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.splitlines())


def test_the_images_lists_are_what_pyproject_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert listed() == set(PROJECT["dependencies"])
    for role in ("operator", "syncer"):
        assert listed("--extra", role) == set(extras[role])
        assert not any(line.startswith(("torch", "transformers")) for line in extras[role])
    torch = listed("--extra", "worker", "--only", "torch")
    assert len(torch) == 1
    assert torch | listed("--extra", "worker", "--without", "torch") == set(extras["worker"])


def test_an_extra_that_is_not_there_is_named() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        listed("--extra", "wroker")
    assert "wroker" in caught.value.stderr and "worker" in caught.value.stderr
