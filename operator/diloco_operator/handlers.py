"""What kopf does in this operator: its handlers, settings and login.

kopf owns the DiLoCoJob: it logs in, runs startup and cleanup, watches the jobs and calls a handler for each event.
The handler only puts the job into the cache and wakes its reconcile (``@kopf.on.event`` keeps no state of its own and
writes nothing: no annotation, no finalizer). What jobs made is the informer's. Why:
docs/decisions/041-kopf-watches-jobs-an-informer-the-rest.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from diloco_operator.informer.reflector import DEAD_SECONDS, NO_BYTE_SECONDS, PAGE, WATCH_SECONDS, Backoffs
from diloco_operator.kube.api import Api
from diloco_operator.kube.kinds import JOB
from diloco_operator.settings import Settings


def make_registry(
    api: Api, begin: Callable[[], None], end: Callable[[], Awaitable[None]], handle: Callable[[Any], None]
) -> kopf.OperatorRegistry:
    """kopf's handlers: ``begin`` at the start, ``end`` once nothing is watched any more, ``handle`` for each event
    of a DiLoCoJob."""
    registry = kopf.OperatorRegistry()
    logins = 0

    @kopf.on.startup(registry=registry)
    async def startup(**_: Any) -> None:
        begin()

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await end()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        nonlocal logins
        logins += 1
        if logins > 1:  # kopf would log in again at once, for ever, while the token is refused
            await _wait_for_credentials(api)
        return await asyncio.to_thread(_connection, api)

    @kopf.on.event(JOB.group, JOB.version, JOB.plural, registry=registry)
    async def job(event: Any, **_: Any) -> None:
        handle(event)

    return registry


def make_settings(settings: Settings) -> kopf.OperatorSettings:
    """kopf's settings: no rights are needed but those on DiLoCoJobs, nothing is written, no try is the last."""
    made = kopf.OperatorSettings()
    made.scanning.disabled = True  # no permission to watch CRDs and namespaces
    made.posting.enabled = False
    made.process.ultimate_exiting_timeout = None
    made.networking.request_timeout = settings.api_timeout_seconds
    made.networking.connect_timeout = 5.0
    made.networking.error_backoffs = Backoffs()
    made.watching.server_timeout = WATCH_SECONDS
    made.watching.client_timeout = DEAD_SECONDS
    made.watching.inactivity_timeout = NO_BYTE_SECONDS
    made.watching.chunk_size = PAGE
    made.queueing.idle_timeout = 0.5  # a finished worker per object is memory
    return made


async def _wait_for_credentials(api: Api) -> None:
    for wait in Backoffs():
        await asyncio.sleep(wait)
        if await api.answers():
            return


def _connection(api: Api) -> kopf.ConnectionInfo:
    """The official client's configuration, with the token as it is now, as kopf takes it. Raises ApiError."""
    config = api.client.config
    scheme, _, token = api.client.authorization().get("authorization", "").partition(" ")
    return kopf.ConnectionInfo(
        server=api.client.host,
        ca_path=config.ssl_ca_cert,
        insecure=not config.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=config.cert_file,
        private_key_path=config.key_file,
        proxy_url=config.proxy or None,
    )
