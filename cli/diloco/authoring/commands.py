"""The words of ``diloco init``, ``diloco explain`` and ``diloco examples``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from diloco.console import CommandError, command, print_text


def _sections(incomplete: str) -> list[str]:
    """The fields that begin as what was typed, for the shell's completion."""
    from diloco.authoring.field_pages import walk

    names = [page.name for page in walk()]
    return [name for full in names for name in (full, full.removeprefix("spec.")) if name.startswith(incomplete)]


@command
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file to write; - prints it.")] = Path(
        "job.yaml"
    ),
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="tiny, 10m, 50m, 125m, 350m or 1b parameters of a Llama-like model.  [default: tiny]"
        ),
    ] = None,
    own: Annotated[
        str | None,
        typer.Option("--command", metavar="PROGRAM", help='Your own loop instead, such as "python train.py".'),
    ] = None,
    data: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Text files, directories, globs or URIs, as often as you like.  [default: python-stdlib]",
        ),
    ] = [],  # noqa: B006 - typer reads it, nobody writes it
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="bytes, or a transformers tokenizer.  [default: bytes]")
    ] = None,
    learners: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=4096, help="Number of learners.  [default: 2]")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps of each learner.  [default: 300]")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The job's name.  [default: from FILE]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written, for programs.")] = False,
) -> None:
    """Write a job file to start from, with comments at the fields that are usually changed.

    Without options, on a terminal, it asks.

    Examples:

        diloco init

        diloco init job.yaml --model 10m --data 'corpus/*.txt' --learners 3

        diloco init own.yaml --command "python train.py" --learners 4
    """
    from diloco.authoring.new_job import Wanted, ask, write_job

    wanted = Wanted(model, own, tuple(data), tokenizer, learners=learners, steps=steps, name=name)
    if as_json and str(file) == "-":
        raise CommandError("- prints the job file, and --json prints what was written: leave one of them out")
    if wanted == Wanted() and str(file) != "-" and not as_json and sys.stdin.isatty() and sys.stdout.isatty():
        wanted = ask()
    text, document = write_job(file, wanted, force)
    print_text(json.dumps(document, indent=1) if as_json else text)


@command
def explain(
    field: Annotated[
        str | None,
        typer.Argument(
            metavar="FIELD",
            help="Its path, with or without spec, such as sync.every; or its name alone.  [default: the job]",
            autocompletion=_sections,
        ),
    ] = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Describe all that is inside it, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Print what a field of the job file means and accepts: type, default, bounds, an example, its parts.

    Examples:

        diloco explain sync.every

        diloco explain training.optimizer

        diloco explain spec --recursive
    """
    from diloco.authoring.field_pages import find_field, page_json, page_text

    page = find_field(field)
    print_text(json.dumps(page_json(page, recursive), indent=1) if as_json else page_text(page, recursive))


@command
def examples(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Examples to write.  [default: all]")] = [],  # noqa: B006
    directory: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write them.")] = Path(
        "examples"
    ),
    listed: Annotated[bool, typer.Option("--list", "-l", help="List the examples and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files with other content.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written or listed, for programs.")] = False,
) -> None:
    """Write the example jobs, which the help of the other commands uses, into a directory.

    Examples:

        diloco examples

        diloco examples minimal.yaml --output .
    """
    from diloco.authoring.packaged_examples import example_files, title_of, write_examples

    if listed:
        titles = {name: title_of(path) for name, path in example_files(names).items()}
        as_text = "\n".join(f"{name:<24} {title}" for name, title in titles.items())
        print_text(json.dumps({"examples": titles}, indent=1) if as_json else as_text)
        return
    written = write_examples(directory, names, force)
    if as_json:
        print_text(json.dumps({"written": [str(path) for path in written]}, indent=1))
        return
    print_text("\n".join(map(str, written)))
    jobs = sorted((path for path in written if path.suffix == ".yaml"), key=lambda path: path.name != "minimal.yaml")
    if jobs:
        print_text(f"Next: diloco run {jobs[0]}")


def add_to(app: typer.Typer) -> None:
    for run in (init, explain, examples):
        app.command(rich_help_panel="Job files")(run)
