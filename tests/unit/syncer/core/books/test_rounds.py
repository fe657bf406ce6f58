"""The opening rule, quorum and grace, against hand-computed cases and a brute-force reading."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol.wire.records import PushHeader, StepReport
from diloco_syncer.core.books.deterministic import DeterministicMode, Mode
from diloco_syncer.core.books.rounds import Accepted, MovingAverage, Progress, Round, RoundBook, RoundRules
from example_counts import share_of

T = TypeVar("T")
REPORT = StepReport(100, 100, 100, ())


def rules(**changes: object) -> RoundRules:
    values: dict[str, object] = {"every": 24, "overlap": 2, "quorum": 1, "grace_factor": 0.9, "grace_cap": 10.0}
    return RoundRules(**{**values, **changes})  # type: ignore[arg-type]


def push(slot: int, fragment: int = 0, round: int = 1, first: int = 1, last: int = 4, sequence: int = 1) -> Accepted:
    header = PushHeader(
        fragment,
        sequence,
        round,
        1,
        base_version=0,
        oldest_version=0,
        first_step=first,
        last_step=last,
        steps=last - first + 1,
        tokens=10,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=REPORT,
        slot=slot,
        incarnation=slot + 1,
    )
    return Accepted(header, handle=slot, norm=1.0)


def at(slot: int, step: int, versions: list[int]) -> Progress:
    return Progress(slot, step, tuple(versions))


def test_first_turn_is_staggered() -> None:
    """Fragment p opens first at (p+1)·H/P steps: one fragment per step at P = H."""
    book = RoundBook(24, rules(), Mode())
    book.begin_progress(0, 0)
    opened = []
    for step in range(1, 25):
        fragment = book.next_due([at(0, step, book.versions)])
        assert fragment is not None
        book.open_round(fragment, 0.0, [at(0, step, book.versions)])
        taken = book.open[fragment]
        book.accept(taken, push(0, fragment, taken.id, 1, last=step), 0.0)
        book.begin_merge(taken, 0.1)
        book.complete_merge(fragment, 1, 0.0, 0.0)
        opened.append(fragment)
    assert opened == list(range(24))


def test_period_counts_from_the_snapshot_not_the_adoption() -> None:
    book = RoundBook(1, rules(every=10), Mode())
    book.begin_progress(0, 0)
    book.open_round(0, 0.0, [at(0, 10, [0])])
    opened = book.open[0]
    book.accept(opened, push(0, 0, opened.id, 1, last=10), 0.0)
    book.begin_merge(opened, 0.1)
    book.complete_merge(0, 1, 0.0, 0.0)  # adopted at step 12, say
    assert book.next_due([at(0, 19, [1])]) is None
    assert book.next_due([at(0, 20, [1])]) == 0


@pytest.mark.promise("Over a long way snapshots of a fragment are H steps apart too, and not H and a round trip")
def test_a_round_opens_as_early_as_learners_answer_late() -> None:
    """Slot 0 has made 8 steps more than the syncer knew when it takes its snapshot, and slot 1 one."""

    def merged(book: RoundBook, step: int, late: tuple[int, ...], round: int | None = None) -> None:
        opened = book.open_round(0, 0.0, [at(slot, step, book.versions) for slot in range(2)])
        for slot, steps in enumerate(late):
            number = opened.id if round is None else round
            book.accept(opened, push(slot, 0, number, step, last=step + steps, sequence=opened.id), 0.0)
        book.begin_merge(opened, 0.1)
        book.complete_merge(0, opened.version + 1, 0.0, 0.0)

    def opens_after(book: RoundBook, slot: int) -> int:
        """Steps of the slot after its last snapshot."""
        known = range(book.marks[0][slot], book.marks[0][slot] + 50)
        return next(step for step in known if book.next_due([at(slot, step, book.versions)]) == 0) - known[0]

    book = RoundBook(1, rules(every=24), Mode())
    for slot in range(2):
        book.begin_progress(slot, 0)
    merged(book, 24, (8, 1))
    assert opens_after(book, 0) == 24 - 7, "the step that is being made ends before any answer"
    assert opens_after(book, 1) == 24
    merged(book, 60, (100, 1))  # a pull was lost
    assert opens_after(book, 0) == 24 - 7, "the median counts, the lesser of two"
    merged(book, 200, (20, 20), round=0)  # offers answer no pull
    assert opens_after(book, 0) == 24 - 7
    book.begin_progress(0, 300)
    book.steps_at_last_opening[0] = 0  # P = 1: nothing opens within H steps of the last opening
    assert opens_after(book, 0) == 24, "another process has another way"
    far = RoundBook(1, rules(every=24), Mode())
    merged(far, 24, (1000, 1))
    assert opens_after(far, 0) == 24 - 18, "what it says of its steps is not believed without end"
    many = RoundBook(1, rules(every=24), Mode())
    for turn in range(1, 20):
        merged(many, 200 * turn, (8 if turn < 15 else 3, 1))
    assert opens_after(many, 0) == 24 - 2, "the way has become shorter: old answers count no more"


def test_a_report_counts_only_on_the_current_version() -> None:
    book = RoundBook(1, rules(every=4), Mode())
    book.begin_progress(0, 0)
    book.versions[0] = 3
    assert book.next_due([at(0, 50, [2])]) is None
    assert book.next_due([at(0, 50, [3])]) == 0


def test_a_slot_left_out_of_a_merge_does_not_open_the_next_round() -> None:
    """Its old steps are above its base still, but its progress counts from the opening; and only once a push of it
    has come, or a turn of the usual pace is over."""
    book = RoundBook(1, rules(every=4, quorum=1), Mode())
    book.begin_progress(0, 0)
    book.begin_progress(1, 0)
    book.open_round(0, 0.0, [at(0, 4, [0]), at(1, 3, [0])])
    opened = book.open[0]
    book.accept(opened, push(0, 0, opened.id, 1, last=4), 0.0)
    book.begin_merge(opened, 0.1)
    book.complete_merge(0, 1, 0.0, 0.0)
    turn = 4 * 0.1
    assert book.next_due([at(0, 5, [1]), at(1, 6, [1])], turn) is None
    assert book.next_due([at(0, 5, [1]), at(1, 7, [1])], turn - 0.01) is None
    assert book.next_due([at(0, 5, [1]), at(1, 7, [1])], turn) == 0
    book.record_late(push(1, 0, opened.id, 1, last=3).header)
    assert book.next_due([at(0, 5, [1]), at(1, 7, [1])], 0.0) == 0


def test_whose_push_comes_while_its_round_is_merged_counts_at_once() -> None:
    book = RoundBook(1, rules(every=4), Mode())
    for slot in (0, 1):
        book.begin_progress(slot, 0)
    opened = book.open_round(0, 0.0, [at(0, 4, [0]), at(1, 3, [0])])
    book.accept(opened, push(0, 0, opened.id, 1, last=4), 0.0)
    book.begin_merge(opened, 0.1)
    book.record_late(push(1, 0, opened.id, 1, last=3).header)
    book.complete_merge(0, 1, 0.0, 0.0)
    assert book.next_due([at(0, 5, [1]), at(1, 7, [1])], 0.0) == 0


def test_a_new_process_counts_though_the_one_before_it_owed_a_push() -> None:
    book = RoundBook(1, rules(every=4), Mode())
    for slot in (0, 1):
        book.begin_progress(slot, 0)
    opened = book.open_round(0, 0.0, [at(0, 4, [0]), at(1, 3, [0])])
    book.accept(opened, push(0, 0, opened.id, 1, last=4), 0.0)
    book.begin_merge(opened, 0.1)
    book.complete_merge(0, 1, 0.0, 0.0)
    book.begin_progress(1, 3)
    assert book.next_due([at(0, 5, [1]), at(1, 7, [1])], 0.0) == 0


@pytest.mark.promise(
    "A round opens by the K-th fastest learner, the longest due first, within the bound of open rounds, in every turn"
)
@pytest.mark.parametrize(
    ("overlap", "fragments", "every", "limit"),
    [(2, 24, 24, 2), (0, 4, 8, 1), (5, 4, 10, 2), (3, 4, 8, 2), (1, 3, 7, 1), (5, 3, 7, 3)],
)
def test_open_rounds_are_bounded(overlap: int, fragments: int, every: int, limit: int) -> None:
    """The limit is τ·P/H, rounded up and at least 1, and no more are opened whatever is due."""
    book = RoundBook(fragments, rules(overlap=overlap, every=every), Mode())
    assert book.exchanges.value == limit
    for step in range(every, 5 * every):
        if (due := book.next_due([at(0, step, book.versions)])) is not None:
            book.open_round(due, 0.0, [at(0, step, book.versions)])
    assert len(book.open) == min(limit, fragments)


class Turn(NamedTuple):
    """A state of the rounds in the middle of a job; per fragment, or per learner."""

    every: int
    overlap: int
    quorum: int
    versions: list[int]
    open: list[int]  # fragments
    steps: list[int]  # slot steps
    openings: list[int]  # slot steps at the last opening of any round
    marks: list[list[int]]  # per fragment and learner
    current: list[list[bool]]  # whether the learner's base is the fragment's version


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Few steps around one period, so that learners are often at a bound, and often equal."""
    fragments, learners = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    every = draw(st.integers(2, 8))

    def each(count: int, values: st.SearchStrategy[T]) -> list[T]:
        return draw(st.lists(values, min_size=count, max_size=count))

    return Turn(
        every,
        draw(st.integers(0, 2 * every)),
        draw(st.integers(1, learners + 1)),
        each(fragments, st.integers(0, 1)),
        open=draw(st.lists(st.integers(0, fragments - 1), max_size=2, unique=True)),
        steps=each(learners, st.integers(every, 2 * every)),
        openings=each(learners, st.integers(0, every)),
        marks=[each(learners, st.integers(0, every)) for _ in range(fragments)],
        current=[each(learners, st.sampled_from([True, True, True, False])) for _ in range(fragments)],
    )


@pytest.mark.promise(
    "A round opens by the K-th fastest learner, the longest due first, within the bound of open rounds, in every turn"
)
@given(turns())
@settings(max_examples=share_of(200))
def test_opening_rule_against_a_plain_reading(turn: Turn) -> None:
    """K learners with H steps since their marks (first turn: (p+1)·H/P), all on the current base; the K-th fastest
    H/P since the last opening; fewer than the limit open, and not this one; the longest due first, ties by index."""
    fragments = len(turn.versions)
    book = RoundBook(fragments, rules(every=turn.every, overlap=turn.overlap, quorum=turn.quorum), Mode())
    book.versions = list(turn.versions)
    book.marks = [dict(enumerate(marks)) for marks in turn.marks]
    book.steps_at_last_opening = dict(enumerate(turn.openings))
    book.open = {fragment: Round(fragment, fragment, turn.versions[fragment], 0.0) for fragment in turn.open}
    learners = []
    for slot, step in enumerate(turn.steps):
        bases = [turn.versions[p] if turn.current[p][slot] else turn.versions[p] + 1 for p in range(fragments)]
        learners.append(at(slot, step, bases))

    def over(fragment: int) -> list[Fraction]:
        """By how many steps each learner is over what the fragment's round needs."""
        turns = Fraction(fragment + 1, fragments) if turn.versions[fragment] == 0 else Fraction(1)
        steps = zip(turn.steps, turn.marks[fragment], turn.current[fragment], strict=True)
        return [step - mark - turns * turn.every for step, mark, current in steps if current]

    def of_quorum(values: list[Fraction]) -> Fraction | None:
        """The most that K of them have."""
        return max((v for v in values if sum(other >= v for other in values) >= turn.quorum), default=None)

    expected = None
    openings = zip(turn.steps, turn.openings, strict=True)
    spread = [step - opening - Fraction(turn.every, fragments) for step, opening in openings]
    may_open = of_quorum(spread)
    if may_open is not None and may_open >= 0 and len(turn.open) < max(1, -(-turn.overlap * fragments // turn.every)):
        for fragment in range(fragments):
            due = of_quorum(over(fragment))
            longest = None if expected is None else of_quorum(over(expected))
            if fragment not in turn.open and due is not None and due >= 0 and (longest is None or due > longest):
                expected = fragment
    assert book.next_due(learners) == expected


def test_the_kth_fastest_decides_in_later_turns_too() -> None:
    book = RoundBook(1, rules(every=10, quorum=2), Mode())
    book.versions = [1]
    book.marks = [{0: 10, 1: 10, 2: 10}]
    assert book.next_due([at(0, 40, [1]), at(1, 19, [1]), at(2, 12, [1])]) is None
    assert book.next_due([at(0, 40, [1]), at(1, 20, [1]), at(2, 12, [1])]) == 0


def test_a_newcomers_steps_count_from_where_it_began() -> None:
    """Slot 0 is new at step 50; of the others only slot 1 has made steps since the last opening."""
    book = RoundBook(2, rules(every=4, quorum=2, overlap=8), Mode())
    book.begin_progress(1, 0)
    book.begin_progress(2, 0)
    book.open_round(0, 0.0, [at(2, 10, [0, 0])])
    book.begin_progress(0, 50)
    others = [at(1, 10, [0, 0]), at(2, 10, [0, 0])]
    assert book.next_due([at(0, 50, [0, 0]), *others]) is None
    assert book.next_due([at(0, 52, [0, 0]), *others]) == 1


def test_a_merge_does_not_move_the_mark_of_a_newcomer_back() -> None:
    book = RoundBook(2, rules(every=4), Mode())
    book.begin_progress(0, 0)
    opened = book.open_round(0, 0.0, [at(0, 4, [0, 0])])
    book.accept(opened, push(0, 0, opened.id, 1, last=4), 0.0)
    book.begin_merge(opened, 0.1)
    assert not book.is_ready(opened, 100.0, set()), "it is merged once"
    book.begin_progress(0, 10)  # a new process has the slot, which it begins at a later step
    book.complete_merge(0, 1, 0.0, 0.0)
    assert book.next_due([at(0, 13, [1, 0])]) is None
    assert book.next_due([at(0, 14, [1, 0])]) == 0


def test_quorum_counts_slots_not_pushes() -> None:
    """A drained learner's offer and its successor's push are one slot."""
    book = RoundBook(1, rules(quorum=2), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0]), at(1, 30, [0])])
    book.accept(opened, push(0, last=4), 1.0)
    book.accept(opened, push(0, first=5, last=9, sequence=2), 1.0)
    assert len(opened.pushes) == 2 and opened.quorum_at is None
    book.accept(opened, push(1), 2.0)
    assert opened.quorum_at == 2.0


def test_a_newer_push_with_the_same_steps_takes_the_place() -> None:
    book = RoundBook(1, rules(), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0])])
    book.accept(opened, push(0, last=4), 1.0)
    replaced = book.accept(opened, push(0, last=6, sequence=2), 1.5)
    assert [p.header.last_step for p in replaced] == [4]
    assert [p.header.last_step for p in opened.pushes] == [6]
    (old,) = book.accept(opened, push(0, first=6, last=9, sequence=3), 2.0)
    assert old.header.last_step == 6, "one step in common is enough"


def test_grace_waits_for_the_rest_but_not_for_ever() -> None:
    book = RoundBook(1, rules(quorum=1, grace_cap=3.0), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0]), at(1, 30, [0])])
    assert not book.is_ready(opened, 100.0, {0, 1})
    book.accept(opened, push(0), 1.0)
    assert opened.deadline == 4.0 and book.wake_at() == 4.0
    assert not book.is_ready(opened, 3.9, {0, 1})
    assert book.is_ready(opened, 4.0, {0, 1})
    assert book.is_ready(opened, 1.0, {0}), "nobody is left to wait for"
    book.accept(opened, push(1), 2.0)
    assert (opened.quorum_at, opened.deadline) == (1.0, 4.0), "it begins with the quorum, not with each push"
    book.begin_merge(opened, None)
    assert book.wake_at() is None


@pytest.mark.promise(
    "The grace window is what the overlap leaves after quorum, merge, durability and broadcast, as measured (Eq. 3)"
)
def test_the_broadcast_to_a_quorum_of_learners_shortens_the_next_grace_window() -> None:
    book = RoundBook(1, rules(quorum=2, overlap=10, grace_factor=1.0, grace_cap=100.0), Mode())
    learners = [at(0, 30, [0]), at(1, 30, [0])]
    opened = book.open_round(0, 0.0, learners)
    for slot in (0, 1):
        book.accept(opened, push(slot), 0.0)
    book.begin_merge(opened, 1.0)
    book.complete_merge(0, 1, 0.5, 10.0)
    book.record_arrival(0, 1, 0, 11.0)
    book.record_arrival(0, 1, 0, 12.0)  # the same learner again
    book.record_arrival(0, 0, 1, 12.0)  # an older version
    book.record_arrival(0, 2, 1, 12.0)
    assert book.sync_seconds == 0.5, "one of two"
    book.record_arrival(0, 1, 1, 13.0)
    book.record_arrival(0, 1, 2, 99.0)
    assert book.sync_seconds == 3.5
    opened = book.open_round(0, 20.0, learners)
    for slot in (0, 1):
        book.accept(opened, push(slot, round=opened.id, first=5, last=8, sequence=2), 21.0)
    assert opened.deadline == 21.0 + 10 * 1.0 - 3.5
    book.begin_merge(opened, 1.0)
    book.complete_merge(0, 2, 0.5, 30.0)
    book.record_arrival(0, 1, 0, 31.0)
    book.record_arrival(0, 1, 1, 31.0)
    assert book.sync_seconds == 3.5, "of a version that was overtaken on its way nothing is known"


@pytest.mark.promise(
    "An exchange that takes longer than τ steps leaves a window of one step, so that learners of about one pace are "
    "merged together"
)
def test_the_window_is_a_step_where_the_exchange_takes_longer_than_its_overlap() -> None:
    book = RoundBook(1, rules(), Mode())
    for average, seconds in ((book.step_seconds, 1.0), (book.quorum_seconds, 5.0), (book.merge_seconds, 0.5)):
        average.add(seconds)
    opened = book.open_round(0, 0.0, [at(0, 30, [0]), at(1, 30, [0])])
    book.accept(opened, push(0), 5.0)
    assert opened.deadline == 6.0


@pytest.mark.promise("Nobody waits for a learner that is late round after round, and it is waited for when it is not")
def test_nobody_waits_for_who_is_late_once_another_has_answered() -> None:
    book = RoundBook(1, rules(grace_cap=3.0), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0]), at(1, 30, [0])])
    book.accept(opened, push(1, round=0), 0.0)
    assert opened.deadline == 3.0, "an offer of who was asked answers"
    book = RoundBook(1, rules(grace_cap=3.0), Mode())
    opened = book.open_round(0, 0.0, [at(0, 30, [0]), at(1, 30, [0])])
    book.accept(opened, push(1, round=77), 0.0)  # it came too late for an earlier round
    assert opened.deadline is None
    assert not book.is_ready(opened, 100.0, {0, 1}, late={0, 1}), "somebody has yet to answer"
    book.accept(opened, push(0), 1.0)
    assert (opened.deadline, book.is_ready(opened, 1.0, {0, 1})) == (4.0, False)
    assert book.is_ready(opened, 1.0, {0, 1}, late={1})
    assert book.is_ready(opened, 4.0, {0, 1})
    book.begin_merge(opened, None)
    assert book.came_in_time(push(1).header, 4.0) and not book.came_in_time(push(1).header, 4.1)
    book.complete_merge(0, 1, 0.1, 3.0)
    assert book.came_in_time(push(1).header, 4.0) and not book.came_in_time(push(1).header, 4.1)


def test_deterministic_waits_for_all_and_ignores_grace() -> None:
    book = RoundBook(1, rules(quorum=2), DeterministicMode(2))
    opened = book.open_round(0, 0.0, [])
    assert opened.id == 1
    book.accept(opened, push(1), 0.0)
    assert not book.is_ready(opened, 1e9, {1})
    book.accept(opened, push(0), 0.0)
    assert book.wake_at() is None
    assert book.is_ready(opened, 0.0, set())
    assert [p.header.slot for p in book.begin_merge(opened, None)] == [0, 1]


@given(
    factor=st.floats(0, 1),
    cap=st.floats(0, 100),
    overlap=st.integers(0, 10),
    step=st.floats(0, 10),
    quorum=st.floats(0, 10),
    sync=st.floats(0, 10),
)
def test_grace_is_equation_3_and_a_step_at_the_least(
    factor: float, cap: float, overlap: int, step: float, quorum: float, sync: float
) -> None:
    job = rules(grace_factor=factor, grace_cap=cap, overlap=overlap)
    got = job.grace_seconds(step, quorum, sync)
    least = step if factor else 0.0  # who was asked answers at the end of its step
    assert got == min(cap, max(least, factor * (overlap * step - quorum - sync)))
    assert job.grace_seconds(None, quorum, sync) == cap


def test_moving_average_has_a_half_life_of_eight_samples() -> None:
    average = MovingAverage()
    average.add(1.0)
    for _ in range(8):
        average.add(0.0)
    assert average.value == pytest.approx(0.5)
