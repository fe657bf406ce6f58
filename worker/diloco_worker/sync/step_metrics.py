"""What a learner measures of its own steps: loss, step times, and the time lost inside this library."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import SupportsFloat

import torch

from diloco_worker.settings import WorkerError


class StepMetrics:
    """Of one process. Any thread may read the properties and ``known_loss``; the training thread calls the rest."""

    def __init__(self) -> None:
        self.signs_of_life = 0  # that the training thread has given; core.stall_rule counts on them
        self.steps = 0  # that this process has made
        self.batches = 0  # that the loop was given since its last step
        # Seconds of waits that are over, and since when it waits now (None: it computes): one value, for other threads.
        self._waits: tuple[float, float | None] = (0.0, None)
        self._step_seconds: deque[float] = deque(maxlen=15)
        self.known_loss = math.nan  # that was read last, nats per token; NaN: none
        self._has_loss = False
        self._copying: tuple[torch.Tensor, torch.cuda.Event] | None = None  # a loss on its way from a GPU

    def add_step(self, seconds: float) -> None:
        """Count a step that took ``seconds`` of computation."""
        self.steps += 1
        self.batches = 0
        self._step_seconds.append(seconds)

    def describe(
        self, loss: float, step: int, tokens: int, compute_seconds: float, carried: tuple[int, int] = (0, 0)
    ) -> dict[str, float]:
        """``Learner.metrics``, with this loss. ``carried``: bytes up and down."""
        return {
            "step": step,
            "tokens": tokens,
            "loss": loss,
            "step_seconds": self.step_seconds,
            "compute_seconds": compute_seconds,
            "stalled_seconds": self.stalled_seconds,
            "bytes_up": carried[0],
            "bytes_down": carried[1],
        }

    def mark_alive(self) -> None:
        """Give a sign of life: whatever the training thread waits for, it does not hang."""
        self.signs_of_life += 1

    def begin_wait(self) -> float:
        """The training thread is inside this library from now on; returns the time, monotonic seconds."""
        self.mark_alive()
        now = time.monotonic()
        self._waits = (self._waits[0], now)
        return now

    def end_wait(self) -> float:
        """The training thread computes again; returns the time, monotonic seconds."""
        self.mark_alive()
        now = time.monotonic()
        over, since = self._waits
        self._waits = (over + (now - since if since is not None else 0.0), None)
        return now

    @property
    def stalled_seconds(self) -> float:
        """In which training waited for this library, the present wait included."""
        over, since = self._waits
        return over + (time.monotonic() - since if since is not None else 0.0)

    @property
    def step_seconds(self) -> float:
        """Median of the last steps, seconds; 0: there was none."""
        seconds = list(self._step_seconds)  # in one piece, because other threads ask too
        return statistics.median(seconds) if seconds else 0.0

    @property
    def last_step_seconds(self) -> float:
        """Of the last step; 0: there was none."""
        return self._step_seconds[-1] if self._step_seconds else 0.0

    @property
    def diverged(self) -> bool:
        """Whether the newest loss that has arrived is NaN or infinite."""
        return self._has_loss and not math.isfinite(self.known_loss)

    def put_loss(self, loss: torch.Tensor | float) -> None:
        """Take a step's loss, nats per token. A scalar tensor on a GPU is copied beside the training and read when
        it is there. Raises WorkerError for what is no number."""
        if not (loss.numel() == 1 if isinstance(loss, torch.Tensor) else isinstance(loss, SupportsFloat)):
            shape = f" of {loss.numel()} values" if isinstance(loss, torch.Tensor) else ""
            raise WorkerError(
                f"after_step: loss is of the type {type(loss).__name__}{shape}: give one number, the mean over the "
                "step's tokens"
            )
        if isinstance(loss, torch.Tensor) and loss.device.type == "cuda":
            self.read_loss()
            with torch.cuda.device(loss.device):  # the current stream is that of the current device
                host = torch.empty((), dtype=torch.float32, pin_memory=True)
                host.copy_(loss.detach().reshape(()).float(), non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._copying = (host, event)
        else:
            self.known_loss = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
            self._has_loss = True
            self._copying = None

    @property
    def arrived_loss(self) -> float | None:
        """The newest loss that has arrived, nats per token; None: none has. For the training thread."""
        loss = self.read_loss()
        return loss if self._has_loss else None

    def read_loss(self) -> float:
        """The newest loss that has arrived, nats per token; NaN: none. For the training thread."""
        if self._copying is not None and self._copying[1].query():
            self.known_loss = float(self._copying[0])
            self._has_loss = True
            self._copying = None
        return self.known_loss
