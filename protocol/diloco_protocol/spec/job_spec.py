"""``spec`` of a DiLoCoJob: its sections, and what follows from several of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from diloco_protocol.spec.base import OutputUri, Spec
from diloco_protocol.spec.cluster import (
    EvaluatorSpec,
    FailurePolicySpec,
    Group,
    LearnersSpec,
    NodeLossSpec,
    RegionSpec,
    SyncerSpec,
)
from diloco_protocol.spec.sync import SyncSpec
from diloco_protocol.spec.training import BatchSpec, ParallelSpec, TrainingSpec


class OutputSpec(Spec):
    """Where the merged model is written at the end."""

    uri: OutputUri | None = Field(
        None,
        examples=["s3://bucket/models/tiny-gpt"],
        description="A bucket's folder (s3://, gs://, az://, with the syncer's credentials), or the absolute path of a "
        "directory. In clusters the directory is on a volume that syncer.podTemplate mounts. When the job is complete "
        "the syncer writes the merged model there, and in clusters it then stops; null: it serves the model until the "
        "job is deleted.",
    )


class JobSpec(Spec):
    """The job itself."""

    suspend: bool = Field(False, description="true: drain, make a checkpoint and stop, until it is false again.")
    suspend_policy: Literal["WhenSaved", "Anyway"] = Field(
        "WhenSaved",
        description="In clusters: whether a suspension waits until the syncer has saved everything, however long that "
        "takes, or removes the pods after some minutes anyway; what is not saved then may be lost. With Anyway a job "
        "whose volume was replaced while it was suspended continues with what the new one has.",
    )
    release: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        pattern=r"^[-A-Za-z0-9._:+]+$",
        examples=["2026-11-22T15:00:00Z"],
        description="Any word. When it changes, the job gets the pod templates and images of the operator's current "
        "release, and its pods are replaced; `diloco upgrade` writes the time. Without a change the job keeps those of "
        "its start.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**32 - 1,
        description="Seed of the initial weights, the order of the data and everything else that is random.",
    )
    ttl_seconds_after_finished: int | None = Field(
        None, ge=0, le=2**31 - 1, description="Delete the job this many seconds after its end; null: keep it."
    )
    active_deadline_seconds: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="In clusters: the job fails this many seconds after its start (status.startTime), suspensions "
        "included; null: never.",
    )
    training: TrainingSpec = Field(default_factory=TrainingSpec, description="What is trained, and how long.")
    sync: SyncSpec = Field(default_factory=SyncSpec, description="How learners exchange and merge.")
    syncer: SyncerSpec = Field(default_factory=SyncerSpec, description="The service that holds the parameters.")
    learners: LearnersSpec = Field(default_factory=LearnersSpec, description="What all learners share.")
    evaluator: EvaluatorSpec = Field(
        default_factory=EvaluatorSpec, description="The process that scores the merged model (training.evaluation)."
    )
    regions: list[RegionSpec] = Field(
        ...,
        min_length=1,
        max_length=64,
        examples=[[{"learners": 3}]],
        description="Where learners run and how many, each region under its own name.",
    )
    output: OutputSpec = Field(default_factory=OutputSpec, description="Where the merged model is written at the end.")
    failure_policy: FailurePolicySpec = Field(default_factory=FailurePolicySpec, description="When the job gives up.")
    node_loss: NodeLossSpec = Field(default_factory=NodeLossSpec, description="What happens to pods on lost nodes.")

    @property
    def slots(self) -> int:
        """M: learners of all regions together."""
        return sum(region.learners for region in self.regions)

    @property
    def most_slots(self) -> int:
        """Learners that may train at once, in all regions: M, or more where regions have maxLearners."""
        return sum(region.most_learners for region in self.regions)

    def batch_of(self, region: str) -> BatchSpec:
        """The batch of a region's learners."""
        own = next((one.batch for one in self.regions if one.name == region), None)
        return self.training.batch if own is None else own

    def parallel_of(self, region: str) -> ParallelSpec:
        """How a region's learners divide the model among their ranks."""
        own = next((one.parallel for one in self.regions if one.name == region), None)
        return self.training.parallel if own is None else own

    def group(self, region: str) -> Group:
        """The processes of each of a region's learners; of an unknown region, those of all others."""
        own = next((one for one in self.regions if one.name == region), None)
        processes, pods = (own.processes, own.pods) if own else (None, None)
        return Group(processes or self.learners.processes, pods or self.learners.pods)

    def in_region(self, region: str) -> JobSpec:
        """The job as a learner of the region has it: ``training.batch``, ``training.parallel``, ``learners.processes``
        and ``learners.pods`` are the region's."""
        own = {"batch": self.batch_of(region), "parallel": self.parallel_of(region)}
        training = self.training.model_copy(update=own)
        learners = self.learners.model_copy(update=self.group(region)._asdict())
        return self.model_copy(update={"training": training, "learners": learners})

    @property
    def quorum(self) -> int:
        """K that holds: all slots in deterministic mode, else sync.quorum."""
        return self.slots if self.sync.deterministic else self.sync.quorum

    @property
    def max_steps_alone(self) -> int:
        """sync.staleness.maxSteps with its default, 4·H."""
        return self.sync.staleness.max_steps or 4 * self.sync.every

    @property
    def evaluated(self) -> bool:
        """Whether an evaluator runs: asked for, and there is a program of the user's, or model and data, to do it."""
        training = self.training
        able = self.evaluator.command is not None or (training.model is not None and training.data is not None)
        return training.evaluation is not None and able
