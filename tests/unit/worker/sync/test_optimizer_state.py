"""The inner optimizer's state as bytes: whole and exact, or refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load, save

from diloco_worker.sync.optimizer_state import ReceivedState, Rewarm, StateRefused, max_state_bytes, restore, snapshot


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    data = torch.randn(steps, 16, 4, generator=torch.Generator().manual_seed(seed))
    for batch in data:
        optimizer.zero_grad()
        (model(batch).squeeze(1) - batch.sum(1)).square().mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_goes_on_bit_for_bit(name: str) -> None:
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 5)
    encode = snapshot(model, optimizer)
    assert encode is not None
    newcomer = copy.deepcopy(model)
    train(model, optimizer, 3, seed=1)  # the snapshot must not move along
    data = encode()
    assert len(data) <= max_state_bytes(model)
    fresh = OPTIMIZERS[name](newcomer.parameters())
    restore(data, newcomer, fresh)
    train(newcomer, fresh, 3, seed=1)
    for own, theirs in zip(newcomer.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_there_is_nothing_to_give_before_the_first_step() -> None:
    model = build()
    assert snapshot(model, torch.optim.AdamW(model.parameters())) is None


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    train(model, optimizer, 2)
    encode = snapshot(model, optimizer)
    assert encode is not None
    return encode()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = state_of(model, optimizer)
    tensors = load(data)
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    key = "0.weight|exp_avg"
    broken = {
        "its format": save(tensors, {**metadata, "format": "9"}),
        "runs AdamW": save(tensors, {**metadata, "optimizer": "SGD"}),
        "this model lacks": save({**tensors, "9.weight|exp_avg": tensors[key].clone()}, metadata),
        r"is \(8, 5\)": save({**tensors, key: torch.zeros(8, 5)}, metadata),
        "not finite": save({**tensors, key: torch.full((8, 4), float("nan"))}, metadata),
        "it lacks": save({k: v for k, v in tensors.items() if not k.startswith("2.")}, metadata),
        "no numbers": save(tensors, {**metadata, "numbers": '{"0.weight|x": "y"}'}),
        "too short": b"",
        "cut off": data[:40],
        "not JSON": data[:8] + b"\xff" * (len(data) - 8),
        "cannot be read": data[:-1],
    }
    other = build(1)
    target = torch.optim.AdamW(other.parameters(), lr=0.01)
    train(other, target, 1)
    before = copy.deepcopy(target.state_dict())
    for message, state in broken.items():
        with pytest.raises(StateRefused, match=message):
            restore(state, other, target)
    after = target.state_dict()
    for index, row in before["state"].items():
        for name, value in row.items():
            assert torch.equal(after["state"][index][name], value)


def test_only_what_the_optimizer_trains_is_in_it() -> None:
    """Frozen parameters have no state, and one that lies in no group is not missed."""
    model = build()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    data = state_of(model, optimizer)
    assert {name.split("|")[0] for name in load(data)} == {"2.weight", "2.bias"}
    fresh = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    restore(data, model, fresh)
    assert len(fresh.state) == 2


def test_a_state_waits_for_the_peers_versions() -> None:
    received = ReceivedState(b"", ((1, 3), (1, 2)))
    assert not received.usable([(1, 3), (1, 1)])
    assert received.usable([(1, 3), (1, 2)])
    assert received.usable([(2, 0), (1, 9)])
    assert ReceivedState(b"", ()).usable([(1, 0)])


def test_a_fresh_optimizer_warms_up() -> None:
    rewarm = Rewarm(4)
    assert rewarm.scale(100) == 1.0
    rewarm.begin(100)
    assert [rewarm.scale(step) for step in range(100, 106)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
