"""The job's programs as data: one syncer with its store, and learners, wherever they run.

A learner joins whatever syncer it reaches, trains on alone when it reaches none, and drains when it is told to end.
A learner of several pods forms when all its processes reach each other; the leading one joins. A process whose
fellow ends, ends too. One whose fellow is silent (its node is lost or cut off, or it hangs) hangs with it, and ends
after a while. All drain when one is told to end.
A syncer whose shards have pods claims the store when it hears all of them, and merges while it does.
A syncer counts those that it hears, loses a slot whose learner it has not heard for the heartbeat's time-out, gives
it to the next that joins, and merges while K take part. What it knows is in its store, which outlives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.vocabulary import ControlMethod, WorkerExit
from operator_simulation.kubernetes import Process, now
from status_documents import job_report, learner_page, slot_row, status_document

HOLDING = ("active", "suspect", "draining")
START_SECONDS, JOIN_SECONDS, DRAIN_SECONDS = 1.5, 1.0, 2.0
HEARTBEAT_SECONDS = 10.0
STALL_SECONDS, MEETING_SECONDS = 60.0, 150.0
"""So long a process waits for a silent fellow, and for all its fellows to come."""
RELEASE_FLAG = "--of-release="
"""A flag that each release of the operator gives to programs; only those of the same release know it."""


@dataclass
class SlotData:
    """One slot; region and ordinal are those of the process that holds it, or held it last."""

    region: str
    ordinal: int
    process: str = ""
    state: str = "empty"
    ready_at: float = 0.0
    heard: float = 0.0
    merged: int = 0


@dataclass
class Store:
    """What of a job outlives its syncer."""

    epoch: int = 0
    merges: int = 0
    tokens: int = 0
    phase: str = "waiting"
    message: str = ""
    slots: list[SlotData] = field(default_factory=list)


class Programs:
    """All programs of one job in all clusters.

    ``processes(role)``: those that run. ``reaches(a, b)``: whether two endpoints reach each other.
    """

    def __init__(self, processes: Callable[[str], list[Process]], reaches: Callable[[str, str], bool]) -> None:
        self.store = Store()
        self.syncer: Process | None = None  # the one that has the store
        self.standbys: list[str] = []
        self.silence: dict[str, float] = {}  # by region: since when nobody of it takes part or stands by
        self.regions_lost: list[str] = []
        self.volume_is_new = False  # the next syncer finds an empty store
        self.is_noticed = False  # what the store had: the status of the job tells of it
        self.lost = 0  # merges that no learner could give back
        self._processes = processes
        self._reaches = reaches
        self._target = ""
        self._moves_at = 0.0

    # ------------------------------------------------------------------ what a container does

    def run_syncer(self, process: Process) -> None:
        """Half a second of a syncer."""
        if not _knows_its_flags(process):
            return
        if self.syncer is not process:
            if now() < process.started + START_SECONDS or process.told_to_end is not None:
                return
            if self.syncer is not None and self.syncer.alive and self.syncer.node is process.node:
                return  # its volume is held
            if not self.hears_shards(process):
                return
            self._claim(process)
        process.ready = True
        self._members(process)
        self._train(process)

    def run_shard(self, process: Process) -> None:
        """A shard, as its syncer sees it (``hears_shards``)."""
        process.ready = _knows_its_flags(process)

    def hears_shards(self, syncer: Process) -> bool:
        """Whether every shard that the syncer counts is there, with the release and the number of shards that it has
        itself. So it is where none has a pod."""
        spec = syncer.job["spec"].get("syncer", {})
        if spec.get("shardPods") is None:
            return True
        count = spec["shards"]
        found = {
            shard.ordinal
            for shard in self._processes("shard")
            if shard.works and shard.ready and shard.told_to_end is None and shard.image == syncer.image
            if shard.job["spec"]["syncer"]["shards"] == count
            if self._reaches(shard.node.endpoint, syncer.node.endpoint)
        }
        return found >= set(range(count))

    def run_learner(self, process: Process) -> None:
        """A learner does what the syncer's side of it shows, and its processes what each sees of the others."""
        if _knows_its_flags(process) and process.pods > 1:
            process.ready = process.ready or process.rank > 0  # its launcher answers probes
            if not process.group and process.works and process.told_to_end is None:
                self._meet(process)
            elif process.works:
                self._follow(process)

    def _meet(self, process: Process) -> None:
        """Form a learner of all its processes, if they are there."""
        process.waits_since = now() if process.waits_since is None else process.waits_since
        free = [p for p in self._processes("learner") if p.works and p.told_to_end is None and not p.group]
        mine = [p for p in free if (p.region, p.ordinal) == (process.region, process.ordinal)]
        mine = [p for p in mine if self._reaches(p.node.endpoint, process.node.endpoint)]
        found = tuple(sorted(mine, key=lambda p: p.rank))
        if [p.rank for p in found] == list(range(process.pods)):
            for one in found:
                one.group, one.waits_since = found, None
        elif now() >= process.waits_since + MEETING_SECONDS:
            process.ended, process.last_line = WorkerExit.FAILED, "timed out while it waited for other ranks"

    def _follow(self, process: Process) -> None:
        """What a process does that was with others."""
        others = [p for p in process.group if p is not process]
        there = [p for p in others if p.node.up and self._reaches(p.node.endpoint, process.node.endpoint)]
        draining = [p.ends_at for p in there if p.told_to_end is not None and p.ended is None]
        if process.ends_at is not None:
            return
        if any(p.ended is not None for p in there):
            process.ended, process.last_line = WorkerExit.GROUP, "connection closed by peer"
        elif len(there) < len(others) or any(p.hung for p in there):
            process.waits_since = now() if process.waits_since is None else process.waits_since
            if now() >= process.waits_since + STALL_SECONDS:
                process.ended, process.last_line = WorkerExit.STALLED, "no step was made"
        else:
            process.waits_since = None
            process.ends_at = max((end for end in draining if end is not None), default=None)

    def run_evaluator(self, process: Process) -> None:
        process.ready = True

    # ------------------------------------------------------------------ the syncer

    def reach_the_stop(self) -> None:
        """The last merge is made, as far as there is a syncer that can."""
        if self.active() and self.store.phase in ("training", "holding"):
            self.store.phase, self._target, self._moves_at = "draining", "complete", now() + DRAIN_SECONDS

    def lose_the_volume(self, known: int) -> None:
        """The store goes; learners that have trained with it hold what was in it. ``known``: how many merges the job's
        status tells of. Of none nobody is told."""
        self.volume_is_new, self.is_noticed = True, known > 0

    def _take_back(self) -> None:
        """A new store: as the old one where a learner of it is left, else empty."""
        self.volume_is_new = False
        held = {slot.process for slot in self.store.slots}
        if any(learner.id in held and learner.works for learner in self._processes("learner")):
            self.store.epoch = 0
        else:
            self.lost = self.store.merges if self.is_noticed else 0
            self.store = Store()

    def _claim(self, process: Process) -> None:
        if self.volume_is_new:
            self._take_back()
        self.syncer, store = process, self.store
        spec = process.job["spec"]
        store.epoch += 1
        places = [(r["name"], i) for r in spec["regions"] for i in range(r["learners"])]
        del store.slots[len(places) :]
        store.slots += [SlotData(*place) for place in places[len(store.slots) :]]
        for slot in store.slots:
            if slot.state in HOLDING:
                slot.state, slot.heard = "suspect", now()
        self.silence = dict.fromkeys(self.regions_lost, -math.inf)
        self.standbys, self.regions_lost = [], []
        if store.phase != "complete":
            store.phase, store.message = "waiting", ""

    def heard(self, learner: Process) -> bool:
        """Whether the syncer hears the process, which leads its learner, now."""
        syncer = self.syncer
        return (
            syncer is not None
            and learner.rank == 0
            and syncer.works
            and learner.works
            and self._reaches(learner.node.endpoint, syncer.node.endpoint)
        )

    def _members(self, syncer: Process) -> None:
        store = self.store
        heard = {p.id: p for p in self._processes("learner") if self.heard(p) and (p.pods == 1 or p.group)}
        for slot in store.slots:
            if slot.state not in HOLDING:
                continue
            if slot.state == "suspect":
                if now() - slot.heard > HEARTBEAT_SECONDS:
                    slot.state = "lost"
            elif slot.process in heard:
                slot.heard = now()
                if heard[slot.process].ends_at is not None:
                    slot.state = "draining"
            elif slot.state == "draining":
                slot.process, slot.state = "", "drained"
            elif now() - slot.heard > HEARTBEAT_SECONDS:
                slot.state = "lost"
        self.standbys = [process for process in self.standbys if process in heard]
        for process in sorted(heard.values(), key=lambda p: p.pod_name):
            if process.ends_at is None and now() >= process.started + JOIN_SECONDS:
                self._seat(process, heard)
        if store.phase in ("training", "holding"):
            self._lose_regions({heard[one].region for one in self.standbys}, syncer.job["spec"]["failurePolicy"])

    def _lose_regions(self, standing_by: set[str], policy: dict[str, Any]) -> None:
        slots = self.store.slots
        present = {slot.region for slot in slots if slot.state in HOLDING} | standing_by
        seen = {slot.region for slot in slots if slot.state != "empty"}
        self.silence = {region: self.silence.get(region, now()) for region in sorted(seen - present)}
        limit = policy["regionLostSeconds"]
        self.regions_lost = [region for region, since in self.silence.items() if now() - since >= limit]

    def _seat(self, process: Process, heard: dict[str, Process]) -> None:
        process.ready = True
        slots, place = self.store.slots, (process.region, process.ordinal)
        if any(s.process == process.id and s.state in HOLDING and s.state != "suspect" for s in slots):
            return
        own = [s for s in slots if s.process == process.id]
        own += [s for s in slots if (s.region, s.ordinal) == place and s.process not in heard]
        free = [s for s in slots if s.state not in HOLDING]
        for slot in (*own, *free):
            slot.region, slot.ordinal = place
            slot.process, slot.state, slot.heard = process.id, "active", now()
            slot.ready_at = now() + JOIN_SECONDS
            self.standbys = [other for other in self.standbys if other != process.id]
            return
        if process.id not in self.standbys:
            self.standbys.append(process.id)

    def in_quorum(self, slot: SlotData) -> bool:
        return slot.state == "active" and now() >= slot.ready_at

    def active(self) -> int:
        """How many learners take part."""
        if self.syncer is None or not self.syncer.works:
            return 0
        return sum(self.in_quorum(slot) for slot in self.store.slots)

    def taking_part(self, process: Process) -> bool:
        return any(s.process == process.id and self.in_quorum(s) for s in self.store.slots)

    def _train(self, syncer: Process) -> None:
        store, spec = self.store, syncer.job["spec"]
        active, required = self.active(), spec["sync"]["quorum"]
        if store.phase in ("waiting", "training", "holding"):
            enough = active >= required
            if store.phase != "waiting" or enough:
                store.phase = "training" if enough else "holding"
            if enough and self.hears_shards(syncer):
                store.merges += 1
                store.tokens += 100 * active
                for slot in store.slots:
                    slot.merged += self.in_quorum(slot)
        elif store.phase == "draining" and now() >= self._moves_at:
            store.phase = self._target

    # ------------------------------------------------------------------ control calls and pages

    def call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """A control call that has reached the syncer."""
        store = self.store
        if method == ControlMethod.STATUS:
            return self.document()
        if method == ControlMethod.REPORT:
            return job_report(outcome=store.phase, merges=store.merges).model_dump(mode="json", by_alias=True)
        if method == ControlMethod.PROCESS_ENDED:
            for slot in store.slots:
                same = (slot.region, slot.ordinal) == (body["region"], body["ordinal"])
                if same and body["process"] in ("", slot.process) and slot.state in HOLDING:
                    slot.state = "lost"
        elif method == ControlMethod.ANNOUNCE and store.phase not in ("complete", "failed", "deleted", "suspended"):
            if body["phase"] == "suspended":
                if store.phase != "draining":
                    store.phase, self._target, self._moves_at = "draining", "suspended", now() + DRAIN_SECONDS
            else:
                store.phase, store.message = body["phase"], body["message"]
        return {}

    def document(self) -> dict[str, Any]:
        """The syncer's status."""
        store, syncer = self.store, self.syncer
        assert syncer is not None
        rows = [
            slot_row(
                i,
                region=slot.region,
                ordinal=slot.ordinal,
                process=slot.process,
                state=slot.state,
                ready=self.in_quorum(slot),
                step=slot.merged,
                loss=2.0,
                merged_pushes=slot.merged,
                heard_seconds_ago=now() - slot.heard if slot.state in HOLDING else None,
            )
            for i, slot in enumerate(store.slots)
        ]
        found = status_document(
            job="job",
            phase=store.phase,
            message=store.message,
            epoch=store.epoch,
            merges=store.merges,
            quorum={"active": self.active(), "required": syncer.job["spec"]["sync"]["quorum"]},
            standby=len(self.standbys),
            standbys=self.standbys,
            regions_lost=self.regions_lost,
            tokens={"trained": store.tokens, "merged": store.tokens, "pending": 0, "dropped": 0},
            slots=rows,
        )
        return found.model_dump(mode="json")

    def page(self, process: Process) -> bytes:
        """A learner's status page."""
        slots = self.store.slots
        mine = next((i for i, s in enumerate(slots) if s.process == process.id and s.state in HOLDING), None)
        heard = self.heard(process)
        found = learner_page(
            job="job",
            region=process.region,
            ordinal=process.ordinal,
            process=process.id,
            phase=self.store.phase if process.ready else "waiting",
            connected=heard,
            tried=True,
            joined=process.ready,
            standby=process.id in self.standbys,
            slot=mine if heard else None,
            merges=self.store.merges if heard else None,
        )
        return found.model_dump_json().encode()


def _knows_its_flags(process: Process) -> bool:
    """Whether the program is of the release that made its template. If not, it ends."""
    release = process.image.rpartition(":")[2]
    flags = [flag for flag in process.command if flag.startswith(RELEASE_FLAG)]
    if process.image.startswith("diloco-") and flags != [f"{RELEASE_FLAG}{release}"]:
        process.ended, process.last_line = 2, f"unrecognized arguments: {' '.join(flags)}"
    return process.ended is None
