#!/usr/bin/env python3
"""The definition of DiLoCoJob as files: ``--write FILE ...`` writes it, ``--check FILE ...`` exits 1 if one differs.
Without arguments it is printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from diloco_operator.crd.schema import text


def main(arguments: list[str] | None = None) -> int:
    """Write, check or print the definition; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/crd.py")
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE", help="write it to these files")
    parser.add_argument("--check", type=Path, nargs="+", default=[], metavar="FILE", help="exit 1 if one differs")
    chosen = parser.parse_args(arguments)
    wanted = text()
    if not chosen.write and not chosen.check:
        sys.stdout.write(wanted)
    for path in chosen.write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted, encoding="utf-8")
    stale = [path for path in chosen.check if not path.is_file() or path.read_text(encoding="utf-8") != wanted]
    for path in stale:
        print(f"{path} is not what the models say: run make manifests", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
