from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_LEARNER: _ClassVar[Role]
    ROLE_EVALUATOR: _ClassVar[Role]

class PhaseName(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[PhaseName]
    PHASE_WAITING: _ClassVar[PhaseName]
    PHASE_TRAINING: _ClassVar[PhaseName]
    PHASE_HOLDING: _ClassVar[PhaseName]
    PHASE_DRAINING: _ClassVar[PhaseName]
    PHASE_EVALUATING: _ClassVar[PhaseName]
    PHASE_COMPLETE: _ClassVar[PhaseName]
    PHASE_FAILED: _ClassVar[PhaseName]
    PHASE_SUSPENDED: _ClassVar[PhaseName]
    PHASE_DELETED: _ClassVar[PhaseName]
ROLE_UNSPECIFIED: Role
ROLE_LEARNER: Role
ROLE_EVALUATOR: Role
PHASE_UNSPECIFIED: PhaseName
PHASE_WAITING: PhaseName
PHASE_TRAINING: PhaseName
PHASE_HOLDING: PhaseName
PHASE_DRAINING: PhaseName
PHASE_EVALUATING: PhaseName
PHASE_COMPLETE: PhaseName
PHASE_FAILED: PhaseName
PHASE_SUSPENDED: PhaseName
PHASE_DELETED: PhaseName

class LearnerMessage(_message.Message):
    __slots__ = ("join", "report", "lease_request", "evaluation", "drained", "peer_state_wanted", "peer_state_unavailable", "drain_request", "base_unavailable", "evaluation_progress")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LEASE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    PEER_STATE_WANTED_FIELD_NUMBER: _ClassVar[int]
    PEER_STATE_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BASE_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    join: Join
    report: Report
    lease_request: LeaseRequest
    evaluation: Evaluation
    drained: Drained
    peer_state_wanted: PeerStateWanted
    peer_state_unavailable: PeerStateUnavailable
    drain_request: DrainRequest
    base_unavailable: BaseUnavailable
    evaluation_progress: EvaluationProgress
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., lease_request: _Optional[_Union[LeaseRequest, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., peer_state_wanted: _Optional[_Union[PeerStateWanted, _Mapping]] = ..., peer_state_unavailable: _Optional[_Union[PeerStateUnavailable, _Mapping]] = ..., drain_request: _Optional[_Union[DrainRequest, _Mapping]] = ..., base_unavailable: _Optional[_Union[BaseUnavailable, _Mapping]] = ..., evaluation_progress: _Optional[_Union[EvaluationProgress, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("format", "job", "process", "role", "region", "ordinal", "layout_digest", "digests", "sequences", "held", "previous_incarnation", "slot", "idle", "tenure", "pod", "attempt", "data_samples")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DATA_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    format: int
    job: str
    process: str
    role: Role
    region: str
    ordinal: int
    layout_digest: str
    digests: _containers.ScalarMap[str, str]
    sequences: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    previous_incarnation: int
    slot: int
    idle: bool
    tenure: int
    pod: str
    attempt: int
    data_samples: _containers.RepeatedCompositeFieldContainer[DataSample]
    def __init__(self, format: _Optional[int] = ..., job: _Optional[str] = ..., process: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., region: _Optional[str] = ..., ordinal: _Optional[int] = ..., layout_digest: _Optional[str] = ..., digests: _Optional[_Mapping[str, str]] = ..., sequences: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., previous_incarnation: _Optional[int] = ..., slot: _Optional[int] = ..., idle: _Optional[bool] = ..., tenure: _Optional[int] = ..., pod: _Optional[str] = ..., attempt: _Optional[int] = ..., data_samples: _Optional[_Iterable[_Union[DataSample, _Mapping]]] = ...) -> None: ...

class DataSample(_message.Message):
    __slots__ = ("first", "items", "digest")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    first: int
    items: int
    digest: str
    def __init__(self, first: _Optional[int] = ..., items: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("epoch", "version", "settled")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    settled: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., settled: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("slot_step", "trained_steps", "trained_tokens", "compute_seconds", "stalled_seconds", "loss", "step_seconds", "fragments", "cursors", "paused", "link", "echo", "diverged", "tenure", "young_optimizer", "batches", "fresh_optimizer", "ranks")
    SLOT_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAINED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    YOUNG_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    FRESH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    slot_step: int
    trained_steps: int
    trained_tokens: int
    compute_seconds: float
    stalled_seconds: float
    loss: float
    step_seconds: float
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentReport]
    cursors: _containers.RepeatedCompositeFieldContainer[LeaseCursor]
    paused: bool
    link: Link
    echo: int
    diverged: bool
    tenure: int
    young_optimizer: bool
    batches: int
    fresh_optimizer: str
    ranks: Ranks
    def __init__(self, slot_step: _Optional[int] = ..., trained_steps: _Optional[int] = ..., trained_tokens: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., stalled_seconds: _Optional[float] = ..., loss: _Optional[float] = ..., step_seconds: _Optional[float] = ..., fragments: _Optional[_Iterable[_Union[FragmentReport, _Mapping]]] = ..., cursors: _Optional[_Iterable[_Union[LeaseCursor, _Mapping]]] = ..., paused: _Optional[bool] = ..., link: _Optional[_Union[Link, _Mapping]] = ..., echo: _Optional[int] = ..., diverged: _Optional[bool] = ..., tenure: _Optional[int] = ..., young_optimizer: _Optional[bool] = ..., batches: _Optional[int] = ..., fresh_optimizer: _Optional[str] = ..., ranks: _Optional[_Union[Ranks, _Mapping]] = ...) -> None: ...

class Ranks(_message.Message):
    __slots__ = ("count", "slowest", "late_seconds")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    LATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    count: int
    slowest: int
    late_seconds: float
    def __init__(self, count: _Optional[int] = ..., slowest: _Optional[int] = ..., late_seconds: _Optional[float] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("down_bytes_per_second", "round_trip_seconds", "missing_fragments")
    DOWN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    down_bytes_per_second: float
    round_trip_seconds: float
    missing_fragments: int
    def __init__(self, down_bytes_per_second: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., missing_fragments: _Optional[int] = ...) -> None: ...

class FragmentReport(_message.Message):
    __slots__ = ("epoch", "base_version", "steps", "tokens", "confirmed_tokens", "dropped_overlap", "dropped_stale")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STALE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_version: int
    steps: int
    tokens: int
    confirmed_tokens: int
    dropped_overlap: int
    dropped_stale: int
    def __init__(self, epoch: _Optional[int] = ..., base_version: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., confirmed_tokens: _Optional[int] = ..., dropped_overlap: _Optional[int] = ..., dropped_stale: _Optional[int] = ...) -> None: ...

class LeaseCursor(_message.Message):
    __slots__ = ("lease", "position")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    lease: int
    position: int
    def __init__(self, lease: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("tokens", "loss", "sum_versions", "final")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SUM_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    loss: float
    sum_versions: int
    final: bool
    def __init__(self, tokens: _Optional[int] = ..., loss: _Optional[float] = ..., sum_versions: _Optional[int] = ..., final: _Optional[bool] = ...) -> None: ...

class EvaluationProgress(_message.Message):
    __slots__ = ("share",)
    SHARE_FIELD_NUMBER: _ClassVar[int]
    share: float
    def __init__(self, share: _Optional[float] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerStateWanted(_message.Message):
    __slots__ = ("patient",)
    PATIENT_FIELD_NUMBER: _ClassVar[int]
    patient: bool
    def __init__(self, patient: _Optional[bool] = ...) -> None: ...

class PeerStateUnavailable(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class BaseUnavailable(_message.Message):
    __slots__ = ("fragment",)
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    def __init__(self, fragment: _Optional[int] = ...) -> None: ...

class SyncerMessage(_message.Message):
    __slots__ = ("welcome", "refusal", "pull", "announcement", "lease", "phase", "peer_state_request", "peer_state_ready", "promotion", "base_request", "echo", "shards")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PEER_STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PEER_STATE_READY_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_FIELD_NUMBER: _ClassVar[int]
    BASE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    pull: Pull
    announcement: Announcement
    lease: Lease
    phase: Phase
    peer_state_request: PeerStateRequest
    peer_state_ready: PeerStateReady
    promotion: Promotion
    base_request: BaseRequest
    echo: Echo
    shards: Shards
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., announcement: _Optional[_Union[Announcement, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., phase: _Optional[_Union[Phase, _Mapping]] = ..., peer_state_request: _Optional[_Union[PeerStateRequest, _Mapping]] = ..., peer_state_ready: _Optional[_Union[PeerStateReady, _Mapping]] = ..., promotion: _Optional[_Union[Promotion, _Mapping]] = ..., base_request: _Optional[_Union[BaseRequest, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., shards: _Optional[_Union[Shards, _Mapping]] = ...) -> None: ...

class Echo(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message", "fatal", "tensors")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    fatal: bool
    tensors: bytes
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., fatal: _Optional[bool] = ..., tensors: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "standby", "observer", "settings", "phase", "seat", "fragments", "initialise", "optimizer_bytes", "shards")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    OBSERVER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    INITIALISE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    standby: bool
    observer: bool
    settings: str
    phase: Phase
    seat: Seat
    fragments: _containers.RepeatedCompositeFieldContainer[Announcement]
    initialise: bool
    optimizer_bytes: int
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, epoch: _Optional[int] = ..., standby: _Optional[bool] = ..., observer: _Optional[bool] = ..., settings: _Optional[str] = ..., phase: _Optional[_Union[Phase, _Mapping]] = ..., seat: _Optional[_Union[Seat, _Mapping]] = ..., fragments: _Optional[_Iterable[_Union[Announcement, _Mapping]]] = ..., initialise: _Optional[bool] = ..., optimizer_bytes: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("port", "host", "fragments")
    PORT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    port: int
    host: str
    fragments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, port: _Optional[int] = ..., host: _Optional[str] = ..., fragments: _Optional[_Iterable[int]] = ...) -> None: ...

class Shards(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("slot", "incarnation", "continuing", "slot_step", "slot_tokens", "leases", "tenure")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTINUING_FIELD_NUMBER: _ClassVar[int]
    SLOT_STEP_FIELD_NUMBER: _ClassVar[int]
    SLOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    incarnation: int
    continuing: bool
    slot_step: int
    slot_tokens: int
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    tenure: int
    def __init__(self, slot: _Optional[int] = ..., incarnation: _Optional[int] = ..., continuing: _Optional[bool] = ..., slot_step: _Optional[int] = ..., slot_tokens: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., tenure: _Optional[int] = ...) -> None: ...

class Promotion(_message.Message):
    __slots__ = ("seat",)
    SEAT_FIELD_NUMBER: _ClassVar[int]
    seat: Seat
    def __init__(self, seat: _Optional[_Union[Seat, _Mapping]] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("round", "fragment", "epoch", "version")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    round: int
    fragment: int
    epoch: int
    version: int
    def __init__(self, round: _Optional[int] = ..., fragment: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("encoding", "bytes", "checksum")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    encoding: str
    bytes: int
    checksum: int
    def __init__(self, encoding: _Optional[str] = ..., bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("fragment", "epoch", "version", "merged_sequence", "merged_version", "full", "delta", "job_tokens", "settled", "progress")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MERGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MERGED_VERSION_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    JOB_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    epoch: int
    version: int
    merged_sequence: int
    merged_version: int
    full: Payload
    delta: Payload
    job_tokens: int
    settled: int
    progress: float
    def __init__(self, fragment: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., merged_sequence: _Optional[int] = ..., merged_version: _Optional[int] = ..., full: _Optional[_Union[Payload, _Mapping]] = ..., delta: _Optional[_Union[Payload, _Mapping]] = ..., job_tokens: _Optional[int] = ..., settled: _Optional[int] = ..., progress: _Optional[float] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease", "data_epoch", "block", "start", "end", "block_size")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DATA_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    data_epoch: int
    block: int
    start: int
    end: int
    block_size: int
    def __init__(self, lease: _Optional[int] = ..., data_epoch: _Optional[int] = ..., block: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: PhaseName
    message: str
    def __init__(self, name: _Optional[_Union[PhaseName, str]] = ..., message: _Optional[str] = ...) -> None: ...

class PeerStateRequest(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class PeerStateReady(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    def __init__(self, transfer: _Optional[int] = ...) -> None: ...

class BaseRequest(_message.Message):
    __slots__ = ("fragment", "epoch", "version")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    epoch: int
    version: int
    def __init__(self, fragment: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class BulkRequest(_message.Message):
    __slots__ = ("token", "upload", "download", "probe")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    token: str
    upload: UploadHeader
    download: DownloadRequest
    probe: Probe
    def __init__(self, token: _Optional[str] = ..., upload: _Optional[_Union[UploadHeader, _Mapping]] = ..., download: _Optional[_Union[DownloadRequest, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("up", "down")
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    up: int
    down: int
    def __init__(self, up: _Optional[int] = ..., down: _Optional[int] = ...) -> None: ...

class BulkReply(_message.Message):
    __slots__ = ("upload", "download", "failure")
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    upload: UploadReply
    download: DownloadHeader
    failure: BulkFailure
    def __init__(self, upload: _Optional[_Union[UploadReply, _Mapping]] = ..., download: _Optional[_Union[DownloadHeader, _Mapping]] = ..., failure: _Optional[_Union[BulkFailure, _Mapping]] = ...) -> None: ...

class BulkFailure(_message.Message):
    __slots__ = ("message", "final")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    message: str
    final: bool
    def __init__(self, message: _Optional[str] = ..., final: _Optional[bool] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("format", "job", "slot", "incarnation", "process", "push", "initial", "peer_state", "base", "total_bytes", "offset", "bytes", "checksum")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    PEER_STATE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    format: int
    job: str
    slot: int
    incarnation: int
    process: str
    push: Push
    initial: Initial
    peer_state: PeerState
    base: Base
    total_bytes: int
    offset: int
    bytes: int
    checksum: int
    def __init__(self, format: _Optional[int] = ..., job: _Optional[str] = ..., slot: _Optional[int] = ..., incarnation: _Optional[int] = ..., process: _Optional[str] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., initial: _Optional[_Union[Initial, _Mapping]] = ..., peer_state: _Optional[_Union[PeerState, _Mapping]] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("fragment", "sequence", "round", "epoch", "base_version", "oldest_version", "first_step", "last_step", "steps", "tokens", "compute_seconds", "encoding", "layout_digest", "report")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    sequence: int
    round: int
    epoch: int
    base_version: int
    oldest_version: int
    first_step: int
    last_step: int
    steps: int
    tokens: int
    compute_seconds: float
    encoding: str
    layout_digest: str
    report: Report
    def __init__(self, fragment: _Optional[int] = ..., sequence: _Optional[int] = ..., round: _Optional[int] = ..., epoch: _Optional[int] = ..., base_version: _Optional[int] = ..., oldest_version: _Optional[int] = ..., first_step: _Optional[int] = ..., last_step: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., encoding: _Optional[str] = ..., layout_digest: _Optional[str] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Initial(_message.Message):
    __slots__ = ("part", "fragment", "digest", "receipt")
    class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LAYOUT: _ClassVar[Initial.Part]
        FRAGMENT: _ClassVar[Initial.Part]
        FROZEN: _ClassVar[Initial.Part]
        DONE: _ClassVar[Initial.Part]
    LAYOUT: Initial.Part
    FRAGMENT: Initial.Part
    FROZEN: Initial.Part
    DONE: Initial.Part
    PART_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    part: Initial.Part
    fragment: int
    digest: str
    receipt: bytes
    def __init__(self, part: _Optional[_Union[Initial.Part, str]] = ..., fragment: _Optional[int] = ..., digest: _Optional[str] = ..., receipt: _Optional[bytes] = ...) -> None: ...

class PeerState(_message.Message):
    __slots__ = ("transfer", "versions")
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    transfer: int
    versions: _containers.RepeatedCompositeFieldContainer[Held]
    def __init__(self, transfer: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[Held, _Mapping]]] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("fragment", "epoch", "version", "encoding", "receipt")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    epoch: int
    version: int
    encoding: str
    receipt: bytes
    def __init__(self, fragment: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., encoding: _Optional[str] = ..., receipt: _Optional[bytes] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("slots", "version", "digest", "tag")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[SlotReceipt]
    version: int
    digest: bytes
    tag: bytes
    def __init__(self, slots: _Optional[_Iterable[_Union[SlotReceipt, _Mapping]]] = ..., version: _Optional[int] = ..., digest: _Optional[bytes] = ..., tag: _Optional[bytes] = ...) -> None: ...

class SlotReceipt(_message.Message):
    __slots__ = ("slot", "tenure", "merged_tokens", "tenure_tokens", "sequence", "version", "last_step", "compute_seconds")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TENURE_FIELD_NUMBER: _ClassVar[int]
    MERGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENURE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    tenure: int
    merged_tokens: int
    tenure_tokens: int
    sequence: int
    version: int
    last_step: int
    compute_seconds: float
    def __init__(self, slot: _Optional[int] = ..., tenure: _Optional[int] = ..., merged_tokens: _Optional[int] = ..., tenure_tokens: _Optional[int] = ..., sequence: _Optional[int] = ..., version: _Optional[int] = ..., last_step: _Optional[int] = ..., compute_seconds: _Optional[float] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("accepted", "reason", "message")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    message: str
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("format", "job", "process", "what", "fragment", "epoch", "version", "transfer", "offset", "bytes", "catching_up")
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FULL: _ClassVar[DownloadRequest.What]
        DELTA: _ClassVar[DownloadRequest.What]
        FROZEN: _ClassVar[DownloadRequest.What]
        PEER_STATE: _ClassVar[DownloadRequest.What]
        OPTIMIZER: _ClassVar[DownloadRequest.What]
        LAYOUT: _ClassVar[DownloadRequest.What]
        FROZEN_DIGEST: _ClassVar[DownloadRequest.What]
        JOB: _ClassVar[DownloadRequest.What]
    FULL: DownloadRequest.What
    DELTA: DownloadRequest.What
    FROZEN: DownloadRequest.What
    PEER_STATE: DownloadRequest.What
    OPTIMIZER: DownloadRequest.What
    LAYOUT: DownloadRequest.What
    FROZEN_DIGEST: DownloadRequest.What
    JOB: DownloadRequest.What
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CATCHING_UP_FIELD_NUMBER: _ClassVar[int]
    format: int
    job: str
    process: str
    what: DownloadRequest.What
    fragment: int
    epoch: int
    version: int
    transfer: int
    offset: int
    bytes: int
    catching_up: bool
    def __init__(self, format: _Optional[int] = ..., job: _Optional[str] = ..., process: _Optional[str] = ..., what: _Optional[_Union[DownloadRequest.What, str]] = ..., fragment: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., transfer: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., catching_up: _Optional[bool] = ...) -> None: ...

class DownloadHeader(_message.Message):
    __slots__ = ("found", "reason", "total_bytes", "bytes", "checksum", "versions", "receipt")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    found: bool
    reason: str
    total_bytes: int
    bytes: int
    checksum: int
    versions: _containers.RepeatedCompositeFieldContainer[Held]
    receipt: bytes
    def __init__(self, found: _Optional[bool] = ..., reason: _Optional[str] = ..., total_bytes: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., receipt: _Optional[bytes] = ...) -> None: ...

class SignedCall(_message.Message):
    __slots__ = ("method", "body", "time_ms", "nonce", "signature")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    method: str
    body: bytes
    time_ms: int
    nonce: bytes
    signature: bytes
    def __init__(self, method: _Optional[str] = ..., body: _Optional[bytes] = ..., time_ms: _Optional[int] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class CallReply(_message.Message):
    __slots__ = ("ok", "message", "body", "signature")
    OK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    message: str
    body: bytes
    signature: bytes
    def __init__(self, ok: _Optional[bool] = ..., message: _Optional[str] = ..., body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
