"""What the ranks of a learner tell each other beside their training, so that each can say for whom it waits in a hang.

A thread of its own puts a sign (``core.rank_delays``) into the store of torch's process group, which rank 0 or
torchrun serves, and reads the others' while nothing seems to go on. Nobody waits for this thread: the store may be
silent too.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from diloco_worker.core.rank_delays import RankSign, describe_hang
from diloco_worker.group import ranks as own_calls
from diloco_worker.group.ranks import Group


class RankWatch:
    """Make it in the thread that trains. ``suspects``: whether nothing seems to go on."""

    def __init__(self, group: Group, interval: float, suspects: Callable[[], bool]) -> None:
        self._group, self._interval, self._suspects = group, interval, suspects
        self._trains = threading.get_ident()
        self._stopped = threading.Event()
        self._first: list[bytes] = []  # all signs, when the suspicion began
        self._last: list[bytes] = []
        threading.Thread(target=self._run, name="diloco-ranks", daemon=True).start()

    def stop(self) -> None:
        """Tell no more: the loop is over."""
        self._stopped.set()

    def describe(self) -> str:
        """Who is waited for, in words, as far as it is known. From any thread, and without waiting."""
        if not self._last:
            return "rank 0 of this learner, or torchrun, does not answer"
        signs = enumerate(zip(self._first, self._last, strict=True))
        return describe_hang(
            {rank: None if one == two else RankSign(*json.loads(two)[1:]) for rank, (one, two) in signs}
        )

    def _run(self) -> None:
        keys = [str(rank) for rank in range(self._group.size)]
        try:
            c10d: Any = dist.distributed_c10d
            store = c10d.PrefixStore("diloco-ranks", c10d._get_default_store().clone())
            turn = 0
            while not self._stopped.wait(self._interval):
                turn += 1
                store.set(keys[self._group.rank], json.dumps([turn, *self._sign()]))
                if not self._suspects():
                    self._first, self._last = [], []
                elif store.check(keys):
                    self._last = store.multi_get(keys)
                    self._first = self._first or self._last
        except RuntimeError:  # what torch raises for a store that is gone, as it is at a learner's end
            return

    def _sign(self) -> tuple[int, bool, str]:
        frame = sys._current_frames().get(self._trains)
        calls = traceback.extract_stack(frame) if frame is not None else []
        here = f"{Path(calls[-1].filename).name}:{calls[-1].lineno} ({calls[-1].name})" if calls else "its end"
        return self._group.number, any(call.filename == own_calls.__file__ for call in calls), here
