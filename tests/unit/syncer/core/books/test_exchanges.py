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


def go_on(
    limit: ExchangeLimit, seconds: Callable[[int], float], exchanges: int, hindered: bool = True, apart: float = WAY / 2
) -> list[int]:
    """So many exchanges under the limit of the moment, which begin ``apart``; the limits after each."""
    found = []
    for number in range(limit._first_round, limit._first_round + exchanges):
        limit.hindered, began = hindered, limit._last[0] + apart if limit._last[0] >= 0 else 0.0
        took = seconds(limit.value)
        limit.record(number, limit.value, began, ended=began + took, next_round=number + 1)
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


@pytest.mark.promise("The first two exchanges over a long way say how many there is room for")
def test_the_limit_is_raised_at_once_to_what_fits_into_an_exchange() -> None:
    """Two that begin a second apart end a second apart where the way is long, and further apart on a narrow link."""
    limit = ExchangeLimit(2, 24)
    assert go_on(limit, long_way, 30, apart=1.0)[:2] == [2, 16]
    assert limit.value == 24, "a limit that keeps rounds from opening still is raised further"
    limit = ExchangeLimit(2, 24)
    limit.hindered = True
    limit.record(1, 2, 0.0, ended=WAY, next_round=3)
    limit.record(2, 2, 1.0, ended=1.5 * WAY, next_round=3)  # behind the first, which it waited for
    assert limit.value == 4, "twice as many are tried, and not the 16 of the beginnings"


def test_a_trial_is_over_when_the_raised_limit_keeps_a_round_from_opening() -> None:
    """As long as it keeps none, nothing is said of what it holds: a link that is nearly full fills up slowly."""
    limit = ExchangeLimit(2, 24)
    assert go_on(limit, long_way, 2)[-1] == 4
    assert set(go_on(limit, long_way, 50, hindered=False)) == {4}
    assert go_on(limit, narrow_link, 2)[-1] == 2


def test_a_raise_stays_where_exchanges_take_no_longer_or_merges_come_faster() -> None:
    def raised(seconds: float, among: int) -> int:
        """The limit after a trial of 4, whose exchanges took so long beside the 16 s of two."""
        limit = ExchangeLimit(2, 4)
        go_on(limit, long_way, 2)
        for number in (2, 3):
            limit.hindered = True
            limit.record(number, among, 20.0 * number, ended=20.0 * number + seconds, next_round=4)
        return limit.value

    assert raised(17.0, among=2) == 4, "as long"
    assert raised(18.0, among=2) == 2, "longer, and no more at once"
    assert raised(22.0, among=4) == 4, "1.45 times as many merges"
    assert raised(24.0, among=4) == 2, "1.33 times"
    limit = ExchangeLimit(2, 24)
    go_on(limit, long_way, 2, apart=1.0)
    assert limit.value == 16, "three doublings"
    go_on(limit, lambda under_way: 4 * WAY, 8, apart=1.0)
    assert limit.value == 2, "twice as many merges, and 1.4 times 1.4 times 1.4 are 2.7"


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
