"""Warnings about a job whose learners and hub are in different clusters: what of ``sync`` asks more of the
links between them than it need. Only what the job file alone shows; `diloco plan` says how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_protocol.spec.job import JobSpec

_IDLE = 4  # so many times the bandwidth that the same bytes need, spread out

Unlikely = tuple[str, Any, str]  # path below spec, value, message


def spans_clusters(spec: JobSpec) -> bool:
    """Whether some link of the job leads from one cluster to another."""
    return len({spec.syncer.cluster, *(region.cluster for region in spec.regions)} - {None}) > 1


def link_warnings(spec: JobSpec) -> Iterator[Unlikely]:
    """Nothing for a job of one cluster or machine, whose network is nobody's bottleneck."""
    if not spans_clusters(spec):
        return
    sync = spec.sync
    if sync.deterministic:
        yield (
            "sync.deterministic",
            True,
            "every learner waits for the slowest link at each exchange; this job spans clusters: "
            "it is meant for tests on one machine",
        )
    period = sync.every / sync.fragments
    if sync.overlap == 0:
        yield (
            "sync.overlap",
            0,
            "no step overlaps an exchange, so each merge is late by its whole way between clusters: "
            "2 hides a step's worth and more",
        )
    elif period >= _IDLE * sync.overlap:
        yield (
            "sync.fragments",
            sync.fragments,
            f"an exchange has {sync.overlap} of the {period:g} steps until the next, and the links between "
            f"clusters lie idle for the rest: they need {period / sync.overlap:.3g} times the bandwidth that "
            f"more fragments (sync.every allows {sync.every}) or a larger sync.overlap would need",
        )
    if sync.compression.up == "float32":
        yield (
            "sync.compression.up",
            "float32",
            "7.8 times the bytes of int4 on the links between clusters: int4 was reported to cost nothing",
        )
    if sync.compression.down == "float32":
        yield (
            "sync.compression.down",
            "float32",
            "twice the bytes of bfloat16 and 7.8 times those of delta-int4, out of the hub for every learner",
        )
