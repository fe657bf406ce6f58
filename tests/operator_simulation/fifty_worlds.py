"""Fifty worlds that every bug of the operator has to be found in which tests/mutants/operator.tsv plants for them.

`make test` does not collect this file, since its name is no test's. tools/mutants.py does, as the mutants name it:

    .venv/bin/python tools/mutants.py --own --only 'world-*'
"""

from __future__ import annotations

import pytest

from operator_simulation.random_faults import SETTINGS, run_random_faults


@pytest.mark.parametrize("seed", range(50))
def test_a_world(seed: int) -> None:
    run_random_faults(seed, **SETTINGS["LIVES"])


@pytest.mark.parametrize("seed", range(50))
def test_a_world_of_groups(seed: int) -> None:
    run_random_faults(seed, **SETTINGS["GROUPS"])
