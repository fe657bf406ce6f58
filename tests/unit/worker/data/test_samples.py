"""What of a data set's content a learner tells, so that the syncer sees whether two read the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.training import BatchSpec, DataSpec, TrainingSpec
from diloco_protocol.wire.records import DataSample
from diloco_worker import data
from diloco_worker.data.map_style import sample_items


def texts(folder: Path, content: str) -> Any:
    folder.mkdir()
    (folder / "corpus.txt").write_text(content)
    named = DataSpec(paths=["corpus.txt"], sequence_length=16)
    training = TrainingSpec(data=named, batch=BatchSpec(sequences=1), evaluation=None)
    return data.load(JobSpec(training=training, regions=[RegionSpec(learners=1)]), directory=folder)


@pytest.mark.promise("A learner whose data have another content than the job's is refused, with the first place of it")
def test_english_and_digits_of_equal_length_differ(tmp_path: Path) -> None:
    draw = random.Random(0)
    english = " ".join(draw.choice(("the", "cat", "sat", "upon", "a", "mat")) for _ in range(20_000))
    digits = "".join(draw.choice("0123456789 ") for _ in english)
    one, same, other = (texts(tmp_path / n, t) for n, t in (("a", english), ("b", english), ("c", digits)))
    assert len(one) == len(other) > 3 * 256
    assert sample_items(one) == sample_items(same)
    first, middle, last = sample_items(one)
    assert [first[:2], middle[:2], last[:2]] == [(0, 256), ((len(one) - 256) // 2, 256), (len(one) - 256, 256)]
    assert all(
        mine.digest != others.digest for mine, others in zip(sample_items(one), sample_items(other), strict=True)
    )


@pytest.mark.promise("A learner whose data have another content than the job's is refused, with the first place of it")
def test_a_few_other_words_are_seen_wherever_they_are(tmp_path: Path) -> None:
    """The order of sequences is mixed, so a corpus of which a part is another shows in what is compared."""
    words = "many words and more of them " * 2000
    part = len(words) // 50
    for i, at in enumerate((0, len(words) // 3, len(words) - part)):
        changed = words[:at] + "x" * part + words[at + part :]
        one, other = texts(tmp_path / f"{i}a", words), texts(tmp_path / f"{i}b", changed)
        assert sample_items(one) != sample_items(other)


class Items:
    """A data set of ``count`` items, each made by a function."""

    def __init__(self, make: Any, count: int = 9) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


@pytest.mark.promise("A learner whose data have another content than the job's is refused, with the first place of it")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda i: i, lambda i: i + 1),
        (lambda i: {"x": torch.tensor(i)}, lambda i: {"y": torch.tensor(i)}),
        (lambda i: (np.float32(i), [b"a"]), lambda i: (np.float32(i), [b"b"])),
        (lambda i: torch.zeros(2, 3), lambda i: torch.zeros(3, 2)),
        (lambda i: torch.zeros(2, dtype=torch.bfloat16), lambda i: torch.zeros(2, dtype=torch.float16)),
        (lambda i: torch.arange(6).reshape(2, 3).T[0], lambda i: torch.arange(2)),
        (lambda i: ["a", None], lambda i: ["aNone"]),
        (lambda i: torch.ones(()) * (i == 8), lambda i: torch.zeros(())),
    ],
)
def test_items_of_any_kind(one: Any, other: Any) -> None:
    mine = sample_items(Items(one))
    assert [sample[:2] for sample in mine] == [(0, 1), (4, 1), (8, 1)] and sample_items(Items(one)) == mine
    assert mine[-1] != sample_items(Items(other))[-1]


def test_few_items_come_once_each() -> None:
    assert [sample.first for sample in sample_items(Items(str, 2))] == [0, 1]
    assert [sample.first for sample in sample_items(Items(str, 1))] == [0]
    assert sample_items(Items(str, 0)) == ()
    assert sample_items(TensorDataset(torch.zeros(3)))[0] == DataSample(
        0, 1, sample_items(Items(lambda i: (torch.zeros(()),)))[0].digest
    )


def test_what_is_drawn_from_a_global_generator_is_the_same_everywhere_and_draws_nothing() -> None:
    """Augmentation that draws from the generators of torch, numpy or Python does not keep learners from each other."""
    drawn = Items(lambda i: (torch.rand(3), np.random.rand(2), random.random()))
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index, union-attr]
    one = sample_items(drawn)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index, union-attr]
    torch.rand(5), np.random.rand(5), random.random()
    assert one and sample_items(drawn) == one


def test_what_has_no_digest_is_not_compared() -> None:
    meant = Items(str)
    meant.compared_items = 0  # type: ignore[attr-defined]
    assert sample_items(Items(str)) and sample_items(meant) == ()
    own = np.random.default_rng()
    assert sample_items(Items(lambda i: own.random())) == ()
    assert sample_items(Items(lambda i: object())) == ()
    assert sample_items(Items(lambda i: {"x": object()})) == ()
