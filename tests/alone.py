"""Lets a test marked ``alone`` run while no other test does, also where pytest-xdist runs several at once.

Such a test measures time or floods a port: what runs beside it would change what it measures.
Others hold a lock together; it holds that lock by itself. Whoever waits for the lock
does so behind a second one, so that a test that wants to be alone gets its turn.
tests/conftest.py takes the hook.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent


@contextmanager
def _locked(folder: Path, how: int) -> Generator[None]:
    """An advisory lock on a folder, which leaves no file behind."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout begins to count
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as held:
        with _locked(_HERE / "unit", fcntl.LOCK_EX):
            held.enter_context(_locked(_HERE, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)
