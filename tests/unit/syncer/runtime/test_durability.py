"""How long the durability waits for a store that fails."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from diloco_syncer.runtime import durability
from diloco_syncer.runtime.durability import Durability, Snapshot
from diloco_syncer.store.checkpoint import Checkpoints
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch
from diloco_syncer.store.tape import Tape


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Durability:
    """A durability that gives up after 0.3 seconds."""
    monkeypatch.setattr(durability, "PATIENCE", 0.3)
    store = DirectoryStore(tmp_path)
    checkpoints = Checkpoints(store, Epoch.claim(store), "job", 1)
    return Durability(checkpoints, Tape(store), lambda: Snapshot(0, {}, []), lambda problem: None)


async def test_a_long_try_that_fails_is_tried_again(waiting: Durability) -> None:
    tries = 0

    def write() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            time.sleep(0.5)  # longer than the patience
            raise OSError(errno.EIO, "broke off")
        return "written"

    assert await waiting.run_write(write) == "written"
    assert tries == 2 and not waiting.problem


async def test_what_fails_all_the_time_ends(waiting: Durability) -> None:
    tries = 0

    def write() -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        await waiting.run_write(write)
    assert tries > 1
