"""Slots, incarnations and who holds which slot.

Theory of operation. A slot outlives its processes. A process joins and is given
a slot under a new incarnation number, drawn from one rising counter, so that of
two incarnations the higher is always the newer; whatever carries an older one is
fenced. Which slot a newcomer gets, in this order:

1. the slot that this very process still has (its tenure goes on; it names its last
   incarnation, for a program may be started again under the id of the one before),
2. the slot of its region and ordinal: a newcomer there supersedes the process
   that was there before, at once, for a place runs one process only,
3. its own nominal slot, then the lowest slot that nobody holds,
4. none: it stands by, and takes the first slot that is lost.

A place belongs to the newest pod that joined from it. A pod that was given up as lost with
its node, and replaced, may come back with its processes alive, or start them once more,
before its kubelet hears that it was deleted: it is refused, and the slot stays with its
successor. The same goes for a process without a pod that has lost its place to a newer one.

A slot is *active* while its process is connected and has reported, *suspect*
when its stream broke, *lost* when nothing was heard for the heartbeat timeout
or somebody who knows said that the process is gone, *draining* when the process
was told to leave, *drained* when it left with everything offered.

No I/O; the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from diloco_syncer.events import Join, MergedPush


class SlotState(StrEnum):
    EMPTY = "empty"  # nobody ever
    ACTIVE = "active"
    SUSPECT = "suspect"
    LOST = "lost"
    DRAINING = "draining"
    DRAINED = "drained"


PODS_KEPT = 8  # of one place; an older one has long been gone
PLACES_KEPT = 16_384

OCCUPIED = frozenset({SlotState.ACTIVE, SlotState.SUSPECT, SlotState.DRAINING})


@dataclass(slots=True)
class Slot:
    """One learner's place; steps and tokens are the slot's, over all processes."""

    index: int
    state: SlotState = SlotState.EMPTY
    region: str = ""
    ordinal: int = 0
    process: str = ""
    connection: int | None = None
    incarnation: int = 0
    incarnations: int = 0  # how many there were
    heard_at: float = 0.0
    ready: bool = False  # has reported with all bases
    advanced: bool = False  # has trained a step in this tenure
    step: int = 0
    step_at_seat: int = 0
    loss: float | None = None
    step_seconds: float = 0.0
    paused: bool = False
    merged_pushes: int = 0
    # Since it was seated, anew or as who it was: what a fault's time of recovery is read from.
    stepped: bool = False
    merged_since: bool = False
    late_rounds: int = 0
    starved: bool = False
    # Newest accepted and newest merged push of the open tenure, per fragment.
    accepted_sequence: dict[int, int] = field(default_factory=dict)
    merged: dict[int, MergedPush] = field(default_factory=dict)
    merged_last_step: dict[int, int] = field(default_factory=dict)

    @property
    def occupied(self) -> bool:
        return self.state in OCCUPIED

    def clear_tenure(self) -> None:
        self.ready = self.advanced = self.paused = self.starved = False
        self.late_rounds = 0
        self.accepted_sequence.clear()
        self.merged.clear()


_DURABLE = (
    "region",
    "ordinal",
    "process",
    "incarnation",
    "incarnations",
    "step",
    "step_at_seat",
    "merged_pushes",
)


class Membership:
    """The slots of a job. ``places``: (region, ordinal) of each slot, in job order."""

    def __init__(self, places: list[tuple[str, int]]) -> None:
        self.places = places
        self.slots = [Slot(index) for index in range(len(places))]
        self.next_incarnation = 1
        self.standby: dict[int, Join] = {}  # connection -> its join, in order of arrival
        self.evaluators: set[int] = set()
        # (region, ordinal) -> the pods that joined from there, the newest last
        self.pods: dict[tuple[str, int], list[str]] = {}

    @property
    def current(self) -> list[Slot]:
        """The slots that the job has now; behind them may be retired ones (scaled down)."""
        return self.slots[: len(self.places)]

    def by_connection(self, connection: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.connection == connection), None)

    def by_place(self, region: str, ordinal: int) -> Slot | None:
        return next(
            (s for s in self.current if s.incarnation and (s.region, s.ordinal) == (region, ordinal)), None
        )

    def superseded(self, join: Join) -> bool:
        """Whether this process's place has gone to a newer one; else its pod is the place's newest."""
        place = (join.region, join.ordinal)
        holder = self.by_place(*place)
        if (
            holder is not None
            and holder.occupied
            and holder.process != join.process
            and 0 < join.previous_incarnation < holder.incarnation
        ):
            return True
        if not join.pod:
            return False
        known = self.pods.setdefault(place, [])
        if join.pod in known[:-1]:
            return True
        if join.pod not in known:
            known.append(join.pod)
            del known[:-PODS_KEPT]
            while len(self.pods) > PLACES_KEPT:
                self.pods.pop(next(iter(self.pods)))
        return False

    def own(self, join: Join) -> Slot | None:
        """The slot that this very process holds, if nobody took it and it was not given up."""
        for slot in self.current if join.previous_incarnation else ():
            if slot.process == join.process and slot.state not in (SlotState.DRAINED, SlotState.EMPTY):
                return slot
        return None

    def choose(self, join: Join, deterministic: bool) -> Slot | None:
        """The slot that a newcomer gets (not its own), or None: stand by."""
        if deterministic:
            place = (join.region, join.ordinal)
            return self.slots[self.places.index(place)] if place in self.places else None
        return self.by_place(join.region, join.ordinal) or self.free_for(join)

    def free_for(self, join: Join) -> Slot | None:
        """A slot that nobody holds, for a standby: its nominal one, else the lowest."""
        if (join.region, join.ordinal) in self.places:
            nominal = self.slots[self.places.index((join.region, join.ordinal))]
            if not nominal.occupied:
                return nominal
        return self._free()

    def _free(self) -> Slot | None:
        return next((slot for slot in self.current if not slot.occupied), None)

    def sit(self, slot: Slot, join: Join, now: float) -> int:
        """Give the slot to the process under a new incarnation, which is returned."""
        slot.incarnation = self.next_incarnation
        slot.incarnations += 1
        self.next_incarnation += 1
        slot.process, slot.region, slot.ordinal = join.process, join.region, join.ordinal
        slot.connection, slot.state, slot.heard_at = join.connection, SlotState.ACTIVE, now
        slot.stepped = slot.merged_since = False
        return slot.incarnation

    def reachable(self) -> set[int]:
        """Slots whose process can still push."""
        return {s.index for s in self.slots if s.occupied and s.connection is not None and s.ready}

    def to_json(self) -> dict[str, Any]:
        return {
            "next_incarnation": self.next_incarnation,
            "pods": [[region, ordinal, pods] for (region, ordinal), pods in self.pods.items()],
            "slots": [
                {name: getattr(slot, name) for name in _DURABLE}
                | {
                    "state": slot.state.value,
                    "merged": {str(k): [v.sequence, v.version] for k, v in slot.merged.items()},
                    "merged_last_step": {str(k): v for k, v in slot.merged_last_step.items()},
                }
                for slot in self.slots
            ],
        }

    def load(self, row: dict[str, Any], now: float) -> None:
        """Who was connected is suspect now, and has a heartbeat timeout to come back."""
        self.next_incarnation = row["next_incarnation"]
        self.pods = {(region, ordinal): list(pods) for region, ordinal, pods in row.get("pods", [])}
        while len(self.slots) < len(row["slots"]):  # the job was scaled down: history stays
            self.slots.append(Slot(len(self.slots)))
        for slot, saved in zip(self.slots, row["slots"], strict=False):
            for name in _DURABLE:
                setattr(slot, name, saved[name])
            state = SlotState(saved["state"])
            slot.state = SlotState.SUSPECT if state in OCCUPIED else state
            slot.heard_at = now
            slot.merged = {int(k): MergedPush(*v) for k, v in saved["merged"].items()}
            # What was accepted and not merged is gone, but for spooled offers, which say so themselves.
            slot.accepted_sequence = {fragment: push.sequence for fragment, push in slot.merged.items()}
            slot.merged_last_step = {int(k): v for k, v in saved["merged_last_step"].items()}
