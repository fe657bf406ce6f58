"""9, before anything is installed: what a person is told. Runs first (conftest.py), on the bare cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from repository import ROOT

from .cli_shell import wait_established
from .clusters import Cluster, CommandFailed, until
from .conftest import SYSTEM, images, install
from .jobs import Job, small_job


@pytest.mark.timeout(400)
def test_a_job_before_the_operator(bare_cluster: Cluster, tmp_path: Path) -> None:
    """No CRD: `diloco apply` says what to install. The CRD alone: it says that nobody acts. Then the
    operator comes, and the waiting job trains."""
    path = tmp_path / "early.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(small_job("early", learners=1)))))
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/dilocojobs.diloco.io"
    if bare_cluster.api(crd) is None:
        with pytest.raises(CommandFailed, match=r"helm install"):
            bare_cluster.diloco("apply", str(path))
    bare_cluster.kubectl("apply", "-f", str(ROOT / "manifests" / "crd.yaml"))
    wait_established(bare_cluster)
    bare_cluster.diloco("apply", str(path))
    job = Job(bare_cluster, "early")
    assert not job.status()
    with pytest.raises(CommandFailed, match="operator"):
        bare_cluster.diloco("apply", str(path), "--wait", "--timeout", "40")
    bare_cluster.load(images())
    # The CRD is there by hand: the chart is told to take it over, as its notes say.
    install(bare_cluster, "crds.install=false")
    try:
        job.in_merges(1)
    finally:
        job.delete()
        bare_cluster.kubectl("delete", "pvc", "--all", "--ignore-not-found")
        bare_cluster.helm("uninstall", "diloco", "-n", SYSTEM, "--wait")
        bare_cluster.kubectl("delete", "crd", "dilocojobs.diloco.io")
        until("the CRD is gone", lambda: bare_cluster.api(crd) is None, 60)
