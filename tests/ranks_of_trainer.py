"""What the ranks of tests/unit/worker/training/test_parallel.py run: some steps of the built-in trainer, each on its
share of a batch, with the model divided in several ways. Rank 0 writes the losses and the whole model's values."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import parse_job
from diloco_worker.training import models, optimizer, trainer
from diloco_worker.training.parallel import sharding

STEPS, ROWS, LENGTH = 3, 8, 16


def spec_of(**training: object) -> JobSpec:
    model = dict(
        model_type="llama",
        vocab_size=61,  # which no number of ranks divides
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=LENGTH,
    )
    document = {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "ranks"},
        "spec": {
            "training": {
                "model": {"config": model},
                "data": {"source": "python", "function": "a:b"},
                "device": "cpu",
                "optimizer": {"eps": 0.01},  # with less of it AdamW's first steps follow a gradient's sign alone
                "batch": {"sequences": ROWS // 2, "accumulation": 2},
                **training,
            },
            "learners": {"processes": 4},
            "regions": [{"learners": 1}],
        },
    }
    return parse_job(json.dumps(document)).spec


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """A learner's batch, in which ranks have different numbers of predictions."""
    ids = torch.randint(0, 61, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, 3 + row :] = -100
    return {"input_ids": ids, "labels": labels}


def train(spec: JobSpec, ranks: int, share: slice, dtype: torch.dtype) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model after STEPS steps, and the losses of this rank's share."""
    where = torch.device("cpu")
    build = lambda: models.build(spec, 5)  # noqa: E731
    model = sharding.build_in_turn(build, spec, where=where, dtype=dtype, ranks=ranks)
    inner = optimizer.build_optimizer(model, spec.training.optimizer)
    losses = []
    for number in range(STEPS):
        batch = {name: tensor[share] for name, tensor in batch_of(number).items()}
        losses.append(trainer.step(model, inner, batch, 2, clip_norm=0.5, dtype=dtype, ranks=ranks))
    return model, losses


def whole_values(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Of every rank: the values of all parameters."""
    named = dict(model.named_parameters())
    return {name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for name, p in named.items()}


def main(folder: Path, cases: Mapping[str, dict[str, object]]) -> None:
    ranks = 0
    for name, training in cases.items():
        bfloat16 = training.get("precision") == "bfloat16"
        spec = spec_of(**training)
        ranks = ranks or sharding.begin_ranks(spec)
        rank, rows = dist.get_rank(), ROWS // ranks
        share = slice(rank * rows, (rank + 1) * rows)
        model, losses = train(spec, ranks, share, torch.bfloat16 if bfloat16 else torch.float32)
        kept = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        values = whole_values(model)
        mine = torch.tensor([kept, *map(float, losses)], dtype=torch.float64)
        rows_of_all = [torch.zeros_like(mine) for _ in range(ranks)]
        dist.all_gather(rows_of_all, mine)
        if rank == 0:
            kept_of_all, *losses_of_all = torch.stack(rows_of_all).T
            held = {"losses": torch.stack(losses_of_all, 1), "kept": kept_of_all.clone()}
            save_file({**{n: t.contiguous() for n, t in values.items()}, **held}, folder / f"{name}.safetensors")
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
