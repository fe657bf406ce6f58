"""Batches ahead of the training: a thread that draws sequences and collates them.

The training thread pops finished batches from a short queue and commits their cursors after the step. The
synchronizer passes leases on at the step boundaries.

Leases are requested early, so that ``reserve`` sequences are always in hand: enough for as many steps as a learner
goes on alone. So a learner waits for a lease only at its very start, and a syncer that restarts does not stop it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from diloco_protocol.wire.records import Lease, LeaseCursor
from diloco_worker.core.leases import Draw, Leases
from diloco_worker.settings import ConfigurationError

_AHEAD = 3  # collated batches waiting
_MOST_REQUESTS = 16  # leases asked for and not here yet
_MOST_LEASES = 120  # held and asked for; limits.MAX_CURSORS bounds a report


@dataclass(frozen=True, slots=True)
class Batch:
    """A collated batch, and the cursors once it is trained."""

    data: Any
    cursors: tuple[LeaseCursor, ...]


@dataclass
class BatchPrefetcher:
    """Draws and collates batches in a thread of its own. Any thread may call the methods.

    ``dataset``: map-style (``__len__``, ``__getitem__``); ``sequences`` of it make a batch, which ``collate`` makes of
    their list. ``reserve``: sequences to lease ahead. ``request(n)`` asks the syncer for n more leases, ``notify()``
    is called when a batch (or an error) is there; neither may block. Raises ConfigurationError for less data than
    one batch.
    """

    dataset: Any
    sequences: int
    seed: int
    request: Callable[[int], None]
    notify: Callable[[], None]
    collate: Callable[[list[Any]], Any] = default_collate
    reserve: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ConfigurationError(f"a batch of {self.sequences} sequences: at least one is needed")
        if len(self.dataset) < self.sequences:
            raise ConfigurationError(
                f"the data set has {len(self.dataset)} sequences and a step needs {self.sequences}: "
                "give more data, or lower batch.sequences, batch.accumulation or data.sequenceLength"
            )
        self._reserve = max(4 * self.sequences, self.reserve)
        self._leases = Leases(self.seed, len(self.dataset))
        self._asked = 0
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._known = False  # how large a block is
        self._generation = 0
        self.is_loading = False  # items are being read and collated
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="diloco-prefetch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------- leases

    def add_lease(self, grant: Lease) -> None:
        """Add a lease. Raises WorkerError if it contradicts the data set."""
        with self._changed:
            self._asked = max(0, self._asked - 1)
            self._leases.add(grant)
            self._known = True
            self._changed.notify_all()

    def reconcile_leases(self, grants: Iterable[Lease], continuing: bool) -> None:
        """Take the slot's leases after a (re)connect; a tenure that is not ``continuing`` drops the old ones."""
        with self._changed:
            self._asked = 0
            if not continuing:
                self._leases.clear()
                self._ready.clear()
                self._generation += 1
            self._leases.reconcile(grants)
            self._changed.notify_all()

    def repeat_requests(self) -> None:
        """Request leases again: the connection broke, and requests on their way may be lost."""
        with self._changed:
            self._asked = 0
            self._changed.notify_all()

    # ------------------------------------------------------- batches

    def pop_batch(self) -> Batch | None:
        """Remove and return the next batch; None: there is none yet. Raises what the data set raised."""
        with self._changed:
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._error is not None:
                raise self._error
            return None

    def commit(self, cursors: Sequence[LeaseCursor]) -> None:
        """Move the cursors: the step was made."""
        with self._changed:
            self._leases.commit(cursors)

    def cursors(self) -> tuple[LeaseCursor, ...]:
        """(lease, position) of every lease, for a report."""
        with self._changed:
            return self._leases.cursors()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)  # a data set that blocks for longer keeps its daemon thread

    # ------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while (drawn := self._next()) is not None:
                draw, generation = drawn
                self.is_loading = True
                data = self.collate([self.dataset[index] for index in draw.sequences])
                self.is_loading = False
                with self._changed:
                    if generation == self._generation:
                        self._ready.append(Batch(data, draw.cursors))
                self.notify()
        except BaseException as error:  # handed to the training thread, which raises it
            with self._changed:
                self._error = error
            self.notify()

    def _next(self) -> tuple[Draw, int] | None:
        with self._changed:
            while not self._closed:
                block = max(1, self._leases.block_size)
                missing = max(self._reserve, block) - self._leases.remaining - self._asked * block
                most = min(_MOST_REQUESTS, _MOST_LEASES - self._leases.unfinished) if self._known else 1
                free = most - self._asked
                if missing > 0 and free > 0:
                    more = min(-(-missing // block), free)
                    self._asked += more
                    self.request(more)
                if len(self._ready) < _AHEAD:
                    draw = self._leases.draw(self.sequences)
                    if draw is not None:
                        return draw, self._generation
                self._changed.wait(1.0)
        return None
