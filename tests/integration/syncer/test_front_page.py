"""The address of the status page opens in a browser: ``/`` is a page, whole in itself, and it is printed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

from syncer_client import SyncerProcess, raw_job

from diloco_protocol.common.http_server import HttpServer
from diloco_protocol.documents import EventRow, Quorum, SlotLink, SlotRow, StatusDocument, StopGoal, Tokens
from diloco_syncer.server.pages.front_page import HTML, SCRIPT, front_page

OF = {"status": StatusDocument, "slot": SlotRow, "event": EventRow, "stop": StopGoal, "quorum": Quorum,
      "tokens": Tokens, "link": SlotLink}  # fmt: skip
OF_JAVASCRIPT = {"length", "find", "slice", "map", "ok", "json"}  # not of a document


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.policy = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        self.links |= {given[name] for name in ("href", "src", "action") if name in given}
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]


def read_page() -> Page:
    page = Page()
    page.feed(HTML.decode())
    return page


async def test_a_syncer_serves_it(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job()).start()
    try:
        with urllib.request.urlopen(f"http://{syncer.addresses['http']}/", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/html") and answer.read() == HTML
        for link in read_page().links:
            assert syncer.get(f"/{link}"), link
    finally:
        syncer.stop()


def test_it_needs_nothing_from_elsewhere_and_allows_nothing_else() -> None:
    page = read_page()
    assert page.links == {"status", "report", "metrics", "healthz", "readyz"}
    assert not re.search(rb"https?://|//[a-z]", HTML.replace(b"<!doctype", b""))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy and "default-src 'none'" in page.policy
    assert "innerHTML" not in SCRIPT and "insertAdjacent" not in SCRIPT and "document.write" not in SCRIPT


def test_its_script_knows_the_page_and_the_status_document() -> None:
    page = read_page()
    assert set(re.findall(r'(?:byId|fill)\("([a-z-]+)"', SCRIPT)) <= page.ids
    used = {(name, field) for name, field in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", SCRIPT) if name in OF}
    assert len(used) > 20
    for name, field in used:
        assert field in OF[name].model_fields or field in OF_JAVASCRIPT, f"{name}.{field}"


async def test_other_paths_name_the_pages() -> None:
    server = HttpServer({"/": front_page})
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"404" in (said := await reader.read()) and b"pages: /" in said
    writer.close()
    await server.stop()
