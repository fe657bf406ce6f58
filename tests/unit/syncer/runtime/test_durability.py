"""How long the engine waits for a store that fails."""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco_syncer.runtime import driver
from diloco_syncer.runtime.driver import Engine


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine of which only the store's thread is there."""
    made = Engine.__new__(Engine)
    made._store_thread = made._merge_thread = ThreadPoolExecutor(1)
    made.problem = ""
    monkeypatch.setattr(Engine, "_tell_problem", lambda self, problem: setattr(self, "problem", problem))
    monkeypatch.setattr(driver, "PATIENCE", 0.3)
    return made


async def test_a_long_try_that_fails_is_tried_again(waiting: Engine) -> None:
    tries = 0

    def write() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            time.sleep(0.5)  # longer than the patience
            raise OSError(errno.EIO, "broke off")
        return "written"

    assert await waiting.durably(write) == "written"
    assert tries == 2 and not waiting.problem


async def test_what_fails_all_the_time_ends(waiting: Engine) -> None:
    tries = 0

    def write() -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        await waiting.durably(write)
    assert tries > 1
