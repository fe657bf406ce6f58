"""The status of a DiLoCoJob that a turn writes: whole, from what the turn has found.

Numbers that only the syncer knows are kept from the last status while it cannot be asked, so that
an operator that restarts changes nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from diloco_operator import names
from diloco_operator.job import rfc3339
from diloco_operator.model import Object
from diloco_operator.objects.manifests import external_address, sync_address
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.conditions.decide import TurnFindings
from diloco_operator.plan.conditions.region_conditions import hub_has_drained
from diloco_operator.plan.desired import job_release, own_release
from diloco_operator.plan.durability import claim_is_going, find_lost_store, known_merges
from diloco_operator.plan.lifecycle import STAGE_WORDS
from diloco_operator.plan.regions import image_of
from diloco_operator.plan.view import ANSWER_PATIENCE, View
from diloco_operator.status_models import JobStatus, Progress, SyncerStatus
from diloco_protocol.spec.base import Spec
from diloco_protocol.vocabulary import FINISHING_PHASES, JobPhase


def build_status(
    view: View, found: TurnFindings, conditions: ConditionSet, replacements: Object, with_pods: bool
) -> Object:
    """The whole status, as the API server takes it. ``with_pods``: this turn applies something that holds
    pods, so the job has started."""
    job, before, document = view.job, view.job.status, view.document
    started = before.get("startTime") or (rfc3339(view.now) if with_pods else None)
    ended = any(conditions.status_of(kind) == "True" for kind in ("Complete", "Failed"))
    completed = before.get("completionTime") or rfc3339(view.now)
    status: dict[str, Any] = {
        "observedGeneration": job.generation,
        "phase": _phase(view, found),
        "startTime": started,
        "drain": found.decision.drain or None,
        "completionTime": completed if ended else None,
        "conditions": conditions.rows(),
        "syncer": _syncer_status(view),
        "progress": _progress(view) or _keep_part(Progress, before.get("progress")),
        "regions": found.regions.rows,
        "release": _release(view) if started else before.get("release") or None,
        "output": view.output,
        "replacements": replacements if any(replacements.values()) else None,
        "report": (_report(view) or before.get("report")) if ended else None,
    }
    if view.here.syncer:
        if document is not None or not found.decision.learners_stay:
            active = 0 if document is None else document.quorum.active
            status["learners"] = f"{found.regions.in_quorum}/{job.spec.slots}"
            status["quorum"] = f"{active}/{view.required}"
        else:  # only the syncer knows them: those of the last status stand
            status["learners"] = before.get("learners") or f"0/{job.spec.slots}"
            status["quorum"] = before.get("quorum") or f"0/{view.required}"
    elif view.here.regions:
        status["learners"] = f"{found.regions.in_quorum}/{sum(r.learners for r in view.here.regions)}"
    given = {key: value for key, value in status.items() if value is not None}
    # Through the model: what it does not know, the API server would prune in silence.
    return JobStatus.model_validate(given).model_dump(mode="json", by_alias=True, exclude_none=True)


def _release(view: View) -> Object:
    """The release that the job has, and what else ``spec.release`` could take it to."""
    release, own = job_release(view), own_release(view)
    newer = f"{own.operator}: {own.syncer}, {own.worker}" if release != own else None
    return {**asdict(release), "newer": newer}


def _keep_part(model: type[Spec], value: Any) -> Object | None:
    """A part of the job's status as it is; None if this version's model does not take it."""
    try:
        return model.model_validate(value).model_dump(mode="json", by_alias=True, exclude_none=True)
    except ValidationError:
        return None


def _phase(view: View, found: TurnFindings) -> str:
    """``status.phase``: the stage, or of a running job the syncer's phase."""
    if not found.decision.training:
        return STAGE_WORDS[found.decision.stage].phase
    if not view.begun:
        return "Pending"
    phase = view.job_phase
    if not view.here.syncer:
        if found.regions.in_quorum:
            return "Running"
        return "Holding" if hub_has_drained(view) else "Starting"
    if phase in FINISHING_PHASES:
        return "Finishing"
    if phase in (JobPhase.TRAINING, JobPhase.HOLDING):
        return "Running" if phase == JobPhase.TRAINING else "Holding"
    before = str(view.job.status.get("phase") or "")
    if phase == "" and before in ("Running", "Holding", "Finishing"):
        syncer = view.pod_of("syncer")
        works = syncer is not None and syncer.alive and syncer.ready
        return before if works or view.unanswered_seconds < ANSWER_PATIENCE else "Holding"
    return "Starting"


def _syncer_status(view: View) -> Object | None:
    if not view.here.syncer:
        return {"address": sync_address(view.job, view.here)} if view.here.regions else None
    document = view.document
    found: Object = dict(_keep_part(SyncerStatus, view.job.status.get("syncer")) or {})
    found["address"] = sync_address(view.job, view.here)
    found["external"] = external_address(view.live(names.syncer_service(view.job.name))) or None
    image = image_of(view, names.syncer_deployment(view.job.name), "syncer")
    if image:
        found["image"] = image
    if document is not None:
        found["epoch"], found["step"] = document.epoch, document.step
        claim = view.live(names.claim(view.job.name))
        if claim is not None and not claim_is_going(view):
            found["volume"] = str(claim["metadata"]["uid"])
        found["merges"] = max(document.merges, known_merges(view) if find_lost_store(view) else 0) or None
    return found


def _progress(view: View) -> Object | None:
    document = view.document
    if not view.here.syncer:
        return _progress_of_learners(view)
    if document is None:
        return None
    before = _keep_part(Progress, view.job.status.get("progress")) or {}
    return {
        "tokens": document.tokens.trained,
        "step": document.step,
        "percent": None if document.progress is None else int(100 * document.progress),
        "secondsLeft": None if document.seconds_left is None else round(document.seconds_left),
        "merges": document.merges,
        "notMerged": document.tokens.pending,
        "storedAt": before.get("storedAt") if document.merges == before.get("merges") else rfc3339(view.now),
        # A syncer that began again knows none, after the job's end for good.
        "loss": document.loss if document.loss is not None else before.get("loss"),
        # It falls by itself while nothing happens, and a status is not written for that.
        "goodput": None if document.goodput is None else round(document.goodput, 2),
    }


def _progress_of_learners(view: View) -> Object | None:
    """``status.progress`` in a cluster without the syncer: what learners here know."""
    members = [page for page in view.pages if page.slot is not None]
    steps = [page.step for page in members if page.step is not None]
    losses = [page.loss for page in members if page.loss is not None]
    if not steps and view.merges is None:
        return None
    before = _keep_part(Progress, view.job.status.get("progress")) or {}
    return {
        "step": max(steps, default=before.get("step")),
        "merges": before.get("merges") if view.merges is None else view.merges,
        "loss": sum(losses) / len(losses) if losses else before.get("loss"),
    }


def _report(view: View) -> Object | None:
    """``status.report``: report.json without its lists and deeper mappings, and without what ``status.output`` says."""
    if view.observed.report is None:
        return None
    found = {}
    for key, value in view.observed.report.model_dump(mode="json", exclude={"output"}).items():
        if isinstance(value, dict):
            found[key] = {k: v for k, v in value.items() if v is not None and not isinstance(v, dict | list)}
        elif value is not None and not isinstance(value, list):
            found[key] = value
    return found


def differs_beyond_progress(before: Object, now: Object) -> bool:
    """Whether two statuses differ in more than progress; such a status is written at once."""

    def steady(status: Object) -> Object:
        kept = {k: v for k, v in status.items() if k != "progress" and v not in (None, {}, [], "")}
        if isinstance(kept.get("syncer"), dict):
            kept["syncer"] = {k: v for k, v in kept["syncer"].items() if k not in ("step", "merges")}
        kept["regions"] = [{k: v for k, v in row.items() if v not in (None, "")} for row in kept.get("regions") or []]
        return kept

    return steady(before) != steady(now)
