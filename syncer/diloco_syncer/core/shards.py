"""Which shard has which fragment, and which shards are lost.

A shard is a process that has the bytes of some fragments. A fragment whose shard is lost is *unserved*: no round is
opened for it, nobody is asked for pushes of it, and no merge of it begins. Every shard begins as served, also after a
restart: nothing here is durable, for the fragments are dealt anew by the same rule.

Example. Fragments of 5, 3, 3 and 2 elements are dealt to two shards: 0 gets the 5, 1 the first 3 and the second, as it
has less each time, and 0 the 2. Shard 1 is lost: fragments 1 and 2 are unserved until it is ready again.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal_fragments(elements: Sequence[int], shards: int) -> tuple[int, ...]:
    """The shard of each fragment. The largest is dealt first, of equal ones the lower index; each goes to the shard
    that has the fewest elements so far, of equal ones to that with the fewest fragments, then to the lowest. So every
    shard has a fragment where there are enough, and shards beyond their number have none."""
    dealt = [0] * len(elements)
    loads = [(0, 0, shard) for shard in range(shards)]
    for fragment in sorted(range(len(elements)), key=lambda fragment: (-elements[fragment], fragment)):
        load, count, shard = min(loads)
        loads[shard] = load + elements[fragment], count + 1, shard
        dealt[fragment] = shard
    return tuple(dealt)


class Shards:
    """The shards of one job."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.lost: dict[int, float] = {}  # since when
        self.of: tuple[int, ...] = ()  # by fragment; empty before version 0

    def deal(self, elements: Sequence[int]) -> None:
        """The fragments' sizes are known."""
        self.of = deal_fragments(elements, self.count)

    def fragments(self, shard: int) -> list[int]:
        return [fragment for fragment, its in enumerate(self.of) if its == shard]

    @property
    def all_served(self) -> bool:
        """Whether every fragment is; a shard without any is not missed."""
        return self.lost.keys().isdisjoint(self.of)

    def is_served(self, fragment: int) -> bool:
        return self.of[fragment] not in self.lost
