"""What a state that was written before impossible numbers were refused may hold, and is repaired of at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from core_desk import Desk, config, of, report
from diloco_protocol.spec.load import parse_job
from diloco_protocol.wire import convert, limits
from diloco_protocol.wire.records import Evaluation, FragmentReport, StepReport
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.leases import MAX_SORTED, Permutation, order_blocks
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.reports import find_nonsense
from ledger_balance import imbalances
from shell_figures import SHELL

MOST = limits.MAX_COUNT


def saved() -> dict[str, Any]:
    """The state of a job whose two learners have trained and merged."""
    desk = Desk(config(evaluated=True))
    desk.begin(2)
    desk.report(1, 4)
    desk.push(0, 4)
    desk.push(1, 4)
    (merge,) = of(desk.log, ev.Merge)
    desk.do(ev.MergeDurable(0, merge.version, 0.1, (1.0, 1.0)))
    state: dict[str, Any] = json.loads(json.dumps(desk.core.state(0.0)))
    return state


def closed_tenures(state: dict[str, Any]) -> None:
    state["ledger"][1]["trained"] = 4 * MOST
    state["ledger"][1]["cells"][0]["dropped"] = {"died": 4 * MOST}


def merged(state: dict[str, Any]) -> None:
    state["ledger"][1]["cells"][0]["merged"] = 4 * MOST


def open_report(state: dict[str, Any]) -> None:
    state["ledger"][1]["report"]["trained_tokens"] = MOST
    state["ledger"][1]["report"]["fragments"][0][3] = MOST


def steps(state: dict[str, Any]) -> None:
    state["members"]["slots"][1].update(step=MOST, step_at_seat=MOST, merged_last_step={"0": MOST})


def incarnation(state: dict[str, Any]) -> None:
    state["members"]["next_incarnation"] = 1 << 64


def scores(state: dict[str, Any]) -> None:
    state["scores"]["rows"] = [[tokens, 1.0] for tokens in range(5000)] + [[1 << 61, -1e300]]


def data_set(state: dict[str, Any]) -> None:
    row = {"sequences": MOST, "slots": 2, "issued": 0, "given": [0, 0], "next_lease": 1, "held": {}, "returned": []}
    state["leases"] = row


@pytest.mark.promise("A state that holds impossible numbers is repaired at the start", section="Hostile callers")
@pytest.mark.parametrize("spoil", [closed_tenures, merged, open_report, steps, incarnation, scores, data_set])
def test_a_state_with_impossible_numbers_is_repaired_at_the_start(spoil: Any) -> None:
    state = saved()
    spoil(state["job"])
    desk = Desk(config(evaluated=True), state, 2)
    assert [event.kind.value for event in of(desk.log, ev.RecordEvent)].count("repaired") == 1
    assert not imbalances(desk.core.ledger)
    # It can be told to anybody, and written: what comes out of it fits its messages.
    for fragment in range(len(desk.core.versions)):
        assert convert.parse_receipt(convert.receipt_message(desk.core.receipt(fragment)).SerializeToString())[1]
    document = desk.core.status(0.0, SHELL)
    assert document.tokens.trained < 1 << 60 and len(document.eval_loss) <= 1000
    # Honest learners come back, train and are merged.
    for connection in (1, 2):
        (admitted,) = of(desk.join(connection, connection - 1, sequences=1000), ev.Admit)
        assert admitted.seat is not None
        assert convert.from_wire(type(admitted.seat), convert.to_wire(admitted.seat)) == admitted.seat
    json.dumps(desk.core.state(0.0))


def test_a_sane_state_is_left_as_it_is() -> None:
    state = saved()
    desk = Desk(config(evaluated=True), json.loads(json.dumps(state)), 2)
    assert "repaired" not in [event.kind.value for event in of(desk.log, ev.RecordEvent)]
    assert json.loads(json.dumps(desk.core.state(0.0)))["job"]["ledger"] == state["job"]["ledger"]


@pytest.mark.promise(
    "Scores are accepted only for models that existed, and their curve is bounded", section="Hostile callers"
)
def test_scores_are_of_models_that_there_were_and_the_curve_is_bounded() -> None:
    desk = Desk(config(evaluated=True))
    desk.begin(1)
    desk.report(1, 2000)
    desk.do(ev.Join(8, "e", "r", 0, evaluator=True, layout_digest="L", digests={}, sequences=0, held=()))
    with pytest.raises(ev.BadMessage, match="of 1 merges, where the job has had 0"):
        desk.do(ev.Evaluated(8, Evaluation(10, 1.0, 1, False)))
    assert desk.core._state.rounds is not None
    desk.core._state.rounds.versions[0] = 5000
    for merges in range(5000):
        desk.do(ev.Evaluated(8, Evaluation(4 * merges, 5000.0 - merges, merges, False)))
    curve = desk.core.status(0.0, SHELL).eval_loss
    assert 300 < len(curve) <= 1000 and curve[0] == (0, 5000.0) and curve[-1] == (4 * 4999, 1.0)
    assert [tokens for tokens, _ in curve] == sorted({tokens for tokens, _ in curve})
    desk.do(ev.Evaluated(8, Evaluation(1 << 40, 0.5, 5000, False)))
    assert desk.core.status(0.0, SHELL).eval_loss[-1] == (20000, 0.5), "no more than were trained"


@pytest.mark.promise(
    "Only the learner that was asked for its optimizer state can answer that it has none", section="Hostile callers"
)
def test_only_the_learner_that_was_asked_can_say_that_it_has_no_state() -> None:
    desk = Desk(config(slots=3))
    desk.begin(2)
    desk.report(1, 5)
    desk.join(3, 2)
    (ask,) = of(desk.do(ev.PeerStateRequested(3)), ev.RequestPeerState)
    for other in (2, 3, 99):
        assert not of(desk.do(ev.PeerStateFailed(other, ask.transfer)), ev.RequestPeerState)
    (told,) = of(desk.do(ev.PeerStateFailed(ask.connection, ask.transfer)), ev.OfferPeerState)
    assert told.transfer == 0


@pytest.mark.promise("A data set's claimed size costs neither memory nor time", section="Hostile callers")
@pytest.mark.parametrize("size", [MAX_SORTED + 1, 3 * MAX_SORTED, 1 << 28])
def test_the_order_of_a_large_data_set_is_a_permutation_made_on_demand(size: int) -> None:
    order = order_blocks(7, 0, size)
    assert isinstance(order, Permutation) and len(order) == size
    if size < 1 << 20:
        assert sorted(order[i] for i in range(size)) == list(range(size))
    first = [order[i] for i in range(1000)]
    assert len(set(first)) == 1000 and first != sorted(first) and max(first) > size // 2
    assert (
        first
        == [order_blocks(7, 0, size)[i] for i in range(1000)]
        != [order_blocks(7, 1, size)[i] for i in range(1000)]
    )


def told(slot_step: int, steps: int, tokens: int, *row: int) -> StepReport:
    """``row``: the fragment's tokens above the base, confirmed, and dropped for each reason."""
    return StepReport(slot_step, steps, tokens, (FragmentReport(1, 0, steps, *row),))


FURTHEST = limits.MAX_STEPS
BOUNDS = [
    (told(4 + FURTHEST, 4, 40, 40), told(5 + FURTHEST, 4, 40, 40), "no slot gets so far"),
    (told(4 + FURTHEST, FURTHEST, 40, 40), told(4 + FURTHEST, FURTHEST + 1, 40, 40), "no slot gets so far"),
    (told(5, 5, 40, 40), told(5, 6, 40, 40), "6 steps trained, in a slot at step 5"),
    (told(4, 4, 40, 40), told(4, 4, 41, 40), "41 tokens in 4 steps: at most 40 are possible"),
    *(
        (told(4, 4, 40, *[10] * 4), told(4, 4, 40, *(10 + (i == more) for i in range(4))), "more tokens than the 40")
        for more in range(4)
    ),
]


@pytest.mark.parametrize(("possible", "impossible", "words"), BOUNDS)
def test_what_one_report_claims_is_bounded_and_an_honest_one_is_not(
    possible: StepReport, impossible: StepReport, words: str
) -> None:
    desk = Desk(config(slots=1, step_tokens=10))
    desk.begin(1)
    desk.report(1, 4)
    assert find_nonsense(desk.core._state, desk.core._state.members.slots[0], possible) == ""
    with pytest.raises(ev.BadMessage, match=words):
        desk.do(ev.Reported(1, impossible))
    assert desk.core.trained_tokens == 40


def test_all_tenures_of_a_slot_train_no_more_than_is_counted_exactly() -> None:
    desk = Desk(config(slots=1))
    desk.begin(1)
    assert desk.core.ledger is not None
    desk.core.ledger.books[0].trained = limits.MAX_SLOT_TOKENS - 50  # of the tenures before
    desk.report(1, 5)
    with pytest.raises(ev.BadMessage, match="60 tokens: no slot trains so many"):
        desk.report(1, 6)


def test_a_batch_may_be_raised_while_the_syncer_runs() -> None:
    """It has read the job as it was, and knows no learner's batch."""
    text = "{apiVersion: diloco.io/v1alpha1, kind: DiLoCoJob, metadata: {name: j}, spec: {training: {model: {config: "
    text += "{model_type: llama}}, data: {paths: [a], sequenceLength: 4}, batch: {sequences: 1}}, "
    text += "regions: [{learners: 1}]}}"
    desk = Desk(config(slots=1, step_tokens=CoreConfig.from_job(parse_job(text)).step_tokens))
    desk.begin(1)
    desk.do(ev.Reported(1, replace(report(50), trained_tokens=50 * 4096)))
    assert desk.core.trained_tokens == 50 * 4096
