"""The words of ``diloco syncer`` and ``diloco learner``: a job on machines without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.command_line import CommandLine, FileOption, JobFile, Overrides, ReportAsJson, RunFolder, StatusPage
from diloco.console import CommandError, command, job_file

syncer = CommandLine(
    name="syncer",
    help="""Serve a job from this machine; learners join from others.

The folder with the certificates is one that `diloco certs issue` makes.

Example:

    diloco syncer serve job.yaml --listen 0.0.0.0:7700 \\
      --credentials pki/default/job/syncer
""",
)
learner = CommandLine(
    name="learner",
    help="""Train on this machine for a job that is served elsewhere.

The folder with the certificates is one that `diloco certs issue` makes.

Example:

    diloco learner join hub.example.org:7700 \\
      --credentials pki/default/job/learners
""",
)

CredentialsFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="tls.crt, tls.key, ca.crt, join-token, as `diloco certs issue` makes them."),
]
Plaintext = Annotated[
    bool, typer.Option("--plaintext", help="Use no certificates: only in a network in which you trust every machine.")
]


@syncer.command()
@command
def serve(
    job: JobFile = None,
    file: FileOption = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where learners join: a port that they can reach.")
    ] = "127.0.0.1:7700",
    workdir: RunFolder = None,
    credentials: CredentialsFolder = None,
    plaintext: Plaintext = False,
    evaluator: Annotated[
        bool, typer.Option("--evaluator/--no-evaluator", help="Score the merged model on this machine.")
    ] = True,
    evaluator_credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A learner's folder, for the evaluator; with --credentials there is no evaluator without it.",
        ),
    ] = None,
    http: StatusPage = "127.0.0.1:0",
    overrides: Overrides = [],  # noqa: B006
    as_json: ReportAsJson = False,
) -> int:
    """Run a job's syncer on this machine until the job is done.

    Learners may join, leave and fail at any time; below the quorum the job holds. The same command on the same
    workdir continues from its store. Ctrl-C drains the job: learners offer their work, then the syncer makes a
    checkpoint. Exit codes are those of `diloco run`.

    Examples:

        diloco syncer serve job.yaml --listen 0.0.0.0:7700 \\
          --credentials pki/default/job/syncer

        diloco syncer serve job.yaml --workdir runs/served --listen 127.0.0.1:7700
    """
    from diloco.local.run import RunOptions, run
    from diloco.processes.worker_specs import ServeOptions
    from diloco_protocol.common.reach import is_loopback

    if credentials is None and not plaintext and not is_loopback(listen.rpartition(":")[0]):
        raise CommandError(
            f"--credentials is missing: any process that reaches {listen} could join. Give the syncer's folder "
            "(`diloco certs issue` makes it); --plaintext uses none, for a network in which you trust every "
            "machine"
        )
    for option, folder in (("--credentials", credentials), ("--evaluator-credentials", evaluator_credentials)):
        if folder is not None and not folder.is_dir():
            raise CommandError(f"{option} {folder}: there is no such folder")
    if credentials is not None and evaluator_credentials is None:
        evaluator = False
    serving = ServeOptions(
        listen,
        credentials and credentials.absolute(),
        evaluator,
        evaluator_credentials and evaluator_credentials.absolute(),
    )
    named = job_file(job, file, "diloco syncer serve")
    return run(RunOptions(named, workdir, overrides=overrides, http=http, as_json=as_json, serving=serving))


@learner.command()
@command
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="host:port of the job's syncer.")],
    job: Annotated[
        Path | None,
        typer.Argument(
            metavar="JOB.yaml", help="The job file, where the job runs code of its own.  [default: the syncer's job]"
        ),
    ] = None,
    file: FileOption = None,
    credentials: CredentialsFolder = None,
    plaintext: Plaintext = False,
    join_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Without certificates: join-token in the workdir of `diloco syncer serve`."),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(metavar="R", help="One of the job's regions.  [default: the certificate's, or the only one]"),
    ] = None,
    workdir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder for this learner alone.  [default: learners/JOB-REGION]"),
    ] = None,
    nnodes: Annotated[
        int, typer.Option(metavar="N", help="Machines of this learner; run the command on each.", min=1)
    ] = 1,
    node_rank: Annotated[int, typer.Option(metavar="N", help="Which of them this is, from 0.", min=0)] = 0,
    master_addr: Annotated[str, typer.Option(metavar="HOST", help="The machine with --node-rank 0.")] = "",
    master_port: Annotated[
        int, typer.Option(metavar="P", help="A free port there, the same on all.", min=1, max=65535)
    ] = 29500,
    overrides: Overrides = [],  # noqa: B006
) -> int:
    """Train on this machine for a job that is served elsewhere, until the job is done or you stop it.

    The learner only connects out: no port needs to be open here. It takes a free slot, or stands by until there is one.
    On Ctrl-C or SIGTERM it offers its work and leaves, and nothing is lost. Without JOB.yaml the syncer decides which
    model and data are used, so trust it with everything that you may read here. Code runs only from your own job file.

    Exit codes: 0 the job is done, or it left in good order; 1 refused or failed; 2 wrong arguments or job.

    Examples:

        diloco learner join hub.example.org:7700 \\
          --credentials pki/default/job/learners

        diloco learner join 127.0.0.1:7700 --join-token-file runs/served/join-token

        diloco learner join hub:7700 --credentials learners/ \\
          --nnodes 2 --node-rank 1 --master-addr gpu-0
    """
    from diloco.machines.join import JoinOptions
    from diloco.machines.join import join as join_job

    if job is not None and file is not None:
        raise CommandError("name one job file: diloco learner join ADDRESS JOB.yaml, or ADDRESS -f JOB.yaml")
    job = job or file
    if overrides and job is None:
        raise CommandError("--set changes a job file: give JOB.yaml too")
    return join_job(
        JoinOptions(
            address,
            job,
            credentials,
            plaintext,
            region=region,
            workdir=workdir,
            overrides=overrides,
            join_token_file=join_token_file,
            nnodes=nnodes,
            node_rank=node_rank,
            master=master_addr and f"{master_addr}:{master_port}",
        )
    )


def add_to(app: typer.Typer) -> None:
    app.add_typer(syncer)
    app.add_typer(learner)
