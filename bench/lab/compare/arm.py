"""One arm's result: what ran, in the figures of ``measures``; as JSON it is kept under the arm's digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco_protocol.common.files import write_whole
from diloco_protocol.spec.job import DiLoCoJob
from lab.compare import measures
from lab.compare.measures import Hit, Recovery, StepEnd
from lab.compare.plan import Comparison

POINTS = 60  # of tokens against time
MAX_RECORD_BYTES = 1 << 30

Tell = Callable[[float], None]
"""Called with the seconds of training that are over."""


class ArmError(Exception):
    """An arm could not be run to its end; the message says why, and which log has more."""


@dataclass(frozen=True, slots=True)
class Record:
    """What an arm leaves. ``scores``: tokens, Unix seconds, loss; ``bytes``: over all learners' links, both ways."""

    steps: list[StepEnd]
    hits: list[Hit]
    started: float
    kept_tokens: int
    trained_tokens: int
    bytes: int
    scores: list[tuple[int, float, float]]
    own: dict[str, Any]
    cpu: Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Figures of one arm; ``losses``: tokens, seconds since the first step, loss; ``tokens``: seconds and tokens
    trained by then; ``own``: what this arm alone has to say."""

    name: str
    wall_seconds: float
    goodput: float
    uptime: float
    kept_tokens: int
    trained_tokens: int
    tokens_per_second: float
    bytes: int
    final_loss: float | None
    cpu_share: float
    recoveries: list[Recovery]
    losses: list[tuple[int, float, float]]
    tokens: list[tuple[float, float]]
    own: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(self), indent=1).encode() + b"\n", mode=0o644)

    @classmethod
    def load(cls, path: Path) -> ArmResult | None:
        """What was kept; None: nothing, or not by this version."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["recoveries"] = [Recovery(**row) for row in content["recoveries"]]
            for name in ("losses", "tokens"):
                content[name] = [tuple(point) for point in content[name]]
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def measure_arm(name: str, plan: Comparison, record: Record) -> ArmResult:
    """The figures of what an arm has left."""
    step_seconds, learners = plan.pace.step_seconds, plan.learners
    last = max((step.time for step in record.steps), default=record.started)
    ended = max(record.started + plan.seconds, last)
    wall = ended - record.started
    return ArmResult(
        name,
        wall,
        measures.goodput(record.kept_tokens, plan.pace.tokens, step_seconds, learners, wall=wall),
        measures.uptime(record.steps, record.started, ended, step_seconds),
        kept_tokens=record.kept_tokens,
        trained_tokens=record.trained_tokens,
        tokens_per_second=record.kept_tokens / wall,
        bytes=record.bytes,
        final_loss=record.scores[-1][2] if record.scores else None,
        cpu_share=record.cpu(record.started, ended),
        recoveries=measures.recoveries(record.hits, record.steps, record.started, ended, step_seconds=step_seconds),
        losses=[(tokens, max(0.0, at - record.started), loss) for tokens, at, loss in record.scores],
        tokens=_tokens_by_time(record, plan.pace.tokens, wall),
        own=record.own,
    )


def _tokens_by_time(record: Record, step_tokens: int, wall: float) -> list[tuple[float, float]]:
    times = sorted(step.time - record.started for step in record.steps)
    points = [wall * i / POINTS for i in range(POINTS + 1)]
    return [(round(at, 3), float(sum(time <= at for time in times) * step_tokens)) for at in points]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; lines torn by a kill, and a file that is not there, are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def write_job(job: DiLoCoJob, path: Path) -> None:
    from diloco_protocol.spec.load import job_to_json

    write_whole(path, job_to_json(job).encode())


def hits_of(rows: Sequence[tuple[str, str, float, float]], names: Sequence[str]) -> list[Hit]:
    """From action, target, time and duration. ``names``: of the job's learners, in the job's order."""
    learners = {name: index for index, name in enumerate(names)}
    return [Hit(action, learners.get(target), time, lasted) for action, target, time, lasted in rows]
