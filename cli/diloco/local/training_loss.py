"""The learners' own training loss, from their metrics files, for a run that nobody scored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from diloco.local.metrics_log import read_rows
from diloco_protocol.documents import TrainingLoss
from diloco_protocol.vocabulary import EVALUATOR

_ENDS = 1 << 16  # bytes read from each end of a file, which is one line for each step of a whole job


def read_training_loss(metrics: Path) -> TrainingLoss | None:
    """Of the learners' files in ``metrics``: the means of the first and of the last loss in each. None: no file tells
    of a loss, or none can be read."""
    firsts, lasts = [], []
    for path in sorted(path for path in metrics.glob("*.jsonl") if path.stem != EVALUATOR):
        try:
            with path.open("rb") as file:
                head = file.read(_ENDS)
                file.seek(max(0, path.stat().st_size - _ENDS))
                tail = file.read(_ENDS)
        except OSError:
            continue
        first, last = next(_losses(head.splitlines()), None), next(_losses(reversed(tail.splitlines())), None)
        if first is not None and last is not None:
            firsts.append(first)
            lasts.append(last)
    if not firsts:
        return None
    return TrainingLoss(first=math.fsum(firsts) / len(firsts), last=math.fsum(lasts) / len(lasts))


def _losses(lines: Iterable[bytes]) -> Iterator[float]:
    """The losses of these lines; one that was cut in two has none."""
    for row in read_rows(lines):
        loss = row.get("loss")
        if isinstance(loss, int | float) and math.isfinite(loss):
            yield float(loss)
