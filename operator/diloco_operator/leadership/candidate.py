"""An operator as a candidate: it reads and writes the Lease, and asks its ``Election`` what to write.

Theory of operation. Requests go through a thread and a connection of their own, with a timeout well below the time for
which the leader may act, so that neither a long queue of writes nor a slow API server ends a leadership that could be
renewed. What fails is tried again after ``RETRY_SECONDS``; a leader that cannot renew stops by itself
(``Election.may_act``). Every change of who leads is logged once, and so is what keeps the Lease from being read. Who
waits for a leadership, or for its end, is woken after each request, and when the time is over for which it may act.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from diloco_operator.kube.api import Observer
from diloco_operator.kube.client import MERGE_PATCH, Client
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import LEASE
from diloco_operator.leadership.election import LEASE_SECONDS, RETRY_SECONDS, Election, LeaseRecord, LeaseWrite
from diloco_operator.model import Object
from diloco_operator.names import MANAGER

log = logging.getLogger(__name__)

REQUEST_SECONDS = 4.0
RELEASE_SECONDS = 3.0


def read_clock() -> float:
    """Seconds that no setting of the clock changes, and that count on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaseStore:
    """The Lease ``namespace/name`` on the API server; each request blocks for at most ``REQUEST_SECONDS``."""

    def __init__(self, client: Client, namespace: str, name: str, observer: Observer) -> None:
        self.where = f"{namespace}/{name}"
        self._client = client
        self._namespace, self._name = namespace, name
        self._observer = observer

    def read(self) -> LeaseRecord | None:
        """The Lease; None: there is none. Raises ApiError."""
        try:
            return read_lease(self._ask("get", "GET", LEASE.path(self._namespace, self._name)))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def write(self, wanted: LeaseWrite) -> LeaseRecord:
        """Make the Lease, or change the version of it that ``wanted`` names. Raises ApiError (409, 404: it is
        another by now)."""
        body = lease_manifest(wanted, self._namespace, self._name, datetime.now(UTC))
        if wanted.version is None:
            return read_lease(self._ask("create", "POST", LEASE.path(self._namespace), body=body))
        path, query = LEASE.path(self._namespace, self._name), {"fieldManager": MANAGER}
        return read_lease(self._ask("patch", "PATCH", path, body=body, query=query, content=MERGE_PATCH))

    def _ask(self, verb: str, method: str, path: str, **parts: Any) -> Object:
        began, status = time.monotonic(), 0
        try:
            status, answer = self._client.request_with_status(method, path, seconds=REQUEST_SECONDS, **parts)
            return answer
        except ApiError as error:
            status, error.verb, error.resource = error.status, verb, LEASE.plural
            raise
        finally:
            self._observer(verb, LEASE.plural, status, time.monotonic() - began)


class Candidate:
    """Takes part in the election until cancelled. ``clock``: seconds, as ``read_clock``."""

    def __init__(self, store: LeaseStore, identity: str, clock: Callable[[], float] = read_clock) -> None:
        self._store = store
        self._clock = clock
        self._election = Election(identity)
        self._thread = ThreadPoolExecutor(1, "lease")
        self._said: tuple[bool, str] = (False, "")
        self._news = asyncio.Event()  # a request has ended, or the Lease is given back
        self.problem = ""

    @property
    def term(self) -> int:
        """Which leadership the newest known is; it rises with each new holder."""
        return self._election.record.term if self._election.record is not None else 0

    @property
    def has_read(self) -> bool:
        """Whether the Lease was ever read or written."""
        return self._election.record is not None

    def leads(self) -> bool:
        """Whether this operator may act. Thread-safe."""
        return self._election.may_act(self._clock())

    def seconds_for_a_write(self) -> float:
        """How long a write that begins now may take; 0: it may not begin. Thread-safe."""
        return self._election.seconds_for_a_write(self._clock())

    async def wait_until_it_leads(self) -> int:
        """Wait until this operator may act; the term in which it does."""
        while not self.leads():
            self._news.clear()
            await self._news.wait()
        return self.term

    async def wait_until_it_is_over(self, term: int) -> None:
        """Wait until this operator may not act any more, or leads in another term."""
        while self.term == term and (left := self._election.seconds_to_act(self._clock())) > 0:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()

    async def run(self) -> None:
        """Take part until cancelled."""
        while True:
            try:
                await self._take_part()
                problem = ""
            except ApiError as error:
                problem = str(error)
            self._tell_change(problem)
            self._news.set()
            await asyncio.sleep(RETRY_SECONDS * random.uniform(0.7, 1.0))

    async def release(self, writes_end: Callable[[], bool]) -> None:
        """Lead no more, and give the Lease back once ``writes_end``; else it ends by itself."""
        wanted = self._election.plan_release()
        self._news.set()
        if wanted is None:
            return
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                while not writes_end():
                    await asyncio.sleep(0.05)
                self._election.receive(await self._call(self._store.write, wanted), self._clock())
                log.info("gave the Lease %s back", self._store.where)
        except (TimeoutError, ApiError) as error:
            log.info("the Lease %s was not given back; it expires by itself: %s", self._store.where, error or "no time")

    async def _take_part(self) -> None:
        election = self._election
        wanted = election.plan_write(self._clock())
        if wanted is None:
            record = await self._call(self._store.read)
            election.receive(record, self._clock())
            wanted = election.plan_write(self._clock())
        if wanted is None:
            return
        sent_at = self._clock()
        try:
            record = await self._call(self._store.write, wanted)
        except ApiError as error:
            # Somebody else's by now, or gone; or this one's, if an answer was lost.
            if error.status == 409 or (error.status == 404 and wanted.version is not None):
                election.forget()
                return
            raise
        election.confirm_write(record, sent_at)

    async def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _tell_change(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            if problem:
                log.warning("the Lease %s cannot be read or written: %s; trying again", self._store.where, problem)
        told = self.leads(), self._election.holder
        if told == self._said:
            return
        before, self._said = self._said[0], told
        if told[0] != before:
            log.info("this operator %s (Lease %s)", "leads" if told[0] else "does not lead any more", self._store.where)
        if not told[0] and told[1] not in ("", self._election.identity):
            log.info("standing by: %s leads (Lease %s)", told[1], self._store.where)


def lease_manifest(wanted: LeaseWrite, namespace: str, name: str, now: datetime) -> Object:
    """What is sent: a whole Lease where there is none, else a merge patch of the version that ``wanted`` names."""
    at = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = {
        "holderIdentity": wanted.holder,
        "leaseDurationSeconds": int(LEASE_SECONDS),
        "acquireTime": wanted.acquired or at,
        "renewTime": at,
        "leaseTransitions": wanted.term,
    }
    if wanted.version is not None:
        return {"metadata": {"resourceVersion": wanted.version}, "spec": spec}
    labels = {"app.kubernetes.io/name": MANAGER, "app.kubernetes.io/managed-by": MANAGER}
    meta = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": spec}


def read_lease(lease: Object) -> LeaseRecord:
    """A Lease as the API server sends it."""
    spec = lease.get("spec") or {}
    return LeaseRecord(
        holder=str(spec.get("holderIdentity") or ""),
        version=str(lease["metadata"]["resourceVersion"]),
        term=int(spec.get("leaseTransitions") or 0),
        seconds=float(spec.get("leaseDurationSeconds") or LEASE_SECONDS),
        acquired=str(spec.get("acquireTime") or ""),
    )
