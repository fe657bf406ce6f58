"""What a person sees: figures, the live picture and plain lines."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from diloco.local.screen import Lines, Live, RunView, blocked_by, picture, progress, progress_line, version_strip
from diloco.local.summary import fault_text, summary
from diloco_protocol.documents import FaultRow
from status_documents import job_report, round_row, shard_row, slot_row, status_document

STATUS: dict[str, Any] = {
    "job": "tiny",
    "phase": "training",
    "elapsed_seconds": 12.5,
    "step": 120,
    "quorum": {"active": 1, "required": 1},
    "standby": 1,
    "versions": [4, 3, 5],
    "tokens": {"trained": 245760, "merged": 0, "pending": 245760, "dropped": 0},
    "tokens_per_second": 10200.4,
    "progress": 0.12,
    "seconds_left": 172.0,
    "merges": 7,
    "eval_loss": [[0, 5.6], [2000, 2.45]],
    "rounds": [
        {
            "fragment": 1,
            "round": 17,
            "merging": False,
            "responders": [0],
            "waiting": [1],
            "open_seconds": 3.0,
            "overdue": False,
            "message": "",
        }
    ],
    "slots": [
        slot_row(
            region="local",
            state="active",
            step=120,
            tokens=1000,
            loss=2.41,
            step_seconds=0.05,
            compute_seconds=9.0,
            stalled_seconds=1.0,
            merged_pushes=40,
        ),
        slot_row(1, region="local", ordinal=1, state="lost", step=80, tokens=900, loss=3.0),
    ],
}


def view(**changes: Any) -> RunView:
    names = {("local", 0): "local-0", ("local", 1): "local-1"}
    status = status_document(**{**STATUS, **changes})
    return RunView("tiny", ("tokens", 2_000_000), status, names, notes={"local-1": "starting"}, serving=True)


def test_the_strip_shows_who_is_ahead() -> None:
    assert version_strip([4, 3, 5]) == "▂▁▃  3 to 5"
    assert version_strip([7, 7]) == "▁▁  7"
    assert version_strip([]) == "none yet"
    assert version_strip([0, 1000])[1] == "█"
    assert len(version_strip(list(range(300))).split()[0]) == 64


def test_the_run_on_one_line() -> None:
    assert progress_line(view()) == (
        "   12.5 s  training  245,760 of 2,000,000 tokens (12 %, about 2 min 52 s left; 10,200/s)"
        "  loss 2.410 -  merged 2.450  versions 3..5  learners 1 active, 1 needed"
    )
    silent = view(eval_loss=[], slots=[], versions=[], tokens_per_second=None, seconds_left=None)
    silent.serving = False
    assert progress_line(silent) == (
        "   12.5 s  training  245,760 of 2,000,000 tokens (12 %)  learners 1 active, 1 needed"
        "  (the syncer does not answer)"
    ), "what is not known is left out"


def test_progress_is_told_in_the_unit_of_the_stop() -> None:
    assert progress(("steps", 300), 120, 245760, 12.5) == "120 of 300 steps, 245,760 tokens"
    assert progress(("seconds", 60.0), 120, 245760, 12.5) == "12 of 60 seconds, 245,760 tokens"
    assert progress(None, 120, 245760, 12.5) == "step 120, 245,760 tokens"
    assert progress(("steps", 300), 120, None, 12.5) == "step 120"
    assert progress(("steps", 150), 151, 245760, 12.5) == "151 steps (150 asked for), 245,760 tokens"
    assert progress(("tokens", 240000), 151, 245760, 12.5) == "245,760 tokens (240,000 asked for)"
    assert progress(("steps", 150), 150, 245760, 12.5) == "150 of 150 steps, 245,760 tokens"


def test_an_ended_job_needs_no_syncer() -> None:
    ended = view(phase="complete")
    ended.serving = False
    assert "does not answer" not in progress_line(ended)


def test_a_shard_that_is_away_or_fails_again_and_again_is_named_with_why() -> None:
    there, away = shard_row(0), shard_row(1, serving=False, message="signal 9 ended its process")
    assert not blocked_by(view(shards=[there, shard_row(1, failures=2)]).status)
    assert blocked_by(view(shards=[there, away]).status) == (
        "shard 1 of the syncer is away: its fragments wait (signal 9 ended its process)"
    )
    both = view(shards=[shard_row(0, serving=False), away])
    assert blocked_by(both.status) == (
        "shards 0 and 1 of the syncer are away: their fragments wait (signal 9 ended its process)"
    )
    assert "shard" not in blocked_by(view(phase="waiting", shards=[there, away]).status), "they may be beginning"
    unneeded = shard_row(2, fragments=[], serving=False)
    assert not blocked_by(view(shards=[there, unneeded]).status), "before version 0, and beyond the fragments"
    failing = shard_row(0, failures=3, message="its process ended with exit code 1")
    assert blocked_by(view(shards=[failing]).status) == (
        "shard 0 of the syncer has failed 3 times in a row (its process ended with exit code 1)"
    )


def test_a_round_says_that_it_waits_for_its_shard() -> None:
    out = io.StringIO()
    rounds = [round_row(fragment=0, responders=[0], unserved=True), round_row(fragment=1, waiting=[0, 1])]
    Console(file=out, width=140).print(picture(view(rounds=rounds), ()))
    assert "fragment 0: 1 in, its shard is awaited  fragment 1: 0 in, 2 awaited" in out.getvalue()


def test_lines_are_few_and_events_come_at_once() -> None:
    out = io.StringIO()
    lines = Lines(out)
    for _ in range(100):
        lines.update(view())
    lines.event("chaos: kill local-1", "red")
    assert out.getvalue().splitlines() == [progress_line(view()), "chaos: kill local-1"]


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    lines = Lines(Gone())
    lines.event("one")
    lines.event("two")


def test_the_picture_has_everything() -> None:
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=140))
    live.update(view())
    live.event("process-ended: local-1: its process ended (SIGKILL)", "red")
    live.close()
    for words in (
        "training",
        "245,760",
        "10,200 tokens/s",
        "2.450",
        "local-0",
        "active",
        "2.410",
        "10.0 %",
        "local-1",
        "lost",
        "starting",
        "▂▁▃  3 to 5",
        "1 active, 1 needed, 1 standing by",
        "fragment 1: 1 in, 1 awaited",
        "its process ended",
    ):
        assert words in out.getvalue(), words


def test_who_has_finished_no_step_is_seen_with_what_its_loop_may_lack() -> None:
    out = io.StringIO()
    slots = [slot_row(region="local", state="active", problem="does it call learner.after_step()?")]
    console = Console(file=out, force_terminal=True, width=140)
    console.print(picture(view(slots=slots), []))
    assert "no step yet" in out.getvalue() and "local-0: does it call learner.after_step()?" in out.getvalue()


def test_a_learner_of_several_ranks_is_a_row_with_their_number_and_the_late_one() -> None:
    def shown(**fields: Any) -> str:
        out = io.StringIO()
        slots = [slot_row(region="local", state="active", step_seconds=0.5, **fields)]
        Console(file=out, width=140).print(picture(view(slots=slots), []))
        return out.getvalue()

    text = shown(ranks=8, slowest_rank=5, slowest_rank_seconds=0.2)
    (row,) = [line for line in text.splitlines() if "local-0" in line]
    assert "ranks" in text and row.split()[1] == "8" and "rank 5 late" in row
    assert "late" not in shown(ranks=8, slowest_rank=5, slowest_rank_seconds=0.02)
    assert "ranks" not in shown()


def test_an_error_stays_above_the_picture_and_obeys_nobody() -> None:
    for screen in (Live, Lines):
        out = io.StringIO()
        shown = Live(Console(file=out, force_terminal=True, width=140)) if screen is Live else Lines(out)
        shown.update(view())
        shown.show_text("the end of log:\n  NameError: name '[red]lss\x1b]0;x\x07'")
        shown.close()
        assert "NameError: name '[red]lss" in out.getvalue() and "\x1b]0;" not in out.getvalue()


def test_on_a_small_terminal_the_newest_events_are_seen() -> None:
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=80, height=24))
    live.update(view())
    for number in range(20):
        out.truncate(0)
        live.event(f"event {number} " + 60 * "x" + " end")  # two lines
    shown = out.getvalue()  # one picture
    live.close()
    assert shown.count("\n") < 24 and shown.count(" end") >= 5
    assert "training" in shown and " end" in shown.split("event 19")[1] and "event 10 " not in shown


def test_the_picture_before_anything_is_known() -> None:
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=120))
    live.event("starting tiny")
    live.update(RunView("tiny", ("steps", 10)))
    live.close()
    assert "starting" in out.getvalue() and "none yet" in out.getvalue()


def test_the_summary_of_full_and_of_empty_reports() -> None:
    fault = FaultRow(
        at_seconds=20.0,
        action="kill",
        target="local-1",
        detected_seconds=0.05,
        joined_seconds=1.0,
        first_step_seconds=2.0,
        recovered_seconds=None,
    )
    assert fault_text(fault, job_report()) == (
        "local-1 killed at 20.0 s: noticed after 50 ms, replaced after 1 s, training again after 2 s,"
        " not merged again before the end"
    )
    full = job_report(
        outcome="complete",
        initial_loss=5.5,
        final_loss=2.0,
        goodput=0.9,
        uptime=1.0,
        tokens={"trained": 10, "merged": 9, "pending": 1, "dropped": 0},
        faults=[fault],
        regions=[
            {"name": "eu", "bytes_up": 7, "bytes_down": 8, "wire_bytes_up": 9, "wire_bytes_down": 11},
            {"name": "us", "bytes_up": 0, "bytes_down": 0, "wire_bytes_up": None, "wire_bytes_down": None},
            {"name": "", "bytes_up": 0, "bytes_down": 5, "wire_bytes_up": None, "wire_bytes_down": None},
        ],
    )
    console = Console(file=io.StringIO(), width=140)
    console.print(summary(full))
    console.print(summary(job_report()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5.500 at the start, 2.000 at the end" in text and "10 trained, 9 merged" in text
    assert "not merged again before the end" in " ".join(text.split()) and "in this run" not in text
    continued = job_report(wall_seconds=5.0, syncer={"epoch": 3, "restarts": 0, "peak_rss_bytes": 0})
    console.print(summary(continued))
    assert "5.0 s in this run" in console.file.getvalue()  # type: ignore[attr-defined]
    for outcome in ("killed", "running"):  # these figures are of the job's clock
        console = Console(file=io.StringIO(), width=140)
        console.print(summary(continued.model_copy(update={"outcome": outcome})))
        assert "5.0 s" in (told := console.file.getvalue()) and "in this run" not in told  # type: ignore[attr-defined]
    assert re.search(r"  eu +7 B up, 8 B down; with all beside it and TLS 9 B up, 11 B down +\n", text)
    assert re.search(r"  others +0 B up, 5 B down +\n", text)


def test_the_clock_is_the_runs_and_from_outside_the_jobs() -> None:
    shown = view()
    shown.run_seconds = 12.0
    assert progress_line(shown).startswith("   12.0 s  ")
    shown.earlier_seconds = 600.0  # of the runs before this one
    assert progress_line(shown).startswith("  612.0 s  ")
    console = Console(file=io.StringIO(), width=140)
    console.print(picture(shown, []))
    assert "10 min 12 s in all" in console.file.getvalue()  # type: ignore[attr-defined]
    shown.run_seconds = None
    assert shown.status is not None and progress_line(shown).startswith(f"{shown.status.elapsed_seconds:7.1f} s  ")
