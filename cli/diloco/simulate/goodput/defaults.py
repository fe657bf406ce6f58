"""The published parameters as the simulators take them."""

from __future__ import annotations

from diloco.simulate.failures import RepairTimes
from diloco.simulate.goodput.fleet import Stops
from diloco.simulate.goodput.published import (
    DOWNSCALE,
    REPAIR_MEAN,
    REPAIR_POWER,
    REPAIR_SHAPE,
    RESTART,
    RIGID_STEP,
    STEP,
    UPSCALE,
)

STOPS = Stops(STEP.value, DOWNSCALE.value, UPSCALE.value)
RIGID_STOPS = Stops(RIGID_STEP.value, RESTART.value, 0.0)
REPAIRS = RepairTimes.with_mean(REPAIR_MEAN.value, REPAIR_SHAPE.value, REPAIR_POWER.value)
