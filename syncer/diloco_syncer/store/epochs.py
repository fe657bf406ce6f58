"""Epochs: which of several syncers the store belongs to.

**Epochs.** A syncer that starts claims the epoch after the newest by creating ``epochs/<n>``; a syncer that loses the
race tries the next. No epoch is claimed twice, even if the store has lost a claim: states name their epochs too.
Epochs have no gaps, so a syncer finds out that it was succeeded by asking for the name after its own
(``Epoch.check``), which it does before and after it makes a record. Between the check and the write a successor may
appear. Then the exclusive name decides: the record is there once. The successor takes it over if it finds it at its
start; one that comes later is set aside at the next start (``restore.py``).

**Succeeded pods.** On a node that a cluster has lost a syncer may live on, and be started again by a kubelet that the
API server cannot reach, with its store still within reach. It would claim epoch after epoch in turn with its
successor. Pods come one after another and never come back. So a pod that has claimed an epoch leaves the store to a
pod that came after it (``find_successor``), while that one claimed its last epoch less than ``LEAVE_SECONDS`` ago.
"""

from __future__ import annotations

import contextlib
import json
import re

from diloco_protocol.common.files import TooLarge
from diloco_syncer.store.base import HigherEpoch, ObjectExists, ObjectNotFound, Store

_EPOCH = re.compile(r"/e(\d{10})-")
_MAX_EPOCHS_TRIED = 1000
_CLAIMS_READ = 200  # the newest
_MAX_CLAIM_BYTES = 4096
LEAVE_SECONDS = 600.0
"""How long after its last claim a successor is given the store. Not for ever: of two pods the one that came
first may have claimed last, and the other is gone."""


class Epoch:
    """This syncer's claim on the store."""

    def __init__(self, store: Store, number: int) -> None:
        self.store = store
        self.number = number

    @classmethod
    def claim(cls, store: Store, claimant: bytes = b"", above: int = 0) -> Epoch:
        """Claim the epoch after the newest, and all those up to ``above`` + 1, because epochs have no gaps.

        ``claimant`` is kept in the claim, for people and ``find_successor``. Raises ``HigherEpoch``, OSError.
        """
        claimed = {int(name.rsplit("/", 1)[1]) for name in store.list("epochs")}
        newest = max([*claimed, *map(epoch_of, store.list("state"))], default=0)
        for number in sorted(set(range(1, newest + 1)) - claimed):  # the store has lost them
            with contextlib.suppress(ObjectExists):
                store.create(_epoch_name(number))
        for number in range(newest + 1, newest + 1 + _MAX_EPOCHS_TRIED):
            try:
                store.create(_epoch_name(number), claimant)
            except ObjectExists:
                continue  # another syncer starts at the same time
            if number > above:
                return cls(store, number)
        raise HigherEpoch(f"{_MAX_EPOCHS_TRIED} epochs were claimed by others while this syncer tried")

    def check(self) -> None:
        """Raises ``HigherEpoch`` if another syncer has claimed a higher one."""
        if self.store.exists(_epoch_name(self.number + 1)):
            raise HigherEpoch(
                f"another syncer has claimed epoch {self.number + 1} of this store; this one has epoch "
                f"{self.number} and stops"
            )


def find_successor(store: Store, pod: str, now: float) -> str:
    """The pod that has taken the store over from ``pod``, as a sentence; empty: none has, lately.

    ``now``: unix seconds. Claims that name no pod are ignored. Raises OSError.
    """
    first: dict[str, int] = {}
    last: dict[str, tuple[int, float]] = {}
    for name in store.list("epochs")[-_CLAIMS_READ:]:
        try:
            claim = json.loads(store.read(name, _MAX_CLAIM_BYTES))
            who, at = str(claim["pod"]), float(claim["time"])
        except (ObjectNotFound, TooLarge, ValueError, TypeError, KeyError):
            continue
        number = int(name.rsplit("/", 1)[1])
        first.setdefault(who, number)
        last[who] = number, at
    if not pod or pod not in first:
        return ""
    came_later = [(*last[who], who) for who in first if first[who] > first[pod]]
    number, at, who = max(came_later, default=(0, 0.0, ""))
    if not who or abs(now - at) > LEAVE_SECONDS:
        return ""
    return f"pod {who}, which came after this one, has claimed epoch {number} of this store"


def epoch_of(name: str) -> int:
    """The epoch in which an object was made, by its name; 0 where the name has none (records, offers)."""
    found = _EPOCH.search(name)
    return int(found.group(1)) if found else 0


def _epoch_name(number: int) -> str:
    return f"epochs/{number:010d}"
