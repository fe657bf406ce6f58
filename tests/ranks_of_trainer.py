"""What the ranks of tests/unit/worker/training/test_parallel.py run: some steps of the built-in trainer, each on its
share of a batch, with the model divided in several ways. Rank 0 writes the losses and the whole model's values."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import parse_job
from diloco_worker.group.placement import find_part
from diloco_worker.named_parameters import local_tensor
from diloco_worker.training import models, optimizer, trainer
from diloco_worker.training.parallel import sharding

STEPS, ROWS, LENGTH = 3, 8, 16


CONFIG = dict(
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


def spec_of(**training: object) -> JobSpec:
    document = {
        "apiVersion": "diloco.io/v1alpha1",
        "kind": "DiLoCoJob",
        "metadata": {"name": "ranks"},
        "spec": {
            "training": {
                "model": {"config": CONFIG},
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
    model = build(spec, ranks, dtype)
    inner = optimizer.build_optimizer(model, spec.training.optimizer)
    losses = []
    gathered: set[torch.dtype] = set()
    sharding.find_blocks(model)[0].mlp.up_proj.register_forward_pre_hook(lambda m, _: gathered.add(m.weight.dtype))
    for number in range(STEPS):
        batch = {name: tensor[share] for name, tensor in batch_of(number).items()}
        losses.append(trainer.step(model, inner, batch, 2, clip_norm=0.5, dtype=dtype, ranks=ranks))
    if ranks > 1:
        assert gathered == {dtype}
    kept = [*model.parameters(), *(value for row in inner.state.values() for value in row.values())]
    assert {one.dtype for one in kept} == {torch.float32}, "masters and moments, whatever the arithmetic"
    return model, losses


def build(spec: JobSpec, ranks: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """What the trainer begins with; of several ranks the leader alone builds values."""

    def build_whole() -> nn.Module:
        assert ranks == 1 or dist.get_rank() == 0
        return models.build(spec, 5)

    return sharding.build_model(
        build_whole, lambda: models.outline(spec), spec, where=torch.device("cpu"), dtype=dtype, ranks=ranks
    )


class Scaled(nn.Module):
    """A model with values that are neither parameters nor buffers: without them nothing can be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(2)))
        self.scales = torch.arange(3.0)


def check_scaled(spec: JobSpec, ranks: int) -> None:
    def outline() -> nn.Module:
        model = Scaled()
        model.weight = nn.Parameter(model.weight.detach().to("meta"))
        model.scales = model.scales.to("meta")
        return model

    model = sharding.build_model(Scaled, outline, spec, where=torch.device("cpu"), dtype=torch.float32, ranks=ranks)
    assert torch.equal(model.scales, torch.arange(3.0))
    check_rows("weight", model.weight, Scaled().weight)


def check_rows(name: str, held: torch.Tensor, whole: torch.Tensor) -> None:
    """What this rank holds is its part of the whole, bit for bit."""
    rows, part = local_tensor(held).detach().view(-1), find_part(name, held, leads=True)
    assert held.dtype == whole.dtype and rows.numel() == part.elements < whole.numel()
    for mine, there in part.cut(0, whole.numel()):
        assert torch.equal(mine.of(rows), there.of(whole.detach().view(-1))), name


def check_begin(spec: JobSpec, ranks: int) -> None:
    """Every rank begins with its rows of what one process begins with, bit for bit; buffers it has whole."""
    model, plain = build(spec, ranks), models.build(spec, 5)
    expected, held = dict(plain.named_parameters()), dict(model.named_parameters())
    assert held.keys() == expected.keys(), "what is tied is tied"
    for name, values in held.items():
        assert values.requires_grad == expected[name].requires_grad, name
        check_rows(name, values, expected[name])
    buffers = dict(model.named_buffers())
    assert buffers and buffers.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert model.config.to_dict() == plain.config.to_dict() and model.training


def whole_values(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Of every rank: the values of all parameters."""
    named = dict(model.named_parameters())
    return {name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for name, p in named.items()}


def main(folder: Path, cases: Mapping[str, dict[str, object]], begins: Sequence[dict[str, object]]) -> None:
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
    for training in begins:
        check_begin(spec_of(**training), ranks)
    check_scaled(spec_of(), ranks)
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
