"""A learner that is interrupted inside the library: what it counted is never told of parameters that it is not true
of."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire.records import Announcement, Payload, Pull, Seat
from diloco_worker import Learner
from diloco_worker.fragments import ModelFragments, Vector, build_layout
from diloco_worker.net.inbox import Downloaded, Inbox, PhaseChanged
from diloco_worker.settings import WorkerError
from diloco_worker.sync.boundary_guard import BoundaryGuard
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint
from diloco_worker.sync.step_metrics import StepMetrics
from diloco_worker.sync.synchronizer import Synchronizer
from example_counts import share_of

FRAGMENTS = 2


class Failing(ModelFragments):
    """Fragments of which the n-th copy or move raises ``error``."""

    fails_at, error = 0, BaseException()

    def _count(self) -> None:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise self.error

    def snapshot(self, fragment: int) -> Vector:
        self._count()
        return super().snapshot(fragment)

    def move(self, *arguments: Any, **named: Any) -> None:
        self._count()
        super().move(*arguments, **named)


class Lone:
    """A synchronizer whose syncer merges each push alone, halfway: the base moves by half of what was pushed."""

    def __init__(self, job: DiLoCoJob) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        layout = build_layout(self.model, FRAGMENTS)
        assert len(layout) == FRAGMENTS
        self.fragments = Failing(self.model, layout)
        self.inbox = Inbox()
        self.versions = [(0, self.fragments.snapshot(p).array) for p in range(FRAGMENTS)]
        self.pushes: list[Any] = []
        client: Any = Mock(connected=True, report_wanted=True, chunks_up=0, push=self.pushes.append)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.synchronizer = Synchronizer(
            job.spec,
            self.model,
            InnerOptimizers(self.model, optimizer),
            layout,
            client=client,
            inbox=self.inbox,
            fragments=self.fragments,
            checkpoint=SlotCheckpoint(None, "a", layout.digest, 60, limit=1),
            metrics=StepMetrics(),
            stopping=lambda: False,
        )
        self.inbox.put(PhaseChanged(JobPhase.TRAINING, ""))
        self.inbox.put(Seat(0, 1, continuing=False, slot_step=0, slot_tokens=0, leases=(), tenure=1))
        for fragment in range(FRAGMENTS):
            self.announce(fragment, 0)
        self.synchronizer.run_boundary()

    def announce(self, fragment: int, sequence: int) -> None:
        version, values = self.versions[fragment]
        size = 4 * len(values)
        payload, merged = Payload("float32", size, version), version if sequence else 0
        announcement = Announcement(fragment, 1, version, payload, merged_sequence=sequence, merged_version=merged)
        self.inbox.put(Downloaded(announcement, Vector.from_array(values.copy())))
        self.inbox.put(announcement)

    def train_step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        self.synchronizer.complete_step(8, 0.1)

    def pull(self, fragment: int) -> None:
        self.inbox.put(Pull(self.versions[fragment][0] + 1, fragment, 1, self.versions[fragment][0]))

    def merge_newest(self) -> None:
        """Merge the newest push if its base is the newest version."""
        push = self.pushes[-1]
        fragment = push.plan.fragment
        version, values = self.versions[fragment]
        if push.plan.base_version == version:
            merged = (values + push.theta.array) / 2
            self.versions[fragment] = (version + 1, merged.astype(np.float32))
            self.announce(fragment, push.plan.sequence)


def small_job() -> DiLoCoJob:
    return DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "a"},
            "spec": {
                "learners": {"command": ["true"]},
                "regions": [{"learners": 1}],
                "sync": {"fragments": FRAGMENTS, "every": 4, "overlap": 1, "staleness": {"maxSteps": 1000}},
            },
        }
    )


@pytest.mark.promise(
    "A learner that is interrupted inside the library, by whatever error, offers nothing more, and Ctrl-C waits until "
    "the parameters are whole: no work is merged twice"
)
@given(st.integers(1, 16), st.sampled_from([KeyboardInterrupt(), torch.OutOfMemoryError("no room"), ValueError("?")]))
@settings(max_examples=share_of(60))
def test_no_push_is_of_another_base_than_it_says(fails_at: int, error: BaseException) -> None:
    """Wherever it is interrupted: the loop goes on, as loops that handle the error do, and then offers everything."""
    one = Lone(small_job())
    bases = {(p, 0): values for p, (_, values) in enumerate(one.versions)}
    one.fragments.fails_at, one.fragments.error = fails_at, error
    for step in range(12):
        one.pull(step % FRAGMENTS)
        try:
            one.train_step()
        except (KeyboardInterrupt, torch.OutOfMemoryError, ValueError):
            break
        one.merge_newest()
        bases |= {(p, version): values for p, (version, values) in enumerate(one.versions)}
    interrupted = one.fragments.fails_at <= 0
    if interrupted:
        for call in (one.train_step, one.synchronizer.await_ready, lambda: one.synchronizer.offer_fragment(0)):
            with pytest.raises(WorkerError, match=f"interrupted inside the library .{type(error).__name__}"):
                call()
    else:
        for fragment in range(FRAGMENTS):
            one.synchronizer.offer_fragment(fragment)
    assert one.pushes or interrupted
    for push in one.pushes:
        np.testing.assert_array_equal(push.base.array, bases[push.plan.fragment, push.plan.base_version])


@pytest.mark.promise(
    "A learner that is interrupted inside the library, by whatever error, offers nothing more, and Ctrl-C waits until "
    "the parameters are whole: no work is merged twice"
)
def test_a_learner_that_was_interrupted_inside_offers_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    (tmp_path / "job.json").write_text(job_to_json(small_job()))
    environ = {"DILOCO_JOB_FILE": str(tmp_path / "job.json"), "DILOCO_SYNCER": "127.0.0.1:1"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = r"interrupted inside the library .OutOfMemoryError: no room.*offers nothing"
    with (
        pytest.raises(WorkerError, match=words),
        Learner.from_environment(model, optimizer, environ=environ) as learner,
        pytest.raises(torch.OutOfMemoryError),
        learner._synchronizer.guard,
    ):
        raise torch.OutOfMemoryError("no room")
    assert learner.exit_code == 1


@pytest.mark.promise(
    "A learner that is interrupted inside the library, by whatever error, offers nothing more, and Ctrl-C waits until "
    "the parameters are whole: no work is merged twice"
)
def test_ctrl_c_waits_until_the_boundary_is_over_and_a_second_one_does_not() -> None:
    guard, done = BoundaryGuard(), []
    before = signal.getsignal(signal.SIGINT)
    guard.hold_interrupts()
    try:
        with pytest.raises(KeyboardInterrupt), guard:
            with guard:
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        assert done == ["inner", "outer"]
        with guard:
            done.append("fit")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # outside of it at once
        guard.check_fit()
        with pytest.raises(KeyboardInterrupt), guard:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("never")
        assert done == ["inner", "outer", "fit"]
        with pytest.raises(WorkerError, match=r"interrupted inside the library .KeyboardInterrupt.:"), guard:
            pass
    finally:
        guard.release_interrupts()
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_and_a_handler_of_the_loops_own_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    guard = BoundaryGuard()
    thread = threading.Thread(target=guard.hold_interrupts)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    guard.release_interrupts()
    guard.hold_interrupts()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        guard.release_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
