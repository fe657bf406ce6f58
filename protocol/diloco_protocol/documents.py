"""The JSON documents that programs show each other: the syncer's status and report, a learner's page.

Each field is defined here once, with its unit and meaning. Programs write and read the documents through these models;
the tables of docs/contracts.md are generated from them (tools/contracts.py), and tests compare them with what the
programs really write. Units, where a description has none: seconds, bytes, nats per token. Null: not known.

A reader leaves out fields that it does not know, for versions may differ. A document that lacks a field, or has
another type in it, is not read at all: ``read_document`` says which field, and its reader goes on as if there
had been no answer.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from diloco_protocol.vocabulary import HELD_STATES, EventKind, JobPhase, SlotState

Count = Annotated[int, Field(ge=0)]


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_known)]
"""A number; one that is not finite is not known."""


class Document(BaseModel):
    """Base of all documents: unknown fields are left out, numbers are finite."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, serialize_by_alias=True, validate_by_name=True
    )


D = TypeVar("D", bound=Document)


class DocumentError(ValueError):
    """A document is not what its model says; the message names the first field that is wrong."""


def read_document(model: type[D], content: bytes | str | dict[str, Any]) -> D:
    """A document from JSON or its object. Whoever calls has bounded the size. Raises DocumentError."""
    try:
        if isinstance(content, dict):
            return model.model_validate(content)
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DocumentError(f"{where}: {first['msg']}" if where else first["msg"]) from None


class Quorum(Document):
    active: Count = Field(description="learners that are active and ready: they can take part in a merge")
    required: Count = Field(description="K, the learners without which nothing is merged")


class RoundRow(Document):
    fragment: Count = Field(description="the fragment that is collected")
    round: Count = Field(description="number of the round")
    merging: bool = Field(description="its pushes are being merged")
    open_seconds: float = Field(description="since it opened")
    overdue: bool = Field(description="it waits for its quorum of pushes much longer than a turn takes")
    message: str = Field(description="of an overdue one: whose pushes it lacks, and the reason of the last refusal")
    responders: list[int] = Field(description="slots whose push has come")
    waiting: list[int] = Field(description="slots that were asked, can be reached and have not answered")


class SlotLink(Document):
    up_bytes_per_second: Number = Field(description="measured here, while pushes arrived")
    down_bytes_per_second: Number = Field(description="as the learner measured it, while broadcasts arrived")
    round_trip_seconds: Number = Field(description="the shortest of the learner's last echoes")
    needs_up_bytes_per_second: Number = Field(description="what the job needs of it at its pace")
    needs_down_bytes_per_second: Number = Field(description="likewise")
    too_slow: bool = Field(description="too slow for the job")
    message: str = Field(description="why, with numbers")


class SlotRow(Document):
    slot: Count = Field(description="index of the slot")
    retired: bool = Field(description="the job has no place for it: it ends when its process leaves")
    region: str = Field(description="region of the process that holds it, or held it last")
    ordinal: int = Field(description="that process's number within its region")
    process: str = Field(description="that process's id; empty: nobody has held it")
    incarnation: Count = Field(description="fencing number of the newest seat")
    incarnations: Count = Field(description="seats that there were")
    state: SlotState = Field(description="state of the slot")
    ready: bool = Field(description="the process has sent its first report with all bases; the operator decides on it")
    step: Count = Field(description="the slot's step, over all its processes")
    steps: Count = Field(description="steps trained, by all processes of the slot")
    tokens: Count = Field(description="tokens trained, likewise")
    loss: Number = Field(description="of the last step; null: none yet, or it is not finite")
    diverged: bool = Field(description="the last step's loss is NaN or infinite")
    step_seconds: Number = Field(description="moving median; 0: none yet")
    compute_seconds: Number = Field(description="from forward to optimizer step, summed")
    stalled_seconds: Number = Field(description="of the training thread inside the library, summed")
    merged_pushes: Count = Field(description="pushes of the slot that were merged")
    heard_seconds_ago: Number = Field(description="since its last message; null: nobody holds it")
    starved: bool = Field(description="it was late in three rounds running")
    paused: bool = Field(description="the learner waits: it has adopted nothing for staleness.maxSteps")
    bytes_up: Count = Field(description="payload since the job began, of all who held the slot")
    bytes_down: Count = Field(description="likewise")
    link: SlotLink | None = Field(description="null: no session")
    problem: str = Field("", description="why its learner has not finished a first step for long; empty: it has")

    @property
    def held(self) -> bool:
        return self.state in HELD_STATES

    @property
    def in_quorum(self) -> bool:
        """Whether its learner counts for the quorum."""
        return self.state is SlotState.ACTIVE and self.ready


class Tokens(Document):
    trained: Count = Field(description="of all learners; merged + pending + dropped")
    merged: Count = Field(description="in a version")
    pending: Count = Field(description="in a learner, or on its way")
    dropped: Count = Field(description="lost for good, each for a reason that the ledger has")


class RegionRow(Document):
    name: str = Field(description="region, `evaluator`, or empty: not known")
    bytes_up: Count = Field(description="payload since the job began")
    bytes_down: Count = Field(description="likewise")
    wire_bytes_up: Count | None = Field(description="everything that passed the sockets; null: no TLS")
    wire_bytes_down: Count | None = Field(description="likewise")


class RefusalRow(Document):
    role: str = Field(description="learner or evaluator")
    region: str = Field(description="region of its place")
    ordinal: int = Field(description="number of its place")
    reason: str = Field(description="a fixed word (protocol.md, session messages down)")
    message: str = Field(description="what is wrong, and the cure")
    fields: list[str] = Field(description="of `spec-drift`: the fields that differ")
    seconds_ago: float = Field(description="since then")


class TlsStatus(Document):
    secure: bool = Field(description="mutual TLS; else everything below but `refused` is null")
    connections: Count | None = Field(description="open ones")
    handshakes: Count | None = Field(description="of them not yet through their handshake")
    refused: dict[str, int] = Field(description="connections, by reason")
    expires: Number = Field(description="when the syncer's own certificate ends, Unix seconds")
    peers_expire: Number = Field(description="when the first of the connected peers' certificates ends, Unix seconds")


class MergeSeconds(Document):
    merge: float = Field(description="of merging, summed over merges")
    quorum: float = Field(description="from a round's opening until its quorum, likewise")
    waited: float = Field(description="from its opening until its pushes are merged, likewise")


class EventRow(Document):
    n: Count = Field(description="number of the event, from 1")
    time: float = Field(description="Unix seconds")
    kind: EventKind = Field(description="what happened")
    slot: int = Field(description="-1: of no slot")
    incarnation: int = Field(description="0: of none")
    message: str = Field(description="a sentence")
    details: dict[str, Any] = Field({}, description="of `joined`: region, ordinal, process, continuing")


class OutputRow(Document):
    """What became of ``output.uri``."""

    uri: str = Field(description="output.uri")
    state: Literal["waiting", "writing", "written", "failed"] = Field(
        description="waiting: the job is not complete yet; writing: also while it is tried again"
    )
    size: Count = Field(0, description="bytes of what was written")
    message: str = Field("", description="what is in the way, with the cure; empty: nothing")

    @property
    def open(self) -> bool:
        """Whether more is to come of it."""
        return self.state in ("waiting", "writing")


class StopGoal(Document):
    kind: Literal["steps", "tokens", "seconds"] = Field(description="what `training.stop` counts")
    limit: float = Field(description="how many end the job")


class StatusDocument(Document):
    job: str = Field(description="name of the job")
    phase: JobPhase = Field(description="the job's phase")
    message: str = Field(description="why, or what is wrong with the store")
    epoch: Count = Field(description="how many syncers this store has had")
    elapsed_seconds: float = Field(description="from the job's first step to its end or now, without suspensions")
    stop: StopGoal | None = Field(None, description="where the job ends; null: of a syncer that does not say")
    step: Count = Field(description="the greatest slot step")
    loss: Number = Field(description="last score of the merged model; before there is one, the active learners' mean")
    quorum: Quorum = Field(description="who can take part")
    standby: Count = Field(description="processes that wait for a slot")
    standbys: list[str] = Field(description="their process ids")
    evaluators: Count = Field(description="evaluators that are connected")
    versions: list[int] = Field(description="newest version of each fragment; empty: version 0 does not exist yet")
    parameters: Count = Field(0, description="trained parameters of the model; 0: version 0 does not exist yet")
    rounds: list[RoundRow] = Field(description="open rounds")
    slots: list[SlotRow] = Field(description="all slots")
    tokens: Tokens = Field(description="what became of the tokens")
    tokens_per_second: Number = Field(description="trained in the last ten seconds, per second")
    merges: Count = Field(description="merges that are durable")
    goodput: Number = Field(description="compute of merged steps over all slots' wall time, 0 to 1")
    uptime: Number = Field(description="share of the job's time in which at least one learner advanced, 0 to 1")
    eval_loss: list[tuple[int, Number]] = Field(description="pairs of trained tokens and loss")
    hold_since_seconds: Number = Field(description="when the present hold began, on the job's clock; null: none")
    bytes_up: Count = Field(description="payload since the job began")
    bytes_down: Count = Field(description="likewise")
    refused: dict[str, int] = Field(description="uploads, by reason")
    regions_lost: list[str] = Field(description="regions that are lost now (failurePolicy.regionLostSeconds)")
    sessions: Count = Field(description="open sessions")
    refusals: list[RefusalRow] = Field(description="the last refusal for good of each place, at most 64")
    regions: list[RegionRow] = Field(description="what the regions' links have carried")
    tls: TlsStatus = Field(description="the sync port's TLS")
    store_problem: str = Field(description="why the store cannot be written; empty: it can")
    output: OutputRow | None = Field(None, description="null: the job has no output.uri")
    seconds: MergeSeconds = Field(description="where merges spend their time")
    events: list[EventRow] = Field(description="the last 500")
    ledger_imbalances: Count = Field(
        0, description="rows of the ledger that did not add up at the last checkpoint; above 0: a fault of the program"
    )


class LearnerLink(Document):
    up_bytes_per_second: Number = Field(description="as this process measured it")
    down_bytes_per_second: Number = Field(description="likewise")
    round_trip_seconds: Number = Field(description="the shortest of the last echoes")


class LearnerRefusal(Document):
    reason: str = Field(description="a fixed word: the syncer's, or one of this side's own")
    message: str = Field(description="what is wrong, and the cure")


class LearnerPage(Document):
    """The status page of a learner or evaluator."""

    job: str = Field(description="name of the job")
    role: Literal["learner", "evaluator"] = Field(description="what it is")
    region: str = Field(description="its region")
    ordinal: Count = Field(description="its number within the region")
    process: str = Field(description="its process id")
    phase: JobPhase = Field(description="the job's phase as last heard")
    message: str = Field(description="the phase's message, or why there is no session")
    connected: bool = Field(description="it has a session now")
    tried: bool = Field(description="it has begun to connect")
    joined: bool = Field(description="it has joined once")
    standby: bool = Field(description="it waits for a slot")
    idle: bool = Field(description="the job is over and it waits to be removed")
    slot: Count | None = Field(description="null: it holds none")
    merges: Count | None = Field(
        description="every fragment's version as announced last, summed; null: not all were announced"
    )
    step: Count | None = Field(description="the slot's step; null: none yet")
    tokens: Count | None = Field(description="trained by this process")
    loss: Number = Field(description="of the last step")
    epoch: Count | None = Field(description="of the syncer; null: it never joined")
    link: LearnerLink = Field(description="its link to the syncer")
    refused: LearnerRefusal | None = Field(description="the refusal that keeps it out; null: none")
    settings: dict[str, Any] | None = Field(
        description="what the syncer told in its last Welcome: sync, learners, stop"
    )


class VersionRange(Document):
    min: Count = Field(description="the oldest fragment's version")
    max: Count = Field(description="the newest fragment's")


class LedgerRow(Document):
    fragment: Count = Field(description="the fragment")
    merged: Count = Field(description="tokens, in a version")
    pending: Count = Field(description="tokens, in a learner or on their way")
    dropped: Count = Field(description="tokens, lost for good")
    reasons: dict[str, int] = Field(description="of the dropped tokens, by reason")


class ReportLearner(Document):
    slot: Count = Field(description="index of the slot")
    retired: bool = Field(description="the job has no place for it now")
    incarnations: Count = Field(description="seats that there were")
    steps: Count = Field(description="trained")
    tokens: Count = Field(description="trained")
    compute_seconds: Number = Field(description="from forward to optimizer step")
    stalled_seconds: Number = Field(description="of the training thread inside the library")
    merged_pushes: Count = Field(description="pushes that were merged")
    bytes_up: Count = Field(description="payload")
    bytes_down: Count = Field(description="payload")


class ReportSyncer(Document):
    epoch: Count | None = Field(description="how many syncers the store has had; null: it could not be asked")
    restarts: Count = Field(description="of them, those before the last; with `diloco run` those of this run")
    peak_rss_bytes: Count = Field(description="the most memory that it had")


class Span(Document):
    from_seconds: float = Field(description="of the job's time")
    to_seconds: float = Field(description="of the job's time")


class RegionAbsence(Span):
    region: str = Field(description="name of the region")


class FaultRow(Document):
    at_seconds: float = Field(description="of the job's time")
    time: float = Field(0.0, description="Unix seconds")
    lasts_seconds: float = Field(0.0, description="as the schedule said; of a kill: until its process may be started")
    action: str = Field(description="kill, term, pause, cut or slow")
    target: str = Field(description="the process")
    detected_seconds: Number = Field(description="since the fault: the syncer knew")
    joined_seconds: Number = Field(description="likewise: a process took the slot")
    first_step_seconds: Number = Field(description="likewise: it trained")
    recovered_seconds: Number = Field(description="likewise: its work was merged")


class Report(Document):
    """The report as the syncer writes it, without ``faults``. A field with a default may be left out: the job's
    status has the report without its lists."""

    schema_: Count = Field(1, alias="schema", description="format of this document")
    outcome: Literal["complete", "failed", "interrupted", "running", "killed"] = Field(
        description="`running`: it has not ended; `interrupted`: it was stopped or suspended, and can go on; `killed`: "
        "as `diloco status` tells of a run that left no report, in the figures that were seen last"
    )
    seed: Count = Field(description="spec.seed")
    spec_digest: str = Field(description="SHA-256 of the spec, hex")
    layout_digest: str | None = Field(None, description="SHA-256 of the layout, hex; empty: version 0 does not exist")
    wall_seconds: Number = Field(None, description="of the job; with `diloco run` of this run")
    steps: Count = Field(description="the greatest slot step")
    merges: Count = Field(description="merges that are durable")
    versions: VersionRange = Field(description="of the fragments")
    tokens: Tokens = Field(description="what became of the tokens")
    ledger: list[LedgerRow] | None = Field(None, description="the same per fragment, with reasons")
    goodput: Number = Field(None, description="compute of merged steps over all slots' wall time, 0 to 1")
    uptime: Number = Field(None, description="share of the job's time in which at least one learner advanced, 0 to 1")
    initial_loss: Number = Field(None, description="of version 0")
    final_loss: Number = Field(None, description="of the merged model at the end")
    eval_loss: list[tuple[int, Number]] = Field([], description="pairs of trained tokens and loss")
    bytes_up: Count = Field(description="payload")
    bytes_down: Count = Field(description="payload")
    regions: list[RegionRow] | None = Field(None, description="what the regions' links have carried")
    learners: list[ReportLearner] | None = Field(None, description="each slot")
    faults: list[FaultRow] = Field([], description="injected by `--chaos`, and when each was over")
    holds: list[Span] | None = Field(None, description="when it held")
    regions_lost: list[RegionAbsence] | None = Field(None, description="when no learner of a region was heard")
    syncer: ReportSyncer = Field(description="the syncer")
    output: OutputRow | None = Field(None, description="the merged model at output.uri; null: the job has none")


class TrainingLoss(Document):
    first: float = Field(description="of the first step that has a loss, nats per token")
    last: float = Field(description="of the last one")


class RunReport(Report):
    """The report of `diloco run`: with ``faults``, and its own ``wall_seconds`` and count of restarts."""

    message: str = Field("", description="with `diloco run`: why it ended so")
    training_loss: TrainingLoss | None = Field(
        None,
        description="with `diloco run`: the learners' own training loss, their mean, where nobody scored the merged "
        "model; null: somebody did, or no loss is known",
    )
