"""Deterministic mode (``sync.deterministic``): two runs with one seed give the same bits (docs/decisions/004).

Theory of operation
-------------------
Normally much depends on who comes first: which slot a process gets, what data it trains, which fragment is due,
whose push a merge has. In deterministic mode a rule of the job alone decides each of these:

* Slots are places in job order. A process gets the slot of its place or none: nobody stands by.
* Slot 0 builds version 0.
* The n-th lease of slot m is the block n·M + m of the endless order, M being the number of slots.
* Nobody is pulled: learners push by themselves at steps that their schedule names. The first push for version v + 1
  opens round v + 1, which waits for all M slots, without a grace window; the last ones come while the job drains.
* The scale of a push is judged beside the others of its round, once all are there. Where it alone is out of scale the
  job fails, by its learner's name: no merge can do without it, and who came first must not matter.
* Every slot stops by itself, at ``stop.steps`` or its share of ``stop.tokens``.

Slots at different steps would be due for different fragments, and wait for each other for ever. So whoever begins a
tenure while the job waits begins at the greatest step of all slots.

``Mode`` holds every question of the core whose answer differs, with the usual answers; ``DeterministicMode`` has
the others. Nothing else in the syncer asks which mode it is.

Example. M = 2, H = 4, P = 1. Both learners push fragment 0 after step 4, as round 1. Slot 1's push opens the round;
slot 0's completes it, and both are merged in slot order. Which came first shows nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set

from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.wire.records import Join, Lease, PushHeader
from diloco_syncer.core.books.leases import LeaseBook
from diloco_syncer.core.books.ledger import Ledger
from diloco_syncer.core.books.shares import Stop
from diloco_syncer.core.books.slots import Slot, SlotTable


class Mode:
    """What the core asks of the job's mode. This class has the usual answers."""

    is_scheduled = False  # learners push by themselves, and nobody is pulled
    has_grace = True  # a round that has its quorum waits for others only so long
    merges_while_draining = False  # a round is merged when it is full; else once, when all have left
    judges_together = False  # the scale of a round's pushes is judged when it has them all; of offers each alone
    begins_together = False  # whoever begins a tenure while the job waits, begins at the greatest step

    def fixed_fields(self, job: DiLoCoJob) -> dict[str, object]:
        """What may not change in a job that has begun, by its name for people."""
        return {"sync.deterministic": False}

    def choose_slot(self, members: SlotTable, join: Join) -> Slot | None:
        """The slot that a process without one gets; None: there is none for it now."""
        return members.by_place(join.region, join.ordinal) or members.free_slot_for(join)

    def standby_objection(self, join: Join) -> str:
        """Why a process that got no slot is refused; empty: it stands by."""
        return ""

    def builds_version_0(self, slot: Slot) -> bool:
        """Whether this slot's process may build version 0 of a new job."""
        return True

    def grant_lease(self, leases: LeaseBook, slot: int, lost: Collection[int]) -> Lease:
        """One more block for the slot. ``lost``: slots without a process."""
        return leases.grant_lease(slot, lost)

    def number_round(self, version: int, next_round: int) -> int:
        """The number of a round that makes ``version`` + 1. ``next_round``: one that no round has had."""
        return next_round

    def opens_round(self, header: PushHeader, version: int) -> bool:
        """Whether this push opens its fragment's round, where none is open. ``version``: the fragment's."""
        return False

    def awaited_slots(self, pulled: Set[int], reachable: Set[int]) -> Set[int]:
        """The slots that a round waits for. ``reachable``: those that can still push."""
        return pulled & reachable

    def is_stop_reached(self, stop: Stop, slots: Sequence[Slot], ledger: Ledger, count: Callable[[], float]) -> bool:
        """Whether the job's stop is reached. ``count``: finds what counts toward it (books/shares.py)."""
        return count() >= stop[1]

    def has_stopped(self, stop: Stop, slot: Slot, ledger: Ledger | None) -> bool:
        """Whether the slot has made its last step: its process has left, and one that takes it leaves at once."""
        return False


class DeterministicMode(Mode):
    """Deterministic mode. ``slots``: M, which is fixed."""

    is_scheduled = True
    has_grace = False
    merges_while_draining = True
    begins_together = True

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.judges_together = slots > 1

    def fixed_fields(self, job: DiLoCoJob) -> dict[str, object]:
        regions = [[region.name, region.learners] for region in job.spec.regions]
        return {"sync.deterministic": True, "regions (with sync.deterministic)": regions}

    def choose_slot(self, members: SlotTable, join: Join) -> Slot | None:
        return members.nominal.get((join.region, join.ordinal))

    def standby_objection(self, join: Join) -> str:
        return f"deterministic mode has no slot for {join.region}-{join.ordinal}"

    def builds_version_0(self, slot: Slot) -> bool:
        return slot.index == 0

    def grant_lease(self, leases: LeaseBook, slot: int, lost: Collection[int]) -> Lease:
        own = next((held for held in leases.returned if held.slot == slot), None)
        if own is not None:  # a newcomer first goes on with what its slot returned
            leases.returned.remove(own)
            return leases.grant(own)
        leases.given.extend([0] * (slot + 1 - len(leases.given)))
        leases.given[slot] += 1
        return leases.grant_block(slot, (leases.given[slot] - 1) * leases.slots + slot)

    def number_round(self, version: int, next_round: int) -> int:
        return version + 1

    def opens_round(self, header: PushHeader, version: int) -> bool:
        return header.round == version + 1 == header.base_version + 1

    def awaited_slots(self, pulled: Set[int], reachable: Set[int]) -> Set[int]:
        return set(range(self._slots))

    def is_stop_reached(self, stop: Stop, slots: Sequence[Slot], ledger: Ledger, count: Callable[[], float]) -> bool:
        return all(self.has_stopped(stop, slot, ledger) for slot in slots)

    def has_stopped(self, stop: Stop, slot: Slot, ledger: Ledger | None) -> bool:
        if stop[0] == "steps":
            return slot.step >= stop[1]
        return ledger is not None and ledger.trained(slot.index) >= -(-int(stop[1]) // self._slots)


def make_mode(job: DiLoCoJob) -> Mode:
    return DeterministicMode(job.spec.slots) if job.spec.sync.deterministic else Mode()
