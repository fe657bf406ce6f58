"""``python -m diloco_operator.uninstall``: what runs before the operator is uninstalled.

Every job carries the operator's finalizer, so that its syncer hears of its deletion. Without
an operator nobody would take it off, and no job, nor its namespace, could be deleted. This
program takes it off every DiLoCoJob in its scope. It deletes nothing: jobs and their pods
stay, and those that train go on. An operator that is installed later takes them over.

A running operator would put the finalizer on again, so it is stopped first (``--stop``: its
Deployment is scaled to 0, and its pods are waited for).

Exit codes: 0 no job in scope carries the finalizer; 1 something failed, and said what.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from diloco_operator.kube.client import MERGE_PATCH, METADATA_LIST, Client, configuration
from diloco_operator.kube.errors import ApiError, ConfigError
from diloco_operator.kube.kinds import DEPLOYMENT, JOB, POD
from diloco_operator.model import Object
from diloco_operator.names import MANAGER
from diloco_protocol.common import bounded_json
from diloco_protocol.vocabulary import FINALIZER

SECONDS = 240.0  # in all; the hook's Job has a deadline a little above
ROUNDS = 5  # lists until none carries the finalizer: jobs may come meanwhile


class Failed(Exception):
    """It cannot be done; the message says what and the way out."""


class Uninstaller:
    """What is done before the operator is uninstalled, until ``end`` (monotonic seconds)."""

    def __init__(self, client: Client, end: float) -> None:
        self._client = client
        self._end = end

    def run(self, namespaces: Sequence[str | None], deployment: str | None, operators: str) -> None:
        """Stop the operator's ``deployment`` in the namespace ``operators`` (None: none), and take the finalizer
        off all jobs in ``namespaces`` (None: all); tried again while the API server does not answer.

        Raises ApiError, Failed.
        """
        wait = 0.5
        while True:
            try:
                if deployment is not None:
                    self._stop_operator(operators, deployment)
                self._release_jobs(namespaces)
                return
            except ApiError as error:
                if not error.unreachable or time.monotonic() + wait > self._end:
                    raise
                print(f"{error}; trying again", file=sys.stderr, flush=True)
                time.sleep(wait * random.uniform(0.7, 1.0))
                wait = min(2 * wait, 10.0)

    def _stop_operator(self, namespace: str, name: str) -> None:
        """Scale the Deployment to 0 and wait until its pods are gone."""
        try:
            deployment = self._client.request("GET", DEPLOYMENT.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return
            raise
        selector = ",".join(f"{k}={v}" for k, v in deployment["spec"]["selector"]["matchLabels"].items())
        self._merge(DEPLOYMENT.path(namespace, name, "scale"), {"spec": {"replicas": 0}})
        print(f"operator {namespace}/{name} is stopped", flush=True)
        while any(self._client.items(POD.path(namespace), query={"labelSelector": selector}, accept=METADATA_LIST)):
            self._check_time()
            time.sleep(1.0)

    def _release_jobs(self, namespaces: Sequence[str | None]) -> None:
        """Take the finalizer off until no job carries it."""
        for _ in range(ROUNDS):
            found = [meta for namespace in namespaces for meta in self._carriers(namespace)]
            if not found:
                return
            for meta in found:
                self._check_time()
                self._release(meta)
        raise Failed(
            f"some jobs carry the finalizer {FINALIZER} again: another operator looks after them, or this one "
            "was not stopped (--stop)"
        )

    def _carriers(self, namespace: str | None) -> list[Object]:
        """The metadata of the jobs that carry the finalizer."""
        try:
            jobs = [item["metadata"] for item in self._client.items(JOB.path(namespace), accept=METADATA_LIST)]
        except ApiError as error:
            if error.status == 404:
                return []  # no CRD, no jobs
            raise
        return [meta for meta in jobs if FINALIZER in (meta.get("finalizers") or ())]

    def _release(self, meta: Object) -> None:
        """Take the finalizer off one job; other finalizers stay."""
        rest = [name for name in meta["finalizers"] if name != FINALIZER]
        patch: Object = {"metadata": {"resourceVersion": meta["resourceVersion"], "finalizers": rest}}
        try:
            self._merge(JOB.path(meta["namespace"], meta["name"]), patch)
        except ApiError as error:
            if error.status not in (404, 409):  # gone; or changed meanwhile, and found again in the next round
                raise
            return
        print(f"finalizer {FINALIZER} taken off {meta['namespace']}/{meta['name']}", flush=True)

    def _merge(self, path: str, patch: Object) -> None:
        query = {"fieldManager": MANAGER}
        self._client.request("PATCH", path, seconds=15.0, query=query, body=patch, content=MERGE_PATCH)

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise Failed("out of time: the operator's pods do not end, or too many jobs")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m diloco_operator.uninstall",
        description=f"Take the operator's finalizer ({FINALIZER}) off all DiLoCoJobs, before the operator is "
        "uninstalled. Deletes nothing.",
        allow_abbrev=False,
    )
    made.add_argument("--stop", metavar="NAME", help="the operator's Deployment, to be stopped first")
    made.add_argument("--namespace", metavar="NAME", default="diloco-system", help="where it is (default %(default)s)")
    made.add_argument(
        "--watch-namespaces", metavar="A,B", default="", help="the namespaces whose jobs it looks after (default: all)"
    )
    made.add_argument(
        "--seconds", metavar="N", type=float, default=SECONDS, help="the longest to try (default %(default)g)"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    bounded_json.install()
    given = parser().parse_args(arguments)
    namespaces: list[str | None] = [name for name in given.watch_namespaces.split(",") if name] or [None]
    try:
        uninstaller = Uninstaller(Client(configuration(), MANAGER), time.monotonic() + given.seconds)
    except ConfigError as error:
        print(f"uninstall: {error}", file=sys.stderr)
        return 1
    try:
        uninstaller.run(namespaces, given.stop, given.namespace)
    except (ApiError, Failed) as error:
        print(
            f"uninstall: {error}\nThe way out by hand is in docs/operator.md (uninstalling): helm uninstall "
            "--no-hooks, and a patch of each job.",
            file=sys.stderr,
        )
        return 1
    print(f"no DiLoCoJob in scope carries {FINALIZER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
