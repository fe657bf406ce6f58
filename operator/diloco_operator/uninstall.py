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
import asyncio
import random
import sys
import time
from collections.abc import Sequence

from diloco_operator.kube.client import Api, ApiError, ConfigError, configuration
from diloco_operator.kube.kinds import DEPLOYMENT, JOB, POD
from diloco_operator.model import Object
from diloco_operator.names import FINALIZER

SECONDS = 240.0  # in all; the hook's Job has a deadline a little above
PAGE = 250
ROUNDS = 5  # lists until none carries the finalizer: jobs may come meanwhile
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class Failed(Exception):
    """It cannot be done; the message says what and the way out."""


async def stop(api: Api, namespace: str, name: str) -> None:
    """Scale the Deployment to 0 and wait until its pods are gone. Raises ApiError."""
    deployment = await api.get(DEPLOYMENT, namespace, name)
    if deployment is None:
        return
    selector = ",".join(f"{k}={v}" for k, v in deployment["spec"]["selector"]["matchLabels"].items())
    await api.merge(DEPLOYMENT, namespace, name, {"spec": {"replicas": 0}}, "scale")
    print(f"operator {namespace}/{name} is stopped", flush=True)
    while await api.list_versions(POD, namespace, selector):
        await asyncio.sleep(1.0)


async def carriers(api: Api, namespace: str | None) -> list[Object]:
    """The metadata of the jobs with our finalizer. Raises ApiError."""
    found: list[Object] = []
    onward = ""
    while True:
        query = {"limit": str(PAGE)} | ({"continue": onward} if onward else {})
        answer = await api.raw("list", JOB.plural, "GET", JOB.path(namespace), query, accept=_METADATA)
        for item in answer.get("items") or ():
            if FINALIZER in (item["metadata"].get("finalizers") or ()):
                found.append(item["metadata"])
        onward = (answer.get("metadata") or {}).get("continue") or ""
        if not onward:
            return found


async def release(api: Api, meta: Object) -> None:
    """Take the finalizer off one job; other finalizers stay. Raises ApiError."""
    rest = [name for name in meta["finalizers"] if name != FINALIZER]
    patch: Object = {"metadata": {"resourceVersion": meta["resourceVersion"], "finalizers": rest}}
    try:
        await api.merge(JOB, meta["namespace"], meta["name"], patch)
    except ApiError as error:
        if error.status not in (404, 409):  # gone; or changed meanwhile, and found again in the next round
            raise
        return
    print(f"finalizer {FINALIZER} taken off {meta['namespace']}/{meta['name']}", flush=True)


async def release_all(api: Api, namespaces: Sequence[str | None]) -> None:
    """Until no job in these namespaces (None: all) carries it. Raises ApiError, Failed."""
    for _ in range(ROUNDS):
        found = [meta for namespace in namespaces for meta in await carriers(api, namespace)]
        if not found:
            return
        for meta in found:
            await release(api, meta)
    raise Failed(
        f"some jobs carry the finalizer {FINALIZER} again: another operator looks after them, or this one "
        "was not stopped (--stop)"
    )


async def run(api: Api, namespaces: Sequence[str | None], deployment: str | None, operators: str, end: float) -> None:
    """All of it, tried again while the API server does not answer, until ``end`` (monotonic seconds).

    Raises ApiError, Failed.
    """
    wait = 0.5
    while True:
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                if deployment is not None:
                    await stop(api, operators, deployment)
                await release_all(api, namespaces)
            return
        except TimeoutError as error:
            raise Failed("out of time: the operator's pods do not end, or too many jobs") from error
        except ApiError as error:
            if error.status == 404 and error.resource == JOB.plural:
                return  # no CRD, no jobs
            if not error.unreachable or time.monotonic() + wait > end:
                raise
            print(f"{error}; trying again", file=sys.stderr, flush=True)
            await asyncio.sleep(wait * random.uniform(0.7, 1.0))
            wait = min(2 * wait, 10.0)


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
    given = parser().parse_args(arguments)
    namespaces: list[str | None] = [name for name in given.watch_namespaces.split(",") if name] or [None]
    try:
        api = Api(configuration(), threads=4, timeout=15.0)
    except ConfigError as error:
        print(f"unfinalize: {error}", file=sys.stderr)
        return 1
    try:
        asyncio.run(run(api, namespaces, given.stop, given.namespace, time.monotonic() + given.seconds))
    except (ApiError, Failed) as error:
        print(
            f"unfinalize: {error}\nThe way out by hand is in docs/operator.md (uninstalling): helm uninstall "
            "--no-hooks, and a patch of each job.",
            file=sys.stderr,
        )
        return 1
    finally:
        api.close()
    print(f"no DiLoCoJob in scope carries {FINALIZER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
