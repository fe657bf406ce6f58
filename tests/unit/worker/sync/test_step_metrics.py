"""What a learner says of its loss."""

from __future__ import annotations

import math

import pytest
import torch

from diloco_worker.sync.step_metrics import StepMetrics


@pytest.mark.promise("A loss that is not finite is shown as none, and the slot as diverged")
def test_a_loss_that_is_not_finite_is_told_apart_from_none() -> None:
    metrics = StepMetrics()
    assert math.isnan(metrics.read_loss()) and not metrics.diverged
    for loss, diverged in ((1.5, False), (torch.tensor(math.nan), True), (2.0, False), (math.inf, True)):
        metrics.put_loss(loss)
        metrics.read_loss()
        assert metrics.diverged is diverged, loss
