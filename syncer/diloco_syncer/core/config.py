"""What the core needs of a job, read from the spec once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from diloco_protocol import resources
from diloco_protocol.merging import push_weights
from diloco_protocol.spec.job import DiLoCoJob, immutable_digests
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.wire import limits
from diloco_syncer.core.books.deterministic import Mode, make_mode
from diloco_syncer.core.books.norm_gate import GATE_FACTOR
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.books.shares import Stop


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Numbers and names that the core's decisions depend on (steps, tokens, seconds)."""

    places: tuple[tuple[str, int], ...]  # (region, ordinal) of every slot, in job order
    rules: RoundRules
    encoding: str  # of pushes
    mode: Mode = field(default_factory=Mode)
    weights: str = "tokens-quality"
    max_versions: int = 16
    max_steps: int = 96  # that a learner makes alone
    batches: Mapping[str, int] = field(default_factory=dict)  # by region: sequences of a learner's step
    heartbeat_timeout: float = 10.0
    stop: Stop = ("steps", 1)
    norm_gate: float | None = None
    # Slots that a region's processes may hold at once, its learners and spares; empty: as many as there are.
    region_slots: Mapping[str, int] = field(default_factory=dict)
    # By region, how many learners it may have beyond its places (regions[].maxLearners).
    open_places: Mapping[str, int] = field(default_factory=dict)
    step_tokens: int = limits.MAX_STEP_TOKENS  # a step trains at most so many; batches may be changed in a running job
    on_region_lost: Literal["Continue", "Hold", "Fail"] = "Continue"
    region_lost_seconds: float = 120.0
    evaluated: bool = False
    seed: int = 0
    shards: int = 1  # processes that share the fragments
    digests: dict[str, str] = field(default_factory=dict)
    drain_seconds: float = 120.0  # at the end: the longest wait for another offer, or another byte of one
    most_drain_seconds: float = 900.0  # and after which bytes prolong it no more
    evaluation_seconds: float = 120.0  # the longest wait for progress of the final evaluation
    most_evaluation_seconds: float = 4 * 3600.0  # and for the score in all, however it comes on
    evaluator_seconds: float = 20.0  # the wait for an evaluator that never scored and is not connected
    peer_seconds: float = 30.0  # the longest wait for another byte of a peer's optimizer state
    checkpoint_seconds: float = 20.0  # and of the one that goes into the checkpoint
    rejoin_seconds: float = limits.REJOIN_SECONDS  # the longest wait for a learner that may bring such a state
    rebuild_seconds: float = 30.0  # an empty store's wait for learners beyond the quorum
    # Of fragments with so many elements, the most rounds that the syncer has the memory for.
    most_rounds: Callable[[Sequence[int]], int] = len

    @classmethod
    def from_job(cls, job: DiLoCoJob) -> CoreConfig:
        spec = job.spec
        sync, stop = spec.sync, spec.training.stop
        return cls(
            places=tuple((region.name, ordinal) for region in spec.regions for ordinal in range(region.learners)),
            rules=RoundRules(
                every=sync.every,
                overlap=sync.overlap,
                quorum=spec.quorum,
                grace_factor=sync.grace.factor,
                grace_cap=sync.grace.cap_seconds,
            ),
            encoding=sync.compression.up,
            mode=make_mode(job),
            weights=push_weights(sync.merge.method, sync.merge.weights),
            max_versions=sync.staleness.max_versions,
            max_steps=spec.max_steps_alone,
            batches={region.name: _step_sequences(spec.in_region(region.name)) for region in spec.regions},
            heartbeat_timeout=sync.heartbeat.timeout_seconds,
            stop=(stop.kind, stop.limit),
            norm_gate=None if sync.deterministic else sync.norm_gate.factor or GATE_FACTOR,
            region_slots=learners_by_region(job),
            open_places={
                region.name: region.most_learners - region.learners
                for region in spec.regions
                if region.most_learners > region.learners
            },
            on_region_lost=spec.failure_policy.on_region_lost,
            region_lost_seconds=spec.failure_policy.region_lost_seconds,
            evaluated=spec.evaluated,
            seed=spec.seed,
            shards=spec.syncer.shards,
            digests=immutable_digests(job),
            most_rounds=partial(resources.most_rounds, spec),
        )


def _step_sequences(spec: JobSpec) -> int:
    return spec.training.batch.sequences * spec.training.batch.accumulation


def learners_by_region(job: DiLoCoJob) -> dict[str, int]:
    """Processes of each region that may be connected, those that stand by included."""
    return {region.name: region.most_learners + region.spares for region in job.spec.regions}
