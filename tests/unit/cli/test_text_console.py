"""Texts of others on a terminal."""

from __future__ import annotations

import ast
import errno
import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

import diloco
from diloco.cluster.fetch import show_report
from diloco.console import CommandError, command
from diloco.local.screen import Lines, Live, RunView
from diloco.local.status import show
from diloco.text_console import TextConsole
from diloco_protocol.common import logs
from diloco_protocol.documents import OutputRow
from status_documents import job_report, slot_row, status_document

HOSTILE = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b31m \r [/of] hidden \x00"
PACKAGE = Path(diloco.__file__).parent


def is_harmless(text: str) -> bool:
    return "hid" in text and not set(text) & set("\x1b\x07\x9b\r\x00")


@pytest.mark.promise(
    "A terminal does not obey text that others wrote, whichever command prints it: messages, conditions, "
    "Events, reports, errors, log lines",
    section="Hostile callers",
)
def test_a_terminal_does_not_obey_what_others_wrote() -> None:
    """A syncer's phase message, a condition, an Event: as a line, in a table, in a text with a style."""
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, "yellow"))
    for shown in (Text(HOSTILE, "red"), table):
        out = io.StringIO()
        TextConsole(file=out, force_terminal=False, color_system=None, width=200).print(shown)
        assert is_harmless(out.getvalue()), out.getvalue()
    out = io.StringIO()
    TextConsole(file=out, force_terminal=True, color_system="standard").print(Text("\x1b[2Jred", "red"))
    assert "\x1b[31m\N{REPLACEMENT CHARACTER}[2Jred" in out.getvalue()  # the console's own colour, not the text's


@pytest.mark.promise(
    "A terminal does not obey text that others wrote, whichever command prints it: messages, conditions, "
    "Events, reports, errors, log lines",
    section="Hostile callers",
)
def test_what_run_status_and_report_show_of_others_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    output = OutputRow(uri="/out", state="failed", message=HOSTILE)
    status = status_document(job=HOSTILE, message=HOSTILE, phase="training", slots=[slot_row(region=HOSTILE)])
    for print_it in (
        lambda: show(status),
        lambda: show_report(job_report(output=output), False),
        lambda: show_report(job_report(output=output), True),
        lambda: Lines().event(HOSTILE),
        lambda: Lines().update(RunView(HOSTILE, None, status)),
    ):
        print_it()
        said = capsys.readouterr().out
        assert said.strip() and not set(said) & set("\x1b\x07\x9b\r\x00"), said


@pytest.mark.promise(
    "A terminal does not obey text that others wrote, whichever command prints it: messages, conditions, "
    "Events, reports, errors, log lines",
    section="Hostile callers",
)
def test_neither_are_errors_nor_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal's message in the log of a learner in the foreground, and in the error that ends a command."""

    @command
    def fail() -> None:
        raise CommandError(HOSTILE)

    with pytest.raises(BaseException, match="2"):
        fail()
    assert is_harmless(capsys.readouterr().err)
    record = logging.LogRecord("a", logging.INFO, "", 0, "refused: %s", (HOSTILE,), None)
    assert is_harmless(logs.TextLines().format(record))


def named(call: ast.Call) -> str:
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


@pytest.mark.promise(
    "A terminal does not obey text that others wrote, whichever command prints it: messages, conditions, "
    "Events, reports, errors, log lines",
    section="Hostile callers",
)
def test_nothing_is_printed_but_by_what_replaces_control_characters() -> None:
    """``print_text`` and ``TextConsole`` are for all; the guard of a child says only which program it could not run."""
    allowed = {("console.py", "print"), ("child_guard.py", "print")}
    found: list[Any] = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and named(node) in ("print", "Console", "echo", "secho"):
                consoles = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).endswith("onsole")
                if not consoles and not ast.unparse(node.func).startswith("TextConsole"):
                    found.append((path.name, named(node), node.lineno))
    assert {each[:2] for each in found} <= allowed, found
    assert ("console.py", "print") in {each[:2] for each in found}  # the search finds what there is


def test_a_pipe_gets_no_blanks_at_the_ends_of_lines() -> None:
    console = TextConsole(file=io.StringIO(), soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("outcome", "complete")
    table.add_row("traffic", "3 MB up, 18.2 MB down")
    console.print(table)
    assert console.file.getvalue() == "outcome  complete\ntraffic  3 MB up, 18.2 MB down\n"  # type: ignore[attr-defined]


def test_a_terminal_that_was_closed_ends_no_run() -> None:
    class Terminal(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    for is_live in (False, True):
        terminal = Terminal()
        screen = Live(TextConsole(file=terminal, force_terminal=True)) if is_live else Lines(terminal)
        terminal.gone = True
        screen.event("one")
        screen.show_text("two")
        screen.update(RunView("tiny"))
        screen.close()
