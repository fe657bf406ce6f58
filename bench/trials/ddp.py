"""The reference as torch trains it: two ranks of DistributedDataParallel over gloo, each with half of the batch, from
the first weights and on the data of the trial that one process trains with the whole batch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

RANKS = 2
WAIT_SECONDS = 600.0  # also where other programs have the processors


@dataclass(frozen=True, slots=True)
class Reference:
    """What the ranks train: the task's model and data for ``steps`` steps. ``rate``: of the inner optimizer, None: the
    task's."""

    kind: str
    size: str
    steps: int
    seed: int
    rate: float | None


def held_out_losses(reference: Reference) -> dict[str, float]:
    """Those of ``tasks.score`` after the reference's steps. Raises RuntimeError if a rank does not answer."""
    context = multiprocessing.get_context("spawn")
    children: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="diloco-ddp-") as folder:
        pipes = []
        try:
            for rank in range(RANKS):
                pipe, end = context.Pipe()
                child = context.Process(target=train_rank, args=(end, rank, folder, reference), daemon=True)
                child.start()
                end.close()
                children.append(child)
                pipes.append(pipe)
            found = [pipe.recv() if pipe.poll(WAIT_SECONDS) else "no answer in time" for pipe in pipes]
        except EOFError:
            raise RuntimeError("a rank ended without an answer; its words are above") from None
        finally:
            for child in children:
                child.join(5)
                if child.is_alive():
                    child.kill()
                    child.join(5)
    if any(isinstance(one, str) for one in found):
        raise RuntimeError(f"DDP over gloo did not run: {found}")
    losses = found[0]
    assert isinstance(losses, dict)
    return losses


def train_rank(pipe: Connection, rank: int, folder: str, reference: Reference) -> None:
    """One rank: sends the held-out losses, or why there are none."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    try:
        pipe.send(_trained(rank, folder, reference))
    except Exception as error:
        pipe.send(repr(error)[:300])


def _trained(rank: int, folder: str, reference: Reference) -> dict[str, float]:
    import numpy as np
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from diloco_worker.training import optimizer as optimizers
    from diloco_worker.training import trainer
    from trials import tasks

    torch.set_num_threads(1)
    kind, size, steps, seed = reference.kind, reference.size, reference.steps, reference.seed
    job = tasks.make_job(kind, size, 1, steps, seed=seed, sync={}, rate=reference.rate)
    data, spec = tasks.TrialData(kind, size, seed), job.spec.training.optimizer
    model = tasks.build_model(job)
    timeout = timedelta(seconds=WAIT_SECONDS / 2)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timeout
    )
    parallel = DistributedDataParallel(model)
    parallel.config = model.config  # where the loss of a mixture of experts looks
    optimizer = optimizers.build_optimizer(parallel, spec)
    sequences = tasks.TASKS[kind, size].sequences
    share = sequences // RANKS
    for step in range(steps):
        first = step * sequences + rank * share
        batch = data.batch(np.arange(first, first + share))
        optimizers.set_learning_rate(optimizer, optimizers.learning_rate(spec, step, step, steps))
        trainer.step(parallel, optimizer, batch, 1, clip_norm=spec.clip_norm, dtype=torch.float32)
    scored = tasks.score(model, data)
    distributed.barrier()
    distributed.destroy_process_group()
    return scored
