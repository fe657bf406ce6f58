"""The cluster of the tests: made once, the operator installed by the chart, taken away at the end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from repository import ROOT

from .clusters import Cluster, delete_at_end, open_cluster, until
from .jobs import Job, small_job
from .operator_shell import kube, kube_bare, operate

__all__ = ["kube", "kube_bare", "operate"]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SYSTEM = "diloco-system"


# These files come first, in this order, on a cluster without the operator: the next test to ask for `cluster`
# installs it, and it stays.
FIRST = ("test_before_install", "test_cli_api", "test_cli_pods", "test_chart")
# Seconds for a test that names no limit: whichever comes first waits for the cluster and its images too.
LIMIT = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT))
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of a run that takes an hour, a failure at once."""
    if report.failed:
        print(f"\n{report.when} of {report.nodeid} FAILED:\n{str(report.longrepr)[-4000:]}", flush=True)


def images(*roles: str) -> tuple[str, ...]:
    """Of these roles, or of all."""
    return tuple(f"diloco-{role}:{VERSION}" for role in roles or ROLES)


ROLES = ("operator", "syncer", "worker")


@pytest.fixture(scope="session")
def bare_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster without the operator, two nodes. If tests to come want the operator its images are loaded meanwhile,
    which takes two minutes."""
    found = open_cluster()
    if isinstance(found, str):
        pytest.skip(found)
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if type(found).__name__ != "Current":
        delete_at_end(request.config, found.down)
    roles = ROLES if "cluster" in wanted else ROLES[:1] if "empty" in wanted else ()
    with ThreadPoolExecutor(1) as one_after_another:
        if not os.environ.get("IMAGES_LOADED"):
            found.loading = {role: one_after_another.submit(found.load, images(role)) for role in roles}
        yield found


def wait_for_images(cluster: Cluster, *roles: str) -> None:
    """Until the cluster has those of these roles. Raises what went wrong."""
    for role in roles:
        if role in cluster.loading:
            cluster.loading[role].result()


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster) -> Cluster:
    """With images loaded and the operator installed, ready."""
    wait_for_images(bare_cluster, *ROLES)
    install(bare_cluster)
    return bare_cluster


def wait_for_no_operator(cluster: Cluster) -> None:
    """Wait until no operator has a pod: one that is on its way out acts until its end."""
    until("no operator", lambda: not cluster.items("/api/v1/pods", "app.kubernetes.io/name=diloco-operator"), 60)


@contextlib.contextmanager
def without_operator(cluster: Cluster) -> Iterator[None]:
    """No operator acts meanwhile: where one is installed it has no pod, and one that is on its way out is
    waited for."""
    deployment = "deploy/diloco-operator"
    there = cluster.api(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/diloco-operator") is not None
    if there:
        cluster.kubectl("scale", deployment, "-n", SYSTEM, "--replicas=0")
    wait_for_no_operator(cluster)
    yield
    if there:
        cluster.kubectl("scale", deployment, "-n", SYSTEM, "--replicas=1")
        cluster.kubectl("rollout", "status", deployment, "-n", SYSTEM, "--timeout=60s")


def install(cluster: Cluster, *values: str, anywhere: bool = False, timeout: int = 180) -> None:
    """`helm upgrade --install` of the chart, as the README says it. ``anywhere``: on any node."""
    nodes = cluster.nodes()
    if "node" in cluster.can and len(nodes) > 1 and not anywhere:  # the node that tests lose is another
        values = (*values, rf"nodeSelector.kubernetes\.io/hostname={nodes[0]}")
    if registry := os.environ.get("IMAGE_REGISTRY"):
        values = (*values, f"images.registry={registry}")
    # In a cluster that was kept the image may be new under its old tag: the pod is made anew.
    values = (*values, rf"podAnnotations.diloco\.io/installed=at-{time.time():.0f}")
    settings = [word for value in values for word in ("--set", value)]
    cluster.helm(
        "upgrade",
        "--install",
        "diloco",
        str(ROOT / "charts" / "diloco"),
        "-n",
        SYSTEM,
        "--create-namespace",
        "--wait",
        "--timeout",
        f"{timeout}s",
        *settings,
        timeout=timeout + 60,
    )


_numbers = iter(range(1000))


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own, with the restricted pod security standard enforced."""
    name = f"t{int(time.time()) % 100000}-{next(_numbers)}"
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
    )
    yield name
    for item in cluster.items(f"/apis/diloco.io/v1alpha1/namespaces/{name}/dilocojobs"):
        cluster.kubectl("delete", "dilocojob", item["metadata"]["name"], "-n", name, "--wait=false", check=False)
    until(
        f"no job left in {name}",
        lambda: not cluster.items(f"/apis/diloco.io/v1alpha1/namespaces/{name}/dilocojobs"),
        60,
    )
    cluster.kubectl("delete", "namespace", name, "--wait=false", check=False)


@pytest.fixture
def start(cluster: Cluster, namespace: str) -> Any:
    """``start(name, **spec)``: a small job of the test's own, applied."""

    def begin(name: str, **spec: Any) -> Job:
        job = Job(cluster, name, namespace)
        job.apply(small_job(name, **spec))
        return job

    return begin


def python(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """This environment's Python."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=timeout, check=False)
