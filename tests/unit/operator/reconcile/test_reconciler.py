"""Turns of one job with a plan of the test's and an API server of the test's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from diloco_operator.informer.cache import Cache
from diloco_operator.job import rfc3339
from diloco_operator.kube.api import NotLeading
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import EVENT, JOB, POD, Kind
from diloco_operator.metrics import Metrics
from diloco_operator.model import Delete, EventWanted, JobPlan, Object, Observed, Ref
from diloco_operator.reconcile import reconciler
from diloco_operator.reconcile.event_recorder import EventRecorder
from diloco_operator.reconcile.reconciler import Reconciler
from diloco_operator.settings import Settings
from diloco_protocol.vocabulary import LABEL_JOB

KEY = ("ns", "job")
AWAY = ApiError("create", "events", 0, "no answer")
QUIET = JobPlan(finalizer=False)
MANIFEST = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings", "namespace": "ns"}}


def job(version: str = "1") -> Object:
    return {"metadata": {"name": "job", "namespace": "ns", "uid": "j", "resourceVersion": version}, "spec": {}}


def pod(version: str = "5", **meta: Any) -> Object:
    """One that has waited for its start for a minute, so that a turn asks for the Events about it."""
    known = {"name": "job-local-0", "namespace": "ns", "uid": "p", "resourceVersion": version}
    born = {"creationTimestamp": rfc3339(time.time() - 60), "labels": {LABEL_JOB: "job"}}
    return {"metadata": {**known, **born, **meta}, "spec": {}, "status": {"phase": "Pending"}}


def event(reason: str) -> EventWanted:
    return EventWanted("Normal", reason, f"{reason} has happened.")


def plan_of(*reasons: str, **more: Any) -> JobPlan:
    return JobPlan(finalizer=False, events=tuple(map(event, reasons)), **more)


async def do_nothing() -> None:
    pass


class ScriptedApi:
    """``before`` is awaited before each Event is stored and ``after`` afterwards: what they raise is answered."""

    def __init__(self) -> None:
        self.events: dict[str, Object] = {}
        self.tries = 0
        self.before: Callable[[], Awaitable[None]] = do_nothing
        self.after: Callable[[], Awaitable[None]] = do_nothing
        self.asked_for_warnings: Callable[[], None] = lambda: None
        self.deleting: Callable[[], Object | None] = lambda: None

    @property
    def reasons(self) -> list[str]:
        return [found["reason"] for found in self.events.values()]

    async def create(self, kind: Kind, namespace: str, manifest: Object) -> Object:
        assert kind is EVENT
        self.tries += 1
        await self.before()
        name = manifest["metadata"]["name"]
        if name in self.events:
            raise ApiError("create", "events", 409, "already exists")
        self.events[name] = manifest
        await self.after()
        return manifest

    async def merge_patch(self, kind: Kind, namespace: str, name: str, patch: Object, sub: str = "") -> Object:
        if kind is JOB:
            return {**job("2"), "status": patch["status"]}
        self.events[name] = {**self.events[name], **patch}
        return self.events[name]

    async def list_warnings(self, namespace: str, selector: str = "") -> tuple[list[Object], bool]:
        self.asked_for_warnings()
        return [], True

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace: int | None) -> Object | None:
        return self.deleting()


class Silent:
    """Stands for the poller, the root key and the permissions of an operator that asks nobody anything."""

    key = None

    def latest_answers(self, key: Any, target: Any) -> tuple[None, dict[str, Any], None]:
        return None, {}, None

    def apply_errors(self, namespace: str) -> tuple[()]:
        return ()

    def schedule(self, *arguments: Any) -> None:
        pass

    def forget(self, key: Any) -> None:
        pass


class World:
    """A reconciler whose plans are those of ``plans``, in turn, and then say nothing."""

    def __init__(self) -> None:
        self.api: Any = ScriptedApi()
        self.cache = Cache()
        self.cache.put(JOB, job())
        self.plans: list[JobPlan] = []
        self.seen: list[Observed] = []
        self.age = 0.0
        self.there: Callable[[], bool] = lambda: True
        nobody: Any = Silent()
        events = EventRecorder(self.api, "test")
        parts = (Settings(), self.api, self.cache, nobody, nobody, nobody, events, Metrics(), lambda: True)
        self.reconciler = Reconciler(*parts, self._confirm, lambda namespace, now: self.age, self._plan)

    async def _confirm(self, key: Any) -> bool:
        return self.there()

    def _plan(self, observed: Observed, memory: Any, settings: Any) -> JobPlan:
        self.seen.append(observed)
        return self.plans.pop(0) if self.plans else QUIET

    async def turn(self, *plans: JobPlan) -> float | None:
        self.plans = list(plans)
        return await self.reconciler.turn(KEY)


def answer(error: ApiError) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


# ------------------------------------------------------------------ Events


@pytest.mark.promise(
    "An Event that could not be written is written by a later turn, once, also after a cancelled turn or a lost answer"
)
@pytest.mark.parametrize(
    "error",
    [AWAY, NotLeading("create", "events", 0, "it does not lead"), ApiError("create", "events", 429, "later")],
    ids=["no answer", "does not lead", "throttled"],
)
async def test_an_event_that_could_not_be_written_is_written_by_a_later_turn(error: ApiError) -> None:
    """The status is written with the transition, so no later plan would name the Event again."""
    world = World()
    world.api.before = answer(error)
    waits = await world.turn(plan_of("JobStarted", "QuorumMet", status={"phase": "Running"}))
    assert world.api.tries == 1, "one request shows that there is no answer"
    assert waits is not None and waits <= reconciler.EVENTS_AGAIN_SECONDS
    world.api.before = do_nothing
    await world.turn(plan_of("Completed"))
    await world.turn()
    assert world.api.reasons == ["JobStarted", "QuorumMet", "Completed"]


@pytest.mark.promise(
    "An Event that could not be written is written by a later turn, once, also after a cancelled turn or a lost answer"
)
async def test_an_event_of_a_turn_that_was_cancelled_is_written_by_a_later_turn() -> None:
    """As when the Lease is renewed too late: turns are cancelled wherever they are, and begin again."""
    world = World()
    sent = asyncio.Event()

    async def stall() -> None:
        sent.set()
        await asyncio.Event().wait()

    world.api.before = stall
    turn = asyncio.create_task(world.turn(plan_of("JobStarted", "QuorumMet")))
    await sent.wait()
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    world.api.before = do_nothing
    await world.turn()
    assert world.api.reasons == ["JobStarted", "QuorumMet"]


@pytest.mark.promise(
    "An Event that could not be written is written by a later turn, once, also after a cancelled turn or a lost answer"
)
async def test_an_event_whose_answer_was_lost_is_not_written_twice() -> None:
    world = World()
    world.api.after = answer(AWAY)
    await world.turn(plan_of("JobStarted"))
    world.api.after = do_nothing
    await world.turn(plan_of("QuorumMet"))
    assert world.api.reasons == ["JobStarted", "QuorumMet"]
    await world.turn(plan_of("JobStarted"))
    assert [found["count"] for found in world.api.events.values()] == [2, 1], "said again, it is counted up"


async def test_an_event_that_is_refused_is_given_up() -> None:
    world = World()
    refusals = [ApiError("create", "events", 403, "forbidden")]

    async def refuse_the_first() -> None:
        if refusals:
            raise refusals.pop()

    world.api.before = refuse_the_first
    waits = await world.turn(plan_of("JobStarted", "QuorumMet"))
    assert world.api.reasons == ["QuorumMet"] and waits == QUIET.wake_in
    await world.turn()
    assert world.api.tries == 2


async def test_an_event_of_a_turn_that_could_not_ask_for_its_job_is_written_by_a_later_turn() -> None:
    """The plan remembers that it has named the Event, and does not name it again."""
    world = World()

    def fail() -> bool:
        raise AWAY

    world.there = fail
    with pytest.raises(ApiError):
        await world.turn(plan_of("JobStarted", apply=(MANIFEST,)))
    await world.turn()
    assert world.api.reasons == ["JobStarted"]


async def test_what_waits_to_be_written_is_bounded_and_is_the_newest() -> None:
    world = World()
    world.api.before = answer(AWAY)
    for number in range(reconciler.MAX_EVENTS + 5):
        await world.turn(plan_of(f"Event{number}"))
    world.api.before = do_nothing
    await world.turn()
    assert world.api.reasons == [f"Event{number}" for number in range(5, reconciler.MAX_EVENTS + 5)]


async def test_an_event_is_logged_once_however_often_it_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world = World()
    world.api.before = answer(AWAY)
    for plan in (plan_of("JobStarted"), QUIET, QUIET):
        await world.turn(plan)
    assert len([line for line in caplog.messages if line.startswith("JobStarted")]) == 1


# ------------------------------------------------------------------ how old the view is


@pytest.mark.promise(
    "The age of the operator's view is that of what it has read, and a stream that returns meanwhile makes it no newer"
)
async def test_a_view_is_as_old_as_it_was_when_it_was_read() -> None:
    """The streams come back while the turn waits for another answer: what it has read is no newer for that."""
    world = World()
    world.cache.put(POD, pod())
    world.age = 60.0

    def come_back() -> None:
        world.age = 0.0
        world.cache.put(POD, pod("6", deletionTimestamp=rfc3339(time.time())))

    world.api.asked_for_warnings = come_back
    await world.turn()
    (observed,) = world.seen
    assert "deletionTimestamp" not in observed.pods[0]["metadata"] and observed.view_age == 60.0


@pytest.mark.promise(
    "The age of the operator's view is that of what it has read, and a stream that returns meanwhile makes it no newer"
)
async def test_a_stream_that_comes_back_while_the_view_is_read_makes_it_no_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.age = 60.0
    read = reconciler.read_cached_job

    def read_meanwhile(*arguments: Any) -> Any:
        seen = read(*arguments)
        world.age = 0.0
        return seen

    monkeypatch.setattr(reconciler, "read_cached_job", read_meanwhile)
    await world.turn()
    assert world.seen[0].view_age == 60.0


# ------------------------------------------------------------------ deletions


@pytest.mark.parametrize("told", [True, False], ids=["the watch told first", "the watch tells later"])
async def test_a_pod_that_was_deleted_by_force_does_not_come_back_with_the_answer(told: bool) -> None:
    """The API server answers with the pod that it has removed, which is terminating in that answer for ever."""
    world = World()
    world.cache.put(POD, pod())

    def remove() -> Object:
        if told:
            world.cache.drop(POD, "ns", "job-local-0", "p", "9")
        return pod("9", deletionTimestamp=rfc3339(time.time()), deletionGracePeriodSeconds=0)

    world.api.deleting = remove
    await world.turn(JobPlan(finalizer=False, deletes=(Delete(Ref("Pod", "job-local-0"), "p", "lost", force=True),)))
    await world.turn()
    assert [len(observed.pods) for observed in world.seen] == [1, 0]


async def test_a_pod_that_still_ends_is_known_as_terminating_at_once() -> None:
    world = World()
    world.cache.put(POD, pod())
    ends = {"deletionTimestamp": rfc3339(time.time() + 30), "deletionGracePeriodSeconds": 30}
    kept = {"deletionTimestamp": ends["deletionTimestamp"], "deletionGracePeriodSeconds": 0, "finalizers": ["x/y"]}
    answers = [pod("9", **ends), pod("10", **kept)]
    world.api.deleting = lambda: answers.pop(0)
    delete = Delete(Ref("Pod", "job-local-0"), "p", "its template has changed")
    for _ in range(2):
        await world.turn(JobPlan(finalizer=False, deletes=(delete,)))
        (found,) = world.cache.of_job(KEY)[1]
        assert found["metadata"]["deletionTimestamp"] == ends["deletionTimestamp"]
    assert found["metadata"]["finalizers"] == ["x/y"]
