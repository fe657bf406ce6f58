"""What a lost store means for a process that joins: the one question that admission asks of recovery.

In a job whose store lost nothing the answer of ``on_join`` is always the same: nothing speaks against the process,
nothing is withheld from it, and its tenure goes on if the slot that it had still has it open.

Else there are three more cases:

1. *It holds an epoch that this syncer has not reached.* The store's epochs went back. The syncer restarts above that
   epoch, so that one (epoch, version) never has two meanings. Where nothing can be recovered any more, the process is
   refused.
2. *It holds versions that the store has not.* They are remembered (``lost_versions``), and it is not told of the
   store's older ones.
3. *It counts in a tenure that the store does not know.* It begins a new one, in whichever slot it gets. In a rebuild
   its tenure goes on in the slot that it names, for receipts count by slot.

Example. The store is empty, and this syncer is epoch 1. A learner joins that holds version 8, announced in epoch 2,
and counts in slot 3. The answer is a restart above epoch 2. It joins again, now epoch 3: no answer, and later, when
version 0 is there again, ``continuing_slot`` is slot 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.vocabulary import JoinRefusal
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.recovery.lost_versions import VersionRecovery
from diloco_syncer.core.state import JobState

EPOCHS_ABOVE = 1000  # as far as a store's epochs are believed to have gone back
FURTHEST = 1 << 20  # incarnations that a lost state may have given: a Join each, two a second at most for a week


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a process that joins gets because of what the store has lost, or has not."""

    answer: ev.Refuse | ev.RestartFromStore | None = None  # it gets this, and no slot
    withheld: frozenset[int] = frozenset()  # fragments that are not announced to it: it holds newer ones
    continuing_slot: Slot | None = None  # where its tenure goes on; None: it begins a new one


@dataclass
class JoinRecovery:
    """Judges joins by what the store has lost."""

    state: JobState
    versions: VersionRecovery

    def on_join(self, join: ev.Join, now: float) -> Verdict:
        """Judge a process that is of the job, and remember what it holds."""
        answer = self._answer_unknown_epoch(join, now)
        if answer is not None:
            return Verdict(answer)
        withheld = self.versions.register_holder(join)
        self._reserve_incarnations(join)
        return Verdict(None, withheld, self._continuing_slot(join))

    def _answer_unknown_epoch(self, join: ev.Join, now: float) -> ev.Refuse | ev.RestartFromStore | None:
        """The answer to a process that holds an epoch which this syncer cannot have announced; None: it does not."""
        state = self.state
        above = self.versions.unknown_epoch(join)
        if not above or not (state.initialised or self.versions.is_of_lost_model(join)):
            return None
        if self.versions.can_recover and above - state.epoch <= EPOCHS_ABOVE:
            return ev.RestartFromStore(f"{join.region}-{join.ordinal} has heard of epoch {above}", above)
        if not state.initialised:
            words = (
                f"the syncer's store is empty, and this process holds versions of epoch {above}: give the syncer its "
                "store back (or a copy of it); to start the job anew, restart its learners"
            )
            return ev.Refuse(join.connection, JoinRefusal.EMPTY_STORE, words, False)
        words = (
            f"it holds versions of epoch {above}, but the job continued from an older copy of its store in "
            f"epoch {state.epoch}: restart this process"
        )
        state.refusals.add(join, JoinRefusal.OTHER_HISTORY, words, (), now)
        return ev.Refuse(join.connection, JoinRefusal.OTHER_HISTORY, words, True)

    def _reserve_incarnations(self, join: ev.Join) -> None:
        """Never give an incarnation again that a state which was lost has given to this process."""
        members = self.state.members
        given = max(join.previous_incarnation, join.tenure)
        if given < members.next_incarnation + FURTHEST:
            members.next_incarnation = max(members.next_incarnation, given + 1)

    def _continuing_slot(self, join: ev.Join) -> Slot | None:
        """The slot in which the tenure that the process counts in goes on; None: that tenure is over here."""
        if self.versions.is_other_lineage(join):
            return None
        own = self.state.members.slot_of_process(join)
        if own is not None:
            return own if self._is_same_tenure(own, join) else None
        if not (self.versions.is_rebuilding and join.tenure and join.held):
            return None
        # The store has never heard of the process. Receipts count by slot, so it is that very slot or none.
        slot = self.state.slot(join.slot)
        return slot if slot is not None and not slot.holder.incarnation and not slot.retired else None

    def _is_same_tenure(self, slot: Slot, join: ev.Join) -> bool:
        """Whether the open tenure of the process's slot is the one that the process counts in. It is not if a state
        that was lost had begun another for it, or if a syncer ended before it could say that it had."""
        if self.state.ledger is None:
            # A copy of the store from before version 0 may have the process in another slot. Receipts count by slot.
            return not join.tenure or join.slot == slot.index
        opened = self.state.ledger.books[slot.index].first_incarnation
        return bool(opened) and join.tenure in (0, opened)
