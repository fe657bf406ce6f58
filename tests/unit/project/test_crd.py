"""The custom resource definition, as far as it can be judged without an API server (that one:
tests/e2e/test_crd_api.py)."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import AfterValidator

from diloco_operator.status_models import JobStatus, Progress
from diloco_protocol.spec.base import Spec, fields_by_alias, nested_model
from diloco_protocol.spec.job import IMMUTABLE, immutable_digests
from diloco_protocol.spec.kubectl_yaml import parse
from diloco_protocol.spec.load import job_to_json, parse_job
from repository import ROOT
from wrong_jobs import BASE, LEAVES, LEFT_TO_THE_OPERATOR, Leaf, local_job

sys.path.insert(0, str(ROOT / "tools"))

import crd_schema as schema
from crd_rules import BETWEEN_FIELDS, rules

SCHEMA = schema.schema()


def nodes(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, (*path, name))
    if "items" in node:
        yield from nodes(node["items"], (*path, "[]"))


NODES = dict(nodes(SCHEMA))


def where(leaf: Leaf) -> tuple[str, ...]:
    return tuple("[]" if isinstance(step, int) else step for step in leaf.path)


def test_kubectl_reads_the_file_as_the_definition() -> None:
    assert parse(schema.text()).value == json.loads(json.dumps(schema.definition()))


def test_plain_apply_takes_it() -> None:
    assert len(schema.text()) < schema.MAX_BYTES and len(json.dumps(schema.definition())) < schema.MAX_BYTES


def test_every_field_of_the_spec_is_there_with_its_description() -> None:
    for leaf in LEAVES:
        if leaf.path[0] == "spec" and len(leaf.path) > 1:
            node = NODES[where(leaf)]
            assert node["description"].endswith(".") and node.get("type"), leaf
            assert node.get("nullable", False) is leaf.nullable, leaf


def test_what_rules_read_is_bounded_and_patterns_mean_the_same_in_go() -> None:
    for path, node in NODES.items():
        if path[:1] != ("spec",):
            continue
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        # Null among choices cannot be said: a field of the spec must not need it.
        leaf = next((leaf for leaf in LEAVES if where(leaf) == path), None)
        assert "enum" not in node or leaf is None or not leaf.nullable, path
        # Classes such as \w are ASCII in Go and Unicode in the models; look-around Go does not have.
        assert not re.search(r"\\[wWdDsSbB]|\(\?", node.get("pattern", "")), path


def test_no_field_is_kept_unseen_but_the_free_mappings() -> None:
    free = {path for path, node in NODES.items() if node.get("x-kubernetes-preserve-unknown-fields")}
    assert free == {
        ("spec", "syncer", "podTemplate"),
        ("spec", "syncer", "shardPods", "podTemplate"),
        ("spec", "learners", "podTemplate"),
        ("spec", "evaluator", "podTemplate"),
        ("spec", "regions", "[]", "podTemplate"),
        ("status", "report"),
    }
    config = NODES["spec", "training", "model", "config"]
    assert config["additionalProperties"] == {"x-kubernetes-preserve-unknown-fields": True, "nullable": True}


def filled(node: dict[str, Any], value: Any) -> Any:
    """The value with the defaults of the schema, as an API server fills them in."""
    if isinstance(value, list):
        return [filled(node["items"], item) for item in value]
    if not isinstance(value, dict) or "properties" not in node:
        return value
    result = dict(value)
    for name, inner in node["properties"].items():
        if result.get(name) is None and "default" in inner and not (name in result and inner.get("nullable")):
            result[name] = copy.deepcopy(inner["default"])
        if name in result:
            result[name] = filled(inner, result[name])
    return result


@pytest.mark.parametrize("job", [local_job({}), BASE, local_job({"sync": {"every": 30}, "seed": None})])
def test_its_defaults_are_the_models(job: dict[str, Any]) -> None:
    plain = parse_job(json.dumps(job))
    there = filled(SCHEMA, job)
    assert json.loads(job_to_json(parse_job(json.dumps(there)))) == json.loads(job_to_json(plain))
    # All of them: what is still missing has null for its default.
    normal = json.loads(job_to_json(plain))["spec"]

    def compare(full: Any, written: Any, path: str) -> None:
        if isinstance(full, dict):
            for name, value in full.items():
                assert name in written or value is None, f"{path}.{name}"
                compare(value, written.get(name), f"{path}.{name}")

    compare(normal, there["spec"], "spec")


def test_whole_defaults_agree_with_the_fields_own() -> None:
    for path, node in NODES.items():
        if "default" in node and "properties" in node:
            assert filled(node, {}) == node["default"] or path[-1] == "stop", path


def test_rules_hang_on_what_is_there_and_say_a_cure() -> None:
    texts = set()
    for rule in rules():
        assert rule.home in NODES, rule
        target = (*rule.home, *rule.field.strip(".").split(".")) if rule.field else rule.home
        assert target in NODES, rule
        assert len(rule.message) < 300 and rule.message[-1] != "." and "\n" not in rule.message, rule
        assert (rule.home, rule.cel) not in texts
        texts.add((rule.home, rule.cel))
        # Only the past and the name are judged at the root: crd_rules says why.
        assert (rule.home == ()) == ("oldSelf" in rule.cel or "metadata" in rule.cel), rule
    assert len(BETWEEN_FIELDS) > 30


def test_what_is_immutable_is_what_learners_compare() -> None:
    assert {".".join(path) for path in IMMUTABLE} == set(immutable_digests(parse_job(json.dumps(BASE))))


def checked(model: type[Spec], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The fields with a check of their own in Python."""
    for alias, field in fields_by_alias(model).items():
        inner, many = nested_model(field.annotation)
        here = (*path, alias)
        if "AfterValidator" in repr((field.annotation, field.metadata)):
            yield here
        if inner is not None:
            yield from checked(inner, (*here, "[]") if many else here)


def test_a_check_that_the_schema_cannot_say_has_a_rule() -> None:
    from diloco_protocol.spec.job_spec import JobSpec

    assert AfterValidator.__name__ == "AfterValidator"
    turned_to_null = {("spec", "training", "evaluation"), ("spec", "training", "optimizer", "clipNorm")}
    for path in set(checked(JobSpec, ("spec",))) - turned_to_null:
        assert any(rule.home == path for rule in BETWEEN_FIELDS), path
    for path in LEFT_TO_THE_OPERATOR:
        assert path.startswith("training.model.config.")


def test_figures_are_rounded_for_people_and_a_diverged_loss_is_none() -> None:
    shown = Progress(loss=1.64738291, goodput=0.933333).model_dump()
    assert (shown["loss"], shown["goodput"]) == (1.6474, 0.9333)
    for loss in (float("nan"), float("inf")):
        assert Progress(loss=loss).loss is None
    with pytest.raises(ValueError, match="loss"):
        Progress(loss="1")  # type: ignore[arg-type]


def test_columns_show_what_the_status_has() -> None:
    for name, kind, path, _ in schema.COLUMNS:
        if path.startswith(".status") and "[" not in path:
            node = NODES[tuple(path.strip(".").split("."))]
            assert node["type"] == kind, name
    assert [name for name, _, _, priority in schema.COLUMNS if not priority] == [
        "Phase",
        "Learners",
        "Quorum",
        "Step",
        "Tokens",
        "Percent",
        "Loss",
        "Goodput",
        "Age",
    ]


def test_every_status_field_has_a_description() -> None:
    for path, node in NODES.items():
        if path[:1] == ("status",) and path[-1] != "[]":
            assert node.get("description", "").endswith((".", "since.", "...")), path
    assert JobStatus().model_dump()["conditions"] == []
