"""What a plan looks at: the job, its pods, its objects and what its syncer says, read once.

The other files of the core take a ``View`` and decide; none of them reads an API object's
or the status document's raw fields twice in different ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from diloco_operator import names
from diloco_operator.job import Job, Place, seconds
from diloco_operator.model import Object, Observed, PlanMemory, PlanSettings, ProgramAnswer, Ref
from diloco_operator.plan.pods import pod_status
from diloco_operator.plan.pods.pod_status import Pod
from diloco_protocol.vocabulary import HELD_STATES, JobPhase, SlotState

PATIENCE = 15.0
"""Seconds without an answer before a syncer that answered is told to be silent."""
UID_DIGITS = 32
"""A process id begins with so many digits of its pod's UID."""
STUCK_SECONDS = 5.0
"""A pod that is there so long after its grace is stuck."""


@dataclass(frozen=True, slots=True)
class Link:
    """What the syncer says of a slot's link: bytes per second and seconds; None: not measured, not known."""

    up: float | None
    down: float | None
    needs_up: float | None
    needs_down: float | None
    round_trip: float | None
    thin: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last refusal of a place, as the syncer's status has it."""

    role: str
    region: str
    reason: str
    fields: tuple[str, ...]
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as the syncer's status has it."""

    region: str
    ordinal: int
    process: str
    state: str
    ready: bool
    silent: float | None  # seconds since it was heard; None: nobody holds it
    merged: int
    step: int
    loss: float | None
    link: Link | None = None  # None: nobody is there

    @property
    def holding(self) -> bool:
        return self.state in HELD_STATES

    @property
    def in_quorum(self) -> bool:
        return self.state == SlotState.ACTIVE and self.ready


@dataclass
class View:
    """One instant. ``memory`` is the plan's to change."""

    observed: Observed
    memory: PlanMemory
    settings: PlanSettings
    job: Job
    here: Place
    pods: tuple[Pod, ...] = field(init=False)
    silent_for: float = field(init=False)  # seconds since the syncer last answered; 0: it did now

    def __post_init__(self) -> None:
        found = (pod_status.read(pod, self.observed.cluster_events) for pod in self.observed.pods)
        self.pods = tuple(pod for pod in found if pod is not None)
        asked = self.observed.syncer
        self.silent_for = self.lasting("no answer", self.document is None)
        if asked is not None and asked.failing_since is not None:
            self.silent_for = max(self.silent_for, self.now - asked.failing_since)

    @property
    def now(self) -> float:
        return self.observed.now

    # ------------------------------------------------------------- objects

    def live(self, ref: Ref) -> Object | None:
        """One of the job's own objects."""
        found = self.observed.objects.get(ref)
        return found if found is not None and names.is_ours(ref, found, self.job.name, self.job.uid) else None

    def replicas(self, ref: Ref) -> int | None:
        """How many pods a live object asks for; None: it is not there."""
        found = self.live(ref)
        return None if found is None else int((found.get("spec") or {}).get("replicas", 1))

    def wanted(self, region: str) -> int:
        """Learners of a region here, spares included."""
        return next((r.learners + r.spares for r in self.here.regions if r.name == region), 0)

    # ------------------------------------------------------------- pods

    @cached_property
    def learners(self) -> dict[str, Pod]:
        """By name; of two of a name (a stale one in a cache) the one that is there to stay."""
        found: dict[str, Pod] = {}
        for pod in self.pods:
            if pod.role == "learner" and (pod.name not in found or pod.alive):
                found[pod.name] = pod
        return found

    def of_region(self, region: str) -> list[Pod]:
        return [pod for pod in self.learners.values() if pod.region == region]

    def place(self, region: str, ordinal: int) -> str:
        """The name of the pod there."""
        return f"{self.job.name}-{region}-{ordinal}"

    def pod_of(self, role: str) -> Pod | None:
        """The syncer's or evaluator's pod: of several the one that is there to stay, the newest first."""
        found = [pod for pod in self.pods if pod.role == role]
        created = {p["metadata"]["uid"]: p["metadata"].get("creationTimestamp", "") for p in self.observed.pods}
        return max(found, key=lambda pod: (pod.alive, not pod.over, created[pod.uid]), default=None)

    def leaving(self, pod: Pod) -> bool:
        """It is going, or was told to by this operator."""
        return not pod.alive or pod.uid in self.memory.own_deletions

    def stuck(self, pod: Pod) -> bool:
        """It should be gone and is not."""
        return pod.leaves_at is not None and self.now > pod.leaves_at + STUCK_SECONDS

    # ------------------------------------------------------------- the syncer's word

    @property
    def asked(self) -> ProgramAnswer | None:
        return self.observed.syncer

    @cached_property
    def document(self) -> dict[str, Any] | None:
        """What the syncer answered now; None: there is no answer."""
        asked = self.asked
        return asked.document if asked is not None and not asked.error else None

    @cached_property
    def slots(self) -> list[Slot]:
        rows = (self.document or {}).get("slots")
        return [_slot(row) for row in rows or [] if isinstance(row, dict)]

    @cached_property
    def _slots_by_pod(self) -> dict[str, list[Slot]]:
        found: dict[str, list[Slot]] = {}
        for slot in self.slots:
            found.setdefault(slot.process[:UID_DIGITS], []).append(slot)
        return found

    @cached_property
    def _standing_by(self) -> frozenset[str]:
        waiting = (self.document or {}).get("standbys")
        return frozenset(str(p)[:UID_DIGITS] for p in waiting) if isinstance(waiting, list) else frozenset()

    @cached_property
    def regions_lost(self) -> frozenset[str]:
        """Which the syncer counts as lost: its time runs while nobody here looks."""
        named = (self.document or {}).get("regions_lost")
        return frozenset(str(name) for name in named) if isinstance(named, list) else frozenset()

    @cached_property
    def refusals(self) -> list[Refusal]:
        """Whom the syncer has refused for good lately."""
        rows = (self.document or {}).get("refusals")
        return [_refusal(row) for row in rows or [] if isinstance(row, dict)]

    @cached_property
    def pages(self) -> list[dict[str, Any]]:
        """Status pages of learners that answered, where the syncer is elsewhere; by the pods' names."""
        told = sorted(self.observed.learners.items())
        return [asked.document for _, asked in told if asked.document is not None and not asked.error]

    @cached_property
    def said(self) -> str:
        """The phase that the syncer is in, or where it is elsewhere, the end that learners here were told;
        empty: not known."""
        if self.here.syncer:
            return str((self.document or {}).get("phase", ""))
        phases = {str(page.get("phase", "")) for page in self.pages}
        return next(
            (
                end
                for end in (JobPhase.DELETED, JobPhase.FAILED, JobPhase.COMPLETE, JobPhase.SUSPENDED)
                if end in phases
            ),
            "",
        )

    @property
    def merges(self) -> int | None:
        """Merges of the job: the syncer's number, or where it is elsewhere the greatest that a connected
        learner has heard of. It falls when the syncer's store was set back. None: not known."""
        if self.here.syncer:
            return _whole((self.document or {}).get("merges"))
        heard = [_whole(page.get("merges")) for page in self.pages if page.get("connected")]
        return max((merges for merges in heard if merges is not None), default=None)

    @property
    def known_at(self) -> float:
        """When what is known of merges was said; infinite: nobody is there who could say it."""
        if self.here.syncer:
            asked = self.asked
            return math.inf if asked is None or asked.error else asked.at
        told = [asked.at for asked in self.observed.learners.values() if not asked.error]
        return max(told, default=math.inf)

    @property
    def required(self) -> int:
        """K: as the syncer has it, else as the job says it."""
        value = ((self.document or {}).get("quorum") or {}).get("required")
        return value if isinstance(value, int) else self.job.spec.quorum

    def slot_of(self, pod: Pod) -> Slot | None:
        """The slot that one of the pod's processes holds, or held last."""
        mine = self._slots_by_pod.get(pod.process, ())
        return max(mine, key=lambda slot: (slot.in_quorum, slot.holding), default=None)

    def in_quorum(self, pod: Pod) -> bool:
        slot = self.slot_of(pod)
        return slot is not None and slot.in_quorum

    def standing_by(self, pod: Pod) -> bool:
        """It waits for a slot, as a spare does."""
        return pod.process in self._standing_by

    def taking_part(self, pod: Pod) -> bool:
        """It has done what its successor is followed for: it is in the quorum, or stands by for it."""
        if not pod.alive:
            return False
        if self.here.syncer:
            return self.in_quorum(pod) or (pod.ready and self.standing_by(pod))
        asked = self.observed.learners.get(pod.name)
        word = asked.document if asked is not None and not asked.error else None
        if word is None or not str(word.get("process", "")).startswith(pod.process):
            return False
        return bool(word.get("connected")) and (word.get("slot") is not None or bool(word.get("standby")))

    # ------------------------------------------------------------- the job's own status, read back

    def condition(self, kind: str) -> dict[str, Any]:
        for condition in self.job.status.get("conditions") or []:
            if condition.get("type") == kind:
                return dict(condition)
        return {}

    def holds(self, kind: str) -> bool:
        return self.condition(kind).get("status") == "True"

    def since(self, kind: str) -> float:
        """Since when the condition is as it is; now, if it is not known."""
        text = self.condition(kind).get("lastTransitionTime")
        try:
            return seconds(text) if isinstance(text, str) else self.now
        except ValueError:
            return self.now

    @property
    def begun(self) -> bool:
        """The job has been started."""
        return bool(self.job.status.get("startTime"))

    # ------------------------------------------------------------- memory

    def lasting(self, fact: str, holds: bool = True) -> float:
        """For how many seconds the fact has been observed without a break; 0 where it does not hold."""
        since = self.memory.since
        if not holds:
            since.pop(fact, None)
            return 0.0
        return self.now - since.setdefault(fact, self.now)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _figure(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _link(row: Any) -> Link | None:
    if not isinstance(row, dict):
        return None
    return Link(
        up=_figure(row.get("up_bytes_per_second")),
        down=_figure(row.get("down_bytes_per_second")),
        needs_up=_figure(row.get("needs_up_bytes_per_second")),
        needs_down=_figure(row.get("needs_down_bytes_per_second")),
        round_trip=_figure(row.get("round_trip_seconds")),
        thin=bool(row.get("thin")),
    )


def _refusal(row: dict[str, Any]) -> Refusal:
    fields, ago = row.get("fields"), _figure(row.get("seconds_ago"))
    return Refusal(
        role=str(row.get("role", "")),
        region=str(row.get("region", "")),
        reason=str(row.get("reason", "")),
        fields=tuple(map(str, fields)) if isinstance(fields, list) else (),
        seconds_ago=math.inf if ago is None else ago,
    )


def _slot(row: dict[str, Any]) -> Slot:
    heard, loss = row.get("heard_seconds_ago"), row.get("loss")
    ordinal = row.get("ordinal")
    return Slot(
        region=str(row.get("region", "")),
        ordinal=ordinal if isinstance(ordinal, int) else 0,
        process=str(row.get("process", "")),
        state=str(row.get("state", "")),
        ready=bool(row.get("ready")),
        silent=float(heard) if isinstance(heard, int | float) else None,
        merged=int(row.get("merged_pushes") or 0),
        step=int(row.get("step") or 0),
        loss=float(loss) if isinstance(loss, int | float) else None,
        link=_link(row.get("link")),
    )
