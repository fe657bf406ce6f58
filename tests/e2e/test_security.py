"""10. What a job's pods, a join token and the operator's own account cannot do."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from .clusters import Cluster, CommandFailed, until
from .conftest import SYSTEM
from .jobs import Job

ACCOUNT = f"system:serviceaccount:{SYSTEM}:diloco-operator"

CALL = """
import sys, time, grpc
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.control_auth import sign_call
address, keys = sys.argv[1], [bytes.fromhex(k) if k else b"" for k in sys.argv[2:]]
with grpc.insecure_channel(address) as channel:
    try:
        grpc.channel_ready_future(channel).result(timeout=5)
    except grpc.FutureTimeoutError:
        print("unreachable")
        sys.exit()
    call_syncer = channel.unary_unary(
        limits.CONTROL_PATH, sync_pb2.SignedCall.SerializeToString, sync_pb2.CallReply.FromString
    )
    for key in keys:
        try:
            reply = call_syncer(sign_call(key, "status", b"{}"), timeout=5)
            print("ok" if reply.ok else "failed")
        except grpc.RpcError as error:
            print(error.code().name)
"""

ANONYMOUS = """
import ssl, urllib.request, urllib.error
trusting = ssl._create_unverified_context()
for path in ("/api/v1/secrets", "/api/v1/namespaces/default/pods", "/apis/diloco.io/v1alpha1/dilocojobs"):
    try:
        address = "https://kubernetes.default.svc" + path
        print(urllib.request.urlopen(address, context=trusting, timeout=5).status)
    except urllib.error.HTTPError as error:
        print(error.code)
    except OSError:
        print("unreachable")
"""

REPLAY = """
import sys, grpc
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.control_auth import sign_call, read_key
key = read_key("/etc/diloco/control/control-key")
with grpc.insecure_channel("127.0.0.1:7701") as channel:
    call_syncer = channel.unary_unary(
        limits.CONTROL_PATH, sync_pb2.SignedCall.SerializeToString, sync_pb2.CallReply.FromString
    )
    def say(call):
        try:
            print("ok" if call_syncer(call, timeout=5).ok else "failed")
        except grpc.RpcError as error:
            print(error.code().name)
    call = sign_call(key, "status", b"{}")
    say(call)
    say(call)                                  # replayed
    call = sign_call(key, "status", b"{}")
    call.method = "announce"
    say(call)                                  # altered
    call = sign_call(key, "announce", b'{"phase": "suspended", "message": ""}')
    call.body = b'{"phase": "deleted", "message": ""}'
    say(call)
    say(sign_call(key, "status", b"{}", time_ms=1))    # long ago
"""


def inside(job: Job, pod: str, program: str, *words: str) -> list[str]:
    """The program's output lines, run by Python in that pod."""
    return job.cluster.kubectl("exec", "-n", job.namespace, pod, "--", "python", "-c", program, *words).split()


@pytest.mark.timeout(300)
def test_pods_and_tokens(start: Any) -> None:
    job: Job = start("guarded", learners=1)
    job.in_merges(1)
    learner, syncer = job.pods("learner")[0], job.syncer_pod()
    for pod in (learner, syncer):
        name = pod["metadata"]["name"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        files = job.cluster.kubectl(
            "exec",
            "-n",
            job.namespace,
            name,
            "--",
            "sh",
            "-c",
            "ls /var/run/secrets/kubernetes.io/serviceaccount 2>/dev/null; touch /writable 2>&1; id -u",
        )
        assert "token" not in files and files.split()[-1] != "0"
        assert "Read-only" in files or "Permission denied" in files
        # Without a token the API server lets nobody see anything.
        asked = inside(job, name, ANONYMOUS)
        assert len(asked) == 3 and set(asked) <= {"401", "403", "unreachable"}, asked
    # The control port believes neither the join token nor an empty or made-up key.
    token = inside(
        job, learner["metadata"]["name"], "print(open('/etc/diloco/credentials/join-token', 'rb').read().strip().hex())"
    )[0]
    address = f"{syncer['status']['podIP']}:7701"
    digits = bytes.fromhex(token).decode()  # the token's own digits, read as a key
    said = inside(job, learner["metadata"]["name"], CALL, address, token, digits, "00" * 32, "")
    # Where the cluster enforces NetworkPolicies nobody even answers; that the port is served is seen below.
    assert said in (["PERMISSION_DENIED"] * 4, ["unreachable"]), said
    # The learner's pod does not have the control key at all.
    with pytest.raises(CommandFailed):
        job.cluster.kubectl("exec", "-n", job.namespace, learner["metadata"]["name"], "--", "ls", "/etc/diloco/control")
    said = inside(job, syncer["metadata"]["name"], REPLAY)
    assert said == ["ok", *["PERMISSION_DENIED"] * 4], said
    job.merging_on()
    policies = job.cluster.items(f"/apis/networking.k8s.io/v1/namespaces/{job.namespace}/networkpolicies")
    syncers = next(p for p in policies if p["metadata"]["name"] == "guarded-syncer")
    control = [r for r in syncers["spec"]["ingress"] if any(p.get("port") in (7701, "control") for p in r["ports"])]
    assert len(control) == 1
    source = json.dumps(control[0]["from"])
    assert SYSTEM in source, source


@pytest.mark.timeout(200)
def test_the_operators_account_reads_no_secret(cluster: Cluster, start: Any) -> None:
    job: Job = start("secretive", learners=1)
    until("its secrets are made", lambda: len(secrets(job)) >= 2, 60)
    for verb in ("get", "list", "watch", "update", "patch", "delete"):
        said = cluster.kubectl("auth", "can-i", verb, "secrets", "-n", job.namespace, f"--as={ACCOUNT}", check=False)
        assert said.strip() == "no", (verb, said)
    assert cluster.kubectl("auth", "can-i", "create", "secrets", f"--as={ACCOUNT}").strip() == "yes"
    name = secrets(job)[0]["metadata"]["name"]
    # By hand: reading, and the ways around that answer with the content.
    for words in (
        ("get", "secret", name, "-o", "yaml"),
        ("get", "secrets", "-o", "yaml"),
        ("label", "secret", name, "a=b", "-o", "yaml"),
        ("patch", "secret", name, "--type=merge", "-p", "{}", "-o", "yaml"),
        ("annotate", "secret", name, "a=b", "-o", "yaml"),
    ):
        with pytest.raises(CommandFailed, match="orbidden"):
            cluster.kubectl(*words, "-n", job.namespace, f"--as={ACCOUNT}")
    with pytest.raises(CommandFailed, match="orbidden"):  # nor a pod that would mount it
        cluster.kubectl("run", "spy", "--image=none", "-n", job.namespace, f"--as={ACCOUNT}")
    # And nothing secret is in what people read.
    values = [
        base64.b64decode(v).decode(errors="replace").strip()
        for s in secrets(job)
        for k, v in s["data"].items()
        if k in ("join-token", "control-key")
    ]
    assert len(values) >= 3
    job.in_merges(1)
    shown = cluster.kubectl("get", "dj,pods,cm,sts,deploy,events", "-n", job.namespace, "-o", "yaml")
    shown += cluster.logs("-n", SYSTEM, "-l", "app.kubernetes.io/name=diloco-operator", "--tail=-1")
    for pod in job.pods():
        shown += cluster.logs(pod["metadata"]["name"], "-n", job.namespace)
    assert not [v for v in values if v in shown]


def secrets(job: Job) -> list[dict[str, Any]]:
    return job.cluster.items(f"/api/v1/namespaces/{job.namespace}/secrets", f"diloco.io/job={job.name}")
