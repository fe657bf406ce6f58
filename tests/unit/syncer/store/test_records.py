"""Records, documents, checkpoints: what is written is read, damage is found, restarts lose nothing."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.export.export import read_model
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.common.files import Buffer
from diloco_protocol.wire.records import FragmentReport, PushHeader, SlotReceipt, StepReport
from diloco_syncer.store import records
from diloco_syncer.store.base import HigherEpoch, Store
from diloco_syncer.store.checkpoint import Checkpoints, RecordMadeMeanwhile, StoreUnusable, offer_name
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.documents import pack_document, unpack_document
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.records import Damaged, FormatRefused, MergeRecord, RecordedPush, Recovered, record_name
from diloco_syncer.store.restore import StoreReader
from example_counts import share_of

LAYOUT = Layout.build([Tensor("w", (100,), "float32", False)], 2)
FROZEN = safetensors.numpy.save({"embed": np.ones(3, np.float32)})


def header(fragment: int = 0, sequence: int = 1) -> PushHeader:
    counts = tuple(
        FragmentReport(1, 0, 2, 200, confirmed_tokens=0, dropped_overlap=0, dropped_stale=0) for _ in range(2)
    )
    report = StepReport(
        2, 2, 200, counts, compute_seconds=0.5, stalled_seconds=0.1, loss=2.5, step_seconds=0.2, cursors=((1, 7),)
    )
    return PushHeader(
        fragment,
        sequence,
        4,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=2,
        steps=2,
        tokens=200,
        compute_seconds=0.5,
        encoding="int4",
        layout_digest="f" * 64,
        report=report,
        slot=0,
        incarnation=3,
    )


def record(fragment: int, version: int, epoch: int = 1, number: int = 0) -> MergeRecord:
    rng = np.random.default_rng(100 * fragment + version)
    n = LAYOUT.elements(fragment)
    theta = rng.standard_normal(n).astype(np.float32)
    return MergeRecord(
        job="j",
        epoch=epoch,
        fragment=fragment,
        version=version,
        theta=theta,
        digest=records.theta_digest(theta),
        outer={"momentum": rng.standard_normal(n).astype(np.float32), "merges": np.array([version], np.int64)},
        feedback=rng.standard_normal(n).astype(np.float32),
        responders=(RecordedPush(header(fragment, version), 1.0, 2, 0.25),),
        number=number or 2 * version - 1 + fragment,
        round=4,
        time=1.5e9,
        quorum_seconds=0.1,
        waited_seconds=0.2,
        merge_seconds=0.3,
        job_tokens=200,
    )


def data_of(made: MergeRecord) -> bytes:
    return b"".join(made.pack())


def same(one: MergeRecord, other: MergeRecord) -> bool:
    return (
        one.body() == other.body()
        and np.array_equal(one.theta, other.theta)
        and one.outer.keys() == other.outer.keys()
        and all(np.array_equal(one.outer[k], other.outer[k]) for k in one.outer)
        and (one.feedback is None) == (other.feedback is None)
    )


def test_a_record_is_read_as_it_was_written() -> None:
    made = record(1, 3)
    read = MergeRecord.unpack(data_of(made), "x")
    assert same(made, read)
    # The loss is not durable; everything else of a responder is.
    assert dataclasses.replace(read.responders[0].header.report, loss=2.5) == header().report


@given(st.data())
@settings(max_examples=share_of(150), deadline=None)
def test_any_changed_byte_is_found(data: st.DataObject) -> None:
    raw = bytearray(data_of(record(0, 1)))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        read = MergeRecord.unpack(bytes(raw), "x")
    except (Damaged, FormatRefused):
        return
    assert same(read, record(0, 1))  # it was one of the zeros between the arrays


@given(st.integers(0, 4000))
@settings(max_examples=share_of(60), deadline=None)
def test_a_cut_off_record_is_found(length: int) -> None:
    raw = data_of(record(0, 1))
    # Behind the last array there are up to 63 zeros, which nothing needs.
    if length < len(raw) - 64:
        with pytest.raises(Damaged):
            MergeRecord.unpack(raw[:length], "x")


def with_header(raw: bytes, **changes: Any) -> bytes:
    length = records._PREFIX.unpack_from(raw)[1]
    start = records._PREFIX.size
    made = {**json.loads(raw[start : start + length]), **changes}
    text = json.dumps(made).encode()
    head = records._PREFIX.pack(records.MAGIC, len(text), records.checksum(text)) + text
    return head + bytes(-len(head) % 64) + raw[start + length + -(start + length) % 64 :]


@pytest.mark.parametrize("number", [0, 1, 3, 99, "2", None])
def test_another_format_number_is_refused_by_name(number: Any) -> None:
    with pytest.raises(FormatRefused, match=r"here has format .*; this release reads 2"):
        MergeRecord.unpack(with_header(data_of(record(0, 1)), format=number), "here")
    body = b"".join(pack_document({"a": 1})).replace(b'"format":2', b'"format":' + json.dumps(number).encode())
    with pytest.raises(FormatRefused, match="here has format"):
        unpack_document(body, "here")


@pytest.mark.parametrize(
    "arrays", [[["theta", "float32", 10**9, 0, 0]], [["theta", "object", 1, 0, 0]], [["theta", "float32", -1, 0, 0]]]
)
def test_a_header_that_lies_about_its_arrays_is_damage(arrays: Any) -> None:
    with pytest.raises(Damaged):
        MergeRecord.unpack(with_header(data_of(record(0, 1)), arrays=arrays), "x")


def test_documents() -> None:
    body = {"a": [1, None, "ü"], "b": {"c": 1.5}}
    raw = b"".join(pack_document(body))
    assert unpack_document(raw, "x") == body
    for wrong in (raw[:-2], raw.replace(b"1.5", b"1.6"), b"", b"{}\n", b"\xff\n"):
        with pytest.raises(Damaged):
            unpack_document(wrong, "x")


def test_names_of_records() -> None:
    for fragment, version in ((0, 1), (511, 10**11)):
        assert records.parse_record_name(record_name(fragment, version)) == (fragment, version)
    for other in ("records/x", "records/f1-v2.rec", "state/f00001-v000000000002.rec", "records/f00001-vx.rec"):
        assert records.parse_record_name(other) is None


# ------------------------------------------------------------------ checkpoints


def opened(store: Store, keep: int = 2) -> Checkpoints:
    made = Checkpoints(store, Epoch.claim(store), "j", keep)
    made.identify({"seed": "a"})
    return made


def begun(store: Store) -> Checkpoints:
    """A store with version 0 in force and a first state."""
    made = opened(store)
    made.load()
    commit_version_0(made)
    made.write_state({"n": 0}, [0, 0])
    return made


def commit_version_0(made: Checkpoints) -> None:
    layout = made.stage(1, "layout.rec", *records.pack("blob", {}, {"blob": array(LAYOUT.to_json().encode())}))
    names = [made.stage(1, f"f{p:05d}.rec", *record(p, 0, made.epoch.number).pack()) for p in range(2)]
    frozen = made.stage(1, "frozen.rec", *records.pack("blob", {}, {"blob": array(FROZEN)}))
    made.commit_initial(layout, names, frozen)


def array(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def merge(made: Checkpoints, versions: list[int], upto: int) -> None:
    """Write records of both fragments until both are at ``upto``."""
    for version in range(min(versions) + 1, upto + 1):
        for fragment in range(2):
            written = record(fragment, version, made.epoch.number)
            written.before = record(fragment, version - 1, made.epoch.number).body()
            made.write_record(written)
            versions[fragment] = version


def test_an_empty_store_restores_nothing(store: Store) -> None:
    restored = opened(store).load()
    assert restored.core is None and restored.layout is None and restored.newest == []


def test_another_job_or_a_changed_field_is_refused(store: Store) -> None:
    opened(store)
    other = Checkpoints(store, Epoch.claim(store), "other", 1)
    with pytest.raises(StoreUnusable, match="holds the job 'j', not 'other'"):
        other.identify({})
    with pytest.raises(StoreUnusable, match="seed may not change"):
        Checkpoints(store, Epoch.claim(store), "j", 1).identify({"seed": "b"})


@pytest.mark.promise(
    "A `job.json` that is damaged together with its copy is reported as wrong content of the store (exit code 2), not "
    "as a fault of the program"
)
def test_a_damaged_job_document_is_the_stores_content_and_no_fault(store: Store) -> None:
    opened(store)
    damage(store, "job.json")
    opened(store)
    assert store.read("job.json", 1 << 20) == store.read("job.copy.json", 1 << 20)
    store.delete("job.json")
    with pytest.raises(StoreUnusable, match="holds the job 'j', not 'other'"):
        Checkpoints(store, Epoch.claim(store), "other", 1).identify({})
    for name in ("job.json", "job.copy.json"):
        damage(store, name)
    with pytest.raises(StoreUnusable, match=r"job\.json.*restore the file"):
        opened(store)


def test_version_0_is_in_force_only_when_it_was_committed(store: Store) -> None:
    made = opened(store)
    made.stage(1, "layout.rec", *records.pack("blob", {}, {"blob": array(LAYOUT.to_json().encode())}))
    assert opened(store).load().layout is None
    begun(store)
    restored = opened(store).load()
    assert restored.layout == LAYOUT and restored.frozen
    assert opened(store).reader.blob(restored.frozen).tobytes() == FROZEN
    assert [r.version for r in restored.newest] == [0, 0]
    assert same(restored.newest[1], record(1, 0, restored.newest[1].epoch))


def test_records_newer_than_the_state_are_found_in_order(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 3)
    made.write_state({"n": 1}, [1, 2])
    restored = opened(store).load()
    assert restored.core == {"n": 1} and not restored.problems
    assert [(r.fragment, r.version) for r in restored.newer] == [(0, 2), (0, 3), (1, 3)]
    assert restored.newer[0].responders[0].header.sequence == 2
    assert [same(r, record(p, 3, made.epoch.number)) for p, r in enumerate(restored.newest)] == [True, True]


def damage(store: Store, name: str) -> None:
    raw = bytearray(store.read(name, 1 << 20))
    raw[-700 if name.endswith(".rec") else -3] ^= 1
    store.replace(name, bytes(raw))


@pytest.mark.promise(
    "A damaged record that no restart needs does not prevent a start, although the tape lacks its line"
)
def test_a_damaged_record_that_only_the_tape_lacks_stops_no_start(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 2)
    made.write_state({"n": 1}, versions)
    name = record_name(0, 1)
    store.replace(name, store.read(name, 1 << 20)[:20])
    again = opened(store)
    assert [record.version for record in again.load().newest] == [2, 2]
    assert [(r.fragment, r.version) for r in again.newer_than({}, [2, 2])] == [(1, 1), (0, 2), (1, 2)]


def test_a_damaged_newest_state_falls_back_to_the_one_before_and_loses_nothing(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 2)
    made.write_manifest({"n": 1}, versions, "")
    merge(made, versions, 4)
    made.write_manifest({"n": 2}, versions, "")
    made.collect("")
    damage(store, store.list("state")[-1])
    restored = opened(store).load()
    assert restored.core == {"n": 1} and "SHA-256" in restored.problems[0]
    assert [r.version for r in restored.newest] == [4, 4]
    assert [(r.fragment, r.version) for r in restored.newer] == [(0, 3), (1, 3), (0, 4), (1, 4)]


def test_a_newest_state_that_is_gone_is_told(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    for upto in (2, 4):
        merge(made, versions, upto)
        made.write_manifest({"n": upto}, versions, "")
        made.collect("")
    newest = store.list("state")[-1]
    store.delete(newest)
    restored = opened(store).load()
    assert restored.core == {"n": 2} and [r.version for r in restored.newest] == [4, 4]
    assert restored.problems == [
        f"{newest} is gone, which {store.list('manifests')[-1]} names: going back to an older state"
    ]


def test_records_are_restored_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other."""
    store = DirectoryStore(tmp_path / "s")
    made, versions = begun(store), [0, 0]
    merge(made, versions, 2)
    both, read = threading.Barrier(2, timeout=20), StoreReader.record

    def record_of(self: StoreReader, fragment: int, version: int) -> MergeRecord:
        both.wait()
        return read(self, fragment, version)

    monkeypatch.setattr(StoreReader, "record", record_of)
    assert [r.version for r in opened(store).load().newest] == [2, 2]


def test_a_damaged_newest_record_goes_back_one_version_loudly(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 3)
    damage(store, record_name(1, 3))
    restored = opened(store).load()
    assert [r.version for r in restored.newest] == [3, 2]
    assert [(r.fragment, r.version) for r in restored.newer] == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3)]
    assert "fragment 1 continues from version 2" in restored.problems[0]
    assert restored.discarded[0][:2] == (1, 2)
    assert len(store.list("discarded")) == 1
    # The version can be made again.
    made = opened(store)
    made.load()
    made.write_record(record(1, 3, made.epoch.number))
    assert [r.version for r in opened(store).load().newest] == [3, 3]


def test_a_damaged_record_of_the_states_own_version_goes_back_one(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    for upto in (1, 2):
        merge(made, versions, upto)
    for _ in range(3):  # nothing is merged, and only the newest two are left
        made.write_manifest({"n": 1}, versions, "")
        made.collect("")
    for harm in (damage, Store.delete):
        harm(store, record_name(1, 2))
        restored = opened(store).load()
        assert [r.version for r in restored.newest] == [2, 1] and not restored.newer
        assert "fragment 1 continues from version 1" in restored.problems[0]


def test_version_0_stays_until_two_records_follow_it(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    for upto, left in ((0, 2), (1, 1), (2, 0)):
        merge(made, versions, upto)
        for _ in range(3):
            made.write_manifest({"n": upto}, versions, "")
            made.collect("")
        fragments = [name for name in store.list("initial") if "-f0000" in name]
        assert len(fragments) == 2 * left, fragments


def test_a_fragment_of_which_nothing_is_left_is_stood_in_for(store: Store) -> None:
    """Only a restart goes on with it: an export has nothing to show."""
    made, versions = begun(store), [0, 0]
    merge(made, versions, 3)
    for _ in range(3):
        made.write_manifest({"n": 1}, versions, "")
        made.collect("")
    for version in (2, 3):
        damage(store, record_name(1, version))
    with pytest.raises(StoreUnusable, match="no whole version is left of fragment 1"):
        StoreReader(store, "j").newest(LAYOUT)
    restored = opened(store).load()
    assert [(r.version, r.made_in) for r in restored.newest] == [(3, 1), (0, 0)]


@pytest.mark.parametrize("harm", ["nothing", "newest record", "newest state", "a gap"])
def test_an_export_is_what_a_restart_goes_on_from_and_changes_nothing(store: Store, harm: str) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 2)
    made.write_state({"n": 2}, versions)
    merge(made, versions, 4)
    if harm == "newest record":
        damage(store, record_name(1, 4))
    elif harm == "newest state":
        damage(store, store.list("state")[-1])
    elif harm == "a gap":
        store.delete(record_name(0, 4))
    folders = ("records", "state", "discarded", "initial")
    before = {name: store.read(name, 1 << 20) for folder in folders for name in store.list(folder)}
    exported = StoreReader(store, "j").newest(LAYOUT)
    assert before == {name: store.read(name, 1 << 20) for folder in folders for name in store.list(folder)}
    _, tensors, found = read_model(store, "j")
    restored = opened(store).load()
    assert found == [r.version for r in restored.newest] == [c.newest.version for c in exported.chains]
    for fragment, pieces in enumerate(LAYOUT.fragments):
        for piece in pieces:
            values = tensors["w"][piece.start : piece.stop]
            assert np.array_equal(values, restored.newest[fragment].theta[piece.offset :][: values.size])


def test_a_gap_is_never_jumped(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 4)
    for version in (2, 3):
        store.delete(record_name(0, version))
    restored = opened(store).load()
    assert [r.version for r in restored.newest] == [1, 4]
    assert "versions 4 to 4 cannot be used" in restored.problems[0]


def taken(version: int, follows: int, epoch: int) -> MergeRecord:
    """Fragment 0's version as a learner had it in epoch 1."""
    rows = (SlotReceipt(0, (1 << 64) - 1, 100, 50, sequence=3, version=version, last_step=10, compute_seconds=1.5),)
    recovered = Recovered(follows, 1, rows)
    return dataclasses.replace(record(0, version, epoch), responders=(), recovered=recovered)


@pytest.mark.parametrize("gone", [True, False])
def test_a_damaged_record_is_known_from_the_one_after_it(store: Store, gone: bool) -> None:
    made = begun(store)
    merge(made, [0, 0], 4)
    name = record_name(0, 3)
    store.replace(name, b"\0" * 100)
    if gone:
        store.delete(name)
    restored = opened(store).load()
    assert [r.version for r in restored.newest] == [4, 4] and not restored.problems and not restored.discarded
    told = [r.body() for r in restored.newer if r.fragment == 0]
    assert told == [record(0, version, made.epoch.number).body() for version in (1, 2, 3, 4)]


def test_a_version_from_a_learner_bridges_the_gap_before_it(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 4)
    for version in (2, 3, 4):
        store.delete(record_name(0, version))
    again = opened(store)
    assert [r.version for r in again.load().newest] == [1, 4]
    written = taken(7, 1, again.epoch.number)
    again.write_record(written)
    last = opened(store)
    restored = last.load()
    assert not restored.problems
    assert [r.version for r in restored.newest] == [7, 4]
    assert [(r.version, r.follows) for r in restored.newer if r.fragment == 0] == [(1, 0), (7, 1)]
    assert restored.newest[0].recovered == written.recovered and restored.newest[0].made_in == 1
    last.write_record(record(0, 8, last.epoch.number))
    last.write_record(taken(20, 8, last.epoch.number))
    restored = opened(store).load()
    assert [(r.version, r.follows) for r in restored.newer if r.fragment == 0] == [(1, 0), (7, 1), (8, 7), (20, 8)]
    # A damaged one takes its fragment back to what it follows.
    damage(store, record_name(0, 20))
    restored = opened(store).load()
    assert [r.version for r in restored.newest] == [8, 4]
    assert "versions 20 to 20 cannot be used" in restored.problems[0]


def test_a_store_in_which_nothing_fits_is_refused(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    merge(made, versions, 1)
    for name in store.list("state"):
        damage(store, name)
    with pytest.raises(StoreUnusable, match="no state in the store can be used"):
        opened(store).load()


def test_garbage_goes_and_nothing_that_is_needed(store: Store) -> None:
    made, versions = begun(store), [0, 0]
    for upto in (5, 9, 14, 20):
        merge(made, versions, upto)
        made.write_manifest({"n": upto}, versions, "")
        made.collect("")
    left = {records.parse_record_name(name) for name in store.list("records")}
    # Two manifests are kept (versions 14 and 20), and everything from the older newest state on.
    assert left == {(f, v) for f in range(2) for v in range(14, 21)}
    assert len(store.list("state")) == 2 and len(store.list("manifests")) == 2
    assert len(store.list("initial")) == 4  # layout and frozen parameters, each with its copy
    # A restart from the older one of both still works.
    damage(store, store.list("state")[-1])
    assert [r.version for r in opened(store).load().newest] == [20, 20]


def test_the_records_of_states_without_a_checkpoint_stay(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    made, versions = begun(store), [0, 0]
    for upto in (3, 5, 5):
        merge(made, versions, upto)
        made.write_state({"n": upto}, versions)
    made.collect("")
    assert not store.exists(record_name(0, 3)) and store.exists(record_name(0, 4))
    assert [r.version for r in opened(store).load().newest] == [5, 5]


def test_a_syncer_that_has_written_no_state_yet_keeps_the_one_before_the_newest(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    made, versions = begun(store), [0, 0]
    merge(made, versions, 2)
    made.write_state({"n": 2}, versions)
    again = opened(store)
    again.load()
    again.collect("")
    damage(store, store.list("state")[-1])
    assert opened(store).load().core == {"n": 0}


def test_a_record_under_anothers_name_is_damage(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    made = begun(store)
    merge(made, [0, 0], 1)
    store.replace(record_name(0, 1), store.read(record_name(1, 1), 1 << 20))
    restored = opened(store).load()
    assert [r.version for r in restored.newest] == [0, 1]
    assert "holds 'j' fragment 1 version 1" in restored.problems[0]


def test_the_record_of_a_predecessor_is_taken_over_and_of_a_successor_obeyed(store: Store) -> None:
    old = begun(store)
    new = opened(store)
    new.load()
    name = record_name(0, 1)
    store.create(name, data_of(record(0, 1, old.epoch.number)))  # the old one's, at the last moment
    with pytest.raises(RecordMadeMeanwhile, match=f"{name} was made in epoch {old.epoch.number} meanwhile"):
        new.write_record(record(0, 1, new.epoch.number))
    with pytest.raises(HigherEpoch, match="claimed epoch 2"):
        old.write_record(record(1, 1, old.epoch.number))
    assert not store.exists(record_name(1, 1))
    again = opened(store)
    assert [r.version for r in again.load().newest] == [1, 0]


@pytest.mark.promise(
    "A record that a superseded syncer made after its successor had started costs no offer: it is set aside"
)
def test_a_record_of_a_succeeded_syncer_is_set_aside_where_its_successor_went_on_without_it(store: Store) -> None:
    """Learners have offered to the successor what that record has in it, and more."""
    old = begun(store)
    old.write_record(record(0, 1, old.epoch.number))
    new = opened(store)
    new.load()
    new.write_state({"n": 2}, [1, 0])
    for name, made in ((record_name(0, 2), record(0, 2, old.epoch.number)), (record_name(1, 1), record(1, 1, 2))):
        store.create(name, data_of(made))
    again = opened(store)
    restored = again.load()
    assert [r.version for r in restored.newest] == [1, 1] and not restored.problems
    assert restored.discarded == [
        (0, 1, "versions 2 to 2 cannot be used: 2 was made in epoch 1, which epoch 2 had succeeded")
    ]
    assert len(store.list("discarded")) == 1 and not store.exists(record_name(0, 2))
    again.write_record(record(0, 2, again.epoch.number))
    assert [r.version for r in opened(store).load().newest] == [2, 1]


def test_a_put_whose_answer_was_lost_may_be_repeated(store: Store) -> None:
    made = begun(store)
    made.write_record(record(0, 1))
    made.write_record(record(0, 1))
    different = dataclasses.replace(record(0, 1), theta=record(0, 2).theta, digest=record(0, 2).digest)
    with pytest.raises(StoreUnusable, match="made twice in epoch 1, differently"):
        made.write_record(different)


def test_a_torn_record_in_the_way_is_set_aside(store: Store) -> None:
    made = begun(store)
    store.create(record_name(0, 1), data_of(record(0, 1))[:300])
    made.write_record(record(0, 1))
    assert same(made.load().newest[0], record(0, 1)) and len(store.list("discarded")) == 1


def test_offers_and_optimizer_state(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = begun(store)
    made.spool_offer(header(1, 5), 0.75, np.array([0.5, 0.0625]), np.arange(50, dtype=np.uint8))
    made.spool_offer(header(0, 6), 0.5, np.array([0.25]), np.arange(3, dtype=np.uint8))
    damage_name = store.list("offers")[0]
    raw = bytearray(store.read(damage_name, 1 << 20))
    raw[-64] ^= 1
    store.replace(damage_name, bytes(raw))
    name = made.write_blob("optimizer", np.arange(100, dtype=np.uint8))
    read, blob = list[str](), StoreReader.blob
    monkeypatch.setattr(StoreReader, "blob", lambda reader, each: (read.append(each), blob(reader, each))[1])
    restored = opened(store).load()
    assert read and name not in read, "its size is in its header"
    assert restored.optimizer == name and restored.optimizer_bytes == 100
    assert made.reader.blob(name).tobytes() == bytes(range(100))
    assert [o.header.id for o in restored.offers] == [header(1, 5).id]
    (offer,) = restored.offers
    assert offer.norm == 0.75 and offer.squares.tolist() == [0.5, 0.0625] and offer.encoded_bytes == 50
    assert made.read_offer(header(1, 5)).tobytes() == bytes(range(50))
    assert "the offer is lost" in restored.problems[0]
    store.delete(offer_name(offer.header))
    with pytest.raises(StoreUnusable, match="acknowledged"):
        made.read_offer(header(1, 5))


def test_an_optimizer_state_that_is_torn_keeps_no_syncer_from_its_start(store: Store) -> None:
    made = begun(store)
    before, newest = (made.write_blob("optimizer", np.arange(size, dtype=np.uint8)) for size in (50, 100))
    store.replace(newest, store.read(newest, 1 << 20)[:10])
    restored = opened(store).load()
    assert (restored.optimizer, restored.optimizer_bytes) == (before, 50)
    assert newest in restored.problems[0] and store.list("optimizer") == [before]


def test_an_offer_that_is_removed_while_a_successor_reads_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The syncer before may have merged it, and removes what nobody needs without asking for its epoch."""
    made = begun(store)
    made.spool_offer(header(0, 6), 0.5, np.array([0.25]), np.arange(3, dtype=np.uint8))
    made.spool_offer(header(1, 5), 0.5, np.array([0.25]), np.arange(3, dtype=np.uint8))
    names, list_names = store.list("offers"), store.list
    store.delete(offer_name(header(0, 6)))
    successor = opened(store)
    monkeypatch.setattr(store, "list", lambda folder: names if folder == "offers" else list_names(folder))
    restored = successor.load()
    assert [offer.header.id for offer in restored.offers] == [header(1, 5).id] and not restored.problems


class SucceededMeanwhile(DirectoryStore):
    """A directory in which a successor claims the next epoch just before an object of ``folder`` is written."""

    folder = ""

    def _succeed(self, name: str) -> None:
        if self.folder and name.startswith(self.folder):
            Epoch.claim(self)

    def replace(self, name: str, *parts: Buffer) -> None:
        self._succeed(name)
        super().replace(name, *parts)

    def create(self, name: str, *parts: Buffer) -> None:
        self._succeed(name)
        super().create(name, *parts)


@pytest.mark.promise(
    "A superseded syncer acknowledges no offer, and announces no state or merge that its successor may not have read"
)
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_succeeded_syncer_makes_no_offer_durable(tmp_path: Path, meanwhile: bool) -> None:
    store = SucceededMeanwhile(tmp_path / "s")
    old = begun(store)
    if meanwhile:  # between its check and its write
        store.folder = "offers/"
    else:
        opened(store).load()
    with pytest.raises(HigherEpoch):
        old.spool_offer(header(1, 5), 0.75, np.array([0.75]), np.arange(50, dtype=np.uint8))
    assert meanwhile or not store.list("offers")


@pytest.mark.promise(
    "A superseded syncer acknowledges no offer, and announces no state or merge that its successor may not have read"
)
@pytest.mark.parametrize("folder", ["state/", "records/"])
def test_what_a_successor_may_not_have_read_is_not_durable(tmp_path: Path, folder: str) -> None:
    store = SucceededMeanwhile(tmp_path / "s")
    old = begun(store)
    store.folder = folder
    with pytest.raises(HigherEpoch):
        if folder == "state/":
            old.write_state({"n": 1}, [0, 0])
        else:
            old.write_record(record(0, 1))


@pytest.mark.promise("A checkpoint that had to wait while version 0 came into force removes nothing of it")
def test_a_checkpoint_from_before_version_0_removes_nothing_of_it(store: Store) -> None:
    """It had to wait for the store, and version 0 came into force before it."""
    made = opened(store)
    for n in range(3):
        made.write_state({"n": n}, [])
    commit_version_0(made)
    made.write_manifest({"n": 3}, [], "")
    made.collect("")
    found = opened(store).load()
    assert found.core == {"n": 3} and [record.version for record in found.newest] == [0, 0]


@pytest.mark.promise("A superseded syncer removes nothing of its successors, also after it was paused")
@pytest.mark.parametrize("stands_still", [False, True])
def test_a_succeeded_syncer_removes_nothing_of_its_successors(
    store: Store, monkeypatch: pytest.MonkeyPatch, stands_still: bool
) -> None:
    old = begun(store)
    old.write_state({"n": 1}, [0, 0])
    new = opened(store)
    new.load()
    optimizer = new.write_blob("optimizer", np.arange(9, dtype=np.uint8))
    for n in range(2, 5):
        new.write_manifest({"n": n}, [0, 0], optimizer)
    made = {folder: store.list(folder) for folder in ("state", "manifests", "optimizer", "records", "initial")}
    if stands_still:  # after its last check
        monkeypatch.setattr(old.epoch, "check", lambda: None)
        old.collect("")
    else:
        with pytest.raises(HigherEpoch):
            old.collect("")
    left = {folder: store.list(folder) for folder in made}
    gone = {name for folder in made for name in made[folder]} - {name for folder in left for name in left[folder]}
    assert not [name for name in gone if "/e0000000002-" in name]
    found = opened(store).load()
    assert found.core == {"n": 4} and found.optimizer == optimizer


def test_a_directory_keeps_nothing_half(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "s")
    made = begun(store)
    merge(made, [0, 0], 2)
    names = [path.name for path in (tmp_path / "s").rglob("*")]
    assert not [name for name in names if name.endswith(".tmp")]


@pytest.mark.promise(
    "A stored header of any form with a correct checksum counts as damage, not as a fault of the program",
    section="Hostile callers",
)
@pytest.mark.parametrize(
    "arrays", [None, 7, "x", [1], [[]], [["theta"]], [["theta", [], 1, 0, 0]], [[{}, "<f4", 1, 0, 0]]]
)
@pytest.mark.parametrize("body", [{}, [], None, {"responders": 5}, {"responders": [{"header": 3}]}])
def test_a_header_of_any_form_with_a_right_checksum_is_damage(arrays: Any, body: Any) -> None:
    """Not a fault of this program, which would end the syncer at each start."""
    for header_ in ({"arrays": arrays, "body": body}, {"body": body}, {"arrays": arrays}):
        raw = json.dumps({"format": records.FORMAT, "kind": "merge"} | header_).encode()
        data = records._PREFIX.pack(records.MAGIC, len(raw), records.checksum(raw)) + raw
        with pytest.raises(Damaged):
            MergeRecord.unpack(data + b"\0" * 4096, "x")
