"""What to do about one job now, from what is observed: data in, data out.

Theory of operation. A turn reads what there is (view.py), places the job (job.py), finds the
stage of its life (lifecycle.py), looks after pods (replacement.py, rollout.py, node_loss.py),
says which objects there shall be (manifests.py, desired.py), and writes all of that down as
status (regions.py, decide.py, conditions.py) and Events (transitions.py). Everything is decided
by level, from what is there now: a turn that was lost, or an operator that was away, changes
nothing but the time at which something is done. ``PlanMemory`` holds counts and patience only.

The order in which a job comes to be: finalizer, settings, claim, services, Secrets; when the
watches show settings and claim as this job's own, what holds pods. A foreign object of one
of those names therefore stops the job before a pod could mount it.

A job that cannot be taken as it stands (its spec is invalid, asks for what this version does
not do, or its podTemplates contradict what makes it work) keeps what it had: nothing is
rendered anew, and status says why.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from diloco_operator import names
from diloco_operator.job import Job, Place, place, read, stamp, unsupported
from diloco_operator.model import Delete, Object, Observed, Plan, PlanMemory, PlanSettings, Ref
from diloco_operator.objects import pods
from diloco_operator.objects.manifests import Images, reachable_at
from diloco_operator.plan import lifecycle, regions
from diloco_operator.plan.conditions.conditions import Conditions
from diloco_operator.plan.conditions.decide import Findings, judge
from diloco_operator.plan.conditions.region_conditions import drained
from diloco_operator.plan.desired import Wanted, want
from diloco_operator.plan.lifecycle import Course
from diloco_operator.plan.pods import node_loss, replacement, rollout
from diloco_operator.plan.transitions import Story, tell
from diloco_operator.plan.view import PATIENCE, View
from diloco_operator.status import JobStatus, Progress, SyncerStatus
from diloco_protocol.spec.base import Spec
from diloco_protocol.vocabulary import FINALIZER, FINISHING_PHASES, JobPhase

STEADY, SOON, BRIEFLY = 20.0, 2.0, 0.5
"""Seconds to the next turn: nothing goes on; something does; the next object can be made at once."""
POLL, POLL_SOON, POLL_LATER = 10.0, 1.0, 5.0
"""Seconds between calls to the syncer: nothing goes on; something does; it has gone on for long."""
LONG = 120.0
FALLEN_SECONDS = 60.0
"""Where learners tell of merges: a smaller number that stays for so long is no older page, but a store that
was set back."""
LOSS = "the last loss"
"""Under this name memory has when it was, and what."""


def plan(observed: Observed, memory: PlanMemory, settings: PlanSettings) -> Plan:
    """The plan for one job. ``memory`` is changed in place. Raises nothing for a bad job."""
    job = read(observed.job)
    if job.deleted_at is not None:
        return _deleted(observed, memory, settings, job)
    if job.document is None:
        return _invalid(observed, memory, job)
    view = View(observed, memory, settings, job, place(job.spec, settings.cluster))
    return _planned(view)


def _planned(view: View) -> Plan:
    job = view.job
    refused = _refused(job, view.here)
    course = lifecycle.course(view)
    starts = course.training and not view.begun and refused is None
    found = Findings(course, regions.Report(), apply_errors=view.observed.apply_errors, refused=refused)
    found.nodes = node_loss.watch(view)
    lost = replacement.Outcome()
    replaced = _replacements(view)
    if course.training and view.begun:
        lost = replacement.watch(view)
        _count(view, replaced, lost)
        if refused is None:
            found.rolled = rollout.roll(view)
    else:
        replacement.rest(view)
    found.regions = regions.report(view, course, found.rolled, found.nodes)
    found.failure = _failure(view, course, lost, replaced)
    if found.failure is not None:
        course = found.course = lifecycle.course(view, found.failure[1])
        found.regions = regions.report(view, course, found.rolled, found.nodes)
    wanted = _wanted(view, course, refused is not None, starts)
    found.held_back = wanted.held_back
    verdicts = judge(view, found)
    status = _status(view, found, verdicts, replaced, wanted.with_pods)
    deletes = [*found.nodes.deletes, *wanted.deletes]
    if found.failure is None:
        deletes += [*lost.deletes, *found.rolled.deletes]
    ttl = lifecycle.expired(view) if course.stage in ("complete", "failed") else None
    busy = _busy(view, found)
    events = [*lost.events, *found.nodes.events, *found.rolled.events, *tell(view, found, verdicts, status)]
    return Plan(
        finalizer=FINALIZER in job.finalizers or view.here.anything,
        secrets=tuple(wanted.secrets),
        apply=tuple(wanted.apply),
        calls=tuple([*lost.calls, *course.calls]),
        deletes=tuple(_once(deletes)),
        status=status,
        urgent=_urgent(job.status, status),
        events=tuple(events),
        delete_job=ttl is not None and ttl <= 0,
        wake_in=_wake_in(view, found, ttl, busy, wanted),
        poll_syncer=busy,
    )


# ------------------------------------------------------------------ jobs that are refused or go


def _refused(job: Job, here: Place) -> tuple[str, str] | None:
    """Reason and message of why the job is not taken as it stands."""
    if not here.anything:
        return "NotPlaced", here.elsewhere[0].upper() + here.elsewhere[1:] + "."
    missing = unsupported(job.spec)
    if missing:
        return "Unsupported", "; ".join(missing) + "."
    contradictions = pods.refusals(job.spec)
    if contradictions:
        return "PodTemplate", "; ".join(map(str, contradictions)) + "."
    return None


def _invalid(observed: Observed, memory: PlanMemory, job: Job) -> Plan:
    """The API server has let a spec pass that the models refuse. Nothing else is touched."""
    before = list(job.status.get("conditions") or [])
    conditions = Conditions(before, job.generation, observed.now)
    message = "; ".join(job.problems[:10])
    if len(job.problems) > 10:
        message += f"; and {len(job.problems) - 10} more"
    conditions.say("Ready", False, "InvalidSpec", message)
    conditions.keep()
    ended = any(c.get("status") == "True" and c.get("type") in ("Complete", "Failed") for c in before)
    phase = job.status.get("phase") if ended else "Invalid"
    status = {**job.status, "observedGeneration": job.generation, "phase": phase, "conditions": conditions.rows()}
    story = Story(memory.told)
    old: Object = next((c for c in before if c.get("type") == "Ready"), {})
    was = str(old.get("message")) if old.get("reason") == "InvalidSpec" else ""
    story.turn("invalid", was, message, "Warning", "InvalidSpec", message)
    return Plan(
        finalizer=FINALIZER in job.finalizers,
        status=status,
        urgent=_urgent(job.status, status),
        events=tuple(story.events),
        wake_in=STEADY,
        poll_syncer=POLL,
    )


def _deleted(observed: Observed, memory: PlanMemory, settings: PlanSettings, job: Job) -> Plan:
    """Learners are told first; then the volume goes, if it is to; then the job is let go, and what it owns
    is collected. Works for a spec that cannot be read, too."""
    if FINALIZER not in job.finalizers:
        return Plan(finalizer=False)
    here = place(job.spec, settings.cluster) if job.document is not None else Place(True, ())
    view = View(observed, memory, settings, job, here)
    course = lifecycle.course(view)
    nodes = node_loss.watch(view) if job.document is not None else node_loss.Lost()
    replacement.rest(view)
    deletes: list[Delete] = list(nodes.deletes)
    done = lifecycle.deletion_done(course)
    ref = names.claim(job.name)
    claim = view.live(ref)
    if done and claim is not None and _volume_goes(job, here):
        done = "deletionTimestamp" in claim["metadata"]
        if not done:
            why = "the job was deleted, and syncer.storage.onDelete is Delete"
            deletes.append(Delete(ref, claim["metadata"]["uid"], why))
    conditions = Conditions(list(job.status.get("conditions") or []), job.generation, observed.now)
    conditions.say("Ready", False, "Deleting", course.message or "Its objects go.")
    conditions.keep()
    status = {**job.status, "observedGeneration": job.generation, "phase": "Deleting", "conditions": conditions.rows()}
    story = Story(memory.told)
    was = "deleting" if job.status.get("phase") == "Deleting" else ""
    story.turn(
        "end", was, "deleting", "Normal", "Deleting", "The job is deleted: its learners are told, then its objects go."
    )
    return Plan(
        finalizer=not done,
        calls=tuple(course.calls),
        deletes=tuple(deletes),
        status=status,
        urgent=_urgent(job.status, status),
        events=tuple(story.events),
        wake_in=BRIEFLY,
        poll_syncer=POLL_SOON,
    )


def _volume_goes(job: Job, here: Place) -> bool:
    """By the letter, so that no doubt about the rest of the spec deletes a volume."""
    syncer = job.raw_spec.get("syncer")
    storage = syncer.get("storage") if isinstance(syncer, dict) else None
    if not isinstance(storage, dict) or not here.syncer:
        return False
    return storage.get("onDelete") == "Delete" and not storage.get("claimName") and not storage.get("uri")


# ------------------------------------------------------------------ parts of a turn


def _wanted(view: View, course: Course, refused: bool, starts: bool) -> Wanted:
    before = view.job.status.get("image") or {}
    images = Images(
        str(before.get("syncer") or view.settings.syncer_image), str(before.get("worker") or view.settings.worker_image)
    )
    if course.stage == "waiting" or (refused and not view.begun):
        return Wanted(images)
    return want(view, course, images, refused, starts)


def _failure(view: View, course: Course, lost: replacement.Outcome, replaced: dict[str, int]) -> tuple[str, str] | None:
    """Reason and message of why the job fails now; None: it does not, or it has ended already."""
    if not course.training or not view.begun:
        return None
    if lost.failure is not None:
        return lost.failure
    limit = view.job.spec.failure_policy.max_replacements
    # What is known of merges is seconds old: an answer from after the last loss may tell of one.
    if replaced["sinceMerge"] > limit and view.known_at > view.memory.since.get(LOSS, 0.0):
        cause = view.memory.told.get(LOSS, "")
        return (
            "TooManyReplacements",
            f"{replaced['sinceMerge']} replacements since the last merge did not help "
            f"(failurePolicy.maxReplacements: {limit}). The last one: {cause or 'not known any more'}",
        )
    return None


def _replacements(view: View) -> dict[str, int]:
    """status.replacements, set back if there was a merge since. A number of merges that has fallen (the
    syncer's store was set back) is what merges are counted from then; a learner's page may be older than
    that of one that is gone, so without the syncer it must last."""
    before = view.job.status.get("replacements") or {}
    found = {key: int(before.get(key) or 0) for key in ("total", "sinceMerge", "merges")}
    merges = view.merges
    fell = merges is not None and merges < found["merges"]
    lasts = view.lasting("merges fell", fell)
    if merges is not None and merges > found["merges"] and found["sinceMerge"]:
        found["sinceMerge"], found["merges"] = 0, merges
    elif merges is not None and fell and (view.here.syncer or lasts >= FALLEN_SECONDS):
        found["merges"] = merges
    return found


def _count(view: View, replaced: dict[str, int], lost: replacement.Outcome) -> None:
    if not lost.counted:
        return
    if not replaced["sinceMerge"]:
        known = int((view.job.status.get("progress") or {}).get("merges") or 0)
        replaced["merges"] = max(known, view.merges or 0)
    replaced["total"] += lost.counted
    replaced["sinceMerge"] += lost.counted
    view.memory.since[LOSS], view.memory.told[LOSS] = view.now, lost.cause


def _once(deletes: list[Delete]) -> list[Delete]:
    """One order per object; a forced one first."""
    found: dict[tuple[Ref, str], Delete] = {}
    for delete in sorted(deletes, key=lambda d: not d.force):
        found.setdefault((delete.ref, delete.uid), delete)
    return list(found.values())


# ------------------------------------------------------------------ status


def _status(view: View, found: Findings, verdicts: Conditions, replaced: dict[str, int], with_pods: bool) -> Object:
    job, before, document = view.job, view.job.status, view.document
    started = before.get("startTime") or (stamp(view.now) if with_pods else None)
    image = before.get("image") or {}
    if started:
        image = {
            "syncer": str(image.get("syncer") or view.settings.syncer_image),
            "worker": str(image.get("worker") or view.settings.worker_image),
        }
    ended = any(verdicts.truth(kind) == "True" for kind in ("Complete", "Failed"))
    completed = before.get("completionTime") or stamp(view.now)
    status: dict[str, Any] = {
        "observedGeneration": job.generation,
        "phase": _phase(view, found),
        "startTime": started,
        "completionTime": completed if ended else None,
        "conditions": verdicts.rows(),
        "syncer": _syncer(view),
        "progress": _progress(view) or _carried(Progress, before.get("progress")),
        "regions": found.regions.rows,
        "image": image or None,
        "replacements": replaced if any(replaced.values()) else None,
        "report": _report(view) or before.get("report"),
    }
    if view.here.syncer:
        active = ((document or {}).get("quorum") or {}).get("active")
        if document is not None or not found.course.training:
            status["learners"] = f"{found.regions.in_quorum}/{job.spec.slots}"
            status["quorum"] = f"{active or 0}/{view.required}"
        else:  # nobody knows: what was last known stands
            status["learners"] = before.get("learners") or f"0/{job.spec.slots}"
            status["quorum"] = before.get("quorum") or f"0/{view.required}"
    elif view.here.regions:
        status["learners"] = f"{found.regions.in_quorum}/{sum(r.learners for r in view.here.regions)}"
    given = {key: value for key, value in status.items() if value is not None}
    # Through the model: what it does not know, the API server would prune in silence.
    return JobStatus.model_validate(given).model_dump(mode="json", by_alias=True, exclude_none=True)


def _carried(model: type[Spec], value: Any) -> Object | None:
    """A part of the job's status that stands as it is; what another version wrote and this one does not
    know is left out."""
    try:
        return model.model_validate(value).model_dump(mode="json", by_alias=True, exclude_none=True)
    except ValidationError:
        return None


def _phase(view: View, found: Findings) -> str:
    stage = found.course.stage
    if stage != "running":
        return {
            "waiting": "Suspended",
            "suspending": "Suspending",
            "suspended": "Suspended",
            "restarting": "Starting",
            "finishing": "Finishing",
            "complete": "Complete",
            "failing": "Failed",
            "failed": "Failed",
            "deleting": "Deleting",
        }[stage]
    if not view.begun:
        return "Pending"
    said = view.said
    if not view.here.syncer:
        if found.regions.in_quorum:
            return "Running"
        return "Holding" if drained(view) else "Starting"
    if said in FINISHING_PHASES:
        return "Finishing"
    if said in (JobPhase.TRAINING, JobPhase.HOLDING):
        return "Running" if said == JobPhase.TRAINING else "Holding"
    before = str(view.job.status.get("phase") or "")
    if said == "" and before in ("Running", "Holding", "Finishing"):
        syncer = view.pod_of("syncer")
        works = syncer is not None and syncer.alive and syncer.ready
        return before if works or view.silent_for < PATIENCE else "Holding"
    return "Starting"


def _syncer(view: View) -> Object | None:
    if not view.here.syncer:
        return {"address": reachable_at(view.job, view.here)} if view.here.regions else None
    document = view.document
    found: Object = dict(_carried(SyncerStatus, view.job.status.get("syncer")) or {})
    found["address"] = reachable_at(view.job, view.here)
    image = regions.image_of(view, names.syncer_deployment(view.job.name), "syncer")
    if image:
        found["image"] = image
    if document is not None:
        found["epoch"] = document.get("epoch")
        found["step"] = max((slot.step for slot in view.slots), default=0)
    return found


def _progress(view: View) -> Object | None:
    document = view.document
    if not view.here.syncer:
        return _progress_of_learners(view)
    if document is None:
        return None
    losses = [slot.loss for slot in view.slots if slot.loss is not None]
    scored = document.get("eval_loss") or []
    loss = scored[-1][1] if scored else sum(losses) / len(losses) if losses else None
    return {
        "tokens": (document.get("tokens") or {}).get("trained"),
        "step": max((slot.step for slot in view.slots), default=0),
        "merges": document.get("merges"),
        "loss": loss,
        # It falls by itself while nothing happens, and a status is not written for that.
        "goodput": None if document.get("goodput") is None else round(document["goodput"], 2),
    }


def _progress_of_learners(view: View) -> Object | None:
    """What is known of it in a cluster without the syncer."""
    told = [page for page in view.pages if page.get("slot") is not None]
    steps = [page["step"] for page in told if isinstance(page.get("step"), int)]
    losses = [page["loss"] for page in told if isinstance(page.get("loss"), int | float)]
    if not steps and view.merges is None:
        return None
    before = _carried(Progress, view.job.status.get("progress")) or {}
    return {
        "step": max(steps, default=before.get("step")),
        "merges": before.get("merges") if view.merges is None else view.merges,
        "loss": sum(losses) / len(losses) if losses else before.get("loss"),
    }


def _report(view: View) -> Object | None:
    """Scalars and groups of scalars; lists stay in report.json."""
    report = view.observed.report
    if report is None:
        return None
    found = {}
    for key, value in report.items():
        if isinstance(value, dict):
            found[key] = {k: v for k, v in value.items() if not isinstance(v, dict | list)}
        elif value is not None and not isinstance(value, list):
            found[key] = value
    return found


def _urgent(before: Object, now: Object) -> bool:
    """Whether anything but progress has changed."""

    def steady(status: Object) -> Object:
        kept = {k: v for k, v in status.items() if k != "progress" and v not in (None, {}, [], "")}
        if isinstance(kept.get("syncer"), dict):
            kept["syncer"] = {k: v for k, v in kept["syncer"].items() if k != "step"}
        kept["regions"] = [{k: v for k, v in row.items() if v not in (None, "")} for row in kept.get("regions") or []]
        return kept

    return steady(before) != steady(now)


# ------------------------------------------------------------------ when to look again


def _busy(view: View, found: Findings) -> float:
    """Seconds between calls to the syncer, which says how much is going on."""
    course, memory = found.course, view.memory
    going = course.stage in ("suspending", "restarting", "finishing", "failing")
    if course.training and view.begun:
        whole = found.regions.in_quorum >= found.regions.wanted
        places = [view.place(r.name, i) for r in view.here.regions for i in range(r.learners + r.spares)]
        ready = {pod.name for pod in view.pods if pod.ready}
        going = (
            not whole
            or not ready.issuperset(places)
            or bool(found.rolled.regions)
            or bool(memory.followed)
            or found.held_back
            or any(view.leaving(pod) for pod in view.pods)
            or view.said not in (JobPhase.TRAINING, "")
            or (view.here.syncer and view.document is None)
        )
    lasts = view.lasting("going on", going)
    if not going:
        return POLL
    return POLL_SOON if lasts < LONG else POLL_LATER


def _wake_in(view: View, found: Findings, ttl: float | None, busy: float, wanted: Wanted) -> float:
    soonest = STEADY if busy == POLL else SOON if busy == POLL_SOON else 2 * POLL_LATER
    if wanted.more:
        soonest = BRIEFLY
    if ttl is not None:
        soonest = min(soonest, max(ttl, BRIEFLY))
    if not math.isinf(found.nodes.wake_in):
        soonest = min(soonest, max(found.nodes.wake_in, BRIEFLY))
    patience = view.job.spec.failure_policy.region_lost_seconds
    for since in found.regions.lost.values():
        left = since + patience - view.now
        if left > 0:
            soonest = min(soonest, max(left, BRIEFLY))
    return soonest
