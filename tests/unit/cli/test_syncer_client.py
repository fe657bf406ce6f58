"""Reading the syncer's pages: whole, bounded, and by their models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import RootModel

from diloco import syncer_client
from diloco.syncer_client import SyncerError, fetch_document
from diloco_protocol.common.http_server import HttpServer, json_page
from diloco_protocol.documents import DocumentError, StatusDocument
from status_documents import status_document

STATUS = status_document(phase="training", versions=[1, 2]).model_dump(mode="json")


class Page:
    """A server whose status page is ``content``."""

    def __init__(self) -> None:
        self.content: Any = STATUS
        self.address = ""


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    made = Page()
    server = HttpServer({"/status": json_page(lambda: RootModel(made.content))})
    made.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    yield made
    await server.stop()


async def test_a_field_that_is_not_known_is_left_out(page: Page) -> None:
    page.content = STATUS | {"of_another_release": 1}
    assert await fetch_document(page.address, "/status", StatusDocument) == status_document(**STATUS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({name: value for name, value in STATUS.items() if name != "versions"}, "versions: Field required"),
        (STATUS | {"merges": "many"}, "merges: Input should be a valid integer"),
        (STATUS | {"slots": [{"slot": 0}]}, "slots.0.retired: Field required"),
        ([], "Input should be an object"),
    ],
)
async def test_the_field_that_is_wrong_is_named(page: Page, content: Any, said: str) -> None:
    page.content = content
    with pytest.raises(SyncerError, match=said) as caught:
        await fetch_document(page.address, "/status", StatusDocument)
    assert page.address in str(caught.value) and isinstance(caught.value.__cause__, DocumentError)


async def test_what_is_too_large_is_not_read(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syncer_client, "MAX_PAGE_BYTES", 100)
    with pytest.raises(SyncerError, match="at most 100 are read"):
        await fetch_document(page.address, "/status", StatusDocument)
