"""The export listener: the merged model and its job, for callers on this machine's loopback.

``GET /model.safetensors`` (model_file.py), ``GET /layout.json`` and ``GET /job.json`` (normal form). It knows no
credentials: it listens on a loopback address only, which in a cluster is reached by port-forward. So
whoever may forward ports to this pod may download the model.

The answer names its exact length and, in ``Diloco-Checksum``, the xxh3-64 of its bytes;
one model is sent at a time, for each holds on to the parameters of its moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.http_server import AddressError, Answer, Page, Stream, split_address
from diloco_protocol.common.reach import is_loopback
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import job_to_json
from diloco_syncer.output.model_file import ModelFile
from diloco_syncer.runtime.global_model import GlobalModel

CHECKSUM = "Diloco-Checksum"


def check_loopback(address: str, name: str) -> None:
    """Raise AddressError unless ``address`` (host:port) is on this machine's loopback."""
    host, _ = split_address(address, name)
    if not is_loopback(host):
        raise AddressError(
            f"{name} {address}: the model is served without credentials, so only to a loopback address, "
            "such as 127.0.0.1:7703"
        )


def export_pages(
    job: DiLoCoJob, model: GlobalModel, make_file: Callable[[Layout], Awaitable[ModelFile]]
) -> Mapping[str, Page]:
    """The pages by their paths. ``make_file`` makes the file of the model as it is now."""
    busy = False

    async def model_page() -> Answer:
        nonlocal busy
        if busy:
            return 503, "text/plain", b"the model is being sent to another caller: try again\n"
        if model.layout is None:
            return 404, "text/plain", b"there is no model yet: the job has not reached version 0\n"
        busy = True
        try:
            file = await make_file(model.layout)
            checksum = await asyncio.to_thread(file.checksum)
        except BaseException:
            busy = False
            raise
        headers = {CHECKSUM: f"xxh3-64={checksum:016x}"}
        return 200, "application/octet-stream", Stream(file.length, send(file), headers)

    async def send(file: ModelFile) -> AsyncGenerator[bytes, None]:
        nonlocal busy
        try:
            for chunk in file.chunks():
                yield bytes(chunk)
                await asyncio.sleep(0)  # a fast reader must not keep the loop to itself
        finally:
            busy = False

    def job_page() -> Answer:
        return 200, "application/json", job_to_json(job).encode()

    def layout_page() -> Answer:
        if model.layout is None:
            return 404, "text/plain", b"there is no model yet: the job has not reached version 0\n"
        return 200, "application/json", model.layout.to_json().encode()

    return {"/model.safetensors": model_page, "/layout.json": layout_page, "/job.json": job_page}
