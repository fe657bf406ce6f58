"""How a changed pod template reaches the pods: one learner at a time in each region, the syncer last.

The StatefulSets update on deletion only. So it is the operator that restarts a pod of an older
revision: it deletes the pod, and the StatefulSet makes a new one from the changed template.
``advance_rollout`` chooses the pods of this turn, by these rules:

* **One at a time.** No pod of a region is restarted while another is missing or leaving, nor
  while one of the new revision does not take part yet. If that one cannot start, as with a wrong
  image, the rollout stops there, and status says why.
* **The broken first.** A learner that does not take part is restarted before any that does. It
  costs nothing, and a repaired template so replaces the broken pod first.
* **Never below K.** A learner in the quorum is restarted only while more than K are, those not
  counted that have just missed heartbeats. Where every learner is needed (K = M), it is restarted
  when all are there, and the job holds until it is back. A syncer that is changed after its learners
  may have fewer slots than the job asks for: then M is the number of its slots.

Example: a job of three learners with K = 2 gets a new image. local-2 is restarted; when it is in
the quorum again, local-1; then local-0; then the syncer.

**The syncer.** Its changed Deployment waits until all regions here are through. One change does
not wait: of what the syncer only reads when it starts (``sync``, ``training.stop``). A rollout
may wait for learners of other clusters, and meanwhile the job would end by a stop that was
raised. Both kinds wait while learners are left that a scaling down removes, for these drain to a
syncer that knows them. Neither waits where the syncer itself does not work.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field

from diloco_operator import names
from diloco_operator.model import AwaitedSuccessor, Delete, EventWanted, Object, Ref
from diloco_operator.objects.manifests import stored_rendering
from diloco_operator.plan.durability import claim_is_going, learners_have_the_only_copy
from diloco_operator.plan.pod_status import Pod
from diloco_operator.plan.pods.groups import delete_learner
from diloco_operator.plan.pods.node_loss import node_lost_since
from diloco_operator.plan.view import UID_DIGITS, View
from diloco_protocol.documents import SlotRow

QUIET_SECONDS, QUIET_HEARTBEATS = 5.0, 3.0  # the greater: silence after which a learner is not relied on


@dataclass(slots=True)
class Rollout:
    """How far the rollout is, and which pods are restarted now."""

    deletes: list[Delete] = field(default_factory=list)
    events: list[EventWanted] = field(default_factory=list)
    regions: dict[str, str] = field(default_factory=dict)  # region with a rollout -> a sentence about it
    stopped: dict[str, str] = field(default_factory=dict)  # region -> its new pod that cannot start
    unknown: set[str] = field(default_factory=set)  # regions whose StatefulSet has no revision for this generation yet


def advance_rollout(view: View) -> Rollout:
    """Choose the pods to restart now. Changes the view's memory."""
    out = Rollout()
    budget = _budget(view)
    restarted = view.memory.rollout_restarts
    restarted -= {(pod.region, pod.ordinal) for pod in view.learners.values() if view.taking_part(pod)}
    for region in view.here.regions:
        if not _revision(view, region.name):
            out.unknown.add(region.name)
            continue
        old = _outdated_pods(view, region.name)
        total = range(view.wanted(region.name))
        if not old and not any((region.name, i) in restarted for i in total):
            continue
        waits, stopped = _find_obstacle(view, region.name, old)
        said = f"a changed template is rolled out, {len(total) - len(old)} of {len(total)} learners have it"
        if stopped:
            out.stopped[region.name] = stopped
        there = [pod for pod in old if all(node_lost_since(view, one.node) is None for one in view.members(pod))]
        pod = _choose_next(view, there) if there else None
        healthy = pod is not None and _may_be_in_quorum(view, pod)
        if waits or not old:
            why = waits
        elif pod is None:
            why = "the others' nodes are lost"
        elif healthy and budget <= 0:
            why = _explain_no_budget(view)
        elif not view.may_act():
            why = ""
        else:
            budget -= healthy
            suffix = ""
            if healthy and _all_are_needed(view):
                suffix = (
                    f"; every learner is needed (sync.quorum is {view.required}), so the job holds until it is back"
                )
            why = f"{pod.name} is restarted now{suffix}"
            view.memory.successors.setdefault(pod.name, AwaitedSuccessor(view.now, ""))
            restarted.add((region.name, pod.ordinal))
            out.deletes += delete_learner(view, pod, "its template has changed")
            told = f"Learner {pod.name} is restarted with a changed template{suffix}."
            out.events.append(EventWanted("Normal", "RollingOut", told))
        out.regions[region.name] = f"{said}; {why}" if why else said
    return out


def _outdated_pods(view: View, region: str) -> list[Pod]:
    """Learners of the region with a pod of an older template than its StatefulSet's, by their leading pods, without
    those that terminate."""
    newest = _revision(view, region)
    if not newest:
        return []
    wanted = view.wanted(region)
    return [
        pod
        for pod in view.learners.values()
        if pod.region == region and pod.alive and 0 <= pod.ordinal < wanted
        if any(one.alive and one.revision and one.revision != newest for one in view.members(pod))
    ]


def _is_rolled_out(view: View) -> bool:
    """Whether every learner here has the template of the job's present generation."""
    for region in view.here.regions:
        if view.live(names.stateful_set(view.job.name, region.name)) is None:
            continue  # a new region: its learners come with the new template
        revision, wanted = _revision(view, region.name), view.wanted(region.name)
        if not revision or _outdated_pods(view, region.name):
            return False
        pods = [pod for pod in view.learner_pods.values() if pod.region == region.name]
        leaving = [pod for pod in pods if pod.terminating and not view.stuck(pod)]
        if any(pod.ordinal < wanted and pod.revision != revision for pod in leaving):
            return False
        if any((region.name, i) in view.memory.rollout_restarts for i in range(wanted)):
            return False
    return True


def _is_shrinking(view: View) -> bool:
    """Whether learners are left that a scaling down removes, or of a region that the job does not have any more."""
    return any(
        pod.role == "learner" and pod.ordinal >= view.wanted(pod.region) and not pod.over and not view.stuck(pod)
        for pod in view.pods
    )


def _revision(view: View, region: str) -> str:
    """The revision of the region's StatefulSet for the job's present generation; empty: not known yet."""
    live = view.live(names.stateful_set(view.job.name, region))
    found = stored_rendering(live)
    if live is None or found is None or found.generation != view.job.generation:
        return ""
    status = live.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(live["metadata"].get("generation") or 0):
        return ""
    return str(status.get("updateRevision") or "")


def _find_obstacle(view: View, region: str, old: list[Pod]) -> tuple[str, str]:
    """Why no pod of the region is restarted now, in words; empty: one may be. And, where the rollout has
    stopped, the pod that cannot start."""
    names_old = {pod.name for pod in old}
    for place in (place for ordinal in range(view.wanted(region)) for place in view.places(region, ordinal)):
        pod = view.learner_pods.get(place)
        if pod is None:
            return f"{place} is being made", ""
        if view.leaving(pod):
            refused = next((e.message for e in view.observed.apply_errors if e.ref == Ref("Pod", place)), "")
            return (f"{place} cannot be deleted: {refused}" if refused and pod.alive else f"{place} is terminating", "")
        leader = view.members(pod)[0]
        if leader.name not in names_old and not view.taking_part(leader):
            if pod.obstacle is not None:
                return f"the rollout stops at {place}, which does not start: {pod.obstacle.message}", place
            if place == view.places(region, pod.ordinal)[-1]:
                return f"{leader.name} is not in the quorum yet", ""
    return "", ""


def _choose_next(view: View, old: list[Pod]) -> Pod:
    """The pod to restart: first those out of the quorum, then those that stand by, then the last ordinal."""
    return min(old, key=lambda p: (_may_be_in_quorum(view, p), view.taking_part(p), -p.ordinal))


def _may_be_in_quorum(view: View, pod: Pod) -> bool:
    """Whether restarting the pod may cost the quorum a member. A pod that has joined counts as a member
    while this is not known, as when the syncer restarts or cannot be reached from here."""
    if view.document is None and pod.running:
        return True
    return view.in_quorum(pod) or (pod.ready and not view.standing_by(pod))


def _budget(view: View) -> int:
    """How many learners in the quorum may be restarted now, in all regions together."""
    if view.document is None or not view.here.syncer:
        # A cluster without the syncer does not know the quorum: one at a time in a region is its limit.
        return 0 if view.here.syncer else len(view.here.regions)
    if learners_have_the_only_copy(view) is not None:
        return 0
    here = {region.name for region in view.here.regions}
    pods = {pod.process: pod for pod in view.pods}
    active = 0
    for slot in view.slots:
        pod = pods.get(slot.process[:UID_DIGITS])
        # The syncer's answer is seconds old: a pod that has left meanwhile does not count.
        leaves = pod is not None and any(map(view.leaving, [pod, *view.members(pod)]))
        has_left = slot.region in here if pod is None else leaves
        active += slot.in_quorum and not has_left and not _is_quiet(view, slot)
    if _all_are_needed(view):
        return 1 if active >= view.required else 0
    return active - view.required


def _all_are_needed(view: View) -> bool:
    """Whether a merge needs every learner that the syncer has a slot for."""
    return view.required >= min(view.job.spec.slots, len(view.slots) or view.job.spec.slots)


def _is_quiet(view: View, slot: SlotRow) -> bool:
    """Whether the slot's learner may have missed heartbeats by now: it may be cut off or dead, and still waited for."""
    limit = max(QUIET_SECONDS, QUIET_HEARTBEATS * view.job.spec.sync.heartbeat.interval_seconds)
    asked = view.observed.syncer
    return (slot.heard_seconds_ago or 0.0) + (max(0.0, view.now - asked.at) if asked is not None else 0.0) > limit


def _explain_no_budget(view: View) -> str:
    danger = learners_have_the_only_copy(view)
    if danger is not None:
        return f"no learner is restarted while what is trained is not safe ({danger.reason})"
    if view.document is None:
        return "no healthy learner is restarted while the syncer does not answer"
    return (
        f"no other is restarted until more than {view.required} (sync.quorum) are in the quorum"
        if not _all_are_needed(view)
        else "no other is restarted until all are in the quorum"
    )


def syncer_change_waits(view: View, before: Object, wanted: Object) -> bool:
    """Whether the syncer's changed Deployment is to wait. ``before`` and ``wanted``: its old and its new rendering."""
    syncer = view.pod_of("syncer")
    works = syncer is not None and syncer.alive and syncer.ready
    if works and claim_is_going(view):
        return True  # the volume would go with its pod
    waits = _is_shrinking(view) or (_without_inputs(before) != _without_inputs(wanted) and not _is_rolled_out(view))
    return works and waits


def _without_inputs(rendered: Object) -> Object:
    """A rendering without the digest of what the program reads when it starts."""
    found = copy.deepcopy(rendered)
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # another program wrote it, in another form
        del found["template"]["metadata"]["annotations"][names.INPUTS]
    return found
