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

A job may be scaled while it lives, by a start of its syncer with other places. Each place
then keeps the slot that its process has, so that nobody who stays is moved; places that are
new get slots that are free, or new ones; and slots that are over are *retired*. A retired
slot's process stays in it until it leaves (its pod is going to be removed, and offers its
work before) or is lost; nobody is seated there any more, and its history stays in the
ledger. A later scaling may take a retired slot for a place again: like a new one, it then
begins at the job's greatest step.

A slot is *active* while its process is connected and has reported, *suspect*
when its stream broke, *lost* when nothing was heard for the heartbeat timeout
or somebody who knows said that the process is gone, *draining* when the process
was told to leave, *drained* when it left with everything offered.

A region is *lost* when somebody of it held a slot and nobody of it has been there for a time
that the job sets (failurePolicy.regionLostSeconds).

No I/O; the time is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.vocabulary import HELD_STATES, SlotState
from diloco_syncer.core.events import Join, MergedPush

PODS_KEPT = 8  # of one place; an older one has long been gone
PLACES_KEPT = 16_384


@dataclass(slots=True)
class Slot:
    """One learner's place; steps and tokens are the slot's, over all processes."""

    index: int
    state: SlotState = SlotState.EMPTY
    retired: bool = False  # scaled down: for whom it has, until they leave
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
    tenure: int = 0  # the incarnation under which its process's tenure began; 0: unknown
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
        return self.state in HELD_STATES

    def clear_tenure(self) -> None:
        self.ready = self.advanced = self.paused = self.starved = False
        self.late_rounds = 0
        self.accepted_sequence.clear()
        self.merged.clear()


ABSENCES = 1000  # that a job remembers
_DURABLE = (
    "retired",
    "region",
    "ordinal",
    "process",
    "incarnation",
    "incarnations",
    "step",
    "step_at_seat",
    "merged_pushes",
)


@dataclass(slots=True)
class Absence:
    """A time in which a region was lost, in the job's elapsed seconds; ``until`` None: it still is."""

    region: str
    since: float
    until: float | None


class SlotTable:
    """The slots of a job. ``places``: (region, ordinal) of each slot, in job order."""

    def __init__(self, places: list[tuple[str, int]]) -> None:
        self.places = places
        self.slots = [Slot(index) for index in range(len(places))]
        self.nominal = dict(zip(places, self.slots, strict=True))  # place -> the slot that it keeps
        self.next_incarnation = 1
        self.standby: dict[int, Join] = {}  # connection -> its join, in order of arrival
        self.evaluators: set[int] = set()
        # (region, ordinal) -> the pods that joined from there, the newest last
        self.pods: dict[tuple[str, int], list[str]] = {}
        self.seen: set[str] = set()  # regions of which somebody held a slot
        # Of these, region -> since when nobody is there; -inf: it was lost already in an earlier life.
        self.silent_since: dict[str, float] = {}
        self.lost: list[str] = []  # of these, those that count as lost
        self.absences: list[Absence] = []  # the newest ABSENCES, in their order

    @property
    def current(self) -> list[Slot]:
        """The slots that the job has now, without the retired ones."""
        return [slot for slot in self.slots if not slot.retired]

    def grow(self, slots: int) -> None:
        """Retired slots for the history of those that a lost state had."""
        while len(self.slots) < slots:
            self.slots.append(Slot(len(self.slots), retired=True))

    def by_connection(self, connection: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.connection == connection), None)

    def by_place(self, region: str, ordinal: int) -> Slot | None:
        return next((s for s in self.current if s.incarnation and (s.region, s.ordinal) == (region, ordinal)), None)

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
        for slot in self.slots if join.previous_incarnation else ():
            if slot.process == join.process and slot.state not in (SlotState.DRAINED, SlotState.EMPTY):
                return slot
        return None

    def choose(self, join: Join, deterministic: bool) -> Slot | None:
        """The slot that a newcomer gets (not its own), or None: stand by."""
        if deterministic:
            return self.nominal.get((join.region, join.ordinal))
        return self.by_place(join.region, join.ordinal) or self.free_for(join)

    def free_for(self, join: Join) -> Slot | None:
        """A slot that nobody holds, for a standby: its nominal one, else the lowest."""
        nominal = self.nominal.get((join.region, join.ordinal))
        return nominal if nominal is not None and not nominal.occupied else self._free()

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
        self.seen.add(join.region)
        return slot.incarnation

    def reachable(self) -> set[int]:
        """Slots whose process can still push."""
        return {s.index for s in self.slots if s.occupied and s.connection is not None and s.ready}

    def watch_regions(self, now: float, patience: float) -> None:
        """Which of the job's regions are lost: somebody of them held a slot, and for ``patience``
        seconds nobody of them does or stands by."""
        present = {slot.region for slot in self.slots if slot.occupied}
        present |= {join.region for join in self.standby.values()}
        regions = dict.fromkeys(region for region, _ in self.places)
        silent = [region for region in regions if region in self.seen - present]
        self.silent_since = {region: self.silent_since.get(region, now) for region in silent}
        self.lost = [region for region, since in self.silent_since.items() if now - since >= patience]

    def note_absences(self, now: float, elapsed: float) -> tuple[list[str], list[str]]:
        """Write down who is lost, and who is back; regions of which either is new. ``elapsed``: the job's
        seconds at ``now``."""
        away = {absence.region: absence for absence in self.absences if absence.until is None}
        gone = [region for region in self.lost if region not in away]
        back = [region for region in away if region not in self.lost]
        for region in gone:
            quiet = now - self.silent_since[region]
            # Infinite: lost in an earlier life, which an older release has not written down.
            since = elapsed if math.isinf(quiet) else max(0.0, elapsed - quiet)
            self.absences.append(Absence(region, since, None))
        for region in back:
            away[region].until = elapsed
        del self.absences[:-ABSENCES]
        known = {region for region, _ in self.places}  # one that the job has no longer is not back
        return gone, [region for region in back if region in known]

    def to_json(self) -> dict[str, Any]:
        return {
            "regions": {
                "seen": sorted(self.seen),
                "lost": self.lost,
                "absences": [[a.region, a.since, a.until] for a in self.absences],
            },
            "next_incarnation": self.next_incarnation,
            "places": [[region, ordinal] for region, ordinal in self.places],
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
        self.slots = [Slot(index) for index in range(len(row["slots"]))]
        for slot, saved in zip(self.slots, row["slots"], strict=True):
            for name in _DURABLE:
                setattr(slot, name, saved.get(name, False) if name == "retired" else saved[name])
            state = SlotState(saved["state"])
            slot.state = SlotState.SUSPECT if state in HELD_STATES else state
            slot.heard_at = now
            slot.merged = {int(k): MergedPush(*v) for k, v in saved["merged"].items()}
            # What was accepted and not merged is gone, but for spooled offers, which say so themselves.
            slot.accepted_sequence = {fragment: push.sequence for fragment, push in slot.merged.items()}
            slot.merged_last_step = {int(k): v for k, v in saved["merged_last_step"].items()}
        regions = row.get("regions") or {}
        self.seen = set(regions.get("seen", ())) or {s.region for s in self.slots if s.incarnation}
        self.silent_since = dict.fromkeys(regions.get("lost", ()), -math.inf)
        self.absences = [Absence(*saved) for saved in regions.get("absences", ())]
        before = row.get("places")
        self._arrange(None if before is None else {(region, ordinal) for region, ordinal in before})

    def _arrange(self, before: set[tuple[str, int]] | None) -> None:
        """Which slot each place keeps, and which slots are over. ``before``: the places until now."""
        kept: dict[tuple[str, int], Slot] = {}
        # Who holds a slot now goes before who held one once, the newest before the older.
        for slot in sorted(self.slots, key=lambda s: (s.retired, not s.occupied, -s.incarnation)):
            if slot.incarnation and (slot.region, slot.ordinal) in self.places:
                kept.setdefault((slot.region, slot.ordinal), slot)
        taken = {slot.index for slot in kept.values()}

        gone = (before or set()) - set(self.places)  # who sits there leaves; a spare has no place of its own

        def leaves(slot: Slot) -> bool:
            return (slot.region, slot.ordinal) in gone

        rest = [slot for slot in self.slots if slot.index not in taken]
        free = [
            *(s for s in rest if not s.retired and s.occupied and not leaves(s)),
            *(s for s in rest if not s.retired and not s.incarnation),
            *(s for s in rest if not s.retired and s.incarnation and not s.occupied),
            *(s for s in rest if s.retired and not s.occupied),
        ]
        for place in self.places:
            if place not in kept:
                if not free:
                    free.append(Slot(len(self.slots)))
                    self.slots.append(free[0])
                kept[place] = free.pop(0)
        furthest = max((slot.step for slot in self.slots), default=0)
        now = {slot.index for slot in kept.values()}
        for slot in kept.values():
            if slot.incarnation and not slot.occupied and (slot.retired or leaves(slot)):
                slot.step = furthest
        for slot in self.slots:
            slot.retired = slot.index not in now
        self.nominal = kept
