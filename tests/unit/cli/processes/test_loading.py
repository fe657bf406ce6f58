"""A slow import is waited for and told of; one that stands still is given up."""

from __future__ import annotations

import os

import pytest

from diloco.processes.loading import SILENT_SECONDS, TOLD_SECONDS, LoadWatch, cpu_seconds


@pytest.mark.promise("An import that takes minutes is waited for while it makes progress, with a line each 15 s")
def test_a_slow_import_is_waited_for_as_long_as_it_moves() -> None:
    watch, now = LoadWatch("loading torch", 1000.0), 1000.0
    for figure in range(40):  # an hour and a half, from a network disk
        now += SILENT_SECONDS - 1
        assert not watch.is_stuck(now, figure)
    assert not watch.is_stuck(now + SILENT_SECONDS, 39)
    assert watch.is_stuck(now + SILENT_SECONDS + 1, 39)


def test_a_line_comes_each_quarter_of_a_minute() -> None:
    watch = LoadWatch("loading torch", 1000.0)
    assert watch.news(1000.0 + TOLD_SECONDS - 0.1, 9.0) == ""
    assert watch.news(1000.0 + TOLD_SECONDS, 9.0) == "still loading torch: 15 s, 9.0 s of it processor time"
    assert watch.news(1020.0, 9.0) == ""
    assert watch.news(1045.0, 31.0) == "still loading torch: 45 s, 31 s of it processor time"


def test_processor_time_is_read() -> None:
    assert cpu_seconds(os.getpid()) > 0.0 == cpu_seconds(1 << 22)
