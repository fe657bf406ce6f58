"""One life of the syncer: from the store to the servers and back.

Start: the ports are bound first (one in use is the caller's mistake, and costs no
epoch), then the store is opened, the epoch claimed and everything restored; the
compiled kernels are loaded; the tape gets the lines that a crash took; and only
then the servers start and the address file is written. End: the servers stop,
what is under way comes to rest, and a last checkpoint is written.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.layout import Layout, Tensor
from diloco_protocol.common.files import write_whole
from diloco_protocol.common.http_server import (
    METRICS_TYPE,
    AddressError,
    HttpServer,
    Page,
    json_page,
    listening_socket,
    split_address,
    text_page,
)
from diloco_protocol.security.credentials import Credentials, CredentialsError, ListenError
from diloco_protocol.spec.job import DiLoCoJob, immutable_digests
from diloco_protocol.vocabulary import EventKind, SyncerExit
from diloco_protocol.wire import channels, limits, services
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.events import InitialModelStored
from diloco_syncer.numerics import merge, outer
from diloco_syncer.runtime.driver import RESTART, Engine
from diloco_syncer.runtime.global_model import Parameters
from diloco_syncer.server.bulk import Bulk
from diloco_syncer.server.control import Control, status_handler
from diloco_syncer.server.pages.export import check_loopback, export_pages
from diloco_syncer.server.pages.metrics import exposition
from diloco_syncer.server.pages.status import report, status
from diloco_syncer.server.tls.access import CallAuthorizer
from diloco_syncer.server.tls.listener import TlsListener
from diloco_syncer.store.base import DirectoryStore, Epoch, HigherEpoch, open_store, successor
from diloco_syncer.store.checkpoint import Checkpoints, Restored
from diloco_syncer.store.tape import Tape

log = logging.getLogger(__name__)

MAX_CONTROL_CONNECTIONS = 256  # of the control port, whose callers are few
SERVICES = ("", services.SESSION_SERVICE, services.SERVICE, "diloco.v1.Status")


@dataclass(frozen=True, slots=True)
class Options:
    """What the program was called with; addresses are host:port, port 0 for any."""

    job: DiLoCoJob
    store: str
    listen: str
    control: str
    http: str
    address_file: Path | None
    control_key: bytes
    credentials: Credentials
    threads: int
    export: str | None = None  # where the merged model is served; a loopback address
    stay: bool = False  # after the job's end serve on, until told to stop
    above: int = 0  # claim a higher epoch than this
    pod: str = ""  # the UID of the pod that it runs in, if it does


def _at(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


async def run(options: Options) -> int:
    """Serve the job until it ends; returns the exit code."""
    while True:
        outcome, options = await _life(options)
        if outcome != RESTART:
            return outcome
        log.warning("beginning again from the store")
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until it serves again, as at first


async def _life(options: Options) -> tuple[int, Options]:
    split_address(options.listen, "--listen")
    split_address(options.control, "--control")
    if options.export is not None:
        check_loopback(options.export, "--export")
    main = aio.server(options=channels.server_options())
    private = aio.server(options=channels.server_options(limits.MAX_REPLY_BYTES, MAX_CONTROL_CONNECTIONS))
    # Calls and replies of the control service are signed, and need no certificate (credentials.py).
    listener = _gate(options, main)
    bound = listener.bind(options.listen) if listener else Credentials().bind(main, options.listen)
    ports = bound, Credentials().bind(private, options.control)
    web = _listen(options.http, "--http")
    out = _listen(options.export, "--export") if options.export is not None else None
    engine = await asyncio.to_thread(_restore, options, asyncio.get_running_loop())
    engine.sessions.doors, engine.stay = CallAuthorizer(listener, _places(options.job)), options.stay
    _recover(engine)
    control = Control(engine, options.control_key)
    bulk = Bulk(engine)
    main.add_generic_rpc_handlers(
        [
            services.session_handler(engine.sessions.serve),
            services.bulk_handlers(bulk.upload, bulk.download),
            status_handler(engine),
        ]
    )
    private.add_generic_rpc_handlers([control.handler()])
    for server in (main, private):
        await _add_health(server)
    pages, export = HttpServer(_pages(engine)), HttpServer(export_pages(engine))
    options = replace(
        options,
        listen=_at(options.listen, ports[0]),
        control=_at(options.control, ports[1]),
        http=_at(options.http, await pages.serve(web)),
        export=_at(options.export, await export.serve(out)) if options.export and out else None,
    )
    engine.start()
    await main.start()
    await private.start()
    if listener is not None:
        listener.start()
    _stop_on_signals(engine)
    if options.address_file is not None:
        _write_addresses(options, engine.epoch)
    log.info(
        "serving on %s, control %s, http %s, epoch %d", options.listen, options.control, options.http, engine.epoch
    )
    outcome = await engine.outcome
    engine.sessions.end_all()
    await asyncio.gather(main.stop(0.5), private.stop(0.5), pages.stop(), export.stop())
    if listener is not None:
        await asyncio.to_thread(listener.stop)
    await engine.close(checkpoint=outcome in (SyncerExit.OK, SyncerExit.FAILED))
    if outcome not in (SyncerExit.OK, RESTART):
        log.error("%s", engine.why)  # last, where people and clusters look for it
    return outcome, replace(options, above=engine.above)


def _gate(options: Options, server: Any) -> TlsListener | None:
    """The TLS listener before the gRPC server; None: plaintext. Raises ``CredentialsError``, of which
    ``ListenError`` is no matter of credentials."""
    if not options.credentials.secure:
        return None
    try:
        now = Credentials.from_directory(options.credentials.directory)  # they may be newer, beginning again
    except CredentialsError as error:
        log.error("the credentials read before are used on: %s", error)
        now = options.credentials
    listener = TlsListener(now, options.job.metadata.name, _places(options.job))
    try:
        server.add_insecure_port(listener.server_address)
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {listener.server_address}: set TMPDIR to a short, writable path"
        ) from error
    return listener


def _places(job: DiLoCoJob) -> dict[str, int]:
    """Learners and spares by region."""
    return {region.name: region.learners + region.spares for region in job.spec.regions}


def _listen(address: str, option: str) -> socket.socket:
    """Bound first of all, so that a port in use costs no epoch. Raises ``AddressError``."""
    try:
        return listening_socket(*split_address(address, option))
    except OSError as error:
        raise AddressError(f"{option} {address}: {error.strerror or error}; choose another port") from error


def _restore(options: Options, loop: asyncio.AbstractEventLoop) -> Engine:
    """Everything from the store; blocks. Raises ``HigherEpoch``, ``StoreUnusable``, ``FormatRefused``,
    OSError."""
    job = options.job
    store = open_store(options.store)
    if options.pod and (taken := successor(store, options.pod, time.time())):
        raise HigherEpoch(f"{taken}: this one leaves it alone")
    warm_up(job, options.threads)
    if isinstance(store, DirectoryStore):
        store.remove_leftovers()
    claimant = {"pid": os.getpid(), "host": os.uname().nodename, "time": time.time()}
    claimant |= {"pod": options.pod} if options.pod else {}
    epoch = Epoch.claim(store, json.dumps(claimant).encode(), options.above)
    checkpoints = Checkpoints(store, epoch, job.metadata.name, job.spec.syncer.checkpoint.keep)
    checkpoints.identify(immutable_digests(job) | _fixed(job))
    restored = checkpoints.load()
    for problem in restored.problems:
        log.error("restoring: %s", problem)
    tape = Tape(store)
    _mend(tape, checkpoints, restored)
    core_state = restored.core["core"] if restored.core is not None else None
    now = time.monotonic()
    core = Core(CoreConfig.from_job(job), core_state, epoch.number, now, time.time())
    engine = Engine(job, core, restored, checkpoints, tape, options.threads, loop)
    if restored.layout is not None:
        parameters = Parameters(job, restored.layout, restored.newest, options.threads)
        if parameters.begun_anew:
            name = job.spec.sync.outer.optimizer
            core.record_event(EventKind.OUTER_RESTART, f"the outer optimizer is {name} now: its state begins anew")
        engine.begin(restored.layout, parameters, restored.frozen)
    if restored.optimizer:
        engine.optimizer_bytes = checkpoints.read_blob(restored.optimizer).nbytes
    return engine


def _fixed(job: DiLoCoJob) -> dict[str, str]:
    """Digests of what else may not change, because learners and data would not fit any more: how the
    layout was made, and in deterministic mode who trains which data."""
    sync, fixed = job.spec.sync, dict[str, object]()
    fixed["sync.merge.meanTensors"] = sync.merge.mean_tensors
    fixed["sync.deterministic"] = sync.deterministic
    if sync.deterministic:
        fixed["regions (with sync.deterministic)"] = [[r.name, r.learners] for r in job.spec.regions]
    return {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in fixed.items()
    }


def _mend(tape: Tape, checkpoints: Checkpoints, restored: Restored) -> None:
    """Give the tape the lines that a crash took, and say where it is ahead of the store."""
    versions = [record.version for record in restored.newest]
    for record in tape.missing(checkpoints.newer_than(tape.newest, versions)):
        tape.append(record)
    reasons = {fragment: why for fragment, _, why in restored.discarded}
    for fragment, version in enumerate(versions):
        if tape.newest.get(fragment, 0) > version:
            restored.behind = True
            why = reasons.get(fragment, "newer records are not in the store")
            tape.discard(fragment, version, checkpoints.epoch.number, why, time.time())
    tape.flush()


def _recover(engine: Engine) -> None:
    """Tell the core what is newer than its state: records, then offers."""
    restored, core = engine.restored, engine.core
    if restored.layout is not None and not core.initialised:
        layout = restored.layout
        engine.handle(InitialModelStored(layout.digest, tuple(layout.elements(p) for p in range(len(layout)))))
    core.close_superseded_tenures(
        [r.header for record in restored.newer for r in record.responders]
        + [offer.header for offer in restored.offers],
        [record.recovered.receipt for record in restored.newer if record.recovered],
    )
    for record in restored.newer:
        taken = record.recovered
        if taken is None:
            headers = [r.header for r in record.responders]
            core.apply_record(record.fragment, record.version, headers, record.epoch)
        else:
            core.apply_recovered_version(record.fragment, record.version, taken.epoch, taken.receipt, record.epoch)
    for offer in restored.offers:
        try:
            if restored.layout is None or offer.header.fragment >= len(restored.layout):
                raise codec.CodecError("its fragment does not exist")
            handle = engine.payloads.restore(offer)
        except codec.CodecError as error:
            log.error("spooled offer %s cannot be used: %s", offer.name, error)
            continue
        if not core.restore_offer(offer.header, handle, offer.norm):
            engine.payloads.drop(handle)
    if restored.core is not None:
        merges, offers = len(restored.newer), len(restored.offers)
        log.info("restored: versions %s, %d merges after the state, %d offers", core.versions, merges, offers)


def warm_up(job: DiLoCoJob, threads: int) -> None:
    """Load (or compile) every kernel that this job's merges need, before anybody waits for one."""
    sync = job.spec.sync
    layout = Layout.build([Tensor("a", (256,), "float32", False), Tensor("b", (256,), "float32", True)], 1)
    values = np.linspace(-1, 1, layout.elements(0), dtype=np.float32)
    for encoding in (sync.compression.up, sync.compression.down.removeprefix("delta-")):
        encoded = codec.encode(values, encoding, threads=threads)
        codec.norm_and_finite(codec.decode(encoded, encoding, values.size), threads=threads)
        codec.encode_with_feedback(values, None, encoding, threads=threads)
        codec.apply_delta(values, encoded, encoding)
    optimizer = outer.make(sync.outer, max_versions=sync.staleness.max_versions)
    for count in range(1, min(9, job.spec.slots + 1)):
        shares = [1 / count] * count
        pushes = [values.copy() for _ in shares]
        merged = merge.merge(layout.fragments[0], pushes, shares, sync.merge.method, threads=threads)
        optimizer.step(values.copy(), merged.delta, {}, ages=[0] * count, weights=shares, threads=threads)


async def _add_health(server: Any) -> None:
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for service in SERVICES:
        await health.set(service, health_pb2.HealthCheckResponse.SERVING)


def _pages(engine: Engine) -> Mapping[str, Page]:
    # The process lives, and serves, also while its store cannot be written: killing it would not help,
    # and learners that cannot reach it would lose more. Status and metrics tell of the store.
    def well() -> tuple[int, bytes]:
        return 200, f"{engine.problem or 'ok'}\n".encode()

    return {
        "/status": json_page(lambda: status(engine)),
        "/report": json_page(lambda: report(engine)),
        "/metrics": text_page(lambda: (200, exposition(lambda: status(engine))), METRICS_TYPE),
        "/healthz": text_page(well),
        "/readyz": text_page(well),
    }


def _stop_on_signals(engine: Engine) -> None:
    """SIGTERM and SIGINT: checkpoint and leave; learners go on and join the next syncer."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, engine.stop, 0, f"signal {number.name}")


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
