"""A measurement's report as files: JSON, Markdown and HTML."""

from __future__ import annotations

from pathlib import Path

from diloco.local.report import write_text
from lab.figures import ResultDocument, render_page
from lab.markdown import render_markdown

NAMES = ("report.json", "report.md", "report.html")


def write_report(document: ResultDocument, directory: Path) -> list[Path]:
    """Write report.json, report.md and report.html into ``directory``, which is made; their paths.
    Raises CommandError."""
    texts = (document.model_dump_json(indent=1) + "\n", render_markdown(document), render_page(document))
    return [write_text(directory / name, text) for name, text in zip(NAMES, texts, strict=True)]
