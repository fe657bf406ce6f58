"""Texts of others on a terminal."""

from __future__ import annotations

import io

from rich.table import Table
from rich.text import Text

from diloco.text_console import TextConsole

HOSTILE = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b31m \r hidden \x00"


def test_a_terminal_does_not_obey_what_others_wrote() -> None:
    """A syncer's phase message, a condition, an Event: as a line, in a table, in a text with a style."""
    table = Table(HOSTILE)
    table.add_row(Text(HOSTILE, "yellow"))
    for shown in (Text(HOSTILE, "red"), table):
        out = io.StringIO()
        TextConsole(file=out, force_terminal=False, color_system=None, width=200).print(shown)
        text = out.getvalue()
        assert "hid" in text and not set(text) & set("\x1b\x07\x9b\r\x00"), text
    out = io.StringIO()
    TextConsole(file=out, force_terminal=True, color_system="standard").print(Text("\x1b[2Jred", "red"))
    assert "\x1b[31m\N{REPLACEMENT CHARACTER}[2Jred" in out.getvalue()  # the console's own colour, not the text's
