"""``diloco status`` of jobs in clusters."""

from __future__ import annotations

import contextlib
import json
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
from diloco.cluster.render import event_count, event_time, job_picture, jobs_table
from diloco.console import print_text
from diloco.text_console import TextConsole
from diloco_protocol.documents import StatusDocument
from diloco_protocol.vocabulary import ResourcePhase


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
            console.print(jobs_table(jobs, time.time(), several, everywhere))
        if not watch:
            return
        time.sleep(POLL_SECONDS)


def _watch(clusters: Sequence[Cluster], name: str) -> None:
    """The picture, drawn again and again until the job ends; elsewhere than on a terminal, lines."""
    for cluster in clusters:
        cluster.job(name)  # that it is not there is said at once
    console = TextConsole(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        follow(clusters, name, ended, None)
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
