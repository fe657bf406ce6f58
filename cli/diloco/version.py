"""Which version this is: ``diloco --version`` and ``diloco version``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diloco.console import print_text


def installed_version() -> str:
    from importlib.metadata import version

    return version("decoupled-diloco")


def _print_version(wanted: bool) -> None:
    if wanted:
        print_text(installed_version())
        raise typer.Exit()


def version(as_json: Annotated[bool, typer.Option("--json", help="Print one object, for programs.")] = False) -> None:
    """Print the version."""
    print_text(json.dumps({"version": installed_version()}) if as_json else installed_version())


def add_to(app: typer.Typer) -> None:
    @app.callback()
    def options(
        shown: Annotated[
            bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None: ...

    app.command()(version)
