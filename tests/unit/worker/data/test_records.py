"""Files of records: which texts come out of them, in which order, and how a wrong one is told."""

from __future__ import annotations

import csv
import gc
import gzip
import io
import json
import sys
import sysconfig
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.common.data.data_files import HEAD_BYTES, RecordFormat, appearance, binary_kind, record_format
from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError
from diloco_protocol.spec.training import BatchSpec, DataSpec, TrainingSpec
from diloco_worker import data
from diloco_worker.data import cache, corpus, records, tables, text
from diloco_worker.data.found import TOLD
from repository import ROOT

TEXTS = ["one", "two\nlines", "", 'a "quote", a comma', "naïve – 日本 \U0001f600"]


def spec(**fields: Any) -> JobSpec:
    training = TrainingSpec(data=DataSpec(**fields), batch=BatchSpec(sequences=1), evaluation=None)
    return JobSpec(training=training, regions=[RegionSpec(learners=1)])


def read(file: Path, field: str = "text") -> list[str]:
    (document,) = corpus.documents([file.name], file.parent)
    format = record_format(file.name)
    assert format is not None
    return list(records.texts(document, format, field))


def problem(file: Path, content: bytes, field: str = "text") -> str:
    file.write_bytes(content)
    with pytest.raises(JobError) as caught:
        read(file, field)
    return str(caught.value)


def tokens(directory: Path, **fields: Any) -> bytes:
    """All tokens of a job's data in the order of the files, as bytes."""
    fields = {"sequence_length": 2, **fields}
    loaded: Any = data.load(spec(**fields), directory=directory, cache_directory=directory / "cache")
    return bytes(loaded.inner.tokens)


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def json_array(texts: list[str]) -> bytes:
    return json.dumps([{"text": text, "n": [1, {}]} for text in texts], ensure_ascii=False, indent=2).encode()


def csv_rows(texts: list[str]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([["id", "text"], *enumerate(texts)])
    return out.getvalue().encode()


def tsv_rows(texts: list[str]) -> bytes:
    out = io.StringIO()
    csv.writer(out, delimiter="\t").writerows([["id", "text"], *enumerate(texts)])
    return out.getvalue().encode()


FORMS = {".jsonl": json_lines, ".ndjson": json_lines, ".json": json_array, ".csv": csv_rows, ".tsv": tsv_rows}


@pytest.mark.parametrize("ending", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_texts_are_those_that_were_written(tmp_path: Path, ending: str, packed: bool) -> None:
    content = FORMS[ending](TEXTS)
    file = tmp_path / f"a{ending}{'.gz' * packed}"
    file.write_bytes(gzip.compress(content) if packed else content)
    assert read(file) == TEXTS
    # A record is a document: its bytes, then the separator.
    assert tokens(tmp_path, paths=[file.name]) == b"".join(text.encode() + b"\0" for text in TEXTS)


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines_in_a_file_named_json(tmp_path: Path, packed: bool) -> None:
    content = json_lines(TEXTS)
    file = tmp_path / f"a.json{'.gz' * packed}"
    file.write_bytes(gzip.compress(content) if packed else content)
    assert read(file) == TEXTS


@pytest.mark.parametrize("uri", ["file://{}/a.jsonl.gz", "memory://records/a.jsonl.gz"])
def test_records_behind_a_uri(tmp_path: Path, uri: str) -> None:
    import fsspec

    uri = uri.format(tmp_path)
    with fsspec.open(uri, "wb") as file:
        file.write(gzip.compress(json_lines(TEXTS)))
    assert tokens(tmp_path, paths=[uri]) == b"".join(text.encode() + b"\0" for text in TEXTS)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=6),
    st.sampled_from([".jsonl", ".json"]),
    st.integers(1, 40),
    st.booleans(),
)
def test_whatever_the_texts_and_wherever_chunks_end(texts: list[str], ending: str, chunk: int, escaped: bool) -> None:
    if ending == ".jsonl":
        content = "".join(json.dumps({"text": text}, ensure_ascii=escaped) + "\n" for text in texts)
    else:
        content = json.dumps([{"a": [True, -1.5e3, None], "text": text} for text in texts], ensure_ascii=escaped)
    document = InMemory("a" + ending, content.encode())
    before = records.CHUNK_BYTES
    records.CHUNK_BYTES = chunk
    try:
        assert list(records.texts(document, record_format(document.uri), "text")) == texts  # type: ignore[arg-type]
    finally:
        records.CHUNK_BYTES = before


class InMemory(corpus.Document):
    """A document without a file."""

    def __init__(self, uri: str, content: bytes) -> None:
        super().__init__(uri, len(content), "")
        object.__setattr__(self, "filesystem", content)

    def open(self) -> Any:
        return io.BytesIO(self.filesystem)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text":"a"}\n\n{"text":', ["a.jsonl", "line 3 is not JSON (expecting value, character 9)"]),
        ("a.jsonl", b'{"text":"a"}\n[1]\n', ["line 2 holds a list; each record must be an object"]),
        ("a.jsonl", b'{"text":"a"}\n{"text":"\xff"}\n', ["line 2 is not UTF-8 (byte 0xff, 10 bytes in)"]),
        ("a.jsonl", b'{"text":"a"}\n{"body":"b","n":1}', ["textField", "a.jsonl, line 2", "no such field", "body, n"]),
        ("a.jsonl", b'{"text":null}', ["textField", "a.jsonl, line 1", "must hold text, and holds null"]),
        ("a.jsonl", b'{"text":7}', ["a.jsonl, line 1", "holds a number"]),
        ("a.jsonl", b'{"text":"x\\ud800"}', ["a.jsonl, line 1: character 2 of the field is not Unicode"]),
        ("a.jsonl.gz", gzip.compress(json_lines(["x"] * 9999))[:-20], ["line ", "cannot be read", "ended before"]),
        ("a.jsonl.gz", b"plain", ["line 1 cannot be read", "Not a gzipped file"]),
        ("a.json", b'[{"text":"a"} {"text":"b"}]', ["record 1 is followed by neither a comma nor the end"]),
        ("a.json", b'[{"text":"a"},{"text":x}, {}]', ["record 2 is not JSON (expecting value)"]),
        ("a.json", b'[{"text":"a"},{"te', ["record 2 is not JSON (unterminated string starting)"]),
        ("a.json", b'[{"text":"a"},{"body":"a"}]', ["textField", "a.json, record 2", "no such field", "body"]),
        ("a.json", b"[{}, 1]", ["a.json, record 1", "no such field"]),
        ("a.json", b"[1]", ["record 1 is not an object"]),
        ("a.json", b'[{"text":"\xff"}]', ["is not UTF-8"]),
        ("a.csv", b"id,body\n1,x\n", ["textField", "a.csv, line 1, the header", "id, body"]),
        ("a.csv", b'text,id\n"a\nb",1\n\nc\n', ["line 5 has 1 values, and the header has 2"]),
        ("a.csv", b'text\n"a\nb', ["line 3 is not CSV (unexpected end of data)"]),
        ("a.csv", b"text\n\xff\n", ["line 2 is not UTF-8"]),
        ("a.tsv", b"id\tbody\n1\tx\n", ["textField", "a.tsv, line 1, the header", "id, body"]),
        ("a.tsv", b'text\tid\n"a\tb', ["line 2 is not TSV (unexpected end of data)"]),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_field(
    tmp_path: Path, name: str, content: bytes, words: list[str]
) -> None:
    said = problem(tmp_path / name, content)
    assert str(tmp_path) in said
    for word in words:
        assert word in said


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "ab", "text": "no"}\n')
    (tmp_path / "b.csv").write_text("text,body\nno,cd\n")
    assert tokens(tmp_path, paths=["a.jsonl", "b.csv"], text_field="body") == b"ab\0cd\0"


def test_a_long_cell_and_a_byte_order_mark(tmp_path: Path) -> None:
    long = "x" * 300_000  # the csv module's own limit is 131 072
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext\n" + long.encode() + b"\n")
    assert read(tmp_path / "a.csv") == [long]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(["a"]))
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json_array(["a"]))
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "a.json") == ["a"]


@pytest.mark.parametrize("make", [json_lines, json_array, csv_rows])
def test_memory_holds_a_record_and_not_the_file(
    tmp_path: Path, make: Callable[[list[str]], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CHUNK_BYTES", 1 << 14)
    file = tmp_path / f"a{next(ending for ending, form in FORMS.items() if form is make)}"
    file.write_bytes(make(["x" * 1000] * 4000))
    (document,) = corpus.documents([file.name], tmp_path)
    format = record_format(file.name)
    assert format is not None
    gc.collect()
    tracemalloc.start()
    try:
        assert sum(len(text) for text in records.texts(document, format, "text")) == 4_000_000
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------ beside plain text


def test_plain_text_has_the_token_file_that_it_always_had(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_bytes(json_lines(["r"]))
    assert tokens(tmp_path, paths=["a.txt"]) == b"plain\0"
    (document,) = corpus.documents(["a.txt"], tmp_path)
    key = cache.digest(["text", "bytes", [(document.uri, document.size, document.stamp)]])
    assert (tmp_path / "cache" / f"tokens-{key}.uint8").read_bytes() == b"plain\0"
    assert tokens(tmp_path, paths=["b.jsonl", "a.txt"]) == b"r\0plain\0"


def test_a_json_file_that_holds_no_such_records_stays_text(tmp_path: Path) -> None:
    for name, content in {
        "a.json": '{\n "a": 1\n}',
        "b.json": "[1, 2]",
        "c.json": "7",
        "d.json": '{"body": "x"}',
    }.items():
        (tmp_path / name).write_text(content)
    assert tokens(tmp_path, paths=["a.json", "b.json", "c.json"]) == b'{\n "a": 1\n}\x00[1, 2]\x007\x00'
    assert json.loads((tmp_path / "cache" / TOLD).read_text())["warnings"] == []
    assert tokens(tmp_path, paths=["d.json"]) == b'{"body": "x"}\0'
    (warning,) = json.loads((tmp_path / "cache" / TOLD).read_text())["warnings"]
    assert "d.json" in warning and "JSON records without text in the field text" in warning and "textField" in warning


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (json_lines(["a", "b"]), "JSON lines: name it .jsonl"),
        (b'{"text": "only one"}', "JSON lines"),
        (b"{\n  'a': 1\n}", ""),
        (b"{braces}\n{in}\n{prose}\n", ""),
        (b'{"a": 1}\nprose\n', ""),
        (b"", ""),
        (b"prose\n", ""),
        (json_array(["a", "b"]), "a JSON array: name it .json"),
        (b'\xef\xbb\xbf [ {"text": "a"}]', "a JSON array"),
        (json_array(["x" * 1000] * 100)[:HEAD_BYTES], "a JSON array"),
        (b"[1, 2]", ""),
        (b"[see {the} note]\n", ""),
        (csv_rows(["a", "b"]), "CSV: name it .csv"),
        (csv_rows(TEXTS), "CSV: name it .csv"),
        (csv_rows(["x, y" * 300] * 100)[:HEAD_BYTES], "CSV: name it .csv"),
        (tsv_rows(["a, b", "c; d"]), "TSV: name it .tsv"),
        (csv_rows(["a", "b"]).replace(b",", b";"), "CSV with semicolons: write it with commas"),
        (b"id,text\n1,a\n", ""),  # two lines are too few to tell
        (b"id,text\n1,a\n2\n3,c\n", ""),
        (b"Hello, world\nhow, then\nand, so\n", ""),
        (b"Row, row, row your boat,\nGently, gently, down the stream,\nMerrily, merrily, then, well,\n", ""),
        (b"One,Two sentences stand here. And more,\nis,not\na,header\n", ""),
        (b"1,2\n3,4\n5,6\n", ""),
        (b"\tindented\n\tcode\n\there\n", ""),
        (b"int a;\nint b;\nint c;\n", ""),
        (b"a,a\nb,b\nc,c\n", ""),
    ],
)
def test_what_a_plain_file_looks_like(head: bytes, words: str) -> None:
    assert appearance(head) if words else not appearance(head)
    assert words in appearance(head)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (gzip.compress(b"x", mtime=0), "compressed with gzip: unpack it first"),
        (b"\x28\xb5\x2f\xfd...", "compressed with zstd"),
        (b"PAR1....", "Parquet: name it .parquet"),
        (b"%PDF-1.7\n1 0 obj", "a PDF: extract its text first"),
        ("prose".encode("utf-16"), "UTF-16: save it as UTF-8"),
        ("prose and more prose".encode("utf-16-le"), "not text"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not text"),
        ((500).to_bytes(8, "little") + b'{"weight":{"dtype":"F32"' + b" " * 400, "not text"),  # safetensors
        (bytes(range(128, 256)) * 3, "not UTF-8: save it as UTF-8"),
        ("Grüße aus den vielen Städten am Rhein".encode("latin-1"), ""),
        ("Grüße".encode()[:3], ""),  # cut within a character
        ("Unlesbar: \ufffd".encode() * 9, ""),
        (b"one document\0another document\0", ""),
        ("é".encode("latin-1") + b"123456789", ""),
        ("é".encode("latin-1") + b"12345678", "not UTF-8"),
    ],
)
def test_what_is_no_text(head: bytes, words: str) -> None:
    assert binary_kind(head) if words else not binary_kind(head)
    assert words in binary_kind(head)


@pytest.mark.promise(
    "A file without text is left out of a data folder by name, and is refused where the job names that file"
)
def test_files_without_text_are_left_out_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "pic.png").write_bytes(b"\x89PNG\r\n\0\0")
    (folder / "zebra.txt").write_text("two")
    for name in ("docs", "docs/*"):
        for _ in range(2):  # read, then known from beside the token file
            assert tokens(tmp_path, paths=[name]) == b"one\0two\0"
            told = json.loads((tmp_path / "cache" / TOLD).read_text())
            assert told["line"].startswith("3 files, 1 left out: pic.png (not text); 8 tokens") and not told["warnings"]
    for paths in (["docs/pic.png"], ["docs/a.txt", "docs/pic.png"], [f"file://{folder}/pic.png"]):
        with pytest.raises(JobError, match=r"data.paths.*pic.png.*something else than text: not text"):
            tokens(tmp_path, paths=paths)
    with pytest.raises(JobError, match=r"holds no text: 1 left out: pic.png \(not text\)"):
        tokens(tmp_path, paths=["docs/*.png"])


@pytest.mark.parametrize("ending", [".py", ".md", ".toml", ".sh"])
def test_text_and_code_are_not_taken_for_records(ending: str) -> None:
    """Of the standard library, which is the built-in corpus, and of this repository."""
    folders = [Path(sysconfig.get_path("stdlib")), ROOT]
    skipped = {".git", ".venv", "site-packages", "node_modules", "build", "runs"}
    files = [f for folder in folders for f in folder.rglob(f"*{ending}") if not skipped & set(f.parts)]
    looks = {
        str(file): said
        for file in files[:800]
        if (said := binary_kind(head := file.read_bytes()[:HEAD_BYTES]) or appearance(head))
    }
    assert files and looks == {}


def test_endings() -> None:
    assert record_format("dir/A.JSONL.GZ") is RecordFormat.JSON_LINES
    assert record_format("a.csv.gz") is RecordFormat.CSV
    assert record_format("a.tsv.gz") is RecordFormat.TSV
    assert record_format("a.parquet") is RecordFormat.PARQUET
    for plain in ("a.parquet.gz", "a.txt", "a.gz", "jsonl", "a.jsonl.zst"):
        assert record_format(plain) is None


def test_a_local_file_as_source_datasets_needs_no_library(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["ab", "cd"]))
    assert tokens(tmp_path, source="datasets", name="a.jsonl") == b"ab\0cd\0"


# ------------------------------------------------------------------ tables


def test_a_table_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for fields in ({"paths": ["a.parquet"]}, {"source": "datasets", "name": "a.parquet"}):
        with pytest.raises(JobError, match=r"a\.parquet.*not installed: pip install 'decoupled-diloco\[datasets\]'"):
            data.load(spec(**fields), directory=tmp_path)


class TestTables:
    @pytest.fixture(autouse=True)
    def _pyarrow(self) -> None:
        pytest.importorskip("pyarrow")

    def table(self, **columns: list[Any]) -> Any:
        import pyarrow as pa

        return pa.table(columns)

    def test_parquet(self, tmp_path: Path) -> None:
        import pyarrow.parquet as pq

        many = [f"text {i}" for i in range(2500)]
        pq.write_table(self.table(n=list(range(2500)), text=many), tmp_path / "a.parquet", row_group_size=700)
        assert read(tmp_path / "a.parquet") == many
        whole = b"".join(text.encode() + b"\0" for text in many)
        assert tokens(tmp_path, paths=["a.parquet"]) == whole
        assert tokens(tmp_path, paths=[f"file://{tmp_path}/a.parquet"]) == whole
        assert tokens(tmp_path, source="datasets", name="a.parquet") == whole

    def test_arrow_as_a_stream_and_as_a_file(self, tmp_path: Path) -> None:
        import pyarrow as pa

        table = self.table(text=TEXTS)
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
        assert read(tmp_path / "a.arrow") == read(tmp_path / "b.arrow") == TEXTS

    def test_refusals(self, tmp_path: Path) -> None:
        import pyarrow.parquet as pq

        pq.write_table(self.table(body=["a"], number=[1], hole=["a", None][:1]), tmp_path / "a.parquet")
        pq.write_table(self.table(text=["a", None]), tmp_path / "null.parquet")
        for file, field, words in [
            ("a.parquet", "text", r"no such column; name the one that holds the text: body, number, hole"),
            ("a.parquet", "number", r"a\.parquet, record 1: the field must hold text, and holds a number"),
            ("null.parquet", "text", r"null\.parquet, record 2: the field must hold text, and holds null"),
        ]:
            with pytest.raises(JobError, match=words):
                read(tmp_path / file, field)
        assert "cannot be read as Parquet" in problem(tmp_path / "b.parquet", b"PAR1 no table")
        assert "cannot be read as Arrow" in problem(tmp_path / "b.arrow", b"no table")

    def test_a_folder_of_save_to_disk(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        many = [f"text {i}" for i in range(100)]
        table = datasets.Dataset.from_dict({"text": many, "n": list(range(100))})
        table.save_to_disk(str(tmp_path / "one"), num_shards=3)
        datasets.DatasetDict({"train": table, "test": table.select([7, 5])}).save_to_disk(str(tmp_path / "two"))
        whole = b"".join(text.encode() + b"\0" for text in many)
        assert tokens(tmp_path, paths=["one"]) == whole
        assert tokens(tmp_path, paths=["two"]) == whole
        assert tokens(tmp_path, paths=["two"], split="test") == b"text 7\0text 5\0"
        with pytest.raises(JobError, match=r"data\.split.*has no such split; it has train, test"):
            tokens(tmp_path, paths=["two"], split="validation")


def saved_folder(where: Path, files: list[str], named: list[str]) -> None:
    where.mkdir(parents=True)
    for name in files:
        (where / name).write_bytes(name.encode())
    (where / "dataset_info.json").write_text("{}")
    (where / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in named]}))


def test_a_saved_folder_is_its_arrow_files_in_its_own_order(tmp_path: Path) -> None:
    """Without pyarrow: which files would be read."""
    saved_folder(tmp_path / "d" / "train", ["a.arrow", "b.arrow", "cache-1.arrow"], ["b.arrow", "a.arrow"])
    saved_folder(tmp_path / "d" / "test", ["t.arrow"], ["t.arrow"])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "notes.txt").write_text("x")

    def names(split: str) -> list[str]:
        listed = corpus.documents(["notes.txt", "d"], tmp_path)
        return [Path(d.uri).name for d in tables.without_bookkeeping(listed, split)]

    assert names("train") == ["notes.txt", "b.arrow", "a.arrow"]
    assert names("test") == ["notes.txt", "t.arrow"]
    (tmp_path / "d" / "train" / "b.arrow").unlink()
    with pytest.raises(JobError, match=r"lacks .*b\.arrow, which its state\.json names"):
        names("train")


@pytest.mark.promise("What a job's data hold is said before its start: files, records, tokens, and what is left out")
def test_a_look_says_what_a_learner_would_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("prose")
    (tmp_path / "docs" / "b.jsonl").write_bytes(json_lines(["ab"] * 90))
    (tmp_path / "docs" / "c.png").write_bytes(b"\0\0")
    whole = DataSpec(paths=["docs"], sequence_length=2)
    line, in_part = text.summarise_data(whole, tmp_path)
    assert line == "3 files, 1 of them with 90 records, 1 left out: c.png (not text); 276 tokens: 138 sequences of 2"
    assert not in_part
    tokens(tmp_path, paths=["docs"])
    assert json.loads((tmp_path / "cache" / TOLD).read_text())["line"].startswith(line)
    read: list[int | None] = []
    original = corpus.Document.read
    monkeypatch.setattr(corpus.Document, "read", lambda self, most=None: read.append(most) or original(self, most))
    monkeypatch.setattr(text, "LOOK_BYTES", 100)
    monkeypatch.setattr(text, "HEAD_BYTES", 50)
    (tmp_path / "large.txt").write_text("x" * 5000)
    line, in_part = text.summarise_data(whole.model_copy(update={"paths": ["large.txt", "docs"]}), tmp_path)
    assert in_part and read == [50, 100] and line.startswith("4 files of 7,247 bytes;")
    assert line.endswith("; the first 100 bytes of text are 101 tokens")
    assert text.summarise_data(whole.model_copy(update={"paths": ["gone.txt"]}), tmp_path) == ("", False)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(json_lines(["x" * 1000] * 9)))
    line, in_part = text.summarise_data(whole.model_copy(update={"paths": ["packed.jsonl.gz"]}), tmp_path)
    assert in_part and line.endswith("; the first 1,000 bytes of text are 1,001 tokens")
    monkeypatch.setattr(text, "LOOK_FILES", 2)
    assert text.summarise_data(whole, tmp_path) == ("more than 2 files", True)
