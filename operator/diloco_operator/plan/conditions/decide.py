"""All conditions of a job, from what the turn has found (``__init__.py`` lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_operator import names
from diloco_operator.job import rfc3339
from diloco_operator.model import LASTING, ApplyError, Fact, Failure, Ref
from diloco_operator.objects.manifests import external_address, shard_deployments, sync_address
from diloco_operator.plan import durability, lifecycle, refusals
from diloco_operator.plan.conditions import hub_conditions, region_conditions
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.lifecycle import STAGE_WORDS, LifecycleDecision
from diloco_operator.plan.pod_status import OUT_OF_MEMORY, Pod, merge_equal, newest_message
from diloco_operator.plan.pods.memory_need import memory_need_text
from diloco_operator.plan.pods.node_loss import NodeLosses
from diloco_operator.plan.pods.rollout import Rollout
from diloco_operator.plan.regions import RegionReport, explain_not_made, is_lost
from diloco_operator.plan.view import ANSWER_PATIENCE, View
from diloco_protocol.common.program_errors import shorten
from diloco_protocol.common.quantities import parse_quantity
from diloco_protocol.resources import even_sizes, find_shortages
from diloco_protocol.vocabulary import CONTROL_PORT, FINISHING_PHASES, JOB_REFUSED_REASONS, JobPhase, SyncerExit

_APPLY_ERRORS = {
    "conflict": ("NameConflict", ""),
    "forbidden": ("Forbidden", "The operator tries again; grant it that right."),
    "quota": ("QuotaExceeded", "Raise the namespace's quota, or ask for less."),
    "invalid": ("Refused", "Correct the job; what runs already continues unchanged."),
    "policy": ("Refused", "Change what is asked for, or have the policy changed; what runs already continues."),
    "webhook": ("WebhookUnavailable", "Mend that webhook, or exclude the namespace from it."),
    "terminating": ("NamespaceTerminating", ""),
    "unavailable": ("ApplyFailed", "The operator tries again."),
    "other": ("ApplyFailed", ""),
}
"""For each reason of an ApplyError the reason of Ready, and the fix."""
# Without these nothing trains; the other kinds are good to have.
_ESSENTIAL = frozenset({"ConfigMap", "Secret", "Service", "PersistentVolumeClaim", "Deployment", "StatefulSet"})


# Refusals that may end without anybody changing the job.
_TRIED_AGAIN = frozenset({"QuotaExceeded", "Forbidden", "ApplyFailed", "WebhookUnavailable"})
STALLED_SECONDS = 120.0
"""So long such a refusal may last before a person is asked to act. A quota may be free again at any time."""

HANDOVER_SECONDS = 15.0
"""A successor may wait so long for the volume that the pod before it still has; two seconds are usual."""
UNFIT_SECONDS = 30.0
"""A syncer whose credentials cannot be used ends within so long."""


@dataclass(slots=True)
class TurnFindings:
    """What the parts of a turn have found, for conditions, status and Events."""

    decision: LifecycleDecision
    regions: RegionReport
    rollout: Rollout = field(default_factory=Rollout)
    node_losses: NodeLosses = field(default_factory=NodeLosses)
    apply_errors: Sequence[ApplyError] = ()
    refused: tuple[str, str] | None = None  # reason and message of why the spec is not taken
    failure: tuple[str, str] | None = None  # reason and message of why the job fails
    syncer_waits: bool = False  # the syncer's changed Deployment waits for the rollout of learners


def decide_conditions(view: View, found: TurnFindings) -> ConditionSet:
    """Decide all conditions of a job whose spec could be read."""
    out = ConditionSet(list(view.job.status.get("conditions") or []), view.job.generation, view.now)
    stage = None if found.decision.training else _stage_reason(found)
    if view.here.syncer:
        _decide_syncer_ready(view, found, out)
        _decide_durable(view, out)
        _decide_quorum_met(view, found, out)
        _decide_region_lost(view, found, out)
        hub_conditions.decide_hub_conditions(view, stage, out)
    elif view.here.regions:
        region_conditions.decide_region_conditions(view, stage, out)
    _decide_name_conflict(found, out)
    _decide_degraded(view, found, out)
    _decide_ends(view, found, out)
    _decide_ready(view, found, out)
    _decide_progress(view, found, out)
    return out


def _stage_reason(found: TurnFindings) -> tuple[str, str]:
    """Reason and message of the conditions that are False because the job does not train."""
    words = STAGE_WORDS[found.decision.stage]
    return words.reason, words.message


# ------------------------------------------------------------------ the syncer


def _decide_syncer_ready(view: View, found: TurnFindings, out: ConditionSet) -> None:
    wanted = found.decision.scale.syncer > 0
    pod = view.pod_of("syncer")
    if not view.begun and pod is None:
        reason, message = ("Starting", "The syncer is being started.") if wanted else _stage_reason(found)
        out.set("SyncerReady", False, reason, message)
    elif not wanted and (pod is None or pod.terminating):
        out.set("SyncerReady", False, *_stage_reason(found))
    else:
        _decide_syncer_pod(view, found, pod, out)


def _decide_syncer_pod(view: View, found: TurnFindings, pod: Pod | None, out: ConditionSet) -> None:
    held = pod is not None and pod.obstacle is not None and "ReadWriteOncePod" in pod.obstacle.message
    handing_over = view.observe(Fact.SYNCER_VOLUME_HELD, holds=held) < HANDOVER_SECONDS and held
    if absence := _explain_absence(view, found, names.syncer_deployment(view.job.name), pod):
        out.set("SyncerReady", False, *absence)
    elif pod is None or pod.over:
        out.set("SyncerReady", False, "Starting", "The syncer's pod is being created.")
    elif pod.terminating:
        out.set("SyncerReady", False, "Restarting", f"Pod {pod.name} is terminating.")
    elif handing_over:
        said = f"Pod {pod.name} waits for its volume, which the previous pod still uses."
        out.set("SyncerReady", False, "Starting", said)
    elif unfit := _explain_unfit(view, pod):
        out.set("SyncerReady", False, "Credentials", f"Pod {pod.name}: {refusals.UNFIT}: {unfit}")
    elif pod.obstacle is not None:
        out.set("SyncerReady", False, pod.obstacle.kind, _describe_obstacle(view, pod, _describe_claim(view, pod)))
    elif fault := _find_shard_fault(view, found):
        out.set("SyncerReady", False, *fault)
    elif not pod.ready:
        awaits = ", or waits for its shards (its log says for which)" * (view.job.spec.syncer.shard_pods is not None)
        out.set("SyncerReady", False, "Starting", f"Pod {pod.name} reads its store, or is about to serve{awaits}.")
    else:
        _decide_answering(view, pod, out)


def _explain_absence(view: View, found: TurnFindings, ref: Ref, pod: Pod | None) -> tuple[str, str] | None:
    """Reason and message of why a Deployment has no pod that runs; None: it has, or will have by itself. ``pod``: the
    newest. A successor may wait for a volume that a pod on a lost node still has."""
    reasons = found.node_losses.reasons
    lost = next((p.name for p in view.pods if p.name in reasons and view.holder_of(p) == ref), None)
    if lost is not None and not (pod is not None and pod.alive and pod.ready and pod.name != lost):
        return "NodeLost", f"Pod {lost}: {reasons[lost]}."
    unmade = explain_not_made(view, ref) if pod is None or pod.over else ""
    return ("NotCreated", f"{unmade[0].upper()}{unmade[1:]}.") if unmade else None


def _find_shard_fault(view: View, found: TurnFindings) -> tuple[str, str] | None:
    """Reason and message of why a shard of the syncer has no pod that runs, of which merges wait; None: each has, or
    will have by itself."""
    for shard, ref in enumerate(shard_deployments(view.job, view.here)):
        pod = view.pod_of(names.SHARD, shard)
        if absence := _explain_absence(view, found, ref, pod):
            return absence
        if pod is not None and pod.alive and pod.obstacle is not None:
            kind = "ShardCrashing" if pod.obstacle.kind == "Crashing" else pod.obstacle.kind
            return kind, _describe_obstacle(view, pod)
    return None


def _describe_obstacle(view: View, pod: Pod, more: str = "") -> str:
    assert pod.obstacle is not None
    more += refusals.missing_secret_cure(view.job, pod.obstacle)
    if pod.role == names.SHARD and pod.last_end is not None and pod.last_end.reason == OUT_OF_MEMORY:
        more += f". {memory_need_text(view, pod.role)}"  # of the syncer's own end its Event tells
    return f"Pod {pod.name}: {pod.obstacle.message.rstrip('.')}{more}."


def _explain_unfit(view: View, pod: Pod) -> str:
    """Why the syncer's credentials cannot be used, with the cure; empty: it does not wait for that. It is said
    while the syncer is being started again, too, or it would come and go."""
    end = pod.last_end
    if pod.ready or end is None or end.code != SyncerExit.CREDENTIALS:
        return ""
    if pod.obstacle is not None and pod.obstacle.kind in ("PodConfiguration", "ImageUnavailable", "VolumeUnavailable"):
        return ""
    if pod.running_since is not None and view.now - pod.running_since > UNFIT_SECONDS:
        return ""
    line = end.last_line.rstrip(".")
    return f"{line}. {refusals.syncer_cure(view.job, line)}"


def _decide_answering(view: View, pod: Pod, out: ConditionSet) -> None:
    asked, document = view.observed.syncer, view.document
    error = shorten(asked.error) if asked is not None else "it could not be asked"
    if document is not None and document.store_problem:
        problem = f"{document.store_problem[0].upper()}{document.store_problem[1:]}"
        out.set("SyncerReady", False, "StoreProblem", view.steady("SyncerReady", f"{problem}.{_volume_cure(view)}"))
    elif document is not None and _awaits_address(view):
        message = "The syncer serves this cluster. Others cannot reach it until its load balancer has an address."
        out.set("SyncerReady", len({region.cluster for region in view.job.spec.regions}) < 2, "AddressPending", message)
    elif document is not None:
        message = f"The syncer serves at {sync_address(view.job, view.here)}, in epoch {document.epoch}."
        out.set("SyncerReady", True, "Serving", message)
    elif view.ready_unanswered_seconds < ANSWER_PATIENCE:
        if view.is_true("SyncerReady"):
            out.keep("SyncerReady")  # one failed call changes nothing
        else:
            out.set("SyncerReady", False, "Starting", f"Pod {pod.name} is ready; the operator asks it next.")
    else:
        out.set(
            "SyncerReady",
            False,
            "NotAnswering",
            f"Pod {pod.name} is ready, but has not answered this operator since "
            f"{rfc3339(view.now - view.ready_unanswered_seconds)} ({error}). Learners may still reach it. If they "
            f"do, check what keeps the operator from its port {CONTROL_PORT}: a NetworkPolicy, or a "
            "control key of another operator.",
        )


def _awaits_address(view: View) -> bool:
    asked = view.job.spec.syncer.endpoint.type == "LoadBalancer"
    return asked and not external_address(view.live(names.syncer_service(view.job.name)))


def _volume_cure(view: View) -> str:
    storage = view.job.spec.syncer.storage
    if storage.uri is not None or storage.claim_name is not None:
        return ""
    return " To enlarge the volume, raise syncer.storage.size, if its storage class allows expansion."


def _describe_claim(view: View, pod: Pod) -> str:
    """What is added of the claim where the syncer's pod waits for its volume; empty: it does not."""
    if pod.obstacle is None or pod.obstacle.kind not in ("VolumeUnavailable", "Unschedulable"):
        return ""
    storage = view.job.spec.syncer.storage
    if storage.claim_name is not None:
        return f" (syncer.storage.claimName is {storage.claim_name}: it must exist and be bound)"
    ref = names.claim(view.job.name)
    live = view.observed.objects.get(ref)
    if live is None or (live.get("status") or {}).get("phase") != "Pending":
        return ""
    message = newest_message(view.observed.cluster_events, ref)
    why = f": {shorten(message)}" if message else ""
    return f" (claim {ref.name} is not bound{why}; syncer.storage names its class and size)"


def _decide_durable(view: View, out: ConditionSet) -> None:
    """Whether what was merged is safe. ``status.progress`` has the numbers, which change all the time."""
    danger = durability.find_danger(view)
    if danger is not None:
        out.set("Durable", False, *danger)
    elif view.document is not None and view.document.merges:
        message = "Every merge is in the store. status.progress says since when, and how much is not merged yet."
        out.set("Durable", True, "Stored", message)
    else:
        out.keep_or_unknown("Durable", "NothingMerged", "Nothing was merged yet.")


def _decide_quorum_met(view: View, found: TurnFindings, out: ConditionSet) -> None:
    if not found.decision.training:
        out.set("QuorumMet", False, *_stage_reason(found))
        return
    if view.document is None:
        if out.status_of("SyncerReady") != "True" or not out.keep("QuorumMet"):
            begun = (view.job.status.get("syncer") or {}).get("epoch") is not None
            message = f"The syncer cannot be asked{'. Learners continue alone for a while' if begun else ' yet'}."
            out.set("QuorumMet", "Unknown", "SyncerNotReady", message)
        return
    active, required = view.document.quorum.active, view.document.quorum.required
    if active >= required:
        out.set("QuorumMet", True, "Met", f"{_learners_are(active)} active, a merge needs {required}.")
    elif view.job_phase == JobPhase.WAITING:
        message = f"{_learners_are(active)} active; training starts, or continues, with {required} (sync.quorum)."
        said = f" The syncer: {shorten(view.document.message, 1000)}." if view.document.message else ""
        out.set("QuorumMet", False, "Gathering", message + said)
    elif view.job_phase in FINISHING_PHASES:
        message = f"The stop is reached; {_learners_are(active)} active, and each offers its last work and leaves."
        out.set("QuorumMet", False, "Finishing", message)
    else:
        message = f"{_learners_are(active)} active, and a merge needs {required} (sync.quorum): nothing is merged."
        out.set("QuorumMet", False, "TooFew", message)


def _learners_are(count: int) -> str:
    return "1 learner is" if count == 1 else f"{count} learners are"


def _decide_region_lost(view: View, found: TurnFindings, out: ConditionSet) -> None:
    lost = {name: since for name, since in found.regions.lost.items() if is_lost(view, name, since)}
    said = ", ".join(f"{name} since {rfc3339(since)}" for name, since in sorted(lost.items()))
    message = f"No learner of these regions is heard: {said}. Their learners rejoin by themselves."
    out.set_fault("RegionLost", "NobodyHeard", message if lost else "", over="AllHeard")


# ------------------------------------------------------------------ what is wrong


def describe_apply_errors(apply_errors: Sequence[ApplyError]) -> list[str]:
    """Failed writes in sentences with their fixes, equal ones in one."""
    said: dict[Failure, list[tuple[str, str]]] = {}
    for error in _sorted(apply_errors):
        message = shorten(error.message, 1000).rstrip(".")
        said.setdefault(error.reason, []).append((f"{error.ref.kind} {error.ref.name}".rstrip(), message))
    # Each name that is taken has a cure of its own.
    merged = {
        reason: [": ".join(row) for row in rows] if reason == "conflict" else merge_equal(rows)
        for reason, rows in said.items()
    }
    return [f"{sentence}. {_APPLY_ERRORS[reason][1]}".strip() for reason in merged for sentence in merged[reason]]


def _sorted(apply_errors: Sequence[ApplyError]) -> list[ApplyError]:
    return sorted(apply_errors, key=lambda t: (t.ref, t.reason, t.message))


def _decide_name_conflict(found: TurnFindings, out: ConditionSet) -> None:
    theirs = describe_apply_errors([t for t in found.apply_errors if t.reason == "conflict"])
    out.set_fault("NameConflict", "NameTaken", " ".join(theirs), over="NamesFree")


def _decide_degraded(view: View, found: TurnFindings, out: ConditionSet) -> None:
    said = describe_apply_errors([t for t in found.apply_errors if t.reason != "conflict"])
    reason = "ApplyFailed" if said else ""
    if found.decision.training:
        causes = {
            name: cause
            for name, cause in found.regions.causes.items()
            if cause != found.rollout.regions.get(name) or name in found.rollout.stopped
        }
        said += [f"Region {name}: {cause}." for name, cause in sorted(causes.items())]
        reason = reason or ("RolloutStopped" if found.rollout.stopped else "Learners" if causes else "")
    unwritten = ""
    if view.output is not None and view.output["state"] == "Failed":
        unwritten = f"The merged model was not written to {view.output['uri']}: {view.output['message']}."
    for word, text in (
        ("Evaluator", _explain_evaluator(view, found) if found.decision.training else ""),
        ("VolumeFixed", _explain_fixed_volume(view)),
        ("OutputFailed", unwritten),
        ("ResourcesTooSmall", explain_small_resources(view) if found.decision.training else ""),
    ):
        said += [text] if text else []
        reason = reason or (word if text else "")
    out.set_fault("Degraded", reason, " ".join(said), over="AsWanted")


def explain_small_resources(view: View) -> str:
    """Which fields of the job ask for less memory or disk than its model needs; empty: none, or its size is not known
    yet. What was said holds until the syncer tells the size again: an operator that starts has not asked it yet."""
    if view.document is None or not view.document.parameters or not view.document.versions:
        known = view.condition("Degraded")
        return str(known.get("message")) if known.get("reason") == "ResourcesTooSmall" else ""
    sizes = even_sizes(view.document.parameters, len(view.document.versions))
    claim = view.live(names.claim(view.job.name))
    asked = (((claim or {}).get("spec") or {}).get("resources") or {}).get("requests") or {}
    volume = parse_quantity(str(asked["storage"])) if "storage" in asked else None
    return " ".join(f"{one.path} {one.message}." for one in find_shortages(view.job.spec, sizes, volume))


def _explain_evaluator(view: View, found: TurnFindings) -> str:
    pod = view.pod_of("evaluator")
    if not found.decision.scale.evaluator or pod is None or pod.terminating:
        return ""
    if pod.name in found.node_losses.reasons:
        return f"Evaluator {pod.name}: {found.node_losses.reasons[pod.name]}; training continues without it."
    if pod.obstacle is not None and pod.obstacle.kind != "NotStarting":
        said = f"{pod.obstacle.message}{refusals.missing_secret_cure(view.job, pod.obstacle)}"
        return f"Evaluator {pod.name}: {said}; training continues without it."
    return ""


def _explain_fixed_volume(view: View) -> str:
    storage = view.job.spec.syncer.storage
    live = view.live(names.claim(view.job.name))
    if live is None or storage.claim_name is not None or storage.uri is not None:
        return ""
    has = (live.get("spec") or {}).get("storageClassName")
    if storage.storage_class_name is None or has is None or has == storage.storage_class_name:
        return ""
    return (
        f"syncer.storage.storageClassName is {storage.storage_class_name}, but the existing volume has the "
        f"class {has}: the class of a volume cannot be changed."
    )


# ------------------------------------------------------------------ ends, and the whole


def _decide_ends(view: View, found: TurnFindings, out: ConditionSet) -> None:
    stage, message = found.decision.stage, found.decision.message
    if stage in ("waiting", "suspended"):
        out.set("Suspended", True, found.decision.drain or "Suspended", message)
    elif stage == "suspending" and found.decision.drain != lifecycle.ASKED:
        out.set("Suspended", False, found.decision.drain, message)
    elif stage in ("suspending", "restarting"):
        out.set("Suspended", False, stage.capitalize(), message)
    elif stage in ("failing", "failed") and view.job.spec.suspend:
        down = lifecycle.waits_for_resume(view)
        said = "The job failed; set suspend: false to continue it." if down else "Its pods are being removed."
        out.set("Suspended", down, "Suspended" if down else "Suspending", said)
    else:
        out.set("Suspended", False, "NotSuspended", "")
    if stage == "complete":
        if not view.is_true("Complete") or not out.keep("Complete"):
            out.set("Complete", True, "StopReached", "The job has reached its stop.")
    else:
        out.set("Complete", False, "NotComplete", "")
    cure = f" To continue it: diloco resume {view.job.name}, or suspend: true and then false."
    if found.failure is not None:
        reason, message = found.failure
        out.set("Failed", True, reason, f"{message.rstrip('.')}.{cure}")
    elif stage in ("failing", "failed"):
        if not view.is_true("Failed") or not out.keep("Failed"):
            message = (view.document and view.document.message) or "the syncer gave no reason"
            out.set("Failed", True, "SyncerFailed", f"The job has failed: {message.rstrip('.')}.{cure}")
    else:
        out.set("Failed", False, "NotFailed", "")


def _decide_ready(view: View, found: TurnFindings, out: ConditionSet) -> None:
    decision = found.decision
    if found.refused is not None:
        out.set("Ready", False, *found.refused)
        return
    essential = [t for t in _sorted(found.apply_errors) if t.ref.kind in _ESSENTIAL]
    if decision.stage in ("waiting", "suspended") and not decision.stalled:
        essential = [t for t in essential if t.reason in LASTING]  # the rest may be over when the job's turn comes
    elif not decision.training:
        essential = []
    if essential:
        out.set("Ready", False, _APPLY_ERRORS[essential[0].reason][0], " ".join(describe_apply_errors(essential)))
        return
    if not decision.training:
        words = STAGE_WORDS[decision.stage]
        as_wanted = decision.stage in ("waiting", "suspended", "complete") and not decision.stalled
        reason = words.phase if as_wanted or decision.stage == "failed" else words.reason
        out.set("Ready", as_wanted, reason, decision.message or words.message)
        return
    wanted = ("SyncerReady", "QuorumMet") if view.here.syncer else ("HubReachable",)
    for kind in wanted:
        row = out.found.get(kind)
        if row is not None and row["status"] != "True" and row["reason"] != "Finishing":
            reason = row["reason"] if kind != "SyncerReady" else f"Syncer{row['reason']}"
            out.set("Ready", False, str(reason), str(row["message"]))
            return
    phase = view.job_phase
    if phase == JobPhase.HOLDING:  # with a quorum: for something else
        why = (view.document and view.document.message) or "the syncer holds"
        said = f"Merges wait: {why}. Learners continue, up to sync.staleness.maxSteps."
        out.set("Ready", False, "Holding", said)
        return
    waits = " The syncer is changed last; it waits until learners here are done." if found.syncer_waits else ""
    rolling = "".join(f" Region {name}: {said}." for name, said in sorted(found.rollout.regions.items()))
    if phase in FINISHING_PHASES:
        out.set("Ready", True, "Finishing", "Learners offer their last work, then the model is evaluated.")
    else:
        out.set("Ready", True, "Training", f"Learners train, and their work is merged.{rolling}{waits}")


def _decide_progress(view: View, found: TurnFindings, out: ConditionSet) -> None:
    """The two conditions of kstatus, from which Flux, `helm --wait` and others tell what is under way from what
    waits for a person."""
    ready, stage = out.found["Ready"], found.decision.stage
    refused = ready["status"] == "False" and ready["reason"] in JOB_REFUSED_REASONS
    if refused and ready["reason"] in _TRIED_AGAIN:
        known = view.is_true("Stalled") and view.condition("Stalled").get("reason") == ready["reason"]
        lasts = known or view.seconds(Fact.APPLY_REFUSED) >= STALLED_SECONDS
        refused = lasts and ready["reason"] != "QuotaExceeded"
    stalled = refused or stage == "failed" or bool(found.decision.stalled)
    reason = found.decision.stalled or ready["reason"]
    out.set("Stalled", stalled, reason if stalled else "NotStalled", ready["message"] if stalled else "")
    starts = found.decision.training and ready["status"] == "False" and view.job_phase in ("", JobPhase.WAITING)
    rolls = bool(found.rollout.regions) or found.syncer_waits
    moves = not stalled and (starts or rolls or stage in ("suspending", "restarting", "finishing", "failing"))
    out.set("Reconciling", moves, str(ready["reason"]) if moves else "AsWanted", "")
