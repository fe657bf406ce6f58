"""``diloco apply``: a job file becomes a DiLoCoJob in one or several clusters.

Server-side apply with a field manager of its own: the file's fields are set, what others own stays. The file is checked
first, by the loader that ``diloco run`` uses, so that a wrong one reaches no cluster.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.cluster.answers import Answers
from diloco.cluster.change import on_every_copy, parse_object
from diloco.cluster.client import MANAGER, Cluster, ClusterError, Object, Where
from diloco.cluster.follow import ended, follow, hindered, invalid, no_operator, seen, wait_for
from diloco.console import FAILED, INTERRUPTED, WRONG, print_text
from diloco.data_files import data_field, local_names
from diloco.validate import problems_text, warnings_text
from diloco_protocol.spec.job import DiLoCoJob, immutable_digests
from diloco_protocol.spec.load import JobError, Problem, job_warnings, load_manifest

HEARD_SECONDS = 10.0  # until an operator that has not looked at a job counts as not there


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """What the command line said. ``timeout``: seconds; None: without end."""

    where: Where
    file: Path
    overrides: Sequence[str] = ()
    dry_run: bool = False
    force: bool = False
    wait: bool = False
    timeout: float | None = None
    as_json: bool = False


def apply(options: ApplyOptions) -> int:
    """Apply the file to every context; returns the exit code. Raises ClusterError where none was reached."""
    try:
        job, document = load_manifest(options.file, options.overrides)
    except JobError as error:
        print_text(problems_text(error), file=sys.stderr)
        return WRONG
    where = _with_namespace(options.where, job)
    clusters = where.open()
    for text in warnings_text([*job_warnings(job), *foreign_paths(job, options.file.parent), *copies(job, clusters)]):
        print_text(text, file=sys.stderr)
    name, answers = job.metadata.name, Answers(job.metadata.name)

    def act(cluster: Cluster) -> str:
        result = apply_to(cluster, job, document, options)
        answers.add(cluster, result=result, dry_run=options.dry_run)
        return f"dilocojob {name} {result}{' (dry run)' * options.dry_run}"

    with answers.printed(options.as_json):
        code, applied = on_every_copy(clusters, act, answers)
        if options.dry_run or not applied:
            return code
        return max(code, _after(applied, name, options, answers))


def _with_namespace(where: Where, job: DiLoCoJob) -> Where:
    named = job.metadata.namespace
    if where.namespace and named and where.namespace != named:
        raise ClusterError(
            f"the file says metadata.namespace: {named}, and --namespace says {where.namespace}: leave one of them out",
            code=WRONG,
        )
    return Where(where.contexts, where.namespace or named, where.kubeconfig)


def _after(clusters: Sequence[Cluster], name: str, options: ApplyOptions, answers: Answers) -> int:
    """What became of it: whether an operator took note, and with --wait how it ended."""
    code, began = 0, time.monotonic()
    timeout = options.timeout if options.wait else None
    heard_by = HEARD_SECONDS if timeout is None else min(HEARD_SECONDS, timeout)  # a part of the whole wait

    def unfinished(cluster: Cluster, job: Object | None) -> list[str]:
        unseen = job is not None and not (job.get("status") or {}).get("observedGeneration")
        return [
            f"has not ended within {options.timeout:g} s; it continues",
            *([no_operator(cluster, name)] if unseen else []),
        ]

    try:
        for cluster, outcome, job in follow(clusters, name, seen, heard_by, quiet=True):
            if outcome is None:
                print_text(f"warning: {no_operator(cluster, name)}", file=sys.stderr)
                answers.add(cluster, warning=no_operator(cluster, name))
            elif job is not None and (refused := invalid(job)) is not None and not options.wait:
                print_text(f"error: {name} {refused[1]}", file=sys.stderr)
                answers.add(cluster, error=refused[1])
                code = FAILED
            elif job is not None and (why := hindered(job)) and not options.wait:
                print_text(f"warning: {name} does not run yet in context {cluster.context}: {why}", file=sys.stderr)
                answers.add(cluster, warning=why)
            elif job is not None and job["spec"].get("suspend") and not options.wait:
                print_text(f"it is suspended: diloco resume {name} {cluster.flags}", flush=True)
        if not options.wait:
            return code
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        return max(code, wait_for(clusters, name, ended, left, unfinished=unfinished, answers=answers))
    except KeyboardInterrupt:
        flags = clusters[0].flags
        print_text(f"\nleft running: diloco status {name} {flags} --watch, or diloco delete {name} {flags}")
        return INTERRUPTED


# ------------------------------------------------------------------ one cluster


def apply_to(cluster: Cluster, job: DiLoCoJob, document: dict[str, Any], options: ApplyOptions) -> str:
    """Apply the document to one cluster: ``created``, ``configured`` or ``unchanged``. Raises ClusterError."""
    name = job.metadata.name
    path = cluster.job_path(name)
    before = cluster.find(path)
    body = {**document, "metadata": {**document["metadata"], "namespace": cluster.namespace}}
    query = {"fieldManager": MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if options.dry_run else {})

    def patch(force: bool) -> Object:
        query["force"] = "true" if force else "false"
        return cluster.request("PATCH", path, query=query, body=body, content="application/apply-patch+yaml")

    try:
        try:
            after = patch(options.force)
        except ClusterError as error:
            if error.reason != "Conflict" or managers(error) != {MANAGER}:
                raise
            # Set by `diloco scale`, suspend or resume since: the file is what is wanted now.
            after = patch(True)
            print_text(f"set back to the file: {_fields(error)} (changed since by diloco scale, suspend or resume)")
    except ClusterError as error:
        raise _explained(error, cluster, job, before) from error
    if before is None:
        return "created"
    return "unchanged" if _content(before) == _content(after) else "configured"


def _content(job: Object) -> Any:
    metadata = job["metadata"]
    return job.get("spec"), metadata.get("labels") or {}, metadata.get("annotations") or {}


_MANAGER = re.compile(r'conflict with "([^"]+)"')


def managers(error: ClusterError) -> set[str]:
    """Who else manages the fields of a conflict."""
    return {match for cause in error.causes for match in _MANAGER.findall(str(cause.get("message")))}


def _fields(error: ClusterError) -> str:
    return ", ".join(str(cause.get("field") or "").lstrip(".") for cause in error.causes)


def _explained(error: ClusterError, cluster: Cluster, job: DiLoCoJob, before: Object | None) -> ClusterError:
    """The API server's refusal in the job file's words."""
    name = job.metadata.name
    if error.reason == "Conflict" and error.causes:
        return ClusterError(
            f"context {cluster.context}: {_fields(error)} of {name} {'is' if len(error.causes) == 1 else 'are'} set"
            f" by {', '.join(sorted(managers(error)))} to other values: put those values into the file, or overwrite"
            " them with --force-conflicts",
            error.reason,
            WRONG,
        )
    if error.reason == "Invalid":
        if before is not None and (changed := changed_for_ever(before, job)):
            named = [str(cause.get("field")) for cause in error.causes]
            within = [one for one in named if any(f"{one}.".startswith(f"spec.{f}.") for f in changed)]
            fixed = list(dict.fromkeys(within)) or [f"spec.{field}" for field in changed]
            return ClusterError(
                f"context {cluster.context}: {', '.join(fixed)}"
                f" of {name} may not change once the job has started: restore"
                f" {'it' if len(fixed) == 1 else 'them'} in the file, or give the job another"
                f" metadata.name (to train anew under this name: diloco delete {name} {cluster.flags},"
                f" and the volume too)",
                error.reason,
                WRONG,
            )
        problems = [Problem(str(c.get("field") or ""), None, str(c.get("message") or "")) for c in error.causes]
        text = problems_text(JobError(problems, f"context {cluster.context}")) if problems else str(error)
        return ClusterError(text, error.reason, WRONG)
    if error.reason == "BadRequest" and "unknown field" in str(error):
        return ClusterError(
            f"{error}: the cluster's CRD and this command line differ in version: upgrade the chart"
            " (helm upgrade), or use the command line of that version",
            error.reason,
        )
    return error


def changed_for_ever(before: Object, job: DiLoCoJob) -> list[str]:
    """The fields, below spec, that differ from the object in the cluster and are fixed once a job has
    started. Empty also where that object is of another version of the format."""
    try:
        there = immutable_digests(parse_object(before))
    except JobError:
        return []
    here = immutable_digests(job)
    return [field for field in here if here[field] != there.get(field)]


# ------------------------------------------------------------------ warnings


def foreign_paths(job: DiLoCoJob, directory: Path) -> list[Problem]:
    """Warnings for what means files beside the job file (in ``directory``) on this machine, and the
    container's working directory in a pod."""
    training = job.spec.training
    data, start = training.data, training.model.from_ if training.model is not None else None
    found = [] if data is None else [(data_field(data), name) for name in local_names(data, directory)]
    if start is not None and start.startswith((".", "~")):  # else a name on Hugging Face, a URI or an absolute path
        found.append(("spec.training.model.from", start))
    message = (
        "this path is relative to the job file on this machine; in a pod it starts at the container's working"
        " directory. Put the files into the image or on a volume (podTemplate) and name them by an absolute"
        " path, or give a URI"
    )
    warned = [Problem(path, name, message) for path, name in found if not name.startswith("/")]
    programs = [("spec.learners.command", word) for word in job.spec.learners.command or []]
    if data is not None and data.function:
        module = data.function.partition(":")[0].replace(".", "/")
        programs.append(("spec.training.data.function", f"{module}.py"))
    message = "this file lies beside the job file; the image must have it in its working directory"
    for path, word in programs:
        if not word.startswith("/") and (directory / word).is_file():
            warned.append(Problem(path, word, message))
    return warned


def copies(job: DiLoCoJob, clusters: Sequence[Cluster]) -> list[Problem]:
    """A warning where a job of one cluster goes to several."""
    named = {region.cluster for region in job.spec.regions} - {None}
    if len(clusters) < 2 or named:
        return []
    message = f"names no clusters, so each of the {len(clusters)} contexts runs a whole job of its own"
    return [Problem("spec.regions", None, message)]
