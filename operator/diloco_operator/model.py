"""What goes into a plan and what comes out of it: plain data between the I/O shell and the plan.

The shell (informer, reconcile) watches the cluster and asks the job's syncer. Once a turn it freezes what it knows into
an ``Observed``. ``planning.plan_job`` reads nothing else, decides, and returns a ``JobPlan``. The shell carries the
plan out in the order of its fields, and keeps the ``PlanMemory`` for the next turn.

All times are wall-clock unix seconds. API objects are the dicts that the API server sends
(camelCase), never changed in place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib.metadata import version
from typing import Any, Generic, Literal, NamedTuple

from diloco_protocol.common.program_errors import RepeatedErrors
from diloco_protocol.documents import D, LearnerPage, Report, StatusDocument
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
    """A Kubernetes Event that somebody else sent lately about one of the job's objects or pods."""

    kind: str
    name: str
    reason: str  # FailedCreate, FailedMount, FailedScheduling, ...
    message: str
    time: float


Failure = Literal[
    "conflict", "invalid", "forbidden", "policy", "quota", "webhook", "terminating", "unavailable", "other"
]
"""Why a write was not taken. conflict: an object of that name is not the job's; invalid: the API server refuses the
object (422, 400); forbidden: a right is missing (RBAC); policy: something that was installed in the cluster refuses it
(PodSecurity, a LimitRange, a webhook, a policy); quota: a ResourceQuota does; webhook: somebody else's webhook does not
answer; terminating: the namespace is being deleted; unavailable: 5xx, 429 or no answer, while others are answered."""


LASTING: frozenset[Failure] = frozenset({"invalid", "policy"})
"""Faults of what is wanted: they end when that changes, or the policy does."""
TERMINATING = "because it is being terminated"
"""What the API server says of a namespace in which nothing can be made any more."""


@dataclass(frozen=True, slots=True)
class ApplyError:
    """Why a part of an earlier plan could not be carried out."""

    ref: Ref
    reason: Failure
    message: str


@dataclass(frozen=True, slots=True)
class ProgramAnswer(Generic[D]):
    """The last answer of the syncer or a learner to the operator, or why there is none."""

    document: D | None
    error: str = ""  # empty, or why there is no document
    at: float = 0.0  # when it was asked for: the document is from then or later
    failing_since: float | None = None  # since when every try failed (monotonic); None: the last one did not


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
    syncer: ProgramAnswer[StatusDocument] | None = None  # None: the syncer is not in this cluster, or has no pod to ask
    # By pod name: only where the syncer is elsewhere.
    learners: dict[str, ProgramAnswer[LearnerPage]] = field(default_factory=dict)
    report: Report | None = None  # report.json, once the syncer has said an end
    # For so many seconds nothing was heard of pods, StatefulSets or nodes; infinite: they may not be watched.
    view_age: float = 0.0
    monotonic: float | None = None  # seconds of a clock that nobody sets, for what is timed; None: ``now``


class Fact(Enum):
    """What the plan times: for how long it has been so without a break."""

    SYNCER_NOT_ANSWERING = auto()
    READY_SYNCER_NOT_ANSWERING = auto()  # subject: its pod's UID
    SYNCER_VOLUME_HELD = auto()  # its pod waits for a ReadWriteOncePod claim that another pod has
    JOB_CHANGING = auto()  # something is going on, so the syncer is asked often
    APPLY_REFUSED = auto()  # something of the job could not be applied
    MERGES_FELL = auto()  # the number of merges is smaller than it was
    REPORT_MISSING = auto()  # the job is complete, and its report is not there
    OUTPUT_UNANSWERED = auto()  # the merged model is being written, and the syncer does not answer
    SUSPENDING = auto()
    SUSPENDING_UNANSWERED = auto()  # the same, while the syncer does not answer
    SETTINGS_DIFFER = auto()  # this copy of the job has other settings than the hub's
    LINKS_FAST_ENOUGH = auto()  # no link is too slow
    LINK_TOO_SLOW = auto()  # subject: a slot, as REGION-ORDINAL
    REGION_NEVER_HEARD = auto()  # subject: a region of another cluster
    NODE_LOST = auto()  # subject: a node's name; it is not ready, or there is no such object
    NODE_MISSING = auto()  # subject: a node's name; there is no such object
    POD_MISSING = auto()  # subject: a learner's place
    POD_SLOW = auto()  # subject: a pod's UID; it does not start, or is stuck
    POD_NOT_JOINED = auto()  # subject: a pod's UID, in an epoch; it runs, and the syncer does not have it
    POD_SILENT = auto()  # subject: a pod's UID, in an epoch; it is ready, and the syncer does not hear it
    POD_LEFT_BEHIND = auto()  # subject: as of POD_SILENT; nobody has come back that fell silent with it
    VOLUME_STAYS = auto()  # the job is deleted, and its volume shall be, and is not
    PROCESS_UNKNOWN = auto()  # subject: how its id begins; it holds a slot, and its pod was never seen


class Timer(NamedTuple):
    """Which fact, about what, and in which epoch of the syncer where that matters."""

    fact: Fact
    subject: str = ""
    epoch: int | None = None


class Timers:
    """Since when facts hold. A fact that does not hold has no timer."""

    def __init__(self) -> None:
        self._since: dict[Timer, float] = {}

    def observe(self, timer: Timer, now: float, holds: bool = True) -> float:
        """For how many seconds the fact has held without a break; 0 where it does not hold now."""
        if not holds:
            self._since.pop(timer, None)
            return 0.0
        return now - self._since.setdefault(timer, now)

    def seconds(self, timer: Timer, now: float) -> float:
        """For how many seconds the fact had held when it was last observed, and until now; 0: it did not."""
        return now - self._since.get(timer, now)

    def stop(self, *facts: Fact) -> None:
        """Stop the timers of these facts, whatever their subjects."""
        self._since = {timer: since for timer, since in self._since.items() if timer.fact not in facts}

    def keep(self, fact: Fact, subjects: Collection[str]) -> None:
        """Stop the timers of a fact about anything but ``subjects``."""
        self._since = {
            timer: since for timer, since in self._since.items() if timer.fact is not fact or timer.subject in subjects
        }


class Topic(Enum):
    """What Events are about, where one is sent per transition and not per turn."""

    SPEC_INVALID = auto()
    JOB_STARTED = auto()
    JOB_END = auto()  # suspension, deletion and the two ends
    JOB_REFUSED = auto()
    APPLY_FAILED = auto()
    CONDITION = auto()  # subject: the condition's type
    SYNCER_FAULT = auto()
    DURABLE = auto()
    VOLUME = auto()  # state: the claim's UID
    QUORUM = auto()
    REGION_SCALE = auto()  # subject: a region
    REGION_ROLLOUT = auto()  # subject: a region
    POD_OBSTACLE = auto()  # subject: a pod's UID
    POD_NODE_LOST = auto()  # subject: a pod's UID
    VOLUME_STAYS = auto()
    OUTPUT = auto()
    RESOURCES = auto()  # the job asks for less than its model needs


@dataclass(slots=True)
class PodSnapshot:
    """A pod as the last turn saw it. What differs now has happened since."""

    uid: str
    ends: int = 0  # how often its main container has ended
    started: bool = False  # its main container has run
    leaving: bool = False  # it terminates, or has ended
    excused: str = ""  # why losing it does not count: the operator's own doing, preemption, eviction
    cause: str = ""  # in words, how its container ended last
    process: str = ""  # id of the process of it that the syncer listed
    joined: bool = False  # the syncer has listed a process of it
    # When this operator saw an end that it judges by the syncer's next answer, and how many ends there were then.
    awaits_answer: tuple[float, int] | None = None


@dataclass(slots=True)
class Backoff:
    """How often a place's pod was deleted as crash-looping or silent, and when it may be again."""

    deletions: int = 0
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class AwaitedSuccessor:
    """A place whose pod is gone, and whose new pod is not in the quorum yet."""

    since: float
    lost_process: str  # id of the process that went with the pod; empty: not known


@dataclass(frozen=True, slots=True)
class PlaceFailures:
    """How often the program of a place failed since the last merge, and when that was counted last."""

    count: int
    at: float


@dataclass(frozen=True, slots=True)
class CountedFailure:
    """The last failure that counted against failurePolicy.maxReplacements."""

    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class RepeatedError:
    """A place that ended again and again with the same error."""

    place: str
    times: int
    error: str
    at: float  # its last end
    process: str = ""  # of a learner its pod's UID without dashes


@dataclass(slots=True)
class PlanMemory:
    """What the plan remembers of one job from turn to turn.

    It may be lost at any time, as when the operator restarts. So nothing in it decides over work: it counts, and it
    says how long something has lasted. A *place* is a learner's pod name, or ``syncer``.
    """

    timers: Timers = field(default_factory=Timers)
    snapshots: dict[str, PodSnapshot] = field(default_factory=dict)  # by place
    # UIDs of pods that this operator has decided to remove: by a rollout, scaling or suspension, or as broken.
    own_deletions: set[str] = field(default_factory=set)
    backoffs: dict[str, Backoff] = field(default_factory=dict)  # by place
    silent_places: set[str] = field(default_factory=set)  # whose silent pod was deleted, and nobody takes part since
    successors: dict[str, AwaitedSuccessor] = field(default_factory=dict)  # by place
    # Region and ordinal of learners that the rollout has restarted and that do not take part again yet.
    rollout_restarts: set[tuple[str, int]] = field(default_factory=set)
    force_deletions: list[float] = field(default_factory=list)  # when, for their budget
    namespace_terminates: bool = False  # nobody can take that back
    settings_edited_at: float | None = None  # when the programs' settings were last seen as somebody had edited them
    # When the newest pod was created of what makes pods, one that is gone included, by the API server's clock.
    newest_pods: dict[Ref, float] = field(default_factory=dict)
    failures: dict[str, PlaceFailures] = field(default_factory=dict)  # by place
    last_counted_failure: CountedFailure | None = None
    errors: RepeatedErrors = field(default_factory=RepeatedErrors)  # by place
    errors_generation: int = 0  # of the job, under which they were counted
    repeated_error: RepeatedError | None = None
    model_size: tuple[int, int] = (0, 0)  # trained parameters and fragments, as the syncer told them last
    # The state of each topic's subject of which an Event was sent last, so that none is sent twice.
    reported: dict[tuple[Topic, str], str] = field(default_factory=dict)


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
    # Of a process that is said to have ended: its pod's name, and that pod's UID without dashes. The call is made only
    # if the API server says so, too.
    ended: tuple[str, str] | None = None


EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True, slots=True)
class EventWanted:
    """One Kubernetes Event about the job, sent after the status is written."""

    type: EventType
    reason: str  # CamelCase
    message: str  # a sentence for people


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What to do now, in this order."""

    finalizer: bool  # whether the job shall carry our finalizer
    secrets: tuple[SecretWanted, ...] = ()
    # Whole manifests for server-side apply. Annotated, where they hold pods, with the generation
    # that they were rendered for (names.GENERATION) and their own rendering (names.RENDERED).
    apply: tuple[Object, ...] = ()
    tries: tuple[Object, ...] = ()  # likewise, of which nothing shall be made yet: only their faults are looked for
    calls: tuple[Call, ...] = ()
    deletes: tuple[Delete, ...] = ()
    status: dict[str, Any] | None = None  # whole; None: leave as it is
    # The plan does not repeat them, so the shell keeps them until they are sent.
    events: tuple[EventWanted, ...] = ()
    delete_job: bool = False  # its time to live is over
    wants_fresh_view: bool = False  # a pod is not deleted, or a process not reported, before the view is fresh
    wake_in: float = 20.0  # seconds until the next reconcile if nothing else wakes it
    poll_syncer: float = 10.0  # seconds between status calls to the syncer until then


RELEASE = version("decoupled-diloco")


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What of the operator's settings a plan depends on (settings.py has them all)."""

    cluster: str | None  # this cluster's name; None: unnamed
    namespace: str  # the operator's own
    syncer_image: str  # defaults for jobs that start now
    worker_image: str
    image_pull_policy: str = "IfNotPresent"
    metrics_namespace: str | None = None  # whose pods may scrape; None: every namespace's
    pull_secrets: tuple[str, ...] = ()  # of jobs' pods, in the job's namespace
    priority_class: str | None = None  # of jobs' pods that name none
    release: str = RELEASE  # the operator's own
