"""The background thread's rules where the network fails: what is tried again, said again, kept."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.security.certificates import issue
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.vocabulary import ENDED_PHASES, FINISHING_PHASES, STOPPED_PHASES
from diloco_protocol.wire import bulk, convert, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import bulk_connection
from diloco_protocol.wire.records import Announcement, Payload, PushPlan, Seat, StepReport
from diloco_worker import Learner, device
from diloco_worker.core.connection_status import ConnectionStatus
from diloco_worker.fragments import Vector, build_layout
from diloco_worker.net import connection as connection_module
from diloco_worker.net import inbox
from diloco_worker.net.bulk_channels import BulkChannels
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.connection import SyncerConnection
from diloco_worker.net.routes import Routes
from diloco_worker.net.session import Outbox
from diloco_worker.net.transfers import Push, StateUpload, Transfers
from diloco_worker.settings import ConfigurationError, WorkerSettings
from diloco_worker.status_page import StatusPort
from operator_world import job_object
from parties import TOKEN, Parties, now


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[SyncerConnection, inbox.Inbox]]:
    job = DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "a"},
            "spec": {
                "learners": {"command": ["true"]},
                "regions": [{"learners": 1}],
                "training": {"stop": {"steps": 1}},
            },
        }
    )
    (tmp_path / "job.json").write_text(job_to_json(job))
    settings = WorkerSettings.from_environment(
        {"DILOCO_JOB_FILE": str(tmp_path / "job.json"), "DILOCO_SYNCER": "127.0.0.1:1"}
    )
    box = inbox.Inbox()
    yield connection(settings, build_layout(torch.nn.Linear(4, 2), 1), box), box


def connection(settings: WorkerSettings, layout: Layout, box: inbox.Inbox) -> SyncerConnection:
    """Which downloads what it is asked to."""
    status = ConnectionStatus()
    return SyncerConnection(
        settings,
        layout,
        box,
        ThreadPoolExecutor(1),
        to_vector=Vector.from_array,
        eager=False,
        idle=False,
        status=status,
    )


def routes() -> Routes:
    return Routes(partial(bulk_connection, Credentials()), "127.0.0.1:1")


def begin_session(one: SyncerConnection) -> None:
    """One in which nothing is carried."""
    channels = BulkChannels(routes(), "a", "b", executor=ThreadPoolExecutor(1), counts=one.counts)
    one._transfers = Transfers(one._context, channels, "float32", lambda *work: None, end_session=lambda reason: None)


# ------------------------------------------------------------------ what is to be said


def kinds(outbox: Outbox) -> list[str]:
    return [str(message.WhichOneof("kind")) for _, message in outbox.begin_sending()]


def lease() -> sync_pb2.LearnerMessage:
    return sync_pb2.LearnerMessage(lease_request=sync_pb2.LeaseRequest())


def drained() -> sync_pb2.LearnerMessage:
    return sync_pb2.LearnerMessage(drained=sync_pb2.Drained())


def all_sent(outbox: Outbox) -> None:
    for key, message in outbox.begin_sending():
        outbox.mark_sent(key, message)


def test_there_is_always_a_heartbeat() -> None:
    outbox = Outbox()
    ((_, message),) = outbox.begin_sending()
    assert message.HasField("report") and convert.from_wire(StepReport, message.report) == StepReport()
    assert outbox.is_empty


def test_what_was_not_sent_is_still_to_be_said() -> None:
    outbox = Outbox()
    outbox.put("a", drained())
    outbox.put_report(StepReport(slot_step=1))
    waiting = outbox.begin_sending()
    outbox.mark_sent(*waiting[0])  # then the stream broke
    assert not outbox.is_empty
    outbox.begin_session()
    assert kinds(outbox) == ["report", "drained"]
    all_sent(outbox)
    assert outbox.is_empty


def test_a_report_that_came_while_the_last_was_sent_is_fresh() -> None:
    outbox = Outbox()
    outbox.put_report(StepReport(slot_step=1))
    waiting = outbox.begin_sending()
    outbox.put_report(StepReport(slot_step=2))
    outbox.mark_sent(*waiting[0])
    assert outbox.has_new_report
    all_sent(outbox)
    assert not outbox.has_new_report


def test_lasting_messages_are_said_in_every_session_and_leases_in_one() -> None:
    outbox = Outbox()
    outbox.put("drained", drained(), lasting=True)
    outbox.put("lease-0", lease())
    outbox.put("other", drained())
    all_sent(outbox)
    outbox.put("lease-1", lease())
    outbox.begin_session()
    assert kinds(outbox) == ["report", "drained"]


def test_a_newer_message_is_not_taken_for_the_one_sent() -> None:
    outbox = Outbox()
    outbox.put("a", drained())
    waiting = outbox.begin_sending()
    outbox.put("a", lease())
    for key, message in waiting:
        outbox.mark_sent(key, message)
    assert kinds(outbox) == ["report", "lease_request"]


# ------------------------------------------------------------------ the rest


def test_one_thread_in_deterministic_mode_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, made: tuple[SyncerConnection, inbox.Inbox]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("DILOCO_THREADS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "many, please")
    job = made[0].settings.job
    sync = job.spec.sync.model_copy(update={"deterministic": True})
    settings = dataclasses.replace(
        made[0].settings, job=job.model_copy(update={"spec": job.spec.model_copy(update={"sync": sync})})
    )
    model = torch.nn.Linear(2, 2)
    try:
        device.configure(settings.job.spec)
        assert torch.get_num_threads() == 1
        torch.set_num_threads(2)
        Learner(settings, model, torch.optim.SGD(model.parameters()))
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_the_phases_are_those_of_the_wire() -> None:
    names = {name.removeprefix("PHASE_").lower() for name in sync_pb2.PhaseName.DESCRIPTOR.values_by_name}
    assert names - STOPPED_PHASES == {"unspecified", "waiting", "training", "holding"}
    assert names >= STOPPED_PHASES == FINISHING_PHASES | ENDED_PHASES


# ------------------------------------------------------------------ when it tries again


class Tries:
    """``serve`` over a clock of its own: connection ``n`` lasts ``lasts(n)`` seconds, and in number ``count`` the
    process closes. ``pauses``: seconds before each further one; ``times``: when they began, since the start."""

    def __init__(
        self, one: SyncerConnection, lasts: Callable[[int], float], count: int, address: str | None = "a:1"
    ) -> None:
        self.now, self.tries = 1000.0, 0
        self.pauses: list[float] = []
        self.times: list[float] = []
        self._one, self._lasts, self._count = one, lasts, count
        self._settings = SimpleNamespace(address=lambda: address)

    async def _connect(self, address: str) -> str:
        self.now += self._lasts(self.tries)
        self.tries += 1
        self._one._closing = self.tries == self._count
        return "away"

    async def _sleep(self, seconds: float) -> None:
        if self._settings.address() is None:  # which no try follows
            self.tries += 1
            self._one._closing = self.tries == self._count
        self.times.append(self.now - 1000)
        self.pauses.append(seconds)
        self.now += seconds

    async def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(connection_module.asyncio, "sleep", self._sleep)
        monkeypatch.setattr(self._one, "_connect", self._connect)
        monkeypatch.setattr(self._one, "settings", self._settings)
        await self._one.serve(0)


@pytest.mark.parametrize("swallowed", [0.0, 2.0], ids=["refused at once", "swallowed for 2 s"])
async def test_a_syncer_that_is_replaced_is_tried_about_once_a_second_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, made: tuple[SyncerConnection, inbox.Inbox], swallowed: float
) -> None:
    tries = Tries(made[0], lambda n: swallowed if n else 100.0, 120)
    await tries.serve(monkeypatch)
    for n in range(5):
        assert min(0.5, 0.05 * 2**n) <= tries.pauses[n] <= min(1.0, 0.1 * 2**n), "the first follow each other quickly"
    minute = [pause for pause, at in zip(tries.pauses, tries.times, strict=True) if at < 160]
    assert len(minute) > 60 / (1.0 + swallowed) and all(0.5 <= pause <= 1.0 for pause in minute[5:])
    later = [pause for pause, at in zip(tries.pauses, tries.times, strict=True) if at >= 160]
    assert len(later) > 10 and all(2.5 <= pause <= 5.0 for pause in later)
    assert len({*later}) > 10, "learners do not come all at once"


async def test_a_session_that_lasted_starts_the_tries_anew(
    monkeypatch: pytest.MonkeyPatch, made: tuple[SyncerConnection, inbox.Inbox]
) -> None:
    tries = Tries(made[0], lambda n: {100: 9.9, 110: 10.1}.get(n, 0.0), 115)
    await tries.serve(monkeypatch)
    assert all(2.5 <= pause <= 5.0 for pause in tries.pauses[98:110])
    assert tries.pauses[110] <= 0.1 and tries.pauses[111] <= 0.2 and tries.pauses[113] <= 1.0


async def test_where_no_address_is_known_yet_the_file_is_looked_at_once_a_second(
    monkeypatch: pytest.MonkeyPatch, made: tuple[SyncerConnection, inbox.Inbox]
) -> None:
    tries = Tries(made[0], lambda n: 0.0, 200, address=None)
    await tries.serve(monkeypatch)
    assert tries.times[-1] > 90 and all(0.5 <= pause <= 1.0 for pause in tries.pauses[5:])


# ------------------------------------------------------------------ what it tells of where it stands


def announced(one: SyncerConnection, version: int, fragment: int = 0) -> Announcement:
    return Announcement(fragment, 1, version, Payload("float32", 4 * one.layout.elements(fragment), 0))


def test_the_jobs_merges_are_every_fragments_version_as_announced_last(
    made: tuple[SyncerConnection, inbox.Inbox],
) -> None:
    layout = build_layout(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), 2)
    one = connection(made[0].settings, layout, inbox.Inbox())
    begin_session(one)
    assert one.status.merges is None
    one._on_announcement(announced(one, 3))
    assert one.status.merges is None, "a fragment has not been heard of"
    one._on_announcement(announced(one, 4, 1))
    assert one.status.merges == 7
    begin_session(one)  # after the one before has ended
    one._on_announcement(announced(one, 5))
    assert one.status.merges == 9
    one._on_announcement(announced(one, 1))
    assert one.status.merges == 5, "a store that was set back"


def test_the_hubs_settings_are_shown_as_they_were_said(made: tuple[SyncerConnection, inbox.Inbox]) -> None:
    one, _ = made
    own = one._syncer_settings.model_dump(mode="json")
    said = {**own, "sync": {**own["sync"], "every": 77}, "learners": 9}
    one._apply_settings(json.dumps(said))
    assert one.status.settings is not None and one.status.settings.model_dump(mode="json") == said
    port = StatusPort(one.settings, "127.0.0.1:0")
    try:
        port.attach(lambda: dataclasses.replace(one.status, merges=12), dict)
        page = port.document()
    finally:
        port.close()
    assert page.settings == said and page.merges == 12 and page.tried is False
    one._apply_settings("{}")
    assert one.status.settings is None, "nothing that is understood"


@pytest.mark.promise("Counts of an ended tenure change nothing in the next one, neither as a report nor as a push")
async def test_a_report_that_was_made_before_a_new_tenure_is_not_sent(
    made: tuple[SyncerConnection, inbox.Inbox],
) -> None:
    one, box = made
    for incarnation in (3, 4):
        begin_session(one)
        one._on_seat(Seat(0, incarnation, incarnation == 4, 0, slot_tokens=0, leases=(), tenure=3))
        one.put_report(StepReport(slot_step=7, tenure=3))
        assert one.outbox.has_new_report
    # The training thread has read of neither seat of the tenure that begins now, and reports once more.
    for incarnation, continuing in ((5, False), (6, True)):
        one._on_seat(Seat(0, incarnation, continuing, 7, slot_tokens=70, leases=(), tenure=5))
    one.put_report(StepReport(slot_step=8, tenure=3))
    assert not one.outbox.has_new_report
    zeros = Vector.from_array(np.zeros(10, np.float32))
    one.push(
        Push(
            PushPlan(
                0,
                3,
                1,
                1,
                base_version=0,
                oldest_version=0,
                first_step=1,
                last_step=4,
                steps=4,
                tokens=128,
                compute_seconds=0.1,
            ),
            zeros,
            zeros,
            StepReport(tenure=3),
        )
    )
    assert inbox.PushAnswered(0, 3, None, "", message="its tenure is over") in box._messages.values()
    seat = next(message for message in box.take_all() if isinstance(message, Seat))
    assert (seat.incarnation, seat.continuing, seat.tenure) == (6, False, 5), "its reports will name 5"


def test_a_push_without_a_session_has_an_open_fate(made: tuple[SyncerConnection, inbox.Inbox]) -> None:
    one, box = made
    plan = PushPlan(
        0,
        3,
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
    zeros = Vector.from_array(np.zeros(10, np.float32))
    one.push(Push(plan, zeros, zeros, StepReport()))
    assert box.take_all() == [inbox.PushAnswered(0, 3, None, "", message="there is no connection")]


# ------------------------------------------------------------------ credentials that cannot be used


def settings_with(tmp_path: Path, credentials: Path, pod: str) -> WorkerSettings:
    document = job_object() | {"metadata": {"name": "job"}}
    (tmp_path / "job.json").write_text(job_to_json(parse_job(json.dumps(document))))
    return WorkerSettings.from_environment(
        {
            "DILOCO_JOB_FILE": str(tmp_path / "job.json"),
            "DILOCO_SYNCER": "127.0.0.1:1",
            "DILOCO_REGION": "local",
            "DILOCO_CREDENTIALS": str(credentials),
            "DILOCO_POD": pod,
        }
    )


def spoil(folder: Path, parties: Parties, how: str) -> str:
    """A learner's folder with something wrong; a word of what is told."""
    if how == "region":
        parties.learner(region="elsewhere")
        return "region 'local'"
    if how == "job":
        parties.learner(job="other")
        return "job 'job'"
    if how == "role":
        parties.syncer("learner")
        return "the syncer of job ns/job"
    if how == "no authority":
        (folder / "ca.crt").unlink()
        return "lacks ca.crt"
    if how == "no pem":
        (folder / "tls.crt").write_bytes(b"hello")
        return "tls.crt"
    (folder / "tls.key").write_bytes(issue(parties.authority, [parties.named("local")], (), now(), days=1).key)
    return "a certificate and its key"


@pytest.mark.parametrize("how", ["region", "job", "role", "no authority", "no pem", "another's key"])
def test_a_pods_credentials_may_be_put_right_while_it_waits(tmp_path: Path, how: str) -> None:
    parties = Parties(tmp_path / "pki", "job")
    folder = parties.learner()
    words = spoil(folder, parties, how)
    settings = settings_with(tmp_path, folder, "ab" * 16)
    one = connection(settings, build_layout(torch.nn.Linear(4, 2), 1), inbox.Inbox())
    said = asyncio.run(one._connect("127.0.0.1:1"))
    assert words in said and one.status.refused == ("credentials-unusable", said)
    assert "PRIVATE KEY" not in said and TOKEN not in said
    parties.learner()
    said = asyncio.run(one._connect("127.0.0.1:1"))
    assert "cannot connect" in said


@pytest.mark.parametrize("how", ["region", "job", "role", "no authority", "no pem"])
def test_outside_of_pods_they_are_a_mistake_that_is_told_at_once(tmp_path: Path, how: str) -> None:
    parties = Parties(tmp_path / "pki", "job")
    folder = parties.learner()
    words = spoil(folder, parties, how)
    with pytest.raises(ConfigurationError, match=words):
        SyncerClient(settings_with(tmp_path, folder, ""), build_layout(torch.nn.Linear(4, 2), 1), inbox.Inbox())


def test_breaking_off_ends_the_session() -> None:
    from grpc import aio

    from diloco_worker.net.session import Session, SessionEnded

    async def run() -> None:
        async with aio.insecure_channel("127.0.0.1:1") as channel:
            session = Session(channel, ())
            session.end("enough")
            await session._raise_when_ended()

    with pytest.raises(SessionEnded, match="enough"):
        asyncio.run(run())


@pytest.mark.promise("Copies for a GPU are handled by background threads, not by the training thread or the event loop")
def test_each_thread_that_handles_vectors_begins_as_it_is_told(tmp_path: Path) -> None:
    """On a GPU that makes the learner's device the thread's; pinned memory would open a context on another one."""
    begun: list[str] = []
    client = SyncerClient(
        settings_with(tmp_path, Parties(tmp_path / "pki", "job").learner(), ""),
        build_layout(torch.nn.Linear(4, 2), 1),
        inbox.Inbox(),
        begin_thread=lambda: begun.append(threading.current_thread().name),
    )
    client.start()
    client._executor.submit(lambda: None).result(10)
    client.stop()
    assert sorted(name.rstrip("_0") for name in begun) == ["diloco-client", "diloco-codec"]


# ------------------------------------------------------------------ settings, and the end of a session


def test_pushes_of_a_session_that_has_begun_have_the_encoding_that_its_welcome_names(
    made: tuple[SyncerConnection, inbox.Inbox],
) -> None:
    """The job file may name another one: it is older."""
    one, _ = made
    begin_session(one)
    said = one._syncer_settings.model_dump(mode="json")
    up = said["sync"]["compression"]["up"] = "float32" if said["sync"]["compression"]["up"] != "float32" else "int8"
    one._transfers.encoding = "int4"  # type: ignore[union-attr]
    one._apply_settings(json.dumps(said))
    assert one._transfers is not None and one._transfers.encoding == up


def test_a_session_is_half_closed_only_when_everything_was_handed_over(
    made: tuple[SyncerConnection, inbox.Inbox],
) -> None:
    """Else the goodbye itself would be cut off."""
    one, _ = made
    closed: list[object] = []
    one._session = SimpleNamespace(half_closed=False, half_close="half close")  # type: ignore[assignment]
    one._spawn = lambda work, *arguments: closed.append(work)  # type: ignore[method-assign,assignment]
    one.outbox.put("drained", drained(), lasting=True)
    one.half_close()
    assert closed == []
    all_sent(one.outbox)
    one.half_close()
    assert closed == ["half close"]


async def test_what_has_come_of_a_download_outlives_the_session(made: tuple[SyncerConnection, inbox.Inbox]) -> None:
    one, _ = made
    kept = []
    for _ in range(2):
        one._begin_session(SimpleNamespace(end=None), routes(), False)  # type: ignore[arg-type]
        assert one._transfers is not None
        kept.append(one._transfers.channels.kept)
        await one._end_session()
    assert kept[0] is kept[1]


def test_a_welcome_and_a_later_message_say_where_fragments_go(made: tuple[SyncerConnection, inbox.Inbox]) -> None:
    one, _ = made
    begin_session(one)
    assert one._transfers is not None
    found = one._transfers.channels.routes
    shard = sync_pb2.Shard(port=7001, fragments=[0])
    one._handle(sync_pb2.SyncerMessage(welcome=sync_pb2.Welcome(shards=[shard])))
    assert found.has_shard(0)
    first = found.find(0)
    one._handle(sync_pb2.SyncerMessage(shards=sync_pb2.Shards(shards=[sync_pb2.Shard(port=7002, fragments=[0])])))
    assert found.has_shard(0) and found.find(0) is not first
    other = sync_pb2.Shard(port=7001, fragments=[1])
    for wrong, words in (([other], "fragment 1 is named, and there are 1"), ([shard, shard], "named twice")):
        with pytest.raises(limits.WireError, match=words):
            one._handle(sync_pb2.SyncerMessage(shards=sync_pb2.Shards(shards=wrong)))
        with pytest.raises(limits.WireError, match=words):
            one._handle(sync_pb2.SyncerMessage(welcome=sync_pb2.Welcome(shards=wrong)))
    assert found.has_shard(0), "nothing of it is believed"
    one._handle(sync_pb2.SyncerMessage(shards=sync_pb2.Shards()))
    assert not found.has_shard(0)


def test_pushes_of_a_deterministic_job_are_sent_again_in_its_next_session(
    made: tuple[SyncerConnection, inbox.Inbox],
) -> None:
    settings = made[0].settings
    sync = settings.job.spec.sync.model_copy(update={"deterministic": True})
    spec = settings.job.spec.model_copy(update={"sync": sync})
    other = dataclasses.replace(settings, job=settings.job.model_copy(update={"spec": spec}))
    assert not made[0]._context.pushes_again
    assert connection(other, made[0].layout, inbox.Inbox())._context.pushes_again


class States:
    """A session's transfers, in which an optimizer state comes, is gone, or is on its way for ever."""

    def __init__(self, data: bytes | None, ever: bool = False) -> None:
        self.data, self.ever, self.asked = data, ever, list[tuple[int, int]]()

    async def download_state(self, what: int, limit: int, transfer: int, epoch: int) -> inbox.StateDownloaded:
        self.asked.append((epoch, transfer))
        if self.ever:
            await asyncio.Event().wait()
        return inbox.StateDownloaded(True, self.data)


@pytest.mark.promise(
    "A new learner takes over an optimizer state over a link of any speed: while bytes come, and while the syncer "
    "still has to answer, it begins with no fresh one"
)
async def test_a_peers_state_goes_on_in_the_next_session_and_is_asked_for_anew_when_it_is_gone(
    made: tuple[SyncerConnection, inbox.Inbox],
) -> None:
    one, box = made
    wanted = sync_pb2.PeerStateWanted(patient=True)
    one.status = dataclasses.replace(one.status, epoch=3)

    async def session(states: States, *messages: sync_pb2.SyncerMessage) -> States:
        one._transfers = states  # type: ignore[assignment]
        for _ in range(1 if one._state_offered is None else 2):
            one.request_peer_state(100, True)
        for message in messages:
            one._handle(message)
        await asyncio.sleep(0.01)
        await one.cancel_tasks()
        return states

    def asked() -> list[sync_pb2.PeerStateWanted]:
        said = [message.peer_state_wanted for _, message in one.outbox.begin_sending()[1:]]
        all_sent(one.outbox)
        return said

    offer = sync_pb2.SyncerMessage(peer_state_ready=sync_pb2.PeerStateReady(transfer=5))
    assert (await session(States(b"", ever=True), offer)).asked == [(3, 5)] and asked() == [wanted]
    assert (await session(States(b"", ever=True))).asked == [(3, 5)] and asked() == []
    assert (await session(States(None))).asked == [(3, 5)] and asked() == [wanted], "the syncer has it no more"
    assert not box.take_all()
    assert (await session(States(b"x"), offer)).asked == [(3, 5)] and asked() == [wanted]
    assert box.take_all() == [inbox.StateDownloaded(True, b"x")]
    begun = sync_pb2.DownloadRequest(what=sync_pb2.DownloadRequest.PEER_STATE, transfer=5)
    one._kept.find(begun).parts.append(bulk.Part(0, 4))
    for _ in range(connection_module._STATE_REQUESTS):
        assert not (await session(States(None))).asked and asked() == [wanted]
    await session(States(None))
    assert not asked() and box.take_all() == [inbox.StateDownloaded(True, None)], "as if no peer had one"
    assert not one._kept.find(begun).parts, "and what had come of one lies about no longer"


@pytest.mark.promise("A peer's optimizer state goes on where its sender's session broke, also again and again")
def test_a_state_that_was_begun_is_not_made_anew(made: tuple[SyncerConnection, inbox.Inbox]) -> None:
    one, box = made
    begin_session(one)
    spawned: list[object] = []
    one._spawn = lambda work, *arguments: spawned.append(arguments)  # type: ignore[method-assign,assignment]
    one.status = dataclasses.replace(one.status, epoch=3)
    one._context.states[3, 5] = StateUpload([], np.zeros(4, np.uint8))
    for transfer in (5, 6):
        asked = sync_pb2.PeerStateRequest(transfer=transfer)
        one._handle(sync_pb2.SyncerMessage(peer_state_request=asked))
    assert spawned == [(5, 3)] and box.take_all() == [inbox.StateRequested(6)]
    one.status = dataclasses.replace(one.status, epoch=4)  # another syncer counts anew
    one._handle(sync_pb2.SyncerMessage(peer_state_request=sync_pb2.PeerStateRequest(transfer=5)))
    assert len(spawned) == 1 and box.take_all() == [inbox.StateRequested(5)]


def test_a_heartbeat_says_what_a_newcomer_lacks(made: tuple[SyncerConnection, inbox.Inbox]) -> None:
    one, _ = made
    assert one._stamp(StepReport(), 1.0, 1.0).link is None
    begin_session(one)
    assert one._transfers is not None
    one._transfers.on_announcement(Announcement(0, 1, 3, Payload("float32", 40, 5)))
    link = one._stamp(StepReport(), 1.0, 1.0).link
    assert link is not None and link.missing_fragments == 1
