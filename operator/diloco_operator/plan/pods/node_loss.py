"""Pods on lost nodes: what status says of them, and when one is force-deleted.

A node is lost when it is NotReady or its object is missing. A pod on it stays Terminating until the node's kubelet
confirms that it has ended, which may be never. Until then the StatefulSet makes no successor.

Under ``nodeLoss.policy: Wait`` status names the node and the cures. Under ``ForceDelete`` the pod
object is deleted with grace 0 if all of this holds:

* the pod is past its grace period, and this operator has seen its node lost for ``afterSeconds``, by its own clock: the
  time in the node's condition is another machine's, whose clock may be behind. A new operator counts anew;
* fewer than ``BUDGET`` pods of the job were force-deleted within ``WINDOW_SECONDS``: where more
  nodes seem lost, a person should look first;
* a learner or an evaluator has no volume that only one node may write. The syncer may have one,
  because the epoch in its store keeps an old syncer from writing there.

A loss is told once this operator has seen it for ``TOLD_AFTER_SECONDS``. Pods and nodes come by two watches: a pod that
is bound to a new node may be seen before that node, or before the node is Ready. An operator that starts goes on with
what status says already.

Nodes are never tainted by the operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from diloco_operator.job import rfc3339, seconds_of
from diloco_operator.model import Delete, EventWanted, Fact, Ref
from diloco_operator.plan.pod_status import Pod
from diloco_operator.plan.view import View

BUDGET, WINDOW_SECONDS = 10, 300.0
"""At most so many force-deletions of one job in so many seconds."""
TOLD_AFTER_SECONDS = 10.0
"""A node must be lost for so long before status and Events say so."""
_SHARED = frozenset({"ReadWriteMany", "ReadOnlyMany"})


@dataclass(slots=True)
class NodeLosses:
    """The pods on lost nodes, and what is to be done about them."""

    reasons: dict[str, str] = field(default_factory=dict)  # pod's name -> a sentence for status
    deletes: list[Delete] = field(default_factory=list)
    events: list[EventWanted] = field(default_factory=list)
    wake_in: float = math.inf  # seconds until the next pod may be force-deleted


def handle_lost_nodes(view: View) -> NodeLosses:
    """Find them among all pods of the job, whatever its stage. Changes the view's memory."""
    out = NodeLosses()
    memory, in_status = view.memory, _status_text(view)
    memory.force_deletions = [t for t in memory.force_deletions if view.clock - t < WINDOW_SECONDS]
    for pod in view.pods:
        if pod.node and not pod.over:
            said = _handle_pod(view, pod, out)
            if said and _is_told(view, pod, in_status):
                out.reasons[pod.name] = said
            elif said:
                out.wake_in = min(out.wake_in, TOLD_AFTER_SECONDS - view.seconds(Fact.NODE_LOST, pod.node))
    for fact in (Fact.NODE_MISSING, Fact.NODE_LOST):
        memory.timers.keep(fact, {pod.node for pod in view.pods})
    return out


def node_lost_since(view: View, name: str) -> float | None:
    """Since when the node is lost; None: it is not, or this operator may not read nodes."""
    nodes = view.observed.nodes
    if nodes is None or not name:
        return None
    node = nodes.get(name)
    if node is None:
        return view.now - view.observe(Fact.NODE_MISSING, name)
    view.observe(Fact.NODE_MISSING, name, holds=False)
    for condition in (node.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            since = seconds_of(condition.get("lastTransitionTime"))
            return view.now if since is None else since
    return None


def _is_told(view: View, pod: Pod, in_status: str) -> bool:
    """Whether the loss of the pod's node is told: it has lasted, or status says so already."""
    lost = view.seconds(Fact.NODE_LOST, pod.node)
    return view.observed.nodes is None or lost >= TOLD_AFTER_SECONDS or _lost_words(pod.node) in in_status


def _lost_words(node: str) -> str:
    """How every sentence about the loss of a node begins; an operator that starts finds it in the status."""
    return f"its node {node} has been lost since "


def _status_text(view: View) -> str:
    """What the job's status says of its regions and conditions."""
    causes = [str(row.get("cause", "")) for row in view.job.status.get("regions") or []]
    return " ".join(causes + [str(row.get("message", "")) for row in view.job.status.get("conditions") or []])


def _handle_pod(view: View, pod: Pod, out: NodeLosses) -> str:
    """What status says of the pod for its node; empty: nothing."""
    policy = view.job.spec.node_loss
    lost = node_lost_since(view, pod.node)
    seen = view.observe(Fact.NODE_LOST, pod.node, holds=lost is not None)
    cures = (
        f"bring the node back, or taint it out-of-service (kubectl taint nodes {pod.node} "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute)"
    )
    if lost is None:
        if view.observed.nodes is not None or not view.stuck(pod):
            return ""
        return (
            f"it should have ended, but its node {pod.node} has not reported that; this operator may not "
            "read nodes, so it cannot tell whether the node is lost"
        )
    said = f"{_lost_words(pod.node)}{rfc3339(lost)}"
    if policy.policy == "Wait":
        return f"{said}, and nodeLoss.policy is Wait: {cures}, or set ForceDelete"
    if pod.leaves_at is None:
        return said
    waits = max(pod.leaves_at - view.now, policy.after_seconds - seen)
    if waits > 0:
        out.wake_in = min(out.wake_in, waits)
        return f"{said}; it is force-deleted at {rfc3339(math.ceil(view.now + waits))}"
    if pod.role != "syncer" and (volume := _own_volume(view, pod)):
        return f"{said}; it is not force-deleted, because only one node may write its volume {volume}: {cures}"
    if len(view.memory.force_deletions) >= BUDGET:
        out.wake_in = min(out.wake_in, view.memory.force_deletions[0] + WINDOW_SECONDS - view.clock)
        return (
            f"{said}; {BUDGET} pods were force-deleted within {WINDOW_SECONDS / 60:.0f} minutes, which is the "
            f"limit, so this one waits: {cures}"
        )
    if view.may_act():
        view.memory.force_deletions.append(view.clock)
        view.memory.own_deletions.add(pod.uid)
        why = f"{said} (nodeLoss.policy ForceDelete)"
        out.deletes.append(Delete(Ref("Pod", pod.name), pod.uid, why, force=True))
        told = f"Pod {pod.name} is force-deleted: {said}. Its successor may start elsewhere."
        out.events.append(EventWanted("Warning", "PodForceDeleted", told))
    return said


def _own_volume(view: View, pod: Pod) -> str:
    """The name of a volume of the pod that only one node may write, as far as is known; empty: there is none."""
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
