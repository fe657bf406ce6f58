"""What a person sees of a run: a live picture on a terminal, plain lines elsewhere.

Both show the same: loss per learner and of the merged model, tokens/s, the fragments' versions, who is in the quorum,
and events (a kill, the loss noticed, the newcomer). The picture is made from the status document and the runner's own
table of processes by plain functions; ``Live`` and ``Lines`` only decide when and where it goes.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.console import lasting_output, print_lasting
from diloco.local.summary import nats, number
from diloco.text_console import ByWidth, TextConsole, fitting_table
from diloco_protocol.common.format_units import download_text, duration_text, rate_text, seconds_text
from diloco_protocol.common.logs import printable
from diloco_protocol.documents import SlotRow, StatusDocument
from diloco_protocol.vocabulary import ENDED_PHASES, SHARD_FAILING, JobPhase, SlotState

EVENTS_SHOWN = 14
LEAST_ROOM = 3  # lines of events, on a small terminal
LINE_SECONDS = 5.0  # between plain progress lines
SAME_LINE_SECONDS = 60.0  # while nothing changes
WAITING_LINE_SECONDS = 15.0  # the same, while the job waits for its learners
LEAST_STEP_SECONDS = 0.02  # of steps shorter than this it says nothing that a learner is late
LATE_SHARE = 0.1  # of a step: a rank that comes so much later than the first is named
NARROW = 85  # columns beside the foot's titles, for long texts: of a terminal of 100
_LEFT_OUT = (
    "slot",
    "waited",
    "s/step",
    "merged",
    "",
    "tokens",
    "loss",
    "ranks",
)  # of the table, in this order, for want of room
GAP = "   "
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
    run_seconds: float | None = None  # since this run began; None: it is looked at from outside
    earlier_seconds: float = 0.0  # of the job's time, before this run continued it

    @property
    def seconds(self) -> float:
        """What the clock shows: the time of the job's runs, from outside the job's own, which begins with its first
        step."""
        if self.run_seconds is not None:
            return self.earlier_seconds + self.run_seconds
        return 0.0 if self.status is None else self.status.elapsed_seconds


def outside_view(status: StatusDocument, stop: tuple[str, float] | None = None) -> RunView:
    """What is seen from outside of a run whose syncer answers."""
    # A slot that nobody has had has no place yet.
    names = {(slot.region, slot.ordinal): f"{slot.region}-{slot.ordinal}" for slot in status.slots if slot.region}
    return RunView(status.job, stop, status, names, serving=True)


class Screen(Protocol):
    def event(self, text: str, style: str = "") -> None:
        """Something happened."""

    def show_text(self, text: str) -> None:
        """Several lines that stay: on a terminal above the picture."""

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
    passed = reached is not None and reached > limit  # the last step of each learner ends after the goal
    text = f"{number(reached)} of {number(limit)} {unit}"
    if passed:
        text = f"{number(reached)} {unit} ({number(limit)} asked for)"
    return text if unit == "tokens" else f"{text}, {number(tokens)} tokens"


def _goal(view: RunView) -> tuple[str, float] | None:
    """Where the job ends, by the job file or by its syncer."""
    if view.stop is not None or view.status is None or view.status.stop is None:
        return view.stop
    return view.status.stop.kind, view.status.stop.limit


def _progress(view: RunView) -> str:
    status = view.status
    if status is None:
        return progress(view.stop, 0, 0, 0.0)
    return progress(_goal(view), status.step, status.tokens.trained, status.elapsed_seconds)


def time_left(percent: int | None, seconds: float | None) -> str:
    """How much of the job is done, and about how long the rest takes, as its syncer says it; empty: not known."""
    if percent is None or (not percent and seconds is None):
        return ""
    text = f"{percent} %"
    if seconds is None:
        return text
    return f"{text}, about {duration_text(seconds) if seconds >= 10 else f'{max(1, round(seconds))} s'} left"


def _time_left(view: RunView) -> str:
    status = view.status
    done = None if status is None or status.progress is None else int(100 * status.progress)
    return time_left(done, None if status is None else status.seconds_left)


def _waited(slot: SlotRow) -> float | None:
    """The share of its time in which the training thread waited for the library, 0 to 1; None: nothing was measured."""
    stalled = slot.stalled_seconds or 0.0
    seconds = stalled + (slot.compute_seconds or 0.0)
    return stalled / seconds if seconds > 0 else None


def silence(view: RunView) -> str:
    """That the syncer does not answer, where it should."""
    if view.serving or view.status is None or view.status.phase in ENDED_PHASES:
        return ""
    return "the syncer does not answer"


def blocked_by(status: StatusDocument | None) -> str:
    """Why nothing is merged at the moment; empty: nothing is in the way."""
    if status is None:
        return ""
    if status.store_problem:
        return status.store_problem
    begun = status.phase != JobPhase.WAITING  # before, shards may have nothing to serve yet
    away = [row for row in status.shards if begun and not row.serving and row.fragments]
    failing = [row for row in status.shards if row.failures >= SHARD_FAILING]
    if named := away or failing:
        shards = f"shard{'s' * (len(named) > 1)} {' and '.join(str(row.shard) for row in named)} of the syncer"
        are, have, their = ("is", "has", "its") if len(named) == 1 else ("are", "have", "their")
        times = min(row.failures for row in named)
        words = f"{are} away: {their} fragments wait" if away else f"{have} failed {times} times in a row"
        why = next((f" ({row.message})" for row in named if row.message), "")
        return f"{shards} {words}{why}"
    return status.message if status.phase in (JobPhase.WAITING, JobPhase.HOLDING) else ""


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
    rate = "" if status.tokens_per_second is None else f"{number(status.tokens_per_second)}/s"
    pace = "; ".join(part for part in (_time_left(view), rate) if part)
    parts = [f"{view.seconds:7.1f} s", status.phase, _progress(view) + (f" ({pace})" if pace else "")]
    # What there is not yet, such as a loss before the first step or a merge, is left out.
    if any(slot.loss is not None and slot.state is SlotState.ACTIVE for slot in status.slots):
        parts.append(f"loss {_losses(status)}")
    if merged_loss(status) is not None:
        parts.append(f"merged {nats(merged_loss(status))}")
    if any(status.versions):
        parts.append(f"versions {min(status.versions)}..{max(status.versions)}")
    together = status.learners_in_merges
    merging = f", {together.recent:.1f} in a merge" if together is not None else ""
    parts.append(f"learners {status.quorum.active} active, {status.quorum.required} needed{merging}")
    return "  ".join([*parts, *(f"({reason})" for reason in (blocked_by(status), silence(view)) if reason)])


def _losses(status: StatusDocument) -> str:
    return " ".join(nats(slot.loss if slot.state is SlotState.ACTIVE else None) for slot in status.slots)


def _lines_of(cells: Sequence[Text], width: int) -> RenderableType:
    """Cells beside each other with ``GAP`` between them, in as many lines as they need."""
    lines: list[Text] = []
    for cell in cells:
        if not cell.plain:
            continue
        if lines and lines[-1].cell_len + len(GAP) + cell.cell_len <= width:
            lines[-1] = lines[-1] + Text(GAP) + cell
        else:
            lines.append(cell)
    return Group(*lines)


@dataclass(frozen=True, slots=True)
class TimedEvent:
    stamp: str
    text: str
    style: str = ""


def events_table(events: Sequence[TimedEvent]) -> Table:
    """Events with their times; lines that do not fit go on below their beginning."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in events:
        table.add_row(Text(event.stamp, style="dim"), Text(event.text, style=event.style))
    return table


def picture(view: RunView, events: Sequence[TimedEvent], whole: bool = False) -> RenderableType:
    """The run as a person sees it on a terminal; ``events``: the newest, below it. ``whole``: long texts are not cut
    where the terminal is narrow."""
    status = view.status
    loss = merged_loss(status)  # None before the first evaluation, and in a job without an evaluator
    cells = [
        Text(view.job, style="bold"),
        Text(status.phase if status else "starting", style="bold cyan"),
        Text(_clock(view)),
        Text(_progress(view)),
        Text(_time_left(view)),
        Text(f"{number(status.tokens_per_second if status else None)} tokens/s"),
        Text("" if loss is None else f"merged loss {nats(loss)}"),
        Text(silence(view), style="red"),
    ]
    head: list[RenderableType] = [ByWidth(lambda width: _lines_of(cells, width))]
    if blocked := blocked_by(status):
        head.append(Text(blocked, style="yellow"))
    foot = Table.grid(padding=(0, 2))
    strip = ByWidth(lambda width: Text(version_strip(status.versions if status else [], max(8, min(64, width - 16)))))
    foot.add_row(Text("fragments", style="dim"), strip)
    if status is None:
        return Group(*head, "", foot, "", events_table(events))
    waiting = f", {status.standby} standing by" if status.standby else ""
    merged = status.learners_in_merges
    together = f", {merged.recent:.1f} in a merge" if merged else ""
    quorum = f"{status.quorum.active} active, {status.quorum.required} needed{together}{waiting}"
    foot.add_row(Text("quorum", style="dim"), quorum)
    rounds = "  ".join(
        f"fragment {row.fragment}: {len(row.responders)} in, "
        + ("its shard is awaited" if row.unserved else f"{len(row.waiting)} awaited")
        for row in sorted(status.rounds, key=lambda row: row.fragment)
    )
    foot.add_row(Text("rounds", style="dim"), rounds or "none open")
    if links := links_text(status):
        foot.add_row(Text("links", style="dim"), links)
    slots = status.slots
    for names, message in _slot_problems(slots):
        foot.add_row("", ByWidth(partial(_problem_text, names, message, whole=whole)))
    table = ByWidth(lambda width: _slots_table(view, slots, width))
    return Group(*head, "", table, "", foot, "", events_table(events))


def _clock(view: RunView) -> str:
    text = duration_text(view.seconds) if view.seconds else "0 s"
    return f"{text} in all" if view.earlier_seconds else text


def _slot_problems(slots: Sequence[SlotRow]) -> list[tuple[str, str]]:
    """Whom it concerns, and what is the matter: each problem once."""
    names: dict[str, list[str]] = {}
    for slot in slots:
        for message in (slot.link.message if slot.link is not None else "", slot.problem):
            if message:
                names.setdefault(message, []).append(f"{slot.region}-{slot.ordinal}")
    return [(", ".join(found), message) for message, found in names.items()]


def _problem_text(names: str, message: str, width: int, whole: bool) -> Text:
    """A problem, or its first clause where there is little room."""
    if not whole and width < NARROW:
        first = message.partition("; ")[0].partition(". ")[0]
        message = first if first == message else f"{first} (more: diloco status)"
    return Text(f"{names}: {message}", style="yellow")


def _slots_table(view: RunView, slots: Sequence[SlotRow], width: int) -> Table:
    """A row for each slot. The slot's number is shown only where it is not the learner's own."""
    rows = [_slot_cells(view, slot) for slot in slots]
    titles = ["learner", "ranks", "slot", "state", "step", "tokens", "loss", "s/step", "waited", "merged", ""]
    if all(slot.slot == slot.ordinal for slot in slots):
        titles.remove("slot")
    if all(slot.ranks == 1 for slot in slots):
        titles.remove("ranks")
    return fitting_table(titles, rows, width, left=("learner", "state", ""), left_out=_LEFT_OUT)


def _slot_cells(view: RunView, slot: SlotRow) -> dict[str, Text]:
    name = view.processes.get((slot.region, slot.ordinal), "-")
    fragments = len(view.status.versions) if view.status else 0
    waited = _waited(slot)
    texts = {
        "learner": name,
        "ranks": str(slot.ranks),
        "slot": str(slot.slot),
        "step": number(slot.step),
        "tokens": number(slot.tokens),
        "loss": nats(slot.loss),
        "s/step": f"{slot.step_seconds or 0:.3f}",
        "waited": "-" if waited is None else f"{100 * waited:.1f} %",
        "merged": number(slot.merged_pushes),
    }
    return {
        **{title: Text(text) for title, text in texts.items()},
        "state": Text(slot.state, style=_STATE_STYLES.get(slot.state, "")),
        "": Text(view.notes.get(name, slot_note(slot, fragments)), style="yellow"),
    }


def slot_note(slot: SlotRow, fragments: int = 0) -> str:
    """What is the matter with a slot, in a word; of a newcomer how many of the model's ``fragments`` it has."""
    if slot.link is not None and slot.link.missing_fragments:
        here = max(fragments - slot.link.missing_fragments, 0)
        return download_text(here, fragments, slot.link.down_bytes_per_second)
    if slot.diverged:
        return "diverged"
    if slot.problem:
        return "no step yet"
    if is_late(slot):
        return "late"
    if slot.slowest_rank is not None and (slot.slowest_rank_seconds or 0.0) > LATE_SHARE * (slot.step_seconds or 0.0):
        return f"rank {slot.slowest_rank} late"
    if slot.link is None or not slot.link.message:
        return ""
    return "slow link" if slot.link.too_slow else "busy machine"


def is_late(slot: SlotRow) -> bool:
    """Whether a slot's updates keep arriving after their merge, and that matters: with steps of milliseconds everybody
    is late now and then."""
    return slot.starved and slot.state is SlotState.ACTIVE and (slot.step_seconds or 0.0) >= LEAST_STEP_SECONDS


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
    return f"slowest: {', '.join(parts)}" if parts else ""


# ------------------------------------------------------------------ where it goes


class Lines:
    """Plain lines: one of progress when something has changed, at most every ``LINE_SECONDS``; every
    ``SAME_LINE_SECONDS`` even if nothing has, as a sign of life."""

    def __init__(self, out: IO[str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stdout
        self._clock = clock
        self._printed_at = float("-inf")
        self._figures: tuple[object, ...] = ()
        self._shown = ""

    def event(self, text: str, style: str = "") -> None:
        self._print(text)

    def show_text(self, text: str) -> None:
        self._print(text)

    def update(self, view: RunView) -> None:
        status, now = view.status, self._clock()
        if status is None:
            if now >= self._printed_at + WAITING_LINE_SECONDS:
                self._printed_at = now
                self._print(f"{view.seconds:7.1f} s  starting")
            return
        figures = (
            *(status.phase, blocked_by(status), silence(view), status.step, status.tokens.trained, status.merges),
            *(status.versions, status.quorum.active, merged_loss(status), _losses(status)),
        )
        line = progress_line(view)
        shown = line.partition(" s  ")[2]  # without the time, which always changes
        news = figures != self._figures and shown != self._shown
        same_seconds = WAITING_LINE_SECONDS if status.phase == JobPhase.WAITING else SAME_LINE_SECONDS
        if now >= self._printed_at + (LINE_SECONDS if news else same_seconds):
            self._printed_at, self._figures, self._shown = now, figures, shown
            self._print(line)

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        with contextlib.suppress(ValueError):  # a stream that somebody has closed
            print_lasting(text, self._out)


class Live:
    """A picture redrawn in place, with the last events below it."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as RichLive

        self._events: deque[TimedEvent] = deque(maxlen=EVENTS_SHOWN)
        self._start = time.monotonic()
        self._view: RunView | None = None
        self._console = console
        self._live = RichLive(console=console, refresh_per_second=4, auto_refresh=False, transient=False)
        self._live.start()

    def event(self, text: str, style: str = "") -> None:
        self._events.append(TimedEvent(f"{time.monotonic() - self._start:7.1f} s", text, style))
        if self._view is not None:
            self.update(self._view)
        else:
            self._draw(events_table(self._events))

    def show_text(self, text: str) -> None:
        with lasting_output(self._console.file):
            self._live.console.print(Text(printable(text)))

    def update(self, view: RunView) -> None:
        self._view = view
        # What is taller than the terminal is cut off at its end, where the newest events are.
        figures = len(self._console.render_lines(picture(view, []), self._console.options))
        room = max(LEAST_ROOM, self._console.height - figures)
        events: deque[TimedEvent] = deque()
        for event in reversed(self._events):
            room -= len(self._console.render_lines(events_table([event]), self._console.options))
            if room < 0:
                break
            events.appendleft(event)
        self._draw(picture(view, events))

    def close(self) -> None:
        with lasting_output(self._console.file):
            self._live.stop()

    def _draw(self, what: RenderableType) -> None:
        with lasting_output(self._console.file):
            self._live.update(what, refresh=True)


def make_screen(stderr: bool = False) -> Screen:
    """For standard output, or ``stderr``: a picture on a terminal, lines elsewhere."""
    console = TextConsole(stderr=stderr)  # without soft_wrap, with which a live picture's lines would be cut
    return Live(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console.file)
