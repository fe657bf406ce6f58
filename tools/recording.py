"""Record a command in a terminal, and write the recording as one SVG that plays by itself.

    python tools/recording.py --svg docs/pictures/demo.svg -- make demo

The command runs in a pseudo-terminal of its own, and its output is shown here while it runs. What it printed is kept
with its times, in asciinema's format (asciicast v2), in the file that ``--cast`` names; ``--from-cast`` renders such a
file again and runs nothing. The picture shows the screen as it was, faster (``--seconds`` is how long it plays) and
with at most ``--frames`` frames; it says by how much faster. The folder that it was made in is ``…`` there. Styles and
animation are CSS within the file, so that a page may show it as an image.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

from diloco_protocol.common.files import write_whole

CELL = (7.8, 17)  # a character's width and height, in pixels, at FONT
FONT = 13
MARGIN = 12
HOLD = 0.15  # the last frame's share of the time
COLOURS = {
    "black": "#3b4252", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d8dee9", "default": "#d8dee9",
    "brightblack": "#7f8899", "brightred": "#ff7b85", "brightgreen": "#b5e08f", "brightbrown": "#ffd68a",
    "brightblue": "#82c4ff", "brightmagenta": "#d99bee", "brightcyan": "#7fdbe6", "brightwhite": "#ffffff",
}  # fmt: skip
BACKGROUND = "#1b1f27"


@dataclass(frozen=True)
class Recording:
    """What a terminal of ``width`` × ``height`` characters was sent: ``events`` of (seconds, text)."""

    width: int
    height: int
    events: tuple[tuple[float, str], ...]

    def without(self, folder: Path) -> Recording:
        """The same, where this folder of the machine that recorded it is ``…``, also where two events share its name:
        they become one."""
        name, events = str(folder), list[tuple[float, str]]()
        begun: tuple[float, str] | None = None  # ends as the folder's name begins
        for at, text in self.events:
            if begun is not None:
                at, text = begun[0], begun[1] + text
            text = text.replace(name, "…")
            begun = (at, text) if any(text.endswith(name[:length]) for length in range(1, len(name))) else None
            if begun is None:
                events.append((at, text))
        return Recording(self.width, self.height, (*events, *([] if begun is None else [begun])))

    def to_cast(self) -> str:
        head = {"version": 2, "width": self.width, "height": self.height}
        lines = [head, *([round(at, 3), "o", text] for at, text in self.events)]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    @classmethod
    def from_cast(cls, text: str) -> Recording:
        head, *events = (json.loads(line) for line in text.splitlines() if line.strip())
        told = tuple((float(at), str(data)) for at, kind, data in events if kind == "o")
        return cls(int(head["width"]), int(head["height"]), told)


def record(command: Sequence[str], width: int, height: int) -> tuple[Recording, int]:
    """Run the command in a terminal of that size; what it printed, and its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    size = {"COLUMNS": str(width), "LINES": str(height), "TERM": "xterm-256color"}
    began, events = time.monotonic(), []
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=os.environ | size
    )
    os.close(theirs)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    try:
        while True:
            ready, _, _ = select.select([ours], [], [], 0.5)
            if not ready and child.poll() is not None:
                break
            try:
                data = os.read(ours, 65536) if ready else b""
            except OSError:  # Linux's way of saying that nobody holds the other end
                break
            if text := decode(data):
                events.append((time.monotonic() - began, text))
                sys.stdout.write(text)
                sys.stdout.flush()
    finally:
        os.close(ours)
        status = child.wait(timeout=60)
    return Recording(width, height, tuple(events)), status


@dataclass(frozen=True)
class Run:
    """Characters of one line that look alike, from column ``at``."""

    at: int
    text: str
    colour: str
    bold: bool


Line = tuple[Run, ...]


def read_line(row: dict[int, pyte.screens.Char], width: int) -> Line:
    """A line of the screen as runs; spaces at a run's ends are left out."""
    cells = [(column, row[column]) for column in range(width)]
    runs = []
    for (colour, bold), group in groupby(cells, key=lambda cell: (cell[1].fg, cell[1].bold)):
        found = list(group)
        text = "".join(char.data for _, char in found)
        if text.strip():
            skipped = len(text) - len(text.lstrip())
            runs.append(Run(found[0][0] + skipped, text.strip(), colour, bold))
    return tuple(runs)


def take_frames(recording: Recording, most: int) -> list[tuple[float, tuple[Line, ...]]]:
    """At most ``most`` screens, evenly over the time, of those that differ from the one before: (seconds, lines)."""
    screen = pyte.Screen(recording.width, recording.height)
    stream = pyte.Stream(screen)
    apart = recording.events[-1][0] / most
    frames: list[tuple[float, tuple[Line, ...]]] = []
    for number, (at, text) in enumerate(recording.events):
        stream.feed(text)
        last = number == len(recording.events) - 1
        if frames and at - frames[-1][0] < apart and not last:
            continue
        lines = tuple(read_line(screen.buffer[y], recording.width) for y in range(recording.height))
        if not frames or lines != frames[-1][1]:
            frames.append((at, lines))
    return frames


def draw_line(line: Line) -> str:
    """A line's SVG. Each word is placed by itself: fonts differ in the width of their spaces."""
    spans = []
    for run in line:
        for at, word in split_words(run.text):
            weight = ' font-weight="bold"' if run.bold else ""
            width = f' textLength="{len(word) * CELL[0]:.1f}"' if len(word) > 1 else ""
            colour = COLOURS.get(run.colour, f"#{run.colour}" if len(run.colour) == 6 else COLOURS["default"])
            place = f'x="{(run.at + at) * CELL[0]:.1f}" fill="{colour}"'
            spans.append(f"<tspan {place}{weight}{width}>{escape(word)}</tspan>")
    return f"<text>{''.join(spans)}</text>"


def split_words(text: str) -> Iterator[tuple[int, str]]:
    """The parts of a text that no two spaces divide, each with its column."""
    at = 0
    for part in text.split("  "):
        if word := part.strip():
            yield at + part.index(word), word
        at += len(part) + 2


def render(recording: Recording, seconds: float, most: int, title: str) -> str:
    """The recording as an animated SVG. Lines that occur in several frames stand in it once."""
    frames = take_frames(recording, most)
    total = max(recording.events[-1][0], 0.001)
    width, height = recording.width * CELL[0], recording.height * CELL[1]
    names: dict[Line, str] = {}
    strip, keys = [], []
    for number, (at, lines) in enumerate(frames):
        uses = []
        for y, line in enumerate(lines):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{(y + 0.8) * CELL[1]:.1f}"/>')
        strip.append(f'<g transform="translate({number * width:.1f})">{"".join(uses)}</g>')
        share = 100 * (1 - HOLD) * at / total if number else 0.0
        keys.append(f"{share:.2f}%{{transform:translateX({-number * width:.1f}px)}}")
    keys.append(f"100%{{transform:translateX({-(len(frames) - 1) * width:.1f}px)}}")
    lines_once = "".join(f'<g id="{name}">{draw_line(line)}</g>' for line, name in names.items())
    faster = total / (seconds * (1 - HOLD))
    told = f"{title}: {total:.0f} s, played {faster:.0f} times as fast" if faster > 1.5 else title
    outer = (width + 2 * MARGIN, height + 2 * MARGIN + CELL[1])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {outer[0]:.0f} {outer[1]:.0f}" width="{outer[0]:.0f}">'
        f"<title>{escape(told)}</title>"
        f"<style>text{{font:{FONT}px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}}"
        f"@keyframes play{{{''.join(keys)}}}"
        f"#strip{{animation:play {seconds:g}s steps(1,end) infinite}}</style>"
        f"<defs>{lines_once}</defs>"
        f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>'
        f'<svg x="{MARGIN}" y="{MARGIN}" width="{width:.1f}" height="{height:.1f}">'
        f'<g id="strip">{"".join(strip)}</g></svg>'
        f'<text x="{MARGIN}" y="{outer[1] - MARGIN:.0f}" fill="{COLOURS["brightblack"]}">{escape(told)}</text>'
        "</svg>\n"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="Example: tools/recording.py --svg demo.svg -- make demo"
    )
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE", help="where the picture goes")
    parser.add_argument("--cast", type=Path, metavar="FILE", help="where what was printed goes, with its times")
    parser.add_argument("--from-cast", type=Path, metavar="FILE", help="render this recording; nothing is run")
    parser.add_argument("--title", help="the line below the picture (default: the command)")
    parser.add_argument(
        "--size", default="100x30", metavar="WxH", help="the terminal's columns and lines (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="how long it plays (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=120, help="at most so many (default: %(default)s)")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --: what to run")
    chosen = parser.parse_args(arguments)
    if bool(chosen.command) == bool(chosen.from_cast):
        parser.error("name a command after --, or a recording by --from-cast")
    if chosen.from_cast:
        recording, status = Recording.from_cast(chosen.from_cast.read_text(encoding="utf-8")).without(Path.cwd()), 0
    else:
        width, _, height = chosen.size.partition("x")
        recording, status = record(chosen.command, int(width), int(height))
        recording = recording.without(Path.cwd())
        if chosen.cast:
            write_whole(chosen.cast, recording.to_cast().encode())
    if status or not recording.events:
        print(f"recording: the command ended with exit code {status}; no picture is written", file=sys.stderr)
        return status or 1
    title = chosen.title or " ".join(chosen.command)
    write_whole(chosen.svg, render(recording, chosen.seconds, chosen.frames, title).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
