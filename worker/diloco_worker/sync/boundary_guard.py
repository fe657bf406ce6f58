"""What happens between two steps happens whole, or this learner trains no further.

Theory of operation
-------------------
A boundary counts first and moves parameters then. An exception between the two leaves counts that are ahead of the
parameters: what a merge has taken already would be pushed once more, as work above the new base.

Ctrl-C is no such exception. It waits until the boundary is over, as SIGTERM does, and is raised then; a second one
does not wait. Any other exception (no memory on the GPU, say) makes the learner *unfit*. No boundary runs any more, and
nothing is pushed or offered. The syncer counts the work as that of a process that has died, and a replacement begins
from the merged model.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from diloco_worker.settings import WorkerError


class BoundaryGuard:
    """A context manager for what must happen whole; it may be entered again within itself. Entering it raises
    WorkerError once the learner is unfit."""

    def __init__(self) -> None:
        self.unfit = ""  # what it was interrupted by
        self._depth = 0
        self._interrupt: tuple[int, FrameType | None] | None = None  # a Ctrl-C that waits
        self._previous: Any = None

    def check_fit(self) -> None:
        """Raise WorkerError if something within was interrupted."""
        if self.unfit:
            raise WorkerError(
                f"the learner was interrupted inside the library ({self.unfit}): its counts may contradict its "
                "parameters. It trains no further and offers nothing; its replacement begins from the merged model"
            )

    def __enter__(self) -> Self:
        self.check_fit()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is not None and not self.unfit:
            self.unfit = f"{type(value).__name__}: {value}".rstrip(": ")
        self._depth -= 1
        if not self._depth and self._interrupt is not None:
            waited, self._interrupt = self._interrupt, None
            if value is None:
                self._previous(*waited)

    def hold_interrupts(self) -> None:
        """From now on let Ctrl-C wait for what is within. Only the main thread may be told so."""
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)

    def release_interrupts(self) -> None:
        """Handle Ctrl-C as before, unless somebody else does by now."""
        if self._previous is not None and signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._depth and self._interrupt is None:
            self._interrupt = signum, frame
        else:
            self._previous(signum, frame)
