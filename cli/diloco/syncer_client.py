"""Talking to a job's syncer from outside: its status page, and signed control calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.processes.workdir import WorkdirError, read_address
from diloco_protocol.common.reach import connect_first, is_loopback, split_address, unreachable_text
from diloco_protocol.documents import D, DocumentError, Report, StatusDocument, read_document
from diloco_protocol.vocabulary import ControlMethod
from diloco_protocol.wire.limits import CONNECT_SECONDS

if TYPE_CHECKING:
    from diloco_protocol.wire.control_client import ControlClient

MAX_PAGE_BYTES = 16 << 20
PAGE_SECONDS = 2.0  # on this machine
FAR_PAGE_SECONDS = 10.0  # of another machine's: a connection and an answer, with round trips of up to 2 s
CALL_SECONDS = 5.0


class SyncerError(Exception):
    """The syncer did not answer, or refused; the message says which."""


async def fetch_document(address: str, path: str, model: type[D], seconds: float | None = None) -> D:
    """GET http://``address````path``: a document of at most MAX_PAGE_BYTES. Raises SyncerError, which names the field
    where the document is not what its model says."""
    if seconds is None:
        seconds = PAGE_SECONDS if is_loopback(address.rpartition(":")[0]) else FAR_PAGE_SECONDS
    try:
        return read_document(model, await asyncio.wait_for(_fetch(address, path), seconds))
    except TimeoutError as error:
        raise SyncerError(f"no answer from http://{address}{path} within {seconds:g} s") from error
    except OSError as error:
        raise SyncerError(unreachable_text(address, error)) from error
    except (EOFError, asyncio.LimitOverrunError) as error:
        raise SyncerError(f"http://{address}{path}: what answers there broke off, or does not speak HTTP") from error
    except ValueError as error:
        raise SyncerError(f"http://{address}{path}: {error}") from error


async def _fetch(address: str, path: str) -> bytes:
    _, port = split_address(address)
    made = await connect_first(address, CONNECT_SECONDS)
    reader, writer = await asyncio.open_connection(sock=made, limit=1 << 20)
    try:
        # By its number: a server does not know which names lead to it, and answers to its own ones alone.
        found = str(writer.get_extra_info("peername")[0])
        named = f"[{found}]" if ":" in found else found
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {named}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = head[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/"):
            raise ValueError("what answers there does not speak HTTP")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
        length = int(headers.get("content-length", "0"))
        if length > MAX_PAGE_BYTES:
            raise ValueError(f"the answer has {length} bytes; at most {MAX_PAGE_BYTES} are read")
        body = await reader.readexactly(length)
        if words[1] != "200":
            raise ValueError(f"status {words[1]}: {body[:200].decode('utf-8', 'replace')}")
        return body
    finally:
        writer.close()


class SyncerClient:
    """The syncer whose addresses stand in ``address_file`` (read anew: a restart may move it)."""

    def __init__(self, address_file: Path, control_key: Path) -> None:
        self._address_file = address_file
        self._control_key = control_key
        self._client: ControlClient | None = None

    def address(self) -> dict[str, str | int] | None:
        """The address file's fields; None while there is none."""
        try:
            return read_address(self._address_file)
        except (FileNotFoundError, WorkdirError):
            return None

    async def status(self, seconds: float | None = None) -> StatusDocument:
        """The status document, which the syncer keeps for up to half a second. Raises SyncerError."""
        return await fetch_document(self._where("http"), "/status", StatusDocument, seconds)

    async def status_now(self) -> StatusDocument:
        """The status document as of this call: dearer than ``status``. Raises SyncerError."""
        return await self._ask(ControlMethod.STATUS, StatusDocument)

    async def report(self) -> Report:
        """The report. Raises SyncerError."""
        return await self._ask(ControlMethod.REPORT, Report)

    async def _ask(self, method: ControlMethod, model: type[D]) -> D:
        try:
            return read_document(model, await self.call(method, {}))
        except DocumentError as error:
            raise SyncerError(f"the {method}: {error}") from error

    async def call(self, method: str, body: dict[str, Any], seconds: float = CALL_SECONDS) -> dict[str, Any]:
        """A signed control call; returns the reply's body. Raises SyncerError."""
        from diloco_protocol.security.credentials import CredentialsError
        from diloco_protocol.wire.control_auth import read_key
        from diloco_protocol.wire.control_client import ControlClient, ControlError

        address = self._where("control")
        try:
            if self._client is None or address != self._client.address:
                await self.close()
                self._client = ControlClient(address, read_key(self._control_key))
            return await self._client.call(method, body, seconds)
        except CredentialsError as error:
            raise SyncerError(f"control call {method}: {error}") from error
        except ControlError as error:
            raise SyncerError(str(error)) from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _where(self, service: str) -> str:
        address = self.address()
        if address is None:
            raise SyncerError("the syncer has not written its address yet")
        return str(address[service])
