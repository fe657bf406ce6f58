"""Which pushes count (algorithm.md section 4.5). Every check that a push passes, in this order. Paths are
those below ``diloco_syncer``; a function without a path is one of this file.

The connection itself was checked before: TLS, the certificate's job and role, the join token
(``server/tls/listener.py``, ``server/tls/access.py``). Then, before the push's bytes are read, so that a
hopeless transfer costs nothing:

 1. The header is small enough, is a message, has a known format number, and names this job; the process that
    it names has a session, with TLS under a certificate of the same party as this connection's
    (``server/uploads.py`` ``upload`` and ``_receive``, ``server/sessions.py`` ``find_caller``).
 2. Every number of the header is in range (``diloco_protocol/wire/convert.py`` ``push_header``).
 3. The syncer is not recovering lost versions; else the learner tries again later
    (``runtime/pushes.py`` ``receive``, ``core/recovery/lost_versions.py`` ``is_pending``).
 4. Version 0 exists, the fragment exists (``_check_fragment``).
 5. The sender is the one that holds the slot, under its newest incarnation, and made the push in the slot's
    present tenure (``_check_sender``). The push is not a repeated one (``_check_repeated``): this comes before what
    may have changed since the first copy was accepted, for the learner takes any other refusal to mean that none was,
    but for one that it has no session.
 6. The job has not ended (``_check_end``). When it has, this is also the reason for whatever 4 and 5 refuse, except
    for a repeated push. Its last merges are not made yet (``_check_last_merges``). Layout and encoding are its
    (``_check_format``).
 7. The base is a version that this store has had, and not a future one (``_check_base``).
 8. Its counts agree with each other (``_check_counts``).
 9. None of its steps was merged before, and none is too old (``_check_steps``).
10. Its round is open, or opens with it (``core/books/deterministic.py`` ``opens_round``); an offer's
    fragment is not merging an earlier push of the same slot (``_check_round``).
11. It can be true: no more tokens than its steps, and its tenure, can have trained (``_check_possible``).
12. It has exactly as many bytes as its encoding gives the fragment (``runtime/pushes.py`` ``receive``).
13. There is room for it, else the learner tries again later; a part that overlaps an earlier one begins
    the upload anew (``runtime/multipart.py`` ``receive_part``).

When all bytes are here:

14. The checksum of every part is right (``runtime/multipart.py`` ``receive_part``).
15. Check 3 once more, since a loss may have been found meanwhile (``runtime/pushes.py`` ``_judge_push``), and checks
    4 to 11, since its round may have closed (``core/merging/aggregation.py`` ``receive_push``).
16. All its values are finite (``check_content``).
17. No piece of it is far larger than the parameters, unless such pushes are usual in the fragment, another
    learner's is as large, or a job's only learner sends them again and again (``check_content``). In
    deterministic mode a round's pushes are judged together, when it has them all (``aggregation.py``
    ``describe_out_of_scale``).
18. Its norm is, for its steps, not far above those of the fragment's merged pushes (``core/books/norm_gate.py``).

A push that passed them is in the round, or waits as an offer. It can still be replaced by a newer push of the same
slot that carries the same steps (``core/books/rounds.py`` ``superseded``). Each refusal has a reason of its own,
which metrics count; the learner keeps the work of a refused push, is asked again, and sends it in the next one.
"""

from __future__ import annotations

from diloco_protocol.vocabulary import ENDED_PHASES, JobPhase, PushRefusal, SlotState
from diloco_protocol.wire.records import PushHeader
from diloco_syncer.core.books.rounds import Round
from diloco_syncer.core.books.slots import TURNS_AHEAD, Slot
from diloco_syncer.core.reports import find_nonsense
from diloco_syncer.core.state import JobState

Refusal = tuple[PushRefusal, str]

MOST_GROWTH = 10.0  # of a push's piece, beside its parameters and the model's
OUT_OF_SCALE = f"a tensor would move by {{growth:.3g}} times the size of its values: at most {MOST_GROWTH:g}"


class PushChecks:
    """The core's checks. Each returns the reason and the words of a refusal, or None."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._config = state.config

    def check_header(self, header: PushHeader, process: str | None = None) -> Refusal | None:
        """Judge a push without its bytes. ``process``: the one that sends it; None: it was compared before."""
        slot, ended = self._state.slot(header.slot), self._check_end()
        refusal = self._check_fragment(header) or self._check_sender(header, slot, process)
        if refusal is not None:
            return ended or refusal
        assert slot is not None and self._state.rounds
        version, opened = self._state.rounds.versions[header.fragment], self._state.rounds.open.get(header.fragment)
        return (
            _check_repeated(header, slot)
            or ended
            or self._check_last_merges()
            or self._check_format(header)
            or self._check_base(header, version)
            or _check_counts(header)
            or self._check_steps(header, slot, version, opened)
            or self._check_round(header, version, opened)
            or self._check_possible(header, slot)
        )

    def check_content(self, header: PushHeader, norm: float, finite: bool, growth: float = 0.0) -> Refusal | None:
        """Judge a push's decoded values by what was measured of them: ``norm`` is the L2 norm of them all, ``growth``
        their size beside the parameters."""
        if not finite:
            return PushRefusal.NOT_FINITE, "the outer gradient has NaN or infinite values"
        gate, together = self._state.norm_gate, self._config.mode.judges_together
        alone = self._state.members.is_alone(header.slot)
        if (
            not (together and header.round)
            and self.is_out_of_scale(header, norm, growth)
            and (together or not gate.record_growth(header.fragment, header.slot, alone))
        ):
            return PushRefusal.OUT_OF_SCALE, OUT_OF_SCALE.format(growth=growth)
        objection = gate.objection(header.fragment, norm, self._usual_steps(header))
        return (PushRefusal.NORM_GATE, objection) if objection else None

    def is_out_of_scale(self, header: PushHeader, norm: float, growth: float) -> bool:
        """Whether a push is far larger than the parameters, and than is usual in its fragment."""
        usual = self._state.norm_gate.is_usual(header.fragment, norm, self._usual_steps(header))
        return growth > MOST_GROWTH and not usual

    def _usual_steps(self, header: PushHeader) -> int:
        return min(header.steps, TURNS_AHEAD * self._config.max_steps)  # more are of pushes that were refused before

    def _check_end(self) -> Refusal | None:
        phase = self._state.phase
        return (PushRefusal.ENDED, f"the job is {phase.value}") if phase in ENDED_PHASES else None

    def _check_fragment(self, header: PushHeader) -> Refusal | None:
        rounds = self._state.rounds
        if not rounds:
            return PushRefusal.OTHER_LAYOUT, "version 0 does not exist yet"
        if not 0 <= header.fragment < rounds.fragments:
            return PushRefusal.INCONSISTENT, f"there is no fragment {header.fragment}"
        return None

    def _check_last_merges(self) -> Refusal | None:
        if self._state.phase is JobPhase.EVALUATING:
            return PushRefusal.ENDED, "the job's last merges are made"
        return None

    def _check_sender(self, header: PushHeader, slot: Slot | None, process: str | None) -> Refusal | None:
        if slot is None or not slot.holder.incarnation:
            return PushRefusal.NO_SLOT, f"no process holds slot {header.slot}: join first"
        if process is not None and process != slot.holder.process:
            return PushRefusal.FENCED, f"slot {slot.index} is another process's"
        if header.incarnation != slot.holder.incarnation:
            return PushRefusal.FENCED, f"incarnation {header.incarnation} was replaced by {slot.holder.incarnation}"
        assert self._state.ledger
        tenure = self._state.ledger.books[slot.index].first_incarnation
        if header.report.tenure not in (0, tenure):
            return PushRefusal.FENCED, f"it is work of tenure {header.report.tenure}; now is tenure {tenure}"
        if not slot.occupied and slot.state is not SlotState.LOST:
            return PushRefusal.NO_SLOT, f"slot {slot.index} is {slot.state}"
        return None

    def _check_format(self, header: PushHeader) -> Refusal | None:
        layout, encoding = self._state.layout_digest, self._config.encoding
        if header.layout_digest != layout:
            return PushRefusal.OTHER_LAYOUT, f"layout {header.layout_digest[:12]}, the job's is {layout[:12]}"
        if header.encoding != encoding:
            return PushRefusal.WRONG_ENCODING, f"encoding {header.encoding!r}, the job's is {encoding!r}"
        return None

    def _check_base(self, header: PushHeader, version: int) -> Refusal | None:
        if not self._store_had(header.epoch, header.fragment, header.base_version):
            base = f"base epoch {header.epoch} version {header.base_version}"
            return PushRefusal.OTHER_EPOCH, f"{base} is not in this store's history"
        if header.base_version > version:
            return PushRefusal.FUTURE_BASE, f"base version {header.base_version} is above {version}"
        return None

    def _store_had(self, epoch: int, fragment: int, version: int) -> bool:
        """Whether this store has had that version under that epoch. A store that lost data began its epoch below
        what learners saw before."""
        if epoch > self._state.epoch:
            return False
        later = [versions for began, versions in self._state.epochs if began > epoch]
        return not later or version <= later[0][fragment]

    def _check_possible(self, header: PushHeader, slot: Slot) -> Refusal | None:
        """Refuse what carries, with the pushes that were merged before it, more than can have been trained."""
        assert self._state.ledger
        merged = self._state.ledger.books[slot.index].cells[header.fragment].tenure_merged
        trained = header.report.trained_tokens
        nonsense = find_nonsense(self._state, slot, header.report)
        if header.tokens > header.steps * self._config.step_tokens:
            nonsense = f"{header.tokens} tokens in {header.steps} steps"
        elif merged + header.tokens > trained:
            nonsense = f"{header.tokens} tokens, {merged} were merged before, and its learner has trained {trained}"
        return (PushRefusal.INCONSISTENT, nonsense) if nonsense else None

    def _check_steps(self, header: PushHeader, slot: Slot, version: int, opened: Round | None) -> Refusal | None:
        merged = slot.pushes.merged.get(header.fragment)
        if merged is not None and header.base_version < merged.version:
            words = f"base {header.base_version} is older than the slot's merge in {merged.version}"
            return PushRefusal.ALREADY_MERGED, words
        if header.first_step <= slot.merged_last_step.get(header.fragment, 0):
            return PushRefusal.ALREADY_MERGED, f"slot step {header.first_step} was merged before"
        # What comes while its fragment merges can be merged in the version after that only.
        age = version - header.oldest_version + (opened is not None and opened.merging)
        if age > self._config.max_versions:
            return PushRefusal.TOO_OLD, f"age {age} is above maxVersions {self._config.max_versions}"
        return None

    def _check_round(self, header: PushHeader, version: int, opened: Round | None) -> Refusal | None:
        assert self._state.rounds
        if header.round and self._config.mode.is_scheduled:
            if opened is None and self._config.mode.opens_round(header, version):
                return None
            if opened is None or opened.merging or opened.id != header.round:
                return PushRefusal.OTHER_ROUND, f"round {header.round} of fragment {header.fragment} is not open"
        elif header.round >= self._state.rounds.next_round:
            return PushRefusal.OTHER_ROUND, f"there was no round {header.round} yet"
        elif opened is not None and opened.merging and header.slot in opened.slots():
            words = "an earlier push of these steps is being merged; adopt it, then offer the rest"
            return PushRefusal.ALREADY_MERGED, words
        return None


def _check_repeated(header: PushHeader, slot: Slot) -> Refusal | None:
    if header.sequence <= slot.pushes.accepted_sequence.get(header.fragment, 0):
        return PushRefusal.REPEATED, f"push {header.sequence} of fragment {header.fragment} was taken before"
    return None


def _check_counts(header: PushHeader) -> Refusal | None:
    contradiction = _contradiction(header)
    if contradiction:
        return PushRefusal.INCONSISTENT, contradiction
    if header.steps == 0:
        return PushRefusal.NO_STEPS, "the push carries no step"
    if header.tokens == 0:
        return PushRefusal.NO_TOKENS, f"the push carries {header.steps} steps and no token"
    return None


def _contradiction(header: PushHeader) -> str:
    """How the header contradicts itself; empty: it does not."""
    if header.steps < 0 or header.tokens < 0 or not 0 <= header.compute_seconds < 1e12:
        return "steps, tokens and compute seconds are not negative"
    if header.steps and header.last_step - header.first_step + 1 != header.steps:
        return f"steps {header.first_step}..{header.last_step} are not {header.steps}"
    if header.oldest_version > header.base_version:
        return f"oldest version {header.oldest_version} is above the base {header.base_version}"
    counts = header.report.fragments
    if header.fragment >= len(counts) or counts[header.fragment].tokens < header.tokens:
        return "the report inside tells fewer tokens than the push carries"
    if header.report.slot_step < header.last_step:
        return "the report inside is older than the push"
    return ""
