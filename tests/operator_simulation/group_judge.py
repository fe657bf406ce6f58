"""What must be true of learners of several pods: world.py asks at each deletion of a pod, and in each step.

- No pod is deleted of a learner whose pods all run together, but as one of one pod would be: for its template, or for
  a silence of its own. What had run beside a lost pod may be, by an operator that learned of the loss late: the learner
  may have come together again meanwhile, with the lost one's successor. So may a learner of which a program kept
  crashing until lately.
- No pod is deleted that waits for the rest of its learner, if it was made after the learner's last loss and no program
  of it keeps crashing.
- What has run beside a lost pod goes within ``TOGETHER_SECONDS``, where nothing keeps the operator from it.

A pod is lost when it has run, and is gone, or is leaving, or has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_operator import names
from diloco_operator.job import unix_seconds
from diloco_operator.model import Object
from diloco_protocol.vocabulary import LABEL_POD_INDEX, LABEL_ROLE
from operator_simulation.api_server import wall
from operator_simulation.kubernetes import Kubernetes, Process, now

TOGETHER_SECONDS = 15.0
SEEN_SECONDS = 8.0
"""What ran for so long has been seen by an operator that nothing keeps from it."""
CRASHES = 3
LATELY_SECONDS = 330.0
"""After so many ends of a program its learner may be replaced: it waits for its next start so long at most."""


def place_of(pod: Object) -> str:
    """The name of the leading pod of the pod's learner; of another program's pod its own."""
    meta = pod["metadata"]
    pods, index = int(meta["labels"].get(names.GROUP_PODS, 1)), int(meta["labels"].get(LABEL_POD_INDEX, 0))
    return f"{meta['name'].rpartition('-')[0]}-{index - index % pods}" if pods > 1 else str(meta["name"])


@dataclass
class _Seen:
    """A pod as it was in the last step. ``since``: when its program ran first; None: it has not."""

    uid: str
    place: str
    since: float | None
    lost: bool = False

    def has_been_seen(self) -> bool:
        """Whether it has run for so long that an operator knows."""
        return self.since is not None and self.since <= wall() - SEEN_SECONDS


class GroupJudge:
    """Of one cluster. ``is_calm``: whether nothing keeps its operator from its work now."""

    def __init__(self, kubernetes: Kubernetes, is_calm: Callable[[], bool]) -> None:
        self._kubernetes = kubernetes
        self._is_calm = is_calm
        self._seen: dict[str, _Seen] = {}
        self._losses: dict[str, float] = {}  # place -> when one of its pods was lost last
        self._beside: dict[str, tuple[float, str, str]] = {}  # UID -> when which pod was lost beside this one, named so

    def _pods(self) -> list[Object]:
        learners = [p for p in self._kubernetes.pods() if p["metadata"]["labels"].get(LABEL_ROLE) == "learner"]
        return [pod for pod in learners if names.GROUP_PODS in pod["metadata"]["labels"]]

    def watch(self) -> None:
        """See what was lost since the last time."""
        pods = {pod["metadata"]["name"]: pod for pod in self._pods()}
        for name, before in list(self._seen.items()):
            pod = pods.get(name)
            same = pod is not None and pod["metadata"]["uid"] == before.uid
            if before.since is not None and not before.lost and not (same and pod is not None and not _leaves(pod)):
                self._lose(name, before)
            if not same:
                del self._seen[name]
        for name, pod in pods.items():
            uid = pod["metadata"]["uid"]
            seen = self._seen.setdefault(name, _Seen(uid, place_of(pod), None, lost=_leaves(pod)))
            if seen.since is None and self._kubernetes.process_of(uid) is not None:
                seen.since = wall()

    def _lose(self, name: str, pod: _Seen) -> None:
        pod.lost = True
        self._losses[pod.place] = wall()
        if not pod.has_been_seen():
            return
        for other, seen in self._seen.items():
            if seen.place == pod.place and not seen.lost and seen.has_been_seen():
                self._beside.setdefault(seen.uid, (wall(), name, other))

    def find_left(self) -> str:
        """A pod that has run beside a lost one and is still there; empty: there is none."""
        there = {pod["metadata"]["uid"] for pod in self._pods() if not _leaves(pod)}
        calm = self._is_calm()
        self._beside = {uid: row for uid, row in self._beside.items() if calm and uid in there}
        for lost_at, lost, name in self._beside.values():
            if wall() > lost_at + TOGETHER_SECONDS:
                return f"{lost} was lost {wall() - lost_at:.0f} s ago, and {name} of its learner is still there"
        return ""

    def is_whole(self, process: Process) -> bool:
        """Whether the process trains with all others of its learner."""
        uids = {p["metadata"]["uid"] for p in self._pods() if not _leaves(p)}
        return bool(process.group) and all(one.works and one.pod_uid in uids for one in process.group)

    def may_go(self, pod: Object) -> bool:
        """Whether the pod has outlived another of its learner, or a program of it kept crashing until lately."""
        lost_at = self._losses.get(place_of(pod))
        outlived = lost_at is not None and unix_seconds(pod["metadata"]["creationTimestamp"]) <= lost_at
        ends = [node.ends.get(uid, ()) for node in self._kubernetes.nodes.values() for uid in self._uids(pod)]
        return outlived or any(len(one) >= CRASHES and one[-1][2] > now() - LATELY_SECONDS for one in ends)

    def find_wrong(self, pod: Object, process: Process) -> str:
        """Why a pod whose learner is not whole may not be deleted; empty: it may."""
        found = [one for one in map(self._kubernetes.process_of, self._uids(pod)) if one is not None]
        if self.may_go(pod) or process.group or not all(one.works for one in found):
            return ""
        return f"it waits for others of learner {place_of(pod)}, which has lost nothing since it was made"

    def _uids(self, pod: Object) -> list[str]:
        """Of all pods of the pod's learner."""
        return [str(p["metadata"]["uid"]) for p in self._pods() if place_of(p) == place_of(pod)]


def _leaves(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp")) or pod["status"].get("phase") == "Failed"
