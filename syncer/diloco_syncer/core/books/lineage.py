"""Which past a store has: the epochs from which the job went on for good.

A syncer's epoch *settles* when it starts to train, or gives up what its store has lost. From then on,
versions above its own that were made before belong to another *lineage*: nobody may bring them back.
The settled epochs, in order, name the lineage.

They are part of the state, and a state can be lost too. Therefore every announcement names the newest
settled epoch, and learners repeat it at Join for each version that they hold.

Until this syncer decides, it trusts what learners report. Once it has recovered a version from a learner, or
its own epoch has settled, a learner that names an epoch missing from ``epochs`` is on another lineage and must
start a new tenure: its pushes and confirmations refer to versions that no longer exist.

Example. Epochs 1 and 2 settled; the store is restored from a copy of epoch 1, and its syncer is epoch 3. A
learner that was told "2 has settled" adds 2 to the past (``learn_settled``), as long as nothing was decided.
Had epoch 3 settled before that learner came, 2 would be another lineage's, and so would the learner's work.
"""

from __future__ import annotations

from bisect import insort
from typing import Any


class Lineage:
    """The epochs that settled in this store's past, ascending."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self._forgotten = 0  # the store was emptied: it is not known which epochs up to this one settled
        self._recovered_in = 0  # the newest epoch in which a version was recovered from a learner

    @property
    def newest_settled(self) -> int:
        return self.epochs[-1] if self.epochs else 0

    @property
    def has_recovered(self) -> bool:
        """Whether a version was recovered from a learner since the newest epoch settled."""
        return self._recovered_in > self.newest_settled

    def mark_settled(self, epoch: int) -> None:
        """The job went on for good in ``epoch``: this syncer's, or that of a record found in the store."""
        if epoch > 0 and epoch not in self.epochs:
            insort(self.epochs, epoch)

    def mark_recovered(self, epoch: int) -> None:
        """A version was recovered from a learner in ``epoch``."""
        self._recovered_in = max(self._recovered_in, epoch)

    def learn_settled(self, epoch: int, *, emptied: bool = False) -> bool:
        """Add an epoch that a learner reports as settled; call only before this syncer's own has settled.
        ``emptied``: the store has forgotten all that was before, too. True: the epoch is new to it."""
        if self.has_recovered or epoch <= self.newest_settled:
            return False
        self.epochs.append(epoch)
        if emptied:
            self._forgotten = epoch
        return True

    def is_unknown(self, epoch: int) -> bool:
        """Whether a learner that reports ``epoch`` as settled is on another lineage."""
        return epoch > self._forgotten and epoch not in self.epochs

    def to_json(self) -> dict[str, Any]:
        return {"epochs": list(self.epochs), "forgotten": self._forgotten, "recovered_in": self._recovered_in}

    def load(self, row: dict[str, Any]) -> None:
        self.epochs = list(row["epochs"])
        self._forgotten = row["forgotten"]
        self._recovered_in = row["recovered_in"]
