"""Fifty worlds of each kind, ten by ten: what they find of faults that are planted is in tests/mutants/syncer.tsv.

Its mutants name the ten worlds in which they are found. So a simulation that loses its eye for a kind of fault is
noticed, as any test is that a mutant survives.
"""

from __future__ import annotations

import pytest

import worlds
from world_seeds import Case

QUICK = {
    ("core", "CHANGED"): {0, 10},
    ("core", "SLOW"): {0, 20},
    ("shell", "INTERRUPTED"): {0, 10},
    ("shell", "DAMAGED"): {10},
}


@pytest.mark.parametrize(
    ("simulation", "setting", "first"),
    [
        pytest.param(*kind, first, marks=[] if first in quick else [pytest.mark.slow])
        for kind, quick in QUICK.items()
        for first in range(0, 50, 10)
    ],
)
def test_ten_worlds(simulation: str, setting: str, first: int) -> None:
    for seed in range(first, first + 10):
        worlds.run_world(Case(simulation, setting, seed), None)
