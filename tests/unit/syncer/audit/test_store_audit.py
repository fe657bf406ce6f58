"""An audit of a whole store, as a simulated job left it: what is damaged or falsified is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_syncer.audit.store_audit import BOOKS, RECORDS, Audit, audit_store
from diloco_syncer.audit.tape_audit import CHAIN
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.documents import pack_document, unpack_document
from diloco_syncer.store.records import MergeRecord
from diloco_syncer.store.tape import line_digest
from syncer_simulation.settings import SUCCESSIONS
from syncer_simulation.shell_sessions import ShellWorld

Objects = dict[str, bytes]


@pytest.fixture(scope="module")
def objects() -> Objects:
    """The store of a job of several syncers, each killed."""
    world = ShellWorld(replace(SUCCESSIONS, seed=1))
    world.run(limit=300.0)
    return dict(world.objects)


@pytest.fixture
def audit_of(tmp_path: Path) -> Callable[[Objects], Audit]:
    def audit(objects: Objects) -> Audit:
        store = DirectoryStore(tmp_path)
        for name in ("state", "records", "tape"):
            for there in store.list(name):
                store.delete(there)
        for name, data in objects.items():
            store.replace(name, data)
        return audit_store(store, "shell")

    return audit


def wrong(audit: Audit) -> list[str]:
    return [check.name for check in audit.checks if check.wrong]


def newest(objects: Objects, folder: str) -> str:
    return max(name for name in objects if name.startswith(f"{folder}/"))


@pytest.mark.promise("`diloco audit` says of any store whether tape, records and ledger are whole and agree")
def test_a_store_of_several_syncers_holds(objects: Objects, audit_of: Callable[[Objects], Audit]) -> None:
    audit = audit_of(objects)
    assert audit.holds and audit.merges > 0 and audit.epochs is not None and audit.epochs[1] > 1
    assert [check.holds for check in audit.checks] == [True] * 6
    assert audit.events["joined"] > 0
    assert "and merged as on the tape" in audit.checks[-1].said


@pytest.mark.promise("`diloco audit` says of any store whether tape, records and ledger are whole and agree")
def test_each_damaged_object_is_named(objects: Objects, audit_of: Callable[[Objects], Audit]) -> None:
    for folder, check in (("records", RECORDS), ("state", RECORDS)):
        name = newest(objects, folder)
        data = bytearray(objects[name])
        data[len(data) // 2] ^= 1
        audit = audit_of({**objects, name: bytes(data)})
        assert check in wrong(audit), folder
        assert any(name in words for one in audit.checks for words in one.wrong), folder


def test_a_record_that_is_whole_and_another_than_the_tape_says_is_named(
    objects: Objects, audit_of: Callable[[Objects], Audit]
) -> None:
    name = newest(objects, "records")
    record = MergeRecord.unpack(objects[name], name)
    record.theta[0] += 1
    kept = audit_of({**objects, name: b"".join(map(bytes, record.pack()))})
    assert [words for check in kept.checks for words in check.wrong] == [
        f"{name}: its parameters are not those of its digest"
    ]
    record.digest = ""
    forged = audit_of({**objects, name: b"".join(map(bytes, record.pack()))})
    assert [words for check in forged.checks for words in check.wrong] == [
        f"{name}: the tape has another digest of this version"
    ]


@pytest.mark.promise("`diloco audit` says of any store whether tape, records and ledger are whole and agree")
def test_tokens_that_only_the_tape_or_only_the_books_have_are_named(
    objects: Objects, audit_of: Callable[[Objects], Audit]
) -> None:
    name = newest(objects, "state")
    state = unpack_document(objects[name], name)
    cell = state["core"]["core"]["job"]["ledger"][0]["cells"][0]
    cell["merged"] += 7
    unbalanced = audit_of({**objects, name: b"".join(map(bytes, pack_document(state)))})
    assert wrong(unbalanced) == [BOOKS] and len(unbalanced.checks[-1].wrong) == 2, "the columns, and the tape"
    cell["dropped"] = {**cell["dropped"], "died": cell["dropped"].get("died", 0) - 7}
    balanced = audit_of({**objects, name: b"".join(map(bytes, pack_document(state)))})
    assert any(words.endswith("by the tape") for words in balanced.checks[-1].wrong)
    tape = {key: data for key, data in objects.items() if key.startswith("tape/0")}
    more = {key: data.replace(b'"tokens":', b'"tokens":1', 1) for key, data in tape.items()}
    assert {CHAIN, BOOKS} <= set(wrong(audit_of({**objects, **more})))


def test_a_tape_that_was_written_anew_as_a_whole_still_has_to_agree_with_the_books(
    objects: Objects, audit_of: Callable[[Objects], Audit]
) -> None:
    made: Objects = {}
    previous, first = "", True
    for name in sorted(key for key in objects if key.startswith("tape/0")):
        lines = []
        for raw in objects[name].splitlines():
            line = json.loads(raw)
            if first and line["kind"] == "merge":
                first, line["responders"][0]["tokens"] = False, 1
            lines.append(json.dumps({**line, "previous": previous}).encode() + b"\n")
            previous = line_digest(lines[-1])
        made[name] = b"".join(lines)
    audit = audit_of({**objects, **made})
    assert CHAIN not in wrong(audit) and BOOKS in wrong(audit)


def test_a_store_without_anything_has_nothing_that_does_not_hold(audit_of: Callable[[Objects], Audit]) -> None:
    audit = audit_of({})
    assert audit.holds and audit.checks[-1].holds is None
