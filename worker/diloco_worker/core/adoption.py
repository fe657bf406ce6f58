"""The adoption rule: what a learner does with its own work when a broadcast comes (algorithm.md section 3).

Theory of operation
-------------------
There are no tensors, threads, clocks or sockets here. This module counts and decides; ``fragments`` moves the
numbers, ``net`` the bytes.

A learner trains *above* a base: for each fragment p, θ_p = base_p + its own work. A *point* says how far it is: slot
step, tokens and compute seconds trained in this tenure (a process's unbroken use of a slot). A fragment's work above
its base is a list of *marks*, each a version and the point from which steps were made on it. The fragment's work is
``now - marks[0].point``, in integers, and counting a step costs the same however many fragments there are.

A *snapshot* is θ_p at one point, taken for a push or an offer. It is kept until the push's fate is known: if the push
is merged, the work up to the snapshot is in Θ', and the work since then is not. Sending changes no count. If very many
snapshots are open, the values of the oldest are given up; if one of those is merged after all, the steps since then
are dropped (overlap).

Example: the base is version 4 at step 10. A pull at step 18 takes a snapshot of 8 steps. Version 5 comes at step 20
and says that this push was merged in it: 8 steps are confirmed, 2 stay above the new base, and with ``keep``
θ ← Θ' + (θ - snapshot). Had version 5 not merged it: θ ← Θ' + (θ - base), and all 10 steps stay above the base.

A broadcast (Θ', v') names this learner's newest push that was merged in any version up to v', and the version that
merged it. What happens to the counts (``Kind`` says what happens to θ):

- A push whose fate was open is merged: the tokens up to its snapshot are *confirmed*. With ``overwrite`` the
  tokens since then are dropped (overlap); with ``keep`` and ``mix`` the marks since the snapshot go on.
- None was: no count changes. Snapshots whose fate is still open move along with the base, so that θ - snapshot stays
  this learner's own work only.
- In either case, work older than ``max_versions`` can never be merged: its tokens are dropped (stale).

Within an epoch a lower version is ignored, and the same version with other bytes stops the learner. A higher epoch
wins whatever its version. With the same version and bytes the base only changes its label; else the base may not be in
that history, where a store has lost versions for good, and the work is rebased all the same.

In integers and at any time, per fragment: trained = confirmed + pending (now - marks[0].point) + dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.wire.records import Announcement, FragmentReport, Payload, PushPlan, StepReport

# Per fragment, with their values; only a syncer that restarts again and again leaves more open.
_MOST_SNAPSHOTS = 8
_MOST_OPEN = 4096  # in all, most of them without their values


class Rule(StrEnum):
    """spec.sync.adoption.rule."""

    OVERWRITE = "overwrite"
    KEEP = "keep"
    MIX = "mix"


class Kind(StrEnum):
    """What to do with θ_p."""

    IGNORE = "ignore"  # nothing: it is older than the base
    STOP = "stop"  # the broadcasts contradict each other: end with ``message``
    RELABEL = "relabel"  # the same bytes under a new epoch: nothing moves
    OVERWRITE = "overwrite"  # θ ← Θ'
    KEEP = "keep"  # θ ← Θ' + (θ - snapshot ``reference``)
    MIX = "mix"  # θ ← (1-α)·Θ' + α·θ
    REBASE = "rebase"  # θ ← Θ' + (θ - base)


class Dropped(StrEnum):
    """Why a learner itself gives up tokens."""

    OVERLAP = "overlap"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class AdoptionConfig:
    """The rule's numbers: H ``every`` and τ ``overlap`` in steps, ``max_steps`` alone before a pause."""

    fragments: int
    every: int
    overlap: int
    rule: Rule = Rule.KEEP
    alpha: float = 0.5
    max_versions: int = 16
    max_steps: int = 96

    @classmethod
    def of(cls, spec: JobSpec, fragments: int) -> AdoptionConfig:
        """What the job says; ``fragments`` is the layout's P."""
        sync = spec.sync
        return cls(
            fragments=fragments,
            every=sync.every,
            overlap=sync.overlap,
            rule=Rule(sync.adoption.rule),
            alpha=sync.adoption.alpha,
            max_versions=sync.staleness.max_versions,
            max_steps=spec.max_steps_alone,
        )


@dataclass(frozen=True, slots=True)
class Point:
    """How far a tenure is: the slot's step, and tokens and compute seconds of the tenure."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """From ``point`` on, steps were made on ``version``."""

    version: int
    point: Point


@dataclass(frozen=True, slots=True)
class Base:
    """The broadcast last adopted; ``full`` stands for its bytes."""

    epoch: int
    version: int
    full: Payload


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with θ_p, and with what is kept beside it. Snapshots are named by their push's sequence.

    ``reference``: the snapshot that KEEP subtracts. ``merged``: the push whose merge this broadcast confirms, 0: none;
    what error feedback kept of it becomes the residual. ``forget``: snapshots that are not needed after the move.
    ``move``: snapshots to which Θ' - base is added.
    """

    kind: Kind
    fragment: int
    message: str = ""
    reference: int = 0
    alpha: float = 0.0
    merged: int = 0
    forget: tuple[int, ...] = ()
    move: tuple[int, ...] = ()

    @property
    def moves_parameters(self) -> bool:
        """Whether θ_p changes and the base becomes Θ'."""
        return self.kind in (Kind.OVERWRITE, Kind.KEEP, Kind.MIX, Kind.REBASE)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    plan: PushPlan
    point: Point
    values: bool = True  # whether θ at ``point`` is still kept


@dataclass(slots=True)
class FragmentState:
    """One fragment's counts. ``sequence`` is the newest used by this process, over all tenures; ``last_merged`` is the
    sequence of the push that was confirmed last, and the version that merged it."""

    base: Base | None = None
    marks: list[Mark] = field(default_factory=list)
    snapshots: dict[int, _Snapshot] = field(default_factory=dict)
    sequence: int = 0
    confirmed: int = 0
    last_merged: tuple[int, int] = (0, 0)
    dropped: dict[Dropped, int] = field(default_factory=lambda: dict.fromkeys(Dropped, 0))

    def oldest_version(self, now: Point) -> int | None:
        """The version on which the oldest step above the base was made; None: there is none."""
        ends = [mark.point.step for mark in self.marks[1:]] + [now.step]
        for mark, end in zip(self.marks, ends, strict=True):
            if end > mark.point.step:
                return mark.version
        return None


class Adoption:
    """All fragments of one learner. Raises ValueError where a caller breaks the order of things."""

    def __init__(self, config: AdoptionConfig) -> None:
        self.config = config
        self.now = Point()
        self.fragments = [FragmentState() for _ in range(config.fragments)]
        self.tenure = 0  # the incarnation under which it began; 0: none has
        self._start_step = 0
        self._adopted_step = 0  # when a broadcast was adopted last, of whichever fragment
        self._without_base = config.fragments

    # -------------------------------------------------------------- tenure and steps

    def begin_tenure(self, slot_step: int, tenure: int = 0) -> None:
        """Begin a tenure: there is no base and nothing is trained. Sequences go on rising. ``tenure``: the seat's,
        which reports name."""
        self.tenure = tenure
        self.now = Point(step=slot_step)
        self._start_step = self._adopted_step = slot_step
        self._without_base = len(self.fragments)
        self.fragments = [FragmentState(sequence=old.sequence) for old in self.fragments]

    @property
    def trained_steps(self) -> int:
        """Inner steps made in this tenure."""
        return self.now.step - self._start_step

    @property
    def complete(self) -> bool:
        """Whether every fragment has a base."""
        return not self._without_base

    def on_step(self, tokens: int, compute_seconds: float) -> None:
        """Count one inner step, which was made on all fragments."""
        if not self.complete:
            raise ValueError("a step was made before every fragment had a base")
        now = self.now
        self.now = Point(now.step + 1, now.tokens + tokens, now.seconds + compute_seconds)

    def pending_steps(self, fragment: int) -> int:
        """Steps above the fragment's base."""
        marks = self.fragments[fragment].marks
        return self.now.step - marks[0].point.step if marks else 0

    def pending_tokens(self, fragment: int) -> int:
        """Tokens above the fragment's base."""
        marks = self.fragments[fragment].marks
        return self.now.tokens - marks[0].point.tokens if marks else 0

    @property
    def paused(self) -> bool:
        """Whether the learner was alone for ``max_steps``: it makes no further step until it adopts a broadcast.

        It is the fragment adopted last that counts, not the one that has waited longest: rounds open at the learners'
        pace, so a learner that pauses while others of its fragments are merged would wait for itself.
        """
        return self.complete and self.now.step - self._adopted_step >= self.config.max_steps

    def report(self) -> StepReport:
        """The counts as a report says them; only meaningful once every fragment has a base."""
        now, rows = self.now, []
        for state in self.fragments:
            base, start = state.base, state.marks[0].point if state.marks else now
            rows.append(
                FragmentReport(
                    epoch=base.epoch if base else 0,
                    base_version=base.version if base else 0,
                    steps=now.step - start.step,
                    tokens=now.tokens - start.tokens,
                    confirmed_tokens=state.confirmed,
                    dropped_overlap=state.dropped[Dropped.OVERLAP],
                    dropped_stale=state.dropped[Dropped.STALE],
                )
            )
        return StepReport(
            slot_step=now.step,
            trained_steps=self.trained_steps,
            trained_tokens=now.tokens,
            fragments=tuple(rows),
            compute_seconds=now.seconds,
            paused=self.paused,
            tenure=self.tenure,
        )

    # -------------------------------------------------------------- pushes

    def snapshot(self, fragment: int, round: int) -> tuple[PushPlan, tuple[int, ...]] | None:
        """Plan a push of everything above the base, now; ``round`` 0: an offer.

        Returns the plan, and the sequences of snapshots whose values are given up to keep their number bounded. None:
        there is no token above the base (zero steps are never pushed, nor are steps that count no token).
        """
        state = self.fragments[fragment]
        steps = self.pending_steps(fragment)
        oldest = state.oldest_version(self.now)
        if state.base is None or oldest is None or not self.pending_tokens(fragment):
            return None
        start = state.marks[0].point
        state.sequence += 1
        plan = PushPlan(
            fragment=fragment,
            sequence=state.sequence,
            round=round,
            epoch=state.base.epoch,
            base_version=state.base.version,
            oldest_version=oldest,
            first_step=start.step + 1,
            last_step=self.now.step,
            steps=steps,
            tokens=self.now.tokens - start.tokens,
            compute_seconds=self.now.seconds - start.seconds,
        )
        kept = sorted(s for s, old in state.snapshots.items() if old.values)
        given_up = kept[: max(0, len(kept) - _MOST_SNAPSHOTS + 1)]
        for sequence in given_up:
            state.snapshots[sequence] = replace(state.snapshots[sequence], values=False)
        for sequence in sorted(state.snapshots)[: max(0, len(state.snapshots) - _MOST_OPEN + 1)]:
            del state.snapshots[sequence]
        state.snapshots[plan.sequence] = _Snapshot(plan, self.now)
        return plan, tuple(given_up)

    def on_push_answer(self, fragment: int, sequence: int, refused: bool) -> tuple[int, ...]:
        """Take the syncer's answer; returns the snapshots that are not needed any more. ``refused``: for good, and the
        work stays above the base. Accepted, or no answer at all: a broadcast will tell."""
        state = self.fragments[fragment]
        if not refused or sequence not in state.snapshots:
            return ()
        del state.snapshots[sequence]
        return (sequence,)

    # -------------------------------------------------------------- drain

    def drain_order(self) -> list[int]:
        """Fragments with work above their base, longest unmerged first, ties by index."""
        waiting = [p for p in range(len(self.fragments)) if self.pending_tokens(p) > 0]
        return sorted(waiting, key=lambda p: (-self.pending_steps(p), p))

    # -------------------------------------------------------------- broadcasts

    def on_broadcast(self, broadcast: Announcement) -> Decision:
        """Decide what to do with a broadcast whose bytes are here, and count as if that were done now, at a step
        boundary."""
        p, state = broadcast.fragment, self.fragments[broadcast.fragment]
        base = state.base
        if base is None:
            state.base = Base(broadcast.epoch, broadcast.version, broadcast.full)
            state.marks = [Mark(broadcast.version, self.now)]
            self._adopted_step = self.now.step
            self._without_base -= 1
            return Decision(Kind.OVERWRITE, p)
        if broadcast.epoch < base.epoch:
            return Decision(Kind.IGNORE, p)
        same_bytes = broadcast.full == base.full
        if broadcast.epoch == base.epoch:
            if broadcast.version < base.version:
                return Decision(Kind.IGNORE, p)
            if broadcast.version == base.version:
                if same_bytes:
                    return Decision(Kind.IGNORE, p)
                return self._stop(broadcast, "arrived twice with different bytes")
        elif broadcast.version == base.version and same_bytes:
            state.base = Base(broadcast.epoch, base.version, base.full)
            return Decision(Kind.RELABEL, p)
        return self._adopt(state, base, broadcast)

    def _adopt(self, state: FragmentState, base: Base, broadcast: Announcement) -> Decision:
        now = self.now
        merged: _Snapshot | None = None
        if broadcast.merged_sequence:
            # Versions do not tell whether it is confirmed: a syncer whose store lost versions up to the base merges an
            # offer, whose base it lost, in a lower one. And where it gave out an older version and then found the newer
            # ones with another learner, a push that was confirmed long ago is told of once more.
            merged = state.snapshots.get(broadcast.merged_sequence)
            sequence, version = state.last_merged
            known = max(base.version, version if broadcast.merged_sequence <= sequence else 0)
            if merged is None and broadcast.merged_version > known:
                what = f"says that push {broadcast.merged_sequence} was merged, which is not outstanding"
                return self._stop(broadcast, what)

        # Count: what was merged is confirmed; the marks since then (or all) go on.
        since = state.marks
        if merged is not None:
            state.confirmed += merged.point.tokens - since[0].point.tokens
            state.last_merged = merged.plan.sequence, broadcast.merged_version
            since = _marks_from(since, merged.point)
        alive = [s for s in state.snapshots.values() if _open_after(s, merged, broadcast)]
        state.base, self._adopted_step = Base(broadcast.epoch, broadcast.version, broadcast.full), now.step
        state.marks = since
        oldest = state.oldest_version(now)
        age = 0 if oldest is None else broadcast.version - oldest
        pending = now.tokens - since[0].point.tokens

        overwrite: Dropped | None = None
        if age > self.config.max_versions:
            overwrite = Dropped.STALE
        elif merged is not None and (self.config.rule is Rule.OVERWRITE or not merged.values):
            overwrite = Dropped.OVERLAP
        if overwrite is not None:
            state.dropped[overwrite] += pending
            state.marks = [Mark(broadcast.version, now)]
            alive = []
        else:
            state.marks = _with_mark(since, Mark(broadcast.version, now))
        forget = tuple(sorted(set(state.snapshots) - {s.plan.sequence for s in alive}))
        state.snapshots = {s.plan.sequence: s for s in alive}
        decision = Decision(
            Kind.REBASE,
            broadcast.fragment,
            merged=merged.plan.sequence if merged else 0,
            forget=forget,
            move=tuple(sorted(s for s, kept in state.snapshots.items() if kept.values)),
        )
        if overwrite is not None:
            return replace(decision, kind=Kind.OVERWRITE)
        if merged is None:
            return decision
        if self.config.rule is Rule.MIX:
            return replace(decision, kind=Kind.MIX, alpha=self.config.alpha)
        return replace(decision, kind=Kind.KEEP, reference=merged.plan.sequence)

    def _stop(self, broadcast: Announcement, what: str) -> Decision:
        message = (
            f"fragment {broadcast.fragment}: version {broadcast.version} of epoch {broadcast.epoch} {what}; "
            "two syncers write one job, or its store was changed: training on would corrupt the model"
        )
        return Decision(Kind.STOP, broadcast.fragment, message=message)


def _open_after(snapshot: _Snapshot, merged: _Snapshot | None, broadcast: Announcement) -> bool:
    """Whether the snapshot's push can still be merged after this broadcast."""
    if snapshot.plan.base_version > broadcast.version:
        return False  # its base is not in this history
    # A push may wait for a later merge than it was made for; one that has steps of the merged one is refused.
    return merged is None or snapshot.plan.first_step > merged.plan.last_step


def _marks_from(marks: Sequence[Mark], point: Point) -> list[Mark]:
    """The marks of the steps made after ``point``; the first starts exactly there."""
    before = [mark for mark in marks if mark.point.step <= point.step]
    after = [mark for mark in marks if mark.point.step > point.step]
    return [Mark(before[-1].version, point), *after]


def _with_mark(marks: Sequence[Mark], new: Mark) -> list[Mark]:
    """Append a mark. No mark keeps a version above the new one's (that history may have been lost). Adjacent marks of
    one version, or without a step between them, become one."""
    kept: list[Mark] = []
    for mark in [*marks, new]:
        mark = Mark(min(mark.version, new.version), mark.point)
        if kept and kept[-1].point.step == mark.point.step:
            kept[-1] = Mark(mark.version, kept[-1].point)
        elif not kept or kept[-1].version != mark.version:
            kept.append(mark)
    return kept
