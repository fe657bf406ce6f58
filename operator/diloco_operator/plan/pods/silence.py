"""Which learners run without being heard by the syncer, and which of them a new pod may help.

A silent learner has joined once and is Ready, and the syncer, which answers this operator, has not heard it for a long
time. Either its program hangs, or the network between the two is cut. A new pod helps in the first case only; in the
second it costs a learner that trains on and would come back with its work. What tells them apart is the others:

* A silence is the learner's own fault only while another learner of its region is heard; of a region of one, while
  another of the job is.
* Where several learners are not heard at once, the network is the likelier cause. None is taken until that has
  lasted ``failurePolicy.regionLostSeconds``, too.
* A network heals for one learner after another. When one of them is heard again, the wait for the others that fell
  silent with it begins anew. So the last one to come back is not at fault because it is the only one left.
* Nobody is taken while a region counts down to lost.
* After one was taken, no other of its region is until the successor takes part. All that are heard take part, too. A
  pod that is stuck on a lost node is not waited for.

Example: eight learners; the node that has the syncer is cut off from the other nodes, and the API server is not. Four
learners are silent at once, and come back with the network. A single one whose whole process hangs is replaced after
``LEARNER_SILENT_SECONDS``.
"""

from __future__ import annotations

from diloco_operator.model import Fact
from diloco_operator.plan.pod_status import Pod
from diloco_operator.plan.view import UID_DIGITS, View
from diloco_protocol.documents import SlotRow
from diloco_protocol.vocabulary import TRAINING_PHASES

LEARNER_SILENT_SECONDS = 30.0
"""A learner is silent after this, or after twice the heartbeat's timeout if that is longer."""


def find_broken_by_silence(view: View) -> dict[str, Pod]:
    """The silent learners that are to be replaced, at most one of each region: region -> pod.

    Changes the view's memory.
    """
    memory = view.memory
    there = [pod for pod in view.learners.values() if pod.uid not in memory.own_deletions]
    memory.silent_places -= {pod.name for pod in there if view.taking_part(pod)}
    unheard = _time_silences(view)
    if not unheard or _counts_down(view):
        return {}
    patience = max(2 * view.job.spec.sync.heartbeat.timeout_seconds, LEARNER_SILENT_SECONDS)
    if len(unheard) > 1:
        patience = max(patience, view.job.spec.failure_policy.region_lost_seconds)
    found: dict[str, Pod] = {}
    for region in view.here.regions:
        places = [view.place(region.name, i) for i in range(view.wanted(region.name))]
        silent = [place for place in places if unheard.get(place, 0.0) > patience]
        if not silent or memory.silent_places.intersection(places):
            continue
        heard = [view.learners.get(place) for place in places if place not in unheard]
        others = [other for other in heard if other is not None and not view.stuck(other)]
        pod = view.learners[silent[0]]
        if all(view.taking_part(other) for other in others) and _others_are_heard(view, pod, others):
            found[region.name] = pod
    return found


def is_heard(view: View, pod: Pod) -> bool:
    """Whether the syncer hears the pod's learner: in a slot, or standing by."""
    slot = view.slot_of(pod)
    return view.standing_by(pod) or (slot is not None and _slot_is_heard(view, slot))


def _slot_is_heard(view: View, slot: SlotRow) -> bool:
    seconds = slot.heard_seconds_ago
    return slot.held and (seconds is None or seconds <= view.job.spec.sync.heartbeat.timeout_seconds)


def _time_silences(view: View) -> dict[str, float]:
    """Place -> for how many seconds its learner, which is ready, has not been heard, nor anybody come back that fell
    silent with it. Timed per epoch, for a syncer that has just started has heard no learner yet."""
    document = view.document
    if document is None or not view.here.syncer:
        return {}
    found, back = {}, []
    for place, pod in view.learners.items():
        expected = pod.ready and pod.running and document.phase in TRAINING_PHASES
        heard = is_heard(view, pod)
        if expected and heard and (lasted := view.seconds(Fact.POD_SILENT, pod.uid, epoch=view.epoch)):
            back.append(lasted)
        seconds = view.observe(Fact.POD_SILENT, pod.uid, epoch=view.epoch, holds=expected and not heard)
        if expected and not heard and pod.alive:
            found[place] = seconds
    return {place: _since_company(view, view.learners[place], seconds, back) for place, seconds in found.items()}


def _since_company(view: View, pod: Pod, seconds: float, back: list[float]) -> float:
    """For how long the silent pod is to be judged. ``seconds``: for how long it is silent; ``back``: for how long
    those were that are heard again since the last turn."""
    together = any(abs(seconds - lasted) < LEARNER_SILENT_SECONDS for lasted in back)
    if together:
        view.observe(Fact.POD_LEFT_BEHIND, pod.uid, epoch=view.epoch, holds=False)
    return min(seconds, view.observe(Fact.POD_LEFT_BEHIND, pod.uid, epoch=view.epoch))


def _counts_down(view: View) -> bool:
    """Whether a region had learners, none of them is heard, and the syncer does not count it as lost yet."""
    for region in view.job.spec.regions:
        slots = [slot for slot in view.slots if slot.region == region.name and slot.process]
        silent = bool(slots) and not any(_slot_is_heard(view, slot) for slot in slots)
        if silent and region.name not in view.regions_lost:
            return True
    return False


def _others_are_heard(view: View, pod: Pod, there: list[Pod]) -> bool:
    """Whether another learner of the pod's region is heard; of a region of one, another of the job. ``there``: the
    region's pods that are not silent."""
    if view.wanted(pod.region) > 1:
        return any(is_heard(view, other) for other in there)
    return any(_slot_is_heard(view, slot) for slot in view.slots if slot.process[:UID_DIGITS] != pod.process)
