"""The tables of docs/operator.md, written from where settings, permissions and metrics are defined.

``python -m diloco_operator.reference --write docs/operator.md`` puts them between the marks in
that page, ``--check`` exits 1 if they are not current. Everything outside of the marks is
written by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from diloco_operator.kube.kinds import needs
from diloco_operator.metrics import Metrics
from diloco_operator.settings import fields, flag, shown_default, variable
from diloco_protocol.common.files import write_whole

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operator.md"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def settings_table() -> str:
    """Every flag and variable."""
    rows = ["| flag, variable | takes | default | |", "|---|---|---|---|"]
    for setting in fields():
        rows.append(
            f"| `{flag(setting.name)}`<br>`{variable(setting.name)}` | {setting.metadata['takes']} "
            f"| `{_cell(shown_default(setting))}` | {_cell(setting.metadata['text'])} |"
        )
    return "\n".join(rows)


def permissions_table() -> str:
    """Every rule that the operator's account needs."""
    rows = ["| API group | resource | verbs | for |", "|---|---|---|---|"]
    for need in needs(nodes=True):
        also = "; not in namespaced mode" if need.optional else ""
        rows.append(
            f"| {f'`{need.group}`' if need.group else 'core'} | `{need.resource}` | {', '.join(need.verbs)} "
            f"| {_cell(need.why)}{also} |"
        )
    return "\n".join(rows)


def metrics_table() -> str:
    """Every metric."""
    rows = ["| metric | type | labels | |", "|---|---|---|---|"]
    for name, kind, labels, text in Metrics().table():
        rows.append(f"| `{name}` | {kind} | {', '.join(f'`{one}`' for one in labels)} | {_cell(text)} |")
    return "\n".join(rows)


TABLES = {"settings": settings_table, "permissions": permissions_table, "metrics": metrics_table}


def filled(text: str) -> str:
    """The page with its tables as they are now. Raises ValueError if a mark is missing."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin (diloco_operator.reference) -->", f"<!-- {name}: end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page lacks the mark {begin if not found else end}")
        text = f"{head}{begin}\n\n{table()}\n\n{end}{tail}"
    return text


def problems(page: Path = PAGE) -> list[str]:
    """What is not current."""
    text = page.read_text(encoding="utf-8")
    try:
        return [] if filled(text) == text else [f"{page} is not current"]
    except ValueError as error:
        return [f"{page}: {error}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco_operator.reference", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", type=Path, metavar="FILE", help="write the tables into this page")
    chosen.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if they are not current there")
    given = parser.parse_args(arguments)
    if given.write is not None:
        text = given.write.read_text(encoding="utf-8")
        write_whole(given.write, filled(text).encode("utf-8"))
        return 0
    found = problems(given.check)
    for problem in found:
        print(f"{problem}: python -m diloco_operator.reference --write {given.check}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
