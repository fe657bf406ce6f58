"""Turns are made while this operator leads, and end when it does not any more.

Nothing here asks again and again who leads: the candidate says when that may have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diloco_operator.leadership.candidate import Candidate
from diloco_operator.reconcile.workqueue import WorkQueue

STOP_SECONDS = 10.0
"""The longest that turns under way are waited for once they are cancelled."""


async def run_while_leading(candidate: Candidate, queue: WorkQueue, begins: Callable[[bool], None]) -> None:
    """Run ``queue`` whenever ``candidate`` leads, until cancelled. ``begins`` is called each time before, with whether
    another operator may have led meanwhile. Raises what the queue fails of."""
    before = 0
    while True:
        term = await candidate.wait_until_it_leads()
        begins(term != before)
        before = term
        turns = asyncio.create_task(queue.run(), name="work queue")
        over = asyncio.create_task(candidate.wait_until_it_is_over(term), name="end of leadership")
        try:
            await asyncio.wait([turns, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            turns.cancel()
            over.cancel()
            await asyncio.wait([turns, over], timeout=STOP_SECONDS)
        if not turns.cancelled():
            turns.result()  # what it failed of
