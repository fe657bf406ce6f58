"""Each region's state in a word, and what keeps it from being whole in a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco_operator import names
from diloco_operator.job import seconds, stamp
from diloco_operator.model import Object, Ref
from diloco_operator.objects.manifests import rendering
from diloco_operator.plan import refusals
from diloco_operator.plan.lifecycle import Course
from diloco_operator.plan.pods.node_loss import Lost
from diloco_operator.plan.pods.pod_status import Pod, shortened
from diloco_operator.plan.pods.rollout import Rollout
from diloco_operator.plan.view import View
from diloco_protocol.spec.job import RegionSpec
from diloco_protocol.vocabulary import TRAINING_PHASES, SlotState

ROLLING = ("RollingOut", "RolloutStopped")
CAUSES = 3
"""So many pods are named; of more there is the number."""
UNHEARD_SECONDS = 120.0
"""After which a region elsewhere from which nobody ever came is told."""
START_PATIENCE = 10.0
"""Seconds for which a pod that is being made or started, or should be gone, is nothing to tell."""
JOIN_PATIENCE = 60.0
"""Likewise one that runs and is not with the syncer."""


@dataclass(slots=True)
class Report:
    """What was found. ``rows``: status.regions; ``causes``: region -> what keeps it from being whole;
    ``lost``: region -> since when nobody there is heard; ``learners``: in the quorum and wanted, of all
    regions; ``obstacles``: learners' pods that do not start -> the kind of reason."""

    rows: list[Object] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    obstacles: dict[str, str] = field(default_factory=dict)
    in_quorum: int = 0
    wanted: int = 0


def report(view: View, course: Course, rolled: Rollout, nodes: Lost) -> Report:
    """status.regions, from what this cluster can see."""
    out = Report()
    here = {region.name for region in view.here.regions}
    before = {row.get("name"): row for row in view.job.status.get("regions") or []}
    for region in view.job.spec.regions:
        if region.name in here:
            _here(view, region, course, rolled, nodes, before.get(region.name) or {}, out)
        elif view.here.syncer:
            _elsewhere(view, region, course, before.get(region.name) or {}, out)
    return out


def _here(
    view: View, region: RegionSpec, course: Course, rolled: Rollout, nodes: Lost, before: Object, out: Report
) -> None:
    wanted = course.scale.learners.get(region.name, 0)
    pods = [view.learners.get(view.place(region.name, i)) for i in range(wanted)]
    there = [pod for pod in pods if pod is not None]
    if view.here.syncer:
        taking = _in_quorum(view, region, course, before)
    else:
        taking = sum(view.taking_part(pod) for pod in there)
        taking = min(taking, region.learners)
    ready = sum(pod.ready and pod.alive for pod in there)
    causes = []
    for ordinal, pod in enumerate(pods):
        said = _cause(view, region, ordinal, pod, nodes) if course.training else ""
        if said and pod is not None and pod.obstacle is not None:
            out.obstacles[pod.name] = pod.obstacle.kind
        if said and rolled.stopped.get(region.name) != view.place(region.name, ordinal):
            causes.append(f"{view.place(region.name, ordinal)}: {said}")
    if region.name in rolled.regions:
        causes.insert(0, rolled.regions[region.name])
    excess = [p for p in view.of_region(region.name) if p.ordinal >= wanted and not p.over]
    for pod in excess:
        if pod.name in nodes.said:
            causes.append(f"{pod.name}: {nodes.said[pod.name]}")
    lost = _lost_since(view, region, course, before, taking)
    state = _state(view, course, region, taking, ready, rolled, excess, lost is not None)
    if course.training and region.name in rolled.unknown and before.get("state") in ROLLING:
        state = str(before["state"])  # a moment after an edit nobody knows who has what
        causes = causes or [str(before.get("cause") or "")]
    _row(view, region, course, out, wanted, ready, taking, state, causes, lost)


def _elsewhere(view: View, region: RegionSpec, course: Course, before: Object, out: Report) -> None:
    taking = _in_quorum(view, region, course, before)
    lost = _lost_since(view, region, course, before, taking)
    causes = ["nobody there is heard"] if lost is not None else []
    known = any(slot.region == region.name and slot.process for slot in view.slots)
    waiting = course.training and view.document is not None and lost is None and not known
    if view.lasting(f"unheard {region.name}", waiting) >= UNHEARD_SECONDS:
        causes = [
            f"nobody there has joined yet: is the job applied in cluster {region.cluster}, to an operator "
            "with that cluster.name, with its Secret?"
        ]
    wanted = region.learners + region.spares if course.training else 0
    state = "Lost" if lost is not None else "Running" if taking >= region.learners else "Elsewhere"
    # Who takes part is ready; who else is, that cluster's copy says.
    _row(view, region, course, out, wanted, taking, taking, state, causes, lost)


def _in_quorum(view: View, region: RegionSpec, course: Course, before: Object) -> int:
    """Learners of the region that take part in merges, as the syncer says. While it cannot be asked,
    what was last known stands: an operator that begins anew changes nothing."""
    if view.document is None and course.training:
        return min(int(before.get("inQuorum") or 0), region.learners)
    return sum(slot.region == region.name and slot.in_quorum for slot in view.slots)


def _row(
    view: View,
    region: RegionSpec,
    course: Course,
    out: Report,
    wanted: int,
    ready: int,
    taking: int,
    state: str,
    causes: list[str],
    lost: float | None,
) -> None:
    cause = "; ".join(causes[:CAUSES])
    if len(causes) > CAUSES:
        cause += f"; and {len(causes) - CAUSES} more"
    cause = shortened(cause, 2000)
    row: dict[str, Any] = {
        "name": region.name,
        "desired": wanted,
        "ready": ready,
        "inQuorum": taking,
        "state": state,
        "cause": cause,
    }
    if region.cluster is not None:
        row["cluster"] = region.cluster
    if lost is not None:
        row["lostSince"] = stamp(lost)
        out.lost[region.name] = lost
    image = image_of(view, names.stateful_set(view.job.name, region.name), "learner")
    if image:
        row["image"] = image
    out.rows.append(row)
    if cause:
        out.causes[region.name] = cause
    out.in_quorum += taking
    out.wanted += region.learners


def image_of(view: View, ref: Ref, container: str) -> str:
    """The image of an object's main container as it was rendered; empty: not known."""
    found = rendering(view.live(ref))
    template = (found[1].get("template") or {}) if found is not None else {}
    containers = (template.get("spec") or {}).get("containers") or []
    return next((str(c.get("image", "")) for c in containers if c.get("name") == container), "")


# ------------------------------------------------------------------ one learner


def _cause(view: View, region: RegionSpec, ordinal: int, pod: Pod | None, nodes: Lost) -> str:
    """Why the learner of that place is not taking part; empty: it is, or it is on its way."""
    place = view.place(region.name, ordinal)
    absent = view.lasting(f"absent {place}", pod is None)
    if pod is None:
        made = _not_made(view, names.stateful_set(view.job.name, region.name))
        if made:
            return made
        return "its pod is not there; the StatefulSet is to make it" if absent > START_PATIENCE else ""
    if pod.name in nodes.said:
        return nodes.said[pod.name]
    if pod.terminating:
        return _stuck(view, pod)
    if pod.obstacle is not None:
        slow = pod.obstacle.kind in ("volume", "other")
        if not slow or view.lasting(f"slow {pod.uid}") > START_PATIENCE:
            return pod.obstacle.message + refusals.missing(view.job, pod.obstacle)
        return ""
    refused = _refused(view, pod)
    if refused:
        return refused
    slot = view.slot_of(pod)
    if slot is not None and slot.state == SlotState.LOST and pod.ready:
        return "it runs, and the syncer does not hear it"
    return _apart(view, pod)


def _stuck(view: View, pod: Pod) -> str:
    """Why a pod that should be gone is not, though its node is well: its successor waits for that."""
    assert pod.leaves_at is not None
    if not view.stuck(pod) or view.lasting(f"slow {pod.uid}") <= START_PATIENCE:
        return ""
    return (
        f"it was to be gone by {stamp(pod.leaves_at)} and is not, and its successor waits for that: look at "
        f"its finalizers{f' and at the kubelet of node {pod.node}' if pod.node else ''}"
    )


def _apart(view: View, pod: Pod) -> str:
    """That a learner runs and does not come to the syncer. Timed per epoch: a syncer that has just come
    back has seen nobody."""
    slot, document = view.slot_of(pod), view.document
    there = view.standing_by(pod) or (slot is not None and slot.holding)
    judged = document is not None and document.get("phase") in TRAINING_PHASES
    fact = f"apart {pod.uid} {(document or {}).get('epoch')}"
    if view.lasting(fact, judged and pod.running and not there) <= JOIN_PATIENCE:
        return ""
    named = view.job.spec.learners.credentials.secret_name
    unless = f"; it waits where Secret {named} does not fit" if named is not None else ""
    return f"it runs, and has not joined the syncer: its log says why (kubectl logs {pod.name}){unless}"


def _refused(view: View, pod: Pod) -> str:
    asked = view.observed.learners.get(pod.name)
    refused = refusals.current(asked.document) if asked is not None and asked.document is not None else None
    return "" if refused is None else refusals.sentence(*refused)


def _not_made(view: View, ref: Ref) -> str:
    """Why the controller could not make a pod, from its last Event."""
    cluster_events = [n for n in view.observed.cluster_events if (n.kind, n.name) == ref and n.reason == "FailedCreate"]
    if not cluster_events:
        return ""
    return explained(max(cluster_events, key=lambda event: event.time).message)


def explained(message: str) -> str:
    """What a controller says when it may not make a pod, with the cure where it is a quota."""
    said = f"its pod cannot be made: {shortened(message)}"
    if "exceeded quota" in message:
        said += "; raise the namespace's quota, ask for fewer learners, or for less of what it counts"
    return said


# ------------------------------------------------------------------ the region as a whole


def _lost_since(view: View, region: RegionSpec, course: Course, before: Object, taking: int) -> float | None:
    """Since when nobody of a region is heard that was heard before; None: somebody is, or nobody can tell.
    Read back from the status, so that an operator that restarts goes on with the same time."""
    text = before.get("lostSince")
    known = seconds(text) if isinstance(text, str) else None
    if not course.training or not view.here.syncer:
        return None
    if view.document is None:
        return known
    if any(slot.region == region.name and slot.holding for slot in view.slots):
        return None
    if known is not None:
        return known
    was_there = bool(before.get("inQuorum")) or any(
        slot.region == region.name and slot.state == SlotState.LOST for slot in view.slots
    )
    return view.now if was_there and taking == 0 else None


def _state(
    view: View,
    course: Course,
    region: RegionSpec,
    taking: int,
    ready: int,
    rolled: Rollout,
    excess: list[Pod],
    lost: bool,
) -> str:
    if not course.training:
        return {
            "suspended": "Suspended",
            "waiting": "Suspended",
            "suspending": "Suspending",
            "restarting": "Restarting",
            "complete": "Ended",
            "failed": "Ended",
            "finishing": "Ended",
            "failing": "Ended",
            "deleting": "Deleting",
        }[course.stage]
    if lost:
        return "Lost"
    if region.name in rolled.stopped:
        return "RolloutStopped"
    if region.name in rolled.regions:
        return "RollingOut"
    if excess:
        return "ScalingDown"
    if taking >= region.learners:
        return "Running"
    return "Starting" if taking == 0 else "Degraded"
