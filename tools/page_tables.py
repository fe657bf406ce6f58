"""Tables of a page of docs that are written from the code: between marks that bear their names.

Run by ``contracts.py`` and ``operator_tables.py``: ``--write PAGE`` puts the tables between the page's marks,
``--check PAGE`` exits 1 if they are not current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from diloco_protocol.common.files import write_whole


def fill_page(text: str, tables: Mapping[str, str]) -> str:
    """The page with these tables between its marks. Raises ValueError if it lacks a table's marks."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
        head, found, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"the page lacks the marks of {name}")
        text = f"{head}{begin}\n\n{table}\n\n{end}{tail}"
    return text


def write_or_check(program: str, text: str, arguments: list[str] | None = None) -> int:
    """Print, write or check a page that is written whole; returns the exit code."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if that file is not the page")
    chosen = parser.parse_args(arguments)
    if chosen.write is not None:
        write_whole(chosen.write, text.encode("utf-8"))
    elif chosen.check is not None:
        if not chosen.check.is_file() or chosen.check.read_text(encoding="utf-8") != text:
            print(f"{chosen.check} is not current: run make docs")
            return 1
    else:
        sys.stdout.write(text)
    return 0


def main(program: str, tables: Mapping[str, str], arguments: list[str] | None = None) -> int:
    """Write or check the tables of a page; returns the exit code."""
    parser = argparse.ArgumentParser(prog=program)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, metavar="FILE", help="put the tables between the page's marks")
    group.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if they are not current")
    chosen = parser.parse_args(arguments)
    page: Path = chosen.write or chosen.check
    before = page.read_text(encoding="utf-8")
    after = fill_page(before, tables)
    if chosen.write:
        write_whole(page, after.encode("utf-8"))
    elif after != before:
        print(f"{page} is not current: run make docs")
        return 1
    return 0
