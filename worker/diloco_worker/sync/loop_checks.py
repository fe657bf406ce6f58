"""What a loop may do wrong that would end in another model than the job's, found at its step boundaries.

A Learner raises what is found. It does so at the first step boundary after the mistake, before any of it is pushed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from diloco_protocol.wire.limits import MAX_STEP_TOKENS
from diloco_worker.fragments import refuse_running_statistics
from diloco_worker.named_parameters import ModelWatch
from diloco_worker.settings import WorkerError
from diloco_worker.sync.inner_optimizers import InnerOptimizers

log = logging.getLogger(__name__)


class LoopChecks:
    """The checks of one loop. ``every``: steps of a turn, sync.every."""

    def __init__(self, inner: InnerOptimizers, watch: ModelWatch, every: int) -> None:
        self.inner = inner
        self._watch = watch
        self._every = every
        self._steps = 0
        self._without_tokens = 0  # steps, in a row
        self._thread = 0
        self._told: set[str] = set()  # names of what has changed

    def check_step(self, tokens: int) -> int:
        """Check what can be seen at a step boundary, and return the step's tokens. Raises WorkerError."""
        for error in self.find_errors(tokens):
            raise error
        for warning in self.find_warnings():
            log.warning("%s", warning)
        return int(tokens)

    def find_errors(self, tokens: int) -> Iterator[WorkerError]:
        """What would have to end the loop, after a step of ``tokens``."""
        self._steps += 1
        model = (self._check_modes, self._watch.check, self.inner.check_parameters)
        for check in (self._check_thread, *model, lambda: self._check_tokens(tokens)):
            try:
                check()
            except WorkerError as error:
                yield error

    def find_warnings(self) -> Iterator[str]:
        """What it should know, once in a turn."""
        if self._steps % self._every:
            return
        new = [name for name in self._watch.changed_state() if name not in self._told]
        self._told.update(new)
        if new:
            more = f" and {len(new) - 3} more" if len(new) > 3 else ""
            yield (
                f"training changes {', '.join(new[:3])}{more}, which is no trained parameter: each learner keeps its "
                "own, and no merge or export has it. Keep averages beside the model, not in it; register a buffer that "
                "is only a cache with persistent=False"
            )

    def _check_thread(self) -> None:
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread:
            raise WorkerError("two threads call after_step: one thread trains, and a process has one Learner")

    def _check_modes(self) -> None:
        if self._steps == 1:
            refuse_running_statistics(self.inner.model)  # modules may be in another mode than at the start

    def _check_tokens(self, tokens: int) -> None:
        """The counts of a job only rise, and a push without tokens is not merged."""
        try:
            count = int(tokens)
        except (TypeError, ValueError, OverflowError):
            count = -1
        if not 0 <= count <= MAX_STEP_TOKENS:
            raise WorkerError(
                f"after_step(tokens={tokens!r}): tokens is how many tokens were trained in this step, a whole number "
                f"from 0 to {MAX_STEP_TOKENS:,}"
            )
        self._without_tokens = 0 if count else self._without_tokens + 1
        if self._without_tokens >= self._every:
            raise WorkerError(
                f"after_step(tokens=0) in {self._every} steps running: a push without tokens is not merged, so this "
                "learner's work would be lost. Count the tokens that were trained, padding left out"
            )
