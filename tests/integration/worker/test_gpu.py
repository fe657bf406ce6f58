"""The worker on a CUDA device: `make gpu-check` runs these, and docs/gpu-checklist.md says what each is for."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learner_process import Rows, Syncer, one_step, small_model
from runs import Run

from diloco_worker import Learner
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Kind
from diloco_worker.fragments import ModelFragments, Vector, build_layout
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_handover import OptimizerHandover
from diloco_worker.sync.optimizer_state import restore, snapshot
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint
from diloco_worker.sync.step_metrics import StepMetrics
from diloco_worker.training import trainer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextmanager
def no_waiting() -> Iterator[None]:
    """In which a call that waits for the device fails."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def keep_busy(gpu: torch.device) -> None:
    """Queue some tenths of a second of work, so that what is not ordered is seen."""
    torch.cuda._sleep(500_000_000)


def wide(gpu: torch.device, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256)).to(gpu, dtype)


def train(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    gpu = next(model.parameters()).device
    for batch in torch.randn(steps, 16, 256, generator=torch.Generator().manual_seed(5)).to(gpu):
        model.zero_grad()
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], list[torch.optim.Optimizer]]] = {
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=0.01)],
    "fused": lambda m: [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)],
    "capturable": lambda m: [torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True)],
    "several": lambda m: [
        torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01),
        torch.optim.AdamW([p for p in m.parameters() if p.ndim < 2], lr=0.01, fused=True),
    ],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_goes_on_bit_for_bit_while_its_donor_trains(gpu: torch.device, name: str) -> None:
    """The state is of the boundary at which it was copied, and lies where the optimizer's kernels look for it."""
    donor = wide(gpu)
    theirs = OPTIMIZERS[name](donor)
    inner = InnerOptimizers(donor, theirs)
    train(donor, theirs, 3)
    newcomer = copy.deepcopy(donor)
    keep_busy(gpu)
    encode = snapshot(inner)
    assert encode is not None
    train(donor, theirs, 2)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(encode()))
    thread.start()
    thread.join(60)
    own = OPTIMIZERS[name](newcomer)
    restore(found[0], InnerOptimizers(newcomer, own))
    for mine, others in zip(own, theirs, strict=True):
        for row, other in zip(mine.state.values(), others.state.values(), strict=True):
            assert {key: value.device for key, value in row.items()} == {k: v.device for k, v in other.items()}
    train(newcomer, own, 2)
    for mine_, other_ in zip(newcomer.parameters(), donor.parameters(), strict=True):
        torch.testing.assert_close(mine_, other_, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Kind.OVERWRITE, Kind.KEEP, Kind.REBASE, Kind.MIX], ids=str)
def test_moves_give_the_bits_that_a_cpu_gives(gpu: torch.device, kind: Kind, dtype: torch.dtype) -> None:
    """Also where the reference's download is under way, and training goes on at once."""
    here, there = wide(torch.device("cpu"), dtype), wide(gpu, dtype)
    layout = build_layout(here, 3, 4)
    cpu, device = ModelFragments(here, layout), ModelFragments(there, layout)
    generator = np.random.default_rng(1)
    for fragment in range(len(layout)):
        new = generator.standard_normal(layout.elements(fragment), dtype=np.float32)
        keep_busy(gpu)
        references = cpu.snapshot(fragment), device.snapshot(fragment)
        for model in (here, there):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        cpu.move(fragment, kind, Vector.from_array(new), references[0], 0.5)
        device.move(fragment, kind, device.pinned(new), references[1], 0.5)
        after = device.snapshot(fragment)
        assert np.array_equal(references[1].array, references[0].array), "of before the parameters changed"
        np.testing.assert_allclose(after.array, cpu.snapshot(fragment).array, rtol=1e-6, atol=1e-6)


def test_boundaries_and_steps_never_wait_for_the_device(gpu: torch.device) -> None:
    model = wide(gpu)
    fragments = ModelFragments(model, build_layout(model, 3, 4))
    values = [fragments.pinned(np.zeros(fragments.layout.elements(p), np.float32)) for p in range(3)]
    reference = fragments.snapshot(0)  # the first of their size may allocate
    metrics = StepMetrics()
    metrics.put_loss(torch.ones((), device=gpu))
    with no_waiting():
        keep_busy(gpu)
        for p in range(3):
            fragments.snapshot(p)
            fragments.move(p, Kind.OVERWRITE, values[p])
        fragments.move(0, Kind.KEEP, values[0], reference)
        metrics.put_loss(torch.full((), 2.0, device=gpu))
        metrics.read_loss()
    torch.cuda.synchronize()
    assert metrics.read_loss() == 2.0


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(256, 256))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.weight[input_ids[:, :-1]].flatten(0, 1)
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))


def test_the_built_in_trainers_step_never_waits_for_the_device(gpu: torch.device) -> None:
    model = Scorer().to(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 256, (6, 8))
    batch = {"input_ids": ids, "labels": ids.clone()}
    trainer.step(model, optimizer, batch, 3, clip_norm=1.0, dtype=torch.bfloat16)  # libraries are loaded
    with no_waiting():
        keep_busy(gpu)
        trainer.step(model, optimizer, batch, 3, clip_norm=1.0, dtype=torch.bfloat16)


def test_a_donor_without_memory_declines_and_trains_on(gpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4096, 4096).to(gpu)  # 64 MB, 128 MB of state
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inner = InnerOptimizers(model, optimizer)

    def step() -> None:
        model(torch.ones(1, 4096, device=gpu)).sum().backward()
        optimizer.step()

    step()
    declined: list[int] = []
    client: Any = SimpleNamespace(decline_state=declined.append)
    checkpoint = SlotCheckpoint(None, "a", "d", 60.0, limit=1 << 30)
    adoption = Adoption(AdoptionConfig(0, 4, 1))
    adoption.on_step(1, 0.1)
    handover = OptimizerHandover(inner, adoption, client, checkpoint, warm_up=10, on_fresh=lambda step: None)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(gpu)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(gpu) + (16 << 20)) / total, gpu)
    try:
        handover.send_state(7, ())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    assert declined == [7] and "it cannot be copied: CUDA out of memory" in caplog.text
    step()


def test_a_compiled_model_sees_what_was_adopted(gpu: torch.device) -> None:
    model = wide(gpu)
    compiled = torch.compile(model, mode="reduce-overhead")  # CUDA graphs
    fragments = ModelFragments(compiled, build_layout(compiled, 3, 4))
    batch = torch.ones(4, 256, device=gpu)
    with torch.no_grad():
        for _ in range(4):
            compiled(batch)
        for p in range(3):
            zeros = np.zeros(fragments.layout.elements(p), np.float32)
            fragments.move(p, Kind.OVERWRITE, fragments.pinned(zeros))
        assert not compiled(batch).any()


def test_a_learner_on_the_second_device_leaves_the_first_alone(syncer: Callable[..., Syncer]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device only")
    before = torch.cuda.mem_get_info(0)[0]
    second = torch.device("cuda", 1)
    torch.cuda.set_device(second)
    try:
        learn(syncer, second)
    finally:
        torch.cuda.set_device(0)
    assert before - torch.cuda.mem_get_info(0)[0] < 64 << 20, "no context, no pinned copies through it"


def learn(syncer: Callable[..., Syncer], where: torch.device) -> Learner:
    service = syncer({"compression": {"up": "int4"}}, {"steps": 60})
    model = small_model().to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows()):
            loss = one_step(model, optimizer, batch.to(where))
            learner.after_step(tokens=batch.numel(), loss=loss)
    report = service.last_report()
    assert report["outcome"] == "complete" and report["merges"] > 0 and report["tokens"]["dropped"] == 0
    return learner


def test_a_learner_trains_a_job(gpu: torch.device, syncer: Callable[..., Syncer]) -> None:
    assert learn(syncer, gpu).metrics["loss"] < 8


def test_the_built_in_trainer_trains_a_job(start: Callable[..., Run]) -> None:
    run = start("--set", "training.device=cuda", steps=200, learners=1)
    assert run.ends() == 0, run.everything()
    assert run.report()["outcome"] == "complete"
