"""What the syncer knows of its job: the data that the decisions are made from.

One object, read and changed by ``reception`` (who is a member), ``merging`` (what
is merged) and ``phases`` (where the job stands), all driven by ``core``. Actions
are appended to ``out`` in the order in which they are to be carried out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from diloco_protocol.vocabulary import EventKind, JobPhase, SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.clock import JobClock
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.events import Action, PushHeader
from diloco_syncer.core.members.leases import LeaseBook
from diloco_syncer.core.members.recent_refusals import RecentRefusals
from diloco_syncer.core.members.slots import Slot, SlotTable
from diloco_syncer.core.merging.ledger import Ledger, PushId
from diloco_syncer.core.merging.push_checks import NormGate
from diloco_syncer.core.merging.rounds import Accepted, Progress, RoundBook
from diloco_syncer.core.recovery.lineage import Lineage


class JobState:
    """``rounds`` and ``ledger`` are None until version 0 is durable."""

    def __init__(self, config: CoreConfig, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self.phase = JobPhase.WAITING
        self.phase_message = ""
        self.members = SlotTable(list(config.places))
        self.clock = JobClock(len(config.places))
        self.leases: LeaseBook | None = None
        self.layout_digest = ""
        self.fragment_elements: tuple[int, ...] = ()
        self.rounds: RoundBook | None = None
        self.ledger: Ledger | None = None
        self.gate = NormGate(config.norm_gate, 0)
        self.offers: list[list[Accepted]] = []  # per fragment, waiting for a round
        self.epochs: list[tuple[int, list[int]]] = []  # (epoch, versions when it began)
        self.merges = 0
        self.eval_loss: list[tuple[int, float]] = []
        self.scored_merges = -1  # merges in the model of its newest row
        self.initial_loss: float | None = None
        self.final_loss: float | None = None
        self.initialiser: int | None = None  # the connection that uploads version 0
        self.invited = ("", 0.0)  # the process that was told to join again for it, and how long that counts
        self.initial_failures: Counter[str] = Counter()  # uploads that did not come through, by process
        self.history = Lineage()
        self.forgotten: set[int] = set()  # slots with tenures that the restored state has not heard of
        self.refusals = RecentRefusals()
        self.out: list[Action] = []

    @property
    def versions(self) -> list[int]:
        return self.rounds.versions if self.rounds else []

    @property
    def initialised(self) -> bool:
        return self.rounds is not None

    @property
    def closing(self) -> bool:
        """On the way to an end: nobody new is seated."""
        return self.phase in (JobPhase.DRAINING, JobPhase.EVALUATING)

    def slot(self, index: int) -> Slot | None:
        return self.members.slots[index] if 0 <= index < len(self.members.slots) else None

    def note(self, kind: str, slot: Slot | None, message: str, **details: object) -> None:
        index, incarnation = (-1, 0) if slot is None else (slot.index, slot.incarnation)
        self.out.append(ev.RecordEvent(kind, index, incarnation, message, dict(details)))

    def make_books(self, layout_digest: str, fragment_elements: tuple[int, ...]) -> None:
        """The layout is known: books for its fragments."""
        fragments = len(fragment_elements)
        self.layout_digest = layout_digest
        self.fragment_elements = fragment_elements
        self.rounds = RoundBook(fragments, self.config.rules)
        self.ledger = Ledger(fragments, len(self.members.slots))
        self.gate = NormGate(self.config.norm_gate, fragments)
        self.offers = [[] for _ in range(fragments)]
        self.epochs = [(self.epoch, [0] * fragments)]

    def announce(self, fragment: int) -> ev.Announce:
        """Tell everybody of the fragment's version, with their own newest merged pushes."""
        assert self.ledger
        merged = {
            slot.connection: slot.merged.get(fragment, ev.MergedPush())
            for slot in self.members.slots
            if slot.connection is not None
        }
        return ev.Announce(fragment, self.versions[fragment], merged, self.ledger.total_trained())

    def accepted_headers(self) -> list[PushHeader]:
        """Pushes and offers that were accepted and are not merged."""
        waiting = [offer.header for offers in self.offers for offer in offers]
        opened = self.rounds.open.values() if self.rounds else ()
        return waiting + [push.header for r in opened for push in r.pushes]

    def held_offers(self) -> set[PushId]:
        """Ids of offers that wait for a merge: their spooled bytes are still needed."""
        return {header.id for header in self.accepted_headers() if header.round == 0}

    def progress(self) -> list[Progress]:
        """The active learners, as the opening rule sees them."""
        learners = []
        for slot in self.members.slots if self.ledger else ():
            assert self.ledger
            report = self.ledger.books[slot.index].report
            if slot.state is SlotState.ACTIVE and slot.connection is not None and slot.ready and report is not None:
                bases = tuple(f.base_version for f in report.fragments)
                learners.append(Progress(slot.index, slot.step, bases))
        return learners

    def tell(self, slot: Slot, report: ev.ReportCounts, now: float) -> bool:
        """Take a report of the slot; False: an older one than known, or of another layout."""
        if self.ledger is None:
            return False
        before, computed = self.ledger.trained(slot.index), self.ledger.compute_seconds(slot.index)
        if not self.ledger.tell(slot.index, report):
            return False
        self.ledger.roll_back(slot.index, self.epoch)
        moved = report.slot_step > slot.step or not slot.advanced
        slot.step = max(slot.step, report.slot_step)
        slot.step_seconds = report.step_seconds
        slot.paused = report.paused
        if report.loss == report.loss:
            slot.loss = report.loss
        if self.leases:
            self.leases.move(slot.index, report.cursors)
        slot.advanced = slot.advanced or bool(report.trained_steps)
        if report.trained_steps and moved and not slot.stepped:
            slot.stepped = True
            self.note(EventKind.FIRST_STEP, slot, f"slot {slot.index} made its first step, {slot.step}")
        trained = self.ledger.trained(slot.index)
        if trained > before:
            self.clock.start(now)
            computed = self.ledger.compute_seconds(slot.index) - computed
            self.clock.advance(now, slot.step_seconds, computed, self.ledger.total_trained())
        return True

    # ------------------------------------------------------------- durable

    def to_json(self, now: float, wall: float = 0.0) -> dict[str, Any]:
        """The durable document (JSON). Accepted pushes that are not offers are not
        in it: their learners still have the work."""
        return {
            "members": self.members.to_json(),
            "phase": {"name": self.phase.value, "message": self.phase_message},
            "clock": self.clock.to_json(now, wall),
            "leases": self.leases.to_json() if self.leases else None,
            "layout_digest": self.layout_digest,
            "fragment_elements": list(self.fragment_elements),
            "rounds": self.rounds.to_json() if self.rounds else None,
            "ledger": self.ledger.to_json() if self.ledger else None,
            "epochs": self.epochs,
            "history": self.history.to_json(),
            "merges": self.merges,
            "eval_loss": self.eval_loss,
            "scored_merges": self.scored_merges,
            "initial_loss": self.initial_loss,
            "final_loss": self.final_loss,
        }

    def load(self, state: dict[str, Any], now: float, wall: float) -> None:
        self.members.load(state["members"], now)
        if state["rounds"] is not None:
            self.make_books(state["layout_digest"], tuple(state["fragment_elements"]))
            assert self.rounds
            self.rounds.load(state["rounds"])
            self.ledger = Ledger.from_json(self.rounds.fragments, state["ledger"])
            self.ledger.grow(len(self.members.slots))
            self.epochs = [(epoch, list(versions)) for epoch, versions in state["epochs"]]
        if state["leases"] is not None:
            self.leases = LeaseBook.from_json(self.config.seed, self.config.rules.deterministic, state["leases"])
        self.clock.load(state["clock"], now, wall)
        self.phase = JobPhase(state["phase"]["name"])
        self.phase_message = state["phase"]["message"]
        self.merges = state["merges"]
        if "history" in state:
            self.history.load(state["history"])
        else:  # a state from before there were histories
            self.history.settle(state.get("settled", 0))
        self.eval_loss = [(tokens, loss) for tokens, loss in state["eval_loss"]]
        self.scored_merges = state.get("scored_merges", -1)
        self.initial_loss = state["initial_loss"]
        self.final_loss = state["final_loss"]
