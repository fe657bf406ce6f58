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
    """A collated batch, the cursors once it is trained, and which draw it is of."""

    data: Any
    cursors: tuple[LeaseCursor, ...]
    draw: int = 0


def check_shares(sequences: int, shares: int) -> None:
    """Raise ConfigurationError unless a batch of so many sequences can be cut into equal shares."""
    if sequences < 1:
        raise ConfigurationError(f"a batch of {sequences} sequences: at least one is needed")
    if sequences % shares:
        raise ConfigurationError(
            f"a batch of {sequences} sequences cannot be cut into equal shares for {shares} ranks: make "
            f"training.batch.sequences (or that of the region) a multiple of {shares}"
        )


def share_of(sequences: Sequence[int], data: tuple[int, int]) -> Sequence[int]:
    """The share of a batch that (index, how many shares) names: sequences that follow each other."""
    index, shares = data
    return sequences[len(sequences) * index // shares : len(sequences) * (index + 1) // shares]


@dataclass
class BatchPrefetcher:
    """Draws and collates batches in a thread of its own. Any thread may call the methods.

    ``dataset``: map-style (``__len__``, ``__getitem__``); ``sequences`` of it make a batch, which ``collate`` makes of
    their list. ``reserve``: sequences to lease ahead. ``data``: which share of each batch is loaded, (index, how
    many shares); others load the rest (``take_draws``). ``request(n)`` asks the syncer for n more leases, ``notify()``
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
    data: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        check_shares(self.sequences, self.data[1])
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
        self._draws = 0  # that were made
        self._untold: list[tuple[int, ...]] = []  # draws that no other rank has been told of
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
                self._leases = Leases(self.seed, len(self.dataset))
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

    def take_draws(self) -> tuple[int, list[tuple[int, ...]]]:
        """The number of the last draw, and the draws since the last call, up to it: their sequences, for other ranks to
        load their shares of."""
        with self._changed:
            found, self._untold = self._untold, []
            return self._draws, found

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
                draw, number, generation = drawn
                self.is_loading = True
                data = self.collate([self.dataset[item] for item in share_of(draw.sequences, self.data)])
                self.is_loading = False
                with self._changed:
                    if generation == self._generation:
                        self._ready.append(Batch(data, draw.cursors, number))
                self.notify()
        except BaseException as error:  # handed to the training thread, which raises it
            with self._changed:
                self._error = error
            self.notify()

    def _next(self) -> tuple[Draw, int, int] | None:
        """The next draw, its number, and the generation that it is of; None: closed."""
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
                        self._draws += 1
                        if self.data[1] > 1:
                            self._untold.append(draw.sequences)
                        return draw, self._draws, self._generation
                self._changed.wait(1.0)
        return None


class ShareLoader:
    """Loads a follower's shares of batches that the leader has drawn, in a thread of its own. ``data``: as
    BatchPrefetcher has it."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], data: tuple[int, int]) -> None:
        self._dataset, self._collate, self._data = dataset, collate, data
        self._waiting: deque[tuple[int, Sequence[int]]] = deque()  # numbers of draws, and their sequences
        self._ready: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self.is_loading = False
        self._thread = threading.Thread(target=self._run, name="diloco-prefetch", daemon=True)
        self._thread.start()

    def add_draw(self, number: int, sequences: Sequence[int]) -> None:
        """Load this draw's share."""
        with self._changed:
            self._waiting.append((number, sequences))
            self._changed.notify_all()

    def pop(self, number: int, seconds: float) -> tuple[Any] | None:
        """The batch of a draw, in a tuple, and forget those before it; None: it is not there after so long. Raises what
        the data set raised."""
        with self._changed:
            while self._waiting and self._waiting[0][0] < number:
                self._waiting.popleft()  # the leader has dropped it
            self._changed.wait_for(lambda: number in self._ready or self._error is not None, seconds)
            if self._error is not None:
                raise self._error
            if number not in self._ready:
                return None
            found = self._ready.pop(number)
            self._ready = {one: batch for one, batch in self._ready.items() if one > number}
            return (found,)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                    if self._closed:
                        return
                    number, sequences = self._waiting.popleft()
                self.is_loading = True
                batch = self._collate([self._dataset[item] for item in share_of(sequences, self._data)])
                self.is_loading = False
                with self._changed:
                    self._ready[number] = batch
                    self._changed.notify_all()
        except BaseException as error:  # handed to the training thread, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
