"""The slot's own checkpoint: its inner optimizer's state in a file of its place, for when no peer has one.

Theory of operation
-------------------
Everything else that a newcomer needs the syncer has: parameters, outer state, data,
steps. The inner optimizer's state only learners have. A newcomer takes a healthy
peer's; when all learners died at once there is none, and the two moments of AdamW
would be gone with hundreds of steps of their averaging. So every learner writes its
state now and then (``spec.syncer.checkpoint.everySeconds``) to
``$DILOCO_WORKDIR/state/<region>-<ordinal>.safetensors``.

The training thread copies the state at a step boundary (``recovery.snapshot``); a
thread serialises the copy and replaces the file whole. One such write runs at a
time, and copying and serialising together may take a hundredth of the time at most:
where the state is large the next one waits longer. A write that fails costs the
newer state and nothing else; it is said once a minute.

The file names its job, its layout, the slot's step and the version vector
(``recovery.Origin``). Another job's is not used.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_protocol.common import files
from diloco_worker.sync.optimizer_state import Origin, StateRefused, origin_of

log = logging.getLogger(__name__)

SAY_AGAIN_SECONDS = 60.0
_SHARE = 100  # one part in so many of a learner's time, at most


class SlotCheckpoint:
    """The file of one place. ``path`` None: there is no working directory, and nothing is kept.

    ``limit``: bytes that a state of this model cannot exceed. All methods belong to the
    training thread."""

    def __init__(self, path: Path | None, job: str, layout_digest: str, every_seconds: float, limit: int) -> None:
        self._path = path
        self._job = job
        self._layout = layout_digest
        self._limit = limit
        self._every = every_seconds
        self._next = time.monotonic() + every_seconds
        self._writer: threading.Thread | None = None
        self._said = -SAY_AGAIN_SECONDS

    def origin(self, step: int, versions: Sequence[tuple[int, int]]) -> Origin:
        """What a state made now is called: slot step, and (epoch, version) per fragment."""
        return Origin(self._job, self._layout, step, tuple(versions))

    @property
    def due(self) -> bool:
        """Whether a copy shall be made at this step boundary."""
        if self._path is None or time.monotonic() < self._next:
            return False
        return self._writer is None or not self._writer.is_alive()

    def keep(self, encode: Callable[[], bytes], copy_seconds: float) -> None:
        """Write what ``encode`` makes, beside the training. ``copy_seconds``: what the copy took."""
        assert self._path is not None
        self._next = time.monotonic() + self._every
        self._writer = threading.Thread(
            target=self._write, args=(self._path, encode, copy_seconds), name="diloco-state", daemon=True
        )
        self._writer.start()

    def failed(self, why: object) -> None:
        """A checkpoint was not made; said once a minute."""
        self._next = time.monotonic() + self._every
        if time.monotonic() - self._said >= SAY_AGAIN_SECONDS:
            self._said = time.monotonic()
            log.warning("the slot's own checkpoint was not written, training goes on: %s", why)

    def close(self, timeout: float = 5.0) -> None:
        """Wait for a write that is under way; one that takes longer leaves the older file."""
        if self._writer is not None:
            self._writer.join(timeout)

    def load(self) -> tuple[bytes, Origin] | None:
        """The place's file and where it comes from; None (and a line in the log): there is none of use."""
        if self._path is None:
            return None
        try:
            data = files.read_bounded(self._path, self._limit)
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

    def _write(self, path: Path, encode: Callable[[], bytes], copy_seconds: float) -> None:
        started = time.monotonic()
        try:
            data = encode()
            busy = copy_seconds + time.monotonic() - started
            if len(data) > self._limit:
                raise files.TooLarge(f"{len(data)} bytes of state; at most {self._limit} would be read")
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f".{glob.escape(path.name)}.*{files.TEMPORARY}"):
                with contextlib.suppress(FileNotFoundError):
                    left.unlink()  # of a predecessor that was killed while it wrote
            files.write_whole(path, data)
        except Exception as error:  # of whatever kind: training is worth more
            self.failed(error)
            return
        self._next = max(self._next, time.monotonic() + _SHARE * busy)
