"""Error feedback: what an encoding drops from one push is added to the next one that counts (algorithm.md section 7).

A push of fragment p encodes Δ + r_p, and r_p, the *residual*, becomes what that encoding dropped only
when the push is known to be merged. A push that was refused, came late or was lost leaves r_p as it
is. So, over all merged pushes, the sum of what was decoded plus the residual is the sum of the Δ.

Example: Δ = 0.9 is encoded as 1.0, so -0.1 was dropped. If that push is merged, the next one encodes
Δ - 0.1; if it is refused, the next one encodes its Δ as it is.

A new process starts with residuals of zero.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from diloco_worker.fragments import Floats


class ErrorFeedback:
    """The residuals of all fragments of one process. Any thread may call its methods."""

    def __init__(self, fragments: int, enabled: bool) -> None:
        self.enabled = enabled
        self._residual: list[Floats | None] = [None] * fragments
        # Per fragment, of each push whose fate is open: what its encoding dropped, None before it is encoded.
        self._open: list[dict[int, Floats | None]] = [{} for _ in range(fragments)]
        self._lock = threading.Lock()  # pushes are encoded in other threads than they are resolved in

    def residual(self, fragment: int) -> Floats | None:
        """r_p, float32[elements]; None stands for zero."""
        return self._residual[fragment]

    def expect_push(self, fragment: int, sequence: int) -> None:
        """Announce a push that will be encoded. If it is resolved before that, nothing is kept of it."""
        if self.enabled:
            with self._lock:
                self._open[fragment].setdefault(sequence, None)

    def record_dropped(self, fragment: int, sequence: int, dropped: Floats) -> None:
        """Keep ``dropped``, float32[elements]: what r_p becomes if this push is merged."""
        with self._lock:
            if sequence in self._open[fragment]:
                self._open[fragment][sequence] = dropped

    def resolve_pushes(self, fragment: int, merged: int, forget: Sequence[int]) -> None:
        """End the open fate of pushes: ``merged`` (0: none) was merged, the others in ``forget`` were not."""
        if not self.enabled:
            return
        with self._lock:
            dropped = self._open[fragment].get(merged)
            if dropped is not None:
                self._residual[fragment] = dropped
            for sequence in (merged, *forget):
                self._open[fragment].pop(sequence, None)

    def forget_open_pushes(self) -> None:
        """Forget the pushes of a tenure that ended: none of them will be confirmed. The residuals stay."""
        with self._lock:
            for pushes in self._open:
                pushes.clear()
