"""A syncer that begins again from its store, and is told to stop meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from syncer_client import serve_in_process

from diloco_syncer import startup
from diloco_syncer.runtime.driver import RESTART
from diloco_syncer.syncer import Syncer

pytestmark = pytest.mark.timeout(180)


@pytest.mark.promise("A signal while a syncer begins again ends the process")
async def test_a_signal_in_the_teardown_of_a_life_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[Syncer] = []
    restore, close = startup.restore, Syncer.close

    def restored(options: startup.Options, loop: asyncio.AbstractEventLoop, *others: Any) -> Any:
        made = restore(options, loop, *others)
        lives.append(made[0])
        outcome = RESTART if len(lives) == 1 else 3
        loop.call_soon_threadsafe(loop.call_later, 0.1, made[0].driver.stop, outcome, "a test")
        return made

    async def signalled(syncer: Syncer, checkpoint: bool) -> None:
        if len(lives) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10):  # the loop hears of it
                await asyncio.sleep(0)
        await close(syncer, checkpoint)

    monkeypatch.setattr(startup, "restore", restored)
    monkeypatch.setattr(Syncer, "close", signalled)
    assert await serve_in_process(tmp_path / "store") == 0
    assert len(lives) == 1, "it began again"


async def test_a_syncer_that_begins_again_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[Syncer] = []
    restore = startup.restore

    def restored(options: startup.Options, loop: asyncio.AbstractEventLoop, *others: Any) -> Any:
        made = restore(options, loop, *others)
        lives.append(made[0])
        outcome = RESTART if len(lives) == 1 else 0
        loop.call_soon_threadsafe(loop.call_later, 0.5, made[0].driver.stop, outcome, "record 4 is damaged")
        return made

    monkeypatch.setattr(startup, "restore", restored)
    assert await serve_in_process(tmp_path / "store") == 0
    first, second = ([(row.kind, row.message) for row in life.event_log.events] for life in lives)
    said = ("syncer-restart", "the syncer began again: record 4 is damaged")
    assert said not in first and said in second
