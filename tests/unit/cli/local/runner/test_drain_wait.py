"""After Ctrl-C a drain is waited for as long as something of it changes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.local.runner import run_end
from diloco.local.runner.run_end import DRAIN_SECONDS, MAX_DRAIN_SECONDS, RunEnd
from diloco.local.watch import StatusWatch
from status_documents import status_document


class DrainingJob:
    """A watch of a job whose drain changes every ``every`` seconds, ``changes`` times, and is over ``ends`` seconds
    after its beginning; with the clock that the runner reads."""

    def __init__(self, every: float, changes: float, ends: float) -> None:
        self.now = 100.0
        self._every, self._changes, self._ends = every, changes, ends

    @property
    def seconds(self) -> float:
        return self.now - 100.0

    @property
    def drain_progress(self) -> object:
        return min(self.seconds // self._every, self._changes)

    @property
    def is_over(self) -> bool:
        return self.seconds >= self._ends

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("every", "changes", "ends", "waited"),
    [
        (9.0, 20, 170.0, 170.0),  # slow, and it comes to its end
        (9.0, 5, 1000.0, 5 * 9.0 + DRAIN_SECONDS),  # then nothing more changes
        (1.0, 0, 1000.0, DRAIN_SECONDS),  # nothing ever does
        (1.0, 1e9, 1e9, MAX_DRAIN_SECONDS),  # without end
    ],
)
async def test_a_drain_is_waited_for_while_it_progresses(
    monkeypatch: pytest.MonkeyPatch, every: float, changes: float, ends: float, waited: float
) -> None:
    job = DrainingJob(every, changes, ends)
    monkeypatch.setattr(run_end, "time", job)
    monkeypatch.setattr(run_end, "asyncio", job)
    only_its_watch: Any = SimpleNamespace(watch=job)
    await RunEnd._wait_for_drain(only_its_watch)
    assert job.seconds == pytest.approx(waited, abs=0.5)


def test_a_drain_has_progressed_where_a_merge_or_a_phase_came() -> None:
    def progress(**changes: Any) -> object:
        watch: Any = SimpleNamespace(view=SimpleNamespace(status=status_document(**changes)))
        return vars(StatusWatch)["drain_progress"].fget(watch)

    told = [progress(), progress(merges=1), progress(phase="evaluating")]
    assert all(one != other for one, other in itertools.combinations(told, 2))
    assert progress() == progress()
