"""The learner's side of Decoupled DiLoCo.

``Learner`` is what a training loop of your own imports. It is loaded on first use,
so that importing this package loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .learner import Learner as Learner
    from .logs import configure as configure_logging
    from .observer import Observer as Observer

__all__ = ["Learner", "Observer", "configure_logging"]


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from .learner import Learner

        return Learner
    if name == "Observer":
        from .observer import Observer

        return Observer
    if name == "configure_logging":
        from .logs import configure

        return configure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
