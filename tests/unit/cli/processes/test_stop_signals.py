"""Which signals a command heeds, and what it says was the reason."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from diloco.processes.stop_signals import STOP_SIGNALS, heeded_signals, stop_reason


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.promise("What nohup or a shell's background has ignored stays ignored: a run outlives its terminal")
@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_stays_ignored(ignored: signal.Signals, handlers: None) -> None:
    assert heeded_signals() == list(STOP_SIGNALS)
    signal.signal(ignored, signal.SIG_IGN)
    assert heeded_signals() == [one for one in STOP_SIGNALS if one is not ignored]


def test_sigterm_is_always_heeded(handlers: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.SIGTERM in heeded_signals()


def test_a_hang_up_is_no_wish_of_the_users() -> None:
    assert stop_reason(signal.SIGHUP) == "the terminal was closed"
    assert stop_reason(signal.SIGINT) == stop_reason(signal.SIGTERM) == "stopped by the user"
