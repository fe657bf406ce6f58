"""The operator's I/O shell on a real API server: what they send, and that they heal.

The operator runs in this process, outside of the cluster, with a plan of the test's own
(operator_shell.py). A cluster of its own, of one node, since the operator looks after all of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from diloco_operator.model import EventWanted, JobPlan, Observed, Ref
from diloco_operator.plan import planning
from diloco_operator.reconcile.diff import APPLIED
from diloco_protocol.vocabulary import FINALIZER

from .clusters import Cluster, until
from .operator_shell import (
    NS,
    WRITES,
    Running,
    Wants,
    apply_errors,
    children,
    config_map,
    get,
    job,
    named,
    quiet,
    secret,
    settled,
    stateful_set,
    status,
    wants_secret,
)

pytestmark = pytest.mark.timeout(300)


# ------------------------------------------------------------------ the steady state


def test_objects_status_finalizer_secret_and_event_are_made_and_then_nothing_is_sent(
    kube: Cluster, operate: Callable[..., Running]
) -> None:
    wants = Wants()
    told: set[str] = set()

    def plan(observed: Observed) -> JobPlan:
        first = not told
        told.add("begun")
        event = EventWanted("Normal", "Started", "The job begins.")
        return JobPlan(
            finalizer=True,
            secrets=(secret(observed.job),),
            apply=children(observed.job),
            status=status(observed),
            events=(event,) if first else (),
            wake_in=1.0,
        )

    wants.plan = plan
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("steady"))
        found = settled(kube, "steady")
        assert found["metadata"]["finalizers"] == [FINALIZER]
        for kind, name in (
            ("configmaps", "steady-settings"),
            ("services", "steady-local"),
            ("poddisruptionbudgets", "steady-local"),
            ("persistentvolumeclaims", "steady-syncer"),
        ):
            child = get(kube, named(kind, name))
            managers = {m["manager"] for m in child["metadata"]["managedFields"] if m["operation"] == "Apply"}
            assert managers == {"diloco-operator"}, kind
        made = get(kube, named("secrets", wants_secret(found)))
        assert set(made["data"]) == {"tls.crt", "tls.key", "ca.crt", "join-token"}
        uid = found["metadata"]["uid"]

        def told_of_it() -> list[Any]:
            events = kube.items(f"/api/v1/namespaces/{NS}/events")
            return [e for e in events if e["reason"] == "Started" and e["involvedObject"].get("uid") == uid]

        events = until("the event", told_of_it, 10)
        assert events[0]["message"] == "The job begins." and events[0]["count"] == 1
        turns = wants.turns
        assert quiet(operator, 12) == {}, "nothing changes, and it asks the API server"
        assert wants.turns > turns + 5, "the job was looked at meanwhile"


def test_an_operator_that_starts_again_writes_nothing(kube: Cluster, operate: Callable[..., Running]) -> None:
    wants = Wants()
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        for i in range(5):
            kube.apply(job(f"again-{i}"))
        for i in range(5):
            settled(kube, f"again-{i}")
        time.sleep(2)
    versions = {
        (item["kind"], item["metadata"]["name"]): item["metadata"]["resourceVersion"]
        for item in json.loads(kube.kubectl("get", "sts,svc,cm,pdb,dj", "-o", "json"))["items"]
    }
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        until("looked at", lambda: len(wants.observed) == 5, 10)
        time.sleep(7)
        sent = operator.since({})
    # 1 Gi for 1024 Mi and the like are known; only lists that the watches make are left.
    assert {verb for verb, _, _ in sent} <= {"list"}, sent
    again = json.loads(kube.kubectl("get", "sts,svc,cm,pdb,dj", "-o", "json"))["items"]
    assert versions == {(i["kind"], i["metadata"]["name"]): i["metadata"]["resourceVersion"] for i in again}


def test_with_the_real_plan_too_a_restart_writes_nothing(kube: Cluster, operate: Callable[..., Running]) -> None:
    """Jobs whose pods do not come and go by themselves: suspended ones."""
    kinds_ = "sts,deploy,svc,cm,pdb,pvc,netpol,dj"

    def versions() -> dict[tuple[str, str], str]:
        items = json.loads(kube.kubectl("get", kinds_, "-o", "json"))["items"]
        return {(i["kind"], i["metadata"]["name"]): i["metadata"]["resourceVersion"] for i in items}

    def whole() -> bool:
        return {kind for kind, name in versions() if name.startswith("real-2")} >= {
            "StatefulSet",
            "Deployment",
            "Service",
            "ConfigMap",
            "PodDisruptionBudget",
            "PersistentVolumeClaim",
            "NetworkPolicy",
        }

    with operate(planning.plan_job, image_pull_policy="Never") as operator:
        until("ready", operator.ready, 30)
        for i in range(3):
            kube.apply(job(f"real-{i}"))
        until("all is there", whole, 40)
        for i in range(3):
            kube.kubectl("patch", "dj", f"real-{i}", "--type=merge", "-p", '{"spec":{"suspend":true}}')
        until(
            "suspended",
            lambda: all(
                get(kube, named("dilocojobs", f"real-{i}"))["status"]["phase"] == "Suspended" for i in range(3)
            ),
            120,
        )
        until("no pod is left", lambda: not kube.items(f"/api/v1/namespaces/{NS}/pods"), 120)
        until("nothing is sent", lambda: not any(verb in WRITES for verb, _, _ in quiet(operator, 6)), 60)
        asked = quiet(operator, 30)
        assert asked == {}, f"nothing changes, and it asks the API server: {asked}"
    before = versions()
    with operate(planning.plan_job, image_pull_policy="Never") as operator:
        until("ready", operator.ready, 30)
        time.sleep(12)
        sent, after = operator.since({}), versions()
        for name in ("real-0", "real-1", "real-2"):
            kube.kubectl("delete", "dj", name, "--timeout=40s")
    # Lists of the watches; and each job's Secrets, of which nobody can tell without a pod.
    assert {key for key in sent if key[0] != "list"} <= {("create", "secrets", "409")}, sent
    assert sent.get(("create", "secrets", "409"), 0) <= 6
    assert after == before


# ------------------------------------------------------------------ drift


def test_what_is_deleted_by_hand_comes_back_and_what_is_edited_is_put_right(
    kube: Cluster, operate: Callable[..., Running]
) -> None:
    with operate() as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("drift"))
        settled(kube, "drift")
        for kind, name in (
            ("cm", "drift-settings"),
            ("svc", "drift-local"),
            ("pdb", "drift-local"),
            ("sts", "drift-local"),
        ):
            path = named(
                {"cm": "configmaps", "svc": "services", "pdb": "poddisruptionbudgets", "sts": "statefulsets"}[kind],
                name,
            )
            before = get(kube, path)["metadata"]["uid"]
            kube.kubectl("delete", kind, name)
            until(
                f"{kind} is back",
                lambda path=path, before=before: (found := get(kube, path)) and found["metadata"]["uid"] != before,
                10,
            )
        patch = {"data": {"a": "edited", "theirs": "kept"}, "metadata": {"labels": {"theirs": "kept"}}}
        kube.kubectl("patch", "cm", "drift-settings", "--type=merge", "-p", json.dumps(patch))
        path = named("configmaps", "drift-settings")
        found = until("put right", lambda: (m := get(kube, path))["data"]["a"] == "1" and m, 10)
        assert found["data"] == {"a": "1", "theirs": "kept"}
        assert found["metadata"]["labels"]["theirs"] == "kept"
        kube.kubectl("scale", "sts", "drift-local", "--replicas=3")
        until("scaled back", lambda: get(kube, named("statefulsets", "drift-local"))["spec"]["replicas"] == 0, 10)
        kube.kubectl("label", "cm", "drift-settings", "diloco.io/job-")  # the watches lose sight of it
        until("labelled again", lambda: get(kube, path)["metadata"]["labels"].get("diloco.io/job") == "drift", 15)
        # Foreign fields and marks are no reason to send anything.
        kube.kubectl("annotate", "svc", "drift-local", "theirs=x")
        assert not any(verb in WRITES for verb, _, _ in quiet(operator, 6))


def test_what_nobody_wants_any_more_leaves_the_object(kube: Cluster, operate: Callable[..., Running]) -> None:
    """Also by an operator that never knew it: the mark on the object tells."""
    wants = Wants()
    wants.plan = lambda o: JobPlan(True, apply=(config_map(o.job, old="x"), stateful_set(o.job)), status=status(o))
    path = named("configmaps", "less-settings")
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("less"))
        settled(kube, "less")
        assert get(kube, path)["data"] == {"a": "1", "old": "x"}
    wants.plan = lambda o: JobPlan(True, apply=(config_map(o.job), stateful_set(o.job)), status=status(o))
    with operate(wants) as operator:
        until("the field is gone", lambda: get(kube, path)["data"] == {"a": "1"}, 20)
        assert get(kube, path)["metadata"]["annotations"][APPLIED]


# ------------------------------------------------------------------ other people's objects


def test_a_foreign_object_is_left_alone_and_said_and_it_heals(kube: Cluster, operate: Callable[..., Running]) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "clash-settings", "namespace": NS},
        "data": {"a": "theirs"},
    }
    kube.apply(foreign)
    path = named("configmaps", "clash-settings")
    before = get(kube, path)
    wants = Wants()
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("clash"))
        settled(kube, "clash")
        ref = Ref("ConfigMap", "clash-settings")
        said = until("said", lambda: apply_errors(wants.observed[NS, "clash"]).get(ref), 10)
        assert said[0] == "conflict" and "is not this job's" in said[1]
        # Our label on it does not make it ours.
        kube.kubectl("label", "cm", "clash-settings", "diloco.io/job=clash")
        time.sleep(6)
        after = get(kube, path)
        assert after["data"] == before["data"] and APPLIED not in after["metadata"].get("annotations", {})
        assert apply_errors(wants.observed[NS, "clash"])[ref][0] == "conflict"
        until(
            "in the status",
            lambda: "clash-settings" in json.dumps(get(kube, named("dilocojobs", "clash"))["status"]),
            10,
        )
        kube.kubectl("delete", "cm", "clash-settings")
        until("healed", lambda: (m := get(kube, path)) and m["data"] == {"a": "1"}, 15)
        until("not said any more", lambda: not wants.observed[NS, "clash"].apply_errors, 10)


def test_an_object_of_an_earlier_job_of_that_name_is_not_taken_over(
    kube: Cluster, operate: Callable[..., Running]
) -> None:
    """Its owner is being collected; a claim has no owner, and the next job goes on from it."""
    wants = Wants()
    with operate(wants) as operator:
        until("ready", operator.ready, 30)
        kube.apply(job("twice"))
        first = settled(kube, "twice")["metadata"]["uid"]
        claim_before = get(kube, named("persistentvolumeclaims", "twice-syncer"))["metadata"]["uid"]
        kube.kubectl("delete", "dj", "twice", "--cascade=orphan", "--timeout=20s")
        orphan = get(kube, named("configmaps", "twice-settings"))
        owners = orphan["metadata"].get("ownerReferences")
        assert not owners, "deleted with --cascade=orphan, it belongs to nobody"
        kube.apply(job("twice"))
        until(
            "said",
            lambda: (
                apply_errors(wants.observed[NS, "twice"]).get(Ref("ConfigMap", "twice-settings"), ("",))[0]
                == "conflict"
            ),
            15,
        )
        assert wants.observed[NS, "twice"].job["metadata"]["uid"] != first
        assert Ref("PersistentVolumeClaim", "twice-syncer") not in apply_errors(wants.observed[NS, "twice"])
        assert get(kube, named("persistentvolumeclaims", "twice-syncer"))["metadata"]["uid"] == claim_before


# ------------------------------------------------------------------ jobs that wait


@pytest.mark.promise(
    "Faults of a suspended job's pod templates are told before it starts, by a dry run", section="Operator"
)
def test_faults_of_a_template_are_told_while_the_job_is_suspended(
    kube: Cluster, operate: Callable[..., Running]
) -> None:
    """With the real plan: nothing is made, and a job that is in order is tried once."""

    def told(kind: str) -> dict[str, Any]:
        conditions = (get(kube, named("dilocojobs", "queued")).get("status") or {}).get("conditions") or []
        return next((one for one in conditions if one["type"] == kind), {})

    queued = job("queued")
    queued["spec"] |= {"suspend": True, "learners": {"podTemplate": {"spec": {"nodeSelectr": {"disk": "ssd"}}}}}
    with operate(planning.plan_job) as operator:
        until("ready", operator.ready, 30)
        kube.apply(queued)
        until("it is told", lambda: told("Ready").get("reason") == "Refused", 30)
        assert "nodeSelectr" in told("Ready")["message"] and told("Stalled")["status"] == "True"
        assert told("Suspended")["status"] == "True"
        queued["spec"]["learners"] = {"podTemplate": {"spec": {"nodeSelector": {"disk": "ssd"}}}}
        kube.apply(queued)
        until("it is in order", lambda: told("Ready").get("status") == "True", 30)
        assert told("Stalled")["status"] == "False"
        assert quiet(operator, 12) == {}
        made = json.loads(kube.kubectl("get", "sts,deploy,pvc,svc,cm", "-l", "diloco.io/job=queued", "-o", "json"))
        assert made["items"] == []
