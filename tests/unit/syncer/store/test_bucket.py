"""A store in a bucket, against a real service over HTTP: what is there, what is lost on the way, what a
person is told."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tape_reader
from diloco_protocol.common.files import NotWritable, TooLarge
from diloco_syncer.runtime.durability import Durability, Snapshot
from diloco_syncer.store import bucket
from diloco_syncer.store.base import HigherEpoch, ObjectExists, ObjectNotFound
from diloco_syncer.store.bucket import BucketStore
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.tape import DISCARDED, Tape, TapeError, segment_names
from free_ports import closed_port
from parties import Parties
from s3_service import SECRET, TOKEN, Relay, S3Service, environment, given


@pytest.fixture
def relay(s3: S3Service) -> Iterator[Relay]:
    relay = Relay(s3.port)
    try:
        with given(environment(relay.url)):
            yield relay
    finally:
        relay.close()


def opened() -> BucketStore:
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}/a folder")
    assert isinstance(store, BucketStore)
    return store


def record(version: int) -> MergeRecord:
    return MergeRecord("j", 1, 0, version, theta=np.full(3, version, np.float32), number=version)


def test_large_objects_and_small(relay: Relay) -> None:
    store = opened()
    data = np.random.default_rng(1).bytes(9_000_001)
    store.create("records/large", memoryview(data)[:5_000_000], b"", memoryview(data)[5_000_000:])
    assert store.read("records/large", len(data)) == data
    assert store.read_start("records/large", 1000) == data[:1000]
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    store.replace("records/values", memoryview(values))
    assert store.read("records/values", 24) == values.tobytes()
    assert store.list("records") == ["records/large", "records/values"], "and no probe is left"


@pytest.mark.promise(
    "In a bucket an optimizer's state may be larger than one request, and than the syncer's memory: it goes in parts, "
    "is there when all parts are, and comes back in parts into a file"
)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_state_goes_in_parts(relay: Relay, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr(bucket, "PART_BYTES", 5 << 20)  # the least that S3 takes
    store = opened()
    checkpoints = Checkpoints(store, Epoch.claim(store), "j", 2)
    state = np.frombuffer(np.random.default_rng(1).bytes(parts * (5 << 20) - 4096), np.uint8)
    name = checkpoints.write_blob("optimizer", state)
    tag = str(store._client.head(store._quick, name)["e_tag"]).strip('"')
    assert tag.endswith("-3") == (parts == 3), "S3 says of how many parts an object was made"
    found = checkpoints.reader.blob(name)
    assert np.array_equal(found, state)
    assert isinstance(store.read_large(name, 1 << 30), memoryview) == (parts == 3)
    with pytest.raises(TooLarge):
        store.read_large(name, 1 << 20)
    with pytest.raises(ObjectNotFound):
        store.read_large("optimizer/none", 1 << 20)


@pytest.mark.promise(
    "A merge record that is larger than 64 MiB is read from a bucket in ranges: one that breaks goes again"
)
def test_a_large_record_comes_in_ranges(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "PART_BYTES", 1 << 20)
    store, asked = opened(), list[tuple[int, int]]()
    checkpoints = Checkpoints(store, Epoch.claim(store), "j", 2)
    theta = np.random.default_rng(1).random(700_000, np.float32)  # 2.7 MiB
    checkpoints.write_record(MergeRecord("j", 1, 0, 1, theta=theta, number=1))
    get_range = store._client.get_range

    def watch(*given: object, start: int, end: int) -> object:
        asked.append((start, end))
        if start == 1 << 20:
            relay.cut()
            threading.Timer(0.5, relay.mend).start()
        return get_range(*given, start=start, end=end)

    monkeypatch.setattr(store._client, "get_range", watch)
    monkeypatch.setattr(store._spool, "allocate", lambda size: pytest.fail("a record is no guest of the disk's"))
    assert np.array_equal(checkpoints.read_record(0, 1).theta, theta)
    assert [start for start, _ in asked] == [0, 1 << 20, 2 << 20]


def test_what_breaks_off_in_parts_changes_nothing(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PART_BYTES": 5 << 20, "RETRY_SECONDS": 0.5, "RETRIES": 1}.items():
        monkeypatch.setattr(bucket, name, value)
    store = opened()
    store.replace("optimizer/one", b"before")
    relay.throttle(256 << 10)  # a part takes 20 s
    cutting = threading.Timer(1.0, relay.cut)
    cutting.start()
    with pytest.raises(OSError, match="store s3://"):
        store.replace("optimizer/one", bytes(16 << 20))
    cutting.join()
    relay.mend()
    assert store.read_large("optimizer/one", 1 << 30) == b"before"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_objects_than_a_page_of_a_listing_has(relay: Relay) -> None:
    store = opened()
    for number in range(1005):  # a page has 1000
        store.replace(f"tape/{number:04d}", b"x")
    assert store.list("tape") == [f"tape/{number:04d}" for number in range(1005)]


def test_threads_share_a_store(relay: Relay) -> None:
    store = opened()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                store.create(f"records/t{number}-{turn}", bytes([number, turn]) * 500)
                assert store.read(f"records/t{number}-{turn}", 1000) == bytes([number, turn]) * 500
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and len(store.list("records")) == 60


def test_a_service_that_is_away_is_an_error_of_the_medium_and_comes_back(relay: Relay) -> None:
    store = opened()
    store.create("records/a", b"x")
    relay.cut()
    for work in (
        lambda: store.create("records/b", b"y"),
        lambda: store.read("records/a", 9),
        lambda: store.list("records"),
        lambda: store.exists("records/a"),
    ):
        with pytest.raises(OSError, match=r"s3://bucket/.* 127.0.0.1:\d+ cannot be reached"):
            work()
    relay.mend()
    assert store.read("records/a", 9) == b"x"
    # Away for a moment only, and nobody hears of it.
    relay.cut()
    threading.Timer(0.3, relay.mend).start()
    assert store.exists("records/a")


def test_a_service_that_says_nothing_is_waited_for_with_a_bound(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    # The short bound is for the stalled request alone: a slow machine's service may take longer for the others. The
    # usual one is longer than this test may take.
    with monkeypatch.context() as bounds:
        bounds.setattr(bucket, "QUICK_SECONDS", 3600.0)
        store = opened()
        bounds.setattr(bucket, "RETRY_SECONDS", 1.0)
        bounds.setattr(store, "_quick", store._opened(0.5, 0.5))
        relay.stall()
        began = time.monotonic()
        with pytest.raises(OSError, match="does not answer in time"):
            store.create("records/a", b"x")
        assert time.monotonic() - began > 0.4, "by the bound that was given"
        relay.mend()
    try:
        store.create("records/a", b"x")
    except ObjectExists:  # it may have arrived after all
        assert store.read("records/a", 9) == b"x"


def test_a_put_may_take_longer_than_a_read_may_pause(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "READ_SECONDS", 1.0)
    store = opened()
    data = np.random.default_rng(1).bytes(3_000_000)
    relay.throttle(2_000_000)
    began = time.monotonic()
    store.create("records/a", data)
    assert time.monotonic() - began > 1
    assert store.read("records/a", len(data)) == data, "bytes come all the time"
    relay.mend()
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 0.5)
    store = BucketStore(store.where)
    # A read that pauses is given up long before a put would be, which has longer than this test.
    threading.Timer(0.5, relay.stall).start()
    relay.throttle(2_000_000)
    began = time.monotonic()
    with pytest.raises(OSError, match="does not answer in time"):
        store.read("records/a", len(data))
    assert time.monotonic() - began > 1


def test_a_put_whose_answer_is_lost_is_there_once(relay: Relay) -> None:
    store = opened()
    relay.lose_next_answer()
    with pytest.raises(ObjectExists):  # the client asks again by itself
        store.create("records/a", b"x")
    assert store.read("records/a", 9) == b"x"
    with pytest.raises(ObjectExists):
        store.create("records/a", b"other")


@pytest.mark.parametrize("cut", [False, True])
def test_a_tape_whose_answer_is_lost_goes_on(relay: Relay, cut: bool) -> None:
    store = opened()
    written = Tape(store)
    written.append(record(1))
    relay.lose_next_answer(and_cut=cut)
    if cut:
        with pytest.raises(OSError, match="cannot be reached"):
            written.flush()
        relay.mend()
        written.append(record(2))  # the next merge comes before it is tried again
        written.flush()
    else:
        written.flush()
        written.append(record(2))
        written.flush()
    written.append(record(3))
    written.flush()
    assert tape_reader.verify(store) == 3 == len(segment_names(store))
    # What another one wrote is not taken for our own.
    ours = Tape(store)
    theirs = Tape(store)
    theirs.append(record(4))
    theirs.flush()
    ours.append_note(DISCARDED, 1.0, {"fragment": 0, "epoch": 2, "version": 3, "reason": "another line"})
    with pytest.raises(TapeError, match="another syncer"):
        ours.flush()


@pytest.mark.promise(
    "A superseded syncer leaves the tape to its successor; a syncer whose predecessor wrote a line at the "
    "last moment starts again from the store"
)
async def test_a_succeeded_syncer_leaves_the_tape_to_its_successor(relay: Relay) -> None:
    """In a bucket a segment of its own would stand where the successor's next one belongs."""
    store = opened()
    checkpoints, tape = Checkpoints(store, Epoch.claim(store), "j", 2), Tape(store)
    durability = Durability(
        checkpoints=checkpoints,
        tape=tape,
        snapshot=lambda: Snapshot(1, {}, []),
        on_problem=lambda problem: None,
        newest_records=list,
    )
    tape.append(record(1))
    Epoch.claim(store)
    for write in (durability.checkpoint, durability.write_state_and_collect):
        with pytest.raises(HigherEpoch):
            await write()
    assert store.list("tape") == []


# ------------------------------------------------------------------ what a person is told


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    service = S3Service(tmp_path_factory.mktemp("guarded"), rights=True)
    try:
        yield service
    finally:
        service.stop()


def refused(where: str) -> str:
    with pytest.raises(NotWritable) as found:
        open_store(where)
    said = str(found.value)
    assert SECRET not in said and TOKEN not in said and "<" not in said and len(said) < 400
    assert found.value.__suppress_context__ or found.value.__context__ is None, "a log would show its text"
    return said


@pytest.mark.promise("A bucket behind a cache that says what was true before is refused at the start, with the cure")
@pytest.mark.parametrize("kept", [False, True], ids=["after a put", "after a delete"])
def test_a_service_that_answers_out_of_a_cache_is_refused(
    s3: S3Service, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Fencing asks whether the next epoch is there."""
    real, cache = BucketStore.exists, dict[str, bool]()

    def exists(self: BucketStore, name: str) -> bool:
        found = cache.get(name, real(self, name))
        if found is kept:
            cache[name] = found
        return found

    monkeypatch.setattr(BucketStore, "exists", exists)
    with given(environment(s3.url)), pytest.raises(NotWritable, match=r"HEAD lags.*turn the cache before it off"):
        open_store(f"s3://bucket/{uuid.uuid4().hex}")


def test_no_such_bucket(s3: S3Service) -> None:
    with given(environment(s3.url)):
        said = refused("s3://nobody-made-this/x")
    assert "store s3://nobody-made-this/x: there is no such bucket" in said and "syncer.storage.uri" in said


def test_access_denied(guarded: S3Service) -> None:
    with given(environment(guarded.url)):
        assert "access denied (403 InvalidAccessKeyId)" in refused("s3://bucket/x")


def test_wrong_endpoints(s3: S3Service) -> None:
    with closed_port() as port, given(environment(f"http://127.0.0.1:{port}")):
        said = refused("s3://bucket/x")
        assert f"127.0.0.1:{port} cannot be reached (no connection)" in said and "AWS_ENDPOINT_URL" in said
    with given(environment("http://no-such-host.invalid")):
        assert "no-such-host.invalid cannot be reached (its name is not known)" in refused("s3://bucket/x")
    with given(environment(f"{s3.url}/moto-api")):
        assert "does not speak this protocol (404)" in refused("s3://bucket/x")
    with given(environment(s3.url.replace("http", "https"))):
        assert "cannot be reached" in refused("s3://bucket/x")


def test_an_endpoint_that_is_none_and_a_uri_without_a_bucket(s3: S3Service) -> None:
    for endpoint in (
        "127.0.0.1:9000",
        "minio",
        "ftp://minio",
        "http://host:9000x",
        "http://host:99999",
        "http://host:0",
        "http://host:+1",
        "http://ho st",
        "http://host/ x",
        " http://host",
        "http://host\n",
        "http://hö.st",
        "http://ho%st",
        "http://ho<st",
        "http://host/<x>",
        "http://u{v@host",
        "http://[::1",
        "http://[::1]x:90",
        "http://[1.2.3.4]",
        "http://[fe80::1%25eth0]",
        "http://1.2.3.400",
        "http://1.2.3.4.5",
        "http://host.0x",
        "http://:9000",
    ):
        with given(environment(endpoint)):
            assert "set AWS_ENDPOINT_URL to https://" in refused("s3://bucket/x"), endpoint
    with given(environment(s3.url)):
        for where in ("s3://", "s3:///x"):
            assert "names no bucket" in refused(where)
        for where in ("s3://[b/x", "s3://b x/y", "s3://b:x/y", "s3://minio:9000/bucket", "s3://b>c/x"):
            assert "correct syncer.storage.uri to s3://BUCKET" in refused(where), where


def test_endpoints_that_are_addresses() -> None:
    for endpoint in (
        "http://minio",
        "https://minio.storage.svc:9000/",
        "http://127.0.0.1:9000",
        "http://[::1]:9000",
        "http://[FD00::1.2.3.4]",
        "https://s3.eu-west-1.amazonaws.com",
        "http://my_minio.:1/a/b?c=d",
        "https://12345.r2.cloudflarestorage.com",
        "http://user:word@minio",
        "http://1a-2b:9000",
    ):
        assert bucket._is_address(endpoint), endpoint


def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    parties = Parties(tmp_path / "pki", "job")
    made = parties.other("service", [], ["localhost"])
    service = S3Service(tmp_path, tls=(made / "tls.crt", made / "tls.key"))
    endpoint = f"https://localhost:{service.port}"
    trusted = {"SSL_CERT_FILE": str(made / "ca.crt")}
    try:
        with given(environment(endpoint)):
            assert f"localhost:{service.port} cannot be reached (its certificate is not trusted)" in refused(
                "s3://bucket/x"
            )
        with given(environment(endpoint) | trusted):
            assert "there is no such bucket" in refused("s3://bucket/x")
    finally:
        service.stop()


def test_an_identity_whose_token_is_not_there(s3: S3Service, tmp_path: Path) -> None:
    role = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"), "AWS_ROLE_ARN": "arn:aws:iam::1:role/x"}
    with given({"AWS_ENDPOINT_URL": s3.url, **role}):
        assert "the credentials of its identity could not be had" in refused("s3://bucket/x")


def test_credentials_of_an_identity_in_a_pod(s3: S3Service, tmp_path: Path) -> None:
    """The interface by which a node's agent hands a pod its role's keys."""
    shown: list[str | None] = []

    class Agent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers["Authorization"])
            keys = {"AccessKeyId": "a", "SecretAccessKey": SECRET, "Token": TOKEN}
            body = json.dumps(keys | {"Expiration": "2099-01-01T00:00:00Z"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "token").write_text("the pod's own")
    with http.server.HTTPServer(("127.0.0.1", 0), Agent) as agent:
        threading.Thread(target=agent.serve_forever, daemon=True).start()
        env = {
            "AWS_ENDPOINT_URL": s3.url,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{agent.server_port}/keys",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
        }
        try:
            with given(env):
                store = opened()
                store.create("records/a", b"x")
        finally:
            agent.shutdown()
    assert store.list("records") == ["records/a"] and set(shown) == {"the pod's own"}


def test_no_credentials(s3: S3Service) -> None:
    nowhere = {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
    env = environment(s3.url)
    del env["AWS_SESSION_TOKEN"], env["AWS_SECRET_ACCESS_KEY"]
    with given(env):
        assert "credentials are not complete" in refused("s3://bucket/x")
    del env["AWS_ACCESS_KEY_ID"]
    with given(env | nowhere):
        said = refused("s3://bucket/x")
    assert "no credentials were found" in said and "AWS_SECRET_ACCESS_KEY" in said


def test_secrets_in_the_uri_are_refused_and_not_repeated() -> None:
    assert "environment" in refused(f"s3://key:{SECRET}@bucket/x")
    assert "environment" in refused(f"s3://bucket/x?aws_secret_access_key={SECRET}")
    for where in (
        f"s3://:{SECRET}@bucket/x",
        f"s3://{SECRET}@bucket/x",
        f"s3://key:{SECRET}@[bucket/x",
        f"s3://key:/{SECRET}@bucket/x",
        f"s3://key:?{SECRET}@bucket/x",
        f"s3://key:#{SECRET}@bucket/x",
        f"s3://bucket/x?secret=@{SECRET}",
        f"s3://:{SECRET}@bucket/x?secret={SECRET}",
    ):
        assert "syncer.storage.uri" in refused(where)
    assert "store s3://…@bucket/x: " in refused(f"s3://:{SECRET}@bucket/x?y")


def test_without_the_package(tmp_path: Path) -> None:
    """In another process, where it cannot be imported."""
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from diloco_syncer.store.open import open_store\n"
        "try: open_store('s3://bucket/x')\n"
        "except OSError as error: print(error.strerror)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "store s3://bucket/x: the package obstore is not installed" in done.stdout, done.stderr


def test_what_the_service_answers_is_not_repeated() -> None:
    """A wrong signature is answered with the request that was signed: S3's own words, recorded."""
    text = (
        "The operation lacked the necessary privileges to complete for path x: Error performing PUT "
        "http://127.0.0.1:1/b/x in 5ms - Server returned non-2xx status code: 403 Forbidden: <Error>"
        "<Code>SignatureDoesNotMatch</Code><CanonicalRequest>PUT\n/b/x\n\nx-amz-security-token:"
        f"{TOKEN}</CanonicalRequest></Error>"
    )
    said = bucket._meaning(text, "s3")
    assert "403 SignatureDoesNotMatch" in said and TOKEN not in said
