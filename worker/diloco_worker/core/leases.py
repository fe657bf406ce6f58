"""Which sequence a learner trains next: leases, cursors, and the order within a block.

Theory of operation
-------------------
The syncer leases blocks of the corpus to slots; block b holds the sequences b·size to (b+1)·size - 1 (algorithm.md
section 8, Data). Within a block the order is a permutation that depends on the seed, the data epoch and the block
alone. So another process can go on with a block from its cursor without having seen its first half. A *position*
counts in that order.

``Leases.draw`` hands out sequences in the order of the leases, ahead of the training. ``commit`` moves a lease's cursor
when a step that used the sequences was made. What was drawn and never trained is trained by the lease's next holder.

Example: a lease of positions 0 to 8, batches of 3. After two draws positions 0 to 5 are handed out; after one
commit the cursor is 3. If the process dies now, the next holder begins at position 3.

A finished lease stays in the reports for a while: reports are cumulative, and the syncer may have missed some.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_protocol.wire.records import Lease, LeaseCursor
from diloco_worker.settings import WorkerError

# Finished leases that are still reported. Not fewer than may be held at once (prefetch), so that all that were
# finished while the syncer was away are reported; limits.MAX_CURSORS bounds both together.
_KEPT_FINISHED = 128


def order_within_block(seed: int, data_epoch: int, block: int, size: int) -> list[int]:
    """The permutation of 0..size-1 of a block: Fisher-Yates on a generator seeded by SHA-256 of the three other
    numbers. It is the same on every platform and Python version."""
    digest = hashlib.sha256(f"{seed}:{data_epoch}:{block}".encode()).digest()
    uniform = random.Random(int.from_bytes(digest, "big")).random
    order = list(range(size))
    for last in range(size - 1, 0, -1):
        other = int(uniform() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order


@dataclass(frozen=True, slots=True)
class Draw:
    """The sequences of one batch, and the cursors once it is trained."""

    sequences: tuple[int, ...]
    cursors: tuple[LeaseCursor, ...]


@dataclass(slots=True)
class _OpenLease:
    grant: Lease
    order: list[int]
    drawn: int  # next position to draw
    trained: int  # the cursor


class Leases:
    """The leases of one slot, oldest first. ``sequences``: how many the data set has."""

    def __init__(self, seed: int, sequences: int) -> None:
        self.seed = seed
        self.sequences = sequences
        self._held: dict[int, _OpenLease] = {}
        self._finished: dict[int, int] = {}

    @property
    def remaining(self) -> int:
        """Sequences leased and not drawn yet."""
        return sum(held.grant.end - held.drawn for held in self._held.values())

    @property
    def unfinished(self) -> int:
        """Leases that are not finished."""
        return len(self._held)

    @property
    def block_size(self) -> int:
        """Of the newest lease; 0: there was none."""
        return next(reversed(self._held.values())).grant.block_size if self._held else 0

    def add(self, grant: Lease) -> bool:
        """Add a lease; False if it is known. Raises WorkerError if it contradicts the data set."""
        if grant.lease in self._held or grant.lease in self._finished:
            return False
        first = grant.block * grant.block_size
        size = min(grant.block_size, self.sequences - first)
        if grant.block_size < 1 or size < 1 or not 0 <= grant.start <= grant.end <= size:
            raise WorkerError(
                f"lease {grant.lease} names positions {grant.start} to {grant.end} of block {grant.block} "
                f"({grant.block_size} a block), and the data set has {self.sequences} sequences: "
                "the learners' data differ; give every learner the same training.data"
            )
        order = order_within_block(self.seed, grant.data_epoch, grant.block, size)
        self._held[grant.lease] = _OpenLease(grant, order, grant.start, grant.start)
        return True

    def reconcile(self, grants: Iterable[Lease]) -> None:
        """Take the slot's leases as the syncer lists them after a reconnect. A lease that is not listed is not drawn
        from any more; a finished one that is not listed has been recorded by the syncer and is forgotten."""
        listed = {grant.lease: grant for grant in grants}
        for lease in [lease for lease in self._held if lease not in listed]:
            del self._held[lease]
        for lease in [lease for lease in self._finished if lease not in listed]:
            del self._finished[lease]
        for grant in listed.values():
            self.add(grant)

    def draw(self, count: int) -> Draw | None:
        """Hand out the next ``count`` sequences, across the end of a lease into the next; None: too few are leased,
        and nothing was drawn."""
        if self.remaining < count:
            return None
        taken: list[int] = []
        cursors: list[LeaseCursor] = []
        for lease, held in self._held.items():
            here = min(count - len(taken), held.grant.end - held.drawn)
            if here == 0:
                continue
            first = held.grant.block * held.grant.block_size
            taken.extend(first + position for position in held.order[held.drawn : held.drawn + here])
            held.drawn += here
            cursors.append(LeaseCursor(lease, held.drawn))
            if len(taken) == count:
                break
        return Draw(tuple(taken), tuple(cursors))

    def commit(self, cursors: Sequence[LeaseCursor]) -> None:
        """Move the cursors: a step was made with the sequences before them."""
        for lease, position in cursors:
            held = self._held.get(lease)
            if held is None or position <= held.trained:
                continue
            held.trained = position
            if position >= held.grant.end:
                del self._held[lease]
                self._finished[lease] = position
        while len(self._finished) > _KEPT_FINISHED:
            del self._finished[next(iter(self._finished))]

    def cursors(self) -> tuple[LeaseCursor, ...]:
        """Every lease's cursor, finished ones first: the rows of a report."""
        open_leases = ((lease, held.trained) for lease, held in self._held.items())
        return tuple(LeaseCursor(*row) for row in (*self._finished.items(), *open_leases))
