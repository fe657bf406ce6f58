"""``diloco status`` and ``diloco events`` of jobs in clusters."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from diloco.cluster.client import Cluster, ClusterError, Object, Where
from diloco.cluster.fetch import Pages
from diloco.cluster.follow import POLL_SECONDS, ended, follow, job_events
from diloco.cluster.logs import SILENCE_SECONDS, lines
from diloco.cluster.render import JobsTable, concerns, event_count, event_line, event_time, job_picture, region_names
from diloco.console import print_text
from diloco.text_console import TextConsole
from diloco_protocol.documents import StatusDocument
from diloco_protocol.vocabulary import ResourcePhase

# ------------------------------------------------------------------ status


def show_status(where: Where, name: str | None, everywhere: bool, watch: bool, as_json: bool) -> None:
    """``diloco status``. Raises ClusterError."""
    clusters = where.open()
    if name is None:
        _list(clusters, everywhere, watch, as_json)
        return
    if watch:
        _watch(clusters, name)
        return
    documents = []
    console = TextConsole(soft_wrap=True, highlight=False)
    with contextlib.ExitStack() as stack:
        for cluster in clusters:
            job = cluster.job(name)
            pages = Pages(cluster, name)
            stack.callback(pages.close)
            page = pages.read(job)
            events = job_events(cluster, name)
            if as_json:
                documents.append(status_document(job, page, events, cluster.context))
                continue
            if len(clusters) > 1:
                console.print(f"context {cluster.context}", style="dim")
            console.print(job_picture(job, page, events, time.time()))
            if page is None and (job.get("status") or {}).get("phase") == ResourcePhase.RUNNING:
                console.print(f"(no rows for learners: {pages.problem})", style="dim")
    if as_json:
        print_text(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))


def status_document(job: Object, page: StatusDocument | None, events: Sequence[Object], context: str) -> Object:
    """``--json``: the syncer's status document, where it could be read, as of a run on one machine; and the
    job's object and events."""
    resource = {**job, "metadata": {k: v for k, v in job["metadata"].items() if k != "managedFields"}}
    head = {"running": page is not None, "job": job["metadata"]["name"], "context": context}
    told = [
        {
            "time": event_time(event),
            "type": event.get("type"),
            "reason": event.get("reason"),
            "message": event.get("message"),
            "count": event_count(event),
        }
        for event in sorted(events, key=event_time)
    ]
    shown = {} if page is None else page.model_dump(mode="json")
    return {**head, **shown, "resource": resource, "resource_events": told}


def _list(clusters: Sequence[Cluster], everywhere: bool, watch: bool, as_json: bool) -> None:
    console = TextConsole(soft_wrap=True, highlight=False)
    while True:
        jobs: list[Object] = []
        contexts: list[str] = []
        for cluster in clusters:
            found = cluster.jobs(everywhere)
            jobs += found
            contexts += [cluster.context] * len(found)
        if as_json:
            print_text(json.dumps({"items": jobs}, indent=1))
        elif not jobs:
            names = [f"{c.context}{'' if everywhere else f' (namespace {c.namespace})'}" for c in clusters]
            console.print(f"there is no job in {', '.join(names)}")
        else:
            several = contexts if len(clusters) > 1 else ()
            console.print(JobsTable(jobs, time.time(), several, everywhere))
        if not watch:
            return
        time.sleep(POLL_SECONDS)


def _watch(clusters: Sequence[Cluster], name: str) -> None:
    """The picture, drawn again and again until the job ends; elsewhere than on a terminal, lines."""
    for cluster in clusters:
        cluster.job(name)  # that it is not there is said at once
    console = TextConsole(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        follow(clusters, name, ended, None, say=lambda line: print_text(line, flush=True))
        return
    views = [_Watched(cluster, Pages(cluster, name)) for cluster in clusters]
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while not all(view.over for view in views):
                for view in views:
                    view.refresh(name)
                live.update(Group(*(part for view in views for part in view.parts)), refresh=True)
                time.sleep(POLL_SECONDS)
    finally:
        for view in views:
            view.pages.close()


@dataclass(slots=True)
class _Watched:
    """One copy of a job on the screen: its last picture, and below it what keeps it from being newer."""

    cluster: Cluster
    pages: Pages
    parts: list[Any] = field(default_factory=list)
    over: bool = False

    def refresh(self, name: str) -> None:

        try:
            job = self.cluster.job(name)
            events = job_events(self.cluster, name)
        except ClusterError as error:
            if not error.passing and error.reason != "NotFound":
                raise
            self.parts = [*self.parts[:1], Text(str(error), "yellow")]
            self.over = error.reason == "NotFound"
            return
        self.parts = [job_picture(job, self.pages.read(job), events, time.time())]
        self.over = ended(job) is not None


# ------------------------------------------------------------------ events


def show_events(where: Where, name: str, watch: bool, as_json: bool) -> None:
    """``diloco events NAME``: of the job and its objects, oldest first. Raises ClusterError."""
    console = TextConsole(soft_wrap=True, highlight=False)
    cursors = [EventCursor(cluster) for cluster in where.open()]
    jobs = {one.cluster.context: one.cluster.job(name) for one in cursors}
    told: dict[str, int] = {}
    while True:
        began, found = time.monotonic(), list[tuple[float, str, Object]]()
        for one in cursors:
            cluster, regions = one.cluster, region_names(jobs[one.cluster.context])
            try:
                events = one.read()
            except ClusterError as error:
                if not watch or not error.passing:
                    raise
                print_text(f"{error} (asking again)", file=sys.stderr)
                continue
            found += [(event_time(e), cluster.context, e) for e in events if concerns(e, name, regions)]
        new: list[Any] = []
        for _, context, event in sorted(found, key=lambda one: one[0]):
            uid = str(event["metadata"].get("uid"))
            if told.get(uid, 0) < event_count(event):
                told[uid] = event_count(event)
                new.append((context, event))
        if as_json:
            for _, event in new:
                print_text(json.dumps(event))
        else:
            for context, event in new:
                place = Text(f"{context}  ", "dim") if len(cursors) > 1 else Text("")
                console.print(place + event_line(event, name, time.time()))
        if not watch:
            if not new and not as_json:
                console.print(f"no events for {name} (the cluster keeps them for about an hour)")
            return
        time.sleep(max(0.0, began + POLL_SECONDS - time.monotonic()))


class EventCursor:
    """The Events of a cluster's namespace: at first all of them, then those that are new."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._version = ""  # to watch from; empty: list first

    def read(self) -> list[Object]:
        """Those since the last call, and of the next ``POLL_SECONDS``. Raises ClusterError; the next call begins with
        all of them then."""
        version, self._version = self._version, ""
        found: list[Object] = []
        if version:
            self._version = self._watch(version, found)
            return found
        for page in self.cluster.pages_of(self.cluster.core_path("events")):
            found += page.get("items") or ()
            version = str((page.get("metadata") or {}).get("resourceVersion") or "")
        self._version = version
        return found

    def _watch(self, version: str, found: list[Object]) -> str:
        """Add what comes within ``POLL_SECONDS``; the version to go on from, empty: it is forgotten."""
        import urllib3

        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": math.ceil(POLL_SECONDS),
        }
        try:
            with self.cluster.stream(self.cluster.core_path("events"), query, SILENCE_SECONDS) as reply:
                for line in lines(reply):
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        return ""
                    version = str(change["object"]["metadata"]["resourceVersion"])
                    found += [change["object"]] if change["type"] in ("ADDED", "MODIFIED") else []
        except ClusterError as error:
            if error.reason not in ("Expired", "Gone"):
                raise
            return ""
        except (OSError, ValueError, urllib3.exceptions.HTTPError):
            return ""  # it broke off: what is known already is not told again
        return version
