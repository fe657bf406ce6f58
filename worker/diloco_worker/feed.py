"""Batches ahead of the training: a thread that draws sequences and collates them.

The training thread takes finished batches from a short queue and commits their
cursors after the step. Leases come in from the exchange; the next one is asked
for while at least a block is still in hand, so that a learner only waits for a
lease at its very start or when the syncer is away for a whole block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .sampling import Draw, Grant, Leases
from .settings import ConfigurationError

_AHEAD = 3  # collated batches waiting


def stack(items: Sequence[Any]) -> Any:
    """Stack tensors, or dicts, tuples and lists of tensors, along a new first dimension."""
    first = items[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(items))
    if isinstance(first, dict):
        return {key: stack([item[key] for item in items]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(stack(list(column)) for column in zip(*items, strict=True))
    return torch.as_tensor(items)


@dataclass(frozen=True, slots=True)
class Batch:
    """A collated batch and where the cursors stand once it was trained."""

    data: Any
    cursors: tuple[tuple[int, int], ...]


class Feed:
    """``dataset``: map-style (``__len__``, ``__getitem__``); ``sequences`` of it make a batch.

    ``request`` asks the syncer for one more lease; it must not block. All methods
    may be called from any thread.
    """

    def __init__(
        self,
        dataset: Any,
        sequences: int,
        seed: int,
        request: Callable[[], None],
        collate: Callable[[Sequence[Any]], Any] = stack,
    ) -> None:
        if sequences < 1:
            raise ConfigurationError(f"a batch of {sequences} sequences: at least one is needed")
        if len(dataset) < sequences:
            raise ConfigurationError(
                f"the data set has {len(dataset)} sequences and a step needs {sequences}: "
                "give more data, or lower batch.sequences, batch.accumulation or data.sequenceLength"
            )
        self._dataset, self._sequences, self._collate = dataset, sequences, collate
        self._leases = Leases(seed, len(dataset))
        self._request = request
        self._asked = False
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._generation = 0
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="diloco-feed", daemon=True)
        self._thread.start()

    # ------------------------------------------------------- leases, from the exchange

    def granted(self, grant: Grant) -> None:
        """The syncer leased one more block."""
        with self._changed:
            self._asked = False
            self._leases.grant(grant)
            self._changed.notify_all()

    def reconcile(self, grants: Iterable[Grant], continuing: bool) -> None:
        """After a (re)connect: the leases of the seat; a new tenure forgets its old ones."""
        with self._changed:
            self._asked = False
            if not continuing:
                self._leases.clear()
                self._ready.clear()
                self._generation += 1
            self._leases.reconcile(grants)
            self._changed.notify_all()

    def ask_again(self) -> None:
        """The connection broke: a request on its way may be lost."""
        with self._changed:
            self._asked = False
            self._changed.notify_all()

    # ------------------------------------------------------- the training thread's side

    def take(self, timeout: float) -> Batch | None:
        """The next batch; None: none came within ``timeout`` seconds. Raises what the data set raised."""
        with self._changed:
            if not self._ready and self._error is None:
                self._changed.wait(timeout)
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            return None

    def commit(self, cursors: Sequence[tuple[int, int]]) -> None:
        """The step was made."""
        with self._changed:
            self._leases.commit(cursors)

    def cursors(self) -> list[tuple[int, int]]:
        """Rows of the report."""
        with self._changed:
            return self._leases.cursors()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)  # a data set that blocks for longer is a daemon's business

    # ------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while (drawn := self._next()) is not None:
                draw, generation = drawn
                data = self._collate([self._dataset[index] for index in draw.sequences])
                with self._changed:
                    if generation == self._generation:
                        self._ready.append(Batch(data, draw.cursors))
                        self._changed.notify_all()
        except BaseException as error:  # handed to the training thread, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> tuple[Draw, int] | None:
        with self._changed:
            while not self._closed:
                low = max(4 * self._sequences, self._leases.block_size)
                if self._leases.remaining < low and not self._asked:
                    self._asked = True
                    self._request()
                if len(self._ready) < _AHEAD:
                    draw = self._leases.draw(self._sequences)
                    if draw is not None:
                        return draw, self._generation
                self._changed.wait(1.0)
        return None
