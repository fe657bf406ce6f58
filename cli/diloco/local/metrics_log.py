"""What a run leaves for later: ``metrics.jsonl``, and TensorBoard events where installed.

``metrics.jsonl`` gathers two sources, one JSON object a line: samples of the syncer's
status (``"source": "status"``) and the lines that every process writes to its own file
(``"source": "local-0"``), in the order in which the runner saw them.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from diloco_protocol.documents import StatusDocument

MAX_READ_BYTES = 1 << 20  # of one process's file, each time
MAX_LINE_BYTES = 1 << 16
SAMPLED = {
    *("phase", "epoch", "elapsed_seconds", "step", "merges", "tokens", "tokens_per_second", "goodput", "uptime"),
    *("bytes_up", "bytes_down"),
}


def read_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The rows in lines of a metrics file; a line that was torn by a kill in the middle of a write has none."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


class MetricsLog:
    """Appends to ``metrics.jsonl``; call ``write`` now and then, ``close`` at the end."""

    def __init__(self, file: Path, metrics: Path, tensorboard: Path | None) -> None:
        """Lines that are in ``metrics`` already are an earlier run's and are not copied again.
        ``tensorboard`` None: no events. Raises OSError."""
        self._metrics = metrics
        self._out: TextIO = file.open("a", encoding="utf-8")
        self._read: dict[str, int] = {path.name: path.stat().st_size for path in metrics.glob("*.jsonl")}
        self._events = _events(tensorboard) if tensorboard is not None else None
        self._evaluations = 0

    def write(self, status: StatusDocument | None) -> None:
        """What the processes have written, and a status document if there is one. Raises OSError."""
        self.follow()
        if status is not None:
            self.sample(status)
        if self._events is not None:
            self._events.flush()

    def sample(self, status: StatusDocument) -> None:
        """Write the figures of a status document (docs/contracts.md)."""
        versions, evaluations = status.versions or [0], status.eval_loss
        row = {
            "source": "status",
            "time": round(time.time(), 3),
            **status.model_dump(mode="json", include=SAMPLED),
            "versions": [min(versions), max(versions)],
            "active": status.quorum.active,
            "eval_loss": evaluations[-1] if evaluations else None,
        }
        self._write(row)
        trained = status.tokens.trained
        for name in ("merges", "tokens_per_second", "goodput", "bytes_up", "bytes_down"):
            self._scalar(f"job/{name}", getattr(status, name), trained)
        self._scalar("job/active_learners", status.quorum.active, trained)
        self._scalar("job/tokens_pending", status.tokens.pending, trained)
        self._scalar("job/tokens_dropped", status.tokens.dropped, trained)
        for tokens, loss in evaluations[self._evaluations :]:
            self._scalar("merged/loss", loss, tokens)
        self._evaluations = max(self._evaluations, len(evaluations))

    def follow(self) -> None:
        """Copy what the processes have written to their files since the last time."""
        for path in sorted(self._metrics.glob("*.jsonl")):
            for row in self._new_rows(path):
                self._write({"source": path.stem, **row})
                step = row.get("step")
                if isinstance(step, int):
                    for name in ("loss", "lr", "step_seconds", "stalled_seconds"):
                        self._scalar(f"{path.stem}/{name}", row.get(name), step)

    def close(self) -> None:
        self.follow()
        self._out.close()
        if self._events is not None:
            self._events.close()

    def _new_rows(self, path: Path) -> Iterator[dict[str, Any]]:
        start = self._read.get(path.name, 0)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < start:
                start = 0  # begun anew
            file.seek(start)
            data = file.read(MAX_READ_BYTES)
        whole = data.rfind(b"\n") + 1  # the last line may be half written
        if whole == 0 and len(data) > MAX_LINE_BYTES:
            whole = len(data)  # no line at all: skip it
        self._read[path.name] = start + whole
        return read_rows(data[:whole].splitlines())

    def _write(self, row: dict[str, Any]) -> None:
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()

    def _scalar(self, tag: str, value: Any, step: int) -> None:
        if self._events is not None and isinstance(value, int | float) and math.isfinite(value):
            self._events.scalar(tag, float(value), step)


class _Events:
    """TensorBoard's event files by its own record format, without torch, and without its writer's
    thread, in which a full disk would end with a traceback that nobody can catch."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._summary = Summary
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((directory / name).open("ab"))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalar(self, tag: str, value: float, step: int) -> None:
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
        self._add(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        self._writer.close()


def _events(directory: Path) -> _Events | None:
    try:
        return _Events(directory)
    except ImportError:
        return None  # not installed: the extra `tensorboard`
