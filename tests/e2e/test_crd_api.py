"""A real API server judges jobs as `diloco validate` does: same verdict, same field named.

tests/wrong_jobs.py has the cases. Most requests are dry runs; while jobs are there to be edited an
operator that is installed has no replica, for it would write their status.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from kubernetes import config
from urllib3.exceptions import HTTPError

from diloco_protocol.spec.job import DiLoCoJob, immutable_digests
from diloco_protocol.spec.load import JobError, job_to_json, load_job, load_manifest, parse_job
from repository import ROOT
from wrong_jobs import (
    BASE,
    CLUSTERS,
    LEAVES,
    LEFT_TO_THE_OPERATOR,
    NAMES,
    RULES,
    SIZES,
    Leaf,
    broken,
    good_value,
    local_job,
    put,
    typo,
    without,
    wrong_values,
)

from .clusters import Cluster, read_patiently, until
from .conftest import without_operator

pytestmark = [
    pytest.mark.promise(
        "A real API server judges a job as `diloco validate` does: the same verdict, and the same field named"
    ),
    pytest.mark.ci,
    pytest.mark.timeout(300),
]

DEFINITION = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text(encoding="utf-8"))
FIELDS = DEFINITION["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
COLLECTION = "/apis/diloco.io/v1alpha1/namespaces/default/dilocojobs"
EXAMPLES = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("manifests/examples/*.yaml")])


@dataclass(frozen=True)
class Answer:
    """What the API server said."""

    status: int
    body: dict[str, Any]

    @property
    def taken(self) -> bool:
        return self.status in (200, 201)

    @property
    def message(self) -> str:
        return str(self.body.get("message", "")).replace("\\", "")

    @property
    def fields(self) -> set[str]:
        """The fields that a refusal names, as the loader writes paths."""
        causes = (self.body.get("details") or {}).get("causes") or []
        named = {cause.get("field", "") for cause in causes}
        # Unknown fields and values that cannot be decoded come as one sentence.
        named |= set(re.findall(r'unknown field "([^"]+)"', self.message))
        named |= {f"metadata.{name}" for name in re.findall(r"ObjectMeta\.(\w+)", self.message)}
        return {re.sub(r"\[(\w+)\]", r".\1", field) for field in named if field}


class Api:
    """The jobs of one namespace."""

    def __init__(self, kubeconfig: Path, context: str) -> None:
        self._client = config.new_client_from_config(str(kubeconfig), context=context)

    def _send(self, method: str, path: str, body: Any, kind: str = "json", **query: str) -> Answer:
        content = {
            "json": "application/json",
            "merge": "application/merge-patch+json",
            "apply": "application/apply-patch+yaml",
        }[kind]
        headers = {"Content-Type": content, "Accept": "application/json"}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._client.configuration.host}{path}?{urlencode(query)}"

        def ask() -> Answer:
            try:
                reply = self._client.rest_client.pool_manager.request(
                    method, url, body=json.dumps(body), headers=headers, timeout=20, retries=False
                )
            except HTTPError as error:
                raise OSError(str(error)) from error
            if reply.status == 429 or reply.status > 500:  # no answer; with 500 it refuses what has no such type
                raise OSError(f"HTTP {reply.status}: {reply.data[:300]!r}")
            return Answer(reply.status, json.loads(reply.data))

        return read_patiently(ask)

    def create(self, job: Any, dry: bool = True) -> Answer:
        """As `kubectl create` and the first `kubectl apply` do."""
        extra = {"dryRun": "All"} if dry else {}
        return self._send("POST", COLLECTION, job, fieldValidation="Strict", **extra)

    def apply(self, job: dict[str, Any], dry: bool = True, sub: str = "") -> Answer:
        """As `kubectl apply --server-side` does."""
        metadata = job.get("metadata")
        name = (metadata.get("name") if isinstance(metadata, dict) else None) or "nameless"
        extra = {"dryRun": "All"} if dry else {}
        return self._send(
            "PATCH",
            f"{COLLECTION}/{name}" + (f"/{sub}" if sub else ""),
            job,
            "apply",
            fieldManager="test",
            fieldValidation="Strict",
            force="true",
            **extra,
        )

    def edit(self, name: str, changes: Mapping[str, Any], sub: str = "", dry: bool = True) -> Answer:
        extra = {"dryRun": "All"} if dry else {}
        path = f"{COLLECTION}/{name}" + (f"/{sub}" if sub else "")
        return self._send("PATCH", path, changes, "merge", fieldValidation="Strict", **extra)

    def could_make_namespace(self, name: str) -> bool:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        return self._send("POST", "/api/v1/namespaces", body, dryRun="All").taken

    def delete(self, name: str) -> None:
        self._send("DELETE", f"{COLLECTION}/{name}", None)


@pytest.fixture(scope="module")
def api(bare_cluster: Cluster) -> Iterator[Api]:
    """With the definition applied as a person would: plain `kubectl apply`. Where it was not there before it
    is taken away again, or Helm would refuse to install over it."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/dilocojobs.diloco.io"
    there = bare_cluster.api(path) is not None
    bare_cluster.kubectl("apply", "-f", str(ROOT / "manifests" / "crd.yaml"))

    def conditions() -> dict[str, str]:
        definition = bare_cluster.api(path) or {}
        found = (definition.get("status") or {}).get("conditions") or []
        return {condition["type"]: condition["status"] for condition in found}

    until("the definition is established", lambda: conditions().get("Established") == "True", 20)
    assert conditions().get("NonStructuralSchema", "False") == "False"
    found = Api(bare_cluster.kubeconfig, bare_cluster.context)
    until("jobs are served", lambda: found.create(local_job({})).taken, 20)
    yield found
    if not there:
        bare_cluster.kubectl("delete", "crd", "dilocojobs.diloco.io", "--timeout=30s")


def wrong(job: Any) -> set[str]:
    """The fields that the loader names, none if the job is right."""
    try:
        parse_job(json.dumps(job))
    except JobError as error:
        return {problem.path for problem in error.problems}
    return set()


def names_the_same(paths: set[str], answer: Answer) -> bool:
    """Whether the refusal is about one of the paths: the field itself, an item in it, or what holds it with
    the rest of the path in the message (the API server names lists' items, and keys of mappings, so)."""
    for path in paths:
        for field in answer.fields:
            if f"{field}.".startswith(f"{path}."):
                return True
            rest = path.removeprefix(f"{field}.") if path.startswith(f"{field}.") else ""
            if rest and all(word in answer.message for word in rest.split(".") if not word.isdigit()):
                return True
    return False


def check(api: Api, job: Any, paths: set[str] | None = None) -> list[str]:
    """What differs between the loader's word and the API server's."""
    expected = wrong(job)
    if paths is not None and not expected >= paths:
        return [f"the loader names {expected}, not {paths}"]
    differences = []
    answers = {"create": api.create(job)}
    if isinstance(job, dict):
        answers["apply"] = api.apply(job)
    for verb, answer in answers.items():
        if answer.taken != (not expected):
            differences.append(f"{verb}: {answer.status} {answer.message}; the loader: {expected or 'taken'}")
        elif verb == "create" and expected and not names_the_same(expected, answer):
            differences.append(f"{verb} names {answer.fields} ({answer.message}); the loader: {expected}")
        elif expected and not any(word in answer.message for word in last_words(expected)):
            # Server-side apply says "field not declared" and ".spec.seed: expected numeric" without causes.
            differences.append(f"{verb} names none of {expected}: {answer.message}")
    return differences


def last_words(paths: set[str]) -> set[str]:
    """Of each path the last word that is no index."""
    return {[word for word in path.split(".") if not word.isdigit()][-1] for path in paths}


# ------------------------------------------------------------------ single fields

# What a request for another kind, version or namespace is told: not about a field.
HEAD = ("apiVersion", "kind", "metadata", "metadata.namespace")


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if str(leaf) not in HEAD], ids=str)
def test_a_wrong_value(api: Api, leaf: Leaf) -> None:
    found = []
    for value in wrong_values(leaf):
        for difference in check(api, put(BASE, leaf.path, value)):
            found.append(f"{json.dumps(value)[:60]}: {difference}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", HEAD[:3])
def test_a_wrong_head(api: Api, path: str) -> None:
    for value in (None, 3, "other", []):
        job = put(BASE, (path,), value)
        assert wrong(job) and not api.create(job).taken and not api.apply(job).taken, value


@pytest.mark.parametrize("name", ["a", "1a", "a-1", "a" * 63, "A", "a.b", "a_b", "-a", "a-", "a" * 64])
def test_a_namespace_is_one_that_could_be_made(api: Api, name: str) -> None:
    """kubectl takes it out of the file and into the request's path."""
    refused = wrong(put(BASE, ("metadata", "namespace"), name))
    assert api.could_make_namespace(name) is (refused == set()), refused


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_values_at_the_bounds_and_null(api: Api, leaf: Leaf) -> None:
    """Taken by both or by none (a bound may break a rule between fields)."""
    if str(leaf) in HEAD:
        return
    values = [good_value(leaf)] + [leaf.bounds[name] for name in ("ge", "le") if name in leaf.bounds]
    values += [None] if leaf.nullable or not leaf.required else []
    if "max_length" in leaf.bounds and leaf.kind is str and "pattern" not in leaf.bounds:
        values += ["ü" * leaf.bounds["max_length"]] if "size" not in leaf.path else []
    found = [f"{json.dumps(v)[:60]}: {d}" for v in values for d in check(api, put(BASE, leaf.path, v))]
    assert not found, "\n".join(found)


def test_an_unknown_field_at_every_level(api: Api) -> None:
    found = []
    for leaf in LEAVES:
        name, job = typo(leaf)
        path = ".".join(map(str, [*leaf.path[:-1], name]))
        found += check(api, job, {path})
    assert not found, "\n".join(found)


def test_a_required_field_left_out(api: Api) -> None:
    found = []
    for leaf in LEAVES:
        if leaf.required and str(leaf) not in HEAD:
            found += check(api, without(BASE, leaf.path), {str(leaf)})
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("path", "value"), NAMES)
def test_wrong_metadata(api: Api, path: str, value: Any) -> None:
    job = put(BASE, tuple(path.split(".")), value)
    assert wrong(job) == {path}
    answer = api.create(job)
    assert not answer.taken and names_the_same({path}, answer), answer


def test_sizes(api: Api) -> None:
    found = []
    for size, good in SIZES:
        job = local_job({"syncer.storage.size": size})
        assert bool(wrong(job)) is not good
        found += [f"{size}: {difference}" for difference in check(api, job)]
    assert not found, "\n".join(found)


# ------------------------------------------------------------------ rules between fields


def left(paths: set[str]) -> bool:
    return paths <= {f"spec.{path}" for path in LEFT_TO_THE_OPERATOR}


@pytest.mark.promise(
    "Plaintext works within one cluster only: `tls.mode: off` requires `endpoint.type: ClusterIP`",
    section="Hostile callers",
)
@pytest.mark.parametrize(("job", "paths"), [c[1:] for c in broken()], ids=[c[0] for c in broken()])
def test_a_broken_rule(api: Api, job: dict[str, Any], paths: set[str]) -> None:
    differences = check(api, job, paths)
    if left(paths) and differences:
        assert all("the loader" in text for text in differences)  # the API server takes it: see crd_rules
        return
    assert not differences, "\n".join(differences)
    answer = api.create(job)
    for path in paths:
        assert names_the_same({path}, answer), (path, answer)


def test_what_is_left_to_the_operator_is_what_the_api_server_takes(api: Api) -> None:
    taken = {path.removeprefix("spec.") for _, job, paths in broken() if api.create(job).taken for path in paths}
    assert taken == set(LEFT_TO_THE_OPERATOR)


def test_random_jobs(api: Api) -> None:
    """Fields of several rules at once, and good values: wherever the loader and the API server differ about
    a job, one of them has a rule that the other has not."""
    pool = [pair for _, fields, _, _ in RULES for pair in fields.items()] + list(CLUSTERS.items())
    pool += [("learners.command", ["a"]), ("training.optimizer.schedule", "constant"), ("sync.every", 48)]
    pool += [("regions", [{"name": "a", "cluster": "hub", "learners": 9}]), ("syncer.cluster", None)]
    dice = random.Random(4)
    seen = {True: 0, False: 0}
    for turn in range(500):
        base = dict(CLUSTERS) if turn % 3 == 0 else {}
        picked = dict(dice.sample(pool, dice.randint(0, 4)))
        # A section before what is in it, or setting the section would take it out again.
        fields = dict(sorted({**base, **picked}.items(), key=lambda pair: pair[0].count(".")))
        try:
            job = local_job(fields)
        except (TypeError, AttributeError, IndexError):
            continue  # a field below null
        paths = wrong(job)
        answer = api.create(job)
        if paths and answer.taken and left(paths):
            continue
        assert answer.taken == (not paths), (fields, paths, answer.message)
        seen[answer.taken] += 1
        if paths:
            assert any(names_the_same({path}, answer) for path in paths), (paths, answer)
    assert min(seen.values()) > 20, seen


# ------------------------------------------------------------------ defaults


def stored(answer: Answer) -> DiLoCoJob:
    assert answer.taken, answer
    return parse_job(json.dumps(answer.body))


def normal(job: DiLoCoJob) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(job_to_json(job))
    data["metadata"] = {"name": data["metadata"]["name"]}
    return data


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_are_taken_and_filled_in_as_the_models_do(api: Api, path: Path) -> None:
    for document in (json.loads(job_to_json(load_job(path))), load_manifest(path)[1]):
        for answer in (api.create(document), api.apply(document)):
            assert normal(stored(answer)) == normal(load_job(path))


def test_the_least_job_has_every_default(api: Api) -> None:
    job = local_job({})
    answer = api.create(job)
    assert normal(stored(answer)) == normal(parse_job(json.dumps(job)))
    # Everything but what is null by default is there to be seen.
    filled = answer.body["spec"]

    def missing(properties: dict[str, Any], value: Any, path: str) -> Iterator[str]:
        for name, node in properties.items():
            if "default" in node and name not in value:
                yield f"{path}.{name}"
            elif "properties" in node and name in value:
                yield from missing(node["properties"], value[name], f"{path}.{name}")

    assert list(missing(FIELDS, filled, "spec")) == []


def test_free_mappings_are_kept_as_written(api: Api) -> None:
    free = {"a": None, "b": [1, {"c": None}], "d": {"e": 1.5, "f": True}, "g": "x", "model_type": "llama"}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "learner", "x": None}]}}
    job = local_job({"training.model.config": free, "learners.podTemplate": template})
    for answer in (api.create(job), api.apply(job)):
        assert stored(answer).spec == parse_job(json.dumps(job)).spec
        assert answer.body["spec"]["learners"]["podTemplate"] == template


def test_null_is_kept_where_it_is_a_value_and_is_the_default_elsewhere(api: Api) -> None:
    job = local_job({"training.evaluation": None, "training.optimizer.clipNorm": None, "sync": None, "seed": None})
    for answer in (api.create(job), api.apply(job)):
        spec = stored(answer).spec
        assert spec.training.evaluation is None and spec.training.optimizer.clip_norm is None
        assert spec.sync.every == 24 and answer.body["spec"]["seed"] == 0


# ------------------------------------------------------------------ YAML

SCALARS = [
    ("training.optimizer.lr", "1e-3"),
    ("training.stop.tokens", "2e6"),
    ("seed", "1.0"),
    ("seed", "1.5"),
    ("seed", "0x10"),
    ("seed", "017"),
    ("seed", "'3'"),
    ("seed", '"3"'),
    ("seed", "three"),
    ("seed", "1_000"),
    ("sync.deterministic", "yes"),
    ("sync.deterministic", "on"),
    ("sync.deterministic", "off"),
    ("sync.deterministic", "'yes'"),
    ("sync.deterministic", "yEs"),
    ("sync.deterministic", "1"),
    ("training.optimizer.lr", "'1e-3'"),
    ("training.optimizer.lr", "1"),
    ("training.optimizer.lr", "yes"),
    ("training.data.split", "on"),
    ("training.data.split", "'on'"),
    ("training.data.split", "1:30"),
    ("training.data.split", "2001-12-14"),
    ("training.data.split", "12"),
    ("training.data.split", "!!str 12"),
    ("training.stop.tokens", "1e400"),
    ("training.stop.tokens", "123456789012345678901"),
    ("training.optimizer.eps", "1.0e-08"),
    ("training.optimizer.clipNorm", ".5"),
    ("sync.outer.lr", "1e-400"),
    ("training.evaluation", "~"),
    ("suspend", ""),
]


@pytest.mark.parametrize(("path", "text"), SCALARS)
def test_scalars(api: Api, bare_cluster: Cluster, path: str, text: str) -> None:
    """kubectl reads the file, and the API server judges what it read."""
    job = json.dumps(local_job({"training.stop": {"tokens": 5}, path: "@@"})).replace('"@@"', f" {text} ")
    try:
        loaded = parse_job(job)
    except JobError as error:
        loaded = None
        paths = {problem.path for problem in error.problems}
    said = bare_cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=as_yaml(job), check=False)
    if loaded is None:
        assert not said, (paths, said)
    else:
        assert parse_job(said).spec == loaded.spec


def as_yaml(job: str) -> str:
    """The same text, which kubectl takes for YAML rather than for JSON."""
    return "# a job\n" + job


@pytest.mark.parametrize(
    "text",
    ["{MINIMAL}\n---\n{MINIMAL}", "{MINIMAL}\nkind: DiLoCoJob", "spec: [", "- a", "just words"],
    ids=["two documents", "a key twice", "not YAML", "a list", "words"],
)
def test_texts_that_are_no_job(api: Api, bare_cluster: Cluster, text: str) -> None:
    text = text.replace("{MINIMAL}", (ROOT / "examples" / "minimal.yaml").read_text())
    with pytest.raises(JobError):
        parse_job(text)
    if "DiLoCoJob" in text:
        return  # kubectl takes several documents, and of a key that is there twice the last: we don't
    assert not bare_cluster.kubectl("create", "--dry-run=server", "-o", "name", "-f", "-", stdin=text, check=False)


# ------------------------------------------------------------------ a job that is there


def elsewhere(name: str) -> dict[str, Any]:
    """A job of a cluster that no operator serves, with every immutable part."""
    fields = {
        "syncer.cluster": "nowhere",
        "regions.0.cluster": "nowhere",
        "training.model": {"config": {"model_type": "llama", "a": 1}, "from": "x", "freeze": ["y"]},
        "training.data": {"source": "datasets", "name": "n", "subset": "s"},
        "sync.quorum": 2,
    }
    return put(local_job(fields), ("metadata", "name"), name)


@pytest.fixture(scope="module")
def nobody_acts(bare_cluster: Cluster) -> Iterator[None]:
    with without_operator(bare_cluster):
        yield


@pytest.fixture(scope="module")
def started(api: Api, nobody_acts: None) -> Iterator[tuple[str, str]]:
    """Two jobs that are there: one that has not started, and one that has."""
    fresh, running = (f"crd-{word}-{random.randrange(10**6)}" for word in ("fresh", "running"))
    for name in (fresh, running):
        answer = api.create(elsewhere(name), dry=False)
        assert answer.taken, answer
    answer = api.edit(running, {"status": {"startTime": "2026-01-01T00:00:00Z"}}, "status", dry=False)
    assert answer.body["status"] == {
        "startTime": "2026-01-01T00:00:00Z",
        "conditions": [],
        "regions": [],
        "report": {},
    }, answer
    yield fresh, running
    for name in (fresh, running):
        api.delete(name)


EDITS: list[tuple[str, Any, str]] = [
    # field below spec, its new value (None removes it), the field that is named
    ("seed", 1, "seed"),
    ("sync.fragments", 12, "sync.fragments"),
    ("training.model", None, "training.model"),
    ("training.model.config.a", 2, "training.model.config"),
    ("training.model.config.a", None, "training.model.config"),
    ("training.model.config.b", 1, "training.model.config"),
    ("training.model.config", {"a": None, "b": 1}, "training.model.config"),  # one key for another
    ("training.model.config", {"a": [1]}, "training.model.config"),
    ("training.model.config", None, "training.model.config"),
    ("training.model.from", "z", "training.model.from"),
    ("training.model.from", None, "training.model.from"),
    ("training.model.revision", "v2", "training.model.revision"),
    ("training.model.frozenDtype", "bfloat16", "training.model.frozenDtype"),
    ("training.model.freeze", [], "training.model.freeze"),
    ("training.model.initialise", ["lm_head*"], "training.model.initialise"),
    ("training.model", {"lora": {}, "freeze": None}, "training.model.lora"),
    ("training.data", None, "training.data"),
    ("training.data.source", "text", "training.data.source"),
    ("training.data", {"source": "python", "function": "a:b", "name": None, "subset": None}, "training.data.function"),
    ("training.data.paths", ["p"], "training.data.paths"),
    ("training.data.name", "m", "training.data.name"),
    ("training.data.subset", "t", "training.data.subset"),
    ("training.data.subset", None, "training.data.subset"),
    ("training.data.revision", "v2", "training.data.revision"),
    ("training.data.split", "t", "training.data.split"),
    ("training.data.textField", "t", "training.data.textField"),
    ("training.data.tokenizer", "t", "training.data.tokenizer"),
    ("training.data.sequenceLength", 64, "training.data.sequenceLength"),
]


def patch(path: str, value: Any) -> dict[str, Any]:
    for step in reversed(path.split(".")):
        value = {step: value}
    return {"spec": value}


@pytest.mark.parametrize(("path", "value", "named"), EDITS)
def test_what_is_fixed_once_the_job_has_started(
    api: Api, started: tuple[str, str], path: str, value: Any, named: str
) -> None:
    fresh, running = started
    answer = api.edit(running, patch(path, value))
    assert not answer.taken and f"spec.{named}" in answer.fields, answer
    assert any(
        cause["field"] == f"spec.{named}" and "cannot change once the job has started" in cause["message"]
        for cause in answer.body["details"]["causes"]
    ), answer
    # Before, it is a field like any other: at most a rule between fields speaks.
    assert "has started" not in api.edit(fresh, patch(path, value)).message
    # And both know the same fields: what is refused here changes a digest that learners compare.
    before, after = elsewhere("a"), apply_patch(elsewhere("a"), patch(path, value))
    if not wrong(after):
        changed = digests(before).items() ^ digests(after).items()
        assert {name for name, _ in changed} == {next(d for d in digests(before) if f"{named}.".startswith(f"{d}."))}


def digests(job: dict[str, Any]) -> dict[str, str]:
    return immutable_digests(parse_job(json.dumps(job)))


def apply_patch(job: Any, change: Any) -> Any:
    """RFC 7386."""
    if not isinstance(change, dict):
        return change
    result = copy.deepcopy(job) if isinstance(job, dict) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_patch(result.get(key), value)
    return result


def test_every_immutable_field_is_edited() -> None:
    sections = FIELDS["training"]["properties"]
    fields = {"seed", "sync.fragments", "training.model", "training.data"}
    for name in ("model", "data"):
        fields |= {f"training.{name}.{field}" for field in sections[name]["properties"]}
    assert {named for *_, named in EDITS} == fields


def test_what_may_change_after_the_start(api: Api, started: tuple[str, str]) -> None:
    _, running = started
    for path, value in {
        "regions": [{"name": "local", "cluster": "nowhere", "learners": 5}],
        "suspend": True,
        "sync.overlap": 3,
        "training.stop": {"tokens": 10},
        "training.optimizer.lr": 0.1,
        "sync.quorum": 1,
        "training.data.paths": [],
        "training.model.lora": None,
        "seed": None,
        "training.model.config": {"a": 1},
    }.items():
        answer = api.edit(running, patch(path, value))
        assert answer.taken, (path, answer)
    job = elsewhere(running)
    for learners, taken in ((2, True), (1, False)):  # down to K in all
        job["spec"]["regions"][0]["learners"] = learners
        answer = api.edit(running, {"spec": {"regions": job["spec"]["regions"]}})
        assert answer.taken is taken, answer
        assert taken or answer.fields == {"spec.sync.quorum"}
    assert api.apply(elsewhere(running)).taken


def test_a_null_is_no_change(api: Api, started: tuple[str, str]) -> None:
    """Null and absent mean the same, whoever wrote which."""
    _, running = started
    job = elsewhere(running)
    job["spec"]["training"]["data"]["function"] = None
    job["spec"]["training"]["model"]["lora"] = None
    assert api.apply(job).taken


def test_what_kubectl_apply_makes_of_zeros_and_of_an_alternative(
    api: Api, bare_cluster: Cluster, started: tuple[str, str]
) -> None:
    fresh, _ = started

    def applied(training: dict[str, Any], *words: str) -> str:
        job = elsewhere(fresh)
        job["spec"]["training"] |= training
        job["spec"]["suspend"] = True
        return bare_cluster.kubectl("apply", "-o", "json", "-f", "-", *words, stdin=json.dumps(job), check=False)

    # What zero says survives where null would not.
    said = applied({"evaluation": {"fraction": 0}, "optimizer": {"clipNorm": 0}}, "--dry-run=server")
    spec = parse_job(said).spec
    assert spec.training.evaluation is None and spec.training.optimizer.clip_norm is None
    # stop had its default: another one is refused with the cure, and the cure works.
    answer = api.edit(fresh, {"spec": {"training": {"stop": {"steps": 100}}}})
    assert answer.fields == {"spec.training.stop"} and "set the others to null" in answer.message
    assert not applied({"stop": {"steps": 100}}, "--dry-run=server")
    said = applied({"stop": {"steps": 100, "tokens": None}}, "--dry-run=server")
    assert parse_job(said).spec.training.stop.steps == 100


def test_status_and_spec_have_separate_doors(api: Api, started: tuple[str, str]) -> None:
    fresh, running = started
    # The endpoint of the spec ignores status: nobody unlocks a job by taking its start time away.
    answer = api.edit(running, {"status": {"startTime": None}, "spec": {"seed": 7}})
    assert answer.fields == {"spec.seed"}, answer
    answer = api.edit(fresh, {"status": {"startTime": "2026-01-01T00:00:00Z"}, "spec": {"seed": 7}})
    assert answer.taken and "startTime" not in answer.body.get("status", {})
    # The endpoint of the status ignores spec.
    answer = api.edit(running, {"spec": {"seed": 7}, "status": {"phase": "Running"}}, "status")
    assert answer.taken and answer.body["spec"]["seed"] == 0
    # A job is created without status, whatever the file says.
    job = elsewhere("crd-with-status")
    job["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
    assert "startTime" not in api.create(job).body.get("status", {})


def test_a_wrong_status_is_refused(api: Api, started: tuple[str, str]) -> None:
    for status, field in [
        ({"phase": "Dancing"}, "status.phase"),
        ({"learners": 3}, "status.learners"),
        ({"progress": {"tokens": "many"}}, "status.progress.tokens"),
        ({"phaze": "x"}, "status.phaze"),
        ({"conditions": [{"type": "Ready"}]}, "status.conditions.0.status"),
    ]:
        answer = api.edit(started[1], {"status": status}, "status")
        assert not answer.taken and field in answer.fields, answer


def test_get_shows_a_job_in_a_line(api: Api, bare_cluster: Cluster, started: tuple[str, str]) -> None:
    from diloco_operator.status_models import JobRelease, JobStatus, Progress, SyncerStatus

    fresh, running = started
    progress = Progress(tokens=1843200, step=612, percent=37, merges=51, loss=1.64738291, goodput=0.93)
    status = JobStatus(
        phase="Running",
        learners="3/3",
        quorum="3/1",
        progress=progress,
        start_time="2026-01-01T00:00:00Z",
        syncer=SyncerStatus(epoch=2, step=612),
        release=JobRelease(operator="0.1.0", syncer="s", worker="w"),
    )
    document = status.model_dump(mode="json")
    answer = api.edit(running, {"status": document}, "status", dry=False)
    assert answer.taken, answer
    enums = ("phase", "drain")  # of which null is no value
    nothing = {k: v for k, v in JobStatus().model_dump(mode="json").items() if k not in enums}  # all null
    assert api.apply(put(elsewhere(running), ("status",), nothing), sub="status").taken
    left = {key: value for key, value in document.items() if value is not None}
    assert {key: value for key, value in answer.body["status"].items() if key in left} == without_nulls(left)
    lines = bare_cluster.kubectl("get", "dj", fresh, running).splitlines()
    columns = ["NAME", "PHASE", "LEARNERS", "QUORUM", "STEP", "TOKENS", "PERCENT", "LOSS", "GOODPUT", "AGE"]
    assert lines[0].split() == columns
    row = next(line for line in lines if line.startswith(running)).split()
    assert row[1:-1] == ["Running", "3/3", "3/1", "612", "1843200", "37", "1.6474", "0.93"], row


def without_nulls(value: Any) -> Any:
    """A merge patch takes null for absent."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def test_what_get_prints_is_a_job_file(api: Api, bare_cluster: Cluster, started: tuple[str, str]) -> None:
    _, running = started
    text = bare_cluster.kubectl("get", "dilocojob", running, "-o", "yaml", "--show-managed-fields")
    notes: list[Any] = []
    job = parse_job(text, notes=notes)
    assert {"status", "metadata.uid", "metadata.managedFields"} <= {note.path for note in notes}
    assert job.spec == parse_job(json.dumps(elsewhere(running))).spec
    assert bare_cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)


def test_a_job_that_older_rules_let_in_can_still_be_served(api: Api, bare_cluster: Cluster) -> None:
    """After an upgrade with a rule more, the operator writes the job's status and takes its finalizer off."""
    name = f"crd-older-{random.randrange(10**6)}"
    job = put(elsewhere(name), ("spec", "sync", "overlap"), 99)
    older = copy.deepcopy(DEFINITION)
    node = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del node["properties"]["sync"]["x-kubernetes-validations"]
    assert not api.create(job).taken
    try:
        bare_cluster.kubectl("apply", "-f", "-", stdin=json.dumps(older))
        until("the older rules hold", lambda: api.create(job, dry=False).taken, 20)
    finally:
        bare_cluster.kubectl("apply", "-f", str(ROOT / "manifests" / "crd.yaml"))
    try:
        fresh = put(job, ("metadata", "name"), "crd-newer")
        until("the newer rules hold", lambda: api.create(fresh).status == 422, 20)
        started = {"status": {"startTime": "2026-01-01T00:00:00Z"}}
        assert api.edit(name, started, "status", dry=False).taken
        assert api.edit(name, {"metadata": {"finalizers": ["diloco.io/test"]}}, dry=False).taken
        assert api.edit(name, {"metadata": {"finalizers": []}}, dry=False).taken
        assert api.edit(name, {"spec": {"suspend": True}}).taken  # what was wrong stays as it was
        assert not api.edit(name, {"spec": {"sync": {"overlap": 98}}}).taken
        assert api.edit(name, {"spec": {"sync": {"overlap": 2}}}).taken
    finally:
        api.delete(name)


def test_no_scale_subresource(api: Api, started: tuple[str, str]) -> None:
    assert api.edit(started[1], {"spec": {"replicas": 3}}, "scale").status == 404
