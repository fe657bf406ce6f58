"""A console for texts that others wrote: job messages, conditions, Events, status documents, reports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from diloco.console import discard
from diloco_protocol.common.logs import printable

_TRAILING = re.compile(r" +$", re.MULTILINE)


class TextConsole(Console):
    """A console that writes no control character but its own: what a text holds of them is replaced. Markup and names
    of emoji in a text are text. With ``soft_wrap`` lines stay whole, and tables have all columns where nobody's window
    limits them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})
        if self.soft_wrap and not self.is_terminal:
            self.width = 200

    def on_broken_pipe(self) -> None:
        """The reader has left: the program's exit code is about its work, and rich's would be 1."""
        self.quiet = True
        discard(self.file)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """What is written. A file or a pipe gets no blanks at the ends of lines, which fill tables to their width."""
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else _TRAILING.sub("", text)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of anything that can be shown; those of the console itself (cursor moves) stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
