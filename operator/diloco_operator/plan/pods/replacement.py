"""What becomes of a pod that is gone, crashes or falls silent.

Kubernetes' own controllers make new pods, and the syncer lets a newcomer join by itself. The
operator adds four things, of which ``track_pods`` does each in every turn.

**Fence.** A slot may be held by a process that no longer exists. The syncer is told so
(``process-ended``) for as long as it lists the process. No guess is needed: a process id begins with its pod's UID. A
container that runs again is not reported, since its new process takes the slot over when it joins.

**Count.** ``status.replacements.total`` counts every loss: a pod that is gone, and each end of a container. It leaves
out what the operator removed, what was preempted or evicted, and what had never started. Nor does it count a learner
that was refused for its credentials or its copy of the job, or a syncer whose credentials cannot be used: a person puts
those right. Against ``failurePolicy.maxReplacements`` only failures count: a container that ended by itself, as
``failurePolicy.rules`` say for its exit code. They count for each place alone, and at most once in the heartbeat's
timeout: what fails everywhere at once is one failure of each. A pod that was deleted has not failed.

**Delete.** Two kinds of pods do not mend by themselves. One crashes again and again; a new pod
may come to another node. The other is silent: it runs and says that it is ready, but the syncer, which answers, does
not hear it (``silence.py`` says when that is its own fault). Both are deleted, with a backoff that grows to five
minutes, and never two of a region at once. A pod that cannot start is left alone, for a new one could not start
either; the status names the reason.

**Follow.** The successor is followed until it is in the quorum or stands by, and that is an Event.

Example: ``kubectl delete pod job-local-1``. The next turn finds another UID at that place, sends
``LearnerGone``, counts one loss in the total, and calls ``process-ended`` while the syncer lists the old process.
When the new pod is in the quorum, ``LearnerReplaced`` says after how many seconds.

A learner of several pods is one place, that of its leading pod: what happens to any of them is its loss, and is counted
once. Its other pods are replaced with the one that is gone (``groups.py``).

All of this compares pods with their snapshots in ``PlanMemory``. An operator that restarts has no
snapshots: it counts nothing of what happened before, and fences after ``UNKNOWN_SECONDS``.

What is still wrong with it: four tasks share one file and one memory, and the order of the calls in ``track_pods``
matters. Following reads what tracking has written in the same turn, and fencing reads which pods are gone. The memory
is changed while the plan is made, so a turn cannot be planned twice to see whether it comes out the same. Whether an
end is excused is decided at four places: in ``_snapshot``, ``_awaits_answer``, ``_handle_gone_pod`` and
``_handle_crash``. Who adds a reason has to look at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco_operator import names
from diloco_operator.model import AwaitedSuccessor, Backoff, Call, Delete, EventWanted, Fact, PodSnapshot, Ref
from diloco_operator.objects.manifests import settings_data
from diloco_operator.plan.pod_status import OUT_OF_MEMORY, ContainerExit, Pod
from diloco_operator.plan.pods import groups
from diloco_operator.plan.pods.memory_need import memory_need_text
from diloco_operator.plan.pods.repeated_errors import SYNCER, is_program_error
from diloco_operator.plan.pods.silence import find_broken_by_silence, is_heard
from diloco_operator.plan.refusals import UNFIT, is_curable
from diloco_operator.plan.view import UID_DIGITS, View
from diloco_protocol.common.program_errors import NEVER_JOINED
from diloco_protocol.vocabulary import TRAINING_PHASES, ControlMethod, SyncerExit, WorkerExit

CRASHES = 3
"""So often the kubelet alone starts a container again, before the pod is replaced."""
FIRST_BACKOFF, LAST_BACKOFF = 20.0, 300.0
UNKNOWN_SECONDS = 5.0
"""A process whose pod was never seen counts as ended after so long: the cache may not have the pod yet."""
SETTINGS_SECONDS = 300.0
"""No program's word fails a job whose settings were edited by hand so lately: kubelets mount what is put back late."""
WITH_ANOTHER = "its learner lost another pod"


@dataclass(slots=True)
class PodChanges:
    """What has happened to pods since the last turn, and what is to be done about it."""

    calls: list[Call] = field(default_factory=list)
    deletes: list[Delete] = field(default_factory=list)
    events: list[EventWanted] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)  # UIDs of pods
    broken: set[str] = field(default_factory=set)  # places of learners that have lost a pod, once for all of theirs
    lost: int = 0  # pods and containers that status counts
    failed: dict[str, str] = field(default_factory=dict)  # place whose program failed -> how
    errors: dict[str, str] = field(default_factory=dict)  # likewise, by an error of the program's -> which
    failure: tuple[str, str] | None = None  # reason and message of why the job fails


def track_pods(view: View) -> PodChanges:
    """Fence, count, delete and follow, for a job that is running. Changes the view's memory."""
    out = PodChanges()
    if view.document is not None and view.document.parameters:
        view.memory.model_size = (view.document.parameters, len(view.document.versions))
    settings, wanted = view.live(names.settings_map(view.job.name)), settings_data(view.job, view.here)
    edited = settings is not None and not wanted.items() <= (settings.get("data") or {}).items()
    if edited and view.job.status.get("observedGeneration") == view.job.generation:
        view.memory.settings_edited_at = view.clock
    ran = {place: s.uid for place, s in view.memory.snapshots.items() if s.started and not s.leaving}
    for lost, learner in groups.mark_broken_learners(view, ran).items():
        said = f"Learner {learner} is replaced, with all its pods: {lost} is lost."
        out.events.append(EventWanted("Warning", "LearnerDeleted", said))
    for places in learner_places(view):
        for place in places:
            _track_place(view, places[0], place, view.learner_pods.get(place), out=out)
        pod = view.learners.get(places[0])
        if pod is not None:
            _follow_learner(view, pod, out)
    if view.here.syncer:
        pod = view.pod_of(SYNCER)
        _track_place(view, SYNCER, SYNCER, pod, out=out)
        if pod is not None:
            _follow_syncer(view, pod, out)
    _forget_places(view)
    if view.here.syncer:
        _fence(view, out)
    silent = find_broken_by_silence(view)
    for region in view.here.regions:
        _delete_broken(view, region.name, silent.get(region.name), out)
    return out


def learner_places(view: View) -> list[list[str]]:
    """Of all learners of this cluster, spares included, the places of each one's pods, its leading one first."""
    return [view.places(region.name, i) for region in view.here.regions for i in range(view.wanted(region.name))]


def reset(view: View) -> None:
    """Forget all pods, for a job that is not running: what happens to them then is the operator's own doing."""
    memory = view.memory
    memory.snapshots.clear()
    memory.successors.clear()
    memory.backoffs.clear()
    memory.silent_places.clear()
    memory.timers.stop(Fact.POD_SILENT, Fact.POD_LEFT_BEHIND, Fact.POD_NOT_JOINED, Fact.PROCESS_UNKNOWN)
    memory.own_deletions &= {pod.uid for pod in view.pods}


# ------------------------------------------------------------------ each place


def _track_place(view: View, learner: str, place: str, pod: Pod | None, out: PodChanges) -> None:
    """Compare the pod of a place with its snapshot of the last turn, and take a new one. ``learner``: the place of the
    learner that it belongs to."""
    before = view.memory.snapshots.get(place)
    if pod is not None and not pod.alive and pod.job_uid not in ("", view.job.uid):
        pod = None  # of an earlier job of this name: its end is no loss of this one's
    if before is not None and (pod is None or pod.uid != before.uid):
        _handle_gone_pod(view, learner, place, before, successor=pod, out=out)
        before = None
    if pod is None:
        return
    if before is not None and pod.ends > before.ends:
        if _awaits_answer(view, pod, before):  # a later turn handles this end
            fresh = _snapshot(view, pod)
            view.memory.snapshots[place] = replace(fresh, ends=before.ends, awaits_answer=before.awaits_answer)
            return
        _handle_crash(view, learner, pod, before, out=out)
    view.memory.snapshots[place] = _snapshot(view, pod)


def _follow_learner(view: View, pod: Pod, out: PodChanges) -> None:
    memory, name = view.memory, pod.name
    since = [one.running_since for one in view.members(pod)]
    if all(one is not None and view.now - one > LAST_BACKOFF for one in since):
        memory.backoffs.pop(name, None)
    awaited, slot = memory.successors.get(name), view.slot_of(pod)
    if awaited is None or not pod.running or not view.taking_part(pod):
        return
    if slot is None or slot.process != awaited.lost_process or not awaited.lost_process:
        del memory.successors[name]
        where = "is in the quorum" if slot is None or slot.in_quorum else "stands by"
        said = f"{name} {where} again, {view.now - awaited.since:.0f} s after its loss."
        out.events.append(EventWanted("Normal", "LearnerReplaced", said))


def _follow_syncer(view: View, pod: Pod, out: PodChanges) -> None:
    successors, end = view.memory.successors, pod.last_end
    unfit = end is not None and end.code == WorkerExit.CONFIGURATION and not pod.running and not pod.terminating
    if end is not None and unfit and _has_right_settings(view):
        why = f"The syncer cannot run this job: {end.last_line or 'it ended with exit code 2'}"
        out.failure = ("SyncerConfiguration", why)
    if SYNCER in successors and pod.alive and pod.ready and view.document is not None:
        waited = view.now - successors.pop(SYNCER).since
        said = f"The syncer answers again, in epoch {view.document.epoch}, {waited:.0f} s after its loss."
        out.events.append(EventWanted("Normal", "SyncerReplaced", said))


def _snapshot(view: View, pod: Pod) -> PodSnapshot:
    before = view.memory.snapshots.get(SYNCER if pod.role == SYNCER else pod.name)
    excused = pod.excused
    if not excused and pod.uid in view.memory.own_deletions:
        excused = "the operator replaced it"
    if not excused and before is not None and before.uid == pod.uid and before.excused != UNFIT:
        excused = before.excused
    if not excused and _has_unfit_credentials(pod) and not pod.ready:
        excused = UNFIT
    others = [one for one in view.members(pod) if one.rank < pod.rank and not one.alive]
    if not excused and not pod.alive and any(one.uid not in view.memory.own_deletions for one in others):
        excused = WITH_ANOTHER
    # A pod that was told to terminate and ended in good order was deleted: its exit code says nothing.
    broke = pod.last_end is not None and not (pod.terminating and pod.last_end.code in (0, 143))
    cause = str(pod.last_end) if broke and not pod.running else ""
    slot = view.slot_of(pod)
    process = slot.process if slot is not None else ""
    same = before if before is not None and before.uid == pod.uid else PodSnapshot(pod.uid)
    joined = view.is_listed(pod.process) or same.joined
    return PodSnapshot(
        uid=pod.uid,
        ends=pod.ends,
        started=pod.started or same.started,
        leaving=not pod.alive,
        excused=excused,
        cause=cause,
        process=process,
        joined=joined,
    )


def _never_joined(view: View, pod: Pod, before: PodSnapshot) -> bool:
    """Whether this is a learner of which the syncer wants work and had never heard when it was asked last. Where the
    syncer cannot be asked it is not known: False."""
    if pod.role == SYNCER or pod.rank or view.document is None or view.document.phase not in TRAINING_PHASES:
        return False
    return not before.joined and not view.is_listed(pod.process)


def _awaits_answer(view: View, pod: Pod, before: PodSnapshot) -> bool:
    """Whether a learner ended well, and only the syncer's next answer tells whether it had joined. The learner may have
    joined after the last answer, which may be as old as the time between two questions. Both times are this operator's:
    a node's clock may differ from it. Changes the snapshot."""
    end, asked = pod.last_end, view.observed.syncer
    if pod.terminating or pod.excused or pod.uid in view.memory.own_deletions:
        return False  # its end is not judged
    if end is None or end.code != 0 or end.makes_room or asked is None or not _never_joined(view, pod, before):
        return False
    if before.awaits_answer is None or before.awaits_answer[1] != pod.ends:
        before.awaits_answer = view.now, pod.ends
    return asked.at <= before.awaits_answer[0]


def _handle_gone_pod(
    view: View, learner: str, place: str, before: PodSnapshot, successor: Pod | None, out: PodChanges
) -> None:
    memory, leader = view.memory, view.memory.snapshots.get(learner, before)
    out.gone.add(before.uid)
    memory.snapshots.pop(place, None)
    own = before.uid in memory.own_deletions
    memory.own_deletions.discard(before.uid)
    memory.successors.setdefault(learner, AwaitedSuccessor(view.now, leader.process))
    if own or learner in out.broken or before.excused == WITH_ANOTHER:
        return  # the Event was sent when the operator deleted it, or for another pod of the learner
    if not before.started:
        return  # nothing was lost
    # An evicted syncer's pod stays as Failed beside its successor, and may be seen so for the first time now.
    left = next((pod for pod in view.pods if pod.uid == before.uid), None)
    excused = before.excused or (left.excused if left is not None else "")
    why = excused or before.cause or "it was deleted, or has lost its labels"
    kind, subject = ("SyncerGone", "The syncer's pod") if place == SYNCER else ("LearnerGone", f"Pod {place}")
    subject += f" of learner {learner}" if learner != place else ""
    out.broken.add(learner)
    there = "its successor exists already" if successor is not None else "its successor is being created"
    if not excused:
        out.lost += 1
    out.events.append(EventWanted("Warning", kind, f"{subject} is gone ({why}); {there}."))


def _handle_crash(view: View, place: str, pod: Pod, before: PodSnapshot, out: PodChanges) -> None:
    """The main container of a pod of a place has ended since the last turn, and the pod is still there."""
    memory, end = view.memory, pod.last_end
    if end is None or pod.terminating or pod.uid in memory.own_deletions:
        return  # it was told to terminate, and did
    if pod.excused:
        return  # as when the kubelet evicts it: the Event comes, without a count, when the pod is gone
    if end.makes_room:
        return  # no loss: an idle learner ended so that its successor can join
    if _has_unfit_credentials(pod):
        return  # a person puts its Secret right: SyncerReady says so, once
    if groups.is_a_consequence(view, pod) or (pod.rank and end.code == 0):
        return  # its leader's end says it
    known, leader = memory.successors.get(place), before if not pod.rank else memory.snapshots.get(place, before)
    memory.successors[place] = AwaitedSuccessor(known.since if known is not None else view.now, leader.process)
    if pod.role == "learner" and is_curable(end) and not _action_of_rules(view, end):
        return  # a person puts its Secret or this copy of the job right: SpecDrift or HubReachable says so
    first = groups.find_first_end(view, pod)
    end = first.last_end or end
    subject = "The syncer" if pod.role == SYNCER else view.title(first)
    action = _action_of_rules(view, end) if pod.role == "learner" else ""
    if pod.group_pods > 1 and action != "Fail" and _is_counted(view, place):
        return
    never_joined = end.code == 0 and _never_joined(view, pod, before)
    said = NEVER_JOINED if never_joined else str(end)
    kind = "SyncerCrashed" if pod.role == SYNCER else "LearnerCrashed"
    told = f"{subject}: {said}."
    if end.reason == OUT_OF_MEMORY:
        told += f" {memory_need_text(view, pod.role)}."
    out.events.append(EventWanted("Warning", kind, told))
    if action == "Fail":
        out.failure = ("ExitCode", f"{told} failurePolicy.rules says Fail for this exit code.")
    elif action != "Ignore":
        out.lost += pod.ends - before.ends
        out.failed[place] = told
        if not action and is_program_error(pod, end, never_joined):
            out.errors[place] = said
    hopeless = pod.role == "learner" and end.code == WorkerExit.CONFIGURATION
    if hopeless and not action and not _others_take_part(view, pod) and _has_right_settings(view):
        why = f"{subject} cannot run this job, and a restart does not help: {end}."
        out.failure = ("LearnerConfiguration", why)


def _is_counted(view: View, place: str) -> bool:
    """Whether a failure of the place was counted so lately that another one counts with it."""
    known = view.memory.failures.get(place)
    return known is not None and view.now - known.at <= view.job.spec.sync.heartbeat.timeout_seconds


def _has_unfit_credentials(pod: Pod) -> bool:
    """Whether this is the syncer's pod, and its program ended because its credentials cannot be used."""
    return pod.role == SYNCER and pod.last_end is not None and pod.last_end.code == SyncerExit.CREDENTIALS


def _has_right_settings(view: View) -> bool:
    """Whether a program that says that it cannot run this job has read this job."""
    edited = view.memory.settings_edited_at
    return edited is None or view.clock - edited > SETTINGS_SECONDS


def _others_take_part(view: View, pod: Pod) -> bool:
    """Whether any other learner takes part. If one does, the fault is this learner's, as after an edit that
    is being rolled out, and not the job's. In a cluster without the syncer, a learner takes part when its
    status page says that it is connected and has a slot."""
    processes = [slot.process for slot in view.slots if slot.in_quorum]
    processes += [page.process for page in view.pages if page.connected and page.slot is not None and page.process]
    return any(not process.startswith(pod.process) for process in processes)


def _action_of_rules(view: View, end: ContainerExit) -> str:
    """The action of failurePolicy.rules for an exit code; empty: no rule names it."""
    rules = view.job.spec.failure_policy.rules
    return next((rule.action for rule in rules if end.code in rule.exit_codes), "")


# ------------------------------------------------------------------ fence


def _fence(view: View, out: PodChanges) -> None:
    """Tell the syncer of every process that it lists as holding a slot and that no longer exists."""
    by_process = {pod.process: pod for pod in view.pods}
    gone_processes = {uid.replace("-", "") for uid in out.gone}
    here = {region.name for region in view.here.regions}
    unknown: set[str] = set()
    for slot in view.slots:
        head = slot.process[:UID_DIGITS]
        if not slot.held or slot.region not in here or len(head) < UID_DIGITS:
            continue
        pod = by_process.get(head)
        if pod is not None:
            dead = pod.main_ended
            why = f"its container ended in pod {pod.name}"
        else:
            unknown.add(head)
            dead = head in gone_processes or view.observe(Fact.PROCESS_UNKNOWN, head) >= UNKNOWN_SECONDS
            why = "its pod is gone"
        if dead and view.may_act():
            body = {"region": slot.region, "ordinal": slot.ordinal, "process": slot.process, "reason": why}
            place = view.place(slot.region, slot.ordinal)
            out.calls.append(Call(ControlMethod.PROCESS_ENDED, body, (place, head)))
    if view.document is not None:
        view.memory.timers.keep(Fact.PROCESS_UNKNOWN, unknown)


# ------------------------------------------------------------------ delete


def _delete_broken(view: View, region: str, silent: Pod | None, out: PodChanges) -> None:
    """Delete at most one crash-looping or silent learner of the region, and none while a pod of another is missing or
    leaving. A pod that is stuck, as on a lost node, is not waited for: it may be stuck for ever."""
    places = [place for i in range(view.wanted(region)) for place in view.places(region, i)]
    pods = [view.learner_pods.get(place) for place in places]
    _repeat_deletions(view, [pod for pod in pods if pod is not None], out)
    if any(pod is None or (view.leaving(pod) and not view.stuck(pod)) for pod in pods):
        return
    for pod in sorted((p for p in pods if p is not None), key=lambda p: (p is not silent, p.name)):
        leader, why = view.members(pod)[0], ""
        # A refused learner would be refused in a new pod too, and meanwhile its last line would be lost.
        loops = pod.ends >= CRASHES and not is_curable(pod.last_end) and not is_curable(leader.last_end)
        if pod is silent:
            why = "it runs, but the syncer does not hear it"
        elif loops and pod.obstacle is not None and pod.obstacle.kind == "Crashing":
            first = groups.find_first_end(view, pod)
            why = f"it keeps crashing: {(first.obstacle or pod.obstacle).message}"
            pod = first
        if why and view.may_act() and _pass_backoff(view, leader.name, pod):
            if pod is silent:
                view.memory.silent_places.add(pod.name)
            out.deletes += groups.delete_learner(view, pod, why)
            together = f", with all pods of learner {leader.name}" if pod.group_pods > 1 else ""
            out.events.append(EventWanted("Warning", "LearnerDeleted", f"Pod {pod.name} is replaced{together}: {why}."))
            return


def _repeat_deletions(view: View, pods: list[Pod], out: PodChanges) -> None:
    """Delete again what an earlier turn deleted and what is there: the request was lost, or the cache is behind. What
    was taken for its silence and is heard meanwhile stays."""
    memory = view.memory
    for pod in (pod for pod in pods if pod.alive and pod.uid in memory.own_deletions):
        if pod.name in memory.silent_places and is_heard(view, pod):
            memory.own_deletions -= {one.uid for one in view.members(pod)}
            memory.silent_places.discard(pod.name)
        elif view.may_act():
            out.deletes.append(Delete(Ref("Pod", pod.name), pod.uid, "it was to be deleted before"))


def _pass_backoff(view: View, place: str, pod: Pod) -> bool:
    """Whether the learner of a place may be deleted now, for this pod of it; if so, the next backoff of the place
    begins. The first backoff begins when a crash is seen. A silent pod has none at first, since its silence was waited
    for."""
    backoff = view.memory.backoffs.get(place)
    if backoff is None and pod.obstacle is not None:
        view.memory.backoffs[place] = Backoff(0, view.clock + FIRST_BACKOFF)
        return False
    backoff = backoff or Backoff()
    if view.clock < backoff.not_before:
        return False
    # Drawn from the UID, so that places that broke together do not come back together.
    spread = 0.9 + 0.2 * int(pod.process[:4] or "0", 16) / 0xFFFF
    delay = min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** (backoff.deletions + 1)) * spread
    view.memory.backoffs[place] = Backoff(backoff.deletions + 1, view.clock + delay)
    return True


# ------------------------------------------------------------------ memory


def _forget_places(view: View) -> None:
    """Forget places that the job does not have any more, and the timers of pods that are gone."""
    memory = view.memory
    places = {SYNCER, *(place for learner in learner_places(view) for place in learner)}
    for known in (memory.snapshots, memory.successors, memory.backoffs, memory.failures):
        for place in known.keys() - places:
            del known[place]
    memory.silent_places &= places
    uids = {pod.uid for pod in view.pods}
    memory.own_deletions &= uids | {snapshot.uid for snapshot in memory.snapshots.values()}
    for fact in (Fact.POD_SILENT, Fact.POD_LEFT_BEHIND, Fact.POD_SLOW, Fact.POD_NOT_JOINED):
        memory.timers.keep(fact, uids)
