"""Pods that went, crashed or fell silent: told, fenced, counted, replaced, followed.

Theory of operation. Kubernetes' own controllers make new pods; the syncer takes a newcomer
in by itself. What is left for the operator:

* **Fence.** Every slot that the syncer still lists as held by a process of which the cluster
  knows that it is gone is reported to it (``process-gone``), as long as it is listed. A
  process id begins with its pod's UID, so there is no guessing. A container that runs again
  needs no word: its new process takes the slot over when it joins.
* **Count.** A loss counts against ``failurePolicy.maxReplacements`` unless it was this
  operator's own doing, a preemption or eviction, or the pod had never started. A container
  that ended counts each time, as ``failurePolicy.rules`` say for its exit code. Who
  is refused, or cannot start, for credentials or another copy of the job does not count: that
  heals when they are put right.
* **Delete** what will not mend by itself: a pod that crashes again and again (a new one may
  come to another node), but not for such a refusal, and one that runs and says it is ready but
  is not heard by a syncer that answers. With a backoff that grows to five minutes, never two of
  a region at once.
* **Follow** the successor until it is in the quorum (or stands by for it).

A pod that cannot start is left alone: a new one could not either. The status names why.
What is remembered (``PlanMemory``) is what pods were like a moment ago. An operator that starts
anew knows nothing of that: it counts nothing for the past, and fences after a moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_operator.model import Call, Delete, EventWanted, PodSnapshot, Ref
from diloco_operator.plan.pods.pod_status import End, Pod
from diloco_operator.plan.refusals import UNFIT, curable
from diloco_operator.plan.view import UID_DIGITS, View
from diloco_protocol.vocabulary import TRAINING_PHASES, ControlMethod, SyncerExit, WorkerExit

CRASHES = 3
"""So often the kubelet alone starts a container again, before the pod is replaced."""
FIRST_BACKOFF, LAST_BACKOFF = 20.0, 300.0
SILENT_SECONDS = 30.0
"""A learner is silent after this, or after twice the heartbeat's timeout if that is longer."""
UNKNOWN_SECONDS = 5.0
"""A process whose pod was never seen is taken for gone after so long: the pod may be on its way here."""
SYNCER = "syncer"


@dataclass(slots=True)
class Outcome:
    """What was found this turn."""

    calls: list[Call] = field(default_factory=list)
    deletes: list[Delete] = field(default_factory=list)
    events: list[EventWanted] = field(default_factory=list)
    counted: int = 0
    cause: str = ""  # of the last one that was counted
    failure: tuple[str, str] | None = None  # reason and message


def watch(view: View) -> Outcome:
    """All of it, for a job that is running. Changes the view's memory."""
    out = Outcome()
    gone: set[str] = set()  # UIDs of pods that went since the last turn
    for region in view.here.regions:
        for ordinal in range(region.learners + region.spares):
            _learner(view, view.place(region.name, ordinal), out, gone)
    if view.here.syncer:
        _syncer(view, out, gone)
    _forget(view)
    if view.here.syncer:
        _fence(view, out, gone)
    for region in view.here.regions:
        _delete(view, region.name, out)
    return out


def rest(view: View) -> None:
    """The job is not running: what happens to pods is its own doing, and not counted."""
    memory = view.memory
    memory.seen.clear()
    memory.followed.clear()
    memory.backoff.clear()
    for fact in [f for f in memory.since if f.partition(" ")[0] in ("silent", "apart", "unknown")]:
        del memory.since[fact]
    uids = {pod.uid for pod in view.pods}
    memory.own_deletions &= uids


# ------------------------------------------------------------------ each place


def _learner(view: View, name: str, out: Outcome, gone: set[str]) -> None:
    memory = view.memory
    pod, before = view.learners.get(name), memory.seen.get(name)
    if before is not None and (pod is None or pod.uid != before.uid):
        _gone(view, name, before, pod, out, gone)
        before = None
    if pod is None:
        return
    if before is not None and pod.ends > before.ends:
        _crashed(view, pod, before, out)
    memory.seen[name] = _sighting(view, pod)
    if pod.running_since is not None and view.now - pod.running_since > LAST_BACKOFF:
        memory.backoff.pop(name, None)
    slot = view.slot_of(pod)
    since, lost = memory.followed.get(name, (0.0, ""))
    if since and pod.running and view.taking_part(pod) and (slot is None or slot.process != lost or not lost):
        del memory.followed[name]
        waited = view.now - since
        where = "is in the quorum" if slot is None or slot.in_quorum else "stands by"
        out.events.append(
            EventWanted("Normal", "LearnerReplaced", f"{name} {where} again, {waited:.0f} s after its loss.")
        )


def _syncer(view: View, out: Outcome, gone: set[str]) -> None:
    memory = view.memory
    pod, before = view.pod_of(SYNCER), memory.seen.get(SYNCER)
    if before is not None and (pod is None or pod.uid != before.uid):
        _gone(view, SYNCER, before, pod, out, gone)
        before = None
    if pod is None:
        return
    end = pod.last_end
    if before is not None and pod.ends > before.ends:
        _crashed(view, pod, before, out)
    if end is not None and end.code == WorkerExit.CONFIGURATION and not pod.running and not pod.terminating:
        out.failure = (
            "SyncerConfiguration",
            f"The syncer cannot work with this job: {end.words or 'it ended with exit code 2'}",
        )
    memory.seen[SYNCER] = _sighting(view, pod)
    if SYNCER in memory.followed and pod.alive and pod.ready and view.document is not None:
        waited = view.now - memory.followed.pop(SYNCER)[0]
        epoch = view.document.get("epoch")
        out.events.append(
            EventWanted(
                "Normal",
                "SyncerReplaced",
                f"The syncer answers again, in epoch {epoch}, {waited:.0f} s after its loss.",
            )
        )


def _sighting(view: View, pod: Pod) -> PodSnapshot:
    before = view.memory.seen.get(SYNCER if pod.role == SYNCER else pod.name)
    excused = pod.excused
    if not excused and pod.uid in view.memory.own_deletions:
        excused = "the operator replaced it"
    if not excused and before is not None and before.uid == pod.uid and before.excused != UNFIT:
        excused = before.excused
    if not excused and _unfit(pod) and not pod.ready:
        excused = UNFIT
    # A pod that was told to go and went in good order was deleted; how its program ended says nothing.
    broke = pod.last_end is not None and not (pod.terminating and pod.last_end.code in (0, 143))
    cause = str(pod.last_end) if broke and not pod.running else ""
    slot = view.slot_of(pod)
    process = slot.process if slot is not None else ""
    return PodSnapshot(pod.uid, pod.ends, pod.started, excused, cause, process)


def _gone(view: View, place: str, before: PodSnapshot, successor: Pod | None, out: Outcome, gone: set[str]) -> None:
    memory = view.memory
    gone.add(before.uid)
    memory.seen.pop(place, None)
    own = before.uid in memory.own_deletions
    memory.own_deletions.discard(before.uid)
    memory.followed.setdefault(place, (view.now, before.process))
    who = "The syncer's pod" if place == SYNCER else f"Pod {place}"
    what = "SyncerGone" if place == SYNCER else "LearnerGone"
    if own:
        return  # it was told when it was done
    if not before.started:
        return  # nothing was lost
    # An evicted syncer's pod stays as Failed beside its successor, and may be seen so for the first time now.
    left = next((pod for pod in view.pods if pod.uid == before.uid), None)
    excused = before.excused or (left.excused if left is not None else "")
    why = excused or before.cause or "it was deleted"
    there = "its successor is there" if successor is not None else "its successor is being made"
    if not excused:
        _count(out, f"{who} is gone: {why}")
    out.events.append(EventWanted("Warning", what, f"{who} is gone ({why}); {there}."))


def _crashed(view: View, pod: Pod, before: PodSnapshot, out: Outcome) -> None:
    place = SYNCER if pod.role == SYNCER else pod.name
    end = pod.last_end
    if end is None or pod.terminating or pod.uid in view.memory.own_deletions:
        return  # it was told to go, and went
    if pod.excused:
        return  # as when its node's kubelet evicts it: told, and not counted, when it is gone
    if end.makes_room:
        return  # it is nobody's loss
    if _unfit(pod):
        return  # its Secret is to be put right: SyncerReady says so, once
    view.memory.followed[place] = (view.memory.followed.get(place, (view.now, ""))[0], before.process)
    who = "The syncer" if pod.role == SYNCER else f"Learner {pod.name}"
    said = f"{who}: {end}."
    action = _rule(view, end) if pod.role == "learner" else ""
    if not action and pod.role == "learner" and curable(end):
        return  # likewise: SpecDrift or HubReachable says so
    kind = "SyncerCrashed" if pod.role == SYNCER else "LearnerCrashed"
    out.events.append(EventWanted("Warning", kind, said))
    if action == "Fail":
        out.failure = ("ExitCode", f"{who}: {end}. failurePolicy.rules says Fail for this exit code.")
    elif action != "Ignore":
        for _ in range(pod.ends - before.ends):
            _count(out, said)
    if action == "" and pod.role == "learner" and end.code == WorkerExit.CONFIGURATION and not _others(view, pod):
        out.failure = (
            "LearnerConfiguration",
            f"{who} cannot work with this job, and another start does not help: {end}.",
        )


def _unfit(pod: Pod) -> bool:
    """Whether it is the syncer's and ended because its credentials could not be used."""
    return pod.role == SYNCER and pod.last_end is not None and pod.last_end.code == SyncerExit.CREDENTIALS


def _others(view: View, pod: Pod) -> bool:
    """Whether anybody else is in the quorum, or where the syncer is elsewhere is connected with a slot: then
    what is wrong is this learner's, as after an edit that is rolled out, and not the job's."""
    processes = [slot.process for slot in view.slots if slot.in_quorum]
    pages = [page for page in view.pages if page.get("connected") and page.get("slot") is not None]
    processes += [str(page["process"]) for page in pages if page.get("process")]
    return any(not process.startswith(pod.process) for process in processes)


def _rule(view: View, end: End) -> str:
    """What failurePolicy.rules say of an exit code; empty: nothing."""
    rules = view.job.spec.failure_policy.rules
    return next((rule.action for rule in rules if end.code in rule.exit_codes), "")


def _count(out: Outcome, cause: str) -> None:
    out.counted += 1
    out.cause = cause


# ------------------------------------------------------------------ fence


def _fence(view: View, out: Outcome, gone: set[str]) -> None:
    by_process = {pod.process: pod for pod in view.pods}
    went = {uid.replace("-", "") for uid in gone}
    here = {region.name for region in view.here.regions}
    unknown: set[str] = set()
    for slot in view.slots:
        head = slot.process[:UID_DIGITS]
        if not slot.holding or slot.region not in here or len(head) < UID_DIGITS:
            continue
        pod = by_process.get(head)
        if pod is not None:
            dead = pod.over or (pod.started and not pod.running)
            why = f"its container ended in pod {pod.name}"
        else:
            fact = f"unknown {head}"
            unknown.add(fact)
            dead = head in went or view.lasting(fact) >= UNKNOWN_SECONDS
            why = "its pod is gone"
        if dead:
            body = {"region": slot.region, "ordinal": slot.ordinal, "process": slot.process, "reason": why}
            out.calls.append(Call(ControlMethod.PROCESS_GONE, body))
    if view.document is not None:
        for fact in [f for f in view.memory.since if f.startswith("unknown ") and f not in unknown]:
            del view.memory.since[fact]


# ------------------------------------------------------------------ delete


def _delete(view: View, region: str, out: Outcome) -> None:
    """At most one pod of the region, and none while another is on its way; one that is stuck on a lost node
    may be so for ever, and is not waited for."""
    pods = [view.learners.get(view.place(region, i)) for i in range(view.wanted(region))]
    for told in (p for p in pods if p is not None and p.alive and p.uid in view.memory.own_deletions):
        # It was to be deleted and is not: the API server did not hear, or the watch does not know yet.
        out.deletes.append(Delete(Ref("Pod", told.name), told.uid, "it was to be deleted before"))
    silent = {pod.name for pod in pods if pod is not None and _silent(view, pod)}
    if any(pod is None or (view.leaving(pod) and not view.stuck(pod)) for pod in pods):
        return
    for pod in sorted((p for p in pods if p is not None), key=lambda p: (p.name not in silent, p.name)):
        why = ""
        # Who is refused so would be in a new pod too, and until then nobody would know why.
        loops = pod.ends >= CRASHES and not curable(pod.last_end)
        if pod.name in silent:
            why = "it runs, and the syncer has not heard it"
        elif loops and pod.obstacle is not None and pod.obstacle.kind == "crash":
            why = f"it crashes again and again: {pod.obstacle.message}"
        if why and _may(view, pod):
            view.memory.own_deletions.add(pod.uid)
            out.deletes.append(Delete(Ref("Pod", pod.name), pod.uid, why))
            out.events.append(EventWanted("Warning", "LearnerDeleted", f"Pod {pod.name} is replaced: {why}."))
            return


def _may(view: View, pod: Pod) -> bool:
    """Whether the backoff of this place is over; begins the next one. The first begins when the fault is
    seen, but for a silent pod, whose silence was waited for."""
    backoff = view.memory.backoff
    times, not_before = backoff.get(pod.name, (0, 0.0))
    if times == 0 and not_before == 0.0 and pod.obstacle is not None:
        backoff[pod.name] = (0, view.now + FIRST_BACKOFF)
        return False
    if view.now < not_before:
        return False
    # Drawn from the UID: places that broke together do not come back together.
    spread = 0.9 + 0.2 * int(pod.process[:4] or "0", 16) / 0xFFFF
    delay = min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** (times + 1)) * spread
    backoff[pod.name] = (times + 1, view.now + delay)
    return True


def silence(view: View) -> float:
    """Seconds after which a learner that says it is ready is silent."""
    return max(2 * view.job.spec.sync.heartbeat.timeout_seconds, SILENT_SECONDS)


def _silent(view: View, pod: Pod) -> bool:
    """Ready, and neither in a slot nor standing by, for long, while the syncer answers. Told per epoch:
    a syncer that has just come back has heard nobody."""
    document = view.document
    if document is None or not view.here.syncer:
        return False
    heard = view.standing_by(pod)
    slot = view.slot_of(pod)
    if slot is not None and slot.holding:
        heard = heard or slot.silent is None or slot.silent <= view.job.spec.sync.heartbeat.timeout_seconds
    judged = pod.ready and pod.running and document.get("phase") in TRAINING_PHASES
    fact = f"silent {pod.uid} {document.get('epoch')}"
    return view.lasting(fact, judged and not heard) > silence(view)


# ------------------------------------------------------------------ memory


def _forget(view: View) -> None:
    """What is remembered of places that are not wanted any more, and of pods that are gone."""
    memory = view.memory
    places = {view.place(r.name, i) for r in view.here.regions for i in range(r.learners + r.spares)}
    places.add(SYNCER)
    uids = {pod.uid for pod in view.pods}
    for known in (memory.seen, memory.followed, memory.backoff):
        for place in [p for p in known if p not in places]:
            del known[place]
    memory.own_deletions &= uids | {seen.uid for seen in memory.seen.values()}
    by_uid = ("silent", "slow", "apart")
    for fact in [f for f in memory.since if f.partition(" ")[0] in by_uid and f.split()[1] not in uids]:
        del memory.since[fact]
