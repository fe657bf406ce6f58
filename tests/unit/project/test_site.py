"""docs/ as a site: every page is in the navigation and in the index, and nothing comes from another host.

`make site` builds it, and mkdocs then checks every link and anchor; here is what can be told without mkdocs.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import yaml

from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import site_hooks

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "decisions")


class SiteLoader(yaml.SafeLoader):
    """Of mkdocs.yml, whose tags name functions."""


SiteLoader.add_multi_constructor("!!python/", lambda loader, suffix, node: suffix)
SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def configuration() -> dict[str, Any]:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=SiteLoader)
    assert isinstance(settings, dict)
    return settings


def pages_of(entry: Any) -> list[str]:
    """The pages that a part of the navigation names."""
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, dict):
        entry = list(entry.values())
    return [page for part in entry for page in pages_of(part)]


def test_every_page_is_once_in_the_navigation() -> None:
    assert sorted(pages_of(configuration()["nav"])) == sorted([*PAGES, "decisions/README.md"])


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| \S.* \|$", index, re.M)
    assert sorted(linked) == sorted([*PAGES, "decisions/README.md"][1:])


def test_the_index_comes_first_of_pages() -> None:
    assert PAGES[0] == "README.md"


def test_links_and_anchors_are_checked_and_fonts_are_the_readers() -> None:
    settings = configuration()
    assert settings["theme"]["font"] is False
    assert settings["plugins"] == ["search"]
    assert settings["validation"]["links"] == dict.fromkeys(
        ("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn"
    )
    assert "--strict" in (ROOT / "Makefile").read_text(encoding="utf-8").split("\nsite: ")[1].split("\n\n")[0]


@pytest.mark.parametrize(
    ("page", "text", "moved"),
    [
        ("docs/job.md", "[x](operator.md#a)", "[x](operator.md#a)"),
        ("docs/job.md", "[x](../README.md#a)", "[x](repository/README.md#a)"),
        ("docs/job.md", "[`x`](../examples/custom_loop.py)", "[`x`](files/examples/custom_loop.py)"),
        ("docs/job.md", "[x](../examples)", "[x](files/examples/index.md)"),
        ("docs/decisions/README.md", "[x](../../CONTRIBUTING.md)", "[x](../repository/CONTRIBUTING.md)"),
        ("README.md", "![x](docs/architecture.svg)", "![x](../architecture.svg)"),
        ("README.md", "[x](LICENSE) [y](CHANGELOG.md)", "[x](../files/LICENSE) [y](CHANGELOG.md)"),
        ("docs/job.md", "[x](https://example.org/a.md) [y](#here)", "[x](https://example.org/a.md) [y](#here)"),
        ("docs/job.md", "[x](../nothing.md)", "[x](../nothing.md)"),
        ("docs/job.md", "```\n[x](../README.md)\n```\n", "```\n[x](../README.md)\n```\n"),
    ],
)
def test_a_link_of_the_repository_as_the_site_has_it(page: str, text: str, moved: str) -> None:
    assert site_hooks.with_links_of_the_site(page, text) == moved


def test_lists_within_lists_are_as_deep_as_the_site_wants_them() -> None:
    text = "1. one\n   - two\n   more\n\n```\n  code\n```\n"
    assert site_hooks.with_deep_lists(text) == "1. one\n    - two\n    more\n\n```\n  code\n```\n"


@pytest.mark.parametrize(
    ("page", "fetches"),
    [
        ('<script src="https://example.org/x.js"></script>', True),
        ('<link rel="stylesheet" href="https://example.org/x.css">', True),
        ("@import url(//example.org/x.css)", True),
        ('<img alt="a" src="http://example.org/x.svg">', True),
        ('<pre class="mermaid"><code>', True),
        ('<a href="https://example.org/">there</a>', False),
        ('<link rel="canonical" href="https://example.org/x.html">', False),
        ('<script src="assets/x.js"></script><img src="../x.svg">', False),
    ],
)
def test_what_a_browser_would_fetch_from_another_host(page: str, fetches: bool) -> None:
    assert bool(site_hooks.FETCHED.search(page)) == fetches
