"""What a person sees of a run: a live picture on a terminal, plain lines elsewhere.

Both show the same: loss per learner and of the merged model, tokens/s, the fragments' versions, who is in the quorum,
and events (a kill, the loss noticed, the newcomer). The picture is made from the status document and the runner's own
table of processes by plain functions; ``Live`` and ``Lines`` only decide when and where it goes.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.console import print_text
from diloco.local.summary import nats, number
from diloco_protocol.common.format_units import rate_text, seconds_text
from diloco_protocol.documents import SlotRow, StatusDocument
from diloco_protocol.vocabulary import ENDED_PHASES, SlotState

EVENTS_SHOWN = 14
LEAST_ROOM = 3  # lines of events, on a small terminal
LINE_SECONDS = 5.0  # between plain progress lines
_BLOCKS = "▁▂▃▄▅▆▇█"
_STATE_STYLES: dict[str, str] = {
    SlotState.ACTIVE: "green",
    SlotState.SUSPECT: "yellow",
    SlotState.LOST: "red",
    SlotState.DRAINING: "yellow",
    SlotState.DRAINED: "dim",
}


@dataclass(slots=True)
class RunView:
    """All that is shown; the runner keeps it up to date."""

    job: str
    stop: tuple[str, float] | None = None  # unit (steps, tokens or seconds) and limit; None: not known
    status: StatusDocument | None = None
    processes: dict[tuple[str, int], str] = field(default_factory=dict)  # (region, ordinal) -> name
    notes: dict[str, str] = field(default_factory=dict)  # process -> what the runner does about it
    serving: bool = False  # the syncer answers


class Screen(Protocol):
    def event(self, text: str, style: str = "") -> None:
        """Something happened."""

    def update(self, view: RunView) -> None:
        """The figures have changed."""

    def close(self) -> None: ...


# ------------------------------------------------------------------ figures


def merged_loss(status: StatusDocument | None) -> float | None:
    return status.eval_loss[-1][1] if status is not None and status.eval_loss else None


def progress(stop: tuple[str, float] | None, step: int | None, tokens: int | None, seconds: float) -> str:
    """How far a job is towards its stop (unit and limit). ``tokens`` None: not known here, as of a region's copy."""
    if tokens is None:
        return f"step {number(step)}"
    if stop is None:
        return f"step {number(step)}, {number(tokens)} tokens"
    unit, limit = stop
    reached = {"steps": step, "tokens": tokens, "seconds": seconds}[unit]
    text = f"{number(reached)} of {number(limit)} {unit}"
    return text if unit == "tokens" else f"{text}, {number(tokens)} tokens"


def _progress(view: RunView) -> str:
    status = view.status
    if status is None:
        return progress(view.stop, 0, 0, 0.0)
    return progress(view.stop, status.step, status.tokens.trained, status.elapsed_seconds)


def silence(view: RunView) -> str:
    """That the syncer does not answer, where it should."""
    if view.serving or view.status is None or view.status.phase in ENDED_PHASES:
        return ""
    return "the syncer does not answer"


def version_strip(versions: list[int], width: int = 64) -> str:
    """One block per fragment, its height by how far its version is ahead of the lowest."""
    if not versions:
        return "none yet"
    low, high = min(versions), max(versions)
    shown = versions if len(versions) <= width else [versions[i * len(versions) // width] for i in range(width)]
    strip = "".join(_BLOCKS[min(version - low, len(_BLOCKS) - 1)] for version in shown)
    return f"{strip}  {low}" if low == high else f"{strip}  {low} to {high}"


def progress_line(view: RunView) -> str:
    status = view.status
    if status is None:
        return "starting"
    versions = status.versions or [0]
    losses = " ".join(nats(slot.loss if slot.state is SlotState.ACTIVE else None) for slot in status.slots)
    return (
        f"{status.elapsed_seconds:7.1f} s  {status.phase}  {_progress(view)}"
        f" ({number(status.tokens_per_second)}/s)  loss {losses}  merged {nats(merged_loss(status))}"
        f"  versions {min(versions)}..{max(versions)}"
        f"  quorum {status.quorum.active}/{status.quorum.required}" + (f"  ({silence(view)})" if silence(view) else "")
    )


def picture(view: RunView, events: list[Text]) -> RenderableType:
    """The run as a person sees it on a terminal; ``events``: the newest, below it."""
    status = view.status
    head = Table.grid(padding=(0, 3))
    head.add_row(
        Text(view.job, style="bold"),
        Text(status.phase if status else "starting", style="bold cyan"),
        f"{status.elapsed_seconds if status else 0:.0f} s",
        _progress(view),
        f"{number(status.tokens_per_second if status else None)} tokens/s",
        f"merged loss {nats(merged_loss(status))}",
        Text(silence(view), style="red"),
    )
    foot = Table.grid(padding=(0, 2))
    foot.add_row(Text("fragments", style="dim"), version_strip(status.versions if status else []))
    if status is None:
        return Group(head, "", foot, "", *events)
    waiting = f", {status.standby} standing by" if status.standby else ""
    quorum = f"{status.quorum.active} active, {status.quorum.required} needed{waiting}"
    foot.add_row(Text("quorum", style="dim"), quorum)
    rounds = "  ".join(
        f"fragment {row.fragment}: {len(row.responders)} in, {len(row.waiting)} awaited"
        for row in sorted(status.rounds, key=lambda row: row.fragment)
    )
    foot.add_row(Text("rounds", style="dim"), rounds or "none open")
    if links := links_text(status):
        foot.add_row(Text("links", style="dim"), links)
    for who, message in slow_links(status):
        foot.add_row("", Text(f"{who}: {message}", style="yellow"))
    return Group(head, "", _slots_table(view, status.slots), "", foot, "", *events)


def _slots_table(view: RunView, slots: Sequence[SlotRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("learner", "slot", "state", "step", "tokens", "loss", "s/step", "waited", "merged", ""):
        table.add_column(title, justify="left" if title in ("learner", "state", "") else "right", no_wrap=True)
    for slot in slots:
        name = view.processes.get((slot.region, slot.ordinal), "-")
        stalled = slot.stalled_seconds or 0.0
        seconds = stalled + (slot.compute_seconds or 0.0)
        table.add_row(
            name,
            str(slot.slot),
            Text(slot.state, style=_STATE_STYLES.get(slot.state, "")),
            number(slot.step),
            number(slot.tokens),
            nats(slot.loss),
            f"{slot.step_seconds or 0:.3f}",
            f"{100 * stalled / seconds:.1f} %" if seconds > 0 else "-",
            number(slot.merged_pushes),
            Text(view.notes.get(name, slot_note(slot)), style="yellow"),
        )
    return table


def slot_note(slot: SlotRow) -> str:
    """What is the matter with a slot, in a word."""
    if slot.diverged:
        return "diverged"
    if slot.starved:
        return "starved"
    return "slow link" if slot.link is not None and slot.link.too_slow else ""


def links_text(status: StatusDocument) -> str:
    """The slowest of the links that were measured; empty where none was."""
    links = [slot.link for slot in status.slots if slot.link is not None]
    parts = []
    if rates := [link.up_bytes_per_second for link in links if link.up_bytes_per_second]:
        parts.append(f"up {rate_text(min(rates))}")
    if rates := [link.down_bytes_per_second for link in links if link.down_bytes_per_second]:
        parts.append(f"down {rate_text(min(rates))}")
    if trips := [link.round_trip_seconds for link in links if link.round_trip_seconds]:
        parts.append(f"round trip {seconds_text(max(trips))}")
    return f"slowest measured: {', '.join(parts)}" if parts else ""


def slow_links(status: StatusDocument) -> list[tuple[str, str]]:
    """Who has a link slower than the job needs, and what that means."""
    return [
        (f"{slot.region}-{slot.ordinal}", slot.link.message)
        for slot in status.slots
        if slot.link is not None and slot.link.too_slow
    ]


# ------------------------------------------------------------------ where it goes


class Lines:
    """Plain lines, at most one of progress every ``LINE_SECONDS``."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stdout
        self._next = 0.0

    def event(self, text: str, style: str = "") -> None:
        self._print(text)

    def update(self, view: RunView) -> None:
        now = time.monotonic()
        if now >= self._next and view.status is not None:
            self._next = now + LINE_SECONDS
            self._print(progress_line(view))

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        try:
            print_text(text, file=self._out, flush=True)
        except (BrokenPipeError, ValueError):
            self._out = open("/dev/null", "w")  # noqa: SIM115 - the reader left (`| head`); the run goes on


class Live:
    """A picture redrawn in place, with the last events below it."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as RichLive

        self._events: deque[Text] = deque(maxlen=EVENTS_SHOWN)
        self._start = time.monotonic()
        self._view: RunView | None = None
        self._console = console
        self._live = RichLive(console=console, refresh_per_second=4, auto_refresh=False, transient=False)
        self._live.start()

    def event(self, text: str, style: str = "") -> None:
        stamp = f"{time.monotonic() - self._start:7.1f} s  "
        self._events.append(Text(stamp, style="dim") + Text(text, style=style))
        if self._view is not None:
            self.update(self._view)
        else:
            self._live.update(Group(*self._events), refresh=True)

    def update(self, view: RunView) -> None:
        self._view = view
        # What is taller than the terminal is cut off at its end, where the newest events are.
        figures = len(self._console.render_lines(picture(view, []), self._console.options))
        room = max(LEAST_ROOM, self._console.height - figures)
        events: deque[Text] = deque()
        for event in reversed(self._events):
            room -= len(event.wrap(self._console, self._console.width))
            if room < 0:
                break
            events.appendleft(event)
        self._live.update(picture(view, list(events)), refresh=True)

    def close(self) -> None:
        self._live.stop()


def make_screen(console: Console) -> Screen:
    return Live(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console.file)
