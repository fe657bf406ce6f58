"""Bytes that each region's link and each slot's learners have carried: ``regions`` of status and report.

Theory of operation. Two counts answer two questions. *Payload* (``bytes_up``, ``bytes_down``) is what the encodings
cost: pushes, broadcasts, version 0 and optimizer states, each part counted once it is here or was sent whole. *Wire*
(``wire_bytes_up``, ``wire_bytes_down``) is what passes the sockets of the TLS listener: payload, what was sent in
vain, messages, HTTP/2 and TLS. Only the headers of TCP/IP and Ethernet, and what TCP sends again, are missing. Without
certificates the wire's bytes are not known (None).

A *place* is a region, ``evaluator`` (wherever it runs), or ``""`` for what came before it was known whose a connection
is. A connection's place is the region that its certificate names, if it names one, and else its learner's region, from
the first call on that tells it. Counts go on over restarts with the state document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diloco_protocol.documents import RegionRow
from diloco_protocol.vocabulary import EVALUATOR

WireBytes = Callable[[], dict[str, tuple[int, int]]]  # by place, (received, sent)
NOBODY = ""


class Traffic:
    """Counts bytes by place and slot; up is towards the syncer. Only the syncer's event loop may call it."""

    def __init__(self, regions: Iterable[str], wire_bytes: WireBytes | None = None) -> None:
        """``regions``: of the job, in its order. ``wire_bytes``: of the TLS listener; None: plaintext."""
        self.regions = tuple(regions)
        self._wire_bytes = wire_bytes
        self._up = Counter[str]()
        self._down = Counter[str]()  # payload, by region
        self._slots_up = Counter[int]()
        self._slots_down = Counter[int]()
        # By region, of syncers before this one.
        self._earlier: dict[str, tuple[int, int]] = {}

    def place_of(self, region: str, evaluator: bool) -> str:
        """The place of a learner or evaluator that joins; a region that the job does not have has the place ``""``."""
        if evaluator:
            return EVALUATOR
        return region if region in self.regions else NOBODY

    def count_received(self, place: str, slot: int | None, count: int) -> None:
        """Count a part of a payload that came from a place; ``slot`` None: its sender has no slot."""
        self._up[place] += count
        if slot is not None:
            self._slots_up[slot] += count

    def count_sent(self, place: str, slot: int | None, count: int) -> None:
        """Count a part of a payload that was sent to a place; ``slot`` None: its reader has no slot."""
        self._down[place] += count
        if slot is not None:
            self._slots_down[slot] += count

    def rows(self) -> list[RegionRow]:
        """One row per region of the job, then others that carried something. Bytes since the job began."""
        wire = self._wire()
        carried = {name for name in (*self._up, *self._down, *wire) if name not in self.regions}
        return [
            RegionRow(
                name=name,
                bytes_up=self._up[name],
                bytes_down=self._down[name],
                wire_bytes_up=wire.get(name, (0, 0))[0] if self._wire_bytes else None,
                wire_bytes_down=wire.get(name, (0, 0))[1] if self._wire_bytes else None,
            )
            for name in (*self.regions, *sorted(carried))
        ]

    def slot_bytes(self, slot: int) -> tuple[int, int]:
        """Payload up and down of all learners that this slot has had."""
        return self._slots_up[slot], self._slots_down[slot]

    def _wire(self) -> dict[str, tuple[int, int]]:
        wire = dict(self._earlier)
        add_bytes(wire, self._wire_bytes() if self._wire_bytes else {})
        return wire

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "up": dict(self._up),
            "down": dict(self._down),
            "wire": {name: list(counts) for name, counts in self._wire().items()},
            # JSON's keys are text.
            "slots_up": list(self._slots_up.items()),
            "slots_down": list(self._slots_down.items()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's counts; where there are none, counts begin here."""
        self._up.update(state.get("up", {}))
        self._down.update(state.get("down", {}))
        self._slots_up.update(dict(state.get("slots_up", [])))
        self._slots_down.update(dict(state.get("slots_down", [])))
        self._earlier = {name: (up, down) for name, (up, down) in state.get("wire", {}).items()}


def add_bytes(sums: dict[str, tuple[int, int]], more: Mapping[str, tuple[int, int]]) -> None:
    """Add bytes received and sent, by place."""
    for place, (up, down) in more.items():
        before = sums.get(place, (0, 0))
        sums[place] = before[0] + up, before[1] + down
