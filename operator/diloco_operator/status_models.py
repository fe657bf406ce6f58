"""``status`` of a DiLoCoJob: the models that the CRD's status schema is generated from.

The plan writes it whole through these models, so nothing is written that the API server would prune. People and
programs read it; the plan itself reads back ``conditions``, ``drain``, ``release``, ``replacements``, ``startTime`` and
``syncer``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from diloco_protocol.spec.base import Spec
from diloco_protocol.vocabulary import ResourcePhase


def _shown(value: Any) -> Any:
    """A number with at most four decimals, for `kubectl get` prints all that there are. None for a number that
    JSON cannot carry (a diverged loss). The report has the exact numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return round(value, 4) if math.isfinite(value) else None


Shown = Annotated[float | None, BeforeValidator(_shown)]


class Condition(Spec):
    """One condition, as Kubernetes' conventions have it."""

    type: str = Field(..., max_length=316, description="Ready, QuorumMet, SyncerReady, ...")
    status: Literal["True", "False", "Unknown"] = Field(..., description="Whether it holds.")
    reason: str = Field(..., max_length=1024, description="One word in CamelCase, for programs.")
    message: str = Field("", max_length=32768, description="A sentence: what is so, and what to do.")
    observed_generation: int = Field(..., ge=0, description="Of the job that this is about.")
    last_transition_time: str = Field(
        ..., max_length=40, json_schema_extra={"format": "date-time"}, description="RFC 3339: since when."
    )


class SyncerStatus(Spec):
    """The syncer as it answered last."""

    epoch: int | None = Field(None, description="How many syncers this job's store has had.")
    step: int | None = Field(None, description="Greatest slot step.")
    merges: int | None = Field(None, description="Merges that its store had when it was last seen with any.")
    volume: str | None = Field(None, max_length=64, description="UID of the claim that the syncer has its store in.")
    address: str | None = Field(None, max_length=300, description="host:port that learners dial.")
    external: str | None = Field(None, max_length=300, description="host:port of its load balancer, once it has one.")
    image: str | None = Field(None, max_length=1024, description="Image that it runs.")


class Progress(Spec):
    """Written at most every 60 s, and at transitions. In a cluster without the syncer it is what learners
    there know."""

    tokens: int | None = Field(None, description="Trained, all learners (syncer's cluster only).")
    step: int | None = Field(None, description="Greatest slot step (of this cluster's, without the syncer).")
    percent: int | None = Field(None, description="How much of training.stop is reached (syncer's cluster only).")
    seconds_left: int | None = Field(
        None, description="Seconds until training.stop is reached, if the rest takes as long as what is done did."
    )
    merges: int | None = Field(None, description="Merges made durable.")
    not_merged: int | None = Field(None, description="Trained tokens that are in no store: the most that can be lost.")
    stored_at: str | None = Field(None, max_length=40, description="RFC 3339: when the newest merge was seen.")
    loss: Shown = Field(None, description="Of the merged model (else of the learners), nats a token.")
    goodput: Shown = Field(None, description="Compute of merged steps over all slots' wall time.")


class RegionStatus(Spec):
    """One region."""

    name: str = Field(..., max_length=20, description="As in spec.regions.")
    cluster: str | None = Field(None, max_length=253, description="Where it runs.")
    desired: int = Field(0, description="Learners wanted, spares included.")
    ready: int = Field(0, description="Pods that have joined (this cluster's regions only).")
    in_quorum: int = Field(0, description="Learners that take part in merges.")
    lost_since: str | None = Field(None, max_length=40, description="RFC 3339: no learner heard since.")
    state: str = Field("", max_length=64, description="One word.")
    cause: str = Field("", max_length=2048, description="What keeps it from being whole.")
    image: str | None = Field(None, max_length=1024, description="Image of its learners.")


class JobRelease(Spec):
    """The release of the operator whose pod templates and images the job has: that which started it, or to which
    ``spec.release`` took it since. Kept, so that the operator's upgrade restarts nothing."""

    operator: str = Field(..., max_length=128, description="The operator's version.")
    asked: str | None = Field(None, max_length=63, description="spec.release that was carried out.")
    syncer: str = Field(..., max_length=1024, description="Default image of the syncer.")
    worker: str = Field(..., max_length=1024, description="Default image of learners and evaluator.")
    newer: str | None = Field(
        None, max_length=2200, description="What `diloco upgrade` would take the job to; none: nothing else."
    )


class OutputStatus(Spec):
    """The merged model at ``output.uri``, once the job is complete."""

    uri: str = Field(..., max_length=1024, description="Where it lies, or shall.")
    state: Literal["Writing", "Written", "Failed"] = Field(..., description="With Written the syncer is stopped.")
    size: int | None = Field(None, description="Bytes of what was written.")
    message: str | None = Field(None, max_length=2048, description="What is wrong, and what fixes it.")


class Replacements(Spec):
    """Learners and syncers that had to be replaced."""

    total: int = Field(
        0, description="That an operator saw, since the job began; a loss while none was running is not among them."
    )
    since_merge: int = Field(
        0, description="Failures since the last merge, of the place that had most; maxReplacements is about it."
    )
    place: str | None = Field(None, max_length=253, description="That place: a learner's pod, or syncer.")
    merges: int = Field(0, description="The job's merges when since_merge was last zero.")


class JobStatus(Spec):
    """The whole status."""

    observed_generation: int | None = Field(None, description="Generation of the spec this is about.")
    phase: ResourcePhase | None = Field(None, strict=False, description="For people; nothing decides on it.")
    start_time: str | None = Field(None, max_length=40, description="RFC 3339; set once.")
    completion_time: str | None = Field(None, max_length=40, description="RFC 3339: complete or failed.")
    drain: Literal["Asked", "Saved", "NotSaved"] | None = Field(
        None,
        description="Of a job that is suspended or has failed: the syncer is told; it said that all is saved; it did "
        "not say so in time. With the latter two the learners are removed.",
    )
    learners: str | None = Field(None, max_length=24, description="In the quorum / wanted.")
    quorum: str | None = Field(None, max_length=24, description="Active / needed (K).")
    conditions: list[Condition] = Field([], max_length=16, description="What is so and why.")
    syncer: SyncerStatus | None = Field(None, description="The syncer as it answered last.")
    progress: Progress | None = Field(None, description="How far it is.")
    regions: list[RegionStatus] = Field([], max_length=64, description="Each region.")
    release: JobRelease | None = Field(None, description="Whose pod templates and images the job has.")
    output: OutputStatus | None = Field(None, description="The merged model at output.uri.")
    replacements: Replacements | None = Field(None, description="Learners that had to be replaced.")
    report: dict[str, Any] = Field({}, description="At the end: report.json's scalars and token totals.")
