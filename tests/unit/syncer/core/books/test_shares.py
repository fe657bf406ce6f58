"""What one learner's work counts for, at the bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from diloco_protocol.wire.records import PushHeader, StepReport
from diloco_syncer.core.books.shares import MOST, Work, bound_steps, bound_tokens, most_beside, work_of
from diloco_syncer.core.books.slots import TURNS_AHEAD, Slot

HEADER = PushHeader(
    0,
    0,
    1,
    1,
    base_version=0,
    oldest_version=0,
    first_step=1,
    last_step=3,
    steps=3,
    tokens=48,
    compute_seconds=0.1,
    encoding="int4",
    layout_digest="",
    report=StepReport(),
    slot=0,
    incarnation=1,
)


def test_tokens_a_step_count_up_to_a_few_times_the_second_most() -> None:
    honest = [Work(16 * 24, 24), Work(16 * 12, 12)]
    assert bound_tokens([*honest, Work(64 * 24, 24)]) == [16 * 24, 16 * 12, 64 * 24], "in bounds, and as it was"
    assert bound_tokens([*honest, Work(65 * 24, 24)]) == [16 * 24, 16 * 12, MOST * 16 * 24]
    assert bound_tokens([*honest, Work(1, 24)]) == [16 * 24, 16 * 12, 1], "too few take nothing from the others"
    assert bound_tokens([Work(10, 1), Work(10_000, 0), Work(0, 5)]) == [10, 0, 0]
    assert bound_tokens([Work(1 << 40, 1)]) == [1 << 40], "who is alone is compared with nobody"


def test_tokens_a_step_count_up_to_a_few_times_the_learners_own_mean() -> None:
    other = Work(16 * 24, 24)
    assert bound_tokens([other, Work(60 * 24, 24, usual=15.0)]) == [16 * 24, 60 * 24], "in bounds, and as it was"
    assert bound_tokens([other, Work(60 * 24, 24, usual=10.0)]) == [16 * 24, MOST * 10 * 24]
    told = replace(HEADER, report=StepReport(trained_steps=100, trained_tokens=1600))
    assert work_of(told, 2) == Work(48, 3, 2, usual=16.0)
    assert work_of(HEADER, 2).usual == math.inf, "nothing is known of it"


def test_sequences_are_compared_with_those_of_the_other_learner_that_reads_most() -> None:
    assert most_beside([Work(0, 5), Work(7, 0)]) == math.inf, "nobody else has read"
    assert most_beside([Work(240, 24, batch=8), Work(24, 24, batch=8)]) == MOST * 1.25
    assert most_beside([Work(1, 24, batch=8)]) == MOST, "the job's own batch is never too much"


def test_batches_that_the_job_gives_are_no_lie() -> None:
    assert bound_tokens([Work(100, 1, batch=1), Work(6400, 1, batch=64)]) == [100, 6400]
    assert bound_tokens([Work(100, 1, batch=1), Work(100 * 64 * 5, 1, batch=64)]) == [100, MOST * 100 * 64]
    assert bound_tokens([Work(6400, 1, batch=64)] * 2 + [Work(500, 1)]) == [6400, 6400, MOST * 100]


def test_a_pushs_steps_count_up_to_those_made_alone_or_a_few_times_the_second_most() -> None:
    assert bound_steps([24, 96], 96) == [24, 96]
    assert bound_steps([24, 97], 96) == [24, 96]
    assert bound_steps([30, 130], 96) == [30, 120]
    assert bound_steps([500], 96) == [500]


@pytest.mark.parametrize("fragments", [1, 3])
def test_steps_count_while_few_of_them_are_unmerged(fragments: int) -> None:
    slot, alone = Slot(0), 10
    slot.advance(TURNS_AHEAD * alone, fragments, alone)
    assert slot.counted_step == 40
    slot.advance(45, fragments, alone)
    assert (slot.step, slot.counted_step) == (45, 40)
    for fragment in range(fragments):
        slot.mark_merged(fragment, 8, alone)
        slot.mark_merged(fragment, 8, alone)  # the same steps again
    slot.advance(60, fragments, alone)
    assert slot.counted_step == 48, "as many as were merged"
    slot.mark_merged(0, 60, alone)
    slot.advance(100, fragments, alone)
    assert slot.counted_step == 48 + alone // fragments, "one push makes good for so many at the most"
    again = Slot.from_json(0, slot.to_json(), 0.0)
    assert (again.counted_step, again.unmerged_parts) == (slot.counted_step, slot.unmerged_parts)
