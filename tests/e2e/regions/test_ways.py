"""How learners come to the hub: through a gateway or a load balancer in front of it, by a name, and with
certificates that are renewed while they train."""

from __future__ import annotations

import re

import pytest

from ..buckets import machine_address, node_address
from ..clusters import run, until
from ..jobs import Job
from .gateway import Gateway
from .test_refusals import metrics
from .world import EU, HUB, NODE_PORT, PROGRAM, US, RunJob, World, contributes

pytestmark = pytest.mark.timeout(900)
NAME = "hub.example.org"


def way_in(world: World, job: Job, kind: str) -> str:
    """Where what stands in front of the hub finds the job's Service."""
    path = f"/api/v1/namespaces/{world.namespace}/services/{job.name}-syncer"
    service = until("the syncer's Service", lambda: world.hub.api(path), 60)
    if kind == "LoadBalancer":
        assert service["spec"]["type"] == "LoadBalancer"
        ports = service["spec"]["ports"]
    else:  # a port of the gateway's own
        assert service["spec"]["type"] == "ClusterIP"
        front = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"{job.name}-front"},
            "spec": {
                "type": "NodePort",
                "selector": service["spec"]["selector"],
                "ports": [{"port": 7700, "targetPort": 7700}],
            },
        }
        world.hub.apply(front, namespace=world.namespace)
        made = until("its port", lambda: world.hub.api(path.removesuffix("syncer") + "front"), 60)
        ports = made["spec"]["ports"]
    return f"{node_address(world.hub)}:{next(port['nodePort'] for port in ports if port['port'] == 7700)}"


@pytest.mark.parametrize("kind", ["External", "LoadBalancer"])
def test_learners_come_through_what_stands_in_front(world: World, kind: str) -> None:
    """And follow it when it moves, without being started again."""
    name, regions = f"front-{kind.lower()}", {EU: 1, US: 1}
    host, asks = machine_address(world.hub), NAME if kind == "External" else ""
    document = world.document(name, regions)
    words = ("--server-name", asks) if asks else ()

    def lead(gateway: Gateway | None) -> None:
        address = gateway.address if gateway else f"{host}:1"
        document["spec"]["syncer"]["endpoint"] = {"type": kind, "address": address}
        for cluster in (HUB, EU, US):
            world.give(document, cluster)

    world.trust(document, *words)
    job = world.job(name)
    try:
        lead(None)  # nobody is there yet
        target = way_in(world, job, kind)
        with Gateway(host, target, asks) as first:
            lead(first)
            job.in_merges(2, timeout=300)
            pods = world.identities(name, EU, US)
            assert set(first.asked) == ({NAME} if asks else set())
            with Gateway(host, target, asks) as second:
                lead(second)
                first.__exit__()
                for region in (EU, US):
                    contributes(job, region, 240)
                assert world.identities(name, EU, US) == pods, "something restarted"
                assert sum(second.asked.values()) > 0 or not asks
                job.exact()
                world.delete(name, EU, US)  # they leave in peace
    finally:
        world.delete(name)


def call(world: World, name: str, address: str) -> None:
    """``name`` is this address, for who asks in a region's cluster: a Service without a selector."""
    labels = {"kubernetes.io/service-name": name}
    for region in (EU, US):
        world.clusters[region].apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name},
                "spec": {"clusterIP": "None", "ports": [{"port": NODE_PORT}]},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "addressType": "IPv4",
                "metadata": {"name": name, "labels": labels},
                "ports": [{"port": NODE_PORT}],
                "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            },
            namespace=world.namespace,
        )


def test_a_name_is_resolved_anew(world: World, run_job: RunJob) -> None:
    """The hub's name leads elsewhere: nothing changes in the job, and nothing is started again."""
    call(world, "moves", machine_address(world.hub))
    endpoint = {"type": "NodePort", "nodePort": NODE_PORT, "address": f"moves.{world.namespace}.svc:{NODE_PORT}"}
    with Gateway(machine_address(world.hub), world.address(), port=NODE_PORT):
        job = run_job("named", {EU: 1, US: 1}, syncer={"endpoint": endpoint})
        job.in_merges(2)
        pods = world.identities("named", EU, US)
        call(world, "moves", node_address(world.hub))
    for region in (EU, US):
        contributes(job, region, 120)
    assert world.identities("named", EU, US) == pods, "something restarted"
    job.exact()


def days(page: str, whose: str) -> float:
    """When this certificate expires, or the first of these, by the syncer's metrics."""
    found = re.search(rf"^diloco_{whose}_expires_timestamp_seconds(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    assert found, page
    return float(found[1]) / 86400


def test_certificates_are_renewed_while_a_job_runs(world: World, run_job: RunJob) -> None:
    """By `diloco certs renew` and `kubectl apply`: who is connected stays, and who connects anew shows
    the new one. Nothing is started again."""
    regions = {EU: 1, US: 1}
    job = run_job("renewed", regions, issue=("--days", "30"))
    job.in_merges(2)
    pods, syncer = world.identities("renewed", EU, US), job.identities("syncer")
    before = metrics(job)
    made = world.pki("renewed") / world.namespace / "renewed"
    folders = [str(folder) for folder in made.iterdir() if folder.is_dir()]
    run(PROGRAM, "certs", "renew", *folders, "--pki", str(world.pki("renewed")), "--days", "90")
    for cluster in (HUB, EU, US):
        world.give(world.document("renewed", regions), cluster)

    def later(whose: str) -> bool:
        return days(metrics(job), whose) > days(before, whose) + 50

    # Who connects shows the new one as soon as the kubelet has handed it on. A cut makes them connect.
    def reconnected() -> bool:
        for name in (EU, US):
            world.clusters[name].fault("cut")
        until("both are lost", lambda: job.training()["quorum"]["active"] == 0, 60)
        for name in (EU, US):
            world.clusters[name].fault("heal")
        for name in (EU, US):
            contributes(job, name, 60)
        return later("certificate") and later("peer_certificate")

    job.merging_on()
    until("all show the new certificates", reconnected, 400)
    assert world.identities("renewed", EU, US) == pods and job.identities("syncer") == syncer
    job.exact()
