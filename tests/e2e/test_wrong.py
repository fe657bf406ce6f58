"""9. Wrong things a person does: the status says what and what to do, nothing is lost, it heals."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .clusters import Cluster, CommandFailed, until
from .jobs import Job, pod_template, small_job
from .test_common_ends import merged_since

ONE = [{"name": "local", "learners": 1}]


def told(job: Job, *words: str, timeout: float = 90) -> str:
    """Wait until one sentence of the status (a condition's message or a region's cause) has all the words."""

    def sentence() -> str | None:
        status = job.status()
        texts = [f"{c['type']} {c['reason']}: {c['message']}" for c in status.get("conditions", [])]
        texts += [f"{r['name']}: {r.get('cause', '')}" for r in status.get("regions", [])]
        return next((t for t in texts if all(w.lower() in t.lower() for w in words)), None)

    try:
        found = str(until(f"{job.name}'s status says {words}", sentence, timeout))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.story()}") from None
    print(f"{job.name}: {found}")
    return found


@pytest.mark.promise(
    "A missing image is named in the job's status and counts as no failure; the job trains once the image is corrected"
)
@pytest.mark.timeout(300)
def test_an_image_that_is_missing(start: Any) -> None:
    template = pod_template("learner", "300m")
    template["spec"]["containers"][0]["image"] = "diloco-worker:nowhere"
    job: Job = start("noimage", learners={"podTemplate": template}, regions=ONE)
    told(job, "diloco-worker:nowhere")
    pod = job.pods("learner")[0]["metadata"]["uid"]
    assert job.status().get("replacements", {}).get("total", 0) == 0, "it could not start: not counted"
    job.patch({"spec": {"learners": {"podTemplate": pod_template("learner", "300m")}}})
    job.in_merges(1)
    assert job.pods("learner")[0]["metadata"]["uid"] != pod


@pytest.mark.promise(
    "An object of another owner under a name that the job needs is never touched; the job names it, and "
    "starts once it is gone"
)
@pytest.mark.timeout(300)
def test_a_foreign_object_of_the_same_name(cluster: Cluster, namespace: str) -> None:
    """It is never touched; the job says whose name it is, and starts when it is gone."""
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "taken-settings"}, "data": {"mine": "yes"}}
    cluster.apply(foreign, namespace=namespace)
    job = Job(cluster, "taken", namespace)
    job.apply(small_job("taken", learners=1))
    job.wait_condition("NameConflict", timeout=60)
    told(job, "taken-settings")
    found = cluster.api(f"/api/v1/namespaces/{namespace}/configmaps/taken-settings")
    assert found is not None and found["data"] == {"mine": "yes"} and "labels" not in found["metadata"]
    cluster.kubectl("delete", "configmap", "taken-settings", "-n", namespace)
    job.in_merges(1)
    job.wait_condition("NameConflict", "False", timeout=60)


@pytest.mark.promise(
    "Objects of a job that a user deletes or changes are restored, without a restart of the syncer, and "
    "foreign fields stay"
)
@pytest.mark.timeout(600)
def test_children_deleted_by_hand(cluster: Cluster, start: Any) -> None:
    job: Job = start("pruned", learners=2)
    before = job.in_merges(2)
    children = (("statefulsets", "pruned-local"), ("services", "pruned-syncer"), ("configmaps", "pruned-settings"))
    first, pods = {child: uid_of(job, *child) for child in children}, job.identities()
    for kind, name in children:
        cluster.kubectl("delete", kind, name, "-n", job.namespace, "--wait=false")
    for child in children:
        until(f"{child} is back", lambda child=child: uid_of(job, *child) != first[child], 60)
    # The learners' pods go with their StatefulSet. Their rows stay at the syncer meanwhile, so new ones are waited for.
    until("both pods are new", lambda: all(job.identities()[name][0] != pods[name][0] for name in pods), 120)
    assert merged_since(job, before)["epoch"] == before["epoch"]
    # A changed field of ours is put right; a foreign one is left.
    path = {"metadata": {"labels": {"example.com/team": "nine"}}, "spec": {"replicas": 7}}
    cluster.kubectl("patch", "statefulset", "pruned-local", "-n", job.namespace, "--type=merge", "-p", json.dumps(path))
    until("replicas are 2 again", lambda: objects(job, "statefulsets")[0]["spec"]["replicas"] == 2, 60)
    assert objects(job, "statefulsets")[0]["metadata"]["labels"]["example.com/team"] == "nine"
    job.exact()


def uid_of(job: Job, kind: str, name: str) -> str:
    """Of one of the job's objects. Raises KeyError."""
    found = {one["metadata"]["name"]: str(one["metadata"]["uid"]) for one in objects(job, kind)}
    return found[name]


def objects(job: Job, kind: str) -> list[dict[str, Any]]:
    group = {"statefulsets": "/apis/apps/v1", "deployments": "/apis/apps/v1"}.get(kind, "/api/v1")
    return job.cluster.items(f"{group}/namespaces/{job.namespace}/{kind}", f"diloco.io/job={job.name}")


@pytest.mark.timeout(300)
def test_a_quota_is_exceeded(cluster: Cluster, namespace: str) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "2"}},
    }
    cluster.apply(quota, namespace=namespace)
    job = Job(cluster, "squeezed", namespace)
    job.apply(small_job("squeezed", learners=3))
    told(job, "quota")
    job.in_merges(1)  # one learner is enough to go on
    cluster.kubectl("delete", "resourcequota", "small", "-n", namespace)
    job.in_merges(3, timeout=300)


@pytest.mark.timeout(300)
def test_a_volume_that_does_not_bind(cluster: Cluster, start: Any) -> None:
    job: Job = start("unbound", learners=1, syncer={"storage": {"claimName": "absent"}})
    told(job, "absent")
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "absent"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.apply(claim, namespace=job.namespace)
    job.in_merges(1, timeout=240)


@pytest.mark.timeout(300)
def test_a_storage_class_that_is_missing(cluster: Cluster, start: Any) -> None:
    """The claim is made and does not bind; it does when the class comes."""
    name = "diloco-e2e-absent"
    job: Job = start(
        "classless", learners=1, syncer={"storage": {"size": "1Gi", "storageClassName": name, "onDelete": "Delete"}}
    )
    try:
        told(job, "classless-syncer is not bound", "storage")
        classes = cluster.items("/apis/storage.k8s.io/v1/storageclasses")
        mark = "storageclass.kubernetes.io/is-default-class"
        default = next(c for c in classes if c["metadata"].get("annotations", {}).get(mark) == "true")
        kept = ("apiVersion", "kind", "provisioner", "parameters", "reclaimPolicy", "volumeBindingMode")
        made = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass"}
        made |= {key: value for key, value in default.items() if key in kept}
        cluster.apply({**made, "metadata": {"name": name}})
        job.in_merges(1, timeout=240)
    finally:
        cluster.kubectl("delete", "storageclass", name, "--ignore-not-found")


@pytest.mark.timeout(300)
def test_a_secret_that_is_missing(cluster: Cluster, start: Any) -> None:
    template = pod_template("learner", "300m")
    template["spec"]["containers"][0]["envFrom"] = [{"secretRef": {"name": "s3-keys"}}]
    job: Job = start("nosecret", learners={"podTemplate": template}, regions=ONE)
    told(job, "create the Secret s3-keys")
    cluster.kubectl("create", "secret", "generic", "s3-keys", "-n", job.namespace, "--from-literal=A=b")
    job.in_merges(1, timeout=240)


@pytest.mark.timeout(300)
def test_an_immutable_field_is_edited(cluster: Cluster, start: Any) -> None:
    job: Job = start("fixed", learners=1)
    job.in_merges(1)
    until("it has started", lambda: job.status().get("startTime"), 60)
    for patch, field in (
        ('{"spec": {"seed": 7}}', "seed"),
        ('{"spec": {"sync": {"fragments": 2}}}', "fragments"),
        ('{"spec": {"training": {"model": {"config": {"hidden_size": 32}}}}}', "model"),
        ('{"spec": {"training": {"data": null}}}', "data"),
    ):
        with pytest.raises(CommandFailed, match=field):
            cluster.kubectl("patch", "dj", "fixed", "-n", job.namespace, "--type=merge", "-p", patch)
    job.merging_on()


@pytest.mark.timeout(300)
def test_a_pod_template_that_no_pod_can_have(cluster: Cluster, start: Any) -> None:
    template = pod_template("learner", "300m")
    template["spec"]["containers"][0]["ports"] = [{"containerPort": "many"}]
    job: Job = start("odd", learners={"podTemplate": template}, regions=ONE)
    told(job, "containerPort")
    job.patch({"spec": {"learners": {"podTemplate": pod_template("learner", "300m")}}})
    job.patch({"spec": {"learners": {"podTemplate": {"spec": {"containers": None}}}}})
    job.in_merges(1, timeout=200)


@pytest.mark.timeout(300)
def test_the_operators_rights_are_too_small(cluster: Cluster, namespace: str) -> None:
    """A verb is taken from the operator's role: the status names it; it heals when it is given back."""
    name = next(
        r["metadata"]["name"]
        for r in cluster.items("/apis/rbac.authorization.k8s.io/v1/clusterroles")
        if r["metadata"]["labels"].get("app.kubernetes.io/instance") == "diloco"
        and any("poddisruptionbudgets" in rule.get("resources", []) for rule in r["rules"] or [])
    )

    role = cluster.api(f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{name}")
    assert role is not None
    lesser = [
        {**rule, "verbs": [v for v in rule["verbs"] if v in ("get", "list", "watch")]}
        if "poddisruptionbudgets" in rule.get("resources", [])
        else rule
        for rule in role["rules"]
    ]
    cluster.kubectl("patch", "clusterrole", name, "--type=merge", "-p", json.dumps({"rules": lesser}))
    job = Job(cluster, "small-rights", namespace)
    try:
        job.apply(small_job("small-rights", learners=1))
        told(job, "poddisruptionbudgets")
        job.in_merges(1)  # training does not need that object
    finally:
        cluster.kubectl("patch", "clusterrole", name, "--type=merge", "-p", json.dumps({"rules": role["rules"]}))
    until(
        "the object is there", lambda: cluster.items(f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"), 90
    )


@pytest.mark.timeout(300)
def test_a_learner_that_crashes_again_and_again(start: Any) -> None:
    """Counted, told with its last words, and the job fails at the limit and not before."""
    job: Job = start(
        "crashing",
        learners={
            "command": ["python", "-c", "raise SystemExit('the disk is on fire')"],
            "podTemplate": pod_template("learner", "300m"),
        },
        regions=ONE,
        failurePolicy={"maxReplacements": 2},
    )
    told(job, "the disk is on fire", timeout=120)
    job.wait_condition("Failed", timeout=240)
    told(job, "maxReplacements")


# A loop of one's own with a wrong name in its step: it joins, takes a batch and ends.
OWN_LOOP = """
import torch
import diloco_worker

def step(model, batch):
    return lss

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with diloco_worker.Learner.from_environment(model, optimizer) as learner:
    for batch in learner.batches([torch.ones(4)] * 1000):
        learner.after_step(tokens=len(batch), loss=step(model, batch))
"""
NAME_ERROR = "NameError: name 'lss' is not defined"


def termination_messages(job: Job) -> list[str]:
    """What the learners' programs have left behind at their last ends."""
    ends = [
        state.get("terminated") or {}
        for pod in job.pods("learner")
        for container in pod["status"].get("containerStatuses", [])
        for state in (container.get("state") or {}, container.get("lastState") or {})
    ]
    return [end["message"] for end in ends if end.get("message")]


@pytest.mark.timeout(500)
def test_a_program_of_ones_own_that_fails_the_same_way_again_and_again(cluster: Cluster, namespace: str) -> None:
    """Before any merge the same error three times fails the job, long before maxReplacements. The error is in the pod's
    termination message, the Events, the condition, the syncer's status, the report, and what `diloco status` prints."""
    learners = {"command": ["python", "-c", OWN_LOOP], "podTemplate": pod_template("learner", "500m")}
    document = small_job("misnamed", learners=learners, regions=ONE)
    for field in ("model", "data"):  # the program's own
        del document["spec"]["training"][field]
    job = Job(cluster, "misnamed", namespace)
    job.apply(document)

    left = until(
        "a learner has left its error",
        lambda: next((message for message in termination_messages(job) if NAME_ERROR in message), None),
        180,
    )
    assert left.strip().splitlines()[-1] == NAME_ERROR and "in step" in left, "the end of its traceback"

    job.wait_condition("Failed", timeout=300)
    failed = job.condition("Failed")
    assert failed["reason"] == "RepeatedError", failed
    said = r"Learner misnamed-local-0 ended \d times with the same error, and nothing was merged yet: .*"
    assert re.match(said + re.escape(NAME_ERROR), failed["message"]), failed
    status = job.status()
    assert status["phase"] == "Failed"
    assert 3 <= status["replacements"]["sinceMerge"] < 10, "maxReplacements is 50"
    assert not (status.get("progress") or {}).get("merges")

    def told_in_events() -> set[str]:
        return {event["reason"] for event in job.events() if NAME_ERROR in (event.get("message") or "")}

    until("Events of the crash and of the failure", lambda: {"LearnerCrashed", "Failed"} <= told_in_events(), 60)
    until("no learner is left", lambda: not job.pods("learner"), 120)
    page = job.wait_training("the syncer knows it", lambda d: d["phase"] == "failed", 60)
    assert NAME_ERROR in page["message"] and page["merges"] == 0
    shown = " ".join(cluster.diloco("status", job.name, "-n", namespace).split())
    report = json.loads(cluster.diloco("report", job.name, "-n", namespace, "--json"))
    assert report["outcome"] == "failed" and re.match(said + re.escape(NAME_ERROR), report["message"])
    assert failed["message"].startswith(report["message"]), "which also says how to continue"
    before_events = shown.partition(" ago ")[0]
    assert "RepeatedError" in before_events and before_events.count(report["message"]) == 1, shown
    shown = " ".join(cluster.diloco("report", job.name, "-n", namespace).split())
    assert "outcome failed: Learner misnamed-local-0 ended" in shown and NAME_ERROR in shown
