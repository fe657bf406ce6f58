"""Merging eight pushes of one fragment: against plain torch, and against reading the same bytes.

The fragments are one of a Llama of 0.27 G parameters in 24 fragments (pieces as they come),
and a single piece of ten million elements, the hardest case, for nothing of it stays in the
cache between the passes. Values are bytes of pushes merged per second.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

import common
from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Piece, Tensor
from diloco_protocol.spec.load import parse_job
from diloco_protocol.wire.records import PushHeader, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.numerics.isotropic import equalize_singular_values, find_matrices
from diloco_syncer.numerics.merge import merge, piece_squares
from diloco_syncer.runtime.global_model import GlobalModel, first_records
from diloco_syncer.store.directory import DirectoryStore

LEARNERS = 8
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {{name: bench-merge}}
spec:
  training: {{model: null, data: null, evaluation: null, stop: {{steps: 10}}}}
  sync: {{merge: {{method: rda}}, outer: {{optimizer: nesterov}}, compression: {{down: {down}}}}}
  learners: {{command: [none]}}
  regions: [{{name: local, learners: 8}}]
"""


def main() -> None:
    parser = common.arguments(__doc__ or "")
    common.add_threads(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    elements = 500_000 if args.quick else 10_000_000
    rounds = 3 if args.quick else 15
    cases = {
        "rda, a Llama's fragment": ("rda", inner_fragment(llama_layout(128 if args.quick else 1024))),
        "rda, one piece": ("rda", [Piece("w", 0, elements, 0, mean=False)]),
        "mean, one piece": ("mean", [Piece("w", 0, elements, 0, mean=False)]),
        "median, a Llama's fragment": ("median", inner_fragment(llama_layout(128 if args.quick else 1024))),
    }
    rows = []
    for name, (method, pieces) in cases.items():
        rows += measure(f"merge {name}", method, pieces, args.threads, rounds=rounds)
    with ThreadpoolController().select(internal_api="openblas").limit(limits=1):  # as the syncer has it
        rows += measure_isotropic(128 if args.quick else 512, args.threads, rounds)
    rows += [measure_version(down, elements, args.threads, rounds) for down in ("bfloat16", "delta-int4")]
    rows += measure_two_threads(elements, rounds)
    common.show(rows, args.json, f"{LEARNERS} learners, {args.threads} threads")


def measure(name: str, method: str, pieces: Sequence[Piece], threads: int, rounds: int) -> list[common.Row]:
    source = np.random.default_rng(0)
    elements = sum(piece.elements for piece in pieces)
    deltas = [source.standard_normal(elements, np.float32) * np.float32(1 + m) for m in range(LEARNERS)]
    weights = [(1 + m) / (LEARNERS * (LEARNERS + 1) / 2) for m in range(LEARNERS)]
    out, other = np.empty(elements, np.float32), torch.empty(elements)
    tensors = [torch.from_numpy(delta) for delta in deltas]

    def squares() -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        return [piece_squares(pieces, delta, threads=threads) for delta in deltas]

    known = squares()
    if method == "median":
        result = np.empty(elements, np.float32)

        def merged(method: str, out: np.ndarray[Any, np.dtype[np.float32]]) -> None:
            merge(pieces, deltas, weights, method, squares=known, out=out, threads=threads)

        return common.compare(
            f"{name}, norms known",
            lambda: merged("median", result),
            {"rda": lambda: merged("rda", out), "torch's median": lambda: torch_median(tensors, other)},
            work=4e-9 * elements * LEARNERS,
            unit="GB/s",
            rounds=rounds,
        )
    rows = common.compare(
        f"{name}, norms taken too",
        lambda: merge(pieces, deltas, weights, method, squares=squares(), out=out, threads=threads),
        {
            "plain torch": lambda: torch_merge(pieces, tensors, weights, method, out=other),
            "reading the same bytes": common.reading(deltas, threads),
        },
        work=4e-9 * elements * LEARNERS,
        unit="GB/s",
        rounds=rounds,
    )
    if method == "rda":
        # In the syncer the norms are taken when a push arrives, off the round's critical path.
        rows += common.compare(
            f"{name}, norms known",
            lambda: merge(pieces, deltas, weights, method, squares=known, out=out, threads=threads),
            {"reading the same bytes": common.reading(deltas, threads)},
            work=4e-9 * elements * LEARNERS,
            unit="GB/s",
            rounds=rounds,
        )
    if not np.allclose(out, other.numpy(), rtol=1e-3, atol=1e-3):
        raise SystemExit(f"{name}: torch has another result")
    return rows


def torch_merge(
    pieces: Sequence[Piece], deltas: Sequence[torch.Tensor], weights: Sequence[float], method: str, out: torch.Tensor
) -> None:
    """The same as one would write it in eager torch."""
    for piece in pieces:
        span = slice(piece.offset, piece.offset + piece.elements)
        parts = [delta[span] for delta in deltas]
        if method == "mean" or piece.mean:
            out[span] = sum(w * part for w, part in zip(weights, parts, strict=True))
            continue
        norms = [part.norm() for part in parts]
        radius = sum(w * norm for w, norm in zip(weights, norms, strict=True))
        direction = sum(w / norm * part for w, part, norm in zip(weights, parts, norms, strict=True))
        out[span] = direction * (radius / direction.norm())


def torch_median(deltas: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """The mean of the two middle values of each element, without lengths."""
    values = torch.stack(list(deltas)).sort(dim=0).values
    torch.add(values[LEARNERS // 2 - 1], values[LEARNERS // 2], out=out).mul_(0.5)


def measure_isotropic(width: int, threads: int, rounds: int) -> list[common.Row]:
    """What ``merge.method: isotropic`` adds to a merge: every matrix of a fragment."""
    layout = llama_layout(width)
    spans = find_matrices(layout, inner_fragment(layout))
    elements = sum(span.rows * span.columns for span in spans)
    delta = np.random.default_rng(0).standard_normal(max(s.offset + s.rows * s.columns for s in spans), np.float32)
    out = delta.copy()
    matrices = [
        torch.from_numpy(delta[s.offset : s.offset + s.rows * s.columns]).view(s.rows, s.columns) for s in spans
    ]
    rows = common.compare(
        f"isotropic, {len(spans)} matrices of width {width}",
        lambda: equalize_singular_values(out, spans, threads),
        {
            "torch's SVD": lambda: [by_svd(matrix) for matrix in matrices],
            "Newton-Schulz in torch, five steps": lambda: [newton_schulz(matrix) for matrix in matrices],
        },
        work=1e-6 * elements,
        unit="M elements/s",
        rounds=rounds,
    )
    found = torch.from_numpy(out[spans[0].offset :][: matrices[0].numel()]).view(matrices[0].shape)
    if not torch.allclose(found, by_svd(matrices[0]), rtol=1e-2, atol=1e-3):
        raise SystemExit("isotropic: torch has another result")
    return rows


def by_svd(matrix: torch.Tensor) -> torch.Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    product: torch.Tensor = left @ right * (values.norm() / len(values) ** 0.5)
    return product


def measure_version(down: str, elements: int, threads: int, rounds: int) -> common.Row:
    """The CPU time of a whole version, to its durable record in a temporary folder, beside that of its merge alone: of
    int4 pushes, whose norms are known, with nesterov. The difference is what a version costs however many push."""
    layout, deltas, squares = make_int4_pushes(elements, threads)
    model = begin_model(down, layout, threads)
    whole, alone = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        for version in range(1, rounds + 1):
            action, began = merge_action(version), time.process_time()
            record, broadcast = model.merge(action, deltas, squares, 1, version)
            store.create(f"record-{version}", *record.pack())
            whole.append(time.process_time() - began)
            model.publish(record, broadcast, 0.0)
            began = time.process_time()
            merge(layout.fragments[0], deltas, [1 / LEARNERS] * LEARNERS, "rda", squares=squares, threads=threads)
            alone.append(time.process_time() - began)
    value, baseline = (1e9 * statistics.median(seconds) / elements for seconds in (whole, alone))
    return common.Row(
        f"CPU of a version, {down} down",
        value,
        "ns/value",
        "its merge alone",
        baseline=baseline,
        ratio=baseline / value,
    )


def measure_two_threads(elements: int, rounds: int) -> list[common.Row]:
    """The time of a fragment's merge, and of a whole version without its record's file, on two threads and on one: of
    int4 pushes, whose norms are known. The aim of the merge is 1.6."""
    layout, deltas, squares = make_int4_pushes(elements, threads=2)
    pieces, weights, action = layout.fragments[0], [1 / LEARNERS] * LEARNERS, merge_action(1)
    one, two = (begin_model("bfloat16", layout, threads) for threads in (1, 2))
    return [
        *common.compare(
            "merge on two threads",
            lambda: merge(pieces, deltas, weights, "rda", squares=squares, threads=2),
            {"one thread": lambda: merge(pieces, deltas, weights, "rda", squares=squares, threads=1)},
            work=1e-6 * elements,
            unit="M values/s",
            rounds=rounds,
        ),
        *common.compare(
            "version on two threads",
            lambda: two.merge(action, deltas, squares, 1, 1),
            {"one thread": lambda: one.merge(action, deltas, squares, 1, 1)},
            work=1e-6 * elements,
            unit="M values/s",
            rounds=rounds,
        ),
    ]


def make_int4_pushes(
    elements: int, threads: int
) -> tuple[Layout, list[codec.EncodedValues], list[np.ndarray[Any, np.dtype[np.float64]]]]:
    """The layout of one fragment of ``elements`` values, a push of each learner, and its squares."""
    source = np.random.default_rng(0)
    layout = Layout.build([Tensor("w", (elements,), "float32")], 1)
    pushes = [source.standard_normal(elements, np.float32) * np.float32(0.01) for _ in range(LEARNERS)]
    squares = [piece_squares(layout.fragments[0], push, threads=threads) for push in pushes]
    return (
        layout,
        [codec.EncodedValues(codec.encode(push, "int4", threads=threads), "int4", elements) for push in pushes],
        squares,
    )


def begin_model(down: str, layout: Layout, threads: int) -> GlobalModel:
    """Version 0 of the model that the pushes are merged into, as the syncer holds it."""
    model = GlobalModel(parse_job(JOB.format(down=down)), threads)
    theta = np.random.default_rng(1).standard_normal(sum(piece.elements for piece in layout.fragments[0]), np.float32)
    model.begin(layout, first_records("bench-merge", 1, {0: theta}))
    return model


def merge_action(version: int) -> ev.Merge:
    """The order to merge a push of each learner."""
    responders = []
    for slot in range(LEARNERS):
        header = PushHeader(
            0,
            version,
            1,
            1,
            base_version=version - 1,
            oldest_version=version - 1,
            first_step=1,
            last_step=1,
            steps=1,
            tokens=1,
            compute_seconds=1.0,
            encoding="int4",
            layout_digest="",
            report=StepReport(1, 1, 1, ()),
            slot=slot,
            incarnation=1,
        )
        responders.append(ev.Responder(header, slot, 1 / LEARNERS, 0))
    return ev.Merge(0, version, 1, tuple(responders), quorum_seconds=0.0, waited_seconds=0.0, job_tokens=1)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """As Muon does it: all singular values come near 1, not to it."""
    x: torch.Tensor = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def inner_fragment(layout: Layout) -> list[Piece]:
    """The first fragment without an embedding."""
    return list(next(pieces for pieces in layout.fragments if not any(piece.mean for piece in pieces)))


def llama_layout(width: int) -> Layout:
    """A 16-layer Llama."""
    tensors = [Tensor(name, (32 * width, width), "float32", True) for name in ("embed_tokens", "lm_head")]
    for layer in range(16):
        shapes: dict[str, tuple[int, ...]] = {f"{n}_proj": (width, width) for n in "qkvo"}
        shapes |= {"gate_proj": (11 * width // 4, width), "up_proj": (11 * width // 4, width)}
        shapes |= {"down_proj": (width, 11 * width // 4), "norm1": (width,), "norm2": (width,)}
        tensors += [Tensor(f"layers.{layer}.{name}", shape, "float32") for name, shape in shapes.items()]
    return Layout.build(tensors, 24)


if __name__ == "__main__":
    main()
