"""Talking to the programs of jobs: signed calls to a syncer's control port, and learners' status pages.

Theory of operation. A job is asked beside its turns, on a timer, so that a syncer that does not answer holds up
nothing. ``SyncerPoller.schedule`` says which pod is to be asked and when. The answer is kept, compressed (there are
hundreds of documents), and wakes the job's reconcile.

That turn calls ``schedule`` again, and only then is there a next question: an operator with more to do than it can
does not ask for answers that nobody reads. At most ``syncer_calls`` are under way at once, of one namespace a quarter:
a job's programs are its owner's, and may answer anything, slowly or not at all. Each call has one deadline, and an
answer has few bytes. A connection is closed
after each answer: the next is seconds away, and hundreds of idle connections are memory in both programs.

A learner is asked only where the job's syncer is in another cluster; its page is read, not
signed, and decides over nothing but words in the status.

An answer is read by its model (diloco_protocol/documents.py) when it comes. One that lacks a field, as another
release's may, is no answer: the error names the field.

An answer is dated by when it was asked for. The program makes its document after that, so the document knows of
everything that happened before its date. It may be seconds on its way, so the time of its arrival would say nothing of
that. Both programs make the document anew for each of these questions.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import logging
import random
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic
from weakref import WeakValueDictionary

from diloco_operator.logs import about
from diloco_operator.metrics import Metrics
from diloco_operator.model import Call, Key, ProgramAnswer
from diloco_protocol.common.reach import join_address
from diloco_protocol.common.tasks import cancel_tasks
from diloco_protocol.documents import D, DocumentError, LearnerPage, Report, StatusDocument, read_document
from diloco_protocol.vocabulary import CONTROL_PORT, WORKER_PORT, ControlMethod, JobPhase
from diloco_protocol.wire.control_client import ControlClient, ControlError

log = logging.getLogger(__name__)

MIN_SECONDS = 1.0  # between two questions to one program
MAX_PAGE = 256 << 10  # bytes of a learner's status page
MAX_HEAD = 16 << 10  # and of what goes before it
MAX_STATUS = 4 << 20  # bytes of a syncer's answer; reading one takes up to thirty times as much memory
ENDS = (JobPhase.COMPLETE, JobPhase.FAILED)
LEARNERS_SECONDS = 20.0
NAMESPACE_SHARE = 4  # the programs of one namespace have at most this part of all calls under way
NOT_ASKED = "this pod has not been asked yet"


class _Kept(Generic[D]):
    """An answer, small."""

    __slots__ = ("_small", "answer", "pod")

    def __init__(self, pod: str, answer: ProgramAnswer[D]) -> None:
        self.pod = pod  # UID
        document = answer.document
        self._small: tuple[type[D], bytes] | None = None
        if document is not None:
            self._small = type(document), zlib.compress(document.model_dump_json().encode(), 1)
        self.answer = replace(answer, document=None)  # all but its document

    def load(self) -> ProgramAnswer[D]:
        if self._small is None:
            return self.answer
        model, blob = self._small
        return replace(self.answer, document=model.model_validate_json(zlib.decompress(blob)))


class _NotLeading(Exception):
    """A call was not sent, for another operator may act."""


@dataclass(slots=True)
class _Job:
    control_key: bytes = b""
    target: tuple[str, str] | None = None  # the syncer pod's UID and IP
    seconds: float = 10.0
    timer: asyncio.TimerHandle | None = None
    asking: bool = False
    asked_at: float = -1e9  # monotonic
    syncer: _Kept[StatusDocument] | None = None
    learners: dict[str, _Kept[LearnerPage]] = field(default_factory=dict)  # by pod name
    learner_targets: dict[str, tuple[str, str]] = field(default_factory=dict)
    report: Report | None = None
    report_wanted: bool = True


@dataclass
class SyncerPoller:
    """Asks programs; ``answered(key)`` is told when there is something new. ``leads``: whether calls that change
    something may be sent."""

    metrics: Metrics
    calls: int
    timeout: float
    answered: Callable[[Key], None]
    leads: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._jobs: dict[Key, _Job] = {}
        self._free = asyncio.Semaphore(self.calls)
        self._share = max(1, self.calls // NAMESPACE_SHARE)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ who is asked

    def schedule(
        self,
        key: Key,
        seconds: float,
        syncer: tuple[str, str] | None,
        control_key: bytes | None,
        learners: Mapping[str, tuple[str, str]],
        report_wanted: bool,
    ) -> None:
        """Ask once, so many seconds after the last time: the syncer (its pod's UID and IP; None: there is
        none), or learners by their pods' names. Called after each turn of the job, so that it is asked again and
        again. ``control_key`` None: not known yet, nobody is asked."""
        job = self._jobs.setdefault(key, _Job())
        if syncer is None or control_key is None:
            job.target, job.syncer = None, None
        else:
            if job.target is not None and job.target[0] != syncer[0]:
                job.asked_at = -1e9  # another pod: ask it at once
            job.target, job.control_key = syncer, control_key
        job.learner_targets = dict(learners)
        job.learners = {name: kept for name, kept in job.learners.items() if name in learners}
        job.seconds = max(MIN_SECONDS, seconds if job.target else max(seconds, LEARNERS_SECONDS))
        job.report_wanted = report_wanted
        self._schedule(key, job)

    def forget(self, key: Key) -> None:
        """The job is gone."""
        job = self._jobs.pop(key, None)
        if job is not None and job.timer is not None:
            job.timer.cancel()

    def latest_answers(
        self, key: Key, pod: str | None
    ) -> tuple[ProgramAnswer[StatusDocument] | None, dict[str, ProgramAnswer[LearnerPage]], Report | None]:
        """The syncer's last answer (``pod``: UID of the pod that is the syncer now; None: there is none, and
        so no answer), learners' by pod name, and the report."""
        # That a pod was not asked yet (by an operator that has just begun) is not that there is none.
        syncer: ProgramAnswer[StatusDocument] | None = ProgramAnswer(None, NOT_ASKED) if pod is not None else None
        job = self._jobs.get(key)
        if job is None:
            return syncer, {}, None
        if syncer is not None and job.syncer is not None:
            syncer = job.syncer.load()
            if job.syncer.pod != pod:
                # An answer of its predecessor says nothing about it, but how long nobody answers goes on.
                syncer = ProgramAnswer(None, NOT_ASKED, syncer.at, syncer.failing_since)
        learners = {
            name: kept.load()
            for name, kept in job.learners.items()
            if job.learner_targets.get(name, ("",))[0] == kept.pod
        }
        return syncer, learners, job.report

    async def call(self, key: Key, syncer_ip: str, control_key: bytes, calls: Iterable[Call]) -> None:
        """Control calls, one after another. What does not come through is logged; after a first one that nobody
        answers the rest is left for another turn."""
        for call in calls:
            try:
                await self._control(key[0], syncer_ip, control_key, call.method, body=call.body, changes=True)
            except _NotLeading:
                break
            except ControlError as error:
                log.info("%s", error, extra=about(key))
                if error.kind == "unreachable":
                    break
            else:
                log.debug("told the syncer: %s %s", call.method, _words(call.body), extra=about(key))

    async def close(self) -> None:
        """Stop asking."""
        for key in list(self._jobs):
            self.forget(key)
        await cancel_tasks(self._tasks)

    # ------------------------------------------------------------------ asking

    def _schedule(self, key: Key, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        if job.asking or (job.target is None and not job.learner_targets):
            return
        wait = job.asked_at + job.seconds * random.uniform(0.95, 1.05) - time.monotonic()
        job.timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._begin, key, job)

    def _begin(self, key: Key, job: _Job) -> None:
        job.timer, job.asking = None, True
        task = asyncio.create_task(self._ask(key, job), name=f"ask {key[0]}/{key[1]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: Key, job: _Job) -> None:
        target = job.target
        try:
            if job.target is not None:
                await self._ask_syncer(key, job, *job.target)
            else:
                await asyncio.gather(
                    *(self._ask_learner(key[0], job, name, *target) for name, target in job.learner_targets.items())
                )
        finally:
            job.asking = False
            job.asked_at = time.monotonic() if job.target == target else -1e9
            if self._jobs.get(key) is job:
                self.answered(key)

    def _places(self, namespace: str) -> asyncio.Semaphore:
        """The places that the programs of one namespace may take: those that stall stall no others."""
        return self._shares.setdefault(namespace, asyncio.Semaphore(self._share))

    async def _ask_syncer(self, key: Key, job: _Job, pod: str, ip: str) -> None:
        document: StatusDocument | None = None
        error, asked_at = "", time.time()
        try:
            answer = await self._control(key[0], ip, job.control_key, ControlMethod.STATUS, body={})
            document = read_document(StatusDocument, answer)
        except (ControlError, DocumentError) as failed:
            error = str(failed)[:500]
        before = job.syncer.answer.failing_since if job.syncer is not None else None
        since = None if document is not None else time.monotonic() if before is None else before
        if since is not None and before is None:
            log.info("the syncer does not answer: %s", error, extra=about(key))
        elif since is None and before is not None:
            log.info("the syncer answers again", extra=about(key))
        job.syncer = _Kept(pod, ProgramAnswer(document, error, asked_at, since))
        if document is None:
            return
        if document.phase not in ENDS:
            job.report = None
        elif job.report is None and job.report_wanted:
            try:
                job.report = read_document(
                    Report, await self._control(key[0], ip, job.control_key, ControlMethod.REPORT, body={})
                )
            except (ControlError, DocumentError) as failed:
                log.info("the report cannot be read yet: %s", failed, extra=about(key))

    async def _control(
        self, namespace: str, ip: str, key: bytes, method: str, body: dict[str, Any], changes: bool = False
    ) -> dict[str, Any]:
        """``changes``: only the leader may make this call."""
        client = ControlClient(join_address(ip, CONTROL_PORT), key, MAX_STATUS)
        outcome = "failed"
        async with self._places(namespace), self._free:
            if changes and not self.leads():  # asked here, since it may have waited for a place
                raise _NotLeading
            began = time.monotonic()
            try:
                answer = await client.call(method, body, self.timeout)
                outcome = "ok"
                return answer
            except ControlError as error:
                outcome = error.kind
                raise
            finally:
                self.metrics.syncer_calls.labels(method, outcome).inc()
                self.metrics.syncer_seconds.observe(time.monotonic() - began)
                await client.close()

    async def _ask_learner(self, namespace: str, job: _Job, name: str, pod: str, ip: str) -> None:
        outcome, error = "ok", ""
        document: LearnerPage | None = None
        async with self._places(namespace), self._free:
            began, asked_at = time.monotonic(), time.time()
            try:
                page = await _read_page(ip, WORKER_PORT, "/status", self.timeout)
                document = read_document(LearnerPage, page)
            except DocumentError as failed:
                outcome, error = "failed", f"its status page: {failed}"[:300]
            except (OSError, http.client.HTTPException, ValueError) as failed:
                outcome, error = "unreachable", f"{type(failed).__name__}: {failed}"[:300]
            self.metrics.syncer_calls.labels("learner-status", outcome).inc()
            self.metrics.syncer_seconds.observe(time.monotonic() - began)
        kept = job.learners.get(name)
        before = kept.answer.failing_since if kept is not None and kept.pod == pod else None
        since = None if document is not None else time.monotonic() if before is None else before
        job.learners[name] = _Kept(pod, ProgramAnswer(document, error, asked_at, since))


def _words(body: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in body.items() if value not in ("", None))[:300]


async def _read_page(ip: str, port: int, path: str, seconds: float) -> bytes:
    """A page of at most MAX_PAGE bytes over plain HTTP, within so many seconds from the connection to the last byte: a
    pod that drips bytes holds nobody up. Raises OSError (TimeoutError too), HTTPException, ValueError."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(ip, port, limit=MAX_HEAD)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {join_address(ip, port)}\r\nConnection: close\r\n\r\n".encode())
            status = await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            size = http.client.parse_headers(io.BytesIO(head)).get("content-length", "")
            if status.split()[1:2] != [b"200"] or not size.isdecimal() or int(size) > MAX_PAGE:
                raise ValueError(f"{status[:100]!r}, {size[:20] or 'an unknown number of'} bytes")
            return await reader.readexactly(int(size))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ValueError(str(error)) from error
        finally:
            writer.transport.abort()
