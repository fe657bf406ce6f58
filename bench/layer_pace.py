"""Gives each training step of a model a fixed time, as if a slower device computed it: the rest of it is slept.

So that what a step's time is made of does not depend on how many processes share the machine's cores. Sleeps are
spread over the layers, a third of the time in the forward pass and two thirds in the backward pass: gradients come one
layer after another, and whoever sends them meanwhile (DDP does) can overlap sending with what stands for computation.
A step that really computes for longer takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

FORWARD_SHARE = 1 / 3


class LayerPace:
    """Hooks on ``layers`` of a model, in their order; a step takes ``step_seconds`` from its first layer's forward pass
    to its last gradient."""

    def __init__(self, layers: Sequence[Any], step_seconds: float) -> None:
        self._count, self._seconds = len(layers), step_seconds
        self._began = self._backward_began = 0.0
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(number))
            layer.register_forward_hook(self._after(number))

    def _before(self, number: int) -> Any:
        def hook(_: Any, inputs: tuple[Any, ...]) -> None:
            if number == 0:
                self._began = time.monotonic()
                if inputs and inputs[0].requires_grad:
                    inputs[0].register_hook(self._gradient_of(-1))

        return hook

    def _after(self, number: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            whole = output[0] if isinstance(output, tuple) else output
            self._sleep(self._began + self._seconds * FORWARD_SHARE * (number + 1) / self._count)
            if whole.requires_grad:
                whole.register_hook(self._gradient_of(number))

        return hook

    def _gradient_of(self, number: int) -> Any:
        """For the gradient of a layer's output (-1: of the first layer's input): the layers after it are done."""

        def hook(_: Any) -> None:
            if number == self._count - 1:
                self._backward_began = time.monotonic()
            done = (self._count - 1 - number) / self._count
            self._sleep(self._backward_began + self._seconds * (1 - FORWARD_SHARE) * done)

        return hook

    @staticmethod
    def _sleep(until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))
