"""Host memory in bytes per parameter: of the library in a learner, beside what the bare loop has, and of a syncer's
model.

Learner processes train a model of a given size through the library, against the real syncer program. What a process
holds is the kernel's count of its anonymous memory (RssAnon), read every few milliseconds; mapped files are not in it,
because the kernel may drop them. Parameters, gradients and AdamW's moments are the bare loop's: they are measured in
each process before it joins, and subtracted.

*Steady* is the median once every fragment was merged twice. *In passing* is the greatest value above it while a second
learner joins and takes the first one's optimizer state (donor and newcomer), and while a learner writes its own
checkpoint. The bounds are the project's: 8 steady, 4 more with error feedback, 4 more in passing.

*Syncer* is what its model (parameters, outer optimizer's state, what can be downloaded) takes in a process of its own,
between two merges, by encoding down and outer optimizer. The bound is 16 bytes, and 18.1 where updates are broadcast
and the optimizer has two moments.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np

import common
import programs
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.bandwidth import links
from diloco_protocol.spec.load import load_job
from diloco_protocol.wire.records import PushHeader, StepReport
from diloco_syncer.__main__ import tune_allocator
from diloco_syncer.core import events as ev
from diloco_syncer.numerics.merge import piece_squares
from diloco_syncer.numerics.outer import REGISTRY
from diloco_syncer.runtime.global_model import GlobalModel, first_records
from diloco_syncer.store.records import Floats

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny-gpt.yaml"
FRAGMENTS = 24
OVERRIDES = (
    "training.stop={steps: 1000000}",
    "training.evaluation=null",
    "regions.0.learners=2",
    f"sync.fragments={FRAGMENTS}",
    f"sync.every={FRAGMENTS}",
    "sync.heartbeat.timeoutSeconds=600",
    "syncer.checkpoint.everySeconds=2",
)
STEADY, FEEDBACK, PASSING = 8.0, 4.0, 4.0  # bytes per parameter
SYNCER, TWO_MOMENTS = 16.0, 18.1
QUICK = (("bfloat16", "nesterov"), ("delta-int4", "adamw"))
SAMPLE_SECONDS = 0.005
STEADY_SECONDS = 3.0
WAIT_SECONDS = 900.0


def main() -> None:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--millions", type=int, nargs="*", default=[50, 200], help="parameters, in millions")
    args = parser.parse_args()
    rows = [
        # Arrays below 4 MiB share a heap, whose holes would be counted.
        measure_syncer((28 if args.quick else 50) * 1_000_000, down, optimizer)
        for down, optimizer in (QUICK if args.quick else itertools.product(links.DOWN, REGISTRY))
    ]
    for millions in [4] if args.quick else args.millions:
        rows += measure(millions * 1_000_000, False) + measure(millions * 1_000_000, True)
    common.show(rows, args.json, "bytes per parameter above the bare loop's")


def measure_syncer(parameters: int, down: str, optimizer: str) -> common.Row:
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe(False)
    process = context.Process(target=hold_model, args=(end, parameters, down, optimizer), daemon=True)
    process.start()
    end.close()  # or the end of a process that failed would not be seen
    held = pipe.recv() / parameters
    process.join(10)
    bound = TWO_MOMENTS if down.startswith("delta") and len(REGISTRY[optimizer].vectors) > 1 else SYNCER
    return common.Row(f"syncer, {down}, {optimizer}", held, "B", "the bound", baseline=bound, ratio=held / bound)


def hold_model(pipe: Connection, parameters: int, down: str, optimizer: str) -> None:
    """Send what a model takes after three merges of each fragment, in bytes of anonymous memory."""
    tune_allocator()
    overrides = (f"sync.compression.down={down}", f"sync.outer={{optimizer: {optimizer}, lr: 0.1}}")
    job = load_job(EXAMPLE, overrides)
    rows = parameters // FRAGMENTS // 1000
    layout = Layout.build([Tensor(f"w{i}", (rows, 1000), "float32", False) for i in range(FRAGMENTS)], FRAGMENTS)
    for made in (False, True):  # the first time of everything, and small: kernels, threads
        begun = anonymous_bytes(os.getpid())
        model = GlobalModel(job, 1)
        sizes = [layout.elements(p) for p in range(FRAGMENTS)] if made else [layout.elements(0)]
        use = layout if made else Layout.build([Tensor("w0", (rows, 1000), "float32", False)], 1)
        model.begin(use, first_records("bench", 1, {p: np.ones(size, np.float32) for p, size in enumerate(sizes)}))
        for version, (fragment, size) in itertools.product((1, 2, 3), enumerate(sizes)):
            delta = np.full(size, 0.01, np.float32)
            merge_once(model, fragment, version, delta)
        del delta
        if made:
            pipe.send(anonymous_bytes(os.getpid()) - begun)
        del model


def merge_once(model: GlobalModel, fragment: int, version: int, delta: Floats) -> None:
    assert model.layout is not None
    counts = StepReport(1, 1, 10, ())
    header = PushHeader(
        fragment,
        version,
        1,
        1,
        base_version=version - 1,
        oldest_version=version - 1,
        first_step=1,
        last_step=1,
        steps=1,
        tokens=10,
        compute_seconds=0.1,
        encoding="float32",
        layout_digest="",
        report=counts,
        slot=0,
        incarnation=1,
    )
    action = ev.Merge(
        fragment, version, 1, (ev.Responder(header, 0, 1.0, 0),), quorum_seconds=0.0, waited_seconds=0.0, job_tokens=0
    )
    squares = piece_squares(model.layout.fragments[fragment], delta)
    model.publish(*model.merge(action, [delta], [squares], 1, version), time.monotonic())


def measure(parameters: int, feedback: bool) -> list[common.Row]:
    """The figures of one size; with error feedback those of the own checkpoint, else donor's and newcomer's."""
    overrides = (*OVERRIDES, f"sync.compression={{up: int4, down: bfloat16, errorFeedback: {str(feedback).lower()}}}")
    size, found = f"{parameters // 1_000_000} M", []

    def row(what: str, value: float, bound: float) -> None:
        share = max(0.0, value) / parameters
        found.append(common.Row(f"{size}, {what}", share, "B", "the bound", baseline=bound, ratio=share / bound))

    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-", dir=Path.cwd()) as text,
        programs.Syncer(Path(text), load_job(EXAMPLE, overrides)) as syncer,
        Trainer(0, parameters, syncer, Path(text) / "work" if feedback else None) as first,
    ):
        until(lambda: min(syncer.status()["versions"], default=0) >= 2, "merges", first)
        steady = first.steady()
        if feedback:
            row("steady, with error feedback", steady - first.bare, STEADY + FEEDBACK)
            path = Path(text) / "work" / "state" / "local-0.safetensors"
            until(path.exists, "its own checkpoint", first)
            written = path.stat().st_mtime_ns
            first.restart_peak()
            until(lambda: path.stat().st_mtime_ns > written, "another checkpoint", first)
            row("own checkpoint, in passing", first.peak - steady, PASSING)
            return found
        row("steady", steady - first.bare, STEADY)
        first.restart_peak()
        with Trainer(1, parameters, syncer, None) as second:
            until(lambda: any(s["slot"] == 1 and s["merged_pushes"] for s in syncer.status()["slots"]), "it", second)
            row("donor of its state, in passing", first.peak - steady, PASSING)
            passed = second.peak
            row("newcomer with a peer's state, in passing", passed - second.steady(), PASSING)
    return found


class Trainer:
    """A learner process. ``bare``: its anonymous memory before it joined; ``peak``: the greatest since."""

    def __init__(self, ordinal: int, parameters: int, syncer: programs.Syncer, workdir: Path | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        environment = {
            "DILOCO_JOB_FILE": str(syncer.job_file),
            "DILOCO_SYNCER": syncer.address,
            "DILOCO_REGION": "local",
            "DILOCO_ORDINAL": str(ordinal),
            "OMP_NUM_THREADS": "1",
            **({"DILOCO_WORKDIR": str(workdir)} if workdir is not None else {}),
        }
        self.process: Any = context.Process(target=train, args=(end, environment, parameters), daemon=True)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.bare = self.now = self.peak = 0

    def __enter__(self) -> Self:
        self.process.start()
        until(lambda: self._pipe.poll(0), "its first steps", self)
        self._pipe.recv()
        self.bare = self.peak = anonymous_bytes(self.process.pid)
        self._thread.start()
        self._pipe.send("join")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.process.kill()
        self.process.join(10)

    def _sample(self) -> None:
        while not self._stopping.wait(SAMPLE_SECONDS) and self.process.is_alive():
            self.now = anonymous_bytes(self.process.pid) or self.now
            self.peak = max(self.peak, self.now)

    def restart_peak(self) -> None:
        self.peak = self.now

    def steady(self) -> float:
        """The median over some seconds."""
        seen = []
        end = time.monotonic() + STEADY_SECONDS
        while time.monotonic() < end:
            time.sleep(0.02)
            seen.append(self.now)
        return statistics.median(seen)


def until(condition: Callable[[], Any], what: str, trainer: Trainer) -> None:
    """Wait for what a trainer shall come to."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > end or not trainer.process.is_alive():
            raise SystemExit(f"bench/memory: {what} did not come; the learner's words are above")
        time.sleep(0.05)


def anonymous_bytes(pid: int) -> int:
    """A process's anonymous memory; 0: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 if "RssAnon:" in status else 0


def train(pipe: Connection, environment: dict[str, str], parameters: int) -> None:
    """A learner: some bare steps, then steps through the library until it is killed."""
    os.environ.update(environment)
    import torch

    from diloco_worker import Learner

    torch.set_num_threads(1)
    rows = parameters // FRAGMENTS // 1000
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(rows, 1000)) for _ in range(FRAGMENTS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    for _ in range(2):
        optimizer.step()
    pipe.send("trains")
    pipe.recv()
    optimizer.state.clear()
    with Learner.from_environment(model, optimizer) as learner:
        for _ in learner.steps():
            optimizer.step()
            learner.after_step(tokens=1000, loss=1.0)


if __name__ == "__main__":
    main()
