"""What the command line does with pods: logs, port-forward, and what comes through one. Small pods stand
where a job's would be; no operator runs.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from status_documents import slot_row, status_document

from .cli_shell import REPORT, Shell, a_condition, only_the_crd, write
from .clusters import Cluster, LocalKube, localkube, run, until
from .jobs import small_job

IMAGE = "python:3.11-slim-bookworm"

SYNCER = """
import http.server, json, os, sys, threading, time

def log(level, message):
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    line = {"time": stamp, "level": level, "job": "tiny", "slot": -1, "message": message}
    print(json.dumps(line), flush=True)

class Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path.startswith("/zeros/"):
            size = int(self.path.rpartition("/")[2])
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            block = bytes(1 << 20)
            while size:
                size -= self.wfile.write(block[:size])
            return
        body = open("/pages" + self.path, "rb").read()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Diloco-Checksum", open("/pages/checksum").read())
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, form, *arguments):
        log("info", form % arguments)

http.server.ThreadingHTTPServer.daemon_threads = True
for address in (("0.0.0.0", 7702), ("127.0.0.1", 7703)):
    server = http.server.ThreadingHTTPServer(address, Pages)
    threading.Thread(target=server.serve_forever).start()
log("warning", "serving")
"""
LEARNER = """
import os, time
step = 0
while True:
    print('{"level": "info", "slot": %s, "message": "step %d"}' % (os.environ["N"], step), flush=True)
    step, _ = step + 1, time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def shell(bare_cluster: Cluster) -> Iterator[Shell]:
    with only_the_crd(bare_cluster) as namespace:
        yield Shell(bare_cluster, namespace)


def a_pod(name: str, role: str, code: str, region: str = "", **env: str) -> dict[str, Any]:
    labels = {"diloco.io/job": "tiny", "diloco.io/role": role, **({"diloco.io/region": region} if region else {})}
    container = {
        "name": role,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", code],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "volumeMounts": [{"name": "pages", "mountPath": "/pages"}],
        # Without a request a pod has the smallest weight that there is: beside busy programs it hardly starts.
        "resources": {"requests": {"cpu": "250m"}},
    }
    volumes = [{"name": "pages", "configMap": {"name": "pages", "optional": True}}]
    spec = {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


@pytest.fixture(scope="module")
def model() -> tuple[Any, dict[str, Any], bytes, str]:
    """A small job, its parameters, and the file and the layout that a syncer serves of them."""
    import safetensors.numpy

    from diloco_protocol.spec.load import parse_job
    from diloco_worker.fragments import build_layout
    from diloco_worker.training.models import build

    job = parse_job(json.dumps(small_job("tiny")))
    built = build(job.spec, 0)
    tensors = {name: tensor.detach().numpy() for name, tensor in built.named_parameters()}
    layout = build_layout(built, job.spec.sync.fragments)
    metadata = {"job": "tiny", "versions": "[3, 2, 2, 2]"}
    return job, tensors, safetensors.numpy.save(tensors, metadata), layout.to_json()


@pytest.fixture(scope="module")
def pods(shell: Shell, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A job with a syncer's pod and two learners'."""
    import xxhash

    from diloco_protocol.spec.load import job_to_json

    if isinstance(shell.cluster, LocalKube):
        run(str(localkube()), "base-image", timeout=600)
        shell.cluster.load([IMAGE])
    job, _, file, layout = model
    page = status_document(
        job="tiny",
        phase="training",
        quorum={"active": 2, "required": 1},
        slots=[slot_row(region="local", ordinal=1, state="active", step=777)],
        step=777,
        tokens=REPORT.tokens,
        versions=[3, 2],
    )
    texts = {
        "status": page.model_dump_json(),
        "report": REPORT.model_dump_json(),
        "job.json": job_to_json(job),
        "layout.json": layout,
        "checksum": f"xxh3-64={xxhash.xxh3_64_intdigest(file):016x}",
    }
    pages = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "pages"},
        "data": texts,
        "binaryData": {"model.safetensors": base64.b64encode(file).decode()},
    }
    shell.cluster.kubectl("create", "-n", shell.namespace, "-f", "-", stdin=json.dumps(pages))
    shell.create(write(tmp_path_factory.mktemp("pods") / "job.yaml", "tiny"))
    shell.set_status("tiny")
    here = ("-l", "diloco.io/job=tiny", "-n", shell.namespace)
    shell.cluster.apply(
        a_pod("tiny-syncer-0", "syncer", SYNCER),
        *(a_pod(f"tiny-local-{n}", "learner", LEARNER, "local", N=str(n)) for n in (0, 1)),
        namespace=shell.namespace,
    )
    shell.cluster.kubectl("wait", "--for=condition=Ready", "pod", *here, "--timeout=90s", timeout=100)
    ready = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7703/status')"
    serves = ("exec", "tiny-syncer-0", "-n", shell.namespace, "--", "python", "-c", ready)
    until("the syncer's pod serves", lambda: shell.cluster.kubectl(*serves) is not None, 30)
    return shell


@pytest.mark.promise("`diloco logs` prints the lines of a job's pods from the first on, merged by time")
def test_logs(pods: Shell) -> None:
    def first_lines() -> bool:
        said = pods("logs", "tiny")
        if "serving" in said and said.count("step 0\n") == 2:
            return True
        raise ValueError(f"the logs begin with {said[:1000]!r}")

    until("all logs are read from their first lines", first_lines, 90)
    said = pods("logs", "tiny", "--tail", "3").splitlines()
    assert {line.split()[0] for line in said} == {"syncer", "local-0", "local-1"}
    assert any(re.match(r"local-1 +INFO +slot 1  step \d+$", line) for line in said), said
    assert any(re.match(r"syncer +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,000 WARNING serving", line) for line in said), said

    def changes() -> int:
        whose = [line.split()[0] for line in pods("logs", "tiny", "local", "--since", "10s").splitlines()]
        return sum(a != b for a, b in itertools.pairwise(whose))

    # Merged by time: the two learners count alike, so neither's lines come in one block. A busy node runs one of them
    # for seconds, or stamps lines of one together.
    until("the learners' lines change places", lambda: changes() > 4, 90)
    (line,) = pods("logs", "tiny", "learner-1", "--tail", "1").splitlines()
    assert re.match(r"INFO +slot 1  step \d+$", line)
    (raw,) = pods("logs", "tiny", "local-1", "--tail", "1", "--raw").splitlines()
    assert json.loads(raw)["message"].startswith("step")
    assert "no log of an earlier container" in pods("logs", "tiny", "local-1", "--previous", code=1)
    assert "local-2 has no pod now" in pods("logs", "tiny", "local-2", code=1)
    assert "did you mean local-1?" in pods("logs", "tiny", "locl-1", code=2)
    assert "there is no job tin " in pods("logs", "tin", code=2)


def test_logs_are_followed_into_the_next_pod(pods: Shell) -> None:
    following = pods.start("logs", "tiny", "local-0", "-f", "--tail", "1")
    assert following.stdout is not None
    steps: list[int] = []

    def read() -> None:
        assert following.stdout is not None
        for line in following.stdout:
            if found := re.search(r"step (\d+)$", line.strip()):
                steps.append(int(found[1]))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    until("lines come", lambda: len(steps) > 5, 20)
    pods.cluster.kubectl("delete", "pod", "tiny-local-0", "-n", pods.namespace)
    pods.cluster.apply(a_pod("tiny-local-0", "learner", LEARNER, "local", N="0"), namespace=pods.namespace)
    until("the new pod's lines come", lambda: 0 in steps and 3 in steps[steps.index(0) :], 40)
    following.send_signal(signal.SIGINT)
    thread.join(20)
    assert following.wait(20) == 130
    # The old container may still write while the new one does; each one's lines come once, in order.
    old, new = steps[0], 0
    for step in steps:
        assert step in (old, new), f"a line twice or missing: {step} of {steps}"
        old, new = (old + 1, new) if step == old else (old, new + 1)


@pytest.mark.promise("`diloco status` of a job in a cluster shows its syncer's page, through a port-forward")
def test_status_with_the_syncers_page(pods: Shell) -> None:
    # The command gives the page some seconds, and prints what it has without it.
    def status() -> bool:
        said = pods("status", "tiny")
        words = ("training", "local-1", "777", "1,234 of", "2 active, 1 needed", "not Ready (LearnersMissing)")
        if all(each in said for each in words):
            return True
        raise ValueError(f"it says {said}")

    until("the status has the syncer's page", status, 60)
    document = until("as JSON too", lambda: (d := json.loads(pods("status", "tiny", "--json")))["slots"] and d, 60)
    assert document["running"] is True and document["slots"][0]["step"] == 777
    assert document["resource"]["metadata"]["name"] == "tiny"


@pytest.mark.promise("`diloco report` of a job in a cluster is its syncer's report, and says whether the job continues")
def test_report(pods: Shell) -> None:
    assert "the job continues" in pods("report", "tiny"), "it does, whatever outcome the syncer's page names"
    pods.set_status("tiny", phase="Complete", conditions=[a_condition("Complete", "all tokens trained")])
    try:
        said = pods("report", "tiny")
        assert "complete" in said and "the job continues" not in said
    finally:
        pods.set_status("tiny")
    written = json.loads(pods("report", "tiny", "--json"))
    assert [row["merged"] for row in written["ledger"]] == [1]
    for key, value in pods.job("tiny")["status"]["report"].items():
        assert written[key] == value


@pytest.mark.promise("`diloco export` of a job in a cluster writes its tensors to the bit")
def test_export(pods: Shell, model: Any, tmp_path: Path) -> None:
    import numpy as np
    import safetensors.numpy

    _, tensors, _, _ = model
    out = tmp_path / "model"
    assert "fragments at versions 2 to 3" in pods("export", "tiny", out, timeout=120)
    written = safetensors.numpy.load_file(out / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensors[name]) for name in tensors)
    assert "exists already" in pods("export", "tiny", out, code=2)


def test_a_port_forward_bears_a_slow_reader_and_much_data(pods: Shell) -> None:
    """300 MB, whole, in little memory, though the reader stops for a while."""
    program = """
import http.client, resource, sys, time
from pathlib import Path
from diloco.cluster.client import open_cluster
from diloco.cluster.port_forward import forwarded
cluster = open_cluster(sys.argv[2], sys.argv[3], Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with forwarded(cluster, "tiny-syncer-0", 7703) as forward:
    connection = http.client.HTTPConnection(forward.address, timeout=60)
    connection.request("GET", "/zeros/300000000")
    answer, got = connection.getresponse(), 0
    time.sleep(2)
    while block := answer.read(1 << 20):
        got += len(block)
    connection.close()
print(got, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    cluster = pods.cluster
    words = (str(cluster.kubeconfig), cluster.context, pods.namespace)
    got, grown = map(int, run(sys.executable, "-c", program, *words, timeout=100).split())
    print(f"300 MB through a port-forward: {grown} MiB more memory at most")
    assert got == 300_000_000
    assert grown < 64


def test_a_port_forward_that_fails_says_why(pods: Shell) -> None:
    from diloco.cluster.client import ClusterError, open_cluster
    from diloco.cluster.port_forward import forwarded

    cluster = open_cluster(pods.cluster.context, pods.namespace, pods.cluster.kubeconfig)
    with forwarded(cluster, "tiny-syncer-0", 9) as forward:
        connection = http.client.HTTPConnection(forward.address, timeout=20)
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.request("GET", "/")
            connection.getresponse()
        until("it says why", lambda: forward.problem, 5, every=0.05)
        assert forward.problem == "nothing listens on port 9 in the pod tiny-syncer-0 (yet)"
    with pytest.raises(ClusterError, match='pods "none" not found'), forwarded(cluster, "none", 9):
        pass
    pods.cluster.apply(a_pod("tiny-brief", "other", SYNCER), namespace=pods.namespace)
    pods.cluster.kubectl("wait", "--for=condition=Ready", "pod/tiny-brief", "-n", pods.namespace, "--timeout=60s")

    def begun() -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(forward.address, timeout=30)
        try:
            connection.request("GET", "/zeros/100000000000")
            return connection.getresponse()
        except http.client.HTTPException as error:  # it does not listen yet
            raise OSError(str(error)) from error

    with forwarded(cluster, "tiny-brief", 7703) as forward:
        answer = until("it serves", begun, 30)
        assert answer.read(1 << 20)
        pods.cluster.kubectl("delete", "pod", "tiny-brief", "-n", pods.namespace, "--wait=false")
        end = time.monotonic() + 60
        with pytest.raises((http.client.IncompleteRead, OSError)):
            while time.monotonic() < end:
                if len(answer.read(1 << 20)) < 1 << 20:
                    raise http.client.IncompleteRead(b"")
        assert time.monotonic() < end, "the reader was not told that the pod is gone"


def test_who_may_not(pods: Shell, tmp_path: Path) -> None:
    """An account that may read jobs and pods and nothing else is told what it lacks."""
    ns = pods.namespace
    kubectl = pods.cluster.kubectl
    kubectl("create", "serviceaccount", "weak", "-n", ns)
    kubectl("create", "role", "weak", "-n", ns, "--verb=get,list", "--resource=dilocojobs.diloco.io,pods")
    kubectl("create", "rolebinding", "weak", "-n", ns, "--role=weak", f"--serviceaccount={ns}:weak")
    config = yaml.safe_load(pods.cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": kubectl("create", "token", "weak", "-n", ns).strip()}
    weak = tmp_path / "weak"
    weak.write_text(yaml.safe_dump(config))
    reach = ("--kubeconfig", str(weak), *pods.reach[2:])
    said = pods("status", "tiny", reach=reach)
    assert "Running" in said and "2 of 3 are in" in said  # from the job's status
    assert "may not get and create pods/portforward" in said
    for words, lacks in (
        (("suspend", "tiny"), "patch dilocojobs.diloco.io"),
        (("scale", "tiny", "local=4"), "patch dilocojobs.diloco.io"),
        (("delete", "tiny"), "delete dilocojobs.diloco.io"),
        (("logs", "tiny"), "get pods/log"),
        (("export", "tiny", str(tmp_path / "model")), "get and create pods/portforward"),
        (("apply", str(write(tmp_path / "j.yaml", "tiny"))), "patch dilocojobs.diloco.io"),
    ):
        assert f"this account may not {lacks}" in pods(*words, code=1, reach=reach)
    assert "ask for a ClusterRole" in pods("status", "-A", code=1, reach=reach[:-2])
    for user in config["users"]:
        user["user"] = {"token": "nonsense"}
    weak.write_text(yaml.safe_dump(config))
    assert "log in again" in pods("status", "tiny", code=2, reach=reach)


def test_chaos_deletes_learners_pods(pods: Shell, tmp_path: Path) -> None:
    """Last: no operator is there that would make the pod again."""
    file = write(tmp_path / "j.yaml", "tiny")
    refused = pods("chaos", file, "--chaos", "1s:pause:learner-1:3s", "--minutes", "0.05", code=2)
    assert "in a cluster pods are deleted" in refused
    path = f"/api/v1/namespaces/{pods.namespace}/pods/tiny-local-1"
    assert pods.cluster.api(path) is not None
    said = pods("chaos", file, "--chaos", "1s:kill:learner-1", "--minutes", "0.1")
    assert "deleted tiny-local-1 (1s:kill:learner-1)" in said and "tiny continues" in said
    assert pods.cluster.api(path) is None, "without a grace period it is gone at once"
    assert "was never carried out" in pods("chaos", file, "--chaos", "1s:kill:learner-1", "--minutes", "0.05", code=1)
