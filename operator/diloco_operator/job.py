"""A DiLoCoJob as the API server sends it, read; and what of it is placed on this cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from diloco_operator.model import Object
from diloco_protocol.common.bounded_json import MAX_DEPTH, TOO_DEEP
from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job import DiLoCoJob, json_digest
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError, job_from_json, job_to_json
from diloco_protocol.vocabulary import API_VERSION, JOB_KIND


@dataclass(frozen=True, slots=True)
class Job:
    """A DiLoCoJob, read. Times are unix seconds."""

    name: str
    namespace: str
    uid: str
    generation: int
    finalizers: tuple[str, ...]
    deleted_at: float | None
    status: Object
    raw_spec: Object
    document: DiLoCoJob | None  # None: the spec is wrong, and ``problems`` says how
    problems: tuple[str, ...] = ()
    normal_form: str = ""  # of ``document``, as its programs read it

    @property
    def spec(self) -> JobSpec:
        assert self.document is not None, "the job is invalid"
        return self.document.spec


def read_job(obj: Object) -> Job:
    """The job of an API object. Raises nothing for a wrong spec."""
    metadata = obj["metadata"]
    spec = obj.get("spec")
    deleted = metadata.get("deletionTimestamp")
    text = json.dumps(_whole(spec), sort_keys=True, separators=(",", ":"))
    document, normal_form, problems = _read_spec(metadata["name"], metadata.get("namespace", "default"), text)
    if TOO_DEEP in text:
        said = f"spec: is nested more than {MAX_DEPTH} levels deep, and cannot be read"
        document, normal_form, problems = None, "", (said,)
    return Job(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 1)),
        finalizers=tuple(metadata.get("finalizers") or ()),
        deleted_at=unix_seconds(deleted) if deleted else None,
        status=dict(obj.get("status") or {}),
        raw_spec=spec if isinstance(spec, dict) else {},
        document=document,
        problems=problems,
        normal_form=normal_form,
    )


def _whole(value: Any) -> Any:
    """The value with whole numbers as int: 2e6 arrives as a float where a whole number is meant."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value


@lru_cache(maxsize=1024)  # a job is read at every reconcile and changes seldom
def _read_spec(name: str, namespace: str, spec: str) -> tuple[DiLoCoJob | None, str, tuple[str, ...]]:
    """(the document, its normal form, what is wrong with it)."""
    head = {"apiVersion": API_VERSION, "kind": JOB_KIND}
    body = {**head, "metadata": {"name": name, "namespace": namespace}, "spec": json.loads(spec)}
    try:
        document = job_from_json(json.dumps(body))
    except JobError as error:
        return None, "", tuple(str(problem) for problem in error.problems)
    return document, job_to_json(document), ()


@dataclass(frozen=True, slots=True)
class Placement:
    """What of a job runs on this cluster."""

    syncer: bool
    regions: tuple[RegionSpec, ...]
    elsewhere: str = ""  # why nothing of the job runs here, as a sentence

    @property
    def anything(self) -> bool:
        return self.syncer or bool(self.regions)


def place_job(spec: JobSpec, cluster: str | None) -> Placement:
    """What of the job is placed on a cluster: all of a job that names no cluster, else what names this one.
    ``cluster``: this cluster's name; None: it has none."""
    named = sorted({n for n in [spec.syncer.cluster, *(r.cluster for r in spec.regions)] if n is not None})
    if not named:
        return Placement(True, tuple(spec.regions))
    here = Placement(
        syncer=cluster is not None and spec.syncer.cluster == cluster,
        regions=tuple(r for r in spec.regions if cluster is not None and r.cluster == cluster),
    )
    if here.anything:
        return here
    said = f"the job names {'the cluster ' if len(named) == 1 else 'the clusters '}{', '.join(named)}"
    if cluster is None:
        return Placement(
            False,
            (),
            f"{said}, and this cluster's operator has no name: install it with cluster.name, or leave "
            "syncer.cluster and regions[].cluster out if the job is for one cluster",
        )
    return Placement(False, (), f"{said}, and this one is called {cluster}: nothing of the job runs here")


def find_unsupported(spec: JobSpec) -> str:
    """What the spec allows and this version of the operator does not do, in words; empty: nothing."""
    named = (spec.syncer.tls.secret_name is not None, spec.learners.credentials.secret_name is not None)
    if spec.syncer.tls.mode != "auto" or named[0] == named[1]:
        return ""
    fields = ("syncer.tls.secretName", "learners.credentials.secretName")
    given, missing, who = (*fields, "learners") if named[0] else (*fields[::-1], "the syncer")
    return f"spec.{missing}: is required where {given} is given: {who} must hold a certificate of the same authority"


def digest(value: Any) -> str:
    """A short digest (16 hexadecimal digits) of a value that JSON can hold."""
    return json_digest(value)[:16]


# ------------------------------------------------------------------ times


def unix_seconds(text: str) -> float:
    """RFC 3339 → unix seconds. Raises ValueError."""
    return datetime.fromisoformat(text).timestamp()


def seconds_of(text: Any) -> float | None:
    """The same; None: it is no such text."""
    try:
        return unix_seconds(text) if isinstance(text, str) else None
    except ValueError:
        return None


def rfc3339(at: float) -> str:
    """Unix seconds → RFC 3339 in whole seconds, as Kubernetes writes them."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
