"""The page of all commands, docs/commands.md, written from the program's own help (tools/generate.py)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from diloco.main import app

_OPENING = """\
# Commands

<!-- Written by `make generate` from the commands' own help (tools/command_pages.py). Don't edit. -->

Every command with its arguments and options; `diloco COMMAND --help` has the bounds of numbers too. \
[Running on one machine](running-locally.md) and \
[Running in a cluster](running-in-a-cluster.md) show the commands at work.
"""


def commands(group: Any, names: tuple[str, ...] = ("diloco",)) -> Iterator[tuple[str, Any]]:
    """Every command that does something itself, by its words, in the order of the help."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        words = (*names, name)
        yield " ".join(words), command
        if hasattr(command, "commands"):
            yield from commands(command, words)


def page() -> str:
    parts = [_OPENING]
    for words, command in commands(typer.main.get_command(app)):
        parts.append(f"## {words}\n")
        parts.append(_prose(inspect.cleandoc(command.help or "")))
        if rows := [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]:
            parts.append("\n".join(["| argument, option | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _prose(text: str) -> str:
    """Paragraphs as they are; indented ones, the examples, as one block of code."""
    blocks: list[str] = []
    code: list[str] = []
    for paragraph in [*re.split(r"\n\s*\n", text), ""]:
        lines = paragraph.strip("\n").splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            code += [line[4:] for line in lines]
            continue
        if code:
            blocks.append("\n".join(["```", *code, "```"]) + "\n")
            code = []
        if lines:
            blocks.append(_plain(" ".join(line.strip() for line in lines)) + "\n")
    return "\n".join(blocks)


def _row(parameter: Any) -> str:
    metavar = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        named = " or ".join(f"`{one}`" for one in metavar.split("|"))  # no | within the code of a table's cell
    else:
        value = "" if parameter.is_flag else " " + " or ".join(metavar.split("|"))
        options = [*parameter.opts, *parameter.secondary_opts]
        named = ", ".join([*(f"`{option}`" for option in options[:-1]), f"`{options[-1]}{value}`"])
    said = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", " ".join((parameter.help or "").split()))
    default = parameter.default
    known = not callable(default) and default not in (None, (), [], "")
    if parameter.required and parameter.param_type_name == "option":
        said += " Required."
    elif parameter.secondary_opts:
        said += f" Default: {(parameter.opts if default else parameter.secondary_opts)[0]}."
    elif parameter.show_default and known and not isinstance(default, bool):
        said += f" Default: {default}."
    return f"| {named} | {_plain(said)} |"


def _plain(text: str) -> str:
    """For a Markdown cell or paragraph: nothing in it is a tag or ends a cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")
