"""The merged model of a job that runs elsewhere, from its syncer's export listener.

Whoever made the listener reachable, by a port-forward to the syncer's pod, gives its URL. What comes is checked before
anybody uses it: its length, the xxh3-64 of all its bytes, and that each tensor lies where the file says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco_protocol.arrays.layout import MAX_JSON_BYTES, Layout, LayoutError
from diloco_protocol.common.reach import unreachable_text
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, job_from_json
from diloco_syncer.output.model_file import MAX_HEADER, NotSafetensors, read_header
from diloco_syncer.server.pages.export import CHECKSUM

T = TypeVar("T")

CONNECT_SECONDS = 10.0
FIRST_BYTE_SECONDS = 300.0  # the syncer reads its whole model once for the checksum, before it answers
STALL_SECONDS = 60.0
MAX_JOB_BYTES = 16 << 20
TRIES = 4
_CHUNK = 4 << 20


class RemoteModelError(Exception):
    """The model was not had; the message says why and, where there is one, the cure."""


class _Again(RemoteModelError):
    """Trying again may help."""


def fetch_layout(url: str) -> Layout:
    """The layout of the model that the listener serves. Breaks are tried again. Raises RemoteModelError."""
    try:
        return _fetch(url, "/layout.json", lambda answer: Layout.from_json(answer.read(MAX_JSON_BYTES)))
    except LayoutError as error:
        raise RemoteModelError(f"{url}/layout.json is no layout: {error}") from error


def fetch_model(
    url: str, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[DiLoCoJob, dict[str, NDArray[np.float32]], list[int]]:
    """The job, every parameter of its merged model by name (float32, in its shape), and the fragments' versions.
    ``url``: of the listener, such as http://127.0.0.1:7703. ``progress`` is told bytes received and bytes in all.

    Breaks are tried again. Raises RemoteModelError.
    """
    try:
        job = _fetch(url, "/job.json", lambda answer: job_from_json(answer.read(MAX_JOB_BYTES).decode()))
    except (JobError, UnicodeDecodeError) as error:
        raise RemoteModelError(f"{url}/job.json is no job: {error}") from error
    where = f"{url}/model.safetensors"
    tensors, metadata = _fetch(url, "/model.safetensors", lambda answer: _model(answer, where, progress))
    if metadata.get("job") != job.metadata.name:
        raise RemoteModelError(f"{url} serves the model of {metadata.get('job')!r} for {job.metadata.name!r}")
    try:
        versions = [int(version) for version in json.loads(metadata["versions"])]
    except (KeyError, ValueError, TypeError) as error:
        raise RemoteModelError(f"{where} does not name its versions") from error
    return job, tensors, versions


def _fetch(url: str, path: str, read: Callable[[http.client.HTTPResponse], T]) -> T:
    """What ``read`` makes of what the listener serves at ``path``; what breaks off is tried again."""
    for attempt in range(TRIES):
        try:
            with contextlib.closing(_get(url, path)) as answer:
                return read(answer)
        except (_Again, OSError, http.client.HTTPException) as error:
            broken = error if isinstance(error, _Again) else _Again(f"{url}{path} broke off: {error}")
        if attempt < TRIES - 1:
            time.sleep(0.5 * 2**attempt * random.uniform(0.5, 1.0))
    raise broken


def _get(url: str, path: str) -> http.client.HTTPResponse:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise RemoteModelError(f"{url}: expected http://HOST:PORT")
    port = parts.port or 80
    address = f"[{parts.hostname}]:{port}" if ":" in parts.hostname else f"{parts.hostname}:{port}"
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        sock = connection.sock  # the connection lets go of it when the answer begins
        assert sock is not None
        sock.settimeout(FIRST_BYTE_SECONDS)
        connection.request("GET", parts.path.rstrip("/") + path)
        answer = connection.getresponse()
        if answer.status != 200:
            said = answer.read(300).decode("utf-8", "replace").strip()
            kind = _Again if answer.status == 503 else RemoteModelError
            raise kind(f"{url}{path}: {said or answer.reason}")
    except OSError as error:
        connection.close()
        raise _Again(f"cannot read {url}{path}: {unreachable_text(address, error)}") from error
    except http.client.HTTPException as error:
        connection.close()
        raise _Again(f"cannot read {url}{path}: what answers there does not speak HTTP ({error!r})") from error
    except RemoteModelError:
        connection.close()
        raise
    sock.settimeout(STALL_SECONDS)
    return answer


def _model(
    answer: http.client.HTTPResponse, where: str, progress: Callable[[int, int], None]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    """Tensors and metadata of a safetensors file that is being received."""
    total = int(answer.headers.get("Content-Length") or -1)
    wanted = (answer.headers.get(CHECKSUM) or "").removeprefix("xxh3-64=")
    if total < 8 or not wanted:
        raise RemoteModelError(f"{where}: what answers there is no syncer of this project")
    digest, received = xxhash.xxh3_64(), 0

    def read_into(target: memoryview) -> None:
        nonlocal received
        at = 0
        while at < target.nbytes:
            count = answer.readinto(target[at : at + _CHUNK])
            if not count:
                raise _Again(f"{where} broke off after {received} of {total} bytes")
            digest.update(target[at : at + count])
            at, received = at + count, received + count
            progress(received, total)

    try:
        head = bytearray(8)
        read_into(memoryview(head))
        length = int.from_bytes(head, "little")
        if length > min(MAX_HEADER, total - 8):
            raise RemoteModelError(f"{where} is no safetensors file")
        header = bytearray(length)
        read_into(memoryview(header))
        entries, metadata = read_header(bytes(header))
        size = entries[-1].stop if entries else 0
        if 8 + length + size != total or any(entry.dtype != "F32" for entry in entries):
            raise RemoteModelError(f"{where}: its header tells of {8 + length + size} bytes, {total} are sent")
        tensors: dict[str, Any] = {}
        for entry in entries:
            values = np.empty(entry.elements, np.float32)
            if values.size:
                read_into(values.data.cast("B"))
            tensors[entry.name] = values.reshape(entry.shape)
    except NotSafetensors as error:
        raise RemoteModelError(f"{where}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Again(f"{where} broke off after {received} of {total} bytes: {error}") from error
    if f"{digest.intdigest():016x}" != wanted:
        raise _Again(f"{where}: the checksum of what came differs from what was sent")
    return tensors, metadata
