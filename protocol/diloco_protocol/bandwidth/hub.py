"""How many processes, cores, and how much memory and disk a job's hub needs at the job's pace.

Pure arithmetic from what a byte and a value were measured to cost. One process of a hub reads and writes all its bytes
in one thread, and makes its merges one after the other in another. So many *shards*, processes that share the
fragments, are wanted that neither thread of any of them is busy for more than ``BUSY`` of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_protocol.bandwidth import links
from diloco_protocol.resources import record_floats, shard_memory, syncer_memory
from diloco_protocol.spec.job_spec import JobSpec

# CPU-seconds, on a machine of two cores (docs/results/making.md), with TLS 1.3; docs/results/parts.md has the tables.
UP_BYTE = 1.6e-9
"""Of a pushed byte in the thread of bytes: TLS, reading, checksums (bench/hub.py, all encodings within 2 %)."""
UP_VALUE = 0.52e-9
"""Of a pushed value, for its push's squares and norms (bench/hub.py; 39 % of an int4 push)."""
DOWN_BYTE = 0.99e-9
"""Of a byte sent, in the thread of bytes (bench/hub.py: 0.89 to 0.99, the dearest)."""
MERGE_VALUE = 0.75e-9
"""Of a pushed value in its merge (int4, the dearest of what bench/merge.py merges)."""
VERSION_VALUE = 20e-9
"""Of a version's value, however many pushes it has: outer step, broadcast, digest, record (bench/merge.py: 9 to 29)."""
BUSY = 0.7
"""Of the time a thread may be busy."""


@dataclass(frozen=True, slots=True)
class HubNeeds:
    """Per second: bytes of payload in and out, bytes of records that are written, and CPU-seconds, which are cores.
    Bytes of memory, of all processes and of the largest shard, where there are ``shards`` of them. ``wanted``: so many
    would be enough if there were as many fragments."""

    bytes_in: float
    bytes_out: float
    written: float
    byte_cores: float
    norm_cores: float
    merge_cores: float
    wanted: int
    shards: int
    memory: int
    shard_memory: int

    @property
    def cores(self) -> float:
        return self.byte_cores + self.norm_cores + self.merge_cores


def hub_needs(spec: JobSpec, sizes: Sequence[int], step_seconds: float) -> HubNeeds:
    """What the hub of a job needs whose fragments have ``sizes`` elements and whose steps take ``step_seconds``."""
    sync, learners = spec.sync, spec.most_slots
    readers = learners + sum(region.spares for region in spec.regions)
    carried = links.traffic(sizes, sync.compression.up, sync.compression.down, learners)
    turn = sync.every * step_seconds
    values = sum(sizes) / turn
    bytes_in, bytes_out = learners * carried.up_per_turn / turn, readers * carried.down_per_turn / turn
    byte_cores = UP_BYTE * bytes_in + DOWN_BYTE * bytes_out
    merge_cores = values * (learners * MERGE_VALUE + VERSION_VALUE)
    busier = max(byte_cores, merge_cores)
    dealt = math.floor(BUSY * len(sizes) / busier)  # fragments that one shard can have
    wanted = math.ceil(len(sizes) / dealt) if dealt else math.ceil(busier / BUSY)
    shards = min(wanted, len(sizes))
    return HubNeeds(
        bytes_in,
        bytes_out,
        written=4 * record_floats(sync) * values,
        byte_cores=byte_cores,
        norm_cores=UP_VALUE * learners * values,
        merge_cores=merge_cores,
        wanted=wanted,
        shards=shards,
        memory=syncer_memory(spec, sizes, shards),
        shard_memory=shard_memory(spec, sizes, shards),
    )


def hub_shortage(spec: JobSpec, fragments: int, needed: HubNeeds) -> str:
    """What to say of ``syncer.shards``; empty: it is enough."""
    if needed.wanted > needed.shards:
        return (
            f"cannot be enough: the hub has work for {needed.wanted} shards ({needed.cores:.3g} cores) and there are "
            f"{fragments} fragments, so merges become rarer: raise sync.every and sync.fragments together, or choose a "
            "smaller sync.compression"
        )
    if spec.syncer.shards < needed.shards:
        whom = "one process" if spec.syncer.shards == 1 else f"{spec.syncer.shards} processes"
        return (
            f"is {spec.syncer.shards}, and {whom} cannot carry this job ({needed.cores:.3g} cores), so merges become "
            f"rarer: set syncer.shards: {needed.shards}"
        )
    return ""
