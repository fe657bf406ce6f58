"""The manifests of a job's objects: names, labels, ports, what they hold and what they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from diloco_operator import names
from diloco_operator.job import Job, place_job, read_job
from diloco_operator.model import PlanSettings, Ref
from diloco_operator.objects import manifests, pods
from diloco_operator.objects.manifests import Release, Rendering
from diloco_protocol.spec.load import job_from_json
from diloco_protocol.vocabulary import LABEL_POD_INDEX
from operator_world import job_object
from repository import ROOT

SETTINGS = PlanSettings(None, "diloco-system", "syncer:1", "worker:1")
RELEASE = Release("1", None, "syncer:1", "worker:1")
EVALUATED = {"evaluation": {"fraction": 0.1}}


def job(**spec: Any) -> Job:
    found = read_job(job_object(**spec))
    assert found.document is not None, found.problems
    return found


def everything(given: Job, settings: PlanSettings = SETTINGS) -> dict[Ref, dict[str, Any]]:
    here = place_job(given.spec, settings.cluster)
    found = [*manifests.manifests_without_pods(given, here, settings)]
    claim = manifests.claim_manifest(given, None)
    found += [claim] if claim is not None and here.syncer else []
    for ref in manifests.pod_holders(given, here):
        spec = manifests.render_pod_holder(given, here, ref, RELEASE, settings=settings)
        found.append(manifests.pod_holder_manifest(given, ref, Rendering(1, spec), 1))
    return {Ref(m["kind"], m["metadata"]["name"]): m for m in found}


def container(template: dict[str, Any]) -> dict[str, Any]:
    return dict(template["spec"]["containers"][0])


def environment(template: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(template)["env"]}


def walk(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(item)


def test_the_objects_of_a_job_have_the_names_of_the_contract() -> None:
    made = everything(job(training=EVALUATED))
    assert sorted(map(tuple, made)) == sorted(
        [
            ("ConfigMap", "job-settings"),
            ("NetworkPolicy", "job-syncer"),
            ("NetworkPolicy", "job-learners"),
            ("Service", "job-syncer"),
            ("Service", "job-local"),
            ("PodDisruptionBudget", "job-local"),
            ("PersistentVolumeClaim", "job-syncer"),
            ("Deployment", "job-syncer"),
            ("StatefulSet", "job-local"),
            ("Deployment", "job-evaluator"),
        ]
    )


def test_labels_and_owners() -> None:
    for ref, manifest in everything(job(training=EVALUATED)).items():
        labels = manifest["metadata"]["labels"]
        assert labels["diloco.io/job"] == "job" and labels["app.kubernetes.io/managed-by"] == "diloco-operator"
        assert labels["diloco.io/role"] in ("syncer", "learner", "evaluator")
        owners = manifest["metadata"].get("ownerReferences", [])
        assert bool(owners) == (ref.kind != "PersistentVolumeClaim"), "the claim outlives the job"
        live = {**manifest, "kind": ref.kind}
        assert names.is_ours(ref, live, "job", job().uid)
        assert names.is_ours(ref, live, "job", "another") == (ref.kind == "PersistentVolumeClaim")
        assert not names.is_ours(ref, {"metadata": {"name": ref.name}}, "job", job().uid)
        template = manifest.get("spec", {}).get("template")
        if template:
            for key, value in manifest["spec"]["selector"]["matchLabels"].items():
                assert template["metadata"]["labels"][key] == value
            assert {k: v for k, v in template["metadata"]["labels"].items() if k in labels} == labels


def test_settings_are_what_programs_read() -> None:
    data = everything(job())[names.settings_map("job")]["data"]
    assert job_from_json(data["job.json"]).metadata.name == "job"
    assert json.loads(data["address.json"]) == {"sync": "job-syncer.ns.svc:7700"} and len(data) == 2
    cuda = everything(job(training={**EVALUATED, "device": "cuda"}))
    settings = cuda[names.settings_map("job")]["data"]
    assert job_from_json(settings["job.json"]).spec.training.device == "cuda"
    assert job_from_json(settings["evaluator.json"]).spec.training.device == "auto", "it has no GPU"
    template = cuda[names.evaluator_deployment("job")]["spec"]["template"]
    assert environment(template)["DILOCO_JOB_FILE"] == "/etc/diloco/settings/evaluator.json"
    learner = cuda[names.stateful_set("job", "local")]["spec"]["template"]
    assert environment(learner)["DILOCO_JOB_FILE"] == "/etc/diloco/settings/job.json"


def test_every_pod_is_restricted() -> None:
    made = everything(job(training=EVALUATED))
    templates = [m["spec"]["template"] for m in made.values() if "template" in m.get("spec", {})]
    assert len(templates) == 3
    for template in templates:
        spec, main = template["spec"], container(template)
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        assert spec["terminationGracePeriodSeconds"] == 30
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert main["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert main["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert {t["tolerationSeconds"] for t in spec["tolerations"]} == {20} and len(spec["tolerations"]) == 2
        assert main["resources"]["requests"] and "limits" not in main["resources"]
        assert "lifecycle" not in main
        for mount in main["volumeMounts"]:
            assert mount["name"] in {v["name"] for v in spec["volumes"]}
        probed = [main[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
        if "status" in {port["name"] for port in main["ports"]}:  # a worker
            assert probed == ["/livez", "/livez", "/readyz"], "a stall is no reason to kill: it ends by itself"
        start = main["startupProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= 3600


def test_the_syncer() -> None:
    deployment = everything(job())[names.syncer_deployment("job")]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"} and deployment["spec"]["replicas"] == 1
    command = container(deployment["spec"]["template"])["command"]
    options = dict(zip(command[3::2], command[4::2], strict=False))
    assert command[:3] == ["python", "-m", "diloco_syncer"] and "--stay" in command
    assert options["--store"] == "/var/lib/diloco/store" and options["--listen"] == "[::]:7700"
    assert options["--control"] == "[::]:7701" and options["--export"].startswith("127.0.0.1:")
    assert options["--control-key-file"] == "/etc/diloco/control/control-key"
    assert "--credentials" in command
    # Every option is one that the program has.
    from diloco_syncer.__main__ import _parser

    _parser().parse_args(command[3:])
    pod_uid = {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert environment(deployment["spec"]["template"]) == {"DILOCO_POD": pod_uid}
    # The sync port is bound before the store is read, and under TLS no kubelet could ask there.
    main = container(deployment["spec"]["template"])
    probed = {p: main[p]["httpGet"] for p in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {p: page["path"] for p, page in probed.items()} == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    ports = {port["name"]: port["containerPort"] for port in main["ports"]}
    assert {ports[page["port"]] for page in probed.values()} == {7702}


def test_the_environment_of_workers_is_one_that_they_read(tmp_path: Any, monkeypatch: Any) -> None:
    from diloco_worker.settings import WorkerSettings

    made = everything(job(training=EVALUATED, syncer={"tls": {"mode": "off"}}))
    path = tmp_path / "job.json"
    path.write_text(made[names.settings_map("job")]["data"]["job.json"])
    values = {
        "metadata.uid": "9dd40b1d-a071-fc6c-86cb-a85f37bee35c",
        "metadata.labels['apps.kubernetes.io/pod-index']": "2",
    }
    for ref, role in (
        (names.stateful_set("job", "local"), "learner"),
        (names.evaluator_deployment("job"), "evaluator"),
    ):
        env = environment(made[ref]["spec"]["template"])
        said = {k: v if isinstance(v, str) else values[v["fieldRef"]["fieldPath"]] for k, v in env.items()}
        assert said["DILOCO_JOB_FILE"] == "/etc/diloco/settings/job.json"
        settings = WorkerSettings.from_environment({**said, "DILOCO_JOB_FILE": str(path)})
        assert settings.role == role and settings.idle_at_end and settings.syncer_file
        assert settings.process.startswith("9dd40b1da071fc6c86cba85f37bee35c")
        assert settings.drain_seconds == (25 if role == "learner" else None)
        if role == "learner":
            assert (settings.region, settings.ordinal) == ("local", 2)


@pytest.mark.parametrize(("grace", "seconds"), [(None, 25), (120, 115), (3, 1)])
def test_a_learner_drains_within_its_grace_period(grace: int | None, seconds: int) -> None:
    """Also a program of the user's own, and where a region's template has the last word."""
    template = {"spec": {"terminationGracePeriodSeconds": grace}} if grace is not None else {}
    region = {"name": "local", "learners": 1, "podTemplate": template}
    learners = {"command": ["mine"], "podTemplate": {"spec": {"containers": [{"name": "side", "image": "i"}]}}}
    made = everything(job(learners=learners, regions=[region]))
    pod = made[names.stateful_set("job", "local")]["spec"]["template"]
    assert environment(pod)["DILOCO_DRAIN_SECONDS"] == str(seconds)
    assert pod["spec"]["terminationGracePeriodSeconds"] == (grace or 30) > seconds
    assert "env" not in pod["spec"]["containers"][1]


@pytest.mark.parametrize("path", [None, "/var/run/why"])
def test_a_learner_leaves_its_error_where_its_pod_says(path: str | None) -> None:
    main = {"name": "learner", **({} if path is None else {"terminationMessagePath": path})}
    made = everything(job(learners={"podTemplate": {"spec": {"containers": [main]}}}))
    pod = made[names.stateful_set("job", "local")]["spec"]["template"]
    assert environment(pod).get("DILOCO_TERMINATION_LOG") == path


def test_learners_command_is_the_containers() -> None:
    command = ["python", "train.py", "--fast"]
    made = everything(job(learners={"command": command}, training=EVALUATED))
    assert container(made[names.stateful_set("job", "local")]["spec"]["template"])["command"] == command
    evaluator = container(made[names.evaluator_deployment("job")]["spec"]["template"])
    assert evaluator["command"] == ["python", "-m", "diloco_worker"]


def test_a_regions_template_goes_over_the_shared_one_and_the_evaluator_takes_no_gpu() -> None:
    shared = {
        "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "nodeSelector": {"pool": "gpu"},
            "priorityClassName": "high",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "x"}],
            "volumes": [{"name": "corpus", "nfs": {"server": "s", "path": "/"}}],
            "containers": [
                {
                    "name": "learner",
                    "image": "mine:1",
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                    "readinessProbe": {"exec": {"command": ["true"]}},
                    "volumeMounts": [{"name": "corpus", "mountPath": "/corpus"}],
                },
                {"name": "side", "image": "side:1"},
            ],
        }
    }
    own = {"spec": {"containers": [{"name": "learner", "image": "mine:2"}]}}
    made = everything(
        job(
            training=EVALUATED,
            learners={"podTemplate": shared},
            regions=[{"name": "local", "learners": 1}, {"name": "far", "learners": 1, "podTemplate": own}],
        )
    )
    near = made[names.stateful_set("job", "local")]["spec"]["template"]["spec"]
    far = made[names.stateful_set("job", "far")]["spec"]["template"]["spec"]
    assert near["containers"][0]["image"] == "mine:1" and far["containers"][0]["image"] == "mine:2"
    assert far["nodeSelector"] == {"pool": "gpu"} and far["containers"][1]["name"] == "side"
    assert far["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    evaluator = made[names.evaluator_deployment("job")]["spec"]["template"]["spec"]
    assert evaluator["containers"][0]["image"] == "mine:1" and evaluator["imagePullSecrets"] == [{"name": "pull"}]
    assert "nvidia.com/gpu" not in json.dumps(evaluator) and "resourceClaims" not in evaluator
    assert evaluator["containers"][0]["readinessProbe"]["httpGet"]
    assert {"name": "corpus", "mountPath": "/corpus"} in evaluator["containers"][0]["volumeMounts"]


@pytest.mark.promise("The evaluator can have a GPU and a program of its own")
def test_the_evaluator_has_a_program_and_resources_of_its_own() -> None:
    """learners.podTemplate gives it where to run, evaluator.podTemplate what it needs beside (a GPU)."""
    gpu = {"limits": {"nvidia.com/gpu": 1}}
    shared = {"spec": {"nodeSelector": {"pool": "gpu"}, "containers": [{"name": "learner", "image": "mine:1"}]}}
    own = {"spec": {"containers": [{"name": "evaluator", "resources": gpu}]}}
    given = job(
        training=EVALUATED,
        learners={"command": ["python", "loop.py"], "podTemplate": shared},
        evaluator={"command": ["python", "score.py"], "podTemplate": own},
    )
    pod = everything(given)[names.evaluator_deployment("job")]["spec"]["template"]["spec"]
    container = next(one for one in pod["containers"] if one["name"] == "evaluator")
    assert container["command"] == ["python", "score.py"] and container["image"] == "mine:1"
    assert container["resources"]["limits"] == gpu["limits"] and pod["nodeSelector"] == {"pool": "gpu"}
    assert {"name": "DILOCO_ROLE", "value": "evaluator"} in container["env"]
    wrong = {"spec": {"containers": [{"name": "evaluator", "command": ["x"]}]}}
    (refusal,) = pods.template_refusals(job(evaluator={"podTemplate": wrong}).spec)
    assert "spec.evaluator.podTemplate" in refusal.path and "spec.evaluator.command" in refusal.message


@pytest.mark.promise("A drain of nodes evicts at most M - K learners at once")
@pytest.mark.parametrize(
    ("learners", "quorum", "budgets"),
    [([3], 1, [2]), ([3], 3, [1]), ([64], 48, [16]), ([6, 2], 4, [3, 1]), ([4, 4], 8, [1, 1]), ([1, 7], 4, [1, 3])],
)
def test_as_many_learners_may_be_evicted_at_once_as_the_job_can_be_without(
    learners: list[int], quorum: int, budgets: list[int]
) -> None:
    regions = [{"name": f"r{i}", "learners": count} for i, count in enumerate(learners)]
    made = everything(job(regions=regions, sync={"quorum": quorum}))
    found = [made[names.budget("job", region["name"])]["spec"]["maxUnavailable"] for region in regions]
    assert found == budgets


@pytest.mark.promise("The chart's pull policy holds for the operator's own images only")
@pytest.mark.parametrize(("own", "policy"), [({}, "Never"), ({"image": "ghcr.io/me/w:1"}, None)])
def test_a_users_own_image_has_its_own_pull_policy(own: dict[str, str], policy: str | None) -> None:
    settings = replace(SETTINGS, image_pull_policy="Never")
    for asked in (None, "Always"):
        given = {"name": "learner", **own} | ({"imagePullPolicy": asked} if asked else {})
        spec = {"podTemplate": {"spec": {"containers": [given]}}}
        one = job(learners=spec)
        made = pods.learner_template(one, one.spec.regions[0], "diloco-worker:1", settings)
        assert made["spec"]["containers"][0].get("imagePullPolicy") == (asked or policy)


def test_argo_cd_does_not_prune_the_claim() -> None:
    claim = everything(job())[names.claim("job")]["metadata"]
    assert claim["annotations"] == {
        names.JOB_UID: job().uid,
        "argocd.argoproj.io/sync-options": "Prune=false",
        "argocd.argoproj.io/compare-options": "IgnoreExtraneous",
    }


@pytest.mark.parametrize(("mode", "protocol"), [("auto", "tls"), ("off", "kubernetes.io/h2c")])
def test_services_say_what_is_spoken(mode: str, protocol: str) -> None:
    made = everything(job(syncer={"tls": {"mode": mode}}))
    (port,) = made[names.syncer_service("job")]["spec"]["ports"]
    assert port["appProtocol"] == protocol
    (port,) = made[names.region_service("job", "local")]["spec"]["ports"]
    assert port["appProtocol"] == "http"


def test_a_service_is_as_clouds_ask() -> None:
    asked = {
        "annotations": {"networking.gke.io/load-balancer-type": "Internal"},
        "loadBalancerClass": "service.k8s.aws/nlb",
        "sourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
        "ipFamilyPolicy": "PreferDualStack",
    }
    given = job(syncer={"endpoint": {"type": "LoadBalancer", "service": asked}})
    service = everything(given)[names.syncer_service("job")]
    assert service["metadata"]["annotations"] == {**asked["annotations"], names.JOB_UID: job().uid}
    assert service["spec"]["loadBalancerClass"] == "service.k8s.aws/nlb"
    assert service["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert service["spec"]["externalTrafficPolicy"] == "Local"
    assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    plain = everything(job())[names.syncer_service("job")]
    assert set(plain["spec"]) == {"type", "selector", "ports"} and len(plain["metadata"]["annotations"]) == 1


def test_labels_of_the_job_are_not_its_objects() -> None:
    """Kueue's label on a StatefulSet alone would have it gate pods that the plan then takes for lost."""
    document = job_object(training=EVALUATED)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus", "mine": "x"}
    for manifest in everything(read_job(document)).values():
        assert not {"kueue.x-k8s.io/queue-name", "mine"} & set(manifest["metadata"]["labels"])


TEMPLATE = {"spec": {"nodeSelector": {"pool": "b"}}}


@pytest.mark.parametrize(
    "spec",
    [
        {"sync": {"quorum": 2}},
        {"seed": 7},
        {"syncer": {"podTemplate": TEMPLATE}},
        {"syncer": {"storage": {"uri": "s3://bucket/a"}}},
        {"syncer": {"storage": {"claimName": "mine"}}},
        {"syncer": {"tls": {"mode": "off"}}},
        {"syncer": {"tls": {"secretName": "s"}}, "learners": {"credentials": {"secretName": "l"}}},
        {"learners": {"podTemplate": TEMPLATE}},
        {"learners": {"command": ["mine"]}},
        {"learners": {"credentials": {"secretName": "l"}}},
        {"regions": [{"name": "local", "learners": 3, "podTemplate": TEMPLATE}]},
        {"regions": [{"name": "local", "learners": 4}]},
        {"training": {**EVALUATED, "device": "cuda"}},
        {"evaluator": {"command": ["mine"]}},
        {"evaluator": {"podTemplate": TEMPLATE}},
        {"ttlSecondsAfterFinished": 7, "suspend": True, "nodeLoss": {"policy": "ForceDelete"}},
    ],
    ids=str,
)
def test_an_origin_changes_where_and_only_where_a_template_does(spec: dict[str, Any]) -> None:
    def made(given: Job) -> dict[Ref, tuple[Any, Any]]:
        here = place_job(given.spec, None)
        return {
            ref: (
                manifests.render_pod_holder(given, here, ref, RELEASE, settings=SETTINGS),
                manifests.origin_of(given, here, ref, "1"),
            )
            for ref in manifests.pod_holders(given, here)
        }

    before, after = made(job(training=EVALUATED)), made(job(**{"training": EVALUATED, **spec}))
    for ref in before.keys() & after.keys():
        assert (before[ref][0] == after[ref][0]) == (before[ref][1] == after[ref][1]), ref


def test_stateful_sets() -> None:
    spec = everything(job())[names.stateful_set("job", "local")]["spec"]
    assert spec["podManagementPolicy"] == "Parallel" and spec["updateStrategy"] == {"type": "OnDelete"}
    assert spec["serviceName"] == "job-local" and "minReadySeconds" not in spec
    service = everything(job())[names.region_service("job", "local")]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    budget = everything(job())[names.budget("job", "local")]["spec"]
    assert budget["maxUnavailable"] == 2 and budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize(
    ("endpoint", "kind", "anywhere"),
    [
        ({}, "ClusterIP", False),
        ({"type": "NodePort", "nodePort": 30700}, "NodePort", True),
        ({"type": "LoadBalancer"}, "LoadBalancer", True),
        ({"type": "External", "address": "hub.example.com:443"}, "ClusterIP", True),
    ],
)
def test_what_reaches_the_syncer(endpoint: dict[str, Any], kind: str, anywhere: bool) -> None:
    made = everything(job(syncer={"endpoint": endpoint}))
    service = made[names.syncer_service("job")]["spec"]
    assert service["type"] == kind and [p["port"] for p in service["ports"]] == [7700], "never the control port"
    assert service["ports"][0].get("nodePort") == endpoint.get("nodePort")
    rules = {r["ports"][0]["port"]: r for r in made[Ref("NetworkPolicy", "job-syncer")]["spec"]["ingress"]}
    assert set(rules) == {7700, 7701, 7702}
    assert ("from" not in rules[7700]) == anywhere
    assert rules[7701]["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "diloco-system"}}}
    ]
    if not anywhere:
        assert rules[7700]["from"] == [{"podSelector": {"matchLabels": {"diloco.io/job": "job"}}}]


def test_who_may_scrape() -> None:
    settings = PlanSettings(None, "diloco-system", "s", "w", metrics_namespace="monitoring")
    made = everything(job(), settings)
    for name in ("job-syncer", "job-learners"):
        rule = made[Ref("NetworkPolicy", name)]["spec"]["ingress"][-1]
        allowed = [v for v in walk(rule["from"]) if isinstance(v, str)]
        assert allowed == ["diloco-system", "monitoring"]
    assert "from" not in everything(job())[Ref("NetworkPolicy", "job-syncer")]["spec"]["ingress"][-1]


# ------------------------------------------------------------------ volume and secrets


@pytest.mark.parametrize(
    ("storage", "volume", "made"),
    [
        ({}, {"persistentVolumeClaim": {"claimName": "job-syncer"}}, True),
        ({"claimName": "mine"}, {"persistentVolumeClaim": {"claimName": "mine"}}, False),
        ({"uri": "s3://bucket/x"}, {"emptyDir": {}}, False),
    ],
)
def test_the_store(storage: dict[str, Any], volume: dict[str, Any], made: bool) -> None:
    found = everything(job(syncer={"storage": storage}))
    assert (names.claim("job") in found) == made
    template = found[names.syncer_deployment("job")]["spec"]["template"]
    data = next(v for v in template["spec"]["volumes"] if v["name"] == "data")
    assert data == {"name": "data", **volume}
    command = container(template)["command"]
    assert command[command.index("--store") + 1] == storage.get("uri", "/var/lib/diloco/store")


BUCKET = """
spec:
  serviceAccountName: train-bucket
  containers:
  - name: syncer
    env:
    - {name: AWS_ENDPOINT_URL, value: "https://s3.example.org"}
    - name: AWS_ACCESS_KEY_ID
      valueFrom: {secretKeyRef: {name: train-bucket, key: AWS_ACCESS_KEY_ID}}
    envFrom:
    - secretRef: {name: train-bucket}
"""


def test_credentials_of_a_bucket_come_with_the_pod_template() -> None:
    syncer = {"storage": {"uri": "s3://bucket/x"}, "podTemplate": yaml.safe_load(BUCKET)}
    assert not pods.template_refusals(job(syncer=syncer).spec)
    spec = everything(job(syncer=syncer))[names.syncer_deployment("job")]["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "train-bucket" and spec["automountServiceAccountToken"] is False
    main = next(one for one in spec["containers"] if one["name"] == "syncer")
    assert [e["name"] for e in main["env"]] == ["DILOCO_POD", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID"]
    assert main["envFrom"] == [{"secretRef": {"name": "train-bucket"}}]
    assert main["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_claim_that_is_there_is_only_made_larger() -> None:
    live = {
        "metadata": {},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "slow",
            "resources": {"requests": {"storage": "20Gi"}},
        },
    }

    def spec(**storage: Any) -> Any:
        found = manifests.claim_manifest(job(syncer={"storage": storage}), live)
        assert found is not None
        return found["spec"]

    assert spec(size="10Gi", storageClassName="fast") == live["spec"]
    assert spec(size="30Gi")["resources"]["requests"]["storage"] == "30Gi"
    fresh = manifests.claim_manifest(job(syncer={"storage": {"storageClassName": "fast"}}), None)
    assert fresh is not None and fresh["spec"] == {
        "accessModes": ["ReadWriteOncePod"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "10Gi"}},
    }


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({}, {"job-syncer-aaaaaaaa": (True, True), "job-learner-aaaaaaaa": (True, False)}),
        ({"syncer": {"tls": {"mode": "off"}}}, {"job-syncer-aaaaaaaa": (False, True)}),
        (
            {"syncer": {"tls": {"secretName": "s"}}, "learners": {"credentials": {"secretName": "l"}}},
            {"job-syncer-aaaaaaaa": (False, True)},
        ),
    ],
)
def test_secrets(spec: dict[str, Any], wanted: dict[str, tuple[bool, bool]]) -> None:
    given = job(**spec)
    found = manifests.wanted_secrets(given, place_job(given.spec, None))
    assert {s.name: (s.tls, s.control_key) for s in found} == wanted
    assert all(s.manifest_head["metadata"]["ownerReferences"] for s in found)
    made = everything(given)
    syncer = made[names.syncer_deployment("job")]["spec"]["template"]["spec"]
    learner = made[names.stateful_set("job", "local")]["spec"]["template"]["spec"]
    secure = spec.get("syncer", {}).get("tls", {}).get("mode") != "off"
    for template in (syncer, learner):
        assert any(v["name"] == "credentials" for v in template["volumes"]) == secure
    assert ("--credentials" in syncer["containers"][0]["command"]) == secure
    control = next(v for v in syncer["volumes"] if v["name"] == "control")
    assert control["secret"]["secretName"] == "job-syncer-aaaaaaaa"
    assert "control" not in {v["name"] for v in learner["volumes"]}, "learners have no control key"
    if wanted.keys() == {"job-syncer-aaaaaaaa"} and secure:
        text = json.dumps(next(v for v in syncer["volumes"] if v["name"] == "credentials"))
        assert '"s"' in text and '"l"' in text and "join-token" in text


def test_only_what_a_pod_waits_for_is_missed() -> None:
    given = job()
    found = manifests.wanted_secrets(
        given, place_job(given.spec, None), frozenset({"job-learner-aaaaaaaa", "users-own"})
    )
    assert {s.name: s.missed for s in found} == {"job-syncer-aaaaaaaa": False, "job-learner-aaaaaaaa": True}


# ------------------------------------------------------------------ several clusters

SPREAD = {
    "syncer": {
        "cluster": "hub",
        "endpoint": {"type": "NodePort", "nodePort": 30700, "address": "10.0.0.1"},
        "tls": {"secretName": "s"},
    },
    "learners": {"credentials": {"secretName": "l"}},
    "regions": [{"name": "a", "cluster": "hub", "learners": 1}, {"name": "b", "cluster": "far", "learners": 2}],
}


def test_each_cluster_has_its_part() -> None:
    given = job(**SPREAD)
    hub = everything(given, PlanSettings("hub", "o", "s", "w"))
    far = everything(given, PlanSettings("far", "o", "s", "w"))
    assert names.syncer_deployment("job") in hub and names.stateful_set("job", "b") not in hub
    assert {tuple(r) for r in far} == {
        ("ConfigMap", "job-settings"),
        ("NetworkPolicy", "job-learners"),
        ("Service", "job-b"),
        ("PodDisruptionBudget", "job-b"),
        ("StatefulSet", "job-b"),
    }
    assert json.loads(far[names.settings_map("job")]["data"]["address.json"]) == {"sync": "10.0.0.1:30700"}
    assert json.loads(hub[names.settings_map("job")]["data"]["address.json"])["sync"].endswith(".svc:7700")
    assert manifests.wanted_secrets(given, place_job(given.spec, "far")) == []


@pytest.mark.parametrize(
    ("cluster", "syncer", "regions", "said"),
    [
        ("hub", True, ["a"], ""),
        ("far", False, ["b"], ""),
        ("other", False, [], "this one is called other"),
        (None, False, [], "cluster.name"),
    ],
)
def test_placement(cluster: str | None, syncer: bool, regions: list[str], said: str) -> None:
    here = place_job(job(**SPREAD).spec, cluster)
    assert here.syncer == syncer and [r.name for r in here.regions] == regions and said in here.elsewhere
    assert bool(here.elsewhere) == (not here.anything)
    unnamed = place_job(job().spec, cluster)
    assert unnamed.syncer and unnamed.regions, "a job that names no cluster is where it was applied"


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("h", "h:30700"),
        ("h:9", "h:9"),
        ("[2001:db8::1]", "[2001:db8::1]:30700"),
        ("[2001:db8::1]:9", "[2001:db8::1]:9"),
    ],
)
def test_addresses(address: str, wanted: str) -> None:
    spec = {**SPREAD, "syncer": {**SPREAD["syncer"], "endpoint": {**SPREAD["syncer"]["endpoint"], "address": address}}}  # type: ignore[dict-item]
    given = job(**spec)
    assert manifests.sync_address(given, place_job(given.spec, "far")) == wanted


# ------------------------------------------------------------------ renderings and what programs read


def test_what_was_rendered_can_be_read_back() -> None:
    given = job()
    ref = names.stateful_set("job", "local")
    spec = manifests.render_pod_holder(given, place_job(given.spec, None), ref, RELEASE, settings=SETTINGS)
    origin = manifests.origin_of(given, place_job(given.spec, None), ref, "1")
    manifest = manifests.pod_holder_manifest(given, ref, Rendering(7, spec, origin), 3)
    assert manifests.stored_rendering(manifest) == Rendering(7, spec, origin) and manifest["spec"]["replicas"] == 3
    assert "replicas" not in spec
    for broken in ("", "[]", "{", '{"a": 1}'):
        manifest["metadata"]["annotations"][names.ORIGIN] = broken
        assert manifests.stored_rendering(manifest) == Rendering(7, spec, None)
    for broken in ("", "[]", "{", '{"a": 1}'):
        manifest["metadata"]["annotations"][names.RENDERED] = broken
        assert manifests.stored_rendering(manifest) is None
    assert manifests.stored_rendering(None) is None and manifests.stored_rendering({"metadata": {}}) is None


def inputs(**spec: Any) -> tuple[str, str, str]:
    given = job(**spec).spec
    return pods.syncer_inputs(given), pods.learner_inputs(given, "local"), pods.evaluator_inputs(given)


@pytest.mark.parametrize(
    ("change", "syncer", "learner", "evaluator"),
    [
        ({"suspend": True}, False, False, False),
        ({"failurePolicy": {"maxReplacements": 1}}, False, False, False),
        ({"failurePolicy": {"onRegionLost": "Hold"}}, True, False, False),
        ({"failurePolicy": {"regionLostSeconds": 60}}, True, False, False),
        ({"nodeLoss": {"policy": "ForceDelete"}}, False, False, False),
        ({"syncer": {"storage": {"onDelete": "Delete"}}}, False, False, False),
        ({"syncer": {"checkpoint": {"everySeconds": 5}}}, True, False, False),
        ({"sync": {"every": 48}}, True, False, False),
        ({"sync": {"merge": {"meanTensors": ["x*"]}}}, True, True, True),
        ({"sync": {"deterministic": True}}, True, True, True),
        ({"seed": 4}, True, True, True),
        ({"regions": [{"name": "local", "learners": 4}]}, True, False, False),
        ({"regions": [{"name": "local", "learners": 3, "spares": 2}]}, False, False, False),
        ({"regions": [{"name": "local", "learners": 2, "maxLearners": 3}]}, False, False, False),
        ({"regions": [{"name": "local", "learners": 3, "maxLearners": 4}]}, True, False, False),
        ({"regions": [{"name": "local", "learners": 3, "batch": {"sequences": 3}}]}, False, True, False),
        ({"training": {"stop": {"tokens": 5}}}, True, False, False),
        ({"training": {"batch": {"sequences": 3}}}, False, True, True),
        ({"training": {"optimizer": {"lr": 0.5}}}, False, True, True),
        ({"training": {"model": {"config": {"model_type": "gpt2"}}}}, True, True, True),
        ({"training": {"evaluation": {"everyTokens": 5}}}, True, True, True),
        ({"learners": {"command": ["x"]}}, False, True, False),
    ],
)
def test_who_is_restarted_by_what(change: dict[str, Any], syncer: bool, learner: bool, evaluator: bool) -> None:
    before, after = inputs(), inputs(**change)
    changed = tuple(a != b for a, b in zip(before, after, strict=True))
    assert changed == (syncer, learner, evaluator)


def test_of_an_evaluation_a_learner_reads_what_is_held_out() -> None:
    one, two = (inputs(training=EVALUATED), inputs(training={"evaluation": {"fraction": 0.1, "everyTokens": 7}}))
    assert one[1] == two[1] and one[2] != two[2] and one[0] == two[0]


def test_an_own_program_may_read_all_of_training() -> None:
    command = {"command": ["x"]}
    one, two = inputs(learners=command), inputs(learners=command, training={"stop": {"tokens": 5}})
    assert one[1] != two[1]


def test_whole_numbers_that_came_as_floats() -> None:
    document = job_object()
    document["spec"]["training"]["stop"] = {"tokens": 2e6}
    document["spec"]["training"]["model"]["config"]["rope_theta"] = 10000.0
    found = read_job(document)
    assert found.document is not None and found.spec.training.stop.tokens == 2_000_000


def test_a_wrong_spec_is_told_whole() -> None:
    document = job_object()
    document["spec"]["sync"] = {"quorum": 9, "everyy": 3}
    document["spec"]["regions"][0]["learners"] = "3"
    found = read_job(document)
    assert found.document is None
    said = "\n".join(found.problems)
    assert "everyy" in said and "learners" in said
    assert read_job({"metadata": {"name": "x", "uid": "u"}}).problems


# ---------------------------------------------------------------- what the operator's settings say of all jobs' pods


@pytest.mark.promise("Pods of jobs can use a private registry and a priority class without a setting in each job")
def test_pull_secrets_and_priority_class_of_the_operator_hold_for_all_pods_of_jobs() -> None:
    settings = replace(SETTINGS, pull_secrets=("registry", "mirror"), priority_class="training")
    own = {"spec": {"imagePullSecrets": [{"name": "team"}], "priorityClassName": "urgent"}}
    made = everything(job(training=EVALUATED, learners={"podTemplate": own}), settings)
    found = {ref.kind + "/" + ref.name: m["spec"]["template"]["spec"] for ref, m in made.items() if "Set" in ref.kind}
    found |= {ref.name: m["spec"]["template"]["spec"] for ref, m in made.items() if ref.kind == "Deployment"}
    assert set(found) == {"StatefulSet/job-local", "job-syncer", "job-evaluator"}
    for name, spec in found.items():
        secrets = [secret["name"] for secret in spec["imagePullSecrets"]]
        assert secrets[:2] == ["registry", "mirror"], "a private registry needs no podTemplate"
        asked = name != "job-syncer"  # the evaluator runs as learners do
        assert secrets[2:] == (["team"] if asked else []), "a job's own are added"
        assert spec["priorityClassName"] == ("urgent" if asked else "training"), "a job's own counts"
    plain = json.dumps(
        [manifest["spec"].get("template") for manifest in everything(job()).values() if "spec" in manifest]
    )
    assert "imagePullSecrets" not in plain and "priorityClassName" not in plain


# ------------------------------------------------------------------ learners of several ranks


def learner_set(given: Job) -> dict[str, Any]:
    return everything(given)[names.stateful_set("job", "local")]["spec"]


def test_a_learner_of_one_process_has_nothing_of_a_group() -> None:
    plain, said = learner_set(job()), learner_set(job(learners={"processes": 1, "pods": 1}))
    assert plain == said
    assert container(plain["template"])["command"] == ["python", "-m", "diloco_worker"]
    assert "/dev/shm" not in str(plain) and names.GROUP_PODS not in str(plain) and "DILOCO_POD_INDEX" not in str(plain)


def test_the_ranks_of_a_pod_are_started_together() -> None:
    made = learner_set(job(learners={"processes": 4}))
    main = container(made["template"])
    launch = ["python", "-m", "diloco_worker.launch", "--processes", "4", "--pods", "1"]
    assert main["command"] == [*launch, "python", "-m", "diloco_worker"]
    env = environment(made["template"])
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    assert env["DILOCO_POD_INDEX"] == index and "DILOCO_ORDINAL" not in env, "the ranks get it from who starts them"
    assert {"name": "shm", "mountPath": "/dev/shm"} in main["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in made["template"]["spec"]["volumes"]
    assert names.GROUP_PODS not in made["template"]["metadata"]["labels"]
    evaluator = everything(job(learners={"processes": 4}, training=EVALUATED))[names.evaluator_deployment("job")]
    assert container(evaluator["spec"]["template"])["command"] == ["python", "-m", "diloco_worker"]


def test_the_pods_of_a_learner_meet_at_its_first_one() -> None:
    own = {"processes": 2, "pods": 2, "command": ["python", "train.py"]}
    made = everything(job(learners=own))
    stateful = made[names.stateful_set("job", "local")]["spec"]
    service = made[names.region_service("job", "local")]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert stateful["serviceName"] == service["metadata"]["name"] and stateful["podManagementPolicy"] == "Parallel"
    command = container(stateful["template"])["command"]
    assert command[3:] == [
        *("--processes", "2", "--pods", "2", "--master", "job-local-{first}.job-local"),
        *("python", "train.py"),
    ]
    assert stateful["template"]["metadata"]["labels"][names.GROUP_PODS] == "2"
    assert names.GROUP_PODS not in stateful["selector"]["matchLabels"], "a selector cannot be changed"


def test_a_regions_pods_have_the_labels_by_which_the_page_keeps_them_together() -> None:
    text = (ROOT / "docs" / "many-gpus.md").read_text(encoding="utf-8")
    (block,) = [block.split("```")[0] for block in text.split("```yaml\n")[1:] if "podAffinity" in block]
    regions = yaml.safe_load(block.replace("NAME", "job"))["regions"]
    given = {"metadata": {"labels": {"gang": "a"}, "annotations": {"of": "4"}}, "spec": {"schedulerName": "gangs"}}
    made = everything(job(regions=regions, learners={"podTemplate": given}, training={"batch": {"sequences": 8}}))
    template = made[names.stateful_set("job", "a")]["spec"]["template"]
    (term,) = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = template["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items(), "the pods are near each other"
    assert (labels[names.GROUP_PODS], labels["gang"], template["metadata"]["annotations"]["of"]) == ("4", "a", "4")
    assert template["spec"]["schedulerName"] == "gangs"
    assert f"`{names.GROUP_PODS}`" in text and f"`{LABEL_POD_INDEX}`" in text, "the page names them"


def test_ranks_of_several_pods_reach_each_other() -> None:
    def rules(**learners: Any) -> list[Any]:
        return list(everything(job(learners=learners))[Ref("NetworkPolicy", "job-learners")]["spec"]["ingress"])

    assert len(rules(processes=2)) == 1, "those of one pod have no network between them"
    (_, among) = rules(pods=2)
    labels = {"diloco.io/job": "job", "diloco.io/role": "learner"}
    assert among == {"from": [{"podSelector": {"matchLabels": labels}}]}


def test_each_region_has_its_own_group() -> None:
    regions = [{"name": "local", "learners": 1, "processes": 2}, {"name": "small", "learners": 2, "processes": 1}]
    made = everything(job(learners={"pods": 2}, regions=regions))
    commands = {
        name: container(made[names.stateful_set("job", name)]["spec"]["template"])["command"]
        for name in ("local", "small")
    }
    assert commands["local"][3:7] == ["--processes", "2", "--pods", "2"]
    assert commands["small"][3:7] == ["--processes", "1", "--pods", "2"]


def test_a_changed_group_makes_another_template_and_no_field_of_one_process_does() -> None:
    def digests(**spec: Any) -> list[str]:
        given = job(**spec)
        region = given.spec.regions[0]
        return [pods.template_inputs(given.spec, "learner", region), pods.learner_inputs(given.spec, region.name)]

    plain, two = digests(), digests(learners={"processes": 2})
    assert plain[0] != two[0] != digests(learners={"pods": 2})[0]
    apart = digests(learners={"processes": 2}, training={"parallel": {"shard": 1, "replicate": 2}})
    assert apart[0] == two[0] and apart[1] != two[1]


def test_a_users_own_shared_memory_is_his() -> None:
    volume = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    mount = {"name": "dshm", "mountPath": "/dev/shm"}
    template = {"spec": {"containers": [{"name": "learner", "volumeMounts": [mount]}], "volumes": [volume]}}
    given = job(learners={"processes": 2, "podTemplate": template})
    assert not pods.template_refusals(given.spec)
    mounts = container(learner_set(given)["template"])["volumeMounts"]
    assert [one for one in mounts if one["mountPath"] == "/dev/shm"] == [mount]


def test_what_ranks_are_told_of_a_pod_is_the_operators() -> None:
    env = [{"name": "DILOCO_POD_INDEX", "value": "0"}]
    template = {"spec": {"containers": [{"name": "learner", "env": env}]}}
    (refused,) = pods.template_refusals(job(learners={"podTemplate": template}).spec)
    assert refused.path.endswith("env[DILOCO_POD_INDEX]")


@pytest.mark.parametrize(("quorum", "spare"), [(4, 1), (2, 2), (1, 3)])
def test_a_budget_counts_each_evicted_pod_as_a_learner(quorum: int, spare: int) -> None:
    given = job(count=4, learners={"pods": 2}, sync={"quorum": quorum})
    assert everything(given)[names.budget("job", "local")]["spec"]["maxUnavailable"] == spare


# ------------------------------------------------------------------ shards with pods of their own


def sharded(shards: int = 2, **syncer: Any) -> dict[str, Any]:
    """``spec.syncer`` of a job whose shards have pods."""
    return {"shards": shards, "shardPods": {}, "storage": {"uri": "s3://bucket/job"}} | syncer


def test_each_shard_has_a_deployment_and_a_service_and_the_syncer_one_for_them() -> None:
    plain, made = everything(job(syncer={"storage": {"uri": "s3://bucket/job"}})), everything(job(syncer=sharded()))
    assert sorted(map(tuple, made.keys() - plain.keys())) == [
        ("Deployment", "job-syncer-shard-0"),
        ("Deployment", "job-syncer-shard-1"),
        ("NetworkPolicy", "job-syncer-shards"),
        ("Service", "job-syncer-shard-0"),
        ("Service", "job-syncer-shard-1"),
        ("Service", "job-syncer-shards"),
    ]
    for shard in (0, 1):
        deployment = made[names.shard_deployment("job", shard)]
        service = made[names.shard_service("job", shard)]["spec"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert labels["diloco.io/role"] == "shard" and labels["diloco.io/shard"] == str(shard)
        assert "diloco.io/region" not in labels and deployment["metadata"]["labels"].items() <= labels.items()
        selected = deployment["spec"]["selector"]["matchLabels"]
        assert selected == service["selector"] == {k: v for k, v in labels.items() if k.startswith("diloco.io/")}
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    entry = made[names.shards_service("job")]["spec"]
    assert entry["type"] == "ClusterIP" and entry["publishNotReadyAddresses"] is True
    assert entry["selector"] == {"diloco.io/job": "job", "diloco.io/role": "syncer"}
    assert entry["ports"][0]["port"] == 7704
    main = container(made[names.syncer_deployment("job")]["spec"]["template"])
    assert {"name": entry["ports"][0]["targetPort"], "containerPort": 7704, "protocol": "TCP"} in main["ports"]


def test_the_commands_of_a_syncer_and_its_shards_fit_each_other() -> None:
    made = everything(job(syncer=sharded(3)))
    syncer = container(made[names.syncer_deployment("job")]["spec"]["template"])["command"]
    from diloco_syncer.__main__ import _parser

    asked = _parser().parse_args(syncer[3:])
    assert asked.shards_listen == "[::]:7704" and asked.shard_host == "job-syncer-shard-{}.ns.svc" and asked.stay
    for shard in range(3):
        template = made[names.shard_deployment("job", shard)]["spec"]["template"]
        main = container(template)
        told = _parser().parse_args(main["command"][3:])
        assert (told.shard, told.syncer) == (shard, "job-syncer-shards.ns.svc:7704")
        assert (told.job, told.store) == (asked.job, asked.store) and told.store == "s3://bucket/job"
        assert told.credentials == asked.credentials and not told.stay and told.listen == "[::]:7700"
        assert Ref("Service", asked.shard_host.format(shard).partition(".")[0]) in made
        # Its identity is the syncer's; the control key is not its business, and no kubelet can ask it anything.
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        own = next(
            v
            for v in made[names.syncer_deployment("job")]["spec"]["template"]["spec"]["volumes"]
            if v["name"] == "credentials"
        )
        assert (
            volumes["credentials"] == own
            and "control" not in volumes
            and volumes["data"] == {"name": "data", "emptyDir": {}}
        )
        assert [port["name"] for port in main["ports"]] == ["sync"]
        assert not {"startupProbe", "livenessProbe", "readinessProbe"} & main.keys()
    plain = container(everything(job())[names.syncer_deployment("job")]["spec"]["template"])
    assert "--shards-listen" not in plain["command"] and 7704 not in [p["containerPort"] for p in plain["ports"]]


def test_the_services_of_shards_are_as_the_syncers() -> None:
    asked = {"annotations": {"cloud": "internal"}, "externalTrafficPolicy": "Local"}
    endpoint = {"type": "NodePort", "nodePort": 30700, "service": asked}
    made = everything(job(syncer=sharded(endpoint=endpoint)))
    ports = []
    for ref in (names.syncer_service("job"), names.shard_service("job", 0), names.shard_service("job", 1)):
        (port,) = made[ref]["spec"]["ports"]
        ports.append(port.pop("nodePort"))
        assert port == {"name": "sync", "port": 7700, "targetPort": "sync", "protocol": "TCP", "appProtocol": "tls"}
        assert made[ref]["spec"]["type"] == "NodePort" and made[ref]["spec"]["externalTrafficPolicy"] == "Local"
        assert made[ref]["metadata"]["annotations"]["cloud"] == "internal"
    assert ports == [30700, 30701, 30702]
    assert "nodePort" not in made[names.shards_service("job")]["spec"]["ports"][0]


def test_only_a_jobs_shards_reach_the_port_of_its_syncer_for_them() -> None:
    for kind, whom in (("ClusterIP", [{"podSelector": {"matchLabels": {"diloco.io/job": "job"}}}]), ("External", None)):
        endpoint = {"type": kind, **({"address": "hub"} if kind == "External" else {})}
        made = everything(job(syncer=sharded(endpoint=endpoint)))
        rules = {
            r["ports"][0]["port"]: r.get("from") for r in made[Ref("NetworkPolicy", "job-syncer")]["spec"]["ingress"]
        }
        ours = {"diloco.io/job": "job", "diloco.io/role": "shard"}
        assert rules[7704] == [{"podSelector": {"matchLabels": ours}}] and rules[7700] == whom
        policy = made[Ref("NetworkPolicy", "job-syncer-shards")]["spec"]
        assert policy["podSelector"] == {"matchLabels": ours}
        assert [(r["ports"][0]["port"], r.get("from")) for r in policy["ingress"]] == [(7700, whom)]


def test_the_shards_template_goes_over_the_syncers() -> None:
    def of(cpu: str, **more: Any) -> dict[str, Any]:
        return {"spec": {**more, "containers": [{"name": "syncer", "resources": {"requests": {"cpu": cpu}}}]}}

    given = sharded(podTemplate=of("1", serviceAccountName="bucket", nodeSelector={"pool": "hub"}))
    given["shardPods"] = {"podTemplate": of("4", nodeSelector={"pool": "large"})}
    made = everything(job(syncer=given), replace(SETTINGS, image_pull_policy="Never"))
    for ref, cpu, pool in (
        (names.syncer_deployment("job"), "1", "hub"),
        (names.shard_deployment("job", 1), "4", "large"),
    ):
        template = made[ref]["spec"]["template"]
        assert container(template)["resources"]["requests"]["cpu"] == cpu and container(template)["image"] == "syncer:1"
        assert template["spec"]["nodeSelector"] == {"pool": pool} and container(template)["imagePullPolicy"] == "Never"
        assert template["spec"]["serviceAccountName"] == "bucket"
    given["shardPods"] = {"podTemplate": {"spec": {"containers": [{"name": "syncer", "command": ["x"]}]}}}
    (refusal,) = pods.template_refusals(job(syncer=given).spec)
    assert "spec.syncer.shardPods.podTemplate" in refusal.path and "operator's" in refusal.message


def test_shards_are_in_the_syncers_cluster_alone() -> None:
    given = job_object(**SPREAD)
    given["spec"]["syncer"] |= sharded(endpoint=SPREAD["syncer"]["endpoint"])
    read = read_job(given)
    assert read.document is not None, read.problems
    for cluster, count in (("hub", 2), ("far", 0)):
        made = everything(read, replace(SETTINGS, cluster=cluster))
        assert sum(manifest["metadata"]["labels"]["diloco.io/role"] == "shard" for manifest in made.values()) == (
            3 * count and 2 * count + 2
        )


def test_what_of_the_job_restarts_the_syncer_and_its_shards() -> None:
    base = job(syncer=sharded()).spec

    def changed(**syncer: Any) -> list[str]:
        """What of their pods differs."""
        now = job(syncer=sharded(**syncer)).spec
        found = [
            role for role in ("syncer", "shard") if pods.template_inputs(now, role) != pods.template_inputs(base, role)
        ]
        return found + ["program"] * (pods.syncer_inputs(now) != pods.syncer_inputs(base))

    assert changed() == []
    assert changed(shards=3) == ["program"]
    assert changed(shardPods={"addresses": ["a", "b"]}) == ["program"]
    assert changed(shardPods={"podTemplate": {"spec": {"nodeSelector": {"pool": "x"}}}}) == ["shard"]
    assert changed(podTemplate={"spec": {"nodeSelector": {"pool": "x"}}}) == ["syncer", "shard"]
    assert changed(shardPods=None) == ["syncer", "shard", "program"]
    assert pods.syncer_inputs(job(syncer={"shards": 2}).spec) != pods.syncer_inputs(job().spec), "processes beside it"
