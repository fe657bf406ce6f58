"""The inner optimizers of a learner, one or several (such as Muon for matrices and AdamW for the rest), taken together.

What belongs to their state beside the tensors of each parameter are numbers in their groups that they change themselves
(a step count, an estimated learning rate). Which those are is observed: an entry that has another value after
``optimizer.step()`` than before it. What a loop sets between steps, such as the learning rate, is not among them.

An optimizer that keeps a copy of the parameters, of which it makes them anew at each step, is refused: a merged version
that is adopted would be undone by its next step. It is known by its name, or by holding tensors that are not the
model's, as float32 masters are. A wrapper that only passes on what it is asked, as accelerate's, is taken off.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from diloco_worker.errors import shorten
from diloco_worker.group.exchange import Exchange
from diloco_worker.named_parameters import named_parameters
from diloco_worker.settings import ConfigurationError

log = logging.getLogger(__name__)

Number = bool | int | float

# Class names (of the optimizer or a base) that are known to make parameters of copies of their own.
_COPYING = re.compile(
    r"ScheduleFree|Lookahead|FP16_?Optimizer|BF16_?Optimizer|Float16Optimizer|MixedPrecisionOptimizer|MasterWeight"
)
# How a step is computed, not what; torch.compile sets some of them for as long as it traces.
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_COPIES = frozenset({"master_param", "master_params", "master_weight", "fp32_param", "slow_param", "slow_buffer"})


def refuse_arguments(model: Any, optimizers: Any) -> None:
    """Raise ConfigurationError for what is no model, or neither an optimizer nor several, as where they are swapped."""
    several = hasattr(optimizers, "param_groups") or isinstance(optimizers, Iterable)
    for name, given, fits, wanted in (
        ("model", model, isinstance(model, torch.nn.Module), "a torch.nn.Module"),
        ("optimizers", optimizers, several, "a torch.optim.Optimizer, or a list of several"),
    ):
        if not fits:
            raise ConfigurationError(
                f"Learner.from_environment(model, optimizers): {name} is of the type {type(given).__name__}: give "
                f"{wanted}"
            )


class InnerOptimizers:
    """``optimizers`` train parameters of ``model``, each its own. Raises ConfigurationError for what cannot be."""

    def __init__(
        self, model: torch.nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> None:
        self.model = model
        self.exchange: Exchange | None = None  # of a learner of several ranks
        given = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
        self.all = [_unwrap(optimizer) for optimizer in given]
        self._begun = False  # some step was made
        self._changed: list[set[str]] = [set() for _ in self.all]  # group entries that each has changed itself
        self._before: list[list[dict[str, Number]]] = [[] for _ in self.all]
        seen: set[int] = set()
        for index, optimizer in enumerate(self.all):
            ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if ours & seen:
                raise ConfigurationError("two optimizers train the same parameter: give each parameter to one of them")
            seen |= ours
            optimizer.register_step_pre_hook(lambda *_, i=index: self._remember_groups(i))
            optimizer.register_step_post_hook(lambda *_, i=index: self._compare_groups(i))
        self._sizes: list[int] = []
        self.check_parameters()
        untrained = [name for name, p in named_parameters(model).items() if p.requires_grad and id(p) not in seen]
        if untrained:
            log.warning("no optimizer holds %s: nothing trains it", shorten(untrained, 3))

    @property
    def name(self) -> str:
        """Their classes' names."""
        return "+".join(type(optimizer).__name__ for optimizer in self.all)

    @property
    def has_state(self) -> bool:
        """Whether some step was made, or a state restored. It may be none at all, as that of plain SGD."""
        return self._begun or self.keeps_state

    @property
    def keeps_state(self) -> bool:
        """Whether there is state of any parameter."""
        return any(optimizer.state for optimizer in self.all)

    def restore_rows(self, rows: Mapping[str, dict[str, Any]], groups: Mapping[str, Number]) -> None:
        """Put these in place of all state: ``rows`` by the parameter's name, and numbers of ``group_numbers``, which
        belong to the state from now on."""
        self.clear_state()
        parameters = self.parameters()
        for name, row in rows.items():
            parameter, optimizer, _ = parameters[name]
            optimizer.state[parameter] = row
        for label, value in groups.items():
            if (found := self.find_group_number(label)) is not None:
                index, group, key = found
                group[key] = type(group[key])(value)
                self._changed[index].add(key)
        self._begun = True

    def clear_state(self) -> None:
        """Forget all state of this process: the next step begins fresh."""
        self._begun = False
        for optimizer in self.all:
            optimizer.state.clear()

    def check_parameters(self) -> None:
        """Raise ConfigurationError if an optimizer holds what is no parameter of the model. Its groups may grow."""
        sizes = [len(group["params"]) for optimizer in self.all for group in optimizer.param_groups]
        if sizes == self._sizes:
            return
        known = {id(p) for p in named_parameters(self.model).values()}
        for optimizer in self.all:
            others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
            if others:
                raise ConfigurationError(
                    f"the optimizer {type(optimizer).__name__} holds {len(others)} tensors that are no parameters of "
                    f"the model, the first of shape {tuple(others[0].shape)}. Copies of the parameters (float32 "
                    "masters) would undo an adopted version: give it model.parameters(). Another module's would never "
                    "be merged: make that module a part of the model"
                )
        self._sizes = sizes

    def parameters(self) -> dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer, dict[str, Any]]]:
        """By the name in the model: the parameter, its optimizer and its group."""
        named = {id(p): (name, p) for name, p in named_parameters(self.model).items()}
        found = {}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in named:
                        name, parameter = named[id(parameter)]
                        found[name] = (parameter, optimizer, group)
        return {name: found[name] for name, _ in named.values() if name in found}

    # ------------------------------------------------------- group entries

    def group_numbers(self) -> dict[str, Number]:
        """The group entries that the optimizers changed themselves, as ``optimizer.group.key``."""
        found = {}
        for index, optimizer in enumerate(self.all):
            for at, group in enumerate(optimizer.param_groups):
                numbers = _numbers(group)
                found.update({f"{index}.{at}.{key}": numbers[key] for key in self._changed[index] & numbers.keys()})
        return found

    def find_group_number(self, label: str) -> tuple[int, dict[str, Any], str] | None:
        """Where the number of that label is: the optimizer's index, the group and the key. None: there is none."""
        match = re.fullmatch(r"(\d{1,4})\.(\d{1,6})\.(\w{1,64})", label)
        if match is None or int(match[1]) >= len(self.all):
            return None
        groups = self.all[int(match[1])].param_groups
        if int(match[2]) >= len(groups) or match[3] not in _numbers(groups[int(match[2])]):
            return None
        return int(match[1]), groups[int(match[2])], match[3]

    def _remember_groups(self, index: int) -> None:
        self._before[index] = [_numbers(group) for group in self.all[index].param_groups]

    def _compare_groups(self, index: int) -> None:
        self._begun = True
        for before, group in zip(self._before[index], self.all[index].param_groups, strict=False):
            now = _numbers(group)
            self._changed[index].update(key for key, value in before.items() if now.get(key, value) != value)
        for row in self.all[index].state.values():
            if isinstance(row, dict) and (copies := _COPIES & row.keys()):
                raise _copying(type(self.all[index]).__name__, f"its state has {min(copies)!r}")
            break  # all rows have the same keys


def _numbers(group: dict[str, Any]) -> dict[str, Number]:
    numbers = {key: value for key, value in group.items() if isinstance(value, (bool, int, float))}
    return {key: value for key, value in numbers.items() if key not in _WAYS and math.isfinite(value)}


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer within its wrappers. Raises ConfigurationError for one that keeps copies, and for what is none."""
    for kind in type(optimizer).__mro__:
        if _COPYING.search(kind.__name__):
            raise _copying(type(optimizer).__name__, f"it is a {kind.__name__}")
    if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer):
        return optimizer
    within = getattr(optimizer, "optimizer", None)
    if hasattr(within, "param_groups") and within is not optimizer:
        return _unwrap(within)
    raise ConfigurationError(
        f"the optimizer {type(optimizer).__name__} is a wrapper without torch's own parts: give the optimizer within it"
    )


def _copying(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the optimizer {name} keeps a copy of the parameters, of which its next step makes them anew ({why}): an "
        "adopted version would be undone. Use one that works on the parameters themselves, such as AdamW, with a "
        "learning-rate schedule of your own"
    )
