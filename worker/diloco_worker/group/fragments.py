"""A model's fragments in a learner of several ranks: each copies and moves its own rows of a fragment's vector."""

from __future__ import annotations

import torch

from diloco_protocol.arrays.layout import Layout
from diloco_worker.core.adoption import Kind
from diloco_worker.fragments import Floats, ModelFragments, Vector, copy_view, move_view
from diloco_worker.group.exchange import Exchange, Run, Span
from diloco_worker.group.ranks import Command

KINDS = list(Kind)  # by the numbers under which the leader tells them


def longest_vector(layout: Layout) -> int:
    """Bytes of the longest fragment."""
    return 4 * max(layout.elements(fragment) for fragment in range(len(layout)))


class GroupFragments(ModelFragments):
    """Every rank makes one. The leader's ``snapshot`` and ``move`` tell the others, who call ``give_snapshot`` and
    ``follow_move``; the vectors are the leader's alone."""

    def __init__(self, model: torch.nn.Module, layout: Layout, exchange: Exchange) -> None:
        super().__init__(model, layout, parts=exchange.parts)
        self._exchange = exchange
        self._spans = [
            [Span(piece.tensor, piece.start, piece.stop, piece.offset) for piece in pieces]
            for pieces in layout.fragments
        ]
        # Per fragment, its views by where they lie in the vector; of another host's rank in one of its own.
        self._by_place = [{(v.name, v.mine): v for v in views} for views in self._views]

    def snapshot(self, fragment: int) -> Vector:
        """As the leader: a copy of the fragment as it is in all ranks, float32[elements]. Raises GroupBroken."""
        self._exchange.group.tell_others(Command.SNAPSHOT, (fragment,))
        return Vector(self.give_snapshot(fragment).clone())

    @torch.no_grad()
    def give_snapshot(self, fragment: int) -> torch.Tensor:
        """Give this rank's part of a snapshot. Returns the leader's vector, which then has all of it."""
        self.watch.check()
        views = self._by_place[fragment]

        def write(run: Run, target: torch.Tensor) -> None:
            copy_view(views[run.name, run.mine], target)

        vector = self._half(0, fragment)
        self._exchange.collect(vector, self._spans[fragment], write)
        return vector

    def move(self, fragment: int, kind: Kind, new: Vector, reference: Vector | None = None, alpha: float = 0.0) -> None:
        """As the leader: move the parameters of all ranks, as ``ModelFragments.move`` does. Raises GroupBroken."""
        subtracts = kind in (Kind.KEEP, Kind.REBASE)
        self._half(0, fragment).copy_(new.tensor)
        if subtracts:
            assert reference is not None
            self._half(1, fragment).copy_(reference.tensor)
        self._exchange.group.tell_others(Command.MOVE, (fragment, KINDS.index(kind), subtracts), alpha=alpha)
        self.follow_move(fragment, kind, subtracts, alpha)

    @torch.no_grad()
    def follow_move(self, fragment: int, kind: Kind, subtracts: bool, alpha: float) -> None:
        """Move this rank's part, as the leader has told."""
        self.watch.check()
        spans, views = self._spans[fragment], self._by_place[fragment]
        new, runs = self._exchange.spread(self._half(0, fragment), spans)
        minus = self._exchange.spread(self._half(1, fragment), spans)[0] if subtracts else None
        for run in runs:
            view = views[run.name, run.mine]
            where = view.theta.device
            less = None if minus is None else run.there.of(minus).to(where)
            move_view(view, kind, run.there.of(new).to(where), less, alpha=alpha)
        self._exchange.group.wait_for_all()

    def _half(self, index: int, fragment: int) -> torch.Tensor:
        return self._exchange.half(index)[: self.layout.elements(fragment)]

    def pinned(self, array: Floats) -> Vector:
        """As the leader: a base, as it is; it goes to the devices by the shared area."""
        return Vector.from_array(array)
