"""A .jsonl file is records, what looks like records and is read as bytes is reported, a line says what was found."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco import data_files
from diloco.checks.machine import find_absent
from diloco.main import app
from diloco.processes.data_found import DataFound
from diloco_protocol.spec.load import load_job, parse_job
from diloco_worker import data

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: records}
spec:
  training:
    model: {config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
                     num_attention_heads: 2, num_key_value_heads: 2}}
    data: {paths: [data.jsonl], sequenceLength: 16}
    batch: {sequences: 2}
    stop: {steps: 15}
    evaluation: {fraction: 0}
    optimizer: {warmupSteps: 2}
    device: cpu
  sync: {fragments: 1, every: 3, overlap: 1}
  regions: [{learners: 1}]
"""
RECORDS = "".join(json.dumps({"text": f"story {i} of many", "id": i}) + "\n" for i in range(300))
TEXT = "".join(f"story {i} of many\0" for i in range(300))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text(RECORDS)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def validate(job: Path, *overrides: str) -> str:
    done = CliRunner().invoke(app, ["validate", "--file-only", str(job), *(f"--set={o}" for o in overrides)])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def assert_refused(job: Path, words: str, *overrides: str) -> None:
    """`diloco validate` says that the job would not start, and why; `diloco run` refuses it before it starts."""
    said = validate(job, *overrides)
    assert said.startswith(f"{job}: a valid job, which `diloco run` would not start on this machine"), said
    assert words in said
    workdir = job.parent / "run"
    done = CliRunner().invoke(
        app, ["run", str(job), "--workdir", str(workdir), *(f"--set={override}" for override in overrides)]
    )
    assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output
    assert not workdir.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_jsonl_file_is_trained_on_as_records_and_the_run_says_what_it_found(job: Path) -> None:
    workdir = job.parent / "run"
    done = subprocess.run(
        [sys.executable, "-m", "diloco.main", "run", str(job), "--workdir", str(workdir)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = f"data: 1 file, 300 records, {len(TEXT):,} tokens: {len(TEXT) // 16} sequences of 16"
    assert done.stdout.count(found) == 1, done.stdout
    assert "warning: data" not in done.stdout
    assert any(found in log.read_text() for log in (workdir / "logs").iterdir())
    (tokens,) = (workdir / "cache").glob("tokens-*.uint8")
    assert tokens.read_bytes() == TEXT.encode()


@pytest.mark.parametrize("name", ["data.txt", "data"])
def test_records_under_another_name_are_told_with_the_fix(
    job: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (job.parent / name).write_text(RECORDS)
    said = validate(job, f"training.data.paths=[{name}]")
    assert f'training.data.paths = "{name}"' in said
    assert "read as plain bytes" in said and "looks like something else: JSON lines: name it .jsonl" in said
    assert "warning" not in validate(job)
    # What a learner does: it warns, reads bytes, and leaves both for the run's screen.
    news = DataFound(job.parent)
    assert news.news() == []
    with caplog.at_level(logging.INFO):
        loaded: Any = data.load(
            parse_job(JOB, [f"training.data.paths=[{name}]"]).spec,
            directory=job.parent,
            cache_directory=job.parent / "cache",
        )
    assert bytes(loaded.inner.tokens) == RECORDS.encode() + b"\0"
    (line, warning) = [text for text, _ in news.news()]
    assert line.startswith(f"data: 1 file, {len(RECORDS) + 1:,} tokens")
    assert name in warning and "looks like something else and is read as plain bytes: JSON lines" in warning
    assert news.news() == [] and "JSON lines: name it .jsonl" in caplog.text


def learner_warnings(job: Path, name: str) -> list[str]:
    """What a learner would leave for the run's screen, after it has read the file."""
    spec = parse_job(JOB, [f"training.data.paths=[{name}]"]).spec
    news = DataFound(job.parent)
    data.load(spec, directory=job.parent, cache_directory=job.parent / "cache")
    return [text for text, _ in news.news() if not text.startswith("data: 1 file")]


ROWS = [["id", "text"], *([str(i), f"story {i}, of many"] for i in range(30))]


def delimited(delimiter: str) -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(ROWS)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("array.txt", json.dumps([{"text": text} for _, text in ROWS]), "a JSON array: name it .json"),
        ("pretty.txt", json.dumps([{"text": text} for _, text in ROWS], indent=2), "a JSON array: name it .json"),
        ("rows.txt", delimited(","), "CSV: name it .csv"),
        ("rows", delimited("\t"), "TSV: name it .tsv"),
        ("rows.dat", delimited(";"), "CSV with semicolons: write it with commas"),
    ],
)
def test_arrays_and_rows_under_another_name_are_told_too(job: Path, name: str, content: str, words: str) -> None:
    (job.parent / name).write_text(content)
    assert f"looks like something else: {words}" in validate(job, f"training.data.paths=[{name}]")
    (warning,) = learner_warnings(job, name)
    assert f"is read as plain bytes: {words}" in warning


def test_a_file_without_text_is_left_out_of_a_folder_and_refused_alone(job: Path) -> None:
    (job.parent / "docs").mkdir()
    (job.parent / "docs" / "a.txt").write_text("prose " * 100)
    for name in ("b.png", "c.png"):
        (job.parent / "docs" / name).write_bytes(b"\x89PNG\0\0")
    said = validate(job, "training.data.paths=[docs]")
    assert said.count("not text") == 1 and '= "docs/b.png and 1 more"' in said and "is left out: not text" in said
    assert "a valid job " in said
    words = "looks like something else than text: not text"
    assert_refused(job, words, "training.data.paths=[docs/b.png]")
    assert "is left out" not in validate(job, "training.data.paths=[docs/b.png]")


def test_what_is_not_utf8_is_told_where_a_tokenizer_would_lose_it(job: Path) -> None:
    (job.parent / "a.txt").write_bytes("Grüße aus den vielen Städten am Rhein".encode("latin-1") * 100)
    assert "UTF-8" not in validate(job, "training.data.paths=[a.txt]")
    assert "save it as UTF-8" in validate(job, "training.data={paths: [a.txt], tokenizer: x/y, sequenceLength: 16}")


def test_tsv_is_read_as_records(job: Path) -> None:
    (job.parent / "rows.tsv").write_text(delimited("\t"))
    assert "warning" not in validate(job, "training.data.paths=[rows.tsv]")
    assert learner_warnings(job, "rows.tsv") == []
    (job.parent / "other.tsv").write_text("id\tbody\n1\tx\n")
    said = validate(job, "training.data.paths=[other.tsv]")
    assert "would not be read as TSV with textField text: it has no column text: set" in said
    assert "the columns are id, body" in said


@pytest.mark.parametrize(
    "content",
    [json.dumps([{"body": text} for _, text in ROWS]), '{"body": "one"}\n{"body": "two of them"}\n', "[{}, 1]" * 9],
)
def test_validate_and_a_learner_see_a_json_file_without_the_field(job: Path, content: str) -> None:
    (job.parent / "a.json").write_text(content)
    said = validate(job, "training.data.paths=[a.json]")
    assert "would be read as plain bytes, and not as JSON with textField text: record 1 has no field text" in said
    (warning,) = learner_warnings(job, "a.json")
    assert "is read as plain bytes: JSON records without text in the field text" in warning
    (job.parent / "a.json.gz").write_bytes(gzip.compress(content.encode()))
    assert "would not be read as JSON with textField text" in validate(job, "training.data.paths=[a.json.gz]")


def test_validate_is_silent_where_a_json_file_is_what_it_seems(job: Path) -> None:
    for content in (json.dumps([{"text": text} for _, text in ROWS]), '{\n "settings": 1\n}', "[1, 2]", "[]", RECORDS):
        (job.parent / "a.json").write_text(content + 20 * "\n")  # long enough for a sequence
        assert "warning" not in validate(job, "training.data.paths=[a.json]"), content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"id": "a", "story": "once upon"}\n',
            "line 1 has no field text: set training.data.textField: story; the fields are id, story",
        ),
        ('{"id": 1}\n', "line 1 has no field text: set training.data.textField: NAME; the fields are id"),
        ('{"text": "x"}\n\n{"text": 3}\n', "line 3 has no text in its field text: put text there, or remove the line"),
        (
            '{"text": 3, "body": "x"}\n',
            "line 1 has no text in its field text: set training.data.textField: body; the fields are",
        ),
        ("prose\n", "line 1 is not JSON: correct or remove it"),
        ("[1]\n", "line 1 holds no JSON object"),
    ],
)
def test_records_that_would_not_be_read_keep_a_run_from_starting(job: Path, content: str, words: str) -> None:
    (job.parent / "data.jsonl").write_text(content)
    assert_refused(job, f"would not be read as JSON lines with textField text: {words}")
    # A program of the user's may read them in its own way.
    said = validate(job, "learners.command=[python, -c, pass]")
    assert words in said and "would not start" not in said


def test_a_missing_column_and_a_damaged_archive_keep_a_run_from_starting(job: Path) -> None:
    (job.parent / "a.csv").write_text("\nid,body\n1,a longer text\n")
    words = "it has no column text: set training.data.textField: body; the columns are id, body"
    assert_refused(job, words, "training.data.paths=[a.csv]")
    assert "warning" not in validate(job, "training.data={paths: [a.csv], textField: body, sequenceLength: 16}")
    (job.parent / "b.jsonl.gz").write_text("no archive")
    assert_refused(job, "it cannot be unpacked: Not a gzipped file", "training.data.paths=[b.jsonl.gz]")
    assert "name it without .gz if it is not packed" in validate(job, "training.data.paths=[b.jsonl.gz]")


def test_a_folder_in_which_every_file_is_left_out_keeps_a_run_from_starting(job: Path) -> None:
    folder = job.parent / "pictures"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0" + bytes(range(256)) * 8)
    assert_refused(
        job, "hold no text: 3 left out, the first pictures/0.png (not text)", "training.data.paths=[pictures]"
    )
    (folder / "a.txt").write_text("words")  # what is left out makes no sequence
    assert_refused(job, "the file holds at most 6 tokens", "training.data.paths=[pictures]")
    (folder / "a.txt").write_text("words " * 100)
    assert "would not start" not in validate(job, "training.data.paths=[pictures]")


@pytest.mark.parametrize(
    ("name", "size", "change", "words"),
    [
        ("a.txt", 0, "", "the file is empty: name data with text"),
        ("a.txt", 11, "", "at most 12 tokens, which is less than one sequence of training.data.sequenceLength = 16"),
        ("a.txt", 16, "", ""),
        ("a.txt", 1, "training.data.tokenizer=gpt2", "at most 13 tokens"),
        ("a.txt", 2, "training.data.tokenizer=gpt2", ""),
        ("a.jsonl.gz", 0, "", "the file is empty"),
        ("folder/.hidden", 100, "", "holds no files"),
        ("folder/a.txt", 3, "", "at most 4 tokens"),
        ("folder/deep/a.txt", 30, "", ""),
        ("[1].txt", 30, "", ""),
    ],
)
def test_files_without_enough_text_keep_a_run_from_starting(
    job: Path, name: str, size: int, change: str, words: str
) -> None:
    file = job.parent / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"a" * size)
    overrides = [f"training.data.paths=['{name.split('/', maxsplit=1)[0]}']", *([change] if change else [])]
    if words:
        assert_refused(job, words, *overrides)
    else:
        assert "warning" not in validate(job, *overrides)
    elsewhere = validate(job, f"{overrides[0][:-1]}, 's3://bucket/more']", *overrides[1:])
    assert "sequenceLength" not in elsewhere, "how much lies there is not known"


@pytest.mark.parametrize("name", ["a.parquet", "saved/data.arrow"])
def test_tables_without_pyarrow_keep_a_run_from_starting(job: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = job.parent / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"PAR1" * 100)
    for about in ("state.json", "dataset_info.json"):
        (job.parent / "saved" / about).write_text("{}") if name.startswith("saved") else None
    monkeypatch.setattr(data_files, "is_installed", lambda package: package != "pyarrow")
    where = f"training.data.paths=[{name.split('/')[0]}]"
    assert_refused(job, "the package pyarrow, which is not installed: pip install 'decoupled-diloco[datasets]'", where)
    monkeypatch.setattr(data_files, "is_installed", lambda package: True)
    assert "warning" not in validate(job, where)


def test_a_data_set_that_is_a_file_of_records_needs_no_package(job: Path) -> None:
    change = "training.data={source: datasets, name: data.jsonl, sequenceLength: 16}"
    assert find_absent(load_job(job, [change]), job.parent) == []
    (job.parent / "data.jsonl").write_text('{"body": "x"}\n')
    (problem,) = find_absent(load_job(job, [change]), job.parent)
    assert problem.path == "spec.training.data.name" and "training.data.textField: body" in problem.message


def test_the_first_load_counts_and_later_ones_know(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    (job.parent / "more.txt").write_text("plain")
    spec = parse_job(JOB, ["training.data.paths=[data.jsonl, more.txt]"]).spec
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            data.load(spec, directory=job.parent, cache_directory=job.parent / "cache")
        assert "data: 2 files, 1 of them with 300 records, " in caplog.text
