"""Commands and groups as this program shows them: no type beside a flag, and wrong numbers in words; the arguments
that several commands have.

typer gives each flag the type ``<bool>`` in the help, also the flags that it adds itself (``--help``, completion), and
passes pydantic's sentence on where a number is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup

JobFile = Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="The job file (kind: DiLoCoJob).")]
FileOption = Annotated[
    Path | None, typer.Option("--filename", "-f", metavar="JOB.yaml", help="The job file, as kubectl names it.")
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change one field below spec, as often as you like; list items by index, the value in YAML: "
        "--set sync.every=12 --set regions.0.learners=2",
    ),
]
RunFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the run keeps everything.  [default: runs/<the job's name>]")
]
StatusPage = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where the syncer serves its status page and metrics; port 0: any.")
]
ReportAsJson = Annotated[
    bool, typer.Option("--json", help="Print report.json at the end, for programs; progress goes to stderr.")
]


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


@contextlib.contextmanager
def _numbers_in_words() -> Iterator[None]:
    try:
        yield
    except typer.BadParameter as error:
        if isinstance(error.__cause__, ValidationError) and (said := _number_text(error.__cause__, error.param)):
            error.message = said
        raise


def _number_text(error: ValidationError, param: Any) -> str:
    """What is wrong with a number; empty: something else is wrong."""
    found = error.errors()[0]
    kind, value = found["type"], found["input"]
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    if not kind.startswith(("int_", "float_", "finite_", "greater_", "less_")):
        return ""
    noun = (
        "a whole number"
        if kind.startswith("int_") or param.type_descriptor.annotation in (int, int | None)
        else "a number"
    )
    bounds = [f"{words} {bound:,}" for words, bound in (("at least", low), ("at most", high)) if bound is not None]
    return f"must be {noun}{' of ' * bool(bounds)}{' and '.join(bounds)}, not {value!r}"


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _numbers_in_words():
            return super().parse_args(ctx, args)


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


class CommandLine(typer.Typer):
    """A typer program whose commands and groups are the above."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, rich_markup_mode="markdown", no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Any:
        return super().command(name, cls=Command, **settings)
