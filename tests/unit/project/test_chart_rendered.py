"""The chart as `helm template` renders it: rights, security, settings, hooks. Needs helm, not a cluster."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_operator import names, settings, uninstall
from diloco_operator.kube.kinds import OWN_NEEDS, Need, needs
from diloco_operator.model import RELEASE
from diloco_operator.objects import pods
from diloco_operator.reconcile import root_key
from diloco_protocol.vocabulary import HTTP_PORT, WORKER_PORT
from repository import VERSION

from .test_chart import CHART, ROOT, chart

HELM = chart.program("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="helm is neither on PATH nor where $LOCALKUBE env says")

CI = sorted((CHART / "ci").glob("*.yaml"))
ROLES = ("operator", "syncer", "worker")
Object = dict[str, Any]


@functools.cache
def render(*words: str, release: str = "diloco", namespace: str = "diloco-system") -> tuple[Object, ...]:
    """The objects, hooks included."""
    return tuple(chart.documents(chart.template(*words, release=release, namespace=namespace)))


def of_kind(objects: tuple[Object, ...], kind: str, name: str | None = None) -> list[Object]:
    return [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]


def hooked(one: Object) -> bool:
    return "helm.sh/hook" in one["metadata"].get("annotations", {})


def pod_specs(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    for one in objects:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]
        elif one["kind"] in ("Deployment", "Job"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def granted(roles: list[Object]) -> set[tuple[str, str, str]]:
    """(group, resource, verb), those that hold for named objects alone left out."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        if "resourceNames" not in rule
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(nodes: bool) -> set[tuple[str, str, str]]:
    return rights(needs(nodes))


def rights(rules: tuple[Need, ...]) -> set[tuple[str, str, str]]:
    return {(need.group, need.resource, verb) for need in rules for verb in need.verbs}


def bound_to_operator(objects: tuple[Object, ...], kind: str, namespace: str | None = None) -> list[Object]:
    """Roles of a kind that the operator's account is bound to."""
    names_ = {
        one["roleRef"]["name"]
        for one in of_kind(objects, f"{kind}Binding")
        if one["metadata"].get("namespace") == namespace
    }
    return [
        one
        for one in of_kind(objects, kind)
        if one["metadata"]["name"] in names_ and one["metadata"].get("namespace") == namespace
    ]


# ---------------------------------------------------------------- rights


@pytest.mark.promise("The operator's permissions are what it needs and nothing else, the Lease included")
def test_the_operator_may_do_what_it_needs_and_nothing_else() -> None:
    objects = tuple(one for one in render() if not hooked(one))
    assert granted(bound_to_operator(objects, "ClusterRole")) == needed(nodes=True)
    (own,) = of_kind(objects, "Role")
    assert own["metadata"]["namespace"] == "diloco-system" and granted([own]) == rights(OWN_NEEDS)


def test_users_rights_are_added_to_the_clusters_roles() -> None:
    """admin and edit may have jobs, view may see them; nobody gets them where somebody else decides that."""
    objects = tuple(one for one in render() if not hooked(one))
    label = "rbac.authorization.k8s.io/aggregate-to-"
    for role, may in (
        ("view", {"get", "list", "watch"}),
        ("edit", {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}),
        ("admin", {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}),
    ):
        added = [
            one for one in of_kind(objects, "ClusterRole") if one["metadata"]["labels"].get(label + role) == "true"
        ]
        assert {verb for _, resource, verb in granted(added) if resource == "dilocojobs"} == may, role
        assert {resource for _, resource, _ in granted(added)} <= {"dilocojobs", "dilocojobs/status"}
    for words in (("--set", "roles.aggregate=false"), ("--set", "watch.namespaces={a}")):
        assert label not in json.dumps([one for one in render(*words)])


def test_with_namespaces_there_are_roles_in_them_and_no_cluster_role() -> None:
    objects = tuple(one for one in render("--set", "watch.namespaces={a,b}") if not hooked(one))
    assert not of_kind(objects, "ClusterRole") and not of_kind(objects, "ClusterRoleBinding")
    for namespace in ("a", "b"):
        roles = [r for r in of_kind(objects, "Role") if r["metadata"]["namespace"] == namespace]
        assert granted(roles) == needed(nodes=False)
        (binding,) = [b for b in of_kind(objects, "RoleBinding") if b["metadata"]["namespace"] == namespace]
        assert binding["subjects"][0]["namespace"] == "diloco-system"
        assert binding["roleRef"]["name"] == roles[0]["metadata"]["name"]
    own = [r for r in of_kind(objects, "Role") if r["metadata"]["namespace"] == "diloco-system"]
    assert granted(own) == rights(OWN_NEEDS), "for the root key and the Lease"


def test_an_operator_that_watches_its_own_namespace_has_one_role_there() -> None:
    objects = tuple(one for one in render("--set", "watch.namespaces={diloco-system}") if not hooked(one))
    assert granted(of_kind(objects, "Role")) == needed(nodes=False) | rights(OWN_NEEDS)


@pytest.mark.parametrize("values", CI, ids=lambda path: path.stem)
def test_no_role_has_a_wildcard_or_reads_secrets(values: Path) -> None:
    objects = render("--values", str(values))
    roles = of_kind(objects, "ClusterRole") + of_kind(objects, "Role")
    assert roles
    for role in roles:
        for rule in role["rules"]:
            assert "*" not in json.dumps(rule)
            if "secrets" in rule["resources"]:
                assert rule["verbs"] == ["create"]
    bound = {(b["kind"], b["roleRef"]["name"]) for b in objects if b["kind"].endswith("RoleBinding")}
    for role in roles:
        added = "aggregate-to-" in json.dumps(role["metadata"]["labels"])
        assert ((f"{role['kind']}Binding", role["metadata"]["name"]) in bound) is not added


def test_the_uninstall_hook_may_stop_the_operator_and_patch_jobs() -> None:
    for words, kind in (((), "ClusterRole"), (("--set", "watch.namespaces={a,b}"), "Role")):
        objects = tuple(one for one in render(*words) if hooked(one))
        jobs = [r for r in of_kind(objects, kind) if "dilocojobs" in json.dumps(r)]
        assert len(jobs) == (1 if kind == "ClusterRole" else 2)
        for role in jobs:
            assert granted([role]) == {("diloco.io", "dilocojobs", "list"), ("diloco.io", "dilocojobs", "patch")}
        (own,) = [r for r in of_kind(objects, "Role") if r["metadata"]["namespace"] == "diloco-system"]
        assert granted([own]) == {("", "pods", "list")}
        for rule in own["rules"]:
            assert rule.get("resourceNames", ["diloco-operator"]) == ["diloco-operator"]


# ---------------------------------------------------------------- pods


@pytest.mark.parametrize("values", CI, ids=lambda path: path.stem)
def test_pods_are_restricted(values: Path) -> None:
    """As the restricted pod security standard has it, and the root file system read-only besides."""
    seen = dict(pod_specs(render("--values", str(values))))
    assert len(seen) == 3  # operator, uninstall hook, test
    for name, spec in seen.items():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert {kind for volume in spec.get("volumes", []) for kind in volume} <= {"name", "secret", "emptyDir"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


def operator(objects: tuple[Object, ...]) -> Object:
    (deployment,) = of_kind(objects, "Deployment")
    return dict(deployment["spec"]["template"]["spec"])


def environment(objects: tuple[Object, ...]) -> dict[str, str]:
    """As the container has it; what refers to something else is left out, but for the namespace."""
    found = {}
    for item in operator(objects)["containers"][0]["env"]:
        if item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == "metadata.namespace":
            found[item["name"]] = "diloco-system"
        elif "value" in item:
            found[item["name"]] = item["value"]
    return found


def test_the_defaults_are_the_operators_own() -> None:
    made = settings.load([], environment(render("--set", "images.registry=registry.example.com")))
    at = {f"{role}_image": f"registry.example.com/diloco-{role}:{RELEASE}" for role in ("syncer", "worker")}
    assert made == replace(settings.Settings(), **at)  # type: ignore[arg-type]


def test_a_name_without_a_registry_is_never_pulled() -> None:
    """Anyone could own that name in the registry that nodes use by default."""
    for words, policy in (
        ((), "Never"),
        (("images.registry=registry.example.com/team",), "IfNotPresent"),
        (tuple(f"images.{role}.repository=registry.example.com/{role}" for role in ROLES), "IfNotPresent"),
        (("images.pullPolicy=Never",), "Never"),
        (("images.registry=registry.example.com", "images.pullPolicy=Always"), "Always"),
    ):
        objects = render(*(part for word in words for part in ("--set", word)))
        assert settings.load([], environment(objects)).image_pull_policy == policy
        found = re.findall(r'"imagePullPolicy": "(\w+)"', json.dumps(objects))
        assert len(found) >= 2 and set(found) == {policy}, words


@pytest.mark.parametrize(
    ("words", "policy", "roles"),
    [
        (("images.pullPolicy=IfNotPresent",), "IfNotPresent", "operator, syncer, worker"),
        (("images.pullPolicy=Always",), "Always", "operator, syncer, worker"),
        (("images.worker.repository=registry.example.com/worker",), "IfNotPresent", "operator, syncer"),
    ],
)
def test_a_policy_that_would_pull_a_name_without_a_registry_is_refused(
    words: tuple[str, ...], policy: str, roles: str
) -> None:
    with pytest.raises(chart.Problem) as refused:
        render(*(part for word in words for part in ("--set", word)))
    said = str(refused.value)
    assert f"with the pull policy {policy} nodes would pull the image of {roles} from docker.io" in said
    assert "set images.registry to your registry, or set images.pullPolicy=Never" in said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("images.registry=https://r.io/x",), "registry"),
        (("images.registry=r.io//x",), "registry"),
        (("serviceAccount.create=false",), "serviceAccount.name"),
    ],
)
def test_values_that_make_wrong_names_are_refused(values: tuple[str, ...], words: str) -> None:
    with pytest.raises(chart.Problem) as refused:
        render(*(part for value in values for part in ("--set", value)))
    assert words in str(refused.value)


@pytest.mark.promise("Pods of jobs can use a private registry and a priority class without a setting in each job")
def test_every_value_reaches_the_operator() -> None:
    made = settings.load([], environment(render("--values", str(CHART / "ci" / "everything.yaml"))))
    assert made.cluster == "east-1" and made.namespace == "diloco-system"
    assert made.syncer_image == "registry.example.com/team/diloco-syncer:latest"
    assert made.worker_image == "registry.example.com/team/diloco-worker:0.2.0@sha256:" + 64 * "a"
    assert made.image_pull_policy == "Always" and made.resync_seconds == 12.5
    assert (made.log_level, made.log_format) == ("DEBUG", "text")
    assert made.metrics_namespace == "kube-public" and made.workers == 16
    assert (made.pull_secrets, made.priority_class) == (("team.registry", "mirror"), "training")
    namespaced = settings.load([], environment(render("--values", str(CHART / "ci" / "namespaced.yaml"))))
    assert namespaced.watch_namespaces == ("default", "kube-public")


def test_variables_that_the_chart_sets_cannot_be_set_again() -> None:
    """extraEnv refuses those that are values of their own, or that probes and volumes rely on."""
    refused = json.loads((CHART / "values.schema.json").read_text())
    refused = refused["properties"]["extraEnv"]["items"]["properties"]["name"]["not"]["enum"]
    everything = environment(render("--values", str(CHART / "ci" / "everything.yaml")))
    namespaced = environment(render("--values", str(CHART / "ci" / "namespaced.yaml")))
    sets = {name for name in everything | namespaced if name.startswith(settings.PREFIX)}
    sets -= {"DILOCO_OPERATOR_WORKERS"}  # everything.yaml's own extraEnv
    assert set(refused) == sets | {settings.variable("http"), settings.variable("key_file")}
    assert set(refused) <= {settings.variable(field.name) for field in settings.fields()}


def test_the_pod_fits_the_program() -> None:
    spec = operator(render())
    container = spec["containers"][0]
    defaults = settings.Settings()
    (port,) = container["ports"]
    assert str(port["containerPort"]) == defaults.http.rpartition(":")[2]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "key"]
    assert defaults.key_file == f"{mount['mountPath']}/key"
    (volume,) = [v for v in spec["volumes"] if v["name"] == "key"]
    assert volume["secret"]["secretName"] == root_key.NAME and volume["secret"]["optional"] is True
    (deployment,) = of_kind(render(), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert not of_kind(render(), "Secret")


def test_a_standby_is_on_another_node_and_drains_leave_one() -> None:
    assert "affinity" not in operator(render()) and not of_kind(render(), "PodDisruptionBudget")
    objects = render("--set", "replicas=2")
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (term,) = operator(objects)["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_two_releases_have_a_lease_each() -> None:
    leases = {environment(render(release=name))["DILOCO_OPERATOR_LEASE"] for name in ("diloco", "training")}
    assert leases == {"diloco-operator", "training-diloco-operator"}


def test_openshift_may_choose_the_users() -> None:
    for _, spec in pod_specs(render("--values", str(CHART / "ci" / "openshift.yaml"))):
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(spec["securityContext"])


# ---------------------------------------------------------------- hooks, CRD, names


def test_the_hooks_program_takes_its_arguments() -> None:
    for words, scope in (((), ""), (("--set", "watch.namespaces={a,b}"), "a,b")):
        (job,) = of_kind(render(*words), "Job")
        command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        assert command[:3] == ["python", "-m", uninstall.__name__]
        given = uninstall.parser().parse_args(command[3:])
        assert (given.stop, given.namespace, given.watch_namespaces) == ("diloco-operator", "diloco-system", scope)
        assert given.seconds < job["spec"]["activeDeadlineSeconds"] < 300, "Helm waits 300 s"


def test_hooks_are_not_taken_for_the_operator() -> None:
    objects = render()
    (deployment,) = of_kind(objects, "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    for one in objects:
        if hooked(one) and one["kind"] in ("Job", "Pod"):
            template = one["spec"].get("template", one)
            assert not selector.items() <= template["metadata"]["labels"].items()


def test_the_definition_is_the_generated_one_and_is_kept() -> None:
    (made,) = of_kind(render(), "CustomResourceDefinition")
    assert made["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert made == yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    assert not of_kind(render("--set", "crds.install=false"), "CustomResourceDefinition")


@pytest.mark.parametrize("values", CI, ids=lambda path: path.stem)
def test_a_release_never_holds_a_job(values: Path) -> None:
    assert not of_kind(render("--values", str(values)), "DiLoCoJob")


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("diloco", "diloco-operator"),
        ("training", "training-diloco-operator"),
        ("diloco-operator", "diloco-operator"),
        ("a" * 53, "a" * 32 + "-diloco-operator"),
    ],
)
def test_names(release: str, name: str) -> None:
    objects = render(release=release)
    assert of_kind(objects, "Deployment")[0]["metadata"]["name"] == name
    for one in objects:
        found = one["metadata"]["name"]
        assert len(found) <= 63 and found.startswith((name, "dilocojobs.diloco.io")), found


@pytest.mark.promise("A job's own image cannot overwrite another job's metrics")
def test_monitors_find_the_pods_and_ports_that_there_are() -> None:
    objects = render("--values", str(CHART / "ci" / "everything.yaml"))
    monitors = of_kind(objects, "PodMonitor")
    assert len(monitors) == 3
    own = next(m for m in monitors if "matchExpressions" not in m["spec"]["selector"])
    (deployment,) = of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert own["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {"syncer": {HTTP_PORT: "http"}, "learner": {WORKER_PORT: "status"}, "evaluator": {WORKER_PORT: "status"}}
    constants = {"http": "HTTP_PORT", "status": "WORKER_PORT"}
    source = Path(pods.__file__).read_text()
    for role, expected in ports.items():
        (found,) = [
            m
            for m in monitors
            if role in (m["spec"]["selector"].get("matchExpressions") or [{"values": []}])[0]["values"]
        ]
        job_labels = names.labels("j", role)
        assert found["spec"]["selector"]["matchLabels"].items() <= job_labels.items()
        assert found["spec"]["selector"]["matchExpressions"][0]["key"] in job_labels
        (endpoint,) = found["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in expected.values()
        assert "honorLabels" not in endpoint, "a job's own image would write over another job's figures"
        assert found["spec"]["jobLabel"] == "diloco.io/job"
        assert f'_port("{endpoint["port"]}", {constants[endpoint["port"]]})' in source, "pods.py names its ports"


def notes(values: str, *more: str) -> str:
    """What `helm install` prints at its end; no cluster is asked."""
    words = ("--dry-run=client", "--values", str(CHART / "ci" / f"{values}.yaml"), *more)
    assert HELM is not None
    said = chart.run(HELM, "install", "diloco", str(CHART), "--namespace", "diloco-system", *words)
    return str(said).partition("NOTES:")[2]


def test_the_notes_name_what_there_is() -> None:
    everywhere, inside, second = notes("default"), notes("namespaced"), notes("second")
    assert "kubectl apply -f manifests/examples/tiny-gpt.yaml" in everywhere
    assert "diloco examples tiny-gpt.yaml && diloco apply examples/tiny-gpt.yaml" in notes(
        "default", "--set", "images.registry=registry.example.com"
    ), "who installs from a registry has no clone"
    assert "kubectl apply -n default -f" in inside, "elsewhere nobody would look at the job"
    assert "--take-ownership" in everywhere and "--take-ownership" in inside
    assert "holds no CRD" in second and "--take-ownership" not in second
    for said, deployment in ((everywhere, "diloco-operator"), (notes("everything"), "trainers")):
        assert f"deploy/{deployment}\n" in said and "<no value>" not in said


def test_the_notes_say_what_to_do_where_no_registry_is_set() -> None:
    said = notes("default")
    assert all(f"diloco-{role}:{VERSION}" in said for role in ROLES), said
    assert "make images" in said and "images.registry" in said


# ---------------------------------------------------------------- the schema


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("watch.namespace=a", "namespace"),
        ("watch.namespaces={A_B}", "watch/namespaces"),
        ("watch.namespaces={a,a}", "watch/namespaces"),
        ("replicas=0", "replicas"),
        ("images.worker.image=x", "images/worker"),
        ("images.pullPolicy=Sometimes", "images/pullPolicy"),
        ("images.syncer.tag=not a tag", "images/syncer/tag"),
        ("images.operator.repository=", "images/operator/repository"),
        ("crds.install=please", "crds/install"),
        ("resyncSeconds=1", "resyncSeconds"),
        ("resyncSeconds=soon", "resyncSeconds"),
        ("logs.level=LOUD", "logs/level"),
        ("logs.format=xml", "logs/format"),
        ("cluster.name=East", "cluster/name"),
        ("cluster=east", "cluster"),
        ("podMonitor.interval=often", "podMonitor/interval"),
        ("resources.request.cpu=1", "resources"),
        ("extraEnv[0].name=DILOCO_OPERATOR_LOG_LEVEL", "extraEnv/0/name"),
        ("extraEnv[0].value=x", "extraEnv/0"),
        ("tolerations[0].tolerationSeconds=soon", "tolerations/0/tolerationSeconds"),
        ("imagePullSecrets={registry}", "imagePullSecrets/0"),
        ("jobs.imagePullSecrets={registry}", "jobs/imagePullSecrets/0"),
        ("jobs.imagePullSecrets[0].name=a_b", "jobs/imagePullSecrets/0/name"),
        ("jobs.priorityClassName=High", "jobs/priorityClassName"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, field: str) -> None:
    assert HELM is not None
    command = [HELM, "template", "diloco", str(CHART), "--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    said = done.stderr.replace(".", "/")
    assert "values don't meet the specifications of the schema" in done.stderr and field in said, done.stderr


def test_the_manifest_without_helm_is_the_charts() -> None:
    objects = chart.documents(chart.install_manifest())
    assert objects[0]["kind"] == "Namespace" and "helm" not in json.dumps(objects).lower()
    kept = [one for one in render() if not hooked(one)]
    assert [(o["kind"], o["metadata"]["name"]) for o in objects[1:]] == [
        (o["kind"], o["metadata"]["name"]) for o in kept
    ]
