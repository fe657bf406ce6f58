"""Learners that break while they train: what is told of them, and what their replacements begin from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from learner_process import Rows, Syncer, one_step, small_model

from diloco_protocol.vocabulary import WorkerExit
from diloco_worker import Learner
from diloco_worker.settings import DivergedError

pytestmark = pytest.mark.usefixtures("torch_settings")


def train(service: Syncer, breaks_at: int | None, ends: Callable[[Learner], bool]) -> torch.nn.Module:
    """Train in this process until ``ends``; one element of the gradient of step ``breaks_at`` is NaN."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with Learner.from_environment(model, optimizer, environ=service.environ()) as learner:
        for batch in learner.batches(Rows(40_000)):
            loss = one_step(model, optimizer, batch)
            if learner.step == breaks_at:
                model[0].weight.grad[0, 0] = torch.nan
                optimizer.step()
            learner.after_step(tokens=batch.numel(), loss=loss)
            if ends(learner):
                break
    return model


def test_nan_ends_a_learner_by_name_and_its_replacement_trains_on(syncer: Callable[..., Syncer]) -> None:
    """One learner, one job: what diverged is never merged, and nothing waits for it."""
    service = syncer({}, {"steps": 1_000_000})
    rounds = 4 * 4  # steps of four rounds
    with pytest.raises(DivergedError, match=r"training diverged: fragment \d has values that are not") as raised:
        train(service, 20, lambda learner: learner.step > 20 + rounds)
    assert raised.value.exit_code == WorkerExit.DIVERGED
    merges = service.status()["merges"]
    model = train(service, None, lambda learner: learner.step % 20 == 0 and service.status()["merges"] > merges + 3)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert service.status()["refused"].get("not-finite", 0) == 0
