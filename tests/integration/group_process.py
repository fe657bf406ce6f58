"""One rank of a learner of several: ranks run this file, as torchrun would start them.

Not a test: what the tests of groups share.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from forked import ForkedProcess, fork
from learner_process import Rows, Syncer, one_step, small_model
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diloco_worker import Learner
from diloco_worker.named_parameters import named_parameters

FORMS = ("ddp", "fsdp", "hsdp", "columns")


def wrap(model: torch.nn.Module, form: str) -> torch.nn.Module:
    """The model as the ranks of a learner hold it. columns: FSDP2 that cuts dimension 1 of matrices."""
    if form == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if form == "single":
        return model
    from torch.distributed.tensor import Shard

    mesh = None
    if form == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.children():
        if type(layer) is torch.nn.Linear and layer.bias is not None:  # not what is tied to another layer
            place = (lambda p: Shard(1) if p.ndim > 1 else Shard(0)) if form == "columns" else None
            fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh)
    return model


def start_group(
    service: Syncer, ordinal: int, form: str, size: int, near: int | None = None, **environ: str
) -> list[ForkedProcess]:
    """The ranks of a learner. ``near``: how many of them are on the leader's host, as far as memory goes."""
    ranks = []
    meeting = service.folder / f"meeting-{ordinal}-{time.monotonic_ns()}"
    for rank in range(size):
        variables = {
            **service.environ(ordinal=ordinal),
            **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)},
            **{"MEETING": f"file://{meeting}", "FORM": form, "GLOO_SOCKET_IFNAME": "lo"},
            **environ,
        }
        if near is not None and rank >= near:
            variables["FAR"] = "1"
        out = service.folder / f"final-{ordinal}.safetensors"
        log = service.folder / f"learner-{ordinal}-{rank}.log"
        ranks.append(fork([__file__, str(out)], variables, log))
    return ranks


def run_rank(out: Path) -> None:
    """A rank, as a user would write it."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    if os.environ.get("FAR"):
        open_area_nowhere()
    form = os.environ["FORM"]
    if form != "single":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=size)
    model = wrap(small_model(), form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    pause = float(os.environ.get("PAUSE", "0"))
    steps = 0
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(Rows(1024)):
            loss = one_step(model, optimizer, batch)
            learner.after_step(tokens=batch.numel(), loss=loss)
            steps += 1
            time.sleep(pause)
    tensors = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in named_parameters(model).items()
    }
    if int(os.environ.get("RANK", "0")) == 0:
        save_file(tensors, out)
        out.with_suffix(".json").write_text(json.dumps(learner.metrics | {"steps_made": steps}))
    if form != "single":
        dist.destroy_process_group()


def open_area_nowhere() -> None:
    """Be a rank on another host: the leader's memory is not there."""
    from diloco_worker.group import exchange

    exchange.open = lambda *_: (_ for _ in ()).throw(FileNotFoundError())  # type: ignore[attr-defined]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
