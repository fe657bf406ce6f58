"""``diloco logs``: the logs of a job's pods as one, by time.

The API server puts a time before each line when asked to. It orders the lines of many pods, is where a broken stream is
taken up again, and is not shown: the programs' own lines have theirs. What was read once is merged by time as it
streams, and never held whole. Followed logs come from one thread a pod, which asks again when a stream ends (a
container restarted, the API server away) until its pod is gone; new pods of the job are picked up.
"""

from __future__ import annotations

import heapq
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.cluster.client import Cluster, ClusterError, Object, Where, nearest
from diloco.cluster.render import region_names
from diloco.console import FAILED, WRONG, print_text
from diloco.log_lines import LinePrinter, LogOptions
from diloco_operator.names import GROUP_PODS
from diloco_protocol.vocabulary import LABEL_POD_INDEX, LABEL_REGION, LABEL_ROLE, LABEL_SHARD

MAX_STREAMS = 64
MAX_LINE = 256 << 10  # characters of one line; the rest of a longer one is another
SILENCE_SECONDS = 60.0  # after which a followed stream is asked for anew: it may be dead
LOOK_SECONDS = 2.0  # between looks for new pods
_CONTAINERS = ("syncer", "learner", "evaluator")
_ONLY_THE_END = ("sinceSeconds", "tailLines")


@dataclass(frozen=True, slots=True)
class Source:
    pod: str
    uid: str
    container: str
    label: str  # as people call it: syncer, syncer-shard-0, evaluator, local-1


# ------------------------------------------------------------------ plain


def ordinal(pod: Object) -> int:
    """A learner's number in its region, by its pod; -1: it has none. A learner of several pods has as many indices."""
    labels = pod["metadata"].get("labels") or {}
    text = labels.get(LABEL_POD_INDEX) or str(pod["metadata"]["name"]).rpartition("-")[2]
    return int(text) // int(labels.get(GROUP_PODS, 1)) if str(text).isdigit() else -1


def source(pod: Object) -> Source:
    """The pod's main container, and what to call it."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    role = labels.get(LABEL_ROLE)
    names = [str(one["name"]) for one in (pod.get("spec") or {}).get("containers") or []]
    container = next((name for name in (role, *_CONTAINERS) if name in names), names[0] if names else "")
    label = f"{labels.get(LABEL_REGION, 'local')}-{ordinal(pod)}" if role == "learner" else str(role)
    label = f"syncer-shard-{labels[LABEL_SHARD]}" if LABEL_SHARD in labels else label
    return Source(str(metadata["name"]), str(metadata.get("uid")), str(container), label)


def chosen(job: Object, pods: Sequence[Object], target: str | None) -> list[Source]:
    """The sources that ``target`` means: syncer, syncer-shard-N, evaluator, REGION, REGION-N, learner-N (counted over
    all regions in the job's order), or a pod's name; None: all. In the job's order. Raises ClusterError for a
    target that the job does not have; one whose pod is not there now gives none."""
    regions = [
        (region, int(row.get("learners") or 0) + int(row.get("spares") or 0))
        for region, row in zip(region_names(job), job["spec"]["regions"], strict=True)
    ]
    order = {"syncer": -3, "shard": -2, "evaluator": -1} | {name: index for index, (name, _) in enumerate(regions)}

    def place(pod: Object) -> tuple[int, int, str]:
        labels = pod["metadata"].get("labels") or {}
        key = labels.get(LABEL_REGION) or labels.get(LABEL_ROLE)
        return order.get(str(key), len(order)), ordinal(pod), str(pod["metadata"]["name"])

    sources = [source(pod) for pod in sorted(pods, key=place)]
    if target is None:
        return sources
    wanted = _labels(job, regions, target)
    found = [one for one in sources if one.label in wanted or target in (one.label, one.pod)]
    if not found and not wanted:
        there = ["syncer", "evaluator", *(name for name, _ in regions)]
        there += [f"{name}-{n}" for name, count in regions for n in range(min(count, 3))]
        name = job["metadata"]["name"]
        raise ClusterError(f"the job {name} has no {target}{nearest(target, there)}", code=WRONG)
    return found


def _labels(job: Object, regions: Sequence[tuple[str, int]], target: str) -> set[str]:
    """The labels that a target stands for, present or not; none: it means nothing in this job."""
    counted = {name: {f"{name}-{n}" for n in range(count)} for name, count in regions}
    learners = (
        f"{name}-{n}"
        for (name, _), row in zip(regions, job["spec"]["regions"], strict=True)
        for n in range(int(row.get("learners") or 0))
    )
    means = {label: {label} for labels in counted.values() for label in labels}
    if "learner" not in counted:  # else it means that region's
        means |= {f"learner-{n}": {label} for n, label in enumerate(learners) if f"learner-{n}" not in means}
    syncer = job["spec"].get("syncer") or {}
    shards = int(syncer.get("shards") or 1) if syncer.get("shardPods") is not None else 0
    means |= counted | {one: {one} for one in ("syncer", "evaluator", *(f"syncer-shard-{n}" for n in range(shards)))}
    return means.get(target, set())


def stamped(line: str) -> tuple[str, str]:
    """A line's time, as text that sorts by it (nanoseconds), and the line without it."""
    stamp, _, text = line.partition(" ")
    head, point, fraction = stamp.removesuffix("Z").partition(".")
    if not stamp.endswith("Z") or len(head) != 19 or (point and not fraction.isdigit()):
        return "", line
    return f"{head}.{fraction:0<9}", text


# ------------------------------------------------------------------ reading


def lines(response: Any) -> Iterator[str]:
    rest = b""
    for chunk in response.stream(64 << 10):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
        while len(rest) > MAX_LINE:
            yield rest[:MAX_LINE].decode("utf-8", "replace")
            rest = rest[MAX_LINE:]
    if rest:
        yield rest.decode("utf-8", "replace")


def _query(one: Source, options: LogOptions, follow: bool) -> dict[str, Any]:
    query = {
        "container": one.container,
        "timestamps": "true",
        "follow": "true" if follow else None,
        "previous": "true" if options.previous else None,
        "sinceSeconds": None if options.since is None else max(1, round(options.since)),
        "tailLines": options.tail,
    }
    return {key: value for key, value in query.items() if value is not None}


def _read(cluster: Cluster, one: Source, options: LogOptions, missing: list[str]) -> Iterator[tuple[str, Source, str]]:
    """(time, source, line) of what there is; a pod without a log is added to ``missing``."""
    import urllib3

    try:
        with cluster.stream(cluster.pod_path(one.pod, "log"), _query(one, options, False), SILENCE_SECONDS) as response:
            last = ""
            for line in lines(response):
                stamp, text = stamped(line)
                last = stamp or last  # a line without a time belongs to the one before
                yield last, one, text
    except ClusterError as error:
        if error.reason in ("Unreachable", "Forbidden", "Unauthorized"):
            raise
        missing.append(one.label)
        _note(f"{one.label}: no log{' of an earlier container' if options.previous else ' yet'}: {error}")
    except (urllib3.exceptions.HTTPError, OSError) as error:
        _note(f"{one.label}: the log broke off: {error}")


def _note(text: str) -> None:
    print_text(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------ following


class _Follower:
    """Threads that follow pods, and the bounded queue that they fill."""

    def __init__(self, cluster: Cluster, options: LogOptions) -> None:
        self.cluster = cluster
        self.options = options
        self.lines: queue.Queue[tuple[str, str]] = queue.Queue(maxsize=1000)
        self.there: set[str] = set()  # UIDs of pods that are there
        self.started: set[str] = set()
        self.error: ClusterError | None = None

    def start(self, one: Source, came_later: bool) -> None:
        """Follow a pod, if there is room; one that came later from its beginning."""
        if one.uid in self.started or len(self.started & self.there) >= MAX_STREAMS:
            return
        self.started.add(one.uid)
        query = _query(one, self.options, True)
        if came_later:
            query = {key: value for key, value in query.items() if key not in _ONLY_THE_END}
        threading.Thread(target=self._run, args=(one, query), daemon=True).start()

    def _run(self, one: Source, query: dict[str, Any]) -> None:
        import urllib3

        last, pause, complaint = "", 0.5, ""
        while one.uid in self.there:
            floor = last  # a stream is taken up at a whole second: what is not newer was shown
            try:
                with self.cluster.stream(self.cluster.pod_path(one.pod, "log"), query, SILENCE_SECONDS) as response:
                    if self._replaced(one):
                        return
                    for line in lines(response):
                        stamp, text = stamped(line)
                        if stamp:
                            if stamp > floor:
                                last, pause = stamp, 0.5
                                self.lines.put((one.label, text))
                        elif text != complaint:  # of the node, which has no log of it (now)
                            complaint = text
                            self.lines.put((one.label, text))
            except ClusterError as error:
                if error.reason in ("Forbidden", "Unauthorized"):
                    self.error = error
                    return
            except (urllib3.exceptions.HTTPError, OSError):
                pass  # silence, or the API server went away
            if last:
                for key in _ONLY_THE_END:
                    query.pop(key, None)
                query["sinceTime"] = last[:19] + "Z"
            time.sleep(pause)
            pause = min(pause * 2, 8.0)

    def _replaced(self, one: Source) -> bool:
        """Whether the pod that has the name now is another one: its log is not this one's."""
        try:
            pod = self.cluster.get(self.cluster.pod_path(one.pod))
        except ClusterError:
            return False
        return bool(pod["metadata"]["uid"] != one.uid)


def show_logs(where: Where, name: str, options: LogOptions) -> int:
    """``diloco logs``: the exit code. Raises ClusterError."""
    cluster = where.open_one()
    job = cluster.job(name)
    sources = chosen(job, cluster.pods(name), options.target)
    if len(sources) > MAX_STREAMS:
        raise ClusterError(
            f"{name} has {len(sources)} pods, and at most {MAX_STREAMS} logs are read at once: name a"
            " region or a learner",
            code=WRONG,
        )
    printer = LinePrinter(options, [one.label for one in sources])
    if options.follow:
        return _follow(cluster, name, options, job, printer=printer)
    if not sources:
        phase = (job.get("status") or {}).get("phase") or "new"
        raise ClusterError(f"{options.target or name} has no pod now (the job is {phase})")
    missing: list[str] = []
    streams = [_read(cluster, one, options, missing) for one in sources]
    for _, one, text in heapq.merge(*streams, key=lambda line: line[0]):
        printer.show(one.label, text)
    return FAILED if len(missing) == len(sources) else 0


def _follow(cluster: Cluster, name: str, options: LogOptions, job: Object, printer: LinePrinter) -> int:
    follower = _Follower(cluster, options)
    look_at = 0.0
    looked = False
    while True:
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + LOOK_SECONDS
            try:
                found = chosen(job, cluster.pods(name), options.target)
                follower.there = {one.uid for one in found}
                for one in found:
                    follower.start(one, looked)
                looked = True
                printer.widen(one.label for one in found)
                if not found:
                    job = cluster.job(name)  # raises where the job is gone
            except ClusterError as error:
                if error.reason == "NotFound":
                    while not follower.lines.empty():
                        printer.show(*follower.lines.get_nowait())
                    _note(f"{name} is gone")
                    return 0
                if not error.passing:
                    raise
        if follower.error is not None:
            raise follower.error
        try:
            printer.show(*follower.lines.get(timeout=0.5))
        except queue.Empty:
            continue
