"""Shards in pods of their own: processes that connect to the syncer over TLS, and to which learners connect.

As Kubernetes would, a test starts a shard that ended again. It chooses when."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedProcess, fork
from sharded_syncer import PATIENT, TWO, be_patient, check_books, digests, first_learner, rejoin, said
from syncer_client import Client, SyncerProcess, raw_job, turn

from diloco.doctor.links import check_links
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.load import job_to_json
from diloco_protocol.vocabulary import SYNC_PORT, SyncerExit
from diloco_syncer.shards import messages as ms
from diloco_syncer.shards.stream import MessageStream, connect_syncer, make_proof
from diloco_syncer.shards.supervisor import MAX_OPENING
from free_ports import free_port
from parties import Parties
from patience import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


class Hub:
    """A syncer and its two shards, each a process; the learners' region is in another cluster."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.parties = folder, Parties(folder / "pki", "raw")
        self.own, self.mine = self.parties.syncer(), Credentials.from_directory(self.parties.learner())
        self.ports, self.port = [free_port(), free_port()], free_port()
        self.address = f"127.0.0.1:{free_port()}"
        addresses = ", ".join(f"'127.0.0.1:{port}'" for port in self.ports)
        self.overrides = [
            *(TWO, PATIENT, "syncer.cluster=hub", "regions=[{name: local, cluster: eu, learners: 2}]"),
            *("syncer.tls={secretName: a}", "learners.credentials={secretName: b}"),
            "syncer.storage={uri: 's3://bucket/of-this-job'}",
            f"syncer.shardPods={{addresses: [{addresses}]}}",
            f"syncer.endpoint={{type: External, address: '{self.address}'}}",
            *overrides,
        ]
        self.syncer = SyncerProcess(folder / "syncer", raw_job(*self.overrides))
        self.pods: dict[int, ForkedProcess] = {}

    def words(self) -> list[str]:
        listen = ("--listen", self.address, "--shards-listen", f"127.0.0.1:{self.port}", "--shard-host", "s-{}.ns.svc")
        return [*listen, "--credentials", str(self.own)]

    def start(self, *shards: int) -> Hub:
        for shard in shards:
            self.start_shard(shard)
        self.syncer.start(*self.words())
        return self

    def start_shard(self, shard: int, job: str = "") -> None:
        words = ["--job", job or str(self.syncer.folder / "job.json"), "--store", str(self.syncer.store)]
        words += ["--listen", f"127.0.0.1:{self.ports[shard]}", "--credentials", str(self.own), "--threads", "1"]
        words += ["--shard", str(shard), "--syncer", f"127.0.0.1:{self.port}"]
        self.pods[shard] = fork(["-m", "diloco_syncer", *words], {}, self.log(shard))

    def log(self, shard: int) -> Path:
        return self.folder / f"shard-{shard}.log"

    def text(self, shard: int) -> str:
        return self.log(shard).read_text() if self.log(shard).exists() else ""

    def kill_shard(self, shard: int) -> None:
        self.pods[shard].kill()
        self.pods[shard].wait()

    def client(self) -> Client:
        return Client(self.syncer, credentials=self.mine)

    async def first_learner(self) -> Client:
        return await first_learner(self.syncer, self.client())

    def serving(self) -> list[bool]:
        return [row["serving"] for row in self.syncer.status()["shards"]]

    def stop(self) -> None:
        self.syncer.stop()
        for pod in self.pods.values():
            if pod.poll() is None:
                pod.kill()


@contextmanager
def hub_at(folder: Path, *overrides: str) -> Iterator[Hub]:
    hub = Hub(folder, *overrides)
    try:
        yield hub
    finally:
        hub.stop()
    for text in (hub.syncer.text(), hub.text(0), hub.text(1)):
        assert "Traceback" not in text and "a fault of this program" not in text


@pytest.mark.promise("Shards in pods of their own outlive the syncer, and make the bits of shards beside it")
async def test_pods_make_the_bits_of_processes_and_go_on_when_a_shard_or_the_syncer_is_killed(tmp_path: Path) -> None:
    beside = SyncerProcess(tmp_path / "beside", raw_job(TWO)).start()
    try:
        client = await first_learner(beside)
        for version in range(4):
            await turn(client, version)
        await client.close()
        assert beside.terminate() == 0
    finally:
        beside.stop()
    with hub_at(tmp_path / "pods") as hub:
        hub.start(0, 1)
        client = await hub.first_learner()
        assert [(shard.host, shard.port) for shard in client.shards()] == [("127.0.0.1", port) for port in hub.ports]
        await turn(client, 0)
        hub.kill_shard(1)
        await until(lambda: said(hub.syncer, "shard 1 is lost"))
        assert hub.serving() == [True, False]
        row = hub.syncer.status()["shards"][1]
        assert (row["failures"], row["message"]) == (1, "it has ended, or is not reached")
        hub.start_shard(1)
        await until(lambda: said(hub.syncer, "shard 1 is ready"))
        await turn(client, 1)
        await turn(client, 2)
        await client.close()
        hub.syncer.kill()
        first = dict(hub.pods)
        hub.syncer.start(*hub.words())
        again = Client(hub.syncer, client.ordinal, client.process, credentials=hub.mine)
        client = await rejoin(client, hub.syncer, again)
        assert hub.serving() == [True, True]
        await turn(client, 3)
        tokens = hub.syncer.status()["tokens"]
        await client.close()
        assert first == hub.pods and [pod.poll() for pod in hub.pods.values()] == [None, None]
        assert hub.syncer.terminate() == 0
        for pod in hub.pods.values():
            pod.terminate()
            assert pod.wait() == 0
    check_books(hub.syncer, tokens)
    assert digests(hub.syncer.store) == digests(beside.store)


async def test_a_job_begins_when_its_pods_have_come_however_long_that_takes(tmp_path: Path) -> None:
    with hub_at(tmp_path, "syncer.shardPods.addresses=[a, '127.0.0.1:4001']") as hub:
        hub.start(0)
        client = hub.client()
        await client.join()
        beginning = asyncio.create_task(client.initialise())
        await until(lambda: said(hub.syncer, "shard-lost: waiting for shard pods"))
        await until(lambda: hub.syncer.status()["shards"][0]["message"] == "")
        assert not beginning.done()
        status = hub.syncer.status()
        assert status["shards"][1]["message"] == "its pod has not connected yet"
        told = [event["message"] for event in status["events"] if event["kind"] == "shard-lost"]
        assert len(told) == 1 and re.fullmatch("waiting for shard pods (0, )?1", told[0])  # the first may be slow too
        hub.start_shard(1)
        await beginning
        await until(lambda: client.shards())
        assert [(s.host, s.port) for s in client.shards()] == [("a", SYNC_PORT), ("127.0.0.1", 4001)]
        await client.close()


async def test_each_region_is_told_how_it_reaches_shards(tmp_path: Path) -> None:
    regions = "regions=[{name: local, cluster: hub, learners: 1}, {name: far, cluster: eu, learners: 1}]"
    ported = "syncer.endpoint={type: NodePort, nodePort: 30000, address: a}"
    with hub_at(tmp_path, regions, "syncer.shardPods.addresses=[]", ported) as hub:
        hub.mine = Credentials.from_directory(hub.parties.learner("any", ""))
        hub.start(0, 1)
        near, far = hub.client(), hub.client()
        await near.join()
        await near.initialise()
        await until(lambda: near.shards())
        await far.join(region="far")
        told = [[(shard.host, shard.port) for shard in one.shards()] for one in (near, far)]
        assert told == [[("s-0.ns.svc", SYNC_PORT), ("s-1.ns.svc", SYNC_PORT)], [("", 30001), ("", 30002)]]
        for one in (near, far):
            await one.close()


async def say_to(hub: Hub, data: bytes, credentials: Credentials | None = None) -> bytes:
    """What the port for shards answers; ``credentials``: behind TLS."""
    context = None
    if credentials is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(credentials.directory / "tls.crt", credentials.directory / "tls.key")
    reader, writer = await asyncio.open_connection("127.0.0.1", hub.port, ssl=context)
    try:
        writer.write(data)
        with suppress(OSError):
            return await asyncio.wait_for(reader.read(), 60)
        return b""
    finally:
        writer.close()


async def hear_refusal(stream: MessageStream) -> str:
    async for message in stream.read_messages():
        assert isinstance(message, ms.HelloRefused)
        return message.why
    return ""


@pytest.mark.promise("Who has not the syncer's key is no shard, and nothing that it says is parsed")
async def test_a_stranger_is_no_shard_and_a_shard_of_another_kind_is_refused_by_words(tmp_path: Path) -> None:
    with hub_at(tmp_path) as hub:
        hub.start()
        own = Credentials.from_directory(hub.own)
        other = Parties(tmp_path / "theirs", "raw", title="theirs")
        hello = ms.write_message(ms.Hello(0, 2))
        message = len(hello).to_bytes(4, "big") + hello
        strangers = [hub.mine, Credentials.from_directory(other.syncer())]
        for one in strangers:  # one of this job's learners, and a syncer of another authority
            assert await say_to(hub, make_proof(one) + message, one) == b""
        assert await say_to(hub, b"GET / HTTP/1.1\r\n\r\n") == b""
        assert said(hub.syncer, "has not the syncer's key") == 1  # and is not logged for each
        assert "Hello" not in hub.syncer.text() and hub.serving() == [False, False]
        for one in strangers:  # and no shard believes another syncer
            with pytest.raises(Exception, match="another certificate than this shard has"):
                await connect_syncer(one, f"127.0.0.1:{hub.port}")
        for odd, words in (
            (ms.Hello(0, 3), "shard 0 is one of 3, and the syncer has 2"),
            (ms.Hello(2, 2), "shard 2 is one of 2, and the syncer has 2"),
            (ms.Hello(1, 2, "0.0.1"), f"shard 1 is of release 0.0.1, and the syncer of {ms.RELEASE}"),
        ):
            stream = await connect_syncer(own, f"127.0.0.1:{hub.port}")
            stream.send(odd)
            assert await hear_refusal(stream) == words and said(hub.syncer, words)
            stream.close()
        three = raw_job(*hub.overrides, "syncer.shards=3", "syncer.shardPods.addresses=[a, b, c]")
        (tmp_path / "three.json").write_text(job_to_json(three))
        hub.start_shard(0, str(tmp_path / "three.json"))
        await until(lambda: "the syncer refuses this shard: shard 0 is one of 3" in hub.text(0))
        assert hub.pods[0].poll() is None  # it tries again
        hub.kill_shard(0)
        hub.start_shard(0)
        hub.start_shard(1)
        client = await hub.first_learner()
        assert hub.serving() == [True, True]
        await turn(client, 0)
        await client.close()


async def test_a_flood_of_the_port_for_shards_pushes_out_its_own_oldest(tmp_path: Path) -> None:
    with hub_at(tmp_path) as hub:
        hub.start()
        silent = [await asyncio.open_connection("127.0.0.1", hub.port) for _ in range(MAX_OPENING + 9)]
        for reader, _ in silent[:9]:
            assert await reader.read() == b""
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(silent[-1][0].read(), 0.5)
        hub.start_shard(1)
        await until(lambda: hub.syncer.status()["shards"][1]["message"] == "")
        for _, writer in silent:
            writer.close()


async def test_a_pod_that_ends_by_a_fault_says_so_and_one_that_cannot_go_on_ends_the_syncer(tmp_path: Path) -> None:
    nesterov = "sync.outer.optimizer=nesterov"
    with hub_at(tmp_path, nesterov) as hub:
        hub.start()
        stream = await connect_syncer(Credentials.from_directory(hub.own), f"127.0.0.1:{hub.port}")
        stream.send(ms.Hello(1, 2))
        stream.send(ms.ShardEnded(SyncerExit.STORE, "the store cannot be used: for a test"))
        stream.close()
        await until(lambda: said(hub.syncer, "shard 1 is away"))
        await until(lambda: hub.syncer.status()["shards"][1]["failures"] == 1)
        assert hub.syncer.status()["shards"][1]["message"] == "the store cannot be used: for a test"
        stream = await connect_syncer(Credentials.from_directory(hub.own), f"127.0.0.1:{hub.port}")
        stream.send(ms.Hello(1, 2))
        stream.send(ms.ShardEnded(SyncerExit.CONFIGURATION, "no restart mends it"))
        assert hub.syncer.wait() == SyncerExit.CONFIGURATION
        assert "no restart mends it" in hub.syncer.text().splitlines()[-1]
        stream.close()


async def test_both_ends_take_new_credentials_and_the_doctor_finds_each_pod(tmp_path: Path) -> None:
    with hub_at(tmp_path) as hub:
        hub.start(0, 1)
        client = await hub.first_learner()
        hub.parties.syncer()  # the same folder
        hub.kill_shard(0)
        hub.start_shard(0)
        await until(lambda: said(hub.syncer, "shard 0 is ready"))
        await client.close()

        def look() -> dict[str, Any]:
            job = hub.syncer.folder / "job.json"
            return {one.about: one for one in check_links(job, [], hub.parties.learner("doctor"), None)}

        found = await asyncio.to_thread(look)
        for about in ("way to the syncer", "way to shard 0", "way to shard 1"):
            assert found[about].level == "ok", found[about]
        hub.kill_shard(1)
        found = await asyncio.to_thread(look)
        assert [found[f"way to shard {n}"].level for n in (0, 1)] == ["ok", "warning"]


async def test_the_arguments_of_pods_need_credentials(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(job_to_json(raw_job(TWO)))
    for words in (["--syncer", "127.0.0.1:1"], ["--shards-listen", "127.0.0.1:0", "--control-key-file", "x"]):
        log = tmp_path / words[0]
        ended = fork(["-m", "diloco_syncer", "--job", str(job), "--store", str(tmp_path / "s"), *words], {}, log)
        assert ended.wait() == 2 and "shards in pods of their own need --credentials" in log.read_text()
