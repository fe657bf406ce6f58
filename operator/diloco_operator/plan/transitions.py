"""One Event per transition: what has happened to a job, in sentences, in order.

A transition is a difference between the job's status and the status that this turn plans. The status is written before
Events are sent, so an operator that restarts finds no difference and sends nothing again. ``PlanMemory.reported`` has
the state of which an Event was sent last, for the turns that still see an older status.

What has no place in the status becomes an Event where it is found: a pod that is gone or deleted
(``pods/replacement.py``), restarted (``pods/rollout.py``), force-deleted (``pods/node_loss.py``).

Example: ``QuorumMet`` is True in the status and False with reason ``TooFew`` in the plan. That is
the transition of ``Topic.QUORUM`` from ``met`` to ``few``: the Event ``QuorumLost``, once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_args

from diloco_operator.job import digest
from diloco_operator.model import EventType, EventWanted, Object, PlanMemory, Topic
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.conditions.decide import TurnFindings, explain_small_resources
from diloco_operator.plan.conditions.region_conditions import DRAINED
from diloco_operator.plan.durability import LOST
from diloco_operator.plan.lifecycle import NOT_SAVED, SAVED
from diloco_operator.plan.pod_status import ObstacleKind
from diloco_operator.plan.regions import ROLLING
from diloco_operator.plan.view import View
from diloco_protocol.vocabulary import JOB_REFUSED_REASONS

_REFUSALS = (JOB_REFUSED_REASONS | {"InvalidSpec"}) - {"NameConflict"}
"""Reasons of Ready with which the job itself, or an object that it cannot do without, is refused. The condition
NameConflict has an Event of its own."""
FAULT_OVER = {
    "NameConflict": "The names that the job needs are free.",
    "SpecDrift": "No learner is refused for another copy of the job any more.",
    "SettingsDiffer": "The settings are the same as the hub's again.",
    "RegionLost": "Learners of every region are heard again.",
    "LinksTooSlow": "Every link is fast enough for the job again.",
    "RoundOverdue": "Every round gets its pushes again.",
    "HubReachable": "",  # its own message says it
}
"""Conditions that have an Event when they begin to say a fault and one when it is over: the latter's sentence."""

_SUSPENDING = ("Suspending", SAVED, NOT_SAVED)
"""Reasons of Suspended while it is False, and the job is on its way there."""
_SYNCER_FAULTS = frozenset(get_args(ObstacleKind)) - {"Crashing"} | {
    "NotCreated",
    "ShardCrashing",
    "NodeLost",
    "NotAnswering",
    "StoreProblem",
    "Credentials",
}
"""Reasons for which SyncerReady is False and that do not pass by themselves. SyncerCrashed tells of a crash."""


class EventLog:
    """Collects the Events of a turn. ``memory.reported`` is changed."""

    def __init__(self, memory: PlanMemory) -> None:
        self.events: list[EventWanted] = []
        self._reported = memory.reported
        # An operator that has just started: what the status says was reported by an earlier one.
        self.is_new = not memory.reported and memory.last_counted_failure is None

    def transition(
        self, topic: Topic, before: str, now: str, kind: EventType, reason: str, message: str, subject: str = ""
    ) -> None:
        """A topic's subject goes from state ``before`` to ``now``. There is an Event if the states differ,
        ``reason`` is not empty, and none was sent of that state before."""
        key = (topic, subject)
        if now != before and self._reported.get(key) != now and reason:
            self.events.append(EventWanted(kind, reason, message[:1000]))
        if now != before or key in self._reported:
            self._reported[key] = now

    def last_state(self, topic: Topic, subject: str = "", *, default: str) -> str:
        """The state that was reported last; ``default``, if none is remembered."""
        return self._reported.get((topic, subject), default)

    def forget(self, *topics: Topic, subject: str | None = None) -> None:
        """Forget what was reported of these topics, whatever their subjects (or of one ``subject``)."""
        for key in [key for key in self._reported if key[0] in topics and subject in (None, key[1])]:
            del self._reported[key]

    def keep(self, topic: Topic, subjects: Collection[str]) -> None:
        """Forget what was reported of a topic about anything but ``subjects``."""
        for key in [key for key in self._reported if key[0] is topic and key[1] not in subjects]:
            del self._reported[key]


def transition_events(view: View, found: TurnFindings, conditions: ConditionSet, status: Object) -> list[EventWanted]:
    """The Events of what differs between the job's status and the planned one."""
    event_log = EventLog(view.memory)
    before = {str(c.get("type")): c for c in conditions.before}
    _report_start(view, event_log, status)
    _report_refusal(event_log, before.get("Ready", {}), conditions.found["Ready"])
    for kind in FAULT_OVER:
        if kind in ("LinksTooSlow", "RoundOverdue", "SpecDrift") and not found.decision.training:
            event_log.forget(Topic.CONDITION, subject=kind)  # no learner is connected, so the fault is not over either
        elif kind in conditions.found:
            _report_fault(event_log, kind, before.get(kind, {}), conditions.found[kind])
    _report_apply_failed(event_log, before.get("Degraded", {}), conditions.found["Degraded"], conditions.found["Ready"])
    if found.decision.training and view.document is not None:
        small = explain_small_resources(view)
        was = "yes" if small and small in str(before.get("Degraded", {}).get("message", "")) else ""
        state = "yes" if small else ""
        event_log.transition(Topic.RESOURCES, was, state, "Warning", "ResourcesTooSmall" if small else "", small)
    if found.decision.training and view.begun:
        _report_syncer_fault(event_log, before, conditions.found)
        _report_quorum(event_log, before, conditions.found)
        _report_regions(view, event_log, found, status)
        _report_pods(view, event_log, found)
    else:
        event_log.forget(Topic.QUORUM, Topic.SYNCER_FAULT, Topic.REGION_SCALE, Topic.REGION_ROLLOUT)
    _report_durable(view, event_log, before.get("Durable", {}), conditions.found.get("Durable", {}), status=status)
    _report_output(view, event_log)
    _report_end(view, event_log, before, conditions.found)
    return event_log.events


def _report_start(view: View, event_log: EventLog, status: Object) -> None:
    if not status.get("startTime"):
        return
    spec, here = view.job.spec, view.here
    regions = ", ".join(f"{r.learners} in {r.name}" for r in here.regions)
    parts = (["the syncer"] if here.syncer else []) + ([f"learners ({regions})"] if regions else [])
    parts += ["the evaluator"] if here.syncer and spec.evaluated else []
    started = str(view.job.status.get("startTime") or "")
    message = f"Started {' and '.join(parts)}."
    event_log.transition(Topic.JOB_STARTED, "yes" if started else "", "yes", "Normal", "Started", message)


def _report_refusal(event_log: EventLog, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """An Event where the job itself, or an object that it cannot do without, is refused."""

    def state(condition: Mapping[str, Any]) -> str:
        if condition.get("status") != "False" or condition.get("reason") not in _REFUSALS:
            return ""
        return f"{condition['reason']} {digest(condition.get('message'))}"

    reason = str(now.get("reason")) if state(now) else ""
    event_log.transition(Topic.JOB_REFUSED, state(before), state(now), "Warning", reason, str(now.get("message")))


def _report_apply_failed(
    event_log: EventLog, before: Mapping[str, Any], now: Mapping[str, Any], ready: Mapping[str, Any]
) -> None:
    """An Event where an object that training can do without is refused. The other reasons of Degraded have
    Events of their own."""
    state = "yes" if now.get("reason") == "ApplyFailed" else ""
    reason = "ApplyFailed" if state and ready.get("reason") not in _REFUSALS else ""
    was = "yes" if before.get("reason") == "ApplyFailed" else ""
    event_log.transition(Topic.APPLY_FAILED, was, state, "Warning", reason, str(now.get("message")))


def _report_fault(event_log: EventLog, kind: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """An Event when a condition begins to say a fault, and one when the fault is over."""
    bad = "False" if kind == "HubReachable" else "True"

    def state(condition: Mapping[str, Any]) -> str:
        if condition.get("reason") == DRAINED:
            return "drained"
        return "fault" if condition.get("status") == bad else ""

    if now.get("status") == "Unknown":
        return
    message, hub = str(now.get("message")), kind == "HubReachable"
    over = {"HubReachable": "HubReachable", "RegionLost": "RegionBack"}.get(kind, f"{kind}Over")
    events: dict[str, tuple[EventType, str, str]] = {
        "drained": ("Normal", "HubDrained", message),
        "fault": ("Warning", "HubUnreachable" if hub else kind, message),
        "": ("Normal", over if before else "", FAULT_OVER[kind] or message),
    }
    event_log.transition(Topic.CONDITION, state(before), state(now), *events[state(now)], kind)


def _report_syncer_fault(event_log: EventLog, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    def state(conditions: Mapping[str, Any]) -> str:
        reason = conditions.get("SyncerReady", {}).get("reason", "")
        return f"Syncer{reason}" if reason in _SYNCER_FAULTS else ""

    fault = state(now)
    message = str(now.get("SyncerReady", {}).get("message", ""))
    event_log.transition(Topic.SYNCER_FAULT, state(before), fault, "Warning", fault, f"The syncer: {message}")


def _report_durable(view: View, event_log: EventLog, before: Object, now: Object, status: Object) -> None:
    """An Event when the volume begins to go, one when the store came back empty, and one when the syncer answers on
    another volume. Nothing else may tell of that: the status may be old, and the new store have as many merges as it
    says. The other dangers have Events of SyncerReady."""

    def state(condition: Object) -> str:
        return str(condition.get("reason")) if condition.get("reason") in ("VolumeGoing", LOST) else ""

    event_log.transition(Topic.DURABLE, state(before), state(now), "Warning", state(now), str(now.get("message")))
    old, syncer = (document.get("syncer") or {} for document in (view.job.status, status))
    had, has = (str(one.get("volume") or "") for one in (old, syncer))
    message = (
        f"The syncer's volume was deleted, and it answers on another, with {syncer.get('merges') or 0} merges: of what "
        f"learners gave back, or of a model that began anew. The other had {old.get('merges') or 0} or more."
    )
    event_log.transition(Topic.VOLUME, had, has, "Warning", "VolumeReplaced" if had and has else "", message)


def _report_quorum(event_log: EventLog, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    def state(conditions: Mapping[str, Any]) -> str:
        row = conditions.get("QuorumMet", {})
        return "met" if row.get("status") == "True" else "few" if row.get("reason") == "TooFew" else ""

    was, message = state(before), str(now.get("QuorumMet", {}).get("message"))
    if state(now) == "met":
        event_log.transition(Topic.QUORUM, was, "met", "Normal", "QuorumMet", message)
    elif state(now) == "few":
        lost = "met" in (was, event_log.last_state(Topic.QUORUM, default=""))
        event_log.transition(Topic.QUORUM, was, "few", "Warning", "QuorumLost" if lost else "", message)


def _report_regions(view: View, event_log: EventLog, found: TurnFindings, status: Object) -> None:
    before = {row.get("name"): row for row in view.job.status.get("regions") or []}
    here = {region.name for region in view.here.regions}
    for row in status.get("regions") or []:
        name, old = row["name"], before.get(row["name"])
        if name not in here or old is None:
            continue
        was, wanted = old.get("desired", 0), row["desired"]
        reason = "Scaled" if was and wanted else ""
        message = f"Region {name}: from {was} to {wanted} learners, spares included."
        event_log.transition(Topic.REGION_SCALE, str(was), str(wanted), "Normal", reason, message, name)
        was_state = str(old.get("state")) if old.get("state") in ROLLING else ""
        state = str(row["state"]) if row["state"] in ROLLING else ""
        kind: EventType = "Warning" if state == "RolloutStopped" else "Normal"
        reason = "RolledOut" if was_state and not state and row["state"] != "Lost" else ""
        message = f"Every learner of region {name} has the changed template."
        if state == "RolloutStopped":
            reason, message = state, f"Region {name}: {found.rollout.regions.get(name, '')}."
        event_log.transition(Topic.REGION_ROLLOUT, was_state, state, kind, reason, message, name)


def _report_pods(view: View, event_log: EventLog, found: TurnFindings) -> None:
    """Pods that do not start, and pods on lost nodes: one Event per pod and kind of reason. An operator that
    has just started sends none for a pod that the status names already."""
    rows = view.job.status.get("regions") or []
    in_status = " ".join(str(row.get("cause", "")) for row in rows)
    in_status += str(view.condition("Degraded").get("message", ""))
    for pod in view.pods:
        wanted = pod.role == "evaluator" or (pod.role == "learner" and pod.ordinal < view.wanted(pod.region))
        if not wanted:  # SyncerReady tells of the syncer's and its shards'
            continue
        title = "Learner" if pod.role == "learner" else "Evaluator"
        subject = view.title(pod) if pod.role == "learner" else f"Evaluator {pod.name}"
        known = event_log.is_new and pod.name in in_status
        kind = found.regions.obstacles.get(pod.name, "")
        if pod.role == "evaluator" and pod.obstacle is not None and pod.alive:
            kind = pod.obstacle.kind if pod.obstacle.kind != "NotStarting" else ""
        kind = "" if kind == "Crashing" and pod.role == "learner" else kind  # LearnerCrashed says it
        message = f"{subject} does not start: {pod.obstacle.message if pod.obstacle is not None else ''}."
        before = event_log.last_state(Topic.POD_OBSTACLE, pod.uid, default=kind if known else "")
        untold = not kind or found.rollout.stopped.get(pod.region) == pod.name  # RolloutStopped says it
        reason = "" if untold else f"{title}NotStarting"
        event_log.transition(Topic.POD_OBSTACLE, before, kind, "Warning", reason, message, pod.uid)
        lost = "lost" if pod.name in found.node_losses.reasons else ""
        message = f"{subject}: {found.node_losses.reasons.get(pod.name, '')}."
        before = event_log.last_state(Topic.POD_NODE_LOST, pod.uid, default=lost if known else "")
        event_log.transition(Topic.POD_NODE_LOST, before, lost, "Warning", "NodeLost" if lost else "", message, pod.uid)
    uids = {pod.uid for pod in view.pods}
    event_log.keep(Topic.POD_OBSTACLE, uids)
    event_log.keep(Topic.POD_NODE_LOST, uids)


def _report_output(view: View, event_log: EventLog) -> None:
    """An Event when the merged model lies at output.uri, and one when it could not be written."""
    before, now = view.job.status.get("output") or {}, view.output or {}
    state = f"{now['state']} {now['uri']}" if now.get("state") in ("Written", "Failed") else ""
    was = f"{before.get('state')} {before.get('uri')}" if before.get("state") in ("Written", "Failed") else ""
    if now.get("state") == "Failed":
        message = f"The merged model was not written to {now['uri']}: {now['message']}."
        event_log.transition(Topic.OUTPUT, was, state, "Warning", "OutputFailed", message)
    else:
        size = f"{now.get('size') or 0:,} bytes"
        message = f"The merged model was written to {now.get('uri')} ({size}); the syncer is being stopped."
        event_log.transition(Topic.OUTPUT, was, state, "Normal", "OutputWritten" if state else "", message)


def _report_end(view: View, event_log: EventLog, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    def state(conditions: Mapping[str, Any]) -> str:
        for kind in ("Failed", "Complete", "Suspended"):
            if conditions.get(kind, {}).get("status") == "True":
                return kind
        return "suspending" if conditions.get("Suspended", {}).get("reason") in _SUSPENDING else ""

    old, new = "deleting" if view.job.status.get("phase") == "Deleting" else state(before), state(now)
    lost = new == "Suspended" and now["Suspended"]["reason"] == NOT_SAVED
    kind: EventType = "Warning" if new == "Failed" or lost else "Normal"
    reason, message = {
        "suspending": ("Suspending", now.get("Suspended", {}).get("message", "")),
        "": ("Resumed", "The job continues.")
        if old in ("Suspended", "suspending", "Failed") and view.begun
        else ("", ""),
    }.get(new, (NOT_SAVED if lost else new, str(now.get(new, {}).get("message", ""))))
    event_log.transition(Topic.JOB_END, old, new, kind, reason, message)
