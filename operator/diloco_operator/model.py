"""What goes into a plan and what comes out: plain data between the walls and the plan.

Theory of operation. The walls (handlers, observe, apply, control) watch the cluster and
ask the job's syncer; once per reconcile they freeze what they know into an ``Observed``.
``plan.plan(observed, memory, settings)`` reads nothing else, decides, and returns a
``Plan``; the walls carry it out in the order of its fields and keep the ``PlanMemory`` for the
next turn. All times are wall-clock unix seconds. API objects are the dicts that the API
server sends (camelCase), never changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from diloco_protocol.vocabulary import ControlMethod

Object = dict[str, Any]
"""One API object as the API server sends it."""


Key = tuple[str, str]
"""A job: namespace and name."""


class Ref(NamedTuple):
    """A child object of a job, in the job's namespace."""

    kind: str  # ConfigMap, Service, StatefulSet, Deployment, ...
    name: str


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """A Kubernetes Event about one of the job's objects or pods, seen lately."""

    kind: str
    name: str
    reason: str  # FailedCreate, FailedMount, FailedScheduling, ...
    message: str
    time: float


@dataclass(frozen=True, slots=True)
class ApplyError:
    """What kept the walls from carrying out a part of an earlier plan."""

    ref: Ref
    # conflict: an object of that name is not the job's; invalid: the API server refuses the
    # object (422, 400); forbidden: RBAC or an admission rule; quota; other
    reason: Literal["conflict", "invalid", "forbidden", "quota", "other"]
    message: str


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """A program's answer to the operator, or why there is none."""

    document: dict[str, Any] | None  # of the syncer: the status document (docs/contracts.md)
    error: str = ""  # empty, or why there is no document
    at: float = 0.0  # when it was answered (or tried)
    failing_since: float | None = None  # since when every try failed; None: the last one did not


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a plan may depend on, at one instant."""

    now: float
    job: Object  # the DiLoCoJob: metadata, spec, status
    objects: dict[Ref, Object] = field(default_factory=dict)  # children that carry the job's label
    pods: tuple[Object, ...] = ()  # with the job's label, the terminating ones included
    nodes: dict[str, Object] | None = None  # by name; None: this operator may not read nodes
    cluster_events: tuple[ClusterEvent, ...] = ()
    apply_errors: tuple[ApplyError, ...] = ()
    syncer: ProgramAnswer | None = None  # None: the syncer is not in this cluster, or has no pod to ask
    # Status documents of learners' status ports, by pod name: only where the syncer is elsewhere.
    learners: dict[str, ProgramAnswer] = field(default_factory=dict)
    report: dict[str, Any] | None = None  # report.json, once the syncer has said an end


@dataclass(slots=True)
class PodSnapshot:
    """A pod as the plan saw it last, for telling and counting what happened to it since."""

    uid: str
    ends: int = 0  # how often its main container has ended
    started: bool = False  # its main container has run
    excused: str = ""  # why its going does not count: this operator's doing, preemption, eviction
    cause: str = ""  # what was wrong with it last, in words
    process: str = ""  # the process of it that the syncer listed


@dataclass(slots=True)
class PlanMemory:
    """What the plan wants to remember until the next turn, and may lose when the operator
    restarts: nothing here decides over work, only over counting and patience."""

    # place (a learner's pod name, or `syncer`) -> its pod as last seen
    seen: dict[str, PodSnapshot] = field(default_factory=dict)
    # pod UIDs whose going is this operator's own doing (rollout, scaling, suspension)
    own_deletions: set[str] = field(default_factory=set)
    # place -> (times deleted as crash-looping or silent, not again before)
    backoff: dict[str, tuple[int, float]] = field(default_factory=dict)
    # condition or fact -> since when it is observed so
    since: dict[str, float] = field(default_factory=dict)
    # place -> since when its successor is followed until it is in the quorum, and the process that was lost
    followed: dict[str, tuple[float, str]] = field(default_factory=dict)
    # times of force-deletions, for the rate budget
    force_deletions: list[float] = field(default_factory=list)
    # what an event was about -> the state that it told last, against telling it twice
    told: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SecretWanted:
    """A Secret to POST; that it is there already (409) is success. Never read, never patched."""

    name: str
    role: Literal["syncer", "learner"]
    manifest_head: Object  # apiVersion, kind, metadata (with ownerReferences)
    # What to put in, made only when it is sent: control-key, join-token, and with ``tls`` certificates.
    tls: bool
    control_key: bool
    # A pod waits for it though it should be there (deleted by hand): POST it again even if it was made.
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """An object to delete, with its UID as precondition."""

    ref: Ref
    uid: str
    why: str  # for the log
    force: bool = False  # grace 0: only for pods on lost nodes


@dataclass(frozen=True, slots=True)
class Call:
    """One signed call to the syncer's control service. Repeating one is harmless."""

    method: ControlMethod
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EventWanted:
    """One Kubernetes Event about the job, sent after the status is written."""

    type: Literal["Normal", "Warning"]
    reason: str  # CamelCase
    message: str  # a sentence for people


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order."""

    finalizer: bool  # whether the job shall carry our finalizer
    secrets: tuple[SecretWanted, ...] = ()
    # Whole manifests for server-side apply. Annotated, where they hold pods, with the generation
    # that they were rendered for (objects.GENERATION) and their own rendering (objects.RENDERED).
    apply: tuple[Object, ...] = ()
    calls: tuple[Call, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status: dict[str, Any] | None = None  # whole; None: leave as it is
    urgent: bool = False  # a transition: write the status now, not at most every 60 s
    # Told once: the plan does not repeat them, so the walls keep them until they are sent.
    events: tuple[EventWanted, ...] = ()
    delete_job: bool = False  # its time to live is over
    wake_in: float = 20.0  # seconds until the next reconcile if nothing else wakes it
    poll_syncer: float = 10.0  # seconds between status calls to the syncer until then


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What of the operator's settings a plan depends on (settings.py has them all)."""

    cluster: str | None  # this cluster's name; None: unnamed
    namespace: str  # the operator's own
    syncer_image: str  # defaults for jobs that start now
    worker_image: str
    image_pull_policy: str = "IfNotPresent"
    metrics_namespace: str | None = None  # whose pods may scrape; None: every namespace's
