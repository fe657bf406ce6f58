"""One rank of a learner of several: ranks run this file, as torchrun would start them.

Not a test: what the tests of groups share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import subprocess
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
from diloco_worker.group.ranks import Command, Group, JoinedStep, Told
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


def start_learner(
    service: Syncer, ordinal: int, form: str, size: int, **environ: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """The ranks of a learner as a runner starts them: in a process that ends as they do, and its log."""
    words = [sys.executable, __file__, str(service.folder / f"final-{ordinal}.safetensors")]
    variables = {**service.environ(ordinal=ordinal), "FORM": form, "GLOO_SOCKET_IFNAME": "lo", **environ}
    variables |= {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    log = service.folder / f"learner-{ordinal}-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "diloco_worker.launch", "--processes", str(size), *words]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=variables, stdout=out, stderr=out), log


_taken: list[torch.Tensor] = []


def exhaust_memory() -> None:
    """From now on this process has no block of 128 KiB to give."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
    with contextlib.suppress(RuntimeError):
        while True:
            _taken.append(torch.empty(32 << 10))


def fail_at(what: str) -> None:
    """COMMAND:TURN:SIGNAL, of rank ``FAILING``: send it to this process when that command comes for that time; the
    command JOIN is the ranks' sum at a boundary. Signal 0: its memory is exhausted; -1: it hangs there."""
    command, turn, number = what.split(":")
    seen = [0]

    def count(name: str) -> None:
        seen[0] += name == command
        if name == command and seen[0] == int(turn):
            if int(number) < 0:
                time.sleep(100_000)
            os.kill(os.getpid(), int(number)) if int(number) else exhaust_memory()

    tell, hear, join = Group.tell_others, Group.hear, Group.join_step

    def telling(self: Group, told: Command, *args: object, **words: object) -> None:
        count(told.name)
        tell(self, told, *args, **words)  # type: ignore[arg-type]

    def hearing(self: Group) -> Told:
        told = hear(self)
        count(told.command.name)
        return told

    def joining(self: Group, *args: object) -> JoinedStep:
        count("JOIN")
        return join(self, *args)  # type: ignore[arg-type]

    Group.tell_others, Group.hear, Group.join_step = telling, hearing, joining  # type: ignore[method-assign, assignment]


def build_model() -> torch.nn.Module:
    """The small model. ``FROZEN``: its first bias is this number and is not trained. ``WIDTH``: of its middle."""
    model = small_model(width=int(os.environ.get("WIDTH", "16")))
    if frozen := os.environ.get("FROZEN"):
        bias = model.get_parameter("0.bias").requires_grad_(False)
        torch.nn.init.constant_(bias, float(frozen))
    return model


def keep_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the optimizer's state, whole, as the slot's checkpoint has it; every rank calls it."""
    rows = {name: optimizer.state[p] for name, p in named_parameters(model).items()}
    found = {
        f"{name}|{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, row in rows.items()
        for key, value in row.items()
    }
    if int(os.environ.get("RANK", "0")) == 0:
        save_file(found, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def run_rank(out: Path) -> None:
    """A rank, as a user would write it."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    if os.environ.get("FAR") and os.environ["RANK"] != "0":
        open_area_nowhere()
    form = os.environ["FORM"]
    if form != "single":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = os.environ.get("MEETING", "env://")
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        if os.environ.get("FAILING") == str(rank):
            fail_at(os.environ["FAIL_AT"])
    model = wrap(build_model(), form)
    if os.environ.get("ADAM"):
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    pause = float(os.environ.get("PAUSE", "0"))
    late = float(os.environ.get("LATE", "0")) if os.environ.get("FAILING") == os.environ.get("RANK", "0") else 0.0
    steps = 0
    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(Rows(1024), int(os.environ.get("SEQUENCES", "4"))):
            if steps == 0 and "FOUND" in os.environ:
                keep_state(model, optimizer, Path(os.environ["FOUND"]))
            loss = one_step(model, optimizer, batch)
            time.sleep(late)
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
