"""A changed template reaches the pods: one learner at a time in each region, the syncer last.

Theory of operation. The StatefulSets update on deletion only, so it is here that a pod with
an older revision is taken: deleted, for the StatefulSet to make it anew. In each region:

* nobody is taken while a pod is missing or on its way out, nor while one of the new
  revision is not in the quorum yet (or standing by). If that one never comes, because the
  image is broken, the rollout stays there, and says so;
* who is not taking part goes first: taking it costs nothing. So a repaired template
  replaces the broken pod before any that works;
* who is in the quorum is taken only while more than K are, or, where every learner is
  needed (K = M), when all are there; then the job holds until it is back.

A changed pod of the syncer is held back until all regions here are through. What it only
reads anew (settings of ``sync``, ``training.stop``) is not: a rollout may wait for learners
elsewhere, and the job would end by a stop that was raised. Both wait while learners are left
that a scaling down takes away (they drain to a syncer that knows them), unless the syncer is
itself what does not work.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field

from diloco_operator import names
from diloco_operator.model import Delete, EventWanted, Object, Ref
from diloco_operator.objects.manifests import rendering
from diloco_operator.plan.pods.node_loss import node_lost_since
from diloco_operator.plan.pods.pod_status import Pod
from diloco_operator.plan.view import UID_DIGITS, View


@dataclass(slots=True)
class Rollout:
    """What was found this turn. ``regions``: region -> a sentence about its rollout, while there is one."""

    deletes: list[Delete] = field(default_factory=list)
    events: list[EventWanted] = field(default_factory=list)
    regions: dict[str, str] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)  # region -> the pod that it waits for in vain
    unknown: set[str] = field(default_factory=set)  # regions whose StatefulSet has not said its revision yet


def roll(view: View) -> Rollout:
    """Takes who is to be taken now. Changes the view's memory."""
    out = Rollout()
    budget = _budget(view)
    for pod in view.learners.values():
        if _rolling(pod.region, pod.ordinal) in view.memory.since and view.taking_part(pod):
            del view.memory.since[_rolling(pod.region, pod.ordinal)]
    for region in view.here.regions:
        if not _revision(view, region.name):
            out.unknown.add(region.name)
            continue
        old = outdated(view, region.name)
        total = range(view.wanted(region.name))
        if not old and not any(_rolling(region.name, i) in view.memory.since for i in total):
            continue
        waits, stopped = _blocked(view, region.name, old)
        said = f"a changed template is rolled out, {len(total) - len(old)} of {len(total)} learners have it"
        if stopped:
            out.stopped[region.name] = stopped
        if waits or not old:
            out.regions[region.name] = f"{said}; {waits}" if waits else said
            continue
        there = [pod for pod in old if node_lost_since(view, pod.node) is None]
        if not there:
            out.regions[region.name] = f"{said}; the others' nodes are lost"
            continue
        pod = _next(view, there)
        healthy = _works(view, pod)
        if healthy and budget <= 0:
            out.regions[region.name] = f"{said}; {_no_budget(view)}"
            continue
        budget -= 1 if healthy else 0
        holds = healthy and view.required >= view.job.spec.slots
        note = (
            f"; every learner is needed (sync.quorum is {view.required}), so the job holds until it is back"
            if holds
            else ""
        )
        out.regions[region.name] = f"{said}; {pod.name} is taken now{note}"
        view.memory.own_deletions.add(pod.uid)
        view.memory.followed.setdefault(pod.name, (view.now, ""))
        view.memory.since.setdefault(_rolling(region.name, pod.ordinal), view.now)
        out.deletes.append(Delete(Ref("Pod", pod.name), pod.uid, "its template has changed"))
        out.events.append(
            EventWanted("Normal", "RollingOut", f"Learner {pod.name} is restarted with a changed template{note}.")
        )
    return out


def outdated(view: View, region: str) -> list[Pod]:
    """Pods of the region that have an older template than the StatefulSet's present one. Those that are on
    their way out are not among them."""
    newest = _revision(view, region)
    if not newest:
        return []
    wanted = view.wanted(region)
    return [
        pod
        for pod in view.of_region(region)
        if pod.alive and 0 <= pod.ordinal < wanted and pod.revision and pod.revision != newest
    ]


def settled(view: View) -> bool:
    """Whether every learner here has the template of the job's present generation."""
    for region in view.here.regions:
        live = view.live(names.stateful_set(view.job.name, region.name))
        if live is None:
            continue  # a new region: its learners come with the new template
        if not _revision(view, region.name) or outdated(view, region.name):
            return False
        wanted = view.wanted(region.name)
        for pod in view.of_region(region.name):
            taken = pod.ordinal < wanted and pod.terminating and pod.revision != _revision(view, region.name)
            if taken and not view.stuck(pod):
                return False
        if any(_rolling(region.name, place) in view.memory.since for place in range(wanted)):
            return False
    return True


def _shrinking(view: View) -> bool:
    """Whether anybody is left of those that a scaling down takes away."""
    for region in view.here.regions:
        wanted = view.wanted(region.name)
        for pod in view.of_region(region.name):
            if pod.ordinal >= wanted and not pod.over and not view.stuck(pod):
                return True
    return _removed(view)


def _rolling(region: str, ordinal: int) -> str:
    """The fact that the rollout has taken a learner that is not taking part again yet."""
    return f"rolling {region}-{ordinal}"


def _removed(view: View) -> bool:
    """Whether learners of a region that is not in the job any more are still there."""
    known = {region.name for region in view.here.regions}
    return any(
        pod.role == "learner" and pod.region not in known and not pod.over and not view.stuck(pod) for pod in view.pods
    )


def _revision(view: View, region: str) -> str:
    """The StatefulSet's newest revision, if that is of the job's present generation; empty: not known yet."""
    live = view.live(names.stateful_set(view.job.name, region))
    found = rendering(live)
    if live is None or found is None or found[0] != view.job.generation:
        return ""
    status = live.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(live["metadata"].get("generation") or 0):
        return ""
    return str(status.get("updateRevision") or "")


def _blocked(view: View, region: str, old: list[Pod]) -> tuple[str, str]:
    """Why nobody is taken now, in words (empty: somebody may be); the pod for which that will not pass."""
    names_old = {pod.name for pod in old}
    for ordinal in range(view.wanted(region)):
        place = view.place(region, ordinal)
        pod = view.learners.get(place)
        if pod is None:
            return f"{place} is being made", ""
        if view.leaving(pod):
            return f"{place} is on its way out", ""
        if place not in names_old and not view.taking_part(pod):
            if pod.obstacle is not None:
                return f"it stops at {place}, which does not start: {pod.obstacle.message}", place
            return f"{place} is not in the quorum yet", ""
    return "", ""


def _next(view: View, old: list[Pod]) -> Pod:
    """Who is not taking part first, then who stands by, then from the last ordinal down."""
    return min(old, key=lambda p: (_works(view, p), view.taking_part(p), -p.ordinal))


def _works(view: View, pod: Pod) -> bool:
    """Whether taking it may cost the quorum a member. One that has joined is given the benefit of the
    doubt: the syncer may be restarting, or not be heard from here."""
    if view.document is None and pod.running:
        return True
    return view.in_quorum(pod) or (pod.ready and not view.standing_by(pod))


def _budget(view: View) -> int:
    """How many learners that are in the quorum may be taken now, in all regions together."""
    if view.document is None or not view.here.syncer:
        # Elsewhere than at the syncer nobody here knows the quorum; one at a time in a region is the limit.
        return 0 if view.here.syncer else len(view.here.regions)
    here = {region.name for region in view.here.regions}
    pods = {pod.process: pod for pod in view.pods}
    active = 0
    for slot in view.slots:
        pod = pods.get(slot.process[:UID_DIGITS])
        # What the syncer said is seconds old: who went meanwhile does not count.
        gone = slot.region in here if pod is None else view.leaving(pod)
        active += slot.in_quorum and not gone
    if view.required >= view.job.spec.slots:
        return 1 if active >= view.required else 0
    return active - view.required


def _no_budget(view: View) -> str:
    if view.document is None:
        return "no learner that works is taken while the syncer does not answer"
    return (
        f"no other is taken until more than {view.required} (sync.quorum) are in the quorum"
        if view.required < view.job.spec.slots
        else "no other is taken until all are in the quorum"
    )


def held_back(view: View, ref: Ref, wanted: Object) -> bool:
    """Whether a changed rendering of the syncer's Deployment waits. ``wanted``: the new rendering."""
    if ref != names.syncer_deployment(view.job.name):
        return False
    found = rendering(view.live(ref))
    if found is None or found[1] == wanted or view.replicas(ref) == 0:
        return False
    syncer = view.pod_of("syncer")
    works = syncer is not None and syncer.alive and syncer.ready
    waits = _shrinking(view) or (_but_inputs(found[1]) != _but_inputs(wanted) and not settled(view))
    return works and waits


def _but_inputs(rendered: Object) -> Object:
    """A rendering without the digest of what the program reads."""
    found = copy.deepcopy(rendered)
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # by another hand: it is not like ours
        del found["template"]["metadata"]["annotations"][names.INPUTS]
    return found
