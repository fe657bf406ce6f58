"""Fragments of real torch models: snapshots, moves, layouts, frozen parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
from safetensors.torch import _SIZE
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_worker.core.adoption import Kind
from diloco_worker.fragments import ModelFragments, Vector, build_layout, frozen_tensors, model_tensors
from diloco_worker.learner import Learner
from diloco_worker.named_parameters import named_parameters
from diloco_worker.net.tensor_file import read_tensors, write_tensors
from diloco_worker.settings import ConfigurationError
from diloco_worker.sync.frozen_parameters import digest_tensors, frozen_file, load_frozen


class Tied(torch.nn.Module):
    """Embedding and output share one weight; a norm; a frozen adapter base."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.base = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.positions = torch.nn.Embedding(6, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = torch.nn.Parameter(torch.randn(20, 8))


def by_hand(model: torch.nn.Module, layout: Layout, fragment: int) -> np.ndarray:
    """The fragment's vector, straight from the layout."""
    tensors = {name: p.detach().float().numpy().ravel() for name, p in model.named_parameters()}
    out = np.full(layout.elements(fragment), np.nan, np.float32)
    for piece in layout.fragments[fragment]:
        out[piece.offset : piece.offset + piece.stop - piece.start] = tensors[piece.tensor][piece.start : piece.stop]
    return out


def test_tied_tensors_appear_once_and_frozen_ones_do_not() -> None:
    layout = build_layout(Tied(), 3)
    assert {t.name: t.mean for t in layout.tensors} == {
        "embedding.weight": True,
        "norm.weight": False,
        "norm.bias": False,
        "positions.weight": True,
    }
    untied = build_layout(Untied(), 3, mean_patterns=("norm.*",))
    assert {t.name: t.mean for t in untied.tensors} == {
        "embedding.weight": True,
        "norm.weight": True,
        "norm.bias": True,
        "positions.weight": True,
        "head.weight": True,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_snapshot_is_a_copy_of_the_pieces(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tied().to(dtype)
    layout = build_layout(model, 4)
    fragments = ModelFragments(model, layout)
    assert len(layout) == 4
    taken = [fragments.snapshot(p) for p in range(4)]
    expected = [by_hand(model, layout, p) for p in range(4)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for vector, values in zip(taken, expected, strict=True):
        assert vector.array.dtype == np.float32
        np.testing.assert_array_equal(vector.array, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Kind.OVERWRITE, Kind.KEEP, Kind.REBASE, Kind.MIX])
def test_moves(kind: Kind, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tied().to(dtype)
    layout = build_layout(model, 3)
    fragments = ModelFragments(model, layout)
    rng = np.random.default_rng(0)
    before = [by_hand(model, layout, p) for p in range(3)]
    new = rng.normal(size=layout.elements(1)).astype(np.float32)
    reference = rng.normal(size=layout.elements(1)).astype(np.float32)
    fragments.move(1, kind, Vector.from_array(new), Vector.from_array(reference), alpha=0.25)
    theta = before[1]
    expected = {
        Kind.OVERWRITE: new,
        Kind.KEEP: new + (theta - reference),
        Kind.REBASE: new + (theta - reference),
        Kind.MIX: np.float32(0.75) * new + np.float32(0.25) * theta,
    }[kind]
    after = by_hand(model, layout, 1)
    if dtype == torch.bfloat16:
        np.testing.assert_allclose(after, expected, rtol=2**-8, atol=1e-6)
    else:
        np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-7)
    for p in (0, 2):
        np.testing.assert_array_equal(by_hand(model, layout, p), before[p], err_msg="only one fragment moves")


def test_moving_without_work_since_the_snapshot_gives_the_broadcasts_bytes() -> None:
    """θ - snapshot is exactly zero then, so keep and overwrite agree bit for bit."""
    model = Tied()
    layout = build_layout(model, 2)
    fragments = ModelFragments(model, layout)
    new = np.random.default_rng(1).normal(size=layout.elements(0)).astype(np.float32)
    fragments.move(0, Kind.KEEP, Vector.from_array(new), fragments.snapshot(0))
    np.testing.assert_array_equal(by_hand(model, layout, 0), new)


@pytest.mark.promise(
    "Parameters in bfloat16 or float16 learn correctly with any `down`: rounding is never pushed as work"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_never_counts_as_work(dtype: torch.dtype) -> None:
    """Two learners share a base in float32; one has parameters of less precision and learns nothing, the other is
    float32 and drifts by 2e-6 a round. The base follows half of the drift: the idle learner holds it back by nothing.
    """
    torch.manual_seed(0)
    idle, drifting = Tied(), Tied()
    drifting.load_state_dict(idle.state_dict())
    idle.to(dtype)
    layouts = [build_layout(model, 1) for model in (idle, drifting)]
    learners = [ModelFragments(model, layout) for model, layout in zip((idle, drifting), layouts, strict=True)]
    start = base = learners[1].snapshot(0).array
    for learner in learners:
        learner.move(0, Kind.OVERWRITE, Vector.from_array(base))
    rounds, drift = 200, np.float32(2e-6)
    for _ in range(rounds):
        with torch.no_grad():
            for parameter in model_tensors(drifting).values():
                parameter.add_(float(drift))
        snapshots = [learner.snapshot(0) for learner in learners]
        np.testing.assert_array_equal(snapshots[0].array, base, err_msg="nothing learnt, nothing pushed")
        new = base - np.mean([base - taken.array for taken in snapshots], axis=0, dtype=np.float32)
        for learner, taken in zip(learners, snapshots, strict=True):
            learner.move(0, Kind.KEEP, Vector.from_array(new), taken)
        base = new
    assert np.mean(base - start) == pytest.approx(rounds * drift / 2, rel=0.02)


@pytest.mark.promise(
    "Parameters in bfloat16 or float16 learn correctly with any `down`: rounding is never pushed as work"
)
def test_what_training_does_to_bfloat16_parameters_is_pushed_whole() -> None:
    """A step in bfloat16 between two moves is the difference of the snapshots, whatever the moves rounded off."""
    torch.manual_seed(0)
    model = Tied().to(torch.bfloat16)
    layout = build_layout(model, 2)
    fragments = ModelFragments(model, layout)
    base = np.random.default_rng(3).normal(size=layout.elements(0)).astype(np.float32)
    fragments.move(0, Kind.OVERWRITE, Vector.from_array(base))
    stored = by_hand(model, layout, 0)
    with torch.no_grad():
        for parameter in model_tensors(model).values():
            parameter.mul_(1.125)
    worked = by_hand(model, layout, 0) - stored
    taken = fragments.snapshot(0)
    np.testing.assert_allclose(taken.array - base, worked, atol=2e-7)
    new = (base + 1).astype(np.float32)
    fragments.move(0, Kind.KEEP, Vector.from_array(new), Vector.from_array(base))
    np.testing.assert_array_equal(fragments.snapshot(0).array, (taken.array - base) + new)


def test_moves_leave_training_intact() -> None:
    """Parameters keep their identity, gradients and memory: the optimizer goes on with them."""
    model = Tied()
    layout = build_layout(model, 2)
    fragments = ModelFragments(model, layout)
    places = {name: p.data_ptr() for name, p in model_tensors(model).items()}
    optimizer = torch.optim.AdamW(list(model_tensors(model).values()), lr=0.1)
    model.head(model.embedding(torch.arange(4))).sum().backward()
    new = np.zeros(layout.elements(0), np.float32)
    fragments.move(0, Kind.OVERWRITE, Vector.from_array(new))
    optimizer.step()
    assert {name: p.data_ptr() for name, p in model_tensors(model).items()} == places
    assert np.abs(by_hand(model, layout, 0)).max() > 0


def test_what_cannot_be_merged_is_refused_by_name() -> None:
    model = Tied()
    model.norm.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match=r"norm\.weight is torch\.complex64"):
        build_layout(model, 2)
    model = Tied()
    model.positions.weight = torch.nn.Parameter(torch.randn(8, 6).t())
    with pytest.raises(ConfigurationError, match=r"positions\.weight is not contiguous"):
        build_layout(model, 2)
    model = Tied()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no trainable elements"):
        build_layout(model, 2)


@pytest.mark.promise(
    "A wrapped model (compiled, checkpointed, DataParallel) has the layout of the inner model, its output "
    "embedding included"
)
def test_a_wrapped_model_is_the_same_model() -> None:
    """The same names, so the same layout: it may join learners that do not wrap it."""
    plain = Untied()
    layout = build_layout(plain, 3, 4)
    assert any(tensor.mean for tensor in layout.tensors if tensor.name == "head.weight"), "the output embedding"

    def wrapped_inside() -> torch.nn.Module:
        model = Untied()
        model.base, model.norm = checkpoint_wrapper(model.base), torch.compile(model.norm)
        return model

    for model in (torch.compile(Untied()), torch.nn.DataParallel(torch.compile(Untied())), wrapped_inside()):
        assert build_layout(model, 3, 4).digest == layout.digest
        assert list(named_parameters(model)) == list(named_parameters(plain))
        assert ModelFragments(model, layout).snapshot(2).array.size == layout.elements(2)

    class Own(torch.nn.Module):
        """A child that happens to have a wrapper's name."""

        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    assert list(named_parameters(Own())) == ["module.weight", "module.bias"]


@pytest.mark.promise(
    "Parameters that were moved or assigned anew, shards of a model, and channels_last are refused by "
    "name, with the fix"
)
def test_parameters_that_moved_are_noticed() -> None:
    """The views would show dead memory for ever, and nobody would learn of it."""

    def to_another_dtype(model: torch.nn.Module) -> None:
        model.to(torch.float64)

    def own_tensor(model: torch.nn.Module) -> None:
        model.norm.weight.data = model.norm.weight.data.clone()

    def own_parameter(model: torch.nn.Module) -> None:
        model.norm.weight = torch.nn.Parameter(torch.ones(8))

    def removed(model: torch.nn.Module) -> None:
        torch.nn.utils.parametrizations.weight_norm(model.norm)

    for change in (to_another_dtype, own_tensor, own_parameter, removed):
        model = Untied()
        fragments = ModelFragments(model, build_layout(model, 1, 4))
        base = fragments.snapshot(0)
        change(model)
        with pytest.raises(ConfigurationError, match=r"was moved or assigned anew after the Learner was made"):
            fragments.snapshot(0)
        with pytest.raises(ConfigurationError, match=r"was moved or assigned anew after the Learner was made"):
            fragments.move(0, Kind.OVERWRITE, base)


@pytest.mark.promise(
    "Parameters that were moved or assigned anew, shards of a model, and channels_last are refused by "
    "name, with the fix"
)
def test_a_part_of_a_model_is_refused_by_name(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.fsdp.fully_shard(Untied(), mesh=mesh)
        assert len(build_layout(sharded, 1)) == 1, "of one process it is whole"
        elsewhere = torch.nn.Linear(2, 2)
        shard = torch.distributed.tensor.DTensor.from_local(
            torch.ones(1, 2), mesh, [torch.distributed.tensor.Shard(0)], shape=(2, 2), stride=(2, 1), run_check=False
        )
        elsewhere.weight = torch.nn.Parameter(shard)
        with pytest.raises(ConfigurationError, match=r"weight is a DTensor .* one shard, and torch\.distributed has"):
            build_layout(elsewhere, 1)
        flattened = torch.nn.Module()
        flattened._flat_param = torch.nn.Parameter(torch.ones(4))
        with pytest.raises(ConfigurationError, match=r"_flat_param is flattened by FSDP .* use FSDP2, fully_shard"):
            build_layout(flattened, 1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.promise(
    "Parameters that were moved or assigned anew, shards of a model, and channels_last are refused by "
    "name, with the fix"
)
def test_channels_last_is_refused_with_the_cure() -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigurationError, match=r"weight is not contiguous.*torch\.contiguous_format"):
        build_layout(model, 1)
    assert len(build_layout(model.to(memory_format=torch.contiguous_format), 1)) == 1


@pytest.mark.promise("Copies for a GPU are handled by background threads, not by the training thread or the event loop")
def test_two_threads_may_ask_for_a_vector_whose_copy_is_under_way() -> None:
    """The copy's event is gone as soon as one of them has waited for it."""

    class Copying:
        def synchronize(self) -> None:
            pass

    class Asked(Vector):
        """Another thread takes the event away between any two looks at it."""

        def __init__(self) -> None:
            super().__init__(torch.ones(3))
            self.events: list[Copying | None] = [Copying(), None]

        def __getattribute__(self, name: str) -> object:
            if name == "_event" and "events" in self.__dict__:
                return self.events.pop(0)
            return super().__getattribute__(name)

    assert Asked().array.tolist() == [1, 1, 1]


def test_frozen_parameters_travel_whole_or_not_at_all() -> None:
    torch.manual_seed(1)
    source, target = Tied(), Tied()
    data = bytearray(frozen_file(source))
    load_frozen(target, data)
    assert torch.equal(target.base.weight, source.base.weight)
    assert not torch.equal(target.positions.weight, source.positions.weight)
    other = Tied()
    other.base = torch.nn.Linear(8, 9)
    for parameter in other.base.parameters():
        parameter.requires_grad_(False)
    kept = other.base.bias.clone()
    with pytest.raises(ConfigurationError, match=r"base\.(weight|bias)"):
        load_frozen(other, data)
    assert torch.equal(other.base.bias, kept)
    with pytest.raises(ConfigurationError, match="not safetensors"):
        load_frozen(target, data[:20])
    with pytest.raises(ConfigurationError, match="differ"):
        load_frozen(target, bytearray(frozen_file(torch.nn.Linear(2, 2).requires_grad_(False))))
    assert frozen_file(torch.nn.Linear(2, 2)) == b"" and isinstance(frozen_file(source), np.memmap)


@pytest.mark.promise("Frozen parameters of every dtype that safetensors knows are exchanged")
@pytest.mark.parametrize("dtype", _SIZE, ids=str)
def test_frozen_parameters_of_every_dtype_travel(dtype: torch.dtype) -> None:
    """As those of quantised bases, which are float8 or packed."""

    def model(first: int) -> torch.nn.Module:
        held = torch.nn.Module()
        values = torch.arange(first, first + 32, dtype=torch.uint8) % 2
        values = values.bool() if dtype is torch.bool else values.view(dtype)
        held.base = torch.nn.Parameter(values.view(2, -1), requires_grad=False)
        return held

    source, target = model(0), model(1)
    sent = bytearray(frozen_file(source))
    load_frozen(target, sent)
    here, there, before = (digest_tensors(frozen_tensors(one)) for one in (target, source, model(1)))
    assert here == there != before
    (tensor,) = read_tensors(sent).values()
    assert read_tensors(write_tensors({"base": tensor}, {}))["base"].shape == source.base.shape


@pytest.mark.promise("A model with running statistics (BatchNorm), which cannot be merged, is refused by name")
def test_a_model_whose_training_updates_running_statistics_is_refused(tmp_path: Path) -> None:
    spec = {"learners": {"command": ["python", "loop.py"]}, "regions": [{"learners": 1}]}
    job = DiLoCoJob.model_validate(
        {"apiVersion": "diloco.io/v1alpha1", "kind": "DiLoCoJob", "metadata": {"name": "own-loop"}, "spec": spec}
    )
    (tmp_path / "job.json").write_text(job_to_json(job))
    environ = {"DILOCO_JOB_FILE": str(tmp_path / "job.json"), "DILOCO_SYNCER": "127.0.0.1:1"}
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigurationError, match=r"running statistics in 1: they are not merged.* GroupNorm"):
        Learner.from_environment(model, optimizer, environ=environ)
    model.eval()  # the statistics stay as they are: right, as long as the mode does
    learner = Learner.from_environment(model, optimizer, environ=environ)
    model.train()
    with pytest.raises(ConfigurationError, match="running statistics in 1"):
        learner.after_step(tokens=1)
    model[1] = torch.nn.BatchNorm2d(8, track_running_stats=False)
    optimizer = torch.optim.AdamW(model.parameters())
    Learner.from_environment(model, optimizer, environ=environ)
