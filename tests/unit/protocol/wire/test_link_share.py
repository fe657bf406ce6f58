"""Which newcomers' bytes go beside those of rounds."""

from __future__ import annotations

import asyncio

import pytest

from diloco_protocol.wire.link_share import (
    ALIVE_BYTES,
    ALIVE_SECONDS,
    MOST_AHEAD,
    MOST_AT_ONCE,
    SHARE,
    SLOW_SECONDS,
    LinkPart,
    SharedLink,
)
from operator_simulation import virtual_time

PIECE = 256 << 10


def begin_part(link: SharedLink, age: int = -1, now: float = 0.0) -> LinkPart:
    part = LinkPart(age, now, PIECE)
    link.parts[part] = None
    return part


def move_bytes(link: SharedLink, of_round: LinkPart, count: int) -> None:
    of_round.wanted = count
    assert link.take_turn(of_round, 0.0)


def test_newcomers_have_their_share_of_what_rounds_move_and_all_that_rounds_leave() -> None:
    link = SharedLink()
    newcomer = begin_part(link, 1)
    assert all(link.take_turn(newcomer, 0.0) for _ in range(1000)), "no round is under way"
    of_round = begin_part(link)
    assert not link.take_turn(newcomer, 0.0)
    move_bytes(link, of_round, int(MOST_AHEAD / SHARE))  # what was too much is made good first, and is bounded
    assert not link.take_turn(newcomer, 0.0)
    moved = 0
    for _ in range(1600):
        move_bytes(link, of_round, PIECE)
        moved += PIECE * link.take_turn(newcomer, 0.0)
    assert moved == pytest.approx(1600 * PIECE * SHARE, rel=0.02)
    link.end_part(of_round, 1.0)
    assert link.take_turn(newcomer, 1.0)


def test_a_share_that_nobody_took_is_kept_within_a_bound() -> None:
    link = SharedLink()
    move_bytes(link, begin_part(link), 1 << 40)
    newcomer = begin_part(link, 1)
    taken = 0
    while link.take_turn(newcomer, 0.0):
        taken += PIECE
    assert taken == MOST_AHEAD


def test_so_many_parts_of_newcomers_go_at_a_time_those_of_the_oldest() -> None:
    link = SharedLink()
    young = begin_part(link, 9, 100.0)
    old = [begin_part(link, 1 + n // 4, 100.0) for n in range(MOST_AT_ONCE)]
    assert not link.take_turn(young, 100.0)
    assert all(link.take_turn(part, 100.0) for part in old)
    assert not link.take_turn(young, 100.0)
    old[5].begun -= SLOW_SECONDS  # its reader's own link is slow
    assert link.take_turn(young, 100.0)
    old[5].begun = 100.0
    assert not link.take_turn(young, 100.0)
    link.end_part(old[0], 100.0)
    assert link.take_turn(young, 100.0)


def test_a_round_whose_reader_is_slow_does_not_hold_newcomers_up() -> None:
    """The others take 20 s for a part: this one may take four times as long before it counts no more."""
    link = SharedLink()
    newcomer = begin_part(link, 1)
    link.end_part(begin_part(link), 20.0)
    slow = begin_part(link, now=100.0)
    assert not link.take_turn(newcomer, 179.0)
    assert link.take_turn(newcomer, 180.0)
    link.end_part(slow, 1000.0)
    begin_part(link, now=2000.0)
    assert not link.take_turn(newcomer, 2080.0), "what is usual has grown by a tenth"
    assert link.take_turn(newcomer, 2090.0)


def test_whoever_waits_has_a_few_bytes_now_and_then_and_the_oldest_goes_first() -> None:
    async def test() -> None:
        link, loop = SharedLink(), asyncio.get_running_loop()
        with link.carry_part() as of_round, link.carry_part(2) as young, link.carry_part(1) as old:
            assert await link.await_turn(of_round, 1) == 1
            assert await link.await_turn(young, PIECE) == PIECE, "there is credit for a byte"
            assert await link.await_turn(young, PIECE) == ALIVE_BYTES and loop.time() == ALIVE_SECONDS
            waiting = [asyncio.ensure_future(link.await_turn(part, PIECE)) for part in (young, old)]
            await asyncio.sleep(0)
            await link.await_turn(of_round, int((PIECE + 1) / SHARE))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert [one.done() for one in waiting] == [False, True] and loop.time() == ALIVE_SECONDS
        for one in waiting:
            one.cancel()

    virtual_time.run(test())


def test_a_round_that_ends_lets_newcomers_go() -> None:
    async def test() -> None:
        link, loop = SharedLink(), asyncio.get_running_loop()
        with link.carry_part(1) as newcomer:
            with link.carry_part():
                waiting = asyncio.ensure_future(link.await_turn(newcomer, PIECE))
                await asyncio.sleep(1.0)
                assert not waiting.done()
            assert await waiting == PIECE and loop.time() == 1.0

    virtual_time.run(test())
