"""Leaving without losing a token: everything above the base is offered to the syncer (algorithm.md section 8, Drain).

Theory of operation
-------------------
An *offer* is a push without a round. It is acknowledged when it is durable, and counts in its fragment's
next round, though the learner is gone by then. Fragments are offered longest unmerged first, a few at a time.

An offer takes the place of this learner's push that was accepted and is not being merged yet. Where a merge is
under way already the syncer refuses the offer (``already-merged``). Then the broadcast of that merge is adopted,
and what is above the new base (nothing, or the overlapped steps) is offered.

Patience begins anew with every answer, and with every chunk that is sent: one fragment may take minutes over a slow
link. What is neither acknowledged nor confirmed when patience ends is given up; the syncer counts it as dropped
(``drain``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco_protocol.vocabulary import ENDED_PHASES, PushRefusal, TransferRefusal
from diloco_worker.sync.synchronizer import Synchronizer

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 20.0  # without any progress
LONGEST_SECONDS = 600.0  # in all
_AT_ONCE = 4  # offers on their way: one is encoded while others are uploaded
_TRIES = 6  # of one fragment

# After these the same work can be offered again later; after any other refusal it cannot.
_AGAIN = frozenset(
    {
        PushRefusal.ALREADY_MERGED,
        PushRefusal.OTHER_EPOCH,
        PushRefusal.OTHER_ROUND,
        PushRefusal.FUTURE_BASE,
        PushRefusal.TOO_OLD,
        PushRefusal.FENCED,
        PushRefusal.INCONSISTENT,
        TransferRefusal.BUSY,
    }
)


@dataclass(slots=True)
class _Offer:
    """How far the offer of one fragment is. ``made_on``: the base version of what is on its way. ``waits_above``:
    offer again when the base's version is above this one."""

    tries: int = 0
    sequence: int | None = None  # on its way
    made_on: int = 0
    waits_above: int | None = None
    again_at: float = 0.0
    done: bool = False
    given_up: str = ""


def offer_everything(
    synchronizer: Synchronizer, until: Callable[[], float] = lambda: math.inf
) -> list[tuple[int, int, str]]:
    """Offer every fragment's work and wait for the answers. Returns what was given up: (fragment, tokens, why).

    ``until``: monotonic seconds when it must be over; asked again and again, for a process that
    drains because its job ends may be told to leave meanwhile.
    Raises WorkerError if the learner cannot go on (fenced for good, contradicting broadcasts).
    """
    synchronizer.begin_drain()
    offers = [_Offer() for _ in synchronizer.adoption.fragments]
    now = time.monotonic()
    end, patience = now + LONGEST_SECONDS, now + PATIENCE_SECONDS
    chunks = synchronizer.client.chunks_up
    while True:
        synchronizer.run_boundary()
        now = time.monotonic()
        if _advance_offers(synchronizer, offers, now) or synchronizer.client.chunks_up != chunks:
            patience = now + PATIENCE_SECONDS
        chunks = synchronizer.client.chunks_up
        left = [p for p, offer in enumerate(offers) if not offer.done and not offer.given_up]
        if not left or synchronizer.phase in ENDED_PHASES or not synchronizer.seated:
            break
        if now > min(end, patience, until()):
            for p in left:
                offers[p].given_up = "no acknowledgement in time"
            break
        synchronizer.wait(0.05)
    given_up = []
    for p, offer in enumerate(offers):
        tokens = synchronizer.adoption.pending_tokens(p)
        if not offer.done and tokens:
            why = offer.given_up or f"the job is {synchronizer.phase}"
            log.warning("fragment %d: %d tokens were not taken over: %s", p, tokens, why)
            given_up.append((p, tokens, why))
    return given_up


def _advance_offers(synchronizer: Synchronizer, offers: list[_Offer], now: float) -> bool:
    """Read the answers, and send offers that are due; whether any offer moved on."""
    progress = False
    adoption = synchronizer.adoption
    for p, offer in enumerate(offers):
        base = adoption.fragments[p].base
        version = base.version if base is not None else 0
        if offer.sequence is not None:
            answer = synchronizer.push_answers.pop((p, offer.sequence), None)
            if answer is None:
                continue
            offer.sequence, progress = None, True
            if answer.accepted:
                offer.done = True
            elif answer.accepted is not None and answer.reason not in _AGAIN:
                offer.given_up = f"refused ({answer.reason}): {answer.message}"
            elif offer.tries >= _TRIES:
                offer.given_up = f"tried {offer.tries} times: {answer.reason} {answer.message}"
            else:
                offer.waits_above = offer.made_on if answer.reason == PushRefusal.ALREADY_MERGED else None
                offer.again_at = now + 0.2 * 2**offer.tries
        if offer.waits_above is not None and version > offer.waits_above:
            offer.waits_above, offer.again_at, progress = None, now, True
    if not synchronizer.client.connected:
        return progress
    on_the_way = sum(offer.sequence is not None for offer in offers)
    order = adoption.drain_order()
    for p, offer in enumerate(offers):
        if p not in order and offer.sequence is None and not offer.given_up:
            progress |= not offer.done
            offer.done = True  # nothing above the base
    for p in order:
        offer = offers[p]
        if on_the_way >= _AT_ONCE:
            break
        if offer.done or offer.given_up or offer.sequence is not None or offer.waits_above is not None:
            continue
        if now >= offer.again_at:
            base = adoption.fragments[p].base
            offer.made_on = base.version if base is not None else 0
            offer.sequence = synchronizer.offer_fragment(p)
            offer.tries += 1
            on_the_way += 1
    return progress
