"""The adoption rule: how many snapshots are open, and of which version the steps above a base are."""

from __future__ import annotations

import pytest

from diloco_protocol.wire.records import Announcement, Payload
from diloco_worker.core import adoption as adoption_rule
from diloco_worker.core.adoption import Adoption, AdoptionConfig, Kind


def news(version: int, epoch: int = 1, merged: tuple[int, int] = (0, 0)) -> Announcement:
    return Announcement(0, epoch, version, Payload("float32", 4, 1000 * epoch + version), *merged)


def learner(offers: int = 0) -> tuple[Adoption, list[tuple[int, ...]]]:
    """With so many offers, a step of 10 tokens before each; and what each of them gave up."""
    adoption = Adoption(AdoptionConfig(1, 4, 1, max_versions=9))
    adoption.begin_tenure(0)
    adoption.on_broadcast(news(0))
    given_up = []
    for _ in range(offers):
        adoption.on_step(10, 1.0)
        planned = adoption.snapshot(0, 0)
        assert planned is not None
        given_up.append(planned[1])
    return adoption, given_up


def test_the_values_of_eight_snapshots_are_kept() -> None:
    adoption, given_up = learner(offers=10)
    assert given_up == [()] * 8 + [(1,), (2,)]
    decision = adoption.on_broadcast(news(1, merged=(3, 1)))
    assert (decision.kind, decision.reference) == (Kind.KEEP, 3)
    adoption, _ = learner(offers=10)
    assert adoption.on_broadcast(news(1, merged=(2, 1))).kind is Kind.OVERWRITE, "there is nothing to subtract"
    assert adoption.report().fragments[0].dropped_overlap == 80


def test_the_oldest_of_very_many_snapshots_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption_rule, "_MOST_OPEN", 20)
    adoption, _ = learner(offers=21)
    assert adoption.on_broadcast(news(1, merged=(2, 1))).kind is Kind.OVERWRITE
    adoption, _ = learner(offers=21)
    assert adoption.on_broadcast(news(1, merged=(1, 1))).kind is Kind.STOP


def test_no_step_is_said_to_be_of_a_version_that_was_lost() -> None:
    """A syncer of a higher epoch goes on from version 1; the second step was made on a version 5 that it has not."""
    adoption, _ = learner(offers=1)
    assert adoption.on_broadcast(news(5)).kind is Kind.REBASE
    adoption.on_step(10, 1.0)
    assert adoption.on_broadcast(news(1, epoch=2)).kind is Kind.REBASE
    assert adoption.on_broadcast(news(2, epoch=2, merged=(1, 2))).kind is Kind.KEEP
    planned = adoption.snapshot(0, 0)
    assert planned is not None
    assert (planned[0].tokens, planned[0].base_version, planned[0].oldest_version) == (10, 2, 1)


def test_the_fate_of_a_push_is_open_until_it_is_merged() -> None:
    """It came too late for version 4, and waits for version 5; a syncer goes on in another epoch meanwhile."""
    adoption, _ = learner()
    adoption.on_broadcast(news(3))
    adoption.on_step(10, 1.0)
    planned = adoption.snapshot(0, 7)
    assert planned is not None and planned[0].base_version == 3
    assert adoption.on_broadcast(news(3, epoch=2)).move == (1,)
    assert adoption.on_broadcast(news(4, epoch=2)).move == (1,)
    assert adoption.on_broadcast(news(5, epoch=2, merged=(1, 5))).forget == (1,)
