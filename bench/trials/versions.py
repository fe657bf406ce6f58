"""The syncer's versions of a trial: the product's, with what some candidates do before the merge."""

from __future__ import annotations

from diloco.simulate.job.values import MergedVersions
from diloco_syncer.core import events as ev
from trials.outers import HeLoCo, turn_delta


class TrialVersions(MergedVersions):
    """Versions whose outer optimizer may be one of outers.py."""

    def merge(self, action: ev.Merge, epoch: int) -> tuple[float, ...]:
        pieces = self.layout.fragments[action.fragment]
        momentum = self.outer_state(action.fragment).get("momentum")
        if isinstance(self.optimizer, HeLoCo) and momentum is not None:
            for responder in action.responders:
                delta = self.delta(responder.handle)
                for piece in pieces:
                    span = slice(piece.offset, piece.offset + piece.elements)
                    delta[span] = turn_delta(delta[span], momentum[span])
                self.replace_delta(responder.handle, action.fragment, delta)
        return super().merge(action, epoch)
