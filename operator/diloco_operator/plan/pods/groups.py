"""Learners of several pods (``learners.pods``): what becomes of the others when one of them is lost.

The processes of a learner train one model together, so what ends one of its pods ends the learner. A container that
ends is joined by the others, whose programs end too, and all start again where they are. A pod that is gone is another
matter: its successor may come to another node, and the others wait for it, or hang on a connection that nobody has
closed. So the others are replaced with it, as one: the scheduler places all of them anew, and no pod holds a GPU for
one that is to come elsewhere. Nothing of another learner is touched.

``mark_broken_learners`` finds them in two ways:

* A pod terminates, whoever has asked for it (``kubectl drain``, a lost node's taint). The others go at once, so that
  all drain together. A pod that was made after the request is a successor already, and stays: both times are the API
  server's. So a pod that is stuck on a lost node for hours takes nobody twice.
* A pod that ran when the last turn saw it is not there any more, or has failed, as after a deletion without grace or a
  kubelet's eviction. Those that the last turn saw beside it go. An operator that restarts does not know of it, and then
  the learner's own end of all its processes has to do.

A pod that has never run breaks nothing: the others wait for whichever comes at its place.

Example: four pods of two learners, job-local-0 to 3, and the node of job-local-3 is drained. Job-local-2 is deleted in
the same turn; 0 and 1 train on.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco_operator.model import Delete, Ref
from diloco_operator.plan.pod_status import Pod
from diloco_operator.plan.view import View
from diloco_protocol.vocabulary import WorkerExit

TOGETHER_SECONDS = 60.0
"""Ends of pods of one learner within so long have one cause: their ranks end with the first that does."""


def delete_learner(view: View, pod: Pod, why: str) -> list[Delete]:
    """The deletion of all pods of a pod's learner. Changes the view's memory."""
    pods = [one for one in view.members(pod) if one.alive]
    view.memory.own_deletions |= {one.uid for one in pods}
    return [Delete(Ref("Pod", one.name), one.uid, why) for one in pods]


def mark_broken_learners(view: View, before: Mapping[str, str]) -> dict[str, str]:
    """Mark for deletion what is left of learners that have lost a pod: name of the lost pod -> its leader's, of those
    that were whole until now. ``before``: name -> UID of the pods that had run when the last turn saw them, and were
    not leaving. Changes the view's memory, by which ``replacement`` deletes them."""
    found: dict[str, str] = {}
    for region in view.here.regions:
        if view.group_pods(region.name) == 1:
            continue
        for ordinal in range(view.wanted(region.name)):
            places = view.places(region.name, ordinal)
            pods = [pod for pod in map(view.learner_pods.get, places) if pod is not None]
            cause, marked = _find_cause(view, places, pods, before)
            marked = [pod for pod in marked if pod.uid not in view.memory.own_deletions]
            if marked:
                view.memory.own_deletions |= {pod.uid for pod in marked}
                found[cause] = places[0]
    return found


def _find_cause(view: View, places: list[str], pods: list[Pod], before: Mapping[str, str]) -> tuple[str, list[Pod]]:
    """The pod that a learner has lost, and those that go with it; empty: none."""
    alive = [pod for pod in pods if pod.alive]
    there = {pod.name: pod.uid for pod in pods if not pod.over}
    gone = next((place for place in places if place in before and there.get(place) != before[place]), "")
    if gone:
        return gone, [pod for pod in alive if before.get(pod.name) == pod.uid]
    for pod in pods:
        asked = pod.deleted_at if pod.started else None
        older = [one for one in alive if asked is not None and one.created is not None and one.created <= asked]
        if older:
            return pod.name, older
    return "", []


def find_first_end(view: View, pod: Pod) -> Pod:
    """The pod of the learner whose program ended first, of those that ended with this pod's, and not by another's end.
    Where times are equal it is the leader. They are of the nodes' clocks, in whole seconds. They choose words, and
    whose exit code counts."""
    end = pod.last_end
    if end is None or end.at is None:
        return pod
    ended = [
        (one.last_end.code == WorkerExit.GROUP, one.last_end.at, one.rank, one)
        for one in view.members(pod)
        if one.last_end is not None and one.last_end.at is not None and abs(one.last_end.at - end.at) < TOGETHER_SECONDS
    ]
    return min(ended, key=lambda row: row[:3])[3]


def is_a_consequence(view: View, pod: Pod) -> bool:
    """Whether the end of a pod's program is told and counted as its leader's, which has ended with it."""
    leader = view.members(pod)[0]
    if pod.rank == 0 or leader.rank != 0 or leader.last_end is None or pod.last_end is None:
        return False
    ends = leader.last_end.at, pod.last_end.at
    return None in ends or abs((ends[0] or 0.0) - (ends[1] or 0.0)) < TOGETHER_SECONDS
