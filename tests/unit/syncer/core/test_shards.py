"""Fragments are dealt to shards by their size, by a rule that a restart repeats."""

from __future__ import annotations

import random

from core_desk import Desk, config
from diloco_protocol.spec.load import parse_job
from diloco_syncer.core import events as ev
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.shards import Shards, deal_fragments


def test_the_largest_is_dealt_first_to_whoever_has_the_least() -> None:
    assert deal_fragments([5, 3, 3, 2], 2) == (0, 1, 1, 0)
    assert deal_fragments([2, 3, 3, 5], 2) == (0, 1, 1, 0)
    assert deal_fragments([4, 4, 4, 4, 4], 2) == (0, 1, 0, 1, 0), "equal ones in their order"
    assert deal_fragments([7, 7], 1) == (0, 0)
    assert deal_fragments([], 3) == ()


def test_every_shard_has_a_fragment_where_there_are_enough() -> None:
    assert deal_fragments([9, 9], 4) == (0, 1), "two have none"
    assert deal_fragments([100, 0, 0, 0], 3) == (0, 1, 2, 1), "those without an element, too"
    chance = random.Random(1)
    for _ in range(200):
        elements = [chance.randrange(1, 1000) for _ in range(chance.randint(1, 30))]
        shards = chance.randint(1, 6)
        dealt = deal_fragments(elements, shards)
        loads = [sum(n for n, its in zip(elements, dealt, strict=True) if its == shard) for shard in range(shards)]
        assert len(set(dealt)) == min(shards, len(elements))
        assert max(loads) - min(loads) <= max(elements)


def test_a_fragment_is_served_unless_its_shard_is_lost() -> None:
    shards = Shards(3)
    shards.deal([8, 8])
    shards.lost[2] = 0.0
    assert shards.all_served and shards.is_served(0), "the third has no fragment"
    shards.lost[1] = 0.0
    assert not shards.all_served and shards.is_served(0) and not shards.is_served(1)
    assert shards.fragments(1) == [1]


def test_the_job_says_how_many_shards_there_are() -> None:
    text = """
apiVersion: diloco.io/v1alpha1
kind: DiLoCoJob
metadata: {name: j}
spec:
  training: {model: null, data: null, stop: {steps: 10}, evaluation: null}
  learners: {command: [python, x.py]}
  regions: [{name: local, learners: 3}]
"""
    job = parse_job(text)
    assert CoreConfig.from_job(job).shards == 1
    syncer = job.spec.syncer.model_copy(update={"shards": 3})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"syncer": syncer})})
    assert CoreConfig.from_job(job).shards == 3


def test_a_restart_deals_as_before_and_everything_is_served() -> None:
    desk = Desk(config(shards=2))
    desk.join(1, 0)
    desk.do(ev.InitialModelStored("L", (2, 3, 3, 5)))
    desk.do(ev.ShardLost(1))
    again = Desk(config(shards=2), desk.core.state(0.0), epoch=2)
    shards = again.core._state.shards
    assert (shards.of, shards.lost) == ((0, 1, 1, 0), {})
