"""What to do about one job now: everything observed goes in, everything to be done comes out.

One turn is one call of ``plan_job``. It reads nothing but its arguments and does nothing itself. It decides by level,
from what is there now: a turn that was missed, or an operator that was away, only delays what is done.

The steps of a turn, with their files:

1. ``job.py`` reads the DiLoCoJob and finds what of it is placed on this cluster. A job that is being
   deleted or is invalid is planned here and ends the turn.
2. ``view.py`` and ``pod_status.py`` read the objects, pods, and the syncer's and learners' answers.
3. ``lifecycle.py`` decides the stage of the job's life, such as running or suspending.
4. ``pods/`` looks after pods: on lost nodes, gone or broken, with an old template.
5. ``regions.py`` says how each region is.
6. ``desired.py`` says which objects there shall be; ``objects/`` renders them.
7. ``conditions/`` decides the conditions, ``job_status.py`` builds the status.
8. ``transitions.py`` makes an Event of each difference between the old status and the new one.

What happens when a pod is deleted, file by file: docs/what-happens-when.md.

A job that cannot be taken as it stands keeps what it had, and status says why: its spec asks for what
this version does not do, or its podTemplates contradict what makes it work.
"""

from __future__ import annotations

import math

from diloco_operator import names
from diloco_operator.job import Job, Placement, find_unsupported, place_job, read_job
from diloco_operator.model import (
    TERMINATING,
    CountedFailure,
    Delete,
    Fact,
    JobPlan,
    Object,
    Observed,
    PlaceFailures,
    PlanMemory,
    PlanSettings,
    Ref,
    Topic,
)
from diloco_operator.objects import pods
from diloco_operator.plan import durability, lifecycle
from diloco_operator.plan.conditions.condition_set import ConditionSet
from diloco_operator.plan.conditions.decide import TurnFindings, decide_conditions
from diloco_operator.plan.desired import (
    DesiredObjects,
    desired_objects,
    find_held_edit,
    find_reshaped_learners,
    objects_to_try,
)
from diloco_operator.plan.job_status import build_status
from diloco_operator.plan.lifecycle import LifecycleDecision
from diloco_operator.plan.pods import node_loss, repeated_errors, replacement, rollout
from diloco_operator.plan.regions import RegionReport, report_regions
from diloco_operator.plan.transitions import EventLog, transition_events
from diloco_operator.plan.view import View
from diloco_protocol.vocabulary import FINALIZER, JobPhase

STEADY, SOON, BRIEFLY = 20.0, 2.0, 0.5
"""Seconds to the next turn: nothing is going on; something is; the next object can be made at once."""
POLL, POLL_SOON, POLL_LATER = 10.0, 1.0, 5.0
"""Seconds between calls to the syncer: nothing is going on; something is; it has been for ``LONG``."""
LONG = 120.0
LET_GO_SECONDS = 300.0
"""A deleted job waits so long for its volume to be deleted, where that is refused; then it goes without."""
FALLEN_SECONDS = 60.0
"""In a cluster without the syncer, a number of merges that stays smaller for so long means that the
syncer's store was set back; for a shorter time it may come from an older status page."""


def plan_job(observed: Observed, memory: PlanMemory, settings: PlanSettings) -> JobPlan:
    """The plan for one job. ``memory`` is changed in place. Raises nothing for a bad job."""
    job = read_job(observed.job)
    if job.deleted_at is not None:
        return _plan_deletion(observed, memory, settings, job)
    if job.document is None:
        return _plan_invalid(observed, memory, job)
    return _plan_readable(View(observed, memory, settings, job, here=place_job(job.spec, settings.cluster)))


def _plan_readable(view: View) -> JobPlan:
    """The plan for a job whose spec could be read and that is not being deleted."""
    if _namespace_terminates(view):
        return _plan_namespace_end(view)
    # Observe: the stage, pods and regions.
    found = TurnFindings(
        lifecycle.decide(view), RegionReport(), apply_errors=view.observed.apply_errors, refused=_refusal(view)
    )
    found.node_losses = node_loss.handle_lost_nodes(view)
    replacements, changes = _replacements(view, found.decision), replacement.PodChanges()
    if found.decision.training and view.begun:
        changes = replacement.track_pods(view)
        _count_losses(view, replacements, changes)
        if found.refused is None:
            found.rollout = rollout.advance_rollout(view)
    else:
        replacement.reset(view)
    found.regions = report_regions(view, found.decision, found.rollout, found.node_losses)
    # Decide: a failure changes the stage. Then objects and conditions.
    found.failure = _failure(view, found.decision, changes, replacements)
    if found.failure is not None:
        found.decision = lifecycle.decide(view, found.failure[1])
        found.regions = report_regions(view, found.decision, found.rollout, found.node_losses)
    desired = _desired(view, found)
    found.syncer_waits = desired.syncer_waits
    conditions = decide_conditions(view, found)
    # Write: one status, and the Events of what differs from the old one.
    status = build_status(view, found, conditions, replacements, with_pods=desired.with_pods)
    events = [*changes.events, *found.node_losses.events, *found.rollout.events]
    events += transition_events(view, found, conditions, status)
    deletes = [*found.node_losses.deletes, *desired.deletes]
    if found.failure is None:
        deletes += [*changes.deletes, *found.rollout.deletes]
    ttl = lifecycle.seconds_to_live(view) if found.decision.stage in ("complete", "failed") else None
    poll = _poll_interval(view, found)
    return JobPlan(
        finalizer=FINALIZER in view.job.finalizers or view.here.anything,
        secrets=tuple(desired.secrets),
        apply=tuple(desired.apply),
        tries=tuple(desired.tries),
        calls=tuple([*changes.calls, *found.decision.calls]),
        deletes=tuple(_merge_deletes(deletes)),
        status=status,
        events=tuple(events),
        delete_job=ttl is not None and ttl <= 0,
        wants_fresh_view=view.wants_fresh,
        wake_in=_wake_in(view, found, ttl, poll, desired=desired),
        poll_syncer=poll,
    )


# ------------------------------------------------------------------ early ends of a turn


def _plan_invalid(observed: Observed, memory: PlanMemory, job: Job) -> JobPlan:
    """The plan for a spec that the API server has let pass and the models refuse: a status, and nothing else."""
    before = list(job.status.get("conditions") or [])
    message = "; ".join(job.problems[:10])
    if len(job.problems) > 10:
        message += f"; and {len(job.problems) - 10} more"
    ended = any(c.get("status") == "True" and c.get("type") in ("Complete", "Failed") for c in before)
    phase = str(job.status.get("phase") or "Invalid") if ended else "Invalid"
    status = _status_not_ready(job, observed.now, phase, "InvalidSpec", message=message)
    event_log = EventLog(memory)
    old: Object = next((c for c in before if c.get("type") == "Ready"), {})
    was = str(old.get("message")) if old.get("reason") == "InvalidSpec" else ""
    event_log.transition(Topic.SPEC_INVALID, was, message, "Warning", "InvalidSpec", message)
    return JobPlan(
        finalizer=FINALIZER in job.finalizers,
        status=status,
        events=tuple(event_log.events),
        wake_in=STEADY,
        poll_syncer=POLL,
    )


def _status_not_ready(job: Job, now: float, phase: str, reason: str, message: str) -> Object:
    """The job's status as it was, but for the phase and Ready."""
    conditions = ConditionSet(list(job.status.get("conditions") or []), job.generation, now)
    conditions.set("Ready", False, reason, message)
    wrong = reason == "InvalidSpec"
    conditions.set("Stalled", wrong, reason if wrong else "NotStalled", message if wrong else "")
    conditions.set("Reconciling", not wrong, "AsWanted" if wrong else reason)
    conditions.keep_undecided()
    return {**job.status, "observedGeneration": job.generation, "phase": phase, "conditions": conditions.rows()}


def _namespace_terminates(view: View) -> bool:
    """Whether the job's namespace is being deleted, by what was refused in it. Changes the view's memory."""
    refused = any(error.reason == "terminating" for error in view.observed.apply_errors)
    refused = refused or any(TERMINATING in event.message for event in view.observed.cluster_events)
    view.memory.namespace_terminates = view.memory.namespace_terminates or refused
    return view.memory.namespace_terminates


def _plan_namespace_end(view: View) -> JobPlan:
    """The plan for a job whose namespace is being deleted, which deletes the job itself last: its learners hear of it
    now, and nothing is made any more, nor told in Events, which could not be written."""
    message = "The namespace is being deleted, and the job with it."
    status = _status_not_ready(view.job, view.now, "Deleting", "NamespaceTerminating", message=message)
    calls = lifecycle.announce(view, JobPhase.DELETED, "the job's namespace is being deleted")
    return JobPlan(FINALIZER in view.job.finalizers, calls=tuple(calls), status=status, poll_syncer=POLL_SOON)


def _plan_deletion(observed: Observed, memory: PlanMemory, settings: PlanSettings, job: Job) -> JobPlan:
    """The plan for a job that is being deleted, for a spec that cannot be read, too. The syncer tells its
    learners; then the volume is deleted, if ``onDelete`` says so; then the finalizer is removed, and
    Kubernetes collects what the job owns."""
    if FINALIZER not in job.finalizers:
        return JobPlan(finalizer=False)
    here = place_job(job.spec, settings.cluster) if job.document is not None else Placement(True, ())
    view = View(observed, memory, settings, job, here=here)
    decision = lifecycle.decide(view)
    losses = node_loss.handle_lost_nodes(view) if job.document is not None else node_loss.NodeLosses()
    replacement.reset(view)
    deletes: list[Delete] = list(losses.deletes)
    done = not decision.message  # nothing is waited for any more
    ref = names.claim(job.name)
    claim = view.live(ref)
    event_log = EventLog(memory)
    message, wake_in, poll = decision.message or "The job's objects are being removed.", BRIEFLY, POLL_SOON
    if done and claim is not None and "deletionTimestamp" not in claim["metadata"] and _deletes_volume(job, here):
        tried = view.observe(Fact.VOLUME_STAYS)
        refused = "; ".join(error.message.rstrip(".") for error in observed.apply_errors if error.ref == ref)
        done, wake_in, poll = tried >= LET_GO_SECONDS, min(STEADY, max(BRIEFLY, tried / 2)), STEADY
        stays = f"PersistentVolumeClaim {ref.name} cannot be deleted: {refused or 'its deletion is not answered'}"
        if refused:
            minutes = f"{LET_GO_SECONDS / 60:.0f} minutes"
            message = f"{stays}. The operator tries again; after {minutes} the job is removed without it."
        if done:
            said = f"{stays}. The job is removed, but the claim stays: delete it by hand."
            event_log.transition(Topic.VOLUME_STAYS, "", "stays", "Warning", "VolumeStays", said)
        else:
            why = "the job was deleted, and syncer.storage.onDelete is Delete"
            deletes.append(Delete(ref, claim["metadata"]["uid"], why))
    status = _status_not_ready(job, observed.now, "Deleting", "Deleting", message=message)
    was = "deleting" if job.status.get("phase") == "Deleting" else ""
    message = "The job is being deleted: its learners are informed, then its objects are removed."
    danger = durability.find_danger(view) if job.document is not None else None
    message += f" {danger.message}" if danger is not None else ""
    event_log.transition(Topic.JOB_END, was, "deleting", "Normal" if danger is None else "Warning", "Deleting", message)
    return JobPlan(
        finalizer=not done,
        calls=tuple(decision.calls),
        deletes=tuple(deletes),
        status=status,
        events=tuple(event_log.events),
        wants_fresh_view=view.wants_fresh,
        wake_in=wake_in,
        poll_syncer=poll,
    )


def _deletes_volume(job: Job, here: Placement) -> bool:
    """Whether ``onDelete`` is Delete for a volume that the operator made. Read from the raw spec: where other
    fields are wrong, the volume is deleted only if these say so to the letter."""
    syncer = job.raw_spec.get("syncer")
    storage = syncer.get("storage") if isinstance(syncer, dict) else None
    if not isinstance(storage, dict) or not here.syncer:
        return False
    return storage.get("onDelete") == "Delete" and not storage.get("claimName") and not storage.get("uri")


# ------------------------------------------------------------------ parts of a turn


def _refusal(view: View) -> tuple[str, str] | None:
    """Reason and message of why the job is not taken as it stands; None: it is."""
    if not view.here.anything:
        return "NotPlaced", view.here.elsewhere[0].upper() + view.here.elsewhere[1:] + "."
    if unsupported := find_unsupported(view.job.spec):
        return "Unsupported", f"{unsupported}."
    if contradictions := pods.template_refusals(view.job.spec):
        return "PodTemplate", "; ".join(map(str, contradictions)) + "."
    if reshaped := find_reshaped_learners(view):
        return "Unsupported", f"{reshaped}."
    held = find_held_edit(view)
    return ("UpgradeNeeded", held[0].upper() + held[1:]) if held else None


def _desired(view: View, found: TurnFindings) -> DesiredObjects:
    refused = found.refused is not None
    if refused and not view.begun:
        return DesiredObjects()
    if found.decision.stage == "waiting":
        return objects_to_try(view)
    return desired_objects(view, found.decision, refused)


def _failure(
    view: View, decision: LifecycleDecision, changes: replacement.PodChanges, replacements: Object
) -> tuple[str, str] | None:
    """Reason and message of why the job fails now; None: it does not, or it has ended already."""
    if not decision.training or not view.begun:
        return None
    if changes.failure is not None:
        return changes.failure
    left = lifecycle.seconds_to_deadline(view)
    if left is not None and left <= 0:
        return (
            "DeadlineExceeded",
            f"It has not ended within {view.job.spec.active_deadline_seconds} s of its start (activeDeadlineSeconds): "
            "raise that before you continue the job.",
        )
    limit, since_merge = view.job.spec.failure_policy.max_replacements, replacements["sinceMerge"]
    last = view.memory.last_counted_failure
    # The number of merges is seconds old: an answer from after the last failure may bring a merge.
    if since_merge > limit and view.merges_known_at > (last.at if last is not None else 0.0):
        cause = (last.cause if last is not None else "") or "not known any more"
        return (
            "TooManyReplacements",
            f"{replacements['place']} failed {since_merge} times since the last merge "
            f"(failurePolicy.maxReplacements: {limit}). The last failure: {cause}",
        )
    return repeated_errors.find_repeated_error(view, replacements)


def _replacements(view: View, decision: LifecycleDecision) -> Object:
    """``status.replacements``, with ``sinceMerge`` set to zero if there was a merge, or the job goes on after it had
    failed. A number of merges that fell, because the syncer's store was set back, is the new base of the count. In a
    cluster without the syncer it must last: the page of the one learner left may be older than that of one that is
    gone. An operator that restarts knows the failures of the place that had most."""
    before, memory = view.job.status.get("replacements") or {}, view.memory
    found: Object = {key: int(before.get(key) or 0) for key in ("total", "sinceMerge", "merges")}
    found["place"] = str(before["place"]) if before.get("place") else None
    if found["place"] and found["place"] not in memory.failures:
        memory.failures[found["place"]] = PlaceFailures(found["sinceMerge"], -math.inf)
    merges = view.merges
    fell = merges is not None and merges < found["merges"]
    lasts = view.observe(Fact.MERGES_FELL, holds=fell)
    if decision.stage == "restarting" or (decision.training and view.is_true("Failed")):
        found["sinceMerge"], found["place"] = 0, None
    elif merges is not None and merges > found["merges"] and found["sinceMerge"]:
        found["sinceMerge"], found["place"], found["merges"] = 0, None, merges
    elif merges is not None and fell and (view.here.syncer or lasts >= FALLEN_SECONDS):
        found["merges"] = merges
    if not found["sinceMerge"]:
        memory.failures.clear()
    return found


def _count_losses(view: View, replacements: Object, changes: replacement.PodChanges) -> None:
    """Count what was lost, and what failed: of each place alone, and at most once in the heartbeat's timeout."""
    memory, timeout = view.memory, view.job.spec.sync.heartbeat.timeout_seconds
    if changes.lost and not replacements["sinceMerge"]:
        known = int((view.job.status.get("progress") or {}).get("merges") or 0)
        replacements["merges"] = max(known, view.merges or 0)
    replacements["total"] += changes.lost
    for place, cause in changes.failed.items():
        before = memory.failures.get(place)
        if before is None or view.now - before.at > timeout:
            memory.failures[place] = PlaceFailures((before.count if before is not None else 0) + 1, view.now)
            memory.last_counted_failure = CountedFailure(view.now, cause)
            repeated_errors.count_error(view, place, changes.errors.get(place, ""))
    if changes.failed:
        worst = max(memory.failures, key=lambda place: memory.failures[place].count)
        replacements["place"], replacements["sinceMerge"] = worst, memory.failures[worst].count


def _merge_deletes(deletes: list[Delete]) -> list[Delete]:
    """One deletion per object; a forced one if there is one."""
    found: dict[tuple[Ref, str], Delete] = {}
    for delete in sorted(deletes, key=lambda d: not d.force):
        found.setdefault((delete.ref, delete.uid), delete)
    return list(found.values())


# ------------------------------------------------------------------ when to look again


def _poll_interval(view: View, found: TurnFindings) -> float:
    """Seconds until the next call to the syncer, by how much is going on."""
    decision, memory = found.decision, view.memory
    changing = decision.stage in ("suspending", "restarting", "finishing", "failing")
    if decision.training and view.begun:
        whole = found.regions.in_quorum >= found.regions.wanted
        ready = {pod.name for pod in view.pods if pod.ready}
        changing = (
            not whole
            or not ready.issuperset(places[0] for places in replacement.learner_places(view))
            or bool(found.rollout.regions)
            or bool(memory.successors)
            or found.syncer_waits
            or any(view.leaving(pod) for pod in view.pods)
            or view.job_phase not in (JobPhase.TRAINING, "")
            or (view.here.syncer and view.document is None)
        )
    lasts = view.observe(Fact.JOB_CHANGING, holds=changing)
    if not changing:
        return POLL
    return POLL_SOON if lasts < LONG else POLL_LATER


def _wake_in(view: View, found: TurnFindings, ttl: float | None, poll: float, desired: DesiredObjects) -> float:
    """Seconds until the next turn, if nothing else wakes the job."""
    waits = [found.node_losses.wake_in, *([ttl] if ttl is not None else [])]
    # What cannot be made now, as over a quota, is tried less and less often.
    refused = view.observe(Fact.APPLY_REFUSED, holds=bool(view.observed.apply_errors))
    waits += [refused / 2] if desired.more else []
    # What follows from a word of the status is done by the turn that reads it.
    waits += [BRIEFLY] if found.decision.drain != lifecycle.drain_of(view) else []
    deadline = lifecycle.seconds_to_deadline(view) if found.decision.training else None
    waits += [deadline] if deadline is not None else []
    patience = view.job.spec.failure_policy.region_lost_seconds
    waits += [left for since in found.regions.lost.values() if (left := since + patience - view.now) > 0]
    steady = STEADY if poll == POLL else SOON if poll == POLL_SOON else 2 * POLL_LATER
    return min(steady, max(min(waits), BRIEFLY))
