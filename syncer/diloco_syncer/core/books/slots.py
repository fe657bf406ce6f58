"""Slots, incarnations, and who holds which slot.

Theory of operation. A slot outlives its processes. Whoever is given a slot gets a new *incarnation* number from one
rising counter. Of two incarnations the higher is the newer, and what carries an older one is refused as fenced. A
*tenure* is one process's unbroken use of a slot; it has several incarnations if the process comes back. A process
that joins gets, in this order:

1. the slot that it still has, if it names its last incarnation (a program may be started again under the process id
   of the one before): its tenure goes on;
2. the slot that a process of its place (region and ordinal) has held. A place runs one process, so the one that was
   there before is superseded at once;
3. the slot that the job assigns to its place, else the lowest slot of its region that nobody holds, else the lowest;
   but the processes of a region never hold more slots than the job gives it learners and spares;
4. in a region with open places (regions[].maxLearners), a slot for itself;
5. none: it stands by, and takes the first slot that is lost.

*Pods.* A place belongs to the newest pod that joined from it. A pod that was given up with its node may come back
after its successor has joined; it is refused. So is a process without a pod whose place a newer process has.

*Scaling.* A job may go on with other places. A place keeps the slot that its process has. A new place gets a free
slot, or a new one. A slot without a place is *retired*: its process stays until it leaves or is lost, nobody is
seated there any more, and its history stays in the ledger. A retired slot that a later scaling gives to a place
begins at the job's greatest step, as a new one does.

*Open places.* A region may have more learners than places (docs/decisions/067). It has as many slots as it has places
or learners, whichever are more. So of the slots that its processes do not hold, those beyond its places are retired;
where it has more learners than places, every place has a slot that is held, whoever holds it. Nobody is missed who is
not there beyond the places: no region is lost by it, and no slot is kept for it.

*States.* ``active``: its process is connected and has reported. ``suspect``: its stream broke. ``lost``: nothing was
heard of it for the heartbeat timeout, or whoever knows said that its process has ended. Heard are a Join and reports,
which are its heartbeats; a push is not. ``draining``: its process was
told to leave. ``drained``: it left, with everything offered. A *region* is lost when somebody of it held a slot and
nobody of it was there for failurePolicy.regionLostSeconds.

Example. The places a-0 and a-1 have the slots 0 and 1. Process p of a-1 holds slot 1 as incarnation 2. Its pod is
deleted, and process q joins from a-1: q gets slot 1 as incarnation 3, in a new tenure. A push that p sent as
incarnation 2 and that arrives now is refused as fenced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.vocabulary import HELD_STATES, SlotState
from diloco_protocol.wire.records import Join, RanksReport
from diloco_syncer.core.books.pace import Pace

PODS_KEPT = 8  # of one place; an older one has long been gone
PLACES_KEPT = 16_384
TURNS_AHEAD = 4

# Of a slot's fields, those that are saved as they are.
_FIGURES = (
    *("retired", "incarnations", "tenure", "step", "uncounted_steps", "unmerged_parts"),
    *("first_loss", "merged_pushes"),
)


@dataclass(frozen=True, slots=True)
class MergedPush:
    """A learner's newest merged push of one fragment: (sequence, version); (0, 0): none."""

    sequence: int = 0
    version: int = 0


@dataclass(slots=True)
class Holder:
    """The process that has the slot, or had it last. The record is a new one each time the slot is given to a process,
    also to the one that had it: what is said of a process here is said of one incarnation."""

    process: str = ""
    """Its id. Empty: nobody ever had the slot, or it was released."""
    region: str = ""
    """The region of its place."""
    ordinal: int = 0
    """Its number in its region."""
    incarnation: int = 0
    """The number under which it has the slot. What carries a lower one is refused. 0: nobody ever had the slot."""
    connection: int | None = None
    """Its session. None: it has none."""
    heard_at: float = 0.0
    """When it joined or last reported, in the core's monotonic seconds."""
    gone: bool = False
    """Whether its end is known, from a party that watched it."""
    ready: bool = False
    """Whether it has reported since it joined, and thus has every fragment. Only then does it count for a quorum."""
    stepped: bool = False
    """Whether it has finished a step since it joined. With the next, this dates a fault's recovery."""
    merged_since: bool = False
    """Whether a push that it made since it joined is merged."""

    @property
    def place(self) -> tuple[str, int]:
        return self.region, self.ordinal


@dataclass(slots=True)
class LastReport:
    """What the open tenure's reports say. The record is a new one with each tenure."""

    step_at_seat: int = 0
    """The slot's step when the tenure began: the tenure has trained the steps from there to ``Slot.step``."""
    advanced: bool = False
    """Whether the tenure has trained a step."""
    sequences: int = 0
    """How many sequences of its leases it has read."""
    batches: int = 0
    """How many batches the process has given to its loop."""
    paused: bool = False
    """Whether it trains no further until it hears of a merge."""
    diverged: bool = False
    """Whether its last loss is not finite."""
    young_optimizer: bool = False
    """Whether its optimizer's state began fresh within the job and is not beyond its warm-up."""
    fresh_optimizer: str = ""
    """Why its optimizer began fresh in the tenure; empty: it did not."""
    ranks: RanksReport | None = None
    """Of a learner of several."""


@dataclass(slots=True)
class PushHistory:
    """The open tenure's pushes, by fragment. The record is a new one with each tenure."""

    accepted_sequence: dict[int, int] = field(default_factory=dict)
    """The number of the newest accepted push: a push with this number or a lower one is a repeated one."""
    merged: dict[int, MergedPush] = field(default_factory=dict)
    """The newest merged push, which the slot's process is told of with each announcement. Its number is at most that of
    ``accepted_sequence``."""
    late_rounds: int = 0
    """In how many rounds, one after the other, its push came after the merge."""
    starved: bool = False
    """Whether these were so many that it is reported, until a push is in time again."""
    pace: Pace = field(default_factory=Pace)
    """How long its steps take, as the syncer sees it."""

    def mark_accepted(self, fragment: int, sequence: int) -> None:
        """A push is accepted, or was once: no push up to its number is taken again."""
        self.accepted_sequence[fragment] = max(sequence, self.accepted_sequence.get(fragment, 0))

    def unmark_accepted(self, fragment: int) -> None:
        """The newest accepted push is lost: only those up to the newest merged one are not taken again."""
        self.accepted_sequence[fragment] = self.merged.get(fragment, MergedPush()).sequence

    def mark_merged(self, fragment: int, push: MergedPush) -> None:
        """A push is merged, which may have been accepted in an earlier life of the syncer."""
        self.merged[fragment] = push
        self.mark_accepted(fragment, push.sequence)


@dataclass(slots=True)
class Told:
    """What was told of the slot, so that it is told once. The record stays for as long as the slot."""

    problem: str = ""
    """Why its process makes no step. Empty: it makes some, or it cannot be expected to yet."""
    stepless_since: float | None = None
    """Since when its process could make a first step and has not. None: it has, or cannot yet."""
    starved_at: float = -math.inf
    """When an event last said that it is starved."""


@dataclass(slots=True)
class Slot:
    """One learner's place. What stands here outlives processes and tenures; the four records below say for how long
    theirs holds."""

    index: int
    """Its number in the job, which never changes."""
    state: SlotState = SlotState.EMPTY
    """Whether somebody has it; see the head of this file."""
    retired: bool = False
    """Whether the job has no place for it now. Its process stays until it leaves, and nobody else gets it."""
    incarnations: int = 0
    """How often it was given to a process."""
    tenure: int = 0
    """The incarnation under which the open tenure began. 0: unknown."""
    step: int = 0
    """The furthest step of all its processes."""
    uncounted_steps: int = 0
    """How many of these do not count toward the job's stop (``advance``)."""
    unmerged_parts: int = 0
    """How many of those that count are in no merge, summed over the fragments."""
    loss: float | None = None
    """The last finite loss. None: there is none yet, or the last one was not finite."""
    first_loss: float | None = None
    """The first finite loss, by whichever process."""
    step_seconds: float = 0.0
    """How long a step takes, as last reported. It is shown, and decides nothing (books/pace.py)."""
    merged_pushes: int = 0
    """How many of its pushes were merged."""
    merged_last_step: dict[int, int] = field(default_factory=dict)
    """By fragment, the last step that is merged: a push of that step or an earlier one is not taken."""
    holder: Holder = field(default_factory=Holder)
    reported: LastReport = field(default_factory=LastReport)
    pushes: PushHistory = field(default_factory=PushHistory)
    told: Told = field(default_factory=Told)

    @property
    def learner(self) -> str:
        """The name of the learner that has the slot, or had it last, as people know it: REGION-ORDINAL."""
        holder = self.holder
        return f"{holder.region}-{holder.ordinal}" if holder.region else f"slot {self.index}"

    @property
    def occupied(self) -> bool:
        return self.state in HELD_STATES

    @property
    def counted_step(self) -> int:
        """The step that counts toward the job's stop: it is only so far beyond what is merged."""
        return self.step - self.uncounted_steps

    def advance(self, step: int, fragments: int, most_alone: int) -> None:
        """Its process says that it has made this step. Of steps that are not merged so many count that an honest
        learner is never ahead by more: ``TURNS_AHEAD`` times those that it makes alone."""
        parts = self.unmerged_parts + fragments * max(0, step - self.step)
        beyond = -(-max(0, parts - fragments * TURNS_AHEAD * most_alone) // fragments)
        self.unmerged_parts = parts - fragments * beyond
        self.uncounted_steps += beyond
        self.step = max(self.step, step)

    def mark_merged(self, fragment: int, last_step: int, most_alone: int) -> None:
        """Its steps up to this one are merged in the fragment. One push makes good for those that a learner makes
        alone, and for no more."""
        before = self.merged_last_step.get(fragment, 0)
        self.merged_last_step[fragment] = max(last_step, before)
        self.unmerged_parts = max(0, self.unmerged_parts - min(most_alone, max(0, last_step - before)))

    def begin_at(self, counted_step: int) -> None:
        """It begins where the job is: at the greatest step that counts, or its own."""
        self.step = max(self.step, counted_step + self.uncounted_steps)

    def begin_tenure(self) -> None:
        """Another process begins at the slot's step: nothing is reported or pushed in its tenure yet."""
        self.reported, self.pushes = LastReport(step_at_seat=self.step), PushHistory()

    def to_json(self) -> dict[str, Any]:
        holder = self.holder
        return {
            **{name: getattr(self, name) for name in _FIGURES},
            "region": holder.region,
            "ordinal": holder.ordinal,
            "process": holder.process,
            "incarnation": holder.incarnation,
            "step_at_seat": self.reported.step_at_seat,
            "sequences": self.reported.sequences,
            "state": self.state.value,
            "merged": {str(k): [v.sequence, v.version] for k, v in self.pushes.merged.items()},
            "merged_last_step": {str(k): v for k, v in self.merged_last_step.items()},
        }

    @classmethod
    def from_json(cls, index: int, row: Mapping[str, Any], now: float) -> Slot:
        """Go on from a saved slot: a process that was connected is suspect."""
        state = SlotState(row["state"])
        merged = {int(k): MergedPush(*v) for k, v in row["merged"].items()}
        return cls(
            index,
            state=SlotState.SUSPECT if state in HELD_STATES else state,
            **{name: row[name] for name in _FIGURES},
            merged_last_step={int(k): v for k, v in row["merged_last_step"].items()},
            holder=Holder(row["process"], row["region"], row["ordinal"], row["incarnation"], heard_at=now),
            reported=LastReport(step_at_seat=row["step_at_seat"], sequences=row["sequences"]),
            # Pushes that were accepted and not merged are gone; spooled offers are restored after this.
            pushes=PushHistory({fragment: push.sequence for fragment, push in merged.items()}, merged),
        )


ABSENCES = 1000  # that a job remembers


@dataclass(slots=True)
class Absence:
    """A time in which a region was lost, in the job's elapsed seconds; ``until`` None: it still is."""

    region: str
    since: float
    until: float | None


class SlotTable:
    """The slots of a job. ``places``: (region, ordinal) of each slot, in job order. ``region_slots``: how many slots
    the processes of a region may hold at once; empty: as many as there are. ``open_places``: of the regions that have
    some, how many learners they may have beyond their places."""

    def __init__(
        self,
        places: list[tuple[str, int]],
        region_slots: Mapping[str, int] | None = None,
        open_places: Mapping[str, int] | None = None,
    ) -> None:
        self.places = places
        self.region_slots = region_slots or {}
        self.open_places = open_places or {}
        self.slots = [Slot(index) for index in range(len(places))]
        self.nominal = dict(zip(places, self.slots, strict=True))  # place -> the slot that it keeps
        self.next_incarnation = 1
        self.standby: dict[int, Join] = {}  # connection -> its join, in order of arrival
        self.evaluators: set[int] = set()
        # (region, ordinal) -> the pods that joined from there, the newest last
        self.pods: dict[tuple[str, int], list[str]] = {}
        self.seen_regions: set[str] = set()  # those of which a process held a slot
        # Of these, region -> since when it has no process; -inf: it was lost already in an earlier life.
        self.silent_since: dict[str, float] = {}
        self.lost_regions: list[str] = []  # of these, those that count as lost
        self.absences: list[Absence] = []  # the newest ABSENCES, in their order

    @property
    def current(self) -> list[Slot]:
        """The slots that the job has now, without the retired ones."""
        return [slot for slot in self.slots if not slot.retired]

    def is_alone(self, index: int) -> bool:
        """Whether the job has this slot alone, and no other one has had a part in the model."""
        return all(slot.index == index or (slot.retired and not slot.merged_pushes) for slot in self.slots)

    @property
    def furthest(self) -> int:
        """The greatest step of a slot that counts."""
        return max((slot.counted_step for slot in self.slots), default=0)

    def add_retired_slots(self, slots: int) -> None:
        """Have at least so many slots; new ones are retired and keep the history of those that a lost state had."""
        while len(self.slots) < slots:
            self.slots.append(Slot(len(self.slots), retired=True))

    def by_connection(self, connection: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.holder.connection == connection), None)

    def by_place(self, region: str, ordinal: int) -> Slot | None:
        return next((s for s in self.current if s.holder.incarnation and s.holder.place == (region, ordinal)), None)

    def register_pod(self, join: Join) -> bool:
        """Make the process's pod its place's newest; False: the place belongs to a newer process."""
        place = (join.region, join.ordinal)
        holder = self.by_place(*place)
        if (
            holder is not None
            and holder.occupied
            and holder.holder.process != join.process
            and 0 < join.previous_incarnation < holder.holder.incarnation
        ):
            return False
        if not join.pod:
            return True
        known = self.pods.setdefault(place, [])
        if join.pod in known[:-1]:
            return False
        if join.pod not in known:
            known.append(join.pod)
            del known[:-PODS_KEPT]
            while len(self.pods) > PLACES_KEPT:
                self.pods.pop(next(iter(self.pods)))
        return True

    def slot_of_process(self, join: Join) -> Slot | None:
        """The slot that this very process had last, unless another process took it or it was released."""
        for slot in self.slots if join.previous_incarnation else ():
            # Process ids are no secret: whoever comes from another place is not the process that had the slot.
            own = slot.holder.process == join.process and slot.holder.place == (join.region, join.ordinal)
            if own and slot.state not in (SlotState.DRAINED, SlotState.EMPTY):
                return slot
        return None

    def free_slot_for(self, join: Join) -> Slot | None:
        """A slot that no process holds: the nominal one of the place, else the lowest of its region, else the lowest.
        None: there is none, or the region's processes hold as many as they may."""
        if self.region_slots and self.count_held(join.region) >= self.region_slots.get(join.region, 0):
            return None
        free = [slot for slot in self.current if not slot.occupied]
        nominal = self.nominal.get((join.region, join.ordinal))
        if nominal is not None and not nominal.occupied:
            return nominal
        own = {slot.index for (region, _), slot in self.nominal.items() if region == join.region}
        if join.region in self.open_places:  # who comes beyond its places has one of its own, and takes nobody's
            free = [slot for slot in free if slot.index in own]
        return min(free, key=lambda slot: (slot.index not in own, slot.index), default=None)

    def count_held(self, region: str) -> int:
        """How many slots the region's processes hold."""
        return sum(slot.occupied and slot.holder.region == region for slot in self.slots)

    def open_slot_for(self, join: Join) -> Slot | None:
        """A slot for a process beyond its region's places, at the job's greatest step: one that was left, else a new
        one, else one that was lost. None: the region has as many learners as it may have."""
        places = sum(region == join.region for region, _ in self.places)
        if self.count_held(join.region) >= places + self.open_places.get(join.region, 0):
            return None
        free = [slot for slot in self.slots if slot.retired and not slot.occupied]
        free.sort(key=lambda slot: (slot.state is SlotState.LOST, slot.index))
        most = len(self.places) + sum(self.open_places.values())
        if not free or (free[0].state is SlotState.LOST and len(self.slots) < most):
            free = [Slot(len(self.slots), retired=True)]
            self.slots += free
        free[0].begin_at(self.furthest)
        return free[0]

    def balance_region(self, region: str) -> list[Slot]:
        """Have as many slots in a region with open places as it has places or learners, whichever are more; returns
        those that are retired now. To be called after whatever takes or leaves a slot of it."""
        if region not in self.open_places:
            return []
        assigned = {slot.index for slot in self.nominal.values()}
        beyond = [slot for slot in self.slots if slot.index not in assigned and slot.holder.region == region]
        held = [slot for slot in beyond if slot.occupied]
        for place in self.places if held else ():
            if place[0] == region and held and not self.nominal[place].occupied:
                beyond.append(self.nominal[place])
                self.nominal[place] = held.pop(0)
                self.nominal[place].retired = False
                beyond.remove(self.nominal[place])
        for slot in held[: self.open_places[region]]:
            slot.retired = False
        retired = [slot for slot in beyond if not slot.occupied and not slot.retired]
        for slot in retired:
            slot.retired = True
        return retired

    def region_of(self, slot: Slot) -> str:
        """The region to which the slot belongs: that of its place, else that of its process."""
        return next((region for (region, _), other in self.nominal.items() if other is slot), slot.holder.region)

    def is_known_region(self, region: str) -> bool:
        """Whether the job has this region."""
        return not self.region_slots or region in self.region_slots

    def give_slot(self, slot: Slot, join: Join, now: float) -> int:
        """Give the slot to the process under a new incarnation, which is returned."""
        incarnation = self.next_incarnation
        self.next_incarnation += 1
        slot.incarnations += 1
        slot.state = SlotState.ACTIVE
        slot.holder = Holder(
            join.process, join.region, join.ordinal, incarnation, connection=join.connection, heard_at=now
        )
        self.seen_regions.add(join.region)
        return incarnation

    def reachable(self) -> set[int]:
        """Slots whose process can still push."""
        return {s.index for s in self.slots if s.occupied and s.holder.connection is not None and s.holder.ready}

    def update_lost_regions(self, now: float, patience: float) -> None:
        """Update ``lost_regions``: those that once had a slot, and for ``patience`` seconds neither hold one nor
        have a process that stands by."""
        present = {slot.holder.region for slot in self.slots if slot.occupied}
        present |= {join.region for join in self.standby.values()}
        regions = dict.fromkeys(region for region, _ in self.places)
        silent = [region for region in regions if region in self.seen_regions - present]
        self.silent_since = {region: self.silent_since.get(region, now) for region in silent}
        self.lost_regions = [region for region, since in self.silent_since.items() if now - since >= patience]

    def record_absences(self, now: float, elapsed: float) -> tuple[list[str], list[str]]:
        """Write down since when regions are lost and which are back; returns the regions of which either is new.
        ``elapsed``: the job's seconds at ``now``."""
        away = {absence.region: absence for absence in self.absences if absence.until is None}
        gone = [region for region in self.lost_regions if region not in away]
        back = [region for region in away if region not in self.lost_regions]
        for region in gone:
            quiet = now - self.silent_since[region]
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
                "seen": sorted(self.seen_regions),
                "lost": self.lost_regions,
                "absences": [[a.region, a.since, a.until] for a in self.absences],
            },
            "next_incarnation": self.next_incarnation,
            "places": [[region, ordinal] for region, ordinal in self.places],
            "pods": [[region, ordinal, pods] for (region, ordinal), pods in self.pods.items()],
            "slots": [slot.to_json() for slot in self.slots],
        }

    def load(self, row: dict[str, Any], now: float) -> None:
        """Go on from a saved table: processes that were connected are suspect, and have a heartbeat timeout to come
        back."""
        self.next_incarnation = row["next_incarnation"]
        self.pods = {(region, ordinal): list(pods) for region, ordinal, pods in row["pods"]}
        self.slots = [Slot.from_json(index, saved, now) for index, saved in enumerate(row["slots"])]
        regions = row["regions"]
        self.seen_regions = set(regions["seen"])
        self.silent_since = dict.fromkeys(regions["lost"], -math.inf)
        self.absences = [Absence(*saved) for saved in regions["absences"]]
        self._arrange({(region, ordinal) for region, ordinal in row["places"]})

    def _arrange(self, before: set[tuple[str, int]]) -> None:
        """Decide which slot each place keeps, and retire the others. ``before``: the places until now."""
        kept: dict[tuple[str, int], Slot] = {}
        # A process that holds a slot now goes before one that held one once, the newest before the older.
        for slot in sorted(self.slots, key=lambda s: (s.retired, not s.occupied, -s.holder.incarnation)):
            if slot.holder.incarnation and slot.holder.place in self.places:
                kept.setdefault(slot.holder.place, slot)
        taken = {slot.index for slot in kept.values()}

        removed = before - set(self.places)  # their processes leave; a spare has no place of its own

        def leaves(slot: Slot) -> bool:
            return slot.holder.place in removed

        rest = [slot for slot in self.slots if slot.index not in taken]
        free = [
            *(s for s in rest if not s.retired and s.occupied and not leaves(s)),
            *(s for s in rest if not s.retired and not s.holder.incarnation),
            *(s for s in rest if not s.retired and s.holder.incarnation and not s.occupied),
            *(s for s in rest if s.retired and not s.occupied),
        ]
        for place in self.places:
            if place not in kept:
                if not free:
                    free.append(Slot(len(self.slots)))
                    self.slots.append(free[0])
                kept[place] = free.pop(0)
        furthest = self.furthest
        now = {slot.index for slot in kept.values()}
        for slot in kept.values():
            if slot.holder.incarnation and not slot.occupied and (slot.retired or leaves(slot)):
                slot.begin_at(furthest)
        for slot in self.slots:
            slot.retired = slot.index not in now
        self.nominal = kept
        for region in self.open_places:
            self.balance_region(region)
