"""The inner optimizer's state as bytes: whole and exact, or refused."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.vocabulary import MAX_FRAGMENTS
from diloco_worker.device import return_free_memory
from diloco_worker.settings import ConfigurationError
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_state import (
    ReceivedState,
    Rewarm,
    StateRefused,
    max_state_bytes,
    origin_of,
    restore,
    snapshot,
)
from own_process import anonymous_bytes, run_in_own_process


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    data = torch.randn(steps, 16, 4, generator=torch.Generator().manual_seed(seed))
    for batch in data:
        optimizer.zero_grad()
        (model(batch).squeeze(1) - batch.sum(1)).square().mean().backward()
        optimizer.step()


class EightBits(torch.optim.Optimizer):
    """Momentum that is kept in 8 bits: per parameter its codes, a code book and a scale per block of 4, as those of
    bitsandbytes are."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            row = self.state[p]
            if not row:
                row["state1"] = torch.full(p.shape, 128, dtype=torch.uint8)
                row["qmap1"] = torch.linspace(-1, 1, 256)
                row["absmax1"] = torch.zeros(-(-p.numel() // 4))
            moment = row["qmap1"][row["state1"].long()].flatten() * row["absmax1"].repeat_interleave(4)[: p.numel()]
            moment = 0.9 * moment + p.grad.flatten()
            blocks = torch.nn.functional.pad(moment, (0, -p.numel() % 4)).view(-1, 4)
            row["absmax1"] = blocks.abs().amax(1)
            scaled = moment / row["absmax1"].repeat_interleave(4)[: p.numel()].clamp(min=1e-9)
            row["state1"] = torch.bucketize(scaled, row["qmap1"]).clamp(max=255).to(torch.uint8).view(p.shape)
            p.sub_(moment.view(p.shape), alpha=self.param_groups[0]["lr"])


class Estimating(torch.optim.Optimizer):
    """Sets its own step size in its group, as Prodigy and D-Adaptation do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1e-3, "k": 0, "capturable": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(self.state[p]["sum"], alpha=group["lr"] * group["d"])
            group["d"] *= 1.25
            group["k"] += 1
            group["capturable"] = not group["capturable"]  # as torch.compile does while it traces a step


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "8 bits": lambda p: EightBits(p, lr=0.01),
    "estimating": lambda p: Estimating(p, lr=0.01),
}


@pytest.mark.promise(
    "States of several optimizers, of 8-bit and factored ones, and changed values in their groups are "
    "handed over exactly"
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_goes_on_bit_for_bit(name: str) -> None:
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    inner = InnerOptimizers(model, optimizer)
    train(model, optimizer, 5)
    encode = snapshot(inner)
    assert encode is not None
    newcomer = copy.deepcopy(model)
    train(model, optimizer, 3, seed=1)  # the snapshot must not move along
    data = encode()
    assert len(data) <= max_state_bytes(model)
    fresh = OPTIMIZERS[name](newcomer.parameters())
    restore(data, InnerOptimizers(newcomer, fresh))
    train(newcomer, fresh, 3, seed=1)
    for own, theirs in zip(newcomer.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((), True),
        ((1,), True),
        ((6, 4, 3), True),
        ((6, 4, 1), True),
        ((1, 1, 3), True),
        ((6, 4), True),
        ((6, 3), True),
        ((3,), True),
        ((4, 4), True),
        ((4, 6, 3), False),
        ((3, 4), False),
        ((5, 5), False),
        ((5,), False),
        ((6, 4, 3, 1), False),
        ((7, 4, 3), False),
    ],
)
def test_which_shapes_a_parameters_state_may_have(shape: tuple[int, ...], fits: bool) -> None:
    """Its own, factors and squares; of the parameter (6, 4, 3)."""
    model = torch.nn.ParameterDict({"p": torch.zeros(6, 4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metadata = {"format": "1", "optimizer": "SGD"}
    data = bytearray(save({"p|any": torch.ones(shape)}, metadata))
    if fits:
        restore(data, InnerOptimizers(model, optimizer))
        assert optimizer.state[model["p"]]["any"].shape == shape
    else:
        with pytest.raises(StateRefused, match=r"for \(6, 4, 3\)"):
            restore(data, InnerOptimizers(model, optimizer))


@pytest.mark.parametrize(("length", "fits"), [(256, True), (257, False)])
def test_how_long_the_code_book_of_a_quantised_state_may_be(length: int, fits: bool) -> None:
    model = torch.nn.ParameterDict({"p": torch.zeros(6, 4, 3)})
    inner = InnerOptimizers(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tensors = {"p|codes": torch.zeros(6, 4, 3, dtype=torch.uint8), "p|book": torch.ones(length)}
    data = bytearray(save(tensors, {"format": "1", "optimizer": "SGD"}))
    with contextlib.nullcontext() if fits else pytest.raises(StateRefused, match=r"book' is \(257,\)"):
        restore(data, inner)


@pytest.mark.promise(
    "Sending and receiving an optimizer's state, and the slot's own checkpoint, need no second copy in "
    "memory: one tensor at a time, through mapped files"
)
def test_giving_and_taking_a_state_takes_no_second_copy_in_memory(tmp_path: Path) -> None:
    run_in_own_process(give_and_take, tmp_path)


def give_and_take(folder: str) -> None:
    size = 64 << 20  # of two moments
    model, newcomer = (
        torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(8)]) for _ in "ab"
    )
    optimizer, fresh = (torch.optim.AdamW(one.parameters(), foreach=False) for one in (model, newcomer))
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = anonymous_bytes()
    encode = snapshot(InnerOptimizers(model, optimizer), folder=Path(folder))
    assert encode is not None
    data = encode()
    assert len(data) > size and anonymous_bytes() - before < size // 4
    restore(data, InnerOptimizers(newcomer, fresh))
    return_free_memory()  # what the allocator keeps of it is no copy
    assert anonymous_bytes() - before < size + size // 4, "the newcomer's own moments"


def test_there_is_nothing_to_give_before_the_first_step() -> None:
    model = build()
    assert snapshot(InnerOptimizers(model, torch.optim.AdamW(model.parameters()))) is None


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> Bytes:
    train(model, optimizer, 2)
    encode = snapshot(InnerOptimizers(model, optimizer))
    assert encode is not None
    return encode()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = state_of(model, optimizer).tobytes()
    tensors = load(data)
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    key = "0.weight|exp_avg"
    broken = {
        "its format": save(tensors, {**metadata, "format": "9"}),
        "runs AdamW": save(tensors, {**metadata, "optimizer": "SGD"}),
        "this learner lacks": save({**tensors, "9.weight|exp_avg": tensors[key].clone()}, metadata),
        r"is \(8, 5\)": save({**tensors, key: torch.zeros(8, 5)}, metadata),
        r"is \(4, 8\)": save({**tensors, key: tensors[key].T.contiguous()}, metadata),
        r"is \(8, 4\) torch.int16": save({**tensors, key: torch.ones(8, 4, dtype=torch.int16)}, metadata),
        "not finite": save({**tensors, key: torch.full((8, 4), float("nan"))}, metadata),
        "it lacks": save({k: v for k, v in tensors.items() if not k.startswith("2.")}, metadata),
        "no numbers": save(tensors, {**metadata, "numbers": '{"0.weight|x": "y"}'}),
        "its numbers are no": save(tensors, {**metadata, "numbers": '{"0.weight|x": Infinity}'}),
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
            restore(bytearray(state), InnerOptimizers(other, target))
    after = target.state_dict()
    for index, row in before["state"].items():
        for name, value in row.items():
            assert torch.equal(after["state"][index][name], value)


HOSTILE: dict[str, Any] = {
    "squares, and has negative": {"0.weight|exp_avg_sq": torch.full((8, 4), -1.0)},
    "far beyond what": {"0.weight|exp_avg": torch.full((8, 4), 1e6)},
    "no count of steps": {"0.weight|step": torch.tensor(-1.0)},
    "has values beyond 1e\\+15": {"0.weight|exp_avg": torch.full((8, 4), 2e15)},
    "has values beyond 1e\\+30": {"0.weight|exp_avg_sq": torch.full((8, 4), 2e30)},
}


@pytest.mark.promise(
    "An optimizer state from a peer or from the store neither ends a new learner nor damages its parameters",
    section="Hostile callers",
)
@pytest.mark.parametrize("why", HOSTILE)
def test_a_state_that_would_spoil_a_newcomer_is_refused(why: str) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = state_of(model, optimizer).tobytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    hostile = bytearray(save({**load(data), **HOSTILE[why]}, metadata))
    newcomer = build()
    with pytest.raises(StateRefused, match=why):
        restore(hostile, InnerOptimizers(newcomer, torch.optim.AdamW(newcomer.parameters(), lr=0.01)))


@pytest.mark.promise(
    "An optimizer state that honest training leaves is accepted, whatever Adam's decays", section="Hostile callers"
)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99999), (0.5, 0.9999), (0.99, 0.9)])
@pytest.mark.parametrize("still", [0, 200])
def test_a_state_that_honest_gradients_leave_is_taken_whatever_the_betas(
    betas: tuple[float, float], still: int
) -> None:
    """Of a row that has had one gradient, and then none for so many steps, as that of a rare token's embedding."""
    model, newcomer = build(), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, betas=betas)
    train(model, optimizer, 1)
    for _ in range(still):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    target = torch.optim.AdamW(newcomer.parameters(), lr=0.01, betas=betas)
    encode = snapshot(InnerOptimizers(model, optimizer))
    assert encode is not None
    restore(encode(), InnerOptimizers(newcomer, target))
    assert target.state


def test_squares_may_be_as_great_as_the_squares_of_what_means_may_be() -> None:
    """A gradient of 3e9, as the sum over a million tokens may be, is no fault."""
    model, newcomer = build(), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3e9)
    optimizer.step()
    target = torch.optim.AdamW(newcomer.parameters(), lr=0.01)
    restore(state_of(model, optimizer, steps=0), InnerOptimizers(newcomer, target))
    assert float(target.state[newcomer[0].weight]["exp_avg_sq"].max()) > 1e15


class Sparse(torch.nn.Module):
    """A frozen base, an adapter, an expert that is not routed to, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Linear(4, 8).requires_grad_(False)
        self.adapter, self.expert, self.unused = (torch.nn.Linear(n, 1) for n in (8, 8, 3))
        self.routed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.base(x).tanh()
        return self.adapter(hidden) + (self.expert(hidden) if self.routed else 0.0)


@pytest.mark.promise(
    "A newcomer takes the optimizer state of a model with frozen parameters, unused layers or sparse experts too"
)
def test_parameters_that_have_no_state_yet_are_named_and_the_rest_is_handed_over() -> None:
    model = Sparse()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # the frozen ones too, as loops are written
    data = state_of(model, optimizer)
    newcomer = copy.deepcopy(model)
    target = torch.optim.AdamW(newcomer.parameters(), lr=0.01)
    train(newcomer, target, 1)
    newcomer.load_state_dict(model.state_dict())
    restore(data, InnerOptimizers(newcomer, target))
    model.routed = newcomer.routed = True  # the expert begins its state here
    for one, own in ((model, optimizer), (newcomer, target)):
        train(one, own, 3, seed=1)
    for own, theirs in zip(newcomer.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_a_row_that_is_missing_and_not_declared_is_refused_unless_it_is_frozen_here() -> None:
    model = Sparse()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = bytes(state_of(model, optimizer))
    inner = InnerOptimizers(model, optimizer)
    for empty in ('["expert.weight"]', "[]"):
        with pytest.raises(StateRefused, match=r"it lacks 'expert.(weight|bias)' and [23] more"):
            restore(with_metadata(data, empty=empty), inner)
    restore(with_metadata(data, empty='["expert.weight", "expert.bias", "unused.weight", "unused.bias"]'), inner)
    with pytest.raises(StateRefused, match="its list of what has no state is no list"):
        restore(with_metadata(data, empty='{"expert.weight": 1}'), inner)


@pytest.mark.promise(
    "A learner whose optimizer keeps no state says so, and nobody waits for one or warms up for want of it"
)
def test_that_there_is_no_state_is_an_answer() -> None:
    model, newcomer = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inner = InnerOptimizers(model, optimizer)
    assert snapshot(inner) is None and not inner.has_state
    train(model, optimizer, 1)
    encode = snapshot(inner)
    assert encode is not None and not inner.keeps_state
    taken = InnerOptimizers(newcomer, torch.optim.SGD(newcomer.parameters(), lr=0.01))
    restore(encode(), taken)
    assert taken.has_state
    taken.clear_state()
    assert not taken.has_state


def nested(depth: int = 100_000) -> str:
    return "[" * depth + "]" * depth


def with_metadata(data: bytes, **changes: str) -> bytearray:
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return bytearray(save(load(data), metadata | changes))


@pytest.mark.promise(
    "An optimizer state from a peer or from the store neither ends a new learner nor damages its parameters",
    section="Hostile callers",
)
@pytest.mark.parametrize(
    "origin",
    [
        "[1e999,1]",
        '["j","l",1,[[1e999,1]],5]',
        nested(),
        "null",
        '["j","l",1,[[[],1]],5]',
        '["j","l",1,[[1,1]]]',
        '["j","l",1,[[1,1]],-1]',
        '["j","l",1,[[1,1]],1e9]',
    ],
)
def test_an_origin_that_makes_no_sense_is_refused(origin: str) -> None:
    model = build()
    data = state_of(model, torch.optim.AdamW(model.parameters(), lr=0.01)).tobytes()
    with pytest.raises(StateRefused):
        origin_of(with_metadata(data, origin=origin))


def test_an_origin_names_no_more_fragments_than_there_may_be() -> None:
    model = build()
    data = state_of(model, torch.optim.AdamW(model.parameters(), lr=0.01)).tobytes()
    most = MAX_FRAGMENTS
    found = origin_of(with_metadata(data, origin=json.dumps(["j", "l", 1, [[1, 2]] * most, 5])))
    assert found is not None and len(found.versions) == most
    with pytest.raises(StateRefused, match="its origin cannot be read"):
        origin_of(with_metadata(data, origin=json.dumps(["j", "l", 1, [[1, 2]] * (most + 1), 5])))


@pytest.mark.promise(
    "An optimizer state from a peer or from the store neither ends a new learner nor damages its parameters",
    section="Hostile callers",
)
def test_what_a_peer_says_of_groups_is_no_more_than_the_optimizer_itself_would_change() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = state_of(model, optimizer).tobytes()
    inner = InnerOptimizers(model, optimizer)
    with pytest.raises(StateRefused, match="cannot be read"):
        restore(with_metadata(data, numbers=nested()), inner)
    restore(with_metadata(data, numbers='{"|0.0.lr": 1e30, "|0.0.weight_decay": -1e30, "|0.0.eps": 0}'), inner)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.01, 0.01, 1e-8)


def test_only_what_the_optimizer_trains_is_in_it() -> None:
    """Frozen parameters have no state, and one that lies in no group is not missed."""
    model = build()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    data = state_of(model, optimizer)
    assert {name.split("|")[0] for name in load(data.tobytes())} == {"2.weight", "2.bias"}
    fresh = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    restore(data, InnerOptimizers(model, fresh))
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


@pytest.mark.promise(
    "A new learner's optimizer state is placed by torch's own policy, including fused and capturable optimizers"
)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"amsgrad": True}], ids=str)
def test_a_state_lies_where_torchs_own_policy_puts_it(options: dict[str, bool]) -> None:
    """The device `meta` stands for a GPU. Kernels that are fused or captured read the step counts there."""
    model = build()
    data = state_of(model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=bool(options.get("amsgrad"))))
    there = build().to("meta")
    optimizer = torch.optim.AdamW(there.parameters(), lr=0.01)
    for group in optimizer.param_groups:  # the constructor asks whether kernels support the device
        group.update(options)
    restore(data, InnerOptimizers(there, optimizer))
    rows = dict(optimizer.state)
    assert len(rows) == 4
    for index, (parameter, row) in enumerate(rows.items()):
        groups = [{**optimizer.param_groups[0], "params": list(range(4))}]
        for key, value in row.items():
            policy = torch.optim.Optimizer._process_value_according_to_param_policy
            assert value.device == policy(parameter, torch.zeros(()), index, groups, key).device, key


@pytest.mark.promise(
    "States of several optimizers, of 8-bit and factored ones, and changed values in their groups are "
    "handed over exactly"
)
def test_several_optimizers_are_handed_over_together() -> None:
    def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW([model[0].bias, model[2].bias], lr=0.01)]

    def run(model: torch.nn.Module, both: list[torch.optim.Optimizer], seed: int) -> None:
        for batch in torch.randn(3, 16, 4, generator=torch.Generator().manual_seed(seed)):
            model.zero_grad()
            (model(batch).squeeze(1) - batch.sum(1)).square().mean().backward()
            for one in both:
                one.step()

    model = build()
    both = optimizers(model)
    run(model, both, 0)
    encode = snapshot(InnerOptimizers(model, both))
    assert encode is not None
    data, newcomer = encode(), copy.deepcopy(model)
    fresh = optimizers(newcomer)
    restore(data, InnerOptimizers(newcomer, fresh))
    run(model, both, 1)
    run(newcomer, fresh, 1)
    for own, theirs in zip(newcomer.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, theirs)
    with pytest.raises(StateRefused, match=r"it is of 'Muon\+AdamW', and this learner runs AdamW"):
        restore(data, InnerOptimizers(newcomer, torch.optim.AdamW(newcomer.parameters())))
    with pytest.raises(ConfigurationError, match="two optimizers train the same parameter"):
        InnerOptimizers(model, [both[0], torch.optim.AdamW(model.parameters())])


@pytest.mark.promise(
    "States of several optimizers, of 8-bit and factored ones, and changed values in their groups are "
    "handed over exactly"
)
def test_only_group_entries_that_the_optimizer_changed_itself_travel() -> None:
    """The learning rate, which the loop sets between steps, is the receiver's own."""
    model = build()
    optimizer = Estimating(model.parameters(), lr=0.01)
    inner = InnerOptimizers(model, optimizer)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        train(model, optimizer, 1)
    assert inner.group_numbers() == {"0.0.d": pytest.approx(1e-3 * 1.25**3), "0.0.k": 3}
    encode = snapshot(inner)
    assert encode is not None
    fresh = Estimating(model.parameters(), lr=0.5)
    receiver = InnerOptimizers(model, fresh)
    restore(encode(), receiver)
    group = fresh.param_groups[0]
    assert (group["lr"], group["k"]) == (0.5, 3) and group["d"] == optimizer.param_groups[0]["d"]
    assert receiver.group_numbers() == inner.group_numbers(), "and on to the next newcomer"


class AdamWScheduleFree(torch.optim.AdamW):
    """Named as the one of schedulefree, which moves a second sequence of its own."""


class Masters(torch.optim.SGD):
    """Keeps float32 masters in its state, as FusedAdam(master_weights=True) does."""

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("master_param", p.detach().clone())


@pytest.mark.promise("An optimizer that keeps a copy of the parameters, and would undo adoptions, is refused by name")
def test_optimizers_that_copy_the_parameters_are_refused_by_name() -> None:
    model = build()
    with pytest.raises(ConfigurationError, match=r"AdamWScheduleFree keeps a copy .* Use one that works on the param"):
        InnerOptimizers(model, AdamWScheduleFree(model.parameters()))
    masters = Masters(model.parameters(), lr=0.1)
    InnerOptimizers(model, masters)
    with pytest.raises(ConfigurationError, match=r"Masters keeps a copy .*its state has 'master_param'"):
        train(model, masters, 1)


@pytest.mark.promise("An optimizer that keeps a copy of the parameters, and would undo adoptions, is refused by name")
def test_an_optimizer_of_what_is_not_the_models_is_refused_at_once_and_when_a_group_is_added() -> None:
    """Float32 masters of a loop's own, or another module."""
    model = build()
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    with pytest.raises(ConfigurationError, match=r"AdamW holds 4 tensors .* first of shape \(8, 4\).*float32 masters"):
        InnerOptimizers(model, torch.optim.AdamW(masters))
    optimizer = torch.optim.AdamW(model.parameters())
    inner = InnerOptimizers(model, optimizer)
    inner.check_parameters()
    optimizer.add_param_group({"params": torch.nn.Linear(3, 3).parameters()})
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"holds 2 tensors .* make that module a part of the model"):
            inner.check_parameters()


def test_trained_parameters_that_no_optimizer_holds_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    InnerOptimizers(model, torch.optim.AdamW(model[0].parameters()))
    assert caplog.messages == ["no optimizer holds 2.weight, 2.bias: nothing trains it"]
    model[2].requires_grad_(False)
    InnerOptimizers(model, torch.optim.AdamW(model[0].parameters()))
    assert len(caplog.messages) == 1


class Wrapper(torch.optim.Optimizer):
    """What accelerate's prepare() gives: a subclass that never calls the base's __init__, and passes everything on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Passing:
    """A wrapper that is no optimizer of torch at all, as Lightning's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Hollow(Wrapper):
    """One that hides what it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.within = optimizer

    param_groups = property(lambda self: self.within.param_groups)  # type: ignore[assignment]


class Lookahead(Wrapper):
    """One that keeps slow copies."""


@pytest.mark.promise("An optimizer within a wrapper, as accelerate's, is found, and other wrappers are refused by name")
def test_wrappers_are_taken_off() -> None:
    model = build()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    for wrapped in (Wrapper(plain), Passing(plain), Passing(Wrapper(plain)), [Wrapper(plain)]):
        inner = InnerOptimizers(model, wrapped)  # type: ignore[arg-type]
        assert inner.all == [plain] and inner.name == "AdamW"
    inner = InnerOptimizers(model, Wrapper(plain))
    train(model, Wrapper(plain), 1)
    assert snapshot(inner) is not None, "steps through the wrapper are seen"
    with pytest.raises(ConfigurationError, match=r"the optimizer Hollow is a wrapper .*: give the optimizer within it"):
        InnerOptimizers(model, Hollow(plain))
    with pytest.raises(ConfigurationError, match=r"Lookahead keeps a copy of the parameters"):
        InnerOptimizers(model, Passing(Lookahead(plain)))  # type: ignore[arg-type]
