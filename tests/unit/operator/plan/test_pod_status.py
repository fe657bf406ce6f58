"""What a pod's status says: a table of what kubelets and controllers write."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from diloco_operator.model import ClusterEvent
from diloco_operator.plan import pod_status
from diloco_operator.plan.pod_status import ContainerExit
from diloco_protocol.common import logs
from diloco_protocol.common.program_errors import MAX_ERROR_CHARS
from diloco_protocol.vocabulary import ENDS_FOR_RESUME


def pod(container: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    statuses = [] if container is None else [{"name": "learner", "image": "worker:1", **container}]
    return {
        "metadata": {
            "name": "job-local-2",
            "uid": "9dd40b1d-a071-fc6c-86cb-a85f37bee35c",
            "labels": {
                "diloco.io/role": "learner",
                "diloco.io/region": "local",
                "apps.kubernetes.io/pod-index": "2",
                "controller-revision-hash": "job-local-1",
            },
        },
        "spec": {"nodeName": "n"},
        "status": {"phase": "Pending", "containerStatuses": statuses, "conditions": [], **status},
    }


def facts(container: dict[str, Any] | None = None, events: list[ClusterEvent] | None = None, **status: Any) -> Any:
    found = pod_status.read_pod(pod(container, **status), events or [])
    assert found is not None
    return found


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}, "restartCount": 0}


def ended(code: int, reason: str = "Error", message: str = "", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, **more}}


def event(reason: str, message: str, name: str = "job-local-2") -> ClusterEvent:
    return ClusterEvent("Pod", name, reason, message, time=1.0)


UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


@pytest.mark.parametrize(
    ("container", "status", "cluster_events", "kind", "words"),
    [
        (
            None,
            {"conditions": [{**UNSCHEDULED, "message": "0/2 nodes: 2 Insufficient cpu."}]},
            [],
            "Unschedulable",
            ["Insufficient cpu"],
        ),
        (
            None,
            {"conditions": [UNSCHEDULED]},
            [event("FailedScheduling", "0/1 nodes: taint x")],
            "Unschedulable",
            ["taint x"],
        ),
        (
            None,
            {"conditions": [{**UNSCHEDULED, "message": 'persistentvolumeclaim "absent" not found'}]},
            [],
            "VolumeUnavailable",
            ["absent"],
        ),
        (
            None,
            {"conditions": [{**UNSCHEDULED, "reason": "SchedulingGated", "message": "gate x"}]},
            [],
            "Unschedulable",
            ["scheduling gates", "gate x"],
        ),
        (
            waiting("ImagePullBackOff", "Back-off pulling image"),
            {},
            [],
            "ImageUnavailable",
            ["worker:1", "ImagePullBackOff", "imagePullSecrets"],
        ),
        (
            waiting("ErrImageNeverPull", "not present"),
            {},
            [],
            "ImageUnavailable",
            ["worker:1", "load it into the", "for an image of your own"],
        ),
        (
            waiting("CreateContainerConfigError", 'secret "s3-keys" not found'),
            {},
            [],
            "PodConfiguration",
            ["create the Secret s3-keys"],
        ),
        (
            waiting("CreateContainerConfigError", "couldn't find key a in Secret ns/b"),
            {},
            [],
            "PodConfiguration",
            ["couldn't find key a in Secret ns/b (CreateContainerConfigError)"],
        ),
        (
            waiting("ContainerCreating"),
            {},
            [event("FailedMount", 'MountVolume.SetUp failed for volume "c" : secret "job-learner-1" not found')],
            "VolumeUnavailable",
            ["create the Secret job-learner-1"],
        ),
        (
            waiting("ContainerCreating"),
            {},
            [event("FailedMount", 'MountVolume.SetUp failed for volume "c" : configmap "corpus" not found')],
            "VolumeUnavailable",
            ["create the ConfigMap corpus"],
        ),
        (waiting("ContainerCreating"), {}, [event("FailedMount", "x", name="another")], None, []),
        (
            waiting("ContainerCreating"),
            {},
            [event("FailedCreatePodSandBox", "no address left")],
            "NotStarting",
            ["no address left"],
        ),
        (waiting("ContainerCreating"), {}, [], None, []),
        (
            {
                **waiting("CrashLoopBackOff", "back-off"),
                "restartCount": 4,
                "lastState": ended(1, message="Traceback\n  ...\nOSError: the disk is on fire\n"),
            },
            {},
            [],
            "Crashing",
            ["exit code 1", "the disk is on fire", "5 times"],
        ),
        (
            {**waiting("CrashLoopBackOff"), "restartCount": 1, "lastState": ended(137, "OOMKilled")},
            {},
            [],
            "Crashing",
            ["out of memory", "resources.limits.memory"],
        ),
        (
            None,
            {"initContainerStatuses": [{"name": "fetch", "image": "f:1", **waiting("ErrImagePull")}]},
            [],
            "ImageUnavailable",
            ["init container fetch", "f:1"],
        ),
        (
            None,
            {
                "initContainerStatuses": [
                    {"name": "fetch", **waiting("CrashLoopBackOff"), "lastState": ended(3, message="no route")}
                ]
            },
            [],
            "Crashing",
            ["init container fetch", "exit code 3", "no route"],
        ),
        ({"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "restartCount": 0}, {}, [], None, []),
    ],
)
def test_why_a_pod_does_not_start(
    container: Any, status: dict[str, Any], cluster_events: list[ClusterEvent], kind: str | None, words: list[str]
) -> None:
    found = facts(container, cluster_events, **status).obstacle
    assert (found.kind if found is not None else None) == kind
    for word in words:
        assert word in found.message


def test_a_secret_that_is_not_there_is_named() -> None:
    message = 'MountVolume.SetUp failed for volume "credentials" : secret "job-learner-1" not found'
    assert facts(waiting("ContainerCreating"), [event("FailedMount", message)]).obstacle.secret == "job-learner-1"
    assert facts(waiting("CreateContainerConfigError", 'secret "a" not found')).obstacle.secret == "a"
    assert facts(waiting("CreateContainerConfigError", "couldn't find key a")).obstacle.secret == ""


@pytest.mark.parametrize(
    ("container", "ends", "started"),
    [
        (None, 0, False),
        (waiting("ContainerCreating"), 0, False),
        ({"state": {"running": {}}, "restartCount": 0}, 0, True),
        ({"state": ended(1), "restartCount": 0}, 1, True),
        # The kubelet counts a restart when it has restarted, so the number stays the same over the three.
        ({"state": ended(1), "restartCount": 2, "lastState": ended(1)}, 3, True),
        ({**waiting("CrashLoopBackOff"), "restartCount": 2, "lastState": ended(1)}, 3, True),
        ({"state": {"running": {}}, "restartCount": 3, "lastState": ended(1)}, 3, True),
    ],
)
def test_how_often_a_container_has_ended(container: Any, ends: int, started: bool) -> None:
    found = facts(container)
    assert (found.ends, found.started) == (ends, started)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ContainerExit(1, "Error", "no", None), "its program ended with exit code 1: no"),
        (ContainerExit(0, "Completed", "", None), "by itself with exit code 0"),
        (ContainerExit(137, "OOMKilled", "", None), "out of memory"),
        (ContainerExit(143, "Error", "", None), "signal 15"),
        (ContainerExit(255, "Error", "", None), "exit code 255"),
    ],
)
def test_an_end_in_words(end: ContainerExit, words: str) -> None:
    assert words in str(end)


def test_a_signal_without_an_exit_code() -> None:
    found = facts({"state": {"terminated": {"signal": 9}}, "restartCount": 0})
    assert found.last_end.code == 137


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]},
            "higher priority",
        ),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]},
            "drained",
        ),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]},
            "tainted",
        ),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "New", "message": "so"}]}, "so"),
        ({"conditions": [{"type": "DisruptionTarget", "status": "False", "reason": "x"}]}, ""),
        ({"phase": "Failed", "reason": "NodeShutdown"}, "shut down"),
        ({"phase": "Failed", "reason": "Evicted"}, ""),
    ],
)
def test_whose_fault_it_is_not(status: dict[str, Any], words: str) -> None:
    excused = facts(None, **status).excused
    assert words in excused and bool(excused) == bool(words)


def test_the_plain_facts() -> None:
    found = facts(
        {"state": {"running": {"startedAt": "2026-01-01T00:00:10Z"}}, "restartCount": 0},
        phase="Running",
        conditions=[{"type": "Ready", "status": "True"}],
    )
    assert (found.region, found.ordinal, found.revision, found.node) == ("local", 2, "job-local-1", "n")
    assert found.process == "9dd40b1da071fc6c86cba85f37bee35c"
    assert found.ready and found.running and found.alive and found.running_since == 1767225610.0
    going = pod(None)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    read = pod_status.read_pod(going, [])
    assert read is not None and read.terminating and not read.alive and read.leaves_at == 1767225600.0
    over = facts(None, phase="Failed")
    assert over.over and not over.alive and over.obstacle is None
    stranger = pod(None)
    stranger["metadata"]["labels"] = {}
    assert pod_status.read_pod(stranger, []) is None


def test_the_last_line_is_one_short_line() -> None:
    assert pod_status.shorten_last_line("a\n\n  b  \n") == "b" and pod_status.shorten_last_line("\n") == ""
    assert len(pod_status.shorten_last_line("x" * 5000)) == MAX_ERROR_CHARS


def test_last_words_of_a_json_log_are_its_message() -> None:
    """As our programs log in a cluster. The head of a long line is not there: the kubelet keeps the end."""
    said = 'training.model "x\\y" differ: äpply the same job\neverywhere'
    formatter = logs.JsonLines({"job": "tiny", "region": "local", "ordinal": 1})
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s", (said,), None)
    line = formatter.format(record)
    assert line.startswith("{") and pod_status.shorten_last_line(f"before\n{line}\n") == " ".join(said.split())
    assert pod_status.shorten_last_line(line[-100:]) == " ".join(said.split())
    for other in ('{"message": 3}', '{"message": "a", "b": 1}', '"message": "\\q"}', "no message"):
        assert pod_status.shorten_last_line(other) == other


def test_a_learner_that_makes_room_has_not_crashed() -> None:
    """What the kubelet reads of its termination log is what the worker leaves there."""
    made = facts({"state": {"running": {}}, "restartCount": 1, "lastState": ended(0, "Completed", ENDS_FOR_RESUME)})
    assert made.last_end.makes_room
    for code, message in ((0, ""), (1, ENDS_FOR_RESUME)):
        other = facts({"state": {"running": {}}, "restartCount": 1, "lastState": ended(code, "x", message)})
        assert not other.last_end.makes_room
