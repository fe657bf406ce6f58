"""What a job's syncer serves inside its pod, from outside: status page, report, merged model.

All through a port-forward (port_forward.py), so that no port of a job needs to be exposed. The
syncer of a job that has ended serves on until the job is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cluster.client import TIMEOUT, Cluster, ClusterError, Object, Where
from diloco.cluster.port_forward import Forward, forwarded
from diloco.cluster.render import holds
from diloco.console import FAILED, print_text
from diloco.local.summary import summary
from diloco.syncer_client import SyncerError, fetch_document
from diloco.text_console import TextConsole
from diloco_protocol.documents import DocumentError, Report, StatusDocument, read_document
from diloco_protocol.vocabulary import EXPORT_PORT, HTTP_PORT

if TYPE_CHECKING:
    from diloco.export.export import Written

REPORT_SECONDS = 60.0
PAGE_SECONDS = 5.0
PAGE_AGAIN_SECONDS = 10.0  # between tries where it is not to be had


def syncer_pod(job: Object, pods: list[Object]) -> str:
    """The name of the syncer's pod that serves. Raises ClusterError, saying why there is none."""
    name = job["metadata"]["name"]
    running = [
        pod
        for pod in pods
        if (pod.get("status") or {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
    ]
    if running:
        newest = max(running, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        return str(newest["metadata"]["name"])
    phase = (job.get("status") or {}).get("phase") or "new"
    output = (job.get("status") or {}).get("output") or {}
    if output.get("state") == "Written":
        uri = output.get("uri")
        said = f"{name} is complete and its syncer was removed; its model and report.json are in {uri}"
        raise ClusterError(f"{said}: diloco export {uri} OUT, from where that can be read")
    if pods:
        state = (pods[-1].get("status") or {}).get("phase")
        raise ClusterError(f"the syncer of {name} is not running yet (its pod is {state}): diloco status {name}")
    if phase == "Suspended":
        raise ClusterError(f"{name} is suspended, its syncer does not run: diloco resume {name}")
    hub = ((job.get("spec") or {}).get("syncer") or {}).get("cluster")
    where = f"; it runs in the cluster {hub}: name that context" if hub else ""
    raise ClusterError(f"{name} has no syncer's pod here (phase: {phase}){where}")


@contextlib.contextmanager
def syncer_port(cluster: Cluster, job: Object, port: int, seconds: float = TIMEOUT) -> Iterator[tuple[Forward, str]]:
    """A port of the job's syncer on this machine, and the pod's name. Raises ClusterError."""
    pod = syncer_pod(job, cluster.pods(job["metadata"]["name"], "syncer"))
    with forwarded(cluster, pod, port, seconds) as forward:
        yield forward, pod


def _fetch_report(cluster: Cluster, job: Object) -> Report:
    with syncer_port(cluster, job, HTTP_PORT) as (forward, pod):
        try:
            return asyncio.run(fetch_document(forward.address, "/report", Report, REPORT_SECONDS))
        except SyncerError as error:
            raise ClusterError(forward.problem or f"the syncer's page /report (pod {pod}): {error}") from error


class Pages:
    """The status pages of one job's syncer: one port-forward, opened anew where the pod has changed."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._open = contextlib.ExitStack()
        self._forward: Forward | None = None
        self._again_at = 0.0  # monotonic seconds
        self.problem = ""  # why there is no page

    def read(self, job: Object) -> StatusDocument | None:
        """The page as it is now; None where it cannot be had: then it is not tried for a while."""
        if time.monotonic() < self._again_at:
            return None
        try:
            if self._forward is None:
                self._forward, _ = self._open.enter_context(syncer_port(self._cluster, job, HTTP_PORT, PAGE_SECONDS))
            document = asyncio.run(fetch_document(self._forward.address, "/status", StatusDocument, PAGE_SECONDS))
        except (ClusterError, SyncerError) as error:
            self.problem = (self._forward and self._forward.problem) or str(error)
            self._again_at = time.monotonic() + PAGE_AGAIN_SECONDS
            self.close()
            return None
        self.problem = ""
        return document if document.job == self._name else None

    def close(self) -> None:
        self._open.close()
        self._forward = None


# ------------------------------------------------------------------ report


def report(where: Where, name: str, as_json: bool) -> None:
    """``diloco report``. Raises ClusterError."""
    cluster = where.open_one(": that of the cluster with the syncer")
    job = cluster.job(name)
    try:
        document = _fetch_report(cluster, job)
    except ClusterError as error:
        short = (job.get("status") or {}).get("report")
        if not short:
            raise
        print_text(f"warning: only the short report of the job's status: {error}", file=sys.stderr)
        try:
            document = read_document(Report, short)
        except DocumentError as wrong:
            raise ClusterError(f"the report in the status of {name}: {wrong}") from wrong
    ended = holds(job, "Complete") or holds(job, "Failed") or holds(job, "Suspended")
    show_report(document, as_json, going=not ended)


def show_report(document: Report, as_json: bool, going: bool = False) -> None:
    """Print a report. ``going``: the job is not over, and what people see says so."""
    if as_json:
        print_text(json.dumps(json.loads(document.model_dump_json()), indent=1))
    else:
        TextConsole(soft_wrap=True).print(summary(document, "the job continues" if going else ""))


# ------------------------------------------------------------------ export


def export(where: Where, name: str, out: Path, adapter: bool = False, check: bool = True) -> Written:
    """``diloco export NAME OUT``, with ``--adapter`` and ``--no-check`` or without. Raises ClusterError."""
    from diloco.export.export import ExportFailed, read_url, write_merged

    cluster = where.open_one(": that of the cluster with the syncer")
    job = cluster.job(name)
    with syncer_port(cluster, job, EXPORT_PORT) as (forward, _):
        try:
            return write_merged(read_url(f"http://{forward.address}", _Progress()), out, adapter, check)
        except ExportFailed as error:
            said = f"{forward.problem}: " if forward.problem else ""
            raise ClusterError(f"{said}{error}", code=FAILED) from error


class _Progress:
    """Bytes received, on a terminal."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent == self._shown or not sys.stderr.isatty():
            return
        self._shown = percent
        end = "\n" if done >= total else ""
        sys.stderr.write(f"\rreceived {done >> 20} of {total >> 20} MiB ({percent} %){end}")
        sys.stderr.flush()
