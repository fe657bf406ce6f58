"""Waiting for something to become so in a cluster, telling what happens meanwhile.

``ProgressReporter`` is plain: it takes what was read and returns the lines that are new. ``follow``
reads the copies of a job in turn, every ``POLL_SECONDS``, until each of them has an
outcome; an API server that does not answer is waited for, since training goes on without it.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco.cluster.answers import Answers
from diloco.cluster.client import Cluster, ClusterError, Object
from diloco.cluster.fetch import Pages
from diloco.cluster.render import condition, condition_style, event_count, event_time, heard, holds, job_line
from diloco.console import COMPLETE, FAILED, print_text
from diloco_protocol.documents import StatusDocument
from diloco_protocol.vocabulary import FAULT_CONDITIONS, JOB_REFUSED_REASONS, ResourcePhase

POLL_SECONDS = 2.0
SLOWEST_POLL = 15.0  # where the API server does not answer
LINE_SECONDS = 5.0  # between progress lines
STILL_SECONDS = 60.0  # between lines that say the same

Outcome = tuple[int, str]
"""An exit code, and the sentence that says why."""

Judge = Callable[[Object | None], Outcome | None]
"""What a job's object (None: it is not there) means to who waits; None: go on waiting."""


@dataclass(slots=True)
class ProgressReporter:
    """What was told already of one copy of a job. ``at``: the unix time from which events are news."""

    at: float
    line_at: float = float("-inf")
    figures: str = ""
    begun: bool = False
    events: dict[str, int] = field(default_factory=dict)  # uid -> times
    conditions: dict[str, str] = field(default_factory=dict)  # type -> status

    def new_lines(self, job: Object, events: Sequence[Object], page: StatusDocument | None, now: float) -> list[str]:
        """The lines that are new: events in order, conditions that turned, and the progress: the syncer's
        (``page``: its status document), or where it is not to be had the job's status'."""
        lines = []
        told = set()
        for event in sorted(events, key=event_time):
            uid, count = str(event["metadata"].get("uid")), event_count(event)
            if event_time(event) >= self.at and self.events.get(uid, 0) < count:
                message = " ".join(str(event.get("message") or "").split())
                lines.append(f"{event.get('reason')}: {message}")
                told.add(message)
            self.events[uid] = count
        first, self.begun = not self.begun, True
        for one in (job.get("status") or {}).get("conditions") or []:
            kind, status = str(one.get("type")), str(one.get("status"))
            before = self.conditions.get(kind)
            if before != status:
                self.conditions[kind] = status
                message = str(one.get("message") or "")
                fine = kind in FAULT_CONDITIONS and status == "False" and before is None  # it never was otherwise
                if condition_style(one) != "dim" and message not in told and not first and not fine:
                    said = kind if status == "True" else f"{kind} is {status}"
                    lines.append(f"{said}: {message or one.get('reason')}")
        line = job_line(job, page, now)
        figures = line.partition(" s  ")[2] or line  # without the time, which always changes
        pause = LINE_SECONDS if figures != self.figures else STILL_SECONDS
        if now - self.line_at >= pause:
            self.figures = figures
            self.line_at = now
            lines.append(line)
        return lines


# ------------------------------------------------------------------ what is waited for


def ended(job: Object | None) -> Outcome | None:
    """Complete or failed."""
    if job is None:
        return FAILED, "was deleted"
    if holds(job, "Complete"):
        return COMPLETE, "is complete"
    if holds(job, "Failed"):
        return FAILED, f"has failed: {_message(job, 'Failed')}"
    return invalid(job)


def invalid(job: Object) -> Outcome | None:
    """Refused by the operator, until it is changed."""
    if heard(job) and (job.get("status") or {}).get("phase") == ResourcePhase.INVALID:
        return FAILED, f"cannot run as it is: {_message(job, 'Ready') or 'diloco status says why'}"
    return None


def hindered(job: Object) -> str:
    """What keeps the operator from making the job true, in its words; empty: nothing that it knows of."""
    ready = condition(job, "Ready") or {}
    if ready.get("status") == "False" and ready.get("reason") in JOB_REFUSED_REASONS:
        return f"{ready['reason']}: {ready.get('message')}"
    return ""


def suspended(job: Object | None) -> Outcome | None:
    """Drained and checkpointed, its pods gone; or ended before it came to that."""
    if job is not None and heard(job) and (job.get("status") or {}).get("phase") == ResourcePhase.SUSPENDED:
        return COMPLETE, "is suspended"
    return ended(job)


def taken_down(job: Object | None) -> Outcome | None:
    """Suspended, or about to be, after it had failed."""
    if job is None:
        return FAILED, "was deleted"
    reason = (condition(job, "Suspended") or {}).get("reason")
    return (COMPLETE, "") if heard(job) and reason in ("Suspending", "Suspended", "Saved", "NotSaved") else None


def resumed(job: Object | None) -> Outcome | None:
    """In training again."""
    if job is not None and heard(job) and (job.get("status") or {}).get("phase") == ResourcePhase.RUNNING:
        return COMPLETE, "is running"
    return ended(job)


def seen(job: Object | None) -> Outcome | None:
    """An operator has looked at it."""
    return (FAILED, "was deleted") if job is None else (COMPLETE, "") if heard(job) else None


def gone_within(uids: set[str]) -> Judge:
    """That none of these is there: no job of the name, or another one."""

    def gone(job: Object | None) -> Outcome | None:
        return (COMPLETE, "is deleted") if job is None or job["metadata"]["uid"] not in uids else None

    return gone


def _message(job: Object, kind: str) -> str:
    found = condition(job, kind) or {}
    return str(found.get("message") or found.get("reason") or "")


# ------------------------------------------------------------------ waiting


@dataclass(slots=True)
class _Copy:
    cluster: Cluster
    reporter: ProgressReporter
    pages: Pages
    outcome: Outcome | None = None
    silent: bool = False
    job: Object | None = None


def follow(
    clusters: Sequence[Cluster], name: str, judge: Judge, timeout: float | None, *, quiet: bool = False
) -> list[tuple[Cluster, Outcome | None, Object | None]]:
    """Wait until every copy of the job has an outcome, ``timeout`` seconds at most (None: without end), and print what
    happens meanwhile; ``quiet``: not.

    Returns, for each cluster, the outcome (None: the time is over) and the job as it was last. Raises
    ClusterError where a cluster refuses to be asked; one that does not answer is asked again.
    """
    end = None if timeout is None else time.monotonic() + timeout
    copies = [_Copy(cluster, ProgressReporter(time.time() - 1.0), Pages(cluster, name)) for cluster in clusters]
    pause = POLL_SECONDS
    with contextlib.ExitStack() as stack:
        for copy in copies:
            stack.callback(copy.pages.close)
        while True:
            for copy in copies:
                if copy.outcome is None:
                    _look(copy, name, judge, several=len(copies) > 1, quiet=quiet)
            left = float("inf") if end is None else end - time.monotonic()
            if left <= 0 or all(copy.outcome is not None for copy in copies):
                return [(copy.cluster, copy.outcome, copy.job) for copy in copies]
            silent = any(copy.silent for copy in copies)
            pause = min(pause * 1.5, SLOWEST_POLL) if silent else POLL_SECONDS
            time.sleep(min(pause * random.uniform(0.8, 1.2), left))


def wait_for(
    clusters: Sequence[Cluster],
    name: str,
    judge: Judge,
    timeout: float | None,
    unfinished: Callable[[Cluster, Object | None], Sequence[str]],
    answers: Answers,
) -> int:
    """``follow``, with what became of each copy printed; the exit code. ``unfinished``: what to say of one whose
    time is over (its object as it was last): how it is, and what else may help. Raises ClusterError."""
    code = COMPLETE
    for cluster, outcome, job in follow(clusters, name, judge, timeout):
        whose = name + context_suffix(cluster, clusters)
        if outcome is None:
            how, *more = unfinished(cluster, job)
            for text in (f"{whose} {how}", *more):
                print_text(f"error: {text}", file=sys.stderr)
            code = max(code, FAILED)
            answers.add(cluster, outcome=how, in_time=False)
        else:
            answers.add(cluster, outcome=outcome[1], in_time=True)
            print_text(f"{whose} {outcome[1]}", file=sys.stderr if outcome[0] else sys.stdout)
            code = max(code, outcome[0])
    return code


def context_suffix(cluster: Cluster, clusters: Sequence[Cluster]) -> str:
    """Behind a sentence: in which context it is so, where there are several."""
    return f" (context {cluster.context})" if len(clusters) > 1 else ""


def _look(copy: _Copy, name: str, judge: Judge, several: bool, quiet: bool) -> None:
    cluster = copy.cluster
    prefix = f"{cluster.context}: " if several else ""
    events: list[Object] = []
    try:
        copy.job = cluster.find(cluster.job_path(name))
        if copy.job is not None and not quiet:
            events = job_events(cluster, name)
    except ClusterError as error:
        if not error.passing:
            raise
        if not copy.silent and not quiet:
            print_text(f"{prefix}{error} (the job continues meanwhile; asking again)", flush=True)
        copy.silent = True
        return
    copy.silent = False
    if copy.job is not None and not quiet:
        # A page that cannot be had costs up to PAGE_SECONDS; not where there is nothing to show yet.
        running = (copy.job.get("status") or {}).get("phase") in (
            ResourcePhase.RUNNING,
            ResourcePhase.HOLDING,
            ResourcePhase.FINISHING,
        )
        page = copy.pages.read(copy.job) if running else None
        for line in copy.reporter.new_lines(copy.job, events, page, time.time()):
            print_text(prefix + line, flush=True)
    copy.outcome = judge(copy.job)


def job_events(cluster: Cluster, name: str) -> list[Object]:
    """The events about the job itself; none where this account may not read them."""
    try:
        return cluster.all_of(
            cluster.core_path("events"), fieldSelector=f"involvedObject.kind=DiLoCoJob,involvedObject.name={name}"
        )
    except ClusterError as error:
        if error.reason == "Forbidden":
            return []
        raise


def operator_hint(cluster: Cluster) -> str:
    """How to look whether an operator runs."""
    return f"kubectl {cluster.reach} get pods -A -l app.kubernetes.io/name=diloco-operator"


def no_operator(cluster: Cluster, name: str) -> str:
    """What to say where no operator has taken note of a job."""
    return (
        f"no operator has looked at {name} in context {cluster.context}: is one running there, for this"
        f" namespace? {operator_hint(cluster)}"
    )
