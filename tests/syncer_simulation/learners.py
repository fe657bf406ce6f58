"""A simulated learner: the real adoption rule, and sets of steps in place of tensors. And how a world is set up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco_protocol.wire.records import Announcement, PushHeader, Receipt, Seat, StepReport
from diloco_syncer.core import events as ev
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Kind, Rule
from diloco_worker.core.leases import Leases

Ids = frozenset[tuple[str, int]]


@dataclass
class Setup:
    seed: int
    slots: int = 3
    fragments: int = 3
    every: int = 4
    overlap: int = 2
    quorum: int = 1
    rule: Rule = Rule.KEEP
    max_versions: int = 4
    steps: int = 40
    chaos: float = 1.0  # how often things break
    latency: float = 1.0  # how slow the network and the merges are
    deaths: float = 1.0  # how often learners die, freeze, lose their connection or leave
    crashes: float = 1.0  # how often the syncer crashes
    refusals: float = 0.1  # how often somebody who is asked for a lost version has it no more
    losses: float = 0.0  # share of the crashes after which the store's newest content is gone
    wipes: float = 0.0  # share of the crashes after which the store is empty
    replaced: float = 0.0  # share of those after which all that had slots are other processes
    scales: float = 0.0  # share of the syncer's starts that have other places
    spares: int = 0  # processes that stand by
    visitors: int = 0  # processes that come beyond the slots, train for a while and go; the region has places for them
    crossings: bool = False  # whether reports of a tenure that is over come after the seat of the next
    stop: str = "steps"  # what ends the job
    edits: float = 0.0  # share of the syncer's starts before which people have changed the job
    clocks: float = 0.0  # seconds by which the wall clocks of the syncers' machines differ, and jump, at most
    regions: int = 1  # the second one's learners go at once now and then, and come back
    on_region_lost: str = "Continue"
    norm_gate: float | None = None
    diverged: float = 0.0  # share of the pushes with values that are not finite, or far above the others'
    slow: float = 0.0  # share of the processes to which versions take seconds, and words do not
    told_crashes: float = 0.0  # share of the seats and leases after which the syncer crashes at once
    swallowed: str = ""  # the kind of message that never arrives: pull, push, answer, announce, report
    sequences: int = 0  # of the data set; 0: no leases


@dataclass
class Learner:
    """One process: the real adoption rule, and sets in place of tensors."""

    process: str
    place: tuple[str, int]
    setup: Setup
    speed: float
    evaluator: bool = False  # takes no seat
    connection: int | None = None
    seat: Seat | None = None
    tenure: int = 0  # the incarnation under which the newest one began
    tenure_slot: int = -1  # and in which slot
    adoption: Adoption = field(init=False)
    leases: Leases = field(init=False)
    theta: list[Ids] = field(default_factory=list)
    base: list[Ids] = field(default_factory=list)
    snapshots: dict[tuple[int, int], Ids] = field(default_factory=dict)
    pulls: dict[int, ev.Pull] = field(default_factory=dict)
    pushed: dict[int, tuple[int, int]] = field(default_factory=dict)  # round and sequence of what answers its pull
    late: float = 0.0  # the longest that a version takes to it, beyond the usual
    news: list[tuple[Announcement, Ids]] = field(default_factory=list)
    tokens_of: dict[tuple[str, int], int] = field(default_factory=dict)
    alive: bool = True
    frozen_until: float = 0.0
    draining: bool = False
    accepted: set[tuple[int, int]] = field(default_factory=set)  # pushes that were answered so: fragment, sequence
    in_flight: set[int] = field(default_factory=set)  # fragments whose offer has no answer yet
    unsettled: set[int] = field(default_factory=set)  # offered, perhaps without an answer, and not refused
    offered: set[int] = field(default_factory=set)  # offered and accepted
    offers: dict[int, tuple[PushHeader, Ids]] = field(default_factory=dict)
    repeat_at: dict[int, float] = field(default_factory=dict)  # by fragment: its offer once more, without an answer
    # Newest download of each fragment, with its receipt, and what had settled when it was announced.
    holdings: dict[int, tuple[int, int, Ids, Receipt, int]] = field(default_factory=dict)
    held_since: dict[int, int | None] = field(default_factory=dict)  # the session of each
    withheld: set[int] = field(default_factory=set)  # fragments of which its Welcome did not tell
    left: bool = False

    def __post_init__(self) -> None:
        s = self.setup
        self.adoption = Adoption(
            AdoptionConfig(
                fragments=s.fragments,
                every=s.every,
                overlap=s.overlap,
                rule=s.rule,
                max_versions=s.max_versions,
                max_steps=8 * s.every,
            )
        )
        self.leases = Leases(s.seed, max(1, s.sequences))
        self.theta = [frozenset()] * s.fragments
        self.base = [frozenset()] * s.fragments

    def begin(self, slot_step: int, tenure: int) -> None:
        self.adoption.begin_tenure(slot_step, tenure)
        self.snapshots.clear()
        self.news.clear()

    def adopt(self) -> None:
        held_back = []
        for news, merged_ids in self.news:
            p = news.fragment
            if p in self.unsettled and news.merged_sequence != self.offers[p][0].sequence:
                held_back.append((news, merged_ids))  # an offered fragment stays as it was offered
                continue
            decision = self.adoption.on_broadcast(news)
            assert decision.kind is not Kind.STOP, decision.message
            own = self.theta[p] - self.base[p]
            match decision.kind:
                case Kind.OVERWRITE:
                    self.theta[p] = merged_ids
                case Kind.KEEP:
                    since = self.theta[p] - self.snapshots[p, decision.reference]
                    assert not since & merged_ids, "kept steps are in the merge already"
                    self.theta[p] = merged_ids | since
                case Kind.MIX:  # the average holds the merge and what came after the push, as KEEP does
                    since = self.theta[p] - self.snapshots[p, decision.merged]
                    assert not since & merged_ids, "mixed steps are in the merge already"
                    self.theta[p] = merged_ids | since
                case Kind.REBASE:
                    assert not own & merged_ids, "a rebase keeps steps that were merged"
                    self.theta[p] = merged_ids | own
                case _:
                    continue
            for sequence in decision.move:
                self.snapshots[p, sequence] = merged_ids | (self.snapshots[p, sequence] - self.base[p])
            for sequence in decision.forget:
                self.snapshots.pop((p, sequence), None)  # its values may be given up
            self.base[p] = merged_ids
            assert len(self.theta[p] - self.base[p]) == self.adoption.pending_steps(p)
        self.news = held_back

    def report(self) -> StepReport:
        return replace(self.adoption.report(), step_seconds=self.speed, cursors=self.leases.cursors())
