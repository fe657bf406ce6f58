"""The links of a job whose learners come from elsewhere: whether its endpoint answers, and what bandwidth each needs.

The endpoint is looked at from this machine, as a learner here would: the name, a TCP connection, the TLS handshake.
With a party's credentials the handshake is a learner's own, both sides are judged, and round trip and rate to the
syncer and each of its shards are measured. Without them no certificate is trusted or refused here; the finding names
the one that was shown.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.bandwidth_plan import Conditions, document, fragment_sizes
from diloco.console import CommandError
from diloco.doctor.findings import Finding
from diloco_protocol.common.format_units import bits_text, seconds_text
from diloco_protocol.common.reach import connect, join_address, resolve_name, split_address, unreachable_text
from diloco_protocol.security.credentials import Credentials, CredentialsError
from diloco_protocol.security.identity import SERVER_NAME
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, load_job
from diloco_protocol.wire import limits, sync_pb2
from diloco_protocol.wire.bulk_calls import BulkConnection, CallFailed, bulk_connection
from diloco_protocol.wire.byte_stream import StreamBroken
from diloco_protocol.wire.verify_server import ServerNotTrusted, tls_words, verify_syncer

_finding = functools.partial(Finding, "links")
HANDSHAKE_SECONDS = 5.0
TRIPS = 5  # of which the shortest is the round trip
LEAST_RATE_BYTES, LEAST_RATE_SECONDS = 256 << 10, 1.0  # of a measured rate: more are sent until it takes so long
_NOT_YET = "expected before the job runs at its hub; else check syncer.endpoint.address, its Service and the firewall"


def check_links(
    file: Path, overrides: Sequence[str], credentials: Path | None, step_seconds: float | None
) -> Iterator[Finding]:
    """Nothing for a job file that is wrong (``check_job`` reports that), or whose links are all inside one machine or
    cluster. ``credentials``: a learner's folder. ``step_seconds``: of an inner step; None: needs are for one second.
    Raises CommandError for an impossible one."""
    try:
        job = load_job(file, overrides)
    except JobError:
        return
    address = job.spec.syncer.endpoint.learner_address
    if address:
        yield from _endpoint(job, address, credentials)
    if address or len(job.spec.regions) > 1:
        yield from _bandwidth(job, file, step_seconds)


def _endpoint(job: DiLoCoJob, address: str, folder: Path | None) -> Iterator[Finding]:
    host, port = split_address(address)
    try:
        numbers = resolve_name(host, port)
    except OSError as error:
        said = f"syncer.endpoint.address: {unreachable_text(address, error)}"
        yield _finding("name", "error", said, fix="learners resolve it where they run: compare with a machine there")
        return
    yield _finding("name", "ok", f"{host} is {', '.join(numbers)}")
    try:
        connection = connect(address)
    except OSError as error:
        yield _finding("connection", "warning", unreachable_text(address, error), fix=_NOT_YET)
        return
    with connection:
        yield _finding("connection", "ok", f"{address} accepts TCP connections")
        if job.spec.syncer.tls.mode == "off":
            return
        if folder is None:
            yield _handshake(job, address, connection)
            return
    found = _identity(address, folder)
    yield found
    if found.level != "error":
        yield from _ways(job, address, Credentials.from_directory(folder))


def _ways(job: DiLoCoJob, address: str, credentials: Credentials) -> Iterator[Finding]:
    """What one connection to the syncer, and to each of its shards, carries."""
    syncer, shards = job.spec.syncer, job.spec.syncer.shards
    for shard in (None, *(range(shards) if shards > 1 else ())):
        about, there = "way to the syncer" if shard is None else f"way to shard {shard}", address
        if shard is not None and syncer.shard_pods is not None:
            host, port = syncer.shard_address(shard)
            there = join_address(host or split_address(address)[0], port)
        try:
            trip, up, down = asyncio.run(_measure_way(bulk_connection(credentials, there, shard)))
        except (CallFailed, StreamBroken, limits.WireError, TimeoutError) as error:
            fix = "measure again; a syncer of an earlier release measures nothing, and a shard has to be there"
            yield _finding(about, "warning", f"not measured: {error or 'it takes too long'}", fix=fix)
            continue
        said = f"round trip {seconds_text(trip)}; one connection carries {_both(8 * up, 8 * down, 'up', 'down')}"
        yield _finding(about, "ok", f"{said}, and a learner has four for each direction")


async def _measure_way(connection: BulkConnection) -> tuple[float, float, float]:
    """Round trip in seconds, and bytes per second up and down. Raises CallFailed, StreamBroken, WireError,
    TimeoutError."""
    try:
        await _probe(connection)  # connects
        trip = min([await _probe(connection) for _ in range(TRIPS)])
        return trip, await _measure_rate(connection, "up", trip), await _measure_rate(connection, "down", trip)
    finally:
        connection.drop()


async def _measure_rate(connection: BulkConnection, direction: str, trip: float) -> float:
    size = LEAST_RATE_BYTES
    while True:
        seconds = await _probe(connection, **{direction: size})
        if seconds - trip >= LEAST_RATE_SECONDS or size >= limits.PROBE_BYTES:
            return size / max(seconds - trip, 1e-6)
        size = min(4 * size, limits.PROBE_BYTES)


async def _probe(connection: BulkConnection, up: int = 0, down: int = 0) -> float:
    """Move so many bytes; returns the seconds that it took."""
    part = memoryview(bytearray(limits.CHUNK_BYTES))
    began = time.monotonic()
    async with asyncio.timeout(limits.PROBE_SECONDS):
        call = await connection.begin(probe=sync_pb2.Probe(up=up, down=down))
        try:
            for start in range(0, up, len(part)):
                await call.write(part[: up - start])
            await call.read_reply()
            while await call.read_into(part):
                pass
        finally:
            call.end()
    return time.monotonic() - began


def _handshake(job: DiLoCoJob, address: str, connection: socket.socket) -> Finding:
    """TLS without credentials: who answers, whether or not it is to be trusted."""
    from cryptography import x509

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    # A gateway chooses its backend by the name that is asked for (SNI).
    name = split_address(address)[0] if job.spec.syncer.endpoint.type == "External" else SERVER_NAME
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        with context.wrap_socket(connection, server_hostname=name) as secure:
            shown = secure.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        fix = "a gateway must pass TLS through unopened; another program may have this port"
        return _finding("TLS", "error", f"{address} does not answer with TLS: {tls_words(error)}", fix=fix)
    except OSError as error:
        said = f"no TLS handshake with {address}: {error.strerror or error}"
        return _finding("TLS", "error", said, fix="a gateway must pass TLS through unopened")
    try:
        certificate = x509.load_der_x509_certificate(shown)
        named = certificate.subject.rfc4514_string() or "an empty subject"
        until = certificate.not_valid_after_utc
    except ValueError as error:
        return _finding("TLS", "warning", f"{address} shows a certificate that cannot be read: {error}")
    said = f"the certificate of {named} answers, valid until {until:%Y-%m-%d}; not verified"
    return _finding("TLS", "ok", said, fix="with --credentials DIR (a learner's folder) it is verified")


def _identity(address: str, folder: Path) -> Finding:
    """TLS with a learner's credentials, as a learner does it."""
    try:
        credentials = Credentials.from_directory(folder)
        mine = credentials.names()
        asyncio.run(verify_syncer(credentials, address, mine))
    except (ServerNotTrusted, CredentialsError) as error:
        return _finding("TLS", "error", str(error), fix="docs/regions.md, Certificates; diloco certs show DIR")
    if not mine:
        said = f"the certificate in {folder} names no job: whom it would be shown to is not checked"
        return _finding("TLS", "warning", said, fix="diloco certs issue makes certificates that name their job")
    return _finding("TLS", "ok", f"{address} is the job's syncer, and accepts the certificate in {folder}")


def _bandwidth(job: DiLoCoJob, file: Path, step_seconds: float | None) -> Iterator[Finding]:
    """What `diloco plan` computes for each region's link and for the hub."""
    conditions = Conditions(1.0 if step_seconds is None else step_seconds)
    conditions.check()
    more = f"diloco plan {file} --step-seconds S"
    try:
        sizes, note = fragment_sizes(job, None, file.resolve().parent)
    except CommandError as error:
        yield _finding("bandwidth", "warning", f"not known: {error}", fix=f"{more} --params N")
        return
    found = document(job, sizes, note, conditions)
    seconds = seconds_text(conditions.step_seconds)
    for region in found["regions"]:
        count = region["learners"] + region["spares"]
        learners = f"{count} learner{'s' * (count != 1)}"
        said = f"needs {_both(region['up'], region['down'], 'up', 'down')} for {learners} at {seconds} a step"
        yield _finding(f"region {region['name']}", "ok", said)
    hub = found["queued"]["hub"]
    said = f"needs {_both(hub['in'], hub['out'], 'in', 'out')} at {seconds} a step"
    asked = "" if step_seconds is not None else f"give --step-seconds S: steps of S seconds need 1/S of it ({more})"
    yield _finding("hub", "ok", said, fix=asked)


def _both(one: float | None, other: float | None, first: str, second: str) -> str:
    if one is None or other is None:
        return "more than any bandwidth"
    return f"{bits_text(one)} {first} and {bits_text(other)} {second}"
