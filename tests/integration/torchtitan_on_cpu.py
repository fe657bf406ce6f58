"""Runs a program of torchtitan on the CPU, by gloo, which torchtitan 0.3 does not do by itself: flex attention has no
backward there (causal attention takes its place), gloo sums gradients and scales nothing, and a CPU has no memory that
torchtitan could watch. Not a test."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


class NoMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


def attend(q: Any, k: Any, v: Any, *, scale: float, enable_gqa: bool, **_: Any) -> tuple[torch.Tensor, None]:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


def divide(module: FSDPModule, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)
    _divide(module, factor)


_divide = FSDPModule.set_gradient_divide_factor

if __name__ == "__main__":
    metrics.build_device_memory_monitor = NoMonitor
    FSDPModule.set_gradient_divide_factor = divide
    FlexAttention._compiled_flex_attn = staticmethod(attend)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
