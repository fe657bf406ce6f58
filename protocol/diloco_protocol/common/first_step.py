"""A loop that asks for one batch after the other and finishes no step: from when that is said, and in which words.

The syncer says it of a job's learners, and a learner that trains alone says it of itself.
"""

from __future__ import annotations

MANY_BATCHES = 8
"""More than a loop takes that puts several batches into one step, usually."""
BATCHES_SECONDS = 20.0


def no_step_text(batches: int) -> str:
    return (
        f"its loop was given {batches} batches and has finished no step: does it call learner.after_step() "
        "after each optimizer step?"
    )
