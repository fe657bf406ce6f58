"""What a loop does wrong is said at the step boundary after it, by both kinds of learner."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_worker import Learner
from diloco_worker.named_parameters import ModelWatch
from diloco_worker.settings import ConfigurationError, WorkerError
from diloco_worker.standalone.learner import StandaloneLearner
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.training_loop import LoopChecks

EVERY = 3


def checks(model: torch.nn.Module) -> LoopChecks:
    return LoopChecks(InnerOptimizers(model, torch.optim.SGD(model.parameters(), lr=0.1)), ModelWatch(model), EVERY)


def learner(kind: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    """One of a job that nobody serves, or alone."""
    job = DiLoCoJob.model_validate(
        {
            "apiVersion": "diloco.io/v1alpha1",
            "kind": "DiLoCoJob",
            "metadata": {"name": "a"},
            "spec": {
                "learners": {"command": ["true"]},
                "regions": [{"learners": 1}],
                "sync": {"every": EVERY, "fragments": 1, "overlap": 1},
            },
        }
    )
    (folder / "job.json").write_text(job_to_json(job))
    if kind == "alone":
        return StandaloneLearner(model, optimizer, job)
    environ = {"DILOCO_JOB_FILE": str(folder / "job.json"), "DILOCO_SYNCER": "127.0.0.1:1"}
    return Learner.from_environment(model, optimizer, environ=environ)


@pytest.mark.promise("Layers that are unfrozen or added after the Learner was made are refused by name, with the fix")
@pytest.mark.parametrize("kind", ["alone", "job"])
def test_a_head_that_is_replaced_is_noticed_at_the_next_step(kind: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = learner(kind, model, optimizer, tmp_path)
    head, model[1] = model[1], torch.nn.Linear(4, 2)
    with pytest.raises(ConfigurationError, match=r"parameter 1\.weight was moved or assigned anew"):
        one.after_step(tokens=8)
    model[1] = head
    model[0].requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"parameter 0\.weight was unfrozen"):
        one.after_step(tokens=8)
    model[0].requires_grad_(False)
    optimizer.add_param_group({"params": torch.nn.Linear(2, 2).parameters()})
    with pytest.raises(ConfigurationError, match=r"SGD holds 2 tensors that are no parameters of the model"):
        one.after_step(tokens=8)


@pytest.mark.promise(
    "A loop whose steps count no tokens ends with a sentence, and the job does not wait for it for ever"
)
def test_a_turn_of_steps_without_tokens_ends_the_loop_and_a_single_one_does_not() -> None:
    one = checks(torch.nn.Linear(2, 1))
    for tokens in (0, 0, 8, 0, 0, 8.0, torch.tensor(0), 0):
        assert one.check_step(tokens) == int(tokens)  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match=r"after_step\(tokens=0\) in 3 steps running: .* Count the tokens that were"):
        one.check_step(0)


def test_what_each_learner_keeps_for_itself_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """An average of the parameters within the model, say."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    one = checks(model)
    for _ in range(3 * EVERY):
        with torch.no_grad():
            model[1].weight.lerp_(model[0].weight, 0.1)
        one.check_step(8)
    (said,) = caplog.messages
    assert said.startswith("training changes 1.weight, which is no trained parameter: each learner keeps its own")


def test_another_thread_is_told_that_one_thread_trains() -> None:
    one = checks(torch.nn.Linear(2, 1))
    one.check_step(8)
    said: list[str] = []

    def step() -> None:
        try:
            one.check_step(8)
        except WorkerError as error:
            said.append(str(error))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert said == ["two threads call after_step: one thread trains, and a process has one Learner"]
    one.check_step(8)
