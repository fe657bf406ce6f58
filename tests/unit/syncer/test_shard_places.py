"""shards/coordinator.py: whose words count when one process of a shard follows another before its end is heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from diloco_syncer.core import events as ev
from diloco_syncer.shards import messages as ms
from diloco_syncer.shards.coordinator import Coordinator, ShardState


class Stream:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: ms.ToShard) -> None:
        self.sent.append(message)


async def test_a_process_that_takes_anothers_place_is_not_lost_with_it() -> None:
    told: list[ev.Event] = []
    others: Any = SimpleNamespace(epoch=1, layout=object(), newest=[])
    nothing: Any = lambda *_: None  # noqa: E731
    places = [ShardState(0)]
    coordinator = Coordinator(
        others,
        others,
        merger=others,
        callers=others,
        check_push=nothing,
        emit=told.append,
        run_task=nothing,
        restart=nothing,
        on_change=nothing,
        shards=places,
    )
    first, second = Stream(), Stream()
    coordinator.connect_shard(0, first)
    places[0].serving = True
    coordinator.connect_shard(0, second)
    assert told == [ev.ShardLost(0)], "the core hears of the first one's end"
    await coordinator.take_message(0, first, ms.StoreProblem("of the first"))
    coordinator.lose_shard(0, first, "its end is heard")
    assert places[0].stream is second and places[0].problem == "" and told == [ev.ShardLost(0)]
    assert [type(message) for message in second.sent] == [ms.Begin]
