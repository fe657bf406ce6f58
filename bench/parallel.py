"""Data-parallel training of a job's model, for comparison: torch's DDP over gloo, and the bytes it moves.

Two processes train the model on batches of the job's size and average their gradients at every
step. Bytes are the kernel's count of what each process's TCP connections received (TCP_INFO),
streams without headers, as the relay counts a learner's. With two processes the ring
sends each gradient once in each direction.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RANKS = 2
WARM_UP = 2  # steps: DDP tells its buckets, and arranges them anew after the first
WAIT_SECONDS = 120.0
_RECEIVED = 128  # where struct tcp_info has tcpi_bytes_received, 64 bits


class NotMeasured(Exception):
    """DDP does not run here, or cannot be counted; the message says why."""


def bytes_per_step(job_file: Path, directory: Path, bfloat16: bool, steps: int) -> float:
    """Bytes that one process receives (and sends) per step, the mean of both. Raises NotMeasured."""
    context = multiprocessing.get_context("spawn")
    children: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        pipes: list[Connection] = []
        try:
            for rank in range(RANKS):
                pipe, end = context.Pipe()
                given = (end, rank, folder, str(job_file), str(directory), bfloat16, steps)
                child = context.Process(target=train, args=given, daemon=True)
                child.start()
                end.close()  # so that a child that dies is an end of file here
                pipes.append(pipe)
                children.append(child)
            return statistics.mean(_answer(pipe) for pipe in pipes)
        finally:
            for child in children:
                child.join(5)
                if child.is_alive():
                    child.kill()
                    child.join(5)


def _answer(pipe: Connection) -> float:
    try:
        if not pipe.poll(WAIT_SECONDS):
            raise NotMeasured(f"no answer within {WAIT_SECONDS:.0f} s")
        found = pipe.recv()
    except EOFError:
        raise NotMeasured("a process ended without an answer; its words are above") from None
    if isinstance(found, str):
        raise NotMeasured(found)
    return float(found)


def train(pipe: Connection, rank: int, folder: str, job_file: str, directory: str, bfloat16: bool, steps: int) -> None:
    """One process: sends its bytes per step, or why there are none."""
    # Each by itself: gloo listens where the machine's name points to, which may be nowhere.
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", DILOCO_JOB_DIRECTORY=directory)
    try:
        pipe.send(_trained(rank, folder, job_file, bfloat16, steps=steps))
    except Exception as error:
        pipe.send(repr(error)[:300])


def _trained(rank: int, folder: str, job_file: str, bfloat16: bool, steps: int) -> float:
    from datetime import timedelta

    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import default_collate

    from diloco_protocol.spec.load import job_from_json
    from diloco_worker import data
    from diloco_worker.training import models, trainer
    from diloco_worker.training import optimizer as optimizers

    torch.set_num_threads(1)
    job = job_from_json(Path(job_file).read_text(encoding="utf-8"))
    dataset = data.load(job.spec)
    model = models.build(job.spec, job.spec.seed)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=WAIT_SECONDS / 2),
    )
    parallel = DistributedDataParallel(model)
    if bfloat16:
        parallel.register_comm_hook(None, averaged_as_bfloat16)
    optimizer = optimizers.build_optimizer(parallel, job.spec.training.optimizer)
    training, before = job.spec.training, 0
    size, clip = training.batch.sequences, training.optimizer.clip_norm
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            before = received()
        at = (step * RANKS + rank) * size
        batch = default_collate([dataset[(at + i) % len(dataset)] for i in range(size)])
        trainer.step(parallel, optimizer, batch, training.batch.accumulation, clip_norm=clip, dtype=torch.float32)
    moved = received() - before
    distributed.barrier()  # nobody leaves while another still needs him
    distributed.destroy_process_group()
    if moved <= 0:
        raise NotMeasured("the kernel counts no bytes of TCP connections here")
    return moved / steps


def averaged_as_bfloat16(_state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    """DDP's communication hook for bfloat16 gradients; torch's own wants NCCL."""
    import torch
    from torch import distributed

    narrow = bucket.buffer().to(torch.bfloat16).div_(RANKS)
    reduced = distributed.all_reduce(narrow, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def received() -> int:
    """Bytes that this process's open TCP connections have received so far (Linux)."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("=Q", info, _RECEIVED)[0]
        except (OSError, struct.error):
            continue  # it was closed meanwhile, or is none that is counted
    return total


if __name__ == "__main__":
    raise SystemExit("bench/parallel.py is a part of bench/encodings.py")
