"""Warnings about a job: what is allowed and probably not meant.

For a job whose learners and hub are in different clusters, that is also what of ``sync`` asks more of the
links between them than it need. Only what the job file alone shows; `diloco plan` says how much."""

from __future__ import annotations

import re
from collections.abc import Iterator

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.rules import Violation, broken, with_values

LARGE_RATE = 0.1
"""Of AdamW, which moves each parameter by about so much in a step: models diverge at less."""
FEW_MERGES = 5
"""Of a fragment, in a run: with fewer the outer optimizer has next to no effect (docs/choosing.md)."""
_IDLE = 4  # so many times the bandwidth that the same bytes need, spread out


def spans_clusters(spec: JobSpec) -> bool:
    """Whether some link of the job leads from one cluster to another."""
    return len({spec.syncer.cluster, *(region.cluster for region in spec.regions)} - {None}) > 1


def _link_warnings(spec: JobSpec) -> Iterator[Violation]:
    """Nothing for a job of one cluster or machine, whose network is nobody's bottleneck."""
    if not spans_clusters(spec):
        return
    sync = spec.sync
    if sync.deterministic:
        yield broken(
            "sync.deterministic",
            "every learner waits for the slowest link at each exchange; this job spans clusters: "
            "it is meant for tests on one machine",
        )
    period = sync.every / sync.fragments
    if sync.overlap == 0:
        yield broken(
            "sync.overlap",
            "no step overlaps an exchange, so each merge is late by its whole way between clusters: "
            "2 hides a step's worth and more",
        )
    elif period >= _IDLE * sync.overlap:
        yield broken(
            "sync.fragments",
            f"an exchange has {sync.overlap} of the {period:g} steps until the next, and the links between "
            f"clusters lie idle for the rest: they need {period / sync.overlap:.3g} times the bandwidth that "
            f"more fragments (sync.every allows {sync.every}) or a larger sync.overlap would need",
        )
    if sync.compression.up == "float32":
        yield broken(
            "sync.compression.up",
            "7.8 times the bytes of int4 on the links between clusters: int4 was reported to cost nothing",
        )
    if sync.compression.down == "float32":
        yield broken(
            "sync.compression.down",
            "twice the bytes of bfloat16 and 7.8 times those of delta-int4, out of the hub for every learner",
        )


def warnings(spec: JobSpec) -> list[Violation]:
    """What is allowed and probably not meant."""
    return with_values(spec, (*_unlikely(spec), *_link_warnings(spec)))


def _few_merges(spec: JobSpec) -> Iterator[Violation]:
    steps, every = _steps(spec), spec.sync.every
    if steps is None or steps // every >= FEW_MERGES:
        return
    count = {0: "no fragment is merged", 1: "each fragment is merged once", 2: "each fragment is merged twice"}
    merged = count.get(steps // every, f"each fragment is merged {steps // every} times")
    most = steps // FEW_MERGES
    fix = f"set sync.every to at most {most} and sync.fragments to no more than that, or " if most else ""
    yield broken(
        "sync.every",
        f"{merged} before the job stops ({steps:,} steps of each learner), and at least about {FEW_MERGES} merges of "
        f"each are recommended: {fix}train longer",
    )


def _steps(spec: JobSpec) -> int | None:
    """Steps of each learner until the stop; None: the job file does not say."""
    training = spec.training
    stop, data = training.stop, training.data
    if stop.tokens is None or spec.learners.command is not None or data is None or data.source != "text":
        return stop.steps
    batches = [(region.learners, spec.batch_of(region.name)) for region in spec.regions]
    sequences = sum(learners * batch.sequences * batch.accumulation for learners, batch in batches)
    return stop.tokens // (sequences * data.sequence_length)


def _unlikely(spec: JobSpec) -> Iterator[Violation]:
    training, outer = spec.training, spec.sync.outer
    warmup, steps = training.optimizer.warmup_steps, training.stop.steps
    if steps is not None and warmup >= steps and spec.learners.command is None:
        default = ", and this is the default" if warmup == type(training.optimizer)().warmup_steps else ""
        yield broken(
            "training.optimizer.warmupSteps",
            f"the warm-up is not over when the job stops (training.stop.steps is {steps}{default}): "
            f"set training.optimizer.warmupSteps to {steps // 10}, a tenth of the steps",
        )
    if training.optimizer.lr > LARGE_RATE and spec.learners.command is None:
        yield broken(
            "training.optimizer.lr",
            "AdamW moves every parameter by about lr at each step, and a model diverges at so much: try 0.001",
        )
    yield from _few_merges(spec)
    if outer.optimizer in ("adamw", "cosine-gated") and (outer.lr or 0) > 0.1:
        yield broken(
            "sync.outer.lr",
            f"{outer.optimizer} moves every parameter by about lr at each merge; 0.7 is meant for nesterov: try 0.001",
        )
    endpoint = spec.syncer.endpoint
    asked = re.fullmatch(r"(?:[^:]*|\[.*\]):(\d+)", endpoint.address or "")
    if endpoint.node_port is not None and asked and int(asked[1]) != endpoint.node_port:
        yield broken(
            "syncer.endpoint.address",
            f"learners dial port {asked[1]}, and syncer.endpoint.nodePort is {endpoint.node_port}: right "
            "only if something between leads from one to the other",
        )
    if spec.sync.deterministic and spec.sync.quorum not in (1, spec.slots):
        yield broken("sync.quorum", f"a deterministic job waits for all {spec.slots} learners")
