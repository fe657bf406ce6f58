"""From pushes to versions: the aggregator opens rounds, puts pushes into them, and starts and completes merges.

``push_checks`` says which pushes count and ``rounds`` when a fragment is merged; here both meet the ledger, the
slots and the offers that wait.

The life of one merge. ``open_rounds`` opens a round, and asks every active learner for its push, again and again until
it is there. ``receive_push`` puts a push into the round. ``start_ready_merges`` closes a round that has waited long
enough, and adds the ``Merge`` action: the shell merges, makes the record durable and says ``MergeDurable``. Only then
does ``complete_merge`` raise the version, count the tokens and announce it.

A shard makes its merges one at a time, beside those of other shards. ``lost_shards``: what is lost with one.

An *offer* is a push without a round, of a learner that leaves. It waits here, and counts in the next round of its
fragment.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from statistics import median_low

from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal, SlotState
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core import events as ev
from diloco_syncer.core.actions import Actions
from diloco_syncer.core.books import shares
from diloco_syncer.core.books.rounds import Accepted, Progress, Round, superseded
from diloco_syncer.core.books.slots import MergedPush, Slot
from diloco_syncer.core.merging.lost_shards import LostShards
from diloco_syncer.core.merging.push_checks import OUT_OF_SCALE, PushChecks
from diloco_syncer.core.recovery.receipts import hold_taken_back_offer, hold_unknown_offer, remember_version
from diloco_syncer.core.reports import apply_report
from diloco_syncer.core.state import JobState

LATE_ROUNDS = 3  # a slot that is late in so many rounds running is starved
FEW_MERGES = 16  # merges before it is said that they have few learners
FEW_SHARE = 0.75  # of the active learners; fewer in a merge are few
FEW_QUIET_SECONDS = 600.0  # between two events that say so
STARVED_QUIET_SECONDS = 60.0  # between two events that tell it of one slot: with short steps it may come every second


class Aggregator:
    """Pushes, rounds and merges of one job."""

    def __init__(self, state: JobState, actions: Actions) -> None:
        self._state = state
        self._actions = actions
        self._quorum = state.config.rules.quorum
        self._few_told_at = -math.inf
        self._offers: dict[int, list[Accepted]] = {}  # by fragment, those that wait for a round
        self.checks = PushChecks(state)
        self.shards = LostShards(state, actions, self._offers)

    def accepted_headers(self) -> list[PushHeader]:
        """The pushes and offers that were accepted and are not merged."""
        rounds = self._state.rounds
        waiting = [offer.header for offers in self._offers.values() for offer in offers]
        return waiting + [push.header for opened in (rounds.open.values() if rounds else ()) for push in opened.pushes]

    # ---------------------------------------------------------------- pushes

    def receive_push(self, event: ev.PushReceived, now: float) -> bool:
        """Check a push whose bytes are all here, answer it, and put it into its round or among the offers. Returns
        whether it is taken."""
        header, state = event.header, self._state
        checks = self.checks
        refusal = checks.check_header(header) or checks.check_content(header, event.norm, event.finite, event.growth)
        if refusal is not None:
            self._record_refusal(header, refusal[0])
            self._actions.add(ev.AnswerPush(event.handle, *refusal))
            return False
        assert state.rounds
        state.norm_gate.record_pass(header.fragment)
        slot = state.members.slots[header.slot]
        apply_report(state, self._actions, slot, header.report, now=now)
        slot.pushes.mark_accepted(header.fragment, header.sequence)
        slot.pushes.pace.record_push(header.last_step, now)
        push = Accepted(header, event.handle, event.norm, event.growth)
        opened = state.rounds.open.get(header.fragment)
        if opened is None and header.round and state.config.mode.opens_round(header, state.versions[header.fragment]):
            opened = state.rounds.open_round(header.fragment, now, state.progress())
        self._actions.add(ev.AnswerPush(event.handle, None, "", offer=not header.round))
        if state.rounds.came_in_time(header, now):
            slot.pushes.late_rounds, slot.pushes.starved = 0, False  # it is worth waiting for again
        if opened is not None and not opened.merging:
            replaced = state.rounds.accept(opened, push, now)
            self._actions.add(*(ev.ReleasePush(old.handle) for old in replaced))
        else:
            state.rounds.record_late(header)
            self._let_wait(push)
        return True

    def _let_wait(self, offer: Accepted) -> None:
        """Let an offer wait, in place of those of which it has the steps."""
        waiting = self._offers.get(offer.header.fragment, [])
        replaced = superseded(waiting, offer.header)
        self._offers[offer.header.fragment] = [old for old in waiting if old not in replaced] + [offer]
        self._actions.add(*(ev.ReleasePush(old.handle) for old in replaced))

    def _record_refusal(self, header: PushHeader, reason: PushRefusal) -> None:
        """Remember why a round lacks the push of one that was asked for it."""
        rounds = self._state.rounds
        if reason is PushRefusal.NORM_GATE:
            self._state.norm_gate.record_refusal(header.fragment)
        opened = rounds.open.get(header.fragment) if rounds else None
        if opened is not None and header.round == opened.id and header.slot in opened.pulled:
            opened.refused[header.slot] = reason.value
        elif rounds and self._state.config.mode.opens_round(header, rounds.versions[header.fragment]):
            rounds.refused_before[header.fragment][header.slot] = reason.value

    # ---------------------------------------------------------------- rounds

    def open_rounds(self, now: float) -> None:
        """Open the rounds that are due, and ask every active learner for its pushes of those that are open."""
        rounds = self._state.rounds
        assert rounds
        active = self._state.progress()
        while (fragment := rounds.next_due(active, now)) is not None:
            opened = rounds.open_round(fragment, now, active)
            self._add_offers(opened, now)
        if not self._state.config.mode.is_scheduled:
            self._pull_pushes(active, now)
        self._tell_overdue_rounds(now)

    def _pull_pushes(self, active: Sequence[Progress], now: float) -> None:
        """Ask for the pushes that open rounds lack, newcomers too, and again where none came."""
        rounds, slots = self._state.rounds, self._state.members.slots
        assert rounds
        for opened in rounds.served():
            # Who is late round after round is not asked for more while its last push waits in this round.
            late = {slot for slot in opened.slots() if slots[slot].pushes.starved}
            responded = opened.answered() | late
            for learner in active if not opened.merging else ():
                connection = slots[learner.slot].holder.connection
                if learner.slot in responded or connection is None:
                    continue
                if rounds.is_pull_due(opened, learner.slot, connection, now):
                    rounds.record_pull(opened, learner.slot, connection, now)
                    self._actions.add(ev.Pull(connection, opened.id, opened.fragment, opened.version))

    def _tell_overdue_rounds(self, now: float) -> None:
        """Record an event for each round that has become overdue."""
        state = self._state
        assert state.rounds
        for opened in state.rounds.open.values():
            if not opened.overdue and state.rounds.is_overdue(opened, now):
                opened.overdue = True
                self._actions.record_event(EventKind.ROUND_OVERDUE, None, state.describe_overdue_round(opened))

    def _add_offers(self, opened: Round, now: float) -> None:
        """Put the fragment's waiting offers into the round; they were checked when they came."""
        assert self._state.rounds
        for offer in self._offers.pop(opened.fragment, []):
            replaced = self._state.rounds.accept(opened, offer, now)
            self._actions.add(*(ev.ReleasePush(old.handle) for old in replaced))

    # ---------------------------------------------------------------- merges

    def describe_out_of_scale(self) -> str:
        """Where pushes are judged together: what is said of the one that alone of its round, which has them all, is out
        of scale; empty: there is none."""
        state = self._state
        for opened in state.rounds.open.values() if state.rounds and state.config.mode.judges_together else ():
            large = [p for p in opened.pushes if self.checks.is_out_of_scale(p.header, p.norm, p.growth)]
            if not opened.merging and len(opened.slots()) >= self._quorum and len({p.header.slot for p in large}) == 1:
                whose = f"of {state.members.slots[large[0].header.slot].learner} to fragment {opened.fragment}"
                why = OUT_OF_SCALE.format(growth=large[0].growth)
                return f"the update {whose} is out of scale, and no other is: {why}"
        return ""

    def start_ready_merges(self, now: float) -> None:
        """Start the merge of every round that has waited long enough."""
        state = self._state
        assert state.rounds
        if state.phase is JobPhase.DRAINING and not state.config.mode.merges_while_draining:
            return  # one last merge of everything, when all have offered
        missed = state.members.lost_regions and state.config.on_region_lost != "Continue"
        if state.phase is JobPhase.HOLDING and missed:
            return  # K slots may have pushed, but the lost region is waited for
        reachable = state.members.reachable()
        late = {slot.index for slot in state.members.slots if slot.pushes.starved}
        # A shard makes them one at a time, and until a merge begins, its round takes what comes.
        able = state.rounds.able_to_merge
        while (ready := next((r for r in able() if state.rounds.is_ready(r, now, reachable, late)), None)) is not None:
            self._start_merge(ready, now)

    @property
    def has_last_merges(self) -> bool:
        """Whether a fragment has offers of K slots, which merge without any learner."""
        return any(len({offer.header.slot for offer in offers}) >= self._quorum for offers in self._offers.values())

    def finish_rounds(self, now: float) -> tuple[bool, bool]:
        """Start the last merges of fragments that are served, when all have left. Returns whether one was started, and
        whether one is under way."""
        rounds = self._state.rounds
        assert rounds
        started = False
        for fragment in filter(self._state.shards.is_served, range(rounds.fragments)):
            opened = rounds.open.get(fragment)
            if opened is not None and opened.merging:
                continue
            offers = self._offers.get(fragment)
            if opened is None and offers:
                if len({offer.header.slot for offer in offers}) < self._quorum:
                    continue  # short of K: they stay, and merge after a resume
                opened = rounds.open_round(fragment, now, ())
            if opened is None:
                continue
            self._add_offers(opened, now)
            if len(opened.slots()) >= self._quorum:
                if not self.describe_out_of_scale():
                    self._start_merge(opened, now, last=True)
                started = True
        return started, any(opened.merging for opened in rounds.served())

    @property
    def awaits_shards(self) -> bool:
        """Whether a fragment is unserved that K slots have work for, which is being merged or will be."""
        slots: dict[int, set[int]] = {}
        for header in self.accepted_headers():
            if not self._state.shards.is_served(header.fragment):
                slots.setdefault(header.fragment, set()).add(header.slot)
        return any(len(some) >= self._quorum for some in slots.values())

    def _start_merge(self, opened: Round, now: float, last: bool = False) -> None:
        """Close the round to further pushes, and have it merged. ``last``: see ``ev.Merge``."""
        state = self._state
        assert state.rounds and state.ledger
        paces = [s.pushes.pace.step_seconds for s in state.members.slots if s.state is SlotState.ACTIVE]
        known = [pace for pace in paces if pace is not None]
        opened.last = last
        pushes = state.rounds.begin_merge(opened, median_low(known) if known else None)
        headers = [push.header for push in pushes]
        batches = [state.batch_of(state.members.slots[header.slot]) for header in headers]
        works = [shares.work_of(header, batch) for header, batch in zip(headers, batches, strict=True)]
        weights = shares.weigh_pushes(state.config.weights, works, state.config.max_steps)
        responders = tuple(
            ev.Responder(
                push.header, push.handle, float(weight), opened.version - push.header.oldest_version, batch=batch
            )
            for push, weight, batch in zip(pushes, weights, batches, strict=True)
        )
        quorum_at = opened.quorum_at if opened.quorum_at is not None else now
        self._actions.add(
            ev.Merge(
                fragment=opened.fragment,
                version=opened.version + 1,
                round=opened.id,
                responders=responders,
                quorum_seconds=quorum_at - opened.opened_at,
                waited_seconds=now - opened.opened_at,
                job_tokens=state.ledger.total_trained(),
                last=last,
            )
        )

    def complete_merge(self, event: ev.MergeDurable, now: float) -> None:
        """The record of a merge is durable: the version rises, its tokens count, and it is announced."""
        state = self._state
        assert state.rounds
        merged = state.rounds.open.get(event.fragment)
        if merged is None or not merged.merging:
            words = f"version {event.version} of fragment {event.fragment} is durable, and its merge was given up"
            self._actions.add(ev.RestartFromStore(words, 0))
            return
        self._leave_out(merged, event.left_out)
        pushes = merged.pushes
        remember_version(state, event.fragment, (push.header.slot for push in pushes))
        closed = state.rounds.complete_merge(event.fragment, event.version, event.merge_seconds, now)
        state.merges += 1
        state.lineage.mark_settled(state.epoch)
        steps = [push.header.steps for push in closed.pushes]
        state.norm_gate.add(event.fragment, zip(event.norms, steps, strict=True))
        if words := state.norm_gate.record_merge(event.fragment, event.norm):
            self._actions.record_event(EventKind.LARGE_MERGE, None, f"version {event.version} of {words}")
        for push in closed.pushes:
            slot = state.members.slots[push.header.slot]
            self._count_merged(slot, push.header, event.version)
            if not slot.holder.merged_since and push.header.incarnation == slot.holder.incarnation:
                slot.holder.merged_since = True
                message = f"{slot.learner} is in a merge (fragment {event.fragment})"
                self._actions.record_event(EventKind.FIRST_MERGE, slot, message)
            self._actions.add(ev.ReleasePush(push.handle))
        if state.shards.is_served(event.fragment):  # else nobody could be in time
            self._update_lateness(closed, now)
        self._tell_few_learners(now)
        self._actions.add(state.announcement(event.fragment))

    def _leave_out(self, merged: Round, handles: Collection[int]) -> None:
        """Pushes with which the merge would have become infinite are not in it. Their learners have the work, and that
        of those who have left is lost."""
        for push in [push for push in merged.pushes if push.handle in handles]:
            merged.pushes.remove(push)
            slot = self._state.members.slots[push.header.slot]
            words = (
                f"the update of {slot.learner} (norm {push.norm:.3g}) would make fragment {merged.fragment} infinite"
            )
            self._actions.record_event(EventKind.LEFT_OUT, slot, f"{words}: it is not merged")
            if self._state.ledger:
                self._state.ledger.drop_held(push.header, "drain")
            self._actions.add(ev.ReleasePush(push.handle))

    def record_arrival(self, event: ev.VersionSent, now: float) -> None:
        """A process has a version that was announced; evaluators and those who stand by have no slot."""
        slot = self._state.members.by_connection(event.connection)
        if slot is not None and self._state.rounds:
            self._state.rounds.record_arrival(event.fragment, event.version, slot.index, now)

    def _count_merged(self, slot: Slot, header: PushHeader, version: int) -> None:
        ledger = self._state.ledger
        assert ledger
        current = ledger.of_open_tenure(header)
        ledger.count_merge(header)
        slot.merged_pushes += 1
        slot.mark_merged(header.fragment, header.last_step, self._state.config.max_steps)
        if current:
            slot.pushes.mark_merged(header.fragment, MergedPush(header.sequence, version))

    def _update_lateness(self, closed: Round, now: float) -> None:
        """A slot that was late in three rounds running is starved, until it is in time again."""
        responded = closed.answered() | closed.in_time
        for index in closed.pulled:
            slot = self._state.members.slots[index]
            pushes, told = slot.pushes, slot.told
            if index in responded or not slot.occupied:
                pushes.late_rounds = 0
                pushes.starved = False
                continue
            pushes.late_rounds += 1
            if pushes.late_rounds >= LATE_ROUNDS and not pushes.starved:
                pushes.starved = True
                if now - told.starved_at < STARVED_QUIET_SECONDS:
                    continue
                told.starved_at = now
                message = f"the updates of {slot.learner} came after the merge in {pushes.late_rounds} rounds running"
                self._actions.record_event(EventKind.STARVED, slot, message)

    def _tell_few_learners(self, now: float) -> None:
        """Say, now and then, that merges have far fewer learners than there are, and how long what takes."""
        state = self._state
        rounds, alive = state.rounds, len(state.progress())
        assert rounds
        recent, exchange, overlap = (
            rounds.learners_in_merges.value,
            rounds.exchange_seconds.value,
            rounds.overlap_seconds,
        )
        if recent is None or exchange is None or overlap is None or rounds.counted_merges < FEW_MERGES:
            return
        if recent >= FEW_SHARE * alive or now - self._few_told_at < FEW_QUIET_SECONDS:
            return
        self._few_told_at = now
        cure = "raise sync.overlap" if exchange > overlap else "their paces differ by more than the grace window"
        steps = f"the {rounds.rules.overlap} steps that it may overlap take {overlap:.3g} s"
        message = (
            f"merges have {recent:.1f} of {alive} learners: an exchange takes {exchange:.3g} s, and {steps}; {cure}"
        )
        self._actions.record_event(EventKind.FEW_LEARNERS, None, message)

    # ---------------------------------------------------------------- after a restart

    def apply_record(self, fragment: int, version: int, headers: Iterable[PushHeader], epoch: int) -> None:
        """Apply a merge record newer than the state, made in ``epoch``; call in version order."""
        state = self._state
        assert state.rounds and state.ledger
        if version <= state.rounds.versions[fragment]:
            return
        state.lineage.mark_settled(epoch)
        headers = list(headers)
        remember_version(state, fragment, (header.slot for header in headers))
        for header in headers:
            slot = state.slot(header.slot)
            if slot is None:
                continue
            slot.advance(header.report.slot_step, len(state.versions), state.config.max_steps)
            state.advance_cursors(slot, header.report.cursors)
            if state.ledger.of_open_tenure(header):
                state.ledger.apply_report(slot.index, header.report)
            self._count_merged(slot, header, version)
        state.rounds.set_version(fragment, version, ((header.slot, header.last_step) for header in headers))
        state.merges += 1

    def restore_offer(self, header: PushHeader, handle: int, norm: float) -> bool:
        """Take back a spooled offer that the store has; False: it was merged, or makes no sense, and may go. Of two
        copies the second stays: one may have been written late, or not be removed yet."""
        state = self._state
        assert state.rounds and state.ledger
        slot = state.slot(header.slot)
        if slot is None or header.fragment >= state.rounds.fragments:
            return False
        if header.first_step <= slot.merged_last_step.get(header.fragment, 0):
            return False
        current = state.ledger.of_open_tenure(header)
        if not current and header.id not in state.ledger.books[slot.index].cells[header.fragment].held:
            if slot.index in state.slots_with_unknown_tenure:
                hold_unknown_offer(state.ledger, header)
            elif not hold_taken_back_offer(state, header):
                return False
        if current:
            state.ledger.apply_report(slot.index, header.report)
            slot.pushes.mark_accepted(header.fragment, header.sequence)
        slot.advance(header.report.slot_step, len(state.versions), state.config.max_steps)
        state.advance_cursors(slot, header.report.cursors)
        self._let_wait(Accepted(header, handle, norm))
        return True
