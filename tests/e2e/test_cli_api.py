"""The command line's calls to a real API server. No operator runs: what it would write is written by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .cli_shell import CRD, Shell, a_condition, install_crd, only_the_crd, write
from .clusters import Cluster, run, until
from .jobs import GROUP


@pytest.fixture(scope="module")
def shell(bare_cluster: Cluster) -> Iterator[Shell]:
    with only_the_crd(bare_cluster) as namespace:
        yield Shell(bare_cluster, namespace)


# ------------------------------------------------------------------ apply


@pytest.mark.promise(
    "`diloco apply` creates and changes a job on a real API server, changes nothing with `--dry-run`, and "
    "names each field that is refused"
)
@pytest.mark.ci
def test_apply(shell: Shell, tmp_path: Path) -> None:
    path = write(tmp_path / "job.yaml", "first")
    assert "dilocojob first created (dry run)" in shell("apply", path, "--dry-run")
    shell("status", "first", code=2)
    said = shell("apply", "-f", path)
    assert "dilocojob first created" in said
    assert "no operator has looked at first" in said and "kubectl" in said
    shell.set_status("first")
    assert shell("apply", path).strip() == "dilocojob first unchanged"
    with shell.operator():
        generation = shell.job("first")["metadata"]["generation"]
        assert "configured (dry run)" in shell("apply", path, "--set", "sync.every=40", "--dry-run")
        assert shell.job("first")["metadata"]["generation"] == generation
        shell("apply", path, "--set", "sync.every=40")
        assert shell.job("first")["spec"]["sync"]["every"] == 40
        managers = {entry["manager"] for entry in shell.job("first")["metadata"]["managedFields"]}
        assert "diloco" in managers

        said = shell("apply", path, "--set", "sync.every=0", "--set", "seed=-1", code=2)
        assert "spec.sync.every" in said and "spec.seed" in said
        said = shell("apply", path, "--set", "training.data.paths.0=books/x", "--dry-run", code=2)
        assert "relative to the job file" in said  # the warning, and then:
        assert "spec.training.data" in said and "may not change once the job has started" in said
        said = shell("apply", path, "--set", "seed=9", "--set", "sync.fragments=2", code=2)
        assert "spec.seed" in said and "spec.sync.fragments" in said and "diloco delete first" in said
        said = shell("apply", path, code=2, reach=(*shell.reach[:-1], "nowhere"))
        assert "there is no namespace nowhere" in said and "create namespace nowhere" in said
        (tmp_path / "named.yaml").write_text(path.read_text().replace("name: first", "name: first\n  namespace: x", 1))
        assert "metadata.namespace: x, and --namespace says" in shell("apply", tmp_path / "named.yaml", code=2)


def test_apply_beside_kubectl(shell: Shell, tmp_path: Path) -> None:
    """What others have set is not changed without a word; what this program itself has set is."""
    with shell.operator():
        path = write(tmp_path / "job.yaml", "shared")
        shell.cluster.kubectl("apply", "-n", shell.namespace, "-f", str(path))
        shell.set_status("shared")
        assert "unchanged" in shell("apply", path)
        said = shell("apply", path, "--set", "sync.every=40", code=2)
        assert "spec.sync.every of shared is set by kubectl" in said and "--force-conflicts" in said
        assert "configured" in shell("apply", path, "--set", "sync.every=40", "--force-conflicts")
        shell("scale", "shared", "local=5")
        shell("suspend", "shared")
        said = shell("apply", path, "--set", "sync.every=40", "--set", "suspend=false")
        assert "set back to the file" in said and "configured" in said
        spec = shell.job("shared")["spec"]
        assert spec["regions"][0]["learners"] == 3 and spec["suspend"] is False


def test_apply_and_wait(shell: Shell, tmp_path: Path) -> None:
    path = write(tmp_path / "job.yaml", "waited")
    said = shell("apply", path, "--wait", "--timeout", "12", code=1)
    assert "has not ended within 12 s" in said and "no operator has looked at waited" in said
    shell.set_status("waited")
    waiting = shell.start("apply", path, "--wait")
    assert waiting.stdout is not None and waiting.stderr is not None
    line = next(text for text in waiting.stdout if "Running" in text)
    assert "3,000 of" in line and "learners 2/3" in line
    shell.set_status("waited", phase="Complete", conditions=[a_condition("Complete", "all tokens trained")])
    rest, error = waiting.communicate(timeout=20)
    assert waiting.returncode == 0 and "Complete: all tokens trained" in rest and "waited is complete" in rest, error
    shell.set_status("waited", phase="Failed", conditions=[a_condition("Failed", "50 replaced in vain")])
    assert "waited has failed: 50 replaced in vain" in shell("apply", path, "--wait", code=1)

    shell.set_status("waited")
    interrupted = shell.start("apply", path, "--wait")
    assert interrupted.stdout is not None
    next(text for text in interrupted.stdout if "Running" in text)
    interrupted.send_signal(signal.SIGINT)
    out, error = interrupted.communicate(timeout=20)
    assert interrupted.returncode == 130 and "left running: diloco status waited" in out, out + error
    assert shell.job("waited")["metadata"].get("deletionTimestamp") is None


# ------------------------------------------------------------------ changes


def test_scale_suspend_resume(shell: Shell, tmp_path: Path) -> None:
    regions = [{"name": name, "learners": 2} for name in ("a", "b", "c", "d")]
    shell.create(write(tmp_path / "job.yaml", "sized", regions=regions, sync={"quorum": 5}))
    said = shell("scale", "sized", "b=3")
    assert "sized scaled: b 2 → 3" in said and "offer their work" not in said
    said = shell("scale", "sized", "b=1", "a=3")
    assert "a 2 → 3, b 3 → 1; learners that leave offer their work first" in said
    assert "sized has 1 in b already" in shell("scale", "sized", "b=1")
    said = shell("scale", "sized", "a=1", "d=1", "c=1", code=2)
    assert "leave sized with 4 learners, and its quorum (K) is 5" in said
    assert "needs one learner at least" in shell("scale", "sized", "a=0", code=2)
    assert "did you mean" in shell("scale", "sized", "aa=1", code=2)

    # Each changes its own region, all at once: nobody's change is lost.
    at_once = [shell.start("scale", "sized", f"{name}={n}") for n, name in enumerate("abcd", 5)]
    for process in at_once:
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, out + error
    found = {row["name"]: row["learners"] for row in shell.job("sized")["spec"]["regions"]}
    assert found == {"a": 5, "b": 6, "c": 7, "d": 8}

    assert "is being suspended" in shell("suspend", "sized")
    assert shell.job("sized")["spec"]["suspend"] is True
    assert "suspended already" in shell("suspend", "sized")
    said = shell("suspend", "sized", "--wait", "--timeout", "2s", code=1)
    assert "not suspended after 2 s" in said and "no operator" in said
    shell.set_status("sized", phase="Suspended")
    assert "sized is suspended" in shell("suspend", "sized", "--wait")
    assert "continues from its checkpoint" in shell("resume", "sized")
    assert shell.job("sized")["spec"]["suspend"] is False
    shell.set_status("sized")
    assert "sized is running" in shell("resume", "sized", "--wait")


@pytest.mark.promise("`diloco delete` names what the deletion waits for and what stays, with commands that work")
def test_delete(shell: Shell, tmp_path: Path) -> None:
    path = write(tmp_path / "job.yaml", "doomed", syncer={"storage": {"size": "1Mi"}})
    shell.create(path)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "doomed-syncer"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }
    shell.cluster.apply(claim, namespace=shell.namespace)
    hold = '{"metadata":{"finalizers":["diloco.io/job"]}}'
    shell.cluster.kubectl("patch", "dj", "doomed", "-n", shell.namespace, "--type=merge", "-p", hold)
    said = shell("delete", "doomed", "--timeout", "2", code=1)
    assert "not gone after 2 s" in said and "diloco.io/job" in said
    (let_go,) = re.findall(r"remove its finalizer by hand: (kubectl .*})'", said)
    assert "being deleted" in shell("status", "doomed")
    waiting = shell.start("delete", "doomed")
    assert waiting.stdout is not None and "is being deleted" in waiting.stdout.readline()
    run("sh", "-c", let_go + "'")
    out, error = waiting.communicate(timeout=30)
    assert waiting.returncode == 0 and "doomed is deleted" in out, out + error
    remove = re.findall(r"to remove them: (kubectl .* delete pvc doomed-syncer)", out)
    assert len(remove) == 1, out
    run("sh", "-c", remove[0])
    shell.create(path)
    assert "stays" not in shell("delete", "doomed", "--no-wait")
    assert "there is no job doomed" in shell("delete", "doomed", code=2)


# ------------------------------------------------------------------ what a person sees


@pytest.mark.promise("`diloco status` of a job whose syncer has no pod shows what the cluster knows of it")
def test_status_without_a_syncer(shell: Shell, tmp_path: Path) -> None:
    shell.create(write(tmp_path / "job.yaml", "seen"))
    assert "no operator has looked at it yet" in shell("status", "seen")
    shell.set_status("seen")
    said = shell("status", "seen")
    for words in (
        "Running",
        "3,000 of",
        "2.415",
        "local-2: no image",
        "not Ready (LearnersMissing)",
        "2 of 3 are in",
        "has no syncer's pod here",
    ):
        assert words in said, said
    document = json.loads(shell("status", "seen", "--json"))
    assert document["running"] is False and document["job"] == "seen"
    assert document["resource"]["status"]["learners"] == "2/3"
    assert re.search(r"seen +Running +2/3 +2/1 +120 +3,000 +- +2.415", shell("status"))
    everywhere = shell("status", "-A", reach=shell.reach[:-2])
    assert re.search(rf"{shell.namespace} +seen +Running", everywhere)
    assert "did you mean seen?" in shell("status", "sen", code=2)
    assert "Running" in shell("status", "seen", "--json")
    # An event of the job, as an operator tells it.
    shell.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "seen.1", "namespace": shell.namespace},
            "involvedObject": {
                "apiVersion": "diloco.io/v1alpha1",
                "kind": "DiLoCoJob",
                "name": "seen",
                "namespace": shell.namespace,
            },
            "type": "Warning",
            "reason": "LearnerGone",
            "message": "local-2 is gone: OOMKilled",
            "firstTimestamp": "2026-01-01T00:00:00Z",
            "lastTimestamp": "2026-01-01T00:00:00Z",
            "count": 3,
        },
        namespace=shell.namespace,
    )
    assert "LearnerGone: local-2 is gone: OOMKilled (3 times)" in shell("status", "seen")
    shell.set_status("seen", phase="Complete", conditions=[a_condition("Complete", "done")])
    assert "Complete" in shell("status", "seen", "--watch")  # ends with the job


# ------------------------------------------------------------------ clusters


def test_several_contexts(shell: Shell, tmp_path: Path) -> None:
    """Two contexts of one cluster, two namespaces, stand for two clusters."""
    config = yaml.safe_load(shell.cluster.kubeconfig.read_text())
    entry = next(c for c in config["contexts"] if c["name"] == shell.cluster.context)["context"]
    other = f"{shell.namespace}-far"
    config["contexts"] = [
        {"name": "hub", "context": {**entry, "namespace": shell.namespace}},
        {"name": "far", "context": {**entry, "namespace": other}},
    ]
    config["current-context"] = "hub"
    two = tmp_path / "two"
    two.write_text(yaml.safe_dump(config))
    reach = ("--kubeconfig", str(two), "--context", "hub", "--context", "far")
    path = write(tmp_path / "job.yaml", "both")
    with shell.operator():
        said = shell("apply", path, reach=reach, code=2)  # one of them cannot: the other has it
    assert "both created (context hub)" in said and f"there is no namespace {other}" in said
    assert "names no clusters" in said
    shell.cluster.kubectl("create", "namespace", other)
    try:
        with shell.operator():
            said = shell("apply", path, reach=reach)
        assert "both unchanged (context hub)" in said and "both created (context far)" in said
        assert "local 3 → 4 (context far)" in shell("scale", "both", "local=4", reach=reach)
        shell("suspend", "both", reach=reach)
        found = [shell.cluster.api(f"{GROUP}/namespaces/{ns}/dilocojobs/both") for ns in (shell.namespace, other)]
        assert [job and job["spec"]["suspend"] for job in found] == [True, True]
        rows = [line.split()[:2] for line in shell("status", reach=reach).splitlines()]
        assert ["hub", "both"] in rows and ["far", "both"] in rows
        assert "this takes one --context" in shell("logs", "both", reach=reach, code=2)
        said = shell("delete", "both", reach=reach)
        assert "both (context hub) is deleted" in said and "both (context far) is deleted" in said
    finally:
        shell.cluster.kubectl("delete", "namespace", other, "--wait=false")
    said = shell("status", reach=("--kubeconfig", str(two), "--context", "hob"), code=2)
    assert "did you mean hub? There are 2: far, hub" in said


@pytest.mark.timeout(180)
def test_the_api_server_is_away(shell: Shell, tmp_path: Path) -> None:
    if "api" not in shell.cluster.can:
        pytest.skip("this cluster's API server cannot be stopped")
    path = write(tmp_path / "job.yaml", "patient")
    shell.create(path)
    shell.set_status("patient")
    waiting = shell.start("apply", path, "--wait")
    assert waiting.stdout is not None
    next(line for line in waiting.stdout if "Running" in line)
    shell.cluster.fault("stop-api")
    try:
        next(line for line in waiting.stdout if "asking again" in line)
        begin = time.monotonic()
        assert "is it running" in shell("status", "patient", code=1)
        assert time.monotonic() - begin < 15
    finally:
        shell.cluster.fault("start-api")
    until("it answers", lambda: shell.cluster.api("/version"), 60)
    until(
        "the status is written",
        lambda: shell.set_status("patient", phase="Complete", conditions=[a_condition("Complete", "x")]) or True,
        30,
    )
    out, error = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and "patient is complete" in out, out + error


def test_the_operator_is_not_installed(shell: Shell, tmp_path: Path) -> None:
    """Last: it takes the CRD away, with all jobs."""
    if os.environ.get("CLUSTER") == "current":
        pytest.skip("the CRD of a cluster that is not the tests' own is left")
    before = shell.cluster.api(CRD)
    assert before is not None
    shell.cluster.kubectl("delete", "crd", "dilocojobs.diloco.io")
    try:
        for words in (
            ("apply", str(write(tmp_path / "j.yaml", "early"))),
            ("status",),
            ("status", "early"),
            ("suspend", "early"),
            ("delete", "early"),
            ("logs", "early"),
        ):
            said = until(
                "the API server has forgotten them",
                lambda words=words: (s := shell(*words, code=1)) and "helm install" in s and s,
                30,
            )
            assert "the operator is not installed" in said
    finally:  # with the marks of who installed it, or Helm would not own it any more
        marks = {key: before["metadata"][key] for key in ("labels", "annotations") if key in before["metadata"]}
        install_crd(shell.cluster, marks)
