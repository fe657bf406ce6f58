"""The words of ``diloco doctor``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cluster.commands import Context, Kubeconfig, Namespace, where
from diloco.command_line import FileOption, Overrides
from diloco.console import COMPLETE, FAILED, CommandError, command, job_file, print_text

if TYPE_CHECKING:
    from diloco.doctor.findings import Finding


@command
def doctor(
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB.yaml|PROGRAM",
            help="A job file: check whether it would run here, too. Or a program of your own: run it for some steps.",
        ),
    ] = None,
    arguments: Annotated[list[str], typer.Argument(metavar="-- ARGUMENT", help="The program's own arguments.")] = [],  # noqa: B006
    file: FileOption = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody writes it
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    credentials: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A learner's folder: check the endpoint's certificate and your own with it."),
    ] = None,
    step_seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long one inner step takes: links need the less, the longer it is."),
    ] = None,
    context: Context = [],  # noqa: B006
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> int:
    """Check this machine, the cluster of your kubeconfig, a job and its links: what would fail, and the fix.

    A program of your own (a .py file) is run alone for 30 steps, and nothing else is checked. A stand-in for the syncer
    moves every fragment of its model by known amounts. What a job would refuse, and what would go wrong without a word,
    is named with the cure. -f JOB.yaml gives it the job's batch.

    If learners reach the job's syncer at an address (spec.syncer.endpoint.address), its name, a TCP connection and the
    TLS handshake are tried from this machine. For a job with an address or several regions, the bandwidth that each
    link needs is computed as `diloco plan` does. Nothing is started or changed.

    Exit codes: 0 nothing would fail, 1 something would.

    Examples:

        diloco doctor

        diloco doctor job.yaml --set regions.0.learners=4

        diloco doctor train.py -f job.yaml -- --lr 3e-4

        diloco doctor --context my-cluster --json

        diloco doctor job.yaml --credentials pki/default/job/eu-1 --step-seconds 0.8
    """
    from diloco.doctor.machine import absent_packages, check_machine, check_packages, check_torch

    if job is not None and job.suffix == ".py":
        from diloco.doctor.program import check_program

        return _show(list(check_program(job, arguments, file)), as_json)
    if arguments:
        raise CommandError(f"{arguments[0]}: arguments after -- are a program's: diloco doctor train.py -- ARGUMENT")
    job = job_file(job, file, "diloco doctor") if job or file else None
    if job is None:
        for option, given in (("--set", overrides), ("--credentials", credentials), ("--step-seconds", step_seconds)):
            if given:
                raise CommandError(f"{option} is for the checks of a job: give JOB.yaml too")
    if credentials is not None and not credentials.is_dir():
        raise CommandError(f"--credentials {credentials}: there is no such folder; `diloco certs issue` makes one")
    absent = absent_packages()
    found: list[Finding] = [*check_machine(Path.cwd()), *check_packages(absent)]
    torch, said = check_torch("torch" not in absent["worker"])
    found += said
    there = where(context, namespace, kubeconfig)
    from diloco.doctor.cluster import check_cluster, has_kubeconfig, no_kubeconfig

    found += check_cluster(there) if has_kubeconfig(there) else [no_kubeconfig()]
    if job is not None:
        from diloco.doctor.job import check_job
        from diloco.doctor.links import check_links

        found += check_job(job, overrides, torch)
        found += check_links(job, overrides, credentials, step_seconds)
    return _show(found, as_json)


def _show(found: Sequence[Finding], as_json: bool) -> int:
    """Print the findings; returns the exit code."""
    from diloco.doctor.findings import findings_text

    failed = any(one.level == "error" for one in found)
    if as_json:
        print_text(json.dumps({"ok": not failed, "findings": [one.document() for one in found]}, indent=1))
    else:
        print_text(findings_text(found))
    return FAILED if failed else COMPLETE


def add_to(app: typer.Typer) -> None:
    app.command()(doctor)
