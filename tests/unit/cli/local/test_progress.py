"""How much is done, how long the rest takes, and a picture that fits the terminal."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from core_desk import Desk, config
from diloco.local.screen import RunView, TimedEvent, events_table, make_screen, picture, progress_line
from diloco_syncer.core.documents import status_document as syncers_status
from shell_figures import SHELL
from status_documents import slot_link, slot_row, status_document

ROW: dict[str, Any] = {"region": "local", "state": "active", "step": 1125, "tokens": 389_120, "loss": 1.986,
                       "step_seconds": 0.06, "compute_seconds": 57.0, "stalled_seconds": 3.0,
                       "merged_pushes": 412}  # fmt: skip
STATUS: dict[str, Any] = {
    "phase": "training",
    "elapsed_seconds": 60.0,
    "step": 1125,
    "quorum": {"active": 3, "required": 1},
    "versions": list(range(14, 38)),
    "tokens": {"trained": 716_800, "merged": 700_000, "pending": 16_800, "dropped": 0},
    "tokens_per_second": 19_535.0,
    "progress": 0.398,
    "seconds_left": 55.4,
    "merges": 600,
    "eval_loss": [[0, 5.6], [700_000, 2.123]],
    "slots": [slot_row(index, ordinal=index, **ROW) for index in range(3)],
    "rounds": [],
}


def view(goal: tuple[str, float] | None = ("tokens", 1_800_000), **changes: Any) -> RunView:
    names = {("local", index): f"local-{index}" for index in range(3)}
    return RunView("tiny-gpt", goal, status_document(**{**STATUS, **changes}), names, serving=True)


def drawn(shown: RunView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture(shown, []))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("progress", "seconds", "text"),
    [
        (0.399, 55.4, "39 %, about 55 s left"),
        (0.295, 240.0, "29 %, about 4 min left"),
        (0.999, 0.3, "99 %, about 1 s left"),
        (0.0, 4000.0, "0 %, about 1 h 6 min left"),
        (1.0, None, "100 %"),
        (0.0, None, ""),
        (None, None, ""),
    ],
)
def test_what_is_done_and_how_long_the_rest_takes_is_the_syncers_word(
    progress: float | None, seconds: float | None, text: str
) -> None:
    """Whatever the pace would make of the figures beside it."""
    shown = view(progress=progress, seconds_left=seconds)
    assert f"of 1,800,000 tokens ({text}{'; ' if text else ''}19,535/s)" in progress_line(shown)
    assert any(text in line for line in drawn(shown, 120))
    assert "%" not in progress_line(RunView("tiny-gpt", ("steps", 10)))


def test_status_from_outside_knows_the_goal() -> None:
    """The syncer's status has it, so that an address is enough."""
    desk = Desk(config(stop=("steps", 4500)))
    stop = syncers_status(desk.core._state, 0.0, SHELL).stop
    assert stop is not None and (stop.kind, stop.limit) == ("steps", 4500)
    text = progress_line(view(None, stop={"kind": "tokens", "limit": 1_800_000}))
    assert "716,800 of 1,800,000 tokens (39 %, about 55 s left" in text


@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_picture_fits_and_no_cell_is_cut(width: int) -> None:
    lines = drawn(view(), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and "…" not in text
    for words in ("tiny-gpt", "716,800 of 1,800,000 tokens", "39 %, about 55 s left", "19,535 tokens/s",
                  "merged loss 2.123", "local-2", "active", "389,120", "1.986", "14 to 37"):  # fmt: skip
        assert words in text, words
    assert ("waited" in text, "s/step" in text) == (width >= 80, width >= 80)


SLOW = slot_link(too_slow=True, message="the link is slower than the job needs: measured up 876 kbit/s; the rest")


def test_at_60_columns_a_note_costs_columns_and_cuts_no_number() -> None:
    rows = [slot_row(index, ordinal=index, **{**ROW, "step": 5_802, "tokens": 751_744}, link=SLOW) for index in (0, 1)]
    lines = drawn(view(slots=rows), 60)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 60 and "…" not in text
    head, first = next((line.split(), after) for line, after in pairwise(lines) if line.startswith("learner"))
    assert head == ["learner", "state", "step", "tokens", "loss", "merged"], "neither waited nor s/step"
    assert first.split() == ["local-0", "active", "5,802", "751,744", "1.986", "412", "slow", "link"]


def test_what_concerns_several_learners_is_said_once_and_briefly_where_there_is_little_room() -> None:
    shown = view(slots=[slot_row(index, ordinal=index, **ROW, link=SLOW) for index in range(3)])
    for width, rest in ((60, False), (120, True)):
        text = " ".join(" ".join(drawn(shown, width)).split())
        assert text.count("local-0, local-1, local-2: the link is slower than the job needs") == 1
        assert ("the rest" in text) == rest


def test_long_events_go_on_below_their_beginning() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    console.print(events_table([TimedEvent("   1.0 s", "parameters 37,024; a learner takes about 202 MB of memory")]))
    first, second = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first.startswith("   1.0 s  parameters") and second.startswith("          ")


def test_a_job_without_an_evaluator_shows_no_merged_loss() -> None:
    assert "merged loss" not in "\n".join(drawn(view(eval_loss=[]), 80))


def test_the_line_of_links_fits_80_columns() -> None:
    link = {"up_bytes_per_second": 119e6, "down_bytes_per_second": 119e6, "round_trip_seconds": 0.0801,
            "needs_up_bytes_per_second": 1e6, "needs_down_bytes_per_second": 1e6, "too_slow": False,
            "message": ""}  # fmt: skip
    lines = drawn(view(slots=[slot_row(0, ordinal=0, **ROW, link=link)]), 80)
    assert [line for line in lines if "round trip" in line] == [line for line in lines if "slowest" in line] != []


def test_what_the_terminal_is_too_narrow_for_continues_on_the_next_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the screen that ``run`` and ``status --watch`` make, on a terminal of 80 columns."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    event = " ".join(f"event{n}" for n in range(30))
    hold = " ".join(f"hold{n}" for n in range(30))
    screen = make_screen()
    screen.event(event)
    screen.update(view(store_problem=hold))
    screen.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    for word in (*event.split(), *hold.split()):
        assert word in shown, word
    assert max(len(line) for line in shown.replace("\r", "\n").splitlines()) <= 80


def test_a_slot_has_a_column_only_where_its_number_is_not_the_learners() -> None:
    assert "slot" not in "\n".join(drawn(view(), 120))
    moved = [slot_row(index, **{**ROW, "ordinal": 2 - index}) for index in range(3)]
    assert "slot" in "\n".join(drawn(view(slots=moved), 120))
