"""What the ranks of a learner do together: how they begin, and what a follower does when it is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diloco_protocol.arrays.layout import Layout
from diloco_worker.fragments import ModelFragments
from diloco_worker.group.exchange import Exchange
from diloco_worker.group.fragments import KINDS, GroupFragments, longest_vector
from diloco_worker.group.placement import find_parts
from diloco_worker.group.ranks import Command, Group, Ranks, Told
from diloco_worker.named_parameters import named_parameters
from diloco_worker.settings import ConfigurationError
from diloco_worker.sync import group_state
from diloco_worker.sync.frozen_parameters import give_frozen, take_frozen
from diloco_worker.sync.inner_optimizers import InnerOptimizers


def build_parts(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    layout: Layout,
    ranks: Ranks,
) -> tuple[ModelFragments, InnerOptimizers]:
    """A learner's fragments and optimizers; every rank calls it at the same place. Raises ConfigurationError for what
    cannot be exchanged, and where the ranks have other models or optimizers."""
    if not isinstance(ranks, Group):
        return ModelFragments(model, layout), InnerOptimizers(model, optimizers)
    inner = InnerOptimizers(model, optimizers)
    found = [json.loads(text) for text in ranks.gather_texts(json.dumps([layout.digest, inner.name]))]
    for rank, one in enumerate(found):
        if one != found[0]:
            raise ConfigurationError(
                f"rank {rank} of this learner has another model or optimizer than rank 0 ({one[1]}, {found[0][1]}): "
                "all ranks build the same ones"
            )
    parts = find_parts(named_parameters(model), ranks.leads)
    exchange = Exchange(ranks, parts, longest_vector(layout))
    inner.exchange = exchange
    return GroupFragments(model, layout, exchange), inner


@dataclass
class GroupOperations:
    """A follower's side of the commands."""

    fragments: GroupFragments
    inner: InnerOptimizers
    exchange: Exchange

    def carry_out(self, told: Told) -> None:
        """Do one operation that the leader has told. Raises GroupBroken, and what the operation raises."""
        match told.command:
            case Command.SNAPSHOT:
                self.fragments.give_snapshot(int(told.items[0]))
            case Command.MOVE:
                fragment, kind, subtracts = map(int, told.items)
                self.fragments.follow_move(fragment, KINDS[kind], bool(subtracts), float(told.words["alpha"]))
            case Command.CLEAR:
                self.inner.clear_state()
            case Command.STATE_OUT:
                group_state.give_state(told.words["forms"], self.inner, self.exchange)
            case Command.STATE_IN:
                group_state.take_state(told.words["rows"], told.words["groups"], self.inner, self.exchange)
            case Command.FROZEN_OUT:
                give_frozen(self.inner.model, self.exchange)
            case Command.FROZEN_IN:
                take_frozen(self.inner.model, self.exchange)
            case _:
                raise AssertionError(f"{told.command.name} is no operation")
