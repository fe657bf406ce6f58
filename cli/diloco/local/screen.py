"""What a person sees of a run: a live picture on a terminal, plain lines elsewhere.

Both show the same: loss per learner and of the merged model, tokens/s, the fragments'
versions, who is in the quorum, and events (a kill, the loss noticed, the newcomer).
The picture is made from the status document and the runner's own table of processes by
plain functions; ``Live`` and ``Lines`` only decide when and where it goes.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco_protocol.common.format_units import rate_text, seconds_text
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
    status: dict[str, Any] = field(default_factory=dict)
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


def number(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def nats(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def merged_loss(status: dict[str, Any]) -> Any:
    evaluations = status.get("eval_loss") or []
    return evaluations[-1][1] if evaluations else None


def progress(view: RunView) -> str:
    """How far the job is towards its stop."""
    status = view.status
    slots = status.get("slots") or []
    reached = {
        "steps": max((slot.get("step") or 0 for slot in slots), default=0),
        "tokens": (status.get("tokens") or {}).get("trained", 0),
        "seconds": status.get("elapsed_seconds") or 0,
    }
    if reached["tokens"] is None:  # not known here: a region's copy of a job
        return f"step {number(reached['steps'])}"
    if view.stop is None:
        return f"step {number(reached['steps'])}, {number(reached['tokens'])} tokens"
    unit, limit = view.stop
    text = f"{number(reached[unit])} of {number(limit)} {unit}"
    return text if unit == "tokens" else f"{text}, {number(reached['tokens'])} tokens"


def silence(view: RunView) -> str:
    """That the syncer does not answer, where it should."""
    ended = view.status.get("phase") in ENDED_PHASES
    return "" if view.serving or ended or not view.status else "the syncer does not answer"


def version_strip(versions: list[int], width: int = 64) -> str:
    """One block per fragment, its height by how far its version is ahead of the lowest."""
    if not versions:
        return "none yet"
    low, high = min(versions), max(versions)
    shown = versions if len(versions) <= width else [versions[i * len(versions) // width] for i in range(width)]
    strip = "".join(_BLOCKS[min(version - low, len(_BLOCKS) - 1)] for version in shown)
    return f"{strip}  {low}" if low == high else f"{strip}  {low} to {high}"


def progress_line(view: RunView) -> str:
    """The run on one line."""
    status = view.status
    if not status:
        return "starting"
    slots = status.get("slots") or []
    quorum = status.get("quorum") or {}
    versions = status.get("versions") or [0]
    losses = " ".join(nats(slot.get("loss")) if slot.get("state") == SlotState.ACTIVE else "-" for slot in slots)
    return (
        f"{status.get('elapsed_seconds') or 0:7.1f} s  {status.get('phase', '-')}  {progress(view)}"
        f" ({number(status.get('tokens_per_second'))}/s)  loss {losses}  merged {nats(merged_loss(status))}"
        f"  versions {min(versions)}..{max(versions)}"
        f"  quorum {quorum.get('active', 0)}/{quorum.get('required', 0)}"
        + (f"  ({silence(view)})" if silence(view) else "")
    )


def picture(view: RunView, events: list[Text]) -> RenderableType:
    status = view.status
    quorum = status.get("quorum") or {}
    head = Table.grid(padding=(0, 3))
    head.add_row(
        Text(view.job, style="bold"),
        Text(str(status.get("phase") or "starting"), style="bold cyan"),
        f"{status.get('elapsed_seconds') or 0:.0f} s",
        progress(view),
        f"{number(status.get('tokens_per_second'))} tokens/s",
        f"merged loss {nats(merged_loss(status))}",
        Text(silence(view), style="red"),
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title, side in (
        ("learner", "left"),
        ("slot", "right"),
        ("state", "left"),
        ("step", "right"),
        ("tokens", "right"),
        ("loss", "right"),
        ("s/step", "right"),
        ("waited", "right"),
        ("merged", "right"),
        ("", "left"),
    ):
        table.add_column(title, justify="right" if side == "right" else "left", no_wrap=True)
    for slot in status.get("slots") or []:
        state = str(slot.get("state") or "-")
        name = view.processes.get((str(slot.get("region")), int(slot.get("ordinal") or 0)), "-")
        compute, stalled = slot.get("compute_seconds") or 0.0, slot.get("stalled_seconds") or 0.0
        table.add_row(
            name,
            str(slot.get("slot")),
            Text(state, style=_STATE_STYLES.get(state, "")),
            number(slot.get("step")),
            number(slot.get("tokens")),
            nats(slot.get("loss")),
            f"{slot.get('step_seconds') or 0:.3f}",
            f"{100 * stalled / (compute + stalled):.1f} %" if compute + stalled > 0 else "-",
            number(slot.get("merged_pushes")),
            Text(view.notes.get(name, slot_note(slot)), style="yellow"),
        )
    waiting = {p: r for r in status.get("rounds") or [] for p in [r.get("fragment")]}
    rounds = "  ".join(
        f"fragment {p}: {len(r.get('responders') or [])} in, {len(r.get('waiting') or [])} awaited"
        for p, r in sorted(waiting.items())
    )
    foot = Table.grid(padding=(0, 2))
    foot.add_row(Text("fragments", style="dim"), version_strip(status.get("versions") or []))
    foot.add_row(
        Text("quorum", style="dim"),
        f"{quorum.get('active', 0)} active, {quorum.get('required', 0)} needed"
        + (f", {status.get('standby')} standing by" if status.get("standby") else ""),
    )
    foot.add_row(Text("rounds", style="dim"), rounds or "none open")
    if links := links_text(status):
        foot.add_row(Text("links", style="dim"), links)
    for who, message in slow_links(status):
        foot.add_row("", Text(f"{who}: {message}", style="yellow"))
    return Group(head, "", table, "", foot, "", *events)


def slot_note(slot: dict[str, Any]) -> str:
    """What is the matter with a slot, in a word."""
    if slot.get("starved"):
        return "starved"
    return "slow link" if (slot.get("link") or {}).get("too_slow") else ""


def links_text(status: dict[str, Any]) -> str:
    """The slowest of the links that were measured; empty where none was."""
    links = [slot["link"] for slot in status.get("slots") or [] if slot.get("link")]
    parts = []
    for name, key in (("up", "up_bytes_per_second"), ("down", "down_bytes_per_second")):
        if rates := [link[key] for link in links if link.get(key)]:
            parts.append(f"{name} {rate_text(min(rates))}")
    if trips := [link["round_trip_seconds"] for link in links if link.get("round_trip_seconds")]:
        parts.append(f"round trip {seconds_text(max(trips))}")
    return f"slowest measured: {', '.join(parts)}" if parts else ""


def slow_links(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Who has a link slower than the job needs, and what that means."""
    return [
        (f"{slot.get('region')}-{slot.get('ordinal')}", str(slot["link"].get("message")))
        for slot in status.get("slots") or []
        if slot.get("link") and slot["link"].get("too_slow")
    ]


def summary(report: dict[str, Any]) -> Table:
    """The report as a small table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()

    def row(name: str, text: str) -> None:
        table.add_row(name, text)

    tokens, versions = report.get("tokens") or {}, report.get("versions") or {}
    row("outcome", str(report.get("outcome")))
    row("loss", f"{nats(report.get('initial_loss'))} at the start, {nats(report.get('final_loss'))} at the end")
    row("tokens", ", ".join(f"{number(tokens.get(k))} {k}" for k in ("trained", "merged", "pending", "dropped")))
    row(
        "merges",
        f"{number(report.get('merges'))}, versions {versions.get('min')} to {versions.get('max')},"
        f" {number(report.get('steps'))} steps",
    )
    if isinstance(report.get("goodput"), float):
        row("goodput", f"{report['goodput']:.3f}, uptime {report.get('uptime') or 0:.3f}")
    row("wire", f"{number(report.get('bytes_up'))} bytes up, {number(report.get('bytes_down'))} down")
    regions = report.get("regions") or []
    for region in regions if len(regions) > 1 else ():
        row(f"wire {region.get('name') or 'others'}", carried_text(region))
    row("time", f"{report.get('wall_seconds') or 0:.1f} s")
    for fault in report.get("faults") or []:
        row("fault", fault_text(fault))
    return table


def carried_text(region: dict[str, Any]) -> str:
    """What a region's link carried."""
    text = f"{number(region.get('bytes_up'))} bytes up, {number(region.get('bytes_down'))} down"
    up, down = region.get("wire_bytes_up"), region.get("wire_bytes_down")
    return text if up is None else f"{text}; with all beside it and TLS {number(up)} up, {number(down)} down"


def fault_text(fault: dict[str, Any]) -> str:
    parts = [f"{fault['action']} {fault['target']} at {fault['at_seconds']:.1f} s:"]
    for name in ("detected", "joined", "first_step", "recovered"):
        seconds = fault.get(f"{name}_seconds")
        parts.append(f"{name.replace('_', ' ')} {'-' if seconds is None else f'{seconds:.2f} s'}")
    return parts[0] + " " + ", ".join(parts[1:])


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
        if now >= self._next and view.status:
            self._next = now + LINE_SECONDS
            self._print(progress_line(view))

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._out, flush=True)
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
    """The picture on a terminal, lines elsewhere."""
    return Live(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console.file)
