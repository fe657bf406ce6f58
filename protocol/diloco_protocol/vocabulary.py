"""The words and numbers that several programs must agree on, each defined once.

What a word means to its program is said where the program uses it; what the wire's words mean to the
other side stands in docs/protocol.md. Members of a StrEnum are strings: they compare equal to the text
of a JSON document and are written as that text.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

# ------------------------------------------------------------------ a job's life


class JobPhase(StrEnum):
    """The job's phase as its syncer decides it; sync.proto's PhaseName without the prefix."""

    WAITING = "waiting"  # fewer than K slots hold version 0
    TRAINING = "training"
    HOLDING = "holding"  # below the quorum: learners go on, merges wait
    DRAINING = "draining"  # learners offer their work and leave
    EVALUATING = "evaluating"  # the last merges are done, the final loss is measured
    COMPLETE = "complete"
    FAILED = "failed"
    SUSPENDED = "suspended"
    DELETED = "deleted"


TRAINING_PHASES = frozenset({JobPhase.WAITING, JobPhase.TRAINING, JobPhase.HOLDING})
"""Learners are wanted."""
FINISHING_PHASES = frozenset({JobPhase.DRAINING, JobPhase.EVALUATING})
"""No further step. While learners drain, offers are merged."""
ENDED_PHASES = frozenset({JobPhase.COMPLETE, JobPhase.FAILED, JobPhase.SUSPENDED, JobPhase.DELETED})
"""This syncer does nothing more for the job."""
STOPPED_PHASES = FINISHING_PHASES | ENDED_PHASES
"""Learners make no further step."""


class SlotState(StrEnum):
    """State of one slot, the place of one learner in the job."""

    EMPTY = "empty"  # nobody has ever held it
    ACTIVE = "active"
    SUSPECT = "suspect"  # its connection is lost; its process may come back
    LOST = "lost"
    DRAINING = "draining"
    DRAINED = "drained"


HELD_STATES = frozenset({SlotState.ACTIVE, SlotState.SUSPECT, SlotState.DRAINING})
"""States of a slot that some process holds."""


class EventKind(StrEnum):
    """Kinds of events in the syncer's status document (docs/contracts.md)."""

    INITIALISED = "initialised"
    PHASE = "phase"
    JOINED = "joined"  # a process holds a slot: for the first time, or again
    SPARE = "spare"  # a process stands by
    REFUSED = "refused"  # a process is refused for good
    FIRST_STEP = "first-step"
    FIRST_MERGE = "first-merge"
    NO_STEPS = "no-steps"  # a learner trains, and has not finished a step for long
    OPTIMIZER_FRESH = "optimizer-fresh"  # a newcomer's inner optimizer begins without the state of a peer or a disk
    STARVED = "starved"
    FEW_LEARNERS = "few-learners"  # merges have fewer learners than there are
    LEFT_OUT = "left-out"  # a push with which a merge would have become infinite
    LARGE_MERGE = "large-merge"  # the norm of a merge is far above those before it
    ROUND_OVERDUE = "round-overdue"  # it has waited for its pushes for long
    SUSPECT = "suspect"
    LOST = "lost"
    PROCESS_ENDED = "process-ended"  # somebody who knows said so: its slot is lost
    DRAINED = "drained"
    DROPPED = "dropped"
    HOLD = "hold"
    RESUME = "resume"
    REGION_LOST = "region-lost"
    REGION_BACK = "region-back"
    SHARD_LOST = "shard-lost"
    SHARD_READY = "shard-ready"  # it is back from its store
    SYNCER_RESTART = "syncer-restart"  # it began again from its store by itself, and why
    LOST_DATA = "lost-data"
    RECOVERED = "recovered"
    OUTER_RESTART = "outer-restart"
    REPAIRED = "repaired"  # the restored state held impossible numbers


class ResourcePhase(StrEnum):
    """``status.phase`` of the DiLoCoJob resource, as the operator writes it; for people."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    HOLDING = "Holding"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    FINISHING = "Finishing"
    COMPLETE = "Complete"
    FAILED = "Failed"
    DELETING = "Deleting"
    INVALID = "Invalid"


FAULT_CONDITIONS = frozenset(
    {
        *("RegionLost", "LinksTooSlow", "RoundOverdue", "SpecDrift", "SettingsDiffer", "NameConflict", "Degraded"),
        "Failed",
    }
)
"""Conditions of a job that tell of trouble when they are True; the others do when they are False."""

JOB_REFUSED_REASONS = frozenset(
    {
        *("Unsupported", "PodTemplate", "UpgradeNeeded", "NotPlaced", "NameConflict", "Refused", "Forbidden"),
        *("QuotaExceeded", "WebhookUnavailable", "ApplyFailed"),
    }
)
"""Reasons of the condition Ready: the API server refuses the job, or an object that it cannot do without,
until a person changes something."""

# ------------------------------------------------------------------ how a process ends


class SyncerExit(IntEnum):
    """Exit codes of the syncer."""

    OK = 0  # the job ended, or the syncer was asked to stop and its state is durable
    FAILED = 1  # the job failed
    CONFIGURATION = 2  # the job file, the arguments or the store's content are wrong: a restart does not help
    SUPERSEDED = 3  # another syncer has taken over the store
    STORE = 4  # the store cannot be written
    CREDENTIALS = 5  # the credentials cannot be used: a restart helps once they are put right


class WorkerExit(IntEnum):
    """Exit codes of learner and evaluator."""

    OK = 0
    FAILED = 1
    CONFIGURATION = 2  # the environment, the job file or the model is wrong: a restart does not help
    REFUSED = 4  # the syncer refused the process for good
    DIVERGED = 5  # its parameters are not finite: a replacement begins from the merged model
    STALLED = 6  # a step took longer than learners.stallSeconds: stack traces are in the log
    GROUP = 7  # another rank of its learner has ended, or is silent: that one's end says why


ENDS_FOR_RESUME = "the job continues: this process ends, so that a new one can take part"
"""Termination message of a learner that was idle at the job's end (complete, suspended), or whose job was
drained, when the job is resumed."""

# ------------------------------------------------------------------ why a program is refused


class PushRefusal(StrEnum):
    """Why the syncer refuses a push; one counter each in its metrics (docs/algorithm.md section 4.5)."""

    FENCED = "fenced"  # an older incarnation
    NO_SLOT = "no-slot"
    OTHER_JOB = "other-job"
    OTHER_LAYOUT = "other-layout"
    OTHER_EPOCH = "other-epoch"  # base of a history that this store does not have
    OTHER_ROUND = "other-round"  # late, or never opened
    REPEATED = "repeated"  # the id was seen
    ALREADY_MERGED = "already-merged"  # base older than the slot's last merged version
    FUTURE_BASE = "future-base"
    TOO_OLD = "too-old"
    WRONG_SIZE = "wrong-size"
    WRONG_ENCODING = "wrong-encoding"
    NOT_FINITE = "not-finite"
    NORM_GATE = "norm-gate"
    OUT_OF_SCALE = "out-of-scale"  # a piece is far larger than the parameters
    NO_STEPS = "no-steps"
    NO_TOKENS = "no-tokens"
    INCONSISTENT = "inconsistent"  # the header contradicts itself
    BAD_CHECKSUM = "bad-checksum"
    ENDED = "ended"


class TransferRefusal(StrEnum):
    """Why an upload is refused for the transfer's sake."""

    PARTIAL = "partial"  # no refusal: this part does not complete its payload
    BUSY = "busy"  # too many uploads at once; try again after a pause
    BAD_TRANSFER = "bad-transfer"
    NOT_JOINED = "not-joined"  # the process that the header names has no session
    INITIAL = "initial"  # a part of version 0 that was not asked for, or that does not fit
    BASE = "base"  # a version that was not asked for, or that does not fit
    NOT_ASKED = "not-asked"
    TOO_LARGE = "too-large"
    NO_SPACE = "no-space"


class JoinRefusal(StrEnum):
    """Why the syncer refuses or ends a session."""

    BAD_JOIN = "bad-join"
    OTHER_LAYOUT = "other-layout"
    SPEC_DRIFT = "spec-drift"
    OTHER_DATA = "other-data"
    NO_SUCH_PLACE = "no-such-place"
    NO_SUCH_REGION = "no-such-region"
    SUPERSEDED = "superseded"
    LOST = "lost"
    OTHER_HISTORY = "other-history"
    EMPTY_STORE = "empty-store"
    INITIALISE = "initialise"
    BAD_MESSAGE = "bad-message"
    FAULT = "fault"  # the syncer failed at what this process said


class ConnectionRefusal(StrEnum):
    """Why the syncer refuses a connection, or a call on it, before it asks what the job is; labels of
    diloco_refused_connections_total."""

    STRANGER = "stranger"
    EXPIRED = "expired"
    NOT_YET_VALID = "not-yet-valid"
    NO_CERTIFICATE = "no-certificate"
    BAD_CERTIFICATE = "bad-certificate"
    UNNAMED = "unnamed"
    WRONG_ROLE = "wrong-role"
    WRONG_JOB = "wrong-job"
    WRONG_REGION = "wrong-region"
    WRONG_PROCESS = "wrong-process"
    WRONG_TOKEN = "wrong-token"
    BAD_JOIN = "bad-join"
    REPLAYED = "replayed"
    TOO_MANY_SESSIONS = "too-many-sessions"
    TOO_MANY_JOINS = "too-many-joins"
    TOO_MANY_CALLS = "too-many-calls"
    TOO_MANY_CONNECTIONS = "too-many-connections"
    NOT_TLS = "not-tls"
    OTHER_TLS = "other-tls"
    HANDSHAKE_TIMEOUT = "handshake-timeout"
    HANDSHAKE_FLOOD = "handshake-flood"
    BROKEN_OFF = "broken-off"
    DISTRUSTED = "distrusted"
    NO_ROOM = "no-room"


class TrustFailure(StrEnum):
    """Why a learner has no session, found on its own side; in its status page beside the syncer's refusals."""

    UNTRUSTED_SYNCER = "untrusted-syncer"  # its certificate is not believed
    CERTIFICATE_REFUSED = "certificate-refused"  # the syncer does not believe ours
    CREDENTIALS_UNUSABLE = "credentials-unusable"  # our own files cannot be read
    UNAUTHENTICATED = "unauthenticated"  # the join token is missing or wrong


class ControlMethod(StrEnum):
    """Methods of the Control service (docs/protocol.md)."""

    PROCESS_ENDED = "process-ended"
    CHECKPOINT = "checkpoint"
    ANNOUNCE = "announce"
    REPORT = "report"
    STATUS = "status"


# ------------------------------------------------------------------ sizes

MAX_FRAGMENTS = 512
"""Of a job. A Report has a row of at most 90 bytes for each fragment: 46 KiB of a push's header."""
SHARD_FAILING = 3
"""Ends of a shard's process in a row, each soon after its start, with which it is named though it is there."""

# ------------------------------------------------------------------ Kubernetes

DOMAIN = "diloco.io"
VERSION = "v1alpha1"
API_VERSION = f"{DOMAIN}/{VERSION}"
JOB_KIND = "DiLoCoJob"
JOB_PLURAL = "dilocojobs"
FINALIZER = f"{DOMAIN}/job"
LABEL_JOB = f"{DOMAIN}/job"
LABEL_ROLE = f"{DOMAIN}/role"
EVALUATOR = "evaluator"  # the process of that role, and what its files are called; no region has this name
LABEL_REGION = f"{DOMAIN}/region"
LABEL_SHARD = f"{DOMAIN}/shard"  # of a shard pod: its number
LABEL_POD_INDEX = "apps.kubernetes.io/pod-index"

SYNC_PORT = 7700
CONTROL_PORT = 7701
HTTP_PORT = 7702
EXPORT_PORT = 7703
SHARDS_PORT = 7704  # of the syncer, for its shards that have pods
WORKER_PORT = 7710
