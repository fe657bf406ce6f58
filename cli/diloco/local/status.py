"""``diloco status``: what a running or finished job looks like, from outside."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

from diloco.console import CommandError
from diloco.processes.workdir import WorkdirError, find, read_address
from diloco.syncer_client import SyncerError, fetch_json

_ADDRESS = re.compile(r"(?:http://)?(\[[0-9a-fA-F:]+\]|[^:/\s]+):([0-9]{1,5})(?:/status)?/?")


class StatusError(CommandError):
    """There is nothing to show; the message says why and the cure."""


def read_status(where: str | None) -> dict[str, Any]:
    """The status document of the job whose run directory or syncer's address this is.

    None: the newest run below ./runs. An address is that of the status page (HTTP) or of
    the syncer's own port. Of a run that is not going on, the last report is shown with
    ``"running": false``. Raises StatusError.
    """
    address = None if where is None or os.path.exists(where) else _ADDRESS.fullmatch(where)
    if address is not None:
        if int(address[2]) > 65535:
            raise StatusError(f"{where}: there is no port {address[2]}; a port is at most 65535")
        return {"running": True, **_from_address(f"{address[1]}:{address[2]}")}
    try:
        workdir = find(where)
    except WorkdirError as error:
        hint = "" if where is None else "; an address would be host:port"
        raise StatusError(f"{error}{hint}") from error
    try:
        document = asyncio.run(fetch_json(str(read_address(workdir.address)["http"]), "/status"))
        name = json.loads(workdir.job.read_text(encoding="utf-8"))["metadata"]["name"]
        if document.get("job") == name:  # else the port is another's by now
            return {"running": True, **document}
    except (FileNotFoundError, WorkdirError, SyncerError, ValueError, KeyError):
        pass  # it is not running: what it left is shown
    try:
        report = json.loads(workdir.report.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StatusError(
            f"the run in {workdir.path} is not going on and has left no report; `diloco run` goes on with it"
        ) from error
    except (OSError, ValueError) as error:
        raise StatusError(f"{workdir.report} cannot be read: {error}") from error
    return {"running": False, "report": report}


def _from_address(address: str) -> dict[str, Any]:
    """From the status page, or if that port does not speak HTTP, by gRPC."""
    try:
        return asyncio.run(fetch_json(address, "/status"))
    except SyncerError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise StatusError(f"nothing listens on {address}: is the job running?") from error
        http_error = error
    import grpc

    from diloco_protocol.security.credentials import Credentials
    from diloco_protocol.wire import channels, limits, sync_pb2

    with Credentials.from_directory(None).blocking_channel(address, channels.channel_options()) as channel:
        try:
            write, read = sync_pb2.StatusRequest.SerializeToString, sync_pb2.StatusReply.FromString
            reply = channel.unary_unary(limits.STATUS_PATH, write, read)(sync_pb2.StatusRequest(), timeout=5.0)
            document = json.loads(reply.json)
        except grpc.RpcError as error:
            raise StatusError(
                f"no syncer answers on {address} ({http_error}; by gRPC: {error.code().name})"  # type: ignore[attr-defined]
            ) from error
    if not isinstance(document, dict):
        raise StatusError(f"what answers on {address} is no syncer of this project")
    return document


def show(document: dict[str, Any]) -> None:
    """Print it for people."""
    from rich.console import Console

    from diloco.local.screen import RunView, picture, summary

    console = Console(soft_wrap=True)
    if not document["running"]:
        console.print("not running; its last report:")
        console.print(summary(document["report"]))
        return
    names = {
        (str(s.get("region")), int(s.get("ordinal") or 0)): f"{s.get('region')}-{s.get('ordinal')}"
        for s in document.get("slots") or []
    }
    view = RunView(str(document.get("job")), None, document, names, serving=True)
    console.print(picture(view, []))
    if message := document.get("message"):
        console.print(str(message), highlight=False)
