"""podTemplate: the strategic merge, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from diloco_operator.job import read_job
from diloco_operator.model import PlanSettings
from diloco_operator.objects import pods
from diloco_operator.objects.template_merge import Protected, find_refusals, merge_template

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "terminationGracePeriodSeconds": 30,
        "securityContext": {"runAsUser": 65532, "runAsNonRoot": True},
        "tolerations": [
            {"key": k, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 20}
            for k in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        ],
        "containers": [
            {
                "name": "learner",
                "image": "ours",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "ports": [{"containerPort": 7710, "name": "status", "protocol": "TCP"}],
                "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}},
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "livenessProbe": {"httpGet": {"path": "/livez", "port": "status"}, "periodSeconds": 20},
            }
        ],
        "volumes": [{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    },
}


def merged(spec: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(BASE)
    result = merge_template(BASE, {"spec": spec})
    assert before == BASE, "the base is not changed"
    return dict(result["spec"])


def main(**fields: Any) -> dict[str, Any]:
    found = merged({"containers": [{"name": "learner", **fields}]})["containers"]
    assert len(found) == 1
    return dict(found[0])


def test_named_containers_are_merged_and_others_kept() -> None:
    spec = merged({"containers": [{"name": "side", "image": "theirs"}, {"name": "learner", "image": "mine"}]})
    assert [c["name"] for c in spec["containers"]] == ["learner", "side"]
    assert spec["containers"][0]["image"] == "mine"
    assert spec["containers"][0]["env"] == BASE["spec"]["containers"][0]["env"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"env": [{"name": "C", "value": "3"}]}, {"A": {"value": "1"}, "B": {"value": "2"}, "C": {"value": "3"}}),
        ({"env": [{"name": "B", "value": "9"}]}, {"A": {"value": "1"}, "B": {"value": "9"}}),
        (
            {"env": [{"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
            {"A": {"value": "1"}, "B": {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}},
        ),
    ],
)
def test_environment_is_merged_by_name(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    env = main(**given)["env"]
    assert {e["name"]: {k: v for k, v in e.items() if k != "name"} for e in env} == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # A default request must not exceed a limit that the user gives, nor what they request.
        ({"limits": {"cpu": "100m"}}, {"requests": {"memory": "512Mi"}, "limits": {"cpu": "100m"}}),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": "2", "memory": "512Mi"}}),
        (
            {"limits": {"nvidia.com/gpu": 1}},
            {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"nvidia.com/gpu": 1}},
        ),
    ],
)
def test_resources(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert main(resources=given)["resources"] == wanted


def test_ports_mounts_and_volumes_are_merged_by_their_keys() -> None:
    ports = main(ports=[{"containerPort": 7710, "hostPort": 1}, {"containerPort": 9}])["ports"]
    assert ports == [{"containerPort": 7710, "name": "status", "protocol": "TCP", "hostPort": 1}, {"containerPort": 9}]
    mounts = main(volumeMounts=[{"name": "data", "mountPath": "/data"}])["volumeMounts"]
    assert [m["mountPath"] for m in mounts] == ["/tmp", "/data"]
    volumes = merged({"volumes": [{"name": "work", "nfs": {"server": "s", "path": "/"}}]})["volumes"]
    assert volumes == [{"name": "work", "nfs": {"server": "s", "path": "/"}}, {"name": "tmp", "emptyDir": {}}]


def test_a_probe_of_another_kind_replaces_ours() -> None:
    probe = main(livenessProbe={"exec": {"command": ["true"]}})["livenessProbe"]
    assert probe == {"exec": {"command": ["true"]}, "periodSeconds": 20}
    assert "livenessProbe" not in main(livenessProbe=None), "null takes it away"
    assert main(livenessProbe={"periodSeconds": 60})["livenessProbe"]["httpGet"]


def test_tolerations_are_added_to() -> None:
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert merged({"tolerations": [gpu]})["tolerations"] == [gpu, *BASE["spec"]["tolerations"]]
    own = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    found = merged({"tolerations": [own]})["tolerations"]
    assert found == [own, BASE["spec"]["tolerations"][1]]
    every = {"operator": "Exists"}
    assert merged({"tolerations": [every]})["tolerations"] == [every]


def test_mappings_are_merged_and_other_lists_replaced() -> None:
    spec = merged({"securityContext": {"runAsUser": 1000, "supplementalGroups": [5]}, "nodeSelector": {"x": "y"}})
    assert spec["securityContext"] == {"runAsUser": 1000, "runAsNonRoot": True, "supplementalGroups": [5]}
    assert spec["nodeSelector"] == {"x": "y"}
    two = merge_template(
        merge_template(BASE, {"spec": {"imagePullSecrets": [{"name": "a"}]}}),
        {"spec": {"imagePullSecrets": [{"name": "b"}]}},
    )
    assert [s["name"] for s in two["spec"]["imagePullSecrets"]] == ["a", "b"]


def test_null_takes_away_what_a_pod_can_do_without() -> None:
    for nothing in ({"metadata": None}, {"spec": None}, {"spec": {"containers": None, "volumes": None}}):
        assert merge_template(BASE, nothing) == BASE
    nulls = dict.fromkeys(("env", "ports", "volumeMounts", "image", "command", "args"))
    assert main(**nulls) == BASE["spec"]["containers"][0]
    spec = merged({"terminationGracePeriodSeconds": None, "securityContext": {"runAsUser": None}})
    assert "terminationGracePeriodSeconds" not in spec and spec["securityContext"] == {"runAsNonRoot": True}


# ------------------------------------------------------------------ what is refused

OURS = Protected(
    "learner", {"diloco.io/job"}, {"DILOCO_JOB_FILE"}, {"/etc/diloco/settings"}, volumes={"settings"}, command="no"
)


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"metadata": {"labels": {"diloco.io/job": "x"}}}, "t.metadata.labels[diloco.io/job]"),
        ({"metadata": {"annotations": {"diloco.io/inputs": "x"}}}, "t.metadata.annotations[diloco.io/inputs]"),
        ({"metadata": {"name": "x"}}, "t.metadata.name"),
        ({"spec": {"restartPolicy": "Never"}}, "t.spec.restartPolicy"),
        ({"spec": {"terminationGracePeriodSeconds": 0}}, "t.spec.terminationGracePeriodSeconds"),
        ({"spec": {"volumes": [{"name": "settings", "emptyDir": {}}]}}, "t.spec.volumes[settings]"),
        ({"spec": {"containers": [{"name": "learner", "command": ["x"]}]}}, "t.spec.containers[learner].command"),
        ({"spec": {"containers": [{"name": "learner", "args": ["x"]}]}}, "t.spec.containers[learner].args"),
        (
            {"spec": {"containers": [{"name": "learner", "env": [{"name": "DILOCO_JOB_FILE", "value": "x"}]}]}},
            "t.spec.containers[learner].env[DILOCO_JOB_FILE]",
        ),
        (
            {
                "spec": {
                    "containers": [
                        {"name": "learner", "volumeMounts": [{"name": "x", "mountPath": "/etc/diloco/settings/"}]}
                    ]
                }
            },
            "t.spec.containers[learner].volumeMounts[/etc/diloco/settings/]",
        ),
        ({"spec": {"initContainers": [{"name": "learner"}]}}, "t.spec.initContainers[learner]"),
        ({"spec": {"containers": {"name": "learner"}}}, "t.spec.containers"),
        ({"spec": {"containers": ["learner"]}}, "t.spec.containers[0]"),
        ({"spec": {"containers": [{"image": "x"}]}}, "t.spec.containers[0]"),
        ({"spec": {"containers": [{"name": "a"}, {"name": "a"}]}}, "t.spec.containers[a]"),
        ({"spec": {"containers": [{"name": "learner", "env": {"A": "1"}}]}}, "t.spec.containers[learner].env"),
        ({"spec": "x"}, "t.spec"),
        ({"spec": {"$patch": "replace"}}, "t.spec.$patch"),
        ({"spec": {"tolerations": {"key": "x"}}}, "t.spec.tolerations"),
    ],
)
def test_refused_by_path(template: dict[str, Any], path: str) -> None:
    found = find_refusals(template, "t", OURS)
    assert [r.path for r in found] == [path] and found[0].message


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"metadata": None, "spec": None},
        {"spec": {"containers": None, "volumes": None}},
        {"metadata": {"labels": {"team": "x"}}, "spec": {"restartPolicy": "Always"}},
        {"spec": {"containers": [{"name": "side", "command": ["x"], "env": [{"name": "DILOCO_JOB_FILE"}]}]}},
        {"spec": {"containers": [{"name": "learner", "securityContext": {"runAsUser": 1}, "image": "x"}]}},
    ],
)
def test_not_refused(template: dict[str, Any]) -> None:
    assert find_refusals(template, "t", OURS) == []
    merge_template(BASE, template)


def test_every_field_that_the_operator_sets_in_a_main_container_is_protected() -> None:
    """What is in the rendered pods and would break the job if it were replaced, is in the lists."""
    from operator_world import job_object

    job = read_job(job_object(training={"evaluation": {"fraction": 0.1}}))
    settings = PlanSettings(None, "diloco-system", "i", "i")
    for role, template in (
        ("syncer", pods.syncer_template(job, "i", settings)),
        ("learner", pods.learner_template(job, job.spec.regions[0], "i", settings)),
    ):
        container = template["spec"]["containers"][0]
        protected = pods._syncer_protected() if role == "syncer" else pods._worker_protected("learner", "")
        assert protected.container == container["name"] == role
        assert {e["name"] for e in container.get("env", [])} <= set(protected.env)
        assert {m["mountPath"] for m in container["volumeMounts"]} <= set(protected.mounts)
        free = {"work"}  # scratch of learners, which may be another volume
        assert {v["name"] for v in template["spec"]["volumes"]} - free <= set(protected.volumes)
        assert set(template["metadata"]["labels"]) <= set(protected.labels)
