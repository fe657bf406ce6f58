"""A bucket outside of all clusters, which their pods reach at this machine's address."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from s3_service import Relay, S3Service, environment

from .clusters import Cluster
from .jobs import pod_template


def node_address(cluster: Cluster, number: int = 0) -> str:
    name = cluster.nodes()[number]
    node = cluster.api(f"/api/v1/nodes/{name}") or {}
    return next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")


def machine_address(cluster: Cluster) -> str:
    """Of this machine, as the cluster reaches it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((node_address(cluster), 9))  # sends nothing: which of our addresses it would use
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def bucket(cluster: Cluster, folder: Path) -> Iterator[dict[str, Any]]:
    """A bucket, and spec.syncer's fields for it."""
    service = S3Service(folder)
    way = Relay(service.port, machine_address(cluster))
    template = pod_template("syncer", "200m")
    env = environment(way.url) | {"AWS_REGION": "us-east-1"}
    template["spec"]["containers"][0]["env"] = [{"name": k, "value": v} for k, v in env.items()]
    try:
        name = service.make_bucket("train-state")
        yield {"storage": {"uri": f"s3://{name}/job"}, "podTemplate": template}
    finally:
        way.close()
        service.stop()
