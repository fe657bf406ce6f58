"""What a learner says of its loss."""

from __future__ import annotations

import math

import pytest
import torch

from diloco_worker.settings import WorkerError
from diloco_worker.sync.step_metrics import StepMetrics


@pytest.mark.promise("A loss that is not finite is shown as none, and the slot as diverged")
def test_a_loss_that_is_not_finite_is_told_apart_from_none() -> None:
    metrics = StepMetrics()
    assert math.isnan(metrics.read_loss()) and not metrics.diverged
    for loss, diverged in ((1.5, False), (torch.tensor(math.nan), True), (2.0, False), (math.inf, True)):
        metrics.put_loss(loss)
        metrics.read_loss()
        assert metrics.diverged is diverged, loss


@pytest.mark.parametrize(("loss", "said"), [(torch.ones(3), "Tensor of 3 values"), ("5.5", "the type str: give one")])
def test_what_is_no_loss_is_refused_in_a_sentence(loss: torch.Tensor | float, said: str) -> None:
    metrics = StepMetrics()
    with pytest.raises(WorkerError, match=said):
        metrics.put_loss(loss)
    metrics.put_loss(torch.ones(1, 1))
    assert metrics.read_loss() == 1.0
