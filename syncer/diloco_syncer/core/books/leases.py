"""Data leases: who trains which part of the corpus.

Theory of operation. The corpus of N sequences (N is what the first learner says) is cut into blocks. In each data
epoch the blocks have an order that depends on the seed and the epoch alone. They are leased to slots one by one, so
that within an epoch the leases are disjoint and together cover everything, whoever joins, leaves or is slow.

A newcomer in a slot goes on with the slot's leases, from their cursors: a slot that is lost keeps them. A slot that is
given up returns what is left of its leases, and that is leased first. When an epoch's last block is out, what lost
slots hold is leased to others before the next epoch begins. Data of steps that were trained and then dropped are not
trained again, because their cursor has moved on.

Example. 1000 sequences in 10 blocks of 100. Slot 0 has block 7 and has trained 40 sequences of it when it is given
up: the next lease that anybody gets is block 7, sequences 40 to 100.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_protocol.wire.records import DataSample, Lease

BLOCKS_PER_SLOT = 64
MAX_BLOCK = 4096  # sequences
MAX_SORTED = 1 << 14  # blocks: sorting these takes a few hundredths of a second


@dataclass(slots=True)
class OpenLease:
    """A lease that a slot has: sequences ``position`` to ``end`` of its block are still to be trained."""

    slot: int
    data_epoch: int
    block: int
    position: int
    end: int


def order_blocks(seed: int, data_epoch: int, blocks: int) -> Sequence[int]:
    """The blocks of one epoch in the order in which they are leased."""
    if blocks > MAX_SORTED:
        return Permutation(f"{seed}:{data_epoch}".encode(), blocks)

    def key(block: int) -> bytes:
        return hashlib.sha256(f"{seed}:{data_epoch}:{block}".encode()).digest()

    return sorted(range(blocks), key=key)


class Permutation(Sequence[int]):
    """0 to ``size`` - 1 in an order that depends on the key, of which each item is computed when it is asked for.

    A Feistel network of four rounds permutes the numbers of 2k bits, where 4**k >= size. A result that is not below
    ``size`` is permuted again until it is, fewer than four times on average. So a data set may have any size, and
    costs neither memory nor time.
    """

    ROUNDS = 4

    def __init__(self, key: bytes, size: int) -> None:
        self._key = key
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(index)
        index = self._permute(index)
        while index >= self._size:
            index = self._permute(index)
        return index

    def _permute(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for turn in range(self.ROUNDS):
            digest = hashlib.sha256(b"%b:%d:%d" % (self._key, turn, right)).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "big") & mask)
        return left << self._half | right


class LeaseBook:
    """The leases of one job. ``sequences``: N; ``slots``: M when the job started."""

    def __init__(self, seed: int, sequences: int, slots: int) -> None:
        if sequences < 1:
            raise ValueError("a data set has at least one sequence")
        self.seed = seed
        self.sequences = sequences
        self.samples: tuple[DataSample, ...] = ()  # of their content; empty: nobody has said
        self.slots = slots
        self.block_size = min(MAX_BLOCK, max(1, sequences // (BLOCKS_PER_SLOT * max(1, slots))))
        self.blocks = -(-sequences // self.block_size)
        self.issued = 0  # index of the next block in the endless order
        self.given = [0] * slots  # leases per slot; only deterministic mode counts them
        self.next_lease = 1
        self.open: dict[int, OpenLease] = {}
        self.returned: deque[OpenLease] = deque()
        self._order: tuple[int, Sequence[int]] | None = None

    def find_other(self, samples: Collection[DataSample]) -> DataSample | None:
        """The first of a learner's samples of its data that differs from those of the job's data; None: none does."""
        known = {(one.first, one.items): one.digest for one in self.samples}
        return next((one for one in samples if known.get((one.first, one.items), one.digest) != one.digest), None)

    def grant_block(self, slot: int, index: int) -> Lease:
        """Lease the block of this index in the endless order to the slot."""
        data_epoch, place = divmod(index, self.blocks)
        if self._order is None or self._order[0] != data_epoch:
            self._order = (data_epoch, order_blocks(self.seed, data_epoch, self.blocks))
        block = self._order[1][place]
        end = min(self.block_size, self.sequences - block * self.block_size)  # the last block may be short
        return self.grant(OpenLease(slot, data_epoch, block, 0, end=end))

    def grant(self, held: OpenLease) -> Lease:
        """Lease a block, or what is left of one, under a new number."""
        lease = self.next_lease
        self.next_lease += 1
        self.open[lease] = held
        return self._as_grant(lease, held)

    def _as_grant(self, lease: int, held: OpenLease) -> Lease:
        return Lease(lease, held.data_epoch, held.block, held.position, end=held.end, block_size=self.block_size)

    def grant_lease(self, slot: int, lost: Collection[int] = ()) -> Lease:
        """One more block for the slot. ``lost``: slots without a process."""
        if not self.returned and self.issued and self.issued % self.blocks == 0:
            for other in lost:
                self.return_leases(other)
        if self.returned:
            held = self.returned.popleft()
            held.slot = slot
            return self.grant(held)
        self.issued += 1
        return self.grant_block(slot, self.issued - 1)

    def count_read(self, slot: int, cursors: Collection[tuple[int, int]]) -> int:
        """How many sequences the slot has read since, by cursors as it reports them."""
        furthest: dict[int, int] = {}
        for lease, position in cursors:
            held = self.open.get(lease)
            if held is not None and held.slot == slot:
                furthest[lease] = max(0, min(position, held.end) - held.position, furthest.get(lease, 0))
        return sum(furthest.values())

    def advance_cursors(self, slot: int, cursors: Collection[tuple[int, int]], most: float = math.inf) -> int:
        """Cursors as the slot reports them; a lease that is not its own, or a step back, is ignored. Returns how many
        sequences it has read since, of which ``most`` count."""
        read = 0
        for lease, position in cursors:
            held = self.open.get(lease)
            if held is None or held.slot != slot or position <= held.position:
                continue
            counted = int(min(position - held.position, held.end - held.position, max(0, most - read)))
            read += counted
            held.position += counted
            if held.position == held.end:
                del self.open[lease]
        return read

    def count_of(self, slot: int) -> int:
        return sum(held.slot == slot for held in self.open.values())

    def leases_of(self, slot: int) -> tuple[Lease, ...]:
        """The slot's leases from their cursors on, oldest first."""
        return tuple(self._as_grant(i, h) for i, h in sorted(self.open.items()) if h.slot == slot)

    def return_leases(self, slot: int) -> None:
        """The slot was given up: what is left of its leases is leased first."""
        for lease in sorted(i for i, h in self.open.items() if h.slot == slot):
            held = self.open.pop(lease)
            if held.position < held.end:
                self.returned.append(held)

    def skip_numbers(self) -> None:
        """Leases may have been given that this book has lost: use none of their numbers again."""
        self.next_lease += 1 << 16

    def to_json(self) -> dict[str, Any]:
        def row(held: OpenLease) -> list[int]:
            return [held.slot, held.data_epoch, held.block, held.position, held.end]

        return {
            "sequences": self.sequences,
            "slots": self.slots,
            "issued": self.issued,
            "given": self.given,
            "next_lease": self.next_lease,
            "held": {str(lease): row(held) for lease, held in self.open.items()},
            "returned": [row(held) for held in self.returned],
            "samples": [list(sample) for sample in self.samples],
        }

    @classmethod
    def from_json(cls, seed: int, row: dict[str, Any]) -> LeaseBook:
        book = cls(seed, row["sequences"], row["slots"])
        book.issued = row["issued"]
        book.given = list(row["given"])
        book.next_lease = row["next_lease"]
        book.open = {int(lease): OpenLease(*values) for lease, values in row["held"].items()}
        book.returned = deque(OpenLease(*values) for values in row["returned"])
        book.samples = tuple(DataSample(*values) for values in row.get("samples", ()))
        return book
