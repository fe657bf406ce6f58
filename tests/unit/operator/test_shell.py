"""The operator's thin I/O shell: what of it is plain code. What needs an API server is in tests/e2e."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from typing import Any

import pytest
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from diloco_operator import logs
from diloco_operator.informer.cache import Cache
from diloco_operator.informer.reflector import Backoffs
from diloco_operator.job import rfc3339, seconds_of
from diloco_operator.kube import kinds
from diloco_operator.kube.client import describe_error
from diloco_operator.kube.errors import ApiError, classify_failure
from diloco_operator.metrics import Metrics
from diloco_operator.model import ClusterEvent, Object, Ref
from diloco_operator.reconcile import observe, status_writer
from diloco_operator.reconcile.apply import explain_refusal
from diloco_operator.reconcile.event_reader import _cluster_event, find_waiting
from diloco_protocol.common.logs import MAX_MESSAGE
from operator_simulation.faults import WEBHOOK
from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import operator_tables

NOW = 1_800_000_000.0


@pytest.mark.promise("An API server that does not answer is logged once")
def test_an_unanswered_request_is_told_in_the_same_words_each_time() -> None:
    """Else whoever logs only what is new would log at every try that the API server is away."""
    said = set()
    for _ in range(2):
        connection = urllib3.connection.HTTPSConnection("10.151.0.1", 443)
        error = urllib3.exceptions.ConnectTimeoutError(connection, "Connection to 10.151.0.1 timed out")
        said.add(describe_error(error))
        assert "timed out" in describe_error(error)
    assert len(said) == 1 and "0x" not in said.pop()


# ------------------------------------------------------------------ status


def merged(old: Any, patch: Any) -> Any:
    """JSON merge patch as RFC 7386 says it."""
    if not isinstance(patch, dict):
        return patch
    made = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), value)
    return made


leaves = st.booleans() | st.integers(0, 3) | st.floats(0, 1) | st.text("ab", min_size=1, max_size=2)
statuses = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=2)
        ),
        max_leaves=6,
    ),
    max_size=4,
)


@given(statuses, statuses)
def test_a_patch_makes_of_the_old_status_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    patch = status_writer.merge_patch(old, new)
    assert merged(old, patch) == new
    assert (patch == {}) == (old == new)


def test_what_the_api_server_fills_in_empty_is_no_difference() -> None:
    there = {"phase": "Running", "conditions": [], "report": {}, "regions": []}
    assert status_writer.merge_patch(there, {"phase": "Running"}) == {}
    assert status_writer.merge_patch({"phase": "Running"}, there) == {}
    assert status_writer.merge_patch({"report": {"message": ""}}, {"report": {}}) == {}


def job_with(status: dict[str, Any]) -> Object:
    meta = {"namespace": "n", "name": "j", "uid": "u", "resourceVersion": "7"}
    return {"metadata": meta, "status": status}


def test_progress_waits_and_everything_else_does_not() -> None:
    there = {"phase": "Running", "progress": {"tokens": 1}, "syncer": {"epoch": 1, "step": 5}}
    moved = {"phase": "Running", "progress": {"tokens": 2}, "syncer": {"epoch": 1, "step": 9}}
    lately = time.monotonic()
    assert status_writer._patch(job_with(there), moved, lately) is None
    assert status_writer._patch(job_with(there), moved, lately - status_writer.PROGRESS_SECONDS - 1) == {
        "metadata": {"resourceVersion": "7", "uid": "u"},
        "status": {"progress": {"tokens": 2}, "syncer": {"step": 9}},
    }
    restarted = {**moved, "syncer": {"epoch": 2, "step": 9}}
    assert status_writer._patch(job_with(there), restarted, lately) is not None
    assert status_writer._patch(job_with(there), there, -1e9) is None
    assert status_writer._patch(job_with({**there, "drain": "Saved"}), moved, lately) is not None
    continued = {**moved, "report": {}}
    assert status_writer._patch(job_with({**there, "report": {"message": ""}}), continued, lately) is None


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, 'pods is forbidden: User "x" cannot list resource "pods"', "forbidden"),
        (403, 'persistentvolumeclaims "c" is forbidden: exceeded quota: small, requested: 1', "quota"),
        (403, 'pods "p" is forbidden: violates PodSecurity "restricted:latest"', "policy"),
        (403, 'persistentvolumeclaims "c" is forbidden: maximum storage usage is 1Gi, but request is 10Gi', "policy"),
        (400, 'admission webhook "x.kyverno.svc" denied the request: no labels', "policy"),
        (422, "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: too many", "policy"),
        (403, "unable to create new content in namespace n because it is being terminated", "terminating"),
        (401, "Unauthorized", "forbidden"),
        (422, 'StatefulSet "x" is invalid: spec.template.spec.containers[0].image: Required value', "invalid"),
        (400, "strict decoding error: unknown field", "invalid"),
        (404, "namespaces not found", "other"),
        (409, "conflict", "other"),
    ],
)
def test_refusals_by_kind(status: int, message: str, reason: str) -> None:
    error = ApiError("patch", "statefulsets", status, message)
    assert classify_failure(error) == reason
    assert not error.unreachable
    assert message[:40] in explain_refusal(error)


@pytest.mark.parametrize(("status", "message", "reason"), [(500, WEBHOOK, "webhook"), (429, "wait", "unavailable")])
def test_what_is_not_available_is_told_with_who_it_is(status: int, message: str, reason: str) -> None:
    error = ApiError("patch", "statefulsets", status, message)
    assert classify_failure(error) == reason and error.unreachable
    assert explain_refusal(error).startswith(
        "the webhook check.example.com" if "webhook" in reason else "the API server"
    )


@pytest.mark.parametrize("status", [0, 429, 500, 503, 504])
def test_what_trying_again_helps_with(status: int) -> None:
    assert ApiError("get", "pods", status, "x").unreachable


def test_a_missing_permission_is_told_with_verb_and_resource() -> None:
    text = 'dilocojobs.diloco.io "j" is forbidden: User "sa" cannot patch resource "dilocojobs/status"'
    said = explain_refusal(ApiError("patch", "dilocojobs/status", 403, text))
    assert said.startswith("the operator may not patch dilocojobs/status: grant it that")


def test_tries_of_a_watch_have_no_end_and_are_spread() -> None:
    first, second = Backoffs(), Backoffs()
    waits_ = [wait for wait, _ in zip(first, range(200), strict=False)]
    assert all(0.2 < wait <= 10.0 for wait in waits_)
    assert waits_[0] <= 0.5 and min(waits_[50:]) >= 6.0
    assert waits_ != [wait for wait, _ in zip(second, range(200), strict=False)]


# ------------------------------------------------------------------ what is read in pods and cluster_events


def pod(name: str, role: str, **status: Any) -> Object:
    born = status.pop("born", 100.0)
    meta = {
        "name": name,
        "uid": f"u-{name}",
        "labels": {"diloco.io/role": role},
        "creationTimestamp": rfc3339(NOW - born),
    }
    if status.pop("ending", False):
        meta["deletionTimestamp"] = rfc3339(NOW)
    running = status.pop("running", True)
    full = {"phase": "Running", "podIP": "10.0.0.1", **status}
    full["containerStatuses"] = [{"name": role, "state": {"running": {}} if running else {"waiting": {}}}]
    return {"metadata": meta, "spec": {}, "status": full}


def test_the_syncer_that_is_asked() -> None:
    assert observe.syncer_pod([]) is None
    assert observe.syncer_pod([pod("l", "learner")]) is None
    assert observe.syncer_pod([pod("s", "syncer", running=False)]) is None
    assert observe.syncer_pod([pod("s", "syncer", podIP="")]) is None
    assert observe.syncer_pod([pod("s", "syncer", phase="Failed")]) is None
    old, young = pod("old", "syncer", podIP="10.0.0.1"), pod("young", "syncer", podIP="10.0.0.2", born=5.0)
    assert observe.syncer_pod([old, young]) == ("u-young", "10.0.0.2")
    ending = pod("ending", "syncer", ending=True, born=1.0)
    assert observe.syncer_pod([old, ending]) == ("u-old", "10.0.0.1")
    assert observe.syncer_pod([ending]) == ("u-ending", "10.0.0.1")


def test_learners_with_a_status_page() -> None:
    pods = [
        pod("a", "learner"),
        pod("b", "learner", ending=True),
        pod("c", "learner", running=False),
        pod("s", "syncer"),
    ]
    assert observe.learner_pods(pods) == {"a": ("u-a", "10.0.0.1")}


@pytest.mark.parametrize(
    ("spec", "cluster", "here"),
    [
        ({}, None, True),
        ({}, "a", True),
        ({"syncer": {"cluster": "a"}}, "a", True),
        ({"syncer": {"cluster": "a"}}, "b", False),
        ({"syncer": {"cluster": "a"}}, None, False),
        ({"syncer": "nonsense"}, "a", True),
        (None, "a", True),
    ],
)
def test_where_the_syncer_is(spec: Any, cluster: str | None, here: bool) -> None:
    assert observe.syncer_is_here({"spec": spec}, cluster) is here


def test_when_it_is_worth_asking_why() -> None:
    def child(kind: str, name: str, age: float, spec: Any, status: Any) -> dict[Ref, Object]:
        meta = {"name": name, "creationTimestamp": rfc3339(NOW - age)}
        return {Ref(kind, name): {"metadata": meta, "spec": spec, "status": status}}

    def names(objects: dict[Ref, Object], *pods: Object) -> list[str]:
        return [ref.name for ref in find_waiting(objects, pods, NOW)]

    owned = pod("a", "learner")
    owned["metadata"]["ownerReferences"] = [{"kind": "StatefulSet", "name": "s"}]
    assert names({}, pod("a", "learner")) == []
    assert names({}, pod("a", "learner", phase="Pending", born=20.0)) == ["a"]
    assert names({}, pod("a", "learner", phase="Pending", born=3.0)) == []
    assert names({}, pod("a", "learner", phase="Pending", born=20.0, ending=True)) == []
    assert names(child("StatefulSet", "s", 60, {"replicas": 2}, status={}), owned) == ["s"]
    assert names(child("StatefulSet", "s", 60, {"replicas": 1}, status={}), owned) == []
    assert names(child("StatefulSet", "s", 3, {"replicas": 2}, status={}), owned) == []
    assert names(child("Deployment", "d", 60, {"replicas": 1}, status={})) == ["d"]
    assert names(child("Deployment", "d", 60, {"replicas": 0}, status={})) == []
    assert names(child("PersistentVolumeClaim", "c", 60, {}, status={"phase": "Pending"})) == ["c"]
    assert names(child("PersistentVolumeClaim", "c", 60, {}, status={"phase": "Bound"})) == []


@pytest.mark.parametrize(
    ("times", "when"),
    [
        ({"lastTimestamp": "2027-01-15T08:00:00Z"}, 1_800_000_000.0),
        ({"lastTimestamp": None, "eventTime": "2027-01-15T08:00:00.250000Z"}, 1_800_000_000.25),
        (
            {"series": {"lastObservedTime": "2027-01-15T08:00:01.000000Z"}, "eventTime": "2027-01-15T07:00:00.000000Z"},
            1_800_000_001.0,
        ),
        ({"metadata": {"creationTimestamp": "2027-01-15T08:00:00Z"}}, 1_800_000_000.0),
    ],
)
def test_an_events_time_however_it_is_told(times: dict[str, Any], when: float) -> None:
    about = {"kind": "Pod", "name": "p", "uid": "u"}
    found = _cluster_event({"involvedObject": about, "reason": "FailedMount", "message": "x" * 5000, **times})
    assert found == (ClusterEvent("Pod", "p", "FailedMount", "x" * 1000, time=when), "u")


def test_an_event_that_is_none() -> None:
    assert _cluster_event({"involvedObject": {"kind": "Pod"}, "lastTimestamp": "2027-01-15T08:00:00Z"}) is None
    assert _cluster_event({"involvedObject": {"kind": "Pod", "name": "p"}, "lastTimestamp": "yesterday"}) is None
    assert seconds_of(rfc3339(NOW)) == NOW and seconds_of(None) is None


# ------------------------------------------------------------------ log and metrics


def lines(form: str) -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    level = root.level
    logs.configure(form, "INFO", stream)
    handler = root.handlers[0]
    root.handlers[:], root.level = before, level
    logger = logging.getLogger("diloco_operator.test")
    logger.handlers[:], logger.propagate = [handler], False
    return logger, stream


def test_a_line_has_its_job_and_ends_with_its_message() -> None:
    logger, stream = lines("json")
    logger.info("begun: %s", "x", extra=logs.about(("ns", "tiny")))
    logger.info("y" * 10_000)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    first, long, failed = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["namespace"], first["job"], first["level"]) == ("ns", "tiny", "info")
    assert list(first)[-1] == "message" and first["message"] == "begun: x"
    assert len(long["message"]) == MAX_MESSAGE and "job" not in long
    assert "ValueError: broken" in failed["traceback"]


def test_lines_for_people() -> None:
    logger, stream = lines("text")
    logger.warning("held", extra=logs.about(("ns", "tiny")))
    assert stream.getvalue().endswith("WARNING ns/tiny: held\n")


def test_what_kopf_says_of_every_attempt_is_left_out() -> None:
    logger, stream = lines("json")
    kopf = logging.getLogger("kopf._cogs.clients.watching")
    kopf.handlers[:], kopf.propagate = logger.handlers, False
    kopf.error("Request attempt #1 failed; will retry: GET x -> boom")
    logger.error("Something else failed")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["Something else failed"]


def test_metrics_have_help_and_units_and_are_what_the_table_says() -> None:
    metrics = Metrics()
    metrics.request("patch", "pods", 200, 0.1)
    text = metrics.page().decode()
    for name, kind, labels, words in operator_tables.metric_rows(metrics):
        assert f"# HELP {name} {words}" in text and f"# TYPE {name} {kind}" in text
        assert words.endswith(".")
        assert name.startswith("diloco_operator_")
        if kind == "histogram":
            assert name.endswith("_seconds")
        if kind == "counter":
            assert name.endswith("_total")
        assert labels == tuple(sorted(set(labels), key=labels.index))
    assert 'diloco_operator_api_requests_total{code="200",resource="pods",verb="patch"} 1.0' in text
    assert "_created" not in text


# ------------------------------------------------------------------ permissions and pages


def test_secrets_are_only_made_and_nothing_is_granted_by_a_star() -> None:
    rules = kinds.needs(nodes=True)
    assert [need.verbs for need in rules if need.resource == "secrets"] == [("create",)]
    assert not any("*" in (need.group, need.resource, *need.verbs) for need in rules)
    assert [need.resource for need in rules if need.optional] == ["nodes"]
    assert {need.resource for need in kinds.needs(nodes=False)} == {n.resource for n in rules} - {"nodes"}


def test_paths() -> None:
    assert kinds.POD.path() == "/api/v1/pods"
    assert kinds.JOB.path("n", "j", "status") == "/apis/diloco.io/v1alpha1/namespaces/n/dilocojobs/j/status"
    assert kinds.NODE.path("n", "x") == "/api/v1/nodes/x"


def test_the_cache_counts_what_it_has() -> None:
    assert Cache().count() == {}
