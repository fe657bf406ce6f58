"""Whether the operator may do what it must: asked of the API server, so that what is missing has a name.

A stream that is forbidden only says so to the watches, and a write only when it is due.
Here every rule of ``kinds.needs`` is asked for at the start and when a stream is forbidden,
and what is missing again every minute until it is granted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from diloco_operator.kube.api import Api
from diloco_operator.kube.errors import ApiError
from diloco_operator.kube.kinds import BY_NAME, JOB, OWN_NEEDS, Need, needs
from diloco_operator.model import ApplyError, Ref
from diloco_operator.settings import Settings

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
CLOSED = (
    "make it, or take it out of --watch-namespaces (watch.namespaces of the chart); if it exists, grant the operator "
    "its rights there: docs/operator.md, permissions"
)
"""What is said of a namespace in which nothing is allowed, as in one that does not exist."""


class MissingPermission(NamedTuple):
    """One thing that the operator may not do. ``namespace`` None: in the whole cluster."""

    need: Need
    verb: str
    namespace: str | None

    def describe(self) -> str:
        where = "in the whole cluster" if self.namespace is None else f"in namespace {self.namespace}"
        group = f".{self.need.group}" if self.need.group else ""
        return f"{self.verb} {self.need.resource}{group} {where}"


class Permissions:
    """``lacking`` is what is missing, as asked last."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._namespaces: tuple[str | None, ...] = settings.watch_namespaces or (None,)
        self._nodes = settings.watches_nodes
        self._own_namespace = settings.namespace
        self.lacking: frozenset[MissingPermission] = frozenset()
        self._recheck = asyncio.Event()

    def recheck(self) -> None:
        """Something was forbidden that was not known to be: ask for everything again."""
        self._recheck.set()

    async def run(self) -> None:
        """Ask until cancelled; only while something is missing, or after ``recheck``."""
        every = {
            MissingPermission(need, verb, namespace)
            for need in needs(self._nodes)
            for verb in need.verbs
            for namespace in self._namespaces
        }
        every |= {MissingPermission(need, verb, self._own_namespace) for need in OWN_NEEDS for verb in need.verbs}
        wanted = every
        while True:
            self._recheck.clear()
            unknown = await self._ask(wanted)
            try:
                async with asyncio.timeout(AGAIN_SECONDS if unknown or self.lacking else None):
                    await self._recheck.wait()
                wanted = every
            except TimeoutError:
                wanted = unknown | self.lacking

    async def _ask(self, wanted: Set[MissingPermission]) -> set[MissingPermission]:
        """Ask for ``wanted``; what the API server did not answer, which is not known to be missing."""
        lacking, unknown = set(self.lacking) - wanted, set()
        for lack in sorted(wanted, key=MissingPermission.describe):
            try:
                if not await self._api.is_allowed(lack.need.group, lack.need.resource, lack.verb, lack.namespace):
                    lacking.add(lack)
            except ApiError as error:
                log.debug("whether the operator may %s is not known: %s", lack.describe(), error)
                unknown.add(lack)
        lacking |= self.lacking & unknown
        most = sum(len(need.verbs) for need in needs(self._nodes))
        count = Counter(lack.namespace for lack in lacking if lack.namespace is not None)
        closed = {namespace for namespace in count if count[namespace] >= most}
        for namespace in sorted(closed & {lack.namespace for lack in lacking - self.lacking}):
            log.error("forbidden: the operator may do nothing in namespace %s: %s", namespace, CLOSED)
        for lack in sorted(lacking - self.lacking, key=MissingPermission.describe):
            if lack.namespace in closed:
                continue
            level = logging.INFO if lack.need.optional else logging.ERROR
            log.log(
                level,
                "forbidden: the operator may not %s (for %s); grant it that right: docs/operator.md, permissions",
                lack.describe(),
                lack.need.why,
            )
        for lack in sorted(self.lacking - lacking, key=MissingPermission.describe):
            log.info("the operator may %s now", lack.describe())
        self.lacking = frozenset(lacking)
        return unknown

    def apply_errors(self, namespace: str) -> list[ApplyError]:
        """What is missing for jobs of a namespace, one for each resource."""
        verbs: dict[Need, list[str]] = {}
        for lack in self.lacking:
            if lack.namespace in (None, namespace) and not lack.need.optional and lack.need not in OWN_NEEDS:
                verbs.setdefault(lack.need, []).append(lack.verb)
        kinds = {kind.plural: kind.name for kind in BY_NAME.values()}
        return [
            ApplyError(
                Ref(kinds.get(need.resource, JOB.name), ""),
                "forbidden",
                f"the operator may not {', '.join(sorted(missing))} {need.resource} (for {need.why}): "
                "grant it that right (docs/operator.md, permissions)",
            )
            for need, missing in sorted(verbs.items(), key=lambda item: item[0].resource)
        ]
