from __future__ import annotations

import pytest

from diloco_syncer.core.books.shares import normalised_weights


def test_tokens_quality_is_quantity_times_quality() -> None:
    """Twice the tokens in the same steps weigh four times; in twice the steps, twice."""
    assert normalised_weights("tokens-quality", [10, 20], [1, 1]) == pytest.approx([1 / 5, 4 / 5])
    assert normalised_weights("tokens-quality", [10, 20], [1, 2]) == pytest.approx([1 / 3, 2 / 3])


def test_other_kinds() -> None:
    assert normalised_weights("tokens", [10, 30], [1, 9]) == pytest.approx([0.25, 0.75])
    assert normalised_weights("uniform", [10, 30], [1, 9]) == [0.5, 0.5]


def test_zero_steps_weigh_nothing() -> None:
    for kind in ("tokens-quality", "tokens", "uniform"):
        assert normalised_weights(kind, [0, 5], [0, 5]) == [0.0, 1.0]
        with pytest.raises(ValueError, match="no push"):
            normalised_weights(kind, [0], [0])
    with pytest.raises(ValueError, match="'x' is none of"):
        normalised_weights("x", [1], [1])
