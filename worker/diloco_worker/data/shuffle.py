"""The training data in an order of the seed's, without a list of it.

The syncer leases blocks of consecutive sequences (algorithm.md section 8), and data lie in the order of their files,
often sorted by what they are about: a learner that trained a block as it lies would see one subject at a time, and
learners would drift apart. So sequence i of the training data is item p(i) of the source, p being a permutation of
0..n-1 that is computed, not stored: a Feistel network of ROUNDS rounds on the least even number of bits that holds n,
applied again while the result is n or more (cycle walking: fewer than four times on average). Every process computes
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

ROUNDS = 6
_MASK = 2**64 - 1


class Dataset(Protocol):
    """A map-style data set: what the trainer and the evaluator read."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, torch.Tensor]: ...


def mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out, one to one."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def step_seed(seed: int, slot: int, step: int, share: int = 0) -> int:
    """A seed of its own for each (job seed, slot, step), below 2^63; and for each share of a learner's batch."""
    value = 0
    for part in (seed, slot, step, share)[: 4 if share else 3]:
        value = mix(value + part + 0x9E3779B97F4A7C15)
    return value >> 1


class Permutation:
    """A permutation of 0..size-1 that depends on ``seed`` (0 <= seed < 2^64) alone."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2) if size > 0 else 1
        self._keys = [mix(seed + (r + 1) * 0x9E3779B97F4A7C15) for r in range(ROUNDS)]

    def __call__(self, i: int) -> int:
        """Where position ``i`` goes. Raises IndexError outside 0..size-1."""
        if not 0 <= i < self.size:
            raise IndexError(i)
        half, low = self._half, (1 << self._half) - 1
        while True:
            left, right = i >> half, i & low
            for key in self._keys:
                left, right = right, left ^ (mix(right ^ key) & low)
            i = left << half | right
            if i < self.size:
                return i


@dataclass(frozen=True, slots=True)
class Shuffled:
    """``inner`` in the permutation's order."""

    inner: Dataset
    order: Permutation

    @property
    def compared_items(self) -> int:
        """As ``sample_items`` asks for it: the inner data set's."""
        return getattr(self.inner, "compared_items", 1)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int, /) -> dict[str, torch.Tensor]:
        return self.inner[self.order(int(i))]
