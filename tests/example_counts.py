"""How many examples a property is tried with: a third in a quick run, all where the profile (conftest.py) says so."""

from __future__ import annotations

from hypothesis import settings

LEAST = 3


def share_of(full: int) -> int:
    """Of ``full`` examples those that the profile in use tries: its ``max_examples`` in a hundred."""
    return max(LEAST, full * settings().max_examples // 100)
