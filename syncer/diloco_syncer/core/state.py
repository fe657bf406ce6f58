"""What the syncer knows of its job: the data that the decisions are made from.

``JobState`` holds the books, each of which changes only itself: ``members`` the slots, ``clock`` the job's time,
``leases`` the data, ``rounds`` the versions and open rounds, ``shards`` who has which fragment, ``norm_gate`` the
usual norms, ``ledger`` the tokens, ``lineage`` the store's past, ``scores`` the losses. It is private to the core: the
shell asks ``Core``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple
from typing import Any, NamedTuple

from diloco_protocol.vocabulary import JobPhase, SlotState
from diloco_protocol.wire.records import Receipt, SlotReceipt
from diloco_syncer.core import events as ev
from diloco_syncer.core.books import shares
from diloco_syncer.core.books.clock import JobClock
from diloco_syncer.core.books.leases import MAX_BLOCK, LeaseBook
from diloco_syncer.core.books.ledger import Ledger
from diloco_syncer.core.books.lineage import Lineage
from diloco_syncer.core.books.norm_gate import NormGate
from diloco_syncer.core.books.recent_refusals import RecentRefusals
from diloco_syncer.core.books.rounds import Progress, Round, RoundBook
from diloco_syncer.core.books.scores import Scores
from diloco_syncer.core.books.slots import MergedPush, Slot, SlotTable
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.shards import Shards

NAMED = 4  # slots in a message


class VersionBefore(NamedTuple):
    """Of a fragment the version before the newest; ``rows``: what the books said of the slots that the newest version
    changed. By it the books go back where the store has lost the newest."""

    version: int
    rows: Receipt


class JobState:
    """One job. ``rounds`` and ``ledger`` are None until version 0 is durable, ``leases`` until a learner
    has said how large the data set is."""

    def __init__(self, config: CoreConfig, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self.phase = JobPhase.WAITING
        self.phase_message = ""
        self.members = SlotTable(list(config.places), config.region_slots, config.open_places)
        self.clock = JobClock(len(config.places))
        self.leases: LeaseBook | None = None
        self.layout_digest = ""
        self.fragment_elements: tuple[int, ...] = ()
        self.shards = Shards(config.shards)
        self.rounds: RoundBook | None = None
        self.ledger: Ledger | None = None
        self.norm_gate = NormGate(config.norm_gate)
        self.epochs: list[tuple[int, list[int]]] = []  # (epoch, versions when it began)
        self.before: list[VersionBefore] = []  # by fragment
        self.merges = 0  # durable ones, of all fragments
        self.lineage = Lineage()
        self.taken_back: dict[tuple[int, int], int] = {}  # by slot and fragment: tokens of a version that was lost
        self.slots_with_unknown_tenure: set[int] = set()  # they had tenures that the restored state never saw
        self.refusals = RecentRefusals()
        self.scores = Scores()

    @property
    def versions(self) -> list[int]:
        """The newest durable version of every fragment; empty before version 0."""
        return self.rounds.versions if self.rounds else []

    @property
    def initialised(self) -> bool:
        return self.rounds is not None

    @property
    def is_ending(self) -> bool:
        """Whether the job is on its way to an end: nobody new is seated."""
        return self.phase in (JobPhase.DRAINING, JobPhase.EVALUATING)

    def slot(self, index: int) -> Slot | None:
        return self.members.slots[index] if 0 <= index < len(self.members.slots) else None

    def make_books(self, layout_digest: str, fragment_elements: tuple[int, ...]) -> None:
        """Make rounds and ledger, now that the layout is known."""
        fragments = len(fragment_elements)
        self.layout_digest = layout_digest
        self.fragment_elements = fragment_elements
        self.shards.deal(fragment_elements)
        most_rounds = self.config.most_rounds(fragment_elements)
        self.rounds = RoundBook(
            fragments, self.config.rules, self.config.mode, most_rounds=most_rounds, shards=self.shards
        )
        self.ledger = Ledger(fragments, len(self.members.slots))
        self.epochs = [(self.epoch, [0] * fragments)]
        self.before = [VersionBefore(0, ())] * fragments

    def announcement(self, fragment: int) -> ev.Announce:
        """The action that announces the fragment's version to all, with their own newest merged pushes."""
        assert self.ledger
        merged = {
            slot.holder.connection: slot.pushes.merged.get(fragment, MergedPush())
            for slot in self.members.slots
            if slot.holder.connection is not None
        }
        return ev.Announce(fragment, self.versions[fragment], merged, self.ledger.total_trained())

    def progress(self) -> list[Progress]:
        """The active learners, as the opening rule sees them."""
        learners = []
        for slot in self.members.slots if self.ledger else ():
            assert self.ledger
            report = self.ledger.books[slot.index].report
            holder = slot.holder
            connected = slot.state is SlotState.ACTIVE and holder.connection is not None
            if connected and holder.ready and report is not None:
                bases = tuple(f.base_version for f in report.fragments)
                learners.append(Progress(slot.index, slot.step, bases))
        return learners

    def batch_of(self, slot: Slot) -> int:
        """Sequences that a step of the slot's learner has, by the job."""
        return self.config.batches.get(slot.holder.region, 1)

    def advance_cursors(self, slot: Slot, cursors: Collection[tuple[int, int]]) -> None:
        """Data whose steps are in a version, or will be, are not leased again: so many as the slot's tenure can have
        read, beside the others. A block more is let pass, since loops may report a step late."""
        if self.leases is None:
            return
        works = [
            shares.Work(one.reported.sequences, one.step - one.reported.step_at_seat, self.batch_of(one))
            for one in self.members.slots
            if one is not slot
        ]
        steps = slot.step - slot.reported.step_at_seat
        most = shares.most_beside(works) * self.batch_of(slot) * steps + MAX_BLOCK
        read = self.leases.advance_cursors(slot.index, cursors, most - slot.reported.sequences)
        slot.reported.sequences += read

    def reached_amount(self, now: float) -> float:
        """What counts toward the job's stop (books/shares.py), once there is a ledger."""
        assert self.ledger
        return shares.reached_amount(
            self.config.stop[0],
            self.members.slots,
            self.ledger,
            self.clock.elapsed(now),
            batches=[self.batch_of(slot) for slot in self.members.slots],
        )

    def describe_overdue_round(self, opened: Round) -> str:
        """What is said of a round that waits for long: whose pushes it lacks, and why where that is known. Holds
        nothing that changes by itself."""
        lacking = sorted(opened.pulled - opened.slots())
        words = [
            f"{self.members.slots[index].learner} ({opened.refused.get(index, 'no push came')})"
            for index in lacking[:NAMED]
        ]
        words += [f"{len(lacking) - NAMED} more"] if len(lacking) > NAMED else []
        return f"fragment {opened.fragment} waits for pushes for long: {', '.join(words) or 'too few slots were asked'}"

    # ------------------------------------------------------------- durable

    def to_json(self, now: float, wall: float = 0.0) -> dict[str, Any]:
        """The durable document (JSON). Accepted pushes that are not offers are not in it: their learners still
        have the work."""
        return {
            "members": self.members.to_json(),
            "phase": {"name": self.phase.value, "message": self.phase_message},
            "clock": self.clock.to_json(now, wall),
            "leases": self.leases.to_json() if self.leases else None,
            "layout_digest": self.layout_digest,
            "fragment_elements": list(self.fragment_elements),
            "rounds": self.rounds.to_json() if self.rounds else None,
            "ledger": self.ledger.to_json() if self.ledger else None,
            "norm_gate": self.norm_gate.to_json(),
            "epochs": self.epochs,
            "lineage": self.lineage.to_json(),
            "before": [[version, [list(astuple(row)) for row in rows]] for version, rows in self.before],
            "merges": self.merges,
            "scores": self.scores.to_json(),
        }

    def load(self, state: dict[str, Any], now: float, wall: float) -> None:
        self.members.load(state["members"], now)
        if state["rounds"] is not None:
            self.make_books(state["layout_digest"], tuple(state["fragment_elements"]))
            assert self.rounds
            self.rounds.load(state["rounds"])
            self.ledger = Ledger.from_json(self.rounds.fragments, state["ledger"])
            self.ledger.add_slots(len(self.members.slots))
            self.norm_gate.load(state["norm_gate"])
            self.epochs = [(epoch, list(versions)) for epoch, versions in state["epochs"]]
            self.before = [VersionBefore(v, tuple(SlotReceipt(*row) for row in rows)) for v, rows in state["before"]]
        if state["leases"] is not None:
            self.leases = LeaseBook.from_json(self.config.seed, state["leases"])
        self.clock.slots = len(self.members.current)
        self.clock.load(state["clock"], now, wall)
        self.phase = JobPhase(state["phase"]["name"])
        self.phase_message = state["phase"]["message"]
        self.merges = state["merges"]
        self.lineage.load(state["lineage"])
        self.scores.load(state["scores"])
