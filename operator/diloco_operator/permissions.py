"""Whether the operator may do what it must: asked of the API server, so that what is missing has a name.

A stream that is forbidden only says so in kopf's log, and a write only when it is due.
Here every rule of ``kinds.needs`` is asked for at the start, and what is missing again
every minute until it is granted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from .api import Api, ApiError
from .kinds import BY_NAME, JOB, Need, needs
from .settings import Settings
from .types import Ref, Trouble

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0


class Lack(NamedTuple):
    """One thing that the operator may not do. ``namespace`` None: in the whole cluster."""

    need: Need
    verb: str
    namespace: str | None

    def words(self) -> str:
        where = "in the whole cluster" if self.namespace is None else f"in namespace {self.namespace}"
        group = f".{self.need.group}" if self.need.group else ""
        return f"{self.verb} {self.need.resource}{group} {where}"


class Permissions:
    """``lacking`` is what is missing, as asked last."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api = api
        self._namespaces: tuple[str | None, ...] = settings.watch_namespaces or (None,)
        self._nodes = settings.watches_nodes
        self.lacking: frozenset[Lack] = frozenset()

    async def run(self) -> None:
        """Ask until all is granted; then never again."""
        wanted = {
            Lack(need, verb, namespace)
            for need in needs(self._nodes)
            for verb in need.verbs
            for namespace in self._namespaces
        }
        while wanted:
            await self._ask(wanted)
            wanted = set(self.lacking)
            if wanted:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _ask(self, wanted: set[Lack]) -> None:
        lacking = set()
        for lack in sorted(wanted, key=lambda lack: (lack.need.resource, lack.verb, lack.namespace or "")):
            try:
                if not await self._api.allowed(
                    lack.need.group, lack.need.resource, lack.verb, lack.namespace
                ):
                    lacking.add(lack)
            except ApiError as error:
                log.debug("whether the operator may %s is not known: %s", lack.words(), error)
                if error.unreachable:  # not known is not forbidden; it is asked again
                    await asyncio.sleep(1.0)
                    lacking |= {lack} & self.lacking
        new, granted = lacking - self.lacking, self.lacking - lacking
        for lack in sorted(new, key=Lack.words):
            level = logging.INFO if lack.need.optional else logging.ERROR
            log.log(level, "forbidden: the operator may not %s (for %s); grant it that: docs/operator.md, "
                    "permissions", lack.words(), lack.need.why)  # fmt: skip
        for lack in sorted(granted, key=Lack.words):
            log.info("the operator may %s now", lack.words())
        self.lacking = frozenset(lacking)

    def troubles(self, namespace: str) -> list[Trouble]:
        """What is missing for jobs of a namespace, one for each resource."""
        verbs: dict[Need, list[str]] = {}
        for lack in self.lacking:
            if lack.namespace in (None, namespace) and not lack.need.optional:
                verbs.setdefault(lack.need, []).append(lack.verb)
        kinds = {kind.plural: kind.name for kind in BY_NAME.values()}
        return [
            Trouble(
                Ref(kinds.get(need.resource, JOB.name), ""), "forbidden",
                f"the operator may not {', '.join(sorted(missing))} {need.resource} (for {need.why}): "
                "grant it that (docs/operator.md, permissions)",
            )
            for need, missing in sorted(verbs.items(), key=lambda item: item[0].resource)
        ]  # fmt: skip
