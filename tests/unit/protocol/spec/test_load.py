"""Reading job files: scalars as kubectl reads them, files that are no job, overrides, and what people see."""

from __future__ import annotations

import gc
import json
import os
import socket
import stat
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from call_counts import count_calls
from diloco.validate import problems_text, summary_text, validate_file
from diloco_protocol.common.files import TooLarge
from diloco_protocol.spec.kubectl_yaml import MAX_BYTES, MAX_DEPTH, MAX_VALUES, YamlProblem, parse
from diloco_protocol.spec.load import (
    MAX_JOB_BYTES,
    JobError,
    Problem,
    job_from_json,
    job_to_json,
    load_job,
    load_manifest,
    parse_job,
    read_job,
    show,
)
from example_counts import share_of
from repository import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def validated(path: Path, overrides: Sequence[str] = ()) -> tuple[str, int]:
    """What `diloco validate --file-only` prints, and its exit code."""
    verdict = validate_file(path, overrides)
    return verdict.text, verdict.exit_code


MINIMAL = """\
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: tiny}
spec:
  training:
    model: {config: {model_type: llama}}
    data: {paths: [python-stdlib]}
  regions:
    - learners: 3
"""

# Recorded from `kubectl patch --local -o json` (kubectl 1.32.4), whose output is this JSON.
KUBECTL: list[tuple[str, Any]] = [
    ("1e-3", 0.001),
    ("1e3", 1000),
    ("1.0e-3", 0.001),
    (".5", 0.5),
    ("1.", 1),
    (".5e1", 5),
    ("+.5", 0.5),
    ("-.5", -0.5),
    ("1.0", 1),
    ("12e03", 12000),
    ("6.8523015e+5", 685230.15),
    ("685_230.15", 685230.15),
    ("2e6", 2000000),
    ("1_000", 1000),
    ("1__0", 10),
    ("_1", "_1"),
    (".1_0", 0.1),
    ("._1", "._1"),
    (".1_", ".1_"),
    ("017", 15),
    ("-017", -15),
    ("0o17", 15),
    ("0O17", 15),
    ("0o8", "0o8"),
    ("08", 8),
    ("09", 9),
    ("0x1F", 31),
    ("0X1f", 31),
    ("-0x1f", -31),
    ("0x1.8p3", "0x1.8p3"),
    ("0b11", 3),
    ("0B11", 3),
    ("-0b11", -3),
    ("0b-1", -1),
    ("0b+1", 1),
    ("0b2", "0b2"),
    ("+1", 1),
    ("-0", 0),
    ("1e400", "1e400"),
    ("18446744073709551615", 2**64 - 1),
    ("123456789012345678901", 123456789012345678901),
    ("yes", True),
    ("Yes", True),
    ("YES", True),
    ("yEs", "yEs"),
    ("no", False),
    ("No", False),
    ("NO", False),
    ("on", True),
    ("On", True),
    ("ON", True),
    ("off", False),
    ("Off", False),
    ("OFF", False),
    ("y", True),
    ("Y", True),
    ("n", False),
    ("N", False),
    ("true", True),
    ("True", True),
    ("TRUE", True),
    ("tRUE", "tRUE"),
    ("false", False),
    ("False", False),
    ("FALSE", False),
    ("~", None),
    ("null", None),
    ("Null", None),
    ("NULL", None),
    ("nULL", "nULL"),
    ('""', ""),
    ("''", ""),
    ("1:30", "1:30"),
    ("190:20:30", "190:20:30"),
    ("2001-12-14", "2001-12-14"),
    ("2001-12-14 10:11:12", "2001-12-14 10:11:12"),
    ("2001-12-14T10:11:12Z", "2001-12-14T10:11:12Z"),
    ("10Gi", "10Gi"),
    ("=", "="),
    ("1 000", "1 000"),
    ("e5", "e5"),
    ("0x", "0x"),
    ("+", "+"),
    (".", "."),
    ("'1e-3'", "1e-3"),
    ('"yes"', "yes"),
    ("!!str 5", "5"),
    ("!!str yes", "yes"),
    ("!!float 3", 3),
    ('!!int "3"', 3),
    ("!!null ''", None),
    ("! 12", "12"),
]


@pytest.mark.parametrize(("text", "value"), KUBECTL, ids=[text for text, _ in KUBECTL])
def test_scalars_are_read_as_kubectl_reads_them(text: str, value: Any) -> None:
    read = parse(f"v: {text}\n").value["v"]
    assert read == value and isinstance(read, type(value))


@pytest.mark.parametrize("text", [".inf", "-.Inf", "+.INF", ".nan", ".NaN"])
def test_what_json_cannot_carry_is_refused(text: str) -> None:
    with pytest.raises(YamlProblem, match="finite"):
        parse(f"v: {text}\n")


def test_keys_become_text_as_in_kubectl() -> None:
    assert parse("{1: a, 1.5: b, yes: c, '2': d}").value == {"1": "a", "1.5": "b", "true": "c", "2": "d"}


def test_merge_keys_and_aliases() -> None:
    text = "base: &b {x: 1, w: 2}\nmore: &m {w: 3, z: 4}\none: {<<: *b, x: 9}\ntwo: {<<: [*b, *m]}\nthree: *b\n"
    value = parse(text).value
    assert value["one"] == {"x": 9, "w": 2} and value["two"] == {"x": 1, "w": 2, "z": 4}
    assert parse("{'<<': 1}").value == {"<<": 1}
    assert value["three"] == value["base"] and value["three"] is not value["base"]
    assert parse("a: &x 1\nb: *x\nc: &x 2\nd: *x\n").value == {"a": 1, "b": 1, "c": 2, "d": 2}  # given anew


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(min_codepoint=32, max_codepoint=126)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcxyz", min_size=1), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=share_of(150), deadline=None)
@given(JSON)
def test_json_is_yaml(value: Any) -> None:
    assert parse(json.dumps({"v": value})).value == {"v": value}


@settings(max_examples=share_of(200), deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text)
    except YamlProblem as problem:
        assert problem.message


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "given twice (first on line 1)"),
        ("a: {x: 1, x: 2}", "given twice"),
        ("{1: a, '1': b}", "given twice"),
        ("a: 1\n---\nb: 2\n", "several documents"),
        ("a: *x", "names nothing"),
        ("&x [*x]", "names nothing"),
        ("&a {k: *a}", "names nothing"),
        ("a: !thing 3", "tag"),
        ("a: !!python/object:os.system [x]", "tag"),
        ("a: !!python/name:os.system ''", "tag"),
        ("a: !!binary aGk=", "tag"),
        ("a: !!set {x}", "tag"),
        ("a: !!int yes", "not a int"),
        ("a: !!bool 3", "not a bool"),
        ("[1]: a", "key must be text"),
        ("{a: 1}: b", "key must be text"),
        ("~: a", "key must be text"),
        ("? {a: 1}\n: 2", "key must be text"),
        ("{<<: 3}", "<< takes a mapping"),
        ("a: &a {x: 1}\nb: {x: 2, <<: *a}", "<< must come first"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "<< must come first"),
        ("{<<: [3]}", "<< takes a mapping"),
        ("a: [1, 2", "not YAML"),
        ("a: 'x", "not YAML"),
        ("\tx: 1", "not YAML"),
        ("a: b: c", "not YAML"),
        ("\x00\x01\x02", "not YAML"),
        ("a: @x", "not YAML"),
        ("[" * (MAX_DEPTH + 1), "nested more than"),
        ("[" * 300_000, "nested more than"),
        ("{a: " * 200, "nested more than"),
        ("a: x\n" * 300_000, "characters"),
        ("[" + "1," * (MAX_VALUES + 1) + "]", "values"),
    ],
    ids=lambda text: text[:24],
)
def test_texts_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(YamlProblem) as caught:
        parse(text)
    assert said in caught.value.message


def test_aliases_of_aliases_are_counted_in_full_and_do_not_blow_up() -> None:
    wide = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    deep = (
        "a0: &a0 "
        + "[" * 50
        + "]" * 50
        + "\n"
        + "".join(f"a{i}: &a{i} {'[' * 40}*a{i - 1}{']' * 40}\n" for i in range(1, 9))
    )
    merged = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))

    def refuse_all() -> None:
        for text, said in ((wide, "values"), (deep, "nested"), (merged, "values")):
            with pytest.raises(YamlProblem, match=said):
                parse(text)

    plain = count_calls(lambda: parse("a: [" + "x, " * 1000 + "x]"))
    assert count_calls(refuse_all) < 100 * plain
    tracemalloc.start()
    try:
        refuse_all()
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_the_second_document_is_named_by_its_line() -> None:
    with pytest.raises(JobError) as caught:
        parse_job(f"{MINIMAL}---\n# more\n---\n{MINIMAL}")
    assert [(p.path, p.line) for p in caught.value.problems] == [("", MINIMAL.count("\n") + 3)]
    assert "a file of its own" in str(caught.value)


def test_an_error_says_its_line() -> None:
    with pytest.raises(YamlProblem) as caught:
        parse("a: 1\nb: 2\nc: [3\n")
    assert caught.value.line == 4
    with pytest.raises(JobError) as job:
        parse_job(MINIMAL.replace("learners: 3", "learners: many"))
    assert [(p.path, p.line) for p in job.value.problems] == [("spec.regions.0.learners", 9)]


def test_empty_documents_beside_the_job_do_not_count() -> None:
    assert parse(f"---\n# a comment\n---\n{MINIMAL}---\n").value["metadata"] == {"name": "tiny"}
    assert parse_job("\ufeff".strip("\ufeff") + MINIMAL).spec.slots == 3


# ------------------------------------------------------------------ files


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        load_job(path, overrides)
    assert caught.value.source == str(path) and str(path) in str(caught.value)
    return "\n".join(problem.message for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\n# nothing\n", "empty"),
        (b"---\n---\n", "empty"),
        (b"- a\n- b\n", "a list"),
        (b"just words\n", "a single value"),
        (b"3", "a single value"),
        (b"\xff\xfe\x00", "(byte 0): save it as UTF-8"),
        (b"name: caf\xe9", "(byte 9): save it as UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "(byte 0): it is no text: name the job file"),
        (b"\x7fELF\x02\x01\x01\x00", "not YAML"),
        (b"a: [", "not YAML"),
        (b"<html><body>404</body></html>", "a single value"),
        (b"a: 1\n---\nb: 2\n", "several documents"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert said in refusal(path)
    text, code = validated(path)
    assert code == 2 and said in text and "Traceback" not in text


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    assert "directory" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal(tmp_path / ("x" * 300))
    assert "cannot be read" in refusal(tmp_path / "a\x00b")
    (tmp_path / "file").write_text("a: 1")
    assert "cannot be read" in refusal(tmp_path / "file" / "job.yaml")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be read" in refusal(loop)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "regular file" in refusal(pipe)  # and does not wait for a writer
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        assert "cannot be read" in refusal(tmp_path / "socket")


def test_a_large_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    gc.collect()
    tracemalloc.start()
    try:
        assert "too large for a job file (100.0 MB" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "it was not read"
    finally:
        tracemalloc.stop()
    path.write_bytes(b"#" * MAX_BYTES)
    assert "empty" in refusal(path)


def test_a_file_that_grows_under_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    real = os.fstat

    def earlier(file: int) -> os.stat_result:
        fields = list(real(file))
        fields[stat.ST_SIZE] = 10
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", earlier)
    assert "too large for a job file" in refusal(path)


def test_a_byte_order_mark_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_job(path).metadata.name == "tiny"


# ------------------------------------------------------------------ meaning


def test_numbers_and_nulls_mean_what_they_mean_to_kubectl() -> None:
    job = parse_job(MINIMAL.replace("data: {p", "stop: {tokens: 2e6, steps: null}\n    batch:\n    data: {p"))
    assert job.spec.training.stop.tokens == 2_000_000 and job.spec.training.batch.sequences == 16
    job = parse_job(MINIMAL, ["training.optimizer.lr=1e-3", "sync.deterministic=on", "seed=0x10"])
    assert (job.spec.training.optimizer.lr, job.spec.sync.deterministic, job.spec.seed) == (0.001, True, 16)
    assert isinstance(parse_job(MINIMAL, ["training.optimizer.lr=1"]).spec.training.optimizer.lr, float)
    assert parse_job(MINIMAL, ["training.evaluation=null"]).spec.training.evaluation is None
    assert parse_job(MINIMAL, ["sync=null"]).spec.sync.every == 24
    assert parse_job(MINIMAL, ["training.evaluation={fraction: 0}"]).spec.training.evaluation is None
    assert parse_job(MINIMAL, ["training.optimizer.clipNorm=0"]).spec.training.optimizer.clip_norm is None
    with pytest.raises(JobError, match=r"metadata\.name"):
        parse_job(MINIMAL.replace("tiny", "on"))  # a boolean: kubectl would send one too


def test_all_problems_come_at_once_with_their_lines() -> None:
    text = MINIMAL.replace("name: tiny", "name: Tiny").replace("learners: 3", "learner: 3") + "  evry: 3\n"
    with pytest.raises(JobError) as caught:
        parse_job(text, ["sync.overlap=99", "a.b", "sync.every.x=3"], source="job.yaml")
    assert [(p.path, p.line) for p in caught.value.problems] == [
        ("--set a.b", None),
        ("metadata.name", 3),
        ("spec.regions.0.learners", 9),
        ("spec.regions.0.learner", 9),
        ("spec.evry", 10),
        ("spec.sync.every", None),
    ]
    text = str(caught.value)
    assert text.startswith("job.yaml:\n") and '  metadata.name = "Tiny": must be' in text and "(line 9)" in text


# ------------------------------------------------------------------ what an API server adds

RECORD = {
    "uid": "6a1c",
    "resourceVersion": "12",
    "generation": 2,
    "creationTimestamp": "2026-01-01T00:00:00Z",
    "deletionTimestamp": None,
    "finalizers": ["diloco.io/job"],
    "ownerReferences": [],
    "generateName": "t-",
    "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    "selfLink": "/x",
    "deletionGracePeriodSeconds": 0,
}


def test_the_record_of_an_api_server_is_named_and_not_used(tmp_path: Path) -> None:
    plain = parse_job(MINIMAL)
    document = parse(MINIMAL).value
    document["metadata"] |= RECORD
    document["status"] = {"phase": "Running", "anything": [1]}
    text, notes = json.dumps(document, indent=1), []
    assert parse_job(text, notes=notes) == plain
    assert {note.path for note in notes} == {"status", *(f"metadata.{name}" for name in RECORD)}
    assert all("not used" in note.message and note.line for note in notes)
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert load_manifest(path)[1] == parse(MINIMAL).value
    said, code = validated(path)
    assert code == 0 and "metadata.managedFields" in said and "not used" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINIMAL.replace("name: tiny", "name: yes"), "at most 30 characters: put it into quotes"),
        (MINIMAL.replace("name: tiny", "name: 123"), "at most 30 characters"),  # no name in quotes either
        *(
            (MINIMAL.replace("    data:", f"    stop: {{{written}}}\n    data:"), said)
            for written, said in (
                ("tokens: 200k", "or null: write 200000"),
                ("tokens: '1.5 M'", "or null: write 1500000"),
                ("tokens: 2B", "or null: write 2000000000"),
                ("tokens: many", "or null"),
                ("tokens: 10m", "or null: write 10000000"),
                ("tokens: '200'", "or null: write 200, without quotes"),
                ("tokens: '-1'", "or null"),
                ("tokens: 5 min", "or null"),
                ("tokens: 99999999T", "or null"),
                ("seconds: 10m", "or null: write 600"),
                ("seconds: 1.5 h", "or null: write 5400"),
                ("seconds: 2d", "or null: write 172800"),
                ("seconds: 10k", "or null"),
            )
        ),
    ],
)
def test_a_value_of_another_type_is_told_how_to_write_it(text: str, said: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(text)
    assert caught.value.problems[0].message.endswith(said)
    assert ("write" in caught.value.problems[0].message) is ("write" in said)


@pytest.mark.parametrize("name", ["uuid", "label", "clusterName"])
def test_metadata_that_no_object_has_is_refused(name: str) -> None:
    with pytest.raises(JobError, match=f"metadata.{name}"):
        parse_job(MINIMAL.replace("name: tiny", f"name: tiny, {name}: a"))


def test_nulls_that_kubectl_drops_are_named_with_what_says_the_same() -> None:
    nulls = {
        "training.evaluation": "fraction: 0",
        "training.optimizer.clipNorm": "clipNorm: 0",
        "training.model.config.sliding_window": "--server-side",
    }
    for path, cure in nulls.items():
        notes: list[Problem] = []
        parse_job(MINIMAL, [f"{path}=null", "training.data.name=null", "seed=null"], notes=notes)
        (note,) = notes
        assert note.path == f"spec.{path}" and cure in note.message
    notes = []
    parse_job(MINIMAL, notes=notes)
    assert notes == []


LABELS = [
    ("a", True),
    ("a/b", True),
    ("example.org/B_c.d", True),
    ("a" * 63, True),
    ("a" * 64, False),
    ("", False),
    ("-a", False),
    ("a-", False),
    ("a/b/c", False),
    ("/a", False),
    ("a/", False),
    ("A.b/c", False),
    ("a b", False),
    ("é", False),
    ("a\n", False),
]


@pytest.mark.parametrize(("key", "good"), LABELS)
def test_labels_and_annotations_are_those_of_kubernetes(key: str, good: bool) -> None:
    def found(**metadata: Any) -> list[str]:
        document = parse(MINIMAL).value
        document["metadata"] |= metadata
        try:
            parse_job(json.dumps(document))
        except JobError as error:
            return [problem.path for problem in error.problems]
        return []

    assert found(labels={key: "x"}) == ([] if good else ["metadata.labels"])
    if key != "A.b/c":  # annotations' keys are looked at in lower case
        assert found(annotations={key: "any thing"}) == ([] if good else ["metadata.annotations"])
    if "/" not in key and key:
        assert found(labels={"a": key}) == ([] if good else ["metadata.labels"])
    assert found(labels={"a": ""}) == [] and found(annotations={"a": "x" * 262_143}) == []
    assert found(annotations={"a": "x" * 262_144}) == ["metadata.annotations"]


# ------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("sync.every=48", "sync.every", 48),
        ("regions.0.learners=2", "regions.0.learners", 2),
        ("regions.1={name: far, learners: 1}", "regions.1.name", "far"),
        ("regions=[{learners: 7}]", "regions.0.learners", 7),
        ("training.stop={steps: 100}", "training.stop.steps", 100),
        ("training.model.config.hidden_size=64", "training.model.config", {"model_type": "llama", "hidden_size": 64}),
        ("training.data.paths=[a, b]", "training.data.paths", ["a", "b"]),
        ("training.data.paths.0=a=b", "training.data.paths", ["a=b"]),
        ("training.data.paths.1=c", "training.data.paths", ["python-stdlib", "c"]),
        ("training.optimizer.clipNorm=null", "training.optimizer.clip_norm", None),
        ("training.optimizer.clipNorm=", "training.optimizer.clip_norm", None),
        ("syncer.storage.storageClassName='123'", "syncer.storage.storage_class_name", "123"),
        ("sync.outer.betas.1=0.99", "sync.outer.betas", [0.9, 0.99]),
        (" suspend = yes", "suspend", True),
    ],
)
def test_overrides(override: str, path: str, value: Any) -> None:
    overrides = ["sync.outer.betas=[0.9, 0.9]"] if "betas" in override else []
    place: Any = parse_job(MINIMAL, [*overrides, override]).spec
    for step in path.split("."):
        place = place[int(step)] if step.isdigit() else getattr(place, step)
    assert place == value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sync.every", "must read path=value"),
        ("=3", "must read path=value"),
        ("sync..every=3", "must read path=value"),
        ("", "must read path=value"),
        ("sync.every=[", "cannot be read"),
        ("regions.3.learners=3", "a list of 1"),
        ("regions.1.learners=3", "has 1, and indices begin with 0, so there is no 1: change 0, or add one"),
        ("regions.local.learners=3", "by its index, from 0"),
        ("regions.-1.learners=3", "by its index"),
        ("training.data.paths.0.x=3", "has no fields"),
        ("spec.sync.every=3", "is not a known field below spec, where these paths start: write sync.every=3"),
        ("metadata.name=other", "is not a known field below spec, where these paths start: edit the file"),
        ("sync.evry=3", "did you mean every?"),
        ("sync.every=three", "must be a whole number"),
        ("training.stop.steps=3", ""),
    ],
)
def test_wrong_overrides(override: str, said: str) -> None:
    if not said:
        assert parse_job(MINIMAL, [override]).spec.training.stop.steps == 3
        return
    with pytest.raises(JobError) as caught:
        parse_job(MINIMAL, [override])
    (problem,) = caught.value.problems
    assert said in problem.message


def test_an_item_is_added_as_a_whole_or_by_its_name_first() -> None:
    whole = parse_job(MINIMAL, ["regions.1={name: far, learners: 1}"])
    assert parse_job(MINIMAL, ["regions.1.name=far", "regions.1.learners=1"]) == whole


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("spec:\n\tx: 1", "a tab: YAML is indented with spaces only", 2),
        ("spec:\n  x: @a", "a value that begins with @ needs quotes", 2),
        ("a: b\nc: d: e", "a second colon in one line", 2),
        ("spec:\n  a: b\n c: d", "this line is indented otherwise", 3),
        ("a: b\nc d\ne: f", "a key without its colon", 3),
        ("a: {b: 1", "a comma or a closing bracket is missing", None),
        ('a: "x', "a quotation mark that is opened there is not closed", None),
    ],
)
def test_what_is_no_yaml_is_told_without_the_parsers_words(text: str, said: str, line: int | None) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(text)
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"not YAML: {said}"), problem
    assert line is None or problem.line == line


def test_later_overrides_win_and_aliases_are_not_shared() -> None:
    assert parse_job(MINIMAL, ["seed=1", "seed=2"]).spec.seed == 2
    text = MINIMAL.replace(
        "- learners: 3", "- &r {name: a, learners: 3, podTemplate: &p {x: 1}}\n    - {<<: *r, name: b}"
    )
    job = parse_job(text, ["regions.0.podTemplate.x=2"])
    assert [region.pod_template for region in job.spec.regions] == [{"x": 2}, {"x": 1}]


def test_a_wrong_override_points_at_no_line() -> None:
    with pytest.raises(JobError) as caught:
        parse_job(MINIMAL, ["regions.0.learners=0"])
    assert [(p.path, p.value, p.line) for p in caught.value.problems] == [("spec.regions.0.learners", 0, None)]


# ------------------------------------------------------------------ validate, examples


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_and_round_trip(path: Path) -> None:
    job = load_job(path)
    assert job_from_json(job_to_json(job)) == job
    text, code = validated(path)
    assert code == 0 and "a valid job" in text and "warning" not in text
    assert "merges    isotropic, nesterov at rate 1.4, momentum 0.5\n" in text
    assert "with 10^8 parameters or more: rda, nesterov at rate 0.7, momentum 0.9\n" in text
    for parameters, merges in ((10**5, "isotropic, nesterov at rate 1.4"), (10**9, "rda, nesterov at rate 0.7")):
        known = summary_text(job, parameters=parameters)
        assert f"merges    {merges}, " in known and "with 10^8 parameters or more" not in known


def test_there_are_the_examples_that_the_readme_names() -> None:
    assert {path.stem for path in EXAMPLES} >= {"minimal", "tiny-gpt", "tiny-moe", "tiny-vit", "custom-loop"}


def test_validate_says_what_the_job_is(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    text, code = validated(path, ["training.stop={steps: 20}", "training.data.paths=[./none, 's3://b/x', ./*.yaml]"])
    assert code == 0
    for said in ("tiny", "llama on ./none", "until 20 steps per learner", "3 (local 3), quorum 1", "warmupSteps"):
        assert said in text
    assert '"./none"' in text and 's3://b/x"' not in text and '"./*.yaml"' not in text


def test_validate_shows_every_problem_with_its_cure(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL.replace("name: tiny", "nam: tiny"))
    text, code = validated(path, ["sync.quorum=9"])
    assert code == 2 and text.startswith(f"{path}: 3 problems\n")
    assert '  metadata.nam = "tiny"   (line 3)\n      is not a known field: did you mean name?' in text
    assert "such as tiny-gpt" in text and "all regions (3)" in " ".join(text.split())
    assert all(len(line) <= 110 for line in text.splitlines() if str(path) not in line)


def test_an_error_without_a_file_reads_well() -> None:
    error = JobError([Problem("training.data.paths", ["x" * 200], "is not there")])
    assert isinstance(error, ValueError) and str(error).startswith('training.data.paths = ["xxx')
    assert len(str(error)) < 130 and problems_text(error).startswith("the job: 1 problem\n")
    assert show("ü") == '"ü"'


def test_a_job_in_normal_form_is_read_from_a_file_within_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    job = parse_job(MINIMAL)
    path.write_text(job_to_json(job))
    assert read_job(path) == job
    for data in (b"\xff\xfe", b"{", b"[]", b"{}"):
        path.write_bytes(data)
        with pytest.raises(JobError, match="normal form"):
            read_job(path)
    with open(path, "wb") as file:
        file.truncate(MAX_JOB_BYTES + 1)
    with pytest.raises(TooLarge, match="at most"):
        read_job(path)
    with pytest.raises(FileNotFoundError):
        read_job(tmp_path / "absent")
    text = job_to_json(job)
    assert job_from_json(text + " " * (MAX_JOB_BYTES - len(text))) == job
    with pytest.raises(JobError, match=f"more than {MAX_JOB_BYTES} bytes"):
        job_from_json(text + " " * (MAX_JOB_BYTES - len(text) + 1))


def test_what_a_newer_operator_wrote_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pod of a job that started before an upgrade. Everywhere else unknown fields are refused."""
    path = tmp_path / "job.json"
    learners = {"podTemplate": {"spec": {"containers": [{"name": "learner", "newer": 1}]}}}
    job = parse_job(json.dumps({**json.loads(json.dumps(parse(MINIMAL).value)), "metadata": {"name": "tiny"}}))
    written = json.loads(job_to_json(job))
    written["spec"]["learners"] |= learners
    job = job_from_json(json.dumps(written))
    written["spec"]["pace"] = None
    written["spec"]["regions"][0]["climate"] = {"warm": True}
    written["spec"]["training"]["model"]["lora2"] = {}
    path.write_text(json.dumps(written))
    assert read_job(path) == job and job.spec.learners.pod_template == learners["podTemplate"]
    for name in ("spec.pace", "spec.regions.0.climate", "spec.training.model.lora2"):
        assert name in caplog.text
    with pytest.raises(JobError, match=r"3 problems|pace"):
        job_from_json(json.dumps(written))
    written["spec"]["sync"]["quorum"] = 99
    path.write_text(json.dumps(written))
    with pytest.raises(JobError, match=r"sync\.quorum") as error:
        read_job(path)
    assert [problem.path for problem in error.value.problems] == ["spec.sync.quorum"]


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("syncer.shards=65", "syncer.shards", "at most 64"),
        ("sync={fragments: 513, every: 600}", "sync.fragments", "at least 1 and at most 512"),
        ("syncer.storage.uri=memory://x", "syncer.storage.uri", "s3://, gs:// or az://"),
        ("syncer.storage.uri=s3://", "syncer.storage.uri", "a bucket by its URI"),
    ],
)
def test_what_the_syncer_cannot_do_is_refused(override: str, path: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(MINIMAL, [override])
    (problem,) = caught.value.problems
    assert problem.path.endswith(path) and words in problem.message
