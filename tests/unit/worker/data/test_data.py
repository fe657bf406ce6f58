"""The job's data: which sequences, held out by what rule, from where, and what is refused."""

from __future__ import annotations

import math
import multiprocessing
import sys
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.load import JobError
from diloco_protocol.spec.training import BatchSpec, DataSpec, EvaluationSpec, TrainingSpec
from diloco_worker import data
from diloco_worker.data import cache, corpus, text
from diloco_worker.data.shuffle import Permutation
from diloco_worker.data.split import Part
from example_counts import share_of
from recorded_disk import RecordedDisk
from repository import ROOT


def spec(fraction: float | None = 0.25, sequences: int = 1, **fields: Any) -> JobSpec:
    evaluation = EvaluationSpec(fraction=fraction) if fraction is not None else None
    training = TrainingSpec(data=DataSpec(**fields), batch=BatchSpec(sequences=sequences), evaluation=evaluation)
    return JobSpec(training=training, regions=[RegionSpec(learners=1)])


def problem(directory: Path, job: JobSpec, held_out: bool = False) -> str:
    with pytest.raises(JobError) as caught:
        data.load(job, held_out, directory=directory)
    return str(caught.value)


# ------------------------------------------------------------------ split


@given(st.integers(0, 3000), st.integers(1, 500).map(lambda n: n / 1000))
@settings(max_examples=share_of(100), deadline=None)
def test_split_is_the_rule(total: int, fraction: float) -> None:
    f = Fraction(repr(fraction))
    held = [i for i in range(total) if math.floor((i + 1) * f) > math.floor(i * f)]
    kept = [i for i in range(total) if math.floor((i + 1) * f) == math.floor(i * f)]
    assert list(Part.of(total, fraction, held_out=True)) == held
    assert list(Part.of(total, fraction, held_out=False)) == kept


def test_split_ends_where_it_ends() -> None:
    part = Part.of(100, 0.1, held_out=True)
    assert (len(part), len(Part.of(100, 0.1, held_out=False))) == (10, 90)
    for bad in (-1, 10):
        with pytest.raises(IndexError):
            part[bad]
    assert len(Part.of(10, 0.0, held_out=False)) == 10


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1))
@settings(max_examples=share_of(60), deadline=None)
def test_shuffle_is_a_permutation(size: int, seed: int) -> None:
    order = Permutation(size, seed)
    assert sorted(order(i) for i in range(size)) == list(range(size))


def test_shuffle_depends_on_the_seed_and_leaves_no_neighbours_together() -> None:
    size = 100_000
    one, same, other = Permutation(size, 1), Permutation(size, 1), Permutation(size, 2)
    places = np.array([one(i) for i in range(2000)])
    assert places.tolist() == [same(i) for i in range(2000)]
    assert (places != np.array([other(i) for i in range(2000)])).mean() > 0.99
    # A block of consecutive sequences comes from everywhere, evenly.
    counts, _ = np.histogram(places, bins=20, range=(0, size))
    assert ((counts - 100.0) ** 2 / 100).sum() < 50  # chi-squared with 19 degrees of freedom: p < 1e-4
    assert np.mean(np.abs(np.diff(places)) < 100) < 0.02
    for i in (-1, size):
        with pytest.raises(IndexError):
            one(i)


# ------------------------------------------------------------------ text


def test_every_byte_is_in_one_sequence_of_one_part(tmp_path: Path) -> None:
    source = bytes(np.random.default_rng(0).integers(1, 128, 1000, np.uint8))
    (tmp_path / "a.bin").write_bytes(source[:400])
    (tmp_path / "b.bin").write_bytes(source[400:])
    job = spec(paths=["b.bin", "a.bin"], sequence_length=10)
    train: Any = data.load(job, directory=tmp_path)
    held = data.load(job, held_out=True, directory=tmp_path)
    assert (len(train), len(held)) == (75, 25)
    seen = sorted(bytes(train[k]["input_ids"].tolist()) for k in range(75))
    assert seen == sorted(bytes(train.inner[k]["input_ids"].tolist()) for k in range(75))
    joined = source[400:] + b"\0" + source[:400] + b"\0"
    rows = {i: bytes(held[i // 4]["input_ids"].tolist()) for i in range(3, 100, 4)}
    kept = [i for i in range(100) if i % 4 != 3]
    rows |= {i: bytes(train.inner[k]["input_ids"].tolist()) for k, i in enumerate(kept)}
    assert b"".join(rows[i] for i in range(100)) == joined[:1000]
    item = train[0]
    assert item["input_ids"].dtype == torch.int64 and torch.equal(item["input_ids"], item["labels"])


def test_directories_globs_and_uris_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "d" / "z").mkdir(parents=True)
    for name in ("d/b.txt", "d/a.txt", "d/z/c.txt", "d/.hidden", "other.log"):
        (tmp_path / name).write_text(name)

    def names(*paths: str) -> list[str]:
        return [Path(d.uri).name for d in corpus.documents(paths, tmp_path)]

    assert names("d") == ["a.txt", "b.txt", "c.txt"]
    assert names("d/*.txt") == ["a.txt", "b.txt"]
    assert names("d/**/*.txt") == ["a.txt", "b.txt", "c.txt"]
    assert names("other.log", "d/b.txt", "d") == ["other.log", "b.txt", "a.txt", "c.txt"]
    assert names(f"file://{tmp_path}/d") == ["a.txt", "b.txt", "c.txt"]
    assert names(f"file://{tmp_path}/d/*.txt") == ["a.txt", "b.txt"]
    (document,) = corpus.documents([f"file://{tmp_path}/other.log"], tmp_path)
    assert document.read() == b"other.log" and document.size == 9 and document.stamp


def test_memory_uri() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/corpus/one.txt", b"0123456789" * 10)
    job = spec(paths=["memory://corpus"], sequence_length=10)
    assert len(data.load(job)) == 8
    assert "nothing there" in problem(Path("/"), spec(paths=["memory://nowhere/x"]))


def test_standard_library_is_the_interpreters_own_source() -> None:
    files = corpus.standard_library_files()
    names = [f.relative_to(corpus.standard_library()).as_posix() for f in files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not any("site-packages" in n or n.startswith("test/") or "_sysconfigdata" in n for n in names)
    job = spec(fraction=0.01, paths=["python-stdlib"])
    train: Any = data.load(job)
    held = data.load(job, held_out=True)
    assert len(train) > 40_000 and len(held) == (len(train) + len(held)) // 100
    first = bytes(train.inner[0]["input_ids"].tolist())
    assert files[0].read_bytes().startswith(first[:100])


def test_token_file_is_made_once_for_all_processes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 5000)
    context = multiprocessing.get_context("fork")
    made, lengths = context.Value("i", 0), context.Queue()

    def produce() -> list[np.ndarray]:
        with made.get_lock():
            made.value += 1
        return [np.arange(100, dtype=np.uint8)] * 50

    def learner() -> None:
        array = cache.token_array(produce, np.dtype(np.uint8), tmp_path / "cache", "k")
        lengths.put((len(array), int(array.sum()), type(array).__name__))

    processes = [context.Process(target=learner) for _ in range(4)]
    for process in processes:
        process.start()
    found = {lengths.get(timeout=30) for _ in processes}
    for process in processes:
        process.join(30)
    assert made.value == 1
    assert found == {(5000, 50 * 4950, "memmap")}
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".lock", ".uint8"]


def test_a_token_file_is_on_the_device_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RecordedDisk(monkeypatch, tmp_path)
    tokens = np.arange(5, dtype=np.uint16)
    cache.token_array(lambda: [tokens], tokens.dtype, tmp_path, "key")
    flushed, named, folder = disk.events
    assert flushed == ("flush", "*.tmp", tokens.tobytes())
    assert named[:2] == ("name", "tokens-key.uint16") and named[1] in folder[2] and folder[:2] == ("flush", ".")


def test_changed_file_is_other_tokens(tmp_path: Path) -> None:
    job = spec(paths=["a.txt"], sequence_length=10)
    where = {"directory": tmp_path, "cache_directory": tmp_path / "cache"}
    (tmp_path / "a.txt").write_text("a" * 100)
    assert data.load(job, **where)[0]["input_ids"][0] == ord("a")
    (tmp_path / "a.txt").write_text("b" * 101)
    assert data.load(job, **where)[0]["input_ids"][0] == ord("b")
    assert len(list((tmp_path / "cache").glob("*.uint8"))) == 2


def test_failed_production_leaves_no_file(tmp_path: Path) -> None:
    def produce() -> Any:
        yield np.zeros(10, np.uint8)
        raise JobError([])

    with pytest.raises(JobError):
        cache.token_array(produce, np.dtype(np.uint8), tmp_path, "k")
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def test_workdir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert "cannot be written" in problem_of_cache(tmp_path / "cache")


def problem_of_cache(directory: Path) -> str:
    with pytest.raises(JobError) as caught:
        data.load(spec(paths=["python-stdlib"]), cache_directory=directory)
    return str(caught.value)


def test_transformers_tokenizer(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", ["<end>", *(f"w{i}" for i in range(300))])
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(100)))
    (tmp_path / "b.txt").write_text(" ".join(f"w{i}" for i in range(200, 300)))
    job = spec(paths=["a.txt", "b.txt"], sequence_length=101, tokenizer=str(folder), fraction=None)
    loaded: Any = data.load(job, directory=tmp_path)
    found = loaded.inner
    assert isinstance(found, text.TokenSequences) and found.tokens.dtype == np.uint16
    assert found[0]["input_ids"].tolist() == [*range(1, 101), 0]
    assert found[1]["input_ids"].tolist() == [*range(201, 301), 0]


@pytest.mark.promise("A token id is never stored as another one, and one that the model does not have is refused")
def test_a_tokenizer_whose_ids_have_holes(tmp_path: Path) -> None:
    """Its vocabulary ends at its highest id, and not at the number of its tokens."""
    folder = word_tokenizer(tmp_path / "tokenizer", {"<end>": 0, "w1": 300, "w2": 70_000})
    (tmp_path / "a.txt").write_text("w1 w2 " * 8)
    job = spec(paths=["a.txt"], sequence_length=17, tokenizer=str(folder), fraction=None)
    loaded: Any = data.load(job, directory=tmp_path)
    assert loaded[0]["input_ids"].tolist() == [300, 70_000] * 8 + [0]
    assert text.tokenizer(str(folder)).vocabulary == 70_001


@pytest.mark.promise("A token id is never stored as another one, and one that the model does not have is refused")
def test_a_token_beyond_the_vocabulary_is_refused_before_it_is_cast(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", ["<end>", "w1"])
    text.tokenizer(str(folder)).tokens = lambda document: np.array([0, 300], np.uint32)  # type: ignore[method-assign]
    (tmp_path / "a.txt").write_text("w1")
    said = problem(tmp_path, spec(paths=["a.txt"], sequence_length=2, tokenizer=str(folder), fraction=None))
    assert "training.data.tokenizer" in said and "gives the token 300, and its vocabulary ends at 1" in said


def test_long_documents_are_tokenised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer", ["<end>", "w0", "w1"])
    words = text.tokenizer(str(folder))
    document = b"w0 w1\nw1 w0\n" * 20
    whole = words.tokens(document)
    monkeypatch.setattr(text, "PIECE_CHARACTERS", 25)
    assert np.array_equal(words.tokens(document), whole)
    assert len(whole) == 81 and whole[-1] == 0


def word_tokenizer(folder: Path, words: list[str] | dict[str, int]) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = words if isinstance(words, dict) else {word: i for i, word in enumerate(words)}
    end = next(iter(ids))
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------ refusals


def test_every_missing_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = problem(tmp_path, spec(paths=["gone.txt", "empty", "no/*.txt", "nosuch://host/x"]))
    for i, words in enumerate(("no such file", "holds no files", "no file matches", "fsspec")):
        line = found.splitlines()[i]
        assert line.startswith(f"spec.training.data.paths.{i}") and words in line


def test_empty_and_short_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    assert "1 tokens" in problem(tmp_path, spec(paths=["a.txt"], sequence_length=16))
    (tmp_path / "a.txt").write_text("x" * 160)
    short = spec(paths=["a.txt"], sequence_length=16, sequences=16)
    assert "less than one batch of 16" in problem(tmp_path, short)
    none = spec(paths=["a.txt"], sequence_length=16, fraction=0.01)
    assert "evaluation.fraction" in problem(tmp_path, none, held_out=True)
    assert len(data.load(spec(paths=["a.txt"], sequence_length=16, fraction=None), directory=tmp_path)) == 10


def test_no_such_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x" * 160)
    (tmp_path / "none").mkdir()
    found = problem(tmp_path, spec(paths=["a.txt"], tokenizer=str(tmp_path / "none")))
    assert "spec.training.data.tokenizer" in found


# ------------------------------------------------------------------ a function of the user's


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_data_for_tests.py").write_text(
        textwrap.dedent("""
        import torch

        def load(data, held_out):
            assert data.source == "python"
            n = 2 if held_out else 10
            return [{"input_ids": torch.full((4,), i), "labels": torch.full((4,), i)} for i in range(n)]

        def wrong(data, held_out):
            return 7

        number = 3
    """)
    )
    (tmp_path / "needs_something.py").write_text("import nothing_of_that_name\n")
    yield tmp_path
    for name in ("own_data_for_tests", "needs_something"):
        sys.modules.pop(name, None)


def test_function_beside_the_job_file(module: Path) -> None:
    job = spec(source="python", function="own_data_for_tests:load")
    assert len(data.load(job, directory=module)) == 10
    assert len(data.load(job, held_out=True, directory=module)) == 2


def test_function_that_is_not_there(module: Path) -> None:
    def found(function: str) -> str:
        return problem(module, spec(source="python", function=function))

    assert "no module nowhere_at_all" in found("nowhere_at_all:load")
    assert "no module own_data_for_tests.sub" in found("own_data_for_tests.sub:load")
    assert "has no function lod" in found("own_data_for_tests:lod")
    assert "has no function number" in found("own_data_for_tests:number")
    assert "must return a data set" in found("own_data_for_tests:wrong")
    # What the user's own module lacks is not a wrong name in the job.
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        data.load(spec(source="python", function="needs_something:load"), directory=module)


def test_byte_plots_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    examples = ROOT / "examples"
    job = spec(source="python", function="byteplots:load")
    train = data.load(job, directory=examples)
    held: Any = data.load(job, held_out=True, directory=examples)
    assert len(held.names) == 10 and len(train) > 10 * len(held)
    assert held[0]["pixel_values"].shape == (1, 32, 32)
    assert float(held[0]["pixel_values"].abs().max()) <= 1
    assert {int(held[i]["labels"]) for i in range(len(held))} == set(range(10))
    assert data.tokens_in({"pixel_values": torch.zeros(3, 1, 2, 2), "labels": torch.zeros(3)}) == 3


# ------------------------------------------------------------------ Hugging Face datasets


class TestHub:
    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("datasets")
        # The libraries read HF_HUB_OFFLINE when they are imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def saved(self, where: Path, rows: dict[str, Any], split: str | None = None) -> str:
        import datasets

        table = datasets.Dataset.from_dict(rows)
        (datasets.DatasetDict({split: table}) if split else table).save_to_disk(str(where))
        return where.name

    def test_text_column(self, tmp_path: Path) -> None:
        name = self.saved(tmp_path / "d", {"text": ["ab" * 20, "cd" * 20], "other": [1, 2]})
        job = spec(source="datasets", name=name, sequence_length=41, fraction=None)
        found: Any = data.load(job, directory=tmp_path, cache_directory=tmp_path / "cache")
        assert bytes(found.inner[1]["input_ids"].tolist()) == b"cd" * 20 + b"\0"

    def test_rows_as_they_are(self, tmp_path: Path) -> None:
        name = self.saved(tmp_path / "d", {"input_ids": [[i, i + 1] for i in range(8)]}, "train")
        job = spec(source="datasets", name=name, fraction=0.25)
        train = data.load(job, directory=tmp_path)
        held = data.load(job, held_out=True, directory=tmp_path)
        assert [row["labels"].tolist() for row in (held[0], held[1])] == [[3, 4], [7, 8]]
        assert len(train) == 6 and train[0]["input_ids"].dtype == torch.int64

    def test_images(self, tmp_path: Path) -> None:
        rows = {"pixel_values": [[[[0.5, 1.0]]]] * 4, "labels": [0, 1, 0, 1]}
        job = spec(source="datasets", name=self.saved(tmp_path / "d", rows), fraction=None)
        found: Any = data.load(job, directory=tmp_path)
        item = found.inner[1]
        assert item["pixel_values"].shape == (1, 1, 2) and item["pixel_values"].dtype == torch.float32
        assert item["labels"].shape == () and int(item["labels"]) == 1

    def test_refusals(self, tmp_path: Path) -> None:
        name = self.saved(tmp_path / "d", {"body": ["a"]}, "train")
        found = problem(tmp_path, spec(source="datasets", name=name))
        assert "textField" in found and "body" in found
        found = problem(tmp_path, spec(source="datasets", name=name, split="validation"))
        assert "data.split" in found and "train" in found
        assert "data.name" in problem(tmp_path, spec(source="datasets", name="no-such-directory/here"))
        name = self.saved(tmp_path / "numbers", {"text": [1, 2]})
        assert "must hold text" in problem(tmp_path, spec(source="datasets", name=name))
