"""Rounds: when a fragment's merge opens, which pushes it waits for, and when it is merged.

Theory of operation (algorithm.md section 4; arXiv 2604.21428, section on the syncer).

*Progress.* Every slot has a mark per fragment: the slot step from which its steps toward the fragment's next merge
count. It is the snapshot that the last merge took from it, or, for a slot that the last merge left out, its step when
that round opened; the period H is thus counted from snapshot to snapshot, not from adoption to adoption. A slot
counts only while its base is the current version. Steps are what a learner says, and open rounds for all. So a slot
that was asked in the fragment's last round and has pushed nothing for it since counts no steps, for as long as H steps
of the usual pace take from that round's opening. A push that came too late for its merge makes it count at once.

Example. H = 24, P = 4, K = 2, three learners at slot steps 31, 30 and 12, all marks of fragment 2 at 6. The two
fastest have made 25 and 24 steps since: a round for fragment 2 opens. Two pushes come; from then on the third
learner has the grace window to push, too.

*Opening.* A round for p opens when K active learners have made H steps since their marks (in the first turn
(p+1)·H/P, which staggers the fragments), p has no round open, fewer rounds are open than the limit (exchanges.py), and
the K-th fastest learner has made H/P steps since the last opening of any round. The longest due opens first; ties by
index. K is never lowered.

*Lead.* A report takes its way to the syncer and a pull its way back, and a learner has made steps meanwhile. Those
that it made lately (the median) count as made when the round opens, but for one. So the snapshots are H steps apart,
and not H and a round trip.

*Waiting.* A round waits for pushes of K different slots, however long. From then on it waits for the other pulled
learners, but at most the grace window. Offers (pushes of learners that left) count in the next round of their fragment.

*Asking again.* A pull, or the push that answers it, can be lost or refused. So every active learner without a push in
the round is asked again: at once over a new connection, else after ``pull_seconds``, then after twice as long each
time, up to ``MOST_PULL_WAIT`` times as long. A learner whose push is still on its way passes over the repetition.

*Overdue.* A round that waits for much longer than its learners need for a turn of H steps, and ``OVERDUE_SECONDS`` at
least, is overdue. Nothing depends on it; people are told, with the last refusal of each slot.

*Merging.* From then on the round is merging, until the shell says that the record is durable. No push may
join it any more.

*Shards.* The process that has a fragment's bytes may be lost (core/shards.py). Until it is back nothing of the above
happens to the fragment's round, which counts for nothing else either: not as open, overdue or late.

What deterministic mode has in place of the opening rule and the grace window: core/books/deterministic.py.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core.books.deterministic import Mode
from diloco_syncer.core.books.exchanges import ExchangeLimit
from diloco_syncer.core.shards import Shards

MOST_PULL_WAIT = 6.0  # between two pulls of one push, in ``pull_seconds``
OVERDUE_SECONDS = 120.0
LEADS = 9  # answers of a slot of whose leads the median counts
OVERDUE_TURNS = 3  # a turn: H steps of the median learner


class MovingAverage:
    """Exponential, ``half_life`` samples; the first sample is taken as it is."""

    def __init__(self, half_life: float = 8.0) -> None:
        self.keep = 0.5 ** (1.0 / half_life)
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.keep * self.value + (1 - self.keep) * sample


@dataclass(frozen=True, slots=True)
class RoundRules:
    """The job's numbers that rounds obey; steps, seconds, slots."""

    every: int  # H
    overlap: int  # τ
    quorum: int  # K
    grace_factor: float
    grace_cap: float
    pull_seconds: float = 10.0  # an answer to a pull is waited for, before it is repeated

    def grace_seconds(self, step: float | None, quorum: float | None, sync: float | None) -> float:
        """clamp(γ·(τ·ξ_step − ξ_quorum − ξ_sync), ξ_step, cap); with an estimate missing: the cap (seconds). A factor
        of 0 is no window at all."""
        if step is None or quorum is None or sync is None:
            return self.grace_cap
        least = step if self.grace_factor > 0 else 0.0
        return min(self.grace_cap, max(least, self.grace_factor * (self.overlap * step - quorum - sync)))


@dataclass(frozen=True, slots=True)
class Progress:
    """What the opening rule knows of one active learner."""

    slot: int
    step: int  # slot step
    bases: tuple[int, ...]  # version of its base, per fragment


@dataclass(slots=True)
class Delivery:
    """A new version on its way to the learners."""

    version: int
    opened: Round
    announced_at: float
    slots: set[int] = field(default_factory=set)  # that have it


@dataclass(slots=True)
class Accepted:
    """A push or offer that waits in a round."""

    header: PushHeader
    handle: int
    norm: float
    growth: float = 0.0  # as of ``ev.PushReceived``; of an offer that was restored 0: it was judged when it came


@dataclass(frozen=True, slots=True)
class Asked:
    """A pull of a slot's push: over which connection, and until when its answer is waited for."""

    connection: int
    until: float
    patience: float  # until - when it was sent


@dataclass(slots=True)
class Round:
    """One attempt to merge one fragment."""

    id: int
    fragment: int
    version: int  # v_p when it opened; the merge makes version + 1
    opened_at: float
    pulled: set[int] = field(default_factory=set)
    asked: dict[int, Asked] = field(default_factory=dict)  # by slot: the newest pull
    refused: dict[int, str] = field(default_factory=dict)  # by slot: the reason for which its newest push was not taken
    overdue: bool = False
    pushes: list[Accepted] = field(default_factory=list)
    steps_at_opening: dict[int, int] = field(default_factory=dict)
    quorum_at: float | None = None
    deadline: float | None = None
    merging: bool = False
    last: bool = False  # all learners had left when its merge began
    in_time: set[int] = field(default_factory=set)  # slots whose push came within the window, after the merge had begun
    late: set[int] = field(default_factory=set)  # slots whose push came after the merge had begun

    def slots(self) -> set[int]:
        return {push.header.slot for push in self.pushes}

    def answered(self) -> set[int]:
        """Slots from which nothing more is to come: their push was made for this round, or is an offer."""
        return {push.header.slot for push in self.pushes if push.header.round in (self.id, 0)}


def superseded(waiting: Iterable[Accepted], header: PushHeader) -> list[Accepted]:
    """Waiting pushes whose steps the new one carries too: of the same slot, and
    overlapping. A tenure's pushes all begin at its base, so the newer is a superset
    (perhaps under a newer incarnation); another tenure's steps never overlap."""
    return [p for p in waiting if p.header.slot == header.slot and header.first_step <= p.header.last_step]


class RoundBook:
    """All rounds of a job's P fragments."""

    def __init__(
        self, fragments: int, rules: RoundRules, mode: Mode, *, most_rounds: int = 0, shards: Shards | None = None
    ) -> None:
        self.rules = rules
        self._shards = shards or Shards()
        if shards is None:
            self._shards.deal((1,) * fragments)
        least = max(1, math.ceil(rules.overlap * fragments / rules.every))
        self.exchanges = ExchangeLimit(least, most_rounds)
        self._mode = mode
        self.versions = [0] * fragments
        self.open: dict[int, Round] = {}  # by fragment
        # By fragment and slot, of pushes that would have opened its round: the reason for which one was not taken.
        self.refused_before: list[dict[int, str]] = [{} for _ in range(fragments)]
        self.marks: list[dict[int, int]] = [{} for _ in range(fragments)]
        self.first_marks: dict[int, int] = {}  # slot -> step at which it began
        self.steps_at_last_opening: dict[int, int] = {}
        self.next_round = 1
        self._leads: dict[int, deque[int]] = {}  # by slot: steps from what was known at an opening to the snapshot
        self._merged: dict[int, Round] = {}  # by fragment: the last round that was merged
        # By fragment and slot: until when its steps do not count toward the next round, unless a push of it comes.
        self._silent: list[dict[int, float]] = [{} for _ in range(fragments)]
        self.step_seconds = MovingAverage()
        self.quorum_seconds = MovingAverage()
        self.merge_seconds = MovingAverage()
        self.broadcast_seconds = MovingAverage()
        self.exchange_seconds = MovingAverage()
        self.learners_in_merges = MovingAverage()
        self.counted_merges = self.counted_learners = (
            0  # of merges and of the learners in them, but for the last merges
        )
        self._deliveries: dict[int, Delivery] = {}  # by fragment: those that fewer than K slots have

    @property
    def fragments(self) -> int:
        return len(self.versions)

    def begin_progress(self, slot: int, step: int) -> None:
        """A process begins a tenure in the slot at this step: its progress counts from here."""
        self.first_marks[slot] = step
        self._leads.pop(slot, None)
        for marks, silent in zip(self.marks, self._silent, strict=True):
            marks[slot] = step
            silent.pop(slot, None)
        self.steps_at_last_opening[slot] = step

    # ------------------------------------------------------------- shards

    def served(self) -> list[Round]:
        """The open rounds whose shard is there."""
        return [opened for opened in self.open.values() if self._shards.is_served(opened.fragment)]

    def able_to_merge(self) -> list[Round]:
        """The open rounds whose shard is there and makes no merge, by age: a shard makes its merges one at a time."""
        busy = {self._shards.of[opened.fragment] for opened in self.open.values() if opened.merging}
        free = [opened for opened in self.served() if self._shards.of[opened.fragment] not in busy]
        return sorted(free, key=lambda opened: opened.id)

    def lose_shard(self, shard: int) -> None:
        """The shard is lost. Nobody is late in its rounds meanwhile, and how long they take says nothing."""
        for fragment in self._shards.fragments(shard):
            self._deliveries.pop(fragment, None)
            if fragment in self.open:
                self.open[fragment].overdue = False

    # ------------------------------------------------------------- opening

    def steps_toward(self, learner: Progress, fragment: int) -> int | None:
        """Steps of this learner toward the fragment's next round; None: its base is not v_p."""
        if learner.bases[fragment] != self.versions[fragment]:
            return None
        mark = self.marks[fragment].get(learner.slot, self.first_marks.get(learner.slot, 0))
        return learner.step - mark

    def _lead(self, slot: int) -> int:
        """By how many steps a round opens before the slot has made H of them, so that its snapshot is taken then.
        Everybody answers at the end of the step that is being made: that one is no part of it. It follows from what a
        learner says of its steps, so it is three quarters of H at most: rounds open four times as often then."""
        lead = statistics.median_low(self._leads.get(slot) or (0,)) - 1
        return max(0, min(lead, 3 * self.rules.every // 4))

    def steps_needed(self, fragment: int) -> float:
        if self.versions[fragment] == 0:
            return (fragment + 1) * self.rules.every / self.fragments
        return float(self.rules.every)

    def next_due(self, active: Iterable[Progress], now: float = 0.0) -> int | None:
        """The fragment whose round should open now, or None."""
        rules, learners = self.rules, list(active)
        has_room = len(self.served()) < self.exchanges.value
        if self._mode.is_scheduled or len(learners) < rules.quorum or (self.exchanges.hindered and not has_room):
            return None
        since = sorted(
            (learner.step - self.steps_at_last_opening.get(learner.slot, 0) for learner in learners), reverse=True
        )
        if since[rules.quorum - 1] < rules.every / self.fragments:
            return None
        leads = {learner.slot: self._lead(learner.slot) for learner in learners}
        best: tuple[float, int] | None = None
        for fragment in range(self.fragments):
            if fragment in self.open or not self._shards.is_served(fragment):
                continue
            silent = self._silent[fragment]
            counted = [learner for learner in learners if now >= silent.get(learner.slot, now)] if silent else learners
            done = sorted(
                (
                    steps + leads[learner.slot]
                    for learner in counted
                    if (steps := self.steps_toward(learner, fragment)) is not None
                ),
                reverse=True,
            )
            if len(done) < rules.quorum:
                continue
            overdue = done[rules.quorum - 1] - self.steps_needed(fragment)
            if overdue >= 0 and (best is None or overdue > best[0]):
                best = (overdue, fragment)
        if best is None:
            return None
        self.exchanges.hindered |= not has_room
        return best[1] if has_room else None

    def open_round(self, fragment: int, now: float, active: Iterable[Progress]) -> Round:
        """Open the fragment's round; the caller pulls ``pulled`` and adds waiting offers."""
        if fragment in self.open:
            raise ValueError(f"fragment {fragment} has an open round")
        version = self.versions[fragment]
        opened = Round(self._mode.number_round(version, self.next_round), fragment, version, now)
        for learner in active:
            opened.pulled.add(learner.slot)
            opened.steps_at_opening[learner.slot] = learner.step
            self.steps_at_last_opening[learner.slot] = learner.step
        self.next_round += 1
        opened.refused, self.refused_before[fragment] = self.refused_before[fragment], {}
        self.open[fragment] = opened
        return opened

    # ------------------------------------------------------------- waiting

    def accept(self, opened: Round, push: Accepted, now: float) -> list[Accepted]:
        """Put a push into the round; returns what it replaces."""
        replaced = superseded(opened.pushes, push.header)
        opened.pushes = [p for p in opened.pushes if p not in replaced] + [push]
        # What came before the round opened does not begin the window: those who were asked need time to answer.
        has_quorum = len(opened.slots()) >= self.rules.quorum and bool(opened.answered() & opened.pulled)
        if opened.quorum_at is None and has_quorum:
            opened.quorum_at = now
            if self._mode.has_grace:
                step, quorum = self.step_seconds.value, self.quorum_seconds.value
                opened.deadline = now + self.rules.grace_seconds(step, quorum, self.sync_seconds)
        return replaced

    def record_late(self, header: PushHeader) -> None:
        """A push waits for its fragment's next round: the steps of its slot count toward that."""
        self._silent[header.fragment].pop(header.slot, None)
        opened = self.open.get(header.fragment)
        if opened is not None:
            opened.late.add(header.slot)

    def came_in_time(self, header: PushHeader, now: float) -> bool:
        """Whether a push that came after its round's merge had begun still came within the round's window."""
        for opened in (self.open.get(header.fragment), self._merged.get(header.fragment)):
            if opened is not None and opened.id == header.round and now <= (opened.deadline or 0.0):
                opened.in_time.add(header.slot)
                return True
        return False

    def is_pull_due(self, opened: Round, slot: int, connection: int, now: float) -> bool:
        """Whether the slot, whose push is not in the round, is to be asked for it now, over this connection."""
        asked = opened.asked.get(slot)
        return asked is None or asked.connection != connection or now >= asked.until

    def record_pull(self, opened: Round, slot: int, connection: int, now: float) -> None:
        """The slot is asked for its push."""
        asked, patience = opened.asked.get(slot), self.rules.pull_seconds
        if asked is not None and asked.connection == connection:
            patience = min(2 * asked.patience, MOST_PULL_WAIT * patience)
        opened.pulled.add(slot)
        opened.asked[slot] = Asked(connection, now + patience, patience)

    def is_overdue(self, opened: Round, now: float) -> bool:
        """Whether the round has waited for its quorum for much longer than a turn takes."""
        turn = self.rules.every * (self.step_seconds.value or 0.0)
        patience = max(OVERDUE_SECONDS, OVERDUE_TURNS * turn)
        waits = not opened.merging and opened.quorum_at is None and self._shards.is_served(opened.fragment)
        return waits and now - opened.opened_at >= patience

    def is_ready(self, opened: Round, now: float, reachable: set[int], late: Set[int] = frozenset()) -> bool:
        """May the round be merged now? ``reachable``: slots that can still push; ``late``: those that are late round
        after round, and that nobody waits for once another has answered."""
        if opened.merging or len(opened.slots()) < self.rules.quorum:
            return False
        waiting = self._mode.awaited_slots(opened.pulled, reachable) - opened.answered()
        if opened.quorum_at is not None:
            waiting -= late
        return not waiting or (opened.deadline is not None and now >= opened.deadline)

    def wake_at(self) -> float | None:
        """When a grace window ends next (seconds), or None."""
        # While a shard makes a merge, its next one begins when that one is made.
        return min((r.deadline for r in self.able_to_merge() if r.deadline is not None), default=None)

    # ------------------------------------------------------------- merging

    def begin_merge(self, opened: Round, median_step: float | None) -> list[Accepted]:
        """Close the round to further pushes; returns its pushes in slot order. ``median_step``: seconds."""
        opened.merging = True
        if median_step is not None:
            self.step_seconds.add(median_step)
        if opened.quorum_at is not None:
            self.quorum_seconds.add(opened.quorum_at - opened.opened_at)
        opened.pushes.sort(key=lambda p: (p.header.slot, p.header.incarnation, p.header.sequence))
        return opened.pushes

    def complete_merge(self, fragment: int, version: int, merge_seconds: float, now: float) -> Round:
        """The record is durable and its version announced: the round is closed and the marks move."""
        closed = self.open.pop(fragment)
        self._merged[fragment] = closed
        self.merge_seconds.add(merge_seconds)
        if not closed.last:
            learners = len(closed.slots())
            self.learners_in_merges.add(learners)
            self.counted_merges, self.counted_learners = self.counted_merges + 1, self.counted_learners + learners
        served = self._shards.is_served(fragment)
        if served:
            self._deliveries[fragment] = Delivery(version, closed, now)
        for slot, step in closed.steps_at_opening.items():
            self._mark(fragment, slot, step)
            answer = next((push.header for push in closed.pushes if push.header.slot == slot), None)
            if answer is not None and answer.round == closed.id:
                self._leads.setdefault(slot, deque(maxlen=LEADS)).append(answer.last_step - step)
        if served:  # else who was asked had nobody to push to
            self.begin_silence(closed)
        self.set_version(fragment, version, ((push.header.slot, push.header.last_step) for push in closed.pushes))
        return closed

    def begin_silence(self, closed: Round) -> None:
        """Who was asked in this round and has pushed nothing counts no steps toward the next, for a turn's time."""
        until = closed.opened_at + self.rules.every * (self.step_seconds.value or 0.0)
        self._silent[closed.fragment] = dict.fromkeys(closed.pulled - closed.slots() - closed.late, until)

    def record_arrival(self, fragment: int, version: int, slot: int, now: float) -> None:
        """The slot's process has all bytes of this version. With the K-th of them its broadcast was as long."""
        delivery = self._deliveries.get(fragment)
        if delivery is None or delivery.version != version:
            return
        delivery.slots.add(slot)
        if len(delivery.slots) >= self.rules.quorum:
            self.broadcast_seconds.add(now - delivery.announced_at)
            opened, under_way = delivery.opened, len(self.served()) + len(self._deliveries)
            self.exchange_seconds.add(now - opened.opened_at)
            self.exchanges.record(opened.id, under_way, opened.opened_at, ended=now, next_round=self.next_round)
            del self._deliveries[fragment]

    @property
    def sync_seconds(self) -> float | None:
        """ξ_sync: to merge, to make durable, and to broadcast, as far as that was measured."""
        merge = self.merge_seconds.value
        return None if merge is None else merge + (self.broadcast_seconds.value or 0.0)

    @property
    def overlap_seconds(self) -> float | None:
        """What the τ steps take that an exchange may overlap, as far as that was measured."""
        return None if self.step_seconds.value is None else self.rules.overlap * self.step_seconds.value

    def set_version(self, fragment: int, version: int, last_steps: Iterable[tuple[int, int]]) -> None:
        """The store has this as the fragment's newest version. ``last_steps``: slots that are in it, each with the last
        step that is; their marks rise."""
        self.versions[fragment] = version
        for slot, step in last_steps:
            self._mark(fragment, slot, step)

    def _mark(self, fragment: int, slot: int, step: int) -> None:
        # A newcomer may have begun on the slot since: its mark never moves back.
        self.marks[fragment][slot] = max(step, self.marks[fragment].get(slot, 0))

    # ------------------------------------------------------------- durable

    def to_json(self) -> dict[str, Any]:
        return {
            "versions": list(self.versions),
            "marks": [{str(slot): step for slot, step in marks.items()} for marks in self.marks],
            "first_marks": {str(slot): step for slot, step in self.first_marks.items()},
            "next_round": self.next_round,
            "learners_in_merges": [self.counted_merges, self.counted_learners],
        }

    def load(self, row: dict[str, Any]) -> None:
        """Open rounds do not survive: their pushes are sent again."""
        self.versions = list(row["versions"])
        self.marks = [{int(slot): step for slot, step in marks.items()} for marks in row["marks"]]
        self.first_marks = {int(slot): step for slot, step in row["first_marks"].items()}
        self.next_round = row["next_round"]
        self.counted_merges, self.counted_learners = row["learners_in_merges"]
        if self.counted_merges:
            self.learners_in_merges.add(self.counted_learners / self.counted_merges)
