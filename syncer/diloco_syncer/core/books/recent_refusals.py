"""Which places were refused for good lately, and why: the status document's ``refusals``.

A learner that is refused ends, and nobody can ask it any more. Seen from the syncer, only nobody comes; so
the last refusal of each place is kept until a process of that place is admitted. It is not durable: a
refused process comes again.
"""

from __future__ import annotations

from collections import OrderedDict

from diloco_protocol.documents import RefusalRow
from diloco_protocol.wire.records import Join

MOST = 64
"""Places that are remembered: those heard of last."""


Place = tuple[str, str, int]


class RecentRefusals:
    """The last refusal of each place."""

    def __init__(self) -> None:
        # With the time of the refusal, by the core's clock.
        self._by_place: OrderedDict[Place, tuple[float, RefusalRow]] = OrderedDict()

    def add(self, join: Join, reason: str, message: str, fields: tuple[str, ...], now: float) -> bool:
        """Remember that a Join was refused for good. ``fields``: in which the jobs differ, where that is why. False:
        the place was refused for this reason before."""
        role, region, ordinal = place = _place(join)
        row = RefusalRow(
            role=role,
            region=region,
            ordinal=ordinal,
            reason=reason,
            message=message,
            fields=list(fields),
            seconds_ago=0,
        )
        _, earlier = self._by_place.get(place, (0.0, None))
        self._by_place[place] = now, row
        self._by_place.move_to_end(place)
        if len(self._by_place) > MOST:
            self._by_place.popitem(last=False)
        return earlier is None or earlier.reason != reason

    def remove(self, join: Join) -> None:
        """Forget the refusal of the place: a process of it was admitted."""
        self._by_place.pop(_place(join), None)

    def rows(self, now: float) -> list[RefusalRow]:
        """For the status document, the oldest first."""
        return [row.model_copy(update={"seconds_ago": now - at}) for at, row in self._by_place.values()]


def _place(join: Join) -> Place:
    return ("evaluator" if join.evaluator else "learner", join.region, join.ordinal)
