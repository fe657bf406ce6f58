"""The inner optimizer, its learning rate on the slot's step, and the trainer's step around it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diloco_protocol.spec.cluster import RegionSpec
from diloco_protocol.spec.job_spec import JobSpec
from diloco_protocol.spec.training import DataSpec, ModelSpec, OptimizerSpec, StopSpec, TrainingSpec
from diloco_worker.core.progress import job_progress, schedule_step
from diloco_worker.data.shuffle import step_seed
from diloco_worker.training import models, trainer
from diloco_worker.training.optimizer import FLOOR, build_optimizer, learning_rate, total_steps
from example_counts import share_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def job(learners: int = 3, **stop: Any) -> JobSpec:
    data = DataSpec(paths=["python-stdlib"], sequence_length=8)
    training = TrainingSpec(model=ModelSpec(config=LLAMA), data=data, stop=StopSpec(**stop))
    return JobSpec(training=training, regions=[RegionSpec(learners=learners)])


def test_total_steps() -> None:
    assert total_steps(job(steps=77).training.stop, 3, 2048) == 77
    assert total_steps(job(tokens=2_000_000).training.stop, 3, 2048) == math.ceil(2_000_000 / (3 * 2048))
    assert total_steps(job(tokens=10).training.stop, 3, 2048) == 1
    assert total_steps(job(seconds=10.0).training.stop, 3, 2048) is None


def test_warm_up_then_cosine_to_the_last_step() -> None:
    spec = OptimizerSpec(lr=0.1, warmup_steps=10)
    rates = [learning_rate(spec, step, step, 110) for step in range(110)]
    assert rates[0] == pytest.approx(0.01) and rates[9] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(0.1) and rates[60] == pytest.approx(0.05)
    assert 0 < rates[-1] <= FLOOR * 0.1 + 1e-12
    assert learning_rate(spec, 10_000, 10_000, 110) == pytest.approx(FLOOR * 0.1)


@pytest.mark.promise("Schedules follow the job's progress to its stop, whatever share of it a slot trains")
@pytest.mark.parametrize("paces", [(3, 1), (1, 0), (2, 2, 1, 0)])
@pytest.mark.parametrize("stop", [{"tokens": 120_000}, {"steps": 400}])
def test_the_rate_follows_the_job_and_not_the_slots_share(paces: tuple[int, ...], stop: dict[str, int]) -> None:
    """Learners of several paces, some of whom never come: at the job's end all are at the floor, and none before the
    job is nearly there; whatever a slot's own steps are."""
    spec, tokens = job(len(paces), **stop), 100
    optimizer = OptimizerSpec(lr=1.0, warmup_steps=10)
    total = total_steps(spec.training.stop, len(paces), tokens)
    steps, last = [0] * len(paces), [0.0] * len(paces)
    heard, rates = 0.0, []
    while heard < 1:
        for slot, pace in enumerate(paces):
            for _ in range(pace):
                progress = job_progress(spec, len(paces), steps[slot], steps[slot] * tokens, heard=heard)
                place = schedule_step(spec, steps[slot], progress, total)
                last[slot] = learning_rate(optimizer, steps[slot], place, total)
                rates.append((progress, last[slot]))
                steps[slot] += 1
        done = max(steps) if "steps" in stop else sum(steps) * tokens
        heard = min(1.0, done / spec.training.stop.limit)
    assert all(rate > FLOOR for progress, rate in rates if progress < 0.9)
    assert all(rate < 0.05 for rate, pace in zip(last, paces, strict=True) if pace)


def test_progress_of_a_deterministic_job_is_the_slots_own() -> None:
    spec = job(tokens=1200)
    exact = spec.model_copy(update={"sync": spec.sync.model_copy(update={"deterministic": True})})
    assert job_progress(spec, 3, 4, 40, heard=0.75) == 0.75
    assert job_progress(spec, 3, 4, 960, heard=0.75) == 0.8, "at least what the slot trained itself"
    assert job_progress(exact, 3, 4, 40, heard=0.75) == 0.1
    assert schedule_step(exact, 7, 0.1, 100) == 7
    seconds = job(seconds=60.0)
    assert job_progress(seconds, 3, 4, 40, heard=0.25) == 0.25


@given(
    st.integers(0, 200), st.integers(1, 2000) | st.none(), st.integers(0, 4000), st.sampled_from(["cosine", "constant"])
)
@settings(max_examples=share_of(100), deadline=None)
def test_rate_is_positive_bounded_and_falls_after_the_warm_up(
    warmup: int, total: int | None, step: int, kind: str
) -> None:
    spec = OptimizerSpec(lr=0.3, warmup_steps=warmup, schedule=kind)
    now, after = (learning_rate(spec, s, s, total) for s in (step, step + 1))
    assert 0 < now <= 0.3
    if step >= warmup:
        assert after <= now
    if kind == "constant" and step >= warmup:
        assert now == 0.3


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerSpec(lr=0.1, weight_decay=0.5, eps=1e-6))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {id(model[0].weight): 0.5, id(model[1].weight): 0.0, id(model[1].bias): 0.0}
    before = model[0].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before * (1 - 0.1 * 0.5))
    assert torch.equal(model[1].weight, torch.ones(4))


def batch(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (rows, 8), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :6] = -100  # parts of the batch differ in predictions
    return {"input_ids": ids, "labels": labels}


def test_a_step_scales_gradients_down_to_the_greatest_norm() -> None:
    norms = []
    for greatest in (None, 1e-3):
        model = models.build(job(steps=1), 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        trainer.step(model, optimizer, batch(6), 1, clip_norm=greatest, dtype=torch.float32)
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
    assert norms[0] > 0.1 and norms[1] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("accumulation", [2, 3, 6])
def test_accumulation_is_the_step_of_the_whole_batch(accumulation: int) -> None:
    results = []
    for passes in (1, accumulation):
        model = models.build(job(steps=1), 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = trainer.step(model, optimizer, batch(6), passes, clip_norm=1.0, dtype=torch.float32)
        results.append((loss, dict(model.named_parameters())))
    (loss, one), (other_loss, other) = results
    torch.testing.assert_close(loss, other_loss)
    for name, p in one.items():
        torch.testing.assert_close(p, other[name], rtol=1e-4, atol=1e-6)


class Scorer(nn.Module):
    """A model of one matrix, with transformers' manner of being called."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=256)
        self.weight = nn.Parameter(torch.zeros(256, 256))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.weight[input_ids[:, :-1]].flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))


@pytest.mark.promise("No step of the built-in trainer waits for the device")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_never_waits_for_the_device(accumulation: int) -> None:
    """The device `meta` has no values, so whoever would wait for one of them fails."""
    model = Scorer().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = trainer.step(model, optimizer, batch(6), accumulation, clip_norm=1.0, dtype=torch.float32)
    assert loss.device.type == "meta" and loss.shape == ()


def test_bfloat16_keeps_weights_and_loss_in_float32() -> None:
    model = models.build(job(steps=1), 0)
    optimizer = build_optimizer(model, OptimizerSpec())
    exact = trainer.step(
        models.build(job(steps=1), 0),
        torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
        batch(4),
        1,
        clip_norm=None,
        dtype=torch.float32,
    )
    loss = trainer.step(model, optimizer, batch(4), 1, clip_norm=None, dtype=torch.bfloat16)
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(exact), rel=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_a_few_steps_learn_a_batch_by_heart() -> None:
    model = models.build(job(steps=1), 0)
    optimizer = build_optimizer(model, OptimizerSpec(lr=0.02))
    losses = [float(trainer.step(model, optimizer, batch(4), 1, clip_norm=1.0, dtype=torch.float32)) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


@given(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), st.tuples(*[st.integers(0, 2**32 - 1)] * 3))
@settings(max_examples=share_of(200), deadline=None)
def test_seeds_of_steps_differ(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    seed, same = step_seed(*one), step_seed(*one)
    assert seed == same and 0 <= seed < 2**63
    assert (seed == step_seed(*other)) == (one == other)
