"""What ranks tell each other through a real store; the other rank is played by the test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from diloco_worker.group.rank_watch import RankWatch
from patience import wait_until


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    c10d: Any = dist.distributed_c10d
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setattr(c10d, "_get_default_store", lambda: made)
    return c10d.PrefixStore("diloco-ranks", made)


@pytest.fixture
def suspects() -> list[bool]:
    return [True]


@pytest.fixture
def watch(store: Any, suspects: list[bool]) -> Iterator[RankWatch]:
    group: Any = SimpleNamespace(size=2, rank=0, number=7)  # what it knows of a Group
    made = RankWatch(group, 0.01, lambda: suspects[0])
    yield made
    made.stop()


def tell(store: Any, turn: int, command: int) -> None:
    store.set("1", json.dumps([turn, command, False, "loop.py:3 (sleep)"]))


def test_a_rank_is_gone_that_tells_nothing_new_and_behind_that_tells_where_it_is(
    watch: RankWatch, store: Any, suspects: list[bool]
) -> None:
    assert watch.describe() == "rank 0 of this learner, or torchrun, does not answer"
    tell(store, 1, command=7)
    wait_until(lambda: watch.describe().startswith("rank 1 of this learner gives no sign"), "a silent rank", longest=30)
    tell(store, 2, command=6)
    wait_until(
        lambda: watch.describe().startswith("the others wait for rank 1: rank 0 at "), "a rank behind", longest=30
    )
    assert "rank 1 at loop.py:3 (sleep)" in watch.describe()
    suspects[0] = False  # it goes on: what was read is of no later hang
    wait_until(lambda: "does not answer" in watch.describe(), "an end of it", longest=30)
