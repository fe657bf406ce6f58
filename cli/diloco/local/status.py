"""``diloco status``: what a running or finished job looks like, from outside."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

from diloco.console import CommandError
from diloco.processes.workdir import MAX_REPORT_BYTES, WorkdirError, find, read_address
from diloco.syncer_client import SyncerError, fetch_document
from diloco_protocol.common.files import read_bounded
from diloco_protocol.documents import DocumentError, RunReport, StatusDocument, read_document

_ADDRESS = re.compile(r"(?:http://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+):([0-9]{1,5})(?:/status)?/?")


def read_status(where: str | None) -> StatusDocument | RunReport:
    """The status document of the job whose run directory or syncer's address this is.

    None: the newest run below ./runs. An address is that of the status page (HTTP) or of
    the syncer's own port. Of a run that is not going on it is the last report. Raises CommandError.
    """
    address = None if where is None or os.path.exists(where) else _ADDRESS.fullmatch(where)
    if address is not None:
        if int(address[2]) > 65535:
            raise CommandError(f"{where}: there is no port {address[2]}; a port is at most 65535")
        return _from_address(f"{address[1]}:{address[2]}")
    try:
        workdir = find(where)
    except WorkdirError as error:
        hint = "" if where is None else "; an address would be host:port"
        raise CommandError(f"{error}{hint}") from error
    unread = ""
    try:
        document = asyncio.run(fetch_document(str(read_address(workdir.address)["http"]), "/status", StatusDocument))
        name = json.loads(workdir.job.read_text(encoding="utf-8"))["metadata"]["name"]
        if document.job == name:  # else the port is another's by now
            return document
    except (OSError, WorkdirError, SyncerError, ValueError, KeyError) as error:
        # It is not running, or the port is another's: what it left is shown.
        unread = f" ({error})" if isinstance(error.__cause__, DocumentError) else ""
    try:
        return read_document(RunReport, read_bounded(workdir.report, MAX_REPORT_BYTES))
    except FileNotFoundError as error:
        raise CommandError(
            f"the run in {workdir.path} is not going on and has left no report{unread}; `diloco run` goes on with it"
        ) from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{workdir.report} cannot be read: {error}") from error


def _from_address(address: str) -> StatusDocument:
    """From the status page, or if that port does not speak HTTP, by gRPC."""
    try:
        return asyncio.run(fetch_document(address, "/status", StatusDocument))
    except SyncerError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise CommandError(f"nothing listens on {address}: is the job running?") from error
        http_error = error
    import grpc

    from diloco_protocol.security.credentials import Credentials
    from diloco_protocol.wire import channels, limits, sync_pb2

    with Credentials.from_directory(None).blocking_channel(address, channels.channel_options()) as channel:
        try:
            write, read = sync_pb2.StatusRequest.SerializeToString, sync_pb2.StatusReply.FromString
            reply = channel.unary_unary(limits.STATUS_PATH, write, read)(sync_pb2.StatusRequest(), timeout=5.0)
            return read_document(StatusDocument, reply.json)
        except grpc.RpcError as error:
            raise CommandError(
                f"no syncer answers on {address} ({http_error}; by gRPC: {error.code().name})"  # type: ignore[attr-defined]
            ) from error
        except DocumentError as error:
            raise CommandError(f"the status of {address}: {error}") from error


def as_json(document: StatusDocument | RunReport) -> dict[str, Any]:
    content = document.model_dump(mode="json")
    if isinstance(document, StatusDocument):
        return {"running": True, **content}
    return {"running": False, "report": content}


def show(document: StatusDocument | RunReport) -> None:
    from diloco.local.screen import RunView, picture, summary
    from diloco.text_console import TextConsole

    console = TextConsole(soft_wrap=True)
    if isinstance(document, RunReport):
        console.print("not running; its last report:")
        console.print(summary(document))
        return
    names = {(slot.region, slot.ordinal): f"{slot.region}-{slot.ordinal}" for slot in document.slots}
    console.print(picture(RunView(document.job, None, document, names, serving=True), []))
    if document.message:
        console.print(document.message, highlight=False)
