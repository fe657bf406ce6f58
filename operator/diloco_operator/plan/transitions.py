"""One Event per transition: what happened to a job, in sentences, in order.

Theory of operation. A transition is a difference between the job's status as it is and the
status that this turn plans. Because the status is written before Events are sent, an
operator that starts anew finds nothing to tell again. ``PlanMemory.told`` has what was told last
of each subject, for turns that still see an older status. What has no place in the status
(a pod lost, a pod deleted) is told where it is found (replacement, rollout, node_loss).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from diloco_operator.job import digest
from diloco_operator.model import EventWanted, Object
from diloco_operator.plan.conditions.conditions import Conditions
from diloco_operator.plan.conditions.decide import Findings
from diloco_operator.plan.conditions.region_conditions import DRAINED
from diloco_operator.plan.regions import ROLLING
from diloco_operator.plan.view import View
from diloco_protocol.vocabulary import JOB_REFUSED_REASONS

# Reasons of Ready: the job itself, or an object that it cannot do without, is refused.
_REFUSALS = JOB_REFUSED_REASONS | {"InvalidSpec"}
# Reasons for which SyncerReady turns False and that do not pass by themselves.
_SYNCER_FAULTS = frozenset(
    {
        "SyncerUnschedulable",
        "SyncerImageUnavailable",
        "SyncerPodConfiguration",
        "SyncerVolumeUnavailable",
        "SyncerNotStarting",
        "SyncerNotCreated",
        "SyncerNodeLost",
        "SyncerNotAnswering",
        "SyncerStoreProblem",
        "SyncerCredentials",
    }
)


class Story:
    """Collects the Events of a turn."""

    def __init__(self, told: dict[str, str]) -> None:
        self.events: list[EventWanted] = []
        self._told = told
        self.fresh = not told  # an operator that has just started: what the status tells was told

    def turn(
        self, subject: str, before: str, now: str, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """``subject`` went from one state to another. Told if there is a reason, and it was not told."""
        if now != before and self._told.get(subject) != now and reason:
            self.events.append(EventWanted(kind, reason, message[:1000]))
        if now != before or subject in self._told:
            self._told[subject] = now

    def last(self, subject: str, otherwise: str) -> str:
        """What was told last of the subject; ``otherwise``, if nothing is remembered."""
        return self._told.get(subject, otherwise)

    def forget(self, *heads: str) -> None:
        """The subjects whose names begin so begin anew."""
        for subject in [s for s in self._told if s.partition(" ")[0] in heads]:
            del self._told[subject]


def tell(view: View, found: Findings, verdicts: Conditions, status: Object) -> list[EventWanted]:
    """The Events of what has changed between the job's status and the planned one."""
    story = Story(view.memory.told)
    before = {str(c.get("type")): c for c in verdicts.before}
    _beginning(view, story, status)
    _refusal(story, before.get("Ready", {}), verdicts.found["Ready"])
    for kind in ("NameConflict", "SpecDrift", "SettingsDiffer", "RegionLost", "LinksTooSlow", "HubReachable"):
        if kind in ("LinksTooSlow", "SpecDrift") and not found.course.training:
            story.forget(kind)  # nobody is there, so it is not over either
        elif kind in verdicts.found:
            _fault(story, kind, before.get(kind, {}), verdicts.found[kind])
    _degraded(story, before.get("Degraded", {}), verdicts.found["Degraded"], verdicts.found["Ready"])
    if found.course.training and view.begun:
        _syncer(story, before, verdicts.found)
        _quorum(story, before, verdicts.found)
        _regions(view, story, found, status)
        _pods(view, story, found)
    else:
        story.forget("quorum", "syncer", "scale", "rollout")
    _ends(view, story, found, before, verdicts.found)
    return story.events


def _beginning(view: View, story: Story, status: Object) -> None:
    if not status.get("startTime"):
        return
    spec, here = view.job.spec, view.here
    regions = ", ".join(f"{r.learners} in {r.name}" for r in here.regions)
    parts = (["the syncer"] if here.syncer else []) + ([f"learners ({regions})"] if regions else [])
    parts += ["the evaluator"] if here.syncer and spec.evaluated else []
    started = str(view.job.status.get("startTime") or "")
    message = f"Started {' and '.join(parts)}."
    story.turn("start", "yes" if started else "", "yes", "Normal", "Started", message)


def _refusal(story: Story, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """The job itself, or one of its objects, is refused."""

    def state(condition: Mapping[str, Any]) -> str:
        if condition.get("status") != "False" or condition.get("reason") not in _REFUSALS:
            return ""
        return f"{condition['reason']} {digest(condition.get('message'))}"

    reason = str(now.get("reason")) if state(now) else ""
    story.turn("refusal", state(before), state(now), "Warning", reason, str(now.get("message")))


def _degraded(story: Story, before: Mapping[str, Any], now: Mapping[str, Any], ready: Mapping[str, Any]) -> None:
    """What could not be applied and is not needed for training; the rest of Degraded is told by parts."""
    state = "yes" if now.get("reason") == "ApplyFailed" else ""
    reason = "ApplyFailed" if state and ready.get("reason") not in _REFUSALS else ""
    was = "yes" if before.get("reason") == "ApplyFailed" else ""
    story.turn("apply", was, state, "Warning", reason, str(now.get("message")))


def _fault(story: Story, kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A condition that tells of a fault: once when it comes, once when it goes."""
    bad = "False" if kind == "HubReachable" else "True"

    def state(condition: Mapping[str, Any]) -> str:
        if condition.get("reason") == DRAINED:
            return "drained"
        return "fault" if condition.get("status") == bad else ""

    if now.get("status") == "Unknown":
        return
    over = {
        "NameConflict": "The names that the job needs are free.",
        "SpecDrift": "The job is the same again.",
        "SettingsDiffer": "The settings are the hub's again.",
        "LinksTooSlow": "Every link is as wide as the job needs again.",
        "RegionLost": "Every region is heard again.",
        "HubReachable": str(now.get("message")),
    }
    if kind == "HubReachable" and now.get("reason") == DRAINED:
        story.turn(kind, state(before), state(now), "Normal", "HubDrained", str(now.get("message")))
    elif state(now):
        reason = "HubUnreachable" if kind == "HubReachable" else kind
        story.turn(kind, state(before), "fault", "Warning", reason, str(now.get("message")))
    else:
        reason = {"HubReachable": "HubReachable", "RegionLost": "RegionBack"}.get(kind, f"{kind}Over")
        story.turn(kind, state(before), "", "Normal", reason if before else "", over[kind])


def _syncer(story: Story, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    def state(conditions: Mapping[str, Any]) -> str:
        reason = f"Syncer{conditions.get('SyncerReady', {}).get('reason', '')}"
        return reason if reason in _SYNCER_FAULTS else ""

    fault = state(now)
    message = str(now.get("SyncerReady", {}).get("message", ""))
    story.turn("syncer", state(before), fault, "Warning", fault, f"The syncer: {message}")


def _quorum(story: Story, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    row, old = now.get("QuorumMet", {}), before.get("QuorumMet", {})
    if row.get("status") == "True":
        story.turn("quorum", _met(old), "met", "Normal", "QuorumMet", str(row.get("message")))
    elif row.get("status") == "False" and row.get("reason") == "TooFew":
        reason = "QuorumLost" if _met(old) == "met" or story.last("quorum", "") == "met" else ""
        story.turn("quorum", _met(old), "few", "Warning", reason, str(row.get("message")))


def _met(condition: Mapping[str, Any]) -> str:
    if condition.get("status") == "True":
        return "met"
    return "few" if condition.get("reason") == "TooFew" else ""


def _regions(view: View, story: Story, found: Findings, status: Object) -> None:
    before = {row.get("name"): row for row in view.job.status.get("regions") or []}
    here = {region.name for region in view.here.regions}
    for row in status.get("regions") or []:
        name, old = row["name"], before.get(row["name"])
        if name not in here or old is None:
            continue
        was, wanted = old.get("desired", 0), row["desired"]
        reason = "Scaled" if was and wanted else ""
        message = f"Region {name} goes from {was} to {wanted} learners, spares included."
        story.turn(f"scale {name}", str(was), str(wanted), "Normal", reason, message)
        was_state = str(old.get("state")) if old.get("state") in ROLLING else ""
        state = str(row["state"]) if row["state"] in ROLLING else ""
        if state == "RolloutStopped":
            said = found.rolled.regions.get(name, "")
            story.turn(f"rollout {name}", was_state, state, "Warning", state, f"Region {name}: {said}.")
        else:
            reason = "RolledOut" if was_state and not state and row["state"] != "Lost" else ""
            message = f"Every learner of region {name} has the changed template."
            story.turn(f"rollout {name}", was_state, state, "Normal", reason, message)


def _pods(view: View, story: Story, found: Findings) -> None:
    """Pods that do not start, and pods on lost nodes, told once per kind of reason. What the status tells
    of a pod already was told by an earlier operator."""
    rows = view.job.status.get("regions") or []
    before = " ".join(str(row.get("cause", "")) for row in rows)
    before += str(view.condition("Degraded").get("message", ""))
    for pod in view.pods:
        if pod.role == "syncer" or (pod.role == "learner" and pod.ordinal >= view.wanted(pod.region)):
            continue
        who, known = ("Learner" if pod.role == "learner" else "Evaluator"), story.fresh and pod.name in before
        kind = found.regions.obstacles.get(pod.name, "")
        if pod.role == "evaluator" and pod.obstacle is not None and pod.alive:
            kind = pod.obstacle.kind if pod.obstacle.kind != "other" else ""
        kind = "" if kind == "crash" and pod.role == "learner" else kind  # told as a crash
        said = pod.obstacle.message if pod.obstacle is not None else ""
        subject = f"obstacle {pod.uid}"
        silent = not kind or found.rolled.stopped.get(pod.region) == pod.name  # told as the rollout's end
        story.turn(
            subject,
            story.last(subject, kind if known else ""),
            kind,
            "Warning",
            "" if silent else f"{who}NotStarting",
            f"{who} {pod.name} does not start: {said}.",
        )
        lost, subject = ("lost" if pod.name in found.nodes.said else ""), f"node {pod.uid}"
        message = f"{who} {pod.name}: {found.nodes.said.get(pod.name, '')}."
        story.turn(
            subject, story.last(subject, lost if known else ""), lost, "Warning", "NodeLost" if lost else "", message
        )
    uids = {pod.uid for pod in view.pods}
    told = view.memory.told
    for subject in [s for s in told if s.partition(" ")[0] in ("obstacle", "node")]:
        if subject.split()[1] not in uids:
            del told[subject]


def _ends(view: View, story: Story, found: Findings, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    stage = found.course.stage

    def state(conditions: Mapping[str, Any], deleting: bool) -> str:
        if deleting:
            return "deleting"
        for kind in ("Failed", "Complete", "Suspended"):
            if conditions.get(kind, {}).get("status") == "True":
                return kind
        return "suspending" if conditions.get("Suspended", {}).get("reason") == "Suspending" else ""

    old, new = state(before, view.job.status.get("phase") == "Deleting"), state(now, stage == "deleting")
    kind: Literal["Normal", "Warning"] = "Warning" if new == "Failed" else "Normal"
    reason, message = {
        "deleting": ("Deleting", "The job is deleted: learners are told, then its objects go."),
        "suspending": ("Suspending", now.get("Suspended", {}).get("message", "")),
        "": ("Resumed", "The job goes on.") if old in ("Suspended", "suspending") and view.begun else ("", ""),
    }.get(new, (new, str(now.get(new, {}).get("message", ""))))
    story.turn("end", old, new, kind, reason, message)
