"""metrics.jsonl and TensorBoard events, gathered from files as workers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco.local.metrics_log import MetricsLog
from status_documents import status_document

STATUS = status_document(
    phase="training",
    merges=7,
    tokens={"trained": 1000, "merged": 900, "pending": 100, "dropped": 0},
    tokens_per_second=10.5,
    versions=[2, 1],
    quorum={"active": 2, "required": 1},
    eval_loss=[[0, 5.5], [900, 4.5]],
    goodput=0.5,
)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_both_sources_in_one_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    old = metrics / "local-0.jsonl"
    old.write_text('{"step": 1, "loss": 9.0}\n')  # an earlier run's
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl", metrics, None)
    with old.open("a") as file:
        file.write('{"step": 2, "loss": 5.0}\n{"step": 3, "lo')
    metrics_log.follow()
    metrics_log.sample(STATUS)
    with old.open("a") as file:
        file.write('ss": 4.0}\n{"torn\n[]\n')
    (metrics / "evaluator.jsonl").write_text('{"loss": 4.5}\n')
    metrics_log.close()
    found = rows(tmp_path / "metrics.jsonl")
    assert [(row["source"], row.get("step"), row.get("loss")) for row in found] == [
        ("local-0", 2, 5.0),
        ("status", 0, None),
        ("evaluator", None, 4.5),
        ("local-0", 3, 4.0),
    ]
    assert found[1]["tokens"]["trained"] == 1000 and found[1]["phase"] == "training" and found[1]["goodput"] == 0.5
    assert found[1]["versions"] == [1, 2] and found[1]["active"] == 2 and found[1]["eval_loss"] == [900, 4.5]


def test_a_status_that_says_nothing_yet(tmp_path: Path) -> None:
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "absent", None)
    metrics_log.sample(status_document())
    metrics_log.close()
    assert rows(tmp_path / "metrics.jsonl")[0]["versions"] == [0, 0]


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = tmp_path / "metrics"
    metrics.mkdir()
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl", metrics, tmp_path / "tensorboard")
    (metrics / "local-0.jsonl").write_text('{"step": 2, "loss": 5.0}\n{"step": 3, "loss": NaN}\n')
    metrics_log.sample(STATUS)
    metrics_log.sample(STATUS)
    metrics_log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("merged/loss")] == [(0, 5.5), (900, 4.5)]
    assert [(e.step, e.value) for e in events.Scalars("local-0/loss")] == [(2, 5.0)]
    assert [e.step for e in events.Scalars("job/merges")] == [1000, 1000]
