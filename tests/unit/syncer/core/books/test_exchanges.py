"""How many rounds may be open: by exchanges whose times are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_syncer.core.books.exchanges import FIRST_PATIENCE, ExchangeLimit

WAY = 16.0  # seconds


def long_way(under_way: int) -> float:
    """An exchange takes as long among many as alone."""
    return WAY


def narrow_link(under_way: int) -> float:
    """Each waits for those before it."""
    return WAY / 2 * under_way


def go_on(limit: ExchangeLimit, seconds: Callable[[int], float], exchanges: int, hindered: bool = True) -> list[int]:
    """So many exchanges under the limit of the moment; the limits after each."""
    found = []
    for number in range(limit._first_round, limit._first_round + exchanges):
        limit.hindered = hindered
        limit.record(number, limit.value, seconds(limit.value), next_round=number + 1)
        found.append(limit.value)
    return found


@pytest.mark.promise(
    "Where exchanges are long because the way is, as many rounds are open as the links have room for; where they are "
    "long because a link is full, no more"
)
def test_the_limit_rises_while_merges_come_faster_for_it() -> None:
    limit = ExchangeLimit(2, 24)
    assert list(dict.fromkeys(go_on(limit, long_way, 40))) == [2, 4, 8, 16, 24]
    assert go_on(limit, long_way, 100)[-1] == 24
    limit = ExchangeLimit(2, 24)
    found = go_on(limit, narrow_link, 2 + FIRST_PATIENCE)
    assert found[:4] == [2, 4, 4, 2] and set(found[4:]) == {2}, "it is tried once"
    assert 4 in go_on(limit, narrow_link, 10), "and again after a while"
    assert limit.value == 2


def test_a_limit_that_keeps_no_round_from_opening_is_not_raised() -> None:
    assert set(go_on(ExchangeLimit(2, 24), long_way, 40, hindered=False)) == {2}


def test_the_limit_falls_where_a_link_has_become_narrow() -> None:
    limit = ExchangeLimit(2, 24)
    go_on(limit, long_way, 60)
    assert limit.value == 24
    go_on(limit, narrow_link, 4000)
    assert limit.value <= 4


def test_the_limit_stays_within_its_bounds() -> None:
    assert set(go_on(ExchangeLimit(3, 1), long_way, 50)) == {3}
    assert max(go_on(ExchangeLimit(1, 5), long_way, 50)) == 5
