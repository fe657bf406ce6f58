"""Where the bulk bytes of a session go: to the syncer, or to the one of its shards that has the fragment.

A *route* is the connections to one of these. The shards share as many connections between them as there are to the
syncer, but for one that each has at least. None is made before it is needed.

Example: of four fragments the syncer names shards for 0 and 1. Then the pushes of 0 and 1 go to their shards over two
connections each, and all else goes to the syncer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diloco_protocol.common.reach import join_address, split_address
from diloco_protocol.wire import bulk
from diloco_protocol.wire.records import Shard

_CONNECTIONS = 4  # up, and as many down
_STATE_CONNECTIONS = 2  # on which a state may pause while those of pushes go on
Connect = Callable[[str, int | None], bulk.Channel]  # to an address and a shard there: a connection, not made yet


class Route:
    """The connections to a ``shard`` at ``address`` (host:port), one of ``count`` that have a share of what there is;
    each carries one part at a time. ``shard`` None: to the syncer. Those of uploads (``up``) carry no downloads."""

    def __init__(self, connect: Connect, address: str, shard: int | None = None, count: int = 1) -> None:
        self._count = count
        lanes = range(self.share(_CONNECTIONS))
        self.up, self.down = (bulk.Lanes([connect(address, shard) for _ in lanes]) for _ in range(2))

    def share(self, most: int) -> int:
        """This route's share of ``most``, at least 1."""
        return max(1, most // self._count)

    def retire(self) -> None:
        """Carry nothing more."""
        self.up.retire()
        self.down.retire()


class Routes:
    """The routes of one session. ``syncer``: the address (host:port) at which this process reaches the syncer.
    ``states``: the connections to it that carry this process's optimizer state."""

    def __init__(self, connect: Connect, syncer: str) -> None:
        self._connect, self._syncer = connect, syncer
        self._own = Route(connect, syncer)
        self.states = bulk.Lanes([connect(syncer, None) for _ in range(_STATE_CONNECTIONS)])
        self._to_shards: dict[tuple[str, int, int], Route] = {}  # by address, number, and how many shards there are
        self._of_fragments: dict[int, Route] = {}

    def find(self, fragment: int) -> Route:
        """Where pushes of the fragment go, and its versions come from; -1: all else."""
        return self._of_fragments.get(fragment, self._own)

    def has_shard(self, fragment: int) -> bool:
        return fragment in self._of_fragments

    def set_shards(self, shards: Sequence[Shard]) -> None:
        """Go to these from now on. What is under way elsewhere may end there."""
        host, port = split_address(self._syncer)
        former, self._to_shards, self._of_fragments = self._to_shards, {}, {}
        for number, shard in enumerate(shards):
            key = join_address(shard.host or host, shard.port or port), number, len(shards)
            route = self._to_shards.get(key) or former.pop(key, None) or Route(self._connect, *key)
            self._to_shards[key] = route
            self._of_fragments |= dict.fromkeys(shard.fragments, route)
        for route in former.values():
            route.retire()

    def close(self) -> None:
        """End all connections that carry nothing."""
        self.set_shards(())
        self._own.retire()
        self.states.retire()
