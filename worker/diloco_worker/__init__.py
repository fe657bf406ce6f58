"""The learner of Decoupled DiLoCo as a library, and the programs built on it (``python -m diloco_worker``).

``Learner`` is what a training loop of your own imports (learner.py has an example), ``Observer`` what an evaluator
of your own does, and ``load_merged`` gives the trained model. They are loaded on first use, so that importing this
package loads no torch.

Layers, from the top: the programs (``training``, ``forkserver``), the public API (``learner``, ``observer``), what
happens at step boundaries (``sync``), the background thread (``net``), ``data``, ``fragments``, and the decisions
(``core``). Imports go down this list, never up, and never to another program's package but diloco_protocol.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_worker.learner import Learner as Learner
    from diloco_worker.logs import configure as configure_logging
    from diloco_worker.observer import Observer as Observer
    from diloco_worker.standalone.merged import load_merged as load_merged

__all__ = ["Learner", "Observer", "configure_logging", "load_merged"]

_LOADED_LATER = {
    "Learner": ("diloco_worker.learner", "Learner"),
    "Observer": ("diloco_worker.observer", "Observer"),
    "configure_logging": ("diloco_worker.logs", "configure"),
    "load_merged": ("diloco_worker.standalone.merged", "load_merged"),
}


def _end_when_told() -> None:
    """End on SIGTERM, in the first process of a container. The kernel ignores the signal there until it is handled,
    so a program that still loads its model would be killed only when its grace period is over. A Learner handles
    SIGTERM itself within its ``with``. In any other process the default ends it before, wherever it is: no handler of
    Python's runs while torch waits for the other ranks."""
    first = os.getpid() == 1 and threading.current_thread() is threading.main_thread()
    if first and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


_end_when_told()

# Before gRPC begins: its own handlers of a fork crash children that use no gRPC, such as a DataLoader's workers.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LOADED_LATER[name]
    return getattr(importlib.import_module(module), attribute)
