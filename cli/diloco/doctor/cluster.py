"""A cluster: whether it answers, knows DiLoCoJobs as this release does, runs an operator, and what this account may."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco.authoring.field_pages import walk
from diloco.cluster.client import INSTALL, Cluster, ClusterError, Where
from diloco.doctor.findings import Finding, Level
from diloco_protocol.vocabulary import DOMAIN, JOB_PLURAL, VERSION

_finding = functools.partial(Finding, "cluster")
CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{JOB_PLURAL}.{DOMAIN}"
OPERATOR = "app.kubernetes.io/name=diloco-operator"

RIGHTS = (
    ("create", DOMAIN, JOB_PLURAL, "diloco apply"),
    ("patch", DOMAIN, JOB_PLURAL, "diloco apply, scale, suspend"),
    ("list", DOMAIN, JOB_PLURAL, "diloco status"),
    ("delete", DOMAIN, JOB_PLURAL, "diloco delete"),
    ("list", "", "pods", "diloco logs"),
    ("get", "", "pods/log", "diloco logs"),
    ("list", "", "events", "diloco status"),
    ("create", "", "pods/portforward", "diloco status, export, report"),
)
"""Verb, group, resource, and the commands that need it."""


def has_kubeconfig(where: Where) -> bool:
    """Whether somebody named a cluster, or there is a kubeconfig that does."""
    paths = (os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep)
    return where.given or any(path and Path(path).expanduser().is_file() for path in paths)


def no_kubeconfig() -> Finding:
    """That there is none: a warning where the environment names one."""
    named = os.environ.get("KUBECONFIG")
    if named:
        return _finding("reach", "warning", f"KUBECONFIG={named}: no such file", fix="correct or unset it")
    return _finding("reach", "ok", "no kubeconfig: it is needed only for jobs in clusters")


def check_cluster(where: Where) -> Iterator[Finding]:
    """Nothing is changed there. Without ``--context`` a cluster that cannot be reached is no error: a job runs on this
    machine without it."""
    bad: Level = "error" if where.given else "warning"
    try:
        cluster = where.open_one()
        version = cluster.get("/version").get("gitVersion")
    except ClusterError as error:
        yield _finding("reach", bad, str(error), fix="" if where.given else "needed only for jobs in clusters")
        return
    yield _finding("reach", "ok", f"{cluster.server}, {version}, namespace {cluster.namespace}")
    try:
        known = cluster.find(f"/apis/{DOMAIN}/{VERSION}")
    except ClusterError as error:
        yield _finding("operator", bad, str(error))
        return
    if known is None:
        install = f"{INSTALL} --kube-context {cluster.context}"
        yield _finding("operator", bad, "the cluster knows no DiLoCoJobs: the operator is not installed", fix=install)
    else:
        yield _definition(cluster)
        yield _operator(cluster, bad)
    yield _rights(cluster, bad)


def _definition(cluster: Cluster) -> Finding:
    """Whether the cluster's definition has the fields that this release has."""
    try:
        definition = cluster.get(CRD)
        schema = next(
            one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"] if one["name"] == VERSION
        )
    except (ClusterError, KeyError, StopIteration, TypeError) as error:
        return _finding("DiLoCoJob", "ok", f"{VERSION} is known; its fields cannot be read ({error})")
    there = set(_fields(schema))
    absent = [page.name for page in walk() if page.path[0] == "spec" and page.name not in there]
    absent = [name for name in absent if name.rpartition(".")[0] not in absent]
    if absent:
        said = (
            f"the cluster's definition lacks {', '.join(absent[:5])}{' and more' * (len(absent) > 5)}: another release"
        )
        return _finding("DiLoCoJob", "warning", said, fix="helm upgrade the operator, or use its release of diloco")
    return _finding("DiLoCoJob", "ok", f"{VERSION}, with all fields of this release")


def _fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """The dotted paths of an OpenAPI schema's properties, without indices."""
    inner = schema.get("items") or schema
    for name, one in (inner.get("properties") or {}).items():
        yield path + name
        yield from _fields(one, f"{path}{name}.")


def _operator(cluster: Cluster, bad: Level) -> Finding:
    try:
        pods = cluster.all_of("/api/v1/pods", labelSelector=OPERATOR)
    except ClusterError as error:
        return _finding("operator", "ok", f"installed; whether it runs cannot be seen ({error})")
    ready = [
        pod
        for pod in pods
        if any(
            one.get("type") == "Ready" and one.get("status") == "True"
            for one in (pod.get("status") or {}).get("conditions") or ()
        )
    ]
    if ready:
        places = sorted({str(pod["metadata"].get("namespace")) for pod in ready})
        return _finding("operator", "ok", f"ready in {', '.join(places)}")
    said = f"{len(pods)} pod{'s' * (len(pods) != 1)} of it, none ready"
    return _finding("operator", bad, said, fix=f"kubectl {cluster.reach} describe pods -A -l {OPERATOR}")


def _rights(cluster: Cluster, bad: Level) -> Finding:
    """What this account may do in the namespace, by the API server's own word."""
    missing: dict[str, str] = {}
    try:
        for verb, group, resource, commands in RIGHTS:
            name, _, sub = resource.partition("/")
            attributes = {"namespace": cluster.namespace, "verb": verb, "group": group, "resource": name}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes | ({"subresource": sub} if sub else {})},
            }
            reply = cluster.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
            if not (reply.get("status") or {}).get("allowed"):
                missing[f"{verb} {resource}"] = commands
    except ClusterError as error:
        return _finding("rights", "warning", f"what this account may do cannot be asked: {error}")
    if not missing:
        return _finding("rights", "ok", f"all that the commands need in namespace {cluster.namespace}")
    said = "; ".join(f"may not {right} (for {commands})" for right, commands in missing.items())
    return _finding("rights", bad, said, fix=f"ask for a Role with these in namespace {cluster.namespace}")
