"""A round that lacks a push: its learner is asked again until the push is there, and people are told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from core_desk import Desk, config, of, reason, report
from diloco_protocol.vocabulary import EventKind, JobPhase, PushRefusal
from diloco_syncer.core import events as ev
from diloco_syncer.core.books.norm_gate import GATE_PATIENCE, GATE_SAMPLES, GATE_WINDOW, NormGate
from diloco_syncer.core.core import Core
from diloco_syncer.server.pages.metrics import exposition
from shell_figures import SHELL


class Job(Desk):
    """A job of one fragment whose learners are heard all the time; H is 4 steps."""

    def __init__(self, learners: int = 1, **changes: object) -> None:
        super().__init__(config(slots=learners, **changes))
        self.steps = [0] * learners
        self.merged = [0] * learners
        self.sequences = [0] * learners
        self.begin(learners)

    def wait(self, seconds: int) -> list[tuple[float, int]]:
        """So long, second by second: when which connection was pulled."""
        pulls = []
        for _ in range(seconds):
            self.now += 1.0
            actions = self.do(ev.Tick())
            for index in range(len(self.steps)):
                actions += self.train(index, 0)
            pulls += [(self.now, pull.connection) for pull in of(actions, ev.Pull)]
        return pulls

    def train(self, slot: int, steps: int) -> list[ev.Action]:
        self.steps[slot] += steps
        version = self.core.versions[0]
        return self.do(ev.Reported(slot + 1, report(self.steps[slot], version, self.merged[slot] * 10)))

    def send(self, slot: int, norm: float) -> PushRefusal | None:
        """A push of everything above the base. One that is accepted is merged at once."""
        version, last, first = self.core.versions[0], self.steps[slot], self.merged[slot] + 1
        self.sequences[slot] += 1
        row = report(last, version, self.merged[slot] * 10)
        steps = last - first + 1
        of_push = {"sequence": self.sequences[slot], "base_version": version, "oldest_version": version}
        of_push |= {"first_step": first, "steps": steps, "tokens": steps * 10, "report": row}
        actions = self.push(slot, last, norm, **of_push)
        if reason(actions) is None:
            self.merged[slot] = last
        merges = of(actions, ev.Merge) or of(self.later(5.0), ev.Merge)
        for merge in merges:
            self.do(ev.MergeDurable(0, merge.version, 0.1, (norm,) * len(merge.responders)))
            for index in range(len(self.steps)):
                self.train(index, 0)
        return reason(actions)

    def turns(self, count: int, norm: float = 1.0) -> None:
        """Rounds in which slot 0 alone pushes H steps."""
        for _ in range(count):
            self.train(0, 4)
            assert self.send(0, norm) is None


@pytest.mark.promise("A lost or refused push is requested again until it arrives, and at once over a new connection")
def test_a_push_that_does_not_come_is_asked_for_again() -> None:
    """The pull, or the push, or its answer was lost: more and more rarely, for as long as the round is open."""
    job = Job()
    assert of(job.train(0, 4), ev.Pull)
    assert job.wait(250) == [(when, 1) for when in (10.0, 30.0, 70.0, 130.0, 190.0, 250.0)]
    assert job.send(0, 1.0) is None and job.core.versions == [1]
    assert job.wait(100) == []


@pytest.mark.promise("A lost or refused push is requested again until it arrives, and at once over a new connection")
def test_a_push_that_was_refused_is_asked_for_again() -> None:
    job = Job()
    job.train(0, 4)
    refused = job.push(0, 4, finite=False)
    assert reason(refused) is PushRefusal.NOT_FINITE
    assert job.wait(10) == [(10.0, 1)]


@pytest.mark.promise("A lost or refused push is requested again until it arrives, and at once over a new connection")
def test_a_learner_that_comes_back_is_asked_at_once() -> None:
    job = Job()
    (pull,) = of(job.train(0, 4), ev.Pull)
    incarnation = job.core.slots[0].holder.incarnation
    job.do(ev.ConnectionLost(1))
    job.join(7, 0, "p1", previous_incarnation=incarnation, tenure=incarnation)
    (again,) = of(job.report(7, 4), ev.Pull)
    assert (again.connection, again.round) == (7, pull.round)


def test_only_slots_without_a_push_are_asked_again() -> None:
    job = Job(learners=3, quorum=3)
    for slot in range(3):
        job.train(slot, 4)
    assert job.send(1, 1.0) is None
    assert sorted(connection for _, connection in job.wait(9)) == [1, 3]


@pytest.mark.promise("A round that stays open is reported, with the missing slots and the reasons")
def test_an_overdue_round_is_told() -> None:
    """In status, metrics and an event: which slots it lacks, and why, where that is known."""
    job = Job(learners=2, quorum=2)
    for slot in range(2):
        job.train(slot, 4)
    job.push(1, 4, finite=False)
    job.wait(119)
    (row,) = job.core.status(job.now, SHELL).rounds
    assert (row.overdue, row.message, row.open_seconds) == (False, "", 119.0)
    job.wait(2)
    document = job.core.status(job.now, SHELL)
    (row,) = document.rounds
    words = "fragment 0 waits for pushes for long: r-0 (no push came), r-1 (not-finite)"
    assert (row.overdue, row.message) == (True, words)
    told = [event for event in of(job.log, ev.RecordEvent) if event.kind is EventKind.ROUND_OVERDUE]
    assert [event.message for event in told] == [words]
    page = exposition(lambda: document).decode()
    assert f'diloco_rounds_overdue{{job="{SHELL.job}"}} 1.0' in page
    assert f'diloco_round_open_seconds{{job="{SHELL.job}"}} 121.0' in page


def test_a_slow_job_is_not_overdue_for_its_pace() -> None:
    """A turn of H steps takes 4 × 60 s; what was merged before says so."""
    job = Job()
    assert job.core._state.rounds
    job.core._state.rounds.step_seconds.add(60.0)
    job.train(0, 4)
    job.wait(719)
    assert not job.core.status(job.now, SHELL).rounds[0].overdue
    job.wait(2)
    assert job.core.status(job.now, SHELL).rounds[0].overdue


# ------------------------------------------------------------------ the norm gate


@pytest.mark.promise(
    "The norm gate accepts honest pushes of any length, survives a restart of the syncer, and adapts when "
    "the job has changed"
)
@pytest.mark.parametrize("growth", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("steps", [1, 6, 23, 24, 25, 96, 400])
def test_the_gate_passes_honest_pushes_of_any_length(growth: float, steps: int) -> None:
    """Norms that grow as steps to the power of 1/2 (independent steps) to 1 (all in one direction)."""
    gate = NormGate(1.5)
    gate.add(0, [(24**growth, 24)] * GATE_SAMPLES)
    assert gate.objection(0, steps**growth, steps) == ""
    assert gate.objection(0, 1.6 * max(steps / 24, (steps / 24) ** 0.5) * 24**growth, steps)


def test_the_gate_forgets_old_norms() -> None:
    gate = NormGate(3.0)
    gate.add(0, [(1.0, 4)] * GATE_WINDOW)
    gate.add(0, [(10.0, 4)] * GATE_WINDOW)
    assert gate.objection(0, 29.0, 4) == "" and gate.objection(0, 31.0, 4)


def test_the_gate_judges_by_the_running_median() -> None:
    job = Job(norm_gate=3.0)
    for turn in range(GATE_SAMPLES):
        job.turns(1, norm=1.0 + turn / 10)
    job.train(0, 4)
    assert job.send(0, norm=3.7) is PushRefusal.NORM_GATE
    assert job.send(0, norm=3.5) is None


@pytest.mark.promise(
    "A job with a norm gate continues after its learners were cut off until they paused, with one learner "
    "and with three"
)
@pytest.mark.parametrize("learners", [1, 3])
def test_a_job_with_a_gate_goes_on_after_its_learners_were_cut_off(learners: int) -> None:
    """The hub's link is cut until learners pause at 4 turns: every push then carries 4 times the steps."""
    job = Job(learners, norm_gate=3.0)
    job.turns(GATE_SAMPLES + 1)
    before = job.core.versions[0]
    for slot in range(learners):
        job.train(slot, 16)
    assert [job.send(slot, norm=4.0) for slot in range(learners)] == [None] * learners
    assert job.core.versions[0] > before


@pytest.mark.promise(
    "The norm gate accepts honest pushes of any length, survives a restart of the syncer, and adapts when "
    "the job has changed"
)
@pytest.mark.parametrize("learners", [1, 3])
def test_the_gate_yields_where_the_job_has_changed(learners: int) -> None:
    """After some refusals in a row the gate begins anew; what is refused is asked for again until then."""
    job = Job(learners, norm_gate=3.0)
    job.turns(GATE_SAMPLES)
    verdicts = []
    for _ in range(GATE_PATIENCE + 1):
        for slot in range(learners):
            job.train(slot, 4)
        verdicts.append(job.send(0, norm=50.0))
        assert verdicts[-1] is None or job.wait(120)
    assert verdicts == [PushRefusal.NORM_GATE] * GATE_PATIENCE + [None]
    job.turns(GATE_SAMPLES, norm=50.0)
    job.train(0, 4)
    assert job.send(0, norm=500.0) is PushRefusal.NORM_GATE


def test_a_learner_that_came_apart_does_not_wear_the_gate_out() -> None:
    """Whatever passes in between begins the count anew."""
    job = Job(2, norm_gate=3.0)
    job.turns(GATE_SAMPLES)
    for _ in range(3 * GATE_PATIENCE):
        job.train(1, 4)
        job.train(0, 4)
        assert job.send(1, norm=50.0) is PushRefusal.NORM_GATE
        assert job.send(0, norm=1.0) is None


@pytest.mark.promise(
    "The norm gate accepts honest pushes of any length, survives a restart of the syncer, and adapts when "
    "the job has changed"
)
def test_the_gate_outlives_the_syncer() -> None:
    job = Job(norm_gate=3.0)
    job.turns(GATE_SAMPLES)
    job.train(0, 4)
    assert job.send(0, norm=50.0) is PushRefusal.NORM_GATE
    saved = json.loads(json.dumps(job.core.state(job.now)))
    after = Core(job.core.config, saved, 2, job.now)
    gate = after._state.norm_gate
    assert gate.objection(0, 50.0, 4) and not gate.objection(0, 2.9, 4)
    gate.record_refusal(0)
    gate.record_refusal(0)
    assert not gate.objection(0, 50.0, 4)  # the refusal before the restart counts too


# ------------------------------------------------------------------ learners that leave


@pytest.mark.promise("A job reports that it holds when a draining learner is missing")
def test_a_job_that_lacks_a_learner_who_drains_says_so() -> None:
    """K = M: nobody opens a round while one of them only offers what it has."""
    job = Job(learners=2, quorum=2)
    assert job.core.phase is JobPhase.TRAINING
    (told,) = of(job.do(ev.DrainRequested(2)), ev.SetPhase)
    assert (told.phase, told.message) == (JobPhase.HOLDING, "1 of 2 learners that a merge needs are active")


@pytest.mark.promise(
    "An offer is never merged at an age above `maxVersions`, and a replaced offer leaves no bytes behind"
)
def test_an_offer_that_another_replaces_in_a_round_is_released() -> None:
    """Both were restored; the newer one carries the steps of both."""
    job = Job(learners=2, quorum=2)
    for last, handle in ((2, 41), (4, 42)):
        offer = replace(job.header(0, last), round=0, sequence=handle)
        assert job.core.restore_offer(offer, handle, 1.0)
    actions = job.train(0, 4) + job.train(1, 4)
    assert of(actions, ev.Pull) and [released.handle for released in of(actions, ev.ReleasePush)] == [41]


@pytest.mark.promise(
    "An offer is never merged at an age above `maxVersions`, and a replaced offer leaves no bytes behind"
)
def test_an_offer_that_comes_while_its_fragment_merges_is_judged_by_the_version_after() -> None:
    """Else it would be merged at an age above maxVersions."""
    job = Job(learners=2, max_versions=2)
    job.turns(2)
    job.train(0, 4)
    offer = replace(job.header(1, 4), round=0)
    assert job.core.check_push(offer) is None
    version, first = job.core.versions[0], job.merged[0] + 1
    row = report(job.steps[0], version, job.merged[0] * 10)
    of_push = {"base_version": version, "oldest_version": version, "first_step": first, "steps": 4, "tokens": 40}
    job.push(0, job.steps[0], sequence=9, report=row, **of_push)
    job.later(5.0)
    assert job.core.open_rounds[0].merging
    refused = job.core.check_push(offer)
    assert refused is not None and refused[0] is PushRefusal.TOO_OLD


@pytest.mark.promise("A merge takes what has come until it is really made: a round is open while another is merged")
def test_a_round_takes_what_comes_until_its_own_merge_begins() -> None:
    desk = Desk(config(slots=2, rules=replace(config().rules, overlap=4)))
    desk.begin(2, fragments=2)
    told = report(4, fragments=2)
    for connection in (1, 2):
        desk.do(ev.Reported(connection, told))
    desk.do(ev.Reported(1, report(6, fragments=2)))
    first, second = desk.core.open_rounds[0], desk.core.open_rounds[1]
    for fragment, opened in ((0, first), (1, second)):
        desk.push(0, 4, fragment=fragment, round=opened.id, report=told)
    (merge,) = of(desk.later(5.0), ev.Merge)
    assert (merge.fragment, second.merging) == (0, False), "the other one's window is over, too"
    assert reason(desk.push(1, 4, fragment=1, round=second.id, report=told)) is None
    (merge,) = of(desk.do(ev.MergeDurable(0, 1, 0.1, (1.0,))), ev.Merge)
    assert (merge.fragment, [one.header.slot for one in merge.responders]) == (1, [0, 1])
