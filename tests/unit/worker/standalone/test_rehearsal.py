"""A loop against the stand-in syncer: each mistake is named once, with its cure, and a loop without one is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco_protocol.common.first_step import MANY_BATCHES
from diloco_worker import Learner
from diloco_worker.settings import ConfigurationError
from diloco_worker.standalone.rehearsal import STEPS, VARIABLE
from diloco_worker.sync.optimizer_state import UNWRITABLE


class Loop:
    """A small loop; a test changes what one of its steps does."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.tokens = 32
        self.before_step: Callable[[int], None] = lambda step: None
        self.after_step: Callable[[int], None] = lambda step: None
        self.rows = torch.randn(64, 8)

    def run(self, told: Path, **environ: str) -> list[tuple[str, str]]:
        """Findings, level and text; the last row is that of steps and moves."""
        with Learner.from_environment(self.model, self.optimizer, environ={VARIABLE: str(told), **environ}) as learner:
            for batch in learner.batches(self.rows):
                self.before_step(learner.step)
                loss = (self.model(batch).squeeze(1) - batch.sum(1)).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.after_step(learner.step)
                learner.after_step(tokens=self.tokens, loss=loss)
        return self.read(told)

    @staticmethod
    def read(told: Path) -> list[tuple[str, str]]:
        rows = [json.loads(line) for line in told.read_text().splitlines()]
        return [(row["level"], row["said"]) for row in rows if "said" in row]


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield Loop()


@pytest.mark.promise(
    "`diloco doctor train.py` names what a job would refuse of a program, or train wrongly without a word"
)
@pytest.mark.parametrize("kind", ["adamw", "plain", "still", "frozen", "unused", "bfloat16", "caches"])
def test_a_loop_without_a_mistake_is_told_nothing(loop: Loop, tmp_path: Path, kind: str) -> None:
    told = tmp_path / "told"
    if kind == "plain":
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-3)
    elif kind == "still":
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
    elif kind == "frozen":
        loop.model[0].requires_grad_(False)
    elif kind == "unused":
        loop.model.add_module("head", torch.nn.Linear(4, 4))
        loop.model.forward = lambda x: loop.model[2](loop.model[1](loop.model[0](x)))
    elif kind == "bfloat16":
        loop.model.to(torch.bfloat16)
        loop.rows = loop.rows.bfloat16()
    elif kind == "caches":
        loop.model.register_buffer("cache", torch.zeros(2), persistent=False)
        loop.after_step = lambda step: loop.model.cache.add_(1.0)
    if kind in ("unused", "bfloat16"):
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=2e-3)
    before = [p.detach().clone() for p in loop.model.parameters()]
    assert loop.run(told) == []
    last = json.loads(told.read_text().splitlines()[-1])
    assert last["steps"] == STEPS and last["moved"] >= 1 + (kind != "frozen"), "every fragment was moved"
    changes = [float((p - b).detach().abs().max()) for p, b in zip(loop.model.parameters(), before, strict=True)]
    assert kind != "still" or max(changes) < 1e-5, "and moved back"


def replaces_head(loop: Loop) -> None:
    def replace(step: int) -> None:
        if step == 3:
            loop.model[2] = torch.nn.Linear(16, 1)

    loop.after_step = replace


def unfreezes(loop: Loop) -> None:
    loop.model[0].requires_grad_(False)
    loop.after_step = lambda step: loop.model[0].requires_grad_(step > 4)


def keeps_masters(loop: Loop) -> None:
    masters = [p.detach().clone() for p in loop.model.parameters()]
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.0

    @torch.no_grad()
    def step(_: int) -> None:
        for master, parameter in zip(masters, loop.model.parameters(), strict=True):
            master.sub_(parameter.grad, alpha=0.01)
            parameter.copy_(master)

    loop.after_step = step


def averages_within(loop: Loop) -> None:
    """By ``.data``, which counts no write."""
    loop.model.register_buffer("mean", torch.zeros(16, 8))
    loop.after_step = lambda step: loop.model.mean.data.lerp_(loop.model[0].weight.data, 0.1)


def counts_none(loop: Loop) -> None:
    loop.tokens = 0


def adds_another_module(loop: Loop) -> None:
    def add(step: int) -> None:
        if step == 2:
            loop.optimizer.add_param_group({"params": torch.nn.Linear(3, 3).parameters()})

    loop.after_step = add


def leaves_out(loop: Loop) -> None:
    loop.optimizer = torch.optim.AdamW(loop.model[0].parameters(), lr=2e-3)


def notes_in_state(loop: Loop) -> None:
    loop.after_step = lambda step: loop.optimizer.state[loop.model[0].bias].update(note="text")


def odd_state(loop: Loop) -> None:
    odd = torch.zeros(16, dtype=torch.int16)
    loop.after_step = lambda step: loop.optimizer.state[loop.model[0].bias].update(odd=odd)


def diverges(loop: Loop) -> None:
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e6)


@pytest.mark.promise(
    "`diloco doctor train.py` names what a job would refuse of a program, or train wrongly without a word"
)
@pytest.mark.parametrize(
    ("mistake", "level", "said"),
    [
        (replaces_head, "error", "parameter 2.weight was moved or assigned anew after the Learner was made"),
        (unfreezes, "error", "parameter 0.weight was unfrozen, or added, after the Learner was made"),
        (keeps_masters, "error", "a step undoes a merge: it puts 0.weight back to where it was"),
        (averages_within, "warning", "training changes mean, which is no trained parameter"),
        (counts_none, "error", "after_step(tokens=0) in 5 steps running"),
        (adds_another_module, "error", "the optimizer AdamW holds 2 tensors that are no parameters of the model"),
        (leaves_out, "warning", "no optimizer holds 2.weight, 2.bias: nothing trains it"),
        (diverges, "error", "training diverged by step "),
        (notes_in_state, "warning", UNWRITABLE),
        (odd_state, "warning", "no newcomer takes the optimizer's state over: '0.bias|odd' is (16,) torch.int16"),
    ],
)
def test_a_mistake_is_named_once(
    loop: Loop, tmp_path: Path, mistake: Callable[[Loop], None], level: str, said: str
) -> None:
    mistake(loop)
    (found,) = loop.run(tmp_path / "told")
    assert found[0] == level and found[1].startswith(said), found


@pytest.mark.promise(
    "`diloco doctor train.py` names what a job would refuse of a program, or train wrongly without a word"
)
def test_what_no_loop_can_go_on_with_ends_it_with_the_same_words(loop: Loop, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(ConfigurationError, match="WORLD_SIZE is 2") as raised:
        loop.run(told, WORLD_SIZE="2")
    assert loop.read(told) == [("error", str(raised.value))]
    told.unlink()
    loop.optimizer, optimizer = None, loop.optimizer
    with pytest.raises(ConfigurationError, match=r"optimizers is of the type NoneType: give a torch\.optim") as raised:
        loop.run(told)
    assert loop.read(told) == [("error", str(raised.value))]
    loop.model, model = optimizer, loop.model
    with pytest.raises(ConfigurationError, match=r"model is of the type AdamW: give a torch\.nn\.Module"):
        Learner.from_environment(loop.model, model, environ={})
    loop.model = model
    loop.model.add_module("again", torch.nn.Linear(8, 16))
    loop.model.again.weight.data = loop.model[0].weight.data
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    told.unlink()
    with pytest.raises(ConfigurationError, match=r"0\.weight and again\.weight lie in the same memory") as raised:
        loop.run(told)
    assert loop.read(told) == [("error", str(raised.value))]


@pytest.mark.promise(
    "`diloco doctor train.py` names what a job would refuse of a program, or train wrongly without a word"
)
def test_a_loop_that_marks_no_step_ends_and_is_told(loop: Loop, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with Learner.from_environment(loop.model, loop.optimizer, environ={VARIABLE: str(told)}) as learner:
        for _ in learner.batches(loop.rows):
            pass
    ((level, said),) = loop.read(told)
    assert level == "error" and said.startswith(
        f"its loop was given {2 * MANY_BATCHES} batches and has finished no step"
    )


def test_the_tokens_of_a_tensor_are_counted(loop: Loop, tmp_path: Path) -> None:
    loop.tokens = torch.tensor(32)  # type: ignore[assignment]
    with Learner.from_environment(loop.model, loop.optimizer, environ={VARIABLE: str(tmp_path / "told")}) as learner:
        next(iter(learner.batches(loop.rows)))
        learner.after_step(tokens=loop.tokens)
        assert learner.tokens == 32
