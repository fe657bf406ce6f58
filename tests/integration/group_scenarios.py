"""What the ranks of a learner do together, without a syncer: ranks run this file, and the leader checks.

Not a test: test_group_parts.py starts them. The leader plays the synchroniser; the others follow its commands.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from group_process import open_area_nowhere, wrap
from learner_process import make_job
from safetensors.torch import load_file
from torch import nn

from diloco_protocol.spec.sync import CompressionSpec
from diloco_protocol.wire.records import PushPlan, StepReport
from diloco_worker import exit_hooks
from diloco_worker.core.adoption import Kind
from diloco_worker.following.operations import GroupOperations, build_parts
from diloco_worker.fragments import Floats, ModelFragments, Vector, build_layout, frozen_tensors
from diloco_worker.group.fragments import GroupFragments
from diloco_worker.group.ranks import Command, Group, GroupBroken, JoinedStep, Ranks, join_ranks
from diloco_worker.named_parameters import named_parameters
from diloco_worker.net.error_feedback import ErrorFeedback
from diloco_worker.net.transfers import Push, encode_push
from diloco_worker.settings import ConfigurationError, WorkerError
from diloco_worker.sync import optimizer_state
from diloco_worker.sync.frozen_parameters import FrozenParameters, digest_tensors, frozen_file, load_frozen
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_state import Origin
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint
from diloco_worker.training.parallel.sharding import begin_ranks, shard_model

FRAGMENTS = 4


class Odd(nn.Module):
    """Sizes that no number of ranks divides, fewer rows than ranks, one dimension, none, and a tied matrix."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 5)
        self.first, self.second = nn.Linear(5, 10), nn.Linear(10, 5)
        self.few = nn.Parameter(torch.randn(1, 5))
        self.one = nn.Parameter(torch.ones(1))
        self.scales = nn.Parameter(torch.randn(3, 2, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.few
        hidden = self.second(torch.tanh(self.first(hidden))) * self.scales.sum((0, 1)) * self.one
        return self.head(hidden)


def tensor_parallel(model: Odd) -> nn.Module:
    """Columns of the first matrix and rows of the second by one half of the ranks' mesh, FSDP2 by the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def build(form: str, dtype: torch.dtype = torch.float32, frozen: tuple[str, ...] = ()) -> nn.Module:
    model = Odd(dtype)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if form == "single":
        return model
    if form == "masters":  # as the built-in trainer divides it, with bfloat16 arithmetic
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return shard_model(model, mesh, torch.device("cpu"), torch.bfloat16)
    return tensor_parallel(model) if form == "tensor" else wrap(model, form)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every rank calls it."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in named_parameters(model).items()
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Every rank the same tokens, so the mean of gradients is each rank's."""
    for step in range(steps):
        tokens = torch.arange(6).roll(step)
        nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def lead_ranks(ranks: Ranks, fragments: ModelFragments, inner: InnerOptimizers, play: Callable[[], None]) -> None:
    """The leader plays, and the others follow it to the end."""
    if not isinstance(ranks, Group) or ranks.leads:
        play()
        ranks.tell_others(Command.END)
        return
    assert isinstance(fragments, GroupFragments) and inner.exchange is not None
    operations = GroupOperations(fragments, inner, inner.exchange)
    while (told := ranks.hear()).command is not Command.END:
        operations.carry_out(told)


class Scene:
    """A model in ranks, and the same in one process."""

    def __init__(self, form: str, dtype: torch.dtype = torch.float32, frozen: tuple[str, ...] = ()) -> None:
        group = join_ranks(os.environ)
        assert isinstance(group, Group)
        self.group = group
        self.model, self.plain = build(form, dtype, frozen), build("single", dtype, frozen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        layout = build_layout(self.plain, FRAGMENTS)
        assert build_layout(self.model, FRAGMENTS).digest == layout.digest, "groups and single processes share a job"
        fragments, self.inner = build_parts(self.model, self.optimizer, layout, group)
        assert isinstance(fragments, GroupFragments) and self.inner.exchange is not None
        self.fragments, self.exchange = fragments, self.inner.exchange
        self.plain_fragments = ModelFragments(self.plain, layout)
        self.layout = layout

    def lead(self, play: Callable[[], None]) -> None:
        """The leader plays, and the others follow it to the end."""
        lead_ranks(self.group, self.fragments, self.inner, play)

    def check_same(self) -> None:
        """The ranks' parameters are those of the one process, bit for bit; every rank calls it."""
        for name, values in whole(self.model).items():
            assert torch.equal(values, self.plain.get_parameter(name)), name


def exchange_fragments(form: str, dtype: torch.dtype) -> None:
    """Snapshots, and every way to move, beside one process: equal bit for bit."""
    scene = Scene(form, dtype)
    random = np.random.default_rng(5)

    def vector(fragment: int) -> Floats:
        return random.standard_normal(scene.layout.elements(fragment), np.float32)

    def check_snapshots() -> None:
        for fragment in range(len(scene.layout)):
            ours, theirs = scene.fragments.snapshot(fragment), scene.plain_fragments.snapshot(fragment)
            assert np.array_equal(ours.array, theirs.array), fragment

    def play() -> None:
        check_snapshots()
        for kind, alpha in ((Kind.OVERWRITE, 0.0), (Kind.KEEP, 0.0), (Kind.REBASE, 0.0), (Kind.MIX, 0.3)):
            for fragment in range(len(scene.layout)):
                new, reference = Vector.from_array(vector(fragment)), Vector.from_array(vector(fragment))
                for one in (scene.fragments, scene.plain_fragments):
                    one.move(fragment, kind, new, reference, alpha)
            check_snapshots()

    scene.lead(play)
    moved = scene.group.gather_texts("1" if scene.group.leads else "0")
    assert moved.count("1") == 1
    for name, values in whole(scene.model).items():
        expected = scene.plain.get_parameter(name).detach().clone()
        dist.broadcast(expected, 0)  # the leader has moved the plain one
        assert torch.equal(values, expected), name


def hand_over_state(form: str) -> None:
    """The state of the ranks goes to one process and back, and training goes on as there."""
    scene = Scene(form)
    train(scene.model, scene.optimizer, 3)
    train(scene.plain, scene.plain_optimizer, 3)
    origin = Origin("job", scene.layout.digest, 3, ())
    alone = InnerOptimizers(scene.plain, scene.plain_optimizer)

    def play() -> None:
        encode = optimizer_state.snapshot(scene.inner, origin)
        assert encode is not None
        made = encode()
        assert optimizer_state.origin_of(made) == origin
        optimizer_state.restore(made, alone)  # what the ranks give fits one process
        optimizer_state.clear_state(scene.inner)
        back = optimizer_state.snapshot(alone, origin)
        assert back is not None and np.array_equal(back(), made), "and is the same again"
        optimizer_state.restore(back(), scene.inner)
        first = named_parameters(scene.model)["first.weight"]
        if hasattr(first, "placements"):
            scene.optimizer.state[first]["factor"] = torch.zeros(3)
            assert optimizer_state.snapshot(scene.inner, origin) is None, "a part of what, nobody knows"
            del scene.optimizer.state[first]["factor"]

    before = {name: state_of(scene.model, scene.optimizer, name) for name in named_parameters(scene.model)}
    scene.lead(play)
    for name, rows in before.items():
        for key, values in state_of(scene.model, scene.optimizer, name).items():
            assert torch.equal(values, rows[key]), (name, key)
    train(scene.model, scene.optimizer, 2)
    part_at_a_state(scene, origin)


def pass_checkpoint(form: str, writes: bool) -> None:
    """Ranks, or one process, write the slot's own checkpoint, or begin with the one that is there. Either way each rank
    holds its rows of what the file says."""
    ranks, model = join_ranks(os.environ), build(form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    layout = build_layout(model, FRAGMENTS)
    fragments, inner = build_parts(model, optimizer, layout, ranks)
    path = Path(os.environ["CHECKPOINT"])
    checkpoint = SlotCheckpoint(path, "job", layout.digest, 0.0, limit=optimizer_state.max_state_bytes(model))

    def write() -> None:
        encode = optimizer_state.snapshot(inner, checkpoint.origin(3, [], 3), checkpoint.folder)
        assert encode is not None
        checkpoint.start_write(encode, 0.0)
        checkpoint.close(timeout=600.0)

    def read() -> None:
        found = checkpoint.load()
        assert found is not None
        optimizer_state.restore(found[0], inner)

    if writes:
        train(model, optimizer, 3)
    lead_ranks(ranks, fragments, inner, write if writes else read)
    kept = load_file(path)
    assert len(kept) == 3 * len(named_parameters(model)), "two moments and a count of steps of each parameter"
    for name in named_parameters(model):
        for key, values in state_of(model, optimizer, name).items():
            assert torch.equal(values, kept[f"{name}|{key}"]), (name, key)


def part_at_a_state(scene: Scene, origin: Origin) -> None:
    """The leader has no memory for what it has told: an error that ends it, and the others with it."""
    if not scene.group.leads:
        try:
            GroupOperations(scene.fragments, scene.inner, scene.exchange).carry_out(scene.group.hear())
            raise AssertionError("the leader's part was not missed")
        except GroupBroken:
            return

    def run_out(*_: object) -> None:
        raise MemoryError("no memory for a window")

    scene.exchange.half = run_out  # type: ignore[assignment]
    try:
        optimizer_state.snapshot(scene.inner, origin)
        raise AssertionError("a part of a state was given")
    except WorkerError as error:
        assert "the optimizer's state could not be given by all ranks: MemoryError('no memory" in str(error), error
    scene.group.close()


def exchange_masters(form: str) -> None:
    """Of a model that computes in bfloat16 the exchange sees and moves float32 parameters, finer than bfloat16."""
    scene = Scene(form)
    train(scene.model, scene.optimizer, 2)
    for name, values in whole(scene.model).items():
        scene.plain.get_parameter(name).detach().copy_(values)

    def check_snapshots() -> list[Floats]:
        taken = [scene.fragments.snapshot(fragment).array for fragment in range(len(scene.layout))]
        for fragment, values in enumerate(taken):
            assert np.array_equal(values, scene.plain_fragments.snapshot(fragment).array), fragment
            assert not np.array_equal(values, torch.from_numpy(values).bfloat16().float().numpy()), fragment
        return taken

    def play() -> None:
        for fragment, before in enumerate(check_snapshots()):
            new, reference = Vector.from_array(before + np.float32(1e-5)), Vector.from_array(before)
            for one in (scene.fragments, scene.plain_fragments):
                one.move(fragment, Kind.KEEP, new, reference)
        check_snapshots()

    scene.lead(play)
    assert {p.dtype for p in scene.model.parameters()} == {torch.float32}
    assert not any(view.rounded is not None for views in scene.fragments._views for view in views)


def encode_pushes(form: str) -> None:
    """The pushes of ranks, with every encoding, are the bytes of one process's with the same parameters; with error
    feedback over several merges too. Every rank's work is given to it as values, because gradients of ranks are summed
    in another order."""
    scene = Scene(form)
    random = np.random.default_rng(7)

    def play() -> None:
        for encoding in get_args(CompressionSpec.model_fields["up"].annotation):
            for feeds_back in (False, True):
                follow_pushes(scene, random, encoding, feeds_back)

    scene.lead(play)


def follow_pushes(scene: Scene, random: np.random.Generator, encoding: str, feeds_back: bool) -> None:
    """As the leader: three pushes of each fragment, of which the second one is refused."""
    sides = (scene.fragments, scene.plain_fragments)
    kept = [ErrorFeedback(len(scene.layout), feeds_back) for _ in sides]
    carried = False
    for sequence, merged in ((1, True), (2, False), (3, True)):
        for fragment in range(len(scene.layout)):
            base = scene.plain_fragments.snapshot(fragment)
            work = 0.01 * random.standard_normal(base.array.size, np.float32)
            encoded = []
            for one, feedback in zip(sides, kept, strict=True):
                one.move(fragment, Kind.OVERWRITE, Vector.from_array(base.array + work))
                feedback.expect_push(fragment, sequence)
                plan = PushPlan(
                    fragment,
                    sequence,
                    round=1,
                    epoch=1,
                    base_version=0,
                    oldest_version=0,
                    first_step=1,
                    last_step=1,
                    steps=1,
                    tokens=10,
                    compute_seconds=0.1,
                )
                encoded.append(encode_push(Push(plan, base, one.snapshot(fragment), StepReport()), encoding, feedback))
                feedback.resolve_pushes(fragment, sequence if merged else 0, [sequence])
            assert np.array_equal(*encoded), (encoding, feeds_back, fragment, sequence)
            residuals = [feedback.residual(fragment) for feedback in kept]
            assert (residuals[0] is not None) == feeds_back
            if residuals[0] is not None:
                assert np.array_equal(*residuals)
                carried |= bool(residuals[0].any())
    assert carried == (feeds_back and encoding != "float32"), "what an encoding drops goes into the next push"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> dict[str, torch.Tensor]:
    row = optimizer.state[named_parameters(model)[name]]
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in row.items()}


def share_frozen(form: str) -> None:
    """Frozen parameters have the digest of one process's, travel whole, and are put in place in all ranks."""
    names = ("embedding.weight", "first.weight")
    scene = Scene(form, frozen=names)
    frozen = FrozenParameters(scene.model, None, scene.exchange)  # type: ignore[arg-type]  # no syncer is asked
    other = build("single", frozen=names)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).add_(1.0)

    def play() -> None:
        assert frozen.digest() == digest_tensors(frozen_tensors(scene.plain))
        load_frozen(other_copy := build("single", frozen=names), bytearray(frozen.serialize()))
        assert digest_tensors(frozen_tensors(other_copy)) == digest_tensors(frozen_tensors(scene.plain))
        load_frozen(scene.model, bytearray(frozen_file(other)), scene.exchange)
        assert frozen.digest() == digest_tensors(frozen_tensors(other))

    scene.lead(play)
    held = whole(scene.model)
    for name in names:
        assert torch.equal(held[name], other.get_parameter(name)), name


def give_commands() -> None:
    """Short and long commands come whole and in order, and the ranks' steps are added up."""
    group = join_ranks(os.environ)
    assert isinstance(group, Group)
    for items in ((), (1, -2), tuple(range(4000))):
        words = {"text": "ä" * len(items), "number": 0.5}
        if group.leads:
            group.tell_others(Command.MOVE, items, **words)
        else:
            told = group.hear()
            assert (told.command, dict(told.words), told.items.tolist()) == (Command.MOVE, words, list(items))
    loss = None if group.leads else 2.0
    assert group.join_step(3, loss, told=False) == JoinedStep(3 * group.size, 2.0, told=False)
    assert group.join_step(1 + group.rank, float(group.rank), told=not group.leads).told
    assert group.join_step(5, None, told=False) == JoinedStep(5 * group.size, None, told=False)
    assert group.join_step(0, math.nan, told=False).loss is None, "of no tokens"
    assert math.isnan(group.join_step(5, math.nan if group.leads else 1.0, told=False).loss or 0.0)
    last = group.size - 1
    for _ in range(5):
        time.sleep(0.1 if group.rank == last else 0.0)
        group.join_step(1, None, told=False)
    assert group.slowest is not None and group.slowest[0] == last and 0.01 < group.slowest[1] < 60, group.slowest
    same = Group(data=(group.rank // 2, group.size // 2))  # pairs of tensor-parallel ranks
    assert same.join_step(7, 1.0, told=False).tokens == 7 * group.size // 2, "one of each pair counts"
    for wrong, said in (((0, group.size), "together they must load"), ((group.size, 2), "is (index, shares)")):
        try:
            Group(data=wrong)
            raise AssertionError(f"{wrong} was taken")
        except ConfigurationError as error:
            assert said in str(error), error
    group.wait_for_all()
    if group.leads:
        group.number += 1  # as if a command had been lost
        group.tell_others(Command.RETURN)
    else:
        try:
            group.hear()
            raise AssertionError("a command out of order was taken")
        except GroupBroken as error:
            assert "the ranks' loops have parted" in str(error)
    group.wait_for_all()
    if group.leads:
        group.close()
        return
    try:
        group.hear()
        raise AssertionError("a group that is closed was heard")
    except GroupBroken as error:
        assert "has ended or is silent, so all of them end" in str(error)


def meet(seconds: str) -> None:
    """Ranks meet as the built-in trainer's do, and act together until one is gone. Then this process takes so many
    seconds to end."""
    logging.basicConfig(stream=sys.stdout)
    exit_hooks.install()
    begin_ranks(make_job({}, {"steps": 1}).spec)
    group = join_ranks(os.environ)
    print("met", flush=True)
    try:
        while True:
            group.join_step(1, None, told=False)
            time.sleep(0.01)
    except GroupBroken:
        time.sleep(float(seconds))
        raise


def main(scenario: str, form: str) -> None:
    torch.set_num_threads(1)
    if scenario == "meet":
        meet(form)
    if os.environ.get("FAR"):
        open_area_nowhere()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=size)
    if scenario == "fragments":
        for dtype in (torch.float32, torch.bfloat16):
            exchange_fragments(form, dtype)
    elif scenario == "commands":
        give_commands()
    elif scenario in ("write", "read"):
        pass_checkpoint(form, scenario == "write")
    else:
        plays = {"state": hand_over_state, "frozen": share_frozen, "pushes": encode_pushes, "masters": exchange_masters}
        plays[scenario](form)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
