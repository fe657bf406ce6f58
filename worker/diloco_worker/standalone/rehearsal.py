"""A program of one's own against a stand-in syncer, which moves every fragment by known amounts (``diloco doctor``).

The program trains alone for some steps. What a job would refuse, or warn of, is written down, and the loop goes on.
Beyond what a Learner checks by itself, a fragment is moved by ten times what a step changes, and the next step must
leave it there; then it is moved back. The optimizer's state is taken and put back, as a newcomer does it. What no
learner exchanges is compared by its values.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diloco_protocol.common.first_step import MANY_BATCHES, no_step_text
from diloco_worker.core.adoption import Kind
from diloco_worker.fragments import Floats, ModelFragments, Vector
from diloco_worker.named_parameters import ModelWatch
from diloco_worker.settings import ConfigurationError, WorkerError, refuse_ranks
from diloco_worker.standalone.learner import StandaloneLearner, job_alone
from diloco_worker.sync import optimizer_state
from diloco_worker.sync.inner_optimizers import refuse_arguments
from diloco_worker.sync.training_loop import LoopChecks

VARIABLE = "DILOCO_REHEARSAL"  # names the file that is added to, one JSON object a line
STEPS = 30
_TURN = 5  # steps; in them is checked what a learner checks once in sync.every
_AMOUNT = 10.0  # of a move, in changes by a step


class _Findings(logging.Handler):
    """Writes each finding once. The library's warnings are findings too."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.WARNING)
        self._file = file
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.add(record.getMessage(), "warning")

    def add(self, said: object, level: str = "error") -> None:
        if str(said) not in self._told:
            self._told.add(str(said))
            self.write({"level": level, "said": str(said)})

    def write(self, row: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class RehearsalLearner(StandaloneLearner):
    """The learner of a rehearsal. Raises ConfigurationError for what no loop can go on with."""

    def __init__(self, model: torch.nn.Module, optimizers: Any, environ: Mapping[str, str]) -> None:
        self._findings = _Findings(Path(environ[VARIABLE]))
        logging.getLogger("diloco_worker").addHandler(self._findings)
        try:
            refuse_ranks(environ, "a rehearsal")
            refuse_arguments(model, optimizers)
            super().__init__(model, optimizers, job_alone(environ))
        except WorkerError as error:
            self._findings.add(error)
            raise
        self._checks = LoopChecks(self._checks.inner, ModelWatch(model, exact=True), _TURN)
        self._fragments: ModelFragments | None = ModelFragments(model, self.layout)
        self._at_once = -(-len(self.layout) // (STEPS // 2 - 1))  # fragments; each takes two boundaries
        self._next = 0  # fragment
        self._before: dict[int, Floats] = {}  # fragments that are moved at the next boundary, as they were at this one
        self._moved: dict[int, tuple[Floats, Floats]] = {}  # the offsets of moves, and what they led to

    @property
    def draining(self) -> bool:
        """Whether the rehearsal is over."""
        if not self.step and self._given > 2 * MANY_BATCHES:
            self._findings.add(no_step_text(self._given - 1))
            return True
        return self._terminated or self.step >= STEPS

    def _check_step(self, tokens: int) -> int:
        for error in self._checks.find_errors(tokens):
            self._findings.add(error)
        for warning in self._checks.find_warnings():
            self._findings.add(warning, "warning")
        try:
            self._exchange()
        except ConfigurationError as error:
            self._findings.add(error)
            self._fragments = None  # there is no moving any more
        if self.step == STEPS - 1:
            self._hand_over()
        self._findings.write({"steps": self.step + 1, "moved": self._next - len(self._before)})
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # a finding by now
            return max(0, int(tokens))
        return 0

    def _exchange(self) -> None:
        """Look whether the fragments are where they were moved to at the boundary before, and move others."""
        fragments = self._fragments
        if fragments is None:
            return
        for fragment, (offset, after) in self._moved.items():
            change = fragments.snapshot(fragment).array - after
            fragments.move(fragment, Kind.REBASE, Vector.from_array(-offset), Vector.from_array(0 * offset))
            if not np.isfinite(change).all():
                raise ConfigurationError(
                    f"training diverged by step {self.step + 1}: {self.layout.fragments[fragment][0].tensor}, or a "
                    "tensor beside it, has values that are not finite. Lower the learning rate, or clip the gradients"
                )
            if float(change @ offset) < -0.5 * float(offset @ offset):
                raise ConfigurationError(
                    f"a step undoes a merge: it puts {self.layout.fragments[fragment][0].tensor} back to where it was. "
                    "Something makes the parameters of a copy of its own, such as float32 masters or an average: train "
                    "the parameters themselves"
                )
        chosen = range(self._next, self._next if self._before else min(self._next + self._at_once, len(self.layout)))
        self._moved = {fragment: self._move(fragments, fragment, before) for fragment, before in self._before.items()}
        self._before = {fragment: fragments.snapshot(fragment).array for fragment in chosen}
        self._next = chosen.stop

    def _move(self, fragments: ModelFragments, fragment: int, before: Floats) -> tuple[Floats, Floats]:
        now = fragments.snapshot(fragment).array
        amount = _AMOUNT * float(np.sqrt(np.mean((now - before) ** 2))) or 1e-3
        offset = np.random.default_rng(fragment).choice(np.array([-amount, amount], np.float32), now.size)
        fragments.move(fragment, Kind.REBASE, Vector.from_array(offset), Vector.from_array(0 * offset))
        return offset, fragments.snapshot(fragment).array

    def _hand_over(self) -> None:
        """Give the optimizer's state, and take it."""
        inner = self._checks.inner
        try:
            if (encode := optimizer_state.snapshot(inner)) is not None:
                optimizer_state.restore(encode(), inner)
            elif inner.has_state:
                self._findings.add(optimizer_state.UNWRITABLE, "warning")
        except (optimizer_state.StateRefused, KeyError) as error:
            self._findings.add(f"no newcomer takes the optimizer's state over: {error}", "warning")
