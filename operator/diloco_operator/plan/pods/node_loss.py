"""Pods on lost nodes: what is said of them, and when one is force-deleted.

A pod whose node is lost stays Terminating until the node's kubelet says that it is gone,
which may be never. Under ``Wait`` that is told, with the cures. Under ``ForceDelete`` the
pod object is deleted with grace 0 if all of this holds: it is past its grace, its node was
NotReady (or away) for ``afterSeconds``, the budget is not used up, and, for a learner or an
evaluator, none of its volumes is one that a single node may write. The syncer may have one:
what fences it is the epoch in its store. Nodes are never tainted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from diloco_operator.job import seconds, stamp
from diloco_operator.model import Delete, EventWanted, Ref
from diloco_operator.plan.pods.pod_status import Pod
from diloco_operator.plan.view import View

BUDGET, WINDOW_SECONDS = 10, 300.0
"""So many force-deletions of one job in so many seconds: if more nodes seem lost, look before it goes on."""
_SHARED = frozenset({"ReadWriteMany", "ReadOnlyMany"})


@dataclass(slots=True)
class Lost:
    """What was found this turn."""

    said: dict[str, str] = field(default_factory=dict)  # pod -> what is so, for status
    deletes: list[Delete] = field(default_factory=list)
    events: list[EventWanted] = field(default_factory=list)
    wake_in: float = math.inf  # seconds until a pod's time is over


def watch(view: View) -> Lost:
    """All pods of the job, whatever its stage. Changes the view's memory."""
    out = Lost()
    memory = view.memory
    memory.force_deletions = [t for t in memory.force_deletions if view.now - t < WINDOW_SECONDS]
    for pod in view.pods:
        if pod.node and not pod.over:
            _look(view, pod, out)
    present = {f"away {pod.node}" for pod in view.pods}
    for fact in [f for f in memory.since if f.startswith("away ") and f not in present]:
        del memory.since[fact]
    return out


def node_lost_since(view: View, name: str) -> float | None:
    """Since when the node is not ready or not there; None: it is well, or nobody can tell."""
    nodes = view.observed.nodes
    if nodes is None or not name:
        return None
    node = nodes.get(name)
    if node is None:
        return view.now - view.lasting(f"away {name}")
    view.lasting(f"away {name}", False)
    for condition in (node.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            text = condition.get("lastTransitionTime")
            return seconds(text) if isinstance(text, str) else view.now
    return None


def _look(view: View, pod: Pod, out: Lost) -> None:
    policy = view.job.spec.node_loss
    lost = node_lost_since(view, pod.node)
    cures = (
        f"bring the node back, or taint it out-of-service (kubectl taint nodes {pod.node} "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute)"
    )
    if lost is None:
        if view.observed.nodes is None and view.stuck(pod):
            out.said[pod.name] = (
                f"it should have gone, and its node {pod.node} does not say that it has; whether the node is "
                "lost cannot be told, since this operator may not read nodes"
            )
        return
    said = f"its node {pod.node} has been lost since {stamp(lost)}"
    if policy.policy == "Wait":
        out.said[pod.name] = f"{said}, and nodeLoss.policy is Wait: {cures}, or set ForceDelete"
        return
    if not pod.terminating:
        out.said[pod.name] = said
        return
    assert pod.leaves_at is not None
    waits = max(pod.leaves_at, lost + policy.after_seconds) - view.now
    shared = pod.role == "syncer" or not (volume := _own_volume(view, pod))
    if waits > 0:
        out.said[pod.name] = f"{said}; it is force-deleted at {stamp(math.ceil(view.now + waits))}"
        out.wake_in = min(out.wake_in, waits)
    elif not shared:
        out.said[pod.name] = (
            f"{said}, and it is not force-deleted, since only one node may write its volume {volume}: {cures}"
        )
    elif len(view.memory.force_deletions) >= BUDGET:
        out.said[pod.name] = (
            f"{said}, and {BUDGET} pods were force-deleted within {WINDOW_SECONDS / 60:.0f} minutes: "
            f"the rest waits; {cures}"
        )
        out.wake_in = min(out.wake_in, view.memory.force_deletions[0] + WINDOW_SECONDS - view.now)
    else:
        view.memory.force_deletions.append(view.now)
        view.memory.own_deletions.add(pod.uid)
        why = f"{said} (nodeLoss.policy ForceDelete)"
        out.deletes.append(Delete(Ref("Pod", pod.name), pod.uid, why, force=True))
        out.events.append(
            EventWanted(
                "Warning",
                "PodForceDeleted",
                f"Pod {pod.name} is force-deleted: {said}. Its successor may start elsewhere.",
            )
        )
        out.said[pod.name] = said


def _own_volume(view: View, pod: Pod) -> str:
    """A volume of the pod that only one node may write, or of which that is not known; empty: none."""
    for volume in pod.spec.get("volumes") or []:
        if "ephemeral" in volume:
            template = (volume["ephemeral"] or {}).get("volumeClaimTemplate") or {}
            modes = (template.get("spec") or {}).get("accessModes") or []
            name = str(volume.get("name"))
        elif "persistentVolumeClaim" in volume:
            name = str((volume["persistentVolumeClaim"] or {}).get("claimName"))
            claim = view.observed.objects.get(Ref("PersistentVolumeClaim", name)) or {}
            modes = (claim.get("spec") or {}).get("accessModes") or []
        elif {"iscsi", "fc"} & set(volume):
            name, modes = str(volume.get("name")), []
        else:
            continue
        if not modes or not set(modes) <= _SHARED:
            return name
    return ""
