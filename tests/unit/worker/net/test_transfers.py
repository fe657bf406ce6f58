"""What a worker carries in bulk, where the network fails: what is tried again, what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from diloco_protocol.wire import bulk, sync_pb2
from diloco_worker.core.adoption import PushPlan
from diloco_worker.fragments import Vector, build_layout
from diloco_worker.net import deliveries, inbox
from diloco_worker.net.deliveries import Deliveries
from diloco_worker.net.fragment_cache import CachedVersion
from diloco_worker.net.session import Outbox
from diloco_worker.net.transfers import ErrorFeedback, Identity, Push, encode_push
from diloco_worker.settings import ConfigurationError


@pytest.fixture
def made() -> tuple[Deliveries, inbox.Inbox]:
    """Which hears of versions, and downloads what it is asked to."""
    box = inbox.Inbox()
    layout = build_layout(torch.nn.Linear(4, 2), 1)
    spawned: list[Any] = []
    return Deliveries(
        layout,
        box,
        Outbox(),
        ErrorFeedback(1, False),
        Identity("a", "b" * 32, 0, 0),
        "float32",
        lambda *work: spawned.append(work),
        Vector.from_array,
        eager=False,
    ), box


class Broken:
    """Transfers of a connection that carries nothing."""

    def __init__(self) -> None:
        self.tries = 0

    async def push(self, *_: Any) -> sync_pb2.UploadReply:
        raise bulk.TransferError("the stream broke", retry=True)

    async def initial(self, *_: Any) -> None:
        self.tries += 1
        raise bulk.TransferError("a part was lost", retry=True)

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)


class Ends:
    """A session that notes why it was broken off."""

    reason = ""

    def break_off(self, reason: str) -> None:
        self.reason = reason


def a_push(sequence: int = 1) -> Push:
    plan = PushPlan(0, sequence, 1, 1, 0, 0, 1, 4, 4, 128, 0.1)
    zeros = np.zeros(10, np.float32)
    return Push(plan, Vector.from_array(zeros + 0.37), Vector.from_array(zeros), sync_pb2.Report())


def test_a_push_without_an_answer_has_an_open_fate(made: tuple[Deliveries, inbox.Inbox]) -> None:
    one, box = made
    one.begin(Broken(), Ends().break_off, False)  # type: ignore[arg-type]
    asyncio.run(one._send_push(a_push()))
    assert box.take_all() == [inbox.PushAnswered(0, 1, None, "", "no answer came")]


def test_version_0_is_tried_again_and_then_left_to_another(
    made: tuple[Deliveries, inbox.Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "_INITIAL_PAUSE", 0.001)
    one, box = made
    broken, ends = Broken(), Ends()
    one.begin(broken, ends.break_off, False)  # type: ignore[arg-type]
    start = [Vector.from_array(np.ones(10, np.float32))]
    asyncio.run(one.upload_initial(start, b""))
    assert broken.tries == 4
    assert ends.reason == "version 0 did not come through in 4 tries"
    assert box.take_all() == []


def test_version_0_with_infinities_is_fatal_and_said(made: tuple[Deliveries, inbox.Inbox]) -> None:
    one, _ = made
    one.begin(Broken(), Ends().break_off, False)  # type: ignore[arg-type]
    start = [Vector.from_array(np.array([1, np.nan], np.float32))]
    with pytest.raises(ConfigurationError, match=r"not finite \(fragment 0\).*check how the model is built"):
        asyncio.run(one.upload_initial(start, b""))


def test_a_roll_back_that_was_overtaken_is_not_forgotten(made: tuple[Deliveries, inbox.Inbox]) -> None:
    one, box = made
    one.holdings.put(CachedVersion(sync_pb2.Announcement(), np.zeros(10, np.float32), b""))
    full = sync_pb2.Payload(encoding="bfloat16", bytes=20)
    for version, reset in ((4, False), (5, True), (6, False)):
        one.announced(sync_pb2.Announcement(epoch=2, version=version, reset=reset, full=full))
    (heard,) = box.take_all()  # of three announcements the newest
    assert isinstance(heard, inbox.Announced)
    assert (heard.news.version, heard.news.reset_at) == (6, (2, 5))


def test_a_push_without_a_session_has_an_open_fate(made: tuple[Deliveries, inbox.Inbox]) -> None:
    one, box = made
    one.push(a_push())
    assert box.take_all() == [inbox.PushAnswered(0, 1, None, "", "there is no connection")]
    # Queued in a session, and the session ends before it is sent.
    one.begin(Broken(), Ends().break_off, False)  # type: ignore[arg-type]
    one.push(a_push(2))
    assert box.take_all() == []
    one.close()
    one.push(a_push(3))
    one.end()
    assert box.take_all() == [
        inbox.PushAnswered(0, 3, None, "", "there is no connection"),
        inbox.PushAnswered(0, 2, None, "", "the connection broke"),
    ]


def test_channels_that_believe_one_certificate_are_doubted(made: tuple[Deliveries, inbox.Inbox]) -> None:
    one, _ = made
    for pinned in (False, True):
        ends = Ends()
        one.begin(Broken(), ends.break_off, pinned)  # type: ignore[arg-type]
        asyncio.run(one._send_push(a_push()))
        assert ends.reason == ("bulk transfers fail: the stream broke" if pinned else "")


# ------------------------------------------------------------------ error feedback


def test_feedback_keeps_nothing_of_a_push_that_was_settled_before_it_was_encoded() -> None:
    feedback = ErrorFeedback(1, True)
    for sequence in range(1, 100):
        feedback.expect_push(0, sequence)
        feedback.resolve_pushes(0, 0, (sequence,))
        encode_push(a_push(sequence), "int4", feedback)
    assert feedback.open_pushes == 0 and feedback.residual(0) is None


def test_a_new_tenure_forgets_open_pushes_and_keeps_what_was_merged() -> None:
    feedback = ErrorFeedback(1, True)
    for sequence in (1, 2):
        feedback.expect_push(0, sequence)
        encode_push(a_push(sequence), "int4", feedback)
    feedback.resolve_pushes(0, 1, ())
    residual = feedback.residual(0)
    assert residual is not None and feedback.open_pushes == 1
    feedback.forget_open_pushes()
    assert feedback.open_pushes == 0 and feedback.residual(0) is residual
