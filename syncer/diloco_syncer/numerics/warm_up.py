"""Loads every compiled kernel that a job needs, before anybody waits for one."""

from __future__ import annotations

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.merging import choose_merge
from diloco_protocol.spec.job import DiLoCoJob
from diloco_syncer.numerics import merge, outer


def warm_up(job: DiLoCoJob, threads: int) -> None:
    """Load (or compile) every kernel that this job's merges need, before anybody waits for one."""
    sync = job.spec.sync
    layout = Layout.build([Tensor("a", (256,), "float32", False), Tensor("b", (256,), "float32", True)], 1)
    values = np.linspace(-1, 1, layout.elements(0), dtype=np.float32)
    for encoding in (sync.compression.up, sync.compression.down.removeprefix("delta-")):
        encoded = codec.encode(values, encoding, threads=threads)
        codec.norm_and_finite(codec.decode(encoded, encoding, values.size), threads=threads)
        codec.encode_with_feedback(values, None, encoding, threads=threads)
        codec.apply_delta(values, encoded, encoding)
    method, settings = choose_merge(job.spec, 0)
    optimizer = outer.make(settings, max_versions=sync.staleness.max_versions)
    for count in range(1, min(9, job.spec.most_slots + 1)):
        shares = [1 / count] * count
        pushes = [values.copy() for _ in shares]
        squares = [merge.piece_squares(layout.fragments[0], push, threads=threads) for push in pushes]
        merged = merge.merge(layout.fragments[0], pushes, shares, method, squares=squares, threads=threads)
        optimizer.step(values.copy(), merged.delta, {}, ages=[0] * count, weights=shares, threads=threads)
