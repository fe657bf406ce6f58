"""Make the HTML page of a measurement's figures again, of what it printed with --json.

python bench/page.py FIGURES.json PAGE.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

import common
from diloco.console import CommandError
from diloco.local.report import write_text
from lab.figures import ResultDocument, render_page


def main() -> int:
    """0; 1: a file cannot be read or written; 2: the file has no such figures."""
    parser = argparse.ArgumentParser(description="Make the HTML page of a measurement's figures again.")
    parser.add_argument("figures", metavar="FIGURES.json", type=Path, help="what a measurement printed with --json")
    parser.add_argument("page", metavar="PAGE.html", type=Path)
    given = parser.parse_args()
    try:
        document = ResultDocument.model_validate_json(given.figures.read_bytes())
        print(f"{write_text(given.page, render_page(document))}: {document.title}")
    except ValidationError as error:
        parser.error(f"{given.figures} has not what a measurement prints with --json: {error}")
    except (OSError, CommandError) as error:
        print(f"{given.figures}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    common.run_to_exit(main)
