"""One life of the syncer: from the store to the servers and back.

Start: the ports are bound first (one in use is the caller's mistake, and costs no epoch). Then startup.py
opens the store, loads the compiled kernels, claims the epoch and restores everything. Only then the servers
start, and the address file is written.

End: the servers stop, what is under way is finished or cancelled, and a last checkpoint is written.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from diloco_protocol.common.files import write_whole
from diloco_protocol.common.http_server import (
    METRICS_TYPE,
    AddressError,
    HttpServer,
    Page,
    json_page,
    kept_page,
    listen_on,
    split_address,
    text_page,
)
from diloco_protocol.security.credentials import Credentials, CredentialsError, ListenError
from diloco_protocol.vocabulary import EventKind, SyncerExit
from diloco_protocol.wire import channels
from diloco_syncer import startup
from diloco_syncer.core.config import learners_by_region
from diloco_syncer.runtime.driver import RESTART
from diloco_syncer.server.control import Control
from diloco_syncer.server.pages.export import check_loopback, export_pages
from diloco_syncer.server.pages.front_page import front_page
from diloco_syncer.server.pages.metrics import exposition
from diloco_syncer.server.tls.listener import CredentialReloader, PortListener
from diloco_syncer.shards.coordinator import STEADY_SECONDS
from diloco_syncer.shards.stream import PROTOCOL
from diloco_syncer.shards.supervisor import ShardPods, ShardProcesses, pause_after
from diloco_syncer.startup import Options
from diloco_syncer.store.checkpoint import Restored
from diloco_syncer.syncer import Syncer

log = logging.getLogger(__name__)

MAX_CONTROL_CONNECTIONS = 64  # of the control port, whose callers are few
SERVICES = ("", channels.SESSION_SERVICE)


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _at(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _addresses(options: Options) -> tuple[str | None, ...]:
    return options.listen, options.control, options.http, options.export


async def run(options: Options) -> int:
    """Serve the job until it ends; returns the exit code. A life that begins again keeps its ports. Where one that the
    system chose has been given to another program meanwhile, it takes others: who reads the address file follows."""
    given, failures = options, 0
    while True:
        began = time.monotonic()
        try:
            outcome, options = await _life(options)
        except (ListenError, AddressError) as error:
            if _addresses(options) == _addresses(given):
                raise
            log.warning("%s; ports are chosen anew", error)
            options = replace(options, listen=given.listen, control=given.control, http=given.http, export=given.export)
            continue
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
        if outcome != RESTART:
            return outcome
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until it serves again, as at first
        failures = failures + 1 if time.monotonic() - began < STEADY_SECONDS else 0
        pause = pause_after(failures) if failures else 0.0  # what a life finds at once, the next may find as well
        log.warning("beginning again from the store in %.1f s", pause)
        # The life that is over holds a model, and its parts each other: without this two would be in memory.
        gc.collect()
        await asyncio.sleep(pause)


async def _life(options: Options) -> tuple[int, Options]:
    split_address(options.listen, "--listen")
    split_address(options.control, "--control")
    if options.export is not None:
        check_loopback(options.export, "--export")
    main = aio.server(options=channels.server_options())
    private = aio.server(options=channels.control_server_options(MAX_CONTROL_CONNECTIONS))
    # Calls and replies of the control service are signed, and need no certificate (credentials.py).
    listener = _gate(options, main)
    ports = listener.bind(options.listen), Credentials().bind(private, options.control)
    # Bound first of all, so that a port in use costs no epoch.
    web = listen_on(options.http, "--http")
    out = listen_on(options.export, "--export") if options.export is not None else None
    pods = listen_on(options.shards_listen, "--shards-listen") if options.shards_listen else None
    syncer, restored = await asyncio.to_thread(startup.restore, options, asyncio.get_running_loop(), listener)
    shards: ShardPods | ShardProcesses | None = None
    if syncer.shards is not None:
        own: dict[str, Any] = {"coordinator": syncer.shards, "stop_by": syncer.driver.stop_by}
        if pods is None:
            shards = ShardProcesses(command=options.command, listener=listener, **own)
        else:
            assert listener.reloader is not None, "no such arguments without credentials"
            reloader = CredentialReloader(listener.reloader.credentials, options.job.metadata.name, [PROTOCOL])
            shards = ShardPods(listening=pods, reloader=reloader, **own)
        await shards.start()
        if not await _begin_shards(syncer, restored):
            for bound in filter(None, (web, out)):
                bound.close()
            await asyncio.to_thread(listener.stop)
            await syncer.close(checkpoint=False)
            await shards.close()
            return _leave(syncer, options)
    startup.replay(syncer, restored)
    if options.began_again:
        syncer.core.record_event(EventKind.SYNCER_RESTART, f"the syncer began again: {options.began_again}")
    driver, status = syncer.driver, syncer.status_page.status
    control = Control(
        options.control_key,
        syncer.core,
        driver.handle,
        syncer.durability.checkpoint,
        status=status,
        report=syncer.fetch_report,
    )
    main.add_generic_rpc_handlers([channels.session_handler(syncer.sessions.serve)])
    listener.serve_bulk(syncer.bulk.accept)
    private.add_generic_rpc_handlers([control.handler()])
    for server in (main, private):
        await _add_health(server)
    epoch = syncer.core.epoch
    pages = HttpServer(_pages(syncer))
    export = HttpServer(export_pages(options.job, syncer.model, syncer.make_model_file))
    options = replace(
        options,
        listen=_at(options.listen, ports[0]),
        control=_at(options.control, ports[1]),
        http=_at(options.http, await pages.serve(web)),
        export=_at(options.export, await export.serve(out)) if options.export and out else None,
    )
    syncer.start(restored.behind)
    del restored  # its arrays live on in the model
    await main.start()
    await private.start()
    listener.start()
    for number in _STOP_SIGNALS:  # checkpoint and leave; learners go on and join the next syncer
        asyncio.get_running_loop().add_signal_handler(number, driver.stop, 0, f"signal {number.name}")
    if options.address_file is not None:
        _write_addresses(options, epoch)
    log.info("serving on %s, control %s, http %s, epoch %d", options.listen, options.control, options.http, epoch)
    outcome = await driver.outcome
    syncer.sessions.end_all()
    await asyncio.gather(main.stop(0.5), private.stop(0.5), pages.stop(), export.stop())
    await syncer.bulk.close()
    await asyncio.to_thread(listener.stop)
    await syncer.close(checkpoint=outcome in (SyncerExit.OK, SyncerExit.FAILED))
    if shards is not None:
        await shards.close()
    return _leave(syncer, options)


def _leave(syncer: Syncer, options: Options) -> tuple[int, Options]:
    """The outcome of a life that is over, and what the next one is called with."""
    outcome, why = syncer.driver.outcome.result(), syncer.driver.stop_reason  # a signal may have replaced RESTART
    if outcome not in (SyncerExit.OK, RESTART):
        log.error("%s", why)  # last, where people and clusters look for it
    return outcome, replace(options, min_epoch=syncer.min_epoch, began_again=why)


async def _begin_shards(syncer: Syncer, restored: Restored) -> bool:
    """Have the shards begin where the store is; False: this life ends before they have."""
    if restored.layout is None:
        return True
    beginning = asyncio.ensure_future(
        syncer.begin_model(restored.layout, restored.newest, restored.frozen, restored.frozen_digest)
    )
    await asyncio.wait((beginning, syncer.driver.outcome), return_when=asyncio.FIRST_COMPLETED)
    if not beginning.done():
        beginning.cancel()
        return False
    await beginning
    return True


def _gate(options: Options, server: Any) -> PortListener:
    """The listener before the gRPC server. Raises ``CredentialsError``, of which ``ListenError`` is no matter of
    credentials."""
    now = options.credentials
    try:
        if now.secure:
            now = Credentials.from_directory(now.directory)  # they may be newer, beginning again
    except CredentialsError as error:
        log.error("the credentials read before are used on: %s", error)
    listener = PortListener(now, options.job.metadata.name, learners_by_region(options.job))
    try:
        server.add_insecure_port(listener.server_address)
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {listener.server_address}: set TMPDIR to a short, writable path"
        ) from error
    return listener


async def _add_health(server: Any) -> None:
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for service in SERVICES:
        await health.set(service, health_pb2.HealthCheckResponse.SERVING)


def _pages(syncer: Syncer) -> Mapping[str, Page]:
    # The process lives, and serves, also while its store cannot be written: killing it would not help,
    # and learners that cannot reach it would lose more. Status and metrics tell of the store.
    def health_page() -> tuple[int, bytes]:
        return 200, f"{syncer.durability.problem or 'ok'}\n".encode()

    status = syncer.status_page.status
    return {
        "/": front_page,
        "/status": kept_page(json_page(status)),
        "/report": kept_page(json_page(syncer.report)),
        "/metrics": kept_page(text_page(lambda: (200, exposition(status)), METRICS_TYPE)),
        "/healthz": text_page(health_page),
        "/readyz": text_page(health_page),
    }


def _write_addresses(options: Options, epoch: int) -> None:
    assert options.address_file is not None
    document: dict[str, Any] = {
        "sync": options.listen,
        "control": options.control,
        "http": options.http,
        "pid": os.getpid(),
        "epoch": epoch,
    }
    if options.export is not None:
        document["export"] = options.export
    write_whole(options.address_file, json.dumps(document).encode() + b"\n")
