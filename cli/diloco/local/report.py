"""``diloco report --html``: the page of a run on this machine, or of a report.json alone."""

from __future__ import annotations

from pathlib import Path

from diloco.console import CommandError, print_text, unwritable_text
from diloco.local.status import read_status
from diloco.processes.workdir import MAX_REPORT_BYTES, Workdir, find
from diloco.reports.document import ResultDocument
from diloco.reports.html import render_html
from diloco.reports.run_report import RunCurves, read_curves, run_report
from diloco_protocol.common.files import PUBLIC, read_bounded, write_whole
from diloco_protocol.documents import Report, read_document


def write_page(what: str | None, file: Path | None) -> None:
    """Write the page. ``what``: a run's directory or a file; None: the newest run below ./runs. ``file``: the page's
    name. Raises CommandError."""
    document, default = _result(what)
    path = file or default.with_suffix(".html")
    if what is not None and path == Path(what):
        raise CommandError(f"{path} is what the report is made of: name another file")
    print_text(f"{write_text(path, render_html(document))}: {document.title}")


def write_text(path: Path, text: str) -> Path:
    """Write a file whole; the directory is made. Raises CommandError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode(), mode=PUBLIC)
    except OSError as error:
        raise CommandError(unwritable_text(path, error)) from error
    return path


def _result(what: str | None) -> tuple[ResultDocument, Path]:
    """The document, and the name of its page less the suffix's."""
    if what is not None and Path(what).is_file():
        return _from_file(Path(what)), Path(what)
    workdir = find(what)
    try:
        curves = read_curves(workdir.metrics_file)
    except OSError as error:
        raise CommandError(f"{workdir.metrics_file} cannot be read: {error.strerror or error}") from error
    return run_report(workdir.job_name() or workdir.path.name, read_status(what), curves), workdir.report


def _from_file(path: Path) -> ResultDocument:
    """Of a report.json alone."""
    try:
        report = read_document(Report, read_bounded(path, MAX_REPORT_BYTES))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(f"{path} is no run's report.json: {error}") from error
    of_run = Workdir(path.absolute().parent)
    name = of_run.job_name() if path.name == of_run.report.name else None
    return run_report(name or path.stem, report, RunCurves())
