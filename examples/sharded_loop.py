"""A learner of many GPUs with a loop of your own: FSDP2 under torchrun, some forty lines of it.

    learners: {processes: 8, command: [python, sharded_loop.py]}     # in a job: eight ranks make one learner
    torchrun --nproc-per-node 2 sharded_loop.py                      # alone, for a first try: nothing is merged

The ranks of one learner call init_process_group and shard their model as in any FSDP2 program. The Learner makes of
them one learner: rank 0 speaks with the syncer, and each rank gives and takes its own rows of a fragment.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from diloco_worker import Learner, configure_logging


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences that count on from anywhere, modulo 64: learnt in a minute."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(17) * (1 + index % 3) + index) % 64


def build_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(64, 128), *layers, nn.Linear(128, 64))


def main() -> int:
    configure_logging()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    model = build_model().to(device)
    for layer in model:
        fully_shard(layer)  # a block at a time, so that no device gathers more than one
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(Numbers()):  # this rank's share of the learner's batch
            batch = batch.to(device)
            logits = model(batch[:, :-1].flatten())
            loss = F.cross_entropy(logits, batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.after_step(tokens=batch[:, 1:].numel(), loss=loss.detach())
    dist.destroy_process_group()
    return learner.exit_code


if __name__ == "__main__":
    sys.exit(main())
