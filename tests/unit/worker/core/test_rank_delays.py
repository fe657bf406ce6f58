"""Which rank the others wait for, of what ranks have said: no processes."""

from __future__ import annotations

import pytest

from diloco_worker.core.rank_delays import STEPS, RankDelays, RankSign, describe_hang

JOIN = RankSign(7, True, "ranks.py:1 (_call)")
BACKWARD = RankSign(7, False, "graph.py:865 (_engine_run_backward)")
LOADING = RankSign(7, False, "prefetch.py:9 (pop)")


def test_who_waits_least_is_the_slowest() -> None:
    delays = RankDelays(3)
    assert delays.slowest == (0, 0.0)
    for _ in range(20 * STEPS):
        delays.add_step([0.5, 0.4, 0.1])
    rank, seconds = delays.slowest
    assert rank == 2 and seconds == pytest.approx(0.4)
    for _ in range(2 * STEPS):  # it is another's turn
        delays.add_step([0.5, 0.0, 0.5])
    assert delays.slowest[0] == 1


def test_one_late_step_is_no_slow_rank() -> None:
    delays = RankDelays(2)
    delays.add_step([0.0, 1.6])
    assert delays.slowest == (0, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ([JOIN, None, JOIN], "rank 1 of this learner gives no sign"),
        ([JOIN, BACKWARD, JOIN], "the others wait for rank 1: rank 0, 2 at ranks.py:1 (_call); rank 1 at graph.py:865"),
        ([JOIN, LOADING], "the others wait for rank 1: "),
        ([BACKWARD, BACKWARD, LOADING], "the others wait for rank 2: rank 0, 1 at graph.py:865"),
        ([BACKWARD, RankSign(6, True, "ranks.py:1 (_call)")], "the others wait for rank 1: "),
        ([BACKWARD, LOADING], "no rank is known to be behind: rank 0 at graph.py:865"),
        ([BACKWARD, BACKWARD, BACKWARD], "no rank is known to be behind: rank 0, 1, 2 at graph.py:865"),
    ],
)
def test_a_hang_names_the_rank_that_is_waited_for(signs: list[RankSign | None], words: str) -> None:
    assert describe_hang(dict(enumerate(signs))).startswith(words)
