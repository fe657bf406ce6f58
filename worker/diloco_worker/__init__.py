"""The learner's side of Decoupled DiLoCo.

``Learner`` is what a training loop of your own imports. It is loaded on first use,
so that importing this package loads no torch.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_worker.learner import Learner as Learner
    from diloco_worker.logs import configure as configure_logging
    from diloco_worker.observer import Observer as Observer

__all__ = ["Learner", "Observer", "configure_logging"]


def _end_when_told() -> None:
    """The first process of a container ignores SIGTERM until it handles it: what the kernel does for any
    other is said here, so that a program which still loads its model does not sit out its grace period.
    A Learner takes over from its ``with`` on."""
    first = os.getpid() == 1 and threading.current_thread() is threading.main_thread()
    if first and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


_end_when_told()


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from diloco_worker.learner import Learner

        return Learner
    if name == "Observer":
        from diloco_worker.observer import Observer

        return Observer
    if name == "configure_logging":
        from diloco_worker.logs import configure

        return configure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
