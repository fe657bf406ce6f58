"""The store's promises on every kind of bucket, each against a service that packages ship."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from syncer_client import Client, SyncerProcess, raw_job, turn

import tape_reader
from bucket_services import KEY, KINDS, BucketService
from diloco_protocol.common.files import NotWritable, TooLarge
from diloco_syncer.store.base import HigherEpoch, ObjectExists, ObjectNotFound, Store
from diloco_syncer.store.checkpoint import Checkpoints, RecordMadeMeanwhile
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.tape import Tape
from s3_service import SECRET, TOKEN, Relay, given

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module", params=KINDS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketService]:
    service = BucketService(request.param, tmp_path_factory.mktemp(request.param))
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def relay(service: BucketService) -> Iterator[Relay]:
    """The way to the service, which the environment names."""
    relay = Relay(service.port)
    try:
        with given(service.environment(relay.port)):
            yield relay
    finally:
        relay.close()


@pytest.fixture
def where(service: BucketService, relay: Relay) -> str:
    """A folder of its own."""
    return f"{service.scheme}://bucket/{uuid.uuid4().hex}/a folder"


def at_once(work: Callable[[int], object], times: int) -> list[object]:
    """What each call returned or raised; all begin together."""
    ready = threading.Barrier(times)

    def one(number: int) -> object:
        ready.wait(30)
        try:
            return work(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(times) as pool:
        return list(pool.map(one, range(times)))


def record(version: int, epoch: int) -> MergeRecord:
    return MergeRecord("j", epoch, 0, version, theta=np.full(3, version, np.float32), number=version)


def test_objects_are_whole_or_absent(where: str) -> None:
    store = open_store(where)
    data = np.random.default_rng(1).bytes(6_000_001)
    store.create("records/large", memoryview(data)[:4_000_000], b"", memoryview(data)[4_000_000:])
    assert store.read("records/large", len(data)) == data and store.read_start("records/large", 1000) == data[:1000]
    with pytest.raises(TooLarge):
        store.read("records/large", len(data) - 1)
    store.replace("records/large", b"other")
    store.replace("records/empty", b"")
    assert store.read("records/large", 9) == b"other" and store.read_start("records/empty", 9) == b""
    assert store.exists("records/empty") and store.list("records") == ["records/empty", "records/large"]
    store.delete("records/large")
    store.delete("records/large")
    assert not store.exists("records/large") and store.list("nothing") == []
    for work in (lambda: store.read("records/large", 9), lambda: store.read_start("records/large", 9)):
        with pytest.raises(ObjectNotFound):
            work()


@pytest.mark.promise(
    "Buckets of S3 (two), Google and Azure: of many that create an object one succeeds, two syncers at "
    "once make each version once, and lost answers and throttling cause no fault (`make bucket-services`; "
    "stand-ins, not the clouds' own)"
)
def test_of_many_that_create_exactly_one_succeeds(where: str) -> None:
    stores = [open_store(where) for _ in range(8)]
    for place in range(5):
        name = f"records/f{place}"
        found = at_once(lambda number, name=name: stores[number].create(name, b"%d" % number), len(stores))
        winners = [number for number, what in enumerate(found) if what is None]
        assert len(winners) == 1 and sum(isinstance(what, ObjectExists) for what in found) == 7, found
        assert stores[0].read(name, 9) == b"%d" % winners[0]


@pytest.mark.promise(
    "Buckets of S3 (two), Google and Azure: of many that create an object one succeeds, two syncers at "
    "once make each version once, and lost answers and throttling cause no fault (`make bucket-services`; "
    "stand-ins, not the clouds' own)"
)
def test_a_listing_has_more_than_a_page(where: str) -> None:
    store = open_store(where)
    names = [f"records/{number:05d}" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.replace(name, b"x"), names))
    assert store.list("records") == names


@pytest.mark.promise(
    "Buckets of S3 (two), Google and Azure: of many that create an object one succeeds, two syncers at "
    "once make each version once, and lost answers and throttling cause no fault (`make bucket-services`; "
    "stand-ins, not the clouds' own)"
)
def test_a_put_whose_answer_is_lost_is_there_once(where: str, relay: Relay) -> None:
    store = open_store(where)
    relay.lose_next_answer()
    with contextlib.suppress(ObjectExists):  # the client asks again by itself, and may be told that the name exists
        store.create("records/a", b"ours")
    assert store.read("records/a", 9) == b"ours"
    with pytest.raises(ObjectExists):
        store.create("records/a", b"other")
    tape = Tape(store)
    tape.append(record(1, 1))
    relay.lose_next_answer(and_cut=True)
    with pytest.raises(OSError):
        tape.flush()
    relay.mend()
    tape.flush()
    assert tape_reader.verify(store) == 1


@pytest.mark.promise(
    "Buckets of S3 (two), Google and Azure: of many that create an object one succeeds, two syncers at "
    "once make each version once, and lost answers and throttling cause no fault (`make bucket-services`; "
    "stand-ins, not the clouds' own)"
)
def test_a_service_that_is_asked_too_often_is_asked_again(where: str, relay: Relay, service: BucketService) -> None:
    store = open_store(where)
    for work in (
        lambda: store.create("records/a", b"x"),
        lambda: store.replace("records/b", b"y"),
        lambda: store.read("records/a", 9),
        lambda: store.list("records"),
        lambda: store.delete("records/b"),
    ):
        if service.kind == "gs":
            service.tell("/refuse", {"count": 2})
        else:
            relay.refuse_next(2)
        work()
    assert store.list("records") == ["records/a"] and store.read("records/a", 9) == b"x"


@pytest.mark.promise(
    "Buckets of S3 (two), Google and Azure: of many that create an object one succeeds, two syncers at "
    "once make each version once, and lost answers and throttling cause no fault (`make bucket-services`; "
    "stand-ins, not the clouds' own)"
)
def test_two_syncers_at_once_make_each_version_once(where: str) -> None:
    """Two claim the store together; each writes its records as fast as it can, until it hears that it was succeeded."""

    def syncer(_: int) -> tuple[int, list[int], type[Exception] | None]:
        store: Store = open_store(where)
        epoch = Epoch.claim(store)
        made, checkpoints, written = [], Checkpoints(store, epoch, "j", 2), Tape(store)
        try:
            # The first writes until it is refused: it may have written any number when the second begins.
            for version in range(1, 9) if epoch.number == 2 else itertools.count(1):
                checkpoints.write_record(record(version, epoch.number))
                made.append(version)
                checkpoints.write_state({"of": epoch.number}, [version])
                written.append(record(version, epoch.number))
        except (HigherEpoch, RecordMadeMeanwhile) as error:
            return epoch.number, made, type(error)
        return epoch.number, made, None

    found = at_once(syncer, 2)
    assert all(isinstance(what, tuple) for what in found), found
    (first, of_first, why), (second, of_second, _) = sorted(found)  # type: ignore[misc, type-var]
    assert (first, second) == (1, 2) and why is HigherEpoch
    assert not set(of_first) & set(of_second), "acknowledged by both"
    store = open_store(where)
    for version in (*of_first, *of_second):
        name = f"records/f00000-v{version:012d}.rec"
        made = MergeRecord.unpack(store.read(name, 1 << 20), name)
        assert made.epoch == (first if version in of_first else second)


def test_a_bucket_that_is_not_there_is_told_with_the_cure(service: BucketService, relay: Relay) -> None:
    with pytest.raises(NotWritable, match=r"there is no such bucket.*syncer\.storage\.uri"):
        open_store(f"{service.scheme}://nobody-made-this/x")


@pytest.mark.promise(
    "Buckets of S3 (two), Google and Azure: of many that create an object one succeeds, two syncers at "
    "once make each version once, and lost answers and throttling cause no fault (`make bucket-services`; "
    "stand-ins, not the clouds' own)"
)
async def test_a_killed_syncer_has_a_successor_and_no_merge_is_lost(
    service: BucketService, where: str, relay: Relay, tmp_path: Path
) -> None:
    one, two = (SyncerProcess(tmp_path / name, raw_job(), uri=where) for name in ("one", "two"))
    client = Client(one.start())
    try:
        await client.join()
        await client.initialise()
        await client.ready()
        for version in range(3):
            await turn(client, version)
        assert (await one.call("checkpoint")).ok
        await turn(client, 3)  # after the newest state: from the records alone
        one.kill()
        two.start()
        assert two.addresses["epoch"] == 2 and two.status()["versions"] == [4, 4]
        assert two.terminate() == 0
    finally:
        await client.close()
        one.stop()
        two.stop()
    assert tape_reader.verify(open_store(where)) == 8
    assert not [word for word in (KEY, SECRET, TOKEN) if word in one.text() + two.text()]
