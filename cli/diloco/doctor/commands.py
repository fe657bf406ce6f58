"""The words of ``diloco doctor``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from diloco.cluster.commands import Context, Kubeconfig, Namespace, where
from diloco.console import COMPLETE, FAILED, command, job_file, print_text


@command
def doctor(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="A job file: check whether it would run here, too.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--filename", "-f", metavar="JOB.yaml", help="The job file, as kubectl names it.")
    ] = None,
    overrides: Annotated[list[str], typer.Option("--set", metavar="PATH=VALUE", help="As for `diloco run`.")] = [],  # noqa: B006 - typer reads it, nobody writes it
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    context: Context = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Check this machine, the cluster of your kubeconfig and a job: what would fail, and the fix.

    Nothing is started or changed. Exit codes: 0 nothing would fail, 1 something would.

    Examples:

        diloco doctor

        diloco doctor job.yaml --set regions.0.learners=4

        diloco doctor --context my-cluster --json
    """
    from diloco.console import CommandError
    from diloco.doctor.findings import Finding, findings_text
    from diloco.doctor.machine import absent_packages, check_machine, check_packages, check_torch

    job = job_file(job, file, "diloco doctor") if job or file else None
    if overrides and job is None:
        raise CommandError("--set changes a job file: give JOB.yaml too")
    absent = absent_packages()
    found: list[Finding] = [*check_machine(Path.cwd()), *check_packages(absent)]
    torch, said = check_torch("torch" not in absent["worker"])
    found += said
    there = where(context, namespace, kubeconfig)
    from diloco.doctor.cluster import check_cluster, has_kubeconfig

    if has_kubeconfig(there):
        found += check_cluster(there)
    if job is not None:
        from diloco.doctor.job import check_job

        found += check_job(job, overrides, torch, absent)
    failed = any(one.level == "error" for one in found)
    if as_json:
        print_text(json.dumps({"ok": not failed, "findings": [one.document() for one in found]}, indent=1))
    else:
        print_text(findings_text(found))
    return FAILED if failed else COMPLETE


def add_to(app: typer.Typer) -> None:
    app.command()(doctor)
