"""Writes a report: Markdown, HTML and JSON, each file whole or absent."""

from __future__ import annotations

from pathlib import Path

from diloco.console import CommandError, unwritable_text
from diloco.reports.document import ResultDocument
from diloco.reports.html import render_html
from diloco.reports.markdown import render_markdown
from diloco_protocol.common.files import PUBLIC, write_whole

NAMES = ("report.json", "report.md", "report.html")


def write_report(document: ResultDocument, directory: Path) -> list[Path]:
    """Write report.json, report.md and report.html into ``directory``, which is made; their paths.
    Raises CommandError."""
    texts = (document.model_dump_json(indent=1) + "\n", render_markdown(document), render_html(document))
    return [write_text(directory / name, text) for name, text in zip(NAMES, texts, strict=True)]


def write_text(path: Path, text: str) -> Path:
    """Write a file whole; the directory is made. Raises CommandError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode(), mode=PUBLIC)
    except OSError as error:
        raise CommandError(unwritable_text(path, error)) from error
    return path
