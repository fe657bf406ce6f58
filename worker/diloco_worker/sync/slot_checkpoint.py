"""The slot's own checkpoint: its inner optimizer's state in a file, for when no peer has one.

Theory of operation
-------------------
The syncer has everything else that a newcomer needs: parameters, outer state, data, steps. The inner optimizer's
state only learners have. A newcomer takes a healthy peer's; but when all learners died at once there is none, and
AdamW's two moments, averages over hundreds of steps, would be lost. So every learner writes its state now and
then (``spec.syncer.checkpoint.everySeconds``) to ``$DILOCO_WORKDIR/state/<region>-<ordinal>.safetensors``.

The training thread copies the state at a step boundary (``optimizer_state.snapshot``); another thread serialises
the copy and replaces the file as a whole. One such write runs at a time. Copying and serialising together may
take a hundredth of the time at most: where the state is large, the next write waits longer. A write that fails
costs the newer state and nothing else; that is logged once a minute.

The file names its job, its layout, the slot's step and the version vector (``optimizer_state.Origin``). Another
job's file is not used.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.common import files
from diloco_protocol.common.program_errors import normal_form
from diloco_worker.sync.optimizer_state import Origin, StateRefused, origin_of

log = logging.getLogger(__name__)

LOG_AGAIN_SECONDS = 3600.0  # between two lines about the same failure, while it lasts
_SHARE = 100  # one part in so many of a learner's time, at most


class SlotCheckpoint:
    """The checkpoint file of one (region, ordinal). ``path`` None: there is no working directory, and nothing is kept.

    ``limit``: bytes that a state of this model cannot exceed. Only the training thread calls the methods.
    """

    def __init__(self, path: Path | None, job: str, layout_digest: str, every_seconds: float, limit: int) -> None:
        self._path = path
        self._job = job
        self._layout = layout_digest
        self._limit = limit
        self._every = every_seconds
        self._next = time.monotonic() + every_seconds
        self._writer: threading.Thread | None = None
        self._failure = ""  # the last one, in its normal form; empty: the last write was none
        self._logged = 0.0

    def origin(self, step: int, versions: Sequence[tuple[int, int]], trained: int) -> Origin:
        """The origin of a state made at this slot step, on these (epoch, version) per fragment, ``trained`` steps after
        it began fresh."""
        return Origin(self._job, self._layout, step, tuple(versions), trained=trained)

    @property
    def due(self) -> bool:
        """Whether a checkpoint is to be made at this step boundary."""
        if self._path is None or time.monotonic() < self._next:
            return False
        return self._writer is None or not self._writer.is_alive()

    @property
    def folder(self) -> Path | None:
        """Where the file lies, made if it is not there; None: nowhere. Raises OSError."""
        if self._path is not None:
            files.make_directory(self._path.parent)
        return None if self._path is None else self._path.parent

    def start_write(self, encode: Callable[[], Bytes], copy_seconds: float) -> None:
        """Write what ``encode`` returns, in another thread. ``copy_seconds``: how long the copy took."""
        assert self._path is not None
        self._next = time.monotonic() + self._every
        self._writer = threading.Thread(
            target=self._write, args=(self._path, encode, copy_seconds), name="diloco-state", daemon=True
        )
        self._writer.start()

    def skip(self) -> None:
        """Make none this time."""
        self._next = time.monotonic() + self._every

    def report_failure(self, why: object) -> None:
        """Log that a checkpoint was not made: each failure once, and again each hour while it lasts."""
        self.skip()
        before, self._failure = self._failure, normal_form(str(why)) or "?"
        if self._failure != before or time.monotonic() - self._logged >= LOG_AGAIN_SECONDS:
            self._logged = time.monotonic()
            log.warning("the slot's own checkpoint was not written, training continues: %s", why)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for a write that is under way; one that takes longer leaves the older file."""
        if self._writer is not None:
            self._writer.join(timeout)

    def load(self) -> tuple[Bytes, Origin] | None:
        """The file, mapped, and its origin; None, and a line in the log if it is there but of no use."""
        if self._path is None:
            return None
        try:
            if (size := self._path.stat().st_size) > self._limit:
                raise files.TooLarge(f"it has {size} bytes; at most {self._limit} are read")
            data = np.memmap(self._path, np.uint8, "c") if size else np.empty(0, np.uint8)
            origin = origin_of(data)
        except FileNotFoundError:
            return None
        except (OSError, StateRefused) as error:
            log.warning("the slot's own checkpoint %s is not used: %s", self._path, error)
            return None
        if origin is None or (origin.job, origin.layout) != (self._job, self._layout):
            log.warning("the slot's own checkpoint %s is not used: it is of another job", self._path)
            return None
        return data, origin

    def _write(self, path: Path, encode: Callable[[], Bytes], copy_seconds: float) -> None:
        started = time.monotonic()
        try:
            data = encode()
            busy = copy_seconds + time.monotonic() - started
            if len(data) > self._limit:
                raise files.TooLarge(f"{len(data)} bytes of state; at most {self._limit} would be read")
            files.make_directory(path.parent)
            for left in path.parent.glob(f".{glob.escape(path.name)}.*{files.TEMPORARY}"):
                with contextlib.suppress(FileNotFoundError):
                    left.unlink()  # of a predecessor that was killed while it wrote
            files.write_whole(path, data.data)
        except Exception as error:  # of whatever kind: training is worth more
            self.report_failure(error)
            return
        self._failure = ""
        self._next = max(self._next, time.monotonic() + _SHARE * busy)
