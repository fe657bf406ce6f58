"""A loop without its job: what it is told, what it trains, and that it is used like a Learner."""

from __future__ import annotations

import collections
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from diloco_protocol.common.first_step import MANY_BATCHES, no_step_text
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_worker import Learner
from diloco_worker.settings import ConfigurationError, WorkerError
from diloco_worker.standalone import learner as standalone
from diloco_worker.standalone.learner import StandaloneLearner
from repository import ROOT

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: mine}
spec:
  learners: {command: [python, train.py]}
  training: {batch: {sequences: 4}, stop: {steps: 5}}
  regions: [{name: local, learners: 2, batch: {sequences: 3}}]
"""


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    (tmp_path / "job.yaml").write_text(JOB)
    return lone(tmp_path / "job.yaml")


def lone(job: Path | None = None) -> Any:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Learner.from_environment(model, optimizer, environ={} if job is None else {"DILOCO_ALONE_JOB": str(job)})


def train(learner: Any, items: int) -> list[torch.Tensor]:
    batches = []
    with learner:
        for (batch,) in learner.batches(TensorDataset(torch.arange(items))):
            batches.append(batch)
            learner.after_step(tokens=batch.numel() * 10, loss=torch.tensor(1.0 / len(batches)))
    return batches


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}


def test_it_has_all_that_a_loop_uses_of_a_learner(alone: Any) -> None:
    def public(names: Any) -> set[str]:
        return {name for name in names if not name.startswith("_")}

    assert public(dir(alone)) == public(dir(Learner)) | {"layout"}
    for name in public(vars(Learner)) & public(vars(StandaloneLearner)) - {"from_environment"}:
        if inspect.isfunction(vars(Learner)[name]):
            theirs, own = (inspect.signature(vars(kind)[name]) for kind in (Learner, StandaloneLearner))
            assert theirs == own, name


def test_the_batch_and_the_stop_are_the_jobs(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert (alone.phase, alone.step, alone.progress, alone.draining) == ("waiting", 0, 0.0, False)
    with caplog.at_level("INFO"):
        batches = train(alone, 100)
    assert [len(batch) for batch in batches] == [3] * 5  # the region's
    assert (alone.phase, alone.step, alone.tokens, alone.progress) == ("complete", 5, 150, 1.0)
    assert alone.draining and alone.exit_code == 0 and alone.metrics["loss"] == pytest.approx(0.2)
    assert "trained alone: 5 steps, 150 tokens, training loss 1.000 to 0.200" in caplog.text


def test_a_program_that_configures_no_logging_does_not_end_in_silence(
    alone: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("WARNING"):
        train(alone, 100)
    assert capsys.readouterr().err == "trained alone: 5 steps, 150 tokens, training loss 1.000 to 0.200\n"


def test_every_item_is_trained_once_in_a_pass_and_each_pass_has_another_order(alone: Any) -> None:
    numbers = torch.cat(train(alone, 5)).tolist()
    assert sorted(numbers[:5]) == sorted(numbers[5:10]) == sorted(numbers[10:15]) == list(range(5))
    assert len({tuple(numbers[start : start + 5]) for start in (0, 5, 10)}) > 1


def test_seeds_differ_between_steps_and_runs_alone_are_alike(tmp_path: Path, alone: Any) -> None:
    seeds = []
    for _ in alone.steps():
        seeds.append(alone.seed)
        alone.after_step(tokens=1)
    assert len(set(seeds)) == 5
    first, second = (torch.cat(train(lone(tmp_path / "job.yaml"), 50)).tolist() for _ in range(2))
    assert first == second


def test_sigterm_ends_the_loop_between_two_steps(alone: Any) -> None:
    with alone as learner:
        for step in learner.steps():
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            learner.after_step(tokens=1)
        assert (learner.step, learner.phase, learner.draining) == (3, "draining", True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_it_complains_as_a_job_would(tmp_path: Path, alone: Any) -> None:
    with pytest.raises(WorkerError, match="after_step was called before the first batch"):
        alone.after_step(tokens=1)
    with pytest.raises(ConfigurationError, match="has 2 sequences and a step needs 3"):
        train(alone, 2)
    train(other := lone(tmp_path / "job.yaml"), 9)
    with pytest.raises(WorkerError, match="one loop"):
        train(other, 9)
    norm = torch.nn.BatchNorm1d(3)
    with pytest.raises(ConfigurationError, match="running statistics"):
        Learner.from_environment(norm, torch.optim.SGD(norm.parameters()), environ={})
    (tmp_path / "job.yaml").write_text(JOB.replace("learners: 2", "lerners: 2"))
    with pytest.raises(ConfigurationError, match=r"DILOCO_ALONE_JOB: [\s\S]*lerners"):
        lone(tmp_path / "job.yaml")
    with pytest.raises(ConfigurationError, match=r"DILOCO_ALONE_JOB: .*none\.yaml:\s+there is no such file"):
        lone(tmp_path / "none.yaml")


@pytest.mark.parametrize("left", ["DILOCO_SYNCER", "DILOCO_WORKDIR", "DILOCO_ROLE", "DILOCO_POD"])
def test_a_learner_of_a_job_that_lacks_its_job_file_never_trains_alone(left: str) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=rf"DILOCO_JOB_FILE is not set.*alone, unset {left}$"):
        environ = {left: "127.0.0.1:1", "DILOCO_LOG_LEVEL": "info", "DILOCO_ALONE_JOB": "job.yaml"}
        Learner.from_environment(model, torch.optim.SGD(model.parameters()), environ=environ)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_runs_under_plain_python(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("steps: 5", "steps: 2"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "custom_loop.py")],
        env={**clean_environment(), "DILOCO_ALONE_JOB": str(tmp_path / "job.yaml")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "training alone: no job started this program (diloco run JOB.yaml does)" in done.stderr
    assert "it stops after 2 steps" in done.stderr and not done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


SCRIPT = """
import torch
from diloco_worker import Learner

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if learner.step == 1:
            breakpoint()
        return torch.ones(2)

model = torch.nn.Linear(2, 1)
with Learner.from_environment(model, torch.optim.SGD(model.parameters(), lr=0.1)) as learner:
    for batch in learner.batches(Rows(), sequences=1):
        learner.after_step(tokens=1)
        if learner.step == 2:
            break
print("after", learner.step)
"""


@pytest.mark.slow
def test_a_breakpoint_in_the_data_set_stops_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"],
        input="p 'at', learner.step, i < 64\nc\n",
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "('at', 1, True)" in done.stdout and "after 2" in done.stdout


# ------------------------------------------------------------------ what batches() wants


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class NoLength(torch.utils.data.Dataset):
    def __getitem__(self, i: int) -> int:
        return i


DATA = TensorDataset(torch.arange(9))
WRONG = {
    "a DataLoader": (DataLoader(DATA, 2), r"got a DataLoader.*learner\.batches\(loader\.dataset\).*learner\.steps\(\)"),
    "an IterableDataset": (Stream(), r"got a Stream \(__len__ missing\): it wants a map-style .*learner\.steps\(\)"),
    "a generator": ((i for i in range(9)), r"got a generator \(__len__ and __getitem__ missing\).*learner\.steps\(\)"),
    "a file": (open(os.devnull), r"got a TextIOWrapper .*learner\.steps\(\)"),  # noqa: SIM115
    "no length": (NoLength(), r"got a NoLength \(__len__ missing\)"),
    "several splits": ({"train": DATA, "test": DATA}, r"got a dict of 'train', 'test': give it one of these"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("in_a_job", [True, False])
def test_what_is_no_map_style_data_set_is_told_the_way(case: str, in_a_job: bool, tmp_path: Path) -> None:
    given, told = WRONG[case]
    environ = {}
    if in_a_job:
        spec = {"learners": {"command": ["python", "loop.py"]}, "regions": [{"learners": 1}]}
        job = {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "own"}, "spec": spec}
        (tmp_path / "job.json").write_text(job_to_json(DiLoCoJob.model_validate(job)))
        environ = {"DILOCO_JOB_FILE": str(tmp_path / "job.json"), "DILOCO_SYNCER": "127.0.0.1:1"}
    model = torch.nn.Linear(2, 1)
    learner = Learner.from_environment(model, torch.optim.SGD(model.parameters()), environ=environ)
    with pytest.raises(ConfigurationError, match=told):
        next(learner.batches(given))


def test_whatever_has_a_length_and_items_by_number_is_taken(tmp_path: Path) -> None:
    for data in (list(range(32)), range(32), torch.arange(32), collections.deque(range(32))):
        assert len(next(lone().batches(data))) == 16


def test_a_loop_that_finishes_no_step_is_told_of_once(
    alone: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "BATCHES_SECONDS", 0.0)  # a wait would show no more
    with alone:
        for given, _ in enumerate(alone.batches(TensorDataset(torch.arange(100))), 1):
            if given <= MANY_BATCHES:
                assert "after_step" not in caplog.text
            if given == 2 * MANY_BATCHES:
                break
    (said,) = [record.message for record in caplog.records if record.message.startswith("no-steps: ")]
    assert said == f"no-steps: {no_step_text(MANY_BATCHES)}"


@pytest.mark.parametrize("tokens", [-5, float("nan"), 1 << 40])
def test_tokens_that_are_no_count_are_refused_at_once(alone: Any, tokens: Any) -> None:
    with pytest.raises(WorkerError, match="after_step\\(tokens="), alone:
        for _ in alone.batches(TensorDataset(torch.arange(100))):
            alone.after_step(tokens=tokens)
    assert (alone.step, alone.tokens) == (0, 0)


def test_a_steps_loss_is_taken_once() -> None:
    """One that is still on its way from a GPU would be lost with the next."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = StandaloneLearner(model, optimizer, standalone.job_alone({}))
    taken: list[object] = []
    put_loss = learner._metrics.put_loss

    def put(loss: torch.Tensor | float) -> None:
        taken.append(loss)
        put_loss(loss)

    learner._metrics.put_loss = put  # type: ignore[method-assign]
    for _, loss in zip(learner.steps(), (0.0, 1.0, 2.0), strict=False):
        learner.after_step(tokens=1, loss=loss)
    assert taken == [0.0, 1.0, 2.0]
