"""Several clusters that one job spans: a hub and regions, each with the operator of its own name."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .clusters import Cluster, open_cluster, run, until
from .conftest import install
from .jobs import Job, small_job

HUB, EU, US = "hub", "eu-1", "us-1"
NODE_PORT = 30443


@dataclass
class World:
    """The clusters by their names, and one namespace in each."""

    clusters: dict[str, Cluster]
    namespace: str
    folder: Path

    @property
    def hub(self) -> Cluster:
        return self.clusters[HUB]

    def address(self, port: int = NODE_PORT) -> str:
        """Where learners of other clusters reach the hub's syncer."""
        return f"{node_address(self.hub)}:{port}"

    def job(self, name: str, cluster: str = HUB) -> Job:
        return Job(self.clusters[cluster], name, self.namespace)

    def document(
        self, name: str, regions: dict[str, int], port: int = NODE_PORT, **spec: Any
    ) -> dict[str, Any]:
        """A small job with its syncer in the hub and so many learners in each of the clusters named."""
        syncer = {
            "cluster": HUB,
            "endpoint": {"type": "NodePort", "nodePort": port, "address": self.address(port)},
            "tls": {"secretName": f"{name}-syncer"},
        } | spec.pop("syncer", {})
        document = small_job(name, syncer=syncer, **spec)
        document["spec"]["learners"]["credentials"] = {"secretName": f"{name}-learner"}
        document["spec"]["regions"] = [
            {"name": cluster, "cluster": cluster, "learners": learners}
            for cluster, learners in regions.items()
        ]
        return document

    def trust(self, document: dict[str, Any]) -> Path:
        """An authority of the job's own, and its Secrets in the clusters, by `diloco certs`."""
        name = document["metadata"]["name"]
        program = str(Path(sys.executable).with_name("diloco"))
        pki, path = self.folder / f"pki-{name}", self.folder / f"{name}.json"
        path.write_text(json.dumps(document))
        run(program, "certs", "init", "--out", str(pki))
        run(program, "certs", "issue", str(path), "--pki", str(pki), "-n", self.namespace)
        made = pki / self.namespace / name
        self.secret(HUB, made / "syncer")
        for cluster in {HUB, *(region["cluster"] for region in document["spec"]["regions"])}:
            self.secret(cluster, made / cluster)  # the hub's: the syncer compares the token
        return made

    def secret(self, cluster: str, folder: Path) -> None:
        path = str(folder / "secret.yaml")
        self.clusters[cluster].kubectl("apply", "--server-side", "-n", self.namespace, "-f", path)

    def apply(self, document: dict[str, Any]) -> Job:
        """To the hub and to each cluster of its regions, as `diloco apply --context … --context …` does."""
        self.trust(document)
        for cluster in {HUB, *(region["cluster"] for region in document["spec"]["regions"])}:
            self.clusters[cluster].apply(document, namespace=self.namespace)
        return self.job(document["metadata"]["name"])


def node_address(cluster: Cluster) -> str:
    node = cluster.items("/api/v1/nodes")[0]
    return next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")


def open_clusters(*names: str) -> dict[str, Cluster]:
    """One node each. Skips the test where the machine has no tool that makes several."""
    prefix = os.environ.get("CLUSTER_NAME", "diloco")
    found = {}
    for name in names:
        cluster = open_cluster(prefix + name.replace("-", ""), nodes=1)
        if isinstance(cluster, str):
            pytest.skip(cluster)
        if type(cluster).__name__ == "Current":
            pytest.skip("several clusters are needed: CLUSTER=localkube or kind")
        found[name] = cluster
    return found


def settle(cluster: Cluster, name: str) -> None:
    """The operator, under the cluster's name."""
    install(cluster, f"cluster.name={name}")


def soon(low: float, high: float) -> None:
    """A random moment."""
    time.sleep(random.uniform(low, high))


__all__ = [
    "EU", "HUB", "NODE_PORT", "US", "World", "node_address", "open_clusters", "settle",
    "soon", "until",
]  # fmt: skip
