"""What a loop says of a step's tokens, checked before anything counts them."""

from __future__ import annotations

from diloco_protocol.wire.limits import MAX_STEP_TOKENS
from diloco_worker.settings import WorkerError


def check_step_tokens(tokens: int) -> int:
    """The tokens of one step, as ``after_step`` was given them. Raises WorkerError: the counts of a job only rise."""
    try:
        count = int(tokens)
    except (TypeError, ValueError, OverflowError):
        count = -1
    if 0 <= count <= MAX_STEP_TOKENS:
        return count
    raise WorkerError(
        f"after_step(tokens={tokens!r}): tokens is how many tokens were trained in this step, a whole number from 0 to "
        f"{MAX_STEP_TOKENS:,}"
    )
