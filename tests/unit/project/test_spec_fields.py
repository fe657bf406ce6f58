"""A field of the spec is in CONTRIBUTING.md's table, and what the table says of it is what the code does."""

from __future__ import annotations

import re

import pytest

from diloco_protocol.spec.base import Spec, unwrap
from diloco_protocol.spec.job import IMMUTABLE, DiLoCoJob, SyncerSettings, immutable_digests
from diloco_protocol.spec.job_spec import JobSpec
from diloco_syncer.startup import _fixed_digests
from diloco_worker.core.syncer_settings import apply_settings
from repository import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("| fields below `spec` |")[1].split("\n\n")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines()[2:]]
TABLE = {name: row for row in ROWS for name in re.findall(r"`(\w+(?:\.\w+)?)`", row[0]) if name != "meanTensors"}


def fields() -> set[str]:
    """Paths below spec in two steps, in one where a field has no parts of its own."""
    found = set()
    for name, field in JobSpec.model_fields.items():
        top = field.alias or name
        model, _ = unwrap(field.annotation)
        parts = model.model_fields if isinstance(model, type) and issubclass(model, Spec) else {}
        found |= {f"{top}.{part.alias or key}" for key, part in parts.items()} or {top}
    return found


def job(**spec: object) -> DiLoCoJob:
    head = {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "j"}}
    training = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"source": "text", "paths": ["a"], "tokenizer": "bytes", "sequenceLength": 128},
        "stop": {"steps": 10},
    }
    return DiLoCoJob.model_validate(
        {**head, "spec": {"training": training, "regions": [{"name": "a", "learners": 2}], **spec}}
    )


def named(words: str) -> set[str]:
    """The fields of the lines of which a cell has these words."""
    return {name for name, row in TABLE.items() if any(words in cell for cell in row)}


def test_every_field_has_a_line_and_every_line_a_field() -> None:
    assert fields() == set(TABLE), "CONTRIBUTING.md, 'Where a new thing goes'"
    names = [name for row in ROWS for name in re.findall(r"`(\w+(?:\.\w+)?)`", row[0])]
    assert len(names) == len(set(names)), "a field is in two lines"


def test_what_may_not_change_is_compared_at_each_join_and_by_the_api_server() -> None:
    assert named("`IMMUTABLE`") == set(immutable_digests(job())) == {".".join(path) for path in IMMUTABLE}


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_else_may_not_change_is_compared_with_the_store(deterministic: bool) -> None:
    compared = {name.partition(" ")[0] for name in _fixed_digests(job(sync={"deterministic": deterministic}))}
    assert {".".join(name.split(".")[:2]) for name in compared} - {"regions"} == named("`_fixed_digests`")
    assert ("regions" in compared) == deterministic and "With `sync.deterministic` regions" in TABLE["regions"][2]


def test_what_the_welcome_brings_is_the_syncers_and_all_else_the_job_files() -> None:
    theirs = SyncerSettings.of(job().spec)
    sync = {f"sync.{name}" for name in theirs.model_dump(mode="json")["sync"]}
    assert named("`SyncerSettings`") == (sync | {"training.stop"}) - named("`IMMUTABLE`") - named("`_fixed_digests`")
    own = job(
        seed=7,
        sync={"every": 50, "quorum": 2, "fragments": 3},
        learners={"command": ["x"]},
        syncer={"checkpoint": {"keep": 9}},
        failurePolicy={"maxReplacements": 3},
    ).spec
    applied = apply_settings(theirs, own)
    assert (applied.sync, applied.training.stop) == (theirs.sync, theirs.stop) and applied.sync != own.sync
    rest = {"sync": own.sync, "training": own.training}
    assert applied.model_copy(update=rest) == own
