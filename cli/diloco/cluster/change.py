"""``diloco scale``, ``suspend``, ``resume`` and ``delete``: small changes of jobs in clusters.

What is changed is read first, and the change is refused by the API server if the job was
changed meanwhile; then it is read again and tried anew.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from diloco.cluster.answers import Answers
from diloco.cluster.client import MANAGER, Cluster, ClusterError, Object, Where, nearest
from diloco.cluster.follow import (
    context_suffix,
    follow,
    gone_within,
    invalid,
    no_operator,
    operator_hint,
    resumed,
    suspended,
    taken_down,
    wait_for,
)
from diloco.cluster.render import heard, holds, region_names
from diloco.console import INTERRUPTED, WRONG, print_text
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, Problem, parse_job
from diloco_protocol.vocabulary import FINALIZER

TRIES = 8
SEEN_SECONDS = 60.0  # for an operator to see a suspension
Patch = list[dict[str, Any]]


def on_every_copy(
    clusters: Sequence[Cluster], act: Callable[[Cluster], str], answers: Answers
) -> tuple[int, list[Cluster]]:
    """Do one thing in every cluster and print what it says; the exit code, and where it worked. Errors are among the
    ``answers``."""
    code, done = 0, []
    for cluster in clusters:
        try:
            said = act(cluster)
        except ClusterError as error:
            print_text(f"error: {error}", file=sys.stderr)
            answers.add(cluster, error=str(error))
            code = max(code, error.code)
            continue
        done.append(cluster)
        print_text(said + context_suffix(cluster, clusters), flush=True)
    return code, done


def patched(cluster: Cluster, name: str, make: Callable[[Object], Patch | None]) -> Object | None:
    """Apply the JSON patch that ``make`` makes of the job, if nobody changed the job since it was read.

    Returns the job as it became; None if ``make`` wanted no change. Raises ClusterError.
    """
    for _ in range(TRIES):
        job = cluster.job(name)
        patch = make(job)
        if patch is None:
            return None
        version = str(job["metadata"]["resourceVersion"])
        guard = {"op": "replace", "path": "/metadata/resourceVersion", "value": version}
        try:
            return cluster.request(
                "PATCH",
                cluster.job_path(name),
                query={"fieldManager": MANAGER, "fieldValidation": "Strict"},
                body=[guard, *patch],
                content="application/json-patch+json",
            )
        except ClusterError as error:
            if error.reason != "Conflict":
                raise
        time.sleep(random.uniform(0.05, 0.3))
    raise ClusterError(f"another program keeps changing {name}: try again", "Conflict")


# ------------------------------------------------------------------ scale


def parse_targets(words: Sequence[str]) -> dict[str, int]:
    """``REGION=N …``. Raises ClusterError."""
    targets: dict[str, int] = {}
    for word in words:
        region, equals, count = word.partition("=")
        if not equals or not region or not count.isascii() or not count.isdigit() or len(count) > 4:
            raise ClusterError(f"{word!r} is no REGION=N, such as local=5", code=WRONG)
        if region in targets:
            raise ClusterError(f"the region {region} is named twice", code=WRONG)
        targets[region] = int(count)
    return targets


def scale_patch(job: Object, targets: dict[str, int]) -> tuple[Patch, dict[str, tuple[int, int]]]:
    """The JSON patch that gives each region of this version of the job its number of learners, and (before, after) of
    each region that changes. Raises ClusterError where the job would not be a valid one."""
    name = str(job["metadata"]["name"])
    regions = region_names(job)
    for region in targets:
        if region not in regions:
            raise ClusterError(f"the job {name} has no region {region}{nearest(region, regions)}", code=WRONG)
    patch: Patch = []
    changed: dict[str, tuple[int, int]] = {}
    for index, region in enumerate(regions):
        if region not in targets:
            continue
        before, after = int(job["spec"]["regions"][index].get("learners") or 0), targets[region]
        if before == after:
            continue
        patch.append({"op": "replace", "path": f"/spec/regions/{index}/learners", "value": after})
        changed[region] = (before, after)
    if changed:
        _check_scaled(job, targets, changed)
    return patch, changed


def _check_scaled(job: Object, targets: dict[str, int], changed: dict[str, tuple[int, int]]) -> None:
    name, spec = str(job["metadata"]["name"]), job["spec"]
    for region, (_, after) in changed.items():
        if after < 1:
            raise ClusterError(
                f"the region {region} needs one learner at least; to stop the job: diloco suspend {name}", code=WRONG
            )
    rows = [
        {**row, "learners": targets.get(n, row.get("learners"))}
        for n, row in zip(region_names(job), spec["regions"], strict=True)
    ]
    total = sum(int(row.get("learners") or 0) for row in rows)
    sync = spec.get("sync") or {}
    quorum = int(sync.get("quorum") or 1)
    if total < quorum and not sync.get("deterministic"):
        raise ClusterError(
            f"that would leave {name} with {total} learner{'s' if total != 1 else ''}, and its quorum (K) is"
            f" {quorum}: nothing would ever be merged. Keep {quorum} in all, or lower spec.sync.quorum first"
            " (edit the file, diloco apply)",
            code=WRONG,
        )
    try:
        parse_object(job, spec={**spec, "regions": rows})
    except JobError as error:
        theirs = _problems(job)
        ours = [problem for problem in error.problems if (problem.path, problem.message) not in theirs]
        if ours:  # else the job was made by another version of the format: the API server decides
            said = [str(Problem(problem.path, problem.value, problem.message)) for problem in ours]
            raise ClusterError("; ".join(said), code=WRONG) from error


def parse_object(job: Object, **fields: Any) -> DiLoCoJob:
    """The job that an object of the cluster stands for, with other ``fields``. Raises JobError."""
    head = {key: job.get(key) for key in ("apiVersion", "kind", "spec")}
    return parse_job(json.dumps({**head, "metadata": {"name": job["metadata"]["name"]}, **fields}))


def _problems(job: Object) -> set[tuple[str, str]]:
    try:
        parse_object(job)
    except JobError as error:
        return {(problem.path, problem.message) for problem in error.problems}
    return set()


def scale(where: Where, name: str, words: Sequence[str], as_json: bool = False) -> int:
    """``diloco scale NAME REGION=N …`` in every context; the exit code. ``as_json``: print what changed where as one
    object. Raises ClusterError."""
    targets = parse_targets(words)
    answers = Answers(name)

    def act(cluster: Cluster) -> str:
        changed: dict[str, tuple[int, int]] = {}

        def make(job: Object) -> Patch | None:
            patch, now = scale_patch(job, targets)
            changed.clear()
            changed.update(now)
            return patch or None

        found = patched(cluster, name, make)
        regions = {region: {"before": before, "after": after} for region, (before, after) in changed.items()}
        answers.add(cluster, changed={} if found is None else regions)
        if found is None:
            return f"{name} has {', '.join(f'{n} in {r}' for r, n in targets.items())} already"
        words = [f"{region} {before} → {after}" for region, (before, after) in changed.items()]
        leaving = any(after < before for before, after in changed.values())
        return f"{name} scaled: {', '.join(words)}" + (
            "; learners that leave offer their work first" if leaving else ""
        )

    with answers.printed(as_json):
        return on_every_copy(where.open(), act, answers)[0]


# ------------------------------------------------------------------ suspend, resume


def suspend(where: Where, name: str, value: bool, wait: bool, timeout: float | None, as_json: bool = False) -> int:
    """``diloco suspend`` and ``resume`` in every context; the exit code. Raises ClusterError."""
    answers = Answers(name)

    def make(job: Object) -> Patch | None:
        if bool(job["spec"].get("suspend")) == value:
            return None
        return [{"op": "add", "path": "/spec/suspend", "value": value}]

    def act(cluster: Cluster) -> str:
        changed = patched(cluster, name, make) is not None
        answers.add(cluster, suspend=value, changed=changed)
        if not changed:
            return f"{name} is suspended already" if value else f"{name} is not suspended"
        if value:
            return f"{name} is being suspended: learners offer their work, the syncer makes a checkpoint"
        return f"{name} continues from its checkpoint"

    def unfinished(cluster: Cluster, job: Object | None) -> list[str]:
        unseen = job is not None and invalid(job) is None and not heard(job)
        return [
            f"is not {'suspended' if value else 'running'} after {timeout:g} s",
            *([no_operator(cluster, name)] if unseen else []),
        ]

    with answers.printed(as_json):
        opened = where.open()
        if not value:
            _suspend_failed(opened, name)
        code, clusters = on_every_copy(opened, act, answers)
        if not wait or not clusters:
            return code
        judge = suspended if value else resumed
        try:
            return max(code, wait_for(clusters, name, judge, timeout, unfinished=unfinished, answers=answers))
        except KeyboardInterrupt:
            print_text(f"\nno longer waiting; the change continues: diloco status {name} {clusters[0].flags}")
            return INTERRUPTED


def _suspend_failed(clusters: Sequence[Cluster], name: str) -> None:
    """A job that has failed goes on after a suspension: suspend its copies, and wait until their operators know.

    Raises ClusterError.
    """
    failed = []
    for cluster in clusters:
        with contextlib.suppress(ClusterError):  # said where it is resumed
            if holds(cluster.job(name), "Failed"):
                patched(cluster, name, lambda _: [{"op": "add", "path": "/spec/suspend", "value": True}])
                failed.append(cluster)
    for cluster, outcome, _ in follow(failed, name, taken_down, SEEN_SECONDS, quiet=True):
        if outcome is None:
            raise ClusterError(
                f"{name} has failed and was suspended, but no operator reacted within {SEEN_SECONDS:.0f} s"
                f"{context_suffix(cluster, clusters)}: is the operator running? Then run diloco resume again"
            )


# ------------------------------------------------------------------ upgrade


def upgrade(where: Where, name: str, word: str, as_json: bool = False) -> int:
    """``diloco upgrade`` in every context; the exit code. ``word``: what ``spec.release`` becomes, in each copy the
    same. Raises ClusterError."""
    answers = Answers(name)

    def act(cluster: Cluster) -> str:
        release = ((cluster.job(name).get("status") or {}).get("release")) or {}
        newer = not release or bool(release.get("newer"))
        answers.add(cluster, changed=newer, release=release.get("newer") or release.get("operator"))
        if not newer:
            return f"{name} has its operator's release already: {release['operator']}"
        patched(cluster, name, lambda job: [{"op": "add", "path": "/spec/release", "value": word}])
        target = release.get("newer") or "its operator's release"
        return f"{name} is taken to {target}; its pods are replaced, learners one after another, the syncer last"

    with answers.printed(as_json):
        return on_every_copy(where.open(), act, answers)[0]


# ------------------------------------------------------------------ delete


def made_claim(job: Object) -> str | None:
    """The claim that the operator made for the job; None: the job names a place of its own."""
    storage = ((job.get("spec") or {}).get("syncer") or {}).get("storage") or {}
    own = storage.get("uri") or storage.get("claimName")
    return None if own else f"{job['metadata']['name']}-syncer"


def stays(job: Object, flags: str) -> str | None:
    """What a deleted job leaves, and how to remove it; None: nothing. ``flags``: as kubectl takes them."""
    storage = ((job.get("spec") or {}).get("syncer") or {}).get("storage") or {}
    if storage.get("uri"):
        return f"its model and checkpoints stay at {storage['uri']}"
    if storage.get("claimName"):
        return f"its model and checkpoints stay on your PersistentVolumeClaim {storage['claimName']}"
    if storage.get("onDelete") == "Delete":
        return None
    claim = made_claim(job)
    return (
        f"its model and checkpoints stay on the PersistentVolumeClaim {claim}, and a job of this name continues"
        f" from them; to remove them: kubectl {flags} delete pvc {claim}"
    )


def _is_gone(cluster: Cluster, claim: str) -> bool:
    with contextlib.suppress(ClusterError):  # of one that may not be looked at, it is said that it stays
        return cluster.find(f"{cluster.core_path('persistentvolumeclaims')}/{claim}") is None
    return False


def delete(where: Where, name: str, wait: bool, timeout: float, as_json: bool = False) -> int:
    """``diloco delete`` in every context; the exit code. Raises ClusterError."""
    answers = Answers(name)
    left: dict[str, str | None] = {}
    uids: set[str] = set()

    def act(cluster: Cluster) -> str:
        job = cluster.job(name)
        claim = made_claim(job)
        # There is none where the syncer is in another cluster, or never came to be.
        nothing = claim is not None and _is_gone(cluster, claim)
        left[cluster.context] = None if nothing else stays(job, cluster.flags)
        uid = str(job["metadata"]["uid"])
        cluster.request("DELETE", cluster.job_path(name), body={"preconditions": {"uid": uid}})
        uids.add(uid)
        answers.add(cluster, deleted=True, remains=left[cluster.context])
        return f"{name} is being deleted: its learners are informed first"

    def unfinished(cluster: Cluster, job: Object | None) -> list[str]:
        return [f"is not gone after {timeout:g} s; the deletion continues", *_held_by(cluster, name, job)]

    with answers.printed(as_json):
        code, clusters = on_every_copy(where.open(), act, answers)
        if wait and clusters:
            gone = gone_within(uids)
            try:
                code = max(code, wait_for(clusters, name, gone, timeout, unfinished=unfinished, answers=answers))
            except KeyboardInterrupt:
                print_text("\nno longer waiting; the deletion continues")
                code = INTERRUPTED
        for cluster in clusters:
            if text := left[cluster.context]:
                print_text(text)
        return code


def _held_by(cluster: Cluster, name: str, job: Object | None) -> list[str]:
    """What keeps a job from being gone, and the cure."""
    held = (job or {}).get("metadata", {}).get("finalizers") or []
    if FINALIZER not in held:
        return [f"another program's finalizer keeps it: {', '.join(held)}"] if held else []
    rest = json.dumps({"metadata": {"finalizers": [one for one in held if one != FINALIZER]}})
    return [
        f"the operator's finalizer keeps it ({FINALIZER}). Is the operator running? {operator_hint(cluster)}."
        " If the operator is gone for good, remove its finalizer by hand:"
        f" kubectl {cluster.flags} patch dilocojob {name} --type=merge -p '{rest}'"
    ]
