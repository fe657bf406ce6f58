"""Which objects the job shall have now, and which of those that are there shall go.

A job's objects come to be in this order: settings, claim, services and Secrets first; what holds pods when the cache
shows settings and claim as this job's own. So a foreign object of one of those names stops the job before a pod could
mount it. ``objects/manifests.py`` has the manifests, and says what "rendered for a generation" means.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco_operator import names
from diloco_operator.model import AwaitedSuccessor, Delete, Object, Ref, SecretWanted
from diloco_operator.objects import manifests
from diloco_operator.objects.manifests import Release, Rendering, Scale
from diloco_operator.plan import lifecycle
from diloco_operator.plan.lifecycle import LifecycleDecision
from diloco_operator.plan.pod_status import newest_message
from diloco_operator.plan.pods.rollout import syncer_change_waits
from diloco_operator.plan.view import View
from diloco_protocol.vocabulary import DOMAIN, LABEL_REGION, LABEL_ROLE

NUDGE_SECONDS = 60.0
"""A controller that could not make pods waits ever longer until it tries again. A changed annotation of
its object makes it try at once; this one changes every so many seconds."""
NUDGED = f"{DOMAIN}/nudged"


@dataclass(slots=True)
class DesiredObjects:
    """What is to be applied, made and deleted."""

    secrets: list[SecretWanted] = field(default_factory=list)
    apply: list[Object] = field(default_factory=list)
    tries: list[Object] = field(default_factory=list)  # what the job would begin with
    deletes: list[Delete] = field(default_factory=list)
    with_pods: bool = False  # something that holds pods is applied
    more: bool = False  # more is applied as soon as the cache shows what is applied now
    syncer_waits: bool = False  # the syncer's changed Deployment waits for the rollout of learners


def own_release(view: View) -> Release:
    """What this operator would take the job to."""
    settings = view.settings
    return Release(settings.release, view.job.spec.release, settings.syncer_image, settings.worker_image)


def job_release(view: View) -> Release:
    """The release that the job has: that which started it, unless ``spec.release`` has changed since."""
    kept, own = view.job.status.get("release") or {}, own_release(view)
    if not kept or kept.get("asked") != own.asked:
        return own
    known = {name: str(kept[name]) for name in ("operator", "syncer", "worker") if kept.get(name)}
    return replace(own, **known)


def find_held_edit(view: View) -> str:
    """Why an edit waits for an upgrade of the job; empty: it does not. It changes a pod template that another
    release made: rendered now, it would have the new release's flags with the old release's image."""
    release = job_release(view)
    if release.operator == view.settings.release:
        return ""
    for ref in manifests.pod_holders(view.job, view.here):
        before = manifests.stored_rendering(view.live(ref))
        origin = before.origin if before is not None and before.generation != view.job.generation else None
        if origin is None or origin.asked != release.asked:
            continue
        now = manifests.origin_of(view.job, view.here, ref, view.settings.release)
        if origin.template != now.template and origin.release != view.settings.release:
            return (
                f"this edit changes the pods of {ref.kind} {ref.name}, which release {origin.release} of the operator "
                f"made; it is {view.settings.release} now. `diloco upgrade {view.job.name}` moves the job to that "
                "release, with this edit; until then the job continues unchanged."
            )
    return ""


def find_reshaped_learners(view: View) -> str:
    """Why an edit waits for the end of the learners that there are: it changes of how many pods they are, and so which
    pod is whose. Empty: it does not."""
    for index, region in enumerate(view.job.spec.regions):
        asked, there = view.job.spec.group(region.name).pods, view.group_pods(region.name)
        if region in view.here.regions and asked != there:
            field = f"regions[{index}].pods" if region.pods is not None else "learners.pods"
            return (
                f"spec.{field} is {asked}, and learners of {there} pod{'s' * (there > 1)} are there (region "
                f"{region.name}): suspend the job, and resume it once they are gone; or set it back"
            )
    return ""


def desired_objects(view: View, decision: LifecycleDecision, refused: bool) -> DesiredObjects:
    """The objects of a job that is placed here. ``refused``: its spec is not taken, and it keeps what it had."""
    out = DesiredObjects()
    job, here, settings = view.job, view.here, view.settings
    ended = decision.stage in ("finishing", "complete", "failing", "failed")
    if not refused:
        missed = frozenset(pod.obstacle.secret for pod in view.pods if pod.obstacle is not None)
        out.secrets = manifests.wanted_secrets(job, here, missed)
        for manifest in manifests.manifests_without_pods(job, here, settings):
            out.apply.append(_as_it_was(view, manifest) if ended else manifest)
        if here.syncer:
            claim = manifests.claim_manifest(job, view.live(names.claim(job.name)))
            out.apply += [claim] if claim is not None else []
    keep = {names.ref_of(manifest) for manifest in out.apply}
    holders = manifests.pod_holders(job, here) if not refused else _rendered(view)
    out.syncer_waits = decision.training and not refused and _syncer_waits(view)
    for ref in holders:
        keep.add(ref)
        if view.live(ref) is None and not _ready_for(view, ref):
            out.more = True
            continue
        rendering = _rendering(view, decision, ref, ended or refused, out=out)
        replicas = _replicas(view, decision.scale, ref) if here.anything else view.replicas(ref) or 0
        manifest = manifests.pod_holder_manifest(job, ref, rendering, replicas)
        if _needs_nudge(view, ref):
            manifest["metadata"]["annotations"][NUDGED] = str(int(view.now // NUDGE_SECONDS))
        out.apply.append(manifest)
        out.with_pods = True
    if not refused:
        _prune(view, decision, keep, out)
    return out


def objects_to_try(view: View) -> DesiredObjects:
    """Claim and pod holders of a job that waits, as it would begin with them. What is wrong with them is found before
    the job's turn has come."""
    job, here, scale = view.job, view.here, lifecycle.full_scale(view)
    claim = manifests.claim_manifest(job, view.live(names.claim(job.name))) if here.syncer else None
    out = DesiredObjects(tries=[claim] if claim is not None else [])
    for ref in manifests.pod_holders(job, here):
        replicas = _replicas(view, scale, ref)
        out.tries.append(manifests.pod_holder_manifest(job, ref, _render(view, ref, None), replicas))
    return out


def _as_it_was(view: View, manifest: Object) -> Object:
    """The manifest with the data of the live settings: after an end they stay, so that a syncer that
    restarts finds the job that has ended."""
    live = view.live(names.ref_of(manifest))
    if manifest["kind"] != "ConfigMap" or live is None or not isinstance(live.get("data"), dict):
        return manifest
    return {**manifest, "data": dict(live["data"])}


def _ready_for(view: View, ref: Ref) -> bool:
    """Whether what the pods of ``ref`` mount, or dial, is there and is the job's own."""
    job, storage = view.job.name, view.job.spec.syncer.storage
    needs = [names.settings_map(job)]
    if ref == names.syncer_deployment(job):
        if storage.claim_name is None and storage.uri is None:
            needs.append(names.claim(job))
    elif view.here.syncer:
        needs.append(names.syncer_service(job))
    there = [view.live(need) for need in needs]
    return all(live is not None and "deletionTimestamp" not in live["metadata"] for live in there)


def _rendered(view: View) -> list[Ref]:
    """The live objects that say how they were rendered."""
    return [ref for ref in view.observed.objects if manifests.stored_rendering(view.live(ref)) is not None]


def _rendering(view: View, decision: LifecycleDecision, ref: Ref, frozen: bool, out: DesiredObjects) -> Rendering:
    """The rendering to apply. Changes the view's memory. While pods are taken down, what they were made of stays: it is
    of no use to them, and a fault in it must not keep them."""
    before, (role, _) = manifests.stored_rendering(view.live(ref)), names.role_of(view.job.name, ref)
    if before is not None and (frozen or decision.stage in ("suspending", "restarting")):
        return before
    fresh = _render(view, ref, before)
    if before is None or before.spec == fresh.spec:
        return fresh
    if out.syncer_waits and role in ("syncer", names.SHARD):
        return before
    if ref.kind == "Deployment" and view.replicas(ref):
        view.memory.own_deletions |= {pod.uid for pod in view.pods if view.holder_of(pod) == ref}
        if role == "syncer" and decision.training:
            view.memory.successors.setdefault("syncer", AwaitedSuccessor(view.now, ""))
    return fresh


def _syncer_waits(view: View) -> bool:
    """Whether a changed Deployment of the syncer, or of its shards, waits. They change together, for shards take no
    other release, nor other settings, than their syncer's; the first shard's is as those of all."""
    shards = manifests.shard_deployments(view.job, view.here)
    for ref in [names.syncer_deployment(view.job.name), *shards[:1]] if view.here.syncer else []:
        before = manifests.stored_rendering(view.live(ref))
        if before is not None:
            fresh = _render(view, ref, before).spec
            if fresh != before.spec and syncer_change_waits(view, before.spec, fresh):
                return True
    return False


def _render(view: View, ref: Ref, before: Rendering | None) -> Rendering:
    """The rendering that the job asks for now: the one before, where it was made of the same."""
    generation, release, own = view.job.generation, job_release(view), own_release(view)
    now = manifests.origin_of(view.job, view.here, ref, own.operator)
    origin = before.origin if before is not None else None
    if before is not None and origin is not None and origin.asked == now.asked:
        # What this release reads of the job may be more than what that read: digests are taken for what they are now.
        same_job = before.generation == generation
        kept = replace(now, release=origin.release)
        if same_job or origin.template == now.template:
            if same_job or origin.program == now.program:
                return Rendering(generation, before.spec, kept)
            return Rendering(generation, manifests.with_program_inputs(before.spec, now.program), kept)
    # A template goes with the image of the release that made it.
    made_by = release if release.operator == own.operator else own
    spec = manifests.render_pod_holder(view.job, view.here, ref, made_by, settings=view.settings)
    return Rendering(generation, spec, now)


def _replicas(view: View, scale: Scale, ref: Ref) -> int:
    role, region = names.role_of(view.job.name, ref)
    if role == "learner":
        return scale.learners.get(region, 0) * view.group_pods(region)
    return scale.evaluator if role == "evaluator" else scale.syncer


def _needs_nudge(view: View, ref: Ref) -> bool:
    """Whether the controller of ``ref`` could not make a pod, by its Events, and a pod is still missing."""
    there = [pod for pod in view.pods if view.holder_of(pod) == ref and not pod.over]
    failed = newest_message(view.observed.cluster_events, ref, "FailedCreate")
    return bool(failed) and len(there) < (view.replicas(ref) or 0)


# ------------------------------------------------------------------ what is not wanted any more


def _prune(view: View, decision: LifecycleDecision, keep: set[Ref], out: DesiredObjects) -> None:
    """Objects of regions that the job does not have any more (their learners drain first), of an evaluator
    that is not asked for, of a syncer that was placed elsewhere, of shards that are not in the syncer's list any more
    (once it has changed). Never the claim."""
    for ref in view.observed.objects:
        live = view.live(ref)
        if (
            live is None
            or "deletionTimestamp" in live["metadata"]
            or ref in keep
            or ref.kind == "PersistentVolumeClaim"
        ):
            continue
        labels = live["metadata"].get("labels") or {}
        if out.syncer_waits and labels.get(LABEL_ROLE) == names.SHARD:
            continue
        region = labels.get(LABEL_REGION)
        left = [pod for pod in view.pods if region and pod.role == "learner" and pod.region == region]
        rendering = manifests.stored_rendering(live)
        if ref.kind == "StatefulSet" and left and rendering is not None:
            out.apply.append(manifests.pod_holder_manifest(view.job, ref, rendering, 0))
        elif not left or ref.kind == "StatefulSet":
            out.deletes.append(Delete(ref, live["metadata"]["uid"], "the job does not ask for it any more"))
