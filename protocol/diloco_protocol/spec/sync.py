"""``spec.sync``: how learners and syncer exchange and merge (Decoupled DiLoCo, arXiv 2604.21428)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from diloco_protocol.spec.base import Pattern, Spec
from diloco_protocol.spec.training import Betas
from diloco_protocol.vocabulary import MAX_FRAGMENTS

LEAST_OF_MEDIAN = 3  # learners: of two, nothing tells which is right


class GraceSpec(Spec):
    """The adaptive grace window after the quorum (Eq. 3)."""

    factor: float = Field(0.9, ge=0, le=1, description="γ: the share of the estimated slack that the syncer waits.")
    cap_seconds: float = Field(10.0, ge=0, le=3600, description="The longest wait after the quorum, in seconds.")


class MergeSpec(Spec):
    """How the outer gradients of one round become one."""

    method: Literal["auto", "rda", "mean", "isotropic", "median"] = Field(
        "auto",
        description="rda: radial-directional averaging (the paper's); mean: weighted mean; isotropic: rda, and then "
        "the singular values of each matrix made equal (IsoLoCo, arXiv 2607.03011), which takes the syncer more time. "
        "auto: isotropic for a model below 10^8 parameters that is trained from scratch, else rda. "
        "median: as auto, with medians over the learners in place of means, for parties that do not know each other; "
        "it needs a quorum of 3 at least. Nothing was measured from 10^8 on.",
    )
    weights: Literal["tokens-quality", "tokens", "uniform"] = Field(
        "tokens-quality",
        description="Weight of a push: tokens × tokens per step, tokens, or equal for all, as it always is with "
        "method median.",
    )
    mean_tensors: list[Pattern] = Field(
        [],
        max_length=64,
        description="Patterns (fnmatch) of parameter names that are merged by mean, whatever the method; "
        "embeddings always are.",
    )


class OuterSpec(Spec):
    """The outer optimizer, on the syncer."""

    optimizer: Literal["nesterov", "sgd", "adamw", "cosine-gated"] = Field(
        "nesterov",
        description="nesterov: SGD with Nesterov momentum; sgd: SGD without momentum; adamw: AdamW; "
        "cosine-gated: Cosine-Gated Adam-Decay (arXiv 2605.09126), which damps old pushes.",
    )
    lr: Annotated[float, Field(gt=0, le=10)] | None = Field(
        None,
        description="Outer learning rate. null: of nesterov 1.4 after isotropic merges, 1 for weights that were "
        "trained before (model.from, lora) and else 0.7, DiLoCo's; of sgd 2 after isotropic merges, else 1; "
        "of adamw and cosine-gated 0.001.",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Of nesterov. null: 0.5 after isotropic merges, 0 for weights that were trained before, else 0.9.",
    )
    betas: Betas = Field([0.9, 0.999], description="Of adamw and cosine-gated.")
    eps: float = Field(1e-8, gt=0, le=1, description="Of adamw and cosine-gated.")
    restart_every: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        None,
        description="Number of merges after which a fragment's momentum is cleared, again and again "
        "(arXiv 2605.28585); null: never.",
    )
    age_decay: float = Field(
        0.5,
        ge=0,
        le=1,
        description="For cosine-gated: α in e^(−α·age), the factor that damps old pushes; age in versions.",
    )


class AdoptionSpec(Spec):
    """What a learner does with the steps it made while its own push was merged."""

    rule: Literal["overwrite", "keep", "mix"] = Field(
        "keep",
        description="overwrite: drop these steps (as in the paper); keep: add them to the merged model; "
        "mix: (1 − alpha) · merged + alpha · own (Streaming DiLoCo).",
    )
    alpha: float = Field(0.5, ge=0, le=1, description="For mix: the share of the learner's own parameters.")


class CompressionSpec(Spec):
    """Encodings on the wire."""

    up: Literal["float32", "bfloat16", "int8", "int4", "int2"] = Field(
        "int4", description="Encoding of pushes (outer gradients)."
    )
    down: Literal["float32", "bfloat16", "delta-int8", "delta-int4"] = Field(
        "bfloat16", description="Encoding of broadcasts (parameters); delta-*: the quantised update instead."
    )
    error_feedback: bool = Field(False, description="Add the encoding error of a merged push to the next push.")


class StalenessSpec(Spec):
    """How far a learner may be ahead alone, or behind the others."""

    max_steps: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        None, description="A learner pauses after this many steps without a new version; null: 4 · every."
    )
    max_versions: int = Field(16, ge=1, le=1_000_000, description="Work older than this many versions is dropped.")


class HeartbeatSpec(Spec):
    """How the syncer notices that a learner is lost."""

    interval_seconds: float = Field(1.0, ge=0.05, le=300, description="Seconds between a learner's heartbeats.")
    timeout_seconds: float = Field(
        10.0, gt=0.05, le=3600, description="A slot is lost after this many seconds of silence."
    )


class NormGateSpec(Spec):
    """A guard against a learner whose training diverges."""

    factor: Annotated[float, Field(gt=1, le=1e6)] | None = Field(
        None,
        description="Refuse a push whose norm, for its steps, is above this multiple of the running median; "
        "null: 10, and never in a deterministic job.",
    )


class SyncSpec(Spec):
    """Exchange and merge."""

    fragments: int = Field(
        24,
        ge=1,
        le=MAX_FRAGMENTS,
        description="P: the number of parts of the model, which are merged in turn; at most every.",
    )
    every: int = Field(24, ge=1, le=1_000_000, description="H: inner steps between two merges of one fragment.")
    overlap: int = Field(
        2, ge=0, le=1_000_000, description="τ: inner steps that one fragment's exchange may overlap; below every."
    )
    quorum: int = Field(
        1, ge=1, le=4096, description="K: the number of learners that a merge needs. With deterministic: all."
    )
    grace: GraceSpec = Field(default_factory=GraceSpec, description="The wait for stragglers after the quorum.")
    merge: MergeSpec = Field(default_factory=MergeSpec, description="How pushes become one outer gradient.")
    outer: OuterSpec = Field(default_factory=OuterSpec, description="The outer optimizer.")
    adoption: AdoptionSpec = Field(default_factory=AdoptionSpec, description="How a learner takes a new version.")
    compression: CompressionSpec = Field(default_factory=CompressionSpec, description="Encodings on the wire.")
    staleness: StalenessSpec = Field(
        default_factory=StalenessSpec, description="Limits for learners that are alone or late."
    )
    heartbeat: HeartbeatSpec = Field(default_factory=HeartbeatSpec, description="Detection of lost learners.")
    norm_gate: NormGateSpec = Field(default_factory=NormGateSpec, description="Refusal of outlying pushes.")
    deterministic: bool = Field(
        False,
        description="Learners wait for each other, and the same seed gives the same bits. For tests and debugging.",
    )
