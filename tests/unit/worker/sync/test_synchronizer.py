"""Which pushes a learner makes: one for each pull, none of work that it knows to be merged. And what version 0 is."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from diloco_protocol.spec.load import parse_job
from diloco_protocol.vocabulary import JobPhase, PushRefusal
from diloco_protocol.wire.records import Announcement, Payload, Pull, Seat
from diloco_worker.fragments import ModelFragments, Vector, build_layout
from diloco_worker.net.inbox import Downloaded, Inbox, InitialRequested, PhaseChanged, PushAnswered
from diloco_worker.net.transfers import Push
from diloco_worker.settings import RefusedError
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint
from diloco_worker.sync.step_metrics import StepMetrics
from diloco_worker.sync.synchronizer import Synchronizer

JOB = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: one}
spec:
  training: {model: null, data: null, stop: {steps: 100}, evaluation: null}
  sync: {fragments: 1, every: 4}
  learners: {command: [python, x.py]}
  regions: [{name: r, learners: 1}]
"""


def answer(sequence: int, accepted: bool | None, reason: str = "") -> PushAnswered:
    return PushAnswered(0, sequence, accepted, reason, message="")


class Scripted:
    """A learner of one fragment that has made a step on version 0, or of more and has none yet; its syncer says
    what the test says."""

    def __init__(self, fragments: int = 1) -> None:
        model = torch.nn.Linear(4, 2 if fragments == 1 else 40)
        layout = build_layout(model, fragments)
        self.inbox, self.pushes = Inbox(), list[Push]()
        self.client: Any = Mock(report_wanted=False, push=self.pushes.append)
        inner = InnerOptimizers(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.fragments = ModelFragments(model, layout)
        self.synchronizer = Synchronizer(
            parse_job(JOB).spec,
            model,
            inner,
            layout,
            client=self.client,
            inbox=self.inbox,
            fragments=self.fragments,
            checkpoint=SlotCheckpoint(None, "one", layout.digest, 60, limit=1),
            metrics=StepMetrics(),
            stopping=lambda: False,
        )
        self.hear(PhaseChanged(JobPhase.TRAINING, ""), self.seat(1))
        if fragments > 1:
            return
        self.hear(self.download(0))
        with torch.no_grad():
            model.bias.add_(1.0)
        self.step()

    def seat(self, incarnation: int) -> Seat:
        return Seat(0, incarnation, False, 0, slot_tokens=0, leases=(), tenure=incarnation)

    def announcement(self, version: int, merged: int = 0) -> Announcement:
        return Announcement(
            0,
            1,
            version,
            Payload("float32", 40, version),
            merged_sequence=merged,
            merged_version=version * bool(merged),
        )

    def download(self, version: int, merged: int = 0) -> Downloaded:
        theta = Vector.from_array(np.full(10, version, np.float32))
        return Downloaded(self.announcement(version, merged), theta)

    def hear(self, *messages: Any) -> None:
        for message in messages:
            self.inbox.put(message)
        self.synchronizer.run_boundary()

    def step(self) -> None:
        self.synchronizer.complete_step(8, 0.1)

    def base(self) -> int:
        state = self.synchronizer.adoption.fragments[0]
        assert state.base is not None
        return state.base.version


@pytest.mark.promise("A repeated pull does not send a push twice; if its push was refused, the pull is answered anew")
def test_a_repeated_pull_is_answered_only_where_its_push_came_to_nothing() -> None:
    one = Scripted()

    def pull(round: int) -> list[int]:
        """Sequences of the pushes that follow."""
        before = len(one.pushes)
        one.hear(Pull(round, 0, 1, 0))
        one.step()
        return [push.plan.sequence for push in one.pushes[before:]]

    assert (pull(7), pull(7)) == ([1], []), "it is on its way"
    one.hear(answer(1, False, PushRefusal.OTHER_ROUND))
    assert pull(7) == [2]
    one.hear(answer(2, None))
    assert pull(7) == [3]
    one.hear(answer(3, True))
    assert pull(7) == [], "it is there"
    assert pull(8) == [4]


def test_what_is_announced_as_merged_is_not_pushed_again_from_the_old_base() -> None:
    one = Scripted()
    one.hear(Pull(1, 0, 1, 0))
    one.hear(one.announcement(1, merged=1), Pull(2, 0, 1, 1))
    one.step()
    assert len(one.pushes) == 1
    one.hear(one.download(1, merged=1))
    assert [(push.plan.base_version, push.plan.steps) for push in one.pushes] == [(0, 1), (1, 1)]


def test_a_merged_offer_is_over_whatever_is_answered_later() -> None:
    """Its first answer was lost. Held back until it has one, its merge would name a push that is forgotten by then."""
    one = Scripted()
    one.synchronizer.begin_drain()
    assert one.synchronizer.offer_fragment(0) == 1
    one.hear(one.download(1, merged=1))
    assert (one.base(), one.synchronizer.adoption.pending_tokens(0)) == (1, 0)
    one.hear(answer(1, False, PushRefusal.ENDED), one.download(2))
    assert one.base() == 2


def test_an_emptied_store_is_rebuilt_of_merged_versions_only() -> None:
    """The syncer that asks has never heard of this learner's tenure, so a new one has just begun."""
    one = Scripted()
    one.hear(one.seat(2), InitialRequested())
    ((vectors, *_), _) = one.client.upload_initial.call_args
    assert [vector.array.tolist() for vector in vectors] == [[0.0] * 10]


@pytest.mark.promise("A job never begins anew from a model of which some fragments are an earlier life's")
@pytest.mark.parametrize("version", [0, 3])
def test_who_holds_some_fragments_of_a_lost_model_begins_no_other_with_them(version: int) -> None:
    one = Scripted(fragments=2)
    elements = one.synchronizer.layout.elements(0)
    one.hear(Downloaded(one.announcement(version), Vector.from_array(np.full(elements, 1.0, np.float32))))
    if version:
        with pytest.raises(RefusedError, match="empty-store"):
            one.hear(InitialRequested())
    else:
        one.hear(InitialRequested())
    assert one.client.upload_initial.called == (not version), "of version 0 the others are this learner's own"
