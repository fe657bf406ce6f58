"""The syncer core's vocabulary: events go in, actions come out.

Everything here is plain data. The shell (server, store, clock) turns what happens into an event, hands it to
``core.Core.handle(event, now)`` and carries out the actions that it returns, in order. ``now`` is a monotonic time in
seconds; the core never asks for it. What both sides of the wire know is in ``diloco_protocol.wire.records``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal
from diloco_protocol.wire.limits import WireError
from diloco_protocol.wire.records import Evaluation, Lease, PushHeader, Seat, StepReport
from diloco_protocol.wire.records import Join as Join
from diloco_syncer.core.books.slots import MergedPush as MergedPush


class BadMessage(WireError):
    """What a caller said contradicts what can be: its session ends, and nothing of it was believed."""


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    connection: int


@dataclass(frozen=True, slots=True)
class Reported:
    connection: int
    report: StepReport


@dataclass(frozen=True, slots=True)
class PushReceived:
    """All bytes of a push are here, decoded; ``norm`` is the L2 norm of the whole fragment, ``growth`` the size of its
    greatest piece beside the parameters (numerics/merge.py)."""

    header: PushHeader
    norm: float
    finite: bool
    handle: int  # the shell's number for the decoded bytes (and an offer's spool file)
    growth: float = 0.0


@dataclass(frozen=True, slots=True)
class InitialModelStored:
    """Version 0 of all fragments is durable."""

    layout_digest: str
    fragment_elements: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InitialModelFailed:
    """The upload of version 0 broke; somebody else must be asked. ``not_believed``: as in ``LostVersionFailed``."""

    connection: int
    not_believed: str = ""


@dataclass(frozen=True, slots=True)
class MergeDurable:
    """The shell merged, and the record of (fragment, version) is durable."""

    fragment: int
    version: int
    merge_seconds: float  # merge, outer step, durability
    norms: tuple[float, ...]  # per push, in the order of the Merge action, without those that were left out
    norm: float = 0.0  # of the merged outer gradient; 0: not known
    left_out: tuple[int, ...] = ()  # handles of pushes with which it would have become infinite


@dataclass(frozen=True, slots=True)
class LeaseRequested:
    connection: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A learner got SIGTERM: it goes on being a member until Drained."""

    connection: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Every fragment offered or given up."""

    connection: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The operator or the local runner saw the process end."""

    region: str
    ordinal: int
    process: str  # empty: whichever runs there
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluator's loss (mean nats per token); from anybody else it is ignored."""

    connection: int
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class EvaluationAdvanced:
    """The evaluator has made this share (0 to 1) of the final score; from anybody else it is ignored."""

    connection: int
    share: float


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Suspend, delete, fail or interrupt: drain first, then that phase."""

    phase: JobPhase
    message: str


@dataclass(frozen=True, slots=True)
class PeerStateRequested:
    """``patient``: those that are about to train are waited for, too."""

    connection: int
    patient: bool = False


@dataclass(frozen=True, slots=True)
class PeerStateReceived:
    transfer: int


@dataclass(frozen=True, slots=True)
class PeerStateAdvanced:
    """Bytes of a state that was asked for have come."""

    transfer: int


@dataclass(frozen=True, slots=True)
class VersionSent:
    """All bytes of a fragment's version were sent to that process."""

    connection: int
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class PushAdvanced:
    """Bytes of a push or an offer have come."""


@dataclass(frozen=True, slots=True)
class PeerStateFailed:
    """That process cannot give the state, or what it gave did not come through."""

    connection: int
    transfer: int


@dataclass(frozen=True, slots=True)
class LostVersionAdvanced:
    """Bytes of a base that a learner holds have come; ``whole``: all of them."""

    connection: int
    fragment: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class LostVersionAccepted:
    """A base that a learner held is here and makes sense: from now on the store may have it as the newest record."""

    fragment: int


@dataclass(frozen=True, slots=True)
class LostVersionStored:
    """A base that a learner held is durable as the fragment's newest record."""

    fragment: int


@dataclass(frozen=True, slots=True)
class LostVersionFailed:
    """That process cannot give this base, or what it gave cannot be used. ``not_believed``: why that is not a version
    which this job's syncers have announced; empty: it may be."""

    connection: int
    fragment: int
    not_believed: str = ""


@dataclass(frozen=True, slots=True)
class ShardLost:
    """The process that has the bytes of some fragments has ended, or is not reached. The shell tells of what happens to
    one shard in its order: a loss that is told after the shard is ready is another one. ``why``: for people."""

    shard: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class ShardReady:
    """A shard has come back from its store; what it had made durable and not told of was told before. ``handles``: of
    all those accepted pushes that it still has, the new handle by the old one. No new one was ever an old one, and what
    is said of an old one from now on (``ReleasePush``) is about nothing that the shard has."""

    shard: int
    handles: dict[int, int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; send one at ``core.wake_at`` at the latest."""


Event = (
    Join
    | ConnectionLost
    | Reported
    | PushReceived
    | InitialModelStored
    | InitialModelFailed
    | MergeDurable
    | LeaseRequested
    | DrainRequested
    | Drained
    | ProcessEnded
    | Evaluated
    | EvaluationAdvanced
    | EndRequested
    | PeerStateRequested
    | PeerStateReceived
    | PeerStateAdvanced
    | PeerStateFailed
    | VersionSent
    | PushAdvanced
    | LostVersionAdvanced
    | LostVersionAccepted
    | LostVersionStored
    | LostVersionFailed
    | ShardLost
    | ShardReady
    | Tick
)


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Admit:
    """Answer a join with Welcome. ``seat`` None: standby or observer."""

    connection: int
    observer: bool
    seat: Seat | None
    initialise: bool
    phase: JobPhase
    message: str
    merged: tuple[MergedPush, ...]  # per fragment, for the announcements inside Welcome
    withheld: frozenset[int] = frozenset()  # fragments that are not announced: it holds newer ones


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a join with Refusal, or end a session with one."""

    connection: int
    reason: str
    message: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class Promote:
    connection: int
    seat: Seat


@dataclass(frozen=True, slots=True)
class RequestInitialModel:
    """This connection shall upload version 0."""

    connection: int


@dataclass(frozen=True, slots=True)
class Pull:
    connection: int
    round: int
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class AnswerPush:
    """The answer to PushReceived; reason None: accepted. An accepted offer is
    spooled durably by the shell before it answers."""

    handle: int
    reason: PushRefusal | None
    message: str
    offer: bool = False


@dataclass(frozen=True, slots=True)
class ReleasePush:
    """The bytes behind the handle are not needed any more."""

    handle: int


@dataclass(frozen=True, slots=True)
class Responder:
    """One push in a merge; ``weight`` is normalised (section 5); ``batch``: sequences of its learner's step, by the
    job."""

    header: PushHeader
    handle: int
    weight: float
    age: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge these into ``version`` = v_p + 1, make it durable, then say ``MergeDurable``. Responders are in slot order.
    ``waited_seconds``: from opening to now; ``quorum_seconds``: from opening to the quorum. ``last``: all learners have
    left, and no step follows that could repair what this merge does."""

    fragment: int
    version: int
    round: int
    responders: tuple[Responder, ...]
    quorum_seconds: float
    waited_seconds: float
    job_tokens: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell every connection about the version; ``merged`` maps connections to
    their newest merged push, all others get none."""

    fragment: int
    version: int
    merged: dict[int, MergedPush]
    job_tokens: int


@dataclass(frozen=True, slots=True)
class GrantLease:
    connection: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class SetPhase:
    """Tell every connection the phase."""

    phase: JobPhase
    message: str


@dataclass(frozen=True, slots=True)
class RequestPeerState:
    """Ask this learner to upload its inner optimizer state under ``transfer``.
    ``checkpoint``: it goes into the job's checkpoint rather than to a newcomer."""

    connection: int
    transfer: int
    checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class OfferPeerState:
    """Tell the newcomer: download this transfer; 0: there is none."""

    connection: int
    transfer: int


@dataclass(frozen=True, slots=True)
class RequestVersion:
    """Ask this process for the version of a fragment that it holds and the store has lost."""

    connection: int
    fragment: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class RestartFromStore:
    """Stop, and begin again from the store, under an epoch above ``above``."""

    reason: str
    above: int


@dataclass(frozen=True, slots=True)
class Persist:
    """SlotTable, leases or phase changed: write the state document durably now,
    before the actions that follow are carried out."""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """One transition, for log, status page and the runner's fault accounting."""

    kind: EventKind
    slot: int
    incarnation: int
    message: str
    details: dict[str, object] = field(default_factory=dict)


Action = (
    Admit
    | Refuse
    | Promote
    | RequestInitialModel
    | Pull
    | AnswerPush
    | ReleasePush
    | Merge
    | Announce
    | GrantLease
    | SetPhase
    | RequestPeerState
    | OfferPeerState
    | RequestVersion
    | RestartFromStore
    | Persist
    | RecordEvent
)
