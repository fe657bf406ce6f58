"""The bandwidth that a job needs: the published figures, the queued model's own laws, measured links."""

from __future__ import annotations

import math
import random

import pytest

from diloco_protocol.arrays import codec
from diloco_protocol.bandwidth import links, model
from diloco_protocol.bandwidth.links import Measured
from diloco_protocol.bandwidth.model import Turn
from diloco_protocol.common import format_units
from diloco_protocol.common.meter import Meter
from diloco_protocol.resources import even_sizes
from diloco_protocol.spec.sync import SyncSpec

PAPERS = Turn(fragments=24, every=24, overlap=2, step_seconds=1.0)


def all_reduced(learners: int, bits: float, seconds: float) -> float:
    """Bits per second and direction for fragments that are all-reduced, each in so many seconds, as the paper's
    are; of 5e9 parameters."""
    return model.rate(bits * 5e9 * model.all_reduce_factor(learners) / PAPERS.fragments, seconds)


# ------------------------------------------------------------------ the published figures


@pytest.mark.parametrize(
    ("reported", "formula", "needed"),
    [
        (198, 194.6, model.data_parallel(5e9, 8, 1.0, 0.95)),
        (0.84, 0.823, all_reduced(8, 4, model.formula_seconds(PAPERS, 0.95))),
        (104, 102.9, model.data_parallel(5e9, 2, 1.0, 0.90)),
        (1.7, 1.76, all_reduced(2, 16, model.formula_seconds(PAPERS, 0.90))),
    ],
)
def test_the_formula_gives_the_papers_figures(reported: float, formula: float, needed: float) -> None:
    assert float(f"{needed / 1e9:.4g}") == pytest.approx(formula, abs=0.005 if formula < 100 else 0.05)
    assert needed / 1e9 == pytest.approx(reported, rel=0.04)


def test_the_queue_needs_more_at_the_papers_point() -> None:
    needed = all_reduced(8, 4, model.queued_seconds(PAPERS, 0.95, 1.0, 0.0)) / 1e9
    assert f"{needed:.2f}" == "1.40"
    # What no queue can be below: a fragment must be through before the next one begins.
    assert needed > 4 * 5e9 * 1.75 / 24 / (1 / 0.95) / 1e9 > 1.38


def test_the_ratios_of_bytes() -> None:
    """67 times fewer per learner link than bfloat16 all-reduce with int4 up and bfloat16 down, 168 with
    int4 both ways: without the scales of the codec's blocks, and a little less with them."""
    all_reduce = 2 * 2 * model.all_reduce_factor(8)  # bytes per parameter and step, both ways
    assert all_reduce / ((0.5 + 2) / 24) == pytest.approx(67.2)
    assert all_reduce / ((0.5 + 0.5) / 24) == pytest.approx(168)
    sizes = even_sizes(5_000_000_000, 24)
    for down, ratio in (("bfloat16", 66.78), ("delta-int4", 162.9)):
        carried = links.traffic(sizes, "int4", down, 8)
        per_step = (carried.up_per_turn + carried.down_per_turn) / 24
        assert all_reduce * 5e9 / per_step == pytest.approx(ratio, rel=1e-3)


# ------------------------------------------------------------------ the queue


def plain_utilisation(turn: Turn, steps: int, up: float, down: float) -> float:
    """The same run step by step, written down as plainly as can be."""
    launches = sorted(
        math.ceil(n * turn.every / turn.fragments - 1e-9) for n in range(1, steps // turn.every * turn.fragments + 1)
    )
    now, busy_up, busy_down, due = 0.0, 0.0, 0.0, dict[int, float]()
    for step in range(1, steps + 1):
        now += turn.step_seconds
        now = max(now, due.pop(step, 0.0))
        for _ in range(launches.count(step)):
            busy_up = max(now, busy_up) + up
            busy_down = max(busy_up + turn.between_seconds, busy_down) + down
            due[step + turn.overlap] = busy_down
            now = max(now, due.pop(step, 0.0))  # where nothing overlaps
    return steps * turn.step_seconds / max(now, busy_down)


def test_the_run_is_as_if_gone_through_step_by_step() -> None:
    draw = random.Random(5)
    for _ in range(300):
        every = draw.randint(1, 40)
        turn = Turn(
            draw.randint(1, every),
            every,
            draw.randint(0, every - 1),
            draw.choice([0.05, 1.0, 3.0]),
            between_seconds=draw.choice([0.0, 0.3]),
        )
        up, down = draw.random() * 4 * turn.step_seconds, draw.random() * 4 * turn.step_seconds
        steps = every * draw.randint(1, 4)
        found = model.utilisation(turn, steps, up, down)
        assert found == pytest.approx(plain_utilisation(turn, steps, up, down), rel=1e-9), turn


@pytest.mark.parametrize("utilisation", [0.8, 0.9, 0.95, 0.98])
@pytest.mark.parametrize(
    ("fragments", "every", "overlap"), [(24, 24, 2), (12, 24, 2), (24, 96, 4), (24, 24, 20), (5, 25, 6)]
)
def test_the_long_run_is_the_closed_limit(fragments: int, every: int, overlap: int, utilisation: float) -> None:
    turn = Turn(fragments, every, overlap, 1.0)
    limit = turn.steady(utilisation)
    steps = 200 * every
    assert model.utilisation(turn, steps, 0.99 * limit, 0.99 * limit) > utilisation - 0.002
    assert model.utilisation(turn, steps, 1.05 * limit, 1.05 * limit) < utilisation


def test_more_overlap_asks_for_less_and_more_utilisation_for_more() -> None:
    needed = [1 / model.queued_seconds(Turn(1, 24, overlap, 1.0), 0.95, 0.5, 0.5) for overlap in (0, 1, 2, 8)]
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == 4
    needed = [1 / model.queued_seconds(PAPERS, c, 0.5, 0.5) for c in (0.5, 0.9, 0.95, 0.99)]
    assert needed == sorted(needed) and len(set(needed)) == 4


def test_no_job_takes_long_to_plan() -> None:
    for turn in (Turn(4096, 1_000_000, 100_000, 1.0), Turn(1, 1_000_000, 999_999, 1.0), Turn(512, 512, 500, 1.0)):
        steps = model.run_steps(turn, 0.999)
        assert steps % turn.every == 0 and steps * turn.fragments // turn.every <= 2 * 4096
        assert 0 < model.queued_seconds(turn, 0.999, 0.5, 0.5) < math.inf


def test_round_trips_take_from_the_window_until_nothing_is_left() -> None:
    sizes = even_sizes(10**9, 24)
    carried, sync = links.traffic(sizes, "int4", "bfloat16", 4), SyncSpec()
    near = links.need_by_queue(carried, links.turn(sync, 24, 1.0, 0.0))
    far = links.need_by_queue(carried, links.turn(sync, 24, 1.0, 0.4))
    beyond = links.need_by_queue(carried, links.turn(sync, 24, 1.0, 2.0))
    assert near.down < far.down < beyond.down == math.inf
    assert links.need_by_formula(carried, links.turn(sync, 24, 1.0, 2.0)).up == math.inf
    assert format_units.bits_text(beyond.down) == "none is enough"


def test_needs_of_both_directions_go_with_their_bytes() -> None:
    carried = links.traffic(even_sizes(5 * 10**9, 24), "int4", "bfloat16", 8)
    for need in (links.need_by_formula(carried, PAPERS), links.need_by_queue(carried, PAPERS)):
        assert need.down / need.up == pytest.approx(carried.down / carried.up, rel=1e-3)
        assert 0.499 * (need.up + need.down) <= need.same <= need.up + need.down


def test_traffic_counts_what_the_codec_makes() -> None:
    sizes = [1000, 1003]
    for up in links.UP:
        for down in links.DOWN:
            carried = links.traffic(sizes, up, down, 3)
            payload = codec.encoded_bytes(up, 1003)
            assert payload < carried.up < payload + 700
            assert carried.up_per_turn == 2 * carried.up - payload + codec.encoded_bytes(up, 1000)
            assert codec.encoded_bytes(down.removeprefix("delta-"), 1003) < carried.down
    assert even_sizes(10, 4) == [2, 3, 2, 3] and sum(even_sizes(5_000_000_001, 24)) == 5_000_000_001


# ------------------------------------------------------------------ measured links


def test_a_meter_counts_the_time_in_which_something_moves() -> None:
    meter = Meter()
    assert meter.rate is None
    for start in (0.0, 100.0, 200.0):  # what lies between does not count
        meter.begin(start)
        meter.begin(start + 1.0)  # two at once share the link
        meter.end(start + 2.0, 300)
        meter.end(start + 4.0, 100)
    assert meter.rate == pytest.approx(100.0, rel=0.05) and meter.transfers == 6


def test_a_broken_transfer_says_nothing_and_old_ones_fade() -> None:
    meter = Meter()
    meter.begin(0.0)
    meter.end(1.0, 1000)
    meter.begin(2.0)
    meter.end(90.0, None)
    assert meter.rate == pytest.approx(1000.0)
    for n in range(60):
        meter.begin(100.0 + n)
        meter.end(100.5 + n, 50)
    assert meter.rate == pytest.approx(100.0, rel=0.01)


def verdict(rate: float, round_trip: float = 0.02, step: float = 1.0) -> links.Verdict:
    """Of a symmetric link of so many times the bytes per second that the job needs down."""
    carried = links.traffic(even_sizes(10**8, 24), "int4", "bfloat16", 4)
    needed = links.judge(carried, SyncSpec(), 24, step, measured=Measured()).down
    assert needed is not None
    return links.judge(carried, SyncSpec(), 24, step, measured=Measured(rate * needed, rate * needed, round_trip))


def test_a_link_is_slow_below_what_the_job_needs() -> None:
    assert not verdict(1.2).too_slow and verdict(1.2).message == ""
    slow = verdict(0.5)
    assert slow.too_slow and "about 48% of their pace" in slow.message
    assert "measured up" in slow.message and "needs up" in slow.message and "sync.compression" in slow.message
    # The same link is fast enough where steps take longer, and too slow where they are shorter.
    carried = links.traffic(even_sizes(10**8, 24), "int4", "bfloat16", 4)
    measured = Measured(10e6, 10e6, 0.0)
    judged = {
        step: links.judge(carried, SyncSpec(), 24, step, measured=measured).too_slow for step in (0.1, 0.5, 2.0, 10.0)
    }
    assert judged == {0.1: True, 0.5: True, 2.0: False, 10.0: False}


def test_an_exchange_longer_than_its_overlap_comes_late() -> None:
    """Each way has room in the two steps until the next; both together have not."""
    sync = SyncSpec(fragments=12, every=24)
    carried = links.traffic(even_sizes(10**8, 12), "int4", "bfloat16", 4)
    late = links.judge(carried, sync, 12, 1.0, measured=Measured(carried.up / 0.5, carried.down / 1.9))
    assert late.too_slow and "longer than the 2 steps that it overlaps: merges come late" in late.message
    assert not links.judge(carried, sync, 12, 1.0, measured=Measured(carried.up / 0.5, carried.down / 1.5)).too_slow


def test_a_busy_machine_is_not_called_a_slow_link() -> None:
    """Steps of 10 ms on a loaded machine: an exchange of 40 ms waits for processors."""
    carried = links.traffic(even_sizes(200_000, 4), "int4", "bfloat16", 2)
    sync = SyncSpec(fragments=4, every=4)
    assert not links.judge(carried, sync, 4, 0.01, measured=Measured(carried.up / 0.01, carried.down / 0.03)).too_slow
    assert links.judge(carried, sync, 4, 0.01, measured=Measured(carried.up / 0.02, carried.down / 0.06)).too_slow


def test_a_far_link_is_not_called_slow() -> None:
    assert not verdict(50.0, round_trip=2.0).too_slow


def test_nothing_is_judged_before_anything_is_known() -> None:
    carried = links.traffic(even_sizes(10**8, 24), "int4", "bfloat16", 4)
    assert links.judge(carried, SyncSpec(), 24, 0.0, measured=Measured(1.0, 1.0)) == links.Verdict()
    unmeasured = links.judge(carried, SyncSpec(), 24, 1.0, measured=Measured())
    assert not unmeasured.too_slow and unmeasured.up is not None


def test_texts() -> None:
    assert format_units.bits_text(1.4e9) == "1.4 Gbit/s" and format_units.rate_text(125_000) == "1 Mbit/s"
    assert format_units.size_text(999.9e6) == "1 GB" and format_units.seconds_text(0.0123) == "12.3 ms"
    lengths = {0.04: "0.0 s", 9.94: "9.9 s", 54.4: "54 s", 60: "1 min", 200: "3 min 20 s", 7500: "2 h 5 min"}
    lengths |= {86_399: "23 h 59 min", 86_400: "1 d", 100_000: "1 d 3 h"}
    assert {seconds: format_units.duration_text(seconds) for seconds in lengths} == lengths


def test_what_a_broken_transfer_took_says_nothing_of_the_link() -> None:
    meter = Meter()
    meter.begin(0.0)
    meter.end(5.0, None)
    meter.begin(5.0)
    meter.end(6.0, 100)
    assert meter.rate == 100.0
