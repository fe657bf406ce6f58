"""shards/coordinator.py: whose words count, what a shard that comes and goes is told, and what becomes of its faults.

The coordinator and the model are the product's. A test says what a shard says, and has what it is told.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.documents import ShardRow
from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import SHARD_FAILING, EventKind, PushRefusal, SyncerExit
from diloco_protocol.wire.records import PushHeader, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.runtime.driver import RESTART
from diloco_syncer.runtime.event_log import EventLog
from diloco_syncer.runtime.global_model import GlobalModel, first_records
from diloco_syncer.runtime.merger import Merged
from diloco_syncer.shards import messages as ms
from diloco_syncer.shards.coordinator import STEADY_SECONDS, Coordinator, ShardState
from diloco_syncer.shards.supervisor import LONGEST_PAUSE, pause_after
from diloco_syncer.store.checkpoint import offer_name

LAYOUT = Layout.build([Tensor("w", (64, 8), "float32", False)], fragments=2)
JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  training: {model: null, data: null, stop: {steps: 10}, evaluation: null}
  learners: {command: [python, x.py]}
  regions: [{name: local, learners: 3}]
"""
GONE = "its process has ended"


class Stream:
    """What is said to one process of a shard."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: ms.ToShard) -> None:
        self.sent.append(message)

    @property
    def later(self) -> list[Any]:
        """What came after ``Begin``."""
        assert isinstance(self.sent[0], ms.Begin)
        return self.sent[1:]


class Job:
    """Two shards of a job whose fragments are at version 1: shard n has fragment n."""

    def __init__(self) -> None:
        self.told: list[ev.Event] = []
        self.events: list[tuple[EventKind, str]] = []
        self.stopped: list[tuple[int, str]] = []
        self.taken: list[Merged] = []
        self.model = GlobalModel(parse_job(JOB), threads=1)
        self.shards = [ShardState(0), ShardState(1)]
        self.streams: list[Stream] = []
        numbers = iter(range(1, 100))
        core: Any = SimpleNamespace(epoch=1, is_recovering=False, record_event=lambda *what: self.events.append(what))
        merger: Any = SimpleNamespace(next_number=lambda: next(numbers), take_version=self._take)
        others: Any = SimpleNamespace()
        nothing: Any = lambda *_: None  # noqa: E731
        self.coordinator = Coordinator(
            core,
            self.model,
            merger,
            others,
            check_push=nothing,
            emit=self.told.append,
            run_task=nothing,
            stop=lambda code, why: self.stopped.append((code, why)),
            on_change=nothing,
            shards=self.shards,
        )
        self.coordinator._dealt = (0, 1)  # as ``begin`` deals them
        for shard in self.shards:
            shard.fragments = (shard.index,)
            self.coordinator._wanted[shard.index] = 0
            self.streams.append(Stream())

    async def _take(self, merged: Merged) -> None:
        self.taken.append(merged)

    async def begin(self) -> Job:
        """Both serve."""
        self.model.begin(LAYOUT, first_records("j", 1, {p: np.zeros(LAYOUT.elements(p), np.float32) for p in (0, 1)}))
        for index in (0, 1):
            self.connect(index)
            await self.say(index, ms.Begun((self.row(index),)))
            self.streams[index].sent[1:] = []
            self.shards[index].returns = 0
        self.told.clear()
        return self

    def row(self, fragment: int, version: int = 0) -> ms.VersionRow:
        record, broadcast = self.model.newest[fragment], self.model.broadcasts[fragment]
        body = record.body() | {"version": version}
        return ms.VersionRow(body, 1.0, broadcast.full_payload, None, squares=(1.0,))

    def connect(self, index: int) -> Stream:
        stream = self.streams[index] = Stream()
        self.coordinator.connect_shard(index, stream)
        return stream

    def lose(self, index: int) -> None:
        self.coordinator.lose_shard(index, self.streams[index], GONE)

    async def say(self, index: int, message: Any) -> None:
        await self.coordinator.take_message(index, self.streams[index], message)

    async def come_back(self, index: int, *offers: str) -> Stream:
        """The shard is lost and back, and there are these offers in the store."""
        self.lose(index)
        stream = self.connect(index)
        await self.say(index, ms.Begun((self.row(index),), offers))
        return stream

    async def offer(self, handle: int, sequence: int) -> PushHeader:
        """An offer for fragment 0 is here, and the core accepts it."""
        push = header(sequence)
        await self.say(0, ms.PushHere(push, handle, 1.0, (1.0,), bytes=64))
        self.coordinator.answer(ev.AnswerPush(handle, None, "", offer=True))
        return push


def header(sequence: int, round: int = 0) -> PushHeader:
    return PushHeader(
        0,
        sequence,
        round,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=1,
        steps=1,
        tokens=10,
        compute_seconds=0.1,
        encoding="float32",
        layout_digest="",
        report=StepReport(1, 1, 10, ()),
        slot=0,
        incarnation=1,
    )


MERGE = ev.Merge(0, 1, 1, (), quorum_seconds=0.0, waited_seconds=0.0, job_tokens=0)


# ------------------------------------------------------------------ coming and going


async def test_a_process_that_takes_anothers_place_is_not_lost_with_it() -> None:
    job = await Job().begin()
    first = job.streams[0]
    second = job.connect(0)
    assert job.told == [ev.ShardLost(0, "another process has taken its place")], "the core hears of the first one's end"
    await job.coordinator.take_message(0, first, ms.StoreProblem("of the first"))
    job.coordinator.lose_shard(0, first, "its end is heard")
    assert job.shards[0].stream is second and job.shards[0].problem == "" and len(job.told) == 1
    assert [type(message) for message in second.sent] == [ms.Begin]


async def test_a_merge_that_was_decided_before_its_shard_came_back_is_void() -> None:
    """The round of its pushes began anew. One of the other shard is not, nor what is decided since."""
    job = await Job().begin()
    before = job.coordinator.count_returns()
    stream = await job.come_back(0)
    job.coordinator.merge(MERGE, before)
    assert stream.later == [] and job.shards[0].merging == {}
    job.coordinator.merge(replace(MERGE, fragment=1), before)
    (asked,) = job.streams[1].later
    assert asked.action.fragment == 1
    job.coordinator.merge(MERGE, job.coordinator.count_returns())
    (asked,) = stream.later
    assert asked.action == MERGE


async def test_nothing_is_said_to_a_shard_before_it_has_begun() -> None:
    """Its handles are of its life before. The merge that it was asked for is taken if its record is durable."""
    job = await Job().begin()
    await job.offer(7, 1)
    await job.say(0, ms.OfferSpooled(7))
    job.lose(0)
    stream = job.connect(0)
    job.coordinator.merge(MERGE, job.coordinator.count_returns())
    job.coordinator.answer(ev.AnswerPush(7, None, "", offer=True))
    assert stream.later == []
    await job.say(0, ms.Begun((job.row(0, 1),)))
    assert [merged.action for merged in job.taken] == [MERGE]
    assert [message.handle for message in stream.later] == [7]
    job.coordinator.release(ev.ReleasePush(7))
    assert stream.later[1:] == [ev.ReleasePush(7)]


async def test_of_the_pushes_that_a_shard_held_durable_offers_alone_are_still_there() -> None:
    """One that the shard had no time to call durable is, if the store has it. Of all others nothing is said again."""
    job = await Job().begin()
    await job.offer(1, 1)
    await job.say(0, ms.OfferSpooled(1))
    untold = await job.offer(2, 2)
    await job.offer(3, 3)  # is being written
    await job.say(0, ms.PushHere(header(4, round=9), 4, 1.0, (1.0,), bytes=64))
    refused = header(5)
    await job.say(0, ms.PushHere(refused, 5, 1.0, (1.0,), bytes=64))
    job.coordinator.answer(ev.AnswerPush(5, PushRefusal.REPEATED, ""))
    released = await job.offer(6, 6)
    job.coordinator.release(ev.ReleasePush(6))
    assert set(job.coordinator._received) == {2, 3} and set(job.coordinator._shard_of) == {1, 2, 3, 4}
    stream = await job.come_back(0, *map(offer_name, (untold, refused, released)))
    assert sorted(message.handle for message in stream.later) == [1, 2]
    assert all(isinstance(message, ms.RestoreOffer) for message in stream.later)
    assert job.told[-1] == ev.ShardReady(0, {1: 1, 2: 2})
    assert not job.coordinator._received, "the end waits for none of them"
    count = len(stream.sent)
    for handle in (3, 4, 5, 6):
        job.coordinator.release(ev.ReleasePush(handle))
        job.coordinator.answer(ev.AnswerPush(handle, None, ""))
    assert len(stream.sent) == count
    # What it has now it has also after the next loss, and what is released by then not.
    job.coordinator.release(ev.ReleasePush(1))
    await job.come_back(0)
    assert job.told[-1] == ev.ShardReady(0, {2: 2}) and set(job.coordinator._offers) == {2}


async def test_the_loss_of_one_shard_takes_nothing_from_another() -> None:
    job = await Job().begin()
    await job.offer(1, 1)
    await job.say(0, ms.OfferSpooled(1))
    await job.come_back(1)
    assert job.told[-1] == ev.ShardReady(1, {})
    job.coordinator.release(ev.ReleasePush(1))
    assert job.streams[0].later[-1] == ev.ReleasePush(1)


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("code", SyncerExit)
async def test_what_a_restart_cannot_mend_ends_the_syncer_with_its_status_and_words(code: SyncerExit) -> None:
    job = await Job().begin()
    await job.say(0, ms.ShardEnded(code, "outer optimizer nesterov: momentum"))
    for_good = code in (SyncerExit.CONFIGURATION, SyncerExit.SUPERSEDED)
    assert job.stopped == ([(code, "outer optimizer nesterov: momentum")] if for_good else [])
    job.lose(0)
    assert job.told == [ev.ShardLost(0, "outer optimizer nesterov: momentum")], "the loss says why, too"


async def test_a_shard_that_cannot_begin_has_the_syncer_begin_again() -> None:
    job = await Job().begin()
    job.lose(0)
    job.connect(0)
    await job.say(0, ms.Begun(failure="record 4 is damaged"))
    assert job.stopped == [(RESTART, "shard 0 cannot go on: record 4 is damaged")]


async def test_a_shard_that_fails_again_and_again_is_told_of_by_name() -> None:
    """Once in a row. One that has run for long, or serves without a failure, is not."""
    job = await Job().begin()
    assert [row.failures for row in job.coordinator.rows()] == [0, 0]
    for count in range(1, SHARD_FAILING + 3):
        job.lose(0)
        assert job.coordinator.count_failure(0, "its process ended with exit code 1", 1) == count
        if count == 2:
            assert job.events == []
        job.connect(0)
    words = "shard 0 of the syncer has failed 3 times in a row: its process ended with exit code 1; it is tried again"
    assert job.events == [(EventKind.SHARD_LOST, words)] and not job.stopped
    assert row_of(job, 0) == (False, SHARD_FAILING + 2, "its process ended with exit code 1")
    await job.say(0, ms.Begun((job.row(0),)))
    assert row_of(job, 0) == (True, SHARD_FAILING + 2, "its process ended with exit code 1"), "it may fail again"
    figures = ms.ShardFigures(1.0, 1, {}, {})
    await job.say(0, figures)
    assert row_of(job, 0)[1] == SHARD_FAILING + 2, "it has not run for long"
    job.shards[0].since -= STEADY_SECONDS
    await job.say(0, figures)
    assert row_of(job, 0) == (True, 0, "") and row_of(job, 1) == (True, 0, "")


async def test_an_end_that_a_shard_has_told_of_has_its_status_and_one_it_has_not_told_of_has_none() -> None:
    job = await Job().begin()
    await job.say(0, ms.ShardEnded(SyncerExit.STORE, "the store cannot be used"))
    assert job.shards[0].code == SyncerExit.STORE
    job.lose(0)
    job.connect(0)
    assert job.shards[0].code == SyncerExit.FAILED


async def test_a_failure_says_what_its_own_process_said_of_its_end() -> None:
    job = await Job().begin()
    await job.say(0, ms.ShardEnded(SyncerExit.FAILED, "a fault of this program: ZeroDivisionError()"))
    job.lose(0)
    job.coordinator.count_failure(0, "its process ended with exit code 1", 1)
    assert row_of(job, 0)[2] == "a fault of this program: ZeroDivisionError()"
    job.coordinator.count_failure(0, "signal 9 ended its process", -9)
    assert row_of(job, 0)[2] == "signal 9 ended its process", "what the one before said is not said of the next"


def row_of(job: Job, shard: int) -> tuple[bool, int, str]:
    row: ShardRow = job.coordinator.rows()[shard]
    return row.serving, row.failures, row.message


@pytest.mark.parametrize(("code", "status"), [(4, SyncerExit.STORE), (1, SyncerExit.FAILED), (-9, SyncerExit.FAILED)])
def test_while_a_job_begins_a_shard_that_fails_again_and_again_ends_the_syncer(code: int, status: SyncerExit) -> None:
    """Nobody could be told of it, for there is no page yet."""
    job = Job()
    for _ in range(SHARD_FAILING - 1):
        job.coordinator.count_failure(1, "words", code)
    assert not job.stopped
    job.coordinator.count_failure(1, "words", code)
    assert job.stopped == [(status, "shard 1 of the syncer has failed 3 times in a row: words")] and not job.events


@pytest.mark.parametrize(
    ("hello", "objection"),
    [
        (ms.Hello(0, 2), ""),
        (ms.Hello(1, 2), ""),
        (ms.Hello(2, 2), "shard 2 is one of 2, and the syncer has 2"),
        (ms.Hello(-1, 2), "shard -1 is one of 2, and the syncer has 2"),
        (ms.Hello(0, 3), "shard 0 is one of 3, and the syncer has 2"),
        (ms.Hello(0, 2, "0.1"), f"shard 0 is of release 0.1, and the syncer of {ms.RELEASE}"),
    ],
)
def test_a_shard_of_another_number_or_release_is_refused(hello: ms.Hello, objection: str) -> None:
    assert hello.find_objection(2) == objection


def test_the_pauses_between_tries_grow_to_a_bound() -> None:
    pauses = [[pause_after(failures) for _ in range(100)] for failures in (1, 2, 5, 6, 5000)]
    assert [max(some) <= most for some, most in zip(pauses, (0.4, 0.8, 6.4, 10.0, 10.0), strict=True)] == [True] * 5
    assert [min(some) >= least for some, least in zip(pauses, (0.2, 0.4, 3.2, 5.0, 5.0), strict=True)] == [True] * 5
    assert all(len(set(some)) > 50 for some in pauses) and LONGEST_PAUSE == 10.0


@pytest.mark.parametrize("kind", [EventKind.SHARD_LOST, EventKind.SYNCER_RESTART])
def test_what_shards_suffer_is_logged_as_a_warning(kind: EventKind, caplog: pytest.LogCaptureFixture) -> None:
    EventLog().record(ev.RecordEvent(kind, -1, 0, "shard 1 is lost"))
    assert [(row.levelname, row.getMessage()) for row in caplog.records] == [("WARNING", f"{kind}: shard 1 is lost")]
