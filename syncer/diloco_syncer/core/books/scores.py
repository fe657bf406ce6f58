"""The evaluator's scores: the job's curve of loss over tokens, its first and its last value."""

from __future__ import annotations

from typing import Any

from diloco_protocol.wire.records import Evaluation

MAX_ROWS = 1000  # of the curve; where there would be more, every second one goes


class Scores:
    """Losses in mean nats per token, as the evaluator sent them."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []  # (tokens trained by all learners, loss), ascending
        self.initial: float | None = None  # of version 0
        self.final: float | None = None  # of the model at the job's end
        self._newest_merges = -1  # merges in the model of the newest row

    def apply(self, score: Evaluation, *, may_be_final: bool) -> None:
        """Take one score, of a model that there is. A model that is scored again (the evaluator began anew, or scores
        the end) replaces its row, so that every model has one."""
        if score.sum_versions == 0 and self.initial is None:
            self.initial = score.loss
        newest = self.rows[-1][0] if self.rows else 0
        if score.tokens >= newest:
            if self.rows and score.sum_versions == self._newest_merges:
                self.rows.pop()
            self.rows.append((score.tokens, score.loss))
            self._newest_merges = score.sum_versions
            self._thin()
        if score.final and may_be_final:
            self.final = score.loss

    def _thin(self) -> None:
        while len(self.rows) > MAX_ROWS:
            del self.rows[1:-1:2]

    def drop_impossible(self, tokens: int) -> bool:
        """Drop rows beyond ``tokens``, which are all that were trained, and rows in excess; whether there were any."""
        before = len(self.rows)
        self.rows = [row for row in self.rows if 0 <= row[0] <= tokens]
        self._thin()
        return len(self.rows) < before

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "newest_merges": self._newest_merges, "initial": self.initial, "final": self.final}

    def load(self, row: dict[str, Any]) -> None:
        self.rows = [(tokens, loss) for tokens, loss in row["rows"]]
        self._newest_merges = row["newest_merges"]
        self.initial = row["initial"]
        self.final = row["final"]
