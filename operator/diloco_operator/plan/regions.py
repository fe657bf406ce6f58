"""``status.regions``: each region's state in a word, and in a sentence what keeps it from being whole.

In the hub a row counts the region's learners as the syncer lists them, wherever they run. What
keeps a learner of this cluster away is read off its pod; of a region of another cluster only
the number in the quorum is known here. A cluster without the syncer has rows for its own regions
alone, and counts the learners whose status pages say that they take part.

While the syncer cannot be asked, the numbers of the last status stand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from diloco_operator import names
from diloco_operator.job import rfc3339, seconds_of
from diloco_operator.model import Fact, Object, Ref
from diloco_operator.objects.manifests import stored_rendering
from diloco_operator.plan import refusals
from diloco_operator.plan.lifecycle import STAGE_WORDS, LifecycleDecision
from diloco_operator.plan.pod_status import Pod, merge_equal, newest_message
from diloco_operator.plan.pods.groups import find_first_end
from diloco_operator.plan.pods.node_loss import NodeLosses
from diloco_operator.plan.pods.rollout import Rollout
from diloco_operator.plan.view import View
from diloco_protocol.common.program_errors import shorten
from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.vocabulary import LABEL_JOB, TRAINING_PHASES, SlotState

ROLLING = ("RollingOut", "RolloutStopped")
CAUSES = 3
"""So many pods' causes are given; of the others there is the number."""
NEVER_HEARD_SECONDS = 120.0
"""After so long status says that no learner of another cluster's region has ever joined."""
START_PATIENCE = 10.0
"""For so long a pod may be missing, start or be stuck before status says so."""
JOIN_PATIENCE = 60.0
"""For so long a learner may run without having joined before status says so."""


@dataclass(slots=True)
class RegionReport:
    """The rows of ``status.regions``, and what other parts of the plan take from them."""

    rows: list[Object] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)  # region -> what keeps it from being whole
    lost: dict[str, float] = field(default_factory=dict)  # region -> since when no learner of it is heard
    obstacles: dict[str, str] = field(default_factory=dict)  # learner's pod that does not start -> kind of reason
    in_quorum: int = 0  # learners of all regions
    wanted: int = 0  # learners of all regions, without spares

    def add(self, region: RegionSpec, row: Object, causes: list[str], lost_since: float | None, image: str) -> None:
        """Add a region's row. ``image``: of its learners; empty: not known."""
        cause = "; ".join(causes[:CAUSES])
        if len(causes) > CAUSES:
            cause += f"; and {len(causes) - CAUSES} more"
        cause = shorten(cause, 2000)
        row = {"name": region.name, **row, "cause": cause}
        if region.cluster is not None:
            row["cluster"] = region.cluster
        if lost_since is not None:
            row["lostSince"] = rfc3339(lost_since)
            self.lost[region.name] = lost_since
        if image:
            row["image"] = image
        if cause:
            self.causes[region.name] = cause
        self.rows.append(row)
        self.in_quorum += row["inQuorum"]
        self.wanted += region.learners


def report_regions(view: View, decision: LifecycleDecision, rolled: Rollout, nodes: NodeLosses) -> RegionReport:
    """The rows, from what this cluster can see. Changes the view's memory (timers)."""
    _remember_newest_pods(view)
    out = RegionReport()
    here = {region.name for region in view.here.regions}
    for region in view.job.spec.regions:
        if region.name in here:
            _report_region_here(view, region, decision, rolled, nodes=nodes, out=out)
        elif view.here.syncer:
            _report_region_elsewhere(view, region, decision, out)
    return out


def is_lost(view: View, region: str, since: float) -> bool:
    """Whether a region of which no learner is heard since then counts as lost: by its patience, or by the syncer."""
    patience = view.job.spec.failure_policy.region_lost_seconds
    return view.now >= since + patience or region in view.regions_lost  # the moment of ``_wake_in``


def _report_region_here(
    view: View, region: RegionSpec, decision: LifecycleDecision, rolled: Rollout, nodes: NodeLosses, out: RegionReport
) -> None:
    wanted = decision.scale.learners.get(region.name, 0)
    pods = [view.learners.get(view.place(region.name, i)) for i in range(wanted)]
    there = [pod for pod in pods if pod is not None]
    if view.here.syncer:
        taking = _in_quorum(view, region, decision)
    else:
        taking = min(sum(view.taking_part(pod) for pod in there), region.learners)
    ready = sum(pod.ready and pod.alive for pod in there)
    absent = []
    for ordinal in range(wanted):
        said = _explain_absence(view, region, ordinal, nodes) if decision.training else ""
        members = [view.learner_pods.get(place) for place in view.places(region.name, ordinal)] if said else []
        out.obstacles |= {
            pod.name: pod.obstacle.kind for pod in members if pod is not None and pod.obstacle is not None
        }
        if said and rolled.stopped.get(region.name) != view.place(region.name, ordinal):
            absent.append((view.place(region.name, ordinal), said))
    excess = [p for p in view.learner_pods.values() if p.region == region.name and p.ordinal >= wanted and not p.over]
    absent += [(pod.name, nodes.reasons[pod.name]) for pod in excess if pod.name in nodes.reasons]
    rolling = [rolled.regions[region.name]] if region.name in rolled.regions else []
    causes = rolling + merge_equal(absent)
    lost, before = _lost_since(view, region, decision, taking), view.region_row(region.name)
    states = (
        ("Lost", lost is not None and is_lost(view, region.name, lost)),
        ("RolloutStopped", region.name in rolled.stopped),
        ("RollingOut", region.name in rolled.regions),
        ("ScalingDown", excess),
        ("Running", taking >= region.learners),
        ("Starting", taking == 0),
    )
    state = next((word for word, holds in states if holds), "Degraded")
    if not decision.training:
        state = STAGE_WORDS[decision.stage].region_state
    elif region.name in rolled.unknown and before.get("state") in ROLLING:
        state = str(before["state"])  # just after an edit it is not known which pods have the changed template
        causes = causes or [str(before.get("cause") or "")]
    row = {"desired": wanted, "ready": ready, "inQuorum": taking, "state": state}
    out.add(region, row, causes, lost, image_of(view, names.stateful_set(view.job.name, region.name), "learner"))


def _report_region_elsewhere(view: View, region: RegionSpec, decision: LifecycleDecision, out: RegionReport) -> None:
    taking = _in_quorum(view, region, decision)
    lost = _lost_since(view, region, decision, taking)
    causes = ["no learner there is heard"] if lost is not None else []
    known = any(slot.region == region.name and slot.process for slot in view.slots)
    waiting = decision.training and view.document is not None and lost is None and not known
    if view.observe(Fact.REGION_NEVER_HEARD, region.name, holds=waiting) >= NEVER_HEARD_SECONDS:
        causes = [
            "no learner there has joined yet: check that the job and its Secret are applied in cluster "
            f"{region.cluster}, and that its operator has that cluster.name"
        ]
    wanted = region.learners + region.spares if decision.training else 0
    gone = lost is not None and is_lost(view, region.name, lost)
    state = "Lost" if gone else "Running" if taking >= region.learners else "Elsewhere"
    # Ready are, as far as is known here, those that take part. That cluster's own status knows more.
    row = {"desired": wanted, "ready": taking, "inQuorum": taking, "state": state}
    out.add(region, row, causes, lost, image_of(view, names.stateful_set(view.job.name, region.name), "learner"))


def _in_quorum(view: View, region: RegionSpec, decision: LifecycleDecision) -> int:
    """How many learners of the region the syncer has in the quorum. While it cannot be asked, the number of
    the last status stands, so that an operator that restarts changes nothing."""
    if view.document is None and decision.learners_stay:
        return min(int(view.region_row(region.name).get("inQuorum") or 0), region.most_learners)
    return sum(slot.region == region.name and slot.in_quorum for slot in view.slots)


def image_of(view: View, ref: Ref, container: str) -> str:
    """The image of a container of an object that holds pods, as rendered; empty: not known."""
    found = stored_rendering(view.live(ref))
    template = (found.spec.get("template") or {}) if found is not None else {}
    containers = (template.get("spec") or {}).get("containers") or []
    return next((str(c.get("image", "")) for c in containers if c.get("name") == container), "")


# ------------------------------------------------------------------ one learner


def _explain_absence(view: View, region: RegionSpec, ordinal: int, nodes: NodeLosses) -> str:
    """Why a learner does not take part; empty: it does, or it has not had the time to. Of several pods it is the one
    that keeps the others waiting; of those that crash, the one that did so first."""
    places = view.places(region.name, ordinal)
    pods = [view.learner_pods.get(place) for place in places]
    said = [
        _explain_pod(view, region, ordinal, place, pod=pod, nodes=nodes)
        for place, pod in zip(places, pods, strict=True)
    ]

    def rank_of(index: int) -> tuple[bool, bool, int]:
        pod = pods[index]
        crashed = pod is not None and pod.obstacle is not None and pod.obstacle.kind == "Crashing"
        return crashed, crashed and pod is not None and find_first_end(view, pod) is not pod, index

    first = min((index for index, words in enumerate(said) if words), key=rank_of, default=None)
    if first is not None:
        words = said[first] if first == 0 else f"its pod {places[first]}: {said[first]}"
        there = sum(pod is not None for pod in pods)
        return f"{there} of its {len(pods)} pods are made; {words}" if 0 < there < len(pods) else words
    leader = pods[0]
    runs = leader is not None and leader.obstacle is None and not leader.terminating
    return _explain_session(view, leader) if leader is not None and runs else ""


def _explain_pod(view: View, region: RegionSpec, ordinal: int, place: str, pod: Pod | None, nodes: NodeLosses) -> str:
    """Why a pod of a learner does not run; empty: it does, or it has not had the time to."""
    missing = view.observe(Fact.POD_MISSING, place, holds=pod is None)
    if pod is None:
        unmade = explain_not_made(view, names.stateful_set(view.job.name, region.name))
        if unmade:
            return unmade
        trains = any(s.in_quorum and (s.region, s.ordinal) == (region.name, ordinal) for s in view.slots)
        if trains and missing > START_PATIENCE:  # the API server has the pod, or its slot would be fenced
            return f"it trains, but its pod lost a label: kubectl label pod {place} {LABEL_JOB}={view.job.name}"
        return "its pod does not exist; its StatefulSet has not created it yet" if missing > START_PATIENCE else ""
    if pod.name in nodes.reasons:
        return nodes.reasons[pod.name]
    if pod.terminating:
        return _explain_stuck(view, pod)
    if pod.obstacle is not None:
        slow = pod.obstacle.kind in ("VolumeUnavailable", "NotStarting")
        if not slow or view.observe(Fact.POD_SLOW, pod.uid) > START_PATIENCE:
            return pod.obstacle.message + refusals.missing_secret_cure(view.job, pod.obstacle)
    return ""


def _explain_session(view: View, pod: Pod) -> str:
    """Why a learner that runs does not take part; ``pod``: the one that leads it."""
    asked, slot = view.observed.learners.get(pod.name), view.slot_of(pod)
    refused = refusals.current_refusal(asked.document) if asked is not None and asked.document is not None else None
    if refused is not None:
        return refusals.refusal_sentence(*refused)
    if slot is not None and slot.state == SlotState.LOST and pod.ready:
        return "it runs, but the syncer does not hear it"
    return _explain_not_joined(view, pod)


def _explain_stuck(view: View, pod: Pod) -> str:
    """Why a stuck pod on a node that is not lost is still there; its successor waits until it is gone."""
    assert pod.leaves_at is not None
    if not view.stuck(pod) or view.observe(Fact.POD_SLOW, pod.uid) <= START_PATIENCE:
        return ""
    return (
        f"it should have ended by {rfc3339(pod.leaves_at)}, and its successor waits for it: check "
        f"its finalizers{f' and the kubelet of node {pod.node}' if pod.node else ''}"
    )


def _explain_not_joined(view: View, pod: Pod) -> str:
    """That a learner runs and has not joined. Timed per epoch, for a syncer that has just started has seen
    no learner yet."""
    slot, document = view.slot_of(pod), view.document
    there = view.standing_by(pod) or (slot is not None and slot.held)
    expected = document is not None and document.phase in TRAINING_PHASES
    outside = expected and pod.running and not there
    if view.observe(Fact.POD_NOT_JOINED, pod.uid, epoch=view.epoch, holds=outside) <= JOIN_PATIENCE:
        return ""
    named = view.job.spec.learners.credentials.secret_name
    unless = f"; it also waits if Secret {named} does not fit" if named is not None else ""
    return f"it runs, but has not joined the syncer: its log says why (kubectl logs {pod.name}){unless}"


def _remember_newest_pods(view: View) -> None:
    """Keep when the newest pod of each StatefulSet and Deployment was created, for the time when it is gone. Both this
    time and an Event's are of the cluster's own clocks, in whole seconds."""
    newest, refs = view.memory.newest_pods, set(view.observed.objects)
    for ref in newest.keys() - refs:
        del newest[ref]
    for pod in view.pods:
        ref = view.holder_of(pod)
        if pod.created is not None and ref in refs:
            newest[ref] = max(newest.get(ref, -math.inf), pod.created)


def explain_not_made(view: View, ref: Ref) -> str:
    """Why a StatefulSet or Deployment could not make a pod, by its last Event, with the cure where it is about a
    quota; empty: it has not said so since it made its newest pod. What kept it from that is over by then, though its
    Event stays for long."""
    since = view.memory.newest_pods.get(ref, -math.inf)
    message = newest_message(view.observed.cluster_events, ref, "FailedCreate", since=since)
    if not message:
        return ""
    said = f"its pod cannot be created: {shorten(message)}"
    if "exceeded quota" in message:
        said += "; raise the namespace's quota, or ask for less (fewer learners, smaller requests)"
    return said


# ------------------------------------------------------------------ the region as a whole


def _lost_since(view: View, region: RegionSpec, decision: LifecycleDecision, taking: int) -> float | None:
    """Since when no learner of a region is heard that was heard before; None: one is, or it is not known.
    The time is read back from the status, so that an operator that restarts goes on with it."""
    before = view.region_row(region.name)
    known = seconds_of(before.get("lostSince"))
    if not decision.training or not view.here.syncer:
        return None
    if view.document is None:
        return known
    if any(slot.region == region.name and slot.held for slot in view.slots):
        return None
    if known is not None:
        return known
    was_there = bool(before.get("inQuorum")) or any(
        slot.region == region.name and slot.state == SlotState.LOST for slot in view.slots
    )
    return view.now if was_there and taking == 0 else None
