"""The deterministic schedule: snapshots exactly at their due steps, adoption exactly τ steps later."""

from __future__ import annotations

import pytest

from diloco_protocol.spec.training import StopSpec
from diloco_protocol.wire.records import Announcement, Payload, PushPlan, StepReport
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Kind, Rule
from diloco_worker.fragments import Vector
from diloco_worker.net.transfers import Push
from diloco_worker.sync.deterministic import DeterministicMode, first_due

VECTOR = Vector.__new__(Vector)


def news(version: int, fragment: int = 0, merged: tuple[int, int] = (0, 0)) -> Announcement:
    return Announcement(fragment, 1, version, Payload("float32", 4, version), *merged)


def pushed(plan: PushPlan) -> Push:
    return Push(plan, VECTOR, VECTOR, StepReport())


@pytest.mark.parametrize(("fragments", "every", "overlap"), [(1, 1, 0), (3, 4, 1), (4, 4, 3), (24, 24, 2), (5, 24, 0)])
def test_the_deterministic_schedule(fragments: int, every: int, overlap: int) -> None:
    """Driven for three turns: snapshots exactly at o_p + k·H, adoption exactly τ steps later."""
    config = AdoptionConfig(fragments, every, overlap, Rule.KEEP)
    adoption = Adoption(config)
    mode = DeterministicMode(adoption)
    adoption.begin_tenure(0)
    for p in range(fragments):
        adoption.on_broadcast(news(0, p))
    taken: dict[int, list[int]] = {p: [] for p in range(fragments)}
    for step in range(1, 3 * every + overlap + 1):
        adoption.on_step(1, 0.0)
        for p in range(fragments):
            if mode.adoption_step(p) == step:
                adopt(adoption, mode, p)
            if mode.due(p):
                base = adoption.fragments[p].base
                assert base is not None
                planned = adoption.snapshot(p, base.version + 1)
                assert planned is not None
                mode.on_push(pushed(planned[0]))
                taken[p].append(step)
                assert mode.adoption_step(p) == step + overlap
                assert mode.may_adopt(p) == (overlap == 0)
                if overlap == 0:
                    adopt(adoption, mode, p)
            assert not mode.due(p)
    for p in range(fragments):
        offset = -(-(p + 1) * every // fragments)
        assert offset == first_due(p, config) <= every
        assert taken[p] == [s for s in range(1, 3 * every + overlap + 1) if s >= offset and (s - offset) % every == 0]


def adopt(adoption: Adoption, mode: DeterministicMode, fragment: int) -> None:
    state = adoption.fragments[fragment]
    assert state.base is not None
    version = state.base.version + 1
    assert adoption.on_broadcast(news(version, fragment, merged=(state.sequence, version))).kind is Kind.KEEP
    mode.on_adopted(fragment)


@pytest.mark.parametrize(("began", "version", "due"), [(2, 0, True), (2, 1, False), (6, 1, True), (6, 2, False)])
def test_a_newcomer_answers_for_the_due_step_that_it_missed(began: int, version: int, due: bool) -> None:
    """Fragment 0 is due at 2, 6, …: the merge of the last of these waits for this slot, or was made without it."""
    adoption = Adoption(AdoptionConfig(2, 4, 1))
    mode = DeterministicMode(adoption)
    adoption.begin_tenure(began)
    adoption.on_broadcast(news(version, 0))
    adoption.on_broadcast(news(1, 1))
    adoption.on_step(1, 0.0)
    assert mode.due(0) == due and not mode.due(1)


def test_a_push_without_an_answer_is_sent_again_until_its_fate_is_known() -> None:
    adoption = Adoption(AdoptionConfig(1, 2, 1))
    mode = DeterministicMode(adoption)
    adoption.on_broadcast(news(0))
    for step in (1, 2):
        adoption.on_step(1, 0.0)
        assert mode.due(0) == (step == 2) and not mode.must_wait
    planned = adoption.snapshot(0, 1)
    assert planned is not None
    push = pushed(planned[0])
    mode.on_push(push)
    assert mode.unmerged_pushes == [push] and mode.awaits_merges and not mode.must_wait
    adoption.on_step(1, 0.0)
    assert mode.must_wait, "the merge is adopted exactly one step later"
    mode.on_resolved(0, adoption.on_push_answer(0, 1, refused=True))
    assert mode.unmerged_pushes == [] and not mode.awaits_merges and not mode.must_wait


def test_a_slot_stops_at_its_own_share() -> None:
    adoption = Adoption(AdoptionConfig(1, 2, 1))
    mode = DeterministicMode(adoption)
    assert not mode.reached_stop(StopSpec(steps=1), 3, 0)
    assert [mode.reached_stop(StopSpec(tokens=100), 3, tokens) for tokens in (33, 34)] == [False, True]
    assert not mode.reached_stop(StopSpec(seconds=1), 3, 10**9)
    adoption.on_broadcast(news(0))
    adoption.on_step(1, 0.0)
    assert mode.reached_stop(StopSpec(steps=1), 3, 0)
