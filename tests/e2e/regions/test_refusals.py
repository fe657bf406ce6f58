"""7. What comes to the hub's port from outside and is refused: raw gRPC, raw TCP and bulk calls, while a job runs."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from diloco_protocol.security.certificates import Issued
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.wire import bulk, channels, limits, sync_pb2
from diloco_protocol.wire.bulk_calls import bulk_connection
from diloco_protocol.wire.verify_server import ServerNotTrusted, verify_syncer
from floods import Flood
from parties import DAY, Parties

from ..clusters import until
from ..conftest import SYSTEM
from ..jobs import Job, pod_template
from .world import HUB, US, RunJob, World, contributes

pytestmark = pytest.mark.timeout(600)
ANSWER_SECONDS = 60.0  # to a Join; a busy machine's syncer may stand still for some
UNANSWERED = ("no TLS handshake", "sends nothing", "cannot connect")  # of what ``heard`` returns


class Insider(Parties):
    """Whoever has the job's authority, and so can make every kind of certificate."""

    def __init__(self, world: World, job: Job) -> None:
        super().__init__(world.folder / f"made-{job.name}", job.name, world.namespace)
        pki = world.pki(job.name)
        self.authority = Issued((pki / "ca.crt").read_bytes(), (pki / "ca.key").read_bytes())
        self.secret = (pki / world.namespace / job.name / "join-token").read_text().strip()

    def at(self, region: str, **how: Any) -> Path:
        """A learner's folder, with the job's own token unless another is given."""
        how.setdefault("token", self.secret)
        return self.learner(f"{region}-{secrets.token_hex(3)}", region, **how)


async def first_word(address: str, folder: Path | None, raw: bytes) -> str:
    """What the syncer says to this Join: ``welcome``, the reason of a refusal, or the status code.
    ``folder`` None: in plaintext."""
    made = Credentials() if folder is None else Credentials.from_directory(folder)
    async with made.aio_channel(address, channels.channel_options()) as channel:
        call: Any = channel.stream_stream(channels.SESSION)(metadata=made.metadata(), timeout=ANSWER_SECONDS)
        try:
            await call.write(raw)
            answer = await call.read()
        except aio.AioRpcError as error:
            return error.code().name
        if answer is aio.EOF:
            return str((await call.code()).name)
        first = sync_pb2.SyncerMessage.FromString(answer)
        call.cancel()
        return first.refusal.reason if first.HasField("refusal") else str(first.WhichOneof("kind"))


async def first_bulk_word(address: str, folder: Path, request: sync_pb2.DownloadRequest) -> str:
    """What the syncer says to this request on a bulk connection: ``found``, why not, or why it does not answer it."""
    connection = bulk_connection(Credentials.from_directory(folder), address)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            header, _ = await bulk.download(connection, request)
        return "found" if header.found else header.reason
    except (bulk.TransferError, TimeoutError) as error:
        return str(error)
    finally:
        connection.drop()


def ask_for(address: str, folder: Path, request: sync_pb2.DownloadRequest, expected: str) -> None:
    """Until the answer has this word: another one may be of a connection that broke."""
    asked = lambda: expected in asyncio.run(first_bulk_word(address, folder, request))  # noqa: E731
    until(f"a bulk call is answered: {expected}", asked, 2 * ANSWER_SECONDS)


def joins(to: Job, **changes: Any) -> bytes:
    """A Join of a process that only listens (it holds no model)."""
    fields: dict[str, Any] = {
        "format": limits.FORMAT,
        "job": to.name,
        "process": secrets.token_hex(16),
        "region": HUB,
        "ordinal": 9,
        "role": sync_pb2.ROLE_LEARNER,
        "idle": True,
        "attempt": time.time_ns() // 1000,
    }
    return sync_pb2.LearnerMessage(join=sync_pb2.Join(**(fields | changes))).SerializeToString()


def heard(address: str, folder: Path, honest: Path) -> str:
    """What a learner with this folder's certificate says, which looks at the syncer first, and takes the
    names of an honest one (with its own it would see itself that it is wrong here)."""
    names = Credentials.from_directory(honest).names()
    try:
        asyncio.run(verify_syncer(Credentials.from_directory(folder), address, names))
    except ServerNotTrusted as error:
        return str(error)
    return "ok"


def ask_to_join(address: str, folder: Path | None, make_join: Callable[[], bytes]) -> str:
    """``first_word``, to another Join if nobody answers the one before."""

    def ask() -> str | None:
        word = asyncio.run(first_word(address, folder, make_join()))
        return word if word != "DEADLINE_EXCEEDED" else None

    return str(until("the syncer answers a Join", ask, 2 * ANSWER_SECONDS))


def ask_to_join_as_trusted(address: str, folder: Path, make_join: Callable[[], bytes]) -> str:
    """The same, where the certificate is good: then UNAVAILABLE, too, means that nobody was there."""

    def ask() -> str | None:
        word = ask_to_join(address, folder, make_join)
        return word if word != "UNAVAILABLE" else None

    return str(until("the syncer is there", ask, 60))


def hear_syncer(address: str, folder: Path, honest: Path) -> str:
    """``heard``, once the syncer has answered: verify_syncer gives it some seconds only."""

    def listen() -> str | None:
        words = heard(address, folder, honest)
        return words if not any(each in words for each in UNANSWERED) else None

    return str(until("the syncer answers a handshake", listen, 60))


def is_hung_up_on(address: str, context: ssl.SSLContext) -> bool:
    """Whether the syncer ends a connection without a certificate; False: it has not answered."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname="diloco-syncer") as tls,
        ):
            assert tls.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # TLS's alert, or a reset
        pass
    return True


def process_in(job: Job, region: str) -> str:
    """The process that holds the region's slot."""
    return next(str(row["process"]) for row in job.training()["slots"] if row["region"] == region)


def metrics(job: Job) -> str:
    return job.page_text("/metrics")


def refused(job: Job) -> dict[str, int]:
    return dict(job.training()["tls"]["refused"])


@pytest.mark.promise(
    "A client from another cluster with a wrong certificate, token, region or message is refused, each "
    "with its own reason",
    section="Hostile callers",
)
@pytest.mark.ci
def test_who_may_not_is_refused_by_name(world: World, run_job: RunJob) -> None:
    job = run_job("guarded", {HUB: 1, US: 1})
    job.in_merges(2)
    pods, epoch = world.identities(job.name, HUB, US), job.training()["epoch"]
    insider, address = Insider(world, job), world.address()
    honest = insider.learner("honest", HUB, token=insider.secret)
    foreign = Parties(world.folder / "foreign", job.name, world.namespace, title="theirs")
    stranger = foreign.learner("stranger", HUB, token=insider.secret)
    (stranger / "ca.crt").write_bytes(insider.authority.certificate)  # it trusts the hub, and not the other way

    # The certificate.
    for folder, reason, said in (
        (stranger, "stranger", "unknown ca"),
        (insider.at(HUB, since=-30 * DAY, days=10), "expired", "certificate expired"),
        (insider.at(HUB, since=30 * DAY), "not-yet-valid", "refuses our certificate"),
        (insider.at(HUB, job="another"), "wrong-job", "hung up"),
        (insider.syncer("another-syncer"), "wrong-role", "refuses our certificate"),
    ):
        before = refused(job).get(reason, 0)
        words = hear_syncer(address, folder, honest)
        assert said in words and words != "ok", (reason, words)
        assert ask_to_join(address, folder, lambda: joins(job)) == "UNAVAILABLE", reason
        until(f"{reason} is counted", lambda r=reason, b=before: refused(job).get(r, 0) >= b + 2, 30)
    # No certificate, and no TLS at all.
    assert ask_to_join(address, None, lambda: joins(job)) == "UNAVAILABLE"
    bare = ssl.create_default_context(cadata=insider.authority.certificate.decode())
    bare.set_alpn_protocols(["h2"])
    until("it hangs up on who has no certificate", lambda: is_hung_up_on(address, bare), 60)
    # What is said with a good certificate.
    said_once: list[bytes] = []

    def join_anew() -> bytes:
        said_once.append(joins(job))  # one that was not answered may have been read: it is not said again
        return said_once[-1]

    assert ask_to_join_as_trusted(address, honest, join_anew) == "welcome"
    assert ask_to_join_as_trusted(address, honest, lambda: said_once[-1]) == "replayed"
    assert ask_to_join_as_trusted(address, honest, lambda: joins(job, job="another")) == "bad-join"
    assert ask_to_join_as_trusted(address, honest, lambda: joins(job, region=US)) == "wrong-region"
    thief = insider.at(HUB, token="b6" * 32)
    assert ask_to_join_as_trusted(address, thief, lambda: joins(job)) == "UNAUTHENTICATED"
    # On a bulk connection: another's process, one that has no session, and the token.
    kinds = sync_pb2.DownloadRequest
    others = kinds(job=job.name, process=process_in(job, US), what=kinds.LAYOUT)
    ask_for(address, honest, kinds(what=kinds.JOB), "found")
    ask_for(address, honest, others, "a process with another certificate has this id")
    ask_for(address, honest, kinds(job=job.name, process="ab" * 16, what=kinds.LAYOUT), "has no session")
    ask_for(address, thief, kinds(what=kinds.JOB), "the join token is missing or wrong")

    expected = {
        "stranger",
        "expired",
        "not-yet-valid",
        "wrong-job",
        "wrong-role",
        "no-certificate",
        "not-tls",
        "replayed",
        "wrong-region",
        "wrong-process",
        "wrong-token",
    }
    until(f"all of {expected} counted", lambda: not expected - refused(job).keys(), 30)
    page = metrics(job)
    # The log's line for each: tests/integration/tls/test_refusals.py.
    for reason in expected:
        assert f'reason="{reason}"' in page, reason
    # Nobody who trains has noticed.
    for region in (HUB, US):
        contributes(job, region, 60)
    assert world.identities(job.name, HUB, US) == pods and job.training()["epoch"] == epoch
    nothing_secret_is_shown(world, job, insider)
    job.exact()


def nothing_secret_is_shown(world: World, job: Job, insider: Insider) -> None:
    """Tokens and keys, in all that people read."""
    pki = world.pki(job.name) / world.namespace / job.name
    values = [insider.secret]
    for key in pki.glob("*/tls.key"):
        values += [line for line in key.read_text().splitlines() if line and "-" not in line]
    assert len(values) >= 4
    for name, cluster in world.clusters.items():
        shown = cluster.kubectl("get", "dj,pods,cm,sts,deploy,events", "-n", world.namespace, "-o", "yaml")
        labels = "app.kubernetes.io/name=diloco-operator"
        shown += cluster.logs("-n", SYSTEM, "-l", labels, "--tail=-1")
        for pod in world.job(job.name, name).pods():
            shown += cluster.logs(pod["metadata"]["name"], "-n", world.namespace)
        assert not [value for value in values if value in shown], name


@pytest.mark.promise(
    "Under a flood of silent, half-open, garbage and foreign connections learners join, and the job merges",
    section="Hostile callers",
)
def test_the_job_goes_on_under_a_flood(world: World, run_job: RunJob) -> None:
    """Silence, half a handshake, garbage and strangers, from one address: nobody is kept out."""
    # Whoever begins a handshake costs the syncer a signature: with a fifth of a core it has none to spare.
    job = run_job("flooded", {HUB: 1, US: 1}, syncer={"podTemplate": pod_template("syncer", None)})
    job.in_merges(2)
    pods, insider = world.identities(job.name, HUB, US), Insider(world, job)
    foreign = Parties(world.folder / "foreign-flood", job.name, world.namespace, title="theirs")
    (stranger := foreign.learner("stranger", HUB)).joinpath("ca.crt").write_bytes(insider.authority.certificate)
    with Flood(world.address(), insider, stranger) as flood:
        until("it is a flood", lambda: job.training()["tls"]["handshakes"] > 100, 60)
        job.merging_on(120, merges=8)
        # A learner whose pod is deleted meanwhile comes in again.
        there = world.job(job.name, US)
        there.cluster.kubectl("delete", "pod", f"{job.name}-{US}-0", "-n", world.namespace, "--wait=false")
        until("its successor", lambda: (now := there.identities()) and not now.items() & pods[US].items(), 120)
        contributes(job, US, 240)
        assert min(flood.counts.values()) > 20, flood.counts
    assert world.identities(job.name, HUB)[HUB] == pods[HUB] and job.training()["tls"]["handshakes"] <= 256
    counts = refused(job)
    print(f"connections that were made: {flood.counts}; refused: {counts}")
    assert {"stranger", "not-tls"} <= counts.keys()
    job.exact()


def test_a_region_whose_copy_differs_is_kept_out(world: World, run_job: RunJob) -> None:
    """In what is immutable: said on both sides, with the fields' names; it comes in when it is put right."""
    regions = {HUB: 1, US: 1}
    document = world.document("drifted", regions)
    job = run_job("drifted", regions, US)
    job.in_merges(1)
    other = world.document("drifted", regions, seed=7)
    world.give(other, US)
    there = world.job("drifted", US)
    there.wait_condition("SpecDrift", timeout=180)
    assert "seed" in there.condition("SpecDrift")["message"]
    job.wait_condition("SpecDrift", timeout=60)
    said = job.condition("SpecDrift")["message"]
    assert "seed" in said and US in said
    job.merging_on()
    assert not any(row["region"] == US and row["merged_pushes"] for row in job.training()["slots"])
    world.delete("drifted", US)
    world.give(document, US)
    job.in_merges(2)
    there.wait_condition("SpecDrift", "False", timeout=120)
    job.wait_condition("SpecDrift", "False", timeout=900)
    job.exact()
