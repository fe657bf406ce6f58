"""Which pushes count: the rules of algorithm.md section 4.5 as one function.

A push is checked twice: its header before any byte is read, so that a hopeless
transfer costs nothing, and again when all bytes are here, since a round may have
been taken meanwhile. The order of the rules is the order of the names that an
operator would want to read: who, what, when, which steps, how large.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from diloco_protocol.vocabulary import PushRefusal, SlotState
from diloco_syncer.core.events import PushHeader
from diloco_syncer.core.members.slots import Slot
from diloco_syncer.core.merging.rounds import Round

GATE_SAMPLES = 5  # norms seen before the gate judges
GATE_WINDOW = 31


@dataclass(frozen=True, slots=True)
class PushLimits:
    encoding: str
    max_versions: int
    deterministic: bool


def check_header(
    header: PushHeader,
    *,
    rules: PushLimits,
    slot: Slot | None,
    version: int,
    opened: Round | None,
    layout_digest: str,
    base_known: bool,
) -> tuple[PushRefusal, str] | None:
    """None: the push may count. ``slot``: the one it names; ``version``: v_p now;
    ``opened``: the fragment's open round; ``base_known``: its base is in this
    store's history."""
    if slot is None or not slot.incarnation:
        return PushRefusal.NO_SLOT, f"slot {header.slot} is not held by anybody: join first"
    if header.incarnation != slot.incarnation:
        return PushRefusal.FENCED, f"incarnation {header.incarnation} was replaced by {slot.incarnation}"
    if not slot.occupied and slot.state is not SlotState.LOST:
        return PushRefusal.NO_SLOT, f"slot {slot.index} is {slot.state}"
    if header.layout_digest != layout_digest:
        return PushRefusal.OTHER_LAYOUT, f"layout {header.layout_digest[:12]}, the job's is {layout_digest[:12]}"
    if header.encoding != rules.encoding:
        return PushRefusal.WRONG_ENCODING, f"encoding {header.encoding!r}, the job's is {rules.encoding!r}"
    if not base_known:
        return (
            PushRefusal.OTHER_EPOCH,
            f"base epoch {header.epoch} version {header.base_version} is not in this store's history",
        )
    if header.base_version > version:
        return PushRefusal.FUTURE_BASE, f"base version {header.base_version} is above {version}"
    if header.sequence <= slot.accepted_sequence.get(header.fragment, 0):
        return PushRefusal.REPEATED, f"push {header.sequence} of fragment {header.fragment} was taken before"
    problem = _inconsistency(header)
    if problem:
        return PushRefusal.INCONSISTENT, problem
    if header.steps == 0 or header.tokens == 0:
        return PushRefusal.NO_STEPS, "the push carries no step"
    merged = slot.merged.get(header.fragment)
    if merged is not None and header.base_version < merged.version:
        return (
            PushRefusal.ALREADY_MERGED,
            f"base {header.base_version} is older than the slot's merge in {merged.version}",
        )
    if header.first_step <= slot.merged_last_step.get(header.fragment, 0):
        return PushRefusal.ALREADY_MERGED, f"slot step {header.first_step} was merged before"
    age = version - header.oldest_version
    if age > rules.max_versions:
        return PushRefusal.TOO_OLD, f"age {age} is above maxVersions {rules.max_versions}"
    if header.round:
        if opened is None and rules.deterministic and header.round == version + 1 == header.base_version + 1:
            return None
        if opened is None or opened.merging or opened.id != header.round:
            return PushRefusal.OTHER_ROUND, f"round {header.round} of fragment {header.fragment} is not open"
    elif opened is not None and opened.merging and header.slot in opened.slots():
        return (
            PushRefusal.ALREADY_MERGED,
            "an earlier push of these steps is being merged; adopt it, then offer the rest",
        )
    return None


def _inconsistency(header: PushHeader) -> str:
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


class NormGate:
    """Refuses a push whose norm is ``factor`` times the running median of its fragment."""

    def __init__(self, factor: float | None, fragments: int) -> None:
        self.factor = factor
        self.norms: list[deque[float]] = [deque(maxlen=GATE_WINDOW) for _ in range(fragments)]

    def check(self, fragment: int, norm: float) -> tuple[PushRefusal, str] | None:
        seen = self.norms[fragment]
        if self.factor is None or len(seen) < GATE_SAMPLES:
            return None
        middle = median(seen)
        if norm > self.factor * middle:
            return (
                PushRefusal.NORM_GATE,
                f"norm {norm:.3g} is above {self.factor:g} x the running median {middle:.3g}",
            )
        return None

    def add(self, fragment: int, norms: tuple[float, ...]) -> None:
        self.norms[fragment].extend(norms)
