"""Aggregator: pushes come in, rounds open, are taken, and become versions.

``rounds`` holds the rules and ``intake`` says which pushes count; here they meet
the ledger, the members and the offers that wait. Plain code, driven by ``core``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from diloco_protocol.vocabulary import ENDED_PHASES, EventKind, JobPhase, PushRefusal, SlotState
from diloco_syncer.core import events as ev
from diloco_syncer.core.events import Action, MergedPush, PushHeader
from diloco_syncer.core.members.slots import Slot
from diloco_syncer.core.merging.push_checks import PushLimits, check_header
from diloco_syncer.core.merging.rounds import Accepted, Round, superseded
from diloco_syncer.core.recovery.receipts import hold
from diloco_syncer.core.state import JobState

LATE_ROUNDS = 3  # late in so many rounds running: starved


class Aggregator:
    def __init__(self, job: JobState) -> None:
        self.job = job
        config = job.config
        self.intake = PushLimits(config.encoding, config.max_versions, config.rules.deterministic)

    # ---------------------------------------------------------------- pushes

    def check_push(self, header: PushHeader, process: str = "") -> tuple[PushRefusal, str] | None:
        """The verdict on a header before its bytes are read; None: send them."""
        if self.job.phase in ENDED_PHASES:
            return PushRefusal.ENDED, f"the job is {self.job.phase.value}"
        if not self.job.rounds:
            return PushRefusal.OTHER_LAYOUT, "version 0 does not exist yet"
        if not 0 <= header.fragment < self.job.rounds.fragments:
            return PushRefusal.INCONSISTENT, f"there is no fragment {header.fragment}"
        slot = self.job.slot(header.slot)
        if process and slot is not None and slot.incarnation and process != slot.process:
            return PushRefusal.FENCED, f"slot {slot.index} is another process's"
        return check_header(
            header,
            rules=self.intake,
            slot=slot,
            version=self.job.rounds.versions[header.fragment],
            opened=self.job.rounds.open.get(header.fragment),
            layout_digest=self.job.layout_digest,
            base_known=self._base_known(header),
        )

    def _base_known(self, header: PushHeader) -> bool:
        """Is (epoch, version) a version that this store has had? A store that lost
        data began its epoch below what learners saw before."""
        if header.epoch > self.job.epoch:
            return False
        later = [versions for epoch, versions in self.job.epochs if epoch > header.epoch]
        return not later or header.base_version <= later[0][header.fragment]

    def push(self, event: ev.PushReceived, now: float) -> None:
        header = event.header
        verdict = self.check_push(header)
        if verdict is None and not event.finite:
            verdict = (PushRefusal.NOT_FINITE, "the outer gradient has NaN or infinite values")
        if verdict is None:
            verdict = self.job.gate.check(header.fragment, event.norm)
        if verdict is not None:
            self.job.out.append(ev.AnswerPush(event.handle, *verdict))
            return
        assert self.job.rounds
        slot = self.job.members.slots[header.slot]
        self.job.tell(slot, header.report, now)
        slot.accepted_sequence[header.fragment] = header.sequence
        push = Accepted(header, event.handle, event.norm)
        opened = self.job.rounds.open.get(header.fragment)
        if opened is None and header.round:
            opened = self.job.rounds.open_round(header.fragment, now, self.job.progress())
        self.job.out.append(ev.AnswerPush(event.handle, None, "", offer=not header.round))
        if opened is not None and not opened.merging:
            replaced = self.job.rounds.accept(opened, push, now)
        else:
            waiting = self.job.offers[header.fragment]
            replaced = superseded(waiting, header)
            self.job.offers[header.fragment] = [o for o in waiting if o not in replaced] + [push]
        self.job.out += [ev.ReleasePush(old.handle) for old in replaced]

    # ---------------------------------------------------------------- merging

    def merged(self, event: ev.MergeDurable, now: float) -> None:
        assert self.job.rounds and self.job.ledger
        closed = self.job.rounds.merged(event.fragment, event.version, event.merge_seconds)
        self.job.merges += 1
        self.job.history.settle(self.job.epoch)
        self.job.gate.add(event.fragment, event.norms)
        for push in closed.pushes:
            slot = self.job.members.slots[push.header.slot]
            self._count_merged(slot, push.header, event.version)
            if not slot.merged_since and push.header.incarnation == slot.incarnation:
                slot.merged_since = True
                self.job.note(
                    EventKind.FIRST_MERGE, slot, f"slot {slot.index} is in a merge (fragment {event.fragment})"
                )
            self.job.out.append(ev.ReleasePush(push.handle))
        self._judge_lateness(closed)
        self.job.out.append(self.job.announce(event.fragment))

    def _count_merged(self, slot: Slot, header: PushHeader, version: int) -> None:
        assert self.job.ledger
        current = self.job.ledger.of_open_tenure(header)
        self.job.ledger.merge(header)
        slot.merged_pushes += 1
        slot.merged_last_step[header.fragment] = max(header.last_step, slot.merged_last_step.get(header.fragment, 0))
        if current:
            slot.merged[header.fragment] = MergedPush(header.sequence, version)
            accepted = slot.accepted_sequence.get(header.fragment, 0)
            slot.accepted_sequence[header.fragment] = max(accepted, header.sequence)

    def _judge_lateness(self, closed: Round) -> None:
        """A slot late in three rounds running shows as starved."""
        responded = closed.slots()
        for index in closed.pulled:
            slot = self.job.members.slots[index]
            if index in responded or not slot.occupied:
                slot.late_rounds, slot.starved = 0, False
                continue
            slot.late_rounds += 1
            if slot.late_rounds >= LATE_ROUNDS and not slot.starved:
                slot.starved = True
                self.job.note(EventKind.STARVED, slot, f"slot {index} was late in {slot.late_rounds} rounds running")

    def pull_open_rounds(self, slot: Slot) -> None:
        """A newcomer is asked to take part in what is open."""
        assert self.job.rounds
        if self.job.config.rules.deterministic or slot.connection is None:
            return
        for opened in self.job.rounds.open.values():
            if not opened.merging and slot.index not in opened.slots():
                opened.pulled.add(slot.index)
                self.job.out.append(ev.Pull(slot.connection, opened.id, opened.fragment, opened.version))

    def open_rounds(self, now: float) -> None:
        assert self.job.rounds
        active = self.job.progress()
        while (fragment := self.job.rounds.due(active)) is not None:
            opened = self.job.rounds.open_round(fragment, now, active)
            for index in sorted(opened.pulled):
                connection = self.job.members.slots[index].connection
                if connection is not None:
                    self.job.out.append(ev.Pull(connection, opened.id, fragment, opened.version))
            self._take_offers(opened, now)

    def _take_offers(self, opened: Round, now: float) -> None:
        """Waiting offers count in this round; they were judged when they came."""
        assert self.job.rounds
        waiting, self.job.offers[opened.fragment] = self.job.offers[opened.fragment], []
        for offer in waiting:
            self.job.rounds.accept(opened, offer, now)

    def take_ready_rounds(self, now: float) -> None:
        assert self.job.rounds
        if self.job.phase is JobPhase.DRAINING and not self.job.config.rules.deterministic:
            return  # one last merge of everything, when all have offered
        missed = self.job.members.lost and self.job.config.on_region_lost != "Continue"
        if self.job.phase is JobPhase.HOLDING and missed:
            return  # enough may have pushed, but it is to wait for them
        reachable = self.job.members.reachable()
        for opened in list(self.job.rounds.open.values()):
            if self.job.rounds.ready(opened, now, reachable):
                self.job.out.append(self._take(opened, now))

    def _take(self, opened: Round, now: float) -> ev.Merge:
        """Close the round to further pushes; the merge that it asks for."""
        assert self.job.rounds and self.job.ledger
        times = [s.step_seconds for s in self.job.members.slots if s.state is SlotState.ACTIVE and s.step_seconds > 0]
        pushes = self.job.rounds.take(opened, median(times) if times else None)
        headers = [push.header for push in pushes]
        shares = normalised_weights(self.job.config.weights, [h.tokens for h in headers], [h.steps for h in headers])
        responders = tuple(
            ev.Responder(push.header, push.handle, float(share), opened.version - push.header.oldest_version)
            for push, share in zip(pushes, shares, strict=True)
        )
        quorum_at = opened.quorum_at if opened.quorum_at is not None else now
        return ev.Merge(
            fragment=opened.fragment,
            version=opened.version + 1,
            round=opened.id,
            responders=responders,
            quorum_seconds=quorum_at - opened.opened_at,
            waited_seconds=now - opened.opened_at,
            job_tokens=self.job.ledger.total_trained(),
        )

    def finish_rounds(self, now: float) -> tuple[bool, list[Action]]:
        """The last merges, when everybody has left: whether none is under way any
        more, and the actions that start those which are due."""
        assert self.job.rounds
        out: list[Action] = []
        for fragment in range(self.job.rounds.fragments):
            opened = self.job.rounds.open.get(fragment)
            if opened is not None and opened.merging:
                continue
            if opened is None and self.job.offers[fragment]:
                if len({o.header.slot for o in self.job.offers[fragment]}) < self.job.config.rules.quorum:
                    continue  # short of K: they stay, and merge after a resume
                opened = self.job.rounds.open_round(fragment, now, ())
            if opened is None:
                continue
            self._take_offers(opened, now)
            if len(opened.slots()) >= self.job.config.rules.quorum:
                out.append(self._take(opened, now))
        return not any(r.merging for r in self.job.rounds.open.values()), out

    # ---------------------------------------------------------------- after a restart

    def recover(self, fragment: int, version: int, headers: Iterable[PushHeader], epoch: int) -> None:
        """A merge record newer than the state, made in ``epoch``; call in version order."""
        assert self.job.rounds and self.job.ledger
        if version <= self.job.rounds.versions[fragment]:
            return
        self.job.history.settle(epoch)
        headers = list(headers)
        for header in headers:
            slot = self.job.slot(header.slot)
            if slot is None:
                continue
            slot.step = max(slot.step, header.report.slot_step)
            if self.job.ledger.of_open_tenure(header):
                self.job.ledger.tell(slot.index, header.report)
            self._count_merged(slot, header, version)
        self.job.rounds.recovered(fragment, version, headers)
        self.job.merges += 1

    def restore_offer(self, header: PushHeader, handle: int, norm: float) -> bool:
        """A spooled offer found in the store; False: it was merged (or makes no sense) and may go."""
        assert self.job.rounds and self.job.ledger
        slot = self.job.slot(header.slot)
        if slot is None or header.fragment >= self.job.rounds.fragments:
            return False
        if header.first_step <= slot.merged_last_step.get(header.fragment, 0):
            return False
        cell = self.job.ledger.books[slot.index].cells[header.fragment]
        if not self.job.ledger.of_open_tenure(header) and header.id not in cell.held:
            if slot.index not in self.job.forgotten:
                return False
            hold(self.job.ledger, header)
        if self.job.ledger.of_open_tenure(header):
            self.job.ledger.tell(slot.index, header.report)
            slot.accepted_sequence[header.fragment] = max(
                header.sequence, slot.accepted_sequence.get(header.fragment, 0)
            )
        slot.step = max(slot.step, header.report.slot_step)
        self.job.offers[header.fragment].append(Accepted(header, handle, norm))
        return True


def normalised_weights(kind: str, tokens: Sequence[int], steps: Sequence[int]) -> list[float]:
    """Normalised weights, one per push.

    ``tokens-quality``: tokens · (tokens / steps), quantity times quality (the
    paper's); ``tokens``: tokens; ``uniform``: the same for all. A push of zero
    steps weighs nothing. Raises ValueError for an unknown kind or if nothing
    weighs anything.
    """
    if kind == "tokens-quality":
        raw = [t * (t / s) if s else 0.0 for t, s in zip(tokens, steps, strict=True)]
    elif kind == "tokens":
        raw = [float(t) if s else 0.0 for t, s in zip(tokens, steps, strict=True)]
    elif kind == "uniform":
        raw = [1.0 if s else 0.0 for s in steps]
    else:
        raise ValueError(f"sync.merge.weights: {kind!r} is none of tokens-quality, tokens, uniform")
    total = sum(raw)
    if not total > 0:
        raise ValueError("no push of the merge carries a step")
    return [value / total for value in raw]
