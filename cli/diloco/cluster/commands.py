"""The commands for clusters: their words and arguments. What they do is in the modules
beside this one, imported when they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.command_line import FileOption, JobFile, Overrides
from diloco.console import CommandError, command, duration, job_file, job_name, means_job, named_job, run_or_job

DELETE_SECONDS = 120.0

if TYPE_CHECKING:
    from diloco.cluster.client import Where

Contexts = Annotated[
    list[str],
    typer.Option(
        "--context",
        metavar="NAME",
        help="Context of the kubeconfig; repeat it to act on every copy of a job.  [default: the current]",
    ),
]
Context = Annotated[
    list[str], typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.  [default: the current]")
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the job.  [default: the context's]"),
]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", metavar="FILE", help="Instead of $KUBECONFIG or ~/.kube/config.")
]
Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.", callback=job_name)]
RunOrJob = Annotated[
    str | None,
    typer.Argument(
        metavar="WORKDIR|JOB",
        help="A run's directory, or the name of a job in a cluster.  [default: the newest run below ./runs]",
        callback=run_or_job,
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it has happened, with lines of progress.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION", parser=duration, help="With --wait: give up after 90s, 10m or 2h (the job continues)."
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one object with an item for each context, for programs; the rest goes to stderr."
    ),
]


def where(contexts: list[str], namespace: str | None, kubeconfig: Path | None) -> Where:
    """The three options that say which clusters are meant."""
    from diloco.cluster.client import Where

    return Where(tuple(contexts), namespace, kubeconfig)


@contextlib.contextmanager
def in_cluster(taken_for_job: str | None) -> Iterator[None]:
    """Around what talks to clusters. ``taken_for_job``: the argument that was taken for a job's name since nothing on
    this machine is called so, None: there is none; an error of the kubeconfig says so."""
    from diloco.cluster.client import ClusterError

    try:
        yield
    except ClusterError as error:
        if taken_for_job is None or error.reason != "Settings":
            raise
        raise CommandError(
            f"there is no run {taken_for_job} here: name its directory, such as runs/{taken_for_job}. Nor is it known"
            f" as a job in a cluster: {error}",
            error.code,
        ) from None


def apply(
    job: JobFile = None,
    file: FileOption = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody writes it
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the API server check everything without a change.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force-conflicts", help="Overwrite fields that another manager has set.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the job until it is complete (0) or has failed (1).")
    ] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
    context: Contexts = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Create a job in a cluster, or change the existing one, from its job file.

    The file is checked first, as `diloco validate` does. With several contexts the same job is applied to each
    of them. Ctrl-C during --wait leaves the job running.

    Examples:

        diloco apply examples/tiny-gpt.yaml --context my-cluster --wait

        diloco apply -f job.yaml --set sync.every=12 --dry-run

        diloco apply job.yaml --context hub --context far
    """
    from diloco.cluster.apply import ApplyOptions
    from diloco.cluster.apply import apply as apply_job

    there = where(context, namespace, kubeconfig)
    return apply_job(
        ApplyOptions(
            there,
            job_file(job, file, "diloco apply"),
            overrides,
            dry_run,
            force=force,
            wait=wait,
            timeout=timeout,
            as_json=as_json,
        )
    )


def logs(
    job: RunOrJob = None,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="PROCESS",
            help="syncer, syncer-shard-N, evaluator, learner-N (counted over all regions), REGION, REGION-N or a pod.  "
            "[default: all]",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    since: Annotated[
        float | None, typer.Option(metavar="DURATION", parser=duration, help="Only the last 30s, 10m, 2h.")
    ] = None,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only the last N lines of each.")] = None,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Show the log of the container before the last restart.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Lines as they are, without the process's name.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One object per line: process, message and what else the log has of it.")
    ] = False,
    context: Context = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Print the logs of a job's pods, or of a run's processes on this machine, merged by time.

    Examples:

        diloco logs runs/tiny-gpt local-1 --tail 20

        diloco logs tiny-gpt -f

        diloco logs tiny-gpt local-1 --previous

        diloco logs tiny-gpt syncer --since 10m --raw
    """
    if raw and as_json:
        raise CommandError("--raw and --json are two forms of the same lines: leave one of them out")
    from diloco.log_lines import LogOptions

    options = LogOptions(target, follow, since, tail, previous=previous, raw=raw, as_json=as_json)
    there = where(context, namespace, kubeconfig)
    if not there.given and not means_job(job):
        from diloco.local.log_files import show_logs as show_run_logs
        from diloco.processes.workdir import find

        return show_run_logs(find(job), options)
    from diloco.cluster.logs import show_logs

    with in_cluster(None if there.given else job):
        return show_logs(there, named_job(job, "diloco logs"), options)


def scale(
    job: Job,
    regions: Annotated[list[str], typer.Argument(metavar="REGION=N...", help="New number of learners of a region.")],
    as_json: AsJson = False,
    context: Contexts = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Change the number of learners of regions. Learners that leave offer their work first; no token is lost.

    Examples:

        diloco scale tiny-gpt local=5

        diloco scale tiny-gpt east=8 west=4 --context hub --context west
    """
    from diloco.cluster import change

    return change.scale(where(context, namespace, kubeconfig), job, regions, as_json)


def suspend(
    job: Job,
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
    context: Contexts = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Drain a job, make a checkpoint and free its machines until `diloco resume`.

    Examples:

        diloco suspend tiny-gpt

        diloco suspend tiny-gpt --wait --timeout 5m --context hub --context far
    """
    from diloco.cluster import change

    return change.suspend(where(context, namespace, kubeconfig), job, True, wait, timeout=timeout, as_json=as_json)


def resume(
    job: Job,
    wait: Wait = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
    context: Contexts = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Continue a suspended or failed job from its checkpoint.

    Example:

        diloco resume tiny-gpt --wait
    """
    from diloco.cluster import change

    return change.suspend(where(context, namespace, kubeconfig), job, False, wait, timeout=timeout, as_json=as_json)


def upgrade(
    job: Job,
    as_json: AsJson = False,
    context: Contexts = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Move a job to its operator's release: its pod templates together with its images.

    After `helm upgrade` a job keeps the release of its start until you run this. Its pods are then replaced, learners
    one after another, the syncer last. By hand: write another word into `spec.release`.

    Examples:

        diloco upgrade tiny-gpt

        diloco upgrade tiny-gpt --context hub --context far
    """
    from datetime import UTC, datetime

    from diloco.cluster import change

    word = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return change.upgrade(where(context, namespace, kubeconfig), job, word, as_json)


def delete(
    job: Job,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is gone, with lines of progress.")
    ] = True,
    timeout: Annotated[
        float | None, typer.Option(metavar="DURATION", parser=duration, help="Give up waiting after it.  [default: 2m]")
    ] = None,
    as_json: AsJson = False,
    context: Contexts = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Delete a job: its learners are informed first, then everything except its volume is deleted.

    The volume keeps the model, unless the job has storage.onDelete: Delete. The command prints how to remove it.

    Examples:

        diloco delete tiny-gpt

        diloco delete tiny-gpt --no-wait --context hub --context far
    """
    from diloco.cluster import change

    return change.delete(where(context, namespace, kubeconfig), job, wait, timeout or DELETE_SECONDS, as_json=as_json)


def add_to(app: typer.Typer) -> None:
    app.command()(command(logs))  # of runs on this machine, too
    for run in (apply, scale, suspend, resume, upgrade, delete):
        app.command(rich_help_panel="In clusters")(command(run))
