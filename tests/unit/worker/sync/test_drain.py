"""The drain over a scripted synchronizer and a clock of its own: what is offered, again, and given up, and when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_protocol.vocabulary import JobPhase, PushRefusal, TransferRefusal
from diloco_protocol.wire.records import Announcement, Payload
from diloco_worker import learner
from diloco_worker.core.adoption import Adoption, AdoptionConfig
from diloco_worker.net.inbox import PushAnswered
from diloco_worker.sync import drain
from diloco_worker.sync.drain import LONGEST_SECONDS, PATIENCE_SECONDS, offer_everything

Answer = tuple[bool | None, str] | None  # accepted and reason; None: none ever comes


class Scripted:
    """A synchronizer whose syncer answers the n-th offer of a fragment by ``answers(fragment, n)``, a second later."""

    def __init__(self, fragments: int, answers: Callable[[int, int], Answer], steps: int = 2) -> None:
        self.now = 1000.0
        self.adoption = Adoption(AdoptionConfig(fragments, 4, 1))
        for fragment in range(fragments):
            self.adopt(fragment, 1)
        for _ in range(steps):
            self.adoption.on_step(8, 0.1)
        self.phase, self.seated = JobPhase.TRAINING, True
        self.client = SimpleNamespace(connected=True, chunks_up=0)
        self.inbox = SimpleNamespace(wait=self.wait)
        self.push_answers: dict[tuple[int, int], PushAnswered] = {}
        self.offers: list[tuple[float, int]] = []  # when, and of which fragment
        self.draining = False
        self.at: dict[float, Callable[[], None]] = {}  # what happens when
        self._answers = answers
        self._due: list[tuple[float, PushAnswered]] = []

    def adopt(self, fragment: int, version: int, merged: int = 0) -> None:
        announcement = Announcement(
            fragment,
            1,
            version,
            Payload("float32", 4, 4),
            merged_sequence=merged,
            merged_version=version if merged else 0,
        )
        self.adoption.on_broadcast(announcement)

    def begin_drain(self) -> None:
        self.draining = True

    def run_boundary(self) -> None:
        assert self.draining
        for when in sorted(when for when in self.at if when <= self.now - 1000):
            self.at.pop(when)()
        for when, answer in self._due:
            if when <= self.now:
                self.push_answers[answer.fragment, answer.sequence] = answer
        self._due = [row for row in self._due if row[0] > self.now]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        assert self.seconds < 2 * LONGEST_SECONDS, "it does not end"

    def offer_fragment(self, fragment: int) -> int | None:
        planned = self.adoption.snapshot(fragment, 0)
        assert planned is not None, "offered although there is nothing above the base"
        self.offers.append((self.now - 1000, fragment))
        answer = self._answers(fragment, sum(p == fragment for _, p in self.offers))
        if answer is not None:
            row = PushAnswered(fragment, planned[0].sequence, *answer, "")
            self._due.append((self.now + 1.0, row))
        return planned[0].sequence

    def drain(self, monkeypatch: pytest.MonkeyPatch, until: Callable[[], float] = lambda: math.inf) -> list[Any]:
        monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.given_up = offer_everything(self, until)  # type: ignore[arg-type]
        return self.given_up

    @property
    def seconds(self) -> float:
        return self.now - 1000


TAKEN: Answer = (True, "")


def test_everything_is_offered_once_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scripted(6, lambda fragment, n: TAKEN)
    assert one.drain(monkeypatch) == []
    assert sorted(fragment for _, fragment in one.offers) == list(range(6))
    assert [when for when, _ in one.offers] == pytest.approx([0, 0, 0, 0, 1, 1], abs=0.11)


def test_a_fragment_without_steps_above_its_base_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scripted(3, lambda fragment, n: TAKEN, steps=0)
    assert one.drain(monkeypatch) == [] and one.offers == [] and one.seconds == 0


@pytest.mark.promise("A drain offers everything, retries after temporary refusals, and ends in bounded time")
@pytest.mark.parametrize("reason", [PushRefusal.FENCED, PushRefusal.OTHER_EPOCH, TransferRefusal.BUSY])
def test_what_passes_by_itself_is_tried_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """With pauses that double, and at last it is given up, though patience is not over."""
    one = Scripted(1, lambda fragment, n: (False, reason))
    assert one.drain(monkeypatch) == [(0, 16, f"tried 6 times: {reason} ")]
    times = [when for when, _ in one.offers]
    gaps = [later - before for before, later in itertools.pairwise(times)]
    assert gaps == pytest.approx([1 + 0.2 * 2**n for n in range(1, 6)], abs=0.11)
    assert one.seconds < 5 * PATIENCE_SECONDS and "16 tokens were not taken over" in caplog.text


def test_an_offer_without_an_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scripted(1, lambda fragment, n: TAKEN if n == 3 else (None, ""))
    assert one.drain(monkeypatch) == [] and len(one.offers) == 3


def test_what_does_not_pass_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scripted(2, lambda fragment, n: TAKEN if fragment else (False, PushRefusal.NORM_GATE))
    assert one.drain(monkeypatch) == [(0, 16, "refused (norm-gate): ")]
    assert len(one.offers) == 2 and one.seconds < 1.2


def test_after_a_merge_that_was_under_way_what_is_above_it_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the merge is adopted, however long that takes, and at once then."""
    one = Scripted(1, lambda fragment, n: TAKEN if n == 2 else (False, PushRefusal.ALREADY_MERGED))
    one.at[9.0] = lambda: one.adopt(0, 2)
    assert one.drain(monkeypatch) == []
    assert [when for when, _ in one.offers] == pytest.approx([0, 9], abs=0.11)


def test_a_merge_that_takes_in_everything_leaves_nothing_to_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scripted(1, lambda fragment, n: (False, PushRefusal.ALREADY_MERGED))
    one.at[3.0] = lambda: one.adopt(0, 2, merged=1)
    assert one.drain(monkeypatch) == [] and len(one.offers) == 1 and one.seconds == pytest.approx(3, abs=0.11)


@pytest.mark.promise("A drain offers everything, retries after temporary refusals, and ends in bounded time")
def test_patience_ends_without_progress_and_begins_anew_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scripted(2, lambda fragment, n: None)
    late = 0.9 * PATIENCE_SECONDS
    one.at[late] = lambda: one.push_answers.update({(0, 1): PushAnswered(0, 1, True, "", message="")})
    assert one.drain(monkeypatch) == [(1, 16, "no acknowledgement in time")]
    assert one.seconds == pytest.approx(late + PATIENCE_SECONDS, abs=0.2)


def test_without_a_syncer_it_ends_within_the_grace_period_that_pods_have_unless_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Scripted(2, lambda fragment, n: TAKEN)
    one.client.connected = False
    assert one.drain(monkeypatch) == [(fragment, 16, "no acknowledgement in time") for fragment in range(2)]
    assert one.seconds == pytest.approx(PATIENCE_SECONDS, abs=0.11)
    assert one.seconds + learner._FAREWELL_SECONDS < 25, "of 30 s; the rest is for the program's own end"


@pytest.mark.promise("A drain offers everything, retries after temporary refusals, and ends in bounded time")
def test_a_drain_that_comes_on_for_ever_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_TRIES", 10**9)
    one = Scripted(50, lambda fragment, n: (False, TransferRefusal.BUSY))
    monkeypatch.setattr(drain, "PATIENCE_SECONDS", math.inf)
    assert len(one.drain(monkeypatch)) == 50
    assert one.seconds == pytest.approx(LONGEST_SECONDS, abs=0.2)


@pytest.mark.promise("A drain offers everything, retries after temporary refusals, and ends in bounded time")
def test_it_is_over_when_the_process_must_end_which_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM may come while the drain of a job's end is under way."""
    one = Scripted(1, lambda fragment, n: None)
    ends = [math.inf]
    one.at[2.0] = lambda: ends.__setitem__(0, one.now + 3)
    assert one.drain(monkeypatch, lambda: ends[0]) == [(0, 16, "no acknowledgement in time")]
    assert one.seconds == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize("lost", ["phase", "seat"])
def test_nothing_is_waited_for_once_the_job_ended_or_the_slot_is_another_ones(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    one = Scripted(1, lambda fragment, n: None)

    def lose() -> None:
        if lost == "seat":
            one.seated = False
        else:
            one.phase = JobPhase.FAILED

    one.at[2.0] = lose
    ((fragment, tokens, why),) = one.drain(monkeypatch)
    assert (fragment, tokens) == (0, 16) and why.startswith("the job is ")
    assert one.seconds == pytest.approx(2, abs=0.11)


def test_without_a_session_nothing_is_offered_and_patience_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Scripted(1, lambda fragment, n: TAKEN)
    one.client.connected = False
    one.at[6.0] = lambda: setattr(one.client, "connected", True)
    assert one.drain(monkeypatch) == []
    assert [when for when, _ in one.offers] == pytest.approx([6], abs=0.11)


@pytest.mark.promise(
    "A drain waits for an offer whose bytes arrive, however slow its link is, on both sides and within a bound"
)
@pytest.mark.parametrize("moves", [True, False])
def test_an_offer_whose_bytes_move_is_waited_for(monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    """However long it takes, within the whole drain's bound; one that stands still is given up."""
    one = Scripted(1, lambda fragment, n: None)
    seconds = 5 * PATIENCE_SECONDS

    def send() -> None:
        one.client.chunks_up += moves

    def arrive() -> None:
        one.push_answers[0, 1] = PushAnswered(0, 1, True, "", message="")

    one.at = {float(second): send for second in range(0, int(seconds), 10)} | {seconds: arrive}
    given_up = one.drain(monkeypatch)
    assert given_up == ([] if moves else [(0, 16, "no acknowledgement in time")])
    assert one.seconds == pytest.approx(seconds if moves else PATIENCE_SECONDS, abs=0.2)
