"""Tokens per second against bandwidth, measured: data-parallel training and ours through the same shaped links.

Learners train one model on this machine, each behind a link of its own that carries so many bits a second each way
(relay.py: token buckets in user space, the same for all arms). Everything that learners say to each other, or to the
syncer, passes them: DDP's gloo connections too (relayed_store.py). Compute is emulated: a step takes a fixed time, of
which the most is slept (layer_pace.py), so that the machine's cores are not the limit; beside each figure is the share
of them that was used. Bytes are those that the real programs send.

Arms: ``ddp-float32`` and ``ddp-bfloat16``, torch's DistributedDataParallel over gloo, gradients averaged at every step,
sent while the backward pass goes on; ``torchft``, its DiLoCo in fragments (torchft_replica.py), where that package is
installed; ``ours``, int4 up and bfloat16 down, the hub's link not shaped; ``ours-hub``, the
hub's link no faster than one learner's. Links are shaped once training is under way, and counting begins a while
later, so that starting up is in no figure.

Ours never waits for its links: on one that is too slow merges become rarer instead. So its tokens per second are read
together with *merges*: those made, of those that the steps made due.

Cells (an arm at a rate) are kept in build/bandwidth by a digest of all that makes them; the same command goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
import programs
import torchft_replica
from diloco.reports.document import Scalar
from diloco_protocol.bandwidth import model as needs
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_from_json, job_to_json, load_job
from lab.figures import Axis, Plot, ResultDocument, Series
from lab.report_files import write_report
from lab.sources import source_digest
from relay import Carried, Link, Relays

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny-gpt.yaml"
CELLS = ROOT / "build" / "bandwidth"
MADE_BY = ("bench", "protocol", "syncer", "worker")  # sources that a cell depends on
ARMS = {
    "ddp-float32": "DDP, float32 gradients",
    "ddp-bfloat16": "DDP, bfloat16 gradients",
    "torchft": "torchft's DiLoCo, float32",
    "ours": "ours, int4 up and bfloat16 down",
    "ours-hub": "ours, the hub's link no faster than a learner's",
}
DDP_BUCKET_MB = 0.5  # of torch's default 25 the whole model is one bucket, and nothing overlaps
POLL_SECONDS = 0.002
START_SECONDS = 240.0
CELL_SECONDS = 420.0
MEGABIT = 125_000  # bytes
TORCHFT_TURNS = 2  # of H steps that are counted


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of all cells of one measurement. A window counts at least so many seconds, and steps of each learner."""

    learners: int
    step_seconds: float
    megabits: tuple[float, ...]
    seconds: float
    ddp_steps: int
    overrides: tuple[str, ...] = ()


COMMON = (
    "training.stop={steps: 1000000}",
    "training.evaluation=null",
    "training.optimizer.schedule=constant",
    "training.batch.sequences=2",
    "sync.compression={up: int4, down: bfloat16}",
    "syncer.checkpoint.everySeconds=3600",
    "sync.heartbeat.timeoutSeconds=600",
)
# The paper's turn: H = 24, P = 24, tau = 2.
FULL = Sizes(
    4, 0.5, (2, 6, 20, 60, 200), 24.0, ddp_steps=2, overrides=("sync.fragments=24", "sync.every=24", "sync.overlap=2")
)
SMALL = ("training.model.config.num_hidden_layers=2", "training.data.sequenceLength=32")
QUICK = Sizes(2, 0.15, (8,), 2.0, ddp_steps=2, overrides=("sync.fragments=6", "sync.every=6", *SMALL))


@dataclass(frozen=True, slots=True)
class Cell:
    """What one arm did at one rate, all learners together."""

    arm: str
    megabits: float
    seconds: float
    steps: float  # of each learner, the mean
    tokens_per_second: float
    link: Carried  # of a learner, the mean
    hub: Carried
    merges: int  # ours alone, and how many were due
    merges_due: float
    dropped_tokens: int
    cores_share: float  # of the machine's, by all processes of the cell
    learners_in_merges: float | None = None  # of ours


class CellFailed(Exception):
    """A cell could not be measured; the message says why."""


def main() -> int:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--arm", action="append", choices=sorted(ARMS), help="only these arms")
    parser.add_argument(
        "--mbit", action="append", type=common.number(above=0), help="only these rates, instead of the five"
    )
    parser.add_argument(
        "--latency", type=common.number(least=0), default=0.0, metavar="SECONDS", help="one way, of each link"
    )
    common.add_report(parser)
    parser.add_argument("--again", action="store_true", help="measure cells anew that are there already")
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    if "torchft" in (args.arm or ()) and not torchft_replica.is_installed():
        raise SystemExit("--arm torchft: the package torchft is not installed: pip install torchft")
    possible = [arm for arm in ARMS if arm != "torchft" or torchft_replica.is_installed()]
    arms = args.arm or [arm for arm in possible if not args.quick or arm in ("ddp-bfloat16", "ours")]
    job = load_job(EXAMPLE, (*COMMON, f"regions.0.learners={sizes.learners}", *sizes.overrides))
    wanted = [(arm, megabits) for megabits in sorted(args.mbit or sizes.megabits, reverse=True) for arm in arms]
    cells = list(measured_cells(wanted, sizes, job, args.latency, again=args.again))
    document = report(cells, sizes, job, args.latency)
    if args.report:
        write_report(document, args.report)
    if args.json:
        print(document.model_dump_json())
    else:
        show(document)
    return 0


def measured_cells(
    wanted: Sequence[tuple[str, float]], sizes: Sizes, job: DiLoCoJob, latency: float, again: bool
) -> Iterator[Cell]:
    """Each cell, from the disk or measured; says on stderr how far it is."""
    files = {cell: CELLS / f"{cell[0]}-{cell[1]:g}-{digest(cell, sizes, job, latency)}.json" for cell in wanted}
    missing = [cell for cell in wanted if again or not files[cell].exists()]
    left = [expected_seconds(arm, megabits, sizes) for arm, megabits in missing]
    for cell in wanted:
        if cell in missing:
            number = len(missing) - len(left) + 1
            say(f"{number} of {len(missing)}: {cell[0]} at {cell[1]:g} Mbit/s; {sum(left):.0f} s left")
            found = measure(cell[0], cell[1], sizes, job, latency=latency)
            left.pop(0)
            CELLS.mkdir(parents=True, exist_ok=True)
            temporary = files[cell].with_suffix(".tmp")
            temporary.write_text(json.dumps(asdict(found)), encoding="utf-8")
            temporary.replace(files[cell])
        kept = json.loads(files[cell].read_text(encoding="utf-8"))
        yield Cell(**{**kept, "link": Carried(**kept["link"]), "hub": Carried(**kept["hub"])})


def digest(cell: tuple[str, float], sizes: Sizes, job: DiLoCoJob, latency: float) -> str:
    """Of all that makes a cell: its arm and rate, the job, the sources, torch."""
    parts = [repr(cell), repr((sizes.learners, sizes.step_seconds, sizes.seconds, sizes.ddp_steps)), job_to_json(job)]
    parts += [repr(latency), version("torch"), repr(DDP_BUCKET_MB)]
    parts.append(source_digest(ROOT / folder for folder in MADE_BY))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def expected_seconds(arm: str, megabits: float, sizes: Sizes) -> float:
    """Roughly, for the time left: starting up, settling, and counting."""
    if arm.startswith("ours"):
        return 12.0 + 2.5 * sizes.seconds
    if arm == "torchft":
        return 20.0 + TORCHFT_TURNS * 24 * max(sizes.step_seconds, 1e6 * 8 * 8e-6 / 24 / megabits)
    step = max(sizes.step_seconds, 1e6 * (8 if arm.endswith("float32") else 4) * 8e-6 / megabits)
    return 12.0 + max(sizes.seconds / 2, (1 + sizes.ddp_steps) * step)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------ one cell


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything that is counted, at one time."""

    time: float
    steps: tuple[int, ...]
    links: tuple[Carried, ...]
    hub: Carried
    cpu_seconds: float
    status: dict[str, Any]


@dataclass(slots=True)
class Running:
    """The processes of a cell and what they are seen by. ``steps``: counters that they share with this process."""

    links: list[Link]
    hub: Link
    steps: list[Any]
    children: list[Any]
    pids: list[int]
    status: Callable[[], dict[str, Any]]

    def now(self) -> Moment:
        return Moment(
            time.monotonic(),
            tuple(counter.value for counter in self.steps),
            tuple(link.carried for link in self.links),
            self.hub.carried,
            cpu_seconds=sum(cpu_seconds(pid) for pid in self.pids) + time.process_time(),
            status=self.status(),
        )

    def wait(self, enough: Callable[[], bool], end: float, what: str) -> None:
        """Until ``enough``. Raises CellFailed if a process ends before, or at ``end`` (monotonic seconds)."""
        while not enough():
            if not all(child.is_alive() for child in self.children):
                raise CellFailed(f"a training process ended before {what}; its words are above")
            if time.monotonic() > end:
                raise CellFailed(f"it took too long before {what}")
            time.sleep(POLL_SECONDS)

    def wait_steps(self, count: int, end: float, what: str) -> None:
        """Until every learner has made ``count`` more steps."""
        goals = [counter.value + count for counter in self.steps]
        self.wait(lambda: all(c.value >= goal for c, goal in zip(self.steps, goals, strict=True)), end, what)


def measure(arm: str, megabits: float, sizes: Sizes, job: DiLoCoJob, latency: float) -> Cell:
    """Start the processes, let them train, shape their links, and count."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder, contextlib.ExitStack() as stack:
        start = start_ours if arm.startswith("ours") else start_torchft if arm == "torchft" else start_ddp
        running = start(arm, sizes, job, Path(folder), latency, stack)
        end = time.monotonic() + START_SECONDS
        every = job.spec.sync.every
        settle = 1 if arm.startswith("ddp") else every
        running.wait_steps(3, end, "its first steps")
        if arm.startswith("ours"):
            running.wait(lambda: min(running.status()["versions"] or [0]) >= 1, end, "the first merges")
        rate = megabits * MEGABIT
        for link in [*running.links, *([running.hub] if arm == "ours-hub" else [])]:
            link.shape(rate)
        end = time.monotonic() + CELL_SECONDS
        running.wait_steps(settle, end, "its links were full")
        first = running.now()
        # torchft's steps wait in the turn's last one, so that whole turns are counted.
        least = {"ddp": sizes.ddp_steps, "torchft": TORCHFT_TURNS * every}.get(arm.partition("-")[0], 1)
        seconds = sizes.seconds if arm.startswith("ours") else sizes.seconds / 2
        running.wait_steps(least, end, "enough steps")
        if arm == "torchft":
            return counted(arm, megabits, job, first, last=running.now())
        while time.monotonic() < first.time + seconds:
            running.wait_steps(1, end, "enough steps")
        return counted(arm, megabits, job, first, last=running.now())


def counted(arm: str, megabits: float, job: DiLoCoJob, first: Moment, last: Moment) -> Cell:
    """The difference of two moments."""
    seconds, learners = last.time - first.time, len(first.steps)
    steps = sum(last.steps) - sum(first.steps)
    carried = [after - before for before, after in zip(first.links, last.links, strict=True)]
    if not any(one.up for one in carried):
        raise CellFailed("nothing passed the learners' links: these are not the ways that they take")
    versions = [sum(moment.status.get("versions", ())) for moment in (first, last)]
    dropped = [moment.status["tokens"]["dropped"] if moment.status else 0 for moment in (first, last)]
    sync = job.spec.sync
    ours = arm.startswith("ours")
    return Cell(
        arm,
        megabits,
        seconds,
        steps / learners,
        tokens_per_second=steps * step_tokens(job) / seconds,
        link=Carried(*(round(statistics.mean(getattr(one, way) for one in carried)) for way in ("up", "down"))),
        hub=last.hub - first.hub,
        merges=versions[1] - versions[0],
        merges_due=steps / learners * sync.fragments / sync.every if ours else 0.0,
        learners_in_merges=(last.status.get("learners_in_merges") or {}).get("recent"),
        dropped_tokens=dropped[1] - dropped[0],
        cores_share=(last.cpu_seconds - first.cpu_seconds) / seconds / len(os.sched_getaffinity(0)),
    )


def step_tokens(job: DiLoCoJob) -> int:
    """Of one learner's step."""
    data = job.spec.training.data
    assert data is not None
    return job.spec.training.batch.sequences * data.sequence_length


def cpu_seconds(pid: int) -> float:
    """That a process has used, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_ours(
    arm: str, sizes: Sizes, job: DiLoCoJob, folder: Path, latency: float, stack: contextlib.ExitStack
) -> Running:
    """A syncer, and learners that reach it through their links."""
    syncer = stack.enter_context(programs.Syncer(folder, job))
    relays = stack.enter_context(Relays())
    links, hub = [Link(latency=latency) for _ in range(sizes.learners)], Link()
    running = Running(links, hub, [], [], pids=[int(syncer.pid)], status=syncer.status)
    for ordinal, link in enumerate(links):
        address = relays.open(syncer.address, link, hub)
        start_process(running, stack, train_ours, (str(syncer.job_file), sizes.step_seconds, ordinal, address))
    return running


def start_ddp(
    arm: str, sizes: Sizes, job: DiLoCoJob, folder: Path, latency: float, stack: contextlib.ExitStack
) -> Running:
    """Processes that find each other by a file, and reach each other through both their links."""
    return start_ranks(train_ddp, arm, sizes, job, folder=folder, latency=latency, stack=stack)


def start_torchft(
    arm: str, sizes: Sizes, job: DiLoCoJob, folder: Path, latency: float, stack: contextlib.ExitStack
) -> Running:
    """Replicas that a lighthouse brings together, and that reach each other through both their links."""
    server, lighthouse = torchft_replica.serve_lighthouse(sizes.learners)
    stack.callback(server.shutdown)
    return start_ranks(train_torchft, lighthouse, sizes, job, folder=folder, latency=latency, stack=stack)


def start_ranks(
    target: Callable[..., None],
    word: str,
    sizes: Sizes,
    job: DiLoCoJob,
    folder: Path,
    latency: float,
    stack: contextlib.ExitStack,
) -> Running:
    """A process for each learner; between any two lie both their links. ``word``: the last argument of ``target``."""
    links = {str(rank): Link(latency=latency) for rank in range(sizes.learners)}
    relays = stack.enter_context(Relays(links))
    job_file = folder / "job.json"
    job_file.write_text(job_to_json(job), encoding="utf-8")
    running = Running(list(links.values()), Link(), [], [], pids=[], status=dict)
    for rank in range(sizes.learners):
        given = (str(job_file), sizes.step_seconds, rank, sizes.learners, relays.requests_address, word)
        start_process(running, stack, target, given)
    return running


def start_process(
    running: Running, stack: contextlib.ExitStack, target: Callable[..., None], given: tuple[Any, ...]
) -> None:
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    child = context.Process(target=target, args=(counter, *given), daemon=True)
    child.start()
    stack.callback(end_processes, running)
    running.steps.append(counter)
    running.children.append(child)
    running.pids.append(int(child.pid or 0))


def end_processes(running: Running) -> None:
    """Killed, all at once: what was to be counted is counted."""
    for child in running.children:
        child.kill()
    for child in running.children:
        child.join(programs.STOP_SECONDS)


# ------------------------------------------------------------------ what trains, in processes of its own


def begin(job_file: str, step_seconds: float) -> tuple[DiLoCoJob, Any, Any, Any]:
    """(job, paced model, optimizer, data set), as the built-in trainer makes them, on one thread."""
    os.environ.update(OMP_NUM_THREADS="1", DILOCO_JOB_FILE=job_file, DILOCO_JOB_DIRECTORY=str(EXAMPLE.parent))
    import torch

    from diloco_worker import data
    from diloco_worker.training import models
    from diloco_worker.training import optimizer as optimizers
    from layer_pace import LayerPace

    torch.set_num_threads(1)
    job = job_from_json(Path(job_file).read_text(encoding="utf-8"))
    model: Any = models.build(job.spec, job.spec.seed)
    LayerPace(list(model.model.layers), step_seconds)
    return job, model, optimizers.build_optimizer(model, job.spec.training.optimizer), data.load(job.spec)


def train_step(job: DiLoCoJob, model: Any, optimizer: Any, batch: Any) -> Any:
    """One step of the built-in trainer; the loss."""
    import torch

    from diloco_worker.training import trainer

    training = job.spec.training
    clip = training.optimizer.clip_norm
    return trainer.step(model, optimizer, batch, training.batch.accumulation, clip_norm=clip, dtype=torch.float32)


def train_ours(counter: Any, job_file: str, step_seconds: float, ordinal: int, address: str) -> None:
    """A learner, until it is killed."""
    os.environ.update(DILOCO_SYNCER=address, DILOCO_REGION="local", DILOCO_ORDINAL=str(ordinal))
    job, model, optimizer, dataset = begin(job_file, step_seconds)
    from diloco_worker import Learner

    with Learner.from_environment(model, optimizer) as learner:
        for batch in learner.batches(dataset):
            loss = train_step(job, model, optimizer, batch)
            learner.after_step(tokens=step_tokens(job), loss=loss)
            counter.value += 1


def train_ddp(
    counter: Any, job_file: str, step_seconds: float, rank: int, learners: int, requests_address: str, arm: str
) -> None:
    """A rank of data-parallel training, until it is killed."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")  # gloo listens where the machine's name points to, which may be nowhere
    job, model, optimizer, dataset = begin(job_file, step_seconds)
    from datetime import timedelta

    from torch import distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # it is there all the same
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import default_collate

    import parallel
    from relayed_store import RelayedStore

    timeout = timedelta(seconds=CELL_SECONDS)
    store = RelayedStore(FileStore(f"{job_file}.store", learners), rank, requests_address)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=learners, timeout=timeout)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=DDP_BUCKET_MB)
    if arm == "ddp-bfloat16":
        wrapped.register_comm_hook(None, parallel.averaged_as_bfloat16)
    size, at = job.spec.training.batch.sequences, rank * job.spec.training.batch.sequences
    while True:
        batch = default_collate([dataset[(at + i) % len(dataset)] for i in range(size)])
        at += size * learners
        train_step(job, wrapped, optimizer, batch)
        counter.value += 1


def train_torchft(
    counter: Any, job_file: str, step_seconds: float, rank: int, learners: int, requests_address: str, lighthouse: str
) -> None:
    """A replica of torchft's DiLoCo, until it is killed."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    job, model, optimizer, dataset = begin(job_file, step_seconds)
    from torch.utils.data import default_collate

    from diloco_protocol.merging import outer_settings

    size, every = job.spec.training.batch.sequences, job.spec.sync.every
    outer = outer_settings(job.spec.sync.outer, "mean")

    def step(number: int) -> None:
        at = (number * learners + rank) * size
        train_step(job, model, optimizer, default_collate([dataset[(at + i) % len(dataset)] for i in range(size)]))
        counter.value += 1

    torchft_replica.train(
        model,
        optimizer,
        step,
        rank=rank,
        replicas=learners,
        every=every,
        outer=(outer.lr, outer.momentum),
        lighthouse=lighthouse,
        requests_address=requests_address,
    )


# ------------------------------------------------------------------ shown


def report(cells: Sequence[Cell], sizes: Sizes, job: DiLoCoJob, latency: float) -> ResultDocument:
    """The figures with their conditions."""
    parameters = count_parameters(job)
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    full = sizes.learners * step_tokens(job) / sizes.step_seconds
    need = needs.data_parallel(parameters, sizes.learners, sizes.step_seconds)
    scale = 5e9 / parameters * sizes.step_seconds  # to a model of 5e9 parameters and steps of 1 s
    curves = [Series(name=ARMS[arm], **points(cells, arm, lambda c: c.tokens_per_second)) for arm in arms]
    sync = job.spec.sync
    return ResultDocument(
        title="Tokens per second against bandwidth",
        summary="Data-parallel training and ours through the same shaped links, measured on one machine.",
        facts={
            "learners": sizes.learners,
            "parameters": parameters,
            "step, emulated": f"{sizes.step_seconds} s",
            "tokens of a learner's step": step_tokens(job),
            "full speed": f"{full:,.0f} tokens/s",
            "ours": f"H = {sync.every}, P = {sync.fragments}, tau = {sync.overlap}, K = {sync.quorum}",
            "latency of a link": f"{latency:g} s one way",
            "data-parallel needs by the formula": f"{need / 1e6:,.0f} Mbit/s for 95 % (bfloat16)",
        },
        rows=[row(cell, cells) for cell in cells],
        plots=[
            Plot(
                title="Tokens per second against bandwidth",
                x=Axis(name="a learner's link, each way", unit="Mbit/s", log=True),
                y=Axis(name="tokens per second, all learners", log=True),
                series=curves,
            )
        ],
        notes=[
            "Emulated: a step takes a fixed time, most of which is slept (a third in the forward pass, two thirds in"
            " the backward pass, layer by layer); links are token buckets in user space. Bytes are those that the real"
            " programs send.",
            "Ours does not wait for its links: where they are too slow its merges become rarer. Read its tokens per"
            " second together with `merges of due`.",
            f"1 Mbit/s is to this model what {scale / 1000:.3g} Gbit/s is to one of 5e9 parameters with steps of 1 s.",
            f"DDP sends buckets of {DDP_BUCKET_MB} MB while the backward pass goes on.",
        ],
    )


def points(cells: Sequence[Cell], arm: str, value: Callable[[Cell], float]) -> dict[str, list[float | None]]:
    own = sorted((cell for cell in cells if cell.arm == arm), key=lambda cell: cell.megabits)
    return {"x": [cell.megabits for cell in own], "y": [value(cell) for cell in own]}


def row(cell: Cell, cells: Sequence[Cell]) -> dict[str, Scalar]:
    """One figure: ours against the fastest of the others at the same rate, each of them against ours."""
    ours = cell.arm.startswith("ours")
    others = [c for c in cells if c.megabits == cell.megabits and c.arm.startswith("ours") != ours]
    other = max(others, key=lambda c: c.tokens_per_second, default=None)
    return {
        "name": f"{ARMS[cell.arm]}, {cell.megabits:g} Mbit/s",
        "value": round(cell.tokens_per_second, 2),
        "unit": "tokens/s",
        "against": None if other is None else ARMS[other.arm],
        "baseline": None if other is None else round(other.tokens_per_second, 2),
        "ratio": None if other is None else round(cell.tokens_per_second / other.tokens_per_second, 4),
        "step, s": round(cell.seconds / cell.steps, 4),
        "link up, kB a step": round(cell.link.up / cell.steps / 1000, 1),
        "link down, kB a step": round(cell.link.down / cell.steps / 1000, 1),
        "merges of due": round(cell.merges / cell.merges_due, 3) if ours and cell.merges_due else None,
        "learners in a merge": cell.learners_in_merges,
        "tokens dropped": cell.dropped_tokens if ours else None,
        "cores used": round(cell.cores_share, 3),
    }


def count_parameters(job: DiLoCoJob) -> int:
    """Trained parameters of the job's model."""
    from diloco_worker.training.models import outline

    return sum(p.numel() for p in outline(job.spec, directory=EXAMPLE.parent).parameters() if p.requires_grad)


def show(document: ResultDocument) -> None:
    for name, value in document.facts.items():
        print(f"{name}: {value}")
    columns = [name for name in document.rows[0] if name not in ("unit", "against", "baseline")]
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for one in document.rows:
        print("| " + " | ".join("" if one[name] is None else str(one[name]) for name in columns) + " |")
    for note in document.notes:
        print(f"\n{note}")


if __name__ == "__main__":
    try:
        common.run_to_exit(main)
    except (CellFailed, programs.ProgramFailed) as error:
        raise SystemExit(f"bench/bandwidth: {error}") from error
