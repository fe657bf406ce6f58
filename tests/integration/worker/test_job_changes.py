"""A job that is changed while it runs: its syncer is started again with another job file, and learners go on
with theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pods import Hub, Pod, make_job

pytestmark = pytest.mark.timeout(300)


class Cluster:
    """A hub and the pods that an operator would run for its job."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.hub = Hub(folder, make_job(**job)).start().serves()
        self.pods: dict[tuple[str, int], Pod] = {}
        self.gone: list[Pod] = []

    def scale(self, **regions: int) -> None:
        """As an operator: the syncer with the new job, then pods."""
        self.hub.restart(make_job(learners=regions))
        self.place(**regions)

    def place(self, **regions: int) -> None:
        wanted = [(region, i) for region, count in regions.items() for i in range(count)]
        for place in wanted:
            if place not in self.pods:
                self.pods[place] = Pod(self.hub, place[1], place[0]).start()
        for place in [place for place in self.pods if place not in wanted]:
            pod = self.pods.pop(place)
            self.gone.append(pod)
            code, _ = pod.terminate()
            assert code == 0 and "drained: slot" in pod.text(), pod.text()[-2000:]

    def slots(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Rows of the slots that are held, by place."""
        return {
            (row["region"], row["ordinal"]): row
            for row in self.hub.status()["slots"]
            if row["state"] in ("active", "draining")
        }

    def trains(self, learners: int) -> None:
        """Everybody is active, and every one of them trains and is merged from here on."""
        hub = self.hub
        hub.waits_until(
            lambda s: s["phase"] == "training" and s["quorum"]["active"] == learners, f"{learners} learners"
        )
        before = {row["slot"]: (row["step"], row["merged_pushes"]) for row in hub.status()["slots"]}

        def goes_on(status: dict[str, Any]) -> bool:
            rows = [row for row in status["slots"] if row["state"] == "active"]
            return len(rows) == learners and all(
                row["step"] > before[row["slot"]][0] and row["merged_pushes"] > before[row["slot"]][1] for row in rows
            )

        hub.waits_until(goes_on, "steps and merges of everybody")

    def close(self) -> None:
        for one in (self.hub, *self.pods.values(), *self.gone):
            one.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(**job: Any) -> Cluster:
        made.append(Cluster(tmp_path, **job))
        return made[-1]

    yield make
    for one in made:
        one.close()


def exact(report: dict[str, Any]) -> None:
    trained = report["tokens"]["trained"]
    for row in report["ledger"]:
        assert row["merged"] + row["pending"] + row["dropped"] == trained, row
        assert sum(row["reasons"].values()) == row["dropped"], row


@pytest.mark.promise(
    "A job grows from three learners to five and shrinks to two: those who stay keep process and slot, "
    "and no token is lost"
)
@pytest.mark.slow
@pytest.mark.ci
def test_three_five_two_and_not_a_token_is_lost(cluster: Callable[..., Cluster]) -> None:
    house = cluster(learners={"a": 2, "b": 1})
    house.place(a=2, b=1)
    house.trains(3)
    kept = {place: row["slot"] for place, row in house.slots().items()}
    processes = {place: pod.process.pid for place, pod in house.pods.items() if pod.process}

    house.scale(a=3, b=2)
    house.trains(5)
    slots = house.slots()
    assert {place: slots[place]["slot"] for place in kept} == kept, "who was there has kept the slot"
    # Newcomers began where the job was, not at its beginning.
    assert min(slots[place]["step"] for place in (("a", 2), ("b", 1))) > 5
    assert all(slots[place]["steps"] < slots[place]["step"] for place in (("a", 2), ("b", 1)))
    assert not any(row["retired"] for row in house.hub.status()["slots"])

    house.scale(a=1, b=1)
    house.trains(2)
    status = house.hub.status()
    rows = {row["slot"]: row for row in status["slots"]}
    assert sum(row["retired"] for row in rows.values()) == 3
    assert {row["state"] for row in rows.values() if row["retired"]} == {"drained"}
    assert {place: row["slot"] for place, row in house.slots().items()} == {
        place: kept[place] for place in (("a", 0), ("b", 0))
    }
    assert status["standby"] == 0 and status["epoch"] == 3
    # Learners kept running all the while, each with the job file that it began with.
    for place in (("a", 0), ("b", 0)):
        pod = house.pods[place]
        assert pod.running and pod.process and pod.process.pid == processes[place]
        assert "the syncer's settings differ" in pod.text()
    asyncio.run(house.hub.call("announce", phase="suspended", message="enough"))
    house.hub.waits_until(lambda s: s["phase"] == "suspended", "the end")
    report = house.hub.report()
    exact(report)
    assert report["tokens"]["dropped"] == 0, report["ledger"]
    assert [row["retired"] for row in report["learners"]].count(True) == 3
    assert report["tokens"]["trained"] == sum(row["tokens"] for row in report["learners"])


@pytest.mark.slow
def test_settings_that_change_reach_learners_that_run(cluster: Callable[..., Cluster]) -> None:
    house = cluster(learners=2, compression={"up": "int4", "down": "bfloat16"}, quorum=1)
    house.place(local=2)
    house.trains(2)
    before = house.hub.status()
    changes: dict[str, Any] = {
        "learners": 2,
        "quorum": 2,
        "every": 6,
        "overlap": 2,
        "compression": {"up": "int8", "errorFeedback": True, "down": "delta-int8"},
        "adoption": {"rule": "mix", "alpha": 0.25},
        "outer": {"optimizer": "adamw", "lr": 0.01},
        "staleness": {"maxVersions": 9_999},
        "merge": {"method": "mean"},
    }
    house.hub.restart(make_job(**changes))
    house.trains(2)
    status = house.hub.status()
    # No push was refused for being made by the old settings.
    assert not status["refused"].keys() & {"wrong-encoding", "wrong-size", "inconsistent"}, status["refused"]
    assert status["quorum"]["required"] == 2
    assert any(event["kind"] == "outer-restart" for event in status["events"])
    # The stop too is moved; only now, as all that was awaited is awaited in a job that trains.
    house.hub.restart(make_job(stop={"steps": status["step"] + 200}, **changes))
    end = house.hub.waits_until(lambda s: s["phase"] == "complete" and s, "the stop that was moved")
    assert end["tokens"]["dropped"] == 0, house.hub.report()["ledger"]
    assert end["merges"] > before["merges"]
    exact(house.hub.report())
    for pod in house.pods.values():
        pod.waits_until(lambda s: s["phase"] == "complete" and s["connected"], "the end")


@pytest.mark.slow
def test_what_may_not_change_is_said_and_nothing_is_touched(cluster: Callable[..., Cluster]) -> None:
    house = cluster(learners=1)
    house.place(local=1)
    house.trains(1)
    versions = house.hub.status()["versions"]
    assert house.hub.terminate()[0] == 0
    exact_bits = {"deterministic": True, "compression": {"up": "float32", "down": "float32"}}
    for changed, field in (
        ({"merge": {"meanTensors": ["0.weight"]}}, "sync.merge.meanTensors"),
        (exact_bits, "sync.deterministic"),
    ):
        house.hub.change(make_job(learners=1, **changed))
        assert house.hub.start().ends() == 2
        last = json.loads(house.hub.text().splitlines()[-1])
        assert last["level"] == "error" and field in last["message"] and "undo the change" in last["message"]
    house.hub.change(make_job(learners=1))
    house.hub.start().serves()
    house.trains(1)
    assert all(new >= old for new, old in zip(house.hub.status()["versions"], versions, strict=True))
