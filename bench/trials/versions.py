"""The syncer's versions of a trial: the product's, with what some candidates do before the merge."""

from __future__ import annotations

import numpy as np

from diloco_syncer.core import events as ev
from diloco_syncer.numerics import isotropic
from lab.world.values import MergedVersions
from trials.outers import HeLoCo, IsoLoCo, equalize_to_mean, turn_delta


class TrialVersions(MergedVersions):
    """Versions whose outer optimizer may be one of outers.py."""

    def merge(self, action: ev.Merge, epoch: int) -> tuple[float, ...]:
        if isinstance(self.optimizer, HeLoCo):
            self._turn_pushes(action)
        elif isinstance(self.optimizer, IsoLoCo):
            self._equalize_pushes(action)
        return super().merge(action, epoch)

    def _turn_pushes(self, action: ev.Merge) -> None:
        """Correct each push by the momentum."""
        momentum = self.outer_state(action.fragment).get("momentum")
        if momentum is None:
            return
        for responder in action.responders:
            delta = self.delta(responder.handle)
            for piece in self.layout.fragments[action.fragment]:
                span = slice(piece.offset, piece.offset + piece.elements)
                delta[span] = turn_delta(delta[span], momentum[span])
            self.replace_delta(responder.handle, action.fragment, delta)

    def _equalize_pushes(self, action: ev.Merge) -> None:
        """Give every push the same matrices, those of the weighted mean made isotropic, so that their mean is that."""
        deltas = {responder.handle: self.delta(responder.handle) for responder in action.responders}
        for span in isotropic.find_matrices(self.layout, self.layout.fragments[action.fragment]):
            inside = slice(span.offset, span.offset + span.rows * span.columns)
            mean = sum(np.float32(r.weight) * deltas[r.handle][inside] for r in action.responders)
            equal = equalize_to_mean(np.asarray(mean).reshape(span.rows, span.columns)).ravel()
            for delta in deltas.values():
                delta[inside] = equal
        for handle, delta in deltas.items():
            self.replace_delta(handle, action.fragment, delta)
