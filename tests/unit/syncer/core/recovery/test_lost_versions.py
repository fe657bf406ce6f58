"""What the core does when its store has lost data, one situation each; the simulation combines them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from diloco_protocol.vocabulary import JobPhase
from diloco_protocol.wire import convert, limits
from diloco_protocol.wire.records import FragmentReport, Held, PushHeader, Receipt, SlotReceipt, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.rounds import RoundRules
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.recovery.lost_versions import ALONE, ANSWER_SECONDS, SLOWEST
from ledger_balance import imbalances
from shell_figures import SHELL

A = TypeVar("A")
CONFIG = CoreConfig(
    places=(("r", 0), ("r", 1)),
    rules=RoundRules(every=4, overlap=1, quorum=1, grace_factor=0.9, grace_cap=5.0),
    encoding="float32",
    stop=("steps", 1000),
)


def counts(epoch: int, base: int, tokens: int, confirmed: int = 0) -> FragmentReport:
    return FragmentReport(epoch, base, tokens // 10, tokens, confirmed_tokens=confirmed)


def report(*fragments: FragmentReport) -> StepReport:
    told = {f.tokens + f.confirmed_tokens for f in fragments}
    (tokens,) = told
    return StepReport(tokens // 10, tokens // 10, tokens, fragments, step_seconds=0.1)


def a_join(connection: int, ordinal: int, **changes: Any) -> ev.Join:
    base = ev.Join(
        connection,
        f"p{ordinal}",
        "r",
        ordinal,
        evaluator=False,
        layout_digest="L",
        digests={},
        sequences=0,
        held=(),
        previous_incarnation=1,
    )
    held = changes.pop("held", ())
    settled = changes.pop("settled", (1,) * len(held))
    rows = tuple(Held(*version, known) for version, known in zip(held, settled, strict=True))
    return replace(base, held=rows, **changes)


class Life:
    """A syncer's core from one of its starts on; two fragments, two slots."""

    def __init__(self, state: dict[str, Any] | None, epoch: int, made: tuple[int, ...] = (), behind: bool = False):
        self.core = Core(CONFIG, None if state is None else json.loads(json.dumps(state)), epoch, 0.0, wall=0.0)
        self.now = 0.0
        self.log = self.core.start(0.0, made, behind)

    def do(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.handle(event, self.now)
        self.log += actions
        return actions

    def join(self, connection: int, ordinal: int, **changes: Any) -> list[ev.Action]:
        return self.do(a_join(connection, ordinal, **changes))

    def later(self, seconds: float) -> list[ev.Action]:
        self.now += seconds
        return self.do(ev.Tick())

    def merge(self, fragment: int, version: int, slot: int, last: int, told: StepReport) -> None:
        """The slot's push of its steps up to ``last`` is merged alone."""
        first = 1
        incarnation = self.core.slots[slot].holder.incarnation
        rounds = self.core._state.rounds
        assert rounds is not None
        opened = rounds.open.get(fragment) or rounds.open_round(fragment, self.now, ())
        header = PushHeader(
            fragment,
            version,
            opened.id,
            self.core.epoch,
            base_version=version - 1,
            oldest_version=version - 1,
            first_step=first,
            last_step=last,
            steps=last - first + 1,
            tokens=10 * (last - first + 1),
            compute_seconds=1.0,
            encoding="float32",
            layout_digest="L",
            report=told,
            slot=slot,
            incarnation=incarnation,
        )
        (verdict, *_) = of(self.do(ev.PushReceived(header, 1.0, True, 7)), ev.AnswerPush)
        assert verdict.reason is None
        if not opened.merging:
            self.later(10.0)
        self.do(ev.MergeDurable(fragment, version, 0.01, (1.0,)))


def of(actions: list[ev.Action], kind: type[A]) -> list[A]:
    return [a for a in actions if isinstance(a, kind)]


def trained() -> tuple[dict[str, Any], dict[int, Receipt]]:
    """A state before the first merge, and the receipts after one merge of each fragment:
    slot 0's ten steps, of which it had told seven."""
    life = Life(None, 1)
    life.join(1, 0, previous_incarnation=0)
    life.join(2, 1, previous_incarnation=0)
    life.do(ev.InitialModelStored("L", (8, 8)))
    for connection in (1, 2):
        life.do(ev.Reported(connection, report(counts(1, 0, 0), counts(1, 0, 0))))
    life.do(ev.Reported(1, report(counts(1, 0, 70), counts(1, 0, 70))))
    life.do(ev.Reported(2, report(counts(1, 0, 30), counts(1, 0, 30))))
    state = life.core.state(life.now)
    for fragment in (0, 1):
        life.merge(fragment, 1, 0, 10, report(counts(1, 0, 100), counts(1, 0, 100)))
    assert life.core.versions == [1, 1] and life.core.ledger is not None and not imbalances(life.core.ledger)
    return state, {fragment: life.core.receipt(fragment) for fragment in (0, 1)}


def restarted(behind: bool = False) -> Life:
    return Life(trained()[0], 2, (1, 1), behind)


HELD = ((1, 1), (1, 0))


def test_if_nobody_has_newer_nothing_happens() -> None:
    life = restarted()
    actions = life.join(11, 0, held=((1, 0), (1, 0)))
    (admit,) = of(actions, ev.Admit)
    assert admit.withheld == frozenset() and not life.core.is_recovering
    life.do(ev.Reported(11, report(counts(2, 0, 70), counts(2, 0, 70))))
    assert life.core.phase is JobPhase.TRAINING
    assert not of(life.log, ev.RequestVersion) and not of(life.log, ev.RestartFromStore)


def test_the_newest_is_asked_for_when_everybody_is_back_and_the_rest_follows_a_restart() -> None:
    state, receipts = trained()
    life = Life(state, 2, (1, 1))
    (admit,) = of(life.join(11, 0, held=HELD), ev.Admit)
    assert admit.withheld == {0} and life.core.is_recovering
    life.do(ev.Reported(11, report(counts(1, 1, 0, 100), counts(1, 0, 100))))
    assert life.core.phase is JobPhase.WAITING, "training waits until it is settled"
    assert not of(life.log, ev.RequestVersion), "slot 1 may hold something newer"
    (ask,) = of(life.join(12, 1, held=((1, 0), (1, 0))), ev.RequestVersion)
    assert (ask.connection, ask.fragment, ask.epoch, ask.version) == (11, 0, 1, 1)
    for wrong in ((12, 0, 1, 1), (11, 1, 1, 1), (11, 0, 2, 1), (11, 0, 1, 2)):
        assert "was not asked for" in life.core.check_version_upload(*wrong, receipts[0])
    assert life.core.check_version_upload(11, 0, 1, 1, receipts[0]) == ""
    (begin,) = of(life.do(ev.LostVersionStored(0)), ev.RestartFromStore)
    assert begin.above == 0

    again = Core(CONFIG, life.core.state(0.0), 3, 0.0, wall=0.0)
    again.close_superseded_tenures([], [receipts[0]])
    again.apply_recovered_version(0, 1, 1, receipts[0], 2)
    again.start(0.0, (1, 1))
    assert again.versions == [1, 0] and again.ledger is not None
    assert imbalances(again.ledger) == []
    assert [again.ledger.merged(0, p) for p in (0, 1)] == [100, 0]
    assert [again.ledger.pending(0, p) for p in (0, 1)] == [0, 100]
    # Who was behind hears what was merged, as if nothing had been lost.
    (admit,) = of(again.handle(a_join(21, 0, held=((1, 0), (1, 0))), 0.0), ev.Admit)
    assert admit.merged[0] == ev.MergedPush(1, 1) and admit.merged[1] == ev.MergedPush()
    assert admit.seat is not None and admit.seat.continuing and admit.withheld == frozenset()


def test_a_receipt_tells_of_more_than_was_told() -> None:
    """The state knows of 70 trained tokens; 100 were merged: at least so many were trained."""
    state, receipts = trained()
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.close_superseded_tenures([], [receipts[0]])
    core.apply_recovered_version(0, 1, 1, receipts[0], 2)
    core.start(0.0, (1, 1))
    assert core.ledger is not None and imbalances(core.ledger) == []
    assert (core.ledger.trained(0), core.ledger.merged(0, 0), core.ledger.pending(0, 1)) == (100, 100, 100)


def test_a_version_that_came_back_counts_all_merges_up_to_it() -> None:
    state, receipts = trained()
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.apply_recovered_version(0, 5, 1, receipts[0], 2)
    assert (core.versions, core.merges) == ([5, 0], 5)


def test_a_tenure_that_the_state_has_not_heard_of() -> None:
    """Its merged tokens count as merged and trained, to the token, and its process begins anew."""
    state, receipts = trained()
    rows = tuple(replace(row, tenure=77) if row.slot == 0 else row for row in receipts[0])
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.close_superseded_tenures([], [rows])
    core.apply_recovered_version(0, 1, 1, rows, 2)
    core.start(0.0, (1, 1))
    assert core.ledger is not None and imbalances(core.ledger) == []
    assert core.ledger.merged(0, 0) == 100 and core.ledger.trained(0) == 100
    assert core.ledger.dropped(0, 1) == {"died": 100}
    (admit,) = of(core.handle(a_join(21, 0), 0.0), ev.Admit)
    assert admit.seat is not None and not admit.seat.continuing and admit.seat.slot_step == 10


def test_the_next_is_asked_and_what_is_not_to_be_had_is_rolled_back() -> None:
    life = restarted()
    life.join(11, 0, held=HELD)
    (first,) = of(life.join(12, 1, held=HELD), ev.RequestVersion)
    (second,) = of(life.do(ev.LostVersionFailed(first.connection, 0)), ev.RequestVersion)
    assert {first.connection, second.connection} == {11, 12}
    actions = life.later(1000.0) if second.connection == 12 else life.do(ev.ConnectionLost(11))
    assert not of(actions, ev.RestartFromStore)
    life = restarted()
    life.join(12, 1)
    life.join(11, 0, held=HELD)
    actions = life.do(ev.LostVersionFailed(11, 0))
    assert [(a.fragment, a.version) for a in of(actions, ev.Announce)] == [(0, 0)]
    assert not life.core.is_recovering
    # Its 100 confirmed tokens are in no version any more.
    life.do(ev.Reported(11, report(counts(2, 0, 0, 100), counts(2, 0, 100))))
    assert life.core.ledger is not None and imbalances(life.core.ledger) == []
    assert life.core.ledger.dropped(0, 0) == {"rolled-back": 100}
    assert life.core.ledger.pending(0, 0) == 0
    # And nobody can bring them back later: this is another history now.
    again = Life(life.core.state(0.0), 3, (1, 1))
    (admit,) = of(again.join(31, 1, held=HELD), ev.Admit)
    assert admit.withheld == frozenset() and not again.core.is_recovering


def test_a_suspension_waits_until_what_came_back_is_in_the_store() -> None:
    """The restart that it needs is under way; suspended before, the job would have lost the version after all."""
    life = restarted()
    life.join(11, 0, held=HELD)
    (ask,) = of(life.join(12, 1, held=((1, 0), (1, 0))), ev.RequestVersion)
    life.do(ev.EndRequested(JobPhase.SUSPENDED, "interrupted"))
    life.do(ev.Drained(12))
    assert of(life.do(ev.LostVersionStored(ask.fragment)), ev.RestartFromStore)
    life.do(ev.Drained(11))
    assert life.core.phase is JobPhase.DRAINING


def test_somebody_who_is_silent_is_waited_for_no_longer_than_any_other() -> None:
    life = restarted()
    life.join(11, 0, held=HELD)
    assert not of(life.later(CONFIG.heartbeat_timeout - 1), ev.RequestVersion)
    life.do(ev.Reported(11, report(counts(1, 1, 0, 100), counts(1, 0, 100))))
    assert of(life.later(2.0), ev.RequestVersion), "slot 1 was given up"


def test_nothing_is_given_up_while_nobody_is_there_who_could_hold_it() -> None:
    life = restarted(behind=True)
    life.later(CONFIG.heartbeat_timeout + 1)
    assert life.core.is_recovering, "all slots were given up, and what the store lost was not"
    assert of(life.join(11, 0, held=HELD), ev.RequestVersion)


BOTH = ((1, 1), (1, 1))
OLD = ((1, 0), (1, 0))


def stay(life: Life, seconds: float, *connections: int) -> list[ev.Action]:
    """So long, while these are heard; returns what was done in the last of it."""
    actions = []
    for _ in range(round(seconds)):
        for connection in connections:
            life.do(ev.Reported(connection, report(counts(1, 1, 0, 100), counts(1, 0, 100))))
        actions = life.later(1.0)
    return actions


def test_the_newest_version_that_anybody_holds_is_asked_for() -> None:
    life = restarted()
    life.join(11, 0, held=((1, 2), (1, 0)))
    (ask,) = of(life.join(12, 1, held=HELD), ev.RequestVersion)
    assert (ask.connection, ask.version) == (11, 2)


def test_one_learner_is_asked_for_one_version_at_a_time() -> None:
    life = restarted()
    life.join(11, 0, held=BOTH)
    (first,) = of(life.join(12, 1, held=OLD), ev.RequestVersion)
    (second,) = of(life.do(ev.LostVersionStored(first.fragment)), ev.RequestVersion)
    assert {first.fragment, second.fragment} == {0, 1} and second.connection == 11


def test_who_does_not_answer_is_given_up_for_another_that_holds_the_version() -> None:
    life = restarted()
    life.join(11, 0, held=HELD)
    (first,) = of(life.join(12, 1, held=HELD), ev.RequestVersion)
    stay(life, ANSWER_SECONDS - 1, 11, 12)
    assert of(life.log, ev.RequestVersion) == [first]
    (second,) = of(stay(life, 1, 11, 12), ev.RequestVersion)
    assert {first.connection, second.connection} == {11, 12}


@pytest.mark.promise(
    "If a holder of lost versions stops sending, it is given up after a minute, however large the "
    "versions are; several holders of the same versions send in parallel"
)
def test_holders_of_the_same_versions_are_asked_at_the_same_time() -> None:
    life = restarted()
    life.join(11, 0, held=BOTH)
    asked = of(life.join(12, 1, held=BOTH), ev.RequestVersion)
    assert [(ask.connection, ask.fragment) for ask in asked] == [(11, 0), (12, 1)]


@pytest.mark.promise(
    "If a holder of lost versions stops sending, it is given up after a minute, however large the "
    "versions are; several holders of the same versions send in parallel"
)
def test_a_holder_whose_bytes_stop_is_given_up_long_before_the_slowest_would_be_done() -> None:
    """As long as they come it is waited for, and while its record is made; and for no longer than the slowest takes."""
    for last in ("stalls", "is whole", "never ends"):
        life = restarted()
        life.core._state.fragment_elements = (SLOWEST * 400, 8)
        life.join(11, 0, held=HELD)
        (first,) = of(life.join(12, 1, held=HELD), ev.RequestVersion)
        began = life.now
        for _ in range(5):
            stay(life, ANSWER_SECONDS - 1, 11, 12)
            life.do(ev.LostVersionAdvanced(first.connection, 0))
        if last == "is whole":
            life.do(ev.LostVersionAdvanced(first.connection, 0, whole=True))
        waited = {"stalls": 6 * ANSWER_SECONDS - 5}.get(last, ANSWER_SECONDS + 400)
        while len(asked := of(life.log, ev.RequestVersion)) == 1 and life.now - began < 2 * waited:
            stay(life, 1, 11, 12)
            life.do(ev.LostVersionAdvanced(23 - first.connection, 0))  # whom nobody has asked
            life.do(ev.LostVersionAdvanced(first.connection, 1))  # for which nobody has
            if last == "never ends":
                life.do(ev.LostVersionAdvanced(first.connection, 0))
        assert life.now - began == pytest.approx(waited, abs=1)
        assert {ask.connection for ask in asked} == {11, 12}


def test_the_only_holder_is_waited_for_while_its_bytes_come() -> None:
    """On a slow link a version that nobody else has is not dropped; but who sends a byte a minute is given up."""
    life = restarted()
    life.core._state.fragment_elements = (SLOWEST * 400, 8)
    life.join(11, 0, held=HELD)
    life.join(12, 1, held=OLD)
    patience = ANSWER_SECONDS + 400
    while life.now < ALONE * patience - 2 * ANSWER_SECONDS:
        stay(life, ANSWER_SECONDS - 1, 11, 12)
        life.do(ev.LostVersionAdvanced(11, 0))
    assert life.core.is_recovering
    while life.now < ALONE * patience + 2 * ANSWER_SECONDS:
        stay(life, ANSWER_SECONDS - 1, 11, 12)
        life.do(ev.LostVersionAdvanced(11, 0))
    assert not life.core.is_recovering and len(of(life.log, ev.RequestVersion)) == 1


def test_who_is_gone_is_given_up_for_another_that_holds_the_version() -> None:
    life = restarted()
    life.join(11, 0, held=HELD)
    (first,) = of(life.join(12, 1, held=HELD), ev.RequestVersion)
    other = 23 - first.connection
    life.do(ev.ConnectionLost(first.connection))
    stay(life, CONFIG.heartbeat_timeout + 1, other)
    assert [ask.connection for ask in of(life.log, ev.RequestVersion)] == [first.connection, other]


@pytest.mark.parametrize("fate", ["gone", "silent", "says that it failed", "slow store"])
def test_an_accepted_version_is_waited_for_whatever_becomes_of_who_sent_it(fate: str) -> None:
    """The store may have its record at any moment: who goes on without it makes a version that is older, or the same
    version once more."""
    life = restarted()
    life.join(11, 0, held=HELD)
    life.join(12, 1, held=OLD)
    life.do(ev.LostVersionAdvanced(11, 0, whole=True))
    life.do(ev.LostVersionAccepted(0))
    if fate == "gone":
        life.do(ev.ConnectionLost(11))
    elif fate == "says that it failed":  # its call was broken off
        life.do(ev.LostVersionFailed(11, 0))
    stay(life, 1000.0 if fate == "slow store" else CONFIG.heartbeat_timeout + 1, 12, *[11] * (fate == "slow store"))
    life.join(13, 0, held=HELD)
    assert life.core.is_recovering and len(of(life.log, ev.RequestVersion)) == 1
    assert not of(life.log, ev.RestartFromStore) and life.core.newest_settled_epoch == 1
    assert of(life.do(ev.LostVersionStored(0)), ev.RestartFromStore)


def test_a_version_from_before_the_stores_own_or_of_this_epoch_is_not_taken() -> None:
    """The store's version of fragment 0 is of epoch 2: what epoch 1 made above it is of another past."""
    life = Life(trained()[0], 3, (2, 1))
    life.join(11, 0, held=HELD)
    life.join(12, 1, held=HELD)
    assert not of(life.log, ev.RequestVersion) and life.core.newest_settled_epoch == 3, "given up"
    life = restarted()
    life.join(11, 0, held=OLD)
    life.join(12, 1, held=OLD)
    life.join(13, 0, held=((2, 1), (1, 0)))  # this syncer made no version 1
    assert not of(life.log, ev.RequestVersion)


@pytest.mark.parametrize(
    ("began", "tenure", "dropped"), [(0, 0, {}), (10, 0, {"died": 70}), (0, 1, {}), (0, 9, {"died": 70})]
)
def test_a_newer_header_ends_the_tenure_that_the_state_knows_if_it_is_of_another(
    began: int, tenure: int, dropped: dict[str, int]
) -> None:
    """The same process may have come back since, under another incarnation."""
    core = Core(CONFIG, trained()[0], 2, 0.0, wall=0.0)
    told = replace(report(counts(1, 0, 80), counts(1, 0, 80)), slot_step=8 + began, tenure=tenure)
    header = PushHeader(
        0,
        1,
        1,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1 + began,
        last_step=8 + began,
        steps=8,
        tokens=80,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=told,
        slot=0,
        incarnation=9,
    )
    core.close_superseded_tenures([header], [])
    assert core.ledger is not None and core.ledger.dropped(0, 0) == dropped


def test_a_version_that_the_store_has_is_not_recovered_once_more() -> None:
    state, receipts = trained()
    core = Core(CONFIG, state, 3, 0.0, wall=0.0)
    core.close_superseded_tenures([], [receipts[0]])
    told = report(counts(1, 0, 100), counts(1, 0, 100))
    core.apply_record(
        0,
        1,
        [
            PushHeader(
                0,
                1,
                1,
                1,
                base_version=0,
                oldest_version=0,
                first_step=1,
                last_step=10,
                steps=10,
                tokens=100,
                compute_seconds=1.0,
                encoding="float32",
                layout_digest="L",
                report=told,
                slot=0,
                incarnation=1,
            )
        ],
        1,
    )
    core.apply_recovered_version(0, 1, 1, receipts[0], 2)
    assert not core._state.lineage.has_recovered and core.merges == 1


def test_a_tape_that_tells_of_more_makes_the_first_wait_for_the_others() -> None:
    life = restarted(behind=True)
    life.join(11, 0, held=((1, 0), (1, 0)))
    life.do(ev.Reported(11, report(counts(2, 0, 70), counts(2, 0, 70))))
    assert life.core.phase is JobPhase.WAITING and life.core.is_recovering
    (ask,) = of(life.join(12, 1, held=HELD), ev.RequestVersion)
    assert ask.connection == 12


def test_nothing_newer_anywhere_and_the_job_goes_on() -> None:
    life = restarted(behind=True)
    for connection, ordinal in ((11, 0), (12, 1)):
        life.join(connection, ordinal, held=((1, 0), (1, 0)))
        life.do(ev.Reported(connection, report(counts(2, 0, 70), counts(2, 0, 70))))
    assert life.core.phase is JobPhase.TRAINING and not of(life.log, ev.RestartFromStore)


@pytest.mark.parametrize("epoch", [2, 5])
def test_an_epoch_that_this_syncer_has_not_told(epoch: int) -> None:
    """The store went back with its epochs: one (epoch, version) would have two meanings."""
    life = restarted()
    actions = life.join(11, 0, held=((epoch, 1), (1, 0)))
    (again,) = of(actions, ev.RestartFromStore)
    assert again.above == epoch and not of(actions, ev.Admit)
    assert isinstance(actions[0], ev.Persist), "a syncer that was succeeded finds out first"
    life = restarted()
    life.join(12, 1)
    life.do(ev.Reported(12, report(counts(2, 0, 30), counts(2, 0, 30))))
    assert life.core.phase is JobPhase.TRAINING
    (refused,) = of(life.join(11, 0, held=((epoch, 1), (1, 0))), ev.Refuse)
    assert (refused.reason, refused.fatal) == ("other-history", True)
    (admit,) = of(life.join(13, 1, held=((2, 0), (2, 0))), ev.Admit)
    assert admit.seat is not None, "who heard it from this syncer may come back"


# ------------------------------------------------------------------ an empty store


def rejoin(life: Life, connection: int, slot: int, held: tuple[tuple[int, int], ...] = HELD, **fields: Any) -> ev.Admit:
    """A learner of an earlier life joins in its tenure, which began as incarnation slot + 1."""
    fields = {"tenure": slot + 1, "slot": slot, "settled": (1, 1), "previous_incarnation": slot + 1} | fields
    (admit,) = of(life.join(connection, slot, held=held, **fields), ev.Admit)
    return admit


def test_leases_that_a_rebuild_makes_get_numbers_that_the_lost_state_cannot_have_given() -> None:
    """Whichever learner says first how large the data is, and once only."""
    life = Life(None, 2)
    rejoin(life, 11, 0)
    rejoin(life, 12, 1, sequences=100)
    leases = life.core._state.leases
    assert leases is not None and leases.next_lease == 1 + (1 << 16)
    life.later(1.0)
    assert leases.next_lease == 1 + (1 << 16)


def test_an_empty_store_is_rebuilt_from_what_learners_hold() -> None:
    """Both fragments come back with their merged tokens, and the tenures of both learners go on."""
    _, receipts = trained()
    life = Life(None, 1)
    (above,) = of(life.join(11, 0, held=HELD, tenure=1, slot=0), ev.RestartFromStore)
    assert above.above == 1 and not of(life.log, ev.Admit)

    life = Life(None, 2)
    first = rejoin(life, 11, 0)
    assert first.initialise and first.seat is not None and first.seat.continuing and first.seat.slot == 0
    assert life.core.version_0_origins(11) == (0, 1), "fragment 1 was never merged: its version 0 is the job's"
    assert life.core.is_recovering
    assert of(life.do(ev.InitialModelStored("L", (8, 8))), ev.RestartFromStore)
    assert not life.core.initialised, "what stands in for version 1 is not gone on from"

    saved = json.loads(json.dumps(life.core.state(0.0)))
    life = Life(saved, 3)
    life.core.handle(ev.InitialModelStored("L", (8, 8)), 0.0)
    life.log += life.core.start(0.0, (0, 1))
    assert life.core.is_recovering and "emptied" in life.core.phase_message
    assert rejoin(life, 21, 0).withheld == {0}
    assert not of(life.log, ev.RequestVersion), "the other learner is waited for"
    second = rejoin(life, 22, 1, ((1, 0), (1, 0)))
    assert second.seat is not None and second.seat.continuing and second.seat.slot == 1 and second.withheld == {0}
    (ask,) = of(life.log, ev.RequestVersion)
    assert (ask.connection, ask.fragment, ask.epoch, ask.version) == (21, 0, 1, 1)
    assert life.core.check_version_upload(21, 0, 1, 1, receipts[0]) == ""
    assert of(life.do(ev.LostVersionStored(0)), ev.RestartFromStore)

    saved = json.loads(json.dumps(life.core.state(0.0)))
    life = Life(saved, 4)
    life.core.close_superseded_tenures([], [receipts[0]])
    life.core.apply_recovered_version(0, 1, 1, receipts[0], 3)
    life.log += life.core.start(0.0, (1, 1))
    assert not life.core.is_recovering
    seats = [rejoin(life, 31, 0).seat, rejoin(life, 32, 1, ((1, 0), (1, 0))).seat]
    assert [seat is not None and seat.continuing for seat in seats] == [True, True]
    life.do(ev.Reported(31, report(counts(1, 1, 20, 100), counts(1, 0, 120))))
    life.do(ev.Reported(32, report(counts(1, 0, 70), counts(1, 0, 70))))
    ledger = life.core.ledger
    assert ledger is not None and imbalances(ledger) == []
    assert [ledger.trained(slot) for slot in (0, 1)] == [120, 70]
    assert (ledger.merged(0, 0), ledger.pending(0, 0), ledger.pending(1, 0)) == (100, 20, 70)
    assert ledger.dropped(0, 0) == ledger.dropped(1, 0) == {}
    assert life.core.phase is JobPhase.TRAINING and life.core.merges == 1
    told = life.core.status(0.0, SHELL)
    assert told.elapsed_seconds == 0.5 and told.goodput == 0.5  # of 1 s for one of two fragments, in one of two slots


def test_a_learner_that_holds_the_model_goes_before_one_that_builds_another() -> None:
    life = Life(None, 5)
    assert of(life.join(12, 1), ev.Admit)[0].initialise
    assert rejoin(life, 11, 0).initialise and life.core.initialiser == 11
    assert not rejoin(life, 13, 1, tenure=2).initialise, "the upload that is under way goes on"
    life.do(ev.ConnectionLost(11))
    (again,) = of(life.log, ev.RequestInitialModel)
    assert again.connection == 13


def test_a_rebuild_never_goes_on_from_what_stands_in_for_a_version() -> None:
    """If no learner has it any more, that is said; who has it later may still bring it."""
    life = Life(None, 5)
    rejoin(life, 11, 0)
    saved = json.loads(json.dumps(life.core.state(0.0)))
    life = Life(saved, 6)
    life.core.handle(ev.InitialModelStored("L", (8, 8)), 0.0)
    life.log += life.core.start(0.0, (0, 1))
    assert of(life.join(22, 1), ev.Admit)[0].withheld == {0}, "a newcomer is not told of it either"
    rejoin(life, 21, 0, ((1, 0), (1, 0)), tenure=1)
    assert "no learner here holds a merged version of fragments 0" in life.core.phase_message
    life.later(CONFIG.heartbeat_timeout - 1)
    assert life.core.phase is JobPhase.WAITING and not of(life.log, ev.RestartFromStore)
    (ask,) = of(life.join(23, 0, held=HELD, settled=(1, 1), tenure=1, slot=0), ev.RequestVersion)
    assert not of(life.do(ev.LostVersionFailed(23, 0)), ev.RequestVersion)
    life.do(ev.Reported(23, report(counts(1, 1, 0), counts(1, 0, 0))))
    life.do(ev.Reported(22, report(counts(1, 1, 0), counts(1, 0, 0))))
    (again,) = of(life.later(CONFIG.heartbeat_timeout), ev.RequestVersion)
    assert again == ask, "the only one that has it is asked once more"


VERSION_0 = ((1, 0), (1, 0))


@pytest.mark.parametrize("end", [JobPhase.SUSPENDED, JobPhase.FAILED])
def test_what_stands_in_for_a_version_is_told_to_nobody_where_the_job_has_ended_meanwhile(end: JobPhase) -> None:
    """Whoever takes it for version 0 moves steps onto it that are in it already."""
    life = Life(None, 2)
    assert rejoin(life, 11, 0).initialise
    life.do(ev.EndRequested(end, "ended"))
    assert life.core.phase is end
    actions = life.do(ev.InitialModelStored("L", (8, 8)))
    assert not of(actions, ev.Announce) and not of(actions, ev.RestartFromStore) and not life.core.initialised
    life = Life(life.core.state(0.0), 3)
    life.core.handle(ev.InitialModelStored("L", (8, 8)), 0.0)
    life.log += life.core.start(0.0, (0, 1))
    assert rejoin(life, 21, 0).withheld == {0} and life.core.is_recovering


@pytest.mark.promise("An emptied store is rebuilt from the learners, whichever returns first")
def test_an_empty_store_without_a_merge_has_its_version_0_back() -> None:
    """Given back by a learner that holds it, as it was: under one (epoch, version) there are never two models."""
    (above,) = of(Life(None, 1).join(12, 1, held=VERSION_0), ev.RestartFromStore)
    assert above.above == 1
    life = Life(None, 2)
    assert not rejoin(life, 12, 1, VERSION_0).initialise, "the other learner may hold more"
    assert "holds version 0" in life.core.phase_message
    assert rejoin(life, 11, 0, VERSION_0).initialise, "nobody holds more"
    assert life.core.version_0_origins(11) == (1, 1)


@pytest.mark.promise("An emptied store is rebuilt from the learners, whichever returns first")
def test_an_empty_store_waits_a_while_for_who_holds_more_than_version_0() -> None:
    life = Life(None, 2)
    assert not rejoin(life, 12, 1, VERSION_0).initialise
    life.later(CONFIG.heartbeat_timeout - 1)
    assert not of(life.log, ev.RequestInitialModel)
    assert rejoin(life, 11, 0).initialise, "it holds a merged version"
    life = Life(None, 2)
    rejoin(life, 12, 1, VERSION_0)
    for _ in range(int(CONFIG.rebuild_seconds / (CONFIG.heartbeat_timeout - 1)) + 1):
        life.later(CONFIG.heartbeat_timeout - 1)
        life.do(ev.Reported(12, report(counts(1, 0, 70), counts(1, 0, 70))))
    (asked,) = of(life.log, ev.RequestInitialModel)
    assert asked.connection == 12, "nobody else came"


def test_an_evaluator_of_an_empty_store_holds_nobody_up() -> None:
    life = Life(None, 1)
    assert not of(life.join(15, 0, held=VERSION_0, evaluator=True), ev.RestartFromStore)
    assert of(life.join(12, 1), ev.Admit)[0].initialise


@pytest.mark.promise(
    "If only an evaluator holds versions of an emptied store, status, condition and log explain what to do"
)
def test_an_empty_store_of_which_only_an_evaluator_holds_versions_says_what_to_do() -> None:
    life = Life(None, 5)
    life.join(15, 0, held=HELD, evaluator=True)
    assert not of(life.join(11, 0), ev.Admit)[0].initialise
    assert not rejoin(life, 12, 1, VERSION_0).initialise, "it is older than what the evaluator holds"
    assert "only an evaluator holds merged versions" in life.core.phase_message
    assert "spec.syncer.storage" in life.core.phase_message
    assert "restart the evaluator and then the syncer" in life.core.phase_message
    told = [event for event in of(life.log, ev.RecordEvent) if event.message == life.core.phase_message]
    assert len(told) == 1 and told[0].kind == "lost-data", "in the log too, once"
    assert of(life.log, ev.SetPhase)[-1].message == life.core.phase_message
    saved = life.core.state(life.now)

    # What it says works: a learner that holds some comes, or both are restarted.
    assert rejoin(life, 13, 0).initialise
    life = Life(saved, 6)
    life.join(15, 0, evaluator=True, previous_incarnation=0)
    assert of(life.join(11, 0, previous_incarnation=0), ev.Admit)[0].initialise


def test_an_empty_store_whose_holders_have_gone_says_what_to_do() -> None:
    life = Life(None, 5)
    rejoin(life, 12, 1)
    life.join(11, 0)
    life.do(ev.ConnectionLost(12))
    for _ in range(int(CONFIG.rebuild_seconds / (CONFIG.heartbeat_timeout - 1)) + 2):
        life.later(CONFIG.heartbeat_timeout - 1)
        life.do(ev.Reported(11, StepReport()))
    assert "no learner here holds the model any more" in life.core.phase_message
    assert not of(life.log, ev.RequestInitialModel) and rejoin(life, 12, 1).initialise, "until it is back"
    life = Life(life.core.state(life.now), 6)
    assert of(life.join(11, 0, previous_incarnation=0), ev.Admit)[0].initialise, "the job starts anew"


@pytest.mark.promise(
    "An emptied store is rebuilt from a learner that stands by, where no learner with a slot holds merged versions"
)
def test_an_empty_store_is_rebuilt_from_who_stands_by() -> None:
    life = Life(None, 5)
    (builder,) = of(life.join(11, 0), ev.Admit)
    assert builder.initialise, "nobody has told of a model yet"
    life.join(12, 1)
    assert rejoin(life, 13, 2).seat is None, "it stands by"
    assert life.core.initialiser is None, "and the job has no new model"
    (asked,) = of(life.log, ev.RequestInitialModel)
    assert asked.connection == 13
    life.do(ev.ConnectionLost(13))
    life.do(ev.Reported(11, StepReport()))
    again = rejoin(life, 14, 2)
    assert again.initialise and again.seat is None
    assert life.core.version_0_origins(14) == (0, 1), "it stands in for what is merged"
    assert [a.above for a in of(life.do(ev.InitialModelStored("L", (8, 8))), ev.RestartFromStore)] == [0]

    # And then for the versions themselves, as everybody is.
    life = Life(life.core.state(life.now), 6)
    life.do(ev.InitialModelStored("L", (8, 8)))  # as the store has it
    life = Life(life.core.state(life.now), 6, (0, 1))
    for connection, ordinal in ((21, 0), (22, 1)):
        assert of(life.join(connection, ordinal), ev.Admit)[0].seat is not None
    assert rejoin(life, 23, 2).seat is None
    assert {(ask.connection, ask.fragment) for ask in of(life.log, ev.RequestVersion)} == {(23, 0)}
    assert of(life.do(ev.LostVersionStored(0)), ev.RestartFromStore), "from then on the store has it"


def test_an_empty_store_gets_version_0_from_who_stands_by() -> None:
    """Where nothing was merged yet, and nobody with a slot holds version 0."""
    life = Life(None, 5)
    life.join(11, 0)
    life.join(12, 1)
    assert rejoin(life, 13, 2, VERSION_0).seat is None
    assert of(life.log, ev.RequestInitialModel) == [ev.RequestInitialModel(13)]
    life.do(ev.ConnectionLost(13))
    assert rejoin(life, 14, 2, VERSION_0).initialise and life.core.version_0_origins(14) == (1, 1)


def test_who_stands_by_is_asked_for_an_emptied_stores_model_after_those_with_slots() -> None:
    life = Life(None, 5)
    life.join(11, 0)
    assert not of(life.log, ev.RequestInitialModel)
    assert rejoin(life, 12, 1).initialise
    assert not rejoin(life, 13, 2).initialise
    assert life.core.initialiser == 12
    life.do(ev.InitialModelFailed(12))
    assert of(life.log, ev.RequestInitialModel) == [ev.RequestInitialModel(12)], "once more, not the other"
    life.do(ev.ProcessEnded("r", 1, "p1", "killed"))
    assert life.core.slots[1].holder.process == "p2", "the place is free for who stood by"
    assert of(life.log, ev.RequestInitialModel)[-1] == ev.RequestInitialModel(13)


def test_who_stands_by_is_not_asked_for_an_emptied_stores_model_while_a_holder_may_come_back_to_its_slot() -> None:
    life = Life(None, 5)
    life.join(11, 0)
    rejoin(life, 12, 1)
    life = Life(life.core.state(life.now), 6)
    life.join(21, 0)
    assert rejoin(life, 23, 2).seat is None
    assert not of(life.log, ev.RequestInitialModel), "the other may be back soon"
    assert rejoin(life, 22, 1, previous_incarnation=2).initialise


def test_who_stands_by_and_does_not_come_back_is_asked_after_others() -> None:
    life = Life(None, 5)
    life.join(11, 0)
    life.join(12, 1)
    rejoin(life, 13, 2)
    rejoin(life, 14, 3)
    assert of(life.log, ev.RequestInitialModel) == [ev.RequestInitialModel(13)]
    life.do(ev.ConnectionLost(13))
    assert of(life.log, ev.RequestInitialModel) == [ev.RequestInitialModel(13)], "it is expected back"
    for _ in range(2):
        life.later(CONFIG.heartbeat_timeout - 1)
        for connection in (11, 12):
            life.do(ev.Reported(connection, StepReport()))
    assert of(life.log, ev.RequestInitialModel)[-1] == ev.RequestInitialModel(14)
    assert rejoin(life, 15, 3).initialise
    life.do(ev.ConnectionLost(15))
    assert life.core.initialiser is None


def test_an_empty_store_does_not_believe_every_epoch() -> None:
    life = Life(None, 1)
    (refused,) = of(life.join(11, 0, held=((5000, 1), (5000, 1))), ev.Refuse)
    assert (refused.reason, refused.fatal) == ("empty-store", False)
    assert "give the syncer its store back" in refused.message


# ------------------------------------------------------------------ receipts


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"slot": 4096}, "slot 4096"),
        ({"version": 2}, "contradicts itself"),
        ({"merged_tokens": 50}, "fewer merged tokens"),
    ],
)
def test_a_receipt_that_cannot_be(changes: dict[str, int], word: str) -> None:
    state, receipts = trained()
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.close_superseded_tenures([], [receipts[0]])
    core.apply_recovered_version(0, 1, 1, receipts[0], 2)
    core.start(0.0, (1, 1))
    for ordinal in (0, 1):
        core.handle(a_join(11 + ordinal, ordinal, held=((1, 2), (1, 0))), 0.0)
    core.handle(ev.LostVersionFailed(12, 0), 0.0)
    newer = tuple(replace(row, version=2 if row.slot else row.version) for row in receipts[0])
    assert core.check_version_upload(11, 0, 1, 2, newer) == ""
    assert "no receipt" in core.check_version_upload(11, 0, 1, 2, ())
    assert "has it twice" in core.check_version_upload(11, 0, 1, 2, (*newer, newer[0]))
    wrong = (replace(newer[0], **{**changes, "version": changes.get("version", 1) + 1}), newer[1])
    assert word in core.check_version_upload(11, 0, 1, 2, wrong)


def test_a_receipt_tells_of_slots_that_the_state_has_not_heard_of() -> None:
    """Slot 1's process came after the state, and is in a record: its merges are in the version."""
    life = Life(None, 1)
    life.join(1, 0, previous_incarnation=0)
    life.do(ev.InitialModelStored("L", (8, 8)))
    state = life.core.state(life.now)
    told = report(counts(1, 0, 40), counts(1, 0, 40))
    header = PushHeader(
        0,
        1,
        1,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=4,
        steps=4,
        tokens=40,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=told,
        slot=1,
        incarnation=2,
    )
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.close_superseded_tenures([header], [])
    core.apply_record(0, 1, [header], 1)
    core.start(0.0, (1, 1))
    assert core.ledger is not None and imbalances(core.ledger) == []
    assert {row.slot: row.merged_tokens for row in core.receipt(0)} == {0: 0, 1: 40}


def test_slots_that_a_lost_state_had() -> None:
    """The job was scaled up and down again after the state: what slot 3 gave is in the records."""
    state, receipts = trained()
    told = report(counts(1, 0, 40), counts(1, 0, 40))
    header = PushHeader(
        0,
        1,
        1,
        1,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=4,
        steps=4,
        tokens=40,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=told,
        slot=3,
        incarnation=9,
    )
    more = replace(receipts[1][0], slot=4, tenure=7, merged_tokens=50, tenure_tokens=50)
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.close_superseded_tenures([header], [(*receipts[1], more)])
    core.apply_record(0, 1, [header], 1)
    core.apply_recovered_version(1, 1, 1, (*receipts[1], more), 1)
    core.start(0.0, (1, 1))
    assert core.ledger is not None and imbalances(core.ledger) == []
    assert [row.merged for row in core.ledger.rows()] == [40, 150]
    assert [slot.retired for slot in core.slots] == [False, False, True, True, True]
    assert [row.slot for row in core.receipt(1)] == [0, 1, 4]


def settled_without_it() -> dict[str, Any]:
    """The state of a syncer (epoch 2) that gave up version 1 of fragment 0, before it did."""
    life = restarted()
    state = life.core.state(0.0)
    life.join(12, 1)
    life.join(11, 0, held=HELD)
    life.do(ev.LostVersionFailed(11, 0))
    assert life.core.newest_settled_epoch == 2 and not life.core.is_recovering
    assert state["job"]["lineage"]["epochs"] == [1], "it has forgotten that"
    return state


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_what_was_given_up_is_not_taken_though_the_store_has_forgotten(first: int, began: bool) -> None:
    """A learner gave up its work on version 1 with the syncer; another comes with it from before."""
    # Whether the state is of epoch 2, and so tells from which versions that one began.
    life = Life(settled_without_it() if began else trained()[0], 3, (1, 1), behind=True)
    joins = [lambda: life.join(11, 0, held=((2, 0), (2, 0)), settled=(2, 2)), lambda: life.join(12, 1, held=HELD)]
    joins[first]()
    joins[1 - first]()
    assert life.core.newest_settled_epoch == 3, "given up once more"
    assert not of(life.log, ev.RequestVersion) and not of(life.log, ev.RestartFromStore)
    told = {a.connection: a for a in of(life.log, ev.Admit)}
    # If it is not known whether version 1 was in that history, its holder waits for the decision.
    waits = first == 1 or not began
    assert told[12].withheld == ({0} if waits else frozenset()) and told[11].withheld == frozenset()
    assert told[11].seat is not None and told[11].seat.continuing
    assert [a.fragment for a in of(life.log, ev.Announce)] == [0] * waits


@pytest.mark.parametrize("stored_first", [True, False])
def test_who_gave_up_what_was_taken_meanwhile_begins_anew(stored_first: bool) -> None:
    """Its pushes and confirmations are of a history in which version 1 never was. ``stored_first``: it comes when the
    record is durable; else while it is being made."""
    _, receipts = trained()
    life = Life(settled_without_it(), 3, (1, 1))
    life.join(12, 1, held=HELD)
    life.later(CONFIG.heartbeat_timeout - 1)
    life.do(ev.Reported(12, report(counts(1, 1, 0), counts(1, 0, 0))))
    life.later(2.0)
    (ask,) = of(life.log, ev.RequestVersion)
    assert life.core.check_version_upload(12, 0, ask.epoch, ask.version, receipts[0]) == ""
    life.do(ev.LostVersionAccepted(0))
    if stored_first:
        life.do(ev.LostVersionStored(0))
    (late,) = of(life.join(11, 0, held=((2, 0), (2, 0)), settled=(2, 2)), ev.Admit)
    assert late.seat is not None and not late.seat.continuing
    if not stored_first:
        life.do(ev.LostVersionStored(0))
    assert of(life.log, ev.RestartFromStore)

    for settled, continuing in (((2, 2), False), ((1, 1), True)):
        again = Core(CONFIG, json.loads(json.dumps(life.core.state(0.0))), 4, 0.0, wall=0.0)
        again.close_superseded_tenures([], [receipts[0]])
        again.apply_recovered_version(0, 1, 1, receipts[0], 3)
        again.start(0.0, (1, 1))
        back = a_join(21, 1, held=((2, 0), (2, 0)), settled=settled, previous_incarnation=9)
        (admit,) = of(again.handle(back, 0.0), ev.Admit)
        assert admit.seat is not None and admit.seat.continuing == continuing
        assert again.ledger is not None and imbalances(again.ledger) == []


def test_merges_in_the_store_tell_which_epochs_settled() -> None:
    """The state is of epoch 1, fragment 1 has a record of epoch 2: what epoch 1 had is history."""
    state, _ = trained()
    core = Core(CONFIG, state, 3, 0.0, wall=0.0)
    told = report(counts(2, 0, 80), counts(2, 0, 80))
    header = PushHeader(
        1,
        1,
        1,
        2,
        base_version=0,
        oldest_version=0,
        first_step=1,
        last_step=8,
        steps=8,
        tokens=80,
        compute_seconds=1.0,
        encoding="float32",
        layout_digest="L",
        report=told,
        slot=0,
        incarnation=1,
    )
    core.close_superseded_tenures([header], [])
    core.apply_record(1, 1, [header], 2)
    core.start(0.0, (1, 2))
    core.handle(a_join(11, 1, held=HELD), 0.0)
    actions = core.handle(a_join(12, 0, held=((2, 0), (2, 0)), settled=(1, 1)), 0.0)
    assert core.newest_settled_epoch == 3 and not of(actions, ev.RequestVersion), "given up"


def test_a_version_of_an_epoch_that_did_not_know_what_had_settled_is_not_taken() -> None:
    """Epoch 3 began from a store that had forgotten that epoch 2 went on without version 1."""
    life = Life(trained()[0], 4, (1, 1))
    life.join(11, 0, held=((3, 1), (3, 0)), settled=(1, 1))
    assert life.core.is_recovering
    actions = life.join(12, 1, held=((2, 0), (2, 0)), settled=(2, 2))
    assert life.core.newest_settled_epoch == 4 and not of(actions, ev.RequestVersion), "given up"
    life = Life(trained()[0], 4, (1, 1))
    life.join(11, 0, held=((3, 1), (3, 0)), settled=(2, 2))
    actions = life.join(12, 1, held=((2, 0), (2, 0)), settled=(2, 2))
    assert [ask.epoch for ask in of(actions, ev.RequestVersion)] == [3]


@pytest.mark.parametrize(("tenure", "continuing"), [(0, True), (1, True), (3, False)])
def test_a_tenure_that_a_lost_state_began_is_not_taken_for_the_one_before(tenure: int, continuing: bool) -> None:
    """Its process is the same, but counts from its new tenure's start."""
    state, _ = trained()
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.start(0.0, (1, 1))
    (admit,) = of(core.handle(a_join(11, 0, tenure=tenure, previous_incarnation=3), 0.0), ev.Admit)
    assert admit.seat is not None and admit.seat.continuing == continuing
    assert core.ledger is not None and imbalances(core.ledger) == []
    assert core.ledger.dropped(0, 0) == ({} if continuing else {"died": 70})


def test_an_incarnation_is_not_given_to_its_process_again() -> None:
    """Not even if that tenure is over: receipts tell one process's tenures apart by it."""
    state, _ = trained()
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.start(0.0, (1, 1))
    newest = core._state.members.next_incarnation
    back = a_join(11, 0, tenure=newest, previous_incarnation=0)
    (admit,) = of(core.handle(back, 0.0), ev.Admit)
    assert admit.seat is not None and admit.seat.incarnation == newest + 1


@pytest.mark.promise("One learner's messages do not change the numbers of all incarnations", section="Hostile callers")
def test_an_incarnation_that_no_lost_state_can_have_given_is_not_reserved() -> None:
    """Else what one learner says moves the numbers of all, durably."""
    state, _ = trained()
    core = Core(CONFIG, state, 2, 0.0, wall=0.0)
    core.start(0.0, (1, 1))
    newest = core._state.members.next_incarnation
    (admit,) = of(core.handle(a_join(11, 0, tenure=1 << 31, previous_incarnation=1 << 31), 0.0), ev.Admit)
    assert admit.seat is not None and admit.seat.incarnation == newest


def test_a_tenure_from_before_version_0_goes_on() -> None:
    """It began under its first incarnation, though it was seated again before there were books."""
    life = Life(None, 1)
    life.join(1, 0, previous_incarnation=0)
    life.do(ev.ConnectionLost(1))
    life.join(2, 0, previous_incarnation=1, tenure=1, slot=0)
    life.do(ev.InitialModelStored("L", (8, 8)))
    (admit,) = of(life.join(3, 0, previous_incarnation=2, tenure=1, slot=0), ev.Admit)
    assert admit.seat is not None and admit.seat.continuing


@pytest.mark.parametrize(("slot", "continuing"), [(1, True), (0, False)])
def test_in_a_copy_from_before_version_0_a_tenure_goes_on_in_its_own_slot_only(slot: int, continuing: bool) -> None:
    """Receipts count by slot: in another one, what is merged of the tenure would be trained twice."""
    life = Life(None, 1)
    life.join(1, 1, previous_incarnation=0)
    copy = life.core.state(0.0)
    life = Life(copy, 9)
    (admit,) = of(life.join(2, 1, held=HELD, previous_incarnation=7, tenure=6, slot=slot), ev.Admit)
    assert admit.seat is not None and (admit.seat.slot, admit.seat.continuing) == (1, continuing)
    assert admit.seat.tenure == (6 if continuing else admit.seat.incarnation)


def test_receipts_on_the_wire() -> None:
    rows = tuple(
        SlotReceipt(
            slot,
            (1 << 64) - 1 - slot,
            1 << 40,
            1 << 39,
            sequence=1 << 20,
            version=1 << 20,
            last_step=1 << 30,
            compute_seconds=1e9,
        )
        for slot in range(500)
    )
    assert convert.parse_receipt(convert.receipt_message(rows).SerializeToString())[1] == rows
    with pytest.raises(limits.WireError):
        convert.parse_receipt(b"\xff" * 20)
