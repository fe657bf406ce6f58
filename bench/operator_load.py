"""The operator with many jobs on a real API server: time of a reconcile, memory, requests.

Nodes and pods are simulated (kwok, or `localkube fake-nodes`), API server, controllers and
scheduler are real, and so is the operator's program. The jobs' syncers are answered for by one
process that runs the real control service and the real core (`standin.py`), on the pods' own
addresses. Everything is measured from outside: the operator's metrics, the kernel's count of
its memory, and the API server's own count of its requests, which it tells apart by account.

In turn: all jobs are created; training goes on; nothing changes (learners are heard and make
no step); 1 % of the pods are killed at random; the operator is stopped, and begins anew.
Memory is compared with an operator in kopf that does nothing, on the same objects, and the
making of objects with server-side apply of the same ones, one after another (a dry run).

p95 of a reconcile is read from the operator's histogram, by linear interpolation within a bucket.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
import fleet
import programs
import standin
from diloco_operator.kube import kinds
from diloco_operator.kube.errors import ApiError
from diloco_protocol.vocabulary import LABEL_JOB, LABEL_ROLE
from kubeapi import Api
from scrape import Snapshot, difference, errors, quantile, reconciles, snapshot, words

BEAT = 20.0  # seconds between two steps of a learner
JOBS, QUICK_JOBS, PODS = 500, 20, 10
WINDOW, QUICK_WINDOW = 180.0, 60.0
SETTLE = 70.0  # progress is written once a minute: then nothing of the last change is left to write
KILLED = 0.01  # of the pods
AIM_SECONDS, AIM_BYTES, AIM_REQUESTS = 1.0, 250e6, 1.0


# ------------------------------------------------------------------ the run


class Bench:
    """All phases on one cluster. ``say`` tells a person how far it is."""

    def __init__(self, api: Api, operator: programs.Operator, pipe: Any, jobs: int, pods: int) -> None:
        self.api, self.operator, self.pipe = api, operator, pipe
        self.jobs, self.pods = jobs, pods
        self.rows: list[common.Row] = []

    def told(self, word: str = "told") -> Any:
        self.pipe.send(word)
        if not self.pipe.poll(60):
            raise fleet.NoCluster("the process that answers for the syncers does not")
        answer = self.pipe.recv()
        return json.loads(answer) if word == "told" else answer

    def row(self, name: str, value: float, unit: str, against: str, baseline: float) -> None:
        """The ratio is that of the baseline to the value."""
        self.rows.append(common.Row(name, value, unit, against, baseline=baseline, ratio=baseline / value))

    def under(self, name: str, value: float, unit: str, aim: float, scale: float = 1.0) -> None:
        """A figure that has an aim."""
        ratio = aim / max(value, aim / 1e6)
        self.rows.append(common.Row(name, value / scale, unit, "the aim", baseline=aim / scale, ratio=ratio))

    def reconcile(self, phase: str, before: Snapshot, after: Snapshot) -> None:
        share = quantile(0.95, "reconcile_seconds", before, after)
        self.under(f"{phase}: reconcile, p95", share, "s", AIM_SECONDS)
        busy = (after.cpu - before.cpu) / (after.at - before.at)
        say(
            f"{phase}: {reconciles(before, after):.0f} reconciles in {after.at - before.at:.0f} s, p50 "
            f"{quantile(0.5, 'reconcile_seconds', before, after):.3f} s, p95 {share:.3f} s; "
            f"calls to syncers p95 {quantile(0.95, 'syncer_call_seconds', before, after):.3f} s, "
            f"requests p50 {quantile(0.5, 'api_request_seconds', before, after):.3f} s "
            f"p95 {quantile(0.95, 'api_request_seconds', before, after):.3f} s; "
            f"{100 * busy:.0f} % of a core; peak {self.operator.peak_bytes / 1e6:.0f} MB; "
            f"errors {errors(before, after) or 'none'}"
        )

    # -------------------------------------------------------------- phases

    def create(self) -> None:
        """All jobs, until each is whole."""
        self.operator.start()
        fleet.until("an operator that is ready", self.operator.ready, 60)
        before = snapshot(self.operator, self.api)
        say(f"no jobs: peak {self.operator.peak_bytes / 1e6:.0f} MB")
        began = time.monotonic()
        fleet.create_jobs(self.api, self.jobs, self.pods, BEAT)
        took = time.monotonic() - began
        patience = 300 + 6.0 * self.jobs
        fleet.until("all StatefulSets made", lambda: self.made() >= self.jobs, patience)
        made = time.monotonic() - began
        fleet.until("every job whole", self.whole, patience, every=3.0)
        whole = time.monotonic() - began
        after = snapshot(self.operator, self.api)
        say(f"created in {took:.0f} s, StatefulSets of all made after {made:.0f} s, whole after {whole:.0f} s")
        self.reconcile("creation", before, after)
        per_job = (after.counted - before.counted) / self.jobs
        self.created = made / self.jobs
        counted = difference(before, after) / self.jobs
        self.row("creation: API requests", per_job, "a job", "as the operator counts", baseline=counted)
        self.row("creation: until every job is whole", whole, "s", "until all StatefulSets are made", baseline=made)
        say(f"  requests: {words(before, after)}")

    def made(self) -> int:
        path = f"/apis/apps/v1/{kinds.STATEFUL_SET.plural}"
        return sum(1 for _ in self.api.items(path, query={"labelSelector": LABEL_JOB}))

    def whole(self) -> bool:
        """Raises NotYet with what there is."""
        phases = Counter(fleet.whole(one) or one.get("phase", "none") for one in fleet.statuses(self.api))
        count = phases.pop(True, 0)
        say(f"  {count} of {self.jobs} whole", again=True)
        if count < self.jobs:
            raise fleet.NotYet(f"{count} of {self.jobs}; the others: {dict(phases)}")
        return True

    def stand(self, phase: str, seconds: float, aim: bool) -> None:
        """So long, and how much is asked of the API server meanwhile."""
        before = snapshot(self.operator, self.api)
        time.sleep(seconds)
        after = snapshot(self.operator, self.api)
        self.reconcile(phase, before, after)
        minutes = (after.at - before.at) / 60
        rate = (after.counted - before.counted) / self.jobs / minutes
        name = f"{phase}: API requests per job and minute"
        if aim:
            self.under(name, rate, "", AIM_REQUESTS)
        counted = difference(before, after) / self.jobs / minutes
        if not aim and rate:
            self.row(name, rate, "", "as the operator counts", baseline=counted)
        say(
            f"  requests: {rate:.3f} per job and minute by the API server's count, "
            f"{counted:.3f} by the operator's: {words(before, after)}"
        )

    def burst(self) -> None:
        """Pods killed at random, all at once; until every job is whole again."""
        found = list(self.api.items("/api/v1/pods", query={"labelSelector": LABEL_JOB}))
        chosen = random.sample(found, max(2, round(KILLED * len(found))))
        before = snapshot(self.operator, self.api)
        killed: dict[str, float] = {}
        for pod in chosen:
            meta = pod["metadata"]
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            killed[meta["uid"].replace("-", "")] = time.monotonic()
            self.api.request("DELETE", path, body={"gracePeriodSeconds": 0})
        fleet.until("every pod back", lambda: self.told()["pods"] >= self.jobs * self.pods, 180)
        took = fleet.until("every job whole", self.whole, 300)
        after = snapshot(self.operator, self.api)
        roles = Counter(pod["metadata"]["labels"][LABEL_ROLE] for pod in chosen)
        say(f"{len(chosen)} pods killed ({', '.join(f'{n} {role}s' for role, n in roles.items())})")
        self.reconcile("burst", before, after)
        say(f"  every job whole again {took:.0f} s after all pods were back; requests: {words(before, after)}")
        waits = self.told_after(killed)
        if waits:
            most, middle = percentile(0.95, waits), statistics.median(waits)
            self.row("burst: pod killed until its syncer is told, p95", most, "s", "the median", baseline=middle)
        say(f"  syncers were told of {len(waits)} of {roles['learner']} learners that were killed")

    def told_after(self, killed: Mapping[str, float]) -> list[float]:
        """Seconds from each learner's end to the first process-ended that names it."""
        first: dict[str, float] = {}
        for at, _, method, body in self.told()["story"]:
            uid = str(body.get("process", ""))[:32]
            if method == "process-ended" and uid in killed:
                first.setdefault(uid, at - killed[uid])
        return sorted(first.values())

    def memory(self, kubeconfig: str, folder: Path) -> None:
        """The operator's peak, then without it: kopf alone, and the API server alone."""
        peak = self.operator.peak_bytes
        self.operator.stop()
        self.under("operator: peak memory", peak, "MB", AIM_BYTES, scale=1e6)
        bare, self.listed = bare_kopf(kubeconfig, folder, self.jobs * (self.pods + 1))
        self.row("operator: peak memory", peak / 1e6, "MB", "kopf that does nothing", baseline=bare / 1e6)
        alone = self.apply_again(min(self.jobs, 40))
        self.row("creation: objects made", self.created, "s/job", "plain apply, one by one", baseline=alone)
        say(f"kopf that does nothing: {bare / 1e6:.0f} MB, all seen after {self.listed:.1f} s")
        say(f"plain server-side apply: {alone:.3f} s a job")

    def apply_again(self, jobs: int) -> float:
        """Seconds to apply one job's objects as they are, without keeping anything."""
        total, counted = 0.0, 0
        for number in range(jobs):
            meta = fleet.job(number, self.pods, BEAT)["metadata"]
            for kind in kinds.CHILDREN:
                selector = f"{LABEL_JOB}={meta['name']}"
                for item in list(self.api.items(kind.path(meta["namespace"]), query={"labelSelector": selector})):
                    item.pop("status", None)
                    item |= {"apiVersion": kind.api_version, "kind": kind.name}
                    kept = {key: item["metadata"][key] for key in ("name", "namespace", "labels")}
                    item["metadata"] = kept
                    began = time.monotonic()
                    self.api.apply(kind.path(meta["namespace"], kept["name"]), item, dryRun="All")
                    total += time.monotonic() - began
                    counted += 1
        say(f"  {counted / jobs:.1f} objects a job")
        return total / jobs

    def restart(self) -> None:
        """A new life of the operator: until it has looked at every job."""
        before = Snapshot(time.monotonic(), {}, fleet.requests_counted(self.api), 0.0)
        self.operator.start()

        def caught_up() -> bool:
            now = snapshot(self.operator, self.api)
            return now.value("reconcile_seconds_count") >= self.jobs and not now.value("queue_depth")

        fleet.until("an operator that has looked at every job", caught_up, 300, every=0.5)
        after = snapshot(self.operator, self.api)
        took = after.at - before.at
        name = "restart: until it has looked at every job"
        self.row(name, took, "s", "kopf that does nothing, to see all", baseline=self.listed)
        self.reconcile("restart", before, after)
        asked, counted = ((after.counted - before.counted) / self.jobs, difference(before, after) / self.jobs)
        self.row("restart: API requests", asked, "a job", "as the operator counts", baseline=counted)
        say(f"  requests: {words(before, after)}")
        time.sleep(30)
        self.under("restart: peak memory", self.operator.peak_bytes, "MB", AIM_BYTES, scale=1e6)


def percentile(share: float, ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bare_kopf(kubeconfig: str, folder: Path, objects: int) -> tuple[int, float]:
    """Peak bytes of an operator that does nothing, once it has seen all objects (at least so many), and
    the seconds from its start until then."""
    program = Path(__file__).with_name("bare_kopf.py")
    with (folder / "bare_kopf.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(program)],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "KUBECONFIG": kubeconfig},
        )
        assert process.stdout is not None
        try:
            began, took, last, quiet = time.monotonic(), 0.0, -1, 0
            while quiet < 5 and time.monotonic() - began < 300:
                line = process.stdout.readline()
                if not line:
                    raise fleet.NoCluster(f"bare_kopf.py ended; its log is {folder / 'bare_kopf.log'}")
                seen = int(line)
                if seen != last or seen < objects:
                    last, quiet, took = seen, 0, time.monotonic() - began
                quiet += 1
            return programs.peak_bytes(process.pid), took
        finally:
            programs.stop(process)


_quiet = False


def say(text: str, again: bool = False) -> None:
    """To people, on stderr; ``again``: in place of the last such line."""
    if not _quiet and (not again or sys.stderr.isatty()):
        print(f"\r{text}" if again else text, file=sys.stderr, end="" if again else "\n", flush=True)


# ------------------------------------------------------------------ the program


def main() -> None:
    common.end_on_sigterm()
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--jobs", type=int, metavar="N", help=f"jobs (default {JOBS}; quick: {QUICK_JOBS})")
    parser.add_argument("--pods", type=int, default=PODS, metavar="N", help=f"of each job (default {PODS})")
    parser.add_argument("--kubeconfig", metavar="FILE", help="a cluster with kwok (default: made by localkube)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster that was made, and all files")
    args = parser.parse_args()
    jobs = args.jobs or (QUICK_JOBS if args.quick else JOBS)
    if args.pods < 3 or jobs < 1:
        parser.error("a job has at least three pods: a syncer, an evaluator and a learner")
    try:
        rows = measure(args, jobs)
    except (fleet.NoCluster, programs.ProgramFailed, ApiError) as error:
        raise SystemExit(f"bench/operator_load: {error}") from error
    common.show(rows, args.json, f"{jobs} jobs of {args.pods} pods")


def measure(args: Any, jobs: int) -> list[common.Row]:
    folder = Path(tempfile.mkdtemp(prefix="diloco-bench-operator-"))
    say(f"files of this run: {folder}")
    window = QUICK_WINDOW if args.quick else WINDOW
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    with fleet.cluster(args.kubeconfig, jobs * args.pods, args.keep) as kubeconfig, fleet.local_addresses():
        api = Api(kubeconfig)
        fleet.give_addresses(api)
        fleet.make_namespaces(api, jobs)
        rights = fleet.admit_operator(api, folder, kubeconfig)
        answering = context.Process(target=standin.run, args=(end, kubeconfig, BEAT), daemon=True)
        answering.start()
        operator = programs.Operator(folder, rights, fleet.NAMESPACE)
        try:
            if not pipe.poll(60) or pipe.recv() != "ready":
                raise fleet.NoCluster("the process that answers for the syncers did not start")
            bench = Bench(api, operator, pipe, jobs, pods=args.pods)
            bench.create()
            time.sleep(SETTLE / 2)
            bench.stand("training goes on", window, aim=False)
            bench.told("still")
            time.sleep(SETTLE)
            bench.stand("nothing changes", window, aim=True)
            bench.told("moving")
            bench.burst()
            bench.memory(rights, folder)
            bench.restart()
            pipe.send("end")
            return bench.rows
        finally:
            operator.stop()
            answering.join(5)
            answering.kill()


if __name__ == "__main__":
    main()
