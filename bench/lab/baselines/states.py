"""What a data-parallel job keeps in memory: its newest checkpoint, and states to be scored later.

They are files of a folder on a memory file system, whole or absent. All ranks hold the same state, so that one's is
enough; that the folder outlives each rank stands for copies in other machines' memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass
class TrainState:
    """How far the job is. ``sequences``: the next one to train; ``tokens``: trained by all, in this state."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0


class MemoryStates:
    """Checkpoints and states to score, in ``folder``. ``writer``: whose checkpoints are a file of their own, where
    several processes may write at once."""

    def __init__(self, folder: Path, writer: str = "") -> None:
        self._folder = folder
        self._own = folder / f"checkpoint{writer}.pt"

    def save(self, state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        """Keep the checkpoint in place of this writer's before. Returns the seconds that it took."""
        began = time.perf_counter()
        _write(self._own, {**vars(state), "model": model.state_dict(), "optimizer": optimizer.state_dict(), **_now()})
        return time.perf_counter() - began

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
        """The most advanced checkpoint's state, put into model and optimizer; without one, the beginning."""
        path = self.most_advanced()
        return TrainState() if path is None else load_checkpoint(_read(path), model, optimizer)

    def most_advanced(self) -> Path | None:
        """The checkpoint of all writers that has the most tokens; None: there is none."""
        found = [(_read(path)["tokens"], path) for path in sorted(self._folder.glob("checkpoint*.pt"))]
        return max(found)[1] if found else None

    def keep_for_score(self, state: TrainState, model: nn.Module) -> None:
        """Keep the parameters, to be scored when the job is over."""
        path = self._folder / f"score-{state.tokens:018d}.pt"
        _write(path, {**vars(state), "model": model.state_dict(), **_now()})

    def forget_scores_after(self, tokens: int) -> None:
        """Drop what was kept of a course that a restart has undone."""
        for path in self._folder.glob("score-*.pt"):
            if int(path.stem.removeprefix("score-")) > tokens:
                path.unlink(missing_ok=True)

    def kept(self) -> Iterator[dict[str, Any]]:
        """What was kept for scores, by tokens; last the most advanced checkpoint, if it is ahead of them."""
        last = -1
        for path in sorted(self._folder.glob("score-*.pt")):
            content = _read(path)
            last = content["tokens"]
            yield content
        newest = self.most_advanced()
        if newest is not None and (checkpoint := _read(newest))["tokens"] > last:
            yield checkpoint


def load_checkpoint(content: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    """Put a checkpoint's content into model and optimizer. Returns how far it is."""
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return TrainState(content["step"], content["sequences"], content["tokens"])


def _now() -> dict[str, float]:
    return {"time": time.time()}


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".part")
    torch.save(content, partial)
    os.replace(partial, path)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return content
