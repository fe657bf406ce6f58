"""One pod's status, read: how it is, why it does not start, how its program ended.

A pod object of the API server goes in, with the cluster's Events about it; a ``Pod`` comes out that
the other files of the plan read. Sentences made here go into status and Events. They name what is
wrong in the cluster's own words and, where there is one, the cure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from diloco_operator import names
from diloco_operator.job import seconds_of
from diloco_operator.model import ClusterEvent, Object, Ref
from diloco_protocol.common.program_errors import shorten
from diloco_protocol.vocabulary import ENDS_FOR_RESUME, LABEL_POD_INDEX, LABEL_REGION, LABEL_ROLE, LABEL_SHARD

_IMAGE = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CONFIG = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreCreateHookError",
        "PreStartHookError",
        "PostStartHookError",
    }
)
_DISRUPTIONS = {
    "PreemptionByScheduler": "a pod with a higher priority took its place",
    "EvictionByEvictionAPI": "it was evicted, as when a node is drained",
    "DeletionByTaintManager": "its node was tainted or lost",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node ended it to save resources",
}
_SHUT_DOWN = ("Preempting", "Shutdown", "NodeShutdown", "Terminated")
_ABSENT = re.compile(r'\b(secret|configmap)s? "([^"]+)" not found')
_KINDS = {"secret": "Secret", "configmap": "ConfigMap"}
OUT_OF_MEMORY = "OOMKilled"
NAMED = 10  # in a message
_MESSAGE = re.compile(r'"message": ?("(?:[^"\\]|\\.)*")\}$')


@dataclass(frozen=True, slots=True)
class ContainerExit:
    """The end of a container's process."""

    code: int
    reason: str  # Error, OOMKilled, Completed, ...
    last_line: str  # of its termination message or log, shortened; may be empty
    at: float | None

    @property
    def makes_room(self) -> bool:
        """Whether an idle learner ended so that its successor can join a job that goes on after a drain."""
        return self.code == 0 and self.last_line == ENDS_FOR_RESUME

    def __str__(self) -> str:
        if self.reason == OUT_OF_MEMORY:
            said = "it ran out of memory (OOMKilled): give it more with resources.limits.memory"
        elif self.code == 0:
            said = "its program ended by itself with exit code 0"
        elif self.code > 128 and self.code < 160:
            said = f"its program was ended by signal {self.code - 128}"
        else:
            said = f"its program ended with exit code {self.code}"
        return f"{said}: {self.last_line}" if self.last_line else said


ObstacleKind = Literal[
    "Unschedulable", "ImageUnavailable", "PodConfiguration", "VolumeUnavailable", "Crashing", "NotStarting"
]
"""Reasons of SyncerReady too."""
_EVENTS: tuple[tuple[tuple[str, ...], ObstacleKind, str], ...] = (
    (("FailedMount", "FailedAttachVolume", "FailedMapVolume"), "VolumeUnavailable", "its volumes cannot be mounted"),
    (
        ("FailedCreatePodSandBox", "NetworkNotReady", "FailedPrepareDynamicResources"),
        "NotStarting",
        "it cannot be set up",
    ),
    (("Failed", "BackOff"), "ImageUnavailable", "its image cannot be pulled"),
)
"""Reasons of Events about a pod, and what they mean, in the order in which they are looked for."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a pod does not start."""

    kind: ObstacleKind
    message: str
    secret: str = ""  # name of a Secret that is missing, by the message


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of the job. Times are unix seconds."""

    name: str
    uid: str
    role: str
    region: str
    ordinal: int  # of its learner; of a shard its number
    rank: int  # in its learner, of several pods; 0: it leads
    group_pods: int  # pods of its learner
    revision: str
    created: float | None
    node: str
    terminating: bool
    deleted_at: float | None  # when it was told to terminate, by the API server's clock; None: not, or not known
    leaves_at: float | None  # end of its grace period; None: it does not terminate
    ready: bool
    running: bool  # its main container
    running_since: float | None
    started: bool  # its main container has run
    ends: int  # how often it has ended
    last_end: ContainerExit | None
    over: bool  # phase Failed or Succeeded: nothing of it runs any more
    excused: str  # why losing it is no fault of the job's: preempted, evicted, ...; empty: it is
    obstacle: Obstacle | None
    spec: Object
    job_uid: str  # of the job whose template it was made from; empty: it does not say

    @property
    def process(self) -> str:
        """The UID without dashes: every id of its processes begins so."""
        return self.uid.replace("-", "")

    @property
    def main_ended(self) -> bool:
        """Whether its main container has run, and does not run now."""
        return self.over or (self.started and not self.running)

    @property
    def alive(self) -> bool:
        """Whether the pod neither terminates nor has ended."""
        return not self.terminating and not self.over


def read_pod(obj: Object, cluster_events: Iterable[ClusterEvent], own: Collection[str] = frozenset()) -> Pod | None:
    """The pod of an API object; None if it is no syncer, shard, learner or evaluator. ``own``: Secrets and ConfigMaps
    that the operator makes, of which no user is told to make them."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    role = labels.get(LABEL_ROLE, "")
    if role not in ("syncer", names.SHARD, "learner", "evaluator"):
        return None
    container = "syncer" if role == names.SHARD else role
    main = next((s for s in status.get("containerStatuses") or [] if s.get("name") == container), None)
    state = (main.get("state") or {}) if main else {}
    running = state.get("running")
    ends, last = _ends(main)
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    over = status.get("phase") in ("Failed", "Succeeded")
    deleted = metadata.get("deletionTimestamp")
    obstacle = None
    if not over and running is None:

        def newest(*reasons: str) -> str:
            return newest_message(cluster_events, Ref("Pod", metadata["name"]), *reasons)

        obstacle = _obstacle(status, state, conditions, newest, last=last, ends=ends)
        absent = _ABSENT.search(obstacle.message) if obstacle is not None else None
        if obstacle is not None and absent is not None and absent[2] in own:
            message = obstacle.message.removesuffix(_cure(obstacle.message))
            obstacle = replace(obstacle, message=f"{message}; the operator makes it again")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=role,
        region=labels.get(LABEL_REGION, ""),
        **place_in_group(metadata["name"], labels)._asdict(),
        revision=labels.get(names.POD_REVISION, ""),
        created=seconds_of(metadata.get("creationTimestamp")),
        node=spec.get("nodeName", ""),
        terminating=deleted is not None,
        deleted_at=_deleted_at(metadata),
        leaves_at=seconds_of(deleted),
        ready=_true(conditions.get("Ready")),
        running=running is not None,
        running_since=seconds_of((running or {}).get("startedAt")),
        started=running is not None or ends > 0,
        ends=ends,
        last_end=last,
        over=over,
        excused=_excused(status, conditions),
        obstacle=obstacle,
        spec=spec,
        job_uid=str((metadata.get("annotations") or {}).get(names.JOB_UID) or ""),
    )


def process_has_ended(pod: Object | None, process: str) -> bool:
    """Whether a process ended, by the object that now has its pod's name (None: there is none). ``process``: its pod's
    UID without dashes."""
    if pod is None or pod["metadata"]["uid"].replace("-", "") != process:
        return True
    found = read_pod(pod, ())
    return found is not None and found.main_ended


class GroupPlace(NamedTuple):
    """Which pod of which learner a pod is."""

    ordinal: int  # -1: of none
    rank: int
    group_pods: int


def place_in_group(name: str, labels: Mapping[str, str]) -> GroupPlace:
    """The place of a pod by its name and labels."""
    text = labels.get(LABEL_POD_INDEX) or labels.get(LABEL_SHARD) or name.rpartition("-")[2]
    pods = labels.get(names.GROUP_PODS) or "1"
    count = max(1, int(pods)) if pods.isdecimal() and len(pods) < 6 else 1
    index = int(text) if text.isdigit() else -1
    return GroupPlace(index // count, index % count if index >= 0 else 0, count)


def _deleted_at(metadata: Mapping[str, Any]) -> float | None:
    ends, grace = seconds_of(metadata.get("deletionTimestamp")), metadata.get("deletionGracePeriodSeconds")
    return None if ends is None or not isinstance(grace, int) else ends - grace


def _true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _ends(main: Object | None) -> tuple[int, ContainerExit | None]:
    """How often the main container has ended, and its last end."""
    if main is None:
        return 0, None
    restarts = int(main.get("restartCount", 0))
    now, before = (main.get("state") or {}), (main.get("lastState") or {}).get("terminated")
    if "terminated" in now:
        return restarts + 1, _end(now["terminated"])
    if "waiting" in now and before is not None:
        # The kubelet counts a restart when it has restarted.
        return restarts + 1, _end(before)
    return restarts, _end(before) if before is not None else None


def _end(terminated: Mapping[str, Any]) -> ContainerExit:
    code = int(terminated.get("exitCode", 0))
    signal = int(terminated.get("signal") or 0)
    return ContainerExit(
        code=code or (128 + signal if signal else 0),
        reason=str(terminated.get("reason", "")),
        last_line=shorten_last_line(str(terminated.get("message") or "")),
        at=seconds_of(terminated.get("finishedAt")),
    )


def shorten_last_line(text: str) -> str:
    """The last line that is not empty, shortened; of a JSON log line its message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return shorten(_message(lines[-1])) if lines else ""


def _message(line: str) -> str:
    """The message of a line of our programs' logs; the line itself if it is no such line. ``message`` is the
    last key (diloco_protocol.common.logs), for of a long line the kubelet keeps the end."""
    found = _MESSAGE.search(line)
    if found is None:
        return line
    try:
        return str(json.loads(found[1]))
    except ValueError:
        return line


def list_names(names: list[str]) -> str:
    """Names for a message: the first ``NAMED``, and the number of the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def merge_equal(said: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each sentence, with all subjects of which it is said. Their own names in it make no difference."""
    subjects: dict[str, list[str]] = {}
    sentences: dict[str, str] = {}
    for subject, sentence in said:
        key = sentence.replace(subject.rpartition(" ")[2], "")
        subjects.setdefault(key, []).append(subject)
        sentences.setdefault(key, sentence)
    return [f"{list_names(subjects[key])}: {sentence}" for key, sentence in sentences.items()]


def _excused(status: Mapping[str, Any], conditions: Mapping[Any, Mapping[str, Any]]) -> str:
    """Why losing the pod is no fault of the job's; empty: no such reason is known."""
    target = conditions.get("DisruptionTarget")
    if target is not None and _true(target):
        reason = str(target.get("reason"))
        return _DISRUPTIONS.get(reason) or str(target.get("message") or "it was disrupted")
    shut_down = status.get("phase") == "Failed" and status.get("reason") in _SHUT_DOWN
    return "its node was shut down" if shut_down else ""


# ------------------------------------------------------------------ why it does not start


def _obstacle(
    status: Mapping[str, Any],
    state: Mapping[str, Any],
    conditions: Mapping[Any, Mapping[str, Any]],
    newest: Callable[..., str],
    last: ContainerExit | None,
    ends: int,
) -> Obstacle | None:
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.get("status") == "False":
        message = scheduled.get("message") or newest("FailedScheduling") or "no node takes it"
        if scheduled.get("reason") == "SchedulingGated":
            return Obstacle("Unschedulable", f"it waits for its scheduling gates: {shorten(message)}")
        claim = "persistentvolumeclaim" in message.lower()
        return Obstacle("VolumeUnavailable" if claim else "Unschedulable", f"no node takes it: {shorten(message)}")
    for init in status.get("initContainerStatuses") or []:
        found = _waiting(init, (init.get("state") or {}).get("waiting"), f"init container {init.get('name')}")
        if found is not None:
            return found
    waiting = state.get("waiting") or {}
    if waiting.get("reason") == "CrashLoopBackOff" or "terminated" in state:
        return _crash(last, ends)
    for one in status.get("containerStatuses") or []:
        mine = (one.get("state") or {}).get("waiting")
        found = _waiting(one, mine, "" if mine == state.get("waiting") else f"container {one.get('name')}")
        if found is not None:
            return found
    for reasons, kind, said in _EVENTS:
        message = newest(*reasons)
        if message:
            return Obstacle(kind, f"{said}: {shorten(message)}{_cure(message)}", _missing_secret(message))
    return None


def _crash(last: ContainerExit | None, ends: int) -> Obstacle:
    said = "its program ended" if last is None else str(last)
    return Obstacle("Crashing", f"{said} ({ends} times)" if ends > 1 else said)


def _waiting(container: Mapping[str, Any], waiting: Mapping[str, Any] | None, subject: str) -> Obstacle | None:
    reason = str((waiting or {}).get("reason", ""))
    message = shorten(str((waiting or {}).get("message") or reason))
    prefix = f"{subject}: " if subject else ""
    if reason in _IMAGE:
        image = container.get("image", "")
        if reason == "ErrImageNeverPull":
            said = f"image {image} is not on the node, and imagePullPolicy is Never: load it into the cluster's nodes, "
            said += "or let them pull it, by imagePullPolicy in the podTemplate for an image of your own; for the "
            said += "operator's (make images CLUSTER=kind:NAME loads them) set images.registry of the chart"
        else:
            said = f"image {image} cannot be pulled ({reason}): {message}; "
            said += "check its name, and imagePullSecrets if its registry needs them"
        return Obstacle("ImageUnavailable", f"{prefix}{said}")
    if reason in _CONFIG:
        return Obstacle("PodConfiguration", f"{prefix}{message} ({reason}){_cure(message)}", _missing_secret(message))
    if reason == "CrashLoopBackOff":
        ended = (container.get("lastState") or {}).get("terminated")
        said = str(_end(ended)) if ended is not None else message
        return Obstacle("Crashing", f"{prefix}{said}")
    return None


def newest_message(cluster_events: Iterable[ClusterEvent], ref: Ref, *reasons: str, since: float = -math.inf) -> str:
    """What the newest Event about an object says; empty: there is none. ``reasons``: if given, only Events with one
    of them. ``since``: no Event before that. The ReplicaSets of a Deployment count as the Deployment."""
    fitting = [
        event
        for event in cluster_events
        if (not reasons or event.reason in reasons)
        and event.time >= since
        and (
            (event.kind, event.name) == ref
            or (ref.kind == "Deployment" and event.kind == "ReplicaSet" and event.name.rpartition("-")[0] == ref.name)
        )
    ]
    return max(fitting, key=lambda event: event.time).message if fitting else ""


def _cure(message: str) -> str:
    found = _ABSENT.search(message)
    if found is None:
        return ""
    return f"; create the {_KINDS[found[1]]} {found[2]}, or correct its name in the job"


def _missing_secret(message: str) -> str:
    """The name in `secret "NAME" not found`."""
    _, found, tail = message.partition('secret "')
    name = tail.partition('"')[0]
    return name if found and "not found" in tail else ""
