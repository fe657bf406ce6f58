"""What a worker carries in bulk, where the network fails: what is tried again, what is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from diloco_protocol.security.credentials import Credentials
from diloco_protocol.vocabulary import PushRefusal, TransferRefusal
from diloco_protocol.wire import bulk, sync_pb2
from diloco_protocol.wire.bulk_calls import bulk_connection
from diloco_protocol.wire.records import Announcement, Payload, PushPlan, StepReport
from diloco_worker.fragments import Vector, build_layout
from diloco_worker.net import bulk_channels, inbox, transfers
from diloco_worker.net.bulk_channels import BulkChannels, ByteCounts
from diloco_worker.net.error_feedback import ErrorFeedback
from diloco_worker.net.fragment_cache import CachedVersion, FragmentCache
from diloco_worker.net.routes import Routes
from diloco_worker.net.session import Outbox
from diloco_worker.net.transfers import Push, TransferContext, Transfers, encode_push
from diloco_worker.settings import ConfigurationError, DivergedError


class Broken(BulkChannels):
    """The connections of a session that carry nothing."""

    def __init__(self) -> None:
        nowhere = Routes(partial(bulk_connection, Credentials()), "127.0.0.1:1")
        super().__init__(nowhere, "a", "b" * 32, executor=ThreadPoolExecutor(1), counts=ByteCounts())
        self.tries = 0

    async def upload(self, payload: Any, **kind: Any) -> sync_pb2.UploadReply:
        self.tries += 1
        raise bulk.TransferError("the stream broke", retry=True)

    async def download(self, **what: Any) -> Any:
        raise bulk.TransferError("the stream broke", retry=True)


class Session:
    """A session in which nothing comes through; ``reason``: why it was ended."""

    def __init__(self, pinned: bool = False, to_vector: Callable[[Any], Vector] = Vector.from_array) -> None:
        self.reason = ""
        self.box = inbox.Inbox()
        self.channels = Broken()
        self.cache = FragmentCache(1)
        layout = build_layout(torch.nn.Linear(4, 2), 1)
        feedback = ErrorFeedback(1, False)
        self.outbox = Outbox()
        context = TransferContext(
            layout, self.box, self.outbox, self.cache, feedback=feedback, to_vector=to_vector, eager=False
        )
        self.one = Transfers(
            context, self.channels, "float32", lambda *work: None, end_session=self.end, pinned_server=pinned
        )

    def end(self, reason: str) -> None:
        self.reason = reason


def a_push(sequence: int = 1) -> Push:
    plan = PushPlan(
        0,
        sequence,
        1,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=4,
        steps=4,
        tokens=128,
        compute_seconds=0.1,
    )
    zeros = np.zeros(10, np.float32)
    return Push(plan, Vector.from_array(zeros + 0.37), Vector.from_array(zeros), StepReport())


def test_a_push_without_an_answer_has_an_open_fate() -> None:
    session = Session()
    asyncio.run(session.one._send_push(a_push()))
    assert session.box.take_all() == [inbox.PushAnswered(0, 1, None, "", message="no answer came")]


@pytest.mark.promise(
    "A learner whose parameters are not finite ends at once with its own exit code (5), and its "
    "replacement trains on; a job of one learner does not hang"
)
def test_a_push_that_is_not_finite_is_not_sent_and_says_that_training_diverged() -> None:
    for odd in (np.nan, np.inf):
        theta = np.zeros(10, np.float32)
        theta[7] = odd
        push = replace(a_push(), theta=Vector.from_array(theta))
        for feedback in (False, True):
            with pytest.raises(DivergedError, match=r"fragment 0 .* not finite at step 4.*lower"):
                encode_push(push, "int4", ErrorFeedback(1, feedback))


@pytest.mark.promise(
    "A new learner never harms its donor: a state that cannot be copied or serialised is declined, and "
    "the donor trains on"
)
def test_a_state_that_cannot_be_serialised_is_declined_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever serialising raises would otherwise end the learner that gives."""
    session = Session()

    def encode() -> bytes:
        raise MemoryError("no memory for the bytes")

    asyncio.run(session.one.send_state(7, encode, [(1, 3)], 2))
    ((_, _), (key, message)) = session.outbox.begin_sending()
    assert key == "no-state-7" and message.peer_state_unavailable.transfer == 7
    assert "cannot be serialised: no memory for the bytes" in caplog.text


def test_a_state_that_does_not_come_through_is_declined() -> None:
    """The syncer hears of this learner's other uploads, and would wait for the state while these go on."""
    session = Session()
    asyncio.run(session.one.send_state(7, lambda: b"state", [(1, 3)], 2))
    ((_, _), (key, message)) = session.outbox.begin_sending()
    assert key == "no-state-7" and message.peer_state_unavailable.transfer == 7


@pytest.mark.promise("A peer's optimizer state goes on where its sender's session broke, also again and again")
def test_a_state_whose_session_is_over_at_the_syncer_goes_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bulk connection may be made anew before this side hears that the session broke."""
    session, sent = Session(), list[tuple[bytes, bulk.SentParts]]()

    async def upload(payload: Any, kept: bulk.SentParts, peer_state: sync_pb2.PeerState) -> sync_pb2.UploadReply:
        sent.append((payload, kept))
        reason = TransferRefusal.NOT_JOINED if len(sent) == 1 else ""
        return sync_pb2.UploadReply(accepted=not reason, reason=reason)

    monkeypatch.setattr(session.channels, "upload", upload)
    asyncio.run(session.one.send_state(7, lambda: b"state", [(1, 3)], 2))
    asyncio.run(session.one.resume_state(7, 2))
    assert sent[0][0] == b"state" and sent[1][0] is sent[0][0] and sent[1][1] is sent[0][1]
    assert len(session.outbox.begin_sending()) == 1 and not session.one.context.states


def test_version_0_is_tried_again_and_then_left_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_INITIAL_PAUSE", 0.001)
    session = Session()
    start = [Vector.from_array(np.ones(10, np.float32))]
    asyncio.run(session.one.upload_initial(start, b""))
    assert session.channels.tries == 4
    assert session.reason == "version 0 did not come through in 4 tries"
    assert session.box.take_all() == []


def test_fragments_of_version_0_are_sent_with_the_digest_of_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it the syncer knows again what an upload that broke has left there."""
    session, sent, values = Session(), list[sync_pb2.Initial](), np.arange(10, dtype=np.float32)

    async def upload(payload: Any, initial: sync_pb2.Initial) -> sync_pb2.UploadReply:
        sent.append(initial)
        return sync_pb2.UploadReply(accepted=True)

    monkeypatch.setattr(session.channels, "upload", upload)
    asyncio.run(session.one.upload_initial([Vector.from_array(values)], b"frozen", "of names and values"))
    assert [one.digest for one in sent] == ["", bulk.checksum_text(values), "of names and values", ""]


def test_version_0_with_infinities_is_fatal_and_said() -> None:
    start = [Vector.from_array(np.array([1, np.nan], np.float32))]
    with pytest.raises(ConfigurationError, match=r"not finite \(fragment 0\).*check how the model is built"):
        asyncio.run(Session().one.upload_initial(start, b""))


@pytest.mark.promise("Copies for a GPU are handled by background threads, not by the training thread or the event loop")
def test_vectors_are_made_beside_the_event_loop() -> None:
    """Pinning a fragment's memory takes as long as copying it, and heartbeats would wait."""
    threads = []

    def to_vector(values: Any) -> Vector:
        threads.append(threading.current_thread())
        return Vector.from_array(values)

    session = Session(to_vector=to_vector)
    values = np.arange(10, dtype=np.float32)
    announcement = Announcement(0, 1, 3, Payload("float32", 40, 5))
    session.cache.put(CachedVersion(announcement, values, b""))
    session.one._announced[0] = announcement
    asyncio.run(session.one._fetch_fragment(0))
    (downloaded,) = session.box.take_all()
    assert isinstance(downloaded, inbox.Downloaded) and downloaded.vector.array.tolist() == values.tolist()
    assert threads and threads[0] is not threading.current_thread()


@pytest.mark.promise("A learner on a GPU keeps each version once in host memory, pinned")
def test_a_version_is_kept_once_where_its_vector_is_a_copy() -> None:
    session = Session(to_vector=lambda values: Vector.from_array(values.copy()))  # as pinning makes one
    announcement = Announcement(0, 1, 3, Payload("float32", 40, 5))
    session.cache.put(CachedVersion(announcement, np.arange(10, dtype=np.float32), b"receipt"))
    session.one._announced[0] = announcement
    asyncio.run(session.one._fetch_fragment(0))
    (downloaded,) = session.box.take_all()
    cached = session.cache.get(0)
    assert isinstance(downloaded, inbox.Downloaded) and cached is not None and cached.receipt == b"receipt"
    assert np.shares_memory(cached.values, downloaded.vector.array)


def test_a_push_that_is_queued_when_its_session_ends_has_an_open_fate() -> None:
    session = Session()
    session.one.push(a_push(2))
    assert session.box.take_all() == []
    session.one.close()
    assert session.box.take_all() == [inbox.PushAnswered(0, 2, None, "", message="the connection broke")]


def test_channels_that_believe_one_certificate_are_doubted() -> None:
    for pinned in (False, True):
        session = Session(pinned)
        announcement = Announcement(0, 1, 3, Payload("float32", 40, 5))
        assert asyncio.run(session.one._obtain_version(announcement)) is None
        assert session.reason == ("bulk transfers fail: the stream broke" if pinned else "")


@pytest.mark.promise("An upload with a damaged part is sent again, and a push without an answer ends its session")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_push_without_an_answer_ends_the_session(pinned: bool) -> None:
    """The next one has new connections, and the syncer asks anew."""
    session = Session(pinned)
    asyncio.run(session.one._send_push(a_push()))
    assert session.reason == "pushes do not come through: the stream broke"


def test_a_push_whose_first_answer_was_lost_counts_as_accepted() -> None:
    """The syncer says ``repeated``, and the merge that names this push must find it."""
    session = Session()
    session.one.channels = Answering(sync_pb2.UploadReply(accepted=False, reason=PushRefusal.REPEATED))
    asyncio.run(session.one._send_push(a_push(3)))
    (answered,) = session.box.take_all()
    assert isinstance(answered, inbox.PushAnswered) and answered.accepted is True and answered.sequence == 3


def test_a_push_that_comes_when_its_session_is_over_has_an_open_fate() -> None:
    """An earlier copy may have been accepted. What was mended: a deterministic learner never sent it again, and its job
    stood still."""
    session = Session()
    session.one.channels = Answering(sync_pb2.UploadReply(accepted=False, reason=TransferRefusal.NOT_JOINED))
    asyncio.run(session.one._send_push(a_push(3)))
    (answered,) = session.box.take_all()
    assert isinstance(answered, inbox.PushAnswered) and answered.accepted is None and answered.sequence == 3


class Answering(Broken):
    """Connections on which each upload is answered so."""

    def __init__(self, reply: sync_pb2.UploadReply) -> None:
        super().__init__()
        self.reply = reply

    async def upload(self, payload: Any, **kind: Any) -> sync_pb2.UploadReply:
        return self.reply


def test_a_version_that_does_not_arrive_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "pause", lambda attempt: 0.0)
    session = Session()
    session.one.on_announcement(Announcement(0, 1, 3, Payload("float32", 40, 5)))

    async def fetch() -> None:
        work = asyncio.create_task(session.one._fetch_fragment(0))
        while not session.reason:
            await asyncio.sleep(0)
        work.cancel()

    asyncio.run(fetch())
    assert session.reason == "fragment 0 does not arrive in 4 tries"


class Damaging(Broken):
    """Connections on which the first ``times`` payloads are damaged."""

    upload = BulkChannels.upload


@pytest.mark.promise("An upload with a damaged part is sent again, and a push without an answer ends its session")
@pytest.mark.parametrize("reason", [PushRefusal.BAD_CHECKSUM, TransferRefusal.BAD_TRANSFER])
@pytest.mark.parametrize(("times", "answer"), [(1, True), (3, True), (9, None)])
def test_a_damaged_upload_is_sent_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, reason: str, times: int, answer: bool | None
) -> None:
    sent = []

    async def upload(channels: Any, header: sync_pb2.UploadHeader, *other: Any, **more: Any) -> sync_pb2.UploadReply:
        sent.append(header.push.sequence)
        damaged = len(sent) <= times
        return sync_pb2.UploadReply(accepted=not damaged, reason=reason if damaged else "")

    monkeypatch.setattr(bulk, "upload", upload)
    monkeypatch.setattr(bulk_channels, "pause", lambda attempt: 0.0)
    session = Session()
    session.one.channels = Damaging()
    asyncio.run(session.one._send_push(a_push(5)))
    (answered,) = session.box.take_all()
    assert isinstance(answered, inbox.PushAnswered) and answered.accepted is answer
    assert sent == [5] * min(4, times + 1) and bool(session.reason) is (answer is None)


# ------------------------------------------------------------------ error feedback


def open_pushes(feedback: ErrorFeedback) -> int:
    """Of how many pushes something is kept, because their fate is open."""
    return sum(map(len, feedback._open))


def test_feedback_keeps_nothing_of_a_push_that_was_settled_before_it_was_encoded() -> None:
    feedback = ErrorFeedback(1, True)
    for sequence in range(1, 100):
        feedback.expect_push(0, sequence)
        feedback.resolve_pushes(0, 0, (sequence,))
        encode_push(a_push(sequence), "int4", feedback)
    assert open_pushes(feedback) == 0 and feedback.residual(0) is None


def test_a_merge_ends_the_fate_of_the_pushes_that_it_left_out() -> None:
    feedback = ErrorFeedback(1, True)
    for sequence in (1, 2, 3):
        feedback.expect_push(0, sequence)
        encode_push(a_push(sequence), "int4", feedback)
    feedback.resolve_pushes(0, 2, (1,))
    assert open_pushes(feedback) == 1 and feedback.residual(0) is not None


def test_a_new_tenure_forgets_open_pushes_and_keeps_what_was_merged() -> None:
    feedback = ErrorFeedback(1, True)
    for sequence in (1, 2):
        feedback.expect_push(0, sequence)
        encode_push(a_push(sequence), "int4", feedback)
    feedback.resolve_pushes(0, 1, ())
    residual = feedback.residual(0)
    assert residual is not None and open_pushes(feedback) == 1
    feedback.forget_open_pushes()
    assert open_pushes(feedback) == 0 and feedback.residual(0) is residual


@pytest.mark.promise(
    "A learner's host memory stays within 8 bytes per parameter, 12 with error feedback: memory that the "
    "allocator keeps of freed vectors is returned"
)
@pytest.mark.parametrize(("seconds", "times"), [(0.0, 2), (3600.0, 0)])
def test_freed_memory_is_given_back_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, seconds: float, times: int
) -> None:
    returned: list[None] = []
    monkeypatch.setattr(transfers, "return_free_memory", lambda: returned.append(None))
    monkeypatch.setattr(transfers, "RETURN_MEMORY_SECONDS", seconds)
    session = Session()
    announcement = Announcement(0, 1, 1, Payload("float32", 40, 0))
    session.cache.put(CachedVersion(announcement, np.zeros(10, np.float32), b""))
    session.one._announced[0] = announcement
    for _ in range(2):
        asyncio.run(session.one._fetch_fragment(0))
    assert len(returned) == times
