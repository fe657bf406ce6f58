"""Whether a job's status is true: it is read each second, beside what the syncer and the API server say.

Each sentence of the status is judged at each look. While it is untrue and an operator leads, its lag grows. While none
leads, as one was just killed, nobody could write anything. Pods that worked at one look and are gone or ending at the
next, without a deed that may have cost them, are written down.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from patience import WaitFailed

from .clusters import FAILURES, repeating, until
from .jobs import Job

LEASE_SECONDS = 6.0
"""An operator that leads renews its Lease every 2 s."""
PROGRESS_SECONDS = 60.0
"""``status.progress`` is written at most so often."""
KINDS = {
    "service": "/api/v1",
    "configmap": "/api/v1",
    "poddisruptionbudget": "/apis/policy/v1",
    "networkpolicy": "/apis/networking.k8s.io/v1",
    "statefulset": "/apis/apps/v1",
    "deployment": "/apis/apps/v1",
}


@dataclass
class Look:
    """All that is seen at one time."""

    status: dict[str, Any]
    pods: list[dict[str, Any]]
    objects: dict[tuple[str, str], dict[str, Any]]
    page: dict[str, Any] | None  # None: the syncer does not answer
    leads: bool
    merges_before: int = 0  # the syncer's, ``PROGRESS_SECONDS`` ago
    wanted: dict[tuple[str, str], Any] = field(default_factory=dict)  # what each object was at the beginning

    def condition(self, kind: str) -> tuple[str, str]:
        found = next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})
        return found.get("status", ""), found.get("reason", "")

    @property
    def active(self) -> int:
        return int(self.page["quorum"]["active"]) if self.page else 0

    @property
    def works(self) -> bool:
        """Whether the job trains with as many learners as a merge needs."""
        return self.page is not None and self.page["phase"] == "training" and self.active >= 1


class Seconds(NamedTuple):
    """For how long a sentence was untrue: while an operator led, and in all."""

    led: float = 0.0
    all: float = 0.0


def longer(one: Seconds, other: Seconds) -> Seconds:
    return Seconds(max(one.led, other.led), max(one.all, other.all))


def merged(look: Look) -> int:
    return int((look.status.get("progress") or {}).get("merges") or 0)


# Each sentence: whether it is true at a look; None: that cannot be told, as the syncer does not answer.
SENTENCES: dict[str, Callable[[Look], bool | None]] = {
    "SyncerReady": lambda s: (s.condition("SyncerReady")[0] == "True") == (s.page is not None),
    "QuorumMet": lambda s: None if s.page is None else (s.condition("QuorumMet")[0] == "True") == (s.active >= 1),
    "Ready": lambda s: (s.condition("Ready")[0] == "True") == s.works,
    "phase": lambda s: (
        None if s.page is None else (s.status.get("phase") == "Running") == (s.page["phase"] == "training")
    ),
    "Durable": lambda s: None if s.page is None or not s.page["merges"] else s.condition("Durable")[0] == "True",
    "Degraded": lambda s: None if not is_whole(s) else s.condition("Degraded")[0] == "False",
    "Suspended, Complete, Failed, Stalled": lambda s: all(
        s.condition(kind)[0] == "False" for kind in ("Suspended", "Complete", "Failed", "Stalled")
    ),
    "syncer.epoch": lambda s: None if s.page is None else s.status["syncer"].get("epoch") == s.page["epoch"],
    "learners": lambda s: None if s.page is None else s.status.get("learners") == f"{in_quorum(s)}/3",
    "quorum": lambda s: None if s.page is None else s.status.get("quorum") == f"{s.active}/1",
    "regions.ready": lambda s: s.status["regions"][0]["ready"] == sum(map(is_at_work, learners(s))),
    "regions.inQuorum": lambda s: None if s.page is None else s.status["regions"][0]["inQuorum"] == in_quorum(s),
    "regions.state": lambda s: None if not is_whole(s) else s.status["regions"][0]["state"] == "Running",
    "progress is of the last minute": lambda s: None if s.page is None else merged(s) >= s.merges_before,
    "every object is as it was": lambda s: all(shape(s.objects.get(key)) == value for key, value in s.wanted.items()),
}


def learners(look: Look) -> list[dict[str, Any]]:
    return [pod for pod in look.pods if pod["metadata"]["labels"].get("diloco.io/role") == "learner"]


def is_at_work(pod: dict[str, Any]) -> bool:
    """Whether it is ready and not on its way out."""
    found = pod["status"].get("containerStatuses") or []
    return "deletionTimestamp" not in pod["metadata"] and bool(found) and all(c["ready"] for c in found)


def in_quorum(look: Look) -> int:
    return sum(slot["state"] == "active" and slot["ready"] for slot in look.page["slots"]) if look.page else 0


def is_whole(look: Look) -> bool:
    """Whether all learners take part."""
    return look.works and in_quorum(look) == 3 and len(learners(look)) == 3 and all(map(is_at_work, learners(look)))


def shape(obj: dict[str, Any] | None) -> Any:
    """Of an object what the operator sets, and nothing that Kubernetes writes into it; None: it is not there."""
    if obj is None or "deletionTimestamp" in obj["metadata"]:
        return None
    meta, spec = obj["metadata"], dict(obj.get("spec") or {})
    for name in ("clusterIP", "clusterIPs"):
        spec.pop(name, None)
    ours = {k: v for k, v in (meta.get("annotations") or {}).items() if k == "diloco.io/job-uid"}
    owners = [owner["uid"] for owner in meta.get("ownerReferences") or []]
    return {"labels": meta.get("labels"), "ours": ours, "owners": owners, "data": obj.get("data"), "spec": spec}


class Looks:
    """Looks at the job each second, in a thread, between ``__enter__`` and ``__exit__``. ``excused``: whether the pod
    of this UID and name may go."""

    def __init__(self, job: Job, system: str, excused: Callable[[str, str], bool]) -> None:
        self._job, self._system, self._excused = job, system, excused
        self._wanted = {key: shape(obj) for key, obj in self._objects().items()}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._merges: list[tuple[float, int]] = []
        self._at_work: dict[str, tuple[str, int]] = {}
        self._untrue: dict[str, Seconds] = {}  # a sentence that is untrue -> since when
        self._longest: dict[str, Seconds] = {}
        self._true_at: dict[str, float] = {}
        self._seen: dict[str, str] = {}  # a sentence -> what was seen when it was untrue last
        self.count = self.led = 0  # looks, and those at which an operator led
        self.taken: list[str] = []  # pods that worked, and that no deed may have cost
        self.ahead: list[str] = []  # progress that the syncer did not have yet

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def lags(self) -> dict[str, Seconds]:
        """For how many seconds, at most, each sentence was untrue."""
        never = Seconds()
        return {name: longer(self._longest.get(name, never), self._untrue.get(name, never)) for name in SENTENCES}

    def print_lags(self) -> None:
        print(f"{self.count} looks, an operator led at {self.led}; seconds that a sentence was untrue, at most:")
        for name, seconds in self.lags().items():
            print(f"  {name:40} {seconds.led:5.1f} while one led, {seconds.all:5.1f} in all", flush=True)

    def wait_until_all_is_true(self, timeout: float) -> None:
        """Until each sentence has been true since now."""
        begun, tried = time.monotonic(), self.count + 2
        missing = set(SENTENCES)

        def all_were() -> bool:
            missing.intersection_update(name for name in SENTENCES if self._true_at.get(name, 0.0) < begun)
            return self.count >= tried and not missing

        try:
            until("a status that is true", all_were, timeout)
        except WaitFailed as error:
            said = "\n".join(f"{name}: {self._seen.get(name)}" for name in sorted(missing))
            raise WaitFailed(f"{error}\nuntrue:\n{said}") from None

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(max(0.0, before + 1.0 - time.monotonic())):
            now = time.monotonic()
            look = None
            with contextlib.suppress(*FAILURES, KeyError, ValueError), repeating():  # nobody answered
                look = self._look()
            try:
                if look is not None:
                    self._judge(look, now - before, now)
            except Exception as error:
                self._error = error
                return
            before = now

    def _look(self) -> Look:
        # The status first: what is read after it can only be newer.
        status = self._job.status()
        pods, page = self._pods(), self._page()
        return Look(status, pods, objects=self._objects(), page=page, leads=self._leads())

    def _pods(self) -> list[dict[str, Any]]:
        """Also those whose labels were taken."""
        found = self._job.cluster.items(f"/api/v1/namespaces/{self._job.namespace}/pods")
        return [pod for pod in found if pod["metadata"]["name"].startswith(f"{self._job.name}-")]

    def _page(self) -> dict[str, Any] | None:
        with contextlib.suppress(*FAILURES, KeyError, ValueError):
            name = self._job.syncer_pod()["metadata"]["name"]
            path = f"/api/v1/namespaces/{self._job.namespace}/pods/{name}:7702/proxy/status"
            return dict(json.loads(self._job.cluster.raw(path, timeout=3.0)))
        return None

    def _objects(self) -> dict[tuple[str, str], dict[str, Any]]:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for kind, group in KINDS.items():
            plural = "networkpolicies" if kind == "networkpolicy" else f"{kind}s"
            for obj in self._job.cluster.items(f"{group}/namespaces/{self._job.namespace}/{plural}"):
                if obj["metadata"]["name"].startswith(f"{self._job.name}-"):
                    found[kind, obj["metadata"]["name"]] = obj
        return found

    def _leads(self) -> bool:
        lease = self._job.cluster.api(f"/apis/coordination.k8s.io/v1/namespaces/{self._system}/leases/diloco-operator")
        renewed = str(((lease or {}).get("spec") or {}).get("renewTime") or "1970-01-01T00:00:00Z")
        return time.time() - calendar.timegm(time.strptime(renewed[:19], "%Y-%m-%dT%H:%M:%S")) < LEASE_SECONDS

    def _judge(self, look: Look, seconds: float, now: float) -> None:
        self.count += 1
        self.led += look.leads
        look.wanted = self._wanted
        if look.page is not None:
            self._merges.append((now, look.page["merges"]))
            look.merges_before = max((m for at, m in self._merges if at <= now - PROGRESS_SECONDS), default=0)
            if merged(look) > look.page["merges"]:
                self.ahead.append(f"{merged(look)} merges in the status, {look.page['merges']} in the store")
        for name, is_true in SENTENCES.items():
            found = is_true(look)
            if found is not False:
                self._true_at[name] = now
            if found is None:
                continue
            lasted = self._untrue.pop(name, Seconds())
            if found:
                self._longest[name] = longer(self._longest.get(name, Seconds()), lasted)
            else:
                led = lasted.led + (seconds if look.leads else 0.0)
                self._untrue[name] = Seconds(led, lasted.all + seconds)
                self._seen[name] = describe(look)
        self._judge_pods(look.pods)

    def _judge_pods(self, pods: list[dict[str, Any]]) -> None:
        there = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid, (name, restarts) in self._at_work.items():
            pod = there.get(uid)
            gone = pod is None or "deletionTimestamp" in pod["metadata"]
            if (gone or restarts_of(pod) > restarts) and not self._excused(uid, name):
                self.taken.append(f"{time.time():.0f} {name} {uid}: {'gone' if gone else 'its container ended'}")
        self._at_work = {
            uid: (pod["metadata"]["name"], restarts_of(pod)) for uid, pod in there.items() if is_at_work(pod)
        }


def describe(look: Look) -> str:
    """For a failure: what was said and what was so."""
    changed = [key for key, value in look.wanted.items() if shape(look.objects.get(key)) != value]
    page = {k: look.page[k] for k in ("phase", "epoch", "merges", "quorum", "message")} if look.page else None
    said = {k: look.status.get(k) for k in ("phase", "learners", "quorum", "regions", "progress", "syncer")}
    conditions = [(c["type"], c["status"], c["message"][:200]) for c in look.status.get("conditions", [])]
    return f"status {said} {conditions}; syncer {page}; objects that differ {changed}; leads {look.leads}"


def restarts_of(pod: dict[str, Any] | None) -> int:
    return sum(c["restartCount"] for c in (pod or {}).get("status", {}).get("containerStatuses", []))
