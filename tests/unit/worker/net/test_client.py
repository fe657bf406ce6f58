"""The background thread's rules where the network fails: what is tried again, said again, kept."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diloco_protocol.security.certificates import issue
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json, parse_job
from diloco_protocol.wire import sync_pb2
from diloco_worker import Learner, device
from diloco_worker.fragments import build_layout
from diloco_worker.net import inbox
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.session import Outbox
from diloco_worker.phases import CLOSING, ENDED, LEAVING
from diloco_worker.settings import ConfigurationError, WorkerSettings
from diloco_worker.status_page import StatusPort
from operator_world import job_object
from parties import TOKEN, Parties, now


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[SyncerClient, inbox.Inbox]]:
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
    one = SyncerClient(settings, build_layout(torch.nn.Linear(4, 2), 1), box, 0)
    yield one, box
    one._loop.close()


# ------------------------------------------------------------------ what is to be said


def kinds(outbox: Outbox) -> list[str]:
    return [str(message.WhichOneof("kind")) for _, message in outbox.waiting()]


def lease() -> sync_pb2.LearnerMessage:
    return sync_pb2.LearnerMessage(lease_request=sync_pb2.LeaseRequest())


def drained() -> sync_pb2.LearnerMessage:
    return sync_pb2.LearnerMessage(drained=sync_pb2.Drained())


def all_sent(outbox: Outbox) -> None:
    for key, message in outbox.waiting():
        outbox.sent(key, message)


def test_there_is_always_a_heartbeat() -> None:
    outbox = Outbox()
    ((_, message),) = outbox.waiting()
    assert message.HasField("report") and message.report == sync_pb2.Report()
    assert outbox.empty


def test_what_was_not_sent_is_still_to_be_said() -> None:
    outbox = Outbox()
    outbox.say("a", drained())
    outbox.report(sync_pb2.Report(slot_step=1))
    waiting = outbox.waiting()
    outbox.sent(*waiting[0])  # then the stream broke
    assert not outbox.empty
    outbox.begin_session()
    assert kinds(outbox) == ["report", "drained"]
    all_sent(outbox)
    assert outbox.empty


def test_a_report_that_came_while_the_last_was_sent_is_fresh() -> None:
    outbox = Outbox()
    outbox.report(sync_pb2.Report(slot_step=1))
    waiting = outbox.waiting()
    outbox.report(sync_pb2.Report(slot_step=2))
    outbox.sent(*waiting[0])
    assert outbox.fresh
    all_sent(outbox)
    assert not outbox.fresh


def test_lasting_messages_are_said_in_every_session_and_leases_in_one() -> None:
    outbox = Outbox()
    outbox.say("drained", drained(), lasting=True)
    outbox.say("lease-0", lease())
    outbox.say("other", drained())
    all_sent(outbox)
    outbox.say("lease-1", lease())
    outbox.begin_session()
    assert kinds(outbox) == ["report", "drained"]


def test_a_newer_message_is_not_taken_for_the_one_sent() -> None:
    outbox = Outbox()
    outbox.say("a", drained())
    waiting = outbox.waiting()
    outbox.say("a", lease())
    for key, message in waiting:
        outbox.sent(key, message)
    assert kinds(outbox) == ["report", "lease_request"]


# ------------------------------------------------------------------ the rest


def test_one_thread_in_deterministic_mode_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, made: tuple[SyncerClient, inbox.Inbox]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setenv("DILOCO_THREADS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "many, please")
    job = made[0]._settings.job
    sync = job.spec.sync.model_copy(update={"deterministic": True})
    settings = dataclasses.replace(
        made[0]._settings, job=job.model_copy(update={"spec": job.spec.model_copy(update={"sync": sync})})
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
    assert names - CLOSING == {"unspecified", "waiting", "training", "holding"}
    assert names >= CLOSING == LEAVING | ENDED


# ------------------------------------------------------------------ what it tells of where it stands


def announced(one: SyncerClient, version: int, fragment: int = 0) -> sync_pb2.Announcement:
    payload = sync_pb2.Payload(encoding="float32", bytes=4 * one._layout.elements(fragment))
    return sync_pb2.Announcement(fragment=fragment, epoch=1, version=version, full=payload)


def test_the_jobs_merges_are_every_fragments_version_as_announced_last(made: tuple[SyncerClient, inbox.Inbox]) -> None:
    layout = build_layout(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), 2)
    one = SyncerClient(made[0]._settings, layout, inbox.Inbox(), 0, eager=False)
    one._deliveries._fetch = lambda fragment: None  # type: ignore[method-assign]
    assert one.connection.merges is None
    one._announced(announced(one, 3))
    assert one.connection.merges is None, "a fragment has not been heard of"
    one._announced(announced(one, 4, 1))
    assert one.connection.merges == 7
    one._deliveries.end()  # a session ends
    one._announced(announced(one, 5))
    assert one.connection.merges == 9
    one._announced(announced(one, 1))
    assert one.connection.merges == 5, "a store that was set back"
    one._loop.close()


def test_the_hubs_settings_are_shown_as_they_were_said(made: tuple[SyncerClient, inbox.Inbox]) -> None:
    one, _ = made
    own = one._syncer_settings.document()
    said = {**own, "sync": {**own["sync"], "every": 77}, "learners": 9}
    one._apply_settings(json.dumps(said))
    assert one.connection.settings is not None and one.connection.settings.document() == said
    port = StatusPort(one._settings, "127.0.0.1:0")
    try:
        port.connection = lambda: dataclasses.replace(one.connection, merges=12)
        page = port.document()
    finally:
        port.close()
    assert page["settings"] == said and page["merges"] == 12 and page["tried"] is False
    one._apply_settings("{}")
    assert one.connection.settings is None, "nothing that is understood"


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
    (folder / "tls.key").write_bytes(issue(parties.authority, [parties.named("local")], (), now(), 1).key)
    return "a certificate and its key"


@pytest.mark.parametrize("how", ["region", "job", "role", "no authority", "no pem", "another's key"])
def test_a_pods_credentials_may_be_put_right_while_it_waits(tmp_path: Path, how: str) -> None:
    parties = Parties(tmp_path / "pki", "job")
    folder = parties.learner()
    words = spoil(folder, parties, how)
    settings = settings_with(tmp_path, folder, "ab" * 16)
    one = SyncerClient(settings, build_layout(torch.nn.Linear(4, 2), 1), inbox.Inbox(), 0)
    try:
        said = one._loop.run_until_complete(one._connect("127.0.0.1:1"))
        assert words in said and one.connection.refused == ("credentials-unusable", said)
        assert "PRIVATE KEY" not in said and TOKEN not in said
        parties.learner()
        said = one._loop.run_until_complete(one._connect("127.0.0.1:1"))
        assert "cannot connect" in said
    finally:
        one._loop.close()


@pytest.mark.parametrize("how", ["region", "job", "role", "no authority", "no pem"])
def test_outside_of_pods_they_are_a_mistake_that_is_told_at_once(tmp_path: Path, how: str) -> None:
    parties = Parties(tmp_path / "pki", "job")
    folder = parties.learner()
    words = spoil(folder, parties, how)
    with pytest.raises(ConfigurationError, match=words):
        SyncerClient(settings_with(tmp_path, folder, ""), build_layout(torch.nn.Linear(4, 2), 1), inbox.Inbox(), 0)


def test_breaking_off_ends_the_session() -> None:
    from grpc import aio

    from diloco_worker.net.session import Session, SessionEnded

    async def run() -> None:
        async with aio.insecure_channel("127.0.0.1:1") as channel:
            session = Session(channel, ())
            session.break_off("enough")
            await session._break()

    with pytest.raises(SessionEnded, match="enough"):
        asyncio.run(run())
