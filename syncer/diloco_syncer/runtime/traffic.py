"""How many bytes each region's link and each slot's learners have carried: status' and report's ``regions``.

Theory of operation. There are two counts, for there are two questions. *Payload*
(``bytes_up``, ``bytes_down``) is what the encodings cost: pushes, broadcasts, version 0, states, each
part once it is here or gone whole. It is the job's own ``bytes_up`` and ``bytes_down``, split up.
*Wire* (``wire_bytes_up``, ``wire_bytes_down``) is what passes the listener's sockets: payload, what was sent
in vain, messages and heartbeats, HTTP/2, TLS with its handshakes. Of what a network card counts, only
TCP/IP's and Ethernet's headers (and what TCP sends again) are missing. The listener sees it
because there each connection is somebody's; without certificates it is not known (None).

A connection is its learner's region's from the call on that tells whose it is, and before that its
certificate's, if that names one. The evaluator is ``evaluator``, wherever it runs. What came
before anybody said who he is has the name ``""``.

Counts go on over restarts with the state. What came after the last state that was written is lost
with its syncer, as for the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_syncer.server.tls.listener import TlsListener

EVALUATOR = "evaluator"  # no region may have that name
NOBODY = ""


class Traffic:
    """Up is towards the syncer. All of it belongs to the syncer's loop."""

    def __init__(self, regions: Iterable[str]) -> None:
        """``regions``: of the job, in its order."""
        self.regions = tuple(regions)
        self._up = Counter[str]()
        self._down = Counter[str]()  # payload, by region
        self._slots_up = Counter[int]()
        self._slots_down = Counter[int]()
        # By region, of syncers before this one.
        self._earlier: dict[str, tuple[int, int]] = {}

    def place(self, region: str, evaluator: bool) -> str:
        """Where the bytes of who joins so are counted: regions that the job has not would be endless."""
        if evaluator:
            return EVALUATOR
        return region if region in self.regions else NOBODY

    def received(self, place: str, slot: int | None, count: int) -> None:
        """A part of a payload came from there; ``slot`` None: from nobody who has one."""
        self._up[place] += count
        if slot is not None:
            self._slots_up[slot] += count

    def sent(self, place: str, slot: int | None, count: int) -> None:
        """A part of a payload went there."""
        self._down[place] += count
        if slot is not None:
            self._slots_down[slot] += count

    def rows(self, listener: TlsListener | None) -> list[dict[str, Any]]:
        """One row per region of the job, then others that carried something. Bytes since the job began."""
        wire = self._wire(listener)
        carried = {name for name in (*self._up, *self._down, *wire) if name not in self.regions}
        return [
            {
                "name": name,
                "bytes_up": self._up[name],
                "bytes_down": self._down[name],
                "wire_bytes_up": wire.get(name, (0, 0))[0] if listener is not None else None,
                "wire_bytes_down": wire.get(name, (0, 0))[1] if listener is not None else None,
            }
            for name in (*self.regions, *sorted(carried))
        ]

    def with_slots(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows that have ``slot``, each with the payload of all who sat there."""
        return [
            row | {"bytes_up": self._slots_up[row["slot"]], "bytes_down": self._slots_down[row["slot"]]} for row in rows
        ]

    def _wire(self, listener: TlsListener | None) -> dict[str, tuple[int, int]]:
        wire = dict(self._earlier)
        for name, (up, down) in (listener.bytes_by_place() if listener is not None else {}).items():
            before = wire.get(name, (0, 0))
            wire[name] = before[0] + up, before[1] + down
        return wire

    def state(self, listener: TlsListener | None) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "up": dict(self._up),
            "down": dict(self._down),
            "wire": {name: list(counts) for name, counts in self._wire(listener).items()},
            # JSON's keys are text.
            "slots_up": list(self._slots_up.items()),
            "slots_down": list(self._slots_down.items()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's; one of an older release has nothing, and counts begin here."""
        self._up.update(state.get("up", {}))
        self._down.update(state.get("down", {}))
        self._slots_up.update(dict(state.get("slots_up", [])))
        self._slots_down.update(dict(state.get("slots_down", [])))
        self._earlier = {name: (up, down) for name, (up, down) in state.get("wire", {}).items()}
