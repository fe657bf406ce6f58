"""The syncer that the operator's simulation has in place of a real one tells the operator what a real core does."""

from __future__ import annotations

from typing import Any

import pytest

from core_desk import Desk, config
from diloco_protocol.documents import StatusDocument, read_document
from diloco_protocol.vocabulary import ControlMethod, JobPhase
from diloco_syncer.core import events as ev
from operator_simulation import programs as stand_in
from operator_simulation.kubernetes import Node, Process
from operator_simulation.programs import Programs
from shell_figures import SHELL

PLACES = (("a", 0), ("a", 1), ("b", 0))
REGION_LOST_SECONDS = 60.0
SPEC = {
    "regions": [{"name": "a", "learners": 2}, {"name": "b", "learners": 1}],
    "sync": {"quorum": 2},
    "failurePolicy": {"regionLostSeconds": REGION_LOST_SECONDS},
}


class Both:
    """A core and the stand-in, to which the same happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rules = config(3, 2, places=PLACES, region_lost_seconds=REGION_LOST_SECONDS)
        self.desk = Desk(self.rules)
        self.before = 0.0  # the time at which the core began
        self.learners: dict[str, Process] = {}
        self.connections: dict[str, int] = {}
        monkeypatch.setattr(stand_in, "now", lambda: self.now)
        self.programs = Programs(lambda role: [p for p in self.learners.values() if p.alive], lambda a, b: True)
        self.syncer = self._process("syncer-1", "", 0)
        self.later(stand_in.START_SECONDS)

    @property
    def now(self) -> float:
        return self.before + self.desk.now

    def _process(self, name: str, region: str, ordinal: int) -> Process:
        role = "learner" if region else "syncer"
        node = Node("hub", "n0")
        place = {"region": region, "ordinal": ordinal, "rank": 0, "pods": 1}
        return Process(name, role, name, name, **place, node=node, job={"spec": SPEC}, started=self.now)

    def later(self, seconds: float) -> None:
        """Time passes; whoever works is heard."""
        end = self.desk.now + seconds
        while self.desk.now < end:
            self.desk.later(0.5)
            for slot in self.desk.core.slots:
                if slot.holder.connection is not None and self.learners[slot.holder.process].works:
                    self.desk.report(slot.holder.connection, slot.step, epoch=self.desk.core.epoch)
            self.programs.run_syncer(self.syncer)

    def join(self, name: str, region: str, ordinal: int) -> None:
        self.learners[name] = self._process(name, region, ordinal)
        connection = self.connections[name] = len(self.connections) + 1
        self.desk.join(connection, ordinal, name, region=region)
        if len(self.connections) == len(PLACES):
            self.desk.do(ev.InitialModelStored("L", (8,)))

    def tell_to_leave(self, name: str) -> None:
        self.learners[name].told_to_end, self.learners[name].ends_at = self.now, self.now + 60.0
        self.desk.do(ev.DrainRequested(self.connections[name]))

    def leave(self, name: str) -> None:
        self.learners[name].ended = 0
        self.desk.do(ev.Drained(self.connections[name]))
        self.desk.do(ev.ConnectionLost(self.connections[name]))

    def fall_silent(self, name: str) -> None:
        self.learners[name].hung = True

    def tell_of_its_end(self, name: str) -> None:
        one = self.learners[name]
        one.ended = 1
        body = {"region": one.region, "ordinal": one.ordinal, "process": name}
        self.programs.call(ControlMethod.PROCESS_ENDED, body)
        self.desk.do(ev.ProcessEnded(one.region, one.ordinal, name, "killed"))

    def suspend(self) -> None:
        self.programs.call(ControlMethod.ANNOUNCE, {"phase": "suspended", "message": "spec.suspend is set"})
        self.desk.do(ev.EndRequested(JobPhase.SUSPENDED, "spec.suspend is set"))

    def restart(self, comes_back: bool) -> None:
        """Another syncer takes over the store; all learners have found it at once, or none."""
        self.syncer.ended = 1
        self.syncer = self._process(f"{self.syncer.id}-again", "", 0)
        self.syncer.started -= stand_in.START_SECONDS
        for one in self.learners.values():
            one.hung = not comes_back
        saved, self.before = self.desk.core.state(self.desk.now), self.now
        self.desk = Desk(self.rules, saved, self.desk.core.epoch + 1)
        for name, connection in self.connections.items() if comes_back else ():
            one, (row,) = self.learners[name], [r for r in saved["job"]["members"]["slots"] if r["process"] == name]
            self.desk.join(connection, one.ordinal, name, region=one.region, previous_incarnation=row["incarnation"])
        self.later(0.5)

    def documents(self) -> tuple[StatusDocument, StatusDocument]:
        theirs = read_document(StatusDocument, self.programs.call(ControlMethod.STATUS, {}))
        return self.desk.core.status(self.desk.now, SHELL), theirs

    def shown(self) -> dict[str, Any]:
        """What both say to the operator; they say the same."""
        core, sim = (figures(document) for document in self.documents())
        assert sim == core
        return core


def figures(document: StatusDocument) -> dict[str, Any]:
    """What the operator decides by."""
    return {
        "phase": document.phase.value,
        "epoch": document.epoch,
        "quorum": (document.quorum.active, document.quorum.required),
        "standbys": document.standbys,
        "standby": document.standby,
        "lost": document.regions_lost,
        "slots": {
            row.slot: (row.state.value, row.in_quorum, row.heard_seconds_ago is not None, row.process)
            for row in document.slots
        },
        "places": {row.slot: (row.region, row.ordinal) for row in document.slots if row.process},
    }


def states(shown: dict[str, Any]) -> list[str]:
    return [row[0] for row in shown["slots"].values()]


@pytest.mark.promise(
    "The operator's simulated syncer reports what a real core reports: phase, quorum, states of slots, "
    "regions lost, over joins, drains, silence, restarts and a suspension"
)
def test_the_stand_in_shows_what_a_core_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(monkeypatch)
    core, sim = (document.model_dump(mode="json") for document in both.documents())
    assert core.keys() == sim.keys() and core["slots"][0].keys() == sim["slots"][0].keys()
    shown = both.shown()
    assert (shown["phase"], states(shown)) == ("waiting", ["empty"] * 3)

    for region, ordinal in PLACES:
        both.join(f"{region}{ordinal}", region, ordinal)
    both.later(3)
    shown = both.shown()
    assert (shown["phase"], shown["quorum"], states(shown)) == ("training", (3, 2), ["active"] * 3)

    both.join("spare", "a", 2)
    both.later(3)
    assert both.shown()["standbys"] == ["spare"]
    both.learners["spare"].ended = 0
    both.desk.do(ev.ConnectionLost(both.connections.pop("spare")))

    both.tell_to_leave("a1")
    both.later(1)
    assert states(both.shown()) == ["active", "draining", "active"]
    both.leave("a1")
    both.later(1)
    assert states(both.shown()) == ["active", "drained", "active"]
    both.join("a1-2", "a", 1)
    both.later(3)
    assert states(both.shown()) == ["active"] * 3

    both.fall_silent("b0")
    both.later(stand_in.HEARTBEAT_SECONDS + 2)
    shown = both.shown()
    assert (shown["phase"], shown["quorum"], states(shown)) == ("training", (2, 2), ["active", "active", "lost"])
    assert shown["lost"] == []
    both.later(REGION_LOST_SECONDS + 2)
    assert both.shown()["lost"] == ["b"]

    both.tell_of_its_end("a0")
    both.later(1)
    shown = both.shown()
    assert (shown["phase"], shown["quorum"], states(shown)) == ("holding", (1, 2), ["lost", "active", "lost"])

    both.restart(comes_back=False)
    shown = both.shown()
    assert (shown["phase"], shown["epoch"], shown["quorum"]) == ("waiting", 2, (0, 2))
    assert states(shown) == ["lost", "suspect", "lost"]
    both.later(stand_in.HEARTBEAT_SECONDS + 2)
    assert states(both.shown()) == ["lost"] * 3


@pytest.mark.promise(
    "The operator's simulated syncer reports what a real core reports: phase, quorum, states of slots, "
    "regions lost, over joins, drains, silence, restarts and a suspension"
)
def test_the_stand_in_goes_on_and_ends_as_a_core_does(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(monkeypatch)
    for region, ordinal in PLACES:
        both.join(f"{region}{ordinal}", region, ordinal)
    both.later(3)
    both.restart(comes_back=True)
    both.later(3)
    shown = both.shown()
    assert (shown["phase"], shown["epoch"], states(shown)) == ("training", 2, ["active"] * 3)
    both.suspend()
    assert both.shown()["phase"] == "draining"
    for name in both.connections:
        both.desk.do(ev.Drained(both.connections[name]))
    both.later(stand_in.DRAIN_SECONDS + 1)
    assert {document.phase for document in both.documents()} == {JobPhase.SUSPENDED}
    both.restart(comes_back=False)
    assert {document.phase for document in both.documents()} == {JobPhase.WAITING}, "it was resumed"
