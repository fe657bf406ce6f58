"""The chart on a real cluster: installed, upgraded, tested, uninstalled and installed again.

Jobs here are suspended, so that nothing trains: what is looked at is what a release makes,
leaves and gives back. Runs before the tests that need the operator (conftest.py); where
they have installed it already, it is put back at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from repository import ROOT

from .clusters import Cluster, CommandFailed, until
from .conftest import SYSTEM, install, wait_for_images, wait_for_no_operator
from .jobs import small_job

CHART = ROOT / "charts" / "diloco"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/dilocojobs.diloco.io"
OURS, ANOTHERS = "diloco.io/job", "example.com/other"
KEY = f"/api/v1/namespaces/{SYSTEM}/secrets/diloco-operator-key"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def empty(bare_cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with the operator's image and no release."""
    wait_for_images(bare_cluster, "operator")
    there = "diloco" in bare_cluster.helm("list", "-n", SYSTEM, "-q").split()
    if there:
        bare_cluster.helm("uninstall", "diloco", "-n", SYSTEM, "--wait")
    if bare_cluster.api(CRD) is not None and not there:
        bare_cluster.kubectl("delete", "crd", "dilocojobs.diloco.io", "--timeout=60s")
    yield bare_cluster
    if there:
        install(bare_cluster)


_numbers = iter(range(1000))


@pytest.fixture
def namespaces(empty: Cluster) -> Iterator[list[str]]:
    """Two namespaces and the operator's own; all jobs and releases are gone at the end."""
    made = [f"chart-{next(_numbers)}-{os.getpid()}" for _ in "ab"]
    for name in (SYSTEM, *made):
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
        empty.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    yield made
    for release in json.loads(empty.helm("list", "-A", "-o", "json")):
        if release["chart"].startswith("diloco-"):
            empty.helm("uninstall", release["name"], "-n", release["namespace"], "--no-hooks", check=False)
    wait_for_no_operator(empty)
    if empty.api(CRD) is not None:
        for item in empty.items("/apis/diloco.io/v1alpha1/dilocojobs"):
            if item["metadata"]["namespace"] in made:
                drop_finalizers(empty, item["metadata"]["namespace"], item["metadata"]["name"])
                empty.kubectl(
                    "delete",
                    "dj",
                    item["metadata"]["name"],
                    "-n",
                    item["metadata"]["namespace"],
                    "--ignore-not-found",
                    "--timeout=30s",
                )
        empty.kubectl("delete", "crd", "dilocojobs.diloco.io", "--timeout=60s")
    for name in made:
        empty.kubectl("delete", "namespace", name, "--wait=false", check=False)


def helm_install(cluster: Cluster, release: str, *words: str, chart: Path = CHART) -> str:
    return cluster.helm("install", release, str(chart), "-n", SYSTEM, "--wait", "--timeout", "90s", *words)


def helm_uninstall(cluster: Cluster, release: str, *words: str) -> None:
    cluster.helm("uninstall", release, "-n", SYSTEM, "--wait", "--timeout", "120s", *words)


def suspended(cluster: Cluster, namespace: str, name: str, *finalizers: str) -> None:
    job = small_job(name, learners=1)
    job["metadata"]["finalizers"] = list(finalizers)
    job["spec"]["suspend"] = True
    cluster.apply(job, namespace=namespace)


def finalizers(cluster: Cluster, namespace: str, name: str) -> set[str]:
    job = cluster.api(f"/apis/diloco.io/v1alpha1/namespaces/{namespace}/dilocojobs/{name}")
    assert job is not None, f"job {namespace}/{name} is gone"
    return set(job["metadata"].get("finalizers") or ())


def drop_finalizers(cluster: Cluster, namespace: str, name: str) -> None:
    """The way out by hand, as docs/operator.md has it."""
    patch = '{"metadata":{"finalizers":null}}'
    cluster.kubectl("patch", "dilocojob", name, "-n", namespace, "--type=merge", "-p", patch)


def looked_after(cluster: Cluster, namespace: str, name: str) -> None:
    until(f"the operator looks after {namespace}/{name}", lambda: OURS in finalizers(cluster, namespace, name), 60)


def left(cluster: Cluster, release: str) -> list[str]:
    """What carries the release's label, in all namespaces."""
    kinds = "deploy,svc,sa,role,rolebinding,clusterrole,clusterrolebinding,netpol,cm,job,pod"
    return cluster.kubectl("get", kinds, "-A", "-l", f"app.kubernetes.io/instance={release}", "-o", "name").split()


def wait_nothing_left(cluster: Cluster, release: str) -> None:
    """After an uninstall. Helm does not wait for the pods of the hook's Job, which Kubernetes deletes after it."""
    until(f"nothing of {release} is left", lambda: not left(cluster, release), 60)


# ------------------------------------------------------------------


@pytest.mark.promise("A real API server accepts the chart with each set of values in `charts/diloco/ci`")
def test_lint_render_and_dry_run(empty: Cluster) -> None:
    """`make chart`, with this cluster: every values file of charts/diloco/ci."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "chart.py"), "check"],
        env={**os.environ, "KUBECONFIG": str(empty.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(list((CHART / "ci").glob("*.yaml")))
    assert all("tried on the API server" in line for line in lines), done.stdout


def test_a_watched_namespace_that_does_not_exist_is_named_before_anything_is_made(empty: Cluster) -> None:
    words = ("install", "absent", str(CHART), "-n", "default", "--dry-run=server", "--set")
    assert "kind: Role" in empty.helm(*words, "watch.namespaces={default}")
    with pytest.raises(CommandFailed, match="there is no namespace nowhere: make it, or leave it out"):
        empty.helm(*words, "watch.namespaces={default,nowhere}")


@pytest.mark.promise(
    "The chart can be installed, upgraded, uninstalled and installed again, also under another name: jobs "
    "and the operator's key stay"
)
@pytest.mark.ci
def test_installed_upgraded_uninstalled_and_installed_again(
    empty: Cluster, namespaces: list[str], tmp_path: Path
) -> None:
    where = namespaces[0]
    # An older chart, whose CRD has no column Goodput.
    older = tmp_path / "diloco"
    shutil.copytree(CHART, older)
    definition = yaml.safe_load((older / "files" / "crd.yaml").read_text())
    columns = definition["spec"]["versions"][0]["additionalPrinterColumns"]
    columns[:] = [column for column in columns if column["name"] != "Goodput"]
    (older / "files" / "crd.yaml").write_text("# older\n" + yaml.safe_dump(definition, sort_keys=False))
    helm_install(empty, "diloco", chart=older)
    assert "Goodput" not in columns_of(empty)
    empty.helm("test", "diloco", "-n", SYSTEM, "--timeout", "90s")
    suspended(empty, where, "kept", ANOTHERS)
    looked_after(empty, where, "kept")

    empty.helm("upgrade", "diloco", str(CHART), "-n", SYSTEM, "--wait", "--timeout", "90s")
    until("the CRD is the newer one", lambda: "Goodput" in columns_of(empty), 20)
    before = empty.api(f"/apis/diloco.io/v1alpha1/namespaces/{where}/dilocojobs/kept")
    key = empty.api(KEY)
    assert before is not None and key is not None

    helm_uninstall(empty, "diloco")
    wait_nothing_left(empty, "diloco")
    assert finalizers(empty, where, "kept") == {ANOTHERS}, "ours, and nobody else's, is taken off"
    after = empty.api(f"/apis/diloco.io/v1alpha1/namespaces/{where}/dilocojobs/kept")
    assert after is not None and after["spec"] == before["spec"]
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    there = empty.api(KEY)
    assert there is not None and there["metadata"]["uid"] == key["metadata"]["uid"]

    # Again under the same name: the CRD that was kept is its own. The job is taken over.
    helm_install(empty, "diloco")
    looked_after(empty, where, "kept")
    helm_uninstall(empty, "diloco")

    # Under another name it has to be handed over.
    with pytest.raises(CommandFailed, match=r"dilocojobs\.diloco\.io"):
        helm_install(empty, "training")
    empty.helm("uninstall", "training", "-n", SYSTEM, "--no-hooks", check=False)
    helm_install(empty, "training", "--take-ownership")
    looked_after(empty, where, "kept")
    empty.helm("test", "training", "-n", SYSTEM, "--timeout", "90s")
    helm_uninstall(empty, "training")
    wait_nothing_left(empty, "training")
    assert finalizers(empty, where, "kept") == {ANOTHERS}


def columns_of(cluster: Cluster) -> list[str]:
    """The CRD's columns."""
    crd = cluster.api(CRD)
    assert crd is not None
    return [column["name"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


def test_uninstalled_without_the_hook_and_the_way_out(empty: Cluster, namespaces: list[str]) -> None:
    where = namespaces[0]
    helm_install(empty, "diloco")
    suspended(empty, where, "stuck")
    looked_after(empty, where, "stuck")
    helm_uninstall(empty, "diloco", "--no-hooks")
    wait_for_no_operator(empty)
    assert finalizers(empty, where, "stuck") == {OURS}
    with pytest.raises(CommandFailed):
        empty.kubectl("delete", "dj", "stuck", "-n", where, "--timeout=3s")
    drop_finalizers(empty, where, "stuck")
    path = f"/apis/diloco.io/v1alpha1/namespaces/{where}/dilocojobs/stuck"
    until("the job is gone", lambda: empty.api(path) is None, 20)


def test_the_hook_lets_a_job_go_that_is_being_deleted(empty: Cluster, namespaces: list[str]) -> None:
    """Deleted while the operator was away: the uninstall does not leave it hanging."""
    where = namespaces[0]
    helm_install(empty, "diloco")
    empty.kubectl("scale", "deploy", "diloco-operator", "-n", SYSTEM, "--replicas=0")
    suspended(empty, where, "going", OURS)
    empty.kubectl("delete", "dj", "going", "-n", where, "--wait=false")
    helm_uninstall(empty, "diloco")
    assert empty.api(f"/apis/diloco.io/v1alpha1/namespaces/{where}/dilocojobs/going") is None


def test_namespaced_mode(empty: Cluster, namespaces: list[str]) -> None:
    inside, outside = namespaces
    helm_install(empty, "diloco", "--set", f"watch.namespaces={{{inside}}}")
    empty.helm("test", "diloco", "-n", SYSTEM, "--timeout", "90s")
    own = [name for name in left(empty, "diloco") if name.startswith("clusterrole")]
    assert own == []
    suspended(empty, outside, "not-ours", OURS, ANOTHERS)
    suspended(empty, inside, "ours")
    looked_after(empty, inside, "ours")
    outsider = empty.api(f"/apis/diloco.io/v1alpha1/namespaces/{outside}/dilocojobs/not-ours")
    assert outsider is not None and not outsider.get("status"), "nobody looks after it"
    account = f"--as=system:serviceaccount:{SYSTEM}:diloco-operator"
    allowed = {
        ("list", "dilocojobs.diloco.io", inside): "yes",
        ("list", "dilocojobs.diloco.io", outside): "no",
        ("list", "pods", outside): "no",
        ("create", "secrets", inside): "yes",
        ("create", "secrets", outside): "no",
        ("create", "secrets", SYSTEM): "yes",
        ("get", "secrets", SYSTEM): "no",
        ("list", "nodes", inside): "no",
    }
    for (verb, resource, namespace), wanted in allowed.items():
        said = empty.kubectl("auth", "can-i", verb, resource, "-n", namespace, account, check=False)
        assert said.split()[-1] == wanted, (verb, resource, namespace, said)
    assert empty.api(KEY) is not None
    helm_uninstall(empty, "diloco")
    assert finalizers(empty, inside, "ours") == set()
    assert finalizers(empty, outside, "not-ours") == {OURS, ANOTHERS}, "not in the release's scope"
    wait_nothing_left(empty, "diloco")


@pytest.mark.promise("`manifests/install.yaml` installs an operator that works, and applying it again changes nothing")
def test_the_manifest_without_helm(empty: Cluster, namespaces: list[str]) -> None:
    path = ROOT / "manifests" / "install.yaml"
    objects: list[dict[str, Any]] = [o for o in yaml.safe_load_all(path.read_text()) if o]
    empty.kubectl("apply", "-f", str(path))
    try:
        empty.kubectl("rollout", "status", "deploy/diloco-operator", "-n", SYSTEM, "--timeout=90s", timeout=100)
        suspended(empty, namespaces[0], "plain")
        looked_after(empty, namespaces[0], "plain")
        # Once more changes nothing.
        again = empty.kubectl("apply", "-f", str(path)).splitlines()
        assert len(again) == len(objects) and all(line.endswith("unchanged") for line in again), again
    finally:
        for one in reversed(objects):
            if one["kind"] not in ("Namespace", "CustomResourceDefinition"):
                empty.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=json.dumps(one))
