"""``spec.syncer``, ``spec.learners``, ``spec.regions`` and what happens when they fail."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from diloco_protocol.common.quantities import parse_quantity
from diloco_protocol.common.reach import split_address
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
from diloco_protocol.spec.training import BatchSpec, ParallelSpec
from diloco_protocol.vocabulary import SYNC_PORT


def _positive_quantity(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError("must be more than zero, such as 10Gi")
    return text


MAX_NODE_PORT = 32767
Quantity = Annotated[str, Field(max_length=32), AfterValidator(_positive_quantity)]
Processes = Annotated[int, Field(ge=1, le=64)]
Pods = Annotated[int, Field(ge=1, le=256)]


class Group(NamedTuple):
    """The processes of one learner: so many in each of its pods."""

    processes: int
    pods: int

    @property
    def ranks(self) -> int:
        """Processes of the learner in all its pods; 1: it is an ordinary process."""
        return self.processes * self.pods


class ServiceSpec(Spec):
    """Settings of the syncer's Service, as in Kubernetes."""

    annotations: dict[str, str] = Field(
        default_factory=dict,
        examples=[{"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"}],
        description="Annotations of the Service; clouds choose the type of load balancer by them, and more.",
    )
    load_balancer_class: Annotated[str, Field(max_length=253)] | None = Field(
        None,
        description="For LoadBalancer: the implementation; null: the cloud's default. Fixed once the Service exists.",
    )
    source_ranges: list[Annotated[str, Field(max_length=43, pattern=CIDR_PATTERN)]] = Field(
        default_factory=list,
        max_length=64,
        examples=[["10.0.0.0/8"]],
        description="For LoadBalancer: the only addresses (CIDR) that may connect; empty: all.",
    )
    external_traffic_policy: Literal["Cluster", "Local"] = Field(
        "Cluster", description="For NodePort and LoadBalancer: Local keeps the learners' addresses."
    )
    ip_family_policy: Literal["SingleStack", "PreferDualStack", "RequireDualStack"] = Field(
        "SingleStack", description="IPv4, IPv6, or both."
    )


class EndpointSpec(Spec):
    """Where learners reach the syncer."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer", "External"] = Field(
        "ClusterIP", description="Type of Service; External: your own gateway leads to it."
    )
    address: Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=253)] | None = Field(
        None, description="host or host:port that learners of other clusters connect to; required across clusters."
    )
    node_port: Annotated[int, Field(ge=30000, le=MAX_NODE_PORT)] | None = Field(
        None, description="For NodePort: the Service of shard pod i has nodePort + 1 + i; null: Kubernetes chooses."
    )
    service: ServiceSpec = Field(default_factory=ServiceSpec, description="Settings of its Service.")

    @property
    def learner_address(self) -> str:
        """host:port that learners of other clusters connect to; empty where no address is given."""
        return _with_port(self.address, self.node_port or SYNC_PORT) if self.address else ""


def _with_port(address: str, port: int) -> str:
    """An ``ADDRESS_PATTERN`` as host:port, with this port where it has none."""
    host, colon, given = address.rpartition(":")
    return address if colon and given.isdigit() and not host.endswith(":") else f"{address}:{port}"


class ShardPodsSpec(Spec):
    """Pods of the syncer's shards, one each."""

    addresses: list[Annotated[str, Field(pattern=ADDRESS_PATTERN, max_length=253)]] = Field(
        default_factory=list,
        max_length=64,
        examples=[["shard-0.example.org", "shard-1.example.org"]],
        description="host or host:port of each shard, in order, that learners of other clusters connect to; empty: "
        "with endpoint.nodePort, for shard i the host of endpoint.address and port nodePort + 1 + i.",
    )
    pod_template: Free = Field({}, description="Merged into each shard's pod template, after syncer.podTemplate.")


class TlsSpec(Spec):
    """The syncer's certificate."""

    secret_name: Name | None = Field(
        None, description="Secret with tls.crt, tls.key, ca.crt; null: the operator makes one (one cluster only)."
    )
    mode: Literal["auto", "off"] = Field(
        "auto",
        description="auto: TLS, with the named Secret or the operator's; off: plaintext, with type ClusterIP only.",
    )


class StorageSpec(Spec):
    """Where the syncer keeps its durable state."""

    size: Quantity = Field("10Gi", description="Size of the volume that the operator makes.")
    storage_class_name: Name | None = Field(None, description="Its storage class; null: the cluster's default.")
    claim_name: Name | None = Field(None, description="Your own PersistentVolumeClaim instead.")
    uri: BucketUri | None = Field(None, description="A bucket instead, by its URI, such as s3://bucket/prefix.")
    on_delete: Literal["Retain", "Delete"] = Field(
        "Retain", description="What happens to the operator's volume when the job is deleted."
    )


class CheckpointSpec(Spec):
    """The syncer's checkpoints."""

    every_seconds: Seconds = Field(60.0, description="Seconds between checkpoints.")
    keep: int = Field(3, ge=1, le=1000, description="Number of checkpoints that are kept.")


class SyncerSpec(Spec):
    """The service that holds the global parameters."""

    cluster: Name | None = Field(None, description="Name of its cluster; null if the job has one cluster.")
    shards: int = Field(
        1, ge=1, le=64, description="Processes that share the fragments, beside the syncer; 1: the syncer has all."
    )
    shard_pods: ShardPodsSpec | None = Field(
        None,
        description="In clusters: each shard is a pod of its own, with a Service; null: shards are processes beside "
        "the syncer, behind its port. `diloco run` ignores it.",
    )
    endpoint: EndpointSpec = Field(default_factory=EndpointSpec, description="Where learners reach it.")
    tls: TlsSpec = Field(default_factory=TlsSpec, description="Its certificate.")
    storage: StorageSpec = Field(default_factory=StorageSpec, description="Where it keeps its durable state.")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="Its checkpoints.")
    pod_template: Free = Field({}, description="Merged into the syncer's pod template.")

    def shard_address(self, shard: int) -> tuple[str, int]:
        """Host and port at which learners of other clusters reach a shard that is a pod; host empty: the syncer's."""
        port = SYNC_PORT if self.endpoint.node_port is None else self.endpoint.node_port + 1 + shard
        given = self.shard_pods.addresses if self.shard_pods is not None else []
        return split_address(_with_port(given[shard], port)) if given else ("", port)


class CredentialsSpec(Spec):
    """What a learner shows when it joins."""

    secret_name: Name | None = Field(
        None,
        description="Secret with tls.crt, tls.key, ca.crt, join-token, of the same name in every cluster; "
        "null: the operator makes one (one cluster only).",
    )


class LearnersSpec(Spec):
    """What all learners share."""

    credentials: CredentialsSpec = Field(
        default_factory=CredentialsSpec, description="Their certificates and join token."
    )
    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="Your own program instead of the built-in trainer. `diloco run` starts it in the "
        "directory of the job file, and replaces `python` by its own interpreter.",
    )
    processes: Processes = Field(
        1,
        description="Processes in each pod of a learner, each with one GPU if the pod has GPUs. They train one model "
        "together. More than 1: the learner's program is started in so many ranks, with the environment of torchrun's.",
    )
    pods: Pods = Field(
        1,
        description="Pods of each learner, whose ranks are processes × pods. On one machine all ranks are started "
        "there.",
    )
    stall_seconds: Seconds | None = Field(
        600.0,
        description="A learner has stalled if it makes no step for this many seconds, and for the time of 20 steps. It "
        "then logs the stack traces of all threads, ends with exit code 6 and is replaced. Before the first step, "
        "which may compile, it has six times as long; null: never.",
    )
    pod_template: Free = Field({}, description="Merged into every learner's pod template.")


class EvaluatorSpec(Spec):
    """The process that scores the merged model."""

    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="Your own program instead of the built-in evaluator: a loop around diloco_worker.Observer. "
        "It is started like learners.command, with DILOCO_ROLE=evaluator.",
    )
    pod_template: Free = Field(
        {},
        description="Merged over learners.podTemplate in the evaluator's pod, whose container is evaluator. "
        "The learners' resources do not apply to it: request a GPU for the evaluator here.",
    )


class RegionSpec(Spec):
    """One place where learners run."""

    name: str = Field(
        "local", pattern=NAME_PATTERN, max_length=20, description="Unique; not syncer, syncer-shard* or evaluator."
    )
    cluster: Name | None = Field(None, description="Name of its cluster; null if the job has one cluster.")
    learners: int = Field(
        ...,
        ge=1,
        le=1024,
        description="Number of learners, one slot each; with a larger maxLearners, the minimum.",
        examples=[3],
    )
    max_learners: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Up to this number, more learners than `learners` may join, train at once, and leave without "
        "counting as a loss; null: the same as learners, and further ones stand by.",
    )
    spares: int = Field(
        0, ge=0, le=1024, description="Number of processes that wait to take the slot of a lost learner."
    )
    batch: BatchSpec | None = Field(
        None,
        description="The batch of this region's learners; it replaces training.batch as a whole; null: training.batch.",
    )
    processes: Processes | None = Field(
        None, description="Processes in each pod of this region's learners; null: learners.processes."
    )
    pods: Pods | None = Field(None, description="Pods of each of this region's learners; null: learners.pods.")
    parallel: ParallelSpec | None = Field(
        None,
        description="How this region's learners divide the model among their ranks; it replaces training.parallel as a "
        "whole; null: training.parallel.",
    )
    pod_template: Free = Field({}, description="Merged over learners.podTemplate in this region.")

    @property
    def most_learners(self) -> int:
        """The bound: learners that may train here at once."""
        return self.learners if self.max_learners is None else self.max_learners


class FailureRule(Spec):
    """What a learner's exit code means."""

    exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        ..., min_length=1, max_length=64, description="The exit codes to which this rule applies.", examples=[[1]]
    )
    action: Literal["Replace", "Ignore", "Fail"] = Field(
        ...,
        description="Replace: replace the learner and count it; Ignore: replace it, not counted; Fail: fail the job.",
        examples=["Replace"],
    )


class FailurePolicySpec(Spec):
    """When the job gives up."""

    max_replacements: int = Field(
        50,
        ge=0,
        le=1_000_000,
        description="The job fails when one learner, or the syncer, fails more often than this without a merge.",
    )
    region_lost_seconds: Seconds = Field(
        120.0, description="A region counts as lost after this many seconds of silence."
    )
    on_region_lost: Literal["Continue", "Hold", "Fail"] = Field(
        "Continue",
        description="Continue: merge while the quorum is met; Hold: no merges until the region is back; "
        "Fail: the job fails.",
    )
    rules: list[FailureRule] = Field(
        [], max_length=32, description="Rules by exit code; the first that matches applies."
    )


class NodeLossSpec(Spec):
    """What happens to pods on a node that has gone silent."""

    policy: Literal["Wait", "ForceDelete"] = Field(
        "Wait", description="Wait for the node, or force-delete the pod so that its replacement can start."
    )
    after_seconds: Seconds = Field(60.0, description="Seconds of a node's silence before its pods are force-deleted.")
