"""Which of its histories a job goes on with, when a store that lost data has made it have several.

Theory of operation. An epoch *settles* when it starts to train, or gives up what its store
had lost: from then on, versions above its own are another history's. The settled epochs
of a store's past, in order, name its history. They are in its state, and a state can be lost
too; so every announcement says which epoch had settled last, and learners say it again at
Join, for each version that they hold. Whoever was told of a settled epoch may have given up
what came before it; who was not, has not.

Until something is decided, what learners tell is believed: the store has forgotten it, and goes on in
that history. Once a version was taken from a learner since then (``chosen``), or this epoch has settled,
it is too late: who has heard of an epoch that is not in this past is *foreign*, and begins anew,
for its pushes and confirmations are of versions that will never be again.

Plain code, in ``job``.
"""

from __future__ import annotations

from bisect import insort
from typing import Any


class Lineage:
    """The epochs that settled in this store's past, ascending."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.taken = 0  # the newest epoch in which a version was taken from a learner

    @property
    def settled(self) -> int:
        """The newest; 0: none."""
        return self.epochs[-1] if self.epochs else 0

    @property
    def chosen(self) -> bool:
        """Whether the store has gone on in this history, though no epoch has settled since."""
        return self.taken > self.settled

    def settle(self, epoch: int) -> None:
        """``epoch`` went on from what it had: this syncer's, or that of a record found in the store."""
        if epoch > 0 and epoch not in self.epochs:
            insort(self.epochs, epoch)

    def take(self, epoch: int) -> None:
        """In ``epoch`` a version was taken from a learner."""
        self.taken = max(self.taken, epoch)

    def hear(self, epoch: int) -> bool:
        """A learner was told that ``epoch`` had settled; call only before this syncer's has.
        True: the store had forgotten it, and it is in its past from now on."""
        if self.chosen or epoch <= self.settled:
            return False
        self.epochs.append(epoch)
        return True

    def foreign(self, epoch: int) -> bool:
        """Whether who was told that ``epoch`` had settled comes from another history."""
        return epoch > 0 and epoch not in self.epochs

    def to_json(self) -> dict[str, Any]:
        return {"epochs": list(self.epochs), "taken": self.taken}

    def load(self, row: dict[str, Any]) -> None:
        self.epochs = list(row["epochs"])
        self.taken = row["taken"]
