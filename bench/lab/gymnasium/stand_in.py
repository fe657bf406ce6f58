"""A learner without a model or torch's steps: the worker's own connection and transfers, and steps that are slept.

It speaks the real protocol by the product's own code (``SyncerConnection``, ``Transfers``): whatever a link does to a
learner it does to this one. Many of them fit into one process: they share an event loop. A step changes every value by
``STEP_CHANGE``, and the books are those of a learner that keeps its steps above a broadcast.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.wire.records import Announcement, FragmentReport, Pull, PushPlan, Seat, StepReport
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net.connection import SyncerConnection
from diloco_worker.net.inbox import Downloaded, Inbox, InitialRequested, StateRequested
from diloco_worker.net.transfers import Push, Transfers, decline_state
from diloco_worker.settings import WorkerSettings

STEP_CHANGE = 0.001
TOKENS = 128  # of a step
START_SECONDS = 0.25  # between two looks at what has come, before the first step
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: links}
spec:
  training: {model: null, data: null, stop: {steps: 1000000}, evaluation: null}
  sync: {fragments: 24, every: 24}
  learners: {command: [python, none.py]}
  regions: [{name: local, learners: 2}]
"""


def light_job(*overrides: str) -> DiLoCoJob:
    """A job for stand-ins."""
    return parse_job(JOB, overrides)


def even_layout(job: DiLoCoJob, elements: int) -> Layout:
    """A model with so many elements in each fragment."""
    count = job.spec.sync.fragments
    tensors = [Tensor(f"t{p:03}", (elements // 256, 256), "float32", False) for p in range(count)]
    return Layout.build(tensors, count, job.spec.sync.every)


@dataclass
class _Fragment:
    """What a learner knows of one fragment: its base, and its own steps."""

    epoch: int = 0
    version: int = 0
    base: Vector | None = None
    merged: int = 0  # steps in the newest push that was merged
    confirmed: int = 0  # tokens
    sequence: int = 0
    pushed: dict[int, int] = field(default_factory=dict)  # steps in each push by its sequence


class StandIn:
    """One learner. ``address``: host:port of the syncer, or of a relay before it. ``first_merge``: the loop's time at
    which a push of its own was first merged."""

    def __init__(
        self,
        folder: Path,
        address: str,
        layout: Layout,
        pace: float,
        executor: ThreadPoolExecutor,
        *,
        ordinal: int = 0,
        to_vector: Callable[[Floats], Vector] = Vector.from_array,
    ) -> None:
        environment = {"DILOCO_JOB_FILE": str(folder / "job.json"), "DILOCO_SYNCER": address}
        settings = WorkerSettings.from_environment(environment | {"DILOCO_ORDINAL": str(ordinal)})
        self.inbox = Inbox()
        self.connection = SyncerConnection(
            settings,
            layout,
            self.inbox,
            executor,
            to_vector=to_vector,
            eager=True,
            idle=False,
            status=ConnectionStatus(),
        )
        self._layout, self._pace = layout, pace
        self._seat: Seat | None = None
        self._steps = 0
        self._fragments = [_Fragment() for _ in range(len(layout))]
        self.ready_at: float | None = None
        self.first_merge: float | None = None
        self.newest_merge: float | None = None

    async def run(self) -> None:
        """Train until cancelled: then it is gone without a word, as after a kill."""
        serving = asyncio.create_task(self.connection.serve(0))
        try:
            while not serving.done():
                await asyncio.sleep(self._pace if self.is_ready else min(self._pace, START_SECONDS))
                for message in self.inbox.take_all():
                    self._read(message)
                self._step()
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self.connection.cancel_tasks()

    def _read(self, message: object) -> None:
        if isinstance(message, Seat):
            if not message.continuing:
                self._steps = 0
                for one in self._fragments:
                    one.merged = one.confirmed = one.sequence = 0
                    one.pushed.clear()
            self._seat = message
        elif isinstance(message, InitialRequested):
            start = [self._make_start(p) for p in range(len(self._layout))]
            self.connection.start_transfer(Transfers.upload_initial, start, b"")
        elif isinstance(message, Downloaded):
            self._adopt(message)
        elif isinstance(message, Pull):
            self._answer(message)
        elif isinstance(message, StateRequested):
            self.connection.outbox.put(f"no-state-{message.transfer}", decline_state(message.transfer))

    def _adopt(self, message: Downloaded) -> None:
        news: Announcement = message.announcement
        one = self._fragments[news.fragment]
        one.epoch, one.version, one.base = news.epoch, news.version, message.vector
        if news.merged_sequence in one.pushed:
            steps = one.pushed[news.merged_sequence]
            one.confirmed += (steps - one.merged) * TOKENS
            one.merged = steps
            one.pushed = {number: at for number, at in one.pushed.items() if number > news.merged_sequence}
            self.newest_merge = asyncio.get_running_loop().time()
            self.first_merge = self.first_merge or self.newest_merge

    @property
    def is_ready(self) -> bool:
        """Whether it has the whole model and a slot."""
        return self._seat is not None and all(one.base is not None for one in self._fragments)

    def _step(self) -> None:
        if not self.is_ready or not self.connection.status.connected:
            return
        self.ready_at = self.ready_at or asyncio.get_running_loop().time()
        self._steps += 1
        self.connection.put_report(self._report())

    def _report(self) -> StepReport:
        assert self._seat is not None
        rows = tuple(
            FragmentReport(
                one.epoch,
                one.version,
                self._steps - one.merged,
                (self._steps - one.merged) * TOKENS,
                confirmed_tokens=one.confirmed,
            )
            for one in self._fragments
        )
        return StepReport(
            self._seat.slot_step + self._steps,
            self._steps,
            self._steps * TOKENS,
            rows,
            compute_seconds=self._pace * self._steps,
            loss=2.0,
            step_seconds=self._pace,
            tenure=self._seat.tenure,
        )

    def _answer(self, pull: Pull) -> None:
        one = self._fragments[pull.fragment]
        steps = self._steps - one.merged
        if (
            self._seat is None
            or one.base is None
            or (one.epoch, one.version) != (pull.epoch, pull.version)
            or not steps
        ):
            return  # it is asked again
        one.sequence += 1
        one.pushed[one.sequence] = self._steps
        plan = PushPlan(
            pull.fragment,
            one.sequence,
            pull.round,
            one.epoch,
            base_version=one.version,
            oldest_version=one.version,
            first_step=self._seat.slot_step + one.merged + 1,
            last_step=self._seat.slot_step + self._steps,
            steps=steps,
            tokens=steps * TOKENS,
            compute_seconds=self._pace * steps,
        )
        self.connection.push(Push(plan, *self._make_work(plan, one.base), self._report()))

    def _make_start(self, fragment: int) -> Vector:
        """The fragment in version 0."""
        return Vector.from_array(np.zeros(self._layout.elements(fragment), np.float32))

    def _make_work(self, plan: PushPlan, base: Vector) -> tuple[Vector, Vector]:
        """The fragment's base, and where this learner's steps have led it."""
        return base, Vector.from_array(base.array - np.float32(STEP_CHANGE * plan.steps))


async def run_until_told(folder: Path, address: str, elements: int, pace: float, ordinal: int) -> None:
    """One stand-in as a program of its own. Each merge of its pushes is a line of its output."""
    job = parse_job((folder / "job.json").read_text(encoding="utf-8"))
    one = StandIn(folder, address, even_layout(job, elements), pace, executor=ThreadPoolExecutor(1), ordinal=ordinal)
    told, running = None, asyncio.create_task(one.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    while not running.done():
        await asyncio.wait({running}, timeout=0.1)
        if one.newest_merge != told:
            told = one.newest_merge
            print(json.dumps({"merged": told}), flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main(words: Sequence[str]) -> int:
    """0. ``words``: folder, address, elements, pace, ordinal."""
    folder, address, elements, pace, ordinal = words
    asyncio.run(run_until_told(Path(folder), address, int(elements), pace=float(pace), ordinal=int(ordinal)))
    return 0


def write_job(job: DiLoCoJob, folder: Path) -> None:
    """As learners find it."""
    (folder / "job.json").write_text(job_to_json(job), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
