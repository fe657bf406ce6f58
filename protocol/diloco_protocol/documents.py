"""The JSON documents that programs show each other: the syncer's status and report, a learner's page.

Each field is defined here once, with its unit and meaning. Programs write and read the documents through these models;
the tables of docs/contracts.md are generated from them (tools/contracts.py), and tests compare them with what the
programs really write. Units, where a description has none: seconds, bytes, nats per token. Null: not known.

A reader leaves out fields that it does not know, for versions may differ. A document that lacks a field, or has
another type in it, is not read at all: ``read_document`` says which field, and its reader continues as if there
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
    """A document from JSON or its object; the caller has bounded the size. Raises DocumentError."""
    try:
        if isinstance(content, dict):
            return model.model_validate(content)
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DocumentError(f"{where}: {first['msg']}" if where else first["msg"]) from None


class Quorum(Document):
    active: Count = Field(description="learners that are active and ready, and so can take part in a merge")
    required: Count = Field(description="K: the number of learners that a merge needs")


class RoundRow(Document):
    fragment: Count = Field(description="the fragment whose pushes are collected")
    round: Count = Field(description="number of the round")
    merging: bool = Field(description="true: its pushes are being merged")
    open_seconds: float = Field(description="seconds since the round opened")
    unserved: bool = Field(False, description="the shard that has the fragment is lost: the round waits for it")
    overdue: bool = Field(
        description="the round has waited for its quorum of pushes far longer than a turn of H steps takes"
    )
    message: str = Field(
        description="of an overdue round: the learners whose pushes are missing, each with the reason of its last "
        "refusal"
    )
    responders: list[int] = Field(description="slots whose push has arrived")
    waiting: list[int] = Field(description="slots that were asked, can be reached and have not answered")


class SlotLink(Document):
    up_bytes_per_second: Number = Field(description="speed up, as the syncer measures it while pushes arrive")
    down_bytes_per_second: Number = Field(description="speed down, as the learner measures it while broadcasts arrive")
    round_trip_seconds: Number = Field(description="shortest round trip of the learner's latest reports")
    missing_fragments: Count = Field(
        0, description="fragments of the model that its process, a newcomer, has still to download"
    )
    needs_up_bytes_per_second: Number = Field(description="speed up that the job needs at its present pace")
    needs_down_bytes_per_second: Number = Field(description="speed down that the job needs at its present pace")
    too_slow: bool = Field(description="the link is too slow for the job")
    message: str = Field(
        description="why it is too slow, with numbers; of a job on one machine whose processors are too few, this"
    )


class SlotRow(Document):
    slot: Count = Field(description="index of the slot")
    retired: bool = Field(description="the job has no place for the slot any more; it ends when its process leaves")
    region: str = Field(description="region of the process that holds the slot, or held it last")
    ordinal: int = Field(description="that process's number within its region")
    process: str = Field(description="that process's id; empty: no process has held the slot")
    incarnation: Count = Field(description="number of the newest incarnation; messages with a lower number are refused")
    incarnations: Count = Field(description="how many incarnations the slot has had")
    state: SlotState = Field(description="state of the slot")
    ready: bool = Field(
        description="its process has reported with a base for every fragment; only then it counts for the quorum"
    )
    step: Count = Field(description="the slot's step, counted over all its processes")
    steps: Count = Field(description="steps trained by all processes of the slot")
    tokens: Count = Field(description="tokens trained by all processes of the slot")
    loss: Number = Field(description="loss of the last step; null: no step yet, or a loss that is not finite")
    diverged: bool = Field(description="the loss of the last step is NaN or infinite")
    step_seconds: Number = Field(description="moving median of the time of a step; 0: no step yet")
    compute_seconds: Number = Field(description="time from forward to optimizer step, summed over all steps")
    stalled_seconds: Number = Field(description="time that the training thread spent in the library, summed")
    merged_pushes: Count = Field(description="pushes of the slot that were merged")
    heard_seconds_ago: Number = Field(description="seconds since its last message; null: no process holds the slot")
    starved: bool = Field(description="its pushes were late in three rounds in succession")
    paused: bool = Field(
        description="its learner waits, because it has adopted no version for staleness.maxSteps steps"
    )
    bytes_up: Count = Field(description="payload up since the job began, of all processes that held the slot")
    bytes_down: Count = Field(description="payload down, of the same processes")
    link: SlotLink | None = Field(description="the link of its process; null: the process has no session")
    problem: str = Field(
        "", description="why its learner has not finished a first step, if that takes long; empty: no such problem"
    )
    sequences_per_step: Number = Field(
        0.0, description="sequences of its leases that its process has read, for each step that it made"
    )
    ranks: Count = Field(1, description="processes that its learner is made of")
    slowest_rank: Count | None = Field(
        None,
        description="of several ranks the one that comes last to the ends of steps; null: there is one, or no step",
    )
    slowest_rank_seconds: Number = Field(
        None, description="by how much it comes after the first of them, the mean of about the last 16 steps"
    )

    @property
    def held(self) -> bool:
        return self.state in HELD_STATES

    @property
    def in_quorum(self) -> bool:
        """Whether its learner counts for the quorum."""
        return self.state is SlotState.ACTIVE and self.ready


class Tokens(Document):
    trained: Count = Field(description="trained by all learners: merged + pending + dropped")
    merged: Count = Field(description="tokens that are part of a version")
    pending: Count = Field(description="tokens that are not merged yet: in a learner, or on their way")
    dropped: Count = Field(description="tokens that are lost for good; the ledger has the reasons")


class RegionRow(Document):
    name: str = Field(description="name of the region, or `evaluator`; empty: not known")
    bytes_up: Count = Field(description="payload up since the job began")
    bytes_down: Count = Field(description="payload down since the job began")
    wire_bytes_up: Count | None = Field(description="all bytes up on the sockets, with TLS; null: the port has no TLS")
    wire_bytes_down: Count | None = Field(
        description="all bytes down on the sockets, with TLS; null: the port has no TLS"
    )


class ShardRow(Document):
    shard: Count = Field(description="its number, from 0")
    fragments: list[int] = Field(description="the fragments whose bytes it has; empty: it has not begun")
    serving: bool = Field(description="it is there; if not, no merge of its fragments begins")
    cpu_seconds: float = Field(description="processor time of its process")
    resident_bytes: Count = Field(description="the most memory that its process has had")
    store_problem: str = Field(description="why it cannot write to the store; empty: it can")
    failures: Count = Field(0, description="how often in a row its process ended soon after its start")
    message: str = Field("", description="why its process ended last, where it is away or fails again and again")


class RefusalRow(Document):
    role: str = Field(description="learner or evaluator")
    region: str = Field(description="region of the refused process")
    ordinal: int = Field(description="number of the refused process within its region")
    reason: str = Field(description="a fixed word (protocol.md, session messages down)")
    message: str = Field(description="what is wrong, and how to fix it")
    fields: list[str] = Field(description="of `spec-drift`: the fields of the job that differ")
    seconds_ago: float = Field(description="seconds since the refusal")


class TlsStatus(Document):
    secure: bool = Field(description="the port uses mutual TLS; if not, all fields below except `refused` are null")
    connections: Count | None = Field(description="open connections")
    handshakes: Count | None = Field(description="connections whose handshake is not finished yet")
    refused: dict[str, int] = Field(description="refused connections, by reason")
    expires: Number = Field(description="when the syncer's own certificate expires, Unix seconds")
    peers_expire: Number = Field(description="when the first certificate of the connected peers expires, Unix seconds")


class MergeSeconds(Document):
    merge: float = Field(description="time spent on merging, summed over all merges")
    quorum: float = Field(description="time from a round's opening to its quorum, summed over all merges")
    waited: float = Field(description="time from a round's opening until its pushes are merged, summed over all merges")


class LearnersInMerges(Document):
    recent: float = Field(description="learners in a merge: the mean of the last ones (half-life 8 merges)")
    overall: float = Field(description="learners in a merge: the mean of all but the last ones of the job")
    exchange_seconds: Number = Field(
        description="from a round's opening until as many learners as a merge needs have its version; null: not known"
    )
    overlap_seconds: Number = Field(description="what the steps take that an exchange may overlap; null: not known")


class EventRow(Document):
    n: Count = Field(description="number of the event, from 1")
    time: float = Field(description="Unix seconds")
    kind: EventKind = Field(description="what happened")
    slot: int = Field(description="slot that the event is about; -1: none")
    incarnation: int = Field(description="incarnation that the event is about; 0: none")
    message: str = Field(description="what happened, in a sentence")
    details: dict[str, Any] = Field(
        {}, description="facts of the event; of `joined`: region, ordinal, process, continuing"
    )


class OutputRow(Document):
    """What became of ``output.uri``."""

    uri: str = Field(description="output.uri of the job")
    state: Literal["waiting", "writing", "written", "failed"] = Field(
        description="waiting: the job is not complete yet; writing: also while a failed write is tried again"
    )
    size: Count = Field(0, description="size of the written model")
    message: str = Field("", description="what prevents the write, and how to fix it; empty: nothing")

    @property
    def open(self) -> bool:
        """Whether more is to come of it."""
        return self.state in ("waiting", "writing")


class StopGoal(Document):
    kind: Literal["steps", "tokens", "seconds"] = Field(description="what `training.stop` counts")
    limit: float = Field(description="the number of them at which the job ends")


class StatusDocument(Document):
    job: str = Field(description="name of the job")
    phase: JobPhase = Field(description="the job's phase")
    message: str = Field(description="why the job is in this phase, or what is wrong with the store")
    epoch: Count = Field(description="how many syncers this store has had")
    elapsed_seconds: float = Field(description="from the job's first step to its end or now, without suspensions")
    stop: StopGoal | None = Field(
        None, description="where the job ends; null: the syncer is of a release that does not report it"
    )
    progress: Number = Field(
        None, description="how much of the job's stop is reached, 0 to 1; null: the syncer is of an earlier release"
    )
    seconds_left: Number = Field(
        None, description="seconds until the stop, if the rest takes as long as what is done did; null: not known"
    )
    step: Count = Field(description="step of the slot that is furthest")
    loss: Number = Field(
        description="last score of the merged model; before the first score, the mean of the active learners' losses"
    )
    quorum: Quorum = Field(description="learners that can take part in merges, and how many a merge needs")
    standby: Count = Field(description="processes that wait for a slot")
    standbys: list[str] = Field(description="process ids of those that wait for a slot")
    evaluators: Count = Field(description="evaluators that are connected")
    versions: list[int] = Field(description="newest version of each fragment; empty: version 0 does not exist yet")
    parameters: Count = Field(0, description="trained parameters of the model; 0: version 0 does not exist yet")
    rounds: list[RoundRow] = Field(description="open rounds")
    slots: list[SlotRow] = Field(description="all slots")
    tokens: Tokens = Field(description="what became of the tokens")
    tokens_per_second: Number = Field(description="tokens trained per second, over the last ten seconds")
    merges: Count = Field(description="merges that were written to the store")
    learners_in_merges: LearnersInMerges | None = Field(
        None, description="how many learners merges have, and how long they take; null: no merge was made"
    )
    goodput: Number = Field(description="compute time of merged steps divided by the wall time of all slots, 0 to 1")
    uptime: Number = Field(description="share of the job's time in which at least one learner advanced, 0 to 1")
    eval_loss: list[tuple[int, Number]] = Field(description="pairs of trained tokens and loss")
    hold_since_seconds: Number = Field(
        description="when the present hold began, in seconds of the job's time; null: the job does not hold"
    )
    bytes_up: Count = Field(description="payload up since the job began")
    bytes_down: Count = Field(description="payload down since the job began")
    refused: dict[str, int] = Field(description="refused uploads, by reason")
    regions_lost: list[str] = Field(description="regions that are lost now (failurePolicy.regionLostSeconds)")
    sessions: Count = Field(description="open sessions with learners and evaluators")
    refusals: list[RefusalRow] = Field(description="the last final refusal of each place, at most 64")
    regions: list[RegionRow] = Field(description="traffic on the links of each region")
    shards: list[ShardRow] = Field([], description="shards of the syncer; empty: it has all fragments itself")
    tls: TlsStatus = Field(description="TLS on the sync port")
    store_problem: str = Field(description="why the store cannot be written; empty: it can be written")
    output: OutputRow | None = Field(
        None, description="the merged model at output.uri; null: the job has no output.uri"
    )
    seconds: MergeSeconds = Field(description="where merges spend their time")
    events: list[EventRow] = Field(description="the last 500 events")
    large_merges: Count = Field(
        0, description="merges since the syncer's start whose norm was far above those of their fragment before"
    )
    ledger_imbalances: Count = Field(
        0, description="rows of the ledger that did not add up at the last checkpoint; above 0: a fault of the syncer"
    )


class LearnerLink(Document):
    up_bytes_per_second: Number = Field(description="speed up, as this process measures it")
    down_bytes_per_second: Number = Field(description="speed down, as this process measures it")
    round_trip_seconds: Number = Field(description="shortest round trip of its latest reports")


class LearnerRefusal(Document):
    reason: str = Field(description="a fixed word: the syncer's, or one of this process's own")
    message: str = Field(description="what is wrong, and how to fix it")


class LearnerPage(Document):
    """The status page of a learner or evaluator."""

    job: str = Field(description="name of the job")
    role: Literal["learner", "evaluator"] = Field(description="learner or evaluator")
    region: str = Field(description="its region")
    ordinal: Count = Field(description="its number within the region")
    process: str = Field(description="its process id")
    phase: JobPhase = Field(description="the job's phase, as this process heard it last")
    message: str = Field(description="the phase's message, or why there is no session")
    connected: bool = Field(description="it has a session with the syncer now")
    tried: bool = Field(description="it has started to connect")
    joined: bool = Field(description="it has joined at least once")
    standby: bool = Field(description="it waits for a slot")
    idle: bool = Field(description="the job has ended, and the process waits to be removed")
    slot: Count | None = Field(description="its slot; null: it holds none")
    merges: Count | None = Field(
        description="sum of the newest announced versions of all fragments; null: a fragment was not announced yet"
    )
    step: Count | None = Field(description="the slot's step; null: none yet")
    tokens: Count | None = Field(description="tokens trained by this process")
    loss: Number = Field(description="loss of the last step")
    epoch: Count | None = Field(description="the syncer's epoch; null: it has never joined")
    link: LearnerLink = Field(description="its link to the syncer")
    refused: LearnerRefusal | None = Field(description="the refusal that keeps it out; null: none")
    settings: dict[str, Any] | None = Field(
        description="the settings in the syncer's last Welcome: sync, learners, stop"
    )


class VersionRange(Document):
    min: Count = Field(description="version of the fragment with the fewest merges")
    max: Count = Field(description="version of the fragment with the most merges")


class LedgerRow(Document):
    fragment: Count = Field(description="index of the fragment")
    merged: Count = Field(description="tokens that are part of a version")
    pending: Count = Field(description="tokens in a learner or on their way")
    dropped: Count = Field(description="tokens that are lost for good")
    reasons: dict[str, int] = Field(description="the dropped tokens by reason")
    imbalance: str = Field(
        "", description="which slot's figures do not add up, a fault of the syncer; empty: they are exact"
    )


class ReportLearner(Document):
    slot: Count = Field(description="index of the slot")
    learner: str = Field(
        "",
        description="name of the learner that has the slot or had it last; of an unused slot, the learner that it is "
        "for; empty: not known",
    )
    retired: bool = Field(description="the job has no place for the slot any more")
    incarnations: Count = Field(description="how many incarnations the slot has had")
    steps: Count = Field(description="steps trained")
    tokens: Count = Field(description="tokens trained")
    compute_seconds: Number = Field(description="time from forward to optimizer step, summed")
    stalled_seconds: Number = Field(description="time that the training thread spent in the library, summed")
    merged_pushes: Count = Field(description="pushes that were merged")
    bytes_up: Count = Field(description="payload up")
    bytes_down: Count = Field(description="payload down")


class ReportSyncer(Document):
    epoch: Count | None = Field(description="how many syncers the store has had; null: the syncer could not be asked")
    restarts: Count = Field(description="syncers before the last one; with `diloco run`: restarts in this run")
    peak_rss_bytes: Count = Field(description="the syncer's greatest memory (RSS)")


class Span(Document):
    from_seconds: float = Field(description="its beginning, in seconds of the job's time")
    to_seconds: float = Field(description="its end, in seconds of the job's time")


class RegionAbsence(Span):
    region: str = Field(description="name of the region")


class FaultRow(Document):
    at_seconds: float = Field(description="when it was injected, in seconds of the job's time")
    time: float = Field(0.0, description="the same, Unix seconds")
    lasts_seconds: float = Field(
        0.0, description="how long it lasts by the schedule; of a kill: how long its process is kept away"
    )
    action: str = Field(description="kill, term, pause, cut or slow")
    target: str = Field(description="the process that it hit")
    detected_seconds: Number = Field(description="from the fault until the syncer noticed it")
    joined_seconds: Number = Field(description="from the fault until a process took the slot")
    first_step_seconds: Number = Field(description="from the fault until that process finished a step")
    recovered_seconds: Number = Field(description="from the fault until that process's work was merged")


class TrainingLoss(Document):
    first: float = Field(description="loss of the first step that has one, nats per token")
    last: float = Field(description="loss of the last step that has one")


class Report(Document):
    """The report of a job. The syncer's has no ``faults``; `diloco run` adds them, and has its own ``message``,
    ``wall_seconds`` and count of restarts. A field with a default may be left out: the job's status has the report
    without its lists."""

    schema_: Count = Field(1, alias="schema", description="format of this document")
    outcome: Literal["complete", "failed", "interrupted", "running", "killed"] = Field(
        description="`running`: the job has not ended; `interrupted`: it was stopped or suspended, and can continue; "
        "`killed`: the run left no report, and `diloco status` shows the last figures that it knows"
    )
    message: str = Field("", description="why the job failed; with `diloco run`: why the run ended")
    seed: Count = Field(description="spec.seed")
    spec_digest: str = Field(description="SHA-256 of the spec, hex")
    layout_digest: str | None = Field(
        None, description="SHA-256 of the layout, hex; empty: version 0 does not exist yet"
    )
    wall_seconds: Number = Field(None, description="wall time of the job; with `diloco run`: of this run")
    steps: Count = Field(description="step of the slot that is furthest")
    merges: Count = Field(description="merges that were written to the store")
    learners_in_merges: Number = Field(None, description="learners in a merge, the mean of all but the last ones")
    versions: VersionRange = Field(description="the fragments' versions")
    tokens: Tokens = Field(description="what became of the tokens")
    ledger: list[LedgerRow] | None = Field(None, description="tokens per fragment, and the reasons of the dropped ones")
    goodput: Number = Field(
        None, description="compute time of merged steps divided by the wall time of all slots, 0 to 1"
    )
    uptime: Number = Field(None, description="share of the job's time in which at least one learner advanced, 0 to 1")
    initial_loss: Number = Field(None, description="loss of version 0")
    final_loss: Number = Field(None, description="loss of the merged model at the end")
    training_loss: TrainingLoss | None = Field(
        None,
        description="if no evaluator scored the merged model: the mean of the learners' training losses; null: it was "
        "scored, or no loss is known",
    )
    eval_loss: list[tuple[int, Number]] = Field([], description="pairs of trained tokens and loss")
    bytes_up: Count = Field(description="payload up")
    bytes_down: Count = Field(description="payload down")
    regions: list[RegionRow] | None = Field(None, description="traffic on the links of each region")
    learners: list[ReportLearner] | None = Field(None, description="one row for each slot")
    faults: list[FaultRow] = Field([], description="the faults that `--chaos` injected, with the times of recovery")
    holds: list[Span] | None = Field(None, description="when the job was holding: merges waited")
    regions_lost: list[RegionAbsence] | None = Field(None, description="when no learner of a region was heard")
    syncer: ReportSyncer = Field(description="epoch, restarts and memory of the syncer")
    output: OutputRow | None = Field(
        None, description="the merged model at output.uri; null: the job has no output.uri"
    )

    @property
    def is_scored(self) -> bool:
        """Whether an evaluator has scored the merged model at any time."""
        return bool(self.eval_loss) or (self.initial_loss, self.final_loss) != (None, None)
