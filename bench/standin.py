"""A process that answers for the syncers of all jobs of a cluster whose pods are simulated.

It does what kubelet and container would do for a syncer's pod: waits until the pod runs, reads
the ConfigMap and the Secret that the pod mounts (the job, and its control key), and serves the
real control service (signed calls, over gRPC) on the pod's own address, on the port that the
real program has. What it answers comes from a ``simulated.Syncer`` with one learner for each of
the job's learner pods that run. Pods' addresses must be addresses of this machine.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from grpc import aio

import simulated
from diloco_operator import names
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import POD
from diloco_protocol.documents import Report
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.load import job_from_json
from diloco_protocol.vocabulary import CONTROL_PORT, LABEL_JOB, LABEL_POD_INDEX, LABEL_REGION, LABEL_ROLE
from diloco_protocol.wire import channels, limits
from diloco_syncer.server.control import Control
from kubeapi import Api, follow

log = logging.getLogger("standin")

TURN_SECONDS = 1.0
JOIN_SECONDS = (0.5, 2.5)  # from a pod that runs to its learner's join
STORY = 100_000  # calls that are remembered

Key = tuple[str, str]  # a job: namespace and name


class _Counted(Control):
    """The control service; every call that is believed is told to ``heard``."""

    heard: Callable[[str, dict[str, Any]], None]

    async def _carry_out(self, method: str, body: dict[str, Any]) -> bytes:
        self.heard(method, body)
        return await super()._carry_out(method, body)


@dataclass
class _Job:
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)  # by UID, those that run
    syncer: simulated.Syncer | None = None
    server: Any = None
    served: str = ""  # UID of the pod that is served
    trying: asyncio.Task[None] | None = None


class StandIn:
    """``api``: read by threads. ``beat``: seconds between two steps of a learner."""

    def __init__(self, api: Api, beat: float) -> None:
        self._api, self._beat = api, beat
        self._jobs: dict[Key, _Job] = {}
        self._calls: Counter[str] = Counter()
        self._story: list[tuple[float, str, str, dict[str, Any]]] = []
        self._still = False
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------- pods

    def saw(self, gone: bool, pod: dict[str, Any]) -> None:
        """A pod as it is now."""
        meta, status = pod["metadata"], pod.get("status") or {}
        labels = meta.get("labels") or {}
        key = (meta["namespace"], labels[LABEL_JOB])
        job = self._jobs.setdefault(key, _Job())
        runs = status.get("phase") == "Running" and bool(status.get("podIP"))
        uid = meta["uid"]
        if runs and not gone and "deletionTimestamp" not in meta:
            if uid not in job.pods:
                job.pods[uid] = pod
                self._started(key, job, pod)
        elif uid in job.pods:
            del job.pods[uid]
            self._ended(job, uid)

    def _started(self, key: Key, job: _Job, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        role = meta["labels"].get(LABEL_ROLE)
        if role == "syncer":
            job.trying = self._run(self._serve(key, job, pod))
        elif job.syncer is not None:
            self._settle(job.syncer, pod)

    @staticmethod
    def _settle(syncer: simulated.Syncer, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        labels, uid = meta["labels"], meta["uid"]
        if labels.get(LABEL_ROLE) == "evaluator":
            syncer.evaluator_pod(uid)
        elif labels.get(LABEL_ROLE) == "learner":
            ordinal = int(labels[LABEL_POD_INDEX])
            syncer.learner_pod(uid, labels[LABEL_REGION], ordinal, random.uniform(*JOIN_SECONDS))

    def _ended(self, job: _Job, uid: str) -> None:
        if job.syncer is not None:
            job.syncer.gone(uid)
        if uid == job.served and job.syncer is not None:
            job.syncer.end()
            server, job.server, job.served = job.server, None, ""
            self._run(server.stop(None))

    # ------------------------------------------------------------- a syncer's pod

    async def _serve(self, key: Key, job: _Job, pod: dict[str, Any]) -> None:
        uid, pause = pod["metadata"]["uid"], 0.5
        while uid in job.pods:
            try:
                settings, secret = await asyncio.to_thread(self._mounted, pod)
                break
            except (ApiError, KeyError) as error:  # not there yet: a kubelet tries again too
                log.warning("%s/%s: %s", *key, error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, 5.0)
        else:
            return
        document = job_from_json(settings)
        if job.syncer is None:
            job.syncer = simulated.Syncer(document, self._beat)
            job.syncer.stand_still(self._still)
            for other in job.pods.values():
                self._settle(job.syncer, other)
        job.syncer.job = document
        job.syncer.begin()
        syncer, page = job.syncer, job.syncer.status_page

        async def report() -> Report:
            return page.report()

        control = _Counted(secret, syncer.core, syncer.handle, syncer.checkpoint, status=page.status, report=report)
        control.heard = lambda method, body: self._heard(key, method, body)
        job.server = aio.server(options=channels.server_options(limits.MAX_REPLY_BYTES))
        job.server.add_generic_rpc_handlers([control.handler()])
        Credentials().bind(job.server, f"{pod['status']['podIP']}:{CONTROL_PORT}")
        await job.server.start()
        job.served = uid
        if uid not in job.pods:  # it went while it started
            self._ended(job, uid)

    def _mounted(self, pod: dict[str, Any]) -> tuple[str, bytes]:
        """job.json and the control key, as the container would find them. Raises KeyError, ApiError."""
        main = next(c for c in pod["spec"]["containers"] if c["name"] == "syncer")
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        at = {mount["mountPath"]: volumes[mount["name"]] for mount in main["volumeMounts"]}
        base = f"/api/v1/namespaces/{pod['metadata']['namespace']}"
        settings = self._api.get(f"{base}/configmaps/{at[names.SETTINGS_PATH]['configMap']['name']}")
        secret = self._api.get(f"{base}/secrets/{at[names.CONTROL_PATH]['secret']['secretName']}")
        return settings["data"]["job.json"], base64.b64decode(secret["data"]["control-key"]).strip()

    def _heard(self, key: Key, method: str, body: dict[str, Any]) -> None:
        self._calls[method] += 1
        if method != "status" and len(self._story) < STORY:
            self._story.append((time.monotonic(), "/".join(key), method, body))

    # ------------------------------------------------------------- time, and the parent

    async def turns(self) -> None:
        """Let time pass for every job."""
        while True:
            began = time.monotonic()
            for n, job in enumerate(list(self._jobs.values())):
                if job.syncer is not None:
                    job.syncer.turn()
                if n % 20 == 19:
                    await asyncio.sleep(0)  # calls are answered between
            await asyncio.sleep(max(0.05, TURN_SECONDS - (time.monotonic() - began)))

    def stand_still(self, still: bool) -> None:
        """Whether learners make no steps: nothing changes then but their heartbeats."""
        self._still = still
        for job in self._jobs.values():
            if job.syncer is not None:
                job.syncer.stand_still(still)

    def told(self) -> dict[str, Any]:
        """For the parent: what there is, and which calls came."""
        syncers = [j.syncer for j in self._jobs.values() if j.syncer is not None and j.syncer.serving]
        return {
            "pods": sum(len(job.pods) for job in self._jobs.values()),
            "served": len(syncers),
            "active": sum(s.status_page.status().quorum.active for s in syncers),
            "merges": sum(s.core.merges for s in syncers),
            "calls": dict(self._calls),
            "story": list(self._story),
        }

    def _run(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a fault of this program", exc_info=error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        servers = [job.server for job in self._jobs.values() if job.server is not None]
        await asyncio.gather(*(server.stop(None) for server in servers))


def run(pipe: Connection, kubeconfig: str, beat: float) -> None:
    """The process: says "ready", then answers the parent's words: told, still, moving, end."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("diloco_syncer").setLevel(logging.ERROR)  # transitions are no news here
    gc.set_threshold(50_000, 20, 20)
    asyncio.run(_run(pipe, kubeconfig, beat))


async def _run(pipe: Connection, kubeconfig: str, beat: float) -> None:
    loop = asyncio.get_running_loop()
    api = Api(kubeconfig)
    stand_in = StandIn(api, beat)

    def saw(gone: bool, pod: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stand_in.saw, gone, pod)

    pods = follow(kubeconfig, POD, saw)
    turns = loop.create_task(stand_in.turns())
    pipe.send("ready")
    while (word := await asyncio.to_thread(pipe.recv)) != "end":
        if turns.done():
            turns.result()
        if word == "told":
            pipe.send(json.dumps(stand_in.told()))
        else:
            stand_in.stand_still(word == "still")
            pipe.send("done")
    pods.stop()
    turns.cancel()
    await stand_in.close()
