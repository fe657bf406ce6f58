"""Several clusters that one job spans: a hub and regions, each with the operator of its own name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..buckets import node_address
from ..clusters import Cluster, open_cluster, run, until
from ..conftest import images, install
from ..jobs import Job, small_job

HUB, EU, US = "hub", "eu-1", "us-1"
NODE_PORT = 30443
Regions = Mapping[str, int | dict[str, Any]]
PROGRAM = str(Path(sys.executable).with_name("diloco"))


@dataclass
class World:
    """The clusters by their names, and one namespace in each."""

    namespace: str
    folder: Path
    clusters: dict[str, Cluster] = field(default_factory=dict)
    destroyed: set[str] = field(default_factory=set)

    @property
    def hub(self) -> Cluster:
        return self.clusters[HUB]

    # ------------------------------------------------------------- clusters

    def begin(self, *names: str, nodes: int = 1) -> None:
        """Clusters with the images, the operator under the cluster's name, and the namespace. Skips the
        test where the machine has no tool that makes several."""
        prefix = os.environ.get("CLUSTER_NAME", "diloco")
        furnished = []
        with ThreadPoolExecutor(len(names)) as pool:  # images are large: the next cluster starts meanwhile
            for name in names:
                cluster = open_cluster(prefix + name.replace("-", ""), nodes)
                if isinstance(cluster, str):
                    pytest.skip(cluster)
                if type(cluster).__name__ == "Current":
                    pytest.skip("several clusters are needed: CLUSTER=localkube or kind")
                self.clusters[name] = cluster
                furnished.append(pool.submit(self._furnish, name))
        for each in furnished:
            each.result()

    def _furnish(self, name: str) -> None:
        cluster = self.clusters[name]
        if name in self.destroyed or not os.environ.get("IMAGES_LOADED"):
            cluster.load(images("operator", *(["syncer"] if name == HUB else []), "worker"))
        install(cluster, f"cluster.name={name}")
        if cluster.api(f"/api/v1/namespaces/{self.namespace}") is None:
            cluster.kubectl("create", "namespace", self.namespace)

    def destroy(self, name: str) -> None:
        """With everything that is in it."""
        self.clusters.pop(name).down()
        self.destroyed.add(name)

    def destroy_all(self) -> None:
        """All at once."""
        with ThreadPoolExecutor(max(1, len(self.clusters))) as pool:
            list(pool.map(self.destroy, list(self.clusters)))

    # ------------------------------------------------------------- jobs

    def address(self, port: int = NODE_PORT) -> str:
        """Where learners of other clusters reach the hub's syncer."""
        return f"{node_address(self.hub)}:{port}"

    def job(self, name: str, cluster: str = HUB) -> Job:
        return Job(self.clusters[cluster], name, self.namespace)

    def endpoint(self, port: int = NODE_PORT) -> dict[str, Any]:
        return {"type": "NodePort", "nodePort": port, "address": self.address(port)}

    def document(self, name: str, regions: Regions, port: int = NODE_PORT, **spec: Any) -> dict[str, Any]:
        """A small job with its syncer in the hub and so many learners, or a region's fields, in each of the clusters
        named."""
        syncer = {"cluster": HUB, "endpoint": self.endpoint(port), "tls": {"secretName": f"{name}-syncer"}} | spec.pop(
            "syncer", {}
        )
        document = small_job(name, syncer=syncer, **spec)
        document["spec"]["learners"]["credentials"] = {"secretName": f"{name}-learner"}
        document["spec"]["regions"] = [
            {"name": cluster, "cluster": cluster, **({"learners": there} if isinstance(there, int) else there)}
            for cluster, there in regions.items()
        ]
        return document

    def pki(self, name: str) -> Path:
        return self.folder / f"pki-{name}"

    def trust(self, document: dict[str, Any], *words: str) -> None:
        """An authority of the job's own, by `diloco certs`; ``words`` for its issue."""
        name = document["metadata"]["name"]
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(document))
        run(PROGRAM, "certs", "init", "--out", str(self.pki(name)))
        run(PROGRAM, "certs", "issue", str(path), "--pki", str(self.pki(name)), "-n", self.namespace, *words)

    def give(self, document: dict[str, Any], cluster: str) -> None:
        """The job and its Secrets, to one cluster."""
        made = self.pki(document["metadata"]["name"]) / self.namespace / document["metadata"]["name"]
        # The hub's is the learners' too: the syncer compares the token.
        for folder in ([made / "syncer"] if cluster == HUB else []) + [made / cluster]:
            path = str(folder / "secret.yaml")
            self.clusters[cluster].kubectl("apply", "--server-side", "-n", self.namespace, "-f", path)
        self.clusters[cluster].apply(document, namespace=self.namespace)

    def apply(self, document: dict[str, Any], *but: str, issue: Sequence[str] = ()) -> Job:
        """To the hub and to each cluster of its regions (``but`` these), as `diloco apply --context …
        --context …` does. ``issue``: words for `diloco certs issue`."""
        self.trust(document, *issue)
        for cluster in sorted({HUB, *(region["cluster"] for region in document["spec"]["regions"])}):
            if cluster not in but:
                self.give(document, cluster)
        return self.job(document["metadata"]["name"])

    def identities(self, name: str, *clusters: str) -> dict[str, dict[str, tuple[str, int]]]:
        """Of the learners' pods: what must not change."""
        return {cluster: self.job(name, cluster).identities() for cluster in clusters}

    def delete(self, name: str, *clusters: str) -> None:
        """The job in these clusters, or everywhere."""
        where = clusters or tuple(self.clusters)
        for cluster in where:
            self.clusters[cluster].kubectl(
                "delete", "dilocojob", name, "-n", self.namespace, "--ignore-not-found", "--wait=false"
            )
        for cluster in where:
            job = self.job(name, cluster)
            until(f"{name} gone in {cluster}", lambda job=job: job.object() is None and not job.pods(), 120)


def merged_of(document: dict[str, Any], region: str) -> int:
    """How many pushes of a region's slots were merged."""
    return sum(row["merged_pushes"] for row in document["slots"] if row["region"] == region)


def contributes(job: Job, region: str, timeout: float) -> dict[str, Any]:
    """Wait until one more push of the region is merged than now."""
    already = merged_of(job.training(), region)
    return dict(job.wait_training(f"{region} contributes", lambda d: merged_of(d, region) > already, timeout))


RunJob = Callable[..., Job]
"""``run_job(name, {cluster: learners}, *but, issue=(), **spec)``: applied everywhere but there, and deleted
at the test's end. In place of the number of learners a region's fields may stand."""
