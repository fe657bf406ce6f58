"""The command ``diloco``. Each command imports what it needs when it runs: help, validate
and status must answer at once, and without torch."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

COMPLETE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="diloco",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help="""Train one model on machines that come and go (Decoupled DiLoCo, arXiv 2604.21428).

A job is one YAML file. Try it on this machine:

    diloco validate examples/tiny-gpt.yaml

    diloco run examples/tiny-gpt.yaml --chaos 20s:kill:learner-1

    diloco export runs/tiny-gpt model/

Exit codes: 0 job complete, 1 job failed, 2 the job file or the arguments are wrong, 130 interrupted.
""",
)

JobFile = Annotated[
    Path, typer.Argument(metavar="JOB.yaml", help="The job file (kind: DiLoCoJob).", show_default=False)
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="PATH=VALUE", show_default=False,
        help="Change one field below spec, as often as you like; list items by index, the value in YAML: "
        "--set sync.every=12 --set regions.0.learners=2",
    ),
]  # fmt: skip


def _fail(message: str, code: int) -> typer.Exit:
    print(message if message.startswith("error") else f"error: {message}", file=sys.stderr)
    return typer.Exit(code)


def _interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C before or after the run itself, which handles it on its own."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


@app.command()
@_interruptible
def run(
    job: JobFile,
    workdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the run keeps everything.  [default: runs/<the job's name>]",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write report.json here too.", show_default=False)
    ] = None,
    chaos: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            show_default=False,
            help="What to break, and when: TIME:ACTION:TARGET[:DURATION], separated by commas. TIME is 20s "
            "(from the first merge) or step=150; ACTION kill, term, pause or cut (the last two with a "
            "DURATION); TARGET learner-2, learner (any, by the seed) or syncer.",
        ),
    ] = "",
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Instead of the job's seed.", show_default=False)
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody writes it
    http: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where the syncer serves its status page and metrics; port 0: any."
        ),
    ] = "127.0.0.1:0",
) -> None:
    """Run a job on this machine, every learner a process, until it is done.

    The same command on the same workdir goes on from the checkpoint there. Ctrl-C drains: learners offer
    their work, the syncer makes a checkpoint; a second Ctrl-C stops at once. Logs, metrics and report.json
    are in the workdir.

    Examples:

        diloco run examples/tiny-gpt.yaml

        diloco run examples/tiny-gpt.yaml --workdir runs/second --seed 1 --set regions.0.learners=2

        diloco run examples/tiny-gpt.yaml --chaos 20s:kill:learner-1,step=150:cut:learner-2:5s,40s:kill:syncer
    """
    from diloco.run import Options, UsageError
    from diloco.run import run as run_job

    try:
        code = run_job(Options(job, workdir, report, chaos, seed, overrides, http))
    except UsageError as error:
        raise _fail(str(error), WRONG) from None
    raise typer.Exit(code)


@app.command()
@_interruptible
def validate(job: JobFile, overrides: Overrides = []) -> None:  # noqa: B006
    """Check a job file: all that is wrong with it at once, with the cure.

    Example:

        diloco validate examples/tiny-gpt.yaml --set sync.every=12
    """
    from diloco.validate import validate_file

    text, code = validate_file(job, overrides)
    print(text, file=sys.stderr if code else sys.stdout)
    raise typer.Exit(code)


@app.command()
@_interruptible
def status(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKDIR|ADDRESS]",
            show_default=False,
            help="A run's directory, or host:port of its status page or its syncer. "
            " [default: the newest below ./runs]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole status document, for programs.")] = False,
) -> None:
    """Show how a job is doing.

    Examples:

        diloco status

        diloco status runs/tiny-gpt --json

        diloco status 127.0.0.1:8080
    """
    from diloco.status import StatusError, read_status, show

    try:
        document = read_status(where)
    except StatusError as error:
        raise _fail(str(error), WRONG) from None
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        show(document)


@app.command()
@_interruptible
def export(
    workdir: Annotated[
        Path, typer.Argument(metavar="WORKDIR", help="A run's directory.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new directory for the model.", show_default=False)
    ],
) -> None:
    """Write the merged model to a directory that transformers loads; the run may still be going on.

    Example:

        diloco export runs/tiny-gpt model/

        python -c "import transformers; transformers.AutoModelForCausalLM.from_pretrained('model/')"
    """
    from diloco.export import ExportFailed, export_run
    from diloco.workdir import WorkdirError, find

    try:
        versions = export_run(find(str(workdir)), out)
    except (WorkdirError, ExportFailed) as error:
        raise _fail(str(error), WRONG) from None
    print(f"{out}: the merged model, fragments at versions {min(versions)} to {max(versions)}")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("decoupled-diloco"))


def main() -> None:
    """The program's entry."""
    app()


if __name__ == "__main__":
    main()
