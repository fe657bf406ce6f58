"""The status document and report.json of the job, from its state and what only the shell knows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diloco_protocol.documents import (
    EventRow,
    LearnersInMerges,
    MergeSeconds,
    OutputRow,
    Quorum,
    RegionAbsence,
    RegionRow,
    Report,
    ReportLearner,
    ReportSyncer,
    RoundRow,
    ShardRow,
    SlotLink,
    SlotRow,
    Span,
    StatusDocument,
    StopGoal,
    TlsStatus,
    Tokens,
    TrainingLoss,
    VersionRange,
)
from diloco_protocol.vocabulary import ENDED_PHASES, TRAINING_PHASES, JobPhase, SlotState
from diloco_syncer.core.books.slots import Slot
from diloco_syncer.core.state import JobState

_OUTCOMES = {JobPhase.COMPLETE: "complete", JobPhase.FAILED: "failed"}  # of those that have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellFigures:
    """What only the shell knows of the job, as the documents have it."""

    job: str  # its name
    store_problem: str
    sessions: int
    links: Mapping[int, SlotLink]  # by slot: of those that have a session
    slot_bytes: Callable[[int], tuple[int, int]]  # payload up and down of a slot's learners
    regions: list[RegionRow]  # all that carried something
    refused_uploads: Mapping[str, int]  # by reason
    tls: TlsStatus
    merge_seconds: MergeSeconds
    events: list[EventRow]
    ledger_imbalances: int = 0
    output: OutputRow | None = None
    shards: list[ShardRow] = field(default_factory=list)


def goodput(state: JobState, now: float) -> float:
    """Compute seconds of merged steps ÷ (P × slots × elapsed), 0..1 (algorithm.md section 1).

    Wall time counts for every slot of the job, whether a process was there or not.
    """
    slot_seconds = state.clock.slot_seconds(now)
    if state.ledger is None or slot_seconds <= 0:
        return 0.0
    share = state.ledger.merged_compute_seconds() / (state.ledger.fragments * slot_seconds)
    return min(1.0, share)  # a store that was set back has lost time, too


def stop_progress(state: JobState, now: float) -> float:
    """How much of the job's stop is reached, 0 to 1."""
    return 0.0 if state.ledger is None else min(1.0, state.reached_amount(now) / state.config.stop[1])


def seconds_left(state: JobState, now: float) -> float | None:
    """Seconds until the stop, if the rest takes as long as what is done did; None: not known, or nothing is trained."""
    done = stop_progress(state, now)
    known = done > 0 and state.phase in TRAINING_PHASES
    return state.clock.elapsed(now) * (1.0 - done) / done if known else None


def newest_loss(state: JobState) -> float | None:
    """Nats per token: the merged model's last score, else the mean of the active learners' last steps, and when all
    have left that of the last steps there were; None: there is neither."""
    if state.scores.rows:
        return state.scores.rows[-1][1]
    known = [(slot.state is SlotState.ACTIVE, slot.loss) for slot in state.members.slots if slot.loss is not None]
    losses = [loss for active, loss in known if active] or [loss for _, loss in known]
    return sum(losses) / len(losses) if losses else None


def training_loss(state: JobState) -> TrainingLoss | None:
    """The means of the learners' first and last losses, where no evaluator has scored the model; None: it has, or no
    loss is known."""
    if state.scores.rows or (state.scores.initial, state.scores.final) != (None, None):
        return None
    slots = state.members.slots
    ends = [(slot.first_loss, slot.loss) for slot in slots if slot.first_loss is not None and slot.loss is not None]
    if not ends:
        return None
    firsts, lasts = zip(*ends, strict=True)
    return TrainingLoss(first=sum(firsts) / len(ends), last=sum(lasts) / len(ends))


def _slot_row(state: JobState, slot: Slot, now: float, shell: ShellFigures) -> SlotRow:
    ledger = state.ledger
    bytes_up, bytes_down = shell.slot_bytes(slot.index)
    ranks = slot.reported.ranks
    stepped = ranks if slot.reported.advanced else None
    return SlotRow(
        slot=slot.index,
        retired=slot.retired,
        region=slot.holder.region,
        ordinal=slot.holder.ordinal,
        process=slot.holder.process,
        incarnation=slot.holder.incarnation,
        incarnations=slot.incarnations,
        state=slot.state,
        ready=slot.holder.ready,
        step=slot.step,
        steps=ledger.steps(slot.index) if ledger else 0,
        tokens=ledger.trained(slot.index) if ledger else 0,
        loss=slot.loss,
        diverged=slot.reported.diverged,
        step_seconds=slot.step_seconds,
        compute_seconds=ledger.compute_seconds(slot.index) if ledger else 0.0,
        stalled_seconds=ledger.stalled_seconds(slot.index) if ledger else 0.0,
        merged_pushes=slot.merged_pushes,
        heard_seconds_ago=now - slot.holder.heard_at if slot.occupied else None,
        starved=slot.pushes.starved,
        paused=slot.reported.paused,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        link=shell.links.get(slot.index),
        problem=slot.told.problem,
        sequences_per_step=slot.reported.sequences / max(1, slot.step - slot.reported.step_at_seat),
        ranks=1 if ranks is None else ranks.count,
        slowest_rank=None if stepped is None else stepped.slowest,
        slowest_rank_seconds=None if stepped is None else stepped.late_seconds,
    )


def _token_totals(state: JobState) -> Tokens:
    return state.ledger.totals() if state.ledger else Tokens(trained=0, merged=0, pending=0, dropped=0)


def learners_in_merges(state: JobState) -> LearnersInMerges | None:
    """How many learners merges have, and what takes how long; None: no merge was made that counts."""
    rounds = state.rounds
    if rounds is None or rounds.learners_in_merges.value is None:
        return None
    return LearnersInMerges(
        recent=rounds.learners_in_merges.value,
        overall=rounds.counted_learners / rounds.counted_merges,
        exchange_seconds=rounds.exchange_seconds.value,
        overlap_seconds=rounds.overlap_seconds,
    )


def status_document(state: JobState, now: float, shell: ShellFigures) -> StatusDocument:
    slots = [_slot_row(state, slot, now, shell) for slot in state.members.slots]
    kind, limit = state.config.stop
    return StatusDocument(
        job=shell.job,
        phase=state.phase,
        message=shell.store_problem or state.phase_message,
        epoch=state.epoch,
        elapsed_seconds=state.clock.elapsed(now),
        stop=StopGoal.model_validate({"kind": kind, "limit": limit}),
        progress=stop_progress(state, now),
        seconds_left=seconds_left(state, now),
        step=state.members.furthest,
        loss=newest_loss(state),
        quorum=Quorum(active=sum(slot.in_quorum for slot in slots), required=state.config.rules.quorum),
        standby=len(state.members.standby),
        standbys=[join.process for join in state.members.standby.values()],
        evaluators=len(state.members.evaluators),
        versions=list(state.versions),
        parameters=sum(state.fragment_elements),
        rounds=[
            RoundRow(
                fragment=opened.fragment,
                round=opened.id,
                merging=opened.merging,
                open_seconds=now - opened.opened_at,
                unserved=not state.shards.is_served(opened.fragment),
                overdue=opened.overdue and not opened.merging,
                message=state.describe_overdue_round(opened) if opened.overdue and not opened.merging else "",
                responders=sorted(opened.slots()),
                waiting=sorted((opened.pulled & state.members.reachable()) - opened.slots()),
            )
            for opened in (state.rounds.open.values() if state.rounds else ())
        ],
        slots=slots,
        tokens=_token_totals(state),
        tokens_per_second=state.clock.rate(now),
        merges=state.merges,
        learners_in_merges=learners_in_merges(state),
        goodput=goodput(state, now),
        uptime=state.clock.uptime(now),
        eval_loss=list(state.scores.rows),
        hold_since_seconds=state.clock.holds[-1][0] if state.clock.holding else None,
        bytes_up=sum(region.bytes_up for region in shell.regions),
        bytes_down=sum(region.bytes_down for region in shell.regions),
        refused=dict(shell.refused_uploads),
        regions_lost=list(state.members.lost_regions),
        sessions=shell.sessions,
        refusals=state.refusals.rows(now),
        regions=shell.regions,
        shards=shell.shards,
        tls=shell.tls,
        store_problem=shell.store_problem,
        seconds=shell.merge_seconds,
        events=shell.events,
        large_merges=state.norm_gate.large_merges,
        ledger_imbalances=shell.ledger_imbalances,
        output=shell.output,
    )


def report(state: JobState, now: float, shell: ShellFigures, spec_digest: str, peak_rss_bytes: int) -> Report:
    """report.json, once the job has ended or as it stands, without ``faults``, which only whoever causes them knows.

    ``restarts`` counts the syncers that this store has had before this one, those of earlier runs included.
    ``outcome`` of a job that has not ended is running; of one that was suspended or deleted, interrupted.
    """
    versions, merged = state.versions or [0], learners_in_merges(state)
    end = state.clock.elapsed(now)
    slots = [_slot_row(state, slot, now, shell) for slot in state.members.slots]
    names = {slot.index: f"{region}-{ordinal}" for (region, ordinal), slot in state.members.nominal.items()}
    names |= {slot.index: slot.learner for slot in state.members.slots if slot.holder.region}
    return Report(
        outcome=_OUTCOMES.get(state.phase, "interrupted" if state.phase in ENDED_PHASES else "running"),
        message=state.phase_message if state.phase is JobPhase.FAILED else "",
        seed=state.config.seed,
        spec_digest=spec_digest,
        layout_digest=state.layout_digest,
        wall_seconds=end,
        steps=state.members.furthest,
        merges=state.merges,
        learners_in_merges=None if merged is None else merged.overall,
        versions=VersionRange(min=min(versions), max=max(versions)),
        tokens=_token_totals(state),
        ledger=state.ledger.rows() if state.ledger else [],
        goodput=goodput(state, now),
        uptime=state.clock.uptime(now),
        initial_loss=state.scores.initial,
        final_loss=state.scores.final,
        training_loss=training_loss(state),
        eval_loss=list(state.scores.rows),
        bytes_up=sum(region.bytes_up for region in shell.regions),
        bytes_down=sum(region.bytes_down for region in shell.regions),
        regions=shell.regions,
        learners=[ReportLearner.model_validate({**dict(slot), "learner": names.get(slot.slot, "")}) for slot in slots],
        holds=[
            Span(from_seconds=since, to_seconds=end if until is None else until) for since, until in state.clock.holds
        ],
        regions_lost=[
            RegionAbsence(
                region=absence.region,
                from_seconds=absence.since,
                to_seconds=end if absence.until is None else absence.until,
            )
            for absence in state.members.absences
        ],
        syncer=ReportSyncer(epoch=state.epoch, restarts=state.epoch - 1, peak_rss_bytes=peak_rss_bytes),
        output=shell.output,
    )
