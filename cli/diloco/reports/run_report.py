"""The report of one run, from its directory: finished, or as it stands.

Figures are the syncer's (report.json of a run that is over, the status document of one that goes on); curves come from
``metrics.jsonl``, which holds samples of the status and every worker's own lines, in the order in which they were seen.
Time is the job's clock: seconds since its first step, without suspensions. A line that cannot be read is left out and
counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from diloco.reports.document import Axis, Mark, Plot, ResultDocument, ResultTable, Scalar, Series, thinned
from diloco_protocol.documents import FaultRow, LearnersInMerges, Report, StatusDocument
from diloco_protocol.vocabulary import EVALUATOR

MAX_LINES = 5_000_000  # of metrics.jsonl; what comes later is left out, and said
LEARNER_POINTS = 120  # of a learner's loss, each the mean of the steps around it
TIME = Axis(name="time since the first step", unit="s")
TOKENS = Axis(name="tokens trained by all learners")
LOSS = Axis(name="loss", unit="nats per token")


@dataclass(slots=True)
class RunCurves:
    """What metrics.jsonl says, by the job's clock."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # learner -> (seconds, loss)
    unreadable: int = 0
    cut: bool = False

    def curve(self, name: str) -> list[tuple[float, float]]:
        """(seconds, value) of a field of the samples."""
        return [
            (row["elapsed_seconds"], row[name])
            for row in self.samples
            if _is_number(row.get(name)) and row["elapsed_seconds"] > 0
        ]


def run_report(name: str, document: StatusDocument | Report, curves: RunCurves) -> ResultDocument:
    """The report of a run of the job ``name``; ``document``: its status, or the report that it left."""
    running = isinstance(document, StatusDocument)
    marks = [_mark(fault) for fault in ([] if isinstance(document, StatusDocument) else document.faults)]
    merged = [(float(tokens), loss) for tokens, loss in document.eval_loss if loss is not None]
    plots = [*_time_plots(curves, marks), *_loss_plots(curves, marks, merged)]
    return ResultDocument(
        title=f"{name}: {'as it stands' if running else 'report of the run'}",
        summary="One training run of Decoupled DiLoCo: what became of its tokens, how it continued through faults, and"
        " what its links carried.",
        facts=_facts(document),
        rows=_rows(document),
        tables=[table for table in _tables(document) if table.rows],
        plots=[plot for plot in plots if any(series.points for series in plot.series)],
        notes=list(_notes(document, curves)),
    )


# ------------------------------------------------------------------ curves


def read_curves(path: Path) -> RunCurves:
    """``metrics.jsonl``; empty if there is none. Raises OSError."""
    curves = RunCurves()
    offset: float | None = None  # of wall time to the job's clock, from the newest sample
    waiting: list[tuple[str, float, float]] = []  # losses before the first sample that has a clock
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for row in _rows_of(lines, curves):
                if row["source"] != "status":
                    if _is_number(row.get("loss")) and row["source"] != EVALUATOR:
                        waiting.append((row["source"], row["time"], row["loss"]))
                elif _is_number(row.get("elapsed_seconds")):
                    curves.samples.append(row)
                    if row["elapsed_seconds"] > 0:
                        offset = row["time"] - row["elapsed_seconds"]
                if offset is not None:
                    for source, time, loss in waiting:
                        curves.losses.setdefault(source, []).append((max(0.0, time - offset), loss))
                    waiting.clear()
    except FileNotFoundError:
        pass
    return curves


def _rows_of(lines: Iterable[str], curves: RunCurves) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines):
        if number >= MAX_LINES:
            curves.cut = True
            return
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("source"), str) and _is_number(row.get("time")):
            yield row
        else:
            curves.unreadable += 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def averaged(points: Sequence[tuple[float, float]], edges: int, last: float) -> list[tuple[float, float]]:
    """Means of y within ``edges`` equal intervals of x from 0 to ``last``, each at its middle; empty ones left out."""
    if last <= 0:
        return []
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        at = min(edges - 1, int(x / last * edges))
        total, count = sums.get(at, (0.0, 0))
        sums[at] = total + y, count + 1
    return [((at + 0.5) * last / edges, total / count) for at, (total, count) in sorted(sums.items())]


# ------------------------------------------------------------------ plots


def _time_plots(curves: RunCurves, marks: list[Mark]) -> Iterator[Plot]:
    share = Axis(name="share", unit="0 to 1")
    named = [("goodput", curves.curve("goodput")), ("uptime", curves.curve("uptime"))]
    yield _plot("Goodput and uptime", share, named, marks)
    active = [("active learners", curves.curve("active"))]
    yield _plot("Learners that train", Axis(name="learners", counts=True), active, marks, line="steps")
    speed = [("all learners", curves.curve("tokens_per_second"))]
    yield _plot("Tokens per second", Axis(name="tokens per second"), speed, marks)
    carried = [
        (f"{way} the hub", _rates(curves.curve(name))) for way, name in (("to", "bytes_up"), ("from", "bytes_down"))
    ]
    yield _plot("Bandwidth used", Axis(name="all learners' payload", unit="Mbit/s"), carried, marks)


def _loss_plots(curves: RunCurves, marks: list[Mark], merged: list[tuple[float, float]]) -> Iterator[Plot]:
    points = thinned(merged)
    yield Plot(title="Loss against tokens", x=TOKENS, y=LOSS, series=[_series("merged model", points)])
    last = max((x for points in curves.losses.values() for x, _ in points), default=0.0)
    learners = [(source, averaged(points, LEARNER_POINTS, last)) for source, points in sorted(curves.losses.items())]
    yield _plot("Loss against time", LOSS, [("merged model", _scores(curves)), *learners], marks)


def _plot(
    title: str, y: Axis, named: Sequence[tuple[str, list[tuple[float, float]]]], marks: list[Mark], line: str = "line"
) -> Plot:
    series = [_series(name, thinned(points), line) for name, points in named if points]
    return Plot(title=title, x=TIME, y=y, series=series, marks=marks)


def _series(name: str, points: list[tuple[float, float]], line: str = "line") -> Series:
    return Series.model_validate({"name": name, "x": [x for x, _ in points], "y": [y for _, y in points], "line": line})


def _rates(totals: list[tuple[float, float]], intervals: int = 60) -> list[tuple[float, float]]:
    """Megabits a second between samples some distance apart, from running totals of bytes."""
    pairs = pairwise(thinned(totals, intervals + 1))
    return [(t1, (b1 - b0) * 8e-6 / (t1 - t0)) for (t0, b0), (t1, b1) in pairs if t1 > t0 and b1 >= b0]


def _scores(curves: RunCurves) -> list[tuple[float, float]]:
    """(seconds, loss) of each score of the merged model, when it was first seen."""
    seen: dict[int, tuple[float, float]] = {}
    for row in curves.samples:
        score = row.get("eval_loss")
        if isinstance(score, list) and len(score) == 2 and all(_is_number(value) for value in score):
            seen.setdefault(int(score[0]), (row["elapsed_seconds"], score[1]))
    return [point for _, point in sorted(seen.items())]


def _mark(fault: FaultRow) -> Mark:
    recovered = fault.recovered_seconds
    after = "not merged again" if recovered is None else f"merged again after {recovered:.1f} s"
    return Mark(x=fault.at_seconds, label=f"{fault.action} {fault.target}: {after}")


# ------------------------------------------------------------------ figures


def _facts(document: StatusDocument | Report) -> dict[str, Scalar]:
    if isinstance(document, StatusDocument):
        return {
            "phase": f"{document.phase}{': ' if document.message else ''}{document.message}",
            "time since the first step": f"{document.elapsed_seconds:,.0f} s",
            "learners": f"{document.quorum.active} active, {document.quorum.required} needed",
            "parameters": document.parameters or None,
        }
    return {
        "outcome": f"{document.outcome}{': ' if document.message else ''}{document.message}",
        "seed": document.seed,
        "job's digest": document.spec_digest,
        "time of the last run": None if document.wall_seconds is None else f"{document.wall_seconds:,.0f} s",
        "syncer restarts": document.syncer.restarts,
    }


def _rows(document: StatusDocument | Report) -> list[dict[str, Scalar]]:
    tokens, merged = document.tokens, document.learners_in_merges
    together = merged.overall if isinstance(merged, LearnersInMerges) else merged
    figures: list[tuple[str, float | None, str]] = [
        ("tokens trained", tokens.trained, "tokens"),
        ("tokens merged", tokens.merged, "tokens"),
        ("tokens pending", tokens.pending, "tokens"),
        ("tokens dropped", tokens.dropped, "tokens"),
        ("merges", document.merges, ""),
        ("learners in a merge", together, "learners"),
        ("goodput", document.goodput, "0 to 1"),
        ("uptime", document.uptime, "0 to 1"),
        ("payload up", document.bytes_up, "bytes"),
        ("payload down", document.bytes_down, "bytes"),
    ]
    if tokens.trained:
        carried = document.bytes_up + document.bytes_down
        figures.append(("payload per token, both ways", carried / tokens.trained, "bytes"))
    if isinstance(document, StatusDocument):
        figures += [("tokens per second", document.tokens_per_second, "tokens/s"), ("loss", document.loss, LOSS.unit)]
    else:
        own = document.training_loss
        if own is not None:
            figures += [("training loss, first", own.first, LOSS.unit), ("training loss, last", own.last, LOSS.unit)]
        else:
            figures.append(("loss at the start", document.initial_loss, LOSS.unit))
            scored = [loss for _, loss in document.eval_loss if loss is not None]
            if document.final_loss is None and scored:
                figures.append(("loss at the last score", scored[-1], LOSS.unit))
            else:
                figures.append(("loss", document.final_loss, LOSS.unit))
    return [{"name": name, "value": value, "unit": unit} for name, value, unit in figures]


def _tables(document: StatusDocument | Report) -> Iterator[ResultTable]:
    if isinstance(document, StatusDocument):
        columns = ("slot", "region", "ordinal", "state", "step", "tokens", "loss", "step_seconds", "stalled_seconds")
        rows: list[dict[str, Scalar]] = [{name: getattr(slot, name) for name in columns} for slot in document.slots]
        yield ResultTable(title="Learners", rows=[{**row, "state": str(row["state"])} for row in rows])
        events: list[dict[str, Scalar]] = [
            {"time": _utc(event.time), "kind": str(event.kind), "what": event.message} for event in document.events
        ]
        yield ResultTable(title="Events", rows=events)
        return
    yield ResultTable(title="Faults, and when each was over (seconds since it)", rows=_plain_rows(document.faults))
    yield ResultTable(title="Learners", rows=_plain_rows(document.learners or []))
    reasons: Counter[str] = Counter()
    for row in document.ledger or []:
        reasons.update(row.reasons)
    lost: list[dict[str, Scalar]] = [{"reason": name, "tokens": count} for name, count in sorted(reasons.items())]
    yield ResultTable(title="Tokens dropped, by reason", rows=lost)
    yield ResultTable(title="Links, by region", rows=_plain_rows(document.regions or []))


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "–"


def _plain_rows(documents: Sequence[Any]) -> list[dict[str, Scalar]]:
    return [one.model_dump(mode="json") for one in documents]


def _notes(document: StatusDocument | Report, curves: RunCurves) -> Iterator[str]:
    yield (
        "Goodput: compute of merged steps over all slots' wall time. Uptime: share of the time in which at least one"
        " learner advanced."
    )
    if isinstance(document, StatusDocument):
        yield "The run continues; the figures are those of the time at which this report was made."
    if not curves.samples:
        yield "There is no metrics.jsonl with samples of the status: curves over time are missing."
    if curves.losses:
        yield f"A learner's loss is the mean of the steps within each of {LEARNER_POINTS} intervals."
    if curves.unreadable:
        yield f"{curves.unreadable} lines of metrics.jsonl could not be read and are left out."
    if curves.cut:
        yield f"Only the first {MAX_LINES:,} lines of metrics.jsonl were read."
