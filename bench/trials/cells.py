"""Trials: what each is made of, its result, and a cache of results from which an interrupted run goes on.

A trial's digest is that of all that makes it: the whole job with its defaults, what the job cannot say, ``CODE`` and
torch's version. ``CODE`` is raised by whoever changes what a trial computes: data, the world, layout, adoption, merge,
outer optimizers, codec; of those kinds of model whose trials it changes.

A trial uses one core: one thread of torch and one of BLAS. Its result is the same on every run of one build of torch on
one processor. On another processor, or by another kernel of BLAS, the order of floating point is another, and training
amplifies the difference. Of six trials of 6 merges that were run again elsewhere one had the same loss. Dense models
differed by up to 0.009 nats (0.35 %), a vision model by 0.18. The mean of five seeds moved by 0.0002. So a single
trial's loss is compared only with trials of the same processor, which each line names (``processor``).

The published tables are of ``PUBLISHED``, the code before. Its lines name no processor, may be of several, and were
chosen and reported by the same 256 held-out sequences. They are shown with ``--published``, and cannot be run again.

Models of the size ``gpu`` are trained on a CUDA device, where two runs need not have the same bits: the digest leaves
torch's version out, and the result says it, with the GPU's name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from diloco_protocol.merging import choose_merge

CODE = {"dense": 2, "moe": 3, "vision": 3}
PUBLISHED = {"dense": 1, "moe": 2, "vision": 2}
CODE_OF_DEATHS = 1  # likewise, of trials in which learners die
CODE_OF_EXCHANGES = 2  # likewise, of trials with longer exchanges, or with paces of learners
EVERY = 24  # H, by which a trial's length is stated in merges of each fragment
DEATHS = 2.0  # of each learner in a trial with faults, on average
AWAY = 0.05  # of the trial's steps that a learner is gone each time
SHORT_EXCHANGE = 1.5
MERGE_SECONDS = 0.05
version = functools.cache(importlib.metadata.version)  # to read it takes milliseconds, and each digest asks


@dataclass(frozen=True)
class Trial:
    """One training run.

    ``merges`` of each fragment at H = EVERY: its length. ``learners`` 0: the data-parallel reference. ``sync``: what
    the job's spec.sync says other than the defaults. ``outer``: an optimizer of outers.py and its settings, instead of
    the job's. ``exchange``: seconds from a snapshot to the version that holds it, steps taking one. ``throttled``: it
    takes so long because the link is narrow, and not because the way is long. ``pace``: seconds of a step of each
    learner, empty: one. ``parts``: sequences that each learner trains in a step, the task's in all;
    empty: as many each. ``timed``: the job ends with the last of its steps, whatever was trained by then, and not with
    its tokens. ``visitors``: so many learners more, each training as many sequences in a step as the others, join after
    a third of the time and leave after two thirds. ``rate``: of the inner optimizer, None: the task's. ``inner``: adamw
    or muon. ``sparse``: pushes are made sparse first (sparse.py). ``broken``: what the
    first learner pushes in place of its work (broken.py). ``ddp``: the reference, by torch's own ranks
    (ddp.py). ``published``: by the code before (``PUBLISHED``).
    """

    kind: str
    size: str
    merges: int
    seed: int
    learners: int = 0
    sync: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    exchange: float = SHORT_EXCHANGE
    throttled: bool = False
    pace: tuple[float, ...] = ()
    parts: tuple[int, ...] = ()
    deaths: bool = False
    timed: bool = False
    visitors: int = 0
    rate: float | None = None
    inner: str = "adamw"
    sparse: bool = False
    broken: str = ""
    ddp: bool = False
    published: bool = False

    @property
    def code(self) -> int:
        """The number of the code that makes it, or made it."""
        return (PUBLISHED if self.published else CODE)[self.kind]

    @property
    def steps(self) -> int:
        """Steps of the job, of the task's sequences each."""
        return self.merges * EVERY

    @functools.cached_property
    def digest(self) -> str:
        from trials import tasks

        sync = self.sync if self.learners else {}
        job = tasks.make_job(
            self.kind,
            self.size,
            self.learners or 1,
            self.steps,
            seed=self.seed,
            sync=sync,
            rate=self.rate,
            timed=self.timed,
            visitors=self.visitors,
        )
        spec = job.spec.model_dump(mode="json", by_alias=True)
        # What is trained decides, and not whether a field or its default says it.
        del spec["training"]["model"]["initialise"]  # which is of checkpoints, and came after the published trials
        # What came with learners of several processes, and of which these trials have none.
        for name in ("parallel", "activationCheckpointing", "compile"):
            del spec["training"][name]
        for holder in (spec["learners"], *spec["regions"]):
            del holder["processes"], holder["pods"]
        for region in spec["regions"]:
            del region["parallel"]
        del spec["suspendPolicy"], spec["syncer"]["shardPods"]  # which are for clusters, and came after them
        spec["sync"]["merge"]["method"], outer = choose_merge(job.spec, 0)
        spec["sync"]["outer"] = asdict(outer)
        if self.outer:
            del spec["sync"]["outer"]
        # The reference has no syncer: its digest is that of what it trains.
        made_by = spec if self.learners else {key: spec[key] for key in ("seed", "training")}
        own = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("sync", "rate", "published") and getattr(self, each.name) != each.default
        }
        if self.deaths:
            own["deaths"] = CODE_OF_DEATHS
        if (self.exchange > SHORT_EXCHANGE or self.pace) and not self.published:
            own["exchanges"] = CODE_OF_EXCHANGES
        on_gpu = tasks.TASKS[self.kind, self.size].device != "cpu"
        document = {"code": self.code, "torch": None if on_gpu else version("torch"), "job": made_by, **own}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def effort(self) -> float:
        """What it takes, in steps of a small reference; rough, for the time left."""
        size = {"small": 1.0, "large": 4.0, "gpu": 4.0}[self.size]
        kind = {"dense": 1.0, "moe": 1.6, "vision": 1.5}[self.kind]
        return self.steps * kind * (size * (1 + 0.05 * self.learners) + 0.3 * self.learners + 0.3 * (self.learners > 0))


def run_trial(trial: Trial) -> dict[str, Any]:
    """Train, and score what came of it: ``loss`` and ``choice_loss`` (tasks.score), ``seconds`` of processor time, the
    ``processor``. Of trials with learners also ``loss_before_drain``, ``merges``, ``responders`` of a merge before the
    drain on average, ``merged`` and ``dropped`` (shares of the trained tokens), ``bytes_up``. Of those on a GPU also
    its name (``device``) and ``torch``, its version. Raises ValueError for a trial of the code before."""
    if trial.published:
        raise ValueError(f"{describe(trial)} is of a code that is gone")
    import torch
    from threadpoolctl import threadpool_limits

    from trials import tasks

    torch.set_num_threads(1)
    where = torch.device(tasks.TASKS[trial.kind, trial.size].device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"{describe(trial)} is trained on a GPU, and torch finds none")
    began = processor_seconds()
    # BLAS's threads, of isotropic merges, would take a core each also while they wait.
    with threadpool_limits(1, "blas"):
        result = _reference(trial) if trial.learners == 0 else _decoupled(trial)
    result |= {"seconds": processor_seconds() - began, "processor": processor()}
    if where.type == "cuda":
        result |= {"device": torch.cuda.get_device_name(where), "torch": torch.__version__}
    return result


@functools.cache
def processor() -> str:
    """The processor, and what torch and BLAS make of it: a trial's bits depend on them."""
    import torch
    from threadpoolctl import threadpool_info

    said = Path("/proc/cpuinfo").read_text("utf-8") if sys.platform == "linux" else ""
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in said.splitlines())}
    name = found.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{word} {found[key]}" for key, word in (("cpu family", "family"), ("model", "model")) if key in found]
    kernels = sorted({one["architecture"] for one in threadpool_info() if one.get("architecture")})
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([name, *numbers, f"torch {capability}", *(f"BLAS {kernel}" for kernel in kernels)])


def processor_seconds() -> float:
    """Of this process and of its children that have ended, such as the ranks of DDP."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _reference(trial: Trial) -> dict[str, Any]:
    from trials import ddp, fleet, inner, tasks

    if trial.ddp:
        reference = ddp.Reference(trial.kind, trial.size, trial.steps, trial.seed, rate=trial.rate)
        return dict(ddp.held_out_losses(reference))
    job = tasks.make_job(trial.kind, trial.size, 1, trial.steps, seed=trial.seed, sync={}, rate=trial.rate)
    model = fleet.train_alone(
        trial.kind, trial.size, job, trial.steps, seed=trial.seed, optimizer=inner.MAKE[trial.inner]
    )
    return dict(tasks.score(model, tasks.TrialData(trial.kind, trial.size, trial.seed)))


def _decoupled(trial: Trial) -> dict[str, Any]:
    from diloco_protocol.vocabulary import EventKind, JobPhase
    from diloco_syncer.core.events import RecordEvent
    from diloco_worker.core.adoption import Kind
    from diloco_worker.fragments import ModelFragments, Vector
    from lab.world.world import World
    from trials import fleet, inner, outers, tasks
    from trials.versions import TrialVersions

    job = tasks.make_job(
        trial.kind,
        trial.size,
        trial.learners,
        trial.steps,
        seed=trial.seed,
        sync=trial.sync,
        rate=trial.rate,
        timed=trial.timed,
        visitors=trial.visitors,
    )
    learners = fleet.Fleet(
        trial.kind, trial.size, job, trial.learners + trial.visitors, make_optimizer=inner.MAKE[trial.inner]
    )
    data, task = tasks.TrialData(trial.kind, trial.size, trial.seed), tasks.TASKS[trial.kind, trial.size]
    versions = TrialVersions(job, learners.layout, learners.initial(), optimizer=outers.make(trial.outer, trial.merges))
    before: dict[str, Any] = {}

    def note_drain(event: RecordEvent) -> None:
        if event.kind is EventKind.PHASE and world.core.phase is JobPhase.DRAINING:
            before.update(seen=world.seen.copy(), theta=[versions.theta(p) for p in range(len(versions.elements))])

    world = World(
        job,
        fleet.TrialTraining(
            learners, data, trial.parts or task.equal_parts(trial.learners), trial.visitors, total=trial.steps
        ),
        versions,
        pace=lambda place: trial.pace[place[1]] if trial.pace else 1.0,
        link=_link(trial, job, versions.elements),
        merge_seconds=MERGE_SECONDS,
        make_values=_make_values(trial),
        on_event=note_drain,
    )
    world.start_all()
    if trial.deaths:
        _plan_deaths(world, trial)
    if trial.visitors:
        _plan_visits(world, trial)
    if not world.run(until=50.0 * trial.steps + 1000):
        raise RuntimeError(f"the job did not end: {world.core.phase_message}")
    model = learners.first.to(learners.device)
    fragments = ModelFragments(model, learners.layout)

    def score(parameters: Sequence[Any]) -> dict[str, float]:
        for fragment, theta in enumerate(parameters):
            fragments.move(fragment, Kind.OVERWRITE, Vector.from_array(theta))
        return tasks.score(model, data)

    loss_before_drain = score(before["theta"])["loss"]
    seen = before["seen"]
    assert world.core.ledger is not None
    totals = world.core.ledger.totals()
    return {
        **score([versions.theta(p) for p in range(len(versions.elements))]),
        "loss_before_drain": loss_before_drain,
        "merges": world.seen["merges"],
        "responders": seen["merged pushes"] / max(1, seen["merges"]),
        "merged": totals.merged / totals.trained,
        "dropped": totals.dropped / totals.trained,
        "steps": world.now,
        "bytes_up": world.bytes_up,
    }


def _make_values(trial: Trial) -> Any:
    from lab.world.values import LearnerValues
    from trials import broken, sparse

    if trial.broken:
        return broken.first_is_broken(trial.broken)
    return sparse.SparseValues if trial.sparse else LearnerValues


def _link(trial: Trial, job: Any, elements: Sequence[int]) -> Any:
    """A link over which an exchange takes so long. A push travels once, a version is announced, asked for and sent:
    four times the latency."""
    from diloco_protocol.arrays import codec
    from lab.world.links import LinkRates

    if not trial.throttled:
        return LinkRates(latency=(trial.exchange - MERGE_SECONDS) / 4)
    # With the latency of the short exchange; the rest is for the push and for the version, half each.
    most, encodings = max(elements), job.spec.sync.compression
    seconds = (trial.exchange - SHORT_EXCHANGE) / 2
    up, down = (codec.encoded_bytes(encoding, most) / seconds for encoding in (encodings.up, encodings.down))
    return LinkRates(latency=(SHORT_EXCHANGE - MERGE_SECONDS) / 4, up=up, down=down)


def _plan_deaths(world: Any, trial: Trial) -> None:
    """Each learner dies DEATHS times on average, at random moments, and another process comes after AWAY."""
    chance = random.Random(trial.seed)
    away = max(5.0, AWAY * trial.steps)

    def die(place: tuple[str, int]) -> None:
        if place in world.learners and not world.ended:
            world.kill_learner(place)
            world.timeline.call_in(away, lambda: come(place))

    def come(place: tuple[str, int]) -> None:
        if not world.ended:
            world.start_learner(place)
            plan(place)

    def plan(place: tuple[str, int]) -> None:
        world.timeline.call_in(chance.expovariate(DEATHS / trial.steps), lambda: die(place))

    for place in list(world.learners):
        plan(place)


def _plan_visits(world: Any, trial: Trial) -> None:
    """Learners beyond the places join after a third of the time, and leave after two thirds."""
    places = [("r", trial.learners + visitor) for visitor in range(trial.visitors)]

    def come() -> None:
        for place in places:
            world.start_learner(place)

    def leave() -> None:
        for place in places:
            world.drain_learner(place)

    world.timeline.call_at(trial.steps / 3, come)
    world.timeline.call_at(trial.steps * 2 / 3, leave)


# ---------------------------------------------------------------- the cache


class Cache:
    """Results in a file, a line each (JSON), appended as they come, so that several programs can share it.

    A line that cannot be read is no result: a run that was killed may have left its last one unfinished.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[str, dict[str, Any]] = {}  # by the trial's digest
        self._read_bytes = 0  # of the file's beginning

    def find(self, trial: Trial) -> dict[str, Any] | None:
        self._read_on()
        line = self._lines.get(trial.digest)
        return None if line is None else line["result"]

    def lines(self) -> list[dict[str, Any]]:
        """What is known of each trial, in the file's order."""
        self._read_on()
        return list(self._lines.values())

    def put(self, trial: Trial, result: Mapping[str, Any]) -> None:
        said = {
            each.name: getattr(trial, each.name)
            for each in fields(trial)
            if each.name != "published" and not _is_default(trial, each)
        }
        line = {"digest": trial.digest, "trial": said, "code": trial.code, "result": dict(result)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(0, os.SEEK_END)
            if size := file.tell():
                file.seek(size - 1)
            torn = b"\n" if size and file.read(1) != b"\n" else b""
            file.write(torn + json.dumps(line, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read_on(self) -> None:
        """Read what was appended since the last time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._read_bytes += len(whole + end)
        for text in whole.splitlines():
            if (line := read_line(text)) is not None:
                self._lines[line["digest"]] = line


def read_line(text: bytes) -> dict[str, Any] | None:
    """A trial's line of the file; None: it is none."""
    try:
        line: Any = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.keys() >= {"digest", "trial", "code", "result"} else None


def _is_default(trial: Trial, one: Field[Any]) -> bool:
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    return bool(getattr(trial, one.name) == default)


def run_trials(trials: Iterable[Trial], cache: Cache, jobs: int, end: float = math.inf, what: str = "") -> bool:
    """Run those trials whose results are not cached, ``jobs`` at once; whether all are there. None is begun after
    ``end`` (of ``time.monotonic``). A line on stderr for each tells the time left of these trials, which ``what``
    names."""
    if what:
        what += ": "
    wanted = {trial.digest: trial for trial in trials}
    missing = [trial for trial in wanted.values() if cache.find(trial) is None]
    began, done, count = time.monotonic(), 0.0, 0
    left = sum(trial.effort for trial in missing)
    if missing:
        print(f"{what}{len(missing)} trials of {len(wanted)} to run", file=sys.stderr, flush=True)

    def finish(trial: Trial, result: Mapping[str, Any]) -> None:
        nonlocal done, count
        cache.put(trial, result)
        done, count = done + trial.effort, count + 1
        seconds = (time.monotonic() - began) * (left - done) / done
        words = f"{what}{count} of {len(missing)}, {seconds / 60:.0f} minutes left: {describe(trial)}"
        print(f"{words}: {result['loss']:.4f} nats, {result['seconds']:.0f} s", file=sys.stderr, flush=True)

    def in_time() -> bool:
        return time.monotonic() < end

    if jobs <= 1 or len(missing) <= 1:
        for trial in missing:
            if not in_time():
                return False
            finish(trial, run_trial(trial))
        return True
    queue = list(missing)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running: dict[Future[dict[str, Any]], Trial] = {}
        while queue or running:
            while queue and len(running) < jobs and in_time():
                trial = queue.pop(0)
                running[pool.submit(run_trial, trial)] = trial
            if not running:
                return False
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                finish(running.pop(future), future.result())
    return True


def describe(trial: Trial) -> str:
    """A trial in a few words."""
    who = f"M={trial.learners}" if trial.learners else "DDP" if trial.ddp else "data-parallel"
    extra = {key: value for key, value in asdict(trial).items() if key in ("sync", "outer") and value}
    rest = f" {json.dumps(extra)}" if extra else ""
    return f"{trial.kind}-{trial.size}, {trial.merges} merges, seed {trial.seed}, {who}{rest}"


RESULTS = Path(__file__).resolve().parent.parent / "results" / "trials.jsonl"  # in the repository


def common_losses(trials: Sequence[Trial], others: Sequence[Trial], cache: Cache) -> tuple[list[float], list[float]]:
    """The losses of those trials and of those of ``others`` in the same places of which both are there."""
    pairs = [(cache.find(one), cache.find(other)) for one, other in zip(trials, others, strict=True)]
    both = [(one["loss"], other["loss"]) for one, other in pairs if one is not None and other is not None]
    return [one for one, _ in both], [other for _, other in both]


def choice_losses(trials: Sequence[Trial], cache: Cache) -> list[float] | None:
    """The losses by which a rate is chosen, of these trials in their order; None: one is missing. The code before had
    no sequences of their own for it."""
    found = [cache.find(trial) for trial in trials]
    if any(one is None for one in found):
        return None
    return [one.get("choice_loss", one["loss"]) for one in found if one is not None]
