"""Examples in the help fit a terminal of 80 columns, so that each line can be copied."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from diloco.main import app

COLUMNS = 80


def pages(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    yield names, inspect.cleandoc(group.help or "")
    for name, command in getattr(group, "commands", {}).items():
        yield from pages(command, (*names, name))


PAGES = list(pages(typer.main.get_command(app)))


def lines_of_examples(page: str) -> list[str]:
    return [line.strip() for line in page.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize(("names", "page"), PAGES, ids=[" ".join(names) or "diloco" for names, _ in PAGES])
def test_a_line_of_an_example_is_a_line_of_the_terminal(names: tuple[str, ...], page: str) -> None:
    result = CliRunner(env={"COLUMNS": str(COLUMNS), "TERMINAL_WIDTH": str(COLUMNS)}).invoke(app, [*names, "--help"])
    assert result.exit_code == 0
    shown = [line.strip() for line in result.output.splitlines()]
    assert all(len(line) <= COLUMNS for line in result.output.splitlines())
    assert [line for line in lines_of_examples(page) if line not in shown] == []


def test_pages_have_examples() -> None:
    assert sum(bool(lines_of_examples(page)) for _, page in PAGES) > 20


def parameters(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for parameter in group.params:
        yield " ".join((*names, parameter.name)), parameter
    for name, command in getattr(group, "commands", {}).items():
        yield from parameters(command, (*names, name))


PARAMETERS = dict(parameters(typer.main.get_command(app)))


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=list(PARAMETERS))
def test_each_argument_and_option_says_what_it_is(parameter: Any) -> None:
    said = parameter.help or ""
    assert said and not said.startswith(("Of ", "That ", "Likewise", "M.", "P.")), said
    assert parameter.metavar or getattr(parameter, "is_flag", False), "its value has no name"
