"""A console for texts that others wrote: job messages, conditions, Events, status documents, reports; and what fits
the width that it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

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


class ByWidth:
    """Something that is made for the width that there is."""

    def __init__(self, make: Callable[[int], RenderableType]) -> None:
        self._make = make

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._make(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._make(options.max_width))


def fitting_table(
    titles: Sequence[str],
    rows: Sequence[Mapping[str, str | Text]],
    width: int,
    *,
    left: Container[str],
    left_out: Sequence[str],
) -> Table:
    """A table with as many columns as there is room for: no cell is cut. ``left``: the columns of words; ``left_out``:
    those that go for want of room, in this order."""
    columns = {title: max(len(title), *(cell_len(str(row[title])) for row in rows), 0) for title in titles}
    for title in left_out:
        if sum(columns.values()) + 2 * (len(columns) - 1) <= width:
            break
        columns.pop(title, None)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in columns:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in columns))
    return table
