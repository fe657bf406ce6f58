"""The job spec: every field wrong once, every rule broken once (tests/wrong_jobs.py has the cases), and what
the models promise about themselves.
"""

from __future__ import annotations

import ast
import copy
import ipaddress
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from diloco_protocol.common.quantities import parse_quantity
from diloco_protocol.spec import rules
from diloco_protocol.spec.base import CIDR_PATTERN, Spec, fields_by_alias, nested_model, unwrap
from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.explain import words
from diloco_protocol.spec.job import DiLoCoJob, immutable_digests, spec_digest
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError, Problem, job_from_json, job_to_json, job_warnings, parse_job
from diloco_protocol.spec.training import StopSpec
from example_counts import share_of
from wrong_jobs import (
    BASE,
    CLUSTERS,
    FAR_SHARD_PODS,
    LEAVES,
    NAMES,
    RULES,
    SHARD_PODS,
    SIZES,
    TOGETHER,
    Leaf,
    broken,
    good_value,
    local_job,
    put,
    typo,
    without,
    wrong_values,
)


def problems(job: Any) -> list[Problem]:
    """What is wrong with a job, [] if nothing."""
    try:
        parse_job(json.dumps(job))
    except JobError as error:
        return error.problems
    return []


# ------------------------------------------------------------------ single fields


def test_the_base_job_is_valid_and_has_every_part() -> None:
    assert problems(BASE) == []
    assert len(LEAVES) > 100
    for leaf in LEAVES:
        put(BASE, leaf.path, None)  # every path can be reached


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_a_wrong_value_is_refused_by_name_and_alone(leaf: Leaf) -> None:
    cases = list(wrong_values(leaf))
    assert cases
    for value in cases:
        found = problems(put(BASE, leaf.path, value))
        # The field or an item in it, once or more; never a consequence elsewhere.
        assert found, value
        for problem in found:
            assert (problem.path + ".").startswith(f"{leaf}."), (value, found)
            assert problem.message.startswith(("must ", "is out of range", "is required")), problem
        if value is not None and not isinstance(value, (list, dict)):
            assert found[0].value == value and str(leaf) in str(found[0])


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_values_at_the_bounds_are_taken(leaf: Leaf) -> None:
    bounds = leaf.bounds
    values = [good_value(leaf)] if unwrap(leaf.annotation)[0] is not str else []
    values += [bounds[name] for name in ("ge", "le") if name in bounds]
    values += [None] if leaf.nullable else []
    for value in values:
        for problem in problems(put(BASE, leaf.path, value)):
            assert not problem.message.startswith(f"must be {words(leaf.annotation, leaf.metadata)}"), problem


def test_an_unknown_field_is_refused_at_every_level_with_the_nearest_name() -> None:
    for leaf in LEAVES:
        name, job = typo(leaf)
        if len(str(leaf.path[-1])) < 4:
            continue
        found = [problem for problem in problems(job) if problem.path.endswith(f"{name}")]
        assert len(found) == 1 and f"did you mean {leaf.path[-1]}?" in found[0].message, (leaf, problems(job))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("spec.training.optimizer.weight_decay", "did you mean weightDecay?"),
        ("spec.training.optimizer.Betas", "did you mean betas?"),
        ("spec.overlap", "did you mean spec.sync.overlap?"),
        ("spec.training.quorum", "did you mean spec.sync.quorum?"),
        ("spec.sync.zzz", "known are fragments, every, overlap"),
        ("spec.regions.0.learner", "did you mean learners?"),
        ("zzz", "known are apiVersion, kind, metadata, spec"),
        ("metadata.uuid", "known are name, namespace, labels"),
    ],
)
def test_hints(path: str, hint: str) -> None:
    steps = tuple(int(step) if step.isdigit() else step for step in path.split("."))
    (problem,) = problems(put(BASE, steps, 1))
    assert problem.path == path and hint in problem.message


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.required], ids=str)
def test_a_required_field_left_out_is_named_with_an_example_that_works(leaf: Leaf) -> None:
    (problem,) = problems(without(BASE, leaf.path))
    assert problem.path == str(leaf) and problem.message.startswith("is required")


def test_defaults_pass_their_own_checks() -> None:
    data = json.loads(job_to_json(parse_job(json.dumps(BASE))))
    assert problems(data) == []


def test_every_field_has_a_description_that_is_a_sentence() -> None:
    for model in {type_ for type_ in Spec.__subclasses__() if type_.__module__.startswith("diloco_protocol")}:
        assert model.__doc__
        for alias, field in fields_by_alias(model).items():
            assert field.description and field.description.endswith("."), (model, alias)
            assert words(field.annotation, field.metadata)


# ------------------------------------------------------------------ rules between fields


@pytest.mark.promise(
    "Plaintext works within one cluster only: `tls.mode: off` requires `endpoint.type: ClusterIP`",
    section="Hostile callers",
)
@pytest.mark.parametrize(("fields", "path", "said"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_a_broken_rule_is_the_only_problem(fields: dict[str, Any], path: str, said: str) -> None:
    job = local_job(fields)
    (problem,) = problems(job)
    assert problem.path == f"spec.{path}" and said in problem.message
    with pytest.raises(ValidationError, match="spec"):  # the models themselves refuse it too
        DiLoCoJob.model_validate(job)


@pytest.mark.parametrize(
    "fields",
    [
        {"sync.fragments": 24},
        {"sync.overlap": 23},
        {"sync.quorum": 3},
        {"sync.staleness.maxSteps": 24},
        {"sync.heartbeat": {"intervalSeconds": 5, "timeoutSeconds": 5.1}},
        {"regions": [{"name": f"r{i}", "learners": 1024} for i in range(4)]},
        {"training.model.config.vocab_size": 256},
        {**SHARD_PODS, "syncer.endpoint": {"type": "NodePort", "nodePort": 32765}},
        {**FAR_SHARD_PODS, "syncer.endpoint": {"type": "NodePort", "nodePort": 30000, "address": "a"}},
        {**FAR_SHARD_PODS, "syncer.shardPods.addresses": ["a", "b:4002"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_at_a_rules_bound_is_taken(fields: dict[str, Any]) -> None:
    assert problems(local_job(fields)) == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"syncer.shardPods.addresses": ["a", "b:4002"]}, [("a", 7700), ("b", 4002)]),
        ({"syncer.shardPods.addresses": ["[::1]", "[::2]:1"]}, [("::1", 7700), ("::2", 1)]),
        ({"syncer.endpoint": {"type": "NodePort", "nodePort": 30000, "address": "a:4001"}}, [("", 30001), ("", 30002)]),
        (
            {
                "syncer.endpoint": {"type": "NodePort", "nodePort": 30000, "address": "a"},
                "syncer.shardPods.addresses": ["b", "c"],
            },
            [("b", 30001), ("c", 30002)],
        ),
    ],
)
def test_where_learners_of_other_clusters_reach_shard_pods(fields: dict[str, Any], told: list[tuple[str, int]]) -> None:
    syncer = parse_job(json.dumps(local_job({**FAR_SHARD_PODS, **fields}))).spec.syncer
    assert [syncer.shard_address(shard) for shard in (0, 1)] == told


def test_a_job_that_spans_clusters() -> None:
    assert problems(local_job(CLUSTERS)) == []
    for path, value in {
        "syncer.endpoint.address": None,
        "syncer.endpoint.type": "ClusterIP",
        "syncer.tls.secretName": None,
        "learners.credentials.secretName": None,
        "regions.1.cluster": None,
    }.items():
        found = problems(local_job({**CLUSTERS, path: value}))
        assert f"spec.{path}" in [problem.path for problem in found], (path, found)


@pytest.mark.parametrize(("fields", "paths"), [case[1:] for case in TOGETHER], ids=[c[0] for c in TOGETHER])
def test_rules_that_break_together(fields: dict[str, Any], paths: set[str]) -> None:
    assert {problem.path for problem in problems(local_job(fields))} == {f"spec.{path}" for path in paths}


def test_every_rule_is_broken_by_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place in spec_rules that yields a violation, by its line: the table holds for all of them, so that
    a new rule gets a case, and with it a rule in the API server."""
    source = Path(rules.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source)
    names = {rule.__name__ for rule in rules.RULES}
    places = {
        call.lineno
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in names
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "broken"
    }
    assert len(places) > 30
    seen: set[int] = set()
    plain = rules.broken

    def noted(*arguments: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        seen.update(places & {frame.f_lineno})
        return plain(*arguments, **named)

    monkeypatch.setattr(rules, "broken", noted)
    for _, job, paths in broken():
        assert {problem.path for problem in problems(job)} >= paths
    assert seen == places, [source.splitlines()[line - 1 : line + 2] for line in places - seen]


def test_rules_are_told_beside_wrong_fields_and_never_as_their_consequence() -> None:
    job = local_job({"sync.overlap": 30, "sync.heartbeat.intervalSeconds": "1", "sync.quorum": 9})
    assert {problem.path for problem in problems(job)} == {
        "spec.sync.overlap",
        "spec.sync.quorum",
        "spec.sync.heartbeat.intervalSeconds",
    }
    # `every` cannot be read, so nothing is said of the fields that are measured by it.
    job = local_job({"sync.every": "many", "sync.overlap": 30, "sync.fragments": 30, "sync.quorum": 9})
    assert {problem.path for problem in problems(job)} == {"spec.sync.every", "spec.sync.quorum"}
    # Nor where it was meant, by another name.
    job = local_job({"sync.evry": 40, "sync.overlap": 30, "sync.fragments": 30})
    assert {problem.path for problem in problems(job)} == {"spec.sync.evry"}


def test_all_wrong_fields_at_once() -> None:
    """Each field of a job replaced by a wrong value in one file: one run names all of them."""
    job, wrong = copy.deepcopy(BASE), set()
    for leaf in LEAVES:
        inner, _ = nested_model(leaf.annotation)
        if inner is not None or leaf.path[0] in ("apiVersion", "kind"):
            continue
        job = put(job, leaf.path, {"not": "this"} if typing.get_origin(leaf.kind) is not dict else 3)
        wrong.add(str(leaf))
    named = {problem.path for problem in problems(job)}
    assert wrong <= named


def test_the_custom_loop_needs_neither_model_nor_data() -> None:
    job = parse_job(json.dumps(local_job({"training": {}, "learners.command": ["python", "loop.py"]})))
    assert not job.spec.evaluated and job.spec.training.stop.tokens == 2_000_000
    job = parse_job(json.dumps(local_job({"training": {"stop": {"seconds": 5}}, "learners.command": ["a"]})))
    assert job.spec.training.stop.seconds == 5.0


def test_derived_values() -> None:
    job = parse_job(json.dumps(BASE))
    assert (job.spec.slots, job.spec.quorum, job.spec.max_steps_alone) == (5, 1, 96)
    assert job.spec.evaluated
    job = parse_job(json.dumps(put(BASE, ("spec", "sync"), {"deterministic": True, "staleness": {"maxSteps": 50}})))
    assert (job.spec.quorum, job.spec.max_steps_alone) == (5, 50)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (
            {"training.stop": {"steps": 150}, "training.optimizer": {"warmupSteps": 150}},
            "training.optimizer.warmupSteps",
        ),
        ({"sync.outer.optimizer": "adamw", "sync.outer.lr": 0.7}, "sync.outer.lr"),
        ({"training.optimizer.lr": 3}, "training.optimizer.lr"),
        ({"training.optimizer.lr": 0.11}, "training.optimizer.lr"),
        ({"sync.deterministic": True, "sync.quorum": 2}, "sync.quorum"),
    ],
)
def test_warnings(fields: dict[str, Any], path: str) -> None:
    (warning,) = job_warnings(parse_job(json.dumps(local_job(fields))))
    assert warning.path == f"spec.{path}"
    assert job_warnings(parse_job(json.dumps(local_job({"training.optimizer.lr": 0.1})))) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"training.stop": {"steps": 20}}, ("no fragment is merged", "20 steps", "set sync.every to at most 4")),
        ({"training.stop": {"steps": 24}}, ("merged once", "set sync.every to at most 4")),
        ({"training.stop": {"steps": 4}}, ("no fragment is merged", "recommended: train longer")),
        ({"training.stop": {"steps": 1000}, "sync.every": 400}, ("merged twice", "set sync.every to at most 200")),
        ({"training.stop": {"steps": 119}}, ("merged 4 times",)),
        ({"training.stop": {"steps": 120}}, ()),
        # Three learners of 16 sequences of 128 tokens: 6,144 tokens a step.
        ({"training.stop": {"tokens": 6_144 * 119}}, ("merged 4 times", "119 steps of each learner")),
        ({"training.stop": {"tokens": 6_144 * 120}}, ()),
        ({"training.stop": {"seconds": 1.0}, "training.optimizer.schedule": "constant"}, ()),
        ({"training.stop": {"tokens": 10}, "learners.command": ["python", "own.py"]}, ()),
    ],
)
def test_a_job_that_merges_seldom_is_warned_of_with_the_fix(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    fields = {"training.optimizer.warmupSteps": 1, **fields}
    found = job_warnings(parse_job(json.dumps(local_job(fields))))
    assert [one.path for one in found] == ["spec.sync.every"] * bool(words)
    assert all(word in one.message for one in found for word in words)


def test_the_warm_up_that_was_not_set_is_told_as_the_default_with_the_fix() -> None:
    (warning,) = (
        one
        for one in job_warnings(parse_job(json.dumps(local_job({"training.stop": {"steps": 50}}))))
        if one.path == "spec.training.optimizer.warmupSteps"
    )
    assert "this is the default" in warning.message
    assert "set training.optimizer.warmupSteps to 5, a tenth of the steps" in warning.message


SPANNING: dict[str, Any] = {
    "syncer": {
        "cluster": "hub",
        "endpoint": {"type": "NodePort", "address": "hub.example.org"},
        "tls": {"secretName": "hub"},
    },
    "learners": {"credentials": {"secretName": "learner"}},
    "regions": [{"name": "eu", "cluster": "eu-1", "learners": 2}, {"name": "us", "cluster": "us-1", "learners": 1}],
}


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("hub.example.org:30443", False),
        ("hub.example.org", False),
        ("[2001:db8::1]:30443", False),
        ("hub.example.org:30444", True),
        ("[2001:db8::1]:443", True),
    ],
)
def test_a_port_that_is_not_the_nodes_is_warned_of(address: str, warned: bool) -> None:
    endpoint = {"type": "NodePort", "nodePort": 30443, "address": address}
    syncer = {**SPANNING["syncer"], "endpoint": endpoint}
    fields = {**SPANNING, "syncer": syncer, "sync": {"fragments": 8, "overlap": 1}}
    found = job_warnings(parse_job(json.dumps(local_job(fields))))
    assert [one.path for one in found] == ["spec.syncer.endpoint.address"] * warned


@pytest.mark.parametrize(
    ("sync", "path", "words"),
    [
        ({"overlap": 0}, "sync.overlap", "no step overlaps"),
        ({"fragments": 1}, "sync.fragments", "need 12 times the bandwidth"),
        ({"fragments": 3, "overlap": 2}, "sync.fragments", "2 of the 8 steps"),
        ({"compression": {"up": "float32"}}, "sync.compression.up", "7.8 times the bytes of int4"),
        ({"compression": {"down": "float32"}}, "sync.compression.down", "twice the bytes of bfloat16"),
        ({"deterministic": True}, "sync.deterministic", "slowest link"),
    ],
)
def test_warnings_of_links_between_clusters(sync: dict[str, Any], path: str, words: str) -> None:
    spanning = parse_job(json.dumps(local_job({**SPANNING, "sync": sync})))
    (warning,) = job_warnings(spanning)
    assert warning.path == f"spec.{path}" and words in warning.message
    assert job_warnings(parse_job(json.dumps(local_job({"sync": sync})))) == []  # one machine: nobody minds
    everywhere = [{"name": "eu", "cluster": "hub", "learners": 2}]
    one = {**SPANNING, "regions": everywhere, "sync": sync}
    assert job_warnings(parse_job(json.dumps(local_job(one)))) == []
    fitting: dict[str, Any] = {"fragments": 8, "overlap": 1}
    assert job_warnings(parse_job(json.dumps(local_job({**SPANNING, "sync": fitting})))) == []


# ------------------------------------------------------------------ the objects


def test_in_python_fields_have_python_names_and_nothing_changes_them() -> None:
    region = RegionSpec(name="a", learners=2, pod_template={"x": 1})
    with pytest.raises(ValidationError):
        region.learners = 3  # type: ignore[misc]
    assert JobSpec(regions=[region]).regions[0].pod_template == {"x": 1}
    with pytest.raises(ValidationError):
        RegionSpec(name="a", learners="2")  # type: ignore[arg-type]
    assert "weight_decay" in problems(put(BASE, ("spec", "training", "optimizer"), {"weight_decay": 1}))[0].path


def test_defaults_are_not_shared_between_jobs() -> None:
    one, other = (parse_job(json.dumps(BASE)) for _ in range(2))
    one.spec.sync.merge.mean_tensors.append("x")
    assert other.spec.sync.merge.mean_tensors == []
    assert parse_job(json.dumps(BASE)).spec.sync.merge.mean_tensors == []


SCALARS = [leaf for leaf in LEAVES if leaf.kind in (bool, int, float) or typing.get_origin(leaf.kind) is Literal]


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Valid jobs in which some scalar fields have some value of theirs."""
    job = copy.deepcopy(BASE)
    for leaf in draw(st.lists(st.sampled_from(SCALARS), max_size=5, unique_by=str)):
        bounds, value = leaf.bounds, None
        if leaf.kind is bool:
            value = draw(st.booleans())
        elif typing.get_origin(leaf.kind) is Literal:
            value = draw(st.sampled_from(typing.get_args(leaf.kind)))
        elif leaf.kind is int:
            value = draw(st.integers(bounds.get("ge", 1), bounds.get("le")))
        else:
            low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
            value = draw(st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds))
        job = put(job, leaf.path, value)
    assume(not problems(job))
    return job


@settings(max_examples=share_of(60), deadline=None)
@given(jobs())
def test_the_normal_form_is_an_exact_inverse(data: dict[str, Any]) -> None:
    job = parse_job(json.dumps(data))
    text = job_to_json(job)
    assert job_from_json(text) == job
    assert job_to_json(job_from_json(text)) == text
    assert parse_job(text) == job  # the normal form is a job file too
    assert spec_digest(job_from_json(text)) == spec_digest(job)


def test_digests_follow_meaning_not_spelling() -> None:
    job = parse_job(json.dumps(BASE))
    turned = json.loads(json.dumps(BASE))
    turned["spec"] = dict(reversed(turned["spec"].items()))
    turned["spec"]["sync"] = {"overlap": 2}
    assert spec_digest(parse_job(json.dumps(turned))) == spec_digest(job)
    before = immutable_digests(job)
    assert set(before) == {"training.model", "training.data", "seed", "sync.fragments"}
    for path, name in {
        ("spec", "training", "model", "config", "hidden_size"): "training.model",
        ("spec", "training", "data", "sequenceLength"): "training.data",
        ("spec", "seed"): "seed",
        ("spec", "sync", "fragments"): "sync.fragments",
    }.items():
        changed = parse_job(json.dumps(put(BASE, path, 7)))
        after = immutable_digests(changed)
        assert [key for key in before if before[key] != after[key]] == [name]
        assert spec_digest(changed) != spec_digest(job)
    changed = parse_job(json.dumps(put(BASE, ("spec", "sync", "overlap"), 3)))
    assert immutable_digests(changed) == before and spec_digest(changed) != spec_digest(job)
    assert spec_digest(parse_job(json.dumps(put(BASE, ("metadata", "name"), "other")))) == spec_digest(job)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"a": NaN}', "[" * 100_000, b"\xff"], ids=lambda text: repr(text)[:12]
)
def test_a_damaged_normal_form_is_refused(text: str | bytes) -> None:
    with pytest.raises(JobError):
        job_from_json(text)


# ------------------------------------------------------------------ quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10Gi", 10 * 2**30),
        ("1Ki", 1024),
        ("0.5Mi", 2**19),
        ("500M", 500_000_000),
        ("1e9", 10**9),
        ("1E3", 1000),
        ("1E", 10**18),
        ("2k", 2000),
        ("1.5G", 1_500_000_000),
        ("100m", 1),
        ("1500m", 2),
        ("7", 7),
        (".5k", 500),
        ("+3", 3),
        ("0", 0),
        ("-1Gi", -(2**30)),
        ("7Ei", 7 * 2**60),
        ("0.0001e20", 10**16),
    ],
)
def test_quantities(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", "10GB", "10 Gi", "Gi", "10gi", "ten", "1e", "1e99", "8Ei", "--1", "1.2.3", "9" * 80, "10K", "1_0"]
)
def test_wrong_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


def test_a_storage_size_is_a_quantity_above_zero() -> None:
    for size, good in SIZES:
        found = problems(local_job({"syncer.storage.size": size}))
        assert [problem.path for problem in found] == ([] if good else ["spec.syncer.storage.size"]), size
        assert good or "quantity" in found[0].message or "zero" in found[0].message


@pytest.mark.parametrize(("path", "value"), NAMES)
def test_wrong_names(path: str, value: Any) -> None:
    (problem,) = problems(put(BASE, tuple(path.split(".")), value))
    assert problem.path == path


@pytest.mark.parametrize("address", ["a", "10.0.0.1", "a.example.org:4001", "[::1]", "[fe80::1]:4001"])
def test_addresses(address: str) -> None:
    assert problems(local_job({"syncer.endpoint": {"type": "External", "address": address}})) == []


@pytest.mark.parametrize("address", ["", "::1", "a:b", "a:", "http://a", "a:1234567", "-a", "a b", "[]", "a\n"])
def test_wrong_addresses(address: str) -> None:
    (problem,) = problems(local_job({"syncer.endpoint": {"type": "External", "address": address}}))
    assert problem.path == "spec.syncer.endpoint.address" and "host:port" in problem.message


@pytest.mark.parametrize(("kind", "limit"), [("steps", 5), ("tokens", 7000), ("seconds", 2.5)])
def test_a_stop_has_one_kind_and_its_limit(kind: str, limit: float) -> None:
    stop = StopSpec.model_validate({kind: limit})
    assert (stop.kind, stop.limit) == (kind, limit)
    assert set(stop.model_dump()) == {"steps", "tokens", "seconds"}  # the normal form stays as it is


@pytest.mark.parametrize("ranges", ["10.0.0.0/8", "0.0.0.0/0", "192.168.1.255/32", "::/0", "fd00::/8", "::1/128"])
def test_ranges_of_addresses(ranges: str) -> None:
    assert re.fullmatch(CIDR_PATTERN, ranges) and ipaddress.ip_network(ranges, strict=False)


@pytest.mark.parametrize("ranges", ["10.0.0.0/33", "10.0.0.256/8", "10.0.0.0", "fd00::/129", "office", "10.0.0/8", ""])
def test_what_is_no_range_of_addresses(ranges: str) -> None:
    assert not re.fullmatch(CIDR_PATTERN, ranges)
