"""The tape: one line per merge, chained, repaired, verified."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tape_reader
from diloco_protocol.wire.records import FragmentReport, PushHeader, StepReport
from diloco_syncer.store import tape as tapes
from diloco_syncer.store.base import Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import MergeRecord, RecordedPush, Recovered, theta_digest
from diloco_syncer.store.tape import Tape, TapeError


def record(fragment: int, version: int) -> MergeRecord:
    report = StepReport(2, 2, 200, (FragmentReport(1, 0, 2, 200),) * 2)
    header = PushHeader(fragment, version, 4, 1, version - 1, version - 1, 1, 2, 2, 200, 0.5, "int4", "", report, 0, 3)
    theta = np.full(3, version, np.float32)
    return MergeRecord(
        "j",
        1,
        fragment,
        version,
        theta,
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
    assert tape_reader.verify(store) == 6 == tape.lines
    lines = list(tape_reader.read(store))
    assert [(line["fragment"], line["version"]) for line in lines] == [(f, v) for v in (1, 2, 3) for f in (0, 1)]
    assert lines[0]["previous"] == "" and lines[0]["result"] == theta_digest(np.full(3, 1, np.float32))
    assert lines[0]["responders"] == [
        {
            "slot": 0,
            "incarnation": 3,
            "sequence": 1,
            "base_epoch": 1,
            "base_version": 0,
            "first_step": 1,
            "last_step": 2,
            "offer": False,
            "age": 0,
            "tokens": 200,
            "steps": 2,
            "weight": 1.0,
            "norm": 0.25,
        }
    ]


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
    path = tmp_path / tapes.FILE
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for length in (last + 1, last + 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(TapeError, match="line 6 is torn"):
            tape_reader.verify(store)
        tape = Tape(store)
        assert (tape.lines, tape.repaired_bytes) == (5, length - last)
        found = [record(f, v) for f in range(2) for v in (2, 3)]
        assert [(r.fragment, r.version) for r in tape.missing(found)] == [(1, 3)]
        tape.append(record(1, 3))
        tape.flush()
        assert path.read_bytes() == whole


def test_changes_are_found(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    filled(store)
    path = tmp_path / tapes.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    changed = lines[1].replace(b'"tokens":200', b'"tokens":201')
    for wrong, message in (
        ([lines[0], changed, *lines[2:]], "line 3 does not follow line 2"),
        (lines[:2] + lines[3:], "line 3 does not follow line 2"),
        (lines[1:], "line 1 does not follow line 0"),
        ([lines[1], lines[0], *lines[2:]], "line 1 does not follow"),
        ([b"not json\n", *lines], "line 1 is not understood"),
        ([lines[0].replace(b'"format":2', b'"format":7')], "has format 7"),
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
    assert tape_reader.verify(store) == len(lines)
    assert (lines[-2]["kind"], lines[-2]["follows"], lines[-2]["held_epoch"]) == (tapes.RECOVERED, 3, 1)
    assert Tape(store).newest == {0: 8, 1: 3}
    tape.append(replace(record(1, 2), recovered=Recovered(1, 1, ())))
    tape.flush()
    with pytest.raises(TapeError, match="fragment 1 is recovered at version 2, and had 3"):
        tape_reader.verify(store)


def test_a_jump_in_versions_is_found_unless_it_is_told(store: Store) -> None:
    tape = filled(store, 3)
    tape.discard(0, 2, 2, "damaged", 1.5e9)
    tape.append(record(0, 3))
    tape.flush()
    assert tape_reader.verify(store) == 8
    tape.append(record(1, 5))
    tape.flush()
    with pytest.raises(TapeError, match="line 9: fragment 1 goes from version 3 to 5"):
        tape_reader.verify(store)
    assert json.loads(json.dumps(list(tape_reader.read(store))[6]))["reason"] == "damaged"


def test_a_put_whose_answer_was_lost_is_known_again(bucket: Store) -> None:
    """In a bucket; the same lines from the same place are the same put."""
    store = bucket
    tape, arrived = Tape(store), Tape(store)
    arrived.append(record(0, 1))
    arrived.flush()
    tape.append(record(0, 1))
    tape.append(record(1, 1))  # it came between the put and its repetition
    tape.flush()
    assert tape_reader.verify(store) == 2 == Tape(store).lines
    late = Tape(store)
    for one, fragment in ((tape, 0), (late, 1)):
        one.append(record(fragment, 2))
    tape.flush()
    with pytest.raises(TapeError, match="another syncer"):
        late.flush()
