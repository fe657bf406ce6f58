"""What a turn looks at: the job, its pods, its objects and what its syncer says, read once.

All other files of the plan take a ``View`` and decide. Raw fields of API objects are read here and in
``pod_status.py`` only, so that no two files read one field in two ways.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from diloco_operator import names
from diloco_operator.job import Job, Placement
from diloco_operator.model import Fact, Object, Observed, PlanMemory, PlanSettings, Ref, Timer
from diloco_operator.plan import pod_status
from diloco_operator.plan.pod_status import Pod
from diloco_protocol.documents import LearnerPage, SlotRow, StatusDocument
from diloco_protocol.vocabulary import JobPhase

ANSWER_PATIENCE = 15.0
"""Seconds without an answer before status says that the syncer does not answer."""
UID_DIGITS = 32
"""A process id begins with so many digits: its pod's UID without dashes."""
FRESH_SECONDS = 15.0
"""By an older view no pod is deleted, and no process said to have ended."""
STUCK_SECONDS = 5.0
"""A pod that is still there so many seconds after its grace period is stuck."""
_NUMBERED = re.compile(r"\S*\d\S*")


@dataclass
class View:
    """The job at one instant. Only ``memory`` is changed by the plan."""

    observed: Observed
    memory: PlanMemory
    settings: PlanSettings
    job: Job
    here: Placement
    pods: tuple[Pod, ...] = field(init=False)
    unanswered_seconds: float = field(init=False)  # since the syncer last answered; 0: it answers
    ready_unanswered_seconds: float = field(init=False)  # for which its pod has been ready, and has not answered
    wants_fresh: bool = field(init=False, default=False)  # something waits for a fresh view

    def __post_init__(self) -> None:
        job = self.job
        own = {names.secret_name(job.name, role, job.uid) for role in ("syncer", "learner")}
        own.add(names.settings_map(job.name).name)
        found = (pod_status.read_pod(pod, self.observed.cluster_events, own) for pod in self.observed.pods)
        self.pods = tuple(pod for pod in found if pod is not None)
        asked, silent = self.observed.syncer, self.document is None
        self.unanswered_seconds = self.observe(Fact.SYNCER_NOT_ANSWERING, holds=silent)
        if asked is not None and asked.failing_since is not None:
            self.unanswered_seconds = max(self.unanswered_seconds, self.clock - asked.failing_since)
        syncer = self.pod_of("syncer")
        uid = syncer.uid if syncer is not None and syncer.alive and syncer.ready else ""
        self.memory.timers.keep(Fact.READY_SYNCER_NOT_ANSWERING, {uid})
        self.ready_unanswered_seconds = self.observe(Fact.READY_SYNCER_NOT_ANSWERING, uid, holds=silent and bool(uid))

    @property
    def now(self) -> float:
        return self.observed.now

    @property
    def clock(self) -> float:
        """Seconds of a clock that no step of the wall's moves: what is timed is timed by it."""
        return self.now if self.observed.monotonic is None else self.observed.monotonic

    def may_act(self) -> bool:
        """Whether the view is fresh enough to take something from a process by it. If not, a fresh one is asked for."""
        fresh = self.observed.view_age <= FRESH_SECONDS
        self.wants_fresh = self.wants_fresh or not fresh
        return fresh

    # ------------------------------------------------------------- objects

    def live(self, ref: Ref) -> Object | None:
        """An object that is there and is this job's; None: there is none, or it is not this job's."""
        found = self.observed.objects.get(ref)
        return found if found is not None and names.is_ours(ref, found, self.job.name, self.job.uid) else None

    def replicas(self, ref: Ref) -> int | None:
        """How many pods an object of the job asks for; None: the object is not there."""
        found = self.live(ref)
        return None if found is None else int((found.get("spec") or {}).get("replicas", 1))

    def wanted(self, region: str) -> int:
        """How many learners a region shall have, spares included; 0 for a region that is not here."""
        return next((r.learners + r.spares for r in self.here.regions if r.name == region), 0)

    # ------------------------------------------------------------- pods

    @cached_property
    def learner_pods(self) -> dict[str, Pod]:
        """All pods of learners by name. The cache may have two of one name; then it is the one that stays."""
        found: dict[str, Pod] = {}
        for pod in self.pods:
            if pod.role == "learner" and (pod.name not in found or pod.alive):
                found[pod.name] = pod
        return found

    @cached_property
    def learners(self) -> dict[str, Pod]:
        """The leading pod of each learner, which alone has a session with the syncer, by name."""
        return {name: pod for name, pod in self.learner_pods.items() if pod.rank == 0}

    @cached_property
    def _groups(self) -> dict[tuple[str, int], list[Pod]]:
        found: dict[tuple[str, int], list[Pod]] = {}
        for pod in sorted(self.learner_pods.values(), key=lambda pod: pod.rank):
            found.setdefault((pod.region, pod.ordinal), []).append(pod)
        return found

    def members(self, pod: Pod) -> list[Pod]:
        """The pods of the pod's learner that are there, by rank; of the syncer's or the evaluator's the pod alone."""
        return self._groups[pod.region, pod.ordinal] if pod.role == "learner" else [pod]

    def title(self, pod: Pod) -> str:
        """What messages call a learner's pod: by its learner, which has the name of its leading pod."""
        if pod.group_pods == 1:
            return f"Learner {pod.name}"
        return f"Learner {self.place(pod.region, pod.ordinal)} (pod {pod.name})"

    @cached_property
    def _group_pods(self) -> dict[str, int]:
        own = [pod for pod in self.learner_pods.values() if pod.job_uid in ("", self.job.uid)]
        return {pod.region: pod.group_pods for pod in own if not pod.over and not self.stuck(pod)}

    def group_pods(self, region: str) -> int:
        """How many pods each learner of a region has: of those that are there, or as the job asks."""
        return self._group_pods.get(region) or self.job.spec.group(region).pods

    def place(self, region: str, ordinal: int, rank: int = 0) -> str:
        """The name of a pod of a region's learner; with rank 0 its leading one, which names the learner's place."""
        return f"{self.job.name}-{region}-{ordinal * self.group_pods(region) + rank}"

    def places(self, region: str, ordinal: int) -> list[str]:
        """The names of all pods of a region's learner."""
        return [self.place(region, ordinal, rank) for rank in range(self.group_pods(region))]

    def pod_of(self, role: str, shard: int | None = None) -> Pod | None:
        """The pod of the syncer, a shard of it, or the evaluator. Of several it is one that stays, and of those the
        newest."""
        found = [pod for pod in self.pods if pod.role == role and shard in (None, pod.ordinal)]
        created = {p["metadata"]["uid"]: p["metadata"].get("creationTimestamp", "") for p in self.observed.pods}
        return max(found, key=lambda pod: (pod.alive, not pod.over, created[pod.uid]), default=None)

    def holder_of(self, pod: Pod) -> Ref:
        """The StatefulSet or Deployment that makes the pod."""
        if pod.role == "learner":
            return names.stateful_set(self.job.name, pod.region)
        if pod.role == names.SHARD:
            return names.shard_deployment(self.job.name, pod.ordinal)
        return Ref("Deployment", f"{self.job.name}-{pod.role}")

    def leaving(self, pod: Pod) -> bool:
        """Whether the pod terminates, has ended, or is to be removed by this operator's decision."""
        return not pod.alive or pod.uid in self.memory.own_deletions

    def stuck(self, pod: Pod) -> bool:
        """Whether the pod is still Terminating after its grace period."""
        return pod.leaves_at is not None and self.now > pod.leaves_at + STUCK_SECONDS

    # ------------------------------------------------------------- what the syncer and learners say

    @cached_property
    def document(self) -> StatusDocument | None:
        """The syncer's status document; None: its last call was not answered."""
        asked = self.observed.syncer
        return asked.document if asked is not None and not asked.error else None

    @property
    def output(self) -> Object | None:
        """``status.output``: what became of output.uri, by the syncer's word, or as the status has it. None: the job is
        not complete yet, or has no output."""
        uri, before = self.job.spec.output.uri, self.job.status.get("output") or {}
        row = None if self.document is None else self.document.output
        if uri is None or not self.here.syncer or (row is None and not before):
            return None
        if row is None or row.uri != uri:  # the syncer cannot be asked, or is about to start again with the new one
            return dict(before) if before.get("uri") == uri else {"uri": uri, "state": "Writing"}
        if row.state == "waiting" and self.document.phase != JobPhase.COMPLETE:  # type: ignore[union-attr]
            return None
        state = {"written": "Written", "failed": "Failed"}.get(row.state, "Writing")
        return {"uri": uri, "state": state, "size": row.size or None, "message": row.message[:2048] or None}

    @property
    def epoch(self) -> int | None:
        """The syncer's epoch; None: it does not answer."""
        return None if self.document is None else self.document.epoch

    @property
    def slots(self) -> list[SlotRow]:
        """The syncer's slots; none while it does not answer."""
        return [] if self.document is None else self.document.slots

    @cached_property
    def _slots_by_pod(self) -> dict[str, list[SlotRow]]:
        found: dict[str, list[SlotRow]] = {}
        for slot in self.slots:
            found.setdefault(slot.process[:UID_DIGITS], []).append(slot)
        return found

    @cached_property
    def _standing_by(self) -> frozenset[str]:
        waiting = [] if self.document is None else self.document.standbys
        return frozenset(process[:UID_DIGITS] for process in waiting)

    @property
    def regions_lost(self) -> list[str]:
        """Regions that the syncer counts as lost. It times them while no operator watches, too."""
        return [] if self.document is None else self.document.regions_lost

    @cached_property
    def pages(self) -> list[LearnerPage]:
        """Status pages of the learners that answered, in the order of pod names. Empty in the hub."""
        answers = sorted(self.observed.learners.items())
        return [asked.document for _, asked in answers if asked.document is not None and not asked.error]

    @cached_property
    def job_phase(self) -> str:
        """The syncer's phase; in a cluster without the syncer, the end that learners here were told of.
        Empty: not known."""
        if self.here.syncer:
            return "" if self.document is None else self.document.phase
        phases = {page.phase for page in self.pages}
        ends = (JobPhase.DELETED, JobPhase.FAILED, JobPhase.COMPLETE, JobPhase.SUSPENDED)
        return next((end for end in ends if end in phases), "")

    @property
    def merges(self) -> int | None:
        """How many merges the job has had: the syncer's number, or in a cluster without the syncer the greatest that a
        connected learner knows. It falls when the syncer's store was set back to an older state. None: not known."""
        if self.here.syncer:
            return None if self.document is None else self.document.merges
        heard = [page.merges for page in self.pages if page.connected and page.merges is not None]
        return max(heard, default=None)

    @property
    def merges_known_at(self) -> float:
        """When this operator asked for ``merges``; infinite: there is no program to tell it. One call that failed does
        not mean that there is none: the next one may tell of a merge."""
        if self.here.syncer:
            asked = self.observed.syncer
            if asked is not None and not asked.error:
                return asked.at
            return math.inf if self.unanswered_seconds >= ANSWER_PATIENCE else -math.inf
        times = [asked.at for asked in self.observed.learners.values() if not asked.error]
        return max(times, default=math.inf)

    @property
    def required(self) -> int:
        """K, the quorum: the syncer's number, or the job's where the syncer does not answer."""
        return self.job.spec.quorum if self.document is None else self.document.quorum.required

    def slot_of(self, pod: Pod) -> SlotRow | None:
        """The slot that a process of the pod holds, or held last; None: it never held one."""
        mine = self._slots_by_pod.get(pod.process, ())
        return max(mine, key=lambda slot: (slot.in_quorum, slot.held), default=None)

    def in_quorum(self, pod: Pod) -> bool:
        """Whether the pod's learner counts for the quorum."""
        slot = self.slot_of(pod)
        return slot is not None and slot.in_quorum

    def standing_by(self, pod: Pod) -> bool:
        """Whether the pod's learner waits for a slot, as a spare does."""
        return pod.process in self._standing_by

    def is_listed(self, process: str) -> bool:
        """Whether the syncer lists a process of this pod (its UID without dashes), which may have ended."""
        return process in self._slots_by_pod or process in self._standing_by

    def taking_part(self, pod: Pod) -> bool:
        """Whether the pod's learner is in the quorum or stands by, as far as this cluster can see."""
        if not pod.alive:
            return False
        if self.here.syncer:
            return self.in_quorum(pod) or (pod.ready and self.standing_by(pod))
        asked = self.observed.learners.get(pod.name)
        page = asked.document if asked is not None and not asked.error else None
        if page is None or not page.process.startswith(pod.process):
            return False
        return page.connected and (page.slot is not None or page.standby)

    # ------------------------------------------------------------- the job's own status, read back

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition as the job's status has it; empty: it has none of that type."""
        rows = self.job.status.get("conditions") or []
        return next((dict(row) for row in rows if row.get("type") == kind), {})

    def region_row(self, region: str) -> Object:
        """A region's row as the job's status has it; empty: it has none of that name."""
        rows = self.job.status.get("regions") or []
        return next((row for row in rows if row.get("name") == region), {})

    def steady(self, kind: str, message: str) -> str:
        """The message that the condition has already, where this one differs in numbers and numbered files alone."""
        before = str(self.condition(kind).get("message") or "")
        return before if _NUMBERED.sub("", before) == _NUMBERED.sub("", message) else message

    def is_true(self, kind: str) -> bool:
        """Whether the job's status has the condition as True."""
        return self.condition(kind).get("status") == "True"

    @property
    def begun(self) -> bool:
        """Whether the job has been started in this cluster."""
        return bool(self.job.status.get("startTime"))

    # ------------------------------------------------------------- memory

    def observe(self, fact: Fact, subject: str = "", *, epoch: int | None = None, holds: bool = True) -> float:
        """For how many seconds a fact has held without a break; 0 where it does not hold now."""
        return self.memory.timers.observe(Timer(fact, subject, epoch), self.clock, holds)

    def seconds(self, fact: Fact, subject: str = "", *, epoch: int | None = None) -> float:
        """For how many seconds a fact has held, by what was observed last; 0 where it did not hold."""
        return self.memory.timers.seconds(Timer(fact, subject, epoch), self.clock)
