"""``spec.syncer``, ``spec.learners``, ``spec.regions`` and what happens when they fail."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from diloco_protocol.common.quantities import parse_quantity
from diloco_protocol.spec.base import (
    ADDRESS_PATTERN,
    CIDR_PATTERN,
    NAME_PATTERN,
    BucketUri,
    Free,
    Name,
    Seconds,
    Spec,
    Text,
)
from diloco_protocol.spec.training import BatchSpec


def _positive_quantity(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError("must be more than zero, such as 10Gi")
    return text


Quantity = Annotated[str, Field(max_length=32), AfterValidator(_positive_quantity)]


class ServiceSpec(Spec):
    """What clouds ask of a Service, as Kubernetes takes it."""

    annotations: dict[str, str] = Field(
        default_factory=dict,
        examples=[{"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"}],
        description="Of the syncer's Service: by them clouds choose an internal or an outer load balancer, and more.",
    )
    load_balancer_class: Annotated[str, Field(max_length=253)] | None = Field(
        None, description="Of LoadBalancer: who makes it; null: the cloud's default. Fixed once there is a Service."
    )
    source_ranges: list[Annotated[str, Field(max_length=43, pattern=CIDR_PATTERN)]] = Field(
        default_factory=list,
        max_length=64,
        examples=[["10.0.0.0/8"]],
        description="Of LoadBalancer: the only addresses (CIDR) that may connect; empty: all.",
    )
    external_traffic_policy: Literal["Cluster", "Local"] = Field(
        "Cluster", description="Of NodePort and LoadBalancer: Local keeps learners' addresses."
    )
    ip_family_policy: Literal["SingleStack", "PreferDualStack", "RequireDualStack"] = Field(
        "SingleStack", description="IPv4, IPv6, or both."
    )


class EndpointSpec(Spec):
    """Where learners reach the syncer."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer", "External"] = Field(
        "ClusterIP", description="Kind of Service; External: an address of yours that leads to it."
    )
    address: Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=253)] | None = Field(
        None, description="host or host:port that learners of other clusters dial; required across clusters."
    )
    node_port: Annotated[int, Field(ge=30000, le=32767)] | None = Field(
        None, description="Of NodePort: shard i listens on nodePort + i; null: Kubernetes chooses."
    )
    service: ServiceSpec = Field(default_factory=ServiceSpec, description="What clouds ask of its Service.")


class TlsSpec(Spec):
    """The syncer's certificate."""

    secret_name: Name | None = Field(
        None, description="Secret with tls.crt, tls.key, ca.crt; null: made for the job (one cluster only)."
    )
    mode: Literal["auto", "off"] = Field(
        "auto", description="auto: TLS, with the named or a made certificate; off: plaintext, by ClusterIP only."
    )


class StorageSpec(Spec):
    """Where the syncer keeps its durable state."""

    size: Quantity = Field("10Gi", description="Size of the volume that is made.")
    storage_class_name: Name | None = Field(None, description="Its storage class; null: the cluster's default.")
    claim_name: Name | None = Field(None, description="A PersistentVolumeClaim of yours instead.")
    uri: BucketUri | None = Field(None, description="A bucket instead, by its URI, such as s3://bucket/prefix.")
    on_delete: Literal["Retain", "Delete"] = Field(
        "Retain", description="What happens to a made volume when the job is deleted."
    )


class CheckpointSpec(Spec):
    """The syncer's checkpoints."""

    every_seconds: Seconds = Field(60.0, description="Between checkpoints.")
    keep: int = Field(3, ge=1, le=1000, description="How many are kept.")


class SyncerSpec(Spec):
    """The service that holds the global parameters."""

    cluster: Name | None = Field(None, description="Cluster it runs in; null in a job of one cluster.")
    shards: int = Field(1, ge=1, le=1, description="Processes that share the fragments; more than 1 do not work yet.")
    endpoint: EndpointSpec = Field(default_factory=EndpointSpec, description="Where learners reach it.")
    tls: TlsSpec = Field(default_factory=TlsSpec, description="Its certificate.")
    storage: StorageSpec = Field(default_factory=StorageSpec, description="Where its durable state lies.")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="Its checkpoints.")
    pod_template: Free = Field({}, description="Merged into the syncer's pod template.")


class CredentialsSpec(Spec):
    """What a learner shows when it joins."""

    secret_name: Name | None = Field(
        None,
        description="Secret with tls.crt, tls.key, ca.crt, join-token, of the same name in every cluster; "
        "null: made for the job (one cluster only).",
    )


class LearnersSpec(Spec):
    """What all learners share."""

    credentials: CredentialsSpec = Field(default_factory=CredentialsSpec, description="How they prove who they are.")
    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="Your own program instead of the built-in trainer. `diloco run` starts it in the "
        "directory of the job file, and takes `python` for the interpreter that it runs under itself.",
    )
    stall_seconds: Seconds | None = Field(
        600.0,
        description="A learner that makes no step for so long, and for 20 of its steps, has stalled: it logs the stack "
        "traces of all threads, ends with exit code 6 and is replaced. Six times as long before the first step, which "
        "may compile; null: never.",
    )
    pod_template: Free = Field({}, description="Merged into every learner's pod template.")


class EvaluatorSpec(Spec):
    """The process that scores the merged model."""

    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="Your own program instead of the built-in evaluator: a loop around diloco_worker.Observer. "
        "It is started as learners.command is, with DILOCO_ROLE=evaluator.",
    )
    pod_template: Free = Field(
        {},
        description="Merged over learners.podTemplate in the evaluator's pod, whose container is evaluator. "
        "Learners' resources are not taken over: a GPU for the evaluator is asked for here.",
    )


class RegionSpec(Spec):
    """One place where learners run."""

    name: str = Field("local", pattern=NAME_PATTERN, max_length=20, description="Unique; not syncer or evaluator.")
    cluster: Name | None = Field(None, description="Cluster it runs in; null in a job of one cluster.")
    learners: int = Field(
        ..., ge=1, le=1024, description="Learners, one slot each; where maxLearners is more, the fewest.", examples=[3]
    )
    max_learners: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Whoever joins beyond learners trains at once, up to so many in all, and is no loss when it goes. "
        "null: as many as learners, and whoever comes beyond stands by.",
    )
    spares: int = Field(0, ge=0, le=1024, description="Processes that wait to take the slot of one that is lost.")
    batch: BatchSpec | None = Field(
        None,
        description="The batch of this region's learners, in place of training.batch as a whole; null: training.batch.",
    )
    pod_template: Free = Field({}, description="Merged over learners.podTemplate in this region.")

    @property
    def most_learners(self) -> int:
        """The bound: learners that may train here at once."""
        return self.learners if self.max_learners is None else self.max_learners


class FailureRule(Spec):
    """What a learner's exit code means."""

    exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        ..., min_length=1, max_length=64, description="The exit codes that this rule is about.", examples=[[1]]
    )
    action: Literal["Replace", "Ignore", "Fail"] = Field(
        ..., description="Replace: and count it; Ignore: replace, not counted; Fail: the job.", examples=["Replace"]
    )


class FailurePolicySpec(Spec):
    """How much failure is taken."""

    max_replacements: int = Field(
        50,
        ge=0,
        le=1_000_000,
        description="Failures of one learner, or of the syncer, since the last merge after which the job fails.",
    )
    region_lost_seconds: Seconds = Field(120.0, description="Silence of a whole region after which it counts as lost.")
    on_region_lost: Literal["Continue", "Hold", "Fail"] = Field(
        "Continue",
        description="Continue: go on while the quorum is met; Hold: no merges until the region is back; "
        "Fail: the job fails.",
    )
    rules: list[FailureRule] = Field([], max_length=32, description="By exit code; the first that fits counts.")


class NodeLossSpec(Spec):
    """What happens to pods on a node that has gone silent."""

    policy: Literal["Wait", "ForceDelete"] = Field(
        "Wait", description="Wait for the node, or force-delete the pod so that its replacement can start."
    )
    after_seconds: Seconds = Field(60.0, description="Node silence before a pod on it is force-deleted.")
