"""Wrong jobs, one fault each: every field of the spec and every rule between fields. And how to break a job.

One table for all that judge a job: the models and the loader
(tests/unit/protocol/spec/test_job.py), and a real API server (tests/e2e/test_crd_api.py), which must
give the same verdict and name the same field. The cases for single fields are made from the models,
so that a new field is tested the day it appears.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from diloco_protocol.spec.base import Spec, fields_by_alias, nested_model, unwrap
from diloco_protocol.spec.explain import constraints
from diloco_protocol.spec.job import DiLoCoJob

BASE: dict[str, Any] = {
    "apiVersion": "diloco.io/v1alpha1",
    "kind": "DiLoCoJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "training": {
            "model": {"config": {"model_type": "llama"}, "lora": {}},
            "data": {"paths": ["python-stdlib"]},
            "evaluation": {},
        },
        "regions": [{"name": "local", "learners": 3}, {"name": "far", "learners": 2}],
        "syncer": {"shards": 2, "shardPods": {}, "storage": {"uri": "s3://a"}},
        "failurePolicy": {"rules": [{"exitCodes": [3], "action": "Fail"}]},
    },
}
"""A job in which every part of the spec is there, so that every field can be set."""

LEFT_TO_THE_OPERATOR = ("training.model.config.model_type", "training.model.config.vocab_size")
"""Fields below spec that the loader judges and no rule of the API server can (tools/crd_rules.py says why)."""

LOCAL: dict[str, Any] = {
    "training": {"model": {"config": {"model_type": "llama"}}, "data": {"paths": ["python-stdlib"]}},
    "regions": [{"learners": 3}],
}


@dataclass(frozen=True)
class Leaf:
    """One field of the spec and where it lies in a job like BASE."""

    path: tuple[str | int, ...]
    annotation: Any
    metadata: tuple[Any, ...]
    required: bool

    @property
    def kind(self) -> Any:
        return unwrap(self.annotation)[0]

    @property
    def nullable(self) -> bool:
        return unwrap(self.annotation)[1]

    @property
    def bounds(self) -> dict[str, Any]:
        return constraints(self.annotation, self.metadata)

    def __str__(self) -> str:
        return ".".join(map(str, self.path))


def leaves(model: type[Spec] = DiLoCoJob, path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """All fields of all models, also those that hold models."""
    for alias, field in fields_by_alias(model).items():
        here = (*path, alias)
        yield Leaf(here, field.annotation, tuple(field.metadata), field.is_required())
        inner, many = nested_model(field.annotation)
        if inner is not None:
            yield from leaves(inner, (*here, 0) if many else here)


LEAVES = list(leaves())


def wrong_values(leaf: Leaf) -> Iterator[Any]:
    """Values that the field alone must refuse."""
    kind, bounds = leaf.kind, leaf.bounds
    origin = typing.get_origin(kind)
    if not leaf.nullable and leaf.required:
        yield None
    if kind is bool:
        yield from ("true", 1, [], {})
    elif kind is int:
        yield from ("3", 1.5, True, [3], {"a": 3})
    elif kind is float:
        yield from ("1", True, [1.0], {})
    elif kind is str:
        yield from (3, True, ["a"], {})
        if bounds.get("min_length") or "pattern" in bounds:
            yield ""
        if "pattern" in bounds:
            yield "No such_name!"
        if "max_length" in bounds:
            yield "a" * (bounds["max_length"] + 1)
    elif origin is Literal:
        yield from ("no-such-choice", 3, typing.get_args(kind)[0].swapcase(), True)
    elif origin is list:
        yield from ("text", 3, {})
        (item,) = typing.get_args(kind)
        good = good_value(Leaf(leaf.path, item, (), True))
        if "max_length" in bounds:
            yield [good] * (bounds["max_length"] + 1)
        if bounds.get("min_length"):
            yield [good] * (bounds["min_length"] - 1)
    elif origin is dict:
        yield from (3, "text", [])
        if typing.get_args(kind)[1] is str:
            yield {"a": 3}
    elif isinstance(kind, type) and issubclass(kind, Spec):
        yield from (3, "text", [], True)
    else:
        raise AssertionError(f"no cases for {kind}")
    if kind in (int, float):
        step = 1 if kind is int else 1e-3
        if "ge" in bounds:
            yield bounds["ge"] - step
        if "gt" in bounds:
            yield bounds["gt"]
        if "le" in bounds:
            yield bounds["le"] + (1 if kind is int else max(1.0, bounds["le"] * 1e-6))
        if "lt" in bounds:
            yield bounds["lt"]


def good_value(leaf: Leaf) -> Any:
    """Some value that the field alone takes."""
    kind, bounds = leaf.kind, leaf.bounds
    origin = typing.get_origin(kind)
    if kind is bool:
        return True
    if kind in (int, float):
        return bounds["ge"] if "ge" in bounds else bounds["le"]
    if kind is str:
        return "python:name" if r":[A-Za-z_]" in bounds.get("pattern", "") else "name"
    if origin is Literal:
        return typing.get_args(kind)[-1]
    if origin is list:
        (item,) = typing.get_args(kind)
        return [good_value(Leaf(leaf.path, item, (), True))] * max(1, bounds.get("min_length", 1))
    if origin is dict:
        return {"a": "b"}
    assert issubclass(kind, Spec)
    return {alias: f.examples[0] for alias, f in fields_by_alias(kind).items() if f.is_required()}


def put(job: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A copy of the job with the value at the path."""
    job = copy.deepcopy(job)
    place: Any = job
    for step in path[:-1]:
        place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
    place[path[-1]] = value
    return job


def without(job: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """A copy of the job without the field at the path."""
    job = copy.deepcopy(job)
    place: Any = job
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return job


def typo(leaf: Leaf) -> tuple[str, dict[str, Any]]:
    """The field's name misspelt, and BASE with a field of that name beside it."""
    name = str(leaf.path[-1])
    wrong = name[:-1] + "x" + name[-1]
    return wrong, put(BASE, (*leaf.path[:-1], wrong), 1)


def local_job(fields: dict[str, Any]) -> dict[str, Any]:
    job = {**{key: BASE[key] for key in ("apiVersion", "kind", "metadata")}, "spec": copy.deepcopy(LOCAL)}
    for path, value in fields.items():
        steps = tuple(int(step) if step.isdigit() else step for step in path.split("."))
        job = put(job, ("spec", *steps), value)
    return job


CLUSTERS: dict[str, Any] = {
    "syncer": {
        "cluster": "hub",
        "endpoint": {"type": "LoadBalancer", "address": "syncer.example.org:4001"},
        "tls": {"secretName": "tls"},
    },
    "learners.credentials.secretName": "join",
    "regions": [{"name": "east", "cluster": "hub", "learners": 2}, {"name": "west", "cluster": "far", "learners": 2}],
}

SHARD_PODS: dict[str, Any] = {"syncer": {"shards": 2, "storage": {"uri": "s3://a"}, "shardPods": {}}}
FAR_SHARD_PODS: dict[str, Any] = {**CLUSTERS, "syncer": {**CLUSTERS["syncer"], **SHARD_PODS["syncer"]}}

# ------------------------------------------------------------------ rules between fields

RULES: list[tuple[str, dict[str, Any], str, str]] = [
    # what, fields below spec in a local job, path of the problem below spec, part of its message
    ("no stop", {"training.stop": {}}, "training.stop", "exactly one"),
    ("two stops", {"training.stop": {"steps": 3, "tokens": 4}}, "training.stop", "steps and tokens are given"),
    (
        "deterministic with a gate",
        {"sync.normGate": {"factor": 3}, "sync.deterministic": True},
        "sync.normGate.factor",
        "leave it out",
    ),
    (
        "deterministic by the clock",
        {"training.stop": {"seconds": 3}, "training.optimizer": {"schedule": "constant"}, "sync.deterministic": True},
        "training.stop.seconds",
        "stop by steps or tokens",
    ),
    ("cosine by the clock", {"training.stop": {"seconds": 3}}, "training.optimizer.schedule", "constant"),
    ("no model", {"training.model": None}, "training.model", "is required"),
    ("empty model", {"training.model": {}}, "training.model", "needs config"),
    ("no kind", {"training.model.config": {}}, "training.model.config.model_type", "is required"),
    ("kind is a number", {"training.model.config": {"model_type": 3}}, "training.model.config.model_type", "llama"),
    ("small vocabulary", {"training.model.config.vocab_size": 255}, "training.model.config.vocab_size", "at least 256"),
    ("vocabulary is text", {"training.model.config.vocab_size": "256"}, "training.model.config.vocab_size", "whole"),
    (
        "frozen and adapted",
        {"training.model.freeze": ["*"], "training.model.lora": {}},
        "training.model.freeze",
        "lora",
    ),
    ("no data", {"training.data": None}, "training.data", "is required"),
    ("text without paths", {"training.data.paths": []}, "training.data.paths", "is required with source text"),
    (
        "datasets without name",
        {"training.data": {"source": "datasets"}},
        "training.data.name",
        "is required with source datasets",
    ),
    ("python without function", {"training.data": {"source": "python"}}, "training.data.function", "is required"),
    ("function of text", {"training.data.function": "a:b"}, "training.data.function", "source is text"),
    ("name of text", {"training.data.name": "a"}, "training.data.name", "set source: datasets"),
    ("subset of text", {"training.data.subset": "a"}, "training.data.subset", "leave it out"),
    ("revision of text", {"training.data.revision": "a"}, "training.data.revision", "leave it out"),
    ("revision of nothing", {"training.model.revision": "a"}, "training.model.revision", "belongs to from"),
    ("new tensors of nothing", {"training.model.initialise": ["a"]}, "training.model.initialise", "belongs to from"),
    (
        "frozen in bfloat16, computed in float32",
        {"training.model.frozenDtype": "bfloat16", "training.precision": "float32"},
        "training.model.frozenDtype",
        "training.precision",
    ),
    (
        "paths of python",
        {"training.data": {"source": "python", "function": "a:b", "paths": ["c"]}},
        "training.data.paths",
        "source is python",
    ),
    ("P above H", {"sync.fragments": 25}, "sync.fragments", "at most sync.every (24)"),
    ("tau is H", {"sync.overlap": 24}, "sync.overlap", "below sync.every (24)"),
    ("K above M", {"sync.quorum": 4}, "sync.quorum", "all regions (3)"),
    ("a median of two", {"sync.merge.method": "median", "sync.quorum": 2}, "sync.quorum", "at least 3 with"),
    ("pause before merge", {"sync.staleness.maxSteps": 23}, "sync.staleness.maxSteps", "at least sync.every"),
    (
        "heartbeat",
        {"sync.heartbeat": {"intervalSeconds": 5, "timeoutSeconds": 5}},
        "sync.heartbeat.timeoutSeconds",
        "more than",
    ),
    (
        "feedback of nothing",
        {"sync.compression": {"up": "float32", "errorFeedback": True}},
        "sync.compression.errorFeedback",
        "no meaning",
    ),
    ("reserved region", {"regions": [{"name": "syncer", "learners": 1}]}, "regions.0.name", "another name"),
    ("region of shards", {"regions": [{"name": "syncer-shards", "learners": 1}]}, "regions.0.name", "another name"),
    ("evaluator region", {"regions": [{"name": "evaluator", "learners": 1}]}, "regions.0.name", "another name"),
    ("same region", {"regions": [{"learners": 1}, {"learners": 1}]}, "regions.1.name", "regions.0"),
    (
        "too many learners",
        {"regions": [{"name": f"r{i}", "learners": 1000} for i in range(5)]},
        "regions",
        "more than 4096",
    ),
    (
        "too many learners at most",
        {"regions": [{"name": f"r{i}", "learners": 1, "maxLearners": 1000} for i in range(5)]},
        "regions",
        "more than 4096",
    ),
    (
        "a bound below the learners",
        {"regions": [{"learners": 3, "maxLearners": 2}]},
        "regions.0.maxLearners",
        "at least learners",
    ),
    (
        "spares of an open region",
        {"regions": [{"learners": 3, "maxLearners": 4, "spares": 1}]},
        "regions.0.spares",
        "trains at once",
    ),
    (
        "more learners of a deterministic job",
        {"sync.deterministic": True, "regions": [{"learners": 3, "maxLearners": 4}]},
        "regions.0.maxLearners",
        "deterministic",
    ),
    (
        "ranks that start ranks",
        {"learners": {"command": ["/opt/torchrun", "a.py"], "processes": 2}},
        "learners.command",
        "[python, train.py]",
    ),
    (
        "ranks that start ranks, by a module",
        {"learners": {"command": ["python", "-m", "torch.distributed.run", "a.py"], "pods": 2}},
        "learners.command",
        "[python, train.py]",
    ),
    ("a rank too many", {"learners.processes": 3}, "training.batch.sequences", "make it 18"),
    (
        "a share that is no whole number",
        {"training.parallel": {"replicate": 3}, "learners": {"processes": 2, "pods": 2}},
        "training.parallel.replicate",
        "has 4 ranks",
    ),
    (
        "more parts than ranks",
        {"training.parallel": {"shard": 4}, "learners.processes": 2},
        "training.parallel.shard",
        "leave shard out",
    ),
    (
        "frozen in bfloat16, in ranks",
        {"training.model.frozenDtype": "bfloat16", "learners.pods": 2},
        "training.model.frozenDtype",
        "one process a learner",
    ),
    ("external", {"syncer.endpoint.type": "External"}, "syncer.endpoint.address", "is required"),
    ("half named", {"syncer.cluster": "a"}, "regions.0.cluster", "everywhere, or nowhere"),
    ("port of ClusterIP", {"syncer.endpoint.nodePort": 30000}, "syncer.endpoint.nodePort", "belongs to type NodePort"),
    (
        "class of a NodePort",
        {"syncer.endpoint": {"type": "NodePort", "service": {"loadBalancerClass": "a"}}},
        "syncer.endpoint.service.loadBalancerClass",
        "belongs to type LoadBalancer",
    ),
    (
        "ranges of a NodePort",
        {"syncer.endpoint": {"type": "NodePort", "service": {"sourceRanges": ["10.0.0.0/8"]}}},
        "syncer.endpoint.service.sourceRanges",
        "belongs to type LoadBalancer",
    ),
    (
        "traffic of ClusterIP",
        {"syncer.endpoint.service": {"externalTrafficPolicy": "Local"}},
        "syncer.endpoint.service.externalTrafficPolicy",
        "belongs to types NodePort",
    ),
    ("tls off and named", {"syncer.tls": {"mode": "off", "secretName": "a"}}, "syncer.tls.mode", "contradicts"),
    *(
        (
            f"plaintext by {kind}",
            {"syncer.tls": {"mode": "off"}, "syncer.endpoint": endpoint},
            "syncer.tls.mode",
            "use auto",
        )
        for kind, endpoint in (
            ("NodePort", {"type": "NodePort"}),
            ("LoadBalancer", {"type": "LoadBalancer"}),
            ("an address", {"type": "External", "address": "syncer.example.org:4001"}),
        )
    ),
    ("two stores", {"syncer.storage": {"claimName": "a", "uri": "s3://a"}}, "syncer.storage.uri", "contradicts"),
    ("a pod for one shard", {**SHARD_PODS, "syncer.shards": 1}, "syncer.shards", "more than 1"),
    ("shard pods on a volume", {**SHARD_PODS, "syncer.storage": {}}, "syncer.storage.uri", "name a bucket"),
    ("shard pods in plaintext", {**SHARD_PODS, "syncer.tls": {"mode": "off"}}, "syncer.tls.mode", "must be auto"),
    (
        "an address of two shards",
        {**SHARD_PODS, "syncer.shardPods.addresses": ["a"]},
        "syncer.shardPods.addresses",
        "has 1 for 2 shards",
    ),
    ("far shards without address", FAR_SHARD_PODS, "syncer.shardPods.addresses", "spans clusters"),
    (
        "a shard beyond the node ports",
        {**SHARD_PODS, "syncer.endpoint": {"type": "NodePort", "nodePort": 32766}},
        "syncer.endpoint.nodePort",
        "32765",
    ),
    (
        "output in the store",
        {"syncer.storage": {"uri": "s3://a/b"}, "output": {"uri": "s3://a/b/c"}},
        "output.uri",
        "lies in the syncer's own store",
    ),
    (
        "class of my volume",
        {"syncer.storage": {"claimName": "a", "storageClassName": "b"}},
        "syncer.storage.storageClassName",
        "leave it out",
    ),
    (
        "delete my bucket",
        {"syncer.storage": {"uri": "s3://a", "onDelete": "Delete"}},
        "syncer.storage.onDelete",
        "never",
    ),
    (
        "class of my bucket",
        {"syncer.storage": {"uri": "s3://a", "storageClassName": "b"}},
        "syncer.storage.storageClassName",
        "leave it out",
    ),
    (
        "delete my claim",
        {"syncer.storage": {"claimName": "a", "onDelete": "Delete"}},
        "syncer.storage.onDelete",
        "never",
    ),
    ("empty kind", {"training.model.config": {"model_type": ""}}, "training.model.config.model_type", "llama"),
    (
        "no kind but null",
        {"training.model.config": {"model_type": None}},
        "training.model.config.model_type",
        "is required",
    ),
    ("vocabulary is not whole", {"training.model.config.vocab_size": 300.5}, "training.model.config.vocab_size", ""),
    ("null config", {"training.model": {"config": None}}, "training.model", "needs config"),
    (
        "name of python",
        {"training.data": {"source": "python", "function": "a:b", "name": "c"}},
        "training.data.name",
        "source is python",
    ),
    (
        "function of datasets",
        {"training.data": {"source": "datasets", "name": "a", "function": "b:c"}},
        "training.data.function",
        "source is datasets",
    ),
    ("shrunk below K", {"sync.quorum": 3, "regions": [{"learners": 2}]}, "sync.quorum", "all regions (2)"),
    ("a region without cluster", {**CLUSTERS, "regions.1.cluster": None}, "regions.1.cluster", "everywhere"),
    ("the syncer without cluster", {"regions.0.cluster": "a"}, "syncer.cluster", "everywhere"),
    ("ClusterIP across clusters", {**CLUSTERS, "syncer.endpoint.type": "ClusterIP"}, "syncer.endpoint.type", "spans"),
    (
        "no address across clusters",
        {**CLUSTERS, "syncer.endpoint.address": None},
        "syncer.endpoint.address",
        "where to connect",
    ),
    ("no TLS secret across clusters", {**CLUSTERS, "syncer.tls.secretName": None}, "syncer.tls.secretName", "create"),
    (
        "no credentials across clusters",
        {**CLUSTERS, "learners.credentials.secretName": None},
        "learners.credentials.secretName",
        "create",
    ),
]

TOGETHER: list[tuple[str, dict[str, Any], set[str]]] = [
    # A job that names no Secret of its own and needs one: two rules, whichever is mended first.
    (
        "no TLS across clusters",
        {**CLUSTERS, "syncer.tls": {"mode": "off"}},
        {"syncer.tls.mode", "syncer.tls.secretName"},
    ),
    ("the syncer in no cluster, two regions in two", {**CLUSTERS, "syncer.cluster": None}, {"syncer.cluster"}),
]


def broken() -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """All cases of broken rules: what, the job, and the fields that are named for it."""
    for what, fields, path, _ in RULES:
        yield what, local_job(fields), {f"spec.{path}"}
    for what, fields, paths in TOGETHER:
        yield what, local_job(fields), {f"spec.{path}" for path in paths}


# ------------------------------------------------------------------ names and sizes

NAMES: list[tuple[str, Any]] = [
    ("metadata.name", "Tiny"),
    ("metadata.name", "a" * 31),
    ("metadata.name", "1a"),
    ("metadata.name", "a-"),
    ("metadata.name", "a.b"),
    ("metadata.name", "a_b"),
    ("metadata.name", ""),
    ("metadata.name", "a" * 300),
    ("metadata.labels", {"a b": "c"}),
    ("metadata.labels", {"a": "-"}),
    ("metadata.labels", {"a": "b" * 64}),
    ("metadata.labels", {"a/b/c": "d"}),
    ("metadata.labels", {"A.b/c": "d"}),
    ("metadata.labels", {"": "d"}),
    ("metadata.annotations", {"a b": "c"}),
    ("metadata.annotations", {"a": "b" * (1 << 18)}),
]
"""Metadata that is wrong, beside what wrong_values makes."""

SIZES: list[tuple[str, bool]] = [
    ("10Gi", True),
    ("1", True),
    ("0.5Mi", True),
    ("1e9", True),
    ("1E3", True),
    ("2k", True),
    ("100m", True),
    (".5k", True),
    ("+3", True),
    ("7Ei", True),
    ("1.", True),
    ("1n", True),
    ("1e-30", True),
    ("1u", True),
    ("10GB", False),
    ("0", False),
    ("-1Gi", False),
    ("", False),
    ("10 Gi", False),
    ("Gi", False),
    ("10gi", False),
    ("ten", False),
    ("1e", False),
    ("1e99", False),
    ("8Ei", False),
    ("--1", False),
    ("1.2.3", False),
    ("10K", False),
    ("1_0", False),
    ("0.0", False),
    ("0e5", False),
    ("9" * 20, False),
]
"""syncer.storage.size, and whether it is one."""
