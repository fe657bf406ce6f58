"""Leaving without losing a token: offers of everything above the base, then Drained.

Longest unmerged first (algorithm.md section 8, Drain). An offer of a fragment
takes the place of this learner's push that was accepted and is not being merged
yet. Where a merge is under way already the syncer refuses the offer
(``already-merged``): then the broadcast of that merge is adopted, and what is
above the new base (nothing, or the overlapped steps) is offered. What is neither
acknowledged nor confirmed when patience ends is given up; the syncer counts it
as dropped (``drain``).
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
        PushRefusal.BAD_CHECKSUM,
        PushRefusal.INCONSISTENT,
        TransferRefusal.BUSY,
    }
)


@dataclass(slots=True)
class _Offer:
    """One fragment's way out. ``made_on``: the base version of what is on its way;
    ``waits_above``: the base version that must rise first."""

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
    """Offer, wait for the acknowledgements. Returns what was given up: (fragment, tokens, why).

    ``until``: monotonic seconds when it must be over; asked again and again, for a process that
    drains because its job ends may be told to leave meanwhile.
    Raises WorkerError if the learner cannot go on (fenced for good, contradicting broadcasts).
    """
    synchronizer.begin_drain()
    offers = [_Offer() for _ in synchronizer.adoption.fragments]
    now = time.monotonic()
    end, patience = now + LONGEST_SECONDS, now + PATIENCE_SECONDS
    while True:
        synchronizer.boundary()
        now = time.monotonic()
        if _look(synchronizer, offers, now):
            patience = now + PATIENCE_SECONDS
        left = [p for p, offer in enumerate(offers) if not offer.done and not offer.given_up]
        if not left or synchronizer.phase in ENDED_PHASES or not synchronizer.seated:
            break
        if now > min(end, patience, until()):
            for p in left:
                offers[p].given_up = "no acknowledgement in time"
            break
        synchronizer.wait_mail(0.05)
    given_up = []
    for p, offer in enumerate(offers):
        tokens = synchronizer.adoption.pending_tokens(p)
        if not offer.done and tokens:
            given_up.append((p, tokens, offer.given_up or f"the job is {synchronizer.phase}"))
    for p, tokens, why in given_up:
        log.warning("fragment %d: %d tokens were not taken over: %s", p, tokens, why)
    return given_up


def _look(synchronizer: Synchronizer, offers: list[_Offer], now: float) -> bool:
    """Take verdicts, send offers that are due; whether anything moved on."""
    progress = False
    adoption = synchronizer.adoption
    for p, offer in enumerate(offers):
        base = adoption.fragments[p].base
        version = base.version if base is not None else 0
        if offer.sequence is not None:
            verdict = synchronizer.verdicts.pop((p, offer.sequence), None)
            if verdict is None:
                continue
            offer.sequence, progress = None, True
            if verdict.accepted:
                offer.done = True
            elif verdict.accepted is not None and verdict.reason not in _AGAIN:
                offer.given_up = f"refused ({verdict.reason}): {verdict.message}"
            elif offer.tries >= _TRIES:
                offer.given_up = f"tried {offer.tries} times: {verdict.reason} {verdict.message}"
            else:
                offer.waits_above = offer.made_on if verdict.reason == PushRefusal.ALREADY_MERGED else None
                offer.again_at = now + 0.2 * 2**offer.tries
        if offer.waits_above is not None and version > offer.waits_above:
            offer.waits_above, offer.again_at, progress = None, now, True
    if not synchronizer.online:
        return progress
    flying = sum(offer.sequence is not None for offer in offers)
    order = adoption.drain_order()
    for p, offer in enumerate(offers):
        if p not in order and offer.sequence is None and not offer.given_up:
            progress |= not offer.done
            offer.done = True  # nothing above the base
    for p in order:
        offer = offers[p]
        if flying >= _AT_ONCE:
            break
        if offer.done or offer.given_up or offer.sequence is not None or offer.waits_above is not None:
            continue
        if now >= offer.again_at:
            base = adoption.fragments[p].base
            offer.made_on = base.version if base is not None else 0
            offer.sequence = synchronizer.offer(p)
            offer.tries += 1
            flying += 1
    return progress
