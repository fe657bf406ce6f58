"""The address of the status page opens in a browser: ``/`` is a page, whole in itself, and it is printed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from syncer_client import SyncerProcess, raw_job

from diloco_protocol.common.http_server import HttpServer, ThreadedPages, json_page
from diloco_protocol.documents import EventRow, Quorum, ShardRow, SlotLink, SlotRow, StatusDocument, StopGoal, Tokens
from diloco_syncer.server.pages.front_page import HTML, front_page
from status_documents import round_row, shard_row, slot_link, slot_row, status_document

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

OF = {"status": StatusDocument, "slot": SlotRow, "event": EventRow, "stop": StopGoal, "quorum": Quorum,
      "tokens": Tokens, "link": SlotLink, "shard": ShardRow}  # fmt: skip
OF_JAVASCRIPT = {"length", "find", "slice", "map", "ok", "json"}  # not of a document


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.policy = ""
        self.text: dict[str, str] = {}  # by the id of the innermost element that has one
        self.styles: dict[str, str] = {}  # class, by id
        self.lines = ""  # the curve's points
        self.scripts: list[str] = []
        self._inside = [("", "")]  # the open elements: tag, and its own id or that of what it is in

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        self.links |= {given[name] for name in ("href", "src", "action") if name in given}
        self.lines += given.get("points", "")
        self.scripts += [""] * (tag == "script")
        if tag != "meta":
            self._inside.append((tag, given.get("id", self._inside[-1][1])))
            self.styles.setdefault(self._inside[-1][1], given.get("class", ""))
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("tr", "text"):
            self.handle_data("\n")
        self._inside.pop()

    def handle_data(self, data: str) -> None:
        tag, identity = self._inside[-1]
        if tag == "script":
            self.scripts[-1] += data
        else:
            self.text[identity] = self.text.get(identity, "") + data


def read_page(text: str = HTML.decode()) -> Page:
    page = Page()
    page.feed(text)
    return page


@pytest.fixture
def script() -> str:
    """The only script of the page, as a browser finds it there."""
    (found,) = read_page().scripts
    return found


async def test_a_syncer_serves_it(tmp_path: Path) -> None:
    syncer = SyncerProcess(tmp_path / "syncer", raw_job()).start()
    try:
        with urllib.request.urlopen(f"http://{syncer.addresses['http']}/", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/html") and answer.read() == HTML
        for link in read_page().links:
            assert syncer.get(f"/{link}"), link
    finally:
        syncer.stop()


def test_it_needs_nothing_from_elsewhere_and_allows_nothing_else(script: str) -> None:
    page = read_page()
    assert page.links == {"status", "report", "metrics", "healthz", "readyz"}
    assert not re.search(rb"https?://|//[a-z]", HTML.replace(b"<!doctype", b""))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy and "default-src 'none'" in page.policy
    assert "innerHTML" not in script and "insertAdjacent" not in script and "document.write" not in script


def test_its_script_knows_the_page_and_the_status_document(script: str) -> None:
    page = read_page()
    assert set(re.findall(r'(?:byId|fill)\("([a-z-]+)"', script)) <= page.ids
    used = {(name, field) for name, field in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", script) if name in OF}
    assert len(used) > 20
    for name, field in used:
        assert field in OF[name].model_fields or field in OF_JAVASCRIPT, f"{name}.{field}"


def _a_long_job() -> StatusDocument:
    """Of learners whose updates keep arriving late, one of which was killed."""
    now = time.time()

    def row(n: int, kind: str, slot: int, message: str) -> EventRow:
        return EventRow(n=n, time=now - 1000 + n, kind=kind, slot=slot, incarnation=1, message=message)  # type: ignore[arg-type]

    events = [
        row(1, "joined", 1, "local-1 joined slot 1 at step 0"),
        row(2, "dropped", 1, "3413 tokens dropped (died)"),
    ]
    late = "the updates of local-{} came after the merge in {} rounds running"
    events += [row(3 + n, "starved", n % 2, late.format(n % 2, 3 + n % 4)) for n in range(200)]
    link = slot_link(up_bytes_per_second=109_500.0, down_bytes_per_second=372_500.0, round_trip_seconds=0.0123)
    return status_document(
        job="long",
        phase="training",
        message="enough learners are active",
        stop={"kind": "tokens", "limit": 2_000_000},
        progress=0.499,
        seconds_left=61.0,
        tokens={"trained": 1_000_000, "merged": 996_587, "pending": 0, "dropped": 3413},
        slots=[
            slot_row(0, region="local", state="active", link=link),
            slot_row(1, region="local", ordinal=1, link=slot_link(missing_fragments=22)),
        ],
        eval_loss=[(0, 5.545), *((20_000 * n, 3.2 - 0.1 * n**0.5) for n in range(1, 51))],
        bytes_up=1_200_000_000,
        events=events,
    )


@pytest.fixture
def opened(tmp_path: Path) -> Page:
    """What a browser shows of the job above."""
    return open_page(tmp_path, _a_long_job)


def open_page(tmp_path: Path, status: Callable[[], StatusDocument]) -> Page:
    """What a browser shows of a job, some seconds after it has opened the page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser is installed (Debian: chromium)")
    served = ThreadedPages({"/": front_page, "/status": json_page(status)}, "127.0.0.1:0")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000", "--dump-dom"]
    try:
        shown = subprocess.run(
            [
                browser,
                *words,
                "--virtual-time-budget=7000",
                f"--user-data-dir={tmp_path}",
                f"http://127.0.0.1:{served.port}/",
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    finally:
        served.stop()
    return read_page(shown.stdout)


@pytest.mark.promise("The status page shows the job in a browser, and renews itself", section="Syncer")
def test_a_browser_shows_the_job(opened: Page) -> None:
    text = opened.text
    assert text["job"].strip() == "long"
    assert text["progress"].strip() == "1,000,000 of 2,000,000 tokens (49 %), about 1 min 1 s left"
    assert text["message"].strip() == "enough learners are active" and opened.styles["message"] == ""
    assert "1.20 GB up (0 bit/s now)" in text["figures"]  # it has looked more than once
    assert "22 fragments to come" in text["learners"]
    assert "876 kbit/s up, 2.98 Mbit/s down, 12 ms" in text["learners"]
    assert not text.get("silence", "").strip()


def test_what_repeats_hides_no_other_event(opened: Page) -> None:
    rows = opened.text["events"].strip().splitlines()
    assert len(rows) == 4 and "100 times since" in rows[0]
    assert "joined" in rows[3] and "3413 tokens dropped (died)" in rows[2]


def test_a_lost_shard_is_shown_with_why_and_the_rounds_that_wait_for_it(tmp_path: Path, opened: Page) -> None:
    rows = [shard_row(0), shard_row(1, serving=False, failures=3, message="signal 9 ended its process")]
    waits = round_row(fragment=3, unserved=True)
    text = open_page(tmp_path, lambda: _a_long_job().model_copy(update={"shards": rows, "rounds": [waits]})).text
    assert "0there0, 2" in text["shards"] and "1away1, 3 waits" in text["shards"]
    assert "3 failures: signal 9 ended its process" in text["shards"]
    assert "shards" not in opened.text or not opened.text["shards"].strip(), "a syncer without shards shows none"


def test_the_curve_has_numbers_and_its_first_point_flattens_nothing(opened: Page) -> None:
    labels = opened.text["plot"].split()
    assert {"3.0", "2.6", "0", "200", "k", "1", "M"} <= set(labels)
    heights = [float(point.partition(",")[2]) for point in opened.lines.split()]
    assert heights[0] < 0 and max(heights[5:]) - min(heights[5:]) > 100  # pixels, of 192
    assert "5.545 at 0 tokens" in opened.text["loss-text"]


def test_a_curve_of_few_scores_is_drawn_whole(tmp_path: Path) -> None:
    page = open_page(tmp_path, lambda: _a_long_job().model_copy(update={"eval_loss": [(0, 5.566), (955_648, 1.999)]}))
    heights = [float(point.partition(",")[2]) for point in page.lines.split()]
    assert 0 < heights[0] < heights[1] and "leaves out" not in page.text["loss-text"]


async def test_other_paths_name_the_pages() -> None:
    server = HttpServer({"/": front_page})
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"404" in (said := await reader.read()) and b"pages: /" in said
    writer.close()
    await server.stop()
