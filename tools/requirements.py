"""Print what pyproject.toml requires, one requirement a line, for `pip install -r`.

    python tools/requirements.py                    the dependencies that every extra has
    python tools/requirements.py --extra syncer     those of one extra alone
    python tools/requirements.py --extra worker --without torch
    python tools/requirements.py --extra worker --only torch

The Dockerfile installs dependencies from these lists before it copies any code, so that
neither a change in the code nor one elsewhere in pyproject.toml installs them anew.
Needs nothing but Python 3.11.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(project: dict[str, object], extras: Sequence[str]) -> list[str]:
    """The lines of `extras`, or of the project itself where none is named.

    Raises SystemExit for an extra that pyproject.toml does not have.
    """
    if not extras:
        return list(project["dependencies"])  # type: ignore[call-overload]
    known: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    unknown = [extra for extra in extras if extra not in known]
    if unknown:
        raise SystemExit(f"requirements: pyproject.toml has no extra {unknown[0]!r}; it has {', '.join(known)}")
    return [line for extra in extras for line in known[extra]]


def name_of(requirement: str) -> str:
    """The distribution's name, in lower case."""
    return re.split(r"[\s\[<>=!~;@]", requirement.strip(), maxsplit=1)[0].lower()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--without", action="append", default=[], help="a distribution to leave out")
    parser.add_argument("--only", action="append", default=[], help="no distribution but these")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in requirements(project, arguments.extra):
        name = name_of(line)
        if name not in arguments.without and (not arguments.only or name in arguments.only):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
