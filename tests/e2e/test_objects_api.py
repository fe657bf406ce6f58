"""Every manifest that the operator renders is taken by a real API server, as it is rendered.

Server-side dry runs by the plan's own objects, in a namespace that enforces the restricted pod
security standard; pods are tried as pods too, because a StatefulSet is taken whatever its pods
are. Then one job's objects are applied twice and changed by the rules of the plan.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diloco_operator.job import Job, place_job, read_job
from diloco_operator.model import Object, PlanSettings
from diloco_operator.objects import manifests
from diloco_operator.objects.manifests import Release
from diloco_operator.reconcile.diff import differences
from diloco_protocol.spec.load import job_to_json, load_job
from operator_world import job_object
from repository import ROOT

from .clusters import Cluster, CommandFailed, until

pytestmark = [pytest.mark.timeout(300)]

SETTINGS = PlanSettings(
    "hub",
    "diloco-system",
    "diloco-syncer:1",
    "diloco-worker:1",
    image_pull_policy="IfNotPresent",
    metrics_namespace="monitoring",
)
EVALUATED = {"evaluation": {"fraction": 0.1}}
FULL = {
    "metadata": {"labels": {"team": "nine"}, "annotations": {"example.com/a": "b"}},
    "spec": {
        "imagePullSecrets": [{"name": "pull"}],
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": 120,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"team": "nine"}},
            }
        ],
        "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
        "volumes": [
            {"name": "corpus", "persistentVolumeClaim": {"claimName": "corpus"}},
            {
                "name": "work",
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
                    }
                },
            },
        ],
        "initContainers": [
            {
                "name": "fetch",
                "image": "busybox",
                "command": ["true"],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "containers": [
            {
                "name": "learner",
                "image": "mine:1",
                "resources": {"limits": {"cpu": "300m", "memory": "1Gi", "nvidia.com/gpu": 1}},
                "env": [{"name": "HF_HOME", "value": "/tmp/hf"}],
                "envFrom": [{"secretRef": {"name": "s3"}}],
                "volumeMounts": [{"name": "corpus", "mountPath": "/corpus"}],
                "livenessProbe": {"exec": {"command": ["true"]}},
            },
            {
                "name": "side",
                "image": "side:1",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            },
        ],
    },
}

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluated": {"training": EVALUATED},
    "cuda": {"training": {**EVALUATED, "device": "cuda"}},
    "own program": {"learners": {"command": ["python", "train.py"]}},
    "spares": {"regions": [{"name": "local", "learners": 2, "spares": 2}]},
    "long names": {"regions": [{"name": "r" * 20, "learners": 1}]},
    "plaintext": {"syncer": {"tls": {"mode": "off"}}},
    "own secrets": {"syncer": {"tls": {"secretName": "s"}}, "learners": {"credentials": {"secretName": "l"}}},
    "own claim": {"syncer": {"storage": {"claimName": "mine"}}},
    "object store": {"syncer": {"storage": {"uri": "s3://bucket/prefix"}}},
    "shard pods": {
        "syncer": {
            "shards": 3,
            "shardPods": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
            "storage": {"uri": "s3://bucket/prefix"},
            "endpoint": {"type": "NodePort", "nodePort": 30780},
        }
    },
    "storage class": {"syncer": {"storage": {"storageClassName": "standard", "size": "1.5Gi"}}},
    "node port": {"syncer": {"endpoint": {"type": "NodePort", "nodePort": 30771}}},
    "any node port": {"syncer": {"endpoint": {"type": "NodePort"}}},
    "load balancer": {"syncer": {"endpoint": {"type": "LoadBalancer"}}},
    "external": {"syncer": {"endpoint": {"type": "External", "address": "hub.example.com:443"}}},
    "full template": {"learners": {"podTemplate": FULL}, "training": EVALUATED},
    "region's template": {"regions": [{"name": "local", "learners": 1, "podTemplate": FULL}]},
    "syncer's template": {
        "syncer": {
            "podTemplate": {
                "spec": {
                    "nodeSelector": {"a": "b"},
                    "containers": [{"name": "syncer", "resources": {"limits": {"cpu": "1"}}}],
                }
            }
        }
    },
    "several clusters": {
        "syncer": {
            "cluster": "hub",
            "endpoint": {"type": "NodePort", "nodePort": 30772, "address": "10.0.0.1"},
            "tls": {"secretName": "s"},
        },
        "learners": {"credentials": {"secretName": "l"}},
        "regions": [{"name": "a", "cluster": "hub", "learners": 1}, {"name": "b", "cluster": "far", "learners": 1}],
    },
}


def all_manifests(job: Job, settings: PlanSettings = SETTINGS, live: Object | None = None) -> list[Object]:
    here = place_job(job.spec, settings.cluster)
    found = manifests.manifests_without_pods(job, here, settings)
    claim = manifests.claim_manifest(job, live)
    if claim is not None and here.syncer:
        found.append(claim)
    release = Release("1", None, "diloco-syncer:1", "diloco-worker:1")
    for ref in manifests.pod_holders(job, here):
        spec = manifests.render_pod_holder(job, here, ref, release, settings=settings)
        rendering = manifests.Rendering(job.generation, spec)
        found.append(manifests.pod_holder_manifest(job, ref, rendering, 2 if ref.kind == "StatefulSet" else 1))
    return found


@pytest.fixture(scope="module")
def restricted(bare_cluster: Cluster) -> Iterator[str]:
    """A namespace that takes restricted pods only."""
    name = f"objects-{int(time.time()) % 100000}"
    bare_cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": name,
                "labels": {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")},
            },
        }
    )
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"  # without which no pod is taken
    until("the namespace's own account", lambda: bare_cluster.api(account), 60)
    yield name
    if not os.environ.get("KEEP"):
        bare_cluster.kubectl("delete", "namespace", name, "--wait=false", check=False)


def send(cluster: Cluster, namespace: str, found: list[Object], *words: str) -> list[Object]:
    """Apply as the operator does; the objects that the API server made of it."""
    prepared = []
    for manifest in found:
        manifest = copy.deepcopy(manifest)
        manifest["metadata"]["namespace"] = namespace
        manifest["metadata"].pop("ownerReferences", None)  # the job itself is not there
        prepared.append(manifest)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": prepared})
    said = cluster.kubectl(
        "apply",
        "--server-side",
        "--field-manager=diloco-operator",
        "--validate=strict",
        "-n",
        namespace,
        "-f",
        "-",
        "-o",
        "json",
        *words,
        stdin=text,
    )
    document = json.loads(said)
    return list(document["items"]) if document["kind"] == "List" else [document]


def pods_of(found: list[Object]) -> list[Object]:
    """The pods that the controllers would make, as far as the templates say."""
    made = []
    for manifest in found:
        template = (manifest.get("spec") or {}).get("template")
        if template is not None:
            spec = copy.deepcopy(template["spec"])
            spec.pop("priorityClassName", None)  # allowed in some namespaces only
            name = f"{manifest['metadata']['name']}-0"
            metadata = {**template["metadata"], "name": name}
            made.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return made


@pytest.mark.promise(
    "A real API server accepts every object that the operator makes, unchanged, in a namespace of the "
    "restricted standard"
)
@pytest.mark.ci
@pytest.mark.parametrize("name", JOBS)
def test_every_manifest_is_taken(bare_cluster: Cluster, restricted: str, name: str) -> None:
    document = job_object("j" * 30 if name == "long names" else "job", **JOBS[name])
    document["metadata"]["labels"] = {"team": "pre-training"}
    job = read_job(document)
    assert job.document is not None, job.problems
    clusters = ["hub", "far"] if name == "several clusters" else ["hub"]
    for cluster in clusters:
        settings = PlanSettings(cluster, "diloco-system", "s:1", "w:1", metrics_namespace="monitoring")
        found = all_manifests(job, settings)
        made = send(bare_cluster, restricted, found, "--dry-run=server")
        assert len(made) == len(found)
        for wanted, live in zip(found, made, strict=True):
            wanted = copy.deepcopy(wanted)
            wanted["metadata"].pop("ownerReferences", None)
            wanted["metadata"]["namespace"] = restricted
            assert not differences(wanted, live), "the API server wrote something else"
        pods = pods_of(found)
        assert len(send(bare_cluster, restricted, pods, "--dry-run=server")) == len(pods)


@pytest.mark.parametrize("path", sorted(ROOT.glob("manifests/examples/*.yaml")), ids=lambda p: p.stem)
def test_the_examples_objects_are_taken(bare_cluster: Cluster, restricted: str, path: Any) -> None:
    document = json.loads(job_to_json(load_job(path)))  # numbers as kubectl reads them
    document["metadata"] |= {"uid": "aaaaaaaa-0000-0000-0000-000000000001", "generation": 1}
    job = read_job(document)
    assert job.document is not None, job.problems
    for cluster in sorted({r.cluster for r in job.spec.regions if r.cluster} | {"hub"}):
        found = all_manifests(job, PlanSettings(cluster, "diloco-system", "s:1", "w:1"))
        send(bare_cluster, restricted, found + pods_of(found), "--dry-run=server")


def test_what_is_applied_can_be_applied_again_and_changed(bare_cluster: Cluster, restricted: str) -> None:
    """Twice the same is no change; every edit that the plan lets through is taken over a live object."""
    first = job_object(training=EVALUATED)
    job = read_job(first)
    made = send(bare_cluster, restricted, all_manifests(job))
    again = send(bare_cluster, restricted, all_manifests(job))

    def written(found: list[Object]) -> list[str]:
        """Versions of what no controller writes into, generations of the rest."""
        busy = ("StatefulSet", "Deployment", "PersistentVolumeClaim", "PodDisruptionBudget")
        return [str(o["metadata"].get("generation" if o["kind"] in busy else "resourceVersion")) for o in found]

    assert written(again) == written(made)
    claim = next(o for o in made if o["kind"] == "PersistentVolumeClaim")
    for change in (
        {"learners": {"podTemplate": FULL}},
        {"learners": {}},
        {"syncer": {"endpoint": {"type": "NodePort", "nodePort": 30773}}},
        {"syncer": {"endpoint": {"type": "NodePort"}}},
        {"syncer": {}},
        {"syncer": {"tls": {"mode": "off"}}},
        {"syncer": {"storage": {"size": "1Gi"}}},
        {"syncer": {"storage": {"storageClassName": "another"}}},
        {"syncer": {"storage": {"uri": "s3://b/p"}}},
        {"syncer": {"storage": {"claimName": "mine"}}},
        {"syncer": {}},
    ):
        first["spec"] |= change
        first["metadata"]["generation"] += 1
        job = read_job(first)
        assert job.document is not None, job.problems
        found = all_manifests(job, live=claim)
        live = send(bare_cluster, restricted, found)
        for wanted, there in zip(found, live, strict=True):
            wanted["metadata"].pop("ownerReferences", None)
            wanted["metadata"]["namespace"] = restricted
            assert not differences(wanted, there), change
            if wanted["kind"] in ("StatefulSet", "Deployment"):
                assert manifests.stored_rendering(there) == manifests.stored_rendering(wanted)


@pytest.mark.promise("Faults of a pod template that the operator leaves to the API server are named by its dry run")
@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": {"containers": [{"name": "learner", "ports": [{"containerPort": "many"}]}]}}, "containerPort"),
        ({"spec": {"containers": [{"name": "learner", "imagee": "x"}]}}, "imagee"),
        ({"spec": {"containers": [{"name": "learner", "resources": {"limits": {"cpu": "-1"}}}]}}, "cpu"),
        ({"spec": {"containers": [{"name": "side"}]}}, "image"),
        ({"spec": {"volumes": [{"name": "x", "emptyDirr": {}}]}}, "emptyDirr"),
        ({"spec": {"nodeSelector": ["x"]}}, "nodeSelector"),
        (
            {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}}},
            "nodeSelectorTerms",
        ),
    ],
)
def test_faults_of_a_template_are_named_by_the_dry_run(
    bare_cluster: Cluster, restricted: str, template: dict[str, Any], field: str
) -> None:
    """What the operator leaves to the API server, it does find."""
    job = read_job(job_object(learners={"podTemplate": template}))
    found = [m for m in all_manifests(job) if m["kind"] == "StatefulSet"]
    with pytest.raises(CommandFailed, match=field):
        send(bare_cluster, restricted, found, "--dry-run=server")
