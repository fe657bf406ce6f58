"""What others do to a job, drawn at random: pods are killed, objects deleted, edited, scaled and relabelled.

Of each deed it is known which pods it may cost: those may go without that the operator has taken anything.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from .clusters import CommandFailed
from .jobs import Job

EXCUSED_SECONDS = 60.0
"""So long after a deed a pod that it may cost may go."""
PAUSE_SECONDS = (1.0, 8.0)
# What is changed of an object of each kind, as a merge patch.
EDITS: dict[str, list[dict[str, Any]]] = {
    "service": [{"spec": {"selector": {"diloco.io/role": "nobody"}}}, {"spec": {"type": "NodePort"}}],
    "configmap": [{"data": {"address.json": "{}"}}, {"data": None}],
    "poddisruptionbudget": [{"spec": {"maxUnavailable": 0}}],
    "networkpolicy": [{"spec": {"ingress": []}}],
    "statefulset": [{"metadata": {"annotations": {"diloco.io/rendered": None}}}],
    "deployment": [{"metadata": {"annotations": {"diloco.io/rendered": None}}}],
}
METADATA: list[dict[str, Any]] = [{"labels": {"diloco.io/job": None}}, {"labels": None}, {"ownerReferences": None}]


class Chaos:
    """Deeds at one job, which has the region ``local`` and no evaluator. ``system``: the operator's namespace."""

    def __init__(self, job: Job, system: str, rng: random.Random) -> None:
        self.job, self.rng, self._system = job, rng, system
        self._done: Counter[str] = Counter()
        self._excused: dict[str, float] = {}  # UID of a pod -> until when it may go
        name = job.name
        self.objects = {
            "service": [f"{name}-syncer", f"{name}-local"],
            "configmap": [f"{name}-settings"],
            "poddisruptionbudget": [f"{name}-local"],
            "networkpolicy": [f"{name}-syncer", f"{name}-learners"],
            "statefulset": [f"{name}-local"],
            "deployment": [f"{name}-syncer"],
        }

    def pause(self) -> float:
        """Seconds until the next deed."""
        return self.rng.uniform(*PAUSE_SECONDS)

    def counts(self) -> dict[str, int]:
        """How often each deed was done."""
        return dict(sorted(self._done.items()))

    def excused(self, uid: str, name: str) -> bool:
        """Whether a pod may go now: a deed of late took it, or the job does not ask for it."""
        ordinal = name.rpartition("-")[2]
        surplus = name.startswith(f"{self.job.name}-local-") and int(ordinal) >= 3
        return surplus or time.monotonic() < self._excused.get(uid, 0.0)

    def do_something(self) -> str:
        """One deed, in words."""
        deeds: list[tuple[int, Callable[[], str]]] = [
            (20, self._kill_an_operator),
            (16, self._kill_a_learner),
            (8, self._kill_a_syncer),
            (20, self._delete_an_object),
            (20, self._edit_an_object),
            (8, self._scale),
            (12, self._edit_metadata),
        ]
        deed = self.rng.choices([deed for _, deed in deeds], [weight for weight, _ in deeds])[0]
        self._done[deed.__name__.removeprefix("_")] += 1
        try:
            return deed()
        except (CommandFailed, OSError) as error:  # what it is about is just not there
            return f"{deed.__name__}: {str(error).strip().splitlines()[-1]}"

    # ------------------------------------------------------------- deeds

    def _kubectl(self, *words: str) -> None:
        self.job.cluster.kubectl(*words, "-n", self.job.namespace)

    def _excuse(self, role: str, names: str = "") -> None:
        for pod in self.job.pods(role):
            if names in ("", pod["metadata"]["name"]):
                self._excused[pod["metadata"]["uid"]] = time.monotonic() + EXCUSED_SECONDS

    def _how(self) -> tuple[str, ...]:
        return self.rng.choice([(), ("--grace-period=0", "--force")])

    def _kill_an_operator(self) -> str:
        how = self._how()
        words = ("-l", "app.kubernetes.io/name=diloco-operator", "--wait=false", *how)
        self.job.cluster.kubectl("delete", "pod", "-n", self._system, *words)
        return f"the operator is deleted {' '.join(how)}"

    def _kill(self, role: str) -> str:
        if not (pods := self.job.pods(role)):  # all are deleted, or scaled away, and not made again yet
            return f"there is no {role} to delete"
        pod, how = self.rng.choice(pods)["metadata"]["name"], self._how()
        self._excuse(role, pod)
        self._kubectl("delete", "pod", pod, "--wait=false", *how)
        return f"pod {pod} is deleted {' '.join(how)}"

    def _kill_a_learner(self) -> str:
        return self._kill("learner")

    def _kill_a_syncer(self) -> str:
        return self._kill("syncer")

    def _some_object(self) -> tuple[str, str]:
        kind = self.rng.choice(list(self.objects))
        return kind, self.rng.choice(self.objects[kind])

    def _delete_an_object(self) -> str:
        kind, name = self._some_object()
        self._kubectl("delete", kind, name, "--wait=false", "--cascade=orphan")
        return f"{kind} {name} is deleted"

    def _patch(self, kind: str, name: str, patch: dict[str, Any]) -> str:
        self._kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(patch))
        return f"{kind} {name} gets {json.dumps(patch)}"

    def _edit_an_object(self) -> str:
        kind, name = self._some_object()
        return self._patch(kind, name, self.rng.choice(EDITS[kind]))

    def _edit_metadata(self) -> str:
        kind, name = self._some_object()
        return self._patch(kind, name, {"metadata": self.rng.choice(METADATA)})

    def _scale(self) -> str:
        kind, replicas = self.rng.choice(["statefulset", "deployment"]), self.rng.choice([0, 0, 1, 2, 7])
        self._excuse("learner" if kind == "statefulset" else "syncer")
        return self._patch(kind, self.objects[kind][0], {"spec": {"replicas": replicas}})
