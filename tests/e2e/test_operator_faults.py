"""The operator's I/O shell on a real API server: faults of jobs, of rights, of the API server, and pods.

The operator runs in this process, outside of the cluster, with a plan of the test's own (operator_shell.py).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_operator.informer import reflector
from diloco_operator.kube import permissions
from diloco_operator.model import Call, Delete, EventWanted, JobPlan, Observed, Ref
from diloco_operator.reconcile import syncer_poller
from diloco_operator.reconcile.job_secrets import RootKey
from status_documents import job_report, status_document

from .clusters import Cluster, until
from .operator_shell import (
    CRD,
    NS,
    Running,
    Syncer,
    Wants,
    account,
    apply_errors,
    children,
    config_map,
    get,
    job,
    named,
    pod,
    quiet,
    secret,
    settled,
    stateful_set,
    status,
    wants_secret,
)

pytestmark = pytest.mark.timeout(300)

# ------------------------------------------------------------------ faults of jobs and of clusters


def test_a_fault_in_a_template_leaves_what_runs_and_names_the_field(
    kube: Cluster, operate: Callable[..., Running]
) -> None:
    wants = Wants()
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("faulty"))
        settled(kube, "faulty")
        path, ref = named("statefulsets", "faulty-local"), Ref("StatefulSet", "faulty-local")
        before = get(kube, path)
        for field, value in (("restartPolicy", "Sometimes"), ("noSuchField", 1), ("hostNetwork", "yes")):

            def plan(observed: Observed, spec: dict[str, Any] = {field: value}) -> JobPlan:  # noqa: B006
                job_ = observed.job
                apply = (config_map(job_, changed="x"), stateful_set(job_, generation=2, **spec))
                return JobPlan(True, apply=apply, status=status(observed))

            wants.plan = plan

            def named_field(field: str = field) -> str:
                reason, message = apply_errors(wants.observed[NS, "faulty"])[ref]
                return reason if field in message else ""

            assert until("said", named_field, 15) == "invalid"
            after = get(kube, path)
            # Its resourceVersion also changes when the controller writes the status of what was there before.
            assert after["spec"] == before["spec"]
            assert after["metadata"]["generation"] == before["metadata"]["generation"]
            assert "changed" not in get(kube, named("configmaps", "faulty-settings"))["data"]
        sent = quiet(operator, 6)
        assert sum(sent.values()) <= 1, f"the fault is tried again and again: {sent}"
        wants.plan = lambda o: JobPlan(
            True,
            apply=(config_map(o.job, changed="x"), stateful_set(o.job, generation=3, hostname="fine")),
            status=status(o),
        )
        until("mended", lambda: get(kube, path)["spec"]["template"]["spec"].get("hostname") == "fine", 15)
        until("not said any more", lambda: not wants.observed[NS, "faulty"].apply_errors, 10)


def test_a_quota_that_is_full_is_said_and_healed(kube: Cluster, operate: Callable[..., Running]) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"persistentvolumeclaims": "0"}},
    }
    kube.apply(quota)
    until("counted", lambda: get(kube, named("resourcequotas", "small"))["status"].get("used"), 20)
    wants = Wants()
    try:
        with operate(wants) as operator:
            until("ready", operator.ready, 30)
            kube.apply(job("poor"))
            ref = Ref("PersistentVolumeClaim", "poor-syncer")
            said = until("said", lambda: apply_errors(wants.observed[NS, "poor"]).get(ref), 15)
            assert said[0] == "quota" and "persistentvolumeclaims" in said[1]
            assert get(kube, named("statefulsets", "poor-local")), "the others were made"
            kube.kubectl("delete", "quota", "small")
            until("healed", lambda: get(kube, named("persistentvolumeclaims", "poor-syncer")), 15)
    finally:
        kube.kubectl("delete", "quota", "small", check=False)


def test_a_role_that_is_too_small_is_named_with_verb_and_resource_and_healed(
    kube: Cluster,
    operate: Callable[..., Running],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(permissions, "AGAIN_SECONDS", 2.0)
    monkeypatch.setattr(reflector, "WATCH_SECONDS", 5)
    lacking = {("configmaps", "patch"), ("pods", "list"), ("pods", "watch"), ("nodes", "list"), ("nodes", "watch")}
    small = account(kube, tmp_path, lacking)
    wants = Wants()
    with operate(wants, kubeconfig=small) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("humble"))
        observed = until(
            "said", lambda: (o := wants.observed.get((NS, "humble"))) and len(o.apply_errors) >= 3 and o, 20
        )
        said = [t.message for t in observed.apply_errors if t.reason == "forbidden"]
        assert any("may not patch configmaps" in m for m in said), said
        assert any("may not list, watch pods" in m for m in said), said
        assert observed.nodes is None, "nodes are optional, and not there"
        assert not any("nodes" in m for m in said)
        assert get(kube, named("statefulsets", "humble-local")), "what may be done is done"
        until(
            "in the status",
            lambda: (
                "may not patch configmaps" in json.dumps(get(kube, named("dilocojobs", "humble")).get("status", {}))
            ),
            10,
        )
        assert operator.page("/healthz")[0] == 200
        lines = [r.message for r in caplog.records]
        assert len([m for m in lines if m.startswith("forbidden: the operator may not list pods")]) >= 1
        account(kube, tmp_path, set())
        until("healed", lambda: get(kube, named("configmaps", "humble-settings")), 40)
        until("not said any more", lambda: not wants.observed[NS, "humble"].apply_errors, 40)
        until("nodes are read", lambda: wants.observed[NS, "humble"].nodes is not None, 40)
        account(kube, tmp_path, {("pods", "list"), ("pods", "watch")})  # taken away while it runs
        until("said again", lambda: apply_errors(wants.observed[NS, "humble"]).get(Ref("Pod", "")), 40)
        account(kube, tmp_path, set())
        until("healed again", lambda: not wants.observed[NS, "humble"].apply_errors, 60)


def test_a_token_that_is_refused_is_tried_with_patience(
    kube: Cluster,
    operate: Callable[..., Running],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reflector, "WATCH_SECONDS", 3)  # then every watch has to begin anew
    small = account(kube, tmp_path, set())
    with operate(kubeconfig=small) as operator:
        until("ready", operator.ready, 30)
        kube.kubectl("delete", "serviceaccount", "small")
        refused = lambda: sum(n for (_, _, code), n in operator.requests().items() if code == "401")  # noqa: E731
        until("refused", refused, 40)
        before = refused()
        time.sleep(10)
        assert refused() - before < 10 * len(operator.operator.informer.streams)  # type: ignore[union-attr]
        assert operator.page("/healthz")[0] == 200
    said = [r.message for r in caplog.records if "refuses the operator's token" in r.message]
    assert len(said) == 1


def test_the_operators_rights_are_enough_and_read_no_secret(
    kube: Cluster, operate: Callable[..., Running], tmp_path: Path
) -> None:
    """Everything that it does here is done with exactly the rights that kinds.needs lists."""
    exact = account(kube, tmp_path, set())
    wants = Wants()
    wants.plan = lambda o: JobPlan(
        True,
        secrets=(secret(o.job),),
        apply=children(o.job, replicas=1),
        status=status(o, "Running"),
        events=(EventWanted("Warning", "Look", "Something happened."),),
    )
    with operate(wants, kubeconfig=exact) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("modest"))
        found = settled(kube, "modest")
        until("the pod is seen", lambda: wants.observed[NS, "modest"].pods, 20)
        meta = wants.observed[NS, "modest"].pods[0]["metadata"]
        delete = Delete(Ref("Pod", meta["name"]), meta["uid"], "a test")
        wants.plan = lambda o: JobPlan(True, apply=children(o.job, replicas=1), deletes=(delete,), status=status(o))

        def another() -> bool:
            return bool(wants.observed[NS, "modest"].pods[0]["metadata"]["uid"] != meta["uid"])

        until("another pod", another, 30)
        until("the secret", lambda: get(kube, named("secrets", wants_secret(found))), 10)
        wants.plan = lambda o: JobPlan(True, apply=children(o.job), delete_job=True)
        until("the job is gone", lambda: get(kube, named("dilocojobs", "modest")) is None, 20)
        denied = {key: n for key, n in operator.requests().items() if key[2] == "403"}
        assert not denied
        secrets_ = {verb for verb, resource, _ in operator.requests() if resource == "secrets"}
        assert secrets_ == {"create"}
    token = yaml.safe_load(exact.read_text())["users"][0]["user"]["token"]
    for words in (
        ("get", "secret", wants_secret(found)),
        ("get", "secrets", "-A"),
        ("delete", "secret", wants_secret(found)),
    ):
        said = kube.kubectl("--token", token, "--kubeconfig", str(exact), *words, "-o", "name", check=False)
        assert said == ""


# ------------------------------------------------------------------ the API server and the CRD


def test_the_api_server_goes_and_comes_back(kube: Cluster, operate: Callable[..., Running]) -> None:
    wants = Wants()
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("away"))
        settled(kube, "away")
        lists = sum(n for (verb, _, _), n in operator.requests().items() if verb == "list")
        kube.fault("stop-api")
        try:
            for _ in range(24):
                assert operator.page("/healthz") == (200, "ok\n")
                assert operator.page("/readyz") == (200, "ok\n")
                time.sleep(0.5)
        finally:
            kube.fault("start-api")
        until("the API server answers", lambda: kube.api("/version"), 60)
        # While the watches do not look yet: nobody will tell them of this but the list that they begin with.
        kube.kubectl("delete", "cm", "away-settings")
        until("it is back", lambda: get(kube, named("configmaps", "away-settings")), 40)
        kube.kubectl("delete", "dj", "away", "--timeout=30s")
        until("forgotten", lambda: (NS, "away") not in operator.operator.cache.jobs(), 20)  # type: ignore[union-attr]
        assert sum(n for (verb, _, _), n in operator.requests().items() if verb == "list") < lists + 60


def test_an_operator_that_starts_before_its_api_server_and_its_crd(
    kube_bare: Cluster, operate: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    kube = kube_bare
    kube.kubectl("delete", "crd", "dilocojobs.diloco.io", "--timeout=60s")
    kube.fault("stop-api")
    wants = Wants()
    try:
        with operate(wants) as operator:
            time.sleep(3)
            assert operator.page("/healthz")[0] == 200
            kube.fault("start-api")
            until("it says what is missing", lambda: "install the CRD" in operator.page("/readyz")[1], 30)
            hints = [r.message for r in caplog.records if "does not know DiLoCoJobs" in r.message]
            assert "kubectl apply -f manifests/crd.yaml" in hints[0]
            kube.kubectl("apply", "--server-side", "-f", str(CRD))
            until("ready", operator.ready, 60)
            kube.apply(job("early"))
            settled(kube, "early")
            # Taken away while it runs, and given back.
            kube.kubectl("patch", "dj", "early", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
            kube.kubectl("delete", "crd", "dilocojobs.diloco.io", "--timeout=60s")
            until("it is missed", lambda: not operator.ready(), 60)
            assert operator.page("/healthz")[0] == 200
            kube.kubectl("apply", "--server-side", "-f", str(CRD))
            until("ready again", operator.ready, 60)
            kube.apply(job("late"))
            settled(kube, "late", 40)
    finally:
        kube.fault("start-api")
        kube.kubectl("apply", "--server-side", "-f", str(CRD))


# ------------------------------------------------------------------ pods


def test_the_syncer_is_asked_and_told(
    kube: Cluster, operate: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pod stands on a node without a kubelet, and says that its address is this machine's."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "nowhere"}}
    wants = Wants()
    gone = Call("process-ended", {"region": "local", "ordinal": 0, "process": "", "reason": "test"})
    wants.plan = lambda o: JobPlan(
        True, apply=children(o.job), calls=(gone,) if o.syncer else (), status=status(o), poll_syncer=1.0
    )
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(node, job("asked"))
        uid = settled(kube, "asked")["metadata"]["uid"]
        syncer = Syncer(RootKey(b"0123456789abcdef" * 4).control_key(uid))
        monkeypatch.setattr(syncer_poller, "CONTROL_PORT", syncer.port)
        try:
            assert wants.observed[NS, "asked"].syncer is None, "there is nobody to ask"
            kube.apply(
                pod("asked-syncer-x", "asked", "syncer", nodeName="nowhere", tolerations=[{"operator": "Exists"}])
            )
            running = {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "podIPs": [{"ip": "127.0.0.1"}],
                "containerStatuses": [
                    {
                        "name": "syncer",
                        "image": "x",
                        "imageID": "x",
                        "ready": True,
                        "restartCount": 0,
                        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                    }
                ],
            }
            kube.kubectl(
                "patch",
                "pod",
                "asked-syncer-x",
                "--subresource=status",
                "--type=merge",
                "-p",
                json.dumps({"status": running}),
            )
            asked = until("answered", lambda: (a := wants.observed[NS, "asked"].syncer) and a.document and a, 15)
            assert asked.document == status_document(phase="training") and asked.failing_since is None
            until("told", lambda: (gone.method, gone.body) in syncer.calls, 10)
            assert wants.observed[NS, "asked"].report is None
            syncer.phase = "complete"
            until("the report", lambda: wants.observed[NS, "asked"].report == job_report(outcome="complete"), 10)
            syncer.stop()

            def silent() -> bool:
                now = wants.observed[NS, "asked"].syncer
                return now is not None and now.document is None and now.failing_since is not None

            until("silence is noticed", silent, 15)
            assert operator.page("/healthz")[0] == 200
        finally:
            kube.kubectl("delete", "pod", "asked-syncer-x", "--force", "--grace-period=0", check=False)
            kube.kubectl("delete", "node", "nowhere", check=False)
    metrics = operator.operator.metrics  # type: ignore[union-attr]
    assert metrics.registry.get_sample_value(
        "diloco_operator_syncer_calls_total", {"method": "status", "outcome": "ok"}
    )


def test_why_a_pod_does_not_start_is_noted(kube: Cluster, operate: Callable[..., Running]) -> None:
    wants = Wants()
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("stuck"))
        settled(kube, "stuck")
        kube.apply(pod("stuck-x", "stuck", "evaluator", nodeSelector={"no": "such"}))
        cluster_events = until("noted", lambda: wants.observed[NS, "stuck"].cluster_events, 30)
        assert {n.kind for n in cluster_events} <= {"Pod", "PodDisruptionBudget"}, "of this job's objects alone"
        [note] = [n for n in cluster_events if n.kind == "Pod"]
        assert (note.name, note.reason) == ("stuck-x", "FailedScheduling")
        assert abs(note.time - time.time()) < 120
        asked = quiet(operator, 20)
        # At most every 15 s, and where there are very many, once more about the pod by name.
        assert asked.get(("list", "events", "200"), 0) <= 4


def test_only_the_object_that_was_meant_is_deleted(kube: Cluster, operate: Callable[..., Running]) -> None:
    wants = Wants()
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("aimed"), pod("aimed-x", "aimed", "evaluator", nodeSelector={"no": "such"}))
        settled(kube, "aimed")
        until("the pod is seen", lambda: wants.observed[NS, "aimed"].pods, 10)
        ref = Ref("Pod", "aimed-x")
        wrong = Delete(ref, "00000000-0000-0000-0000-000000000000", "test")
        wants.plan = lambda o: JobPlan(True, apply=children(o.job), deletes=(wrong,), status=status(o))
        until("tried", lambda: operator.requests().get(("delete", "pods", "409")), 15)
        there = get(kube, named("pods", "aimed-x"))
        assert there and "deletionTimestamp" not in there["metadata"]
        right = replace(wrong, uid=there["metadata"]["uid"], force=True)
        wants.plan = lambda o: JobPlan(True, apply=children(o.job), deletes=(right,), status=status(o))
        until("gone", lambda: get(kube, named("pods", "aimed-x")) is None, 15)


def test_a_secret_that_was_deleted_is_made_again_when_it_is_missed(
    kube: Cluster, operate: Callable[..., Running]
) -> None:
    wants = Wants()
    missed = [False]
    wants.plan = lambda o: JobPlan(
        True, secrets=(secret(o.job, missed[0]),), apply=children(o.job), status=status(o), wake_in=1.0
    )
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("kept"))
        path = named("secrets", wants_secret(settled(kube, "kept")))
        before = until("made", lambda: get(kube, path), 10)
        kube.kubectl("delete", "secret", path.rsplit("/", 1)[1])
        assert not any(resource == "secrets" for _, resource, _ in quiet(operator, 3))
        missed[0] = True
        after = until("made again", lambda: get(kube, path), 45)
        assert after["data"]["tls.key"] == before["data"]["tls.key"]
        assert after["data"]["join-token"] == before["data"]["join-token"]
        assert after["data"]["tls.crt"] != before["data"]["tls.crt"]


def test_the_root_key_is_made_once_and_then_waited_for(
    kube: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kube.kubectl("delete", "secret", "diloco-operator-key", check=False)
    file = tmp_path / "mounted"
    with Running(kube.kubeconfig, Wants(), file, namespace=NS) as operator:
        until("ready", operator.ready, 30)
    made = get(kube, named("secrets", "diloco-operator-key"))
    assert made["immutable"] is True
    with Running(kube.kubeconfig, Wants(), file, namespace=NS) as operator:
        said = until("waits", lambda: "is mounted at" in operator.page("/readyz")[1], 30)
        assert said and operator.page("/healthz")[0] == 200
        file.write_bytes(base64.b64decode(made["data"]["key"]))
        until("ready", operator.ready, 10)
    text = " ".join(record.getMessage() for record in caplog.records)
    assert base64.b64decode(made["data"]["key"]).decode() not in text


def test_one_namespace_alone(kube: Cluster, operate: Callable[..., Running]) -> None:
    kube.kubectl("create", "namespace", "elsewhere", check=False)
    wants = Wants()
    with operate(wants, watch_namespaces=(NS,)) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("inside"))
        kube.apply(job("outside", "elsewhere"), namespace="elsewhere")
        settled(kube, "inside")
        time.sleep(3)
        assert set(wants.observed) == {(NS, "inside")}
        assert wants.observed[NS, "inside"].nodes is None
        assert not any(resource == "nodes" for _, resource, _ in operator.requests())
    kube.kubectl("delete", "dj", "outside", "-n", "elsewhere", "--wait=false")
