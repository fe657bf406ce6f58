"""What each condition says, from everything that the turn has found (conditions.py says which there are)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_operator import names
from diloco_operator.job import stamp
from diloco_operator.model import ApplyError, Ref
from diloco_operator.objects.manifests import reachable_at
from diloco_operator.plan import refusals
from diloco_operator.plan.conditions import hub_conditions, region_conditions
from diloco_operator.plan.conditions.conditions import Conditions
from diloco_operator.plan.lifecycle import Course
from diloco_operator.plan.pods.node_loss import Lost
from diloco_operator.plan.pods.pod_status import Pod, shortened
from diloco_operator.plan.pods.rollout import Rollout
from diloco_operator.plan.regions import Report, explained
from diloco_operator.plan.view import PATIENCE, View
from diloco_protocol.vocabulary import CONTROL_PORT, FINISHING_PHASES, JobPhase, SyncerExit

_WAITING = {
    "unschedulable": "Unschedulable",
    "image": "ImageUnavailable",
    "config": "PodConfiguration",
    "volume": "VolumeUnavailable",
    "crash": "Crashing",
    "other": "NotStarting",
}
_STAGE = {
    "waiting": ("Suspended", "The job is suspended and was not started."),
    "suspending": ("Suspending", "The job is being suspended."),
    "suspended": ("Suspended", "The job is suspended."),
    "restarting": ("Restarting", "The job goes on when its earlier pods are gone."),
    "finishing": ("Complete", "The job has reached its end."),
    "complete": ("Complete", "The job has ended."),
    "failing": ("Failed", "The job has failed."),
    "failed": ("Failed", "The job has failed."),
    "deleting": ("Deleting", "The job is being deleted."),
}
_CURES = {
    "forbidden": "It is done when the operator is granted that.",
    "quota": "Raise the namespace's quota, or ask for less.",
    "invalid": "Correct the job; what ran before goes on as it was.",
}
_REASONS = {
    "invalid": "Refused",
    "forbidden": "Forbidden",
    "quota": "QuotaExceeded",
    "other": "ApplyFailed",
    "conflict": "NameConflict",
}
# Without these nothing trains; the other kinds are good to have.
_ESSENTIAL = frozenset({"ConfigMap", "Secret", "Service", "PersistentVolumeClaim", "Deployment", "StatefulSet"})


HAND_OVER_SECONDS = 15.0
"""For so long a successor may wait for the volume that the pod before it still has; two are usual."""
UNFIT_SECONDS = 30.0
"""A syncer whose credentials cannot be used has ended after so long."""


@dataclass(slots=True)
class Findings:
    """What the turn found. ``refused``: reason and message of why the job is not taken as it stands."""

    course: Course
    regions: Report
    rolled: Rollout = field(default_factory=Rollout)
    nodes: Lost = field(default_factory=Lost)
    apply_errors: Sequence[ApplyError] = ()
    refused: tuple[str, str] | None = None
    failure: tuple[str, str] | None = None
    held_back: bool = False  # the syncer's change waits for the rollout


def judge(view: View, found: Findings) -> Conditions:
    """All conditions of a job whose spec could be read."""
    out = Conditions(list(view.job.status.get("conditions") or []), view.job.generation, view.now)
    stage = None if found.course.training else _stage(found)
    if view.here.syncer:
        _syncer_ready(view, found, out)
        _quorum(view, found, out)
        _region_lost(view, found, out)
        hub_conditions.judge(view, stage, out)
    elif view.here.regions:
        region_conditions.judge(view, stage, out)
    _conflict(found, out)
    _degraded(view, found, out)
    _ends(view, found, out)
    _ready(view, found, out)
    return out


def _stage(found: Findings) -> tuple[str, str]:
    return _STAGE[found.course.stage]


# ------------------------------------------------------------------ the syncer


def _syncer_ready(view: View, found: Findings, out: Conditions) -> None:
    wanted = found.course.scale.syncer > 0
    pod = view.pod_of("syncer")
    if not view.begun and pod is None:
        reason, message = ("Starting", "It is being started.") if wanted else _stage(found)
        out.say("SyncerReady", False, reason, message)
    elif not wanted and (pod is None or pod.terminating):
        out.say("SyncerReady", False, *_stage(found))
    else:
        _running_syncer(view, found, pod, out)


def _running_syncer(view: View, found: Findings, pod: Pod | None, out: Conditions) -> None:
    held = pod is not None and pod.obstacle is not None and "ReadWriteOncePod" in pod.obstacle.message
    handing_over = view.lasting("the syncer's volume is held", held) < HAND_OVER_SECONDS and held
    # A successor waits for the volume that a pod on a lost node still has.
    stuck = next((p.name for p in view.pods if p.role == "syncer" and p.name in found.nodes.said), None)
    if stuck is not None and not (pod is not None and pod.alive and pod.ready and pod.name != stuck):
        out.say("SyncerReady", False, "NodeLost", f"Pod {stuck}: {found.nodes.said[stuck]}.")
    elif pod is None or pod.over:
        made = _not_made(view)
        out.say("SyncerReady", False, "NotCreated" if made else "Starting", made or "Its pod is being made.")
    elif pod.terminating:
        out.say("SyncerReady", False, "Restarting", f"Pod {pod.name} is on its way out.")
    elif handing_over:
        said = f"Pod {pod.name} waits for the volume that the one before it still has."
        out.say("SyncerReady", False, "Starting", said)
    elif unfit := _unfit(view, pod):
        out.say("SyncerReady", False, "Credentials", f"Pod {pod.name}: {refusals.UNFIT}: {unfit}")
    elif pod.obstacle is not None:
        reason = _WAITING[pod.obstacle.kind]
        more = _claim(view, pod) + refusals.missing(view.job, pod.obstacle)
        message = f"Pod {pod.name}: {pod.obstacle.message.rstrip('.')}{more}."
        out.say("SyncerReady", False, reason, message)
    elif not pod.ready:
        out.say("SyncerReady", False, "Starting", f"Pod {pod.name} reads its store, or is about to serve.")
    else:
        _answering(view, pod, out)


def _unfit(view: View, pod: Pod) -> str:
    """Why its credentials cannot be used, with the cure; empty: that is not what it waits for. Also while it
    is being started again, or this would come and go."""
    end = pod.last_end
    if pod.ready or end is None or end.code != SyncerExit.CREDENTIALS:
        return ""
    if pod.obstacle is not None and pod.obstacle.kind in ("config", "image", "volume"):
        return ""
    if pod.running_since is not None and view.now - pod.running_since > UNFIT_SECONDS:
        return ""
    words = end.words.rstrip(".")
    return f"{words}. {refusals.syncer_cure(view.job, words)}"


def _answering(view: View, pod: Pod, out: Conditions) -> None:
    asked, document = view.asked, view.document
    error = shortened(asked.error) if asked is not None else "it could not be asked"
    if document is not None and document.get("store_problem"):
        out.say("SyncerReady", False, "StoreProblem", f"Its store: {document['store_problem']}.")
    elif document is not None:
        epoch = document.get("epoch")
        message = f"It serves at {reachable_at(view.job, view.here)} in epoch {epoch}."
        out.say("SyncerReady", True, "Serving", message)
    elif view.silent_for < PATIENCE:
        before = view.condition("SyncerReady")
        if before.get("status") == "True":  # one call that failed is nothing to tell
            out.say("SyncerReady", True, str(before.get("reason")), str(before.get("message")))
        else:
            out.say("SyncerReady", False, "Starting", f"Pod {pod.name} is ready and about to be asked.")
    else:
        out.say(
            "SyncerReady",
            False,
            "NotAnswering",
            f"Pod {pod.name} is ready, and has not answered this operator since "
            f"{stamp(view.now - view.silent_for)} ({error}). Learners may still reach it; if they "
            f"do, look for what keeps the operator from its port {CONTROL_PORT}: a NetworkPolicy, or a "
            "control key of another operator.",
        )


def _not_made(view: View) -> str:
    """Why the syncer's pod could not be made: a ReplicaSet's Event."""
    head = f"{view.job.name}-syncer-"
    cluster_events = [
        n
        for n in view.observed.cluster_events
        if n.reason == "FailedCreate" and n.kind == "ReplicaSet" and n.name.startswith(head)
    ]
    if not cluster_events:
        return ""
    said = explained(max(cluster_events, key=lambda event: event.time).message)
    return said[0].upper() + said[1:] + "."


def _claim(view: View, pod: Pod) -> str:
    """What is said of the claim of a pod that waits for its volume."""
    if pod.obstacle is None or pod.obstacle.kind not in ("volume", "unschedulable"):
        return ""
    storage = view.job.spec.syncer.storage
    if storage.claim_name is not None:
        return f" (syncer.storage.claimName is {storage.claim_name}: it must exist and be bound)"
    ref = names.claim(view.job.name)
    live = view.observed.objects.get(ref)
    if live is None or (live.get("status") or {}).get("phase") != "Pending":
        return ""
    cluster_events = [n for n in view.observed.cluster_events if Ref(n.kind, n.name) == ref]
    why = f": {shortened(max(cluster_events, key=lambda n: n.time).message)}" if cluster_events else ""
    return f" (claim {ref.name} is not bound{why}; syncer.storage names its class and size)"


def _quorum(view: View, found: Findings, out: Conditions) -> None:
    if not found.course.training:
        out.say("QuorumMet", False, *_stage(found))
        return
    quorum = (view.document or {}).get("quorum")
    if not isinstance(quorum, dict):
        before = view.condition("QuorumMet")
        if out.truth("SyncerReady") == "True" and before:
            out.say("QuorumMet", before["status"], str(before.get("reason")), str(before.get("message")))
        else:
            message = "The syncer, which knows, cannot be asked; learners go on alone for a while."
            out.say("QuorumMet", "Unknown", "SyncerNotReady", message)
        return
    active, required = int(quorum.get("active") or 0), int(quorum.get("required") or 0)
    if active >= required:
        out.say("QuorumMet", True, "Met", f"{_are(active)} active, a merge needs {required}.")
    elif view.said == JobPhase.WAITING:
        message = f"{_are(active)} active; training begins, or goes on, with {required} (sync.quorum)."
        out.say("QuorumMet", False, "Gathering", message)
    else:
        message = f"{_are(active)} active, and a merge needs {required} (sync.quorum): nothing is merged."
        out.say("QuorumMet", False, "TooFew", message)


def _are(count: int) -> str:
    return "1 learner is" if count == 1 else f"{count} learners are"


def _region_lost(view: View, found: Findings, out: Conditions) -> None:
    policy = view.job.spec.failure_policy
    lost = {
        name: since
        for name, since in found.regions.lost.items()
        if view.now - since >= policy.region_lost_seconds or name in view.regions_lost
    }
    if lost:
        said = ", ".join(f"{name} since {stamp(since)}" for name, since in sorted(lost.items()))
        out.say(
            "RegionLost",
            True,
            "NobodyHeard",
            f"Nobody is heard of region {said}. Its learners rejoin by themselves when they are back.",
        )
    else:
        out.say("RegionLost", False, "AllHeard", "")


# ------------------------------------------------------------------ what is wrong


def told(apply_error: ApplyError) -> str:
    """A failed write in a sentence with its cure."""
    cure = _CURES.get(apply_error.reason, "")
    message = shortened(apply_error.message, 1000).rstrip(".")
    return f"{apply_error.ref.kind} {apply_error.ref.name}: {message}. {cure}".strip()


def _sorted(apply_errors: Sequence[ApplyError]) -> list[ApplyError]:
    return sorted(apply_errors, key=lambda t: (t.ref, t.reason, t.message))


def _conflict(found: Findings, out: Conditions) -> None:
    theirs = [t for t in found.apply_errors if t.reason == "conflict"]
    if theirs:
        out.say("NameConflict", True, "NameTaken", " ".join(sorted(map(told, theirs))))
    else:
        out.say("NameConflict", False, "NamesFree", "")


def _degraded(view: View, found: Findings, out: Conditions) -> None:
    said = [told(t) for t in _sorted(found.apply_errors) if t.reason != "conflict"]
    reason = "ApplyFailed" if said else ""
    if found.course.training:
        causes = {
            name: cause
            for name, cause in found.regions.causes.items()
            if cause != found.rolled.regions.get(name) or name in found.rolled.stopped
        }
        said += [f"Region {name}: {cause}." for name, cause in sorted(causes.items())]
        reason = reason or ("RolloutStopped" if found.rolled.stopped else "Learners" if causes else "")
        evaluator = _evaluator(view, found)
        if evaluator:
            said.append(evaluator)
            reason = reason or "Evaluator"
    fixed = _fixed_volume(view)
    if fixed:
        said.append(fixed)
        reason = reason or "VolumeFixed"
    out.say("Degraded", bool(said), reason or "AsWanted", " ".join(said))


def _evaluator(view: View, found: Findings) -> str:
    pod = view.pod_of("evaluator")
    if not found.course.scale.evaluator or pod is None or pod.terminating:
        return ""
    if pod.name in found.nodes.said:
        return f"Evaluator {pod.name}: {found.nodes.said[pod.name]}; training goes on without it."
    if pod.obstacle is not None and pod.obstacle.kind != "other":
        said = f"{pod.obstacle.message}{refusals.missing(view.job, pod.obstacle)}"
        return f"Evaluator {pod.name}: {said}; training goes on without it."
    return ""


def _fixed_volume(view: View) -> str:
    storage = view.job.spec.syncer.storage
    live = view.live(names.claim(view.job.name))
    if live is None or storage.claim_name is not None or storage.uri is not None:
        return ""
    has = (live.get("spec") or {}).get("storageClassName")
    if storage.storage_class_name is None or has is None or has == storage.storage_class_name:
        return ""
    return (
        f"syncer.storage.storageClassName is {storage.storage_class_name}, and the volume that is there is "
        f"of class {has}: a volume keeps its class."
    )


# ------------------------------------------------------------------ ends, and the whole


def _ends(view: View, found: Findings, out: Conditions) -> None:
    stage, message = found.course.stage, found.course.message
    if stage in ("waiting", "suspended"):
        out.say("Suspended", True, "Suspended", message or "Everything is saved; set suspend: false to go on.")
    elif stage in ("suspending", "restarting"):
        out.say("Suspended", False, stage.capitalize(), message)
    else:
        out.say("Suspended", False, "NotSuspended", "")
    if stage == "complete":
        before = view.condition("Complete")
        said = before.get("message") if before.get("status") == "True" else None
        out.say("Complete", True, "StopReached", said or "The job has reached its stop.")
    else:
        out.say("Complete", False, "NotComplete", "")
    if found.failure is not None:
        out.say("Failed", True, *found.failure)
    elif stage in ("failing", "failed"):
        before = view.condition("Failed")
        if before.get("status") == "True":
            out.say("Failed", True, str(before.get("reason")), str(before.get("message")))
        else:
            message = str((view.document or {}).get("message") or "the syncer says so")
            out.say("Failed", True, "SyncerFailed", f"The job has failed: {message}")
    else:
        out.say("Failed", False, "NotFailed", "")


def _ready(view: View, found: Findings, out: Conditions) -> None:
    course = found.course
    if found.refused is not None:
        out.say("Ready", False, *found.refused)
        return
    if not course.training:
        reason, message = _stage(found)
        out.say("Ready", False, reason, course.message or message)
        return
    essential = [t for t in _sorted(found.apply_errors) if t.ref.kind in _ESSENTIAL]
    if essential:
        out.say("Ready", False, _REASONS[essential[0].reason], " ".join(map(told, essential)))
        return
    wanted = ("SyncerReady", "QuorumMet") if view.here.syncer else ("HubReachable",)
    for kind in wanted:
        row = out.found.get(kind)
        if row is not None and row["status"] != "True":
            reason = row["reason"] if kind != "SyncerReady" else f"Syncer{row['reason']}"
            out.say("Ready", False, str(reason), str(row["message"]))
            return
    phase = view.said
    if phase == JobPhase.HOLDING:  # with a quorum: for something else
        why = str((view.document or {}).get("message") or "the syncer holds")
        said = f"Merges wait: {why}. Learners train on, up to sync.staleness.maxSteps."
        out.say("Ready", False, "Holding", said)
        return
    waits = " A change of the syncer waits until learners here are through." if found.held_back else ""
    rolling = "".join(f" Region {name}: {said}." for name, said in sorted(found.rolled.regions.items()))
    if phase in FINISHING_PHASES:
        out.say("Ready", True, "Finishing", "Learners offer their last work, then the model is evaluated.")
    else:
        out.say("Ready", True, "Training", f"Learners train, and their work is merged.{rolling}{waits}")
