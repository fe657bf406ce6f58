"""The summary at a run's end tells what happened, in units that people read, and what to do next."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diloco.local.run import next_commands
from diloco.local.summary import dropped_by_reason, share_text, summary
from diloco.processes.exit_errors import tail
from diloco.processes.workdir import Workdir
from diloco_protocol.documents import Report
from status_documents import job_report

KILL = {"at_seconds": 30.8, "action": "kill", "target": "local-1", "detected_seconds": 0.03, "joined_seconds": 0.23,
        "first_step_seconds": 0.31, "recovered_seconds": 0.9}  # fmt: skip
DEMO: dict[str, Any] = {
    "outcome": "complete",
    "initial_loss": 5.545,
    "final_loss": 1.812,
    "tokens": {"trained": 1_803_264, "merged": 1_798_230, "pending": 0, "dropped": 5_034},
    "ledger": [{"fragment": f, "merged": 1_798_230, "pending": 0, "dropped": 5_034,
                "reasons": {"died": 5_000, "overlap": 34}} for f in range(2)],
    "versions": {"min": 51, "max": 53},
    "merges": 1248,
    "steps": 2520,
    "goodput": 0.9804,
    "uptime": 0.999,
    "bytes_up": 79_196_706,
    "bytes_down": 76_000_000,
    "regions": [{"name": "local", "bytes_up": 79_196_706, "bytes_down": 75_000_000, "wire_bytes_up": None,
                 "wire_bytes_down": None},
                {"name": "evaluator", "bytes_up": 0, "bytes_down": 9_088, "wire_bytes_up": None,
                 "wire_bytes_down": None}],
    "wall_seconds": 95.2,
    "holds": [],
    "faults": [KILL],
}  # fmt: skip


def told(report: Report) -> str:
    console = Console(file=io.StringIO(), width=300)
    console.print(summary(report))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def rows(text: str) -> dict[str, str]:
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines()}


def test_the_demos_story() -> None:
    text = told(job_report(**DEMO))
    for words in (
        "5.545 at the start, 1.812 at the end (nats per token)",
        "1,803,264 trained, 1,798,230 merged, nothing pending, 5,034 dropped (0.28 %: 5,000 with a process that ended",
        "1,248; each fragment 51 to 53 times, in 2,520 steps of the fastest learner",
        "98 % of the learners' time was computing that was merged; ",
        "; at least one learner made progress 99.9 % of the time",
        "79.2 MB up, 76 MB down",
        "1 min 35 s",
        "local-1 killed at 30.8 s: noticed after 30 ms, replaced after 230 ms, training again after 310 ms, ",
        "merging again after 900 ms; 5,000 tokens lost (0.28 %); merges continued meanwhile",
    ):
        assert words in text, (words, text)
    # One region is all there is: no second line of the same traffic; and no bytes by the digit.
    assert "79,196,706" not in text and "9,088" not in text and text.count("79.2 MB") == 1


def test_a_learner_without_a_merge_is_named() -> None:
    """Such as one that has another model."""

    def learners(*merged: int, retired: bool = False) -> dict[str, Any]:
        zero = dict.fromkeys(("incarnations", "steps", "tokens", "bytes_up", "bytes_down"), 0)
        zero |= {"compute_seconds": 0, "stalled_seconds": 0, "retired": retired}
        return {"learners": [zero | {"slot": n, "learner": f"local-{n}", "merged_pushes": pushes}
                             for n, pushes in enumerate(merged)]}  # fmt: skip

    never = "never contributed to a merge"
    assert f"local-1, local-3 {never}" in told(job_report(**DEMO, **learners(9, 0, 7, 0)))
    many = told(job_report(**DEMO, **learners(9, *[0] * 8)))
    assert f"local-1, local-2, local-3, local-4, local-5 and 3 more {never}" in many
    assert never not in told(job_report(**DEMO, **learners(9, 7)))
    assert never not in told(job_report(**DEMO, **learners(0, retired=True)))
    assert never not in told(job_report(**{**DEMO, "outcome": "interrupted"}, **learners(9, 0))), "it may yet"


def test_of_a_job_without_a_last_score_the_newest_one_is_shown() -> None:
    scores = [[0, 5.545], [700_000, 2.25]]
    text = told(job_report(**{**DEMO, "outcome": "running", "final_loss": None, "eval_loss": scores}))
    assert "5.545 at the start, 2.250 at the last score" in text


def test_what_is_said_of_faults_is_so() -> None:
    hold = {"from_seconds": 31.0, "to_seconds": 31.5}
    assert "merges continued" not in told(job_report(**{**DEMO, "holds": [hold]}))
    assert "merges continued" in told(job_report(**{**DEMO, "holds": [{"from_seconds": 40.0, "to_seconds": 41.0}]}))
    assert "merges continued" not in told(job_report(**{**DEMO, "holds": None})), "it is not known"
    assert "tokens lost" not in told(job_report(**{**DEMO, "faults": [KILL, KILL]})), "of which of the two?"
    for epoch, restarts, said in ((2, 1, True), (2, 0, False), (4, 1, False)):
        syncer = {"epoch": epoch, "restarts": restarts, "peak_rss_bytes": 0}
        assert ("tokens lost" in told(job_report(**{**DEMO, "syncer": syncer}))) == said, "an earlier run's, perhaps"
    unseen = {**KILL, "action": "pause", "lasts_seconds": 2.0}
    unseen |= dict.fromkeys(("detected_seconds", "joined_seconds", "first_step_seconds", "recovered_seconds"))
    assert "local-1 paused for 2 s at 30.8 s; nothing was lost" in told(job_report(**{**DEMO, "faults": [unseen]}))
    lost = {**KILL, "recovered_seconds": None}
    assert "not merged again before the end" in told(job_report(**{**DEMO, "faults": [lost]}))


def test_a_run_that_trained_nothing_has_no_rows_of_zeros() -> None:
    text = told(job_report(outcome="failed", wall_seconds=3.0))
    assert rows(text) == {"outcome": "failed", "time": "3.0 s"}


def test_shares_have_the_digits_that_say_something() -> None:
    assert [share_text(value) for value in (0.0, 0.0028, 0.00004, 0.3, 0.9804, 0.999, 1.0)] == [
        *("0 %", "0.28 %", "0.004 %", "30 %", "98 %", "99.9 %", "100 %")
    ]


def test_the_next_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workdir = Workdir(tmp_path / "runs" / "demo")
    os.makedirs(workdir.path)
    assert next_commands(workdir) == ["diloco export runs/demo model/", "diloco report runs/demo --html"]
    workdir.tensorboard.mkdir()
    (tmp_path / "model").mkdir()
    assert next_commands(workdir)[::2] == [
        "diloco export runs/demo demo-model/",
        "tensorboard --logdir runs/demo/tensorboard",
    ]
    elsewhere = Workdir(Path("/data/run"))
    assert next_commands(elsewhere)[1] == "diloco report /data/run --html"


def test_what_was_dropped_by_reason_sums_to_what_was_dropped() -> None:
    """An average over fragments is no whole number, and its roundings need not sum to the whole."""
    ledger = [{"fragment": f, "merged": 0, "pending": 0, "dropped": died + stale,
               "reasons": {"died": died, "stale": stale}}
              for f, (died, stale) in enumerate([(4010, 7), (4011, 8), (4011, 8)])]  # fmt: skip
    tokens = {"trained": 9000, "merged": 4982, "pending": 0, "dropped": 4018}
    assert dropped_by_reason(job_report(tokens=tokens, ledger=ledger)) == [("died", 4010), ("stale", 8)]


def test_they_have_the_programs_path_where_the_shell_would_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr("sys.argv", [str(tmp_path / ".venv" / "bin" / "diloco"), "run"])
    workdir = Workdir(tmp_path / "runs" / "demo")
    os.makedirs(workdir.tensorboard)
    assert next_commands(workdir) == [
        ".venv/bin/diloco export runs/demo model/",
        ".venv/bin/diloco report runs/demo --html",
        ".venv/bin/tensorboard --logdir runs/demo/tensorboard",
    ]


def test_what_is_pending_at_the_end_is_said_with_the_reason() -> None:
    tokens = {"trained": 100, "merged": 60, "pending": 40, "dropped": 0}
    for outcome, words in (("complete", "or its process had ended"), ("interrupted", "kept in the store")):
        assert words in told(job_report(outcome=outcome, tokens=tokens, ledger=[]))
        assert words not in told(job_report(outcome=outcome, tokens={**tokens, "pending": 0, "merged": 100}))


def test_what_no_store_is_known_to_have_is_not_promised() -> None:
    tokens = {"trained": 100, "merged": 60, "pending": 40, "dropped": 0}
    assert "40 pending (as last heard)" in told(job_report(outcome="interrupted", tokens=tokens, ledger=None))


def test_the_end_of_a_log_is_the_last_processs(tmp_path: Path) -> None:
    log = tmp_path / "local-0.log"
    log.write_text("Traceback: first\n")
    begin = log.stat().st_size
    with log.open("a") as more:
        more.write("Traceback: second\n")
    assert tail(log, 20, begin) == ["Traceback: second"]
    assert tail(log, 20) == ["Traceback: first", "Traceback: second"]
