"""What a process computes with: device, precision, threads, determinism."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from diloco_protocol.common.cpu_quota import usable_cores
from diloco_protocol.spec.job_spec import JobSpec
from diloco_worker.errors import job_error

log = logging.getLogger(__name__)


def return_free_memory() -> None:
    """Give the system back what the allocator keeps of freed memory; where it is not glibc's, nothing happens.

    The allocator takes blocks of up to 32 MiB, such as the fragments of a model of 200 million parameters, from heaps
    that it does not shrink by itself.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def device(spec: JobSpec) -> torch.device:
    """The device of training.device. Raises JobError if cuda is asked for and not there."""
    wanted = spec.training.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise job_error(
            "spec.training.device",
            wanted,
            "torch finds no CUDA device here: use auto or cpu, or install a torch built for CUDA",
        )
    return torch.device("cuda", torch.cuda.current_device())


def smallest_memory() -> int:
    """Bytes of the CUDA device that has the least."""
    return min(torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count()))


def precision(spec: JobSpec, where: torch.device) -> torch.dtype:
    """float32 or bfloat16, of training.precision; auto is bfloat16 on a GPU that has it in hardware, and wherever
    frozen parameters are bfloat16."""
    wanted, model = spec.training.precision, spec.training.model
    if wanted == "bfloat16" or (model is not None and model.frozen_dtype == "bfloat16"):
        return torch.bfloat16
    has = where.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if wanted == "auto" and has else torch.float32


def autocast(where: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """The context of forward passes; weights and optimizer stay float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(where.type, dtype)


def to_device(batch: Mapping[str, torch.Tensor], where: torch.device) -> dict[str, torch.Tensor]:
    """The batch on the device; on a GPU copied without waiting, from pinned memory."""
    if where.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(where, non_blocking=True) for name, tensor in batch.items()}


def configure(spec: JobSpec) -> None:
    """Set the process's threads and, in deterministic mode, torch's deterministic algorithms.

    Threads: DILOCO_THREADS if set, else OMP_NUM_THREADS (the runner shares the machine's cores out; a forked process
    says it again, because torch read it when it was loaded), else torch's choice, but no more than the container's
    quota has cores. Raises JobError for a DILOCO_THREADS that is no number.
    """
    given = os.environ.get("DILOCO_THREADS")
    if given and not (given.isdecimal() and int(given) > 0):
        raise job_error("DILOCO_THREADS", given, "must be a whole number from 1")
    given = given or os.environ.get("OMP_NUM_THREADS")
    if given is None:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    elif given.isdecimal() and int(given) > 0:  # OpenMP takes other forms too
        torch.set_num_threads(int(given))
    if spec.sync.deterministic:
        be_deterministic()
    log.info("torch %s, %d thread(s)", torch.__version__, torch.get_num_threads())


def be_deterministic() -> None:
    """sync.deterministic: torch's deterministic algorithms, and one thread whatever the environment
    says, because sums are made in another order with another number of them."""
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
