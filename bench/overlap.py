"""What synchronisation costs the training thread: time inside the library, and step time with and without.

A learner process trains the demo's model (examples/tiny-gpt.yaml, one learner, otherwise
its own settings: every 12 steps each fragment, int4 up) through the library, against the
real syncer program. A second process trains the same model on the same data without the
library. They take turns on one core, some steps each, and the syncer has another core.
While one trains the other stands still, so both see the same machine.

*Stalled* is what the library itself counts: the training thread's time inside its calls,
from being handed a batch to being handed the next, less the loop's own work. The
background thread shares the core with training here, which is the worst case; what it
takes shows in the step time, of which the median and the mean are told: at some steps a
fragment moves, at others none. A turn's first step is not counted: its caches are cold.

``--millions`` measures a larger model instead: of layers of 7.1 million parameters, one
sequence a step, so that a step is as short as the model allows.

``--device cuda`` trains on a GPU, whose memory has both models, in the precision that the
built-in trainer chooses there. Its models have layers of 50.6 million parameters (500 million
in all without ``--millions``), steps of 16 sequences of 512 tokens, and the defaults of
``sync``. The processes that train have four cores, the syncer has the others. Each step is
waited for, so that its time is known.

``--processes N`` measures a learner of N ranks (FSDP2 over gloo, on the CPU, of 50 million parameters without
``--millions``) beside a learner of one process with the same batch, N sequences. Each has a syncer of its own; all
share all cores. The two learners take turns. The figures of the ranks are the leader's, and are seconds of its training
thread inside the library, not a difference of steps. Before each boundary the ranks wait for each other in their own
process group: who is early there waits for the slower ranks' steps, not for the library. *In commands* is the part of
these seconds that the leader spends in collectives of the library's own (``GroupClock``).

Host memory is what a learner's processes hold of anonymous and shared memory, each shared page once (Pss), above what
they hold when they have trained without the library; what the allocator keeps of freed memory is given back before it
is counted. The parameters are those of the whole model.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import common
import programs
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import load_job

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny-gpt.yaml"
OVERRIDES = (
    "training.stop={steps: 1000000}",
    "training.evaluation=null",
    "training.optimizer.schedule=constant",
    "regions.0.learners=1",
    "syncer.checkpoint.everySeconds=3600",
    "sync.heartbeat.timeoutSeconds=600",
)
WAIT_SECONDS = 600.0
SETTLE_SECONDS = 0.3  # between turns, for what the background has under way

LAYERS = {"cpu": (768, 2048, 12), "cuda": (2048, 5504, 16)}  # of larger models: width, inner width, heads
ON_GPU = (
    "training.batch.sequences=16",
    "training.data.sequenceLength=512",
    "training.model.config.max_position_embeddings=512",
    "sync={}",
    "sync.heartbeat.timeoutSeconds=600",
)
GPU_MILLIONS = 500
GROUP_MILLIONS = 50
GPU_CORES = 4  # of the processes that train


def main() -> None:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--millions", type=int, help="parameters of the model, in millions (default: the demo's, 0.9)")
    ranks = "ranks of a learner, beside a learner of one process"
    parser.add_argument("--processes", type=common.whole_number(2), metavar="N", help=ranks)
    parser.add_argument("--device", choices=tuple(LAYERS), default="cpu", help="what trains (default: cpu)")
    args = parser.parse_args()
    turns, steps = (3, 12) if args.quick else (12, 72)  # 72: each fragment six times
    on_gpu = args.device == "cuda"
    if args.millions is not None and args.millions < 1:
        parser.error(f"--millions is {args.millions}: expected 1 or more")
    if on_gpu and not common.finds_gpu():
        parser.error("--device cuda: torch finds no CUDA device here")
    if args.processes:
        if on_gpu:
            parser.error("--processes is measured on the CPU: leave --device out")
        millions = args.millions or (2 if args.quick else GROUP_MILLIONS)
        compare_group(args.processes, millions, args.quick, args.json)
        return
    millions = args.millions or (GPU_MILLIONS if on_gpu else None)
    if millions is not None:
        turns, steps = (2, 12) if args.quick else (4 if on_gpu else 6, 24)
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = {cores[0]}, {cores[-1]}
    if on_gpu and len(cores) > GPU_CORES:
        ours, theirs = set(cores[:GPU_CORES]), set(cores[GPU_CORES:])
    job = load_job(EXAMPLE, (*OVERRIDES, *larger_model(millions, args.device)))
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    children: list[Any] = []
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder,
        programs.Syncer(Path(folder), job, theirs) as syncer,
    ):
        for name, target in (("with", synchronised), ("without", alone)):
            pipes[name], end = context.Pipe()
            given = (end, ours, str(syncer.job_file), syncer.address)
            child = context.Process(target=target, args=given, daemon=True)
            child.start()
            children.append(child)
            ask(pipes[name], 0, children)  # ready to take its first step
        measured: dict[str, list[Turn]] = {name: [] for name in pipes}
        for name in pipes:
            ask(pipes[name], steps, children)  # warm up; the learner's first merges
        for turn in range(turns):
            for name in ("with", "without") if turn % 2 else ("without", "with"):
                time.sleep(SETTLE_SECONDS)
                measured[name].append(ask(pipes[name], steps, children))
        merges = syncer.status()["merges"]
        for pipe in pipes.values():
            pipe.send(-1)
        for child in children:
            child.join(60)
    if merges == 0:
        raise SystemExit("bench/overlap: nothing was merged, so nothing was measured")
    where = "one core" if len(cores) == 1 else f"{len(ours)} and {len(theirs)} core(s)"
    note = f"{turns} turns of {steps} steps on {args.device}; learner and syncer on {where}; {merges} merges"
    common.show(figures(measured), args.json, note)


def larger_model(millions: int | None, device: str) -> tuple[str, ...]:
    """What a job with a model of so many million parameters has instead, and on which device."""
    if millions is None:
        return ("training.device=cpu",)
    width, inner, heads = LAYERS[device]
    config = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": max(1, round(millions * 1e6 / (4 * width**2 + 3 * width * inner))),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    own = ON_GPU if device == "cuda" else ("training.batch.sequences=1",)
    prefix = "training.model.config"
    return (f"training.device={device}", *(f"{prefix}.{name}={value}" for name, value in config.items()), *own)


class Turn(NamedTuple):
    """What came of a turn: seconds of a step (median, mean), and the share of the time that was stalled; of ranks, also
    the share that was spent in commands."""

    median: float = 0.0
    mean: float = 0.0
    stalled: float = 0.0
    commands: float = 0.0


def figures(measured: dict[str, list[Turn]]) -> list[common.Row]:
    stalled = statistics.mean(turn.stalled for turn in measured["with"])
    name = "training thread inside the library"
    rows = [common.Row(name, 100 * stalled, "%", "the training thread's wall time", baseline=100.0, ratio=stalled)]
    for name, of in (("step, synchronised", "median"), ("step, synchronised, mean", "mean")):
        seconds = {who: [getattr(turn, of) for turn in turns] for who, turns in measured.items()}
        value, alone = (1e3 * statistics.median(seconds[who]) for who in ("with", "without"))
        ratio = common.paired(seconds["without"], seconds["with"])
        rows.append(common.Row(name, value, "ms", "the same loop alone", baseline=alone, ratio=ratio))
    return rows


def ask(pipe: Connection, steps: int, children: list[Any]) -> Turn:
    """Have ``steps`` steps made; what came of it."""
    if steps:
        pipe.send(steps)
    end = time.monotonic() + WAIT_SECONDS
    while not pipe.poll(0.5):
        if time.monotonic() > end or not all(child.is_alive() for child in children):
            raise SystemExit("bench/overlap: a training process does not answer; its words are above")
    return Turn(*pipe.recv())


class Turns:
    """A training process's side: stands still between turns, and takes the time of each step. ``spent``: seconds so
    far, stalled (and in commands). ``settle`` waits until all that was queued on the device is done; ``trim`` is called
    at the end of a turn."""

    def __init__(
        self,
        pipe: Connection,
        spent: Callable[[], Sequence[float]],
        settle: Callable[[], None],
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        self._pipe, self._spent, self._settle, self._trim = pipe, spent, settle, trim
        self._left = 0
        self._seconds: list[float] = []
        self._before: Sequence[float] = ()
        self._began = self._last = 0.0

    def next(self) -> bool:
        """Call between two steps; False: no more."""
        self._settle()
        now = time.monotonic()
        if self._left:
            self._seconds.append(now - self._last)
            self._left -= 1
        if not self._left:
            if self._seconds:
                counted = self._seconds[1:]
                shares = [(b - a) / (now - self._began) for a, b in zip(self._before, self._spent(), strict=True)]
                self._trim()
                self._pipe.send((statistics.median(counted), statistics.fmean(counted), *shares))
                self._seconds = []
            else:
                self._pipe.send(())
            steps = self._pipe.recv()
            if steps < 0:
                return False
            self._left, self._before = steps, self._spent()
            now = self._began = time.monotonic()
        self._last = now
        return True


def begin(cores: set[int], job_file: str, address: str, ranks: int = 1) -> tuple[DiLoCoJob, Any, Any, Any]:
    """(job, model, optimizer, data set), as the built-in trainer makes them in each of so many ranks, on ``cores``."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DILOCO_JOB_FILE"], os.environ["DILOCO_SYNCER"] = job_file, address
    os.environ["DILOCO_JOB_DIRECTORY"] = str(EXAMPLE.parent)
    import torch

    from diloco_protocol.spec.load import job_from_json
    from diloco_worker import data, device
    from diloco_worker.training import models
    from diloco_worker.training import optimizer as optimizers
    from diloco_worker.training.parallel import sharding

    torch.set_num_threads(1)
    # The allocator keeps what it is given back once it has seen a block so large. The library's
    # own buffers would do this for one process and not for the other.
    torch.ones(31 << 20, dtype=torch.uint8)
    job = job_from_json(Path(job_file).read_text(encoding="utf-8"))
    sharding.begin_ranks(job.spec)
    where = device.device(job.spec)
    model = sharding.build_model(
        lambda: models.build(job.spec, job.spec.seed),
        lambda: models.outline(job.spec),
        job.spec,
        where=where,
        dtype=device.precision(job.spec, where),
        ranks=ranks,
    )
    return job, model, optimizers.build_optimizer(model, job.spec.training.optimizer), data.load(job.spec)


def waiting(model: Any) -> Callable[[], None]:
    """What waits for the model's device."""
    import torch

    where = next(model.parameters()).device
    return (lambda: torch.cuda.synchronize(where)) if where.type == "cuda" else lambda: None


def trained(job: DiLoCoJob, model: Any, optimizer: Any, batch: Any, ranks: int = 1) -> tuple[int, Any]:
    """One step of the built-in trainer; (tokens, loss), of this rank."""
    from diloco_worker import data, device
    from diloco_worker.training import trainer

    training = job.spec.training
    dtype = device.precision(job.spec, device.device(job.spec))
    loss = trainer.step(
        model,
        optimizer,
        batch,
        training.batch.accumulation,
        clip_norm=training.optimizer.clip_norm,
        dtype=dtype,
        ranks=ranks,
    )
    return data.tokens_in(batch), loss


def synchronised(pipe: Connection, cores: set[int], job_file: str, address: str) -> None:
    """The loop through the library."""
    job, model, optimizer, dataset = begin(cores, job_file, address)
    from diloco_worker import Learner

    with Learner.from_environment(model, optimizer) as learner:
        turns = Turns(pipe, lambda: [learner.metrics["stalled_seconds"]], waiting(model))
        for batch in learner.batches(dataset):
            if not turns.next():
                break
            tokens, loss = trained(job, model, optimizer, batch)
            learner.after_step(tokens=tokens, loss=loss)
    sys.exit(learner.exit_code)


def alone(pipe: Connection, cores: set[int], job_file: str, address: str) -> None:
    """The same loop without it: batches of the same data set, in order."""
    job, model, optimizer, dataset = begin(cores, job_file, address)
    from torch.utils.data import default_collate

    turns = Turns(pipe, lambda: [0.0], waiting(model))
    size, at = job.spec.training.batch.sequences, 0
    while turns.next():
        batch = default_collate([dataset[(at + i) % len(dataset)] for i in range(size)])
        at += size
        trained(job, model, optimizer, batch)


# ---------------------------------------------------------------- a learner of several ranks


def compare_group(processes: int, millions: int, quick: bool, as_json: bool) -> None:
    """Measure a learner of so many ranks and one of one process, in turns, and show the figures."""
    turns, steps = (2, 6) if quick else (5, 12)
    cores = os.sched_getaffinity(0)
    overrides = (*OVERRIDES, *larger_model(millions, "cpu"), f"training.batch.sequences={processes}")
    measured: dict[str, list[Turn]] = {}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, ranks in (("ranks", processes), ("alone", 1)):
            job = load_job(EXAMPLE, (*overrides, f"learners.processes={ranks}"))
            syncer = stack.enter_context(programs.Syncer(Path(folder) / name, job, cores))
            sides[name] = Side(syncer, ranks, stack)
            sides[name].ask(steps)  # warm up; the learner's first merges
            measured[name] = []
        for turn in range(turns):
            for name in ("ranks", "alone") if turn % 2 else ("alone", "ranks"):
                time.sleep(SETTLE_SECONDS)
                measured[name].append(sides[name].ask(steps))
        for name, side in sides.items():
            memory[name] = side.held_bytes(turns) / side.parameters
            if not side.syncer.status()["merges"]:
                raise SystemExit("bench/overlap: nothing was merged, so nothing was measured")
        merges = [side.syncer.status()["merges"] for side in sides.values()]
        for side in sides.values():
            side.end()
    note = (
        f"{turns} turns of {steps} steps on the CPU, {sides['ranks'].parameters / 1e6:.1f} million parameters; "
        f"{processes} ranks, and one process, on {len(cores)} core(s); {merges[0]} and {merges[1]} merges"
    )
    common.show(group_figures(measured, memory), as_json, note)


def group_figures(measured: dict[str, list[Turn]], memory: dict[str, float]) -> list[common.Row]:
    rows = []
    for name, who, of in (
        ("leader inside the library", "ranks", "stalled"),
        ("of it in commands", "ranks", "commands"),
        ("one process inside the library", "alone", "stalled"),
    ):
        share = statistics.mean(getattr(turn, of) for turn in measured[who])
        rows.append(common.Row(name, 100 * share, "%", "the training thread's wall time", baseline=100.0, ratio=share))
    for name, shares in (("a boundary", True), ("a step", False)):
        seconds = {who: [turn.mean * (turn.stalled if shares else 1.0) for turn in of] for who, of in measured.items()}
        value, alone = (1e3 * statistics.mean(seconds[who]) for who in ("ranks", "alone"))
        rows.append(common.Row(f"{name}, ranks", value, "ms", "one process's", baseline=alone, ratio=value / alone))
    held, alone = memory["ranks"], memory["alone"]
    rows.append(common.Row("host memory, all ranks", held, "B", "one process's", baseline=alone, ratio=held / alone))
    return rows


class Side:
    """A learner's processes, killed at the end of ``stack`` if they are left: SIGTERM alone only asks a learner to end
    at its next step. ``parameters``: of its model."""

    def __init__(self, syncer: programs.Syncer, ranks: int, stack: contextlib.ExitStack) -> None:
        self.syncer = syncer
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.children: list[Any] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(ranks):
            pipe, end = context.Pipe()
            given = (end, rank, ranks, port, str(syncer.job_file), syncer.address)
            self.children.append(context.Process(target=train_rank, args=given, daemon=True))
            self.children[-1].start()
            stack.callback(self.children[-1].kill)
            self.pipes.append(pipe)
        self.parameters = int(self._answer().median)  # it has trained without the library
        self._bare = self._now()
        self._held: list[int] = []
        self.ask(0)  # ready to take its first step through it

    def ask(self, steps: int) -> Turn:
        """Have all ranks make ``steps`` steps; what came of it in the leader. 0: let them go on."""
        for pipe in self.pipes:
            pipe.send(steps)
        turn = self._answer()
        self._held.append(self._now() - self._bare)
        return turn

    def _answer(self) -> Turn:
        leader, *_ = [ask(pipe, 0, self.children) for pipe in self.pipes]
        return leader

    def held_bytes(self, turns: int) -> float:
        """What the library held in all ranks together: the median of what it was at the ends of the last turns."""
        return statistics.median(self._held[-turns:])

    def _now(self) -> int:
        return sum(private_and_shared_bytes(child.pid) for child in self.children)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(-1)
        for child in self.children:
            child.join(60)


def private_and_shared_bytes(pid: int) -> int:
    """A process's anonymous memory, and its share of what it has in common with others in memory."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(rollup.partition(f"{name}:")[2].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


class GroupClock:
    """Counts the seconds that a rank spends in collectives of the library's own from now on."""

    def __init__(self, group: Any) -> None:
        self.seconds = 0.0
        self._call, group._call = group._call, self._time_call

    def _time_call(self, collective: Any) -> None:
        began = time.monotonic()
        try:
            self._call(collective)
        finally:
            self.seconds += time.monotonic() - began


def train_rank(pipe: Connection, rank: int, ranks: int, port: int, job_file: str, address: str) -> None:
    """One rank of a learner, or its only process: two steps without the library, then turns through it."""
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    job, model, optimizer, dataset = begin(os.sched_getaffinity(0), job_file, address, ranks)
    import torch
    from torch.utils.data import default_collate

    from diloco_worker import Learner, device

    for turn in range(2):
        trained(job, model, optimizer, default_collate([dataset[turn]]), ranks=ranks)
    device.return_free_memory()
    pipe.send([sum(parameter.numel() for parameter in model.parameters())])
    pipe.recv()
    optimizer.state.clear()
    with Learner.from_environment(model, optimizer) as learner:
        clock = GroupClock(learner._ranks) if rank == 0 and ranks > 1 else None

        def spent() -> Sequence[float]:
            stalled = learner.metrics["stalled_seconds"]
            return (stalled, clock.seconds) if clock is not None else (stalled,)

        turns = Turns(pipe, spent, waiting(model), device.return_free_memory)
        for batch in learner.batches(dataset):
            if not turns.next():
                break
            tokens, loss = trained(job, model, optimizer, batch, ranks=ranks)
            if ranks > 1:
                torch.distributed.barrier()
            learner.after_step(tokens=tokens, loss=loss)
    sys.exit(learner.exit_code)


if __name__ == "__main__":
    main()
