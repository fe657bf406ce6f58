"""``diloco audit``: what holds of a run, by its tape, records and books."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from diloco.console import COMPLETE, FAILED, CommandError, print_text, wrapped
from diloco.processes.workdir import Workdir, find
from diloco_syncer.audit.store_audit import Audit, Check, audit_store
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.documents import read_document
from diloco_syncer.store.open import open_store
from diloco_syncer.store.records import Damaged, FormatRefused

SHOWN = 5  # faults of a check
_WORDS = {True: "ok", False: "WRONG", None: "-"}


def audit(what: str, as_json: bool) -> int:
    """Audit the run or store that ``what`` names, print what holds, and return the exit code. Raises CommandError."""
    store, job = _open(what)
    try:
        found = audit_store(store, job, _tell_progress)
    except (OSError, FormatRefused) as error:
        raise CommandError(f"{what} cannot be read: {error}", FAILED) from error
    document = {"holds": found.holds, **asdict(found)}
    print_text(json.dumps(document, indent=1) if as_json else _text(what, found))
    return COMPLETE if found.holds else FAILED


def _tell_progress(doing: str) -> None:
    """Say on a terminal what is being read: the records of a large job take minutes."""
    if sys.stderr.isatty():
        print_text(f"reading {doing}", file=sys.stderr)


def _open(what: str) -> tuple[Store, str]:
    """The store, and its job's name."""
    if "://" not in what and not (Path(what) / "epochs").is_dir():
        workdir: Workdir = find(what)
        if (name := workdir.job_name()) is None or not workdir.store.is_dir():
            raise CommandError(f"{workdir.path} holds no store: its run has not begun")
        return DirectoryStore(workdir.store), name
    if what.startswith("file://") and not os.path.isdir(what.removeprefix("file://")):
        raise CommandError(f"{what}: there is no such directory")  # to open it would make it
    try:
        store = open_store(what)
        names = store.list("state")
    except OSError as error:
        raise CommandError(f"{what}: {error.strerror or error}") from error
    for name in reversed(names):
        try:
            return store, str(read_document(store, name)["job"])
        except FormatRefused as error:
            raise CommandError(f"{what}: {error}") from error
        except (Damaged, ObjectNotFound, KeyError):  # a running syncer removes states
            continue
    raise CommandError(f"{what} is no store of a job, or it has no state yet: name a run's directory or its store")


def _text(what: str, found: Audit) -> str:
    first, last = found.epochs or (0, 0)
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    lines = [f"{what}: the job {found.job}, {found.merges} merges in {epochs}"]
    for check in found.checks:
        lines += _check_lines(check)
    for said, counts in (("events on the tape", found.events), ("uploads refused", found.refused)):
        if counts:
            counted = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            lines += wrapped(f"{said}: {counted}", "  ", "    ")
    lines.append("everything holds" if found.holds else "NOT everything holds")
    return "\n".join(lines)


def _check_lines(check: Check) -> list[str]:
    lines = wrapped(check.said, f"  {_WORDS[check.holds]:<6}{check.name:<10}", " " * 18)
    for words in check.wrong[:SHOWN]:
        lines += wrapped(words, " " * 8, " " * 10)
    if len(check.wrong) > SHOWN:
        lines.append(f"{' ' * 8}and {len(check.wrong) - SHOWN} more (--json lists them)")
    return lines
