"""The tape: one line per merge, chained, repaired, verified."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tape_reader
from diloco_protocol.wire.records import FragmentReport, PushHeader, StepReport
from diloco_syncer.store import tape as tapes
from diloco_syncer.store.base import Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import FormatRefused, MergeRecord, RecordedPush, Recovered, theta_digest
from diloco_syncer.store.tape import Tape, TapeError
from recorded_disk import RecordedDisk


def record(fragment: int, version: int) -> MergeRecord:
    report = StepReport(2, 2, 200, (FragmentReport(1, 0, 2, 200),) * 2)
    header = PushHeader(
        fragment,
        version,
        4,
        1,
        base_version=version - 1,
        oldest_version=version - 1,
        first_step=1,
        last_step=2,
        steps=2,
        tokens=200,
        compute_seconds=0.5,
        encoding="int4",
        layout_digest="",
        report=report,
        slot=0,
        incarnation=3,
    )
    theta = np.full(3, version, np.float32)
    return MergeRecord(
        "j",
        1,
        fragment,
        version,
        theta=theta,
        responders=(RecordedPush(header, 1.0, 0, 0.25),),
        number=2 * version - 1 + fragment,
        time=1.5e9,
        digest=theta_digest(theta),
    )


def filled(store: Store, versions: int = 3) -> Tape:
    tape = Tape(store)
    for version in range(1, versions + 1):
        for fragment in range(2):
            tape.append(record(fragment, version))
        tape.flush()
    return tape


def test_lines(store: Store) -> None:
    tape = filled(store)
    assert tape_reader.verify(store) == 6 == tape.lines - len(tapes.segment_names(store))
    lines = list(tape_reader.read(store))
    assert [(line["fragment"], line["version"]) for line in lines] == [(f, v) for v in (1, 2, 3) for f in (0, 1)]
    assert lines[0]["result"] == theta_digest(np.full(3, 1, np.float32))
    assert lines[0]["responders"] == [
        {
            "slot": 0,
            "incarnation": 3,
            "tenure": 3,
            "sequence": 1,
            "base_epoch": 1,
            "base_version": 0,
            "oldest_version": 0,
            "first_step": 1,
            "last_step": 2,
            "offer": False,
            "age": 0,
            "tokens": 200,
            "steps": 2,
            "trained_tokens": 200,
            "trained_steps": 2,
            "batch": 1,
            "weight": 1.0,
            "norm": 0.25,
        }
    ]


def test_a_flushed_line_is_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RecordedDisk(monkeypatch, tmp_path)
    tape = filled(DirectoryStore(tmp_path), 1)
    segment = tapes.segment_names(DirectoryStore(tmp_path))[0]
    for version in (2, 3):
        tape.append(record(0, version))
        whole = (tmp_path / segment).read_bytes()
        disk.events.clear()
        tape.flush()
        assert disk.events == [("flush", segment, whole)] and whole.count(b"\n") == version + 2


def test_a_half_line_is_gone_from_the_device_before_another_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(DirectoryStore(tmp_path), 1)
    segment = tapes.segment_names(DirectoryStore(tmp_path))[0]
    whole = (tmp_path / segment).read_bytes()
    with (tmp_path / segment).open("ab") as file:
        file.write(b'{"half')
    disk = RecordedDisk(monkeypatch, tmp_path)
    Tape(DirectoryStore(tmp_path))
    assert (tmp_path / segment).read_bytes() == whole
    assert ("flush", segment, whole) in disk.events


def test_it_goes_on_after_a_restart(store: Store) -> None:
    filled(store, 2)
    again = Tape(store)
    assert again.newest == {0: 2, 1: 2}
    again.append(record(0, 3))
    again.flush()
    assert tape_reader.verify(store) == 5


def test_a_torn_last_line_is_cut_off_and_written_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    filled(store)
    path = tmp_path / tapes.segment_name(1)
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for length in (last + 1, last + 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert tape_reader.verify(store) == 5, "a last line may just be being written"
        tape = Tape(store)
        assert (tape.lines, path.read_bytes()) == (6, whole[:last])
        assert tape.newest == {0: 3, 1: 2}
        tape.append(record(1, 3))
        tape.flush()
        assert path.read_bytes() == whole


def test_changes_are_found(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    filled(store)
    path = tmp_path / tapes.segment_name(1)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = lines[2].replace(b'"tokens":200', b'"tokens":201')
    for wrong, message in (
        ([*lines[:2], changed, *lines[3:]], "line 4: it does not follow the line before"),
        (lines[:2] + lines[3:], "line 3: it does not follow"),
        (lines[1:], "line 1: a line 'merge' has no place here"),
        ([lines[1], lines[0], *lines[2:]], "line 1: a line 'merge' has no place here"),
        ([b"not json\n", *lines], "line 1 is not understood"),
        ([lines[0].replace(b'"format":2', b'"format":7')], "has format 7"),
        ([lines[0].replace(b'"newest":{}', b'"newest":{"0":4}'), *lines[1:]], "were the newest versions"),
    ):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(Exception, match=message) as caught:
            tape_reader.verify(store)
        assert type(caught.value).__name__ in ("TapeError", "FormatRefused")


def test_a_version_from_a_learner_may_jump_and_only_up(store: Store) -> None:
    tape = filled(store, 3)
    tape.append(replace(record(0, 7), responders=(), recovered=Recovered(3, 1, ())))
    tape.append(record(0, 8))
    tape.flush()
    lines = list(tape_reader.read(store))
    assert tape_reader.verify(store) == len(lines) == 8
    assert (lines[-2]["kind"], lines[-2]["follows"], lines[-2]["held_epoch"]) == (tapes.RECOVERED, 3, 1)
    assert Tape(store).newest == {0: 8, 1: 3}
    tape.append(replace(record(1, 2), recovered=Recovered(1, 1, ())))
    tape.flush()
    with pytest.raises(TapeError, match="fragment 1 is taken back at version 2, and had 3"):
        tape_reader.verify(store)


def test_a_jump_in_versions_is_found_unless_it_is_told(store: Store) -> None:
    tape = filled(store, 3)
    tape.append_note(tapes.DISCARDED, 1.5e9, {"fragment": 0, "epoch": 2, "version": 2, "reason": "damaged"})
    tape.append(record(0, 3))
    tape.flush()
    assert tape_reader.verify(store) == 8
    tape.append(record(1, 5))
    tape.flush()
    with pytest.raises(TapeError, match=r"line \d+: fragment 1 goes from version 3 to 5"):
        tape_reader.verify(store)
    assert json.loads(json.dumps(list(tape_reader.read(store))[6]))["reason"] == "damaged"


def test_a_put_whose_answer_was_lost_is_known_again(bucket: Store) -> None:
    """In a bucket; the same lines from the same place are the same put."""
    store = bucket
    tape, arrived = Tape(store), Tape(store)
    arrived.append(record(0, 1))
    arrived.flush()
    tape.append(record(0, 1))
    tape.flush()
    tape.append(record(1, 1))
    tape.flush()
    assert tape_reader.verify(store) == 2 and Tape(store).lines == 4
    late = Tape(store)
    for one, fragment in ((tape, 0), (late, 1)):
        one.append(record(fragment, 2))
    tape.flush()
    with pytest.raises(TapeError, match="another syncer"):
        late.flush()


# ------------------------------------------------------------------ segments


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """About three lines in each, in a directory; in a bucket each flush makes one."""
    monkeypatch.setattr(tapes, "SEGMENT_BYTES", 2000)


class CountingStore(DirectoryStore):
    """A directory that counts the bytes that are read of a tape."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes_read = 0

    def read(self, name: str, limit: int) -> bytes:
        data = super().read(name, limit)
        self.bytes_read += len(data)
        return data

    def read_start(self, name: str, count: int) -> bytes:
        data = super().read_start(name, count)
        self.bytes_read += len(data)
        return data


@pytest.mark.promise("A start reads only the last segment of the tape, however long the tape is")
def test_a_start_reads_no_more_of_a_long_tape_than_of_a_short_one(tmp_path: Path, small_segments: None) -> None:
    read = []
    for versions in (4, 40):
        filled(DirectoryStore(tmp_path / f"{versions}"), versions)
        store = CountingStore(tmp_path / f"{versions}")
        assert Tape(store).newest == {0: versions, 1: versions}
        read.append(store.bytes_read)
        assert tape_reader.verify(store) == 2 * versions
    assert len(tapes.segment_names(store)) >= 20
    assert read[1] < 1.5 * read[0]


def test_segments_of_one_tape_follow_each_other_over_restarts(store: Store, small_segments: None) -> None:
    for version in range(1, 9):
        tape = Tape(store)
        for fragment in range(2):
            tape.append(record(fragment, version))
        tape.flush()
    names = tapes.segment_names(store)
    assert len(names) > 3 and tape_reader.verify(store) == 16
    if isinstance(store, DirectoryStore):
        (store.root / names[2]).unlink()
        with pytest.raises(TapeError):
            tape_reader.verify(store)
    assert Tape(store).newest == {0: 8, 1: 8}, "earlier ones are of no matter to a start"


@pytest.mark.promise("A start reads only the last segment of the tape, however long the tape is")
@pytest.mark.parametrize("name", ["", "{}", "tape/000000000001.jsonl", "tape/000000000099.jsonl"])
def test_the_end_is_found_whatever_the_file_says_that_names_it(store: Store, small_segments: None, name: str) -> None:
    filled(store, 8)
    if name.startswith("tape"):
        name = json.dumps({"segment": name})
    store.replace("tape/last.json", name.encode())
    tape = Tape(store)
    assert tape.newest == {0: 8, 1: 8} and not tape.damage
    store.delete("tape/last.json")
    assert Tape(store).lines == tape.lines


def zeros(data: bytes, at: int, count: int) -> bytes:
    return data[:at] + bytes(count) + data[at + count :]


HARM = {
    "a line of zeros": lambda data: zeros(data, data.index(b"\n", len(data) // 2) + 1, 40),
    "a page of zeros": lambda data: zeros(data, len(data) // 4, len(data) // 2),
    "one bit": lambda data: data.replace(b'"tokens":200', b'"tokens":201', 1),
    "another format in a line": lambda data: data[:300] + data[300:].replace(b'"format":2', b'"format":7', 1),
    "the head": lambda data: b"{" + data,
    "all of it": lambda data: bytes(len(data) - 1) + b"\n",
    "everything gone": lambda data: b"",
}


@pytest.mark.promise("A damaged tape prevents nothing: the segment is kept, and the tape records the damage")
@pytest.mark.parametrize("harm", HARM)
def test_damage_of_the_tape_stops_nothing_and_is_told(store: Store, small_segments: None, harm: str) -> None:
    filled(store, 8)
    name = tapes.segment_names(store)[-1]
    damaged = HARM[harm](store.read(name, 1 << 20))
    store.replace(name, damaged)
    tape = Tape(store)
    assert tape.damage
    assert [store.read(aside, 1 << 20) for aside in store.list("discarded")] == [damaged]
    for made in (record(f, v) for v in (7, 8) for f in range(2)):  # the store still has these
        if made.version > tape.newest.get(made.fragment, 0):
            tape.append(made)
    for fragment in range(2):
        tape.append(record(fragment, 9))
    tape.flush()
    assert tape.newest == {0: 9, 1: 9}
    told = [line for line in map(json.loads, tape_reader.raw_lines(store)) if "damaged" in line]
    assert [line["kind"] for line in told] == ["segment"], "the tape says so itself, once"
    tape_reader.verify(store)
    again = Tape(store)
    assert not again.damage and again.newest == {0: 9, 1: 9}


@pytest.mark.promise(
    "A segment of the tape whose predecessor the store has lost is set aside, and announces no version"
)
def test_a_segment_whose_predecessor_the_store_has_lost_tells_nothing(store: Store, small_segments: None) -> None:
    """The store went back here and there: it still has the end of a tape, and not what was before."""
    filled(store, 8)
    *_, before, lost, last = tapes.segment_names(store)
    lines = [json.loads(raw) for raw in store.read(lost, 1 << 20).splitlines()]
    store.delete(lost)
    store.replace("tape/last.json", json.dumps({"segment": before}).encode())
    tape = Tape(store)
    assert not tape.damage
    for line in lines[1:]:  # made anew, out of other pushes
        tape.append(replace(record(line["fragment"], line["version"]), time=1.6e9))
    tape.flush()
    assert max(tape.newest.values()) < 8 and store.exists(last)
    again = Tape(store)
    assert again.newest == tape.newest and "does not follow" in again.damage
    assert len(store.list("discarded")) == 1 and not store.exists(last)
    tape_reader.verify(store)
    assert not Tape(store).damage


def test_a_segment_of_another_format_is_refused(store: Store) -> None:
    filled(store, 1)
    (name,) = tapes.segment_names(store)
    store.replace(name, store.read(name, 1 << 20).replace(b'"format":2', b'"format":7'))
    with pytest.raises(FormatRefused, match="format 7"):
        Tape(store)


@pytest.mark.promise("A line of the tape that could not be written is written once, as soon as possible")
def test_lines_that_could_not_be_written_are_written_once_when_they_can(tmp_path: Path, small_segments: None) -> None:
    store = DirectoryStore(tmp_path)
    tape = filled(store, 2)
    os.rename(tmp_path / "tape", tmp_path / "away")
    (tmp_path / "tape").write_bytes(b"")  # where the folder belongs
    for version in range(3, 7):
        for fragment in range(2):
            tape.append(record(fragment, version))
        with pytest.raises(OSError):
            tape.flush()
    (tmp_path / "tape").unlink()
    os.rename(tmp_path / "away", tmp_path / "tape")
    tape.flush()
    assert tape_reader.verify(store) == 12 and Tape(store).newest == {0: 6, 1: 6}
